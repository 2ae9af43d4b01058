"""Rows of results: JSON lines, appended one by one as runs end, from which all tables and figures are made."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from secateurs.errors import RunError


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of the file, in order; none where there is no file. A last line that a killed run left unfinished is skipped."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # without the line end that completes it
                continue
            raise RunError(
                f"{path}, line {number}: is no JSON ({error}). Remove the line: its run will be done again."
            ) from error
        if not isinstance(row, dict):
            raise RunError(f"{path}, line {number}: got {type(row).__name__}, wanted an object with the figures of a run")
        rows.append(row)
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
