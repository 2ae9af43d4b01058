"""README's Python runs on a small network, and its output has the form that is shown; its lines fit a terminal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT, blocks, digits_loaders, run_block, trained

README = ROOT / "README.md"
NUMBER = re.compile(r"\d[\d.,]*")


def test_the_five_lines_run_and_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train, val, test = digits_loaders()
    names: dict[str, Any] = {"model": trained(train), "train_loader": train, "val_loader": val, "test_loader": test}
    code, *others = [block for block in blocks(README) if block.language == "python"]
    assert not others
    run_block(code, README, names)
    printed = capsys.readouterr().out
    (shown,) = [block.text for block in blocks(README) if block.language == "text"]
    assert [_form(line) for line in printed.splitlines()] == [_form(line) for line in shown.splitlines()]
    assert names["result"].bound <= 0.03
    assert names["result"].macs.removed > 0.2
    assert (tmp_path / "small.safetensors").exists()


def _form(line: str) -> str:
    """A line without its numbers, and without the speed, which is measured, and how far a prediction of it was off."""
    line = re.sub(r".* (at batch \d+ in eager mode)(; the prediction, [^;]*)?", r"\1", line)
    return NUMBER.sub("0", line)


def test_a_stranger_has_a_minute() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120
