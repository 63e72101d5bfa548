"""`jit` and `graph_cache` of the frontend, served from disk: the same signatures, results and errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cudnn

from plancache import transparent
from plancache.builders import default_cache


def jit(heur_modes: Any = cudnn.heur_mode.A, **kwargs: Any) -> Callable[..., Any]:
    """`cudnn.jit`, served from the cache: the process's, or the one that `enable()` was given.

    Args:
        heur_modes: one `cudnn.heur_mode` or a list of them.
        kwargs: whatever the frontend takes.

    Returns a decorator for functions that give `(graph, tensors)`; the decorated one gives `(graph, uids)`.
    """
    decorate = cudnn.jit(heur_modes, **kwargs)
    return lambda function: _served(decorate(function))


def graph_cache(key_fn: Callable[..., Any], maxsize: int = 256) -> Callable[..., Any]:
    """`cudnn.graph_cache`, with what the decorated function builds served from the cache.

    Args:
        key_fn: gives the key of a call, from its arguments.
        maxsize: how many results are kept; the oldest goes first.
    """
    decorate = cudnn.graph_cache(key_fn, maxsize)
    return lambda function: decorate(_served(function))


def _served(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with transparent.serving(transparent.active() or default_cache()):
            return function(*args, **kwargs)

    return wrapper
