"""Widths that modules store and evaluation does not read: an exporter's forward, a training branch or a new head may.

Such a number is set where one new value is right: what the module computes stays, a second forward of it gives what its
forward gives, and all widths of that size that its code handles have become the same. Where several could be right, the cut
is refused.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs.errors import NotInPlace
from secateurs.graph.capture.calls import tensors_in
from secateurs.graph.flow import find_flows
from secateurs.graph.node_info import info, shape_of
from secateurs.graph.trace import Graph

WITHOUT_EFFECT = ("extra_repr", "reset_parameters", "init_weights", "_init_weights")  # they print, or start a training

SPEAKING = (  # names of widths that code outside a model asks for
    *("num_features", "num_channels", "in_features", "out_features", "in_channels", "out_channels", "channels"),
    *("embed_dim", "embedding_dim", "hidden_dim", "hidden_size", "head_hidden_size", "intermediate_size", "head_dim", "width"),
)
MEANINGS = 16  # of a list, at most: more than one is refused


@dataclass
class Sizes:
    """Sizes of the tensors that a module's code handles.

    `widths` are new numbers of channels by old ones, the same where nothing was cut; `others` are sizes along other axes.
    """

    widths: dict[int, set[int]] = field(default_factory=dict)
    others: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Write:
    """A tensor or an attribute of the submodule at `path` that gets another value."""

    path: str
    name: str
    value: Any


def sizes_by_module(before: Graph, after: Graph) -> dict[str, Sizes]:
    """Return, by path, the sizes of the tensors that the code of each module handles: what it computes, passes on and gets.

    What a submodule computes inside is left out: a number of its parent says nothing about it.
    """
    later = {node.name: node for node in after.module.graph.nodes}
    flows = find_flows(before.module)
    found: dict[str, Sizes] = {}
    for node, flow in flows.of.items():
        old, new = shape_of(node).dims, shape_of(later[node.name]).dims if node.name in later else None
        if flow.axis is None or old is None or new is None or len(old) != len(new):
            continue
        pairs = list(zip(old, new, strict=True))
        for path in set().union(*(_between(_scope(node), _scope(user)) for user in (node, *flows.users.get(node, ())))):
            sizes = found.setdefault(path, Sizes())
            for axis, (a, b) in enumerate(pairs):
                if axis == flow.axis or a != b:
                    sizes.widths.setdefault(a, set()).add(b)
                elif axis > 0:  # not the batch
                    sizes.others.add(a)
    return found


def _scope(node: fx.Node) -> str:
    """Return the path of the module whose code calls the op at `node`."""
    stack = info(node).get("nn_module_stack") or {}
    paths = [str(entry[0]) if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    return next((path for path in reversed(paths) if node.op != "call_module" or path != node.target), "")


def _between(one: str, other: str) -> set[str]:
    """Return the paths of the modules through whose code a tensor goes from one module to another."""
    ways = [list(itertools.accumulate(path.split("."), "{}.{}".format)) if path else [] for path in (one, other)]
    shared = [a for a, b in zip(*ways, strict=False) if a == b]
    return {path for way in ways for path in way if path not in shared} | {shared[-1] if shared else ""}


def readers(kind: type, name: str) -> list[str]:
    """Return the methods of a class, torch's aside, whose code mentions `name`, but for those that only construct one."""
    mentions = {method: set(_names(code)) for method, code in _methods(kind)}
    construction = {"__init__"}
    while True:  # helpers of the constructor, such as _make_layer
        users = {m: {user for user, names in mentions.items() if m in names and user != m} for m in mentions}
        more = {m for m, by in users.items() if m.startswith("_") and by and by <= construction} - construction
        if not more:
            return [m for m, names in mentions.items() if name in names and m not in (*construction, *WITHOUT_EFFECT)]
        construction |= more


def _methods(kind: type) -> Iterator[tuple[str, CodeType]]:
    """Yield the methods of a class and its bases, of an overridden one the last first; torch's own classes are left out."""
    for base in reversed(kind.__mro__):
        if base is object or base.__module__.partition(".")[0] == "torch":
            continue
        for name, member in vars(base).items():
            inner = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
            if isinstance(inner, FunctionType):
                yield name, inner.__code__


def _names(code: CodeType) -> Iterator[str]:
    """Yield what a function's code mentions: attributes, globals, and strings, which getattr may be called with."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names(constant)


@dataclass(frozen=True)
class _Call:
    """The first call of a module in a run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: list[Tensor]

    def repeats(self, method: Callable[..., Any], tolerance: float) -> bool:
        """Whether a method gives for the same arguments what the module gave."""
        try:
            with torch.no_grad():
                got = tensors_in(method(*copy.deepcopy(self.args), **copy.deepcopy(self.kwargs)))
        except Exception:  # a method with a width that does not fit, or with other arguments, may raise anything
            return False
        return same(got, self.output, tolerance)


def _calls(network: nn.Module, run: Callable[[nn.Module], Any], paths: set[str]) -> dict[str, _Call]:
    """Run a network, and return the first calls of its submodules at `paths`."""
    if not paths:
        return {}
    given: dict[str, tuple[Any, Any]] = {}
    found: dict[str, _Call] = {}

    def before(path: str) -> Any:
        return lambda part, args, kwargs: given.setdefault(path, copy.deepcopy((args, kwargs))) and None

    def after(path: str) -> Any:
        def hook(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if path not in found:
                found[path] = _Call(*given[path], [t.detach().clone() for t in tensors_in(output)])

        return hook

    handles = []
    for path in paths:
        part = network.get_submodule(path)
        handles += [
            part.register_forward_pre_hook(before(path), with_kwargs=True),
            part.register_forward_hook(after(path), with_kwargs=True),
        ]
    try:
        with torch.no_grad():
            run(network)
    finally:
        for handle in handles:
            handle.remove()
    return found


def forward_methods(network: nn.Module) -> dict[str, list[str]]:
    """Return, by path, the methods of submodules that are called forward_…, or _forward…."""
    found = {
        path: [m for m in dict(_methods(type(part))) if m.lstrip("_").startswith("forward") and m != "forward"]
        for path, part in network.named_modules()
    }
    return {path: methods for path, methods in found.items() if methods}


def second_forwards(network: nn.Module, run: Callable[[nn.Module], Any], tolerance: float) -> dict[str, list[str]]:
    """Return, by path, the methods called forward_… that give what the module's forward gives, such as an exporter's."""
    named = forward_methods(network)
    found = {
        path: [m for m in named[path] if call.repeats(getattr(network.get_submodule(path), m), tolerance)]
        for path, call in _calls(network, run, set(named)).items()
    }
    return {path: methods for path, methods in found.items() if methods}


def find_stored_widths(
    network: nn.Module,
    run: Callable[[nn.Module], Any],
    sizes: Mapping[str, Sizes],
    seconds: Mapping[str, list[str]],
    known: set[tuple[str, str]],
    tolerance: float,
) -> list[tuple[Write, str]]:
    """Return the widths to set in a network that is cut already and evaluates as it should; it is left as it is.

    `run` evaluates it, `sizes` are those of `sizes_by_module`, and `seconds` the second forwards of its modules before the
    cut. `known` are attributes that are set already. With each comes a note for the user, empty where a second forward proves
    it or its name says it. Raises `NotInPlace` where a number is ambiguous that the module's code may read, or a second
    forward no longer gives what the first gives.
    """
    stored = {
        path: numbers
        for path, part in network.named_modules()
        if path in sizes and (numbers := _stored(part, sizes[path].widths, {n for where, n in known if where == path}))
    }
    calls = _calls(network, run, {*stored, *seconds})
    found: list[tuple[Write, str]] = []
    for path in dict.fromkeys([*stored, *seconds]):
        part, call, meant = network.get_submodule(path), calls.get(path), stored.get(path, {})
        where = f"{type(part).__name__} at {path!r}" if path else type(part).__name__
        old = {name: getattr(part, name) for name in meant}
        standing = {name: [old[name], *(value for value in meant[name] if value != old[name])] for name in meant}
        if call is not None:  # what evaluation reads is right as it is
            for name, values in standing.items():
                standing[name] = [v for v in values if _stands(part, {name: v}, call, ["forward"], tolerance)]
        if call is not None and path in seconds:
            choices = [dict(zip(standing, values, strict=True)) for values in itertools.product(*standing.values())]
            choices = [choice for choice in choices if _stands(part, choice, call, seconds[path], tolerance)]
            if not choices:
                raise NotInPlace(
                    f"{type(network).__name__} cannot be cut in place: {', '.join(seconds[path])} of {where} gave what its "
                    f"forward gives, and with narrower layers does not. Leave its layers alone (ignore=...), or use the "
                    f"compacted network."
                )
            standing = {name: [v for v in standing[name] if any(c[name] == v for c in choices)] for name in standing}
        for name, values in standing.items():
            possible = values if len(values) == 1 else [value for value in values if value in meant[name]]
            by = ", ".join(readers(type(part), name))
            parts = old[name] if isinstance(old[name], tuple | list) else [old[name]]
            if len(values) > 1 and name not in SPEAKING and not sizes[path].others.isdisjoint(parts):
                # an image or a grid has that size, too
                found.append((Write(path, name, old[name]), f"{where}: {name} stays {old[name]}, which may be no width"))
            elif len(possible) > 1 and not by:
                could = " or ".join(map(str, possible[:3]))
                found.append((Write(path, name, old[name]), f"{where}: {name} stays {old[name]}, and could be {could}"))
            elif len(possible) > 1:
                raise NotInPlace(
                    f"{type(network).__name__} cannot be cut in place: {where} stores {name} = {old[name]}, which {by} may "
                    f"read, and which could be {' or '.join(map(str, possible[:3]))} now: evaluation does not tell. Leave the "
                    f"layers of one of these widths alone (ignore=...), or use the compacted network."
                )
            elif possible != [old[name]]:
                plain = len(values) == 1 or name in SPEAKING  # proved, or said by its name
                note = "" if plain else f"{where}: {name} from {old[name]} to {possible[0]}, for {by}"
                found.append((Write(path, name, possible[0]), note))
    return found


def _stored(part: nn.Module, widths: Mapping[int, set[int]], known: set[str]) -> dict[str, list[Any]]:
    """Return the numbers, and lists of numbers, that a module stores, with what they may mean after a cut.

    Its code reads them, or they have a name that speaks of a width, as of what a trainer asks a backbone for.

    Left out are those of torch's own modules, which are set with the tensors that they count, and those that a cut has not
    changed in any of their meanings.
    """
    found: dict[str, list[Any]] = {}
    if type(part).__module__.partition(".")[0] == "torch":
        return found
    for name, value in vars(part).items():
        several = type(value) in (tuple, list) and all(type(v) is int for v in value)
        numbers = list(value) if several else [value] if type(value) is int else []
        old = [n for n in dict.fromkeys(numbers) if n in widths]
        if name in known or not old or all(widths[n] == {n} for n in old):
            continue
        if name not in SPEAKING and not readers(type(part), name):
            continue
        every = itertools.islice(itertools.product(*(sorted(widths[n]) for n in old)), MEANINGS)
        new = [dict(zip(old, each, strict=True)) for each in every]
        found[name] = [type(value)(each.get(n, n) for n in numbers) if several else each[value] for each in new]
    return found


def _stands(part: nn.Module, values: Mapping[str, Any], call: _Call, methods: list[str], tolerance: float) -> bool:
    """Whether methods of a module give what it gave, with these values of its attributes."""
    old = {name: getattr(part, name) for name in values}
    try:
        for name, value in values.items():
            setattr(part, name, value)
        return all(call.repeats(getattr(part, method), tolerance) for method in methods)
    finally:
        for name, value in old.items():
            setattr(part, name, value)


def same(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> bool:
    """Whether tensors are equal up to rounding; NaN equals NaN."""
    if [t.shape for t in got] != [t.shape for t in wanted]:
        return False
    for a, b in zip(got, wanted, strict=True):
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        scale = float(b.double().nan_to_num(0, 0, 0).abs().max()) if b.numel() else 0.0
        if not torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance * max(scale, 1e-30), equal_nan=True):
            return False
    return True
