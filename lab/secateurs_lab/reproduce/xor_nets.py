"""Many small XOR networks trained at once as tensors: one axis holds the experiments, and nothing loops over them.

Shape letters: E experiments, N points, H hidden neurons, I inputs (2, or 3 where a constant 1 carries the hidden bias).
An experiment's numbers depend on the seed and on its own index only, never on how many others run beside it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from cyclopts import Parameter
from torch import Tensor

Optimiser = Literal["sgd", "adam"]

# Tensors of a block of experiments stay in the processor's cache: several times faster than all 1,000 in one.
_TRAIN_BLOCK, _SCORE_BLOCK = 512, 4
# Kernels sum in another order in the last few columns: blocks are padded to a multiple of this, so none is ever "the
# last".
_LANES = 64


_INTERNAL = Parameter(parse=False)  # no flag of the command


def _flag(text: str) -> Parameter:
    return Parameter(help=text)


@dataclass(frozen=True)
class Setting:
    """What the paper leaves open, with values that reproduce its Table 1; most are flags of the command."""

    seed: Annotated[int, _INTERNAL] = 1
    experiments: Annotated[int, _flag("Experiments a row, for each seed.")] = 1000
    first: Annotated[int, _INTERNAL] = 0  # index of the first: `first=7, experiments=1` repeats the eighth of a longer run
    optimiser: Annotated[Optimiser, _flag("Trains and retrains all networks; it decides more than anything else here.")] = "sgd"
    learning_rate: Annotated[float, _flag("Of the optimiser.")] = 0.1
    epochs: Annotated[int, _flag("Of training, and of every retraining.")] = 130
    points: Annotated[int, _flag("Training points of an experiment; the same number of fresh points tests it.")] = 1000
    batch: Annotated[int, _INTERNAL] = 32
    off: Annotated[float, _flag("P: share of the neurons switched off in a mask.")] = 0.3
    masks: Annotated[int, _flag("M: masks in an ensemble.")] = 300
    hidden_bias: Annotated[bool, _flag("Give the hidden neurons a bias, which the paper's construction does not have.")] = False


@dataclass(frozen=True)
class Points:
    """Labelled points of every experiment."""

    x: Tensor  # (E, N, I)
    y: Tensor  # (E, N), 1 where the label is +1, else 0


@dataclass(frozen=True)
class XorTask:
    """The XOR problem of every experiment: two directions, training points and fresh points."""

    a: Tensor  # (E, 2)
    b: Tensor  # (E, 2)
    train: Points
    fresh: Points


@dataclass(frozen=True)
class Nets:
    """One network for each experiment: sigmoid(w2 · relu(w1 x) + b2)."""

    w1: Tensor  # (E, H, I)
    w2: Tensor  # (E, H)
    b2: Tensor  # (E,)

    def hidden(self, x: Tensor) -> Tensor:
        """Activations (E, N, H)."""
        return (x @ self.w1.mT).relu()

    def logits(self, x: Tensor) -> Tensor:
        """Outputs before the sigmoid, (E, N); positive means label +1."""
        return (self.hidden(x) @ self.w2[..., None]).squeeze(-1) + self.b2[:, None]

    def take(self, kept: Tensor) -> Nets:
        """Return the networks with only the neurons `kept`, bool (E, H) with the same number in every row."""
        ids = kept.nonzero()[:, 1].reshape(len(kept), -1)
        return Nets(self.w1.gather(1, ids[..., None].expand(-1, -1, self.w1.shape[-1])), self.w2.gather(1, ids), self.b2)


def stream(setting: Setting, purpose: str) -> torch.Generator:
    """Return a generator for one purpose, independent of every other purpose and seed."""
    digest = hashlib.sha256(f"{setting.seed}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def uniform(setting: Setting, purpose: str, *shape: int) -> Tensor:
    """Draw from [0, 1), (E, *shape). Earlier experiments are drawn too and dropped, so that each keeps its own numbers."""
    size = (setting.first + setting.experiments, *shape)
    return torch.rand(size, generator=stream(setting, purpose))[setting.first :]


def make_task(setting: Setting) -> XorTask:
    """Draw orthonormal a and b, and Gaussian points with label sign((a · x)(b · x)), for every experiment."""
    angle = 2 * math.pi * uniform(setting, "angle")
    turn = torch.where(uniform(setting, "turn") < 0.5, 1.0, -1.0)
    a = torch.stack([angle.cos(), angle.sin()], -1)
    b = torch.stack([-angle.sin(), angle.cos()], -1) * turn[:, None]
    train, fresh = (_draw_points(setting, a, b, purpose) for purpose in ("training points", "fresh points"))
    return XorTask(a, b, train, fresh)


def _draw_points(setting: Setting, a: Tensor, b: Tensor, purpose: str) -> Points:
    radius, angle = uniform(setting, purpose, setting.points, 2).unbind(-1)
    # A standard Gaussian point in polar form; torch.randn would make an experiment's points depend on how many are
    # drawn.
    radius, angle = (-2 * (1 - radius).log()).sqrt(), 2 * math.pi * angle
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
    y = ((x @ a[..., None]) * (x @ b[..., None]) > 0).squeeze(-1).float()
    if setting.hidden_bias:
        x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
    return Points(x, y)


def new_nets(setting: Setting, hidden: int, purpose: str) -> Nets:
    """Return networks with PyTorch's default initialisation: uniform in ±1/√(inputs of the neuron)."""
    inputs = 3 if setting.hidden_bias else 2
    first = (2 * uniform(setting, f"{purpose} w1", hidden, inputs) - 1) / math.sqrt(2)
    second = (2 * uniform(setting, f"{purpose} w2", hidden + 1) - 1) / math.sqrt(hidden)
    return Nets(first, second[:, :hidden], second[:, hidden])


def train(nets: Nets, points: Points, setting: Setting, purpose: str, *, held: Nets | None = None) -> Nets:
    """Train every network on its own points with binary cross-entropy, from its present weights.

    `held` is 1 where a weight is trained and 0 where it stays zero.

    The batches of an epoch hold the same indices in all experiments: their points are independent, so their training
    is.
    """
    generator = stream(setting, f"{purpose} order")
    orders = [torch.randperm(points.y.shape[-1], generator=generator) for _ in range(setting.epochs)]

    def work(w1: Tensor, w2: Tensor, b2: Tensor, x: Tensor, y: Tensor, *free: Tensor) -> tuple[Tensor, ...]:
        # Experiments last: they are the columns of the processor's vector unit. w1 (I, H, E), w2 (H, E), b2 (E,), x (I, N, E).
        held = [t.movedim(0, -1) for t in (free[0].mT, *free[1:])] if free else []
        w1, w2, b2, x, y = (t.movedim(0, -1).contiguous() for t in (w1.mT, w2, b2, x.mT, y))
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[setting.optimiser]
        optimiser = kind([w1, w2, b2], lr=setting.learning_rate)
        for order in orders:
            for batch in torch.split(order, setting.batch):
                w1.grad, w2.grad, b2.grad = _gradients(w1, w2, b2, x[:, batch], y[batch])
                optimiser.step()
                for weight, mask in zip((w1, w2, b2), held, strict=False):
                    weight.mul_(mask)
        return w1.movedim(-1, 0).mT, w2.movedim(-1, 0), b2

    free = () if held is None else (held.w1, held.w2, held.b2)
    trained = _in_blocks(work, _TRAIN_BLOCK, nets.w1, nets.w2, nets.b2, points.x, points.y, *free)
    return Nets(*(t.contiguous() for t in trained))


def _gradients(w1: Tensor, w2: Tensor, b2: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of each experiment's mean binary cross-entropy; written out, far faster than autograd."""
    hidden = w1[0, :, None] * x[0]
    for weights, values in zip(w1[1:], x[1:], strict=True):
        hidden.addcmul_(weights[:, None], values)
    hidden.relu_()
    error = (w2[:, None] * hidden).sum(0).add_(b2).sigmoid_().sub_(y).div_(len(y))
    for_w2 = (hidden * error).sum(1)
    reached = hidden.sign_().mul_(error)  # relu's slope is 1 where it let something through, else 0
    for_w1 = torch.stack([(reached * values).sum(1) * w2 for values in x])
    return for_w1, for_w2, error.sum(0)


def accuracies(nets: Nets, points: Points) -> Tensor:
    """Return the share of points with the right label, (E,)."""
    return ((nets.logits(points.x) > 0) == (points.y > 0.5)).double().mean(-1)


def mask_losses(nets: Nets, points: Points, masks: Tensor) -> Tensor:
    """Return the mean loss (E, M) of every network under every mask over its neurons, bool (E, M, H), True = kept."""

    def work(w1: Tensor, w2: Tensor, b2: Tensor, x: Tensor, y: Tensor, kept: Tensor) -> tuple[Tensor]:
        against = 1 - 2 * y  # -1 where the label is +1: the loss is softplus(against * logit)
        shares = Nets(w1, w2, b2).hidden(x) * w2[:, None] * against[..., None]
        signed = torch.baddbmm((against * b2[:, None])[:, None], kept, shares.mT)
        return (torch.nn.functional.softplus(signed).mean(-1),)

    given = (nets.w1, nets.w2, nets.b2, points.x, points.y, masks.to(nets.w1))
    return _in_blocks(work, _SCORE_BLOCK, *given)[0]


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: on tensors this small a second one costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_blocks(work: Callable[..., tuple[Tensor, ...]], size: int, *tensors: Tensor) -> list[Tensor]:
    """Apply `work` to blocks of experiments and join the results; the last block is filled up by repeating experiments."""
    count = len(tensors[0])
    step = min(size, _LANES)
    padded = torch.arange(math.ceil(count / step) * step) % count
    blocks = torch.split(padded, size)
    results = [work(*(t[ids] for t in tensors)) for ids in blocks]
    return [torch.cat(parts)[:count] for parts in zip(*results, strict=True)]
