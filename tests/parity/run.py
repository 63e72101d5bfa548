"""NVIDIA's own tests of the frontend, three times: without plancache, with it on an empty cache, and on the warm one.

    python -m tests.parity.run --checkout CHECKOUT [--seconds 180] [--jobs 8] [--json FILE]

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
from concurrent.futures import ThreadPoolExecutor, as_completed
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
    ("test_sdpa_thd.py", []),
    ("test_sdpa_chunked_prefill.py", []),
    ("test_matmul_fuzzer.py", ["test_matmul_fuzzer.py::test_matmul_fuzz", "--parity-first=24"]),
    ("test_conv_fuzzer.py", ["test_conv_fuzzer.py", "--parity-first=24"]),
    ("test_block_scale_quantize.py", []),
    ("test_sdpa_mxfp8.py", []),
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


class File:
    """One file of tests, run three times: on no, an empty and a warm cache."""

    def __init__(self, file: str, arguments: list[str], options: argparse.Namespace, home: str) -> None:
        self.file, self.results, self.told, self.took, self.said = file, [], [], [], ""
        for place in (None, Path(home, file), Path(home, file)):
            before = time.monotonic()
            result, said = run(options.checkout, file, arguments, place, options.seconds)
            self.took.append(time.monotonic() - before)
            self.results.append(result)
            if place is not None:
                told = said.removeprefix("plancache ") if said.startswith("plancache ") else "{}"
                self.told.append(Counter(json.loads(told)))
            if said and not said.startswith("plancache "):
                self.said += said
        self.common = set.intersection(*map(set, self.results))
        self.unequal = [
            (name, *(result.get(name, "-") for result in self.results))
            for name in sorted(set().union(*self.results))
            if len({result.get(name, "-") for result in self.results}) > 1
        ]

    def __str__(self) -> str:
        seconds = " ".join(f"{one:.0f}" for one in self.took)
        lines = [f"{self.file:<40}{len(self.common):>5} tests, {len(self.unequal)} unequal, {seconds} s"]
        lines += [f"    {name}: {' | '.join(states)}" for name, *states in self.unequal]
        lines += [f"    {label}: {dict(told)}" for label, told in zip(("empty", "warm"), self.told, strict=True)]
        return "\n".join(lines + ([self.said] if self.said else []))


def main() -> int:
    """Run, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="for one file and run")
    parser.add_argument("--jobs", type=int, default=1, help="files at once")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="part of a file's name")
    options = parser.parse_args()
    chosen = [(file, arguments) for file, arguments in TESTS if (options.only or "") in file]
    files = []
    with tempfile.TemporaryDirectory(prefix="plancache-parity-") as home, ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(File, file, arguments, options, home) for file, arguments in chosen]):
            files.append(done.result())
            print(files[-1], flush=True)
    totals = [
        Counter(state.split()[0] for file in files for name, state in file.results[turn].items() if name in file.common)
        for turn in range(3)
    ]
    told = [sum((file.told[turn] for file in files), Counter()) for turn in range(2)]
    for label, total in zip(("without plancache", "empty cache", "warm cache"), totals, strict=True):
        print(f"{label:<20}{dict(total)}")
    print(f"on the empty cache: {dict(told[0])}\non the warm cache:  {dict(told[1])}")
    different = [one for file in files for one in file.unequal]
    if options.json:
        options.json.write_text(json.dumps({"totals": totals, "served": told, "different": different}, indent=1))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
