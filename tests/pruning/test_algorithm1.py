"""Whole runs against plain arithmetic: Algorithm 1 written out, the promise on other images, who won, what a file holds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import randomise_, seeded
from secateurs import load, replay, trace
from secateurs._util.tensors import parse
from secateurs.api import Pruner
from secateurs.config import Recipe
from secateurs.data import Data, Examples
from secateurs.data import load as load_data
from secateurs.data.dataset import derive
from secateurs.data.splits import subset
from secateurs.errors import InvalidInput
from secateurs.graph.plan import Plan
from secateurs.graph.sites import find_sites
from secateurs.metrics import correct, cross_entropy, evaluate
from secateurs.models import build
from secateurs.pruning.context import PruningContext, Runtime
from secateurs.pruning.figures import RunResult
from secateurs.pruning.measure import CERTIFYING
from secateurs.pruning.results import ChosenAllocation, Step
from secateurs.scoring.cache import MeasurementCache
from secateurs.scoring.engine import MaskedNetwork
from secateurs.selection.contract import divide_images, paired_bound

WIDTHS = (12, 10)


class Plain(nn.Module):
    """Three linear layers with ReLUs between, without anything that hides what a neuron does."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Flatten()
        self.one, self.two, self.three = nn.Linear(64, WIDTHS[0]), nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Linear(WIDTHS[1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(F.relu(self.one(self.flat(x))))
        return self.three(F.relu(x))


@pytest.fixture(scope="module")
def data() -> Data:
    return load_data("digits")


@pytest.fixture(scope="module")
def trained(data: Data) -> Plain:
    """About 94 % right."""
    torch.manual_seed(0)
    model = Plain()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for number in range(150):
        x, y = data.train.batch(torch.arange(128 * number, 128 * (number + 1)) % len(data.train))
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[arg-type, no-untyped-call]
        optimiser.step()
    return model.eval()


# ---- the paper's procedure -------------------------------------------------------------------------------------------


class ByHand:
    """The network as plain matrices, whose neurons can be switched off or taken out."""

    def __init__(self, model: Plain) -> None:
        pairs = [(layer.weight, layer.bias) for layer in (model.one, model.two, model.three)]
        self.weights = [(w.detach().double().numpy(), b.detach().double().numpy()) for w, b in pairs]

    def logits(self, x: np.ndarray, site: int = 0, keep: np.ndarray | None = None) -> np.ndarray:
        for place, (weight, bias) in enumerate(self.weights):
            x = x @ weight.T + bias
            x = np.maximum(x, 0) if place < 2 else x
            x = x * keep if keep is not None and place == site else x
        return x

    def take_out(self, site: int, keep: np.ndarray) -> None:
        (weight, bias), (after, bias_after) = self.weights[site], self.weights[site + 1]
        self.weights[site], self.weights[site + 1] = (weight[keep], bias[keep]), (after[:, keep], bias_after)


def mean_loss(logits: np.ndarray, y: np.ndarray) -> float:
    logits = logits - logits.max(1, keepdims=True)
    return float((np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]).mean())


def mean_divergence(logits: np.ndarray, before: np.ndarray) -> float:
    """Kullback and Leibler's, of the answers before from those now."""
    now, then = (z - np.log(np.exp(z).sum(1, keepdims=True)) for z in (logits, before))
    return float((np.exp(then) * (then - now)).sum(1).mean())


def arrays(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    x, y = examples.ready(torch.float64).batch(slice(None))
    assert isinstance(y, Tensor)
    return x.flatten(1).numpy(), y.numpy()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_papers_recipe_is_algorithm_1_written_out(tmp_path: Path, data: Data, trained: Plain, direction: Any) -> None:
    alpha = 0.08
    outcome = Pruner(trained, data, recipe=Recipe.paper(max_drop=alpha, direction=direction), folder=tmp_path / "run").finish()
    net, (x, y), (held, wanted) = ByHand(trained), arrays(data.train), arrays(data.search)
    sites = [("one", 0), ("two", 1)] if direction == "forward" else [("two", 1), ("one", 0)]
    assert [step.site for step in outcome.steps] == [name for name, _ in sites]
    for step, (_, site) in zip(outcome.steps, sites, strict=True):
        channels = WIDTHS[site]
        kept = tmp_path / "run" / "ensembles" / f"{step.number:04d}.safetensors"
        masks = parse(kept.read_bytes())[0]["masks"].numpy()
        assert masks.shape == (10 * channels, channels)  # M = 10 masks a filter
        assert set((~masks).sum(1)) == {round(0.3 * channels)}  # P = 30 % of them off
        losses = np.array([mean_loss(net.logits(x, site, mask), y) for mask in masks])  # on all training examples
        scores = 1 - (losses - losses.min()) / (losses.max() - losses.min())  # Eq. 2
        coef = np.linalg.lstsq(masks.astype(float), scores, rcond=None)[0]  # Eq. 3
        order = coef.argsort()
        before = float((net.logits(held).argmax(1) == wanted).mean())
        looked = []
        for m in range(math.floor(0.9 * channels), -1, -1):  # remove all that may go, put back one by one
            keep = np.ones(channels, dtype=bool)
            keep[order[:m]] = False
            looked.append((m, float((net.logits(held, site, keep).argmax(1) == wanted).mean())))
            if before - looked[-1][1] <= alpha + 1e-12:
                break
        m, after = looked[-1]
        assert step.removed == tuple(order[:m].tolist())
        assert np.allclose(step.evaluated, [look for look in looked if look[0]], rtol=0, atol=1e-9)
        assert (step.accuracy_before, step.accuracy_cut, step.accuracy) == pytest.approx((before, after, after))
        net.take_out(site, keep)
        assert step.loss == pytest.approx(mean_loss(net.logits(held), wanted), rel=1e-5)
    assert sum(len(step.removed) for step in outcome.steps) > 0


# ---- the contract ----------------------------------------------------------------------------------------------------


def right(module: nn.Module, examples: Examples) -> Tensor:
    """Whether each answer is right, float64 (N,)."""
    x, y = examples.batch(slice(None))
    with torch.no_grad():
        found: Tensor = module(x).argmax(1) == y
    return found.double()


@pytest.mark.parametrize(
    ("allocation", "repair"), [("sequential", "least-squares"), ("global", "least-squares"), ("global", "every-layer")]
)
def test_the_promise_holds_for_the_network_that_a_run_gives(data: Data, trained: Plain, allocation: Any, repair: Any) -> None:
    max_drop, confidence = 0.1, 0.9
    recipe = Recipe.fast(
        max_drop=max_drop,
        confidence=confidence,
        budget="run",
        allocation=allocation,
        criterion="l1",
        repair=repair,
        repair_examples=256,
    )
    run = Pruner(trained, data, recipe=recipe)
    outcome = run.finish()
    assert outcome.cost_after.macs < 0.9 * outcome.cost_before.macs
    sides = divide_images(len(data.search), certifying=CERTIFYING, seed=derive(recipe.seed, "certify"))
    before, after = (right(module, data.search)[sides.certification] for module in (trained, outcome.graph.module))
    journal = run.journal
    answers = [a for record in (*journal.of(ChosenAllocation), *journal.of(Step)) for a in record.answers]
    assert any(answers)
    assert all(answers[:-1])  # nothing is trained: the first no is final,
    if True in answers:  # so that every bound may take all that is allowed
        bound = paired_bound(before, after, confidence).upper
        assert bound <= max_drop
        last = [step.bound for step in outcome.steps if step.bound is not None][-1:]
        assert allocation == "global" or last == [pytest.approx(bound)]
    assert float((right(trained, data.test) - right(outcome.graph.module, data.test)).mean()) <= max_drop


def test_without_confidence_the_estimate_on_all_validation_images_decides(data: Data, trained: Plain) -> None:
    recipe = Recipe.fast(max_drop=0.05, confidence=0.0, allocation="global", criterion="l1", repair="least-squares")
    outcome = Pruner(trained, data, recipe=recipe).finish()
    drop = float((right(trained, data.search) - right(outcome.graph.module, data.search)).mean())
    assert drop <= 0.05 + 1e-12
    assert outcome.search.before - outcome.search.after == pytest.approx(drop)
    assert len(outcome.steps) > 0


# ---- who won ---------------------------------------------------------------------------------------------------------


def test_a_portfolio_records_its_winner_and_the_margin(data: Data, trained: Plain) -> None:
    names = ("l1", "l2", "random")
    recipe = Recipe.fast(max_drop=0.05, confidence=0.0, criterion="portfolio", portfolio=names, repair="none", sites=("one",))
    (step,) = Pruner(trained, data, recipe=recipe).finish().steps
    assert {name for name, _ in step.compared} == set(names)
    losses = [loss for _, loss in step.compared]
    assert losses == sorted(losses)
    (winner, least), (second, more), _ = step.compared
    assert step.criterion == winner
    assert step.note == f"{winner} won the portfolio, with a loss of {least:.4f} against {more:.4f} of {second}"
    net, (x, _) = ByHand(trained), arrays(data.search)
    order = np.abs(net.weights[0][0]).sum(1).argsort()
    cut = []
    for m in (3, 6, 9):  # a quarter, a half and three quarters of 12
        keep = np.ones(12, dtype=bool)
        keep[order[:m]] = False
        cut.append(mean_divergence(net.logits(x, 0, keep), net.logits(x, 0, np.ones(12, dtype=bool))))
    assert dict(step.compared)["l1"] == pytest.approx(np.exp(np.log(cut).mean()), rel=1e-5)
    if winner == "l1":
        assert step.removed == tuple(order[: len(step.removed)].tolist())


# ---- what was measured once ------------------------------------------------------------------------------------------


def figures(outcome: RunResult) -> list[tuple[object, ...]]:
    return [(step.site, step.removed, step.compared, step.bound, step.accuracy, step.loss) for step in outcome.steps]


@pytest.mark.parametrize("allocation", ["sequential", "global"])
def test_a_repeated_run_reads_all_measurements_from_the_cache(
    tmp_path: Path, data: Data, trained: Plain, allocation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.fast(
        max_drop=0.15, masks=512, allocation=allocation, criterion="portfolio", repair="least-squares", repair_examples=128
    )
    first = Pruner(trained, data, recipe=recipe, store=tmp_path / "measured").finish()

    def refused(self: MaskedNetwork, *args: object, **options: object) -> None:
        raise AssertionError("measured again")

    for name in ("measure", "values", "slopes"):
        monkeypatch.setattr(MaskedNetwork, name, refused)
    again = Pruner(trained, data, recipe=recipe, store=tmp_path / "measured").finish()
    assert figures(again) == figures(first)
    assert any(step.removed for step in first.steps)


# ---- what a file holds -----------------------------------------------------------------------------------------------


def shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("options", [{"rounds": 2, "direction": "backward"}, {"allocation": "global"}], ids=str)
def test_a_repaired_network_reloads_to_what_was_reported(
    tmp_path: Path, data: Data, trained: Plain, options: dict[str, Any]
) -> None:
    recipe = Recipe.fast(max_drop=0.1, confidence=0.0, criterion="l1", repair="least-squares", repair_examples=256, **options)
    outcome = Pruner(trained, data, recipe=recipe, folder=tmp_path / "run").finish()
    assert all(step.repaired is None or step.repaired[1] <= step.repaired[0] for step in outcome.steps)
    assert sum(len(step.removed) for step in outcome.steps) > 2
    example = data.train.batch(slice(0, 2)).inputs
    again = load(Plain(), tmp_path / "run" / "pruned.safetensors", example_input=example).module
    assert float(right(again, data.test).mean()) == pytest.approx(outcome.test.after, abs=1e-12)
    end = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()][-1]
    assert end["test"]["after"] == pytest.approx(float(right(again, data.test).mean()), abs=1e-12)
    left = {name: WIDTHS[place] for place, name in enumerate(("one", "two"))}
    for step in outcome.steps:
        assert len(set(step.removed)) == len(step.removed) == left[step.site] - step.kept
        left[step.site] = step.kept
    assert (again.one.out_features, again.two.out_features) == (left["one"], left["two"])  # type: ignore[union-attr]
    replayed = replay(trace(trained, example), Plan.load(tmp_path / "run" / "plan.json")).module
    assert shapes(replayed) == shapes(again)


@pytest.mark.parametrize(
    ("name", "options", "shortcut"),
    [("resnet8", {"widths": (4, 4, 6)}, "after"), ("resnet8", {"widths": (4, 4, 6)}, "stream"), ("split-small", {}, "before")],
)
def test_what_the_search_measures_is_what_the_run_makes(name: str, options: dict[str, Any], shortcut: Any) -> None:
    """One repaired cut after another, from the last site to the first: under a mask, and made."""
    model, shape = randomise_(build(name, **options), 0), (3, 12, 12)
    generator = seeded(0)
    sets = [Examples(torch.randn(12, *shape, generator=generator, dtype=torch.float64), torch.arange(12) % 10) for _ in "123"]
    graph = trace(model, sets[0].inputs[:2])
    recipe = Recipe.fast(confidence=0.0, repair="least-squares", repair_examples=12, shortcut=shortcut)
    context = PruningContext(
        graph, Data("random", *sets), recipe, Runtime(cross_entropy, correct, None, MeasurementCache(), None)
    )
    for site in reversed(find_sites(graph, shortcut)):
        now = context.site(graph, site.name)
        if now is None:
            continue
        place, keep = context.prepare(graph, now), torch.arange(now.channels) % 3 != 1
        under_mask = context.evaluator(place, cross_entropy).on(sets[1]).means(keep[None])
        graph, repair = context.compacted(place, keep)
        assert repair is not None
        assert repair.error_after <= repair.error_before
        assert evaluate(graph.module, sets[1]).loss == pytest.approx(float(under_mask), rel=1e-9)
    assert len(graph.plan.steps) > 3


def test_too_few_validation_images_for_a_promise_are_an_error_before_any_work(data: Data, trained: Plain) -> None:
    few = Data("few", data.train, subset(data.search, 31, seed=0), data.test)
    with pytest.raises(InvalidInput, match=r"max_drop=0.05 cannot be certified at 95 % with 31 validation images: with the 25"):
        Pruner(trained, few, recipe=Recipe.fast(max_drop=0.05))
