"""Files are whole or absent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from secateurs._util.files import replacing, write_text


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "first")
    write_text(path, "second")
    assert path.read_text() == "second"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def fail_half_way(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"new")
        raise RuntimeError("half-way")


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError, match="half-way"):
        fail_half_way(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    write_text(tmp_path / "ours", "x")
    (tmp_path / "plain").write_text("x")
    modes = [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("ours", "plain")]
    assert modes[0] == modes[1]
