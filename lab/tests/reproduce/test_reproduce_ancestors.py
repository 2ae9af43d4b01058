"""The table of the ancestors: rows are made once, kept, and turned into a table; the real figures are marked realdata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nets import seeded
from secateurs._util.terminal import clock
from secateurs.data import Data, Examples, Scaling
from secateurs.errors import InvalidInput
from secateurs_lab.compare.rows import read_rows
from secateurs_lab.reproduce import ancestors as command
from secateurs_lab.reproduce.ancestors import ANCESTORS, AncestorRow, sheet


def row(name: str, seed: int = 0, **changes: Any) -> AncestorRow:
    given = {
        "name": name,
        "seed": seed,
        "network": "lenet5",
        "conditions": "as asked",
        "images": 55_000,
        "published": "1.0 %",
        "error_before": 0.009,
        "error_after": 0.0123,
        "weights_before": 430_500,
        "weights_left": 36_000,
        "macs_before": 2_293_000,
        "macs_after": 390_000,
        "widths": (9, 18, 25),
        "note": "",
        "seconds": 61.0,
    }
    return AncestorRow(**{**given, **changes})


def test_a_line_shows_every_seed_of_the_last_conditions() -> None:
    rows = [
        row("ours-lenet5", conditions="before"),
        row("ours-lenet5"),
        row("ours-lenet5", 1, error_after=0.0099, macs_after=380_000, widths=(8, 18, 25)),
        row("l0-lenet5", images=100, error_after=0.5),
    ]
    (line,) = sheet(rows).lines
    assert line[:6] == (
        "ours-lenet5",
        "1.0 %",
        "0.90 → 1.23, 0.99 %",
        "9-18-25; 8-18-25",
        "430k → 36.0k",
        "2,293k → 385k",
    )
    assert line[6] == "as asked; seeds 0, 1"
    assert line[7] == clock(61)


def test_names_and_conditions_tell_the_lines_apart() -> None:
    assert len({one.name for one in ANCESTORS}) == len({one.conditions for one in ANCESTORS}) == len(ANCESTORS)
    budget = next(one for one in ANCESTORS if one.name == "ssl-lenet5").budget(1000)
    assert budget.between is not None
    assert budget.between.steps == budget.between.epochs * 8  # 1,000 images in batches of 128


def test_rows_are_made_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling, images = Scaling(255.0, (0.5,), (0.5,)), torch.randint(0, 255, (3, 60, 1, 28, 28), generator=seeded(0))
    train, search, test = (
        Examples(part.to(torch.uint8), torch.arange(60) % 10, scaling, torch.arange(60) + 60 * i)
        for i, part in enumerate(images)
    )
    data = Data("mnist", train, search, test, classes=tuple("0123456789"))
    monkeypatch.setattr(command, "load_mnist", lambda: data)

    def run(*only: str, render: bool = False) -> str:
        command.ancestors(only=only, out=tmp_path / "out", runs=tmp_path / "runs", render=render)
        return capsys.readouterr().out

    assert "maxplus-wins" in run("maxplus-wins", "maxplus-threshold")
    rows = read_rows(tmp_path / "out/rows.jsonl", AncestorRow)
    assert [found.name for found in rows] == ["maxplus-wins", "maxplus-threshold"]
    assert all(found.macs_after < found.macs_before == 144 * 784 for found in rows)

    def never(*args: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(command, "_made", never)
    run("maxplus-wins", "maxplus-threshold")
    assert "maxplus-wins" in run(render=True)
    with pytest.raises(InvalidInput, match=r"no such line\. Did you mean 'l0-lenet5'"):
        command.ancestors(only=("l0-lenet",))


@pytest.mark.realdata
@pytest.mark.slow
def test_han_keeps_the_accuracy_of_lenet300_with_a_twelfth_of_the_weights(tmp_path: Path) -> None:
    """Published: 1.64 → 1.59 % error, 267k → 22k weights. A fifth of a point is the sampling error of 10,000 images."""
    command.ancestors(only=("han-lenet300",), out=tmp_path / "out", runs=tmp_path / "runs")
    (found,) = read_rows(tmp_path / "out/rows.jsonl", AncestorRow)
    assert found.weights_left < 22_100
    assert found.error_after < 0.0159 + 0.003
