"""The cache directory: where it is by default, which file system it is on, whether it may be trusted, its modes."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from plancache.errors import StoreError
from plancache.settings import user_cache_directory

# File systems whose locks and shared memory SQLite's WAL can rely on. Everything else (NFS, Lustre, GPFS, FUSE,
# unknown) holds record files.
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs"})


def default_directory() -> Path:
    """Where plans are kept if nobody says otherwise."""
    return user_cache_directory() / "plans"


def filesystem(path: Path) -> str:
    """The type of the file system that `path` is on, or would be; `unknown` where it cannot be told."""
    try:
        mounts = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n")
        place = _existing(path).resolve()
    except OSError:
        return "unknown"
    best, kind = -1, "unknown"
    for line in filter(None, mounts):
        left, _, right = line.partition(" - ")
        # Blanks and the like are written as \040; every other character stays as it is, of whatever alphabet.
        mounted = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split(" ")[4]))
        # Of mounts on the same place, the last one is on top.
        if place.is_relative_to(mounted) and len(mounted.parts) >= best:
            best, kind = len(mounted.parts), right.split()[0]
    return kind


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


@dataclass(frozen=True)
class Access:
    """What may be done with a cache directory.

    Attributes:
        read_only: nothing may be written there.
        mode: the directory's mode, which everything that is made in it follows.
        foreign: it is another owner's: not even root writes there.
    """

    read_only: bool
    mode: int = 0o700
    foreign: bool = False

    @property
    def file_mode(self) -> int:
        """The mode of files."""
        return self.mode & 0o666

    def make(self, path: Path) -> None:
        """Make a directory below, with the same mode (and group, where that is set on the directory)."""
        if path.is_dir():
            return
        scratch = _scratch(path)
        scratch.mkdir()
        try:
            scratch.chmod(self.mode)
            scratch.rename(path)  # or onto another process's, which is as empty
        except OSError:
            scratch.rmdir()
            if not path.is_dir():
                raise

    def make_file(self, path: Path) -> None:
        """Make an empty file with the directory's mode, if there is none.

        It has its mode from the first moment on. Where two users share a directory, one that opened a file before it
        was made writable for the group could not write it later (17 of 48 processes that raced, measured).
        """
        if path.exists():
            return
        scratch = _scratch(path)
        os.close(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.file_mode))
        try:
            self.follow(scratch)
            with suppress(OSError):  # another process was first; or there are no links here, and the caller makes it
                os.link(scratch, path)
        finally:
            scratch.unlink()

    def follow(self, path: Path) -> None:
        """Give a file that was just made the directory's mode."""
        with suppress(PermissionError):
            path.chmod(self.file_mode)


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}")


def access(path: Path, *, read_only: bool, signed: bool, trusted: tuple[str, ...]) -> Access:
    """Make the directory if it is not there, and say what may be done with it.

    A cached plan is native code, so a directory that others may have written is refused. A new one is readable by its
    owner alone; an existing one keeps its mode.

    Args:
        read_only: do not make it, and do not write.
        signed: every record is checked against a key, so that it does not matter who wrote it.
        trusted: paths of directories of other owners that are taken nevertheless.

    Raises:
        StoreError: the directory cannot be made, is not there, or is refused; the error says why.
    """
    try:
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if read_only:
                raise StoreError("there is no cache here", path=path, found=f"no directory {path}") from None
            _make(path)
            status = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError("the cache directory is no directory", path=path, found=str(path), todo="Set PLANCACHE_DIR.")
    _refuse(path, status, "the cache directory", signed or _named(path, trusted))
    if not os.access(path, os.X_OK):
        raise _unreadable(path, f"user {os.geteuid()} may not enter {path}")
    mine = status.st_uid == os.geteuid() or bool(status.st_mode & stat.S_IWGRP and _in_group(status.st_gid))
    may_write = mine and os.access(path, os.W_OK | os.X_OK)
    return Access(read_only or not may_write, stat.S_IMODE(status.st_mode), foreign=not mine)


def bundle_access(path: Path, *, signed: bool, trusted: tuple[str, ...]) -> Access | None:
    """What may be done with a bundle, by the same rules; None if there is no file at `path`.

    Raises:
        StoreError: it cannot be read, or is refused; the error says why.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        return None
    _refuse(path, status, "the bundle", signed or _named(path, trusted))
    return Access(read_only=True)


def check_file(file: Path) -> bool:
    """Refuse a database that everybody may write, whatever the directory's mode; whether there is one.

    Raises:
        StoreError: it is such a one.
    """
    try:
        mode = file.stat().st_mode
    except OSError:
        return False
    if mode & stat.S_IWOTH:
        raise StoreError(
            "the database is refused, since others could put native code into it",
            path=file,
            found=f"{file} may be written by everybody",
            todo=f"chmod o-w {file}",
        )
    return True


def _named(path: Path, trusted: tuple[str, ...]) -> bool:
    if not trusted:
        return False
    places = {os.path.normpath(one) for one in trusted} | {os.path.realpath(one) for one in trusted}
    return os.path.normpath(path) in places or os.path.realpath(path) in places


def _unreadable(path: Path, found: object) -> StoreError:
    return StoreError("the cache cannot be read", path=path, found=str(found))


def _refuse(path: Path, status: os.stat_result, kind: str, vouched: bool) -> None:
    def refused(why: str, todo: str) -> StoreError:
        what = f"{kind} is refused, since others could put native code into it"
        return StoreError(what, path=path, found=f"{path} {why}", todo=todo)

    if status.st_mode & stat.S_IWOTH:
        raise refused("may be written by everybody", f"chmod o-w {path}")
    stranger = not _in_group(status.st_gid) and status.st_uid != os.geteuid()
    if status.st_mode & stat.S_IWGRP and stranger and not vouched:
        raise refused("may be written by a group that you are not in", "Have it signed (PLANCACHE_KEY_FILE).")
    shared = bool(status.st_mode & stat.S_IWGRP)
    if status.st_uid not in (0, os.geteuid()) and not shared and not vouched:
        raise refused(f"belongs to another user ({status.st_uid})", f"PLANCACHE_TRUST={path}, or have it signed.")


def _in_group(group: int) -> bool:
    return os.geteuid() == 0 or group == os.getegid() or group in os.getgroups()


def _make(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StoreError(
            "the cache directory cannot be made", path=path, found=str(error), todo="Set PLANCACHE_DIR."
        ) from error
