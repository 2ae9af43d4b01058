"""Step 1 of 9: trace an nn.Module on an example input into a `Graph`; the user's model is not changed.

A `Graph` is a torch.fx graph of ordinary modules that records the output shape of every node. Normalisation (`normalise.py`)
has turned functional layers into modules and in-place ops into out-of-place ones.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from secateurs._util.modules import copyable, eval_mode, unwrapped, with_real_tensors
from secateurs.errors import InvalidInput, NonFinite, SecateursError, Untraceable
from secateurs.graph.attention import expand_attention_
from secateurs.graph.capture.calls import ByPosition, Call, call_for, check_model
from secateurs.graph.capture.calls import Example as Example
from secateurs.graph.capture.calls import as_example as as_example
from secateurs.graph.capture.calls import tensors_in as tensors_in
from secateurs.graph.capture.code import call_directly_
from secateurs.graph.capture.export import export
from secateurs.graph.capture.leaves import RULED as RULED
from secateurs.graph.capture.leaves import Leaf, Leaves, is_ruled
from secateurs.graph.capture.leaves import ruled_class as ruled_class
from secateurs.graph.capture.record import buffers_restored, record
from secateurs.graph.capture.symbolic import Unpickler, trace_symbolically
from secateurs.graph.channels import Kept, call_word, module_path
from secateurs.graph.computed_weights import compute_weights_
from secateurs.graph.cost import count_macs
from secateurs.graph.node_info import Shape as Shape
from secateurs.graph.node_info import called_module, copy_info_, info, keep_facts_, kept_facts
from secateurs.graph.node_info import shape_of as shape_of
from secateurs.graph.normalise import AnotherPath, align_train_and_eval_, normalise_
from secateurs.graph.other_sizes import attempt, other_batches, other_sizes, refuse_other_images_
from secateurs.graph.plan import Plan
from secateurs.graph.weight_norm import has_hooks

Engine = Literal["auto", "fx", "record", "export"]

_FEW_PRODUCTS = 10**10  # weights times numbers of the example: more than the multiplications of most networks


@dataclass(frozen=True, eq=False)
class Graph:
    """A network as ordinary modules joined by a torch.fx graph, with everything that the next cut needs.

    `module` is the runnable network, `example` a valid input. `plan` holds the cuts made so far, `leaves` the paths of the
    submodules that tracing did not enter. `ids` gives, for each node that lost channels, the ids of the original channels that
    remain. `kept` gives, for each parameter and buffer that the last cut narrowed, the indices of the entries that remain.
    """

    module: fx.GraphModule
    example: tuple[Tensor, ...]
    plan: Plan
    leaves: tuple[str, ...] = ()
    ids: Mapping[str, Tensor] = field(default_factory=dict)
    kept: Mapping[str, Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.plan.steps:  # so that the network alone can be pruned further
            keep_facts_(self.module, (self.plan, self.leaves, dict(self.ids)))

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(e.shape)) for e in self.example)
        return f"Graph({type(self.module).__name__}, example {shapes}, {len(self.plan.steps)} steps of cuts)"

    def __call__(self, *inputs: Tensor) -> Any:
        """Run the network."""
        return self.module(*inputs)

    def with_module(self, module: fx.GraphModule) -> Graph:
        """Return the graph with another network of the same structure, for example with other weights."""
        return replace(self, module=module)


@with_real_tensors
def trace(model: nn.Module, example_input: Example, *, engine: Engine = "auto", leaves: Iterable[Leaf] | None = None) -> Graph:
    """Capture `model` on `example_input`: a tensor, a tuple of tensors, or a mapping from names of arguments to tensors.

    Tensors may lie within lists and dicts; the captured network takes them by position, in their order. Values of a mapping
    that are not tensors go to the model unchanged and stay fixed. `engine` says how the forward is followed: "fx" runs it on
    proxies, "record" runs it on the example and records every call, "export" uses torch.export; "auto" takes the first of them
    that gives what the model gives. The model is copied, not changed; every submodule of the copy keeps its train or eval mode.
    `leaves` names submodules (by path or class) that tracing does not enter; layers
    connected to them are not pruned. A batch of one example is doubled if the model accepts a batch of two. A network that
    was pruned before keeps its plan and the numbers of its original channels.
    """
    return _trace(model, example_input, engine, leaves, explain=True)


def _trace(model: nn.Module, example_input: Example, engine: Engine, leaves: Iterable[Leaf] | None, *, explain: bool) -> Graph:
    """Do what `trace` says; with `explain`, a refusal names the submodules that can be captured."""
    model = unwrapped(model)
    call, example = call_for(model, example_input)
    with torch.no_grad():
        check_model(model, example)
    if engine not in get_args(Engine):
        raise InvalidInput(f"engine: got {engine!r}, wanted one of {', '.join(map(repr, get_args(Engine)))}.")
    name = type(model).__name__
    facts = kept_facts(model) if engine == "auto" and leaves is None else None
    if facts is not None and isinstance(model, fx.GraphModule):  # a network that was pruned before
        with copyable(model):
            pruned = copy.deepcopy(model)
        copy_info_(model.graph, pruned.graph)
        record_shapes_(pruned, example)
        return Graph(pruned, example, *facts)
    try:
        with copyable(model):
            copied = copy.deepcopy(model).eval()
    except Exception as error:
        raise InvalidInput(f"{name} cannot be copied: copy.deepcopy(model) raises {error}.") from error
    within = Leaves(copied, leaves or ())
    reference = ByPosition(copied, call).eval() if call.keywords or call.fixed or call.nested else copied
    expected = _run(reference, example, name)
    others = [(example, expected)] if example[0].shape[:1] == (1,) else []
    for doubled, found in other_batches(reference, example, 2) if others else []:
        example, expected = doubled, found  # an axis of length 1 looks like an axis that is not there
    shared: dict[int, Any] = {id(parameter): parameter for parameter in reference.parameters()}
    probe = copy.deepcopy(reference, shared)  # some networks change their own settings when they see another image size
    others = others if others and others[0][0] is not example else []
    others += other_sizes(probe, example, expected, batches=not others)
    checks = _Checks(reference, example, expected, tuple(others), name)
    refusals: list[Untraceable] = []
    module: fx.GraphModule | None = None
    for chosen in ("fx", "record", "export") if engine == "auto" else (engine,):
        try:
            module = _captured(copied, call, within, checks, chosen, demanded=model.training)
        except Untraceable as error:
            refusals.append(error)
            if module is not None or (isinstance(error, AnotherPath) and chosen != "fx"):
                break
            continue
        if chosen != "fx" or not any(map(_is_recorded_better, module.graph.nodes)):
            break
    if module is None:
        parts = _traceable_parts(copied, call, example) if explain else ""
        if len(refusals) == 1 and not parts:
            raise refusals[0]
        raise type(refusals[-1])("\n".join([*map(str, refusals), *([parts] if parts else [])])) from refusals[0]
    copy_modes_(model, module)
    origin = f"{type(model).__module__}.{type(model).__qualname__}"
    return Graph(module, example, Plan(model=origin), within.chosen(copied))


def _traceable_parts(model: nn.Module, call: Call, example: tuple[Tensor, ...]) -> str:
    """Say which submodules of a network that cannot be captured can be captured alone, and what share of its MACs they do."""
    given: dict[str, tuple[Any, ...]] = {}
    children = dict(model.named_children())

    def note(name: str, args: tuple[Any, ...]) -> None:
        given.setdefault(name, args)

    hooks = [child.register_forward_pre_hook(lambda _, args, n=name: note(n, args)) for name, child in children.items()]
    try:
        macs = count_macs(ByPosition(model, call), example)
    except Exception:  # as in `attempt`
        return ""
    finally:
        for hook in hooks:
            hook.remove()
    total = sum(macs.values())
    found = []
    for name, args in given.items():
        share = sum(n for path, n in macs.items() if f"{path}.".startswith(f"model.{name}.")) / max(total, 1)
        if share < 0.01 or not args or not all(isinstance(a, Tensor) for a in args):
            continue
        try:
            _trace(children[name], args, "auto", None, explain=False)
        except SecateursError:
            continue
        found.append(f"{name!r} ({share:.0%} of the MACs)")
    alone = "can be captured alone" if len(found) == 1 else "can each be captured alone"
    return f"{' and '.join(found)} {alone}: trace it with its own input, and put the result in its place." if found else ""


def _is_recorded_better(node: fx.Node) -> bool:
    """Whether torch.fx has computed with a buffer, a constant then, or has not entered a function (`torch.fx.wrap`)."""
    if node.op != "call_function":
        return "_tensor_constant" in str(node.target)
    package = str(getattr(node.target, "__module__", None) or "torch").split(".")[0]
    return package not in ("torch", "_operator", "builtins", "math", "secateurs") and not is_ruled(node.target)


@dataclass(frozen=True)
class _Checks:
    """What a captured network is compared with: the model, its outputs for the example, and those for inputs of other sizes."""

    reference: nn.Module
    example: tuple[Tensor, ...]
    expected: Any
    others: tuple[tuple[tuple[Tensor, ...], Any], ...]
    name: str


def _captured(copied: nn.Module, call: Call, leaves: Leaves, checks: _Checks, engine: str, *, demanded: bool) -> fx.GraphModule:
    """Capture with one engine, normalise, and compare with the model; raises `Untraceable` where they differ."""
    follow: Callable[[], fx.Graph]
    if engine == "fx":
        follow = functools.partial(trace_symbolically, copied, call, leaves)
    elif engine == "record":
        follow = functools.partial(record, copied, call, checks.example, leaves)
    else:
        follow = functools.partial(export, copied, call, checks.example, leaves)
    example, name = checks.example, checks.name
    copied.train().eval()  # a change of mode clears what some layers computed from their weights and keep
    if engine != "fx":  # on another batch: what a layer keeps for the example's shape would be a constant
        for inputs, _ in checks.others[:1]:
            attempt(checks.reference, inputs)
    graph = follow()
    graph._tracer_cls = Unpickler
    call_directly_(graph)
    module = fx.GraphModule(copied, graph, class_name=name)
    record_shapes_(module, example)
    copied.train()
    aligned = align_train_and_eval_(module, follow, demanded=demanded)
    if expand_attention_(module, leaves):
        record_shapes_(module, example)
    compute_weights_(module)
    normalise_(module)
    _record_origins_(module)
    module.eval()
    copied.eval()
    _check_same(_run(module, example, name), checks.expected, name)
    if engine != "fx":  # these run on real values, of which they might have taken one for a constant
        changed = tuple(e.flip(0).roll(1, -1) * 0.9 if e.is_floating_point() else e.flip(0) for e in example)
        outputs = attempt(checks.reference, changed)
        if outputs is not None:
            _check_same(_run(module, changed, name), outputs, name)
        if aligned:
            _check_train_mode(module, checks)
    _record_other_sizes_(module, checks, fixed_image_size=engine != "fx")
    return module


def _check_train_mode(module: fx.GraphModule, checks: _Checks) -> None:
    """Compare outputs and updated statistics in train mode, with the same random numbers."""
    found: list[tuple[Any, dict[str, Tensor]]] = []
    for network in (checks.reference, module):
        with torch.random.fork_rng(devices=[]), buffers_restored(network), torch.no_grad():
            torch.manual_seed(0)
            outputs = attempt(network.train(), checks.example)
            holder = network.model if isinstance(network, ByPosition) else network
            updated = {name: buffer.clone() for name, buffer in holder.named_buffers()}
        network.eval()
        found.append((outputs, updated))
    (theirs, their_buffers), (ours, our_buffers) = found
    if theirs is None:
        return
    both = [n for n, b in our_buffers.items() if n in their_buffers and b.is_floating_point()]
    try:
        _check_same([ours, [our_buffers[n] for n in both]], [theirs, [their_buffers[n] for n in both]], checks.name)
    except NonFinite:
        return
    except Untraceable as error:
        raise Untraceable(
            f"the traced {checks.name} gives another output or other BatchNorm statistics than the model in train mode. "
            f"Mark the submodule that behaves differently as a leaf: trace(model, x, leaves=['path.of.submodule'])."
        ) from error


def copy_modes_(source: nn.Module, target: nn.Module) -> None:
    """Give every submodule of `target` the mode of the same path in `source`, or of `source` itself where there is none."""
    modes = {path: part.training for path, part in source.named_modules()}
    for path, part in target.named_modules():
        part.training = modes.get(path, source.training)


def record_shapes_(module: fx.GraphModule, example: tuple[Tensor, ...]) -> None:
    """Run `module` once in eval mode, without values where that is possible, and record the output shape of every node."""
    inputs = like_network(module, example)
    try:
        with eval_mode(module):
            recorder = _without_values(module, inputs)
            if recorder is None:
                recorder = _Recorder(module)
                with buffers_restored(module):
                    recorder.run(*copy.deepcopy(inputs))
    except Exception as error:
        raise Untraceable(
            f"the traced {type(module).__name__} does not run on the example input: {str(error).splitlines()[0]} "
            f"torch.fx recorded another path than the model takes: mark the submodule as a leaf, or pass all arguments."
        ) from error
    for node, shape in recorder.shapes.items():
        info(node)["shape"] = shape
        info(node).pop("other_shapes", None)  # recorded before the last change of the network


def _without_values(module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> _Recorder | None:
    """Run `module` on tensors without values, which takes a fraction of the time; None where real ones are better.

    Layers of others than torch, and those with hooks or computed weights, might keep a tensor without values. For a small
    network real ones take less time: the first operation without values makes torch load its compiler, for over a second.
    """
    if sum(weight.numel() for weight in module.parameters()) * sum(given.numel() for given in inputs) < _FEW_PRODUCTS:
        return None
    for layer in (called_module(module, node) for node in module.graph.nodes):
        known = layer is None or type(layer).__module__.startswith(("torch.nn.modules", "secateurs.graph"))
        if not known or isinstance(layer, nn.RNNBase) or (layer is not None and has_hooks(layer)):
            return None
    recorder = _OnMeta(module)
    try:
        recorder.run(*(tensor.to("meta") for tensor in inputs))
    except Exception:  # a forward that reads values, or makes tensors on another device
        return None
    return recorder


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of the network's first floating-point parameter; float32 if it has none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def like_network(module: nn.Module, example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the example on the device and in the precision of the network, which may have moved since it was traced."""
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    if first is None:
        return example
    return tuple(e.to(first.device, first.dtype) if e.is_floating_point() else e.to(first.device) for e in example)


def _record_other_sizes_(module: fx.GraphModule, checks: _Checks, *, fixed_image_size: bool) -> None:
    """Record the output shapes of all nodes for inputs of other sizes, and compare the outputs with the model's own.

    With `fixed_image_size` a network that is right for images of one size passes; it is made to refuse others.
    """
    name = checks.name
    for inputs, expected in checks.others:
        same_images = all(i.shape[2:] == e.shape[2:] for i, e in zip(inputs, checks.example, strict=True))
        recorder = _Recorder(module)
        try:
            with torch.no_grad():
                result = recorder.run(*copy.deepcopy(inputs))
        except Exception as error:
            if fixed_image_size and not same_images:
                continue
            raise Untraceable(
                f"the traced {name} does not run on an input of shape {tuple(inputs[0].shape)}, though the model does: "
                f"{str(error).splitlines()[0]} Its forward takes another path for that size: mark the submodule as a leaf."
            ) from error
        try:
            if all(bool(torch.isfinite(t).all()) for t in tensors_in(expected) if t.is_floating_point() and not t.is_meta):
                _check_same(result, expected, name)
        except Untraceable:
            if same_images or not fixed_image_size:
                raise
            refuse_other_images_(module, checks.example)
            continue
        for node, shape in recorder.shapes.items():
            info(node)["other_shapes"] = (*info(node).get("other_shapes", ()), shape)


class _Recorder(fx.Interpreter):
    """Runs a graph and collects the output shape of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[fx.Node, Shape] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.shapes[n] = Shape(tuple(result.shape)) if isinstance(result, Tensor) else Shape(None, _plain(result))
        return result


class _OnMeta(_Recorder):
    """Runs a graph on tensors without values; weights of layers need not be such tensors."""

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.fetch_attr(target)
        weights = {name: t.to("meta") for name, t in (*layer.named_parameters(), *layer.named_buffers())}
        return functional_call(layer, weights, args, kwargs) if weights else layer(*args, **kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = super().get_attr(target, args, kwargs)
        return found.to("meta") if isinstance(found, Tensor) else found


def _plain(value: Any) -> Any:
    """Return sizes and numbers as they are, and tensors inside a tuple as shapes: enough for rules, and holds no tensors."""
    if isinstance(value, Tensor):
        return Shape(tuple(value.shape))
    if isinstance(value, tuple | list):
        return tuple(_plain(v) for v in value)
    return value if isinstance(value, int | float | bool | str) else None


def _run(module: nn.Module, example: tuple[Tensor, ...], name: str) -> Any:
    try:
        with torch.no_grad():
            return module(*copy.deepcopy(example))
    except Exception as error:
        shapes = ", ".join(str(tuple(e.shape)) for e in example)
        raise InvalidInput(
            f"{name} does not run on the example input of shape {shapes}: {error}. "
            f"Pass an input that model(example_input) accepts."
        ) from error


def _check_same(traced: Any, expected: Any, name: str) -> None:
    """Compare the traced network's outputs with the model's: they differ where torch.fx missed a side effect or randomness."""
    found, wanted = tensors_in(traced), tensors_in(expected)
    if len(found) != len(wanted):
        raise Untraceable(f"the traced {name} gives {len(found)} tensors, the model itself {len(wanted)}.")
    for ours, theirs in zip(found, wanted, strict=True):
        if ours.is_meta or not theirs.is_floating_point():
            continue
        if not bool(torch.isfinite(theirs).all()):
            raise NonFinite(f"{name} gives NaN or infinite outputs for the example input, so nothing can be compared on it.")
        scale = float(theirs.abs().max()) if theirs.numel() else 0.0
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5 * max(scale, 1e-30)):
            raise Untraceable(
                f"the traced {name} gives another output than the model itself: its forward is random in eval mode, "
                f"changes a tensor in place behind a view, or relies on hooks of the model or a container. Rewrite that part, "
                f"or mark the submodule as a leaf: trace(model, x, leaves=['path.of.submodule'])."
            )


def _record_origins_(module: fx.GraphModule) -> None:
    """Record at every node facts about the uncut network that cuts would hide, and a name for each call of a function."""
    for node in reversed(module.graph.nodes):
        info(node)["unused"] = node.op != "output" and all(info(user)["unused"] for user in node.users)
    calls: Counter[str] = Counter()
    for node in module.graph.nodes:
        layer = called_module(module, node)
        groups, inputs, filters = (getattr(layer, name, None) for name in ("groups", "in_channels", "out_channels"))
        info(node)["filters_a_channel"] = 0
        if isinstance(groups, int) and isinstance(filters, int) and 1 < groups == inputs:  # depthwise
            info(node)["filters_a_channel"] = filters // groups
        if node.op in ("call_function", "call_method"):
            name = ".".join(part for part in (module_path(node), call_word(node)) if part)
            info(node)["name"] = f"{name}_{calls[name]}" if calls[name] else name
            calls[name] += 1
