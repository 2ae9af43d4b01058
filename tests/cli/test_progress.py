"""What a command shows while it works: plain lines, bars, and the time that is left."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from secateurs.cli import progress
from secateurs.config import (
    Recipe,
)
from secateurs.methods.base import Budget
from secateurs.methods.compare.run import entries
from secateurs.pruning.results import Progress


def plain_screen(every: float, clock: Callable[[], float] = time.monotonic) -> tuple[progress.Screen, io.StringIO]:
    said = io.StringIO()
    screen = progress.Screen(Console(file=said, width=160, _environ={}), every=every)
    screen.bars.get_time = clock
    return screen, said


def test_without_a_terminal_progress_is_printed_at_intervals() -> None:
    status = progress.Status("site 1 of 2, a", "scoring masks", 5, 10, "accuracy 97.00 %")
    screen, said = plain_screen(every=1000)
    screen.update(status)
    assert said.getvalue() == ""
    screen, said = plain_screen(every=0)
    screen.update(status)
    assert said.getvalue() == "site 1 of 2, a: scoring masks 5 of 10; accuracy 97.00 %\n"


def test_the_time_left_is_that_of_the_sites_of_this_round() -> None:
    now = [0.0]
    screen, _ = plain_screen(every=1000, clock=lambda: now[0])

    def at(seconds: float, done: int) -> str:
        now[0] = seconds
        status = progress.Status("a", "scoring masks", 1, 2, overall=(done, 5))
        screen.update(status)
        return screen.time_left(status)

    assert (at(0, 0), at(10, 1)) == ("", "")  # one site gives no speed: it may have begun before
    assert at(20, 2) == "about 30 s left in this round"  # 10 s a site, three to come
    assert at(50, 3) == "about 40 s left in this round"  # 20 s a site, two to come
    assert at(60, 0) == ""  # the next round
    training = progress.Status("t", "optimiser steps", 1, 100)
    screen.update(training)
    assert screen.time_left(training) == ""
    for seconds in (61, 62):
        now[0] = seconds
        training = progress.Status("t", "optimiser steps", 10 * (seconds - 60), 100)
        screen.update(training)
    assert screen.time_left(training) == "about 8 s left"


def test_a_terminal_shows_bars_with_site_accuracy_and_macs() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, _environ={})
    screen = progress.Screen(console)
    watcher = progress.RunWatcher(screen, Recipe.fast(rounds=2), [a_step()])
    watcher.watch(Progress("score", 5, 10, "layer2.0.conv1", number=4, sites=7))
    console.print(screen.render())
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    for part in ("round 1 of at most 2, site 4 of 7, layer2.0.conv1", "accuracy 97.00 %", "12.5 % of the MACs"):
        assert part in text
    assert re.search(r"sites of this round [━╸╺]+ +3/7 ", text)
    assert re.search(r"scoring masks +[━╸╺]+ +5/10 ", text)


def test_the_time_left_of_a_comparison_is_that_of_its_missing_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    left = entries(["a", "b"], [Budget("none"), Budget("short")], [0.1], [0])
    known = [SimpleNamespace(budget_name="none", search_seconds=20.0, training_seconds=0.0)]
    watcher = progress.RowWatcher(plain_screen(every=1000)[0], left, known)  # type: ignore[arg-type]
    assert watcher.time_left() == ""  # how long training takes is not known
    trained = SimpleNamespace(budget_name="short", search_seconds=20.0, training_seconds=40.0)
    watcher = progress.RowWatcher(plain_screen(every=1000)[0], left, [*known, trained])  # type: ignore[list-item]
    assert watcher.time_left() == "roughly 2 min 40 s left"
    now[0] = 15.0
    assert watcher.time_left() == "roughly 2 min 25 s left"
    now[0] = 500.0
    assert watcher.time_left() == "roughly 2 min 20 s left"  # the first takes longer than others did


def a_step() -> Any:
    return SimpleNamespace(accuracy=0.97, parameters_removed=0.25, macs_removed=0.125)
