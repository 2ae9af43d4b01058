"""The bound of a result is about the network that it holds: after its training, and over all sites."""

from __future__ import annotations

from pathlib import Path

import torch
from digit_loaders import digits, loaders, right, trained
from torch import nn

import secateurs as sc


def forget_threes(model: nn.Module) -> None:
    """Train so badly that a tenth of the answers is lost."""
    last = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        last.bias[3] -= 1000


def test_the_bound_holds_for_the_network_after_their_training(tmp_path: Path) -> None:
    recipe = sc.Recipe.fast(max_drop=0.3, criterion="l1", sites=("0",), largest_share=0.1, round_to=1, keep_best=False)
    alone = sc.prune(trained(), *loaders(), recipe=recipe, progress=False)
    result = sc.prune(trained(), *loaders(), recipe=recipe, finetune=forget_threes, folder=tmp_path / "run", progress=False)
    lost = right(trained(), digits()[1]) - right(result.model, digits()[1])
    assert lost > 0.08
    assert alone.bound is not None
    assert alone.bound < lost  # the cut alone costs little
    assert result.bound is not None
    assert lost < result.bound <= 0.3
    assert f"at most {100 * result.bound:.2f} points" in str(result)
    promise = (tmp_path / "run/report.html").read_text().split(">Promise<")[1][:200]
    assert f"at most −{100 * result.bound:.1f}" in promise or f"at most −{100 * result.bound:.2f}" in promise


def test_a_budget_for_every_site_promises_nothing_about_all_of_them() -> None:
    recipe = sc.Recipe.fast(max_drop=0.1, criterion="l1", budget="site")
    result = sc.prune(trained(), *loaders(), recipe=recipe, progress=False)
    assert sum(bool(step.removed) for step in result.steps) == 2
    assert all(step.bound is not None for step in result.steps)
    assert result.bound is None
    assert "no site costs more than 10.00 points; nothing is promised about all of them together" in str(result)
