"""Folders of runs: free of links, locked by one process, with errors of the disk that say what to do."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from secateurs._util.files import LOCK
from secateurs.errors import RunError, SecateursError


def refuse_links(folder: Path) -> None:
    """RunError if the folder, or a folder in it, holds anything but files and folders.

    A link leads reading and writing to any place, and opening a pipe waits for ever; a folder may come from anybody.
    """
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            with suppress(FileNotFoundError):  # a run may be at work here
                mode = path.lstat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    raise RunError(
                        f"{path}: is {'a link' if stat.S_ISLNK(mode) else 'no ordinary file'}, and a folder that may come from "
                        f"anybody is read only without. If you know where it leads, put that in its place (cp -rL)."
                    )


def lock(path: Path) -> IO[bytes]:
    """Lock a folder for this process, until the file is closed."""
    with disk_errors(path):
        file = (path / LOCK).open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise RunError(f"{path}: another process is working on this run. Wait for it, or stop it first.") from error
    return file


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk, our own errors about them included, into a `RunError` that says what to do."""
    try:
        yield
    except (OSError, SecateursError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"the disk is full ({cause.strerror}). Free some space, then resume with: secateurs resume {path}"
        elif cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):  # no entry: as within /proc
            what = f"cannot be written ({cause.strerror}). Choose a folder that you may write to."
        else:
            path = Path(os.fsdecode(cause.filename2 or cause.filename or path))
            what = f"{cause.strerror or cause}."
        raise RunError(f"{path}: {what}") from cause
