"""Files that commands write: whole or not there, and never over another one unless that was asked for."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

import click


def write_text(file: Path, text: str, force: bool) -> int:
    """Write a file, and give its bytes. What was there stays as it is until all of the new one is written.

    Raises:
        click.ClickException: it is there already and not to be overwritten, or it cannot be written.
    """
    content = text.encode("utf-8", "replace")
    try:
        place = file.resolve()  # what a link leads to is written, and not the link
        if place.exists() and not place.is_file() and force:
            place.write_bytes(content)  # a pipe, a device: those are not replaced
        else:
            _write(place, content, force)
    except FileExistsError:
        raise click.ClickException(f"{file} exists. Give --force to overwrite it.") from None
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error}") from None
    return len(content)


def _write(place: Path, content: bytes, force: bool) -> None:
    if place.exists() and not force:
        raise FileExistsError
    scratch = place.with_name(f".{place.name[:200]}.{secrets.token_hex(8)}")
    try:
        scratch.write_bytes(content)
        if force:
            with suppress(FileNotFoundError):
                shutil.copymode(place, scratch)
            scratch.replace(place)
        else:
            _put(scratch, place)
    finally:
        scratch.unlink(missing_ok=True)


def _put(scratch: Path, place: Path) -> None:
    """Rename, but not onto what somebody else has put there meanwhile."""
    try:
        os.link(scratch, place)
    except FileExistsError:
        raise
    except OSError:  # no links on this file system
        scratch.replace(place)
