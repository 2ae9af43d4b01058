"""Methods: each meets its target to a filter, spends its budget to the image, equals its masked form, and can be killed."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from nets import assert_same_bits, weights_of
from secateurs import Graph, compact, find_sites, load, masked, save, trace
from secateurs._util.journal import Journal, record_from
from secateurs.config import TrainSettings, criterion_names
from secateurs.data import Data, Examples, load_cifar10, load_digits, subset
from secateurs.data.dataset import derive
from secateurs.errors import InvalidInput, RunError, TrainingError
from secateurs.graph.cost import cost
from secateurs.graph.masking import copied
from secateurs.graph.sites import Site
from secateurs.metrics import Measure, accuracy
from secateurs.models import example_input, load_public
from secateurs.pruning.context import PruningContext
from secateurs.pruning.results import Progress
from secateurs.selection.allocation import Curve
from secateurs.training import train_
from secateurs.training.objective import held_out_means, objective_for
from secateurs_lab.methods import METHODS, NO_TRAINING, Budget, Pruned, Task, Trained, algorithm1, method, sfp, training
from secateurs_lab.methods.base import EpochSeconds, MethodState, StepCost, opened, recipe_for
from secateurs_lab.methods.one_shot import advances, ranked
from secateurs_lab.methods.sfp import Zeroing, zero_filters_
from secateurs_lab.methods.training import finished, tally, total, train_rest, training_stages
from torture.journals import entries_of, write_entries
from torture.runs import ResidualNet


class Sealed(Examples):
    """A test set that raises when it is read."""

    def batch(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("a method read the test set")

    take = ready = digest = batches = scaled = to = batch


TARGET = 0.3
PIECES = TrainSettings(steps=5, batch=24, lr=0.02, schedule="constant")
BUDGET = Budget("tiny", PIECES, TrainSettings(epochs=2, batch=24, lr=0.05, augment="crop", pad=1))
NAMES = ("random", "l2:uniform", "obs+refit", "li", "sfp", "paper")


def generous(name: str, max_drop: float = 0.04) -> Any:
    """The method; Algorithm 1 may cost more than a point, which takes many rounds of 60 images to remove anything."""
    return functools.partial(method(name), max_drop=max_drop) if name == "paper" else method(name)


@functools.cache
def data() -> Data:
    whole = load_digits()
    train, search = subset(whole.train, 121, seed=0), subset(whole.search, 60, seed=0)  # 121 = 5 · 24 + 1: an odd last batch
    return Data("digits", train, search, Sealed(whole.test.inputs, whole.test.targets))


@functools.cache
def graph() -> Graph:
    torch.manual_seed(0)
    net = ResidualNet(8)
    train_(net, data().train, TrainSettings(epochs=3, batch=24, lr=0.1))
    return trace(net.eval(), torch.randn(2, 1, 8, 8))


def task(**changes: Any) -> Task:
    return replace(Task(graph(), data(), TARGET), **changes)


@dataclass
class Seen:
    """What really happened while a method worked, and its outcome."""

    batches: list[tuple[int, float]] = field(default_factory=list)  # images and rate of every step of an optimiser
    zeroed: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = field(default_factory=list)  # weights before and after
    wide: list[Graph] = field(default_factory=list)  # what soft pruning removes filters from
    outcome: Pruned | None = None

    @property
    def pruned(self) -> Pruned:
        assert self.outcome is not None
        return self.outcome


@functools.cache
def run(name: str) -> Seen:
    """The method on the tiny network, and every step of an optimiser with the size of the batch before it."""
    seen, before, size = Seen(), weights_of(graph().module), 0
    zero, cut = Zeroing.zero_, sfp.cut_all

    def batch(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal size
        if isinstance(module, nn.Linear) and module.training:
            size = len(inputs[0])

    def step(optimiser: torch.optim.Optimizer, *_: object) -> None:
        seen.batches.append((size, optimiser.param_groups[0]["lr"]))

    def zeroed(self: Zeroing) -> None:
        trained = weights_of(self.graph.module)
        zero(self)
        seen.zeroed.append((trained, weights_of(self.graph.module)))

    def cut_wide(work: Any, curves: Any, counts: Any, network: Graph) -> Any:
        seen.wide.append(network)
        return cut(work, curves, counts, network)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as hooks:
        hooks.enter_context(register_module_forward_pre_hook(batch))
        hooks.callback(register_optimizer_step_post_hook(step).remove)
        patch.setattr(Zeroing, "zero_", zeroed)
        patch.setattr(sfp, "cut_all", cut_wide)
        seen.outcome = generous(name)(task(budget=BUDGET))
    assert_same_bits(before, graph().module.state_dict())
    return seen


@functools.cache
def untrained(name: str) -> Pruned:
    """The method without any training."""
    return generous(name)(task())


def share_removed(smaller: Graph) -> float:
    return 1 - cost(smaller).macs / cost(graph()).macs


def masks_of(removed: dict[str, tuple[int, ...]]) -> dict[str | Site, Tensor]:
    """Masks by site without the removed channels."""
    width = {site.name: site.channels for site in find_sites(graph())}
    return {name: ~torch.isin(torch.arange(width[name]), torch.tensor(ids)) for name, ids in removed.items()}


def same_outputs(one: nn.Module, other: nn.Module) -> None:
    inputs = data().search.batch(slice(0, 20)).inputs
    with torch.no_grad():
        torch.testing.assert_close(one.eval()(inputs), other.eval()(inputs), rtol=1e-4, atol=1e-5)


# ---- every method --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_target_is_reached_with_no_filter_to_spare(name: str) -> None:
    smaller = run(name).pruned.graph
    assert share_removed(smaller) >= TARGET
    removed = smaller.plan.removed()
    fewer = [{**removed, site: tuple(i for i in ids if i != back)} for site, ids in removed.items() for back in ids]
    assert any(share_removed(compact(graph(), masks_of(some))) < TARGET for some in fewer)


def test_the_untouched_network_is_trained_and_nothing_else() -> None:
    after = TrainSettings(epochs=2, batch=24, lr=0.05, distill=0.5, average=0.9)
    found = method("untouched")(task(target_macs=0.0, budget=Budget("after", after=after)))
    by_hand = trace(copied(graph()).module, graph().example)
    stage = training_stages(task(budget=Budget("after", after=after)), 1)[0].settings  # with its seed
    train_(by_hand.module, data().train, stage, teacher=graph().module)
    assert_same_bits(found.graph.module.state_dict(), by_hand.module.state_dict())
    assert cost(found.graph).macs == cost(graph()).macs
    assert found.trained.images == 2 * len(data().train)


@pytest.mark.parametrize(("rate", "kept"), [(50.0, "the weights before it are kept"), (0.01, " is kept: loss")])
def test_a_budget_that_keeps_the_best_never_leaves_worse_weights_on_held_out_examples(rate: float, kept: str) -> None:
    after = TrainSettings(epochs=2, batch=24, lr=rate, clip_norm=1.0, distill=1.0)
    start = method("l1:uniform")(task()).graph
    guarded = method("l1:uniform")(task(budget=Budget("guarded", after=after, keep_best=True)))
    assert kept in guarded.note
    with opened(task(), "l1:uniform", recipe_for(task(), "l1"), None) as opening:
        held_out = opening.context.held_out_examples
    apart = [
        float(held_out_means(net.module, held_out, objective_for(after, loss_fn=None, teacher=graph().module))[0])
        for net in (start, guarded.graph)
    ]
    assert apart[1] <= apart[0]
    if rate > 1:  # harm undone, to the bit
        assert_same_bits(guarded.graph.module.state_dict(), start.module.state_dict())
    else:
        assert apart[1] < apart[0]


def test_all_methods_are_trained_on_as_many_images_at_the_same_rates() -> None:
    per_epoch = 5  # 24, 24, 24, 24, 25 images
    rates = [0.05 * (1 + math.cos(math.pi * step / (2 * per_epoch))) / 2 for step in range(2 * per_epoch)]
    sizes = [24, 24, 24, 24, 25] * 2
    wanted = 5 * 24 * 0.02 + math.fsum(rate * size for rate, size in zip(rates, sizes, strict=True))
    for name in NAMES:
        seen = run(name)
        assert sum(n for n, _ in seen.batches) == seen.pruned.trained.images == 5 * 24 + 2 * 121, name
        assert math.fsum(n * rate for n, rate in seen.batches) == pytest.approx(wanted, rel=1e-12), name
        assert seen.pruned.trained.rate_sum == pytest.approx(wanted, rel=1e-12), name
    assert len({run(name).pruned.trained for name in NAMES}) == 1


@pytest.mark.parametrize("name", ["obs+repair", "sfp", "paper"])
def test_pruned_networks_reload_from_their_file(name: str, tmp_path: Path) -> None:
    smaller = run(name).pruned.graph
    again = load(ResidualNet(8), save(smaller, tmp_path / "pruned.safetensors"))
    assert_same_bits(smaller.module.state_dict(), again.module.state_dict())
    same_outputs(smaller.module, again.module)


@pytest.mark.parametrize("name", ["fpgm-sfp", "li", "l1"])
def test_without_training_a_pruned_network_is_the_masked_one(name: str) -> None:
    found = untrained(name)
    assert found.trained == Trained(0, 0.0)
    same_outputs(found.graph.module, masked(graph(), masks_of(found.graph.plan.removed())))


def test_uniform_cuts_remove_the_smallest_norms_of_every_site_in_the_same_share() -> None:
    removed = untrained("l2:uniform").graph.plan.removed()
    sites = {site.name: site for site in find_sites(graph())}
    shares = [len(removed.get(name, ())) / site.channels for name, site in sites.items()]
    assert max(shares) - min(shares) <= 1 / 6 + 1e-9  # the narrowest site has 6 filters
    for name, ids in removed.items():
        weight: Any = graph().module.get_submodule(name).weight
        norms = np.sqrt((weight.detach().numpy().astype(float) ** 2).sum((1, 2, 3)))
        assert set(ids) == set(np.argsort(norms)[: len(ids)])


def test_passes_count_images_by_masks() -> None:
    """20 filters at 3 sites, 60 held-out images that the untouched network answers first, 121 images to rank on."""
    points = {6: 6, 8: 8}  # 0 and every eighth of the filters, up to 0.9 of them
    curves = 60 * sum(points[site.channels] for site in find_sites(graph())) + 60
    assert untrained("l1").passes == curves
    assert untrained("l2:uniform").passes == 0
    ranking = {"taylor": 3 * 3 * 121, "leave-one-out": (20 + 3) * 121}  # there and back counts three; every filter, and none
    for name, wanted in ranking.items():
        asked = task()
        with opened(asked, name, recipe_for(asked, name), None) as work:
            places = [work.context.prepare(graph(), site) for site in work.sites]
            assert sum(ranked(work, place, 1)[1] for place in places) == wanted


@pytest.mark.parametrize("name", ["portfolio+refit", "l1:uniform", "li"])
def test_all_targets_and_budgets_of_a_method_share_what_it_finds_at_the_sites(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is ranked again, and what comes out is what it would have been without sharing; another seed shares nothing."""
    store = tmp_path / "measured.sqlite"
    first = method(name)(task(store=store))
    alone = method(name)(task(target_macs=0.5, budget=BUDGET))

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("ranked again")

    monkeypatch.setattr(PruningContext, "rank", refuse)
    shared = method(name)(task(target_macs=0.5, budget=BUDGET, store=store))
    assert shared.passes == alone.passes
    assert shared.search_seconds >= 0.3 * first.search_seconds, "what another row has measured counts, beside the own cut"
    assert_same_bits(alone.graph.module.state_dict(), shared.graph.module.state_dict())
    with pytest.raises(AssertionError, match="ranked again"):
        method(name)(task(target_macs=0.5, seed=1, store=store))


def test_a_folder_of_a_release_with_other_settings_goes_on_and_another_budget_is_refused(tmp_path: Path) -> None:
    asked = task(budget=BUDGET, folder=tmp_path)
    expected = method("l1:uniform")(asked)
    first, *_ = entries_of(tmp_path)
    budget = first["asked"]["budget"]
    assert budget["after"].pop("mixup") == 0.0
    budget["after"]["int8"] = False  # a setting that is gone
    del budget["keep_best"]
    shutil.rmtree(tmp_path / "checkpoints")  # killed before anything was found
    write_entries(tmp_path, [first])
    again = method("l1:uniform")(asked)
    assert_same_bits(expected.graph.module.state_dict(), again.graph.module.state_dict())
    with pytest.raises(RunError, match="was started with another budget"):
        method("l1:uniform")(replace(asked, budget=replace(BUDGET, keep_best=True)))
    budget["after"]["int8"] = True
    write_entries(tmp_path, [first])
    with pytest.raises(RunError, match="was started with another budget"):
        method("l1:uniform")(asked)


# ---- names and mistakes --------------------------------------------------------------------------------------------------


def test_methods_are_found_by_name() -> None:
    for name in [
        *(set(criterion_names()) - {"obs"}),
        "obs+repair",
        "portfolio+repair",
        "fpgm:uniform",
        "li",
        "sfp",
        "fpgm-sfp",
        "paper",
    ]:
        assert METHODS[name]
        assert callable(method(name))
    with pytest.raises(InvalidInput, match=r"no method 'fpmg-sfp'.*Did you mean 'fpgm-sfp'"):
        method("fpmg-sfp")
    with pytest.raises(InvalidInput, match=r"no method 'obs'.*obs wants one of"):
        method("obs")


@pytest.mark.parametrize("name", ["l1:uniform", "paper"])
def test_a_target_beyond_all_filters_is_an_error(name: str) -> None:
    one_site = trace(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).eval(), graph().example)
    with pytest.raises(InvalidInput, match=r"target_macs = 0\.95: wanted at most 0\.875"):  # with one filter of eight left
        generous(name, max_drop=1.0)(task(graph=one_site, target_macs=0.95))
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        method(name)(task(target_macs=1.0))


def test_a_folder_of_another_task_is_refused(tmp_path: Path) -> None:
    def open_folder(name: str, **changes: Any) -> None:
        asked = task(folder=tmp_path, **changes)
        with opened(asked, name, recipe_for(asked, "l1"), None):
            pass

    open_folder("l1")
    open_folder("l1")
    with pytest.raises(RunError, match="another target_macs and seed"):
        open_folder("l1", target_macs=0.2, seed=1)
    with pytest.raises(RunError, match="another method"):
        open_folder("l2")
    with pytest.raises(RunError, match="another loss and metric"):
        open_folder("l1", loss_fn=torch.nn.functional.mse_loss, metric=torch.nn.functional.l1_loss)


def test_a_folder_distinguishes_two_lambdas(tmp_path: Path) -> None:
    def open_folder(metric: Measure) -> None:
        asked = task(folder=tmp_path, metric=metric)
        with opened(asked, "l1", recipe_for(asked, "l1"), None):
            pass

    open_folder(lambda o, t: o.argmax(1) == t)
    open_folder(lambda o, t: o.argmax(1) == t)
    with pytest.raises(RunError, match=r"another metric\. Give what it was started with"):
        open_folder(lambda o, t: o.argmin(1) == t)


def test_training_that_differs_from_the_budget_is_an_error() -> None:
    asked = task(budget=BUDGET)
    wanted = pytest.raises(TrainingError, match=r"budget 'tiny': 0 images were trained on .*, wanted 362 ")
    with opened(asked, "l1", recipe_for(asked, "l1"), None) as work, wanted:
        finished(work, MethodState(untrained("l2:uniform").graph))


# ---- soft pruning --------------------------------------------------------------------------------------------------------


def test_soft_pruning_of_no_filter_is_plain_training_to_the_bit() -> None:
    asked = task(budget=replace(BUDGET, between=None))
    with opened(asked, "sfp", recipe_for(asked, "l2"), None) as work:
        state = MethodState(work.copied())
        zeroing = Zeroing(state.graph, work.sites, dict.fromkeys((s.name for s in work.sites), 0), "l2")
        soft = train_rest(work, state, lambda before, now: zeroing.zero_())
        plain = work.copied()
    assert BUDGET.after is not None
    train_(plain.module, data().train, replace(BUDGET.after, seed=derive(0, "after")))
    assert_same_bits(plain.module.state_dict(), soft.graph.module.state_dict())


def test_zeroed_filters_are_the_smallest_and_their_channels_are_masked() -> None:
    """Norms by hand: with all weights of a filter equal to its number, filter 0 comes first."""
    copied = graph().with_module(masked(graph(), {}))
    numbers = {"conv": [5, 1, 3, 2, 6, 4], "conv1": [8, 7, 6, 5, 4, 3, 2, 1], "conv2": [1, 2, 3, 4, 5, 6]}
    for name, values in numbers.items():
        weight: Any = copied.module.get_submodule(name).weight
        weight.data.copy_(weight.sign() * torch.tensor(values).view(-1, 1, 1, 1) / 10)
    wide = graph().with_module(masked(copied, {}))
    Zeroing(copied, list(find_sites(copied)), {"conv": 2, "conv1": 3, "conv2": 1}, "l2").zero_()
    removed = {"conv": (1, 3), "conv1": (5, 6, 7), "conv2": (0,)}
    for name, ids in removed.items():
        found: Any = copied.module.get_submodule(name).weight
        assert [i for i, row in enumerate(found) if not row.any()] == list(ids)
    same_outputs(copied.module, masked(wide, masks_of(removed)))


def test_transposed_filters_are_zeroed_in_their_groups() -> None:
    conv = nn.ConvTranspose1d(4, 4, 2, groups=2)
    zero_filters_(conv, torch.tensor([False, True, True, False]))
    out = conv(torch.ones(1, 4, 3))[0]
    assert [bool(channel.any()) for channel in out] == [True, False, False, True]


def test_soft_pruning_zeroes_every_epoch_removes_at_the_end_and_filters_keep_training() -> None:
    seen = run("sfp")
    assert len(seen.zeroed) == 2  # 362 images: less than three epochs of 121
    (_, zeroed), (later, _) = seen.zeroed
    names = [f"{name}.weight" for name in ("conv", "conv1", "conv2")]
    dead = torch.cat([~zeroed[name].flatten(1).any(1) for name in names])
    moved = torch.cat([later[name].flatten(1).any(1) for name in names])
    assert dead.any()
    assert (dead & moved).any()
    removed = seen.pruned.graph.plan.removed()
    assert int(dead.sum()) == sum(map(len, removed.values()))
    same_outputs(seen.pruned.graph.module, masked(seen.wide[0], masks_of(removed)))


def test_without_training_soft_pruning_equals_a_uniform_cut() -> None:
    assert untrained("sfp").graph.plan == untrained("l2:uniform").graph.plan


# ---- sensitivity ---------------------------------------------------------------------------------------------------------


def test_thresholds_by_hand() -> None:
    """Where the accuracy recovers, what lies behind the worst place before counts as bad as that."""
    one = Curve("one", (0, 1, 2, 3), (0.0, 0.02, 0.01, 0.05), (0.0, 1.0, 2.0, 3.0))
    two = Curve("two", (0, 2, 4), (0.0, -0.1, 0.02), (0.0, 1.0, 2.0))
    steps = [(step.threshold, step.site, step.removed) for step in advances([one, two])]
    assert steps == [(0.0, "two", 2), (0.02, "one", 1), (0.02, "one", 2), (0.02, "two", 4), (0.05, "one", 3)]


def test_no_site_alone_loses_more_than_the_threshold() -> None:
    found = run("li").pruned
    threshold = float(found.note.split()[1].rstrip(","))
    start, alone = accuracy(graph().module, data().search), {}
    for site, keep in masks_of(found.graph.plan.removed()).items():
        alone[site] = start - accuracy(masked(graph(), {site: keep}), data().search)
    over = [site for site, drop in alone.items() if drop > threshold + 1e-4]
    assert len(over) <= 1  # the site that was cut last may end between two numbers that were measured


# ---- killed and resumed --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As sudden as a signal."""


def killer(phase: str, after: int) -> Callable[[Progress], None]:
    """Raises when the phase is reported for the `after`-th time."""
    left = [after]

    def watch(progress: Progress) -> None:
        left[0] -= progress.phase == phase
        if left[0] <= 0:
            raise Killed

    return watch


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("obs+repair", [("score", 3), ("retrain", 8)]),
        ("sfp", [("finetune", 2), ("retrain", 8)]),
        ("paper", [("finetune", 2), ("retrain", 8)]),
    ],
)
def test_killed_methods_resume_to_the_same_result(name: str, kills: list[tuple[str, int]], tmp_path: Path) -> None:
    asked = task(budget=BUDGET, folder=tmp_path)
    for kill in kills:
        with pytest.raises(Killed):
            generous(name)(asked, watch=killer(*kill))
    phases: list[str] = []
    again, whole = generous(name)(asked, watch=lambda progress: phases.append(progress.phase)), run(name).pruned
    assert [phase for phase in phases if phase in ("finetune", "retrain")] == [
        "retrain"
    ] * 5  # killed in the second epoch of the end: only that is done again
    assert again.graph.plan == whole.graph.plan
    assert (again.trained, again.passes, again.note) == (whole.trained, whole.passes, whole.note)
    assert_same_bits(whole.graph.module.state_dict(), again.graph.module.state_dict())


def test_a_killed_training_whose_best_weights_are_kept_resumes_to_the_same_bits(tmp_path: Path) -> None:
    after = TrainSettings(epochs=3, batch=24, lr=0.01, distill=1.0, average=0.9, freeze_batchnorm=True)
    asked = task(budget=Budget("guarded", after=after, keep_best=True), folder=tmp_path)
    with pytest.raises(Killed):
        method("l1:uniform")(asked, watch=killer("retrain", 8))  # in the second epoch
    again, whole = method("l1:uniform")(asked), method("l1:uniform")(replace(asked, folder=None))
    assert_same_bits(whole.graph.module.state_dict(), again.graph.module.state_dict())
    assert again.note == whole.note
    assert "kept" in again.note


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("l1:uniform", [("retrain", 8), ("retrain", 5)]),
        ("ssl", [("finetune", 3), ("retrain", 8)]),
        ("paper", [("finetune", 2), ("retrain", 8)]),
    ],
)
def test_seconds_of_training_add_up_over_kills(name: str, kills: list[tuple[str, int]], tmp_path: Path) -> None:
    """A clock that ticks once a step: 5 steps between the cuts and 10 behind them, however often the method was killed.

    Steps of an epoch that was not saved are done again, and count once.
    """
    ticks = [0]

    def ticking(kill: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
        def watch(progress: Progress) -> None:
            ticks[0] += progress.phase in ("finetune", "retrain")
            if kill is not None:
                kill(progress)

        return watch

    with pytest.MonkeyPatch.context() as patch:
        for module in (training, algorithm1):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(ticks[0])))
        asked = task(budget=BUDGET, folder=tmp_path)
        for kill in kills:
            with pytest.raises(Killed):
                generous(name)(asked, watch=ticking(killer(*kill)))
        assert generous(name)(asked, watch=ticking(None)).training_seconds == 15
    assert ticks[0] > 15


def test_a_folder_of_an_earlier_version_resumes_without_the_seconds_of_its_epochs(tmp_path: Path) -> None:
    asked, append = task(budget=BUDGET, folder=tmp_path), Journal.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", lambda self, each: None if isinstance(each, EpochSeconds) else append(self, each))
        with pytest.raises(Killed):
            method("l1:uniform")(asked, watch=killer("retrain", 8))
    assert method("l1:uniform")(asked).trained.images == 5 * 24 + 2 * 121
    before: dict[str, Any] = {"step": 0, "passes": 1, "training_seconds": 2.0, "trained": True}
    assert record_from(before, StepCost) == StepCost(0, 1, 2.0, trained=True, elsewhere=0.0)


def test_training_stages_add_up_to_the_budget() -> None:
    for count in (1, 2, 3, 7):
        found = training_stages(task(budget=BUDGET), count)
        pieces = [stretch.settings.steps for stretch in found if stretch.phase == "finetune"]
        assert sum(piece or 0 for piece in pieces) == 5
        assert len(pieces) == min(count, 5)
        assert len({stretch.settings.seed for stretch in found}) == len(found)
    assert training_stages(task(budget=NO_TRAINING), 3) == ()
    assert total([]) == Trained(0, 0.0)
    both = total([tally(PIECES, 121, 2), tally(PIECES, 121, 5)])
    assert both.images == 48 + 121
    assert both.rate_sum == pytest.approx(169 * 0.02)


# ---- the real thing ------------------------------------------------------------------------------------------------------


@pytest.mark.realdata
@pytest.mark.parametrize(("name", "target"), [("li", 0.3), ("fpgm-sfp", 0.3), ("l1:uniform+repair", 0.3), ("paper", 0.05)])
def test_public_resnet20(name: str, target: float) -> None:
    """A cut of 30 % of the MACs on few images; the paper's way takes longest, so only its first cuts."""
    whole = load_cifar10(split="public")
    few = replace(whole, train=subset(whole.train, 512, seed=0), search=subset(whole.search, 128, seed=0))
    network = trace(load_public(20), example_input("resnet20"))
    budget = Budget("two", after=TrainSettings(epochs=1, steps=2, lr=0.01, augment="crop-flip"))
    found = method(name)(Task(network, few, target, budget))
    assert target <= 1 - cost(found.graph).macs / cost(network).macs < target + 0.01
    assert found.trained.images == 256
    assert accuracy(found.graph.module, few.search) > 0.5
