"""Training: steps, schedules and losses by hand; determinism and resuming as laws; real digits learnt in seconds."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from small import line, rates, seeded_net, small_images, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import secateurs
from nets import assert_same_bits, seeded, weights_of
from secateurs.config import GENTLE, PAPER_FINETUNE, PAPER_RESNET, PAPER_RETRAIN, TrainSettings
from secateurs.data import Examples, Scaling
from secateurs.data import load as load_data
from secateurs.data.stream import Stream, stream_of
from secateurs.errors import DataError, InvalidInput, RecipeError, TrainingError
from secateurs.metrics import accuracy, evaluate, outputs
from secateurs.training import (
    EpochRecord,
    TrainState,
    carry_momentum,
    carry_optimizer,
    learning_rate,
    recalibrate_,
    restore_,
    train_,
)
from secateurs.training.augment import augment, crop_at, mix, random_crop, random_flip
from secateurs.training.checks import check_trainable
from secateurs.training.objective import distance
from secateurs.training.schedule import steps_in_epoch

# one step by hand


@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_equal_those_worked_out_by_hand(nesterov: bool) -> None:
    # loss (w·2 - 1)²: gradient 4·(2w - 1), plus weight decay 0.1·w; momentum 0.5; rate 0.01
    net, examples = line(1.0), Examples(torch.tensor([[2.0]]).double(), torch.tensor([[1.0]]).double())
    asked = TrainSettings(epochs=3, batch=1, lr=0.01, momentum=0.5, weight_decay=0.1, nesterov=nesterov, schedule="constant")
    history = train_(net, examples, asked, loss_fn=lambda given, wanted: ((given - wanted) ** 2).mean())
    w, v = 1.0, 0.0
    for record in history.epochs:
        assert record.loss == pytest.approx((2 * w - 1) ** 2, rel=1e-12)
        gradient = 4 * (2 * w - 1) + 0.1 * w
        v = 0.5 * v + gradient
        w -= 0.01 * (gradient + 0.5 * v if nesterov else v)
    assert net.weight.item() == pytest.approx(w, rel=1e-12)
    assert history.momentum["weight"].item() == pytest.approx(v, rel=1e-12)


def test_clipping_bounds_the_step() -> None:
    net, examples = line(1.0), Examples(torch.tensor([[2.0]]).double(), torch.tensor([[1.0]]).double())
    asked = TrainSettings(epochs=1, batch=1, lr=0.1, momentum=0, weight_decay=0, schedule="constant", clip_norm=0.5)
    train_(net, examples, asked, loss_fn=lambda given, wanted: (given - wanted) ** 2)
    assert net.weight.item() == pytest.approx(1 - 0.1 * 0.5, rel=1e-5)  # the gradient is 4


def test_frozen_parameters_stay() -> None:
    net = small_net()
    net[0].weight.requires_grad_(False)
    before = weights_of(net)
    train_(net, small_images(), TrainSettings(epochs=1, batch=10))
    assert torch.equal(net[0].weight, before["0.weight"])
    assert not torch.equal(net[5].weight, before["5.weight"])


# schedules


def test_the_papers_schedules() -> None:
    first_steps = [learning_rate(PAPER_RESNET, epoch * 352, 352) for epoch in (0, 99, 100, 149, 150, 199)]
    assert first_steps == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert learning_rate(PAPER_RESNET, 100 * 352 - 1, 352) == pytest.approx(0.1)
    retrain = [learning_rate(PAPER_RETRAIN, epoch * 10, 10) for epoch in (0, 19, 20, 39, 40, 59, 60, 79)]
    assert retrain == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5])
    assert (PAPER_RESNET.epochs, PAPER_RETRAIN.epochs, PAPER_FINETUNE.epochs) == (200, 80, 10)
    assert (PAPER_RESNET.batch, PAPER_RESNET.momentum, PAPER_RESNET.weight_decay) == (128, 0.9, 1e-4)
    assert {PAPER_RESNET.augment, PAPER_RETRAIN.augment, PAPER_FINETUNE.augment} == {"crop-flip"}


def test_cosine_by_hand() -> None:
    found = rates(TrainSettings(epochs=2, lr=1.0, schedule="cosine"), 2)
    assert found == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])


def test_warmup_rises_to_the_schedule() -> None:
    found = rates(TrainSettings(epochs=3, lr=0.8, warmup=1, schedule="cosine"), 4)
    assert found[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert found[4:9:4] == pytest.approx([0.8, 0.4])  # the cosine starts after the warm-up and is half-way 4 steps on
    stepped = rates(TrainSettings(epochs=4, lr=0.8, warmup=1, schedule="step", milestones=(2,)), 2)
    assert stepped == pytest.approx([0.4, 0.8, 0.8, 0.8, 0.08, 0.08, 0.08, 0.08])


@pytest.mark.parametrize("total", [10, 33, 100])
def test_one_cycle_is_that_of_torch(total: int) -> None:
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    torchs = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=0.3, total_steps=total, cycle_momentum=False)
    expected = []
    for _ in range(total):
        expected.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        if len(expected) < total:
            torchs.step()
    assert rates(TrainSettings(epochs=total, lr=0.3, schedule="one-cycle"), 1) == pytest.approx(expected, rel=1e-9)


def test_the_loop_follows_the_schedule() -> None:
    asked = TrainSettings(epochs=3, batch=20, lr=0.5, momentum=0, schedule="step", milestones=(1, 2))
    history = train_(small_net(), small_images(), asked)
    assert [record.lr for record in history.epochs] == pytest.approx([0.5, 0.05, 0.005])
    assert [record.steps for record in history.epochs] == [3, 6, 9]


def test_a_single_example_left_over_joins_the_batch_before() -> None:
    assert [steps_in_epoch(count, 8) for count in (1, 7, 8, 9, 10, 16, 17, 18)] == [1, 1, 1, 1, 2, 2, 2, 3]
    assert steps_in_epoch(5, 1) == 5
    seen: list[int] = []

    def counting(given: Tensor, wanted: Tensor) -> Tensor:
        seen.append(len(given))
        return nn.functional.cross_entropy(given, wanted)

    train_(small_net(), small_images(17), TrainSettings(epochs=1, batch=8), loss_fn=counting)
    assert seen == [8, 9]


def test_steps_end_a_training_within_an_epoch() -> None:
    history = train_(small_net(), small_images(50), TrainSettings(epochs=9, batch=10, steps=7))
    assert [record.steps for record in history.epochs] == [5, 7]
    assert history.epochs[-1].lr == pytest.approx(0.01 * (1 + math.cos(math.pi * 6 / 7)) / 2), "the cosine ends there too"


# augmentation


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.integers(0, 99))
def test_crops_are_windows_of_the_padded_image(n: int, c: int, height: int, width: int, pad: int, seed: int) -> None:
    generator = seeded(seed)
    images = torch.randint(1, 256, (n, c, height, width), generator=generator, dtype=torch.uint8)
    top, left = torch.randint(2 * pad + 1, (2, n), generator=generator)
    found = crop_at(images, pad, top, left).numpy()
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    for row, (y, x) in enumerate(zip(top.tolist(), left.tolist(), strict=True)):
        assert np.array_equal(found[row], padded[row, :, y : y + height, x : x + width])


def test_all_crops_and_both_flips_occur_equally_often() -> None:
    image = torch.zeros(1, 1, 3, 3)
    image[0, 0, 1, 1] = 1  # the position of the spot shows the crop
    crops = random_crop(image.expand(9000, -1, -1, -1), pad=1, generator=seeded(0))
    counts = crops.sum(0).flatten()
    assert all(abs(float(count) - 1000) < 4 * math.sqrt(1000) for count in counts)
    ramp = torch.arange(3.0).expand(4000, 1, 1, 3)
    flipped = random_flip(ramp, generator=seeded(0))
    mirrored = (flipped[:, 0, 0] == torch.tensor([2.0, 1.0, 0.0])).all(1)
    assert torch.equal(flipped[~mirrored], ramp[~mirrored])
    assert abs(int(mirrored.sum()) - 2000) < 4 * math.sqrt(1000)


def test_kinds_of_augmentation() -> None:
    images = torch.arange(2 * 16.0).reshape(2, 1, 4, 4)
    generator = seeded(0)
    assert augment(images, "none", pad=2, generator=generator) is images
    assert torch.equal(augment(images, "crop", pad=0, generator=generator), images)
    with pytest.raises(InvalidInput, match=r"augment = 'crop' for inputs of shape \(2, 16\)"):
        augment(images.flatten(1), "crop", pad=1, generator=generator)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_mixtures_lie_between_two_examples(share: float) -> None:
    """One-hot inputs show the partner and its part; a second input has the same ones, rows in another shape."""
    count = 2000
    one, rows = torch.eye(count), torch.arange(count).float()
    mixed, other = mix((one, rows[:, None, None]), share, generator=seeded(0))
    torch.testing.assert_close(mixed.sum(1), torch.ones(count))
    torch.testing.assert_close(other[:, 0, 0], mixed @ rows, rtol=1e-4, atol=1e-2)
    own = mixed.diagonal()
    assert bool((1 - own <= share + 1e-6).all())
    assert 1 - float(own.mean()) == pytest.approx(share / 2, abs=0.02 * share)  # uniform between 0 and the share
    assert bool(((mixed > 0).sum(1) <= 2).all())
    assert bool(((mixed > 0).sum(0) <= 2).all()), "every example is the partner of one"
    assert mix(one, 0.0, generator=seeded(0)) is one
    with pytest.raises(InvalidInput, match=r"mixup = 1 for inputs of type torch.int64: wanted floating-point numbers"):
        mix(torch.arange(4), 1.0, generator=seeded(0))


def test_mixtures_are_of_scaled_images_and_resume_to_the_same_bits() -> None:
    teacher, states, seen = seeded_net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), 7), [], []
    asked = replace(LONG, label_smoothing=0.0, distill=1.0, mixup=1.0, epochs=3)
    net = small_net()
    net.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    train_(net, small_images(), asked, teacher=teacher, save=lambda state: states.append(on_disk(state)))
    assert max(float(batch.abs().max()) for batch in seen) <= 2.0  # (0 - 0.5) / 0.25 and (1 - 0.5) / 0.25
    for state in states:
        other = small_net(99)
        train_(other, small_images(), asked, teacher=teacher, resume=state)
        assert_same_bits(weights_of(other), weights_of(net))
    plain = small_net()
    train_(plain, small_images(), replace(asked, mixup=0.0), teacher=teacher)
    assert any(not torch.equal(weights_of(plain)[name], tensor) for name, tensor in weights_of(net).items())


def test_mixtures_have_no_labels() -> None:
    with pytest.raises(RecipeError, match=r"mixup = 0.5 with distill = 0.9: a mixture has no label"):
        TrainSettings(mixup=0.5, distill=0.9)


def test_padding_is_black_before_scaling() -> None:
    seen: list[Tensor] = []

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return self.linear(x.flatten(1))

    white = Examples(torch.full((64, 1, 4, 4), 255, dtype=torch.uint8), torch.zeros(64).long(), Scaling(255.0, (0.5,), (0.5,)))
    train_(Watch(), white, TrainSettings(epochs=1, batch=64, augment="crop", pad=2))
    assert set(seen[0].unique().tolist()) == {-1.0, 1.0}  # black and white


# distillation


def test_distillation_by_hand() -> None:
    # temperature 2 turns logits (2·ln 3, 0) into probabilities 3/4 and 1/4, and (0, 0) into halves
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2 * math.log(3.0), 0.0]])
    expected = 4 * (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5))
    assert float(distance(student, teacher, 2.0)) == pytest.approx(expected, rel=1e-5)
    assert float(distance(teacher, teacher, 2.0)) == pytest.approx(0, abs=1e-7)


def test_the_loss_is_shared_between_labels_and_teacher() -> None:
    images, teacher = small_images(12), seeded_net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), 7)
    net = seeded_net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), 8)
    x = images.ready().inputs
    plain = nn.functional.cross_entropy(net(x), images.targets)
    apart = 9 * nn.functional.kl_div((net(x) / 3).log_softmax(1), (teacher(x) / 3).softmax(1), reduction="batchmean")
    asked = TrainSettings(epochs=1, batch=12, distill=0.25, temperature=3.0)
    expected = float((0.75 * plain + 0.25 * apart).detach())
    teacher.train()
    history = train_(net, images, asked, teacher=teacher)
    assert history.epochs[0].loss == pytest.approx(expected, rel=1e-5)
    assert teacher.training, "the teacher's mode is given back"


def test_a_student_of_labels_it_never_sees_learns_from_the_teacher() -> None:
    images, teacher = small_images(60), seeded_net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), 7)
    net = seeded_net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), 8)
    train_(net, images, TrainSettings(epochs=60, batch=20, lr=0.1, distill=1.0, weight_decay=0), teacher=teacher)
    agreement = (outputs(net, images).argmax(1) == outputs(teacher, images).argmax(1)).float().mean()
    assert agreement >= 0.95


def test_distilling_needs_a_teacher_that_is_another_network() -> None:
    net = small_net()
    with pytest.raises(InvalidInput, match=r"distill = 0.5 needs a teacher"):
        train_(net, small_images(), TrainSettings(distill=0.5))
    with pytest.raises(InvalidInput, match="the teacher is the network that is trained"):
        train_(net, small_images(), TrainSettings(distill=0.5), teacher=net)


# determinism


LONG = TrainSettings(epochs=5, batch=16, lr=0.05, augment="crop-flip", pad=1, clip_norm=5.0, label_smoothing=0.1, seed=3)


def on_disk(state: TrainState) -> TrainState:
    """The state, written to safetensors and JSON and read again."""
    return TrainState(load(save(state.tensors)), json.loads(json.dumps(state.meta)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_resuming_after_any_epoch_equals_never_stopping(channels_last: bool) -> None:
    asked, search = replace(LONG, channels_last=channels_last), small_images(20, seed=9)
    states: list[TrainState] = []
    net = small_net()
    history = train_(net, small_images(), asked, search=search, save=lambda state: states.append(on_disk(state)))
    assert [len(state.records()) for state in states] == [1, 2, 3, 4, 5]
    for state in states:
        torch.manual_seed(len(state.records()))  # whatever the user's random state is by then
        other = small_net(99)
        again = train_(other, small_images(), asked, search=search, resume=state)
        assert_same_bits(weights_of(other), weights_of(net))
        assert again.epochs == history.epochs
        assert_same_bits(dict(again.momentum), dict(history.momentum))


def test_a_training_interrupted_within_an_epoch_resumes_from_its_start() -> None:
    states: list[TrainState] = []
    net, other = small_net(), small_net()
    train_(net, small_images(), LONG)

    def stop(done: int, planned: int) -> None:
        assert planned == 20
        if done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_(other, small_images(), LONG, save=states.append, on_step=stop)
    assert len(states[-1].records()) == 2
    fresh = small_net(5)
    restore_(fresh, states[-1])
    assert_same_bits(weights_of(other), weights_of(fresh))  # the weights are those of the start of the epoch
    train_(other, small_images(), LONG, resume=states[-1])
    assert_same_bits(weights_of(other), weights_of(net))


def test_the_users_random_state_mode_and_gradients_are_untouched() -> None:
    net = small_net()
    net[1].eval()
    before = [part.training for part in net.modules()]
    torch.manual_seed(11)
    state = torch.get_rng_state()
    train_(net, small_images(), replace(LONG, epochs=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in net.modules()] == before
    assert all(weight.grad is None for weight in net.parameters())


def test_the_users_random_state_changes_nothing_and_the_seed_does() -> None:
    results = []
    for user, seed in ((1, 3), (2, 3), (1, 4)):
        torch.manual_seed(user)
        net = small_net()
        train_(net, small_images(), replace(LONG, epochs=1, seed=seed))
        results.append(weights_of(net))
    assert_same_bits(results[0], results[1])
    assert not torch.equal(results[0]["5.weight"], results[2]["5.weight"])


def test_measuring_the_validation_set_changes_nothing() -> None:
    nets = [small_net(), small_net()]
    train_(nets[0], small_images(), replace(LONG, epochs=2))
    history = train_(nets[1], small_images(), replace(LONG, epochs=2), search=small_images(20, seed=9))
    assert_same_bits(weights_of(nets[0]), weights_of(nets[1]))
    found = evaluate(nets[1], small_images(20, seed=9))
    assert history.epochs[-1].search_loss == pytest.approx(found.loss, rel=1e-6)
    assert history.epochs[-1].search_accuracy == found.accuracy


def test_every_example_is_seen_once_an_epoch_in_an_order_of_its_own() -> None:
    orders: list[int] = []

    def watching(given: Tensor, wanted: Tensor) -> Tensor:
        orders.extend(wanted.flatten().int().tolist())
        return (given - wanted).pow(2).mean()

    examples = Examples(torch.ones(23, 1).double(), torch.arange(23.0)[:, None].double())
    train_(line(0.0), examples, TrainSettings(epochs=2, batch=5, lr=1e-6), loss_fn=watching)
    first, second = orders[:23], orders[23:]
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second != list(range(23))


def test_dropout_differs_from_epoch_to_epoch() -> None:
    seen: list[Tensor] = []

    def watching(given: Tensor, wanted: Tensor) -> Tensor:
        seen.append(given.detach() == 0)
        return given.sum()

    net = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5))
    train_(net, Examples(torch.ones(2, 1), torch.ones(2)), TrainSettings(epochs=2, batch=2), loss_fn=watching)
    assert not torch.equal(seen[0], seen[1])


def test_channels_last_gives_the_weights_back_in_the_usual_order() -> None:
    net, plain = small_net(), small_net()
    train_(net, small_images(), replace(LONG, epochs=1, channels_last=True))
    train_(plain, small_images(), replace(LONG, epochs=1))
    assert all(weight.is_contiguous() for weight in net.parameters())
    for name, tensor in weights_of(plain).items():
        torch.testing.assert_close(net.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)


def test_channels_last_is_for_images_and_stays_where_it_was() -> None:
    video = nn.Sequential(nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(2, 3))
    examples = Examples(torch.randn(8, 1, 2, 2, 2), torch.arange(8) % 3)
    train_(video, examples, TrainSettings(epochs=1, batch=4, channels_last=True))
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 3)).to(memory_format=torch.channels_last)
    images = Examples(torch.randn(8, 4, 3, 3), torch.arange(8) % 3)
    train_(net, images, TrainSettings(epochs=1, batch=4, channels_last=True))
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_trains_nearly_the_same_and_resumes_exactly(precision: str) -> None:
    asked = replace(LONG, epochs=2, lr=0.01, precision=precision)
    states: list[TrainState] = []
    net, plain = small_net(), small_net()
    train_(net, small_images(), asked, save=lambda state: states.append(on_disk(state)))
    train_(plain, small_images(), replace(asked, precision="float32"))
    assert net[0].weight.dtype == torch.float32
    start = small_net()[5].weight
    moved = (plain[5].weight - start).norm()
    assert (net[5].weight - plain[5].weight).norm() < 0.1 * moved
    other = small_net()
    train_(other, small_images(), asked, resume=states[0])
    assert_same_bits(weights_of(other), weights_of(net))


# divergence and wrong use


def test_divergence_is_named_and_undone() -> None:
    net = small_net()
    states: list[TrainState] = []

    def exploding(given: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(given, wanted) * (math.nan if len(states) == 2 else 1)

    with pytest.raises(TrainingError, match=r"epoch 2, step 8 of 20, at learning rate .*the loss is nan.*Lower lr"):
        train_(net, small_images(), replace(LONG, label_smoothing=0.0), loss_fn=exploding, save=states.append)
    expected = small_net()
    restore_(expected, states[-1])
    assert_same_bits(weights_of(net), weights_of(expected))
    assert net.training


def test_a_rate_that_is_too_high_is_noticed() -> None:
    net = small_net()
    before = weights_of(net)
    with pytest.raises(TrainingError, match="training diverged in epoch 0"):
        train_(net, small_images(), TrainSettings(epochs=1, batch=10, lr=1e30, schedule="constant"))
    assert_same_bits(weights_of(net), before)


def test_weights_that_overflow_in_the_last_step_are_noticed() -> None:
    net, examples = line(1.0).float(), Examples(torch.tensor([[2.0]]), torch.tensor([[1.0]]))
    asked = TrainSettings(epochs=1, batch=1, lr=1e38, schedule="constant")
    with pytest.raises(TrainingError, match="'weight' is no longer finite"):
        train_(net, examples, asked, loss_fn=lambda given, wanted: (given - wanted).pow(2) * 1e3)
    assert net.weight.item() == 1.0


def test_infinite_buffers_that_were_there_before_are_no_divergence() -> None:
    net = line(1.0)
    net.register_buffer("mask", torch.tensor([-math.inf, 0.0]))
    examples = Examples(torch.ones(4, 1).double(), torch.ones(4, 1).double())
    train_(net, examples, TrainSettings(epochs=1), loss_fn=lambda given, wanted: (given - wanted).pow(2))


def test_a_checkpoint_of_something_else_is_refused() -> None:
    states: list[TrainState] = []
    train_(small_net(), small_images(), replace(LONG, epochs=2), save=states.append)
    asked = replace(LONG, epochs=2)
    with pytest.raises(TrainingError, match=r"lr was 0\.05, is 0\.5; seed was 3, is 4"):
        train_(small_net(), small_images(), replace(asked, lr=0.5, seed=4), resume=states[0])
    with pytest.raises(TrainingError, match="there were 50 training examples, there are 49"):
        train_(small_net(), small_images(49), asked, resume=states[0])
    other = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    before = weights_of(other)
    with pytest.raises(TrainingError, match=r"it has \(4, 1, 3, 3\) for '0.weight', the network nothing"):
        train_(other, small_images(), asked, resume=states[0])
    assert_same_bits(weights_of(other), before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "cosin"}, "schedule = 'cosin': wanted one of .* Did you mean 'cosine'"),
        ({"lr": 0.0}, "lr = 0.0: wanted a number above 0"),
        ({"lr": math.nan}, "lr = nan: wanted a number above 0"),
        ({"batch": 0}, "batch = 0: wanted 1 to"),
        ({"epochs": 2.5}, "epochs = 2.5: got float, wanted a whole number"),
        ({"momentum": 1.0}, "momentum = 1.0: wanted 0 to 0.9999"),
        ({"milestones": (3,)}, "milestones go with schedule 'step'"),
        ({"schedule": "step"}, "milestones go with schedule 'step'"),
        ({"schedule": "step", "milestones": (5, 3)}, "wanted rising epochs"),
        ({"warmup": 10}, "warmup = 10 of epochs = 10"),
        ({"warmup": 1, "schedule": "one-cycle"}, "which has its own"),
        ({"nesterov": True, "momentum": 0.0}, "it needs momentum"),
        ({"distill": 1.5}, "distill = 1.5: wanted 0 to 1"),
    ],
)
def test_settings_out_of_range_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        TrainSettings(**fields)


def test_settings_come_from_a_recipe() -> None:
    found = msgspec.toml.decode(b'epochs = 80\nlr = 0.01\nschedule = "step"\nmilestones = [20, 40, 60]', type=TrainSettings)
    assert found == replace(PAPER_RETRAIN, augment="none")
    with pytest.raises(msgspec.ValidationError, match=r"momentum = 1\.5: wanted 0 to 0\.9999"):
        msgspec.toml.decode(b"momentum = 1.5", type=TrainSettings)


def test_nothing_to_train_on_or_with() -> None:
    with pytest.raises(InvalidInput, match="no examples"):
        train_(small_net(), small_images(0), TrainSettings())
    with pytest.raises(InvalidInput, match="nothing to train"):
        train_(nn.Flatten(), small_images(), TrainSettings())
    with pytest.raises(InvalidInput, match=r"label_smoothing = 0.1 with a loss of your own"):
        train_(small_net(), small_images(), TrainSettings(label_smoothing=0.1), loss_fn=nn.functional.cross_entropy)
    net = small_net()
    before = weights_of(net)
    assert train_(net, small_images(), TrainSettings(epochs=0)).epochs == ()
    assert_same_bits(weights_of(net), before)


# momentum through a cut


def test_momentum_is_cut_like_the_weights() -> None:
    buffer = torch.arange(24.0).reshape(4, 3, 2)
    found = carry_momentum(
        {"a": buffer, "b": torch.arange(4.0), "removed": torch.ones(1), "whole": torch.ones(2)},
        {"a": (torch.tensor([0, 3]), torch.tensor([0, 2]), None), "b": (torch.tensor([3, 1]),), "new": (None,)},
        ["a", "b", "new", "whole"],
    )
    assert found.keys() == {"a", "b", "whole"}
    # by hand: element (i, j, k) is 6i + 2j + k; rows 0 and 3, columns 0 and 2
    assert found["a"].tolist() == [[[0, 1], [4, 5]], [[18, 19], [22, 23]]]
    assert found["b"].tolist() == [3, 1]
    assert found["whole"].tolist() == [1, 1]


def test_momentum_carried_over_a_cut_continues_that_of_the_wide_network() -> None:
    # two independent neurons; dropping the first must not show in the training of the second
    examples = Examples(torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[0.5, -1.0]]).double())
    asked = TrainSettings(epochs=1, batch=1, lr=0.01, schedule="constant", weight_decay=0)

    def squares(given: Tensor, wanted: Tensor) -> Tensor:
        return (given - wanted).pow(2).sum()

    wide = seeded_net(lambda: nn.Linear(2, 2, dtype=torch.float64))
    history = train_(wide, examples, replace(asked, epochs=3), loss_fn=squares)
    narrow = nn.Linear(2, 1, dtype=torch.float64)
    narrow.load_state_dict({"weight": wide.weight[1:].detach(), "bias": wide.bias[1:].detach()})
    kept = {"weight": (torch.tensor([1]), None), "bias": (torch.tensor([1]),)}
    train_(wide, examples, asked, loss_fn=squares, momentum=history.momentum)
    half = replace_targets(examples, slice(1, 2))
    train_(narrow, half, asked, loss_fn=squares, momentum=carry_momentum(history.momentum, kept, kept))
    torch.testing.assert_close(narrow.weight, wide.weight[1:], rtol=0, atol=1e-14)
    torch.testing.assert_close(narrow.bias, wide.bias[1:], rtol=0, atol=1e-14)
    with pytest.raises(TrainingError, match=r"momentum of shape \(2, 2\) for 'weight'"):
        train_(narrow, half, asked, loss_fn=squares, momentum=history.momentum)


def replace_targets(examples: Examples, columns: slice) -> Examples:
    assert isinstance(examples.targets, Tensor)
    return Examples(examples.inputs, examples.targets[:, columns])


# BatchNorm recalibration


def test_recalibration_measures_means_and_variances() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.Dropout(0.5)).double()
    data = torch.randn(64, 3, generator=seeded(0)).double() * 5 + 2
    examples = Examples(data, torch.zeros(64))
    net.train()
    net(data)  # some older statistics
    tracked, weight = net[0].num_batches_tracked.clone(), net[0].weight.detach().clone()
    state = torch.get_rng_state()
    recalibrate_(net, examples, batch=64)
    np.testing.assert_allclose(net[0].running_mean, data.numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(net[0].running_var, data.numpy().var(0, ddof=1), rtol=1e-12)
    assert torch.equal(net[0].num_batches_tracked, tracked)
    assert torch.equal(net[0].weight, weight)
    assert net[0].momentum == 0.3
    assert net.training
    assert torch.equal(torch.get_rng_state(), state)
    recalibrate_(net, examples, batch=16)  # the mean over equal batches is the mean over all
    np.testing.assert_allclose(net[0].running_mean, data.numpy().mean(0), rtol=1e-12)


def test_recalibration_is_repeatable_and_undone_on_error() -> None:
    net = small_net()
    train_(net, small_images(), replace(LONG, epochs=1))
    one, other = copy.deepcopy(net), copy.deepcopy(net)
    recalibrate_(one, small_images(), 2, batch=16)
    recalibrate_(other, small_images(), 2, batch=16)
    assert_same_bits(weights_of(one), weights_of(other))
    assert not torch.equal(one[1].running_mean, net[1].running_mean)
    before = weights_of(one)
    one.append(nn.Linear(7, 7))  # does not fit: forward fails after the BatchNorm has seen a batch
    with pytest.raises(RuntimeError):
        recalibrate_(one, small_images())
    assert torch.equal(one[1].running_mean, before["1.running_mean"])
    assert torch.equal(one[1].num_batches_tracked, before["1.num_batches_tracked"])
    with pytest.raises(InvalidInput, match="batches=0"):
        recalibrate_(net, small_images(), 0)


def test_recalibration_repairs_statistics_that_no_longer_fit() -> None:
    net, images = small_net(), small_images(200)
    recalibrate_(net, images)
    good = outputs(net, images)
    with torch.no_grad():
        net[0].weight.mul_(3)  # BatchNorm in train mode would not notice, up to its eps
    assert (outputs(net, images) - good).abs().max() > 0.1
    recalibrate_(net, images)
    torch.testing.assert_close(outputs(net, images), good, rtol=0, atol=1e-3)


# end to end


def digits_net() -> nn.Module:
    return seeded_net(
        lambda: nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
    )


def test_digits_are_learnt() -> None:
    digits, net = load_data("digits"), digits_net()
    seen: list[EpochRecord] = []
    asked = TrainSettings(epochs=8, batch=32, lr=0.1)
    train_(net, digits.train, asked, search=digits.search, on_epoch=seen.append)
    assert [record.epoch for record in seen] == list(range(8))
    assert seen[-1].loss < seen[0].loss / 3
    assert accuracy(net, digits.test) >= 0.97


def test_regression_is_learnt() -> None:
    x = torch.randn(200, 3, generator=seeded(0)).double()
    y = x @ torch.tensor([[2.0], [-1.0], [0.5]]).double() + 3
    net = nn.Linear(3, 1, dtype=torch.float64)
    asked = TrainSettings(epochs=30, batch=20, lr=0.05, weight_decay=0)
    history = train_(net, Examples(x, y), asked, search=Examples(x, y), loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(net.weight, torch.tensor([[2.0, -1.0, 0.5]]).double(), rtol=0, atol=1e-3)
    assert history.epochs[-1].accuracy is None
    assert history.epochs[-1].search_accuracy is None
    assert history.epochs[-1].search_loss < 1e-4


class TwoHeads(nn.Module):
    """A class and a size from one input, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.size = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"kind": self.kind(x), "size": self.size(x)[:, 0]}


def test_several_outputs_are_learnt() -> None:
    x = torch.randn(300, 2, generator=seeded(0))
    examples = Examples(x, {"kind": (x[:, 0] > x[:, 1]).long(), "size": x.sum(1)})

    def both(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> Tensor:
        kind = nn.functional.cross_entropy(given["kind"], wanted["kind"])
        return kind + nn.functional.mse_loss(given["size"], wanted["size"])

    def right_kind(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> Tensor:
        return given["kind"].argmax(1) == wanted["kind"]

    net = seeded_net(TwoHeads)
    history = train_(net, examples, TrainSettings(epochs=20, batch=30, lr=0.1), loss_fn=both, metric=right_kind)
    assert history.epochs[-1].accuracy >= 0.95
    found = evaluate(net, examples, loss_fn=lambda given, wanted: (given["size"] - wanted["size"]).abs(), metric=right_kind)
    assert found.loss < 0.05


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam, torch.optim.AdamW])
def test_an_optimiser_is_carried_through_a_cut(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Its state is that of the weights that stay: a step on the smaller network moves them as on the larger one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    graph = secateurs.trace(model, torch.randn(2, 4, dtype=torch.float64))
    network = graph.module
    optimiser = make(network.parameters())
    inputs = torch.randn(8, 4, dtype=torch.float64)
    for _ in range(3):
        optimiser.zero_grad()
        network(inputs).square().sum().backward()
        optimiser.step()
    keep = torch.tensor([True, False, True, True, False, True])
    with torch.no_grad():  # the removed neurons have no effect: gradients of all others are the same with and without them
        network.get_submodule("2").weight[:, ~keep] = 0
    smaller = secateurs.compact(graph, {"0": keep})
    carried = carry_optimizer(optimiser, network, smaller)
    for one, parts in ((optimiser, network), (carried, smaller.module)):
        one.zero_grad()
        parts(inputs).square().sum().backward()
        one.step()
    rows = keep.nonzero().flatten()
    wide, narrow = (each.get_submodule("0").weight for each in (network, smaller.module))
    torch.testing.assert_close(narrow, wide[rows], rtol=0, atol=1e-12)
    wide, narrow = (each.get_submodule("2").weight for each in (network, smaller.module))
    torch.testing.assert_close(narrow, wide[:, rows], rtol=0, atol=1e-12)
    with pytest.raises(TrainingError, match="parameters that `before` has not"):
        carry_optimizer(optimiser, nn.Linear(1, 1), smaller)
    with pytest.raises(TrainingError, match="after: got GraphModule, wanted the Graph that compact gives"):
        carry_optimizer(optimiser, network, smaller.module)  # type: ignore[arg-type]


def test_an_optimiser_is_not_carried_through_two_cuts_at_once() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    graph = secateurs.trace(network, torch.rand(2, 4))
    optimiser = torch.optim.Adam(graph.module.parameters())
    graph.module(torch.rand(3, 4)).sum().backward()
    optimiser.step()
    smaller = secateurs.compact(graph, {"0": torch.arange(6) > 1})
    twice = secateurs.compact(smaller, {"2": torch.arange(5) > 0})
    with pytest.raises(TrainingError, match="cut several times: carry the optimiser through every cut"):
        carry_optimizer(optimiser, graph.module, twice)
    carry_optimizer(carry_optimizer(optimiser, graph.module, smaller), smaller.module, twice)


# what is done otherwise than asked for


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_float64_stays_float64_and_a_note_says_so(precision: str) -> None:
    asked, images = TrainSettings(epochs=1, batch=16, lr=0.01, precision=precision), small_images().ready(torch.float64)
    net, plain = small_net().double(), small_net().double()
    history = train_(net, images, asked)
    train_(plain, images, replace(asked, precision="float32"))
    assert history.note == f"a network of float64 cannot compute in {precision}: trained in float64"
    assert_same_bits(weights_of(net), weights_of(plain))


@pytest.mark.parametrize(
    ("asked", "ignored"),
    [
        (TrainSettings(), ""),
        (replace(GENTLE, lr=0.01, features=0.0), ""),
        (TrainSettings(batch=8), "batch = 8"),
        (TrainSettings(augment="crop"), "augment = 'crop'"),
        (TrainSettings(batch=8, augment="crop-flip"), "batch = 8 and augment = 'crop-flip'"),
    ],
)
def test_settings_that_a_loader_leaves_without_effect_are_noted(asked: TrainSettings, ignored: str) -> None:
    stream, asked = stream_of(list(small_images().ready().batches(10)), "train"), replace(asked, epochs=1)
    history = train_(small_net(), stream, asked, teacher=small_net(1))
    assert history.epochs[0].steps == 5, "batches are the loader's"
    note = f"the train loader's own batches and augmentation are used, not {ignored}"
    assert history.note == (note if ignored else "")
    assert not train_(small_net(), small_images(), asked, teacher=small_net(1)).note


def test_all_norms_with_running_statistics_are_frozen() -> None:
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.BatchNorm2d(4)),
        *(nn.Flatten(), nn.Linear(16, 3)),
    )
    train_(net, small_images(), TrainSettings(epochs=1, batch=10))  # statistics that are not those of fresh layers
    before = weights_of(net)
    train_(net, small_images(), TrainSettings(epochs=1, batch=10, freeze_batchnorm=True))
    after = weights_of(net)
    assert {name for name in before if torch.equal(before[name], after[name])} == set(dict(net.named_buffers()))


def test_the_users_gradients_come_back_even_after_an_error() -> None:
    net = small_net()
    net[5].weight.grad = given = torch.full_like(net[5].weight, 7.0)
    train_(net, small_images(), TrainSettings(epochs=1, batch=10))
    with pytest.raises(TrainingError):
        train_(net, small_images(), TrainSettings(epochs=1, batch=10, lr=1e30, schedule="constant"))
    assert net[5].weight.grad is given
    assert bool((given == 7).all())
    assert all(weight.grad is None for weight in (net[0].weight, net[5].bias))


# loaders and BatchNorm


def dense_net(*, track: bool = True) -> nn.Module:
    """BatchNorm behind a linear layer, which cannot normalise a single example."""
    norm = nn.BatchNorm1d(4, track_running_stats=track)
    return seeded_net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4), norm, nn.ReLU(), nn.Linear(4, 3)))


def batches_seen(net: nn.Module, examples: Examples | Stream, asked: TrainSettings) -> list[list[int]]:
    """The row numbers, as targets, of the batches of a training."""
    seen: list[list[int]] = []

    def watching(given: Tensor, wanted: Tensor) -> Tensor:
        seen.append(wanted.tolist())
        return given.square().mean()

    train_(net, examples, asked, loss_fn=watching)
    return seen


def in_batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    rows = torch.arange(sum(sizes))
    return list(zip(torch.randn(sum(sizes), 1, 4, 4, generator=seeded(0)).split(sizes), rows.split(sizes), strict=True))


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_single_example_of_a_loader_is_trained_with_one_of_the_batch_before(shuffled: bool) -> None:
    """1,153 examples in batches of 64 leave one over; the number of steps is the length of the loader."""
    x, y = torch.randn(1153, 1, 4, 4, generator=seeded(0)), torch.arange(1153)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=shuffled)
    seen = batches_seen(dense_net(), stream_of(loader, "train"), TrainSettings(epochs=2))
    assert [len(batch) for batch in seen] == ([64] * 18 + [2]) * 2
    for epoch in (seen[:19], seen[19:]):
        assert epoch[18][0] == epoch[17][-1]
        assert {row for batch in epoch for row in batch} == set(range(1153))


def test_single_examples_of_a_loader_are_as_they_come_where_that_is_possible_or_asked_for() -> None:
    ones, asked = stream_of(in_batches(2, 1), "train"), TrainSettings(epochs=1)
    without = seeded_net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    assert batches_seen(without, ones, asked) == [[0, 1], [2]]
    assert batches_seen(dense_net(), ones, replace(asked, freeze_batchnorm=True)) == [[0, 1], [2]]
    assert batches_seen(dense_net(track=False), ones, replace(asked, freeze_batchnorm=True)) == [[0, 1], [1, 2]]
    assert batches_seen(small_net(), stream_of(in_batches(1, 1), "train"), asked) == [[0], [1]], "16 values a channel"
    assert batches_seen(small_net(), stream_of(in_batches(2, 1, 1, 3), "train"), asked) == [[0, 1], [1, 2], [3], [4, 5, 6]]


@pytest.mark.parametrize("first", [1, 2])
def test_batchnorm_that_has_one_value_is_named(first: int) -> None:
    """A first batch of one has none before it; one of two has examples of another shape here."""
    loader = [(torch.randn(first, 1, 4, 6), torch.arange(first)), (torch.randn(1, 1, 4, 4), torch.arange(1))]
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(1), nn.Linear(1, 3))
    wanted = r"BatchNorm cannot normalise the only value .*Use batch = 2 or more, a loader .*or freeze_batchnorm = true"
    with pytest.raises(InvalidInput, match=wanted):
        train_(net, stream_of(loader, "train"), TrainSettings(epochs=1))
    for images, batch in ((small_images(5), 1), (small_images(1), 128)):
        with pytest.raises(InvalidInput, match=wanted):
            train_(dense_net(), images, TrainSettings(epochs=1, batch=batch))
    train_(dense_net(), small_images(5), TrainSettings(epochs=1, batch=1, freeze_batchnorm=True))


def test_a_training_that_cannot_begin_is_refused_before_it() -> None:
    images, net = small_images(5).ready(), dense_net().eval()
    before, one = weights_of(net), DataLoader(TensorDataset(*in_batches(5)[0]), batch_size=1)
    check_trainable(net, images, TrainSettings(batch=2), sample=images)
    check_trainable(net, images, TrainSettings(batch=1, freeze_batchnorm=True), sample=images)
    check_trainable(small_net(), images, TrainSettings(batch=1), sample=images)
    for examples, asked in ((images, TrainSettings(batch=1)), (stream_of(one, "train"), TrainSettings())):
        with pytest.raises(InvalidInput, match="BatchNorm cannot normalise the only value"):
            check_trainable(net, examples, asked, sample=images)
    assert_same_bits(weights_of(net), before)
    assert not any(part.training for part in net.modules())
    words = Examples(torch.arange(8).view(4, 2), torch.zeros(4))
    for examples in (words, stream_of(list(words.batches(2)), "train")):
        with pytest.raises(InvalidInput, match=r"mixup = 0.5 for inputs of type torch.int64: wanted floating-point numbers"):
            check_trainable(net, examples, TrainSettings(distill=1.0, mixup=0.5), sample=words)
    with pytest.raises(InvalidInput, match="there is nothing to train"):
        check_trainable(net.requires_grad_(False), images, TrainSettings())
    empty = DataLoader(TensorDataset(*in_batches(5)[0]), batch_size=8, drop_last=True)
    with pytest.raises(InvalidInput, match=r"the train loader, whose length is 0: wanted at least one batch"):
        check_trainable(net, stream_of(empty, "train"), TrainSettings())


class Claims(list[tuple[Tensor, Tensor]]):
    """A loader that says that it has three batches."""

    def __len__(self) -> int:
        return 3


def test_a_loader_with_fewer_batches_than_its_length_is_named() -> None:
    net = small_net()
    before = weights_of(net)
    with pytest.raises(DataError, match=r"the train loader gave 2 batches in epoch 0, but its length is 3.*as its len\(\)"):
        train_(net, stream_of(Claims(in_batches(3, 3)), "train"), TrainSettings(epochs=1), loss_fn=flat)
    assert_same_bits(weights_of(net), before)
    train_(net, stream_of(Claims(in_batches(3, 3)), "train"), TrainSettings(epochs=1, steps=2), loss_fn=flat)


def test_a_loader_with_more_batches_than_its_length_is_noted() -> None:
    stream = stream_of(Claims((x, y % 3) for x, y in in_batches(3, 3, 3, 3)), "train")
    history = train_(small_net(), stream, TrainSettings(epochs=2))
    assert [record.steps for record in history.epochs] == [3, 6]
    assert history.note == "the train loader has more batches than its length: epochs end after 3"
    assert not train_(small_net(), stream_of(in_batches(3, 3, 3), "train"), TrainSettings(epochs=1), loss_fn=flat).note
    assert not train_(small_net(), stream, TrainSettings(epochs=1, steps=2)).note


def flat(given: Tensor, wanted: Tensor) -> Tensor:
    return given.square().mean()


def test_mixtures_are_not_compared_with_labels_and_need_two_examples() -> None:
    asked = TrainSettings(epochs=1, batch=10, distill=1.0, mixup=1.0)
    history = train_(small_net(), small_images(), asked, teacher=small_net(7), search=small_images(20, seed=9))
    assert history.epochs[0].accuracy is None
    assert history.epochs[0].search_accuracy is not None
    assert not history.note
    single = DataLoader(TensorDataset(*in_batches(3)[0]), batch_size=1)
    for examples, batch in ((small_images(3), 1), (small_images(1), 128), (stream_of(single, "train"), 128)):
        history = train_(small_net(), examples, replace(asked, batch=batch), teacher=small_net(7))
        assert history.note == "batches of one example have nothing to mix: mixup = 1 has no effect"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_mixtures_of_any_floating_point_type_keep_it(dtype: torch.dtype) -> None:
    """Between 60,000 and -60,000 there is no overflow of float16, whose largest number is 65,504."""
    given = torch.tensor([[6e4], [-6e4]] * 100, dtype=dtype)
    found = mix(given, 1.0, generator=seeded(0))
    assert found.dtype == dtype
    assert bool((found.abs() <= 6e4).all())
    assert not torch.equal(found, given)
