"""Step 1 of 9: takes an nn.Module and an example input, gives a Graph; the user's model is untouched.

A `Graph` is a torch.fx graph of ordinary modules whose every node knows the shape of what it gives. Normalisation
(`normalise.py`) has already turned functional layers into modules and in-place ops into plain ones.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from secateurs.errors import InvalidInput, NonFinite, Untraceable
from secateurs.graph.channels import Kept, call_word, module_path
from secateurs.graph.normalise import align_train_and_eval_, normalise_
from secateurs.graph.plan import Plan

Leaf = str | type[nn.Module]
Example = Tensor | tuple[Tensor, ...]

RULED: set[type[nn.Module]] = set()
"""Module classes with a rule of their own: tracing does not look inside them."""

HARMLESS = {"__init__", "__module__", "__doc__", "__annotations__", "__firstlineno__", "__static_attributes__", "extra_repr"}


def ruled_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class whose rule holds for `kind`: itself, or a parent of which it overrides nothing that matters."""
    for parent in kind.__mro__:
        if parent in RULED:
            return parent
        if any(hasattr(base, name) for base in parent.__bases__ for name in vars(parent) if name not in HARMLESS):
            return None
    return None


@dataclass(frozen=True, eq=False)
class Graph:
    """A network as ordinary modules joined by a torch.fx graph, with what is needed to go on cutting it.

    `module` is the runnable network. `example` is an input that it takes. `plan` holds the cuts made so far,
    `leaves` the submodules that were left whole. `ids` gives,
    for each node that lost channels, which of its original channels are left. `kept` gives, for each parameter and
    buffer that the last cut narrowed, the entries that survived it. `findings` keeps what was found out about the structure,
    which nobody changes once the graph is there.
    """

    module: fx.GraphModule
    example: tuple[Tensor, ...]
    plan: Plan
    leaves: tuple[str, ...] = ()
    ids: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Kept] = field(default_factory=dict)
    findings: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(e.shape)) for e in self.example)
        return f"Graph({type(self.module).__name__}, example {shapes}, {len(self.plan.steps)} steps of cuts)"

    def __call__(self, *inputs: Tensor) -> Any:
        """Run the network."""
        return self.module(*inputs)

    def with_module(self, module: fx.GraphModule) -> Graph:
        """The same graph with other weights: `module` must have the same structure."""
        return replace(self, module=module)  # which also forgets the findings, in case it has not


@dataclass(frozen=True)
class Shape:
    """What a node gives: the shape of a tensor, or, for anything else, the value itself."""

    dims: tuple[int, ...] | None
    value: Any = None

    @property
    def is_tensor(self) -> bool:
        """Whether the node gives one tensor."""
        return self.dims is not None


def shape_of(node: fx.Node, size: int = 0) -> Shape:
    """The recorded shape of what `node` gave for the example input; for `size` > 0, for an input of another size."""
    shape = node.meta["shape"] if size == 0 else node.meta["other_shapes"][size - 1]
    assert isinstance(shape, Shape)
    return shape


def trace(model: nn.Module, example_input: Example, *, leaves: Iterable[Leaf] | None = None) -> Graph:
    """Follow `model`'s forward with torch.fx on `example_input` (a tensor, or a tuple of them for several arguments).

    The model is copied, never changed; every submodule of the copy keeps its train or eval mode. `leaves` names submodules
    (by path or class) to be left whole: tracing does not look inside them, and what they touch is not pruned. An example
    of one is doubled if the model takes a batch of two.
    """
    example = as_example(example_input)
    with torch.no_grad():
        check_model(model, example)
    copied = _copied(model)
    modes = {name: module.training for name, module in copied.named_modules()}
    tracer = _Tracer(copied, leaves or ())
    expected = _run(copied.eval(), example)
    others = [(example, expected)] if example[0].shape[:1] == (1,) else []
    for doubled, found in other_batches(copied, example, 2) if others else []:
        example, expected = doubled, found  # a batch of one looks like an axis that is not there
    others = [*(others if others and others[0][0] is not example else []), *other_sizes(copied, example, expected)]
    arguments = _default_arguments(copied, example)
    graph = _follow(tracer, copied, arguments)
    module = fx.GraphModule(copied, graph, class_name=type(model).__name__)
    record_shapes_(module, example)
    align_train_and_eval_(module, lambda: _follow(tracer, copied.train(), arguments), demanded=model.training)
    normalise_(module)
    _note_origin_(module)
    module.eval()
    _check_same(_run(module, example), expected, type(model).__name__)
    _record_other_sizes_(module, others, type(model).__name__)
    for name, part in module.named_modules():
        part.training = modes.get(name, model.training)
    origin = f"{type(model).__module__}.{type(model).__qualname__}"
    return Graph(module, example, Plan(model=origin), tracer.left_whole(copied))


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise InvalidInput(
            f"{type(model).__name__} cannot be copied ({error}). Weights that are computed (torch.nn.utils.weight_norm) must "
            f"be made plain first: torch.nn.utils.remove_weight_norm, or use torch.nn.utils.parametrizations."
        ) from error


def as_example(example_input: Example) -> tuple[Tensor, ...]:
    """The example input as the tuple of the model's positional arguments."""
    example = (example_input,) if isinstance(example_input, Tensor) else example_input
    if not isinstance(example, tuple) or not example or not all(isinstance(e, Tensor) for e in example):
        raise InvalidInput(
            f"example_input: got {type(example_input).__name__}, wanted a tensor, or a tuple of tensors for a model "
            f"with several arguments. Pass one batch as the model takes it, e.g. torch.randn(2, 3, 32, 32)."
        )
    return tuple(e.detach().clone() for e in example)


def check_model(model: nn.Module, example: tuple[Tensor, ...]) -> None:
    """Refuse what cannot be traced rightly: no module, NaN or infinite weights, another device or dtype than the example's."""
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model: got {type(model).__name__}, wanted a torch.nn.Module (an instance, not a class).")
    if isinstance(model, torch.jit.ScriptModule):
        raise Untraceable("a ScriptModule cannot be traced. Pass the nn.Module that it was made from.")
    scripted = [name for name, part in model.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted:
        raise Untraceable(
            f"the submodule {scripted[0]!r} is a ScriptModule, which cannot be traced. Put the nn.Module in its place."
        )
    if any(is_lazy(p) for p in [*model.parameters(), *model.buffers()]):
        raise InvalidInput("the model has lazy layers without weights yet. Run it once: model(example_input).")
    for name in [*dict(model.named_modules()), *dict(model.named_parameters()), *dict(model.named_buffers())]:
        if any(c in name for c in '"\\') or not name.isprintable() or any(map(iskeyword, name.split("."))):
            raise InvalidInput(
                f"the model has a part named {name!r}: torch.fx cannot write Python's keywords, quotes, backslashes or line "
                f"breaks into code. Give that submodule or parameter another name."
            )
    floating = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        floating.append((name, tensor))
        if not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
            raise NonFinite(
                f"{name!r} holds NaN or infinite values: no cut can be judged on such a network. "
                f"Load finite weights, or find out where training diverged."
            )
    devices = {str(t.device) for _, t in floating}
    for e in example:
        if devices and str(e.device) not in devices:
            raise InvalidInput(
                f"the example input is on {str(e.device)!r} but the model is on {', '.join(sorted(devices))!r}. "
                f"Move one of them: example_input.to(...) or model.to(...)."
            )
        dtypes = {t.dtype for _, t in floating}
        if e.is_floating_point() and dtypes and e.dtype not in dtypes:
            raise InvalidInput(
                f"the example input is {e.dtype} but the model is {', '.join(sorted(map(str, dtypes)))}. "
                f"Convert one of them: example_input.to(dtype) or model.to(dtype)."
            )


def record_shapes_(module: fx.GraphModule, example: tuple[Tensor, ...]) -> None:
    """Run `module` once in eval mode and record at every node the shape of what it gives."""
    training = {m: m.training for m in module.modules()}
    try:
        module.eval()
        with torch.no_grad():
            recorder = _Recorder(module)
            recorder.run(*like_network(module, copy.deepcopy(example)))
        for node, shape in recorder.shapes.items():
            node.meta["shape"] = shape
            node.meta.pop("other_shapes", None)  # of a network as it was
    except Exception as error:
        raise Untraceable(
            f"the traced {type(module).__name__} does not run on the example input: {str(error).splitlines()[0]} "
            f"torch.fx followed another path than the model takes: mark the submodule as a leaf, or give all arguments."
        ) from error
    finally:
        for part, mode in training.items():
            part.training = mode


def like_network(module: nn.Module, example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The example on the device and in the precision of the network, which may have been moved since it was traced."""
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    if first is None:
        return example
    return tuple(e.to(first.device, first.dtype) if e.is_floating_point() else e.to(first.device) for e in example)


def other_sizes(model: nn.Module, example: tuple[Tensor, ...], expected: Any) -> list[tuple[tuple[Tensor, ...], Any]]:
    """Inputs like the example that `model` takes in another batch size, and in another image size, with its outputs.

    What a network does to its channels must not depend on sizes, and an example alone cannot tell a batch of 2 from 2 groups.
    `expected` is what the model gives for the example. Empty for a network that takes one size only: one that fails, or
    whose outputs no longer are as many as its inputs (view(-1, 512) makes more rows of a larger image).
    """
    found = other_batches(model, example, 1 + math.prod(example[0].shape[:1]))
    images = [e for e in example if e.dim() > 2 and e.is_floating_point()]
    large = all(n % 2 == 0 and n >= 64 for e in images for n in e.shape[2:])
    for factor in ((0.5, 2) if large else (2, 0.5)) if images else ():  # half an image is a quarter of the work
        resized = tuple(_resized(e, factor) for e in (found[0][0] if found else example))
        outputs = attempt(model, resized)
        if outputs is not None and _goes_by_batch(outputs, resized) == _goes_by_batch(expected, example):
            return [*found, (resized, outputs)]
    return found


def _goes_by_batch(outputs: Any, inputs: tuple[Tensor, ...]) -> list[bool]:
    """Which of the outputs have an entry for each input of the batch."""
    return [t.shape[:1] == inputs[0].shape[:1] for t in tensors_in(outputs)]


def other_batches(model: nn.Module, example: tuple[Tensor, ...], count: int) -> list[tuple[tuple[Tensor, ...], Any]]:
    """The example repeated to a batch of `count`, with the model's outputs; empty if it does not take that."""
    batch = example[0].shape[0] if example[0].dim() else 0
    if batch == 0:
        return []
    index = torch.arange(count, device=example[0].device) % batch
    repeated = tuple(e.index_select(0, index) if e.dim() and e.shape[0] == batch else e for e in example)
    outputs = attempt(model, repeated)
    return [] if outputs is None else [(repeated, outputs)]


def _resized(tensor: Tensor, factor: float) -> Tensor:
    """The tensor with all axes behind the channels `factor` times as long."""
    if tensor.dim() < 3 or not tensor.is_floating_point():
        return tensor
    for axis in range(2, tensor.dim()):
        index = torch.arange(int(tensor.shape[axis] * factor), device=tensor.device) % tensor.shape[axis]
        tensor = tensor.index_select(axis, index)
    return tensor


def attempt(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """What the model gives for `inputs`; None where it does not take them."""
    try:
        with torch.no_grad():  # a GraphModule that fails prints to the user's terminal; an interpreter does not
            run = fx.Interpreter(model).run if isinstance(model, fx.GraphModule) else model
            return run(*copy.deepcopy(inputs))
    except Exception:  # a network for one size only: then nothing is to be known about others
        return None


def _record_other_sizes_(module: fx.GraphModule, others: list[tuple[tuple[Tensor, ...], Any]], name: str) -> None:
    """Record at every node what it gives for inputs of other sizes; the model's own outputs for them must come out."""
    for inputs, expected in others:
        recorder = _Recorder(module)
        try:
            with torch.no_grad():
                result = recorder.run(*copy.deepcopy(inputs))
        except Exception as error:
            raise Untraceable(
                f"the traced {name} does not run on another size of input, {tuple(inputs[0].shape)}, though the model does: "
                f"{str(error).splitlines()[0]} Its forward takes another path there: mark the submodule as a leaf."
            ) from error
        if all(bool(torch.isfinite(t).all()) for t in tensors_in(expected) if t.is_floating_point() and not t.is_meta):
            _check_same(result, expected, name)
        for node, shape in recorder.shapes.items():
            node.meta["other_shapes"] = (*node.meta.get("other_shapes", ()), shape)


class _Recorder(fx.Interpreter):
    """Runs a graph and collects the shape of what each node gives."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[fx.Node, Shape] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.shapes[n] = Shape(tuple(result.shape)) if isinstance(result, Tensor) else Shape(None, _plain(result))
        return result


def _plain(value: Any) -> Any:
    """Sizes and numbers as they are, tensors inside a tuple as their shapes: enough for rules, and holds no memory."""
    if isinstance(value, Tensor):
        return Shape(tuple(value.shape))
    if isinstance(value, tuple | list):
        return tuple(_plain(v) for v in value)
    return value if isinstance(value, int | float | bool | str) else None


class _Tracer(fx.Tracer):
    """torch.fx's tracer, with the user's leaves and the classes that have a rule left whole."""

    def __init__(self, root: nn.Module, leaves: Iterable[Leaf]) -> None:
        super().__init__()
        chosen = list(leaves)
        self.names = {leaf for leaf in chosen if isinstance(leaf, str)}
        self.classes = tuple(leaf for leaf in chosen if not isinstance(leaf, str))
        known = {name for name, _ in root.named_modules()}
        for name in self.names - known:
            raise InvalidInput(f"leaves: the model has no submodule {name!r}. Give a path of model.named_modules().")

    def left_whole(self, root: nn.Module) -> tuple[str, ...]:
        """Paths of the submodules that the user wanted as leaves."""
        return tuple(name for name, part in root.named_modules() if name in self.names or isinstance(part, self.classes))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name in self.names
            or isinstance(m, self.classes)
            or ruled_class(type(m)) is not None
            or super().is_leaf_module(m, module_qualified_name)
        )


def _default_arguments(model: nn.Module, example: tuple[Tensor, ...]) -> dict[str, Any]:
    """The arguments of forward that the example leaves to their defaults: tracing must see those, not stand-ins."""
    given: dict[str, Any] = {}
    for place, parameter in enumerate(inspect.signature(model.forward).parameters.values()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise Untraceable(
                f"{type(model).__name__}.forward takes *{parameter.name}, which torch.fx cannot follow. Wrap the model in a "
                f"module whose forward names its inputs."
            )
        if place >= len(example) and parameter.default is not parameter.empty:
            given[parameter.name] = parameter.default
    return given


def _follow(tracer: _Tracer, model: nn.Module, arguments: dict[str, Any]) -> fx.Graph:
    try:
        with _interrupts_deferred():
            graph = tracer.trace(model, concrete_args=arguments or None)
        graph._tracer_cls = None  # our tracer takes arguments, but unpickling a GraphModule makes a tracer without any
        _forget_arguments_(graph, arguments)
        return graph
    except Exception as error:
        raise Untraceable(_untraceable(model, error)) from error


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: torch.fx, interrupted while it traces, may trace nothing more afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt


def _forget_arguments_(graph: fx.Graph, arguments: dict[str, Any]) -> None:
    """Erase the placeholders of arguments left to their defaults, and the checks that torch.fx added for them."""
    for node in [n for n in graph.nodes if n.op == "placeholder" and _is_default(n, arguments)]:
        for user in sorted(_readers(node), key=list(graph.nodes).index, reverse=True):
            graph.erase_node(user)
        graph.erase_node(node)


def _is_default(node: fx.Node, arguments: dict[str, Any]) -> bool:
    return any(re.fullmatch(rf"{re.escape(name)}(_\d+)?", str(node.target)) for name in arguments)


def _readers(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for user in node.users:
        found |= {user} | _readers(user)
    return found


def _untraceable(model: nn.Module, error: Exception) -> str:
    """Names the deepest line of the user's own code in the error's traceback, and the submodule it belongs to."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    where = f'line {own[-1].lineno} of {own[-1].filename}, in {own[-1].name}: "{own[-1].line}"' if own else "its forward"
    return (
        f"torch.fx cannot follow {type(model).__name__}: {where} ({type(error).__name__}: {str(error).splitlines()[0]}). "
        f"Its outcome depends on the values of a tensor, or it calls what cannot be traced. Rewrite that line, or mark the "
        f"submodule that holds it as a leaf: trace(model, x, leaves=['path.of.submodule'])."
    )


def _is_library(filename: str) -> bool:
    path = Path(filename)
    return Path(torch.__file__).parent in path.parents or Path(__file__).parent in path.parents


def _run(module: nn.Module, example: tuple[Tensor, ...]) -> Any:
    try:
        with torch.no_grad():
            return module(*copy.deepcopy(example))
    except Exception as error:
        shapes = ", ".join(str(tuple(e.shape)) for e in example)
        raise InvalidInput(
            f"{type(module).__name__} does not run on the example input of shape {shapes}: {error}. "
            f"Pass an input that model(example_input) accepts."
        ) from error


def _check_same(traced: Any, expected: Any, name: str) -> None:
    """The traced network must give what the model gives: otherwise torch.fx missed a side effect or a random choice."""
    pairs = zip(tensors_in(traced), tensors_in(expected), strict=True)
    for ours, theirs in pairs:
        if ours.is_meta or not theirs.is_floating_point():
            continue
        if not bool(torch.isfinite(theirs).all()):
            raise NonFinite(f"{name} gives NaN or infinite outputs for the example input: nothing can be compared on it.")
        scale = float(theirs.abs().max()) if theirs.numel() else 0.0
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5 * max(scale, 1e-30)):
            raise Untraceable(
                f"the traced {name} gives another output than the model itself: its forward is random in eval mode, "
                f"changes a tensor in place behind a view, or relies on hooks of the model or a container. Rewrite that part, "
                f"or mark the submodule as a leaf: trace(model, x, leaves=['path.of.submodule'])."
            )


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors inside nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, each.name) for each in fields(value)]
    if isinstance(value, tuple | list):
        return [t for v in value for t in tensors_in(v)]
    return []


def _filters_a_channel(module: fx.GraphModule, node: fx.Node) -> int:
    """How many filters a depthwise layer has for each channel; 0 for any other node. A cut can make it look otherwise."""
    layer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    groups, inputs, filters = (getattr(layer, name, None) for name in ("groups", "in_channels", "out_channels"))
    if isinstance(groups, int) and isinstance(filters, int) and 1 < groups == inputs:
        return filters // groups
    return 0


def _note_origin_(module: fx.GraphModule) -> None:
    """Note at every node what must survive all cuts: for a call of a function, a name such as 'layer1.0.add'."""
    seen: dict[str, int] = {}
    for node in reversed(module.graph.nodes):  # no way leads from it to an output
        node.meta["unread"] = node.op != "output" and all(user.meta["unread"] for user in node.users)
    for node in module.graph.nodes:
        node.meta["filters_a_channel"] = _filters_a_channel(module, node)
        if node.op not in ("call_function", "call_method"):
            continue
        name = ".".join(part for part in (module_path(node), call_word(node)) if part)
        count = seen.get(name, 0)
        seen[name] = count + 1
        node.meta["name"] = f"{name}_{count}" if count else name
