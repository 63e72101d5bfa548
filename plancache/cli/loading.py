"""Cached builders from modules and files that the command line names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import click

from plancache.builders import CachedBuilder


def builders(names: Iterable[str]) -> list[CachedBuilder]:
    """The cached builders of modules (`package.module`) and files, each once.

    Raises:
        click.ClickException: one cannot be imported, or has no cached builder.
    """
    before = list(sys.path)
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules of the working directory, as for `python -m`
    found: dict[int, CachedBuilder] = {}
    for name in names:
        module = _imported(name)
        here = [value for value in vars(module).values() if isinstance(value, CachedBuilder)]
        # A package's __init__.py comes along with *.py, and need not have any.
        if not here and Path(name).name != "__init__.py":
            raise click.ClickException(f"{name} has no builders. Decorate them with @plancache.cached(cases=[...]).")
        found |= {id(builder): builder for builder in here}
    # Worker processes find modules where this one does. A file `queue.py` beside the builders would break them.
    sys.path[:] = [*before, *(place for place in sys.path if place not in before)]
    return list(found.values())


def _imported(name: str) -> ModuleType:
    path = Path(name)
    try:
        if path.suffix != ".py" and not path.is_file():
            return importlib.import_module(name)
        if not path.is_file():
            raise click.ClickException(f"there is no file {name}")
        return _from_file(path.resolve())
    except click.ClickException:
        raise
    except (Exception, SystemExit) as error:  # whatever user code raises while it is imported
        raise click.ClickException(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    """A file as Python itself would know it: inside its package, or by its name beside its directory."""
    parts, root = [path.stem], path.parent
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    dotted = ".".join(parts[:-1] if path.stem == "__init__" else parts)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    known = sys.modules.get(dotted)
    if known is None and (spec := importlib.util.find_spec(dotted)) is not None and spec.origin == str(path):
        return importlib.import_module(dotted)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    # Its name is another module's.
    alone = importlib.util.spec_from_file_location(f"plancache_file_{path.stem}", path)
    assert alone is not None
    assert alone.loader is not None
    module = importlib.util.module_from_spec(alone)
    alone.loader.exec_module(module)
    return module
