"""The tutorial does what it says: its Python blocks and its commands are run in order, in a folder of their own."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT, blocks, run_block
from secateurs.cli import execute

TUTORIAL = ROOT / "docs" / "tutorial.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mynet", None)


@pytest.mark.docs
def test_the_tutorial_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in blocks(TUTORIAL):
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "python":
            run_block(block, TUTORIAL, names)
        elif block.language == "console":
            for command in re.findall(r"^\$ secateurs (.*)$", block.text, re.M):
                assert execute(shlex.split(command)) == 0, (command, capsys.readouterr().err)
        else:
            pytest.fail(f"line {block.line}: a block of {block.language!r}, which no test runs")
    for result, promised in ((names["result"], True), (names["resumed"], False)):
        assert result.search.before > 0.9, "the network to prune is not trained"
        assert result.search.before - result.search.after <= 0.02 + 1e-12
        assert result.cost_after.parameters < 0.9 * result.cost_before.parameters
        assert (result.bound is not None) == promised
    printed = capsys.readouterr().out
    assert "runs/first/pruned.safetensors" in printed
    (said,) = re.findall(r"about (\S+) without repair and (\S+) with it", TUTORIAL.read_text())
    without, repaired = map(float, re.findall(r"^\d\.\d{3}$", printed, re.M))
    assert without == pytest.approx(float(said[0]), abs=0.1)
    assert repaired == pytest.approx(float(said[1]), abs=0.02)
