"""Benchmarks that keep rows: other settings make other rows, in folders of their own, and no row is made twice."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import rounds
from test_methods import data, graph

from secateurs import Graph
from secateurs.methods.compare.rows import append_row, read_rows
from secateurs.metrics import accuracy

PLAN = rounds.Plan("small", "l1:uniform", 0.3, 1, 1.0, 0.01, 0, "bfloat16", None)
OTHERS: dict[str, Any] = {
    **{"network": "large", "method": "l1", "target": 0.4, "rounds": 2, "epochs": 2.0, "rate": 0.02, "seed": 1},
    **{"precision": "float32", "examples": 100},
}


class SmallSubject:
    """What `rounds.run` asks of a network and its data."""

    def __init__(self, runs: Path) -> None:
        self.graph, self.data, self.runs = graph(), data(), runs

    def accuracies(self, network: Graph) -> tuple[float, float]:
        found = accuracy(network.module, self.data.search)
        return found, found

    def before(self, *start: object) -> tuple[float, float]:
        return 1.0, 1.0


def test_rounds_of_every_plan_have_a_folder_of_their_own() -> None:
    assert set(OTHERS) == set(rounds.Plan.__dataclass_fields__)
    plans = [PLAN, *(replace(PLAN, **{name: value}) for name, value in OTHERS.items())]
    assert len({plan.folder for plan in plans}) == len(plans)


def test_rounds_in_another_precision_are_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, train_ = list[str](), rounds.train_

    def seen(module: Any, examples: Any, settings: Any, **options: Any) -> Any:
        trained.append(settings.precision)
        return train_(module, examples, replace(settings, augment="none", precision="float32"), **options)

    monkeypatch.setattr(rounds, "train_", seen)
    subject: Any = SmallSubject(tmp_path)
    for plan in (PLAN, replace(PLAN, precision="float32"), PLAN):
        assert rounds.run(subject, plan).plan == plan
    assert trained == ["bfloat16", "float32"]


def test_the_table_of_rounds_shows_what_differs(tmp_path: Path) -> None:
    row = rounds.Row(**asdict(PLAN), macs_removed=0.31, steps=5, validation_after=0.9, test_after=0.88, test_dense=0.91,
                     search_seconds=2.0, training_seconds=3.0, conditions="a core")  # fmt: skip
    for name, value in OTHERS.items():
        lines = rounds.table([row, replace(row, **{name: value})]).splitlines()[2:]
        assert len(lines) == (1 if name == "seed" else 2), name
        assert len(set(lines)) == len(lines), name
    append_row(tmp_path / "rows.jsonl", asdict(row))
    (again,) = read_rows(tmp_path / "rows.jsonl", rounds.Row)
    assert again == row
    assert rounds.table([again]).splitlines()[2] == (
        "| small | 30% | l1:uniform | 1 | 0.01 | bfloat16 | 1 | 1 | 90.00 | 88.00 | 2 | 3 |"
    )
