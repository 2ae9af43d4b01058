"""Benchmarks that keep rows: other settings make other rows, in folders of their own, and no row is made twice."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from test_methods import data, graph

from secateurs import Graph
from secateurs.data import load_digits, subset
from secateurs.metrics import accuracy
from secateurs_lab.compare.rows import append_row, read_rows

with pytest.MonkeyPatch.context() as path:
    path.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import ensembles, finetuning, finetuning_page, rounds

PLAN = rounds.Plan("small", "l1:uniform", 0.3, 1, 1.0, 0.01, 0, "bfloat16", None)
OTHERS: dict[str, Any] = {
    **{"network": "large", "method": "l1", "target": 0.4, "rounds": 2, "epochs": 2.0, "rate": 0.02, "seed": 1},
    **{"precision": "float32", "examples": 100},
}


class SmallSubject:
    """What benchmarks ask of a network and its data."""

    network = "resnet20"

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


def small_subject(*_: object) -> SmallSubject:
    found = SmallSubject(Path())
    found.data = replace(found.data, test=subset(load_digits().test, 20, seed=0))
    return found


SMALL = [
    *("--networks", "resnet20", "--images", "40", "--validation", "30", "--test", "20", "--curves", "20"),
    *("--shares", "0.3", "--targets", "0.2", "0.3"),
]


def run_ensembles(monkeypatch: pytest.MonkeyPatch, results: Path, *options: str) -> list[Any]:
    """The rows after the command on a small network; the network's name is one that the table knows."""
    monkeypatch.setattr(ensembles, "RESULTS", results)
    monkeypatch.setattr(ensembles, "Subject", small_subject)
    monkeypatch.setattr("sys.argv", ["ensembles", *SMALL, *options])
    assert ensembles.main() == 0
    return ensembles.read_ensembles()


def test_a_second_run_of_ensembles_makes_only_the_rows_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "rows.jsonl"
    slopes = ("loss, signed", "loss, size")
    first = run_ensembles(monkeypatch, results, "--orders", "l1", *slopes, "bonsai", "--off", "0.8")
    made = [(row.order, row.removed, row.share) for row in first]
    filters = [(name, "filters", 0.3) for name in ("l1", *slopes, "bonsai")]
    assert made == [*filters, ("l1", "MACs", 0.2), ("l1", "MACs", 0.3)]
    assert {(row.removed, row.off, row.images) for row in first} == {("filters", 0.8, 40), ("MACs", None, None)}
    results.write_text("".join(line + "\n" for line in results.read_text().splitlines() if '"order": "loss, size"' not in line))
    for dear in ("bonsai", "by_criterion", "method"):
        monkeypatch.setattr(ensembles, dear, None)
    again = run_ensembles(monkeypatch, results, "--orders", "l1", *slopes, "bonsai", "--off", "0.8")
    assert [row.order for row in again] == ["l1", "loss, signed", "bonsai", "l1", "l1", "loss, size"]


def test_seconds_of_an_order_are_those_of_its_slopes_and_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by hand: all slopes take 100 s, the sets of a site 10 s; this network has three sites."""
    clock, slopes, sets = [0.0], ensembles.network_slopes, ensembles.order_by_sets

    def slow_slopes(*given: Any, **options: Any) -> Any:
        clock[0] += 100
        return slopes(*given, **options)

    def slow_sets(each: Any) -> Any:
        clock[0] += 10
        return sets(each)

    monkeypatch.setattr(ensembles, "process_time", lambda: clock[0])
    monkeypatch.setattr(ensembles, "network_slopes", slow_slopes)
    monkeypatch.setattr(ensembles, "order_by_sets", slow_sets)
    rows = run_ensembles(monkeypatch, tmp_path / "rows.jsonl", "--orders", "loss, signed", "loss, size", "loss, sets")
    assert {row.order: row.cpu_seconds for row in rows} == {"loss, signed": 100, "loss, size": 100, "loss, sets": 130}


def test_rows_of_ensembles_made_before_are_read() -> None:
    rows = ensembles.read_ensembles()
    assert {row.network for row in rows} <= set(ensembles.NETWORKS)
    assert {row.order for row in rows} <= set(ensembles.ORDERS)
    assert len({row.case for row in rows}) == len(rows) > 0
    assert "| resnet20 |" in ensembles.rendered()


TRAINED = finetuning.Row(
    network="small",
    start="l1",
    target=0.3,
    loss="cross-entropy",
    batchnorm="live",
    rate=0.01,
    seed=0,
    epochs=1,
    precision="bfloat16",
    examples=None,
    averaged=False,
    macs_removed=0.3,
    validation_before=0.5,
    validation_after=0.8,
    test_before=0.5,
    test_after=0.7,
    test_dense=0.9,
    search_seconds=0.0,
    training_seconds=1.0,
    conditions="",
)
DISTILLED = finetuning_page.Change("", {"loss": "cross-entropy"}, {"loss": "distillation"})


def test_a_change_is_worth_the_difference_of_rows_that_are_alike_otherwise() -> None:
    rows = [TRAINED, replace(TRAINED, loss="distillation", test_after=0.75), replace(TRAINED, rate=0.002, test_after=0.6)]
    rows += [
        replace(TRAINED, start="fpgm", test_after=0.8),
        replace(TRAINED, start="fpgm", loss="distillation", test_after=0.78),
    ]
    found, failed = finetuning_page.gains(rows, DISTILLED)
    assert found == pytest.approx([5.0, -2.0])  # points; the row at 0.002 has no partner
    assert failed == 0


@pytest.mark.parametrize("after", [None, 0.44])
def test_a_training_that_diverges_or_leads_nowhere_is_counted_and_not_averaged(after: float | None) -> None:
    good, bad = TRAINED, replace(TRAINED, loss="distillation", test_after=after)
    assert finetuning_page.gains([good, bad], DISTILLED) == ([], 1)
    back = finetuning_page.Change("", DISTILLED.instead, DISTILLED.given)
    assert finetuning_page.gains([good, bad], back) == ([], 0)  # of what failed nothing is gained


def test_the_validation_set_chooses_the_row_that_is_shown() -> None:
    better = replace(TRAINED, rate=0.002, validation_after=0.82, test_after=0.65)
    table = finetuning_page.chosen_table([TRAINED, better, replace(TRAINED, rate=0.03, validation_after=None, test_after=None)])
    assert "| 50.00 → 82.00 | 50.00 → 65.00 | cross-entropy, live, 0.002, last |" in table


def test_the_tables_of_the_page_are_those_of_the_rows() -> None:
    text = finetuning_page.render(read_rows(finetuning_page.ROWS, finetuning.Row))
    assert text in finetuning_page.PAGE.read_text(), f"write them again: {finetuning_page.COMMAND}"
