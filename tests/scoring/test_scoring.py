"""Scoring a site: the paper's procedure, rounds that stop when they have converged, and nothing measured twice."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nets import seeded
from secateurs import Graph, Site, find_sites, fit_importance, sample_masks, score_masks, scores, trace
from secateurs.config import FAST, PAPER, Scoring
from secateurs.data import Examples, load_cifar10, subset
from secateurs.data.dataset import derive, generator_for
from secateurs.errors import InvalidInput
from secateurs.metrics import cross_entropy
from secateurs.models import example_input, load_public
from secateurs.scoring import EnsembleResult, score_site
from secateurs.scoring.cache import MeasurementCache
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import Importance, rank_correlation

CHANNELS = 12
LOSSES = Scoring(estimator="losses", masks_per_filter=20, design="balanced", examples=64)


@pytest.fixture(scope="module")
def problem() -> tuple[Graph, Site, Examples]:
    """A small network whose hidden neurons have planted worths, and examples that it labels itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, CHANNELS), nn.ReLU(), nn.Linear(CHANNELS, 3)).eval()
    with torch.no_grad():
        model[2].weight.mul_(torch.linspace(0.05, 4, CHANNELS))  # type: ignore[operator]  # worth more and more
    inputs = torch.randn(900, 6, generator=seeded(1))
    with torch.no_grad():
        labels = model(inputs).argmax(1)
    graph = trace(model, inputs[:2])
    return graph, find_sites(graph)[0], Examples(inputs, labels)


@pytest.fixture(scope="module")
def whole(problem: tuple[Graph, Site, Examples]) -> Importance:
    """What many masks on all examples find."""
    found = scored(*problem, replace(PAPER, masks_per_filter=60)).importance
    assert isinstance(found, Importance)
    return found


def same(one: EnsembleResult, other: EnsembleResult) -> bool:
    assert isinstance(one.importance, Importance)
    assert isinstance(other.importance, Importance)
    tensors = [(s.importance.coef, s.ensemble.masks, s.ensemble.losses) for s in (one, other)]  # type: ignore[union-attr]
    return one.note == other.note and all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


def scored(
    graph: Graph, site: Site, pool: Examples, scoring: Scoring, *, store: MeasurementCache | None = None, **options: Any
) -> EnsembleResult:
    """Score a site, in a store of its own unless one is given."""
    evaluator = SiteEvaluator(graph, site) if store is None else SiteEvaluator(graph, site, store=store)
    return score_site(evaluator, pool, scoring, **options)


class Counting(MeasurementCache):
    """A cache that counts what it stores, and may be interrupted after `breaks_after` times."""

    def __init__(self, path: Path | None = None, *, breaks_after: float = math.inf) -> None:
        super().__init__(path)
        self.puts, self.breaks_after = 0, breaks_after

    def put(self, context: str, keys: list[bytes], values: list[Tensor]) -> None:  # type: ignore[override]
        if self.puts >= self.breaks_after:
            raise KeyboardInterrupt
        self.puts += 1
        super().put(context, keys, values)


def test_paper_is_the_fixed_procedure(problem: tuple[Graph, Site, Examples]) -> None:
    graph, site, pool = problem
    masks = sample_masks(CHANNELS, 120, off=0.3, design="exact", generator=generator_for(7, "masks", 3))
    wanted = score_masks(graph, site, masks, pool)
    found = scored(graph, site, pool, PAPER, seed=7, step=3)
    assert torch.equal(found.ensemble.masks, masks)
    torch.testing.assert_close(found.ensemble.losses, wanted.losses, rtol=1e-6, atol=0)
    assert isinstance(found.importance, Importance)
    assert torch.equal(found.importance.coef, fit_importance(masks, scores(found.ensemble.losses)).coef)
    assert (found.used, found.bound, found.examples, found.stable, found.note) == (120, 120, 900, None, "120 masks")


def test_a_fixed_number_of_examples_is_the_stratified_subset(problem: tuple[Graph, Site, Examples]) -> None:
    graph, site, pool = problem
    found = scored(graph, site, pool, replace(PAPER, examples=100, masks=10), seed=7)
    chosen = subset(pool, 100, seed=derive(7, "scoring"))
    wanted = score_masks(graph, site, found.ensemble.masks, chosen).losses
    torch.testing.assert_close(found.ensemble.losses, wanted, rtol=1e-6, atol=0)


def test_transforms_are_those_of_importance(problem: tuple[Graph, Site, Examples]) -> None:
    graph, site, pool = problem
    found = scored(graph, site, pool, replace(PAPER, transform="log", ridge=1e-3, examples=64))
    wanted = fit_importance(found.ensemble.masks, scores(found.ensemble.losses, "log"), ridge=1e-3)
    assert torch.equal(found.importance.coef, wanted.coef)


@pytest.mark.parametrize(
    "scoring", [FAST, replace(LOSSES, examples=400), replace(LOSSES, examples=None)], ids=["fast", "losses", "noise"]
)
def test_adaptive_ensembles_find_the_order_of_the_whole_and_stop(
    problem: tuple[Graph, Site, Examples], whole: Importance, scoring: Scoring
) -> None:
    graph, site, pool = problem
    found = scored(graph, site, pool, scoring, seed=3)
    assert isinstance(found.importance, Importance)
    assert rank_correlation(whole.coef, found.importance.coef) > 0.9
    assert found.stable
    assert found.used < found.bound
    assert found.note == f"stable after {found.used:,} of {found.bound:,} masks"


@pytest.mark.parametrize("scoring", [FAST, LOSSES], ids=["fast", "losses"])
def test_an_ensemble_that_never_converges_uses_all_masks_and_says_so(
    problem: tuple[Graph, Site, Examples], scoring: Scoring
) -> None:
    graph, site, pool = problem
    blind = replace(pool, targets=torch.randint(3, (len(pool),), generator=seeded(2)))
    found = scored(graph, site, blind, replace(scoring, agreement=1.0, masks=300))
    assert (found.used, found.bound, found.stable) == (300, 300, False)
    assert found.note == "not stable after 300 of 300 masks"


@pytest.mark.parametrize(
    "scoring", [FAST, replace(LOSSES, masks=90), replace(PAPER, examples=64)], ids=["fast", "losses", "paper"]
)
def test_an_interrupted_ensemble_ends_the_same_and_nothing_is_measured_twice(
    problem: tuple[Graph, Site, Examples], scoring: Scoring, tmp_path: Path
) -> None:
    graph, site, pool = problem
    counted = Counting()
    whole = scored(graph, site, pool, scoring, seed=5, store=counted)
    for stop in sorted({0, 1, counted.puts // 2, counted.puts - 1}):
        path = tmp_path / f"{stop}.sqlite"
        with pytest.raises(KeyboardInterrupt):
            scored(graph, site, pool, scoring, seed=5, store=Counting(path, breaks_after=stop))
        assert same(whole, scored(graph, site, pool, scoring, seed=5, store=MeasurementCache(path)))
        again = Counting(path, breaks_after=0)
        assert same(whole, scored(graph, site, pool, scoring, seed=5, store=again))


def test_other_weights_examples_or_losses_are_measured_again(problem: tuple[Graph, Site, Examples]) -> None:
    graph, site, pool = problem
    masks = sample_masks(CHANNELS, 4, generator=seeded(0))

    def sharper(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(3 * outputs, targets)

    other = trace(nn.Sequential(nn.Linear(6, CHANNELS), nn.ReLU(), nn.Linear(CHANNELS, 3)).eval(), torch.randn(2, 6))
    store = MeasurementCache()
    few, more = pool.take(torch.arange(40)), pool.take(torch.arange(40, 80))
    evaluators = [
        (SiteEvaluator(graph, site, cross_entropy, store), few),
        (SiteEvaluator(graph, site, cross_entropy, store), more),
    ]
    evaluators += [(SiteEvaluator(graph, site, sharper, store), few), (SiteEvaluator(other, site, cross_entropy, store), few)]
    found = [evaluator.on(examples).means(masks) for evaluator, examples in evaluators]
    fresh = [score_masks(b.graph, b.site, masks, examples, loss_fn=b.measure).losses for b, examples in evaluators]
    for one, wanted in zip(found, fresh, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-6, atol=0)


def test_slopes_are_those_of_autograd(problem: tuple[Graph, Site, Examples]) -> None:
    graph, site, pool = problem
    few, turns = pool.take(torch.arange(30)), [sample_masks(CHANNELS, 30, generator=seeded(seed)) for seed in (0, 1)]
    losses, slopes = SiteEvaluator(graph, site, cross_entropy, MeasurementCache(), batch=7).on(few).slopes(turns)
    hidden, last = graph.module.get_submodule("0"), graph.module.get_submodule("2")
    for turn, masks in enumerate(turns):
        z = masks.float().requires_grad_()
        wanted = cross_entropy(last(hidden(few.inputs).relu() * z), few.targets)
        torch.testing.assert_close(losses[turn], wanted.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(slopes[turn], torch.autograd.grad(wanted.sum(), z)[0], rtol=1e-4, atol=1e-6)


def test_progress_counts_up_to_what_was_used(problem: tuple[Graph, Site, Examples]) -> None:
    graph, site, pool = problem
    for scoring in (FAST, LOSSES, replace(PAPER, examples=64)):
        seen: list[tuple[int, int]] = []
        found = scored(graph, site, pool, scoring, on_scored=lambda done, bound, into=seen: into.append((done, bound)))  # type: ignore[misc]
        assert [done for done, _ in seen] == sorted({done for done, _ in seen})
        assert seen[-1] == (found.used, found.bound)


def test_a_small_pool_gives_its_examples_more_masks(problem: tuple[Graph, Site, Examples]) -> None:
    graph, site, pool = problem
    found = scored(graph, site, pool.take(torch.arange(20)), replace(FAST, adaptive=False, masks=400))
    assert (found.examples, found.used, found.stable) == (20, 400, None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"estimator": "gradients"}, "Did you mean 'gradient'"),
        ({"transform": "log"}, "belong to estimator='losses'"),
        ({"examples": 1}, "examples = 1: wanted 2 to"),
        ({"agreement": 0.0}, "agreement = 0.0: wanted a number above 0 and at most 1"),
        ({"masks": 3}, "masks = 3: wanted 4 to"),
        ({"design": "balance"}, "Did you mean 'balanced'"),
    ],
)
def test_wrong_settings_are_explained(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Scoring(**wrong)  # type: ignore[arg-type]


@pytest.mark.realdata
def test_fast_is_as_reliable_as_the_paper_at_a_twentieth_of_its_cost() -> None:
    graph = trace(load_public(20), example_input("resnet20"))
    site = next(site for site in find_sites(graph) if site.name == "layer3.2.conv1")
    found = scored(graph, site, load_cifar10("public", download=False).train, FAST)
    assert isinstance(found.importance, Importance)
    assert found.stable
    # a gradient pass takes the time of 2.4 forward ones; the paper's 640 masks on 2,048 images have a split-half of 0.40
    assert 2.4 * found.used < 640 * 2048 / 20
    assert found.importance.split_half > 0.6
