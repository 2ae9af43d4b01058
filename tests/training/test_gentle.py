"""Gentle training: distillation by hand and by finite differences, frozen BatchNorm, averages, the rate, and the guard."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from small import line, rates, seeded_net, small_images, small_net
from torch import Tensor, nn

from nets import assert_same_bits, seeded, weights_of
from secateurs import Pruner, Recipe
from secateurs._util.journal import Journal
from secateurs.config import GENTLE, PAPER_FINETUNE, PAPER_RETRAIN, TrainSettings
from secateurs.data import Examples
from secateurs.errors import Diverged, InvalidInput, TrainingError
from secateurs.metrics import correct, cross_entropy
from secateurs.pruning.figures import KINDS
from secateurs.pruning.judge import Judge
from secateurs.training import (
    EpochRecord,
    KeptWeights,
    RateTrials,
    TrainState,
    candidates,
    find_rate,
    keep_best_,
    learning_rate,
    precision,
    train_,
)
from secateurs.training.augment import suitable_augmentation
from secateurs.training.objective import distance, held_out_means, judge_for, objective_for
from secateurs.training.resumable import train_resumably_
from secateurs.training.state import snapshot
from torture.journals import entries_of
from torture.runs import differing_file, few_digits, perceptron

ALL = TrainSettings(
    epochs=3,
    batch=16,
    lr=0.02,
    schedule="linear",
    warmup_share=0.2,
    distill=1.0,
    temperature=2.0,
    freeze_batchnorm=True,
    average=0.8,
)


# schedules


def test_warmup_is_a_share_of_the_steps_and_the_rate_falls_to_nothing() -> None:
    found = rates(TrainSettings(epochs=2, lr=1.0, schedule="linear", warmup_share=0.2), 5)
    assert found == pytest.approx([0.5, 1.0, *(1 - k / 8 for k in range(8))])
    assert rates(TrainSettings(epochs=1, lr=1.0, schedule="linear"), 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    short = TrainSettings(epochs=9, steps=5, lr=1.0, schedule="linear", warmup_share=0.2)
    assert [learning_rate(short, step, 5) for step in range(5)] == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25])


def test_settings_that_contradict_each_other_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"warmup = 1 with warmup_share = 0.1: give one"):
        TrainSettings(warmup=1, warmup_share=0.1)
    with pytest.raises(InvalidInput, match=r"optimiser = 'adamw': it needs momentum of SGD"):
        TrainSettings(nesterov=True, optimiser="adamw")
    with pytest.raises(InvalidInput, match=r"lr = 'fast': got str, wanted a number or 'auto'"):
        TrainSettings(lr="fast")  # type: ignore[arg-type]  # what a user may try
    with pytest.raises(InvalidInput, match=r"average = 1.0: wanted 0 or more and below 1"):
        TrainSettings(average=1.0)


# optimisers


def test_adamw_steps_equal_those_worked_out_by_hand() -> None:
    # loss (2w - 1)²: gradient 4·(2w - 1); decoupled weight decay 0.1; moments with 0.9 and 0.999
    net, examples = line(1.0), Examples(torch.tensor([[2.0]]).double(), torch.tensor([[1.0]]).double())
    asked = TrainSettings(optimiser="adamw", epochs=3, batch=1, lr=0.01, weight_decay=0.1, schedule="constant")
    history = train_(net, examples, asked, loss_fn=lambda given, wanted: ((given - wanted) ** 2).mean())
    w, m, v = 1.0, 0.0, 0.0
    for t in (1, 2, 3):
        gradient = 4 * (2 * w - 1)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        w -= 0.01 * 0.1 * w
        w -= 0.01 * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
    assert net.weight.item() == pytest.approx(w, rel=1e-12)
    assert history.momentum == {}


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_averaging_and_adamw_resume_to_the_same_bits(optimiser: Any) -> None:
    asked, teacher = replace(ALL, optimiser=optimiser, augment="crop", pad=1), small_net(5)
    states: list[TrainState] = []
    net = small_net()

    def keep(state: TrainState) -> None:
        states.append(TrainState(load(save(state.tensors)), json.loads(json.dumps(state.meta))))

    history = train_(net, small_images(), asked, teacher=teacher, search=small_images(20, seed=9), save=keep)
    for state in states:
        other = small_net(99)
        again = train_(other, small_images(), asked, teacher=teacher, search=small_images(20, seed=9), resume=state)
        assert_same_bits(weights_of(other), weights_of(net))
        assert_same_bits(dict(again.last), dict(history.last))
        assert again.epochs == history.epochs


# averages


def test_the_average_equals_its_definition() -> None:
    """The weights after step t of T count d^(T - t), divided by the sum of all: no bias to where the training began."""
    net, seen = small_net().double(), list[dict[str, Tensor]]()
    asked = replace(ALL, distill=0.0, freeze_batchnorm=False, average=0.7)
    history = train_(net, small_images().ready(torch.float64), asked, on_step=lambda done, of: seen.append(snapshot(net)))
    counts = np.array([0.7 ** (len(seen) - t) for t in range(1, len(seen) + 1)])
    counts /= counts.sum()
    for name, tensor in snapshot(net).items():
        every = np.stack([each[name].double().numpy() for each in seen])
        expected = np.tensordot(counts, every, 1) if tensor.is_floating_point() else every[-1]
        np.testing.assert_allclose(tensor.double().numpy(), expected, rtol=1e-9, atol=1e-12)
    assert_same_bits({**snapshot(net), **history.last}, seen[-1])


def test_what_is_measured_after_an_epoch_is_the_average() -> None:
    net, search = small_net(), small_images(40, seed=9)
    history = train_(net, small_images(), replace(ALL, distill=0.0), search=search)
    found, _ = held_out_means(net, search, objective_for(TrainSettings(), loss_fn=None, teacher=None))
    assert history.epochs[-1].search_loss == pytest.approx(found, rel=1e-6)


def test_averaging_leaves_infinite_buffers_alone() -> None:
    net = line(1.0)
    net.register_buffer("mask", torch.tensor([-math.inf, 0.0]))
    examples = Examples(torch.ones(4, 1).double(), torch.ones(4, 1).double())
    train_(net, examples, TrainSettings(epochs=2, average=0.5), loss_fn=lambda given, wanted: (given - wanted).pow(2))
    assert net.mask.tolist() == [-math.inf, 0.0]


# BatchNorm


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_frozen_statistics_are_the_same_to_the_bit_and_used_in_the_forward_pass(average: float) -> None:
    net, modes = small_net(), list[tuple[bool, bool]]()
    train_(net, small_images(), TrainSettings(epochs=1, batch=10))  # statistics that are not those of a fresh layer
    before = weights_of(net)
    net[1].register_forward_pre_hook(lambda part, given: modes.append((part.training, net[4].training)))
    train_(net, small_images(), TrainSettings(epochs=2, batch=10, freeze_batchnorm=True, average=average))
    assert set(modes) == {(False, True)}, "BatchNorm in eval mode, dropout in train mode"
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(weights_of(net)[name], before[name])
    assert not torch.equal(net[1].weight, before["1.weight"]), "its weights are trained"
    assert net[1].training, "the mode is given back"


# distillation


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def test_dist_by_numpy() -> None:
    student, teacher = torch.randn(2, 6, 4, generator=seeded(0)).double()
    one, other = ((logits / 2).softmax(1).numpy() for logits in (student, teacher))
    over_classes = np.mean([1 - pearson(a, b) for a, b in zip(one, other, strict=True)])
    over_batch = np.mean([1 - pearson(a, b) for a, b in zip(one.T, other.T, strict=True)])
    assert float(distance(student, teacher, 2.0, "dist")) == pytest.approx(4 * (over_classes + over_batch), rel=1e-9)
    assert float(distance(teacher, teacher, 2.0, "dist")) == pytest.approx(0, abs=1e-9)
    dense = student.T.reshape(1, 4, 2, 3)  # the pixels of one image are examples
    assert float(distance(dense, teacher.T.reshape(1, 4, 2, 3), 2.0, "dist")) == pytest.approx(
        4 * (over_classes + over_batch), rel=1e-9
    )


def test_the_divergence_of_a_dense_prediction_is_the_mean_over_its_pixels() -> None:
    student, teacher = torch.randn(2, 6, 4, generator=seeded(0)).double()
    one, other = ((logits / 2).softmax(1).numpy() for logits in (student, teacher))
    expected = 4 * np.mean((other * (np.log(other) - np.log(one))).sum(1))
    assert float(distance(student, teacher, 2.0, "kl")) == pytest.approx(expected, rel=1e-9)
    dense = [logits.reshape(2, 3, 4).movedim(2, 1)[..., None] for logits in (student, teacher)]  # 2 images of 3 x 1 pixels
    assert float(distance(*dense, 2.0, "kl")) == pytest.approx(expected, rel=1e-9)


def test_the_squared_error_is_a_share_of_the_variance_by_hand() -> None:
    teacher = torch.tensor([[100.0, -1.0], [104.0, 1.0]])  # around (102, 0): 2², 2², 1², 1²
    assert float(distance(teacher + 0.5, teacher, 4.0, "squared")) == pytest.approx(0.25 / 2.5)
    assert float(distance(teacher[:1] + 1, teacher[:1], 4.0, "squared")) == pytest.approx(1 / 5000.5)  # one: of its energy
    assert float(distance(torch.ones(3), torch.zeros(3), 4.0, "squared")) == 1.0
    assert float(distance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), 4.0, "squared")) == pytest.approx(0.5)


def test_outputs_of_a_loss_of_the_users_own_are_compared_as_classes_only_where_targets_are_class_numbers() -> None:
    teacher, asked = seeded_net(lambda: nn.Linear(3, 4), 7), TrainSettings(distill=1.0, temperature=2.0)
    inputs, outputs = torch.randn(5, 3, generator=seeded(1)), torch.randn(5, 4, generator=seeded(2))
    wanted, numbers = teacher(inputs).detach(), torch.tensor([0, 1, 2, 3, 0])
    kl, squared = (float(distance(outputs, wanted, 2.0, kind)) for kind in ("kl", "squared"))

    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.square().mean(1)

    for loss_fn, targets, expected in (
        (None, numbers, kl),
        (None, outputs.softmax(1), kl),  # soft labels
        (own, numbers, kl),  # weighted classes, say
        (own, torch.zeros(5, 4), squared),  # regression, several labels
        (own, torch.zeros(5, 4, dtype=torch.long), squared),
        (own, {"ids": numbers}, squared),
    ):
        found = objective_for(asked, loss_fn=loss_fn, teacher=teacher)((inputs,), outputs, targets)
        assert float(found) == pytest.approx(expected, rel=1e-6)
    one = objective_for(asked, loss_fn=own, teacher=seeded_net(lambda: nn.Linear(3, 1), 7))  # one logit, labels 0 and 1
    assert float(one((inputs,), outputs[:, :1], numbers % 2)) > 0


def test_training_by_a_teacher_is_judged_by_the_users_own_loss() -> None:
    examples = Examples(torch.randn(64, 3, generator=seeded(0)), torch.zeros(64, 2))
    net, teacher = (seeded_net(lambda: nn.Linear(3, 2), seed) for seed in (1, 2))
    with torch.no_grad():
        net.weight.zero_()  # right for all examples, while every step towards the teacher is wrong
        net.bias.zero_()

    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1)

    judge = judge_for(TrainSettings(distill=1.0), loss_fn=own, teacher=teacher)
    assert held_out_means(net, examples, judge, teacher=teacher)[0] == 0.0
    assert held_out_means(teacher, examples, judge, teacher=teacher)[0] == pytest.approx(
        float(own(teacher(examples.inputs), examples.targets).mean().detach()), rel=1e-5
    )
    found = find_rate(
        net, examples, TrainSettings(epochs=1, lr="auto", distill=1.0), held_out=examples, teacher=teacher, loss_fn=own
    )
    assert found.lr == min(rate for rate, _ in found.tried)  # which does the least harm


@pytest.mark.parametrize("kind", ["kl", "dist", "squared"])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_gradients_equal_finite_differences(kind: Any, share: float) -> None:
    asked = TrainSettings(distill=share, distance=kind, temperature=2.0)
    inputs, targets = torch.randn(5, 3, generator=seeded(1)).double(), torch.tensor([0, 1, 2, 3, 0])
    teacher = seeded_net(lambda: nn.Linear(3, 4), 7).double()
    objective = objective_for(asked, loss_fn=None, teacher=teacher)
    logits = torch.randn(5, 4, generator=seeded(2)).double().requires_grad_()
    objective((inputs,), logits, targets).backward()
    assert logits.grad is not None
    for place in np.ndindex(5, 4):
        up, down = logits.detach().clone(), logits.detach().clone()
        up[place] += 1e-6
        down[place] -= 1e-6
        slope = float(objective((inputs,), up, targets) - objective((inputs,), down, targets)) / 2e-6
        assert float(logits.grad[place]) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_loss_of_outputs_in_half_precision_is_computed_in_full(share: float) -> None:
    logits, targets = 5 * torch.randn(64, 10, generator=seeded(0)).bfloat16(), torch.arange(64) % 10
    wanted = logits.double() + 0.1 * torch.randn(64, 10, generator=seeded(1)).double()  # a teacher that is near
    exact = (
        float(4 * nn.functional.kl_div((logits.double() / 2).log_softmax(1), (wanted / 2).softmax(1), reduction="batchmean"))
        if share
        else float(nn.functional.cross_entropy(logits.double(), targets))
    )
    teacher = seeded_net(lambda: nn.Linear(1, 10), 0)
    teacher.forward = lambda x: wanted.float()  # type: ignore[method-assign]
    objective = objective_for(TrainSettings(distill=share, temperature=2.0), loss_fn=None, teacher=teacher)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert float(objective((torch.zeros(64, 1),), logits, targets)) == pytest.approx(exact, rel=1e-2)


def test_one_example_and_equal_outputs_have_finite_gradients() -> None:
    for logits in (torch.zeros(1, 4), torch.zeros(3, 4)):
        student = logits.clone().requires_grad_()
        distance(student, torch.randn(logits.shape, generator=seeded(0)), 2.0, "dist").backward()
        assert student.grad is not None
        assert bool(student.grad.isfinite().all())


def test_teacher_alone_needs_no_labels() -> None:
    images, teacher = small_images(30), small_net(5)
    net = small_net()
    train_(net, replace(images, targets=torch.full((30,), -7)), replace(ALL, epochs=1), teacher=teacher, metric=_nothing)
    other = small_net()
    train_(other, images, replace(ALL, epochs=1), teacher=teacher, metric=_nothing)
    assert_same_bits(weights_of(net), weights_of(other))


def _nothing(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros(len(outputs))


def test_outputs_that_are_no_classes_are_refused() -> None:
    for shape in ((5, 1), (5,)):
        with pytest.raises(InvalidInput, match=r"wanted \(N, K, …\) with 2 classes or more. Set distance = 'squared'"):
            distance(torch.zeros(shape), torch.ones(shape), 2.0)


def test_auto_augments_colour_images_only() -> None:
    def of(*shape: int) -> Examples:
        return Examples(torch.zeros(2, *shape), torch.zeros(2))

    assert suitable_augmentation(of(3, 32, 32)) == ("crop-flip", 4)
    assert [suitable_augmentation(of(*shape))[0] for shape in ((1, 28, 28), (3, 4, 4), (16,))] == ["none"] * 3


# the learning rate


def test_the_rate_is_the_best_of_the_trials_and_the_weights_are_as_before() -> None:
    # loss (w - 1)² from w = 0: in 50 steps the highest rate gets nearest; with inputs ten times as large it diverges
    def squares(given: Tensor, wanted: Tensor) -> Tensor:
        return (given - wanted).pow(2)

    asked = TrainSettings(epochs=50, batch=4, lr="auto", momentum=0.0, weight_decay=0.0, schedule="constant")
    net, ones = line(0.0), torch.ones(8, 1).double()
    found = find_rate(net, Examples(ones, ones), asked, held_out=Examples(ones, ones), loss_fn=squares)
    assert found.lr == 1e-2
    assert net.weight.item() == 0.0
    for rate, loss in found.tried:
        assert loss == pytest.approx((1 - 2 * rate) ** 100, rel=1e-6)  # the error shrinks by 1 - 2 rate at every step
    steep = find_rate(net, Examples(30 * ones, ones), asked, held_out=Examples(30 * ones, ones), loss_fn=squares)
    assert (steep.lr, [loss is not None for _, loss in steep.tried[:2]]) == (5e-4, [True, True])
    assert train_(net, Examples(ones, ones), asked, loss_fn=squares).epochs[0].lr == 1e-2
    with pytest.raises(TrainingError, match=r"diverges at all of 0.0005, 0.002, 0.01"):
        find_rate(net, Examples(1e200 * ones, ones), asked, held_out=Examples(ones, ones), loss_fn=squares)
    assert net.weight.item() != 0.0


def test_a_rate_is_journaled_and_not_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = TrainSettings(epochs=2, batch=16, lr="auto")
    whole, stopped = small_net(), small_net()
    with Journal(None, KINDS) as journal:
        train_resumably_(journal, whole, small_images(), asked)
        assert [type(record) for record in journal.records] == [RateTrials, EpochRecord, EpochRecord]

    def interrupt(record: EpochRecord) -> None:
        raise KeyboardInterrupt

    with Journal(tmp_path, KINDS) as journal, pytest.raises(KeyboardInterrupt):
        train_resumably_(journal, stopped, small_images(), asked, on_epoch=interrupt)
    monkeypatch.setattr("secateurs.training.resumable.find_rate", None)
    fresh = small_net()
    with Journal(tmp_path, KINDS) as journal:
        train_resumably_(journal, fresh, small_images(), asked)
    assert_same_bits(weights_of(fresh), weights_of(whole))


# precision


def test_bfloat16_is_tried_in_a_process_of_its_own_and_given_up_where_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = TrainSettings(epochs=1, batch=16, precision="bfloat16")
    plain, fallen = small_net(), small_net()
    train_(plain, small_images(), replace(asked, precision="float32"))
    monkeypatch.setattr(precision, "_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    precision.bfloat16_works.cache_clear()
    try:
        history = train_(fallen, small_images(), asked)
        ran = precision.bfloat16_works.cache_info().misses
        assert (history.note, ran) == ("bfloat16 fails on this processor: trained in float32", 1)
    finally:
        precision.bfloat16_works.cache_clear()
    assert_same_bits(weights_of(fallen), weights_of(plain))


@pytest.mark.parametrize(("first", "then"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_training_goes_on_in_the_precision_that_it_began_in(first: str, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor can: a machine without bfloat16 goes on in float32 and says so."""
    asked = TrainSettings(epochs=2, batch=16, precision="bfloat16")

    def able(kind: str) -> None:
        monkeypatch.setattr(precision, "bfloat16_works", lambda: kind == "bfloat16")

    states: list[TrainState] = []
    whole, resumed = small_net(), small_net()
    able(first)
    train_(whole, small_images(), asked, save=states.append)
    able(then)
    history = train_(resumed, small_images(), asked, resume=states[0])
    if first == "float32":
        assert_same_bits(weights_of(resumed), weights_of(whole))
    else:
        assert history.note == "bfloat16 fails on this processor: trained in float32, after 1 epochs in bfloat16 elsewhere"


# the guard


def adversary(kind: str, start: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """What a training may leave at worst."""
    generator = seeded(seed)
    damage = {
        "random": lambda t: torch.randn(t.shape, generator=generator) * 10 ** (seed % 5 - 2),
        "nan": lambda t: torch.where(torch.rand(t.shape, generator=generator) < 0.1, math.nan, t),
        "infinite": lambda t: t * math.inf,
        "flipped": lambda t: -t,
        "nudged": lambda t: t + 0.01 * torch.randn(t.shape, generator=generator),
        "nothing": lambda t: t.clone(),
    }[kind]
    return {name: damage(tensor) if tensor.is_floating_point() else tensor for name, tensor in start.items()}


ADVERSARIES = ("random", "nan", "infinite", "flipped", "nudged", "nothing")


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(ADVERSARIES), st.sampled_from((None, *ADVERSARIES)), st.integers(0, 999), st.booleans())
def test_the_guard_never_takes_weights_that_are_worse_on_held_out_examples(
    end: str, last: str | None, seed: int, by_metric: bool
) -> None:
    net, images = small_net(seed), small_images(60, seed)
    start = snapshot(net)
    objective = objective_for(TrainSettings(), loss_fn=None, teacher=None)

    def measure() -> tuple[float, float | None]:
        return held_out_means(net, images, objective, metric=correct)

    loss, metric = measure()
    every = candidates(start, adversary(end, start, seed), None if last is None else adversary(last, start, seed + 1))
    kept = keep_best_(net, every, measure, by="metric" if by_metric else "loss")
    after, metric_after = measure()
    assert metric is not None
    assert metric_after is not None
    assert (metric_after, -after) >= (metric, -loss) if by_metric else after <= loss
    assert math.isfinite(after)
    assert [each.name for each in kept.tried][:2] == ["start", "end"]
    best = [
        each.metric if by_metric else -each.loss for each in kept.tried if each.loss is not None and each.metric is not None
    ]
    assert (metric_after if by_metric else -after) == pytest.approx(max(best), rel=1e-9), "none of them is better"
    if kept.kept == "start":
        assert_same_bits(snapshot(net), start)


def test_weights_between_start_and_end_lie_on_the_line() -> None:
    start = {"w": torch.tensor([0.0, 4.0]), "n": torch.tensor(3)}
    found = candidates(start, {"w": torch.tensor([4.0, 0.0]), "n": torch.tensor(7)}, {"w": torch.tensor([9.0, 9.0])})
    assert list(found) == ["start", "end", "average", "25 % of the way", "50 % of the way", "75 % of the way"]
    assert found["end"]["w"].tolist() == [9, 9]
    assert found["75 % of the way"]["w"].tolist() == [3, 1]
    assert found["75 % of the way"]["n"] == 7
    mask = torch.tensor([0.0, -math.inf])  # of attention
    moved = candidates({"w": torch.zeros(1), "mask": mask}, {"w": torch.ones(1), "mask": mask})["25 % of the way"]
    assert (moved["w"].tolist(), moved["mask"].tolist()) == ([0.25], [0.0, -math.inf])


# within runs

DATA = few_digits(384)


def harmed(**changes: Any) -> Pruner:
    """A run whose training climbs the loss."""

    def unwanted(outputs: Tensor, targets: Tensor) -> Tensor:
        return -cross_entropy(outputs, targets).clamp(max=20)

    training = TrainSettings(epochs=1, batch=64, lr=0.2)
    recipe = Recipe.fast(max_drop=1.0, confidence=0, criterion="l1", target_parameters=0.2, retrain=training, **changes)
    model = perceptron()
    train_(model, DATA.train, TrainSettings(epochs=10, batch=32, lr=0.1))
    found = Pruner(model, DATA, recipe=recipe, loss=unwanted)
    found.finish()
    return found


def test_a_training_that_harms_is_undone_and_the_record_says_so() -> None:
    guarded, let = harmed(), harmed(keep_best=False)
    (kept,) = guarded.journal.of(KeptWeights)
    assert let.journal.of(KeptWeights) == []
    assert (kept.kept, kept.by, kept.phase) == ("start", "metric", "retrain")
    assert guarded.result is not None
    assert let.result is not None
    assert guarded.result.search.after > let.result.search.after + 0.1
    assert guarded.result.search.after == guarded.result.steps[-1].accuracy
    before, after = kept.tried[0].metric, kept.tried[1].metric
    assert kept.summary() == f"the weights before it are kept: metric {before:.4g} on held-out examples, after it {after:.4g}"


def test_weights_that_the_budget_refuses_are_not_said_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judge, "still_within", lambda *given, **options: False)
    recipe = Recipe.fast(max_drop=1.0, confidence=0, criterion="l1", target_parameters=0.2)
    run = Pruner(perceptron(), DATA, recipe=recipe, retrain=TrainSettings(epochs=3, batch=32, lr=0.05))
    list(run)
    (kept,) = run.journal.of(KeptWeights)
    assert (kept.kept, kept.tried[0].name) == ("start", "start")
    assert "is better on them, but not within the allowed drop" in kept.note
    assert run.state.accuracy == run.steps[-1].accuracy


DIVERGING = TrainSettings(epochs=3, batch=32, lr=1e30)


@pytest.mark.parametrize("phase", ["retrain", "finetune"])
@pytest.mark.parametrize("budget", ["run", "site"])
@pytest.mark.parametrize("keep_best", [True, False])
def test_a_training_that_diverges_leaves_the_network_before_it(phase: str, budget: Any, keep_best: bool) -> None:
    recipe = Recipe.fast(max_drop=0.3, confidence=0, criterion="l1", sites=("layers.1",), budget=budget, keep_best=keep_best)
    untrained = Pruner(perceptron(), DATA, recipe=recipe).finish()
    run = Pruner(perceptron(), DATA, recipe=replace(recipe, **{phase: DIVERGING}))
    result = run.finish()
    assert result.macs.removed > 0
    assert_same_bits(weights_of(result.model), weights_of(untrained.model))
    (kept,) = run.journal.of(KeptWeights)
    assert (kept.kept, kept.phase, kept.tried[1].loss) == ("start", phase, None)
    assert "Note: training was undone: the weights before it are kept: metric" in str(result)
    assert "after it not finite; training diverged in epoch 0, step" in str(result)


def test_with_several_workers_a_divergence_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may diverge alone, while the others wait for it."""
    monkeypatch.setattr("secateurs.pruning.trainer.active", lambda: SimpleNamespace(size=2))
    recipe = Recipe.fast(max_drop=0.3, confidence=0, criterion="l1", sites=("layers.1",), retrain=DIVERGING)
    with pytest.raises(Diverged, match="training diverged in epoch 0"):
        Pruner(perceptron(), DATA, recipe=recipe).finish()


def test_a_training_that_diverges_in_a_later_epoch_leaves_the_network_before_the_first(tmp_path: Path) -> None:
    """Also where the run is stopped after each record, and resumed."""
    from secateurs import resume

    # every step multiplies the weights by 9: too large for float32 in the second epoch
    asked = TrainSettings(epochs=3, batch=64, lr=1e-2, weight_decay=1e3, momentum=0.0, schedule="constant")
    plain = Recipe.fast(max_drop=0.3, confidence=0, criterion="l1", sites=("layers.1",))
    untrained = Pruner(perceptron(), DATA, recipe=plain).finish()
    recipe = replace(plain, retrain=asked)
    whole = Pruner(perceptron(), DATA, recipe=recipe, folder=tmp_path / "whole").finish()
    assert_same_bits(weights_of(whole.model), weights_of(untrained.model))
    append = Journal.append

    def stop(journal: Journal, record: Any) -> None:
        append(journal, record)
        if isinstance(record, EpochRecord | KeptWeights):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            Pruner(perceptron(), DATA, recipe=recipe, folder=tmp_path / "stopped").finish()
        with pytest.raises(KeyboardInterrupt):
            resume(tmp_path / "stopped", perceptron(seed=3), DATA).finish()
    again = resume(tmp_path / "stopped", perceptron(seed=4), DATA).finish()
    assert_same_bits(weights_of(again.model), weights_of(whole.model))
    assert differing_file(tmp_path / "whole", tmp_path / "stopped") is None
    units = [entry["unit"] for entry in entries_of(tmp_path / "stopped")]
    assert [units.count(unit) for unit in ("epoch", "kept", "retrained")] == [1, 1, 1]


def test_gentle_by_its_name_in_a_recipe_and_in_the_call() -> None:
    assert Recipe.fast(retrain="gentle").retrain == GENTLE  # type: ignore[arg-type]  # a name stands for settings
    assert Recipe.fast(finetune="paper-finetune").finetune == PAPER_FINETUNE  # type: ignore[arg-type]
    assert Recipe.fast(retrain="paper-retrain").retrain == PAPER_RETRAIN  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"retrain = 'gentel': wanted a table of settings, .*Did you mean 'gentle'"):
        Recipe.fast(retrain="gentel")  # type: ignore[arg-type]
    found = Pruner(
        perceptron(), DATA, max_drop=0.3, macs=0.3, recipe=Recipe.fast(confidence=0, criterion="l1"), retrain="gentle"
    )
    assert found.recipe.retrain == GENTLE
    found.finish()
    (rate,), (kept,) = found.journal.of(RateTrials), found.journal.of(KeptWeights)
    assert [tried for tried, _ in rate.tried] == [5e-4, 2e-3, 1e-2]
    losses = {each.name: each.loss for each in kept.tried}
    assert losses[kept.kept] == min(losses.values())
    assert kept.by == "loss"


def test_a_certified_bound_is_no_worse_after_training() -> None:
    recipe = Recipe.fast(max_drop=0.3, confidence=0.9, criterion="l1", retrain=TrainSettings(epochs=1, batch=64, lr=0.02))
    found = Pruner(perceptron(), DATA, recipe=recipe)
    list(found)
    last = [step.bound for step in found.steps if step.bound is not None][-1]
    assert found.journal.of(KeptWeights)
    bound = found.judge.bound(found.graph)
    assert bound is not None
    assert bound <= last + 1e-9


def test_a_gentle_run_that_stops_between_any_two_records_ends_the_same(tmp_path: Path) -> None:
    """Stopped after every line that a training writes, resumed each time."""
    from secateurs import resume

    recipe = Recipe.fast(max_drop=0.3, confidence=0, criterion="l1", sites=("layers.1",), retrain=replace(GENTLE, batch=64))
    whole = Pruner(perceptron(), DATA, recipe=recipe, folder=tmp_path / "whole").finish()
    folder, append = tmp_path / "stopped", Journal.append

    def stop(journal: Journal, record: Any) -> None:
        append(journal, record)
        if isinstance(record, RateTrials | EpochRecord | KeptWeights):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            Pruner(perceptron(), DATA, recipe=recipe, folder=folder).finish()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                resume(folder, perceptron(seed=3), DATA).finish()
    again = resume(folder, perceptron(seed=4), DATA).finish()
    assert_same_bits(weights_of(whole.model), weights_of(again.model))
    units = [entry["unit"] for entry in entries_of(folder)]
    assert [units.count(unit) for unit in ("rate", "epoch", "kept", "retrained")] == [1, 1, 1, 1]
    page = (folder / "report.html").read_text()
    assert "Retraining: " in page
    assert "on held-out examples" in page


def test_the_settings_of_before_train_as_plain_torch_does() -> None:
    """The loop that was there before these settings, written out by hand: the same bits."""
    asked = TrainSettings(epochs=2, batch=25, lr=0.05, schedule="constant", weight_decay=1e-3)
    net, images = nn.Sequential(nn.Flatten(), seeded_net(lambda: nn.Linear(16, 3))), small_images()
    plain = copy.deepcopy(net)
    orders: list[Tensor] = []

    def watched(outputs: Tensor, targets: Tensor) -> Tensor:
        orders.append(targets.clone())
        return cross_entropy(outputs, targets)

    seen: list[Tensor] = []
    net[0].register_forward_pre_hook(lambda part, given: seen.append(given[0].clone()))
    train_(net, images, asked, loss_fn=watched)
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for inputs, targets in zip(seen, orders, strict=True):
        optimiser.zero_grad()
        nn.functional.cross_entropy(plain(inputs), targets, reduction="none").mean().backward()
        optimiser.step()
    assert_same_bits(weights_of(net), weights_of(plain))
