"""What README's five lines and the tutorial end with is faster, whichever engine runs it, and by how many examples at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT, blocks, digits_loaders, run_block, trained
from secateurs import Graph, api
from secateurs.export import engines
from secateurs.pruning import context, speeds
from secateurs.speed import tables
from secateurs.speed.engines import TorchEngine, at_batch
from secateurs.speed.timing import COMPARED_ROUNDS, compare

AT_LEAST = {1: 1.0, 64: 1.1}  # measured on an idle core: 1.07 and more at single examples, 1.29 and more at 64


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are those of this machine, as users have them."""
    monkeypatch.setattr(api, "engine_for", engines.engine_for)
    monkeypatch.setattr(context, "preferred_multiple", tables.preferred_multiple)
    monkeypatch.setattr(speeds, "FINAL_ROUNDS", COMPARED_ROUNDS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mynet", None)


def assert_faster(dense: Graph, smaller: Graph) -> None:
    """Both in turns in one run: the lower end of the interval counts."""
    for engine in (TorchEngine(1), engines.OnnxEngine(1)):
        for batch, least in AT_LEAST.items():
            timed = at_batch(engine, batch)
            (found,) = compare([timed.network(dense), timed.network(smaller)]).speedups
            assert found.low > least, (engine.name, batch, found.summary())


def test_the_five_lines_end_with_a_faster_network(folder: Path) -> None:
    train, val, test = digits_loaders()
    names: dict[str, Any] = {"model": trained(train), "train_loader": train, "val_loader": val, "test_loader": test}
    readme = ROOT / "README.md"
    run_block(next(block for block in blocks(readme) if block.language == "python"), readme, names)
    assert_faster(names["result"].context.original, names["result"].graph)


@pytest.mark.docs
def test_the_tutorial_ends_with_a_faster_network(folder: Path) -> None:
    names: dict[str, Any] = {}
    tutorial = ROOT / "docs" / "tutorial.md"
    for block in blocks(tutorial):
        if block.title:
            (folder / block.title).write_text(block.text)
        elif "result" not in names:
            run_block(block, tutorial, names)
    assert_faster(names["result"].context.original, names["result"].graph)
