"""One thread for every test: small tensors gain nothing by more, and results do not depend on the machine's cores."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from secateurs import config, criteria

torch.set_num_threads(1)
gc.set_threshold(20_000, 20, 20)  # looking for garbage at every 700 objects would take a twentieth of the time


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are checked here and not in a new process, which takes seconds to import torch."""
    from nets import run_exported
    from secateurs.export import deliver

    monkeypatch.setattr(deliver, "run_fresh", run_exported)


@pytest.fixture
def own_criteria() -> Iterator[None]:
    """Criteria that a test registers are gone after it."""
    tables: list[Any] = [criteria._REGISTRY, criteria._OWN, criteria._FUNCTIONS]
    known, names = [dict(table) for table in tables], list(config.CRITERIA)
    yield
    for table, before in zip(tables, known, strict=True):
        table.clear()
        table.update(before)
    config.CRITERIA[:] = names


@pytest.fixture(autouse=True)
def multiples_of_eight(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Which widths run well is not measured, so that tests do the same on every machine; no times are kept for later runs.

    Where no engine is named, time is told by MACs. The speed of a result is measured in few rounds.
    """
    from engines import with_known_times
    from secateurs import api
    from secateurs.pruning import context, speeds
    from secateurs.speed import tables

    monkeypatch.setattr(speeds, "FINAL_ROUNDS", (3, 3))
    monkeypatch.setattr(context, "preferred_multiple", lambda *given: 8)
    monkeypatch.setattr(api, "engine_for", with_known_times(api.engine_for))
    monkeypatch.setattr(tables, "home", lambda: tmp_path_factory.getbasetemp() / "home")
