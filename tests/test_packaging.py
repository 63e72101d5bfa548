"""The wheel holds everything that is read at run time, and importing plancache costs nothing."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_ships_migrations_examples_devices_and_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"plancache/migrations/{file.name}" for file in (ROOT / "migrations").glob("*.sql")}
    wanted |= {f"plancache/examples/{file.name}" for file in (ROOT / "examples").glob("*.py")}
    wanted |= {"plancache/devices/h200.json", "plancache/py.typed", "plancache/cudnn/driver_entry_points.txt"}
    wanted |= {f"plancache/web/report.{ending}" for ending in ("html", "css", "js")}
    assert wanted <= names
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)


def test_a_fresh_environment_with_the_wheel_opens_a_cache(wheel, tmp_path):
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    # The dependencies of this environment, but not its editable plancache: .pth files on PYTHONPATH are not read.
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib"), "PLANCACHE_DIR": str(tmp_path / "cache")}
    source = """
import sys, plancache
from plancache.cli.demo import EXAMPLES, _cases
assert plancache.__file__.startswith(sys.argv[1]), plancache.__file__
with plancache.open() as cache:
    assert list(cache.rows()) == []
print(all(_cases(example) for example in EXAMPLES))
"""
    command = [python, "-W", "error", "-c", source, str(home)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    for command in ([home / "bin" / "plancache", "path"], [python, "-m", "plancache", "path"]):
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'cache'}\n"), done.stderr


def test_everything_that_is_imported_is_a_dependency(wheel):
    metadata = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    required = set(re.findall(r"^Requires-Dist: ([\w-]+)", text, re.MULTILINE))
    packages = {"cudnn": "nvidia-cudnn-frontend", "cuda": "cuda-python", "sqlite_utils": "sqlite-utils"}
    imported = set()
    for file in (ROOT / "plancache").rglob("*.py"):
        imported |= set(re.findall(r"^\s*(?:import|from) (\w+)", file.read_text(), re.MULTILINE))
    third_party = imported - set(sys.stdlib_module_names) - {"plancache"}
    assert {packages.get(name, name) for name in third_party} <= required
    assert len(third_party) > 5


def test_importing_plancache_imports_neither_cudnn_nor_anything_slow(run):
    slow = ("cudnn", "click", "rich", "filelock", "sqlite_utils", "sqlite3", "msgpack", "zstandard", "cuda.bindings")
    source = f"import sys, plancache; print([name for name in {slow!r} if name in sys.modules])"
    assert run(source).strip() == "[]"


def test_a_warm_lookup_imports_nothing_that_only_a_build_or_a_migration_needs(run, warm):
    source = """
import sys, plancache
from tests import graphs
with plancache.target("h200"), plancache.open(sys.argv[1]) as cache:
    assert cache.build(graphs.sdpa()[0]).source == "disk"
kept_out = "filelock sqlite_utils click rich cutlass torch socket subprocess statistics difflib".split()
ours = "cudnn.running filling explain nearest totals tuning store.verify store.bundle".split()
kept_out += [f"plancache.{name}" for name in ours]
print([name for name in kept_out if name in sys.modules])
"""
    assert run(source, warm).strip() == "[]"


def test_every_public_name_is_there_and_has_a_docstring():
    import plancache

    for name in (*plancache.__all__, "open"):
        value = getattr(plancache, name)
        assert (value.__doc__ or "").strip(), name
    assert set(plancache.__all__) <= set(dir(plancache))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = plancache.nothing
