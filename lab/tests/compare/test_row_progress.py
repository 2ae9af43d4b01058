"""What a comparison shows while it works."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from secateurs.report.progress import Screen
from secateurs_lab.compare.progress import RowWatcher
from secateurs_lab.compare.run import entries
from secateurs_lab.methods.base import Budget


def test_the_time_left_of_a_comparison_is_that_of_its_missing_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    screen = Screen(Console(file=io.StringIO()), every=1000)
    left = entries(["a", "b"], [Budget("none"), Budget("short")], [0.1], [0])
    known = [SimpleNamespace(budget_name="none", search_seconds=20.0, training_seconds=0.0)]
    watcher = RowWatcher(screen, left, known)  # type: ignore[arg-type]
    assert watcher.time_left() == ""  # how long training takes is not known
    trained = SimpleNamespace(budget_name="short", search_seconds=20.0, training_seconds=40.0)
    watcher = RowWatcher(screen, left, [*known, trained])  # type: ignore[list-item]
    assert watcher.time_left() == "roughly 2 min 40 s left"
    now[0] = 15.0
    assert watcher.time_left() == "roughly 2 min 25 s left"
    now[0] = 500.0
    assert watcher.time_left() == "roughly 2 min 20 s left"  # the first takes longer than others did
