"""Python as another user: real processes with another uid, for which this process must be root.

The interpreter of a virtual environment may lie in root's home, where nobody else gets at it; then the system's own of
the same version runs, with the environment's packages.
"""

import atexit
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Neither need have an entry in the list of users.
ALICE, BOB, TEAM = 1000, 1001, 2000


class Users:
    """Runs Python as other users, with homes of their own under a directory that all can enter."""

    def __init__(self, place):
        self.place = place
        for user in (ALICE, BOB):
            for directory in (self.home(user), self.temporary(user)):
                directory.mkdir(mode=0o700)
                os.chown(directory, user, user)

    def home(self, user):
        return self.place / f"home-{user}"

    def temporary(self, user):
        """What is TMPDIR to this user."""
        return self.place / f"tmp-{user}"

    def directory(self, name, owner=0, mode=0o755, group=None):
        """Make a directory of this owner and mode."""
        made = self.place / name
        made.mkdir()
        os.chown(made, owner, owner if group is None else group)
        made.chmod(mode)
        return made

    def start(self, user, source, *arguments, groups=(), **environment):
        """Start Python source as a user, from the project's root; gives the process, with pipes."""
        home = {"HOME": str(self.home(user)), "TMPDIR": str(self.temporary(user))}
        variables = {**_environment(), **home, **environment}
        return subprocess.Popen(
            [interpreter(), "-W", "error", "-c", source, *map(str, arguments)],
            **_as(user, groups),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={name: value for name, value in variables.items() if value is not None},
        )

    def run(self, user, source, *arguments, check=True, **rest):
        """The same to its end; gives its stdout, or without `check` the exit code, stdout and stderr."""
        with self.start(user, source, *arguments, **rest) as process:
            out, complaints = process.communicate(timeout=120)
        if not check:
            return process.returncode, out, complaints
        assert (process.returncode, complaints) == (0, ""), f"exit code {process.returncode}\n{out}\n{complaints}"
        return out


def _as(user, groups=()):
    return {"user": user, "group": user, "extra_groups": list(groups), "umask": 0o022}


def _environment():
    return {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}


@cache
def interpreter():
    """A Python of this version that another user can run with plancache and cuDNN; None if there is none."""
    system = Path("/usr/bin/python{}.{}".format(*sys.version_info))
    for candidate in (sys.executable, _environment_of(system) if system.exists() else None):
        command = [candidate, "-c", "import cudnn, msgpack, zstandard, tests.stores, plancache.store.layers"]
        try:
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=_environment(), **_as(ALICE))
        except (OSError, TypeError, subprocess.CalledProcessError):
            continue
        return candidate
    return None


def _environment_of(python):
    """A virtual environment of another interpreter with the packages of this one; it goes when this process ends."""
    place = Path(tempfile.mkdtemp(prefix="plancache-tests-"))
    atexit.register(shutil.rmtree, place)
    packages = Path(sysconfig.get_paths()["purelib"])
    linked = place / packages.relative_to(sys.prefix)
    for directory in (place / "bin", linked.parent):
        directory.mkdir(parents=True)
    linked.symlink_to(packages)
    (place / "bin" / "python").symlink_to(python)
    (place / "pyvenv.cfg").write_text(f"home = {python.parent}\n")
    place.chmod(0o755)
    return str(place / "bin" / "python")
