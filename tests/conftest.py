"""One thread for every test: small tensors gain nothing by more, and results do not depend on the machine's cores."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are checked here and not in a new process, which takes seconds to import torch."""
    from nets import run_exported
    from secateurs.export import programs, source

    for module in (programs, source):
        monkeypatch.setattr(module, "run_fresh", run_exported)


@pytest.fixture(autouse=True)
def multiples_of_eight(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Which widths run well is not measured, so that tests do the same on every machine; no times are kept for later runs."""
    from secateurs.pruning import context, latency_tables

    monkeypatch.setattr(context, "preferred_multiple", lambda *given: 8)
    monkeypatch.setattr(latency_tables, "home", lambda: tmp_path_factory.getbasetemp() / "home")
