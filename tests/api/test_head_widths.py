"""Runs that cut neurons, heads of attention and features within heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import secateurs as sc
from nets import assert_same, run, seeded
from secateurs.errors import InvalidInput

WIDTHS = ["qkv.query_key", "qkv.value"]


class Block(nn.Module):
    """Attention of 4 heads of 6 features, and a hidden layer, both added to what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.qkv, self.proj = nn.Linear(4, 24), nn.Linear(24, 72), nn.Linear(24, 24)
        self.hidden, self.back, self.out = nn.Linear(24, 16), nn.Linear(16, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        q, k, v = self.qkv(x).reshape(x.size(0), -1, 3, 4, 6).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.back(torch.relu(self.hidden(x)))
        logits: Tensor = self.out(x.mean(1))
        return logits


def network() -> nn.Module:
    torch.manual_seed(3)
    return Block().double().eval()


def loaders() -> list[DataLoader[tuple[Tensor, ...]]]:
    """What the network itself answers: no training is needed for it to be right."""
    inputs = torch.randn(144, 5, 4, generator=seeded(1), dtype=torch.float64)
    targets = network()(inputs).argmax(1).detach()
    return [DataLoader(TensorDataset(inputs[rows], targets[rows]), batch_size=48) for rows in (slice(96), slice(96, 144))]


def settings(**changed: Any) -> dict[str, Any]:
    return {"max_drop": 0.5, "confidence": 0.0, "round_to": 1, "head_widths": True} | changed


def removed_masks(result: sc.Result) -> tuple[sc.Graph, dict[str, Tensor]]:
    whole = sc.trace(network(), next(iter(loaders()[0]))[0])
    wide = {cut.site: cut.channels for step in result.plan.steps for cut in step}
    removed = result.plan.removed()
    masks = {name: ~torch.isin(torch.arange(wide[name]), torch.tensor(removed[name])) for name in removed if removed[name]}
    return whole, masks


@pytest.mark.parametrize("allocation", ["sequential", "global"])
def test_one_run_cuts_neurons_heads_and_features(allocation: str) -> None:
    """What is left computes what the user's network does with all that was removed set to zero."""
    targets = {} if allocation == "sequential" else {"target_macs": 0.75}
    recipe = sc.Recipe.fast(criterion="l1", **settings(allocation=allocation, branches=False, largest_share=0.7, **targets))
    result = sc.prune(network(), *loaders(), recipe=recipe, progress=False)
    cut = {step.site: step.noun for step in result.steps if step.removed}
    assert cut.keys() >= {"qkv", "hidden", *WIDTHS}
    assert (cut["qkv"], cut["hidden"], cut["qkv.value"]) == ("heads", "filters", "features")
    whole, masks = removed_masks(result)
    x = torch.randn(3, 5, 4, generator=seeded(2), dtype=torch.float64)
    assert_same(run(result.model, x), run(sc.masked(whole, masks), x))
    heads, (features, values) = masks["qkv"].sum(), (masks[name].sum() for name in WIDTHS)
    layers = dict(result.model.named_modules())
    assert layers["qkv"].out_features == heads * (2 * features + values)
    assert layers["proj"].in_features == heads * values


def test_the_best_recipe_repairs_what_features_leave(tmp_path: Path) -> None:
    """All sites are surveyed, weighed and repaired together; the saved network is the one that was measured."""
    recipe = sc.Recipe.best(repair_examples=64, target_macs=0.3, **settings())
    result = sc.prune(network(), *loaders(), recipe=recipe, progress=False)
    assert result.macs.removed >= 0.3
    assert {step.site for step in result.steps} & set(WIDTHS)
    x = torch.randn(3, 5, 4, generator=seeded(2), dtype=torch.float64)
    path = result.save(tmp_path / "small.safetensors")
    assert_same(run(sc.load(network(), path).module, x), run(result.model, x))


def test_widths_are_asked_for() -> None:
    sites = {
        step.site
        for step in sc.Pruner(network(), *loaders(), recipe=sc.Recipe.fast(criterion="l1", **settings(head_widths=False)))
    }
    assert "qkv" in sites
    assert not sites & set(WIDTHS)
    chosen = sc.Pruner(network(), *loaders(), recipe=sc.Recipe.fast(criterion="l1", **settings(sites=("*.value",))))
    assert [step.site for step in chosen] == ["qkv.value"]
    with pytest.raises(InvalidInput, match="no site has such a name"):
        list(
            sc.Pruner(
                network(), *loaders(), recipe=sc.Recipe.fast(criterion="l1", **settings(head_widths=False, sites=("*.value",)))
            )
        )
