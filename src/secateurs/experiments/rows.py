"""Rows of results: JSON lines, appended one by one as runs end, from which all tables and figures are made."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from secateurs.decode import Malformed, decode_json
from secateurs.errors import RunError


def read_rows(path: Path, kind: Any = dict[str, Any]) -> list[dict[str, Any]]:
    """Read all rows of the file, in order, each of the type `kind`; none where there is no file.

    A last line that a killed run left unfinished is skipped.
    """
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}).") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n"), 1):
        if not line:
            continue
        try:
            rows.append(decode_json(line, kind))
        except Malformed as error:
            raise RunError(f"{path}, line {number}: damaged ({error}). Remove the line: its run will be done again.") from error
    return rows


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row; on return it is on the disk. Processes may share the file: a line is one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _drop_half_line(path)
    with path.open("ab") as file:
        file.write(json.dumps(row, sort_keys=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _drop_half_line(path: Path) -> None:
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
