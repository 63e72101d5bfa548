"""FlashInfer's cuDNN paths, three times: without plancache, with it on an empty cache, and on the warm one.

    python -m tests.parity.flashinfer [--seconds 120] [--json FILE]

Needs a GPU, torch and the package flashinfer-python (its Python files are enough). Each run is a process of its own,
which is killed after so many seconds. Where the same plan ran, the outputs must be equal bit by bit; where another one
did, or where a path does not repeat its own bits, they must be close to what torch gives in 32 bits. A path that is
refused with the same error in all three runs counts as equal, and is named. Exit code 0 says that all are equal and
that some path ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
RUNS = ("without plancache", "empty cache", "warm cache")


def run(cache: Path | None, home: Path, seconds: float) -> dict[str, Any]:
    """One process: what it said of each path, and how it ended."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "FLASHINFER_WORKSPACE_BASE": str(home),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "tests.parity.flashinfer_paths", *([str(cache)] if cache else [])]
    told: dict[str, Any] = {"paths": {}, "versions": {}, "stats": {}}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        output, told["ended"] = done.stdout, f"exit code {done.returncode}"
        if done.returncode:
            told["ended"] += f": {(done.stderr.strip().splitlines() or [''])[-1][:200]}"
    except subprocess.TimeoutExpired as late:  # it was killed with SIGKILL
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        told["ended"] = f"killed after {seconds:.0f} s"
    for line in output.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "path":
            path = json.loads(rest)
            told["paths"][path.pop("name")] = path
        elif kind in ("versions", "stats"):
            told[kind] = json.loads(rest)
    return told


def verdict(three: list[dict[str, Any] | None]) -> str:
    """`equal`, `equal: refused`, `close`, or what is wrong."""
    if None in three:
        return "WRONG: missing in a run"
    results = [one for one in three if one is not None]
    refused = [one.get("refused") for one in results]
    if any(refused):
        return "equal: refused" if len(set(refused)) == 1 else f"WRONG: {' | '.join(map(str, refused))}"
    for one in results:
        for name, difference in one["differences"].items():
            if not difference <= one["tolerance"]:
                return f"WRONG: {name} differs by {difference:.3g} from what torch gives"
    if all(one["hashes"] == results[0]["hashes"] for one in results):
        return "equal"
    if any(set(one["hashes"]) != set(results[0]["hashes"]) for one in results):
        return "WRONG: other outputs"
    if all(one["repeats"] and one["plans"] == results[0]["plans"] for one in results):
        return "WRONG: other bits of the same plan"
    unchecked = {name for one in results for name in set(one["hashes"]) - set(one["differences"])}
    return f"WRONG: no reference for {sorted(unchecked)}" if unchecked else "close"


def milliseconds(result: dict[str, Any] | None) -> str:
    seconds = (result or {}).get("seconds")
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def report(names: list[str], runs: list[dict[str, Any]], verdicts: dict[str, str]) -> None:
    """A table: the time of each path's first call in ms, how far it is from the reference, what the cache said."""
    print(f"{'first call, ms':<32}{'without':>8}{'empty':>8}{'warm':>8}{'off by':>10}  outputs")
    for name in names:
        three = [one["paths"].get(name) for one in runs]
        differences = [d for one in three if one for d in one.get("differences", {}).values()]
        off = f"{max(differences):.2g}" if differences else "-"
        print(f"{name:<32}{''.join(f'{milliseconds(one):>8}' for one in three)}{off:>10}  {verdicts[name]}")
        served = [", ".join(f"{number} {told}" for told, number in one["served"].items()) for one in three[1:] if one]
        if any(served) and verdicts[name] != "equal: refused":
            print(f"    {' | '.join(served)}")
        if verdicts[name] == "equal: refused":
            print(f"    {three[0]['refused']}")
    print(f"\n{'all paths that ran':<32}", end="")
    ran = [name for name in names if verdicts[name] in ("equal", "close")]
    print("".join(f"{sum(one['paths'][name]['seconds'] for name in ran) * 1e3:>8.0f}" for one in runs))
    for label, one in zip(RUNS, runs, strict=True):
        print(f"{label}: {one['ended']}; {one['stats'] or ''}")
    print(", ".join(f"{name} {value}" for name, value in runs[0]["versions"].items()))


def main() -> int:
    """Run, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="for one process, which is killed then")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plancache-parity-") as home:
        cache = Path(home, "cache")
        run(None, Path(home), options.seconds)  # thrown away: what follows finds all files in memory, the first run too
        runs = [run(place, Path(home), options.seconds) for place in (None, cache, cache)]
    names = list(dict.fromkeys(name for one in runs for name in one["paths"]))
    verdicts = {name: verdict([one["paths"].get(name) for one in runs]) for name in names}
    report(names, runs, verdicts)
    if options.json:
        options.json.write_text(json.dumps({"runs": dict(zip(RUNS, runs, strict=True)), "outputs": verdicts}, indent=1))
    ended = all(one["ended"] == "exit code 0" for one in runs)
    return (
        0 if ended and "equal" in verdicts.values() and not any(v.startswith("WRONG") for v in verdicts.values()) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
