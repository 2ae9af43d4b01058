"""Networks for the tests: random weights and statistics, random cuts, and networks that are generated."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateurs import Graph, Site, compact, masked, trace
from secateurs.data import Examples
from secateurs.graph.layers import SumInto
from secateurs.graph.trace import tensors_in
from secateurs.models import build, example_input
from secateurs_lab.models.topologies import InvertedResidual

ATOL = 1e-12
"""What rounding in float64 may make of outputs of size 1 (they are kept at that size by `randomise_`)."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def randomise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """In place: float64, eval mode, weights that keep activations of size 1, and no statistic or bias left at 0 or 1."""
    generator = seeded(seed)
    model.double().eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        with torch.no_grad():
            if name.endswith("running_var") or (tensor.dim() < 2 and name.endswith("weight")):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64))
            else:
                fan = max(tensor[0].numel(), 1) if tensor.dim() > 1 else 4
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / fan**0.5)
    return model


class Net(nn.Module):
    """The named layers, and a function of the network and its input that is its forward."""

    def __init__(self, body: Callable[..., Any], **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class TwoInputs(Net):
    """The same with two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return self.body(self, x, y)


def random_keep(sites: list[Site], seed: int, share: float = 0.5) -> dict[str, Tensor]:
    """A mask for each site that drops about `share` of its channels, and keeps one at least."""
    generator = seeded(seed)
    masks = {}
    for site in sites:
        keep = torch.rand(site.channels, generator=generator) >= share
        keep[torch.randint(site.channels, (), generator=generator)] = True
        masks[site.name] = keep
    return masks


def without(channels: int, *removed: int) -> Tensor:
    """The mask that keeps all channels but the removed ones."""
    keep = torch.ones(channels, dtype=torch.bool)
    keep[list(removed)] = False
    return keep


def conv(into: int, out: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    """A convolution that keeps the size of an image unless options say otherwise."""
    return nn.Conv2d(into, out, kernel, **({"padding": kernel // 2} | options))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """The same names and, bit for bit, the same tensors."""
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def add_as_if_large_(module: nn.Module, large: int = 0) -> None:
    """In place: sums with a narrow term take the form for inputs of `large` values a channel already at smaller ones."""
    for part in module.modules():
        if isinstance(part, SumInto):
            part.large = large


def assert_same(got: Any, wanted: Any, atol: float = ATOL) -> None:
    """The same tensors up to rounding, NaN where the other has NaN; `atol` is for outputs up to size 1."""
    ours, theirs = tensors_in(got), tensors_in(wanted)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        finite = b[b.isfinite()].abs() if b.is_floating_point() else b[:0]
        scale = max(1.0, float(finite.max()) if finite.numel() else 1.0)
        torch.testing.assert_close(a, b, rtol=0, atol=atol * scale, equal_nan=True)


def run(module: nn.Module, *inputs: Tensor) -> Any:
    with torch.no_grad():
        return module(*copy.deepcopy(inputs))


def run_exported(kind: str, path: Path, batches: Sequence[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """The outputs of an exported file, for each batch."""
    network = torch.export.load(path).module() if kind == "pt2" else runpy.run_path(str(path / "model.py"))["load"]()
    return [tensors_in(run(network, *batch)) for batch in batches]


def assert_compact_is_masked(
    graph: Graph, masks: Mapping[str, Tensor], *batches: tuple[Tensor, ...], prove: bool = True
) -> Graph:
    """Compact, compare with the masked network on the example and on other batches, and return the compacted graph.

    With `prove`, `compact` makes its own comparison too, as it does for users.
    """
    smaller, reference = compact(graph, masks, verify=prove), masked(graph, masks)
    for batch in (graph.example, *batches):
        assert_same(run(smaller.module, *batch), run(reference, *batch))
    return smaller


def traced(model: nn.Module, *example: Tensor, seed: int = 0, **options: Any) -> Graph:
    """The graph of the randomised network."""
    return trace(randomise_(model, seed), example, **options)


# ---- built-in networks, narrow -------------------------------------------------------------------------------------------


TOPOLOGIES = {
    **{name: {} for name in ("fcn3", "mlp", "cnn1d", "split-small", "densenet-small", "mobilenet-small", "resnext-small")},
    "unet-small": {},
    "resnet8": {"widths": (4, 6, 8)},
    "resnet8-b": {"widths": (4, 6, 8)},
}
"""A network of every topology in `models`, as narrow as it gets; the deeper ResNets are resnet8 again."""


def with_few_blocks(name: str) -> nn.Module:
    """The network with one block of each kind: what all cuts of a network cost grows with the square of the sites."""
    model = build(name, **TOPOLOGIES.get(name, {}))
    if name == "mobilenet-small":
        model.blocks = nn.Sequential(model.blocks[0], InvertedResidual(8, 32, stride=2, expansion=3))  # residual, then not
    elif name == "resnext-small":
        model.blocks = model.blocks[:3]  # projected, plain, strided
    return model


@cache
def random_problem(name: str, dtype: torch.dtype = torch.float64, count: int = 7) -> tuple[Graph, Examples]:
    """A narrow network of that topology with random BatchNorm statistics, and random examples for it."""
    torch.manual_seed(0)
    model = build(name, **TOPOLOGIES[name]).eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(part.get_buffer("running_mean"), 0, 0.2, generator=seeded(1))
            nn.init.uniform_(part.get_buffer("running_var"), 0.5, 1.5, generator=seeded(2))
            nn.init.uniform_(part.weight, 0.5, 1.5, generator=seeded(3))
            nn.init.normal_(part.bias, 0, 0.2, generator=seeded(4))
    inputs = example_input(name, count).to(dtype)
    graph = trace(model.to(dtype), inputs[:2])
    shape = graph.module(inputs).shape
    classes = max(shape[1], 2) if len(shape) > 1 else 2
    return graph, Examples(inputs, torch.randint(classes, (count, *shape[2:]), generator=seeded(5)))


# ---- generated networks: a stem, some blocks, a head --------------------------------------------------------------------


def _norm_act(channels: int, draw: Draw) -> nn.Sequential:
    parts: list[nn.Module] = [nn.BatchNorm2d(channels)] if draw.one_in(2) else []
    return nn.Sequential(*parts, draw.activation(channels))


class Draw:
    """Small random choices from a seed; the same seed gives the same network."""

    def __init__(self, seed: int) -> None:
        self.generator = seeded(seed)

    def between(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def one_in(self, count: int) -> bool:
        return self.between(1, count) == 1

    def activation(self, channels: int) -> nn.Module:
        made: list[Callable[[], nn.Module]] = [
            lambda: nn.ReLU(inplace=self.one_in(2)),
            nn.ReLU,
            nn.SiLU,
            nn.Sigmoid,
            nn.Identity,
            lambda: nn.PReLU(channels),
            lambda: nn.LeakyReLU(0.1, inplace=True),
            lambda: nn.Hardtanh(0.25, 2.0),
        ]
        return made[self.between(0, len(made) - 1)]()

    def conv(self, into: int, out: int, kernel: int | None = None, **options: Any) -> nn.Conv2d:
        kernel = kernel or 1 + 2 * self.between(0, 1)
        options = {"padding": kernel // 2, "bias": self.one_in(2)} | options
        return nn.Conv2d(into, out, kernel, **options)


class Chain(nn.Module):
    """Convolution, sometimes BatchNorm, activation, sometimes a pool."""

    def __init__(self, channels: int, size: int, draw: Draw) -> None:
        super().__init__()
        out = draw.between(2, 7)
        padding_mode = ("zeros", "circular", "replicate")[draw.between(0, 2)]
        self.conv = draw.conv(channels, out, padding_mode=padding_mode)
        self.act = _norm_act(out, draw)
        pools = [nn.Identity(), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.Dropout2d(0.3), nn.ZeroPad2d((0, 1, 0, 0))]
        self.pool = pools[draw.between(0, len(pools) - 1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.act(self.conv(x)))


class Residual(nn.Module):
    """Two convolutions beside a shortcut: the input itself, option A where it gets wider, or a projection."""

    def __init__(self, channels: int, size: int, draw: Draw) -> None:
        super().__init__()
        kind = draw.between(0, 3)
        self.stride = 2 if kind in (1, 2) and size >= 4 else 1
        out = channels + draw.between(0, 4) if kind in (1, 2) else channels
        middle = draw.between(2, 6)
        self.conv1 = draw.conv(channels, middle, 3, stride=self.stride)
        self.act1 = _norm_act(middle, draw)
        self.conv2 = draw.conv(middle, out)
        self.norm2 = nn.BatchNorm2d(out) if draw.one_in(2) else nn.Identity()
        self.project = draw.conv(channels, out, 1, stride=self.stride) if kind == 2 else None
        before = (out - channels) // 2
        self.pad = (0, 0, 0, 0, before, out - channels - before)
        self.in_place = draw.one_in(2)
        self.last = draw.activation(out)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.act1(self.conv1(x))))
        if self.project is not None:
            x = self.project(x)
        elif self.stride > 1 or any(self.pad):
            x = F.pad(x[:, :, :: self.stride, :: self.stride], self.pad)
        if self.in_place:
            y += x
            return self.last(y)
        return self.last(x + y)


class PreActivation(nn.Module):
    """The input plus what BatchNorm, activation and two convolutions make of it, scaled by a parameter."""

    def __init__(self, channels: int, size: int, draw: Draw) -> None:
        super().__init__()
        middle = draw.between(2, 6)
        self.act1, self.act2 = _norm_act(channels, draw), _norm_act(middle, draw)
        self.conv1, self.conv2 = draw.conv(channels, middle), draw.conv(middle, channels)
        self.scale = nn.Parameter(torch.ones(channels, 1, 1)) if draw.one_in(2) else 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.conv2(self.act2(self.conv1(self.act1(x))))


class Dense(nn.Module):
    """New channels behind, before and around the old ones."""

    def __init__(self, channels: int, size: int, draw: Draw) -> None:
        super().__init__()
        out = draw.between(2, 4)
        self.norm, self.conv, self.act = _norm_act(channels, draw), draw.conv(channels, out), draw.activation(out)
        self.order = draw.between(0, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.conv(self.norm(x)))
        return torch.cat([[x, y], [y, x], [y, x, y]][self.order], 1)


class Grouped(nn.Module):
    """Into a multiple of the groups, through a grouped convolution (shuffled or not), and on."""

    def __init__(self, channels: int, size: int, draw: Draw) -> None:
        super().__init__()
        self.groups = draw.between(2, 3)
        middle, out = self.groups * draw.between(1, 3), self.groups * draw.between(1, 3)
        self.widen, self.act1 = draw.conv(channels, middle, 1), _norm_act(middle, draw)
        self.conv, self.act2 = draw.conv(middle, out, 3, groups=self.groups), _norm_act(out, draw)
        self.shuffle = nn.ChannelShuffle(self.groups) if draw.one_in(3) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.act2(self.conv(self.act1(self.widen(x)))))


class Separable(nn.Module):
    """Pointwise, depthwise (with a multiplier now and then), squeeze and excite, pointwise; residual if it fits."""

    def __init__(self, channels: int, size: int, draw: Draw) -> None:
        super().__init__()
        wide, times = draw.between(2, 6), draw.between(1, 2)
        out = channels if draw.one_in(2) else draw.between(2, 6)
        self.expand, self.act1 = draw.conv(channels, wide, 1), _norm_act(wide, draw)
        self.depthwise, self.act2 = draw.conv(wide, wide * times, 3, groups=wide), _norm_act(wide * times, draw)
        self.squeeze, self.excite = nn.Conv2d(wide * times, 3, 1), nn.Conv2d(3, wide * times, 1)
        self.project = draw.conv(wide * times, out, 1)
        self.gated, self.residual = draw.one_in(2), out == channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.act2(self.depthwise(self.act1(self.expand(x))))
        if self.gated:
            y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y = self.project(y)
        return x + y if self.residual else y


class Parts(nn.Module):
    """Channels are divided (chunk, uneven split, slices), treated differently and joined again."""

    def __init__(self, channels: int, size: int, draw: Draw) -> None:
        super().__init__()
        self.kind = draw.between(0, 3)
        left = [(channels + 1) // 2, 1, (channels + 1) // 2, channels - 1][self.kind]
        self.sizes = [left, channels - left]
        right = max(channels - left, 1)
        out = draw.between(2, 4)
        self.left, self.right = draw.conv(left, out), draw.conv(right, out)
        self.act = draw.activation(out)
        self.sums = draw.one_in(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == 0:
            a, b = x.chunk(2, 1)
        elif self.kind == 1:
            a, b = torch.split(x, self.sizes, dim=1)
        elif self.kind == 2:
            a, b = x[:, ::2], x[:, 1::2]
        else:
            a, b = x[:, 1:], x[:, :1]
        a, b = self.left(a), self.act(self.right(b))
        return a + b if self.sums else torch.cat([b, a], dim=1)


class Hourglass(nn.Module):
    """Down by a stride or a pool, up by a transposed convolution or interpolation, joined with the finer features."""

    def __init__(self, channels: int, size: int, draw: Draw) -> None:
        super().__init__()
        low = 2 * draw.between(1, 3)
        self.down = draw.conv(channels, low, 2, stride=2, padding=0)
        self.act = _norm_act(low, draw)
        groups = draw.between(1, 2)
        self.up = nn.ConvTranspose2d(low, 2 * draw.between(1, 3), 2, stride=2, groups=groups, bias=draw.one_in(2))
        self.interpolates, self.adds = draw.one_in(3), draw.one_in(2)
        self.match = draw.conv(low if self.interpolates else self.up.out_channels, channels, 1)
        self.act2 = draw.activation(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.down(x))
        y = F.interpolate(y, scale_factor=2.0) if self.interpolates else self.up(y)
        y = self.act2(self.match(y))
        return x + y if self.adds else torch.cat([x, y], 1)


class Mixed(nn.Module):
    """LayerNorm over the channels (they lie last there) or GroupNorm, then a perceptron at every pixel."""

    def __init__(self, channels: int, size: int, draw: Draw) -> None:
        super().__init__()
        self.last = draw.one_in(2)
        self.norm = nn.LayerNorm(channels) if self.last else nn.GroupNorm(1, channels)
        middle = draw.between(2, 6)
        self.fc1, self.act, self.fc2 = nn.Linear(channels, middle), nn.GELU(), nn.Linear(middle, channels)
        self.residual = draw.one_in(2)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.last else self.norm(x)
        y = y.permute(0, 2, 3, 1)
        y = self.norm(y) if self.last else y
        y = self.fc2(self.act(self.fc1(y))).permute(0, 3, 1, 2)
        return x + y if self.residual else y


class Products(nn.Module):
    """Branches that are multiplied, attention over space, differences, the larger of two."""

    def __init__(self, channels: int, size: int, draw: Draw) -> None:
        super().__init__()
        out = draw.between(2, 5)
        self.a, self.b = draw.conv(channels, out), draw.conv(channels, out)
        self.act1, self.act2 = _norm_act(out, draw), draw.activation(out)
        self.look = nn.Conv2d(out, 1, 1)
        self.kind = draw.between(0, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.act1(self.a(x)), self.act2(self.b(x))
        if self.kind == 0:
            return a * b
        if self.kind == 1:
            return a * torch.sigmoid(self.look(b))
        if self.kind == 2:
            return a - 0.5 * b
        if self.kind == 3:
            return torch.maximum(a, b) + 1
        return torch.cat([a, b], 2)[:, :, : a.size(2)] + a.mean((2, 3), keepdim=True)


BLOCKS: dict[str, type[nn.Module]] = {
    block.__name__: block
    for block in (Chain, Residual, PreActivation, Dense, Grouped, Separable, Parts, Hourglass, Mixed, Products)
}
HEADS = ("mean", "flatten", "view", "pixels", "perceptron", "conv")


class Generated(nn.Module):
    """A stem, the named blocks with random sizes, and a head."""

    def __init__(self, blocks: Sequence[str], head: str, seed: int) -> None:
        super().__init__()
        draw = Draw(seed)
        self.head = head
        self.stem = draw.conv(3, draw.between(2, 6), 3)
        self.act = _norm_act(self.stem.out_channels, draw)
        self.blocks = nn.Sequential()
        x = self.act(self.stem(torch.zeros(2, 3, 8, 8)))
        for name in blocks:
            block = BLOCKS[name](x.shape[1], x.shape[2], draw)
            if name == "Hourglass" and any(n % 2 for n in x.shape[2:]):
                continue  # would not come up to the size it went down from
            x = block(x)
            self.blocks.append(block)
        channels, features = x.shape[1], x[0].numel()
        self.hidden = nn.Linear(features if head in ("flatten", "view") else channels, 6)
        self.norm = nn.BatchNorm1d(6)
        self.classify = nn.Linear(6, 4)
        self.out = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.act(self.stem(x)))
        if self.head == "conv":
            return self.out(x)
        if self.head == "pixels":
            return self.classify(F.relu(self.hidden(x.permute(0, 2, 3, 1))))
        if self.head == "flatten":
            x = torch.flatten(x, 1)
        elif self.head == "view":
            x = x.contiguous().view(x.size(0), -1)
        elif self.head == "mean":
            x = x.mean((2, 3))
        else:
            x = F.adaptive_max_pool2d(x, 1).flatten(1)
        return self.classify(F.relu(self.norm(self.hidden(x))))
