"""Files are whole or absent: written under a temporary name, synced, then renamed. Folders at work are locked."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

LOCK = ".lock"  # the file that is locked by the process that works in a folder


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; on success it is synced and takes the place of `path`, on error it vanishes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f".{path.name}.{secrets.token_hex(6)}.part"
    handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask, as any new file
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
        sync_folder(path.parent)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all."""
    with replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut, where the system lets folders be synced."""
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
    """Whether a process works in the folder of a run: it holds the folder's lock as long as it lives."""
    try:
        with (path / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
