"""Which rows a command means: the filters that listings, bundles and pruning share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import click

from plancache.cache import PlanCache
from plancache.cli.values import age_value, seconds
from plancache.store.interface import Listed
from plancache.totals import Names

ROUTES = ("native", "tuned", "replay", "deviceless")
_PAUSE = 600.0


def ago(text: str) -> float:
    """Seconds since 1970 of `30m`, `12h`, `7d` or `2w` ago."""
    length = seconds(text)
    if length is None:
        raise click.BadParameter(f"{text!r} is no age: write 30m, 12h, 7d or 2w")
    return time.time() - length


@dataclass(frozen=True)
class Selection:
    """What the shared options say; None means any."""

    key: str | None
    device: str | None
    environment: str | None
    builder: str | None
    engine: int | None
    route: str | None
    since: str | None
    older_than: str | None
    last_run: bool | None
    op: str | None = None

    def of(self, rows: Iterable[Listed], names: Names | None = None) -> list[Listed]:
        """The rows that are meant; `names` are what their devices and environments are called."""
        names = names or Names()
        since = None if self.since is None else ago(self.since)
        before = None if self.older_than is None else ago(self.older_than)
        rows = last_used(rows) if self.last_run else rows
        return [
            listed
            for listed in rows
            if listed.row.key.startswith(self.key or "")
            and self._is_device(listed.row.device, names)
            and self._is_environment(listed.row.environment, names)
            and _plain(self.op or "") in _plain(listed.row.operation)
            and (self.builder is None or self.builder in listed.row.builder)
            and self.engine in (None, listed.row.engine)
            and self.route in (None, listed.row.route)
            and (since is None or listed.used >= since)
            and (before is None or listed.used < before)
        ]

    def of_cache(self, cache: PlanCache) -> list[Listed]:
        """The rows of a cache that are meant."""
        every = list(cache.rows())
        return self.of(every, cache.names(every))

    def _is_device(self, fingerprint: str, names: Names) -> bool:
        if self.device is None or fingerprint.startswith(self.device):
            return True
        return self.device.lower() in names.device(fingerprint).lower()

    def _is_environment(self, environment: str, names: Names) -> bool:
        if self.environment is None or environment.startswith(self.environment):
            return True
        wanted = self.environment.split(".")
        return names.cudnn(environment).split(".")[: len(wanted)] == wanted

    @property
    def is_everything(self) -> bool:
        """Whether no option was given."""
        return not any(getattr(self, name) for name in self.__dataclass_fields__)


def _plain(operation: str) -> str:
    """As people type it: without ×, and whatever the case."""
    return operation.lower().replace("×", "x")


def last_used(rows: Iterable[Listed]) -> list[Listed]:
    """The rows that the last run used: back from the latest use, until ten minutes went by without one."""
    latest_first = sorted(rows, key=lambda listed: -listed.used)
    for number, (later, earlier) in enumerate(pairwise(latest_first), start=1):
        if later.used - earlier.used > _PAUSE:
            return latest_first[:number]
    return latest_first


def selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the shared options, as one `selection` argument."""

    def call(**given: Any) -> Any:
        names = Selection.__dataclass_fields__
        chosen = {name: given.pop(name, None) for name in names}
        return command(selection=Selection(**chosen), **given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    options = (
        click.option("--device", help="Part of the device's name, or the beginning of its fingerprint."),
        click.option("--env", "environment", help="cuDNN version, as 9.27, or the beginning of the hash."),
        click.option("--op", help="Part of the operation, as 'conv' or 'matmul 1x64'."),
        click.option("--builder", help="Part of the name of the function that declared the graph."),
        click.option("--engine", type=int, help="Engine id of the plan."),
        click.option("--route", type=click.Choice(ROUTES), help="How the plan was built."),
        click.option("--since", callback=age_value, metavar="AGE", help="Used since: 30m, 12h, 7d, 2w ago."),
        click.option("--older-than", callback=age_value, metavar="AGE", help="Not used since."),
        click.option("--last-run", is_flag=True, help="What was used last, back to a pause of ten minutes."),
    )
    for option in reversed(options):
        call = option(call)
    call.__click_params__.extend(getattr(command, "__click_params__", []))  # type: ignore[attr-defined]
    return call
