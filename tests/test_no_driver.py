"""A host without an NVIDIA driver: the stand-in is made once, is silent, and gives way to a real driver."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from plancache.cudnn import no_driver
from tests.conftest import ROOT

ENSURE = """
import ctypes
from plancache.cudnn.no_driver import ensure_driver
ensure_driver()
ensure_driver()
print(ctypes.CDLL("libcuda.so.1").cuInit(0))
"""


@pytest.fixture(autouse=True)
def _no_real_driver(run):
    found = "import ctypes\ntry: ctypes.CDLL('libcuda.so.1'); print('driver')\nexcept OSError: print('none')"
    if run(found).strip() == "driver":
        pytest.skip("this host has an NVIDIA driver, so nothing stands in for it")


def libraries(home):
    return sorted(home.rglob("libcuda.so.1"))


def test_it_is_compiled_once_and_says_that_there_is_no_device(run, tmp_path):
    assert run(ENSURE, XDG_CACHE_HOME=str(tmp_path)).split() == ["100"]
    (library,) = libraries(tmp_path)
    before = library.stat()
    assert run(ENSURE, XDG_CACHE_HOME=str(tmp_path), PATH="/nonexistent").split() == ["100"]
    assert library.stat().st_mtime_ns == before.st_mtime_ns
    assert library.parent.stat().st_mode & 0o777 == 0o700


def test_building_without_a_driver_prints_nothing(run, tmp_path):
    # cuDNN prints a line for each entry point that it cannot find, thousands in all.
    source = """
import plancache
from tests import graphs
with plancache.target("h200"), plancache.open() as cache:
    cache.build(graphs.matmul()[0])
"""
    done = run(source, check=False, XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_a_compiler_the_error_says_what_to_install(run, tmp_path):
    source = """
import plancache
try:
    with plancache.target("h200"): plancache.pygraph()
except plancache.PlanCacheError as error: print(type(error).__name__, error)
"""
    out = run(source, XDG_CACHE_HOME=str(tmp_path), PATH="/nonexistent")
    assert out.startswith("LibraryError this host has no NVIDIA driver, and no C compiler")
    assert "apt-get install gcc" in out


def test_a_compiler_that_fails_is_quoted(run, tmp_path):
    out = run(ENSURE, check=False, XDG_CACHE_HOME=str(tmp_path), CC="false").stderr
    assert "the C compiler could not make the stand-in" in out
    assert libraries(tmp_path) == []
    assert [path for path in tmp_path.rglob("*") if path.name.startswith("tmp")] == []


def test_eight_processes_that_start_at_once_all_get_it(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", ENSURE]
    running = [subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(8)]
    assert [process.communicate(timeout=120)[0].split() for process in running] == [[b"100"]] * 8
    assert len(libraries(tmp_path)) == 1


def test_a_directory_that_others_may_write_is_not_used(run, tmp_path):
    run(ENSURE, XDG_CACHE_HOME=str(tmp_path))
    (library,) = libraries(tmp_path)
    library.write_bytes(b"not a library, and put there by somebody else")
    library.parent.chmod(0o777)
    assert run(ENSURE, XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path)).split() == ["100"]


def test_a_home_that_cannot_be_written_does_not_matter(run, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    out = run(ENSURE, XDG_CACHE_HOME=str(file / "below"), TMPDIR=str(tmp_path))
    assert out.split() == ["100"]


def test_a_driver_that_is_there_is_used_and_nothing_is_made(run, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the tests need a C compiler"
    code = tmp_path / "driver.c"
    code.write_text("int cuInit(unsigned flags) { return 7; }")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", code], check=True)
    cache = tmp_path / "cache"
    assert run(ENSURE, XDG_CACHE_HOME=str(cache), LD_LIBRARY_PATH=str(tmp_path)).split() == ["7"]
    assert not cache.exists()


# What starts like this in cuDNN's engines is a name of the driver's API, looked up while the process runs.
DRIVER = (
    rb"cu(?:Ctx|Device|Driver|Event|Func|Get|Graph|Init|Kernel|Launch|Library|Mem|Module|Occupancy|Stream|TensorMap)"
)


def test_every_entry_point_that_cudnns_engines_name_is_exported():
    from plancache.cudnn import environment

    exported = set(re.findall(r"\b(cu[A-Z]\w+)\(", no_driver.source())) | set(
        re.findall(r"ENTRY\((\w+)\)", no_driver.source())
    )
    (library,) = environment.library_path().parent.glob("libcudnn_engines_runtime_compiled.so*")
    named = {name.decode() for name in re.findall(rb"\0(" + DRIVER + rb"\w*)(?=\0)", library.read_bytes())}
    assert len(named) > 20
    assert named - exported == set()


def test_a_disk_that_is_full_is_told_in_words(run, tmp_path):
    out = run(
        "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "import plancache\n"
        "try:\n    with plancache.target('h200'): plancache.pygraph()\n"
        "except plancache.PlanCacheError as error: print(type(error).__name__)\n",
        XDG_CACHE_HOME=str(tmp_path),
        TMPDIR=str(tmp_path),
    )
    assert out.split() == ["LibraryError"]


def test_the_compiler_that_pip_installed_is_found_before_a_graph_is_built(run):
    found = run(
        "from pathlib import Path\n"
        "from plancache.cudnn import libraries, no_driver\n"
        "no_driver.ensure_driver()\n"
        "libraries.ensure_nvrtc()\n"
        "print({line.split('/')[-1] for line in Path('/proc/self/maps').read_text().splitlines()})"
    )
    assert re.search(r"libnvrtc\.so\.1[23]'", found)


def test_the_compilers_builtins_are_found_where_cudnn_loaded_the_compiler_by_itself(run):
    # cuDNN 9.19 loads NVRTC out of its wheel while it plans a graph with dynamic shapes, and NVRTC then finds none.
    found = run(
        "import ctypes, sys\n"
        "from pathlib import Path\n"
        "from plancache.cudnn import libraries\n"
        "files = [found for entry in sys.path for found in Path(entry, 'nvidia').glob('*/lib/libnvrtc.so.*')]\n"
        "ctypes.CDLL(str(files[0]))\n"
        "libraries.ensure_nvrtc()\n"
        "print({line.split('/')[-1] for line in Path('/proc/self/maps').read_text().splitlines()})"
    )
    assert "libnvrtc-builtins.so." in found
