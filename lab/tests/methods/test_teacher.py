"""The teacher of a comparison: asked once for a batch, and nobody can tell but by the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nets import assert_same_bits
from secateurs import trace
from secateurs.config import TrainSettings
from secateurs.data import Data, load_digits, subset
from secateurs.errors import RunError
from secateurs.graph.trace import Graph
from secateurs.models import build
from secateurs.scoring.cache import MeasurementCache
from secateurs.training import train_
from secateurs_lab.methods import Budget, Task, method
from secateurs_lab.methods.teacher import RecallingTeacher

AFTER = TrainSettings(epochs=2, batch=32, lr=0.05, schedule="linear", distill=1.0, temperature=2.0)
BUDGET = Budget("distilled", after=AFTER, keep_best=True)


class Counting(nn.Module):
    """Answers as another module does, and counts how often it or a copy of it is asked."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, Calls()

    @property
    def asked(self) -> int:
        return len(self.calls)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls.append(len(inputs))
        outputs: Tensor = self.inner(inputs)
        return outputs


class Calls(list[int]):
    """A list that its copies share."""

    def __deepcopy__(self, memo: object) -> Calls:
        return self


@pytest.fixture(scope="module")
def data() -> Data:
    whole = load_digits()
    return Data("digits", *(subset(part, 100, seed=0) for part in (whole.train, whole.search, whole.test)))


@pytest.fixture(scope="module")
def graph(data: Data) -> Graph:
    torch.manual_seed(0)
    net = build("mlp", hidden=(16, 8))
    train_(net, data.train, TrainSettings(epochs=4, batch=32, lr=0.2))
    return trace(net.eval(), torch.randn(2, 1, 8, 8))


def answered(*inputs: Tensor) -> Callable[[nn.Module], list[Tensor]]:
    def ask(module: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            return [module(each) for each in inputs]

    return ask


def test_a_batch_is_asked_once_and_every_bit_of_it_counts(tmp_path: Path) -> None:
    net, batch = Counting(nn.Linear(4, 3)), torch.randn(5, 4)
    near = batch.clone()
    near[2, 1] = torch.nextafter(near[2, 1], torch.tensor(9.0))
    for _ in range(2):  # the second time from the file
        cache = MeasurementCache(tmp_path / "answers.sqlite")
        found = answered(batch, near, batch[:4], batch.double()[:, :4].float())(RecallingTeacher(net, cache))
        wanted = answered(batch, near, batch[:4], batch)(net.inner)
        assert_same_bits(dict(enumerate(found)), dict(enumerate(wanted)))  # type: ignore[arg-type]
        cache.close()
    assert net.asked == 3  # the last of the four is the first again


def other_weights() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    with torch.no_grad():
        net[0].bias[0] += 1
    return net


class Scaled(nn.Sequential):
    """Has a buffer that its state dict leaves out."""

    def __init__(self, factor: float) -> None:
        super().__init__(nn.Linear(4, 3), nn.ReLU())
        self.register_buffer("factor", torch.tensor(factor), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


@pytest.mark.parametrize("other", [other_weights, lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), lambda: Scaled(2.0)])
def test_another_network_has_answers_of_its_own(other: Callable[[], nn.Module], tmp_path: Path) -> None:
    """The same weights may belong to another activation, the same state dict to another buffer."""
    nets = []
    for make in (lambda: Scaled(1.0), lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()), other):
        torch.manual_seed(0)
        nets.append(make())
    batch, path = torch.randn(5, 4), tmp_path / "answers.sqlite"
    for _ in range(2):
        for net in nets:
            (found,) = answered(batch)(RecallingTeacher(net, MeasurementCache(path)))
            assert torch.equal(found, net(batch))


def test_a_teacher_stays_what_it_was(tmp_path: Path) -> None:
    """Nothing that is done to the network meanwhile gets into the answers: other weights, or training mode."""
    torch.manual_seed(0)
    net, batch = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), torch.randn(5, 4)
    wanted = net.eval()(batch).detach()
    teacher = RecallingTeacher(net, MeasurementCache(tmp_path / "answers.sqlite"))
    with torch.no_grad():
        net[0].weight.mul_(2)
    teacher.train()
    for _ in range(2):
        assert torch.equal(answered(batch)(teacher)[0], wanted)


def test_answers_in_half_precision_are_others(tmp_path: Path) -> None:
    net, batch, cache = Counting(nn.Linear(4, 3)), torch.randn(5, 4), MeasurementCache(tmp_path / "answers.sqlite")
    teacher = RecallingTeacher(net, cache)
    plain = answered(batch)(teacher)[0]
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = answered(batch)(teacher)[0]
            torch.testing.assert_close(half, net.inner(batch).detach().float(), rtol=0, atol=0)
    assert net.asked == 2
    assert not torch.equal(half, plain)


def test_what_is_not_one_small_tensor_of_numbers_is_not_kept(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path / "answers.sqlite")

    class Two(nn.Module):
        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return inputs, inputs + 1

    batch = torch.randn(3, 4)
    assert torch.equal(RecallingTeacher(Two(), cache)(batch)[1], batch + 1)
    assert torch.equal(RecallingTeacher(nn.Upsample(scale_factor=30_000), cache)(batch[None])[..., 0], batch[None, ..., 0])
    assert len(cache) == 0


def test_damaged_answers_are_an_error(tmp_path: Path) -> None:
    path, batch = tmp_path / "answers.sqlite", torch.randn(5, 4)
    net = nn.Linear(4, 3)
    cache = MeasurementCache(path)
    answered(batch)(RecallingTeacher(net, cache))
    cache.close()
    raw = path.read_bytes()
    value = answered(batch)(net)[0].numpy().tobytes()
    assert value in raw
    path.write_bytes(raw.replace(value, bytes(len(value))))
    with pytest.raises(RunError, match="does not match its checksum"):
        answered(batch)(RecallingTeacher(net, MeasurementCache(path)))


def test_rows_of_one_seed_share_the_answers_and_end_as_without(
    graph: Graph, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, forward = Calls(), RecallingTeacher.forward

    def counted(self: RecallingTeacher, *inputs: Tensor) -> Any:
        before = self.spared
        answer = forward(self, *inputs)
        if self.spared == before:
            asked.append(len(inputs[0]))
        return answer

    monkeypatch.setattr(RecallingTeacher, "forward", counted)
    alone = Task(graph, data, 0.3, BUDGET)
    wanted = {name: method(name)(alone) for name in ("l1:uniform", "fpgm:uniform")}
    shared, counts = replace(alone, answers=tmp_path / "answers.sqlite"), []
    for name, pruned in wanted.items():
        asked.clear()
        found = method(name)(shared)
        counts.append(len(asked))
        assert_same_bits(found.graph.module.state_dict(), pruned.graph.module.state_dict())
    asked.clear()
    method("l1:uniform")(replace(shared, budget=replace(BUDGET, after=replace(AFTER, lr=0.1))))
    # two epochs of four batches, and one batch of held-out images however many weights they compare; then nothing new
    assert [*counts, len(asked)] == [2 * 4 + 1, 0, 0]


def test_the_seconds_of_a_row_do_not_depend_on_who_asked_first(
    graph: Graph, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay, begin = 0.02, RecallingTeacher.__init__

    def slow(self: RecallingTeacher, *args: Any) -> None:
        begin(self, *args)
        self.teacher.register_forward_pre_hook(lambda module, inputs: sleep(delay))

    monkeypatch.setattr(RecallingTeacher, "__init__", slow)
    task = Task(graph, data, 0.3, BUDGET, answers=tmp_path / "answers.sqlite")
    assert all(method("l1:uniform")(task).training_seconds > 9 * delay for _ in range(2))
