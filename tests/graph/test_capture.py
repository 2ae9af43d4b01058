"""Three engines capture one network: those with the idioms that torch.fx cannot follow, and the small ones that all follow.

Every expected value comes from the model itself: its outputs, gradients, statistics and names.
"""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nets import TOPOLOGIES, assert_compact_is_masked, assert_same, conv, random_keep, random_tensor, randomise_, run
from torch import Tensor, fx, nn

from secateurs import Graph, compact, find_sites, trace
from secateurs.compaction import replay
from secateurs.errors import InvalidInput, Untraceable
from secateurs.graph import trace as tracing
from secateurs.graph.trace import shape_of, tensors_in
from secateurs.models import build, example_input

X = random_tensor(2, 3, 8, 8)


class Split(nn.Module):
    """A C2f block: a list of chunks that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.cv1, self.cv2 = conv(3, 8), conv(12, 4)
        self.m = nn.ModuleList([conv(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        y = list(F.silu(self.cv1(x)).chunk(2, 1))
        y.extend(F.silu(m(y[-1])) for m in self.m)
        return self.cv2(torch.cat(y, 1))


class Detector(nn.Module):
    """Any arguments, anchors that are cached by shape, another output in train mode, and writing by index."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = conv(3, 6), nn.BatchNorm2d(6), conv(6, 4)
        self.shape: Any = None
        self.stride = torch.tensor([2.0])

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.loss(x, *args) if isinstance(x, dict) else self.predict(x, *args, **kwargs)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.predict(batch["img"]).mean()

    def predict(self, x: Tensor, augment: bool = False) -> Any:
        if augment:
            return [self.predict(x), self.predict(x.flip(-1))]
        found = self.head(F.silu(self.norm(self.body(x))))
        if self.training:
            return [found]
        if self.shape != found.shape:
            h, w = found.shape[2:]
            self.anchors = torch.arange(h * w, dtype=x.dtype, device=x.device) + 0.5
            self.strides = found.new_full((h * w,), self.stride[0].item())
            self.shape = found.shape
        flat = torch.cat([part.view(x.shape[0], self.head.out_channels, -1) for part in [found]], 2)
        flat[:, 0::2] = flat[:, 0::2] * self.anchors * self.strides
        return flat, [found]


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As transformers return it: a dataclass that is a mapping too."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __post_init__(self) -> None:
        self.update({name: value for name, value in (("loss", self.loss), ("logits", self.logits)) if value is not None})


def takes_options(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that pops keyword arguments, as those of transformers do."""

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        as_mapping = kwargs.pop("return_dict", True)
        found = forward(self, *args, **kwargs)
        return found if as_mapping else tuple(v for v in (found.loss, found.logits) if v is not None)

    return wrapped


class Classifier(nn.Module):
    """Keyword inputs, options, a loss if there are labels, and a dataclass as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = conv(3, 6), nn.Linear(6, 4)

    @takes_options
    def forward(self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if pixel_values is None:
            raise ValueError("You have to specify pixel_values")
        logits = self.head(F.relu(self.body(pixel_values)).mean((2, 3)))
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


class Attention(nn.Module):
    """Tokens from an image whose size is checked and padded; dropout as a rate that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out, self.up = nn.Conv2d(3, 8, 2, 2), nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 12)
        self.head, self.dropout = nn.Linear(12, 3), 0.2

    def forward(self, x: Tensor) -> Tensor:
        height = math.ceil(x.shape[2] / 4) * 4
        if height != x.shape[2]:
            x = F.pad(x, (0, 0, 0, height - x.shape[2]))
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        batch, count, width = tokens.shape
        q, k, v = self.qkv(tokens).reshape(batch, count, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate).transpose(1, 2).reshape(batch, count, width)
        return self.head(F.dropout(F.gelu(self.up(tokens + self.out(mixed))), 0.1, self.training).mean(1))


class NormAct(nn.BatchNorm2d):
    """BatchNorm and an activation in one class, by functions, as in timm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.act(x)


class SameConv(nn.Conv2d):
    """A convolution that pads by the size of its input, as those of TensorFlow do."""

    def forward(self, x: Tensor) -> Tensor:
        extra = max((math.ceil(x.shape[-1] / 2) - 1) * 2 + 3 - x.shape[-1], 0)
        x = F.pad(x, [extra // 2, extra - extra // 2, extra // 2, extra - extra // 2])
        return F.conv2d(x, self.weight, self.bias, self.stride)


class Functional(nn.Module):
    """Layers by functions, in-place ops, a weight that is used twice, constants that are made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.twice = SameConv(3, 6, 3, 2), NormAct(6), conv(6, 6)
        self.mid, self.head = conv(6, 5), conv(5, 4)
        self.register_buffer("scale", torch.tensor([0.5]), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.bn(self.stem(x))
        for weight in torch.linspace(0.5, 1.0, 2).tolist():
            y = self.twice(x) * weight
            y += x
            x = F.relu(y, inplace=True)
        table = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=x.dtype)
        return {"out": self.head(F.relu(self.mid(x))) * self.scale, "table": table.sum(), "sizes": [x.shape[0]]}


IDIOMS = {kind.__name__: kind for kind in (Split, Detector, Attention, Functional)}


def same_everywhere(model: nn.Module, graph: Graph) -> None:
    """Outputs at other batches, names, gradients, and a cut of every site."""
    assert set(graph.module.state_dict()) == set(model.state_dict())
    assert dict(graph.module.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for batch in (1, 5):
        inputs = random_tensor(batch, 3, 8, 8, seed=batch)
        assert_same(run(graph.module, inputs), run(model, inputs))
    other = copy.deepcopy(model)
    for network in (graph.module, other):
        network.zero_grad()
        sum(t.sum() for t in tensors_in(network(X.clone())) if t.requires_grad).backward()  # type: ignore[union-attr]
    wanted = dict(other.named_parameters())
    for name, parameter in graph.module.named_parameters():
        assert_same(parameter.grad, wanted[name].grad)
    fresh = {name: torch.randn_like(t) if t.is_floating_point() else t for name, t in model.state_dict().items()}
    fresh = {name: t.abs() + 0.1 if name.endswith("running_var") else t for name, t in fresh.items()}
    other.load_state_dict(fresh)
    graph.module.load_state_dict(fresh)
    assert_same(run(graph.module, X), run(other, X))
    sites = list(find_sites(graph))
    assert sites
    assert_compact_is_masked(graph, random_keep(sites, 0, 0.3), (random_tensor(3, 3, 8, 8, seed=9),))


@pytest.mark.parametrize("engine", ["record", "export"])
@pytest.mark.parametrize("name", IDIOMS)
def test_idioms_that_fx_cannot_follow(name: str, engine: Any) -> None:
    model = randomise_(IDIOMS[name]())
    with pytest.raises(Untraceable):
        trace(model, X, engine="fx")
    same_everywhere(model, trace(model, X, engine=engine))


@pytest.mark.parametrize("name", IDIOMS)
def test_train_mode(name: str) -> None:
    model = randomise_(IDIOMS[name]())
    graph = trace(model, X)
    found = []
    for network in (model, graph.module):
        torch.manual_seed(3)
        found.append(tensors_in(run(network.train(), X)))
    statistics = dict(model.named_buffers())
    for key, buffer in graph.module.named_buffers():
        if "running" in key:
            assert_same(buffer, statistics[key])
    if name != "Detector":  # in train mode its head gives less
        assert_same(found[1], found[0])


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_engines_agree(name: str) -> None:
    model = randomise_(build(name, **TOPOLOGIES[name]))
    inputs = example_input(name, 2).double()
    engines = ("fx", "record", "export") if name in ("resnet8", "mlp") else ("fx", "record")
    first, *others = (trace(model, inputs, engine=engine) for engine in engines)  # type: ignore[arg-type]
    keep = random_keep(list(find_sites(first)), 1)
    wanted = run(compact(first, keep).module, inputs)
    for graph in others:
        assert [(s.name, s.channels) for s in find_sites(graph)] == [(s.name, s.channels) for s in find_sites(first)]
        assert list(graph.module.state_dict()) == list(first.module.state_dict())
        assert_same(run(compact(graph, keep, verify=False).module, inputs), wanted)


class Counting(nn.Module):
    """A forward that changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 6), conv(6, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        out: Tensor = self.b(F.relu(self.a(x)))
        return out


@pytest.mark.parametrize("few", [0, 10**18], ids=["without values", "with values"])
@pytest.mark.parametrize("name", [*TOPOLOGIES, "a buffer that changes"])
def test_shapes_are_recorded_with_and_without_values(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large network without values, of a small one with them: the network's own shapes, and nothing is changed."""
    monkeypatch.setattr(tracing, "_FEW_PRODUCTS", few)
    known = name in TOPOLOGIES
    model = randomise_(build(name, **TOPOLOGIES[name]) if known else Counting())
    graph = trace(model, example_input(name, 2).double() if known else X)
    keep = random_keep(list(find_sites(graph)), 1)
    graph = compact(graph, keep, verify=False)
    buffers = {key: buffer.clone() for key, buffer in graph.module.named_buffers()}
    seen: dict[str, tuple[int, ...]] = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            found = super().run_node(n)
            if isinstance(found, Tensor):
                seen[n.name] = tuple(found.shape)
            return found

    recorded = {node.name: shape_of(node).dims for node in graph.module.graph.nodes if shape_of(node).is_tensor}
    tracing.record_shapes_(graph.module, graph.example)
    assert all(torch.equal(buffer, buffers[key]) for key, buffer in graph.module.named_buffers())
    Watch(graph.module).run(*graph.example)
    assert recorded == seen


class Frozen(nn.Module):
    """BatchNorm by arithmetic with buffers, as in detectors: torch.fx would make constants of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 6), conv(6, 2)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.view(1, -1, 1, 1) * 2
        return self.b(F.relu(self.a(x) * scale + self.shift.view(1, -1, 1, 1)))


def test_buffers_stay_buffers() -> None:
    model = randomise_(Frozen())
    same_everywhere(model, trace(model, X))


def test_inputs_by_keyword_and_outputs_in_the_models_own_types() -> None:
    model = randomise_(Classifier())
    labels = torch.tensor([1, 2])
    graph = trace(model, {"labels": labels, "pixel_values": X})
    with torch.no_grad():
        got, wanted = graph.module(pixel_values=X, labels=labels), model(X, labels)
    assert type(got) is Output
    assert_same([got.loss, got["logits"]], [wanted.loss, wanted.logits])
    assert_compact_is_masked(graph, {"body": torch.arange(6) > 1})
    pair = run(trace(model, {"pixel_values": X, "return_dict": False}).module, X)
    assert type(pair) is tuple
    assert_same(pair, (wanted.logits,))
    with pytest.raises(InvalidInput, match=r"does not run on the example input.*You have to specify pixel_values"):
        trace(model, {"labels": labels})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own imports
def test_wrapped_models_are_unwrapped() -> None:
    model = randomise_(Split())
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert set(trace(wrapped, X).module.state_dict()) == set(model.state_dict())  # type: ignore[arg-type]


def doubled(x: Tensor) -> Tensor:
    return x * 2


class Doubles(nn.Module):
    """Calls a compiled function, which no recorder of torch's functions sees."""

    twice: Any

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 6), conv(6, 2)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.b(self.twice(self.a(inputs[0])))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.script
def test_what_cannot_be_recorded_is_refused_or_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doubles, "twice", staticmethod(torch.jit.script(doubled)), raising=False)
    model = randomise_(Doubles())
    with pytest.raises(Untraceable, match="gives another output than the model itself"):
        trace(model, X, engine="record")
    assert_same(run(trace(model, X).module, X), run(model, X))


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = conv(3, 2)

    def forward(self, *inputs: Tensor) -> Tensor:
        x = self.a(inputs[0])
        return x if x.mean() > 0 else -x


def test_a_decision_by_values_is_refused_with_every_engines_reason() -> None:
    message = r"(?s)takes \*inputs.*reads the values of a tensor that depends on its input: line .*x.mean\(\) > 0.*torch.export"
    with pytest.raises(Untraceable, match=message):
        trace(randomise_(Decides()), X)
    with pytest.raises(InvalidInput, match="engine: got 'jit', wanted one of 'auto', 'fx', 'record', 'export'"):
        trace(randomise_(Split()), X, engine="jit")  # type: ignore[arg-type]


class CountsByValues(Decides):
    """A number of steps that depends on values: torch.export prints the program that it has until then."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        y = torch.relu(x)
        for _ in range(int(y.abs().max() * 3)):
            y = torch.relu(y + 1)
        return y


@pytest.mark.parametrize("kind", [Decides, CountsByValues])
@pytest.mark.parametrize("engine", ["auto", "export"])
def test_a_refusal_is_an_exception_and_prints_nothing(
    kind: type[nn.Module], engine: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Untraceable):
        trace(randomise_(kind()), X, engine=engine)
    assert capfd.readouterr() == ("", "")


class Stubborn(nn.Module):
    """Its statistics move twice as fast in train mode as its layer says, which no graph can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = conv(3, 6), nn.BatchNorm2d(6), conv(6, 2)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        self.norm.momentum = 0.2 if self.training else 0.1
        y = F.relu(self.norm(self.a(x)))
        self.norm.momentum = 0.1
        return self.b(y)


def test_other_statistics_in_train_mode_are_refused() -> None:
    with pytest.raises(Untraceable, match="other BatchNorm statistics than the model in train mode"):
        trace(randomise_(Stubborn()), X)


def test_a_head_that_differs_in_training_needs_eval_mode() -> None:
    with pytest.raises(Untraceable, match=r"in train mode.*another path.*call model.eval\(\)"):
        trace(randomise_(Detector()).train(), X)


class Windows(nn.Module):
    """Does something else for larger images, with outputs of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 6), conv(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        return self.b(y.roll(1, 2) if x.shape[2] > 8 else y)


def test_a_network_that_depends_on_the_size_of_images_has_a_fixed_one() -> None:
    model = randomise_(Windows())
    graph = trace(model, X)
    smaller = assert_compact_is_masked(graph, {"a": torch.arange(6) > 1}, (random_tensor(5, 3, 8, 8),))
    for network in (graph.module, smaller.module):
        with pytest.raises(AssertionError, match="x must have length 8 along axis"):
            run(network, random_tensor(2, 3, 16, 16))


def test_a_captured_network_can_be_moved() -> None:
    model = randomise_(Detector()).float()
    graph = trace(model, X.float())
    assert_same(run(graph.module.double(), X), run(copy.deepcopy(model).double(), X))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), lambda module: module])
def test_a_pruned_network_is_an_input(way: Callable[[nn.Module], nn.Module]) -> None:
    model = randomise_(build("resnet8", **TOPOLOGIES["resnet8"]))
    inputs = example_input("resnet8", 2).double()
    first = trace(model, inputs)
    smaller = compact(first, random_keep(list(find_sites(first, "after")), 2, 0.3))
    module = way(smaller.module)
    with torch.no_grad():  # trained elsewhere
        for parameter in module.parameters():
            parameter.mul_(1.01)
    again = trace(module, inputs)
    assert_same(run(again.module, inputs), run(module, inputs))
    sites = list(find_sites(again, "after"))
    assert len(sites) == len(find_sites(smaller, "after"))
    twice = assert_compact_is_masked(again, random_keep(sites, 3, 0.3))
    assert [s.original for s in sites] == [s.original for s in find_sites(smaller, "after")]
    replayed = replay(trace(model, inputs), twice.plan).module
    assert {n: t.shape for n, t in replayed.state_dict().items()} == {n: t.shape for n, t in twice.module.state_dict().items()}


# ---- inputs within lists and dicts, and what a refusal says ---------------------------------------------------------------


class Nested(nn.Module):
    """Several images in a list, and another in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = conv(3, 6), conv(3, 6), conv(6, 2)

    def forward(self, images: list[Tensor], more: dict[str, Any]) -> Tensor:
        out: Tensor = self.o(F.relu(self.a(images[0]) + self.b(images[1])) * more["factor"]["inner"] * more["times"])
        return out


@pytest.mark.parametrize("named", [True, False])
def test_inputs_within_lists_and_dicts(named: bool) -> None:
    model, tensors = randomise_(Nested()), [random_tensor(2, 3, 8, 8, seed=i) for i in (1, 2)]
    factor = random_tensor(2, 1, 8, 8, seed=3)
    given: Any = {"images": tensors, "more": {"factor": {"inner": factor}, "times": 2}}
    graph = trace(model, given if named else tuple(given.values()))
    names = [node.name for node in graph.module.graph.nodes if node.op == "placeholder"]
    assert names == (
        ["images_0", "images_1", "more_factor_inner"] if named else ["input_0_0", "input_0_1", "input_1_factor_inner"]
    )
    with torch.no_grad():
        wanted = model(**given)
    assert_same(run(graph.module, *tensors, factor), wanted)
    assert_compact_is_masked(graph, random_keep(list(find_sites(graph)), 0))


class Branching(nn.Module):
    """A backbone, and a head that decides by values."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(conv(3, 6), nn.ReLU(), conv(6, 6)), conv(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.backbone(x)
        while float(found.abs().mean()) > 1:
            found = found / 2
        out: Tensor = self.head(found)
        return out


def test_a_refusal_says_what_could_be_captured() -> None:
    """486 of 522 MACs a pixel are the backbone's: 9 · 3 · 6 + 9 · 6 · 6 of all with 6 · 6."""
    with pytest.raises(
        Untraceable, match=r"'backbone' \(93% of the MACs\) and 'head' \(7% of the MACs\) can each be captured alone"
    ):
        trace(randomise_(Branching()), X)
