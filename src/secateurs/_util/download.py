"""Where secateurs keeps what it downloads."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from secateurs._util.files import sync_folder
from secateurs.errors import DownloadError, InvalidInput


def home() -> Path:
    """Folder for weights and data: `$SECATEURS_HOME`, or `~/.cache/secateurs` when that is unset or empty."""
    moved = os.environ.get("SECATEURS_HOME")
    return Path(moved).expanduser() if moved else Path.home() / ".cache" / "secateurs"


Progress = Callable[[int, int | None], None]
"""Called with the bytes on disk so far, and the bytes of the whole file where the server tells."""

_ATTEMPTS = 3
_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 30.0
_PARTIAL_CONTENT = 206
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True)
class _Digest:
    """A checksum to hold a file to; `wanted` may be the leading digits only."""

    algorithm: str
    wanted: str

    def of(self, path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, self.algorithm).hexdigest()

    def fits(self, path: Path) -> bool:
        return self.of(path).startswith(self.wanted)


class _Interrupted(Exception):
    """The connection broke: what has arrived is on disk, and another attempt may go on from there."""


def fetch(url: str, path: Path, *, sha256: str | None = None, md5: str | None = None, progress: Progress | None = None) -> Path:
    """Return `path`, downloading it from `url` first unless it is there with the right checksum.

    A checksum is given in hexadecimal, whole or its first 8 digits or more; without one any file at `path` is good.
    What arrives is kept in `path` + ".part" until it is complete and its checksum fits, so `path` is never a torso.
    With a checksum an interrupted download goes on where it stopped; without one it starts again, because nothing would
    notice halves of two different files. A failure is a `DownloadError`, and leaves a file already at `path` alone.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidInput(f"cannot download {url!r}: wanted an address that starts with http:// or https://.")
    digests = [_digest(name, wanted) for name, wanted in (("sha256", sha256), ("md5", md5)) if wanted is not None]
    if path.is_file() and all(digest.fits(path) for digest in digests):
        return path
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (digests and part.is_file() and all(digest.fits(part) for digest in digests)):
            _download(url, path, part, resume=bool(digests), progress=progress)
        _check(url, part, digests)
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        raise DownloadError(f"cannot store {url} as {path}: {error}. Free some space, or make the folder writable.") from error
    return path


def _digest(algorithm: str, wanted: str) -> _Digest:
    digits = hashlib.new(algorithm).digest_size * 2
    if not re.fullmatch(rf"[0-9a-fA-F]{{8,{digits}}}", wanted):
        raise InvalidInput(f"{algorithm}={wanted!r} is not a checksum: wanted 8 to {digits} hexadecimal digits.")
    return _Digest(algorithm, wanted.lower())


def _check(url: str, part: Path, digests: list[_Digest]) -> None:
    for digest in digests:
        got = digest.of(part)
        if not got.startswith(digest.wanted):
            part.unlink()
            raise DownloadError(
                f"{url} arrived with {digest.algorithm} {got}, wanted {digest.wanted}. What arrived was deleted; "
                f"try again, and if that gives the same, the file at that address has changed."
            )


def _download(url: str, path: Path, part: Path, *, resume: bool, progress: Progress | None) -> None:
    """Fill `part`; a connection that breaks after having brought something is tried again."""
    for attempt in range(1, _ATTEMPTS + 1):
        if not resume:
            part.unlink(missing_ok=True)
        before = _size(part)
        try:
            _transfer(url, part, progress)
            return
        except HTTPError as error:
            with error:  # it holds the connection open
                raise DownloadError(f"{url} answered {error.code} {error.reason}. {_by_hand(url, path)}") from error
        except _Interrupted as error:
            if attempt == _ATTEMPTS or _size(part) <= before:
                raise DownloadError(f"cannot reach {url}: {error}. Try again later, or: {_by_hand(url, path)}") from error


def _by_hand(url: str, path: Path) -> str:
    return f"Download {url} by hand and put it at {path}."


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    """One download: append to `part` what it lacks, or write it anew when the server will not go on from there."""
    start = _size(part)
    response = _open(url, start)
    if response is None:
        part.unlink()
        start, response = 0, _open(url, 0)
    assert response is not None  # a request without a range is answered or raises
    with response:
        if response.status != _PARTIAL_CONTENT:
            start = 0
        length = response.headers.get("Content-Length")
        with part.open("ab" if start else "wb") as file:
            _copy(response, file, start, None if length is None else start + int(length), progress)


def _open(url: str, start: int) -> HTTPResponse | None:
    """Ask for `url` from byte `start` on; None when the server has no such byte, or offers another range."""
    headers = {"User-Agent": "secateurs", "Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(Request(url, headers=headers), timeout=_TIMEOUT_SECONDS)
    except HTTPError as error:
        if start and error.code == _RANGE_NOT_SATISFIABLE:
            error.close()
            return None
        raise
    except (OSError, HTTPException) as error:
        raise _Interrupted(str(error) or type(error).__name__) from error
    assert isinstance(response, HTTPResponse)  # only http and https get here
    if start and response.status == _PARTIAL_CONTENT and not _starts_at(response, start):
        response.close()
        return None
    return response


def _starts_at(response: HTTPResponse, start: int) -> bool:
    return response.headers.get("Content-Range", "").startswith(f"bytes {start}-")


def _copy(response: HTTPResponse, file: BinaryIO, done: int, total: int | None, progress: Progress | None) -> None:
    try:
        while chunk := _read(response):
            done += file.write(chunk)
            if progress is not None:
                progress(done, total)
    finally:
        file.flush()
        os.fsync(file.fileno())
    # A closed connection reads like the end of the file: only the announced length tells them apart.
    if total is not None and done < total:
        raise _Interrupted(f"the connection closed after {done} of {total} bytes")


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, HTTPException) as error:
        raise _Interrupted(str(error) or type(error).__name__) from error
