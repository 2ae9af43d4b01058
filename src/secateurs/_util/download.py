"""Downloads into the cache folder: a file arrives whole and with its checksum, or not at all."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from secateurs._util.files import replacing
from secateurs.errors import DownloadError, InvalidInput

Progress = Callable[[int, int | None], None]
"""Called with the bytes received so far, and the bytes of the whole file where the server announces them."""

_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 30.0


def home() -> Path:
    """Folder for weights and data: `$SECATEURS_HOME`, or `~/.cache/secateurs` when that is unset or empty."""
    moved = os.environ.get("SECATEURS_HOME")
    return Path(moved).expanduser() if moved else Path.home() / ".cache" / "secateurs"


def fetch(url: str, path: Path, *, sha256: str | None = None, md5: str | None = None, progress: Progress | None = None) -> Path:
    """Return `path`, downloading it from `url` first unless it is there with the right checksum.

    A checksum is given in hexadecimal, in full or its first 8 digits or more; without one any file at `path` is accepted.
    `path` is replaced only by a complete file with the right checksum. A failure is a `DownloadError`, and leaves a file
    already at `path` alone.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidInput(f"cannot download {url!r}: wanted an address that starts with http:// or https://.")
    checksums = {name: digits.lower() for name, digits in (("sha256", sha256), ("md5", md5)) if digits is not None}
    for name, wanted in checksums.items():
        digits = hashlib.new(name).digest_size * 2
        if not re.fullmatch(rf"[0-9a-f]{{8,{digits}}}", wanted):
            raise InvalidInput(f"{name}={wanted!r} is not a checksum: wanted 8 to {digits} hexadecimal digits.")
    if path.is_file() and all(_digest(path, name).startswith(wanted) for name, wanted in checksums.items()):
        return path
    request = Request(url, headers={"User-Agent": "secateurs", "Accept-Encoding": "identity"})
    try:
        with urlopen(request, timeout=_TIMEOUT_SECONDS) as response, replacing(path) as file:
            length, done = response.headers.get("Content-Length"), 0
            total, hashes = None if length is None else int(length), {name: hashlib.new(name) for name in checksums}
            while chunk := response.read(_CHUNK):
                done += file.write(chunk)
                for hasher in hashes.values():
                    hasher.update(chunk)
                if progress is not None:
                    progress(done, total)
            # a closed connection reads like the end of the file: only the announced length tells them apart
            if total is not None and done < total:
                raise ConnectionError(f"the connection closed after {done} of {total} bytes")
            for name, wanted in checksums.items():
                if not hashes[name].hexdigest().startswith(wanted):
                    raise DownloadError(
                        f"{url} arrived with {name} {hashes[name].hexdigest()}, wanted {wanted}, and was discarded. "
                        f"Try again; if that gives the same, the file at that address has changed."
                    )
    except HTTPError as error:
        with error:  # it holds the connection open
            raise DownloadError(
                f"{url} answered {error.code} {error.reason}. Download it by hand and put it at {path}."
            ) from error
    except (OSError, HTTPException) as error:
        raise DownloadError(
            f"cannot download {url}: {error or type(error).__name__}. Check the network, the free space and the permissions of "
            f"{path.parent}, or download it by hand and put it at {path}."
        ) from error
    return path


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()
