"""One thread for every test: small tensors gain nothing by more, and results do not depend on the machine's cores."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are checked here and not in a new process, which takes seconds to import torch."""
    from nets import run_exported
    from secateurs.export import deliver

    monkeypatch.setattr(deliver, "run_fresh", run_exported)
