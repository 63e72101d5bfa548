"""All benchmarks one after another, then the page: `make bench`. With `--quick` it is the gate: `make bench-check`.

The gate fails if a ratio is worse than the bound that stands beside its benchmark. One that is over is run once more,
since what else a machine does seldom hits the same ratio twice; the second run counts.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks import page, peers


def one(name: str, *options: str) -> bool:
    """Run a benchmark in a process of its own; whether it went through."""
    started = time.monotonic()
    print(f"== {name}", flush=True)
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], check=False)
    print(f"== {name}: {time.monotonic() - started:.0f} s\n", flush=True)
    return done.returncode == 0


def main() -> None:
    """Run everything, or what is named."""
    options = [one for one in sys.argv[1:] if one.startswith("-")]
    names = [one for one in sys.argv[1:] if not one.startswith("-")] or list(page.NAMES)
    quick = "--quick" in options
    if "store" in names:
        peers.installed(quick)  # what lacks is told now, and not after minutes
    failed = [name for name in names if not one(name, *options) and not (quick and one(name, *options))]
    if not quick:
        page.main()
    if failed:
        sys.exit(f"{'worse than a bound, twice' if quick else 'failed'}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
