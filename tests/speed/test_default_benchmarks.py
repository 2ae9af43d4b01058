"""The benchmarks of the default call and of the timer: figures from rows by hand, no row made twice, every network there."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from secateurs.speed.timing import SpeedUp
from secateurs_lab.compare.rows import append_row, read_rows

with pytest.MonkeyPatch.context() as path:
    path.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import defaults, defaults_networks, timing


def speed(batch: int, ratio: float, by_macs: float | None = 1.2) -> defaults.Speed:
    over = None if by_macs is None else interval(ratio / by_macs)
    return defaults.Speed(batch, 2.0, interval(ratio), ratio, None if by_macs is None else interval(by_macs), over)


def interval(ratio: float) -> SpeedUp:
    return SpeedUp(ratio, 0.96 * ratio, 1.04 * ratio)


GOOD = defaults.Row(
    *("resnet56", "onnxruntime", 0.01),
    macs_removed=0.4,
    before=0.93,
    after=0.925,
    examples=5000,
    seconds=900.0,
    processor_seconds=200.0,
    printed=(defaults.Printed(64, SpeedUp(1.7, 1.6, 1.8), 0.6), defaults.Printed(1, SpeedUp(1.9, 1.85, 1.95), None)),
    speeds=(speed(1, 1.6), speed(64, 1.75)),
    conditions="a core",
)
BAD = replace(GOOD, network="lenet5", engine="torch", speeds=(speed(1, 0.9), speed(64, 1.1)))
DENSE = defaults.Row(
    *("vit", "torch", 0.01),
    before=0.95,
    after=0.95,
    dense=True,
    why="nothing is faster",
    speeds=(
        defaults.Speed(1, 0.3, None, None, interval(1.1), interval(1 / 1.1)),
        defaults.Speed(64, 3.0, None, None, None, None),
    ),
    conditions="a core",
)
SLOW = defaults.Row("resnet18", "torch", 0.1, error="more than 60 minutes, in phase 'times'", conditions="a core")


def figures(*rows: defaults.Row) -> dict[str, tuple[str, bool | None]]:
    return {one.what.split(",")[0]: (one.now, one.reached) for one in defaults.wanted(rows)}


def test_figures_of_rows_by_hand() -> None:
    found = figures(GOOD, BAD, DENSE, SLOW)
    behind, reached = found["the choice by MACs is faster than the choice by time"]
    assert behind == "3 of 5 cells: lenet5 (torch, batch 1), lenet5 (torch, batch 64), vit (torch, batch 1)"
    assert reached is False
    assert found["slower than dense"] == ("1 of 6 cells: lenet5 (torch, batch 1)", False)
    assert found["median speed at the loader's batch"] == ("1.38x (2 cells)", False)  # 1.75 and the dense network; no MNIST
    assert found["public ResNet-56"] == ("1.60x / 1.75x at 0.50 points", True)
    # 0.6 of the time by prediction, 1 / 1.75 and 1 / 1.1 measured
    assert found["predicted against measured time"] == ("at most 34% (lenet5 (torch)), median 20%", False)
    assert found["printed intervals that hold what was measured afresh"] == ("1 of 4", False)


def test_without_rows_nothing_is_reached_or_missed() -> None:
    assert {reached for _, reached in figures().values()} == {None}
    assert defaults.page([])


def test_rows_are_read_as_they_were_and_the_page_shows_each(tmp_path: Path) -> None:
    rows = [GOOD, BAD, DENSE, SLOW]
    for row in rows:
        append_row(tmp_path / "rows.jsonl", asdict(row))
    assert read_rows(tmp_path / "rows.jsonl", defaults.Row) == rows
    page = defaults.page(rows)
    assert (
        "| resnet56 | cifar10 | onnxruntime | 40% | 93.00 → 92.50 % | 1.60 (1.54 to 1.66) [1.20] | 1.75 (1.68 to 1.82) [1.20] "
        "| 5% | 200 |"
    ) in page
    assert "- vit, torch: the dense network was returned: nothing is faster." in page
    assert "- resnet18, torch: more than 60 minutes, in phase 'times'." in page


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(defaults, "ROWS", tmp_path / "rows.jsonl")
    monkeypatch.setattr(defaults, "RUNS", tmp_path)
    monkeypatch.setattr(defaults_networks, "RUNS", tmp_path)
    yield tmp_path
    sys.modules.pop("mynet", None)


def test_no_row_is_made_twice_and_one_that_failed_only_if_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[tuple[str, str]]()

    def pruned(subject: defaults_networks.Subject, engine: str, *_: Any) -> defaults.Row:
        made.append((subject.name, engine))
        return defaults.Row(subject.name, engine, 0.03, error="" if engine == "none" else "no luck", dense=True)

    monkeypatch.setattr(defaults, "pruned", pruned)
    subject = defaults_networks.SUBJECTS["readme"]

    def make(*engines: str, retry: bool = False) -> list[tuple[str, str]]:
        made.clear()
        defaults.make(subject, engines, 1.0, math.inf, retry=retry)
        return list(made)

    assert make("torch") == [("readme", "none"), ("readme", "torch")]
    (folder / "readme-none.safetensors").touch()
    assert make("torch") == []
    assert make("torch", "onnxruntime") == [("readme", "onnxruntime")]
    assert make("torch", retry=True) == [("readme", "torch")]
    (folder / "readme-none.safetensors").unlink()
    assert make("torch", retry=True) == [("readme", "none"), ("readme", "torch")]
    defaults.make(subject, ["torch"], 1.0, -math.inf, retry=True)
    assert len(made) == 2


def test_a_search_that_takes_too_long_says_where_it_was(folder: Path) -> None:
    subject = defaults_networks.SUBJECTS["readme"]
    row = defaults.pruned(subject, "none", *subject.ready(), 0.0)
    assert row.error.startswith("more than 0 minutes, in phase '")


def test_the_second_way_to_measure_finds_the_ratio_on_a_clock_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third call meets a slice of another process."""
    now, calls = [0.0], [0]
    monkeypatch.setattr(defaults, "perf_counter", lambda: now[0])

    def load(seconds: float) -> Any:
        def run() -> float:
            calls[0] += 1
            now[0] += seconds + (0.012 if calls[0] % 3 == 0 else 0.0)
            return 0.0

        return lambda: run

    assert defaults.in_blocks(load(0.003), load(0.002)) == pytest.approx(1.5)


def test_there_are_the_networks_that_the_table_is_about() -> None:
    subjects = defaults_networks.SUBJECTS
    assert len(subjects) >= 16
    for name in ("readme", "lstm", "unet", "mobilenet-small", "densenet-small", "vit", "lenet5", "resnet8-mnist"):
        images = torch.rand(2, 1, 28, 28) if subjects[name].kind == "mnist" else torch.rand(2, 1, 8, 8)
        outputs = subjects[name].build().eval()(images)
        assert outputs.shape[:2] == (2, 3 if name == "unet" else 10)
        again = subjects[name].build().state_dict()
        assert all(torch.equal(tensor, again[key]) for key, tensor in subjects[name].build().state_dict().items())


def test_the_network_and_training_of_the_tutorial_are_those_of_its_page(folder: Path) -> None:
    model, loaders = defaults_networks.SUBJECTS["tutorial"].ready()
    images, labels = next(iter(loaders.test))
    with torch.no_grad():
        assert (model(images).argmax(1) == labels).float().mean() > 0.85


def test_without_timm_it_is_said_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(defaults_networks.NotInstalled, match=r"`make test-integrations` .* --networks resnet18"):
        defaults_networks.SUBJECTS["resnet18"].ready()


# ---- benchmarks.timing -------------------------------------------------------------------------------------------------------


def test_busy_processes_are_one_to_eight_of_both_kinds_on_all_cores() -> None:
    drawn = [timing.mixture(number, 1, range(4)) for number in range(40)]
    assert sorted({len(each) for each in drawn}) == list(range(1, 9))
    assert {one.core for each in drawn for one in each} == {0, 1, 2, 3}
    assert {one.kind for each in drawn for one in each} == set(timing.BUSY)
    assert drawn == [timing.mixture(number, 1, range(4)) for number in range(40)]


def test_busy_processes_end_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    started, popen = list[Any](), timing.subprocess.Popen

    def keep(*given: Any, **options: Any) -> Any:
        started.append(popen(*given, **options))
        return started[-1]

    monkeypatch.setattr(timing.subprocess, "Popen", keep)
    monkeypatch.setitem(timing.BUSY, "sleeps", "import time\ntime.sleep(600)")
    with timing.running([timing.Beside("sleeps", max(timing.os.sched_getaffinity(0)))] * 2):
        assert [process.poll() for process in started] == [None, None]
    assert all(process.poll() is not None for process in started)


def test_a_comparison_is_right_if_it_holds_the_figure_or_says_that_it_does_not_know(tmp_path: Path) -> None:
    def said(low: float, high: float) -> timing.Comparison:
        return timing.Comparison(3, 1, 2, (low + high) / 2, low, high, "other processes used 1.8 of 2 cores", 1.0)

    comparisons = (said(1.4, 1.6), said(1.52, 1.6), said(1.6, 2.4), said(1.45, 1.5))
    row = timing.Row("torch", 1, (0.9, 0.6), (1.48, 1.5, 1.51), comparisons, "", "a core")
    assert (row.reference, row.coverage, row.too_busy) == (1.5, 0.75, 0.25)
    append_row(tmp_path / "rows.jsonl", asdict(row))
    assert read_rows(tmp_path / "rows.jsonl", timing.Row) == [row]
    assert "| torch | 1 | 0.90 → 0.60 | 1.50x (1.48 to 1.51) | 75% | 25% | 1.05 |" in timing.page([row])
