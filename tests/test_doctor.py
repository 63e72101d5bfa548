"""`plancache doctor` says what stands in the way, also where cuDNN is missing or broken, and changes nothing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from plancache import child, trial
from plancache import doctor as examination
from plancache.cli import cli
from plancache.doctor import ERROR, OK, WARNING
from plancache.store import directory as directories
from plancache.store.database import FILE
from tests.conftest import ROOT
from tests.stores import snapshot


def invoke(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def examined(path, code=0):
    lines = invoke("--dir", path, "doctor", "--json", code=code).splitlines()
    return {one["name"]: one for one in map(json.loads, lines)}


@pytest.fixture
def unprobed(monkeypatch):
    """The part about cuDNN takes a second and is tested by itself."""
    monkeypatch.setattr(examination, "_cudnn", lambda: iter(()))


def test_on_a_sound_host_everything_is_looked_at_and_fits_80_columns(warm, monkeypatch):
    before = snapshot(warm)
    lines = invoke("--dir", warm, "doctor").splitlines()
    assert max(map(len, lines)) <= 80
    assert snapshot(warm) == before
    found = examined(warm)
    assert set(found) == {
        *("plancache", "frontend", "cuDNN", "libraries", "NVRTC", "driver", "C compiler", "devices"),
        *("directory", "file system", "space", "store", "locks", "layers", "signing"),
    }
    assert {one["state"] for one in found.values()} <= {OK, WARNING}
    assert found["cuDNN"]["found"].startswith("9.")
    assert "write-ahead log" in found["store"]["found"]
    assert "may be deleted at any time" in found["directory"]["found"]
    assert snapshot(warm) == before


def broken(tmp_path, source):
    """The environment of a process that has another package by the name of cudnn."""
    (tmp_path / "broken" / "cudnn").mkdir(parents=True)
    (tmp_path / "broken" / "cudnn" / "__init__.py").write_text(source)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "broken"), str(ROOT)])}


@pytest.mark.parametrize(
    ("source", "where", "says"),
    [
        ("raise ImportError('no such thing')", "frontend", "cannot be imported: no such thing"),
        ("__version__ = '0.1'", "frontend", "not NVIDIA's cuDNN frontend"),
        ("__version__ = '1.2.0'; pygraph = backend_version = None", "frontend", "too old"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "cuDNN", "ended with -11"),
    ],
    ids=["missing", "another", "old", "crashing"],
)
def test_a_missing_or_broken_cudnn_is_an_error_that_says_what_to_do(warm, tmp_path, source, where, says):
    command = [sys.executable, "-m", "plancache", "--dir", str(warm), "doctor", "--json"]
    done = subprocess.run(
        command, env=broken(tmp_path, source), capture_output=True, text=True, cwd=ROOT, check=False, timeout=100
    )
    assert (done.returncode, done.stderr) == (1, "")
    found = {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert found[where]["state"] == ERROR
    assert says in found[where]["found"]
    assert "pip install" in found[where]["todo"]
    assert found["store"]["state"] == OK


def test_without_a_driver_a_compiler_is_needed_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert examination._compiler(needed=True).state == ERROR
    assert examination._compiler(needed=False).state == OK
    (tmp_path / "plancache" / "no-driver" / "x").mkdir(parents=True)
    (tmp_path / "plancache" / "no-driver" / "x" / "libcuda.so.1").touch()
    assert examination._compiler(needed=True).state == OK


def test_a_driver_without_devices_and_other_bindings_are_warnings():
    assert examination._driver({"version": "13.0", "status": 100, "devices": 0}).state == WARNING
    sound = {"version": "13.0", "status": 0, "devices": 1}
    names, cudnn = {"names": ["NVIDIA H200"]}, {"cuda": 12}
    assert examination._devices(sound, names, {"version": "12.9"}, cudnn).state == OK
    other = examination._devices(sound, names, {"version": "13.0"}, cudnn)
    assert (other.state, "cuda-python>=12,<13" in other.todo) == (WARNING, True)


def test_several_cudnns_are_a_warning(monkeypatch, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "libcudnn.so.9").write_text(name)
    monkeypatch.setattr(examination, "_library_places", lambda: iter([tmp_path / "a", tmp_path / "b", tmp_path / "a"]))
    found = examination._on_disk({"file": str(tmp_path / "a" / "libcudnn.so.9")})
    assert (found.state, found.found.startswith("2 cuDNNs")) == (WARNING, True)


@pytest.mark.usefixtures("unprobed")
def test_a_cache_that_is_not_there_is_not_made(tmp_path):
    found = examined(tmp_path / "none")
    assert "not there yet" in found["directory"]["found"]
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("unprobed")
def test_a_directory_that_everybody_may_write_is_an_error_with_the_way_out(warm):
    warm.chmod(0o777)
    found = examined(warm, code=1)["directory"]
    assert (found["state"], found["todo"]) == (ERROR, f"chmod o-w {warm}")
    (warm.parent / "file").write_text("")
    assert examined(warm.parent / "file", code=1)["directory"]["state"] == ERROR


@pytest.mark.usefixtures("unprobed")
def test_damage_is_named(warm):
    (warm / "damaged-1-plancache.sqlite3").write_bytes(b"x")
    assert "verify --repair" in examined(warm)["damage"]["todo"]
    (warm / FILE).write_bytes(b"no database at all" * 10)
    assert "no SQLite database" in examined(warm, code=1)["store"]["found"]


@pytest.mark.usefixtures("unprobed")
def test_settings_layers_and_keys_that_are_wrong_are_errors(warm, tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o644)
    monkeypatch.setenv("PLANCACHE_KEY_FILE", str(key))
    monkeypatch.setenv("PLANCACHE_LAYERS", f"{tmp_path / 'none'}:{warm}")
    found = [json.loads(line) for line in invoke("--dir", warm, "doctor", "--json", code=1).splitlines()]
    states = [(one["name"], one["state"]) for one in found if one["name"] in ("layer", "signing")]
    assert states == [("layer", ERROR), ("layer", OK), ("signing", WARNING)]
    key.write_bytes(b"short")
    assert examined(warm, code=1)["signing"]["found"].startswith("the key is too short")
    monkeypatch.setenv("PLANCACHE_MODE", "nonsense")
    assert "PLANCACHE_MODE" in examined(warm, code=1)["settings"]["found"]


@pytest.mark.usefixtures("unprobed")
def test_a_lock_that_is_held_is_told_with_its_holder_and_one_of_a_killed_process_is_not(warm, run):
    source = """
import sys, plancache
from pathlib import Path
from plancache.store.directory import Access
from plancache.store.locks import SingleFlight
with SingleFlight(Path(sys.argv[1]), Access(False), 1).turn(sys.argv[2], lambda: False):
    print("held", flush=True)
    sys.stdin.readline()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", source, str(warm), "0" * 64],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        assert f"1 held, each for a build that is going on: process {holder.pid} on" in examined(warm)["locks"]["found"]
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert examined(warm)["locks"]["found"].startswith("none is held; 1 signed by processes that are gone")


@pytest.mark.usefixtures("unprobed")
def test_a_database_on_a_network_file_system_is_a_warning(warm, monkeypatch):
    monkeypatch.setattr(directories, "filesystem", lambda path: "nfs4")
    found = examined(warm)
    assert "record files" in found["file system"]["found"]
    assert found["store"]["state"] == WARNING


# ------------------------------------------------------------ trying a file system


def test_a_sound_file_system_passes_and_nothing_stays_there(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "_KILLS", 2)
    monkeypatch.setattr(trial, "_READS", 0.2)
    lines = [json.loads(line) for line in invoke("doctor", "--filesystem", tmp_path, "--json").splitlines()]
    names = [one["name"] for one in lines]
    assert names[:5] == ["file system", "modes", "clock", "locks", "renames"]
    assert {one["state"] for one in lines} == {OK}, lines
    assert list(tmp_path.iterdir()) == []


def test_locks_that_do_not_lock_and_records_that_are_torn_are_found(tmp_path, monkeypatch):
    import filelock

    with monkeypatch.context() as patched:
        patched.setattr(filelock.FileLock, "acquire", lambda self, **options: None)
        assert trial._locks(tmp_path).state == WARNING
    with monkeypatch.context() as patched:
        patched.setattr(trial, "_is_whole", lambda content: False)
        patched.setattr(trial, "_READS", 0.2)
        (tmp_path / "renames").mkdir()
        assert trial._renames(tmp_path / "renames").state == ERROR
    monkeypatch.setattr(trial, "_KILLS", 1)
    with monkeypatch.context() as patched:
        (tmp_path / "files").mkdir()
        good = trial._killed_files(tmp_path / "files")
        assert good.state == OK
        for file in (tmp_path / "files" / "records").rglob("*.native"):
            file.write_bytes(file.read_bytes()[:-1])
        assert trial._killed_files(tmp_path / "files").state == ERROR


def test_what_a_killed_trial_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / f"{trial._PREFIX}old"
    left.mkdir()
    os.utime(left, (time.time() - 7200, time.time() - 7200))
    with trial._scratch(tmp_path) as place:
        assert [path.name for path in tmp_path.iterdir()] == [place.name]


def test_a_directory_that_may_not_be_written_is_an_error(users):
    place = users.place / "theirs"
    place.mkdir(mode=0o755)
    source = (
        "import sys; from plancache.trial import run; from pathlib import Path; print(run(Path(sys.argv[1]))[-1].state)"
    )
    assert users.run(1234, source, place).strip() == ERROR


def test_a_file_that_is_named_like_a_module_of_python_breaks_no_child_process(tmp_path, monkeypatch):
    (tmp_path / "signal.py").write_text("raise SystemExit('not this one')\n")
    (tmp_path / "mine.py").write_text("print('mine')\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # as Python does with a script's directory
    said = [
        subprocess.run(child.command(module), capture_output=True, text=True, check=True).stdout
        for module in ("mine", "plancache.probe")
    ]
    assert said[0] == "mine\n"
    assert '"frontend"' in said[1]
