"""Atomic files: written under a temporary name, synced, then renamed. A run locks its folder."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

LOCK = ".lock"  # file locked by the process that uses the folder


@contextmanager
def replacing_path(path: Path) -> Iterator[Path]:
    """Give the name of a temporary file to write; it replaces `path` on success, synced, and is deleted on error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.part"
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` on success, synced, and is deleted on error."""
    with replacing_path(path) as temporary:
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # minus the umask, like any new file
        with os.fdopen(handle, "wb") as file:
            yield file


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, atomically."""
    write_bytes(path, text.encode())


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut, where the system can sync folders."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def is_held(path: Path) -> bool:
    """Whether a process uses the folder of a run: it holds the folder's lock while it is alive."""
    try:
        with (path / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
