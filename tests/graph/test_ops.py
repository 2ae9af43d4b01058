"""One op each, as small as it gets, in module, functional and method form: compact = masked for random cuts of all its
sites, or refused with a reason; never wrong, never a crash."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from nets import (
    Net,
    TwoInputs,
    assert_compact_is_masked,
    assert_same,
    conv,
    random_keep,
    random_tensor,
    randomise_,
    run,
    seeded,
    traced,
)
from secateurs import compact, find_sites, masked, rule, trace, verify
from secateurs.errors import EmptyLayer, Untraceable
from secateurs.graph.flow import Flow, Op, channelwise
from secateurs.graph.flow.table import RULES
from secateurs.graph.masking import split_at
from secateurs.graph.sites import find_site
from secateurs.graph.trace import RULED
from secateurs.models import build

Parts = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Case:
    """A network with one op, the shape of its input, the sites it must have, and the layers it must refuse, with reasons."""

    body: Callable[..., Any]
    parts: Parts
    sites: tuple[str, ...] = ("a",)
    refused: Mapping[str, str] = field(default_factory=dict)
    shape: tuple[int, ...] = (2, 3, 8, 8)
    other_batches: bool = True
    may_empty: bool = False  # a cut can leave one of several readers nothing


CASES: dict[str, Case] = {}


def op(name: str, body: Callable[..., Any], parts: Parts, sites: tuple[str, ...] = ("a",), **rest: Any) -> None:
    assert name not in CASES
    CASES[name] = Case(body, parts, sites, **rest)


def between(
    name: str, f: Callable[..., Any], reason: str = "", out: int = 8, may_empty: bool = False, **parts: Callable[[], Any]
) -> None:
    """Put `f` (of the tensor, or of the network and the tensor) between convolutions a and b; `reason` refuses a."""
    of_net = f.__code__.co_argcount == 2 and not f.__defaults__

    def body(net: Net, x: Tensor) -> Tensor:
        return net.b(f(net, net.a(x)) if of_net else f(net.a(x)))

    def made() -> dict[str, Any]:
        return {"a": conv(3, 8), "b": conv(out, 4)} | {part: make() for part, make in parts.items()}

    op(name, body, made, () if reason else ("a",), refused={"a": reason} if reason else {}, may_empty=may_empty)


def parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.ones(shape))


# ---- layers -----------------------------------------------------------------------------------------------------------

for dims in (1, 2, 3):
    Conv, Transposed = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
    Norm, Instance = getattr(nn, f"BatchNorm{dims}d"), getattr(nn, f"InstanceNorm{dims}d")
    shape = (2, 3, *[6] * dims)

    def layered(make: Callable[..., nn.Module], out: int = 8, conv: Any = Conv, **options: Any) -> Parts:
        """a, the layer g from 8 to `out` channels, and b."""
        return lambda: {"a": conv(3, 8, 1), "g": make(8, out, 3, **options), "b": conv(out, 4, 1)}

    def two_layers(net: Net, x: Tensor) -> Tensor:
        return net.b(F.relu(net.g(F.relu(net.a(x)))))

    for label, options in {
        "plain": {},
        "stride": {"stride": 2},
        "dilation": {"dilation": 2, "padding": 2},
        "no bias": {"bias": False, "padding": 1},
        "grouped": {"groups": 4, "padding": 1},
        "grouped by 2, no bias": {"groups": 2, "bias": False},
    }.items():
        emptied = {"may_empty": "groups" in options}
        op(f"Conv{dims}d {label}", two_layers, layered(Conv, **options), ("a", "g"), shape=shape, **emptied)
        op(f"ConvTranspose{dims}d {label}", two_layers, layered(Transposed, **options), ("a", "g"), shape=shape, **emptied)
    for mode in ("circular", "reflect", "replicate"):
        if (dims, mode) != (3, "reflect"):  # torch has no such
            parts = layered(Conv, padding_mode=mode, padding=1)
            op(f"Conv{dims}d {mode}", two_layers, parts, ("a", "g"), shape=shape)
    op(
        f"ConvTranspose{dims}d with output padding",
        two_layers,
        layered(Transposed, stride=2, output_padding=1),
        ("a", "g"),
        shape=shape,
    )
    parts = layered(Transposed, out=4, groups=2, stride=2)
    op(f"ConvTranspose{dims}d grouped, fewer out", two_layers, parts, ("a", "g"), shape=shape, may_empty=True)
    for bias in (False, True):
        parts = layered(Conv, groups=8, bias=bias, padding=1)
        op(f"depthwise Conv{dims}d, bias={bias}", two_layers, parts, ("a",), shape=shape)
    parts = layered(Conv, out=16, groups=8, bias=False, padding=1)
    op(f"depthwise Conv{dims}d, two filters a channel", two_layers, parts, ("a", "g"), shape=shape, may_empty=True)

    def normed(net: Net, x: Tensor) -> Tensor:
        return net.b(F.relu(net.n(net.a(x))))

    for label, make in {
        f"BatchNorm{dims}d": lambda N=Norm: N(8),
        f"BatchNorm{dims}d without weights": lambda N=Norm: N(8, affine=False),
        f"BatchNorm{dims}d without statistics": lambda N=Norm: N(8, track_running_stats=False),
        f"InstanceNorm{dims}d": lambda N=Instance: N(8),
        f"InstanceNorm{dims}d with all": lambda N=Instance: N(8, affine=True, track_running_stats=True),
    }.items():
        op(label, normed, lambda C=Conv, m=make: {"a": C(3, 8, 1), "n": m(), "b": C(8, 4, 1)}, shape=shape)
    for pool in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool"):
        word = "".join(f"_{c.lower()}" if c.isupper() else c for c in pool)[1:]
        function = getattr(F, f"{word}{dims}d")
        op(
            f"{pool}{dims}d",
            lambda net, x: net.b(net.p(F.relu(net.a(x)))),
            lambda C=Conv, P=getattr(nn, f"{pool}{dims}d"): {"a": C(3, 8, 1), "p": P(2), "b": C(8, 4, 1)},
            shape=shape,
        )
        op(
            f"F.{word}{dims}d",
            lambda net, x, f=function: net.b(f(F.relu(net.a(x)), 2)),
            lambda C=Conv: {"a": C(3, 8, 1), "b": C(8, 4, 1)},
            shape=shape,
        )

for label, pool in {
    "F.max_pool1d": lambda x: F.max_pool1d(x, 3, 1, 1),
    "F.adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 8),
}.items():  # torch takes (N, C) for one example of N channels
    op(
        f"{label} over features (N, C)",
        lambda net, x, pool=pool: net.b(pool(F.relu(net.a(x)))),
        lambda: {"a": nn.Linear(3, 8), "b": nn.Linear(8, 4)},
        (),
        refused={"a": "works along the axis of the channels"},
        shape=(2, 3),
    )
for label, pool in {
    "F.avg_pool2d": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "F.adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (8, 5)),
}.items():
    op(
        f"{label} of (N, C, L)",
        lambda net, x, pool=pool: net.b(pool(F.relu(net.a(x)))),
        lambda: {"a": nn.Conv1d(3, 8, 1), "b": nn.Conv1d(8, 4, 1)},
        (),
        refused={"a": "works along the axis of the channels"},
        shape=(2, 3, 6),
    )
op(
    "padding='same'",
    lambda net, x: net.b(F.relu(net.a(x))),
    lambda: {"a": nn.Conv2d(3, 8, 3, padding="same", dilation=2), "b": conv(8, 4)},
)
op(
    "depthwise with BatchNorm between two pointwise",
    lambda net, x: net.b(net.n2(net.g(F.relu(net.n(net.a(x))))).relu()),
    lambda: {
        "a": conv(3, 6, 1),
        "n": nn.BatchNorm2d(6),
        "g": conv(6, 6, groups=6, bias=False),
        "n2": nn.BatchNorm2d(6),
        "b": conv(6, 4, 1),
    },
)
op(
    "depthwise with BatchNorm, two filters a channel",
    lambda net, x: net.b(net.n2(net.g(F.relu(net.a(x)))).relu()),
    lambda: {
        "a": conv(3, 4, 1),
        "g": conv(4, 8, groups=4, bias=False),
        "n2": nn.BatchNorm2d(8),
        "b": conv(8, 4, 1),
    },
    ("a", "g"),  # a filter of a goes with both that read it
    may_empty=True,
)
op(
    "transposed depthwise",
    lambda net, x: net.b(F.relu(net.g(F.relu(net.a(x))))),
    lambda: {"a": conv(3, 6), "g": nn.ConvTranspose2d(6, 6, 2, 2, groups=6, bias=False), "b": conv(6, 4)},
)
op(
    "grouped with BatchNorm",
    lambda net, x: net.b(F.relu(net.n(net.g(F.relu(net.a(x)))))),
    lambda: {"a": conv(3, 9), "g": conv(9, 6, groups=3, bias=False), "n": nn.BatchNorm2d(6), "b": conv(6, 4)},
    ("a", "g"),
    may_empty=True,
)
for label, shape in {"(N, C)": (4, 5), "(N, T, C)": (2, 3, 5), "(N, H, W, C)": (2, 3, 3, 5), "(C)": (5,)}.items():
    op(
        f"Linear on {label}",
        lambda net, x: net.b(F.relu(net.a(x))),
        lambda: {"a": nn.Linear(5, 7), "b": nn.Linear(7, 3)},
        shape=shape,
        other_batches=label != "(C)",
    )
op(
    "Linear with BatchNorm1d on (N, C)",
    lambda net, x: net.b(F.relu(net.n(net.a(x)))),
    lambda: {"a": nn.Linear(5, 7, bias=False), "n": nn.BatchNorm1d(7), "b": nn.Linear(7, 3)},
    shape=(4, 5),
)
op(
    "Linear that reads along another axis than the channels'",
    lambda net, x: net.b(F.relu(net.l(F.relu(net.a(x))))),
    lambda: {"a": conv(3, 8), "l": nn.Linear(8, 5), "b": conv(8, 4)},
    (),
    refused={"a": "reads along another axis", "l": "reads along another axis"},
)
op(
    "convolution without a batch axis",
    lambda net, x: net.b(F.relu(net.a(x))),
    lambda: {"a": conv(3, 8), "b": conv(8, 4)},
    shape=(3, 8, 8),
    other_batches=False,
)

# ---- functional layers with the network's own parameters ------------------------------------------------------------------


def functional(*shapes: tuple[int, ...]) -> Parts:
    return lambda: {f"w{i}": nn.Parameter(torch.ones(shape)) for i, shape in enumerate(shapes)}


op(
    "F.conv2d",
    lambda net, x: F.conv2d(F.relu(F.conv2d(x, net.w0, net.w1, padding=1)), net.w2),
    functional((8, 3, 3, 3), (8,), (4, 8, 1, 1)),
    ("conv2d",),
)
op(
    "F.conv2d with keywords, grouped",
    lambda net, x: F.conv2d(F.conv2d(F.relu(F.conv2d(input=x, weight=net.w0)), weight=net.w1, groups=2).relu(), net.w2),
    functional((8, 3, 3, 3), (4, 4, 1, 1), (4, 4, 1, 1)),
    ("conv2d", "conv2d_1"),
    may_empty=True,
)
op(
    "F.conv_transpose2d",
    lambda net, x: F.conv2d(F.relu(F.conv_transpose2d(x, net.w0, net.w1, 2)), net.w2),
    functional((3, 8, 2, 2), (8,), (4, 8, 1, 1)),
    ("conv_transpose2d",),
)
op(
    "F.linear",
    lambda net, x: F.linear(F.relu(F.linear(x, net.w0)), net.w1, net.w2),
    functional((8, 3), (4, 8), (4,)),
    ("linear",),
    shape=(2, 3),
)
op(
    "F.conv2d with weights that are computed from the input",
    lambda net, x: net.b(F.relu(F.conv2d(F.relu(net.a(x)), net.w0 / x.norm()))),
    lambda: {"a": conv(3, 8), "w0": nn.Parameter(torch.ones(8, 8, 1, 1)), "b": conv(8, 4)},
    (),
    refused={"a": "no rule for conv2d"},
)


def batch_norm_parts() -> dict[str, Any]:
    shared = {"a": conv(3, 8), "b": conv(8, 4), "weight": nn.Parameter(torch.ones(8)), "bias": nn.Parameter(torch.ones(8))}
    return shared | {"running_mean": torch.zeros(8), "running_var": torch.ones(8)}


op(
    "F.batch_norm that follows the mode",
    lambda net, x: net.b(
        F.relu(F.batch_norm(net.a(x), net.running_mean, net.running_var, net.weight, net.bias, net.training, 0.2, 1e-3))
    ),
    batch_norm_parts,
)
op(
    "F.batch_norm that is frozen",
    lambda net, x: net.b(
        F.relu(F.batch_norm(net.a(x), net.running_mean, net.running_var, weight=net.weight, bias=net.bias, training=False))
    ),
    batch_norm_parts,
    None,  # type: ignore[arg-type]
)
op(
    "F.prelu",
    lambda net, x: net.b(F.prelu(net.a(x), net.weight)),
    lambda: {"a": conv(3, 8), "b": conv(8, 4), "weight": nn.Parameter(torch.ones(8))},
)

# ---- activations ----------------------------------------------------------------------------------------------------------

MODULES = (
    *(nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(0.2), nn.RReLU(), nn.ELU(), nn.SELU(), nn.CELU(2.0)),
    *(nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.Hardtanh(), nn.Hardtanh(0.5, 2.0), nn.Tanh()),
    *(nn.Sigmoid(), nn.Hardsigmoid(), nn.LogSigmoid(), nn.Softplus(), nn.Softsign(), nn.Softshrink(), nn.Hardshrink()),
    *(nn.Tanhshrink(), nn.Threshold(0.1, 0.0), nn.Threshold(0.1, 3.0), nn.PReLU(), nn.PReLU(8), nn.Identity()),
    *(nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.Upsample(scale_factor=2), nn.UpsamplingBilinear2d((5, 6))),
    *(nn.ZeroPad2d(1), nn.ConstantPad2d(1, 0.5), nn.ReflectionPad2d(1), nn.ReplicationPad2d((0, 1, 2, 0)), nn.CircularPad2d(1)),
)
for module in MODULES:
    between(repr(module), lambda net, x: net.m(x), m=lambda m=module: m)
    between(f"relu, {module!r}", lambda net, x: net.m(F.relu(x)), m=lambda m=module: m)
for word in (
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish", "hardtanh", "tanh", "sigmoid"),
    *(
        "hardsigmoid",
        "logsigmoid",
        "softplus",
        "softsign",
        "softshrink",
        "hardshrink",
        "tanhshrink",
        "relu_",
        "elu_",
        "leaky_relu_",
    ),
):
    between(f"F.{word}", lambda x, f=getattr(F, word): f(x))
for word in ("relu", "sigmoid", "tanh", "relu_", "sigmoid_", "tanh_", "abs", "neg", "exp", "cos", "square", "expm1", "round"):
    between(f".{word}()", lambda x, w=word: getattr(x, w)())
    between(f"torch.{word}", lambda x, f=getattr(torch, word, torch.relu): f(x))
between("clamp(min=0)", lambda x: x.clamp(min=0))
between("clamp(1, 2) revives", lambda x: torch.clamp(x, 1, 2))
between("power", lambda x: x**2)
between("power 0 revives", lambda x: F.relu(x) ** 0)
between("a number to the power revives", lambda x: 2**x)
between("square root", lambda x: F.relu(x).sqrt())
between("abs()", lambda x: abs(x))
between("negation", lambda x: -F.relu(x))

# ---- norms and sums over channels -------------------------------------------------------------------------------------

between("GroupNorm", lambda net, x: F.relu(net.n(x)), "takes statistics over several channels", n=lambda: nn.GroupNorm(2, 8))
between("LayerNorm", lambda net, x: F.relu(net.n(x)), "over several channels", n=lambda: nn.LayerNorm([8, 8, 8]))
between("F.group_norm", lambda x: F.group_norm(F.relu(x), 4), "takes statistics over several channels")
between("F.layer_norm", lambda x: F.layer_norm(F.relu(x), x.shape[1:]), "over several channels|no rule for")
between("LocalResponseNorm", lambda net, x: net.n(F.relu(x)), "over several channels", n=lambda: nn.LocalResponseNorm(2))
op(
    "LayerNorm of channels that lie last",
    lambda net, x: net.b(net.n(F.relu(net.a(x)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
    lambda: {"a": conv(3, 8), "n": nn.LayerNorm(8), "b": conv(8, 4)},
    (),
    refused={"a": "LayerNorm at node 'n'"},
)
between("Softmax", lambda net, x: net.m(F.relu(x)), "removed channels would count", m=lambda: nn.Softmax(1))
between("F.softmax", lambda x: F.softmax(x, 1), "removed channels would count")
between("F.normalize", lambda x: F.normalize(F.relu(x)), "removed channels would count")
between("mean over channels", lambda x: x - F.relu(x).mean(1, keepdim=True))
between("sum over channels", lambda x: x * F.relu(x).sum(dim=1, keepdim=True))
between("sum of everything", lambda x: F.relu(x) / (1 + F.relu(x).sum()))
between("cumsum over channels", lambda x: F.relu(x).cumsum(1), "accumulates over the channels")
between("F.instance_norm", lambda x: F.relu(F.instance_norm(x)))
between("softmax over space", lambda x: torch.softmax(x.flatten(2), -1).view(-1, 8, 8, 8))

# ---- channels that go together ------------------------------------------------------------------------------------------

between("F.glu", lambda x: F.glu(F.relu(x), 1), out=4)
between("nn.GLU", lambda net, x: net.g(x), out=4, g=lambda: nn.GLU(1))
between("F.glu along space", lambda x: F.glu(F.relu(x), 2))
between("PixelShuffle", lambda net, x: F.relu(net.s(x)), out=2, s=lambda: nn.PixelShuffle(2))
between("F.pixel_shuffle", lambda x: F.pixel_shuffle(F.relu(x), 2), out=2)
between("PixelUnshuffle", lambda net, x: net.s(F.relu(x)), out=32, s=lambda: nn.PixelUnshuffle(2))
between("torch.pixel_unshuffle", lambda x: torch.pixel_unshuffle(F.relu(x), 4), out=128)
between("a gate from the other half", lambda x: (lambda y: y[0] * torch.sigmoid(y[1]))(x.chunk(2, 1)), out=4)
between("gates of both halves", lambda x: torch.tanh(x[:, :4]) * x[:, 4:].sigmoid(), out=4)
for label, unfold in {"nn.Unfold": lambda net, x: net.u(x), "F.unfold": lambda net, x: F.unfold(x, 3)}.items():
    op(
        label,
        lambda net, x, f=unfold: net.b(f(net, F.relu(net.a(x))).transpose(1, 2)),
        lambda: {"a": conv(3, 8), "u": nn.Unfold(3), "b": nn.Linear(72, 4)},
    )
for label, unbind in {"unbind": lambda x: x.unbind(2), "torch.unbind": lambda x: torch.unbind(x, dim=-2)}.items():
    op(
        label,
        lambda net, x, f=unbind: (lambda rows: net.b(rows[0] + rows[3]))(f(F.relu(net.a(x)))),
        lambda: {"a": conv(3, 8), "b": nn.Conv1d(8, 4, 3)},
    )
between("unbind of channels", lambda x: x.unbind(1)[0].unsqueeze(1), "picks a single channel", out=1)

# ---- numbers, in place ------------------------------------------------------------------------------------------------

REVIVES = "turns zero channels into something else"
between("x * 3", lambda x: F.relu(x) * 3)
between("3 * x", lambda x: 3 * F.relu(x))
between("torch.mul(x, 0.5)", lambda x: torch.mul(F.relu(x), 0.5))
between("x / 3", lambda x: F.relu(x) / 3)
between("x.div(3)", lambda x: F.relu(x).div(3))
between("3 / (x + 2)", lambda x: 3 / (F.relu(x) + 2))
between("x + 3", lambda x: F.relu(x) + 3)
between("3 + x", lambda x: 3 + F.relu(x))
between("3 - x", lambda x: 3 - F.relu(x))
between("torch.sub(x, 1, alpha=2)", lambda x: torch.sub(F.relu(x), 1, alpha=2))
between("torch.rsub(x, 1)", lambda x: torch.rsub(F.relu(x), 1))
between("x + 3 before the activation", lambda x: F.relu(x + 3))
between("hard swish by hand", lambda x: x * F.relu6(x + 3) / 6)
between("x.add_(1)", lambda x: F.relu(x.add_(1)))
between("x.mul_(2).relu_()", lambda x: x.mul_(2).relu_())
between("F.relu(inplace=True)", lambda x: F.relu(x, inplace=True))


def read_again(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    z = net.m(y)  # changes y as well
    return net.b(z) + net.b2(y)


def added_in_place(net: Net, x: Tensor) -> Tensor:
    y = F.relu(net.a(x))
    z = net.c(y)
    z += y
    y *= 2
    return net.b(F.relu(z)) + net.b2(y)


op(
    "in-place module whose input is read again",
    read_again,
    lambda: {"a": conv(3, 8), "m": nn.ReLU(inplace=True), "b": conv(8, 4), "b2": conv(8, 4)},
    ("a", "b", "b2"),
)
op(
    "+= and *= on tensors that are read again",
    added_in_place,
    lambda: {"a": conv(3, 8), "c": conv(8, 8), "b": conv(8, 4), "b2": conv(8, 4)},
    ("a", "c", "b"),
    refused={"b2": "it is the shortcut"},
)

# ---- where tensors meet -----------------------------------------------------------------------------------------------


def two_branches(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    return lambda net, x: net.b(f(F.relu(net.a(x)), torch.tanh(net.c(x))))


def branches(out: int = 8) -> Parts:
    return lambda: {"a": conv(3, 8), "c": conv(3, 8), "b": conv(out, 4)}


for label, join in {
    "x + y": lambda x, y: x + y,
    "torch.add(x, y, alpha=2)": lambda x, y: torch.add(x, y, alpha=2),
    "x.add(y)": lambda x, y: x.add(y),
    "x - y": lambda x, y: x - y,
    "x.sub(y)": lambda x, y: x.sub(y),
    "torch.maximum": torch.maximum,
    "torch.min of two": torch.min,
    "cat along space": lambda x, y: torch.cat([x, y], 2),
    "cat along the batch": lambda x, y: torch.cat((x, y)),
    "x + y.mean(space)": lambda x, y: x + y.mean([-1, -2], True),
    "expand_as": lambda x, y: x.mean((2, 3), keepdim=True).expand_as(y) + y,
    "x * x + y": lambda x, y: x * x + y,
    "x + x + y": lambda x, y: x + x + y,
    "type_as": lambda x, y: x.type_as(y) + y,
}.items():
    op(label, two_branches(join), branches(), ("a", "c"))
op("x * y", two_branches(lambda x, y: x * y), branches(), ("a", "c"), may_empty=True)
op("x.mul(y)", two_branches(lambda x, y: x.mul(y)), branches(), ("a", "c"), may_empty=True)
op("x * y.mean(space)", two_branches(lambda x, y: x * y.mean((2, 3), keepdim=True)), branches(), ("a",))  # y is a gate
op("cat", two_branches(lambda x, y: torch.cat([x, y], dim=1)), branches(16), ("a", "c"))
op("cat with a negative dim", two_branches(lambda x, y: torch.cat([y, x, y], dim=-3)), branches(24), ("a", "c"))
op("torch.concat(axis=1)", two_branches(lambda x, y: torch.concat((x, y), axis=1)), branches(16), ("a", "c"))
op(
    "cat of one tensor with itself",
    two_branches(lambda x, y: torch.cat([x, x], 1) * torch.cat([y, x], 1)),
    branches(16),
    ("a", "c"),
)
op("cat with the input", lambda net, x: net.b(torch.cat([x, F.relu(net.a(x))], 1)), lambda: {"a": conv(3, 8), "b": conv(11, 4)})
op("torch.where", two_branches(lambda x, y: torch.where(x > y, x, y)), branches(), ("a", "c"))
op(
    "division by a tensor",
    two_branches(lambda x, y: x / (y * y + 1)),
    branches(),
    ("c", "a"),
    may_empty=True,
)
for label, multiply in {
    "matmul": torch.matmul,
    "@": lambda x, y: x @ y,
    "einsum": lambda x, y: torch.einsum("nchw,ncwk->nchk", x, y),
    "bmm": lambda x, y: torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).view(-1, 8, 8, 8),
}.items():
    if label == "bmm":
        op(label, two_branches(multiply), branches(), (), refused={"a": "mixes", "c": "mixes"})
    else:
        op(label, two_branches(multiply), branches(), ("a", "c"), may_empty=True)
between("F.normalize over space", lambda x: F.normalize(F.relu(x), dim=2))
between(
    "BatchNorm over flattened axes",
    lambda net, x: (lambda y: net.n(y.flatten(0, 1)).reshape_as(y).relu().transpose(1, 2).unflatten(2, (8, 8)))(
        x.flatten(2).transpose(1, 2)
    ),
    n=lambda: nn.BatchNorm1d(8),
)
op(
    "BatchNorm over flattened axes, a perceptron at every place",
    lambda net, x: net.b((lambda y: net.n(y.flatten(0, 1)).reshape_as(y))(net.a(x.flatten(2).transpose(1, 2))).relu()),
    lambda: {"a": nn.Linear(3, 8), "n": nn.BatchNorm1d(8), "b": nn.Linear(8, 4)},
)
op(
    "context pooled by a product",
    lambda net, x: (lambda y: net.b(y + net.e(y.flatten(2) @ net.w(y).flatten(2).softmax(-1).transpose(1, 2)).unsqueeze(-1)))(
        F.relu(net.a(x))
    ),
    lambda: {"a": conv(3, 8), "w": conv(8, 1, 1), "e": nn.Conv1d(8, 8, 1), "b": conv(8, 4)},
    ("a", "e"),
)
op(
    "tokens weighted by a product",
    lambda net, x: net.b(torch.softmax(net.w(x).flatten(2), -1) @ F.relu(net.a(x)).flatten(2).transpose(1, 2)),
    lambda: {"a": conv(3, 8), "w": conv(3, 5, 1), "b": nn.Linear(8, 4)},
    ("w", "a"),
)
op(
    "products of channels with channels",  # the second factor's are followed; the first factor's are summed over nowhere
    two_branches(lambda x, y: (x.flatten(2) @ y.flatten(2).transpose(1, 2)).unsqueeze(1).expand(-1, 8, -1, -1)),
    branches(),
    ("a",),
    refused={"c": "reads along another axis"},
)
for label, multiply in {
    "matmul over channels": lambda x, y: (x.permute(0, 2, 3, 1) @ y.permute(0, 2, 1, 3)).permute(0, 3, 1, 2),
    "einsum over channels": lambda x, y: torch.einsum("nchw,nchk->nhwk", x, y),
}.items():
    op(label, two_branches(multiply), branches(), ("a", "c"), may_empty=True)  # no channel may be kept of both
op("stack", two_branches(lambda x, y: torch.stack([x, y], 1).sum(1)), branches(), ("a", "c"))
op("stack behind", two_branches(lambda x, y: torch.stack((x, y), dim=-1).mean(-1)), branches(), ("a", "c"))
op(
    "squeeze and excite",
    lambda net, x: (lambda y: net.b(y * torch.sigmoid(net.e(F.relu(net.r(F.adaptive_avg_pool2d(y, 1)))))))(F.relu(net.a(x))),
    lambda: {"a": conv(3, 8), "r": conv(8, 3, 1), "e": conv(3, 8, 1), "b": conv(8, 4)},
    ("a", "r"),
)
op(
    "squeeze and excite by linear layers",
    lambda net, x: (
        lambda y: net.b(y * torch.sigmoid(net.e(F.relu(net.r(y.mean((2, 3)))))).view(x.size(0), 8, 1, 1).expand_as(y))
    )(F.relu(net.a(x))),
    lambda: {"a": conv(3, 8), "r": nn.Linear(8, 3), "e": nn.Linear(3, 8), "b": conv(8, 4)},
    ("a", "r"),
)
op(
    "attention over space",
    lambda net, x: (lambda y: net.b(y * torch.sigmoid(net.t(y))))(F.relu(net.a(x))),
    lambda: {"a": conv(3, 8), "t": conv(8, 1), "b": conv(8, 4)},
)
between("learned scale (C, 1, 1)", lambda net, x: F.relu(x) * net.scale, scale=parameter(8, 1, 1))
between("learned shift (1, C, 1, 1)", lambda net, x: F.relu(x + net.shift), shift=parameter(1, 8, 1, 1))
between("learned number", lambda net, x: F.relu(x) * net.scale, scale=parameter(1))
between("position in space (H, W)", lambda net, x: F.relu(x) * net.scale, scale=parameter(8, 8))

# ---- parts ------------------------------------------------------------------------------------------------------------


def chunked(net: Net, x: Tensor) -> Tensor:
    left, right = F.relu(net.a(x)).chunk(2, 1)
    return net.b(left) + net.c(right)


def split_unevenly(net: Net, x: Tensor) -> Tensor:
    few, many, rest = torch.split(F.relu(net.a(x)), [2, 5, 1], dim=1)
    return net.b(few) + net.c(many) + rest


def split_by_size(net: Net, x: Tensor) -> Tensor:
    parts = F.relu(net.a(x)).split(3, dim=1)
    return net.b(torch.cat([parts[2], parts[0]], 1))


def split_space(net: Net, x: Tensor) -> Tensor:
    left, right = F.relu(net.a(x)).chunk(2, dim=3)
    return net.b(left) - net.b2(right)


def part_unread(net: Net, x: Tensor) -> Tensor:
    few, _ = F.relu(net.a(x)).split([3, 5], 1)
    return net.b(few)


def chunk_unread(net: Net, x: Tensor) -> Tensor:
    _, right = torch.chunk(F.relu(net.a(x)), 2, dim=1)
    return net.b(right)


def gated_halves(net: Net, x: Tensor) -> Tensor:
    value, gate = net.a(x).chunk(2, dim=1)
    return net.b(torch.tanh(value) * F.relu(gate))


def split_as_list(net: Net, x: Tensor) -> Tensor:
    return net.b(torch.cat(F.relu(net.a(x)).split(2, 1), 1))


op("chunk", chunked, lambda: {"a": conv(3, 7), "b": conv(4, 3), "c": conv(3, 3)}, ("a", "b", "c"), may_empty=True)
op(
    "split into uneven parts",
    split_unevenly,
    lambda: {"a": conv(3, 8), "b": conv(2, 1), "c": conv(5, 1)},
    refused={"b": "it has one filter only"},
    may_empty=True,
)
op("split by size", split_by_size, lambda: {"a": conv(3, 8), "b": conv(5, 3)}, may_empty=True)
op("chunk of space", split_space, lambda: {"a": conv(3, 8), "b": conv(8, 3), "b2": conv(8, 3)}, ("a", "b", "b2"))
op("split with a part that is not read", part_unread, lambda: {"a": conv(3, 8), "b": conv(3, 3)}, may_empty=True)
op("chunk with a part that is not read", chunk_unread, lambda: {"a": conv(3, 8), "b": conv(4, 3)}, may_empty=True)
op("halves that gate each other", gated_halves, lambda: {"a": conv(3, 8), "b": conv(4, 3)}, may_empty=True)
op("split passed as a list", split_as_list, lambda: {"a": conv(3, 8), "b": conv(8, 3)}, (), refused={"a": "split"})
for label, index, width in (
    ("x[:, 2:5]", (slice(None), slice(2, 5)), 3),
    ("x[:, ::2]", (slice(None), slice(None, None, 2)), 4),
    ("x[:, -3:]", (slice(None), slice(-3, None)), 3),
    ("x[:, 1::3, ::2, 1:]", (slice(None), slice(1, None, 3), slice(None, None, 2), slice(1, None)), 3),
    ("x[:, :, ::2, ::2]", (slice(None), slice(None), slice(None, None, 2), slice(None, None, 2)), 8),
    ("x[..., :-1]", (..., slice(None, -1)), 8),
    ("x[:, :, -1:]", (slice(None), slice(None), slice(-1, None)), 8),
    ("x[..., 1:4, :, :]", (..., slice(1, 4), slice(None), slice(None)), 3),
):
    op(
        label,
        lambda net, x, i=index: net.b(F.relu(net.a(x))[i]),
        lambda w=width: {"a": conv(3, 8), "b": conv(w, 3)},
        may_empty=width < 8,
    )
op(
    "x[:, None] and back",
    lambda net, x: net.b(F.relu(net.a(x))[:, None][:, 0]),
    lambda: {"a": conv(3, 8), "b": conv(8, 3)},
)
op("x[-1:]", lambda net, x: net.b(F.relu(net.a(x))[-1:]), lambda: {"a": conv(3, 8), "b": conv(8, 3)})
op("x[0]", lambda net, x: net.b(F.relu(net.a(x))[0]), lambda: {"a": conv(3, 8), "b": conv(8, 3)})
op("narrow", lambda net, x: net.b(F.relu(net.a(x)).narrow(1, 2, 4)), lambda: {"a": conv(3, 8), "b": conv(4, 3)}, may_empty=True)
between("x[:, 3] refused", lambda x: F.relu(x)[:, 3:4] + F.relu(x)[:, 3, None], "picks a single channel", out=1)
between("x[:, [0, 2, 4]]", lambda x: F.relu(x)[:, [4, 2, 0]], out=3, may_empty=True)
between("index_select", lambda net, x: F.relu(x).index_select(1, net.i), "no rule for index_select", i=lambda: torch.arange(8))
between("flip of channels", lambda x: F.relu(x).flip(1))

# ---- pads -------------------------------------------------------------------------------------------------------------

between("pad of space", lambda x: F.pad(F.relu(x), (1, 2, 0, 1)))
between("pad of space with a value", lambda x: F.pad(F.relu(x), (1, 1), value=2.0))
between("reflecting pad", lambda x: F.pad(F.relu(x), (1, 1, 1, 1), mode="reflect"))
between("negative pad", lambda x: F.pad(F.relu(x), (-1, 1)))
between("pad of channels", lambda x: F.pad(F.relu(x), (0, 0, 0, 0, 2, 1)), out=11)
between("pad of channels and space", lambda x: F.pad(F.relu(x)[:, :, ::2], (1, 0, 0, 1, 1, 3), "constant", 0), out=12)
between("pad of channels with a value", lambda x: F.pad(F.relu(x), (0, 0, 0, 0, 1, 1), value=1.0), "pads the channels", out=10)
between("negative pad of channels", lambda x: F.pad(F.relu(x), (0, 0, 0, 0, -1, 2)), "pads the channels", out=9)

# ---- shapes -----------------------------------------------------------------------------------------------------------


def flattened(name: str, f: Callable[[Tensor], Tensor], features: int = 512, **rest: Any) -> None:
    """Convolution, ReLU, `f`, Linear."""
    op(
        name,
        lambda net, x: net.l(f(F.relu(net.a(x)))),
        lambda: {"a": conv(3, 8), "l": nn.Linear(features, 3)},
        **rest,
    )


op(
    "nn.Flatten",
    lambda net, x: net.l(net.f(F.relu(net.a(x)))),
    lambda: {"a": conv(3, 8), "f": nn.Flatten(), "l": nn.Linear(512, 3)},
)
flattened("torch.flatten(x, 1)", lambda x: torch.flatten(x, 1))
flattened("x.flatten(1)", lambda x: x.flatten(1))
flattened("x.flatten(start_dim=1)", lambda x: x.flatten(start_dim=1))
flattened("view(x.size(0), -1)", lambda x: x.view(x.size(0), -1))
flattened("view(x.shape[0], -1)", lambda x: x.view(x.shape[0], -1))
flattened("view(-1, 512)", lambda x: x.view(-1, 512))
flattened("view(-1, C * H * W)", lambda x: x.view(-1, x.size(1) * x.size(2) * x.size(3)))
flattened("reshape((N, 512))", lambda x: x.reshape((x.shape[0], 512)))
flattened("torch.reshape", lambda x: torch.reshape(x, (-1, 512)))
flattened("flatten for one example only", lambda x: x[:1].view(1, -1))
flattened("mean((2, 3))", lambda x: x.mean((2, 3)), 8)
flattened("mean(dim=[2, 3], keepdim=True), flatten", lambda x: x.mean(dim=[2, 3], keepdim=True).flatten(1), 8)
flattened("mean(-1).mean(-1)", lambda x: x.mean(-1).mean(-1), 8)
flattened("torch.sum over space", lambda x: torch.sum(x, (2, 3)), 8)
flattened("amax over space", lambda x: x.amax((2, 3)), 8)
flattened("std over space", lambda x: x.std((2, 3)), 8)
flattened("std with a positional flag", lambda x: x.permute(0, 2, 3, 1).std((1, 2), True), 8)
flattened("var, keepdim", lambda x: torch.var(x, (2, 3), keepdim=True).flatten(1), 8)
flattened("pool, squeeze()", lambda x: F.adaptive_avg_pool2d(x, 1).squeeze(), 8)
flattened("pool, squeeze(-1).squeeze(-1)", lambda x: F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1), 8)
flattened("pool, squeeze((2, 3))", lambda x: F.adaptive_avg_pool2d(x, 1).squeeze((2, 3)), 8)
flattened("pool, x[:, :, 0, 0]", lambda x: F.adaptive_max_pool2d(x, 1)[:, :, 0, 0], 8)
flattened("permute to channels last", lambda x: x.permute(0, 2, 3, 1), 8)
flattened("(N, C, HW), transpose", lambda x: x.flatten(2).transpose(1, 2), 8)
flattened("reshape to (N, C, HW), permute", lambda x: x.reshape(x.size(0), 8, -1).permute(0, 2, 1), 8)
flattened("permute, reshape to pixels", lambda x: x.permute(0, 2, 3, 1).reshape(-1, 8), 8)
flattened("swapaxes", lambda x: x.swapaxes(1, 3), 8)
flattened("max over space by a pair", lambda x: x.flatten(2).max(2)[0], 8)
flattened("torch.max over space by a pair", lambda x: torch.max(torch.min(x, 2, keepdim=True)[0], dim=-1)[0].flatten(1), 8)
flattened("max over channels", lambda x: x.max(1)[0].flatten(1), 64)
flattened(
    "where the largest channel is",
    lambda x: x.max(1)[1].flatten(1).to(x.dtype),
    64,
    sites=(),
    refused={"a": "over the channels"},
)
between("squeeze(1) of more than one channel", lambda x: F.relu(x).squeeze(1))
between("unsqueeze and squeeze", lambda x: F.relu(x).unsqueeze(-1).squeeze(-1))
between("unsqueeze(0), squeeze(0)", lambda x: torch.squeeze(torch.unsqueeze(F.relu(x), 0), 0))
between("view(N, C, -1) and back", lambda x: F.relu(x).view(x.size(0), x.size(1), -1).view(x.size(0), 8, 8, 8))
between("reshape(-1, C, H, W)", lambda x: F.relu(x).flatten(1).reshape(-1, 8, 8, 8))
for label, sizes in {"x.shape[:2]": lambda x: x.shape[:2], "x.size()[0:2]": lambda x: x.size()[0:2]}.items():

    def by_sizes(net: Net, x: Tensor, sizes: Callable[[Tensor], Any] = sizes) -> Tensor:
        y = F.relu(net.a(x))
        batch, channels = sizes(y)
        return net.b(y * torch.sigmoid(net.e(y.mean((2, 3)).view(batch, channels))).view(batch, channels, 1, 1))

    op(f"{label} taken apart", by_sizes, lambda: {"a": conv(3, 8), "e": nn.Linear(8, 8), "b": conv(8, 4)})
between("x.view(x.size())", lambda x: F.relu(x).view(x.size()))
between("expand of space", lambda x: F.relu(x).mean((2, 3), keepdim=True).expand(-1, -1, 8, 8))
between("expand with all sizes", lambda x: F.relu(x).mean((2, 3), keepdim=True).expand(x.size(0), 8, 4, 4))
between("repeat", lambda x: F.relu(x).repeat(1, 1, 2, 2))
between("shuffle by views", lambda x: F.relu(x).view(-1, 2, 4, 8, 8).transpose(1, 2).reshape(-1, 8, 8, 8))
between("nn.ChannelShuffle", lambda net, x: net.m(F.relu(x)), m=lambda: nn.ChannelShuffle(4))
between("interpolate", lambda x: F.interpolate(F.relu(x), scale_factor=2))
between("bilinear to a size", lambda x: F.interpolate(F.relu(x), size=(5, 6), mode="bilinear", align_corners=False))
between("contiguous, clone, detach", lambda x: F.relu(x).contiguous().clone().detach())
between("to another layout in memory", lambda x: F.relu(x).contiguous(memory_format=torch.channels_last))
between("to(dtype of another tensor)", lambda x: F.relu(x).to(x.dtype))
between("mask by comparison", lambda x: F.relu(x) * (x > 0).to(x.dtype))
between("x.size(1) in arithmetic", lambda x: F.relu(x) * x.size(1) / x.shape[1] ** 0.5)
between("numel in arithmetic", lambda x: F.relu(x) / x.numel(), "no rule for numel")
between("zeros_like", lambda x: F.relu(x) + torch.zeros_like(x))
between("a constant tensor", lambda x: F.relu(x) * torch.full((1, 1, 8, 8), 2.0, dtype=torch.float64))
for label, target, width in (("(8, 1, 1)", (8, 1, 1), 8), ("(2, 2, 2)", (2, 2, 2), 2)):
    op(
        f"Unflatten to {label}",
        lambda net, x: net.b(net.u(F.relu(net.a(x)))),
        lambda t=target, w=width: {"a": nn.Linear(5, 8), "u": nn.Unflatten(1, t), "b": nn.Conv2d(w, 3, 1)},
        None,  # type: ignore[arg-type]
        shape=(2, 5),
    )
op(
    "view from features to images",
    lambda net, x: net.b(F.relu(net.a(x)).view(-1, 4, 3, 3)),
    lambda: {"a": nn.Linear(5, 36), "b": nn.Conv2d(4, 2, 1)},
    shape=(2, 5),
)
op(
    "x.view(y.size())",
    lambda net, x: (lambda y: net.b(F.relu(net.c(y)).view(y.size())))(F.relu(net.a(x))),
    lambda: {"a": conv(3, 8), "c": conv(8, 8), "b": conv(8, 4)},
    ("a", "c"),
)
op(
    "interpolate to another tensor's size",
    lambda net, x: (lambda y: net.b(F.interpolate(F.relu(net.c(F.max_pool2d(y, 2))), size=y.shape[2:]) + y))(F.relu(net.a(x))),
    lambda: {"a": conv(3, 8), "c": conv(8, 8), "b": conv(8, 4)},
    None,  # type: ignore[arg-type]
)
op(
    "transposed convolution to another tensor's size",
    lambda net, x: (lambda y: net.b(net.u(F.relu(net.c(y)), output_size=y.size()) + y))(F.relu(net.a(x))),
    lambda: {"a": conv(3, 8), "c": conv(8, 6, 2, stride=2, padding=0), "u": nn.ConvTranspose2d(6, 8, 2, 2), "b": conv(8, 4)},
    None,  # type: ignore[arg-type]
)

# ---- layers that are left alone ---------------------------------------------------------------------------------------


class Own(nn.Module):
    """A module that torch.fx cannot look into."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 1e9 else x * 2


class OwnConv(nn.Conv2d):
    """A subclass that changes nothing."""


class Standardised(nn.Conv2d):
    """A subclass that computes its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias, padding=self.padding)


def hooked() -> nn.Module:
    layer = conv(3, 8)
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return layer


def tied() -> dict[str, Any]:
    parts = {"a": conv(3, 8), "c": conv(8, 8), "d": conv(8, 8), "b": conv(8, 4)}
    parts["d"].weight = parts["c"].weight
    return parts


def in_a_row(net: Net, x: Tensor) -> Tensor:
    return net.b(F.relu(net.d(F.relu(net.c(F.relu(net.a(x)))))))


def with_weight_norm_hook(layer: nn.Module) -> nn.Module:
    """Weight norm as torch had it before parametrizations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(layer)


for label, normed_layer in {
    "weight norm": lambda: parametrizations.weight_norm(conv(8, 8)),
    "weight norm by a hook": lambda: with_weight_norm_hook(conv(8, 8)),
    "weight norm of all weights": lambda: parametrizations.weight_norm(conv(8, 8, bias=False), dim=None),
    "weight norm, grouped": lambda: parametrizations.weight_norm(conv(8, 8, groups=2)),
    "weight norm of inputs": lambda: parametrizations.weight_norm(nn.ConvTranspose2d(8, 8, 2, 2)),
}.items():
    op(
        label,
        lambda net, x: net.b(F.relu(net.w(F.relu(net.a(x))))),
        lambda make=normed_layer: {"a": conv(3, 8), "w": make(), "b": conv(8, 4)},
        ("a", "w"),
        may_empty="grouped" in label,
    )
op(
    "orthogonal weights",
    lambda net, x: net.b(F.relu(net.a(x))),
    lambda: {"a": parametrizations.orthogonal(conv(3, 8)), "b": conv(8, 4)},
    (),
    refused={"a": "computes its weights from all of them .*Orthogonal"},
)
op(
    "spectral norm behind",
    lambda net, x: net.b(F.relu(net.a(x))),
    lambda: {"a": conv(3, 8), "b": parametrizations.spectral_norm(conv(8, 4))},
    (),
    refused={"a": "'b' computes its weights"},
)
op(
    "forward hook",
    lambda net, x: net.b(F.relu(net.a(x))),
    lambda: {"a": hooked(), "b": conv(8, 4)},
    (),
    refused={"a": "has forward hooks"},
)
op(
    "tied weights",
    in_a_row,
    tied,
    (),
    refused={"a": "'c' shares its weights with 'd'", "c": "shares its weights", "d": "shares its weights with 'c'"},
)
op(
    "a layer called twice",
    lambda net, x: net.b(F.relu(net.c(F.relu(net.c(F.relu(net.a(x))))))),
    lambda: {"a": conv(3, 8), "c": conv(8, 8), "b": conv(8, 4)},
    ("a", "c"),
)
op(
    "a BatchNorm called twice",
    lambda net, x: net.b(F.relu(net.n(net.c(F.relu(net.n(net.a(x))))))),
    lambda: {"a": conv(3, 8), "n": nn.BatchNorm2d(8), "c": conv(8, 8), "b": conv(8, 4)},
    ("a",),  # of both convolutions: the statistics are those of both
)
op(
    "an activation called twice",
    lambda net, x: net.b(net.m(net.c(net.m(net.a(x))))),
    lambda: {"a": conv(3, 8), "m": nn.ReLU(), "c": conv(8, 8), "b": conv(8, 4)},
    ("a", "c"),
)
op(
    "a weight that is read elsewhere",
    lambda net, x: net.b(F.relu(net.a(x))) * net.a.weight.sum(),
    lambda: {"a": conv(3, 8), "b": conv(8, 4)},
    (),
    refused={"a": "shares its weights", "b": "output"},
)
op("a subclass that changes nothing", lambda net, x: net.b(F.relu(net.a(x))), lambda: {"a": OwnConv(3, 8, 3), "b": conv(8, 4)})
op(
    "a subclass that computes its weights",
    lambda net, x: net.b(F.relu(net.c(F.relu(net.a(x))))),
    lambda: {"a": conv(3, 8), "c": Standardised(8, 8, 3, padding=1), "b": conv(8, 4)},
    ("a", "c.conv2d"),
)
op(
    "a BatchNorm whose branch is not read",
    lambda net, x: (lambda y, unread: net.b(y))(F.relu(net.a(x)), net.c(x)),
    lambda: {"a": conv(3, 8), "c": conv(3, 8), "b": conv(8, 4)},
    None,  # type: ignore[arg-type]
)
op(
    "two outputs",
    lambda net, x: (lambda y: (net.b(y), net.c(y)))(F.relu(net.a(x))),
    lambda: {"a": conv(3, 8), "b": conv(8, 4), "c": conv(8, 2)},
)
op(
    "a dict of outputs, one of them the features",
    lambda net, x: (lambda y: {"out": net.b(y), "features": y})(F.relu(net.c(F.relu(net.a(x))))),
    lambda: {"a": conv(3, 8), "c": conv(8, 8), "b": conv(8, 4)},
    refused={"c": "output"},
)
op(
    "submodules named like what surgery adds",
    lambda net, x: net.mask_relu(net.relu(net.align_relu(net.mask_a(net.a(x))))),
    lambda: {
        "a": conv(3, 8),
        "mask_a": nn.ReLU(),
        "align_relu": conv(8, 8),
        "relu": nn.ReLU(),
        "mask_relu": conv(8, 3),
    },
    ("a", "align_relu"),
)


# ---- parts, choices, repetitions ------------------------------------------------------------------------------------------

for label, f in {
    "mean over channels and space": lambda x: x - F.relu(x).mean((1, 2), keepdim=True),
    "mean of everything": lambda x: x * F.relu(x).mean(),
    "amax over channels": lambda x: x * torch.amax(x, dim=1, keepdim=True),
    "amin over channels and space": lambda x: x + x.amin((1, 3), keepdim=True),
    "min over channels": lambda x: x - x.min(1, keepdim=True).values,
    "norm over channels": lambda x: F.relu(x) / (1 + torch.linalg.vector_norm(F.relu(x), dim=1, keepdim=True)),
    "channel and spatial statistics": lambda x: F.relu(x) * torch.cat([x.mean(1, True), x.amax(1, True)], 1).sum(1, True),
    "argmax over space": lambda x: (F.relu(x).flatten(2).argmax(-1) / 8)[:, :, None, None] * x,
    "max over space with places": lambda x: sum(F.relu(x).flatten(2).max(2))[:, :, None, None] + x,
    "topk over space": lambda x: F.relu(x).flatten(2).topk(3)[0].mean(-1)[:, :, None, None],
    "sort over space": lambda x: torch.sort(x.flatten(2), dim=-1)[0].view_as(x),
    "median over space": lambda x: x.median(dim=3)[0].unsqueeze(3),
    "var_mean over space": lambda x: torch.var_mean(x, (2, 3), keepdim=True)[0],
    "logsumexp over space": lambda x: x.logsumexp((2, 3), keepdim=True),
    "x.norm over space": lambda x: x.norm(dim=2, keepdim=True),
    "cumsum over space": lambda x: F.relu(x).cumsum(2),
    "where with a number that revives": lambda x: torch.where(x > 0, x, 0.5),
    "x.where": lambda x: x.where(x > 0, 0.1 * x),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "masked_fill that revives": lambda x: F.relu(x).masked_fill(x < 0, 2.0),
    "x / its own norm": lambda x: F.relu(x) / F.relu(x).amax((2, 3), keepdim=True),  # 0 / 0 where a channel is masked
    "rsqrt": lambda x: x * (1 + x.square().mean((2, 3), keepdim=True)).rsqrt(),
    "instance norm by hand": lambda x: (x - x.mean((2, 3), True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt(),
    "select": lambda x: F.relu(x).select(2, 1).unsqueeze(2),
    "torch.select": lambda x: torch.select(F.relu(x), -1, 0).unsqueeze(-1),
    "windows": lambda x: F.relu(x).unfold(2, 4, 4).unfold(3, 4, 4).amax((-1, -2)),
    "fold of unfold": lambda x: F.fold(F.unfold(F.relu(x), 3, padding=1), (8, 8), 3, padding=1),
    "movedim": lambda x: torch.movedim(F.relu(x), 1, -1).movedim(-1, 1),
    "flip of space": lambda x: F.relu(x).flip(2),
    "lerp": lambda x: torch.lerp(F.relu(x), x, 0.3),
    "unflatten": lambda x: F.relu(x).flatten(1).unflatten(1, (8, 8, 8)),
    "F.lp_pool2d": lambda x: F.lp_pool2d(F.relu(x), 2, 2),
    "einsum with dots": lambda x: torch.einsum("b...,b->b...", F.relu(x), x.sum((1, 2, 3))),
}.items():
    between(label, f)
between("torch.topk, where", lambda x: F.relu(x).flatten(2).topk(3)[1][:, :, None].to(x.dtype), "asks where equal values are")
between("repeat of channels", lambda x: F.relu(x).repeat(1, 2, 1, 1), out=16)
between("repeat_interleave of channels", lambda x: F.relu(x).repeat_interleave(2, 1), out=16)
between("space to depth, channels last", lambda x: F.relu(x).unflatten(2, (4, 2)).permute(0, 3, 1, 2, 4).flatten(1, 2), out=16)
between("sum of two halves", lambda x: F.relu(x).view(-1, 2, 4, 8, 8).sum(1), out=4)
between("the larger of two halves", lambda x: x.reshape(x.size(0), 2, 4, 8, 8).max(1)[0], out=4)
between("torch.addcmul", lambda net, x: torch.addcmul(net.s, net.s, F.relu(x)), s=parameter(1, 8, 1, 1))
between("einsum without an arrow", lambda net, x: torch.einsum("abcd,cz", F.relu(x), net.w), w=parameter(8, 5))
between("nn.Unflatten", lambda net, x: net.u(F.relu(x).flatten(1)), u=lambda: nn.Unflatten(1, (8, 8, 8)))
between(
    "grid_sample",
    lambda net, x: F.grid_sample(x, net.g.repeat(x.size(0), 1, 1, 1), align_corners=False),
    g=parameter(1, 5, 5, 2),
)
op("hstack", two_branches(lambda x, y: torch.hstack([x, y])), branches(16), ("a", "c"))
op(
    "torch.batch_norm that follows the mode",
    lambda net, x: net.b(
        torch.batch_norm(net.a(x), net.weight, net.bias, net.running_mean, net.running_var, net.training, 0.2, 1e-3, False)
    ),
    batch_norm_parts,
)
op(
    "F.batch_norm of the batch, always",
    lambda net, x: net.b(F.relu(F.batch_norm(net.a(x), None, None, net.weight, net.bias, True))),
    batch_norm_parts,
)
op(
    "F.instance_norm with weights",
    lambda net, x: net.b(F.relu(F.instance_norm(net.a(x), weight=net.weight, bias=net.bias))),
    batch_norm_parts,
)


def split_attention(net: Net, x: Tensor) -> Tensor:
    """Two groups of channels, weighted by a softmax between them and added (ResNeSt)."""
    y = F.relu(net.a(x))
    groups = y.reshape(y.shape[0], 2, 4, y.shape[2], y.shape[3])
    weights = net.up(F.relu(net.down(groups.sum(dim=1).mean((2, 3), keepdim=True))))
    weights = F.softmax(weights.view(y.shape[0], 1, 2, -1).transpose(1, 2), dim=1).reshape(y.shape[0], -1)
    return net.b((groups * weights.view(y.shape[0], -1, 1, 1).reshape(y.shape[0], 2, 4, 1, 1)).sum(dim=1))


op(
    "split attention",
    split_attention,
    lambda: {"a": conv(3, 8), "down": conv(4, 3, 1), "up": conv(3, 8, 1), "b": conv(4, 4)},
    ("a", "down"),
)

# ---- hidden units ---------------------------------------------------------------------------------------------------------


def recurrent(kind: Callable[..., nn.Module], width: int = 6, **options: Any) -> Parts:
    return lambda: {"a": nn.Linear(3, 8), "r": kind(8, 6, **{"batch_first": True} | options), "b": nn.Linear(width, 4)}


def sequence(net: Net, x: Tensor) -> Tensor:
    return net.b(net.r(F.relu(net.a(x)))[0])


for kind in (nn.LSTM, nn.GRU, nn.RNN):
    op(kind.__name__, sequence, recurrent(kind), ("a", "r"), shape=(2, 5, 3))
op(
    "LSTM, stacked in both directions",
    sequence,
    recurrent(nn.LSTM, 12, num_layers=2, bidirectional=True),
    ("a", "r"),
    shape=(2, 5, 3),
)
op("GRU, time first, no bias", sequence, recurrent(nn.GRU, batch_first=False, bias=False), ("a", "r"), shape=(2, 5, 3))
op(
    "last states of an LSTM",
    lambda net, x: (lambda found: net.b(found[1][0][-1] + torch.tanh(found[1][1][-1]) + found[0][:, -1]))(
        net.r(F.relu(net.a(x)))
    ),
    recurrent(nn.LSTM),
    ("a", "r"),
    shape=(2, 5, 3),
)
op(
    "GRU that starts from zeros",
    lambda net, x: net.b(net.r(F.relu(net.a(x)), torch.zeros(1, x.shape[0], 6, dtype=x.dtype))[0]),
    recurrent(nn.GRU),
    ("a", "r"),
    shape=(2, 5, 3),
)
op(
    "GRU that starts from a state",
    lambda net, x: net.b(net.r(F.relu(net.a(x)), x.mean() * torch.ones(1, x.shape[0], 6, dtype=x.dtype))[0]),
    recurrent(nn.GRU),
    (),
    refused={"a": "starts from a state", "r": "starts from a state"},
    shape=(2, 5, 3),
)
op(
    "RNN that nothing reads",
    lambda net, x: (lambda y, unread: net.b(y))((y := F.relu(net.a(x))), net.r(y)[0].mean(1)),
    lambda: {"a": nn.Linear(3, 8), "r": nn.RNN(8, 6, batch_first=True), "b": nn.Linear(8, 4)},
    shape=(2, 5, 3),
)
op(
    "LSTM with a projection",
    sequence,
    recurrent(nn.LSTM, 4, proj_size=4),
    (),
    refused={"a": "proj_size", "r": "proj_size"},
    shape=(2, 5, 3),
)
op(
    "convolutions, then a GRU in both directions",
    lambda net, x: net.b(net.r(F.relu(net.a(x)).flatten(1, 2).transpose(1, 2))[0]),
    lambda: {"a": conv(3, 8), "r": nn.GRU(64, 6, bidirectional=True), "b": nn.Linear(12, 4)},
    ("a", "r"),
)


@pytest.mark.parametrize("name", CASES)
def test_compact_equals_masked_or_is_refused(name: str) -> None:
    case = CASES[name]
    example = random_tensor(*case.shape, seed=5)
    graph = traced(Net(case.body, **case.parts()), example)
    sites = find_sites(graph)
    refusals = {u.name: u.reason for u in sites.unprunable}
    if case.sites is not None:
        assert tuple(site.name for site in sites) == case.sites, refusals
    for layer, reason in case.refused.items():
        assert_matches(reason, refusals[layer])
    batches = ((torch.cat([example, example[:1] / 2]),),) if case.other_batches else ()
    after = find_sites(graph, "after")
    positions = [sites] if list(after) == list(sites) else [sites, after]
    for found, (seed, share) in product(positions, enumerate((0.4, 1.0))):
        keep = random_keep(found, seed, share)
        try:
            smaller = assert_compact_is_masked(graph, keep, *batches, prove=share < 1)
        except EmptyLayer:
            assert case.may_empty
            continue
        if any(not mask.all() for mask in keep.values()):
            assert count(smaller.module) < count(graph.module)


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), f"{pattern!r} is not in {text!r}"


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# ---- what needs more than a cut -------------------------------------------------------------------------------------------


def test_two_inputs() -> None:
    net = TwoInputs(
        lambda net, x, y: net.b(torch.cat([F.relu(net.a(x)), F.relu(net.c(y))], 1)) + net.d(F.relu(net.a2(x + y))),
        a=conv(3, 8),
        c=conv(3, 6),
        b=conv(14, 4),
        a2=conv(3, 5),
        d=conv(5, 4),
    )
    example = (random_tensor(2, 3, 8, 8, seed=1), random_tensor(2, 3, 8, 8, seed=2))
    graph = traced(net, *example)
    sites = find_sites(graph)
    assert {"a", "c", "a2"} <= {site.name for site in sites}
    assert_compact_is_masked(graph, random_keep(sites, 0), tuple(x[:1] * 2 for x in example))


def test_optional_arguments_that_the_example_leaves_out() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv(3, 8), conv(8, 4)

        def forward(self, x: Tensor, gate: Tensor | None = None, double: bool = True) -> Tensor:
            x = F.relu(self.a(x))
            if gate is not None:
                x = x * gate
            return self.b(2 * x if double else x)

    x = random_tensor(2, 3, 8, 8)
    assert_compact_is_masked(traced(Optional(), x), {"a": torch.arange(8) > 3})
    gate = random_tensor(2, 8, 1, 1)
    graph = traced(Optional(), x, gate)
    assert_compact_is_masked(graph, {"a": torch.arange(8) > 3}, (x[:1], gate[1:]))


DROPOUTS = {
    "F.dropout": lambda net, x: F.dropout(x, 0.5, training=net.training),
    "F.dropout, positional": lambda net, x: F.dropout(x, 0.5, net.training),
    "F.dropout2d": lambda net, x: F.dropout2d(x, p=0.5, training=net.training),
    "torch.dropout": lambda net, x: torch.dropout(x, 0.5, net.training),
    "F.dropout, in place": lambda net, x: F.dropout(x, 0.5, net.training, inplace=True),
    "F.alpha_dropout": lambda net, x: F.alpha_dropout(x, 0.5, net.training),
    "nn.Dropout": lambda net, x: net.drop(x),
}


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.parametrize("training", [True, False])
def test_dropout_follows_the_mode_after_tracing_and_cutting(name: str, training: bool) -> None:
    net = Net(lambda net, x: net.b(DROPOUTS[name](net, F.relu(net.a(x)))), a=conv(3, 8), b=conv(8, 4), drop=nn.Dropout(0.5))
    graph = trace(randomise_(net).train(training), random_tensor(2, 3, 8, 8))
    smaller = compact(graph, {"a": torch.arange(8) > 2})
    for module in (graph.module, smaller.module):
        assert module.training == training  # as it was
        module.train()
        assert not torch.equal(run(module, *graph.example), run(module, *graph.example))
        module.eval()
        assert torch.equal(run(module, *graph.example), run(module, *graph.example))
    assert_same(run(smaller.module, *graph.example), run(masked(graph, {"a": torch.arange(8) > 2}).eval(), *graph.example))


def test_dropout_that_is_always_on_is_refused() -> None:
    net = Net(lambda net, x: net.b(F.dropout(net.a(x), 0.5, training=True)), a=conv(3, 8), b=conv(8, 4))
    with pytest.raises(Untraceable, match="its forward is random in eval mode"):
        traced(net, random_tensor(2, 3, 8, 8))


def test_functional_batch_norm_follows_the_mode_only_if_it_did() -> None:
    follows = Net(CASES["F.batch_norm that follows the mode"].body, **batch_norm_parts())
    frozen = Net(CASES["F.batch_norm that is frozen"].body, **batch_norm_parts())
    x = random_tensor(2, 3, 8, 8)
    for net in (follows, frozen):
        graph = traced(net, x)
        graph.module.train()
        before = run(net.eval(), x)
        assert_same(run(graph.module, x), run(net.train(), x))
        assert torch.equal(run(graph.module.eval(), x), before) == (net is frozen)  # statistics moved, or did not


def test_a_removed_hidden_unit_is_zero_at_every_step() -> None:
    """By hand: the recurrence of an LSTM with h_j set to zero before anything reads it, against the masked network."""
    net = randomise_(Net(lambda net, x: net.r(x)[0], r=nn.LSTM(3, 6, batch_first=True)))
    keep, x = torch.arange(6) % 3 > 0, random_tensor(2, 5, 3)
    cell = nn.LSTMCell(3, 6).double()
    for name, parameter in cell.named_parameters():
        parameter.data = getattr(net.r, f"{name}_l0").data
    h, c, wanted = torch.zeros(2, 6).double(), torch.zeros(2, 6).double(), []
    for step in x.unbind(1):
        h, c = (state.detach() for state in cell(step, (h, c)))
        h = h * keep
        wanted.append(h)
    net = Net(lambda net, x: net.b(net.r(x)[0]), r=net.r, b=nn.Linear(6, 6, bias=False).double().eval())
    net.b.weight.data = torch.eye(6).double()
    graph = trace(net, x)
    assert_same(run(masked(graph, {"r": keep}), x), torch.stack(wanted, 1))
    smaller = assert_compact_is_masked(graph, {"r": keep}, (x[:1],))
    assert smaller.module.r.hidden_size == 4
    again = assert_compact_is_masked(smaller, {"r": torch.arange(4) > 0}, (x[:1],))
    assert find_site(again, "r").original == (2, 4, 5)


def test_hidden_units_are_scored_one_mask_for_each_example() -> None:
    case = CASES["last states of an LSTM"]
    graph = traced(Net(case.body, **case.parts()), x := random_tensor(2, 5, 3))
    keep = torch.stack([torch.arange(6) % 2 > 0, torch.arange(6) > 1])
    parts = split_at(graph, find_site(graph, "r"))
    factors = keep.double().requires_grad_()
    found = parts.suffix(*parts.prefix(x), factors)
    assert_same(found.detach(), torch.cat([run(masked(graph, {"r": k}), x[i : i + 1]) for i, k in enumerate(keep)]))
    found.square().sum().backward()
    step, along = 1e-6, random_tensor(2, 6)
    with torch.no_grad():
        ahead, back = (parts.suffix(*parts.prefix(x), factors + s * along).square().sum() for s in (step, -step))
    torch.testing.assert_close((factors.grad * along).sum(), (ahead - back) / (2 * step), rtol=1e-6, atol=1e-6)


def test_weight_norm_stays_after_a_cut() -> None:
    net = Net(CASES["weight norm"].body, **CASES["weight norm"].parts())
    graph = traced(net, random_tensor(2, 3, 8, 8))
    smaller = compact(graph, {"a": torch.arange(8) > 2, "w": torch.arange(8) > 3})
    assert [n for n, _ in smaller.module.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert smaller.module.w.parametrizations.weight.original1.shape == (4, 5, 3, 3)
    torch.testing.assert_close(smaller.module.w.weight, graph.module.w.weight[4:, 3:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["split attention", "GRU", "weight norm", "x / its own norm", "amax over channels"])
def test_every_engine_gives_the_same_sites_and_cuts_in_both_modes(name: str) -> None:
    case = CASES[name]
    x, found = random_tensor(*case.shape, seed=5), []
    for engine in ("fx", "record", "export"):
        graph = traced(Net(case.body, **case.parts()), x, engine=engine)
        assert tuple(site.name for site in find_sites(graph)) == case.sites
        keep = random_keep(find_sites(graph), seed=1, share=0.4)
        smaller, reference = compact(graph, keep).module.train(), masked(graph, keep).train()
        assert_same(run(smaller, x), run(reference, x))
        found.append(run(smaller.eval(), x))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_networks_are_cut_inside_a_block_for_the_meta_device() -> None:
    graph = traced(Net(lambda net, x: net.b(F.relu(net.a(x))), a=conv(3, 8), b=conv(8, 4)), random_tensor(2, 3, 8, 8))
    keep = torch.arange(8) > 2
    with torch.device("meta"):
        smaller = compact(graph, {"a": keep})
    assert not smaller.module.a.weight.is_meta
    assert smaller.module.a.out_channels == 5


def test_one_frame_of_a_video_is_not_made_shorter() -> None:
    """Images of twice the size do not fit the positions, half the size does; half a frame would be none."""
    net = Net(
        lambda net, x: net.o(F.relu(net.a(x + net.p[..., : x.shape[-1]])).flatten(3).mean(-1).amax(2)),
        a=nn.Conv3d(3, 8, (1, 3, 3), padding=(0, 1, 1)),
        p=nn.Parameter(torch.ones(8, 8)),
        o=nn.Linear(8, 2),
    )
    net.p = nn.Parameter(torch.ones(1, 8))
    graph = traced(net, random_tensor(2, 3, 1, 8, 8))
    assert [site.name for site in find_sites(graph)] == ["a"]


def test_statistics_of_a_call_that_nothing_reads_are_not_lost() -> None:
    """A BatchNorm that is also called on an unread branch: emptying that branch would end its updates in train mode."""
    net = Net(
        lambda net, x: (lambda y, unread: net.b(y))(F.relu(net.n(net.a(x))), net.n(net.c(F.relu(net.d(x))))),
        a=conv(3, 8),
        c=conv(4, 8),
        d=conv(3, 4),
        n=nn.BatchNorm2d(8),
        b=conv(8, 4),
    )
    graph = traced(net, random_tensor(2, 3, 8, 8))
    assert_compact_is_masked(graph, {"d": torch.arange(4) > 1})
    with pytest.raises(EmptyLayer, match="Keep at least one filter"):
        compact(graph, {"d": torch.zeros(4, dtype=torch.bool)})


def test_functional_weights_are_there_once() -> None:
    case = CASES["F.conv2d"]
    graph = traced(Net(case.body, **case.parts()), random_tensor(2, 3, 8, 8))
    smaller = compact(graph, {"conv2d": torch.arange(8) > 2})
    assert count(graph.module) == 8 * 27 + 8 + 4 * 8
    assert count(smaller.module) == 5 * 27 + 5 + 4 * 5


def test_a_subclass_that_changes_nothing_keeps_its_name_and_class() -> None:
    class OwnNorm(nn.BatchNorm2d):
        """Nothing new."""

    net = Net(lambda net, x: net.b(F.relu(net.n(net.a(x)))), a=OwnConv(3, 8, 3), n=OwnNorm(8), b=conv(8, 4))
    graph = trace(randomise_(net).train(), random_tensor(2, 3, 8, 8))
    smaller = compact(graph, {"a": torch.arange(8) > 2})
    assert list(smaller.module.state_dict()) == list(net.state_dict())
    assert type(smaller.module.a) is OwnConv
    assert smaller.module.a.out_channels == smaller.module.n.num_features == 5


def test_a_leaf_is_left_whole_and_touches_nothing_else() -> None:
    net = Net(
        lambda net, x: net.b(net.own(F.relu(net.c(F.relu(net.a(x)))))), a=conv(3, 8), c=conv(8, 8), own=Own(), b=conv(8, 4)
    )
    for leaves in (["own"], [Own]):
        graph = traced(net, random_tensor(2, 3, 8, 8), leaves=leaves)
        sites = find_sites(graph)
        assert [site.name for site in sites] == ["a"]
        assert {u.name: u.reason for u in sites.unprunable}["c"] == "no rule for Own at node 'own'"
        assert_compact_is_masked(graph, random_keep(sites, 0))


@contextmanager
def without_new_rules() -> Iterator[None]:
    rules, leaves = dict(RULES), set(RULED)
    try:
        yield
    finally:
        RULES.clear()
        RULES.update(rules)
        RULED.clear()
        RULED.update(leaves)


def test_a_user_adds_rules_for_a_module_a_function_and_a_method() -> None:
    net = Net(
        lambda net, x: net.d(F.relu(net.c(F.relu(net.b(net.own(net.a(x))).cumsum(2)))).erfc()),
        a=conv(3, 8),
        own=Own(),
        b=conv(8, 8),
        c=conv(8, 8),
        d=conv(8, 4),
    )
    with without_new_rules():

        @rule(Own, "cumsum")
        def keeps(op: Op) -> Flow:
            return channelwise(op, keeps_zero=True)

        @rule("erfc")
        def revives(op: Op) -> Flow:
            return channelwise(op, keeps_zero=False)

        graph = traced(net, random_tensor(2, 3, 8, 8))  # no leaves needed: a class with a rule is one
        sites = find_sites(graph)
        assert [site.name for site in sites] == ["a", "b", "c"]
        smaller = assert_compact_is_masked(graph, random_keep(sites, 1))
        assert any(isinstance(part, Own) for part in smaller.module.modules())
    with pytest.raises(Untraceable, match=r"torch.fx cannot follow Net"):
        traced(net, random_tensor(2, 3, 8, 8))


@pytest.mark.parametrize("bias", [float("nan"), 10.0])
def test_nan_and_infinities_of_a_removed_channel_are_removed_with_it(bias: float) -> None:
    """Masked and compacted are finite and equal though the removed channels alone are NaN, or exp(10,000) = infinite."""
    net = Net(lambda net, x: net.b(torch.exp(1000 * net.n(net.a(x)))), a=conv(3, 8), n=nn.BatchNorm2d(8), b=conv(8, 4))
    randomise_(net)
    with torch.no_grad():
        net.n.weight.fill_(1e-4)
        net.n.bias.zero_()
    graph = trace(net, x := random_tensor(2, 3, 8, 8))
    keep = torch.arange(8) >= 3
    with torch.no_grad():
        graph.module.n.bias.masked_fill_(~keep, bias)
    assert not run(graph.module, x).isfinite().all()
    smaller = assert_compact_is_masked(graph, {"a": keep})
    assert run(smaller.module, x).isfinite().all()


def test_verify_compares_networks_that_cast_in_their_own_precision() -> None:
    """A network that casts to float32 inside cannot be run in float64; it is compared in its own precision instead."""
    net = Net(lambda net, x: net.b(F.relu(net.a(x)).to(torch.float32)), a=conv(3, 8), b=conv(8, 4))
    graph = trace(net, torch.randn(2, 3, 8, 8, generator=seeded(0)))
    assert verify(graph, {"a": torch.arange(8) > 2}).difference < 1e-4


def test_an_image_of_another_size_than_the_example() -> None:
    net = Net(
        lambda net, x: (lambda y: net.b(F.interpolate(F.relu(net.c(F.max_pool2d(y, 2))), size=y.shape[2:]) + y))(
            F.relu(net.a(x))
        ),
        a=conv(3, 8),
        c=conv(8, 8),
        b=conv(8, 4),
    )
    graph = traced(net, random_tensor(2, 3, 8, 8))
    for seed in range(3):
        keep = random_keep(find_sites(graph), seed)
        assert_compact_is_masked(graph, keep, (random_tensor(1, 3, 11, 6),), (random_tensor(4, 3, 4, 20),))


def test_axes_of_equal_sizes_are_followed_by_their_order() -> None:
    """Batch, channels, height and width are all 4, so only the order of the axes distinguishes them."""
    bodies: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.transpose(0, 1).transpose(0, 1),
        lambda x: x.view(4, 4, 4, 4),
        lambda x: x.permute(1, 0, 2, 3).permute(1, 0, 2, 3),
        lambda x: x + x.permute(0, 2, 1, 3),
        lambda x: x.reshape(16, 4, 4).view(4, 4, 4, 4),
        lambda x: x.reshape(4, 16, 4).reshape(4, 4, 4, 4),
        lambda x: x.view(2, 2, 4, 4, 4).transpose(0, 1).reshape(4, 4, 4, 4),
        lambda x: x.view(4, 2, 2, 4, 4).transpose(1, 2).reshape(4, 4, 4, 4),
        lambda x: x.view(4, 2, 2, 4, 4).transpose(2, 3).reshape(4, 4, 4, 4),
        lambda x: x.permute(3, 2, 1, 0).reshape(4, 4, 4, 4),
        lambda x: x.permute(0, 2, 3, 1).reshape(4, 4, 4, 4),
        lambda x: x.mean(2, keepdim=True).permute(0, 2, 1, 3).expand(4, 4, 4, 4),
    ]
    for body in bodies:
        net = Net(lambda net, x, body=body: net.b(body(F.relu(net.a(x)))), a=conv(4, 4), b=conv(4, 4))
        graph = traced(net, random_tensor(4, 4, 4, 4))
        for seed in range(3):
            assert_compact_is_masked(graph, random_keep(find_sites(graph), seed))


@pytest.mark.parametrize("batch", [1, 2])
def test_an_example_of_one_does_not_hide_the_batch_axis(batch: int) -> None:
    bodies: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.flatten(1),
        lambda x: x.view(x.size(0), -1),
        lambda x: x.reshape(-1, 512),
        lambda x: x.view(-1, 8 * 8 * 8),
        lambda x: x.permute(0, 1, 3, 2).reshape(x.shape[0], 8, 64).flatten(1),
    ]
    for body in bodies:
        net = Net(lambda net, x, body=body: net.l(body(F.relu(net.a(x)))), a=conv(3, 8), l=nn.Linear(512, 3))
        graph = traced(net, random_tensor(batch, 3, 8, 8))
        assert_compact_is_masked(graph, {"a": torch.arange(8) % 3 > 0}, (random_tensor(4, 3, 8, 8, seed=1),))


def test_grouped_layers_cut_unevenly_stay_grouped() -> None:
    net = Net(lambda net, x: net.b(F.relu(net.g(F.relu(net.a(x))))), a=conv(3, 8), g=conv(8, 12, groups=4), b=conv(12, 4))
    graph = traced(net, random_tensor(2, 3, 8, 8))
    filters = {
        "a": [0, 1, 2],
        "g": [0, 1, 2, 3, 7],
    }  # all that group 0 reads and gives, one input of group 1, filters of others
    keep = {name: torch.ones(width, dtype=torch.bool) for name, width in (("a", 8), ("g", 12))}
    for name, removed in filters.items():
        keep[name][removed] = False
    smaller = assert_compact_is_masked(graph, keep)
    grouped = smaller.module.g
    assert (grouped.groups, grouped.in_channels, grouped.out_channels) == (3, 6, 9)
    assert smaller.module.b.in_channels == 7
    whole = compact(graph, {"g": torch.arange(12) >= 6})
    assert (whole.module.g.groups, whole.module.g.in_channels, whole.module.g.out_channels) == (2, 4, 6)
    assert whole.module.a.out_channels == 4  # the first four are not read any more


def test_names_do_not_grow_with_the_number_of_cuts() -> None:
    graph = trace(build("resnet8", widths=(6, 8, 10)).eval(), torch.randn(2, 3, 8, 8))
    for _ in range(3):
        for name, last in (("conv1", 0), ("layer1.0.conv2", -1)):
            keep = torch.ones(find_site(graph, name).channels, dtype=torch.bool)
            keep[last] = False
            graph = compact(graph, {name: keep})
    aligned = [node.name for node in graph.module.graph.nodes if "align" in node.name]
    assert aligned
    assert max(name.count("align") for name in aligned) == 1
