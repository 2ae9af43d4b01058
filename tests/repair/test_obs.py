"""Optimal Brain Surgeon for whole filters: equals greedy elimination by brute force, where every candidate is refitted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nets import seeded
from secateurs.errors import InvalidInput
from secateurs.repair.obs import Quadratic, obs_order

CHANNELS = 5


def refitted_error(features: np.ndarray, weight: np.ndarray, removed: np.ndarray) -> float:
    """What is left of the layer's output when the features in `removed` are dropped and the others refitted, by lstsq."""
    wanted = features @ weight
    if removed.all():
        return float((wanted**2).sum())
    fitted, *_ = np.linalg.lstsq(features[:, ~removed], wanted, rcond=None)
    return float(((features[:, ~removed] @ fitted - wanted) ** 2).sum())


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), layers=st.integers(0, 3))
def test_obs_is_greedy_elimination_by_brute_force(seed: int, layers: int) -> None:
    random = np.random.default_rng(seed)
    problems = []
    for _ in range(layers):  # filters with none, one or several features, and some features that stay
        source = random.permutation(np.concatenate([random.integers(-1, CHANNELS, 9), [-1]]))
        mixed = random.normal(size=(60, 10)) @ random.normal(size=(10, 10))
        problems.append((mixed, random.normal(size=(10, 3)), source))
    alone = random.uniform(0, 20, CHANNELS)
    quadratics = [Quadratic(*map(torch.from_numpy, (x.T @ x, w, source))) for x, w, source in problems]
    found = obs_order(quadratics, CHANNELS, alone=torch.from_numpy(alone))
    removed: list[int] = []
    error = 0.0
    for step in range(CHANNELS):
        costs = {}
        for c in set(range(CHANNELS)) - set(removed):
            out = [*removed, c]
            costs[c] = alone[out].sum() + sum(refitted_error(x, w, np.isin(source, out)) for x, w, source in problems)
        best = min(costs, key=costs.__getitem__)
        assert int(found.order[step]) == best
        assert float(found.increases[step]) == pytest.approx(costs[best] - error, rel=1e-6, abs=1e-8)
        error = costs[best]
        removed.append(best)


def test_a_duplicate_is_removed_first_and_its_twin_then_counts_for_both() -> None:
    x = torch.randn(50, 3, generator=seeded(0), dtype=torch.float64)
    x[:, 2] = 2 * x[:, 0]
    gram = x.T @ x + 1e-9 * torch.eye(3)
    weight = torch.tensor([[1.0], [0.3], [1.0]], dtype=torch.float64)
    found = obs_order([Quadratic(gram, weight, torch.arange(3))], 3)
    assert int(found.order[0]) in (0, 2)
    assert float(found.increases[0]) == pytest.approx(0.0, abs=1e-6)
    assert int(found.order[1]) == 1


def test_wrong_shapes_are_named() -> None:
    gram, weight = torch.eye(3), torch.ones(3, 1)
    with pytest.raises(InvalidInput, match=r"gram of shape \(3, 3\) .* for 2 features: wanted \(2, 2\)"):
        obs_order([Quadratic(gram, weight, torch.arange(2))], 2)
    with pytest.raises(InvalidInput, match=r"features come from filters -1 .* to 1, got"):
        obs_order([Quadratic(gram, weight, torch.arange(3))], 2)
