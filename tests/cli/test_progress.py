"""What a command shows while it works: plain lines, bars, and the time that is left."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from secateurs.cli import progress
from secateurs.config import (
    Recipe,
)
from secateurs.pruning.results import Progress, TriedNetwork


def plain_screen(every: float, clock: Callable[[], float] = time.monotonic) -> tuple[progress.Screen, io.StringIO]:
    said = io.StringIO()
    return progress.Screen(Console(file=said, width=160, _environ={}), every, clock), said


def test_without_a_terminal_progress_is_printed_at_intervals() -> None:
    status = progress.Status("site 1 of 2, a", "scoring masks", 5, 10, "accuracy 97.00 %")
    screen, said = plain_screen(every=1000)
    screen.update(status)
    assert said.getvalue() == ""
    screen, said = plain_screen(every=0)
    screen.update(status)
    assert said.getvalue() == "site 1 of 2, a: scoring masks 5 of 10; accuracy 97.00 %\n"


def test_the_time_left_is_that_of_the_whole_run_and_falls_between_events() -> None:
    now = [0.0]
    screen, said = plain_screen(every=30, clock=lambda: now[0])
    status = progress.Status("All sites together", "weighing the cuts of all sites", 0, 1, left=300.0)
    screen.update(status)
    told = []
    for now[0] in (0.0, 100.0, 200.0, 290.0, 1800.0):
        told.append(screen.time_left(status))
    assert told[:3] == ["about 5 min 00 s left in all", "about 3 min 20 s left in all", "about 1 min 40 s left in all"]
    assert told[4] == "about 7 min 30 s left in all"  # it is late, and says no "about 5 s"
    screen.update(status)
    assert said.getvalue() == "All sites together: weighing the cuts of all sites; about 5 min 00 s left in all\n"
    assert screen.time_left(progress.Status("Training", "optimiser steps", 1, 100)) == ""


def test_a_terminal_shows_a_bar_with_site_accuracy_and_macs() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120, _environ={})
    screen = progress.Screen(console)
    watcher = progress.RunWatcher(screen, Recipe.fast(rounds=2), [a_step()])
    watcher.watch(Progress("score", 5, 10, "layer2.0.conv1", number=4, sites=7, left=3600.0))
    console.print(screen.render())
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    for part in ("round 1 of at most 2, site 4 of 7, layer2.0.conv1", "accuracy 97.00 %", "12.5 % of the MACs", "about 1 h 00"):
        assert part in text
    assert re.search(r"scoring masks +[━╸╺]+ +5/10 ", text)


def test_between_cuts_that_are_made_together_no_accuracy_is_shown() -> None:
    """0.20 on the way to 0.57 says nothing of the network; those that are tried as a whole are shown with what they save."""
    shown = io.StringIO()
    screen = progress.Screen(Console(file=shown, width=200, _environ={}), every=0)
    watcher = progress.RunWatcher(screen, Recipe(), metric="macro_recall")
    tried = TriedNetwork(0.4, "time", 0.9123, accepted=True)
    watcher.watch(Progress("divide", 1, 8, left=60.0, tried=tried))
    for done, site in enumerate(("conv1", "conv2")):
        watcher.watch(Progress("cut", done, 2, site, number=done + 1, sites=2, tried=tried))
        watcher.step(a_step(site, 0.2 if site == "conv1" else 0.57))
    text = shown.getvalue()
    assert (
        "the network with 40 % of the time saved: macro_recall 0.9123, within the allowed drop; about 1 min 00 s left" in text
    )
    assert "conv1: 16 → 8 filters; removed 25.0 % of the parameters" in text
    assert "conv2: 16 → 8 filters; macro_recall 0.57, removed" in text
    assert "0.2," not in text


def a_step(site: str = "a", accuracy: float = 0.97) -> Any:
    shares = {"parameters_removed": 0.25, "macs_removed": 0.125}
    return SimpleNamespace(site=site, accuracy=accuracy, channels=16, kept=8, noun="filters", round=0, seconds=1.0, **shares)
