"""Options that several commands have, and callbacks that read values: a wrong one is told before anything is opened."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from plancache.errors import SettingsError
from plancache.settings import size

_Command = TypeVar("_Command", bound=Callable[..., Any])
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def size_value(context: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Bytes."""
    try:
        return None if value is None else size(value, param.opts[0])
    except SettingsError as error:
        raise click.BadParameter(str(error), context, param) from None


def age_value(context: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """An age, as it was given."""
    if value is not None and seconds(value) is None:
        raise click.BadParameter(f"{value!r} is no age: write 30m, 12h, 7d or 2w", context, param)
    return value


def seconds_value(context: click.Context, param: click.Parameter, value: float) -> float:
    """A length of time that goes by: with next to none, every plan would hang."""
    if not 1 <= value < float("inf"):
        raise click.BadParameter(f"{value} is no number of seconds, 1 or more", context, param)
    return value


def seconds(age: str) -> float | None:
    """The seconds of an age, as 30m, 12h, 7d or 2w; None if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", age)
    return float(found[1]) * _UNITS[found[2]] if found else None


def timeout_option(what: str) -> Callable[[_Command], _Command]:
    """`--timeout`, of a plan or candidate that is run in a child process."""
    return click.option(
        "--timeout",
        type=float,
        callback=seconds_value,
        default=60.0,
        show_default=True,
        help=f"Seconds after which a {what} hangs.",
    )


memory_option = click.option(
    "--memory",
    callback=size_value,
    metavar="SIZE",
    help="Memory on the device for one graph. [default: most of what is free]",
)
