"""Filled in one virtual environment, used and rewarmed in another: `python -m tests.two_environments [OLD NEW]`.

OLD and NEW are versions of cuDNN-JIT for CUDA 12. Needs a package index, no GPU and no driver, and some minutes, which
is why it is no part of the suite. What is checked, with an exit code of 1 where it does not hold:

- `warm examples/*.py --device h200` in OLD builds everything, and `export` writes it into a bundle;
- with the bundle as the only layer under an empty cache and `require-hit`, every builder of every example is served;
- in NEW the bundle serves nothing, `rewarm` builds each of its plans and kernels again from their documents alone, and
  their bundle then serves every builder.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.conftest import ROOT

VERSIONS = ("9.26.1.1", "9.27.0.42")

# What a job does: it calls the builders. Nothing is built with `require-hit`; what is not there is an error.
JOB = """
import collections, plancache
from plancache.cli.demo import DYNAMIC, EXAMPLES, _cases
sources = collections.Counter()
with plancache.target("h200"):
    for example in (*EXAMPLES, DYNAMIC):
        for builder, case in _cases(example):
            graph, _ = builder(None, *case)
            sources[str(plancache.last_outcome(graph).source)] += 1
print(dict(sources), "of", sum(sources.values()))
"""


class Environment:
    """A virtual environment with one version of cuDNN."""

    def __init__(self, home: Path, version: str) -> None:
        self._python = home / "bin" / "python"
        print(f"cuDNN-JIT {version}: installing", flush=True)
        venv.create(home, with_pip=True)
        install = ["-m", "pip", "install", "--quiet", f"{ROOT}[jit-cu12]", f"nvidia-cudnn-jit-cu12=={version}"]
        self.run(*install)

    def run(self, *arguments: object, expected: int = 0, **environment: str) -> str:
        """Run the interpreter, away from the checkout; its standard output."""
        command = [str(self._python), *map(str, arguments)]
        given = {name: value for name, value in os.environ.items() if not name.startswith(("PLANCACHE", "PYTHONPATH"))}
        done = subprocess.run(
            command, env={**given, **environment}, cwd=self._python.parent, capture_output=True, text=True, check=False
        )
        if done.returncode != expected:
            sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    def plancache(self, directory: Path, *arguments: object) -> str:
        return self.run("-m", "plancache", "--dir", directory, *arguments)

    def listed(self, directory: Path) -> list[dict]:
        kinds = ([], ["--kernels"])
        return [
            json.loads(line) for kind in kinds for line in self.plancache(directory, "ls", "--json", *kind).splitlines()
        ]

    def job(self, bundle: Path, empty: Path, expected: int = 0) -> str:
        settings = {"PLANCACHE_DIR": str(empty), "PLANCACHE_LAYERS": str(bundle), "PLANCACHE_MODE": "require-hit"}
        return self.run("-c", JOB, expected=expected, **settings).strip()


def main() -> None:
    """Everything in order, with a line about each."""
    versions = sys.argv[1:] or VERSIONS
    with tempfile.TemporaryDirectory(prefix="plancache-two-") as home:
        place = Path(home)
        old, new = (Environment(place / version, version) for version in versions)
        examples = sorted(str(file) for file in (ROOT / "examples").glob("[a-z]*.py"))
        print(old.plancache(place / "old", "warm", *examples, "--device", "h200").splitlines()[-1])
        print(old.plancache(place / "old", "export", place / "old.bundle").strip().replace(home, "..."))
        print("the bundle alone, the same cuDNN:", served(old, place, "old.bundle"))
        new.job(place / "old.bundle", place / "none", expected=1)
        report = [
            json.loads(line)
            for line in new.plancache(place / "new", "rewarm", place / "old.bundle", "--json").splitlines()
        ]
        print(turned(old.listed(place / "old"), new.listed(place / "new"), report))
        new.plancache(place / "new", "export", place / "new.bundle")
        print("its bundle alone, the new cuDNN:", served(new, place, "new.bundle"))


def served(environment: Environment, place: Path, bundle: str) -> str:
    """What became of every builder; all must have come out of the bundle."""
    told = environment.job(place / bundle, place / f"under-{bundle}")
    if not told.startswith("{'layer': ") or "," in told:
        sys.exit(f"not everything was served: {told}")
    return told


def turned(before: list[dict], after: list[dict], report: list[dict]) -> str:
    """Every row of the old libraries has one of the new ones, unless these cannot have it and `rewarm` says why."""
    old, new = ({(row["graph"], row["build"], kind(row)) for row in rows} for rows in (before, after))
    without = [line for line in report if line["outcome"] == "unsupported"]
    if len(old - new) > len(without) or {route for _, _, route in old - new} - {"replay"}:
        sys.exit(f"{len(old - new)} of {len(old)} rows were not turned over: {sorted(old - new)[:5]}")
    versions = {row["cudnn"] for row in after}
    if versions & {row["cudnn"] for row in before}:
        sys.exit(f"rows of old libraries among the new ones: {versions}")
    lines = [f"{len(old & new)} of {len(old)} rows turned over to cuDNN {', '.join(sorted(versions))}"]
    said = {f"  no replay of {line['builder']}: {line['error'].splitlines()[0][:60]}" for line in without}
    lines += sorted(said)
    return "\n".join(lines)


def kind(row: dict) -> str:
    """The route; a kernel's row also has its own hash in it, which other libraries make anew."""
    return str(row["route"]).split("-")[0]


if __name__ == "__main__":
    main()
