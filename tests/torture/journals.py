"""Journals as tests write them: the chain of digests is made here by hand, apart from the code that checks it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DIGEST = 79  # bytes of the last field with the bracket that ends the line


def entries_of(folder: Path) -> list[dict[str, Any]]:
    """The entries of a journal without their digests, unchecked; a last line that is being written is left out."""
    lines = (folder / "journal.jsonl").read_text().split("\n")[:-1]
    return [{key: value for key, value in json.loads(line).items() if key != "digest"} for line in lines]


def write_entries(folder: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Write a journal whose digests are right, whatever its entries say."""
    write_bodies(folder, [json.dumps(entry).encode() for entry in entries])


def write_bodies(folder: Path, bodies: Iterable[bytes]) -> None:
    """Write a journal of lines that are given without their digests, each ending in a bracket."""
    origin = next((folder / name for name in ("provenance.json", "training.json") if (folder / name).exists()), None)
    digest = hashlib.sha256(b"" if origin is None else origin.read_bytes()).hexdigest()
    lines = []
    for body in bodies:
        digest = hashlib.sha256(digest.encode() + body).hexdigest()
        lines.append(body[:-1] + b', "digest": "' + digest.encode() + b'"}\n')
    (folder / "journal.jsonl").write_bytes(b"".join(lines))
