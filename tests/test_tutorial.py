"""The tutorial does what it says: its Python blocks and its commands are run in order, in a folder of their own."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from secateurs.cli import execute

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial.md"
FENCE = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.M | re.S)


def blocks() -> list[tuple[str, str, str, int]]:
    """Language, file name, text and line of every fenced block."""
    text = TUTORIAL.read_text()
    return [(m[1], m[2] or "", m[3], text[: m.start()].count("\n") + 2) for m in FENCE.finditer(text)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mynet", None)


def test_the_tutorial_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for language, title, text, line in blocks():
        if title:
            (folder / title).write_text(text)
        elif language == "python":
            exec(compile("\n" * (line - 1) + text, str(TUTORIAL), "exec"), names)
        elif language == "console":
            for command in re.findall(r"^\$ secateurs (.*)$", text, re.M):
                assert execute(shlex.split(command)) == 0, (command, capsys.readouterr().err)
        else:
            pytest.fail(f"line {line}: a block of {language!r}, which nobody runs")
    outcome = names["outcome"]
    assert outcome.search_before.accuracy > 0.9, "the network to prune is not trained"
    assert outcome.search_before.accuracy - outcome.search_after.accuracy <= 0.02 + 1e-12
    assert outcome.cost_after.parameters < 0.9 * outcome.cost_before.parameters
    printed = capsys.readouterr().out
    assert "runs/first/pruned.safetensors" in printed
    (promised,) = re.findall(r"about (\S+) without repair and (\S+) with it", TUTORIAL.read_text())
    without, repaired = map(float, re.findall(r"^\d\.\d{3}$", printed, re.M))
    assert without == pytest.approx(float(promised[0]), abs=0.1)
    assert repaired == pytest.approx(float(promised[1]), abs=0.02)


def test_the_core_is_ten_lines() -> None:
    (core,) = (text for language, title, text, _ in blocks() if language == "python" and "budget=" in text)
    statements = len(re.findall(r"^\S.*[^(\s]$|^\S.*\($", core, re.M))
    assert statements <= 10
