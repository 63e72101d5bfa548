"""NVIDIA's own tests of the frontend, three times: without plancache, with it on an empty cache, and on the warm one.

    python -m tests.parity.run --checkout CHECKOUT [--seconds 180] [--json FILE]

CHECKOUT is one of https://github.com/NVIDIA/cudnn-frontend (nothing of it is kept here). Almost all of its tests need a
GPU, torch and the package looseversion. The three lists of passed, failed and skipped tests must be equal; exit code 0
says that they are. Tests that a time limit cut off in one run are left out of all three, and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = ("fwd", "bwd", "fwd_ragged", "bwd_ragged", "fwd_bias")
# File, and what narrows it down: chosen to fit ten minutes on an H200 in all.
TESTS = [
    ("test_matmul_bias_relu.py", []),
    ("test_conv_bias.py", []),
    ("test_conv_fprop.py", []),
    ("test_conv_genstats.py", []),
    ("test_conv_reduction.py", []),
    ("test_wgrads.py", []),
    ("test_layernorm.py", []),
    ("test_rmsnorm.py", []),
    ("test_instancenorm.py", []),
    ("test_batchnorm.py", []),
    ("test_silu_and_mul.py", []),
    ("test_slice.py", []),
    ("test_apply_rope.py", []),
    ("test_kernel_cache.py", []),
    ("test_deviceless_aot_compilation.py", []),
    ("test_low_precision_matmul.py", []),
    ("test_sdpa_with_caching.py", []),
    ("test_flexible_sdpa.py", []),
    (
        "test_mhas_v2.py",
        [f"test_mhas_v2.py::test_sdpa_random_{kind}_L0[test{n}]" for kind in KINDS for n in (1, 2, 3, 4)],
    ),
]


def run(
    checkout: Path, file: str, options: list[str], cache: Path | None, seconds: float
) -> tuple[dict[str, str], str]:
    """Run one file of tests; gives each test's outcome, and what plancache said."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment.pop("PLANCACHE_PARITY", None)
    if cache is not None:
        environment["PLANCACHE_PARITY"] = str(cache)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.parity.plugin", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *(options or [file])]
        try:
            done = subprocess.run(
                command,
                cwd=checkout / "test" / "python",
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {f"{file}": "cut off"}, ""
        said = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("plancache ")), "")
        if not report.exists():
            return {f"{file}": f"crashed with exit code {done.returncode}"}, done.stdout[-500:] + done.stderr[-500:]
        return outcomes(report), said


def outcomes(report: Path) -> dict[str, str]:
    """passed, skipped, or failed and with which error, by test."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        state = "passed"
        for kind in ("failure", "error", "skipped"):
            part = case.find(kind)
            if part is not None:
                message = (part.get("message") or "").split("\n")[0]
                state = kind if kind == "skipped" else f"{kind} {message[:80]}"
        found[name] = state
    return found


def main() -> int:
    """Run, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="for one file and run")
    parser.add_argument("--budget", type=float, default=560.0, help="for all of it; what does not fit is named")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="part of a file's name")
    options = parser.parse_args()
    started, different, left_out = time.monotonic(), [], []
    totals: list[Counter[str]] = [Counter(), Counter(), Counter()]
    told: list[Counter[str]] = [Counter(), Counter()]
    with tempfile.TemporaryDirectory(prefix="plancache-parity-") as home:
        for file, arguments in TESTS:
            if (options.only or "") not in file:
                continue
            if time.monotonic() - started > options.budget - 30:
                left_out.append(file)
                continue
            cache = Path(home, file)
            results = []
            took = []
            for place in (None, cache, cache):
                before = time.monotonic()
                result, said = run(options.checkout, file, arguments, place, options.seconds)
                took.append(time.monotonic() - before)
                results.append(result)
                if place is not None and said.startswith("plancache "):
                    told[len(results) - 2].update(json.loads(said.removeprefix("plancache ")))
                elif said and not said.startswith("plancache "):
                    print(said)
            common = set.intersection(*(set(result) for result in results))
            for total, result in zip(totals, results, strict=True):
                total.update(state.split()[0] for name, state in result.items() if name in common)
            unequal = [
                (name, *(result.get(name, "-") for result in results))
                for name in sorted(set().union(*results))
                if len({result.get(name, "-") for result in results}) > 1
            ]
            different += unequal
            print(
                f"{file:<40}{len(common):>5} tests, {len(unequal)} unequal, {' '.join(f'{one:.0f}' for one in took)} s"
            )
            for name, *states in unequal:
                print(f"    {name}: {' | '.join(states)}")
    for label, total in zip(("without plancache", "empty cache", "warm cache"), totals, strict=True):
        print(f"{label:<20}{dict(total)}")
    print(f"on the empty cache: {dict(told[0])}\non the warm cache:  {dict(told[1])}")
    if left_out:
        print(f"left out for want of time: {', '.join(left_out)}")
    if options.json:
        fields = {"totals": totals, "served": told, "different": different, "left_out": left_out}
        options.json.write_text(json.dumps(fields, indent=1))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
