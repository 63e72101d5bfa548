"""What every benchmark shares: timing one call many times, and the line that says what was measured on what."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import cudnn


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, and what 99 of 100 calls stay under."""

    median: float
    p99: float


def measure(call: Callable[[], object], times: int, warm_up: int = 10) -> Timing:
    """Time `call` by itself, `times` times."""
    for _ in range(warm_up):
        call()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return Timing(statistics.median(taken), sorted(taken)[int(0.99 * (len(taken) - 1))])


def measure_in_turns(calls: Mapping[str, Callable[[], object]], rounds: int, times: int) -> dict[str, Timing]:
    """Time several calls against each other: round by round, so that what else the machine does hits all of them."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(times):
                started = time.perf_counter()
                call()
                taken[name].append(time.perf_counter() - started)
    return {
        name: Timing(statistics.median(each), sorted(each)[int(0.99 * (len(each) - 1))]) for name, each in taken.items()
    }


def machine() -> str:
    """Processor, cores, versions and date, in one line."""
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(": ")[2]
            break
    cores = len([line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("processor")])
    return (
        f"{cores} cores of {cpu}, Python {platform.python_version()}, cuDNN {cudnn.backend_version_string()}, "
        f"frontend {cudnn.__version__}, {date.today().isoformat()}"
    )
