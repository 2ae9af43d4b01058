"""Cuts inside the user's own model: `cut_` narrows its parameters, so that its class, trainer and file format stay usable.

The model's forward stays as it is written, so it must allow the cut: sums add what has the same channels, and widths are read
from tensors. Numbers that modules store are set where a trial shows that this makes the model equal to the compacted graph.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs._util.modules import copyable, keeping_modes, unwrapped
from secateurs.compaction import perturb_, replay
from secateurs.compaction.stored_widths import (
    Write,
    find_stored_widths,
    forward_methods,
    same,
    second_forwards,
    sizes_by_module,
)
from secateurs.compaction.writes import find_writes, submodule, write_
from secateurs.errors import InvalidInput, NotInPlace, PlanError
from secateurs.graph.capture.calls import ByPosition, call_for, tensors_in
from secateurs.graph.layers import Align, Constant, SumInto
from secateurs.graph.masking import copied
from secateurs.graph.node_info import called_module, info, label_of, shape_of
from secateurs.graph.other_sizes import attempt, other_batches
from secateurs.graph.plan import Plan
from secateurs.graph.trace import Example, Graph, dtype_of, like_network, trace

TOLERANCE = 1e-9  # of the largest value, in float64


def cut_(model: nn.Module, plan: Plan | Graph | str | Path, example_input: Example | None = None) -> nn.Module:
    """Narrow the layers of `model` in place as `plan` says, and return it: same class, same forward, fewer channels.

    `plan` is a `Plan`, the path of one, or a compacted `Graph`, whose weights the model gets, too. `example_input` may be left
    out for a graph. The cut model is compared with the compacted graph first, on a copy: in float64, with perturbed weights, in
    eval and in train mode, at another batch size. Raises `NotInPlace` where the model's forward does not allow the cut; the
    model is as it was then. Parameters that were narrowed are new: make a new optimiser, and wrap the model in
    DistributedDataParallel or torch.compile again.
    """
    network = unwrapped(model)
    graph = plan if isinstance(plan, Graph) else None
    cuts = graph.plan if graph is not None else plan if isinstance(plan, Plan) else _loaded(plan)
    if example_input is None:
        if graph is None:
            raise InvalidInput("example_input: got none, wanted an input that the model accepts. A plan does not hold one.")
        example_input = _example_of(graph, network)
    _check_plan(cuts, network)
    with keeping_modes(network):
        before = trace(network.eval(), example_input)
    after = replay(before, cuts, verify=graph is None)
    if graph is not None:
        try:
            after.module.load_state_dict(graph.module.state_dict())
        except RuntimeError as error:
            raise PlanError(f"the graph's weights do not fit the {type(network).__name__}: {error}") from error
    trial = _Trial(network, example_input, before, after)
    attributes = trial.prove()
    write_(network, [*find_writes(network, before, after, everything=graph is not None), *attributes], cuts)
    if trial.notes:
        warnings.warn(
            f"numbers that evaluation does not read were set, or not, by the widths of that size around them: "
            f"{'; '.join(trial.notes)}. Set what is something else.",
            stacklevel=2,
        )
    return model


def _loaded(plan: Any) -> Plan:
    if not isinstance(plan, str | Path):
        raise PlanError(f"plan: got {type(plan).__name__}, wanted a Plan, its path, or a compacted Graph.")
    return Plan.load(plan)


def _example_of(graph: Graph, network: nn.Module) -> Example:
    """Return the graph's example as the model takes it: by position where its arguments come first, else by name."""
    names = [str(node.target) for node in graph.module.graph.nodes if node.op == "placeholder"]
    known = list(inspect.signature(network.forward).parameters)
    tensors = like_network(network, graph.example)
    if len(names) == 1 or known[: len(names)] == names or not set(names) <= set(known):
        return tensors
    return dict(zip(names, tensors, strict=True))


def _check_plan(plan: Plan, network: nn.Module) -> None:
    ours = f"{type(network).__module__}.{type(network).__qualname__}"
    if plan.model not in ("", ours):
        raise PlanError(f"plan: it was made for a {plan.model}, but the model is a {ours}. Use a model of that class.")
    for cut in itertools.chain(*plan.steps):
        if cut.offsets:
            raise NotInPlace(
                f"the plan adds an offset behind the sum {cut.offsets[0]!r}, which the forward of {type(network).__name__} "
                f"does not have. Prune with shortcut='coupled', or with repair='none'."
            )


class _Trial:
    """A copy of the model that is cut, compared with the compacted graph, and thrown away."""

    def __init__(self, network: nn.Module, example_input: Example, before: Graph, after: Graph) -> None:
        self.original, self.before, self.after = network, before, after
        self.notes: list[str] = []  # on attributes that were set though nothing that was run reads them
        self.worked: set[str] = set()  # names of attributes that were set: those of the next block are called alike
        self.call, example = call_for(network, example_input)
        generator = torch.Generator().manual_seed(0)
        self.noisy = copied(after)
        perturb_(self.noisy.module, generator)
        with copyable(network):
            self.copy = copy.deepcopy(network).eval()
        write_(self.copy, find_writes(network, before, self.noisy, everything=True), after.plan)
        with copyable(self.noisy.module):
            self.wanted = copy.deepcopy(self.noisy.module).eval()
        self.dtype = torch.float64
        probe = tuple(t.double() if t.is_floating_point() else t for t in example)
        if attempt(self.wanted.double(), probe) is None:  # the network casts to a fixed dtype, or the device has no float64
            probe, self.dtype = example, dtype_of(network)
            self.wanted = copy.deepcopy(self.noisy.module).eval()
        self.copy.to(self.dtype)
        self.tolerance = TOLERANCE if self.dtype == torch.float64 else 1e-3
        batch = example[0].shape[0] if example[0].dim() else 0
        others = [inputs for inputs, _ in other_batches(self.wanted, probe, batch + 1)]
        self.probes = [
            tuple(torch.randn(t.shape, generator=generator).to(t) if t.is_floating_point() else t for t in inputs)
            for inputs in [probe, *others]
        ]

    def prove(self) -> list[Write]:
        """Return the attributes that have to be set besides those of layers, such as a width that a module stores."""
        chosen: list[Write] = []
        failure = self._run()
        while failure is not None:
            found = next(filter(None, (self._further(each, failure) for each in self._choices(failure))), None)
            if found is None:
                break
            set_now, failure = found
            chosen += set_now
        if failure is not None:
            raise self._refusal(failure)
        chosen += self._stored({(write.path, write.name) for write in chosen})
        self._check_train_mode()
        return chosen

    def _stored(self, known: set[tuple[str, str]]) -> list[Write]:
        """Set and return the widths that modules store and evaluation does not read."""

        def run(network: nn.Module) -> Any:
            return ByPosition(network, self.call)(*copy.deepcopy(self.probes[0]))

        seconds: dict[str, list[str]] = {}
        if forward_methods(self.original):
            with copyable(self.original):
                uncut = copy.deepcopy(self.original).eval().to(self.dtype)
            perturb_(uncut, torch.Generator().manual_seed(1))  # a branch of fresh zeros must not make two forwards equal
            seconds = second_forwards(uncut, run, self.tolerance)
        sizes = sizes_by_module(self.before, self.after)
        found = find_stored_widths(self.copy, run, sizes, seconds, known, self.tolerance)
        if not self._set([write for write, _ in found]):  # a module around one reads it, and it is no width
            found = [(write, note) for write, note in found if self._set([write])]
        self.notes = [note for _, note in found if note]
        return [write for write, _ in found]

    def _set(self, writes: list[Write]) -> bool:
        """Set attributes of the copy, and undo it if it no longer gives what it should."""
        old = [Write(w.path, w.name, getattr(self.copy.get_submodule(w.path), w.name)) for w in writes]
        for write in writes:
            setattr(self.copy.get_submodule(write.path), write.name, write.value)
        if not writes or self._run() is None:
            return True
        for write in old:
            setattr(self.copy.get_submodule(write.path), write.name, write.value)
        return False

    def _run(self) -> _Failure | None:
        """Run the cut copy on all probes; None if it gives what the compacted graph gives, layer by layer where it has them."""
        done = 0  # calls before the last one whose output is that of the compacted graph
        calls: list[str] = []
        different: list[str] = []
        expected: dict[str, list[Tensor]] = {}

        class Watch(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                value = super().run_node(n)
                if n.op == "call_module" and isinstance(value, Tensor):
                    expected.setdefault(str(n.target), []).append(value)
                return value

        def look(path: str) -> Any:
            def hook(part: nn.Module, args: Any, output: Any) -> None:
                nonlocal done
                calls.append(path)
                if expected.get(path) and not different:
                    if isinstance(output, Tensor) and same([output], [expected[path].pop(0)], self.tolerance):
                        done = len(calls)
                    else:
                        different.append(path)

            return hook

        hooks = [part.register_forward_hook(look(path)) for path, part in self.copy.named_modules()]
        network = ByPosition(self.copy, self.call)
        try:
            for probe in self.probes:
                expected.clear()
                with torch.no_grad():
                    wanted = tensors_in(Watch(self.wanted).run(*copy.deepcopy(probe)))
                    try:
                        got = tensors_in(network(*copy.deepcopy(probe)))
                    except Exception as error:  # a forward with a width that does not fit may raise anything
                        around = [*self._modules_of(error), *(m for path in different for m in _around(path))]
                        return _Failure(done if different else len(calls), error, list(dict.fromkeys(around)))
                    if not same(got, wanted, self.tolerance):
                        last = different or calls[-1:]
                        return _Failure(done, None, [m for path in last for m in _around(path)], "".join(different))
        finally:
            for hook in hooks:
                hook.remove()
        return None

    def _modules_of(self, error: Exception) -> list[str]:
        """Return the paths of the submodules in whose forward the error was raised, innermost first."""
        names = {id(part): path for path, part in self.copy.named_modules()}
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        found = [names[id(f.f_locals["self"])] for f in reversed(frames) if id(f.f_locals.get("self")) in names]
        return list(dict.fromkeys(found))

    def _choices(self, failure: _Failure) -> Iterator[list[Write]]:
        """Yield attributes to set: single ones of the modules that failed, innermost first, then several of a module."""
        for path in failure.modules:
            single = sorted(self._numbers_in(path), key=lambda write: write.name not in self.worked)
            yield from ([write] for write in single)
            names = {write.name for write in single}
            if 1 < len(names) == len(single):
                yield single
            yield from (
                [one, other] for one, other in itertools.combinations(single, 2) if one.name != other.name and len(single) > 2
            )

    def _numbers_in(self, path: str) -> Iterator[Write]:
        """Yield the numbers that a submodule stores which equal a width that the cut has changed, with the new width."""
        changes = self._changes(path)
        for name, value in vars(self.copy.get_submodule(path)).items():
            several = isinstance(value, tuple | list) and all(type(v) is int for v in value)
            for old, new in sorted(changes):
                if type(value) is int and value == old:
                    yield Write(path, name, new)
                elif several and old in value:
                    yield Write(path, name, type(value)(new if v == old else v for v in value))

    def _changes(self, path: str) -> set[tuple[int, int]]:
        """Return old and new sizes, where they differ, of what is computed inside a submodule and of its layers."""

        def inside(where: str) -> bool:
            return path in ("", where) or where.startswith(f"{path}.")

        found: set[tuple[int, int]] = set()
        later = {node.name: node for node in self.after.module.graph.nodes}
        for node in self.before.module.graph.nodes:
            stack = info(node).get("nn_module_stack") or {}
            made_in = [str(entry[0]) if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
            if node.name in later and (path == "" or any(map(inside, made_in))):
                pairs = zip(shape_of(node).dims or (), shape_of(later[node.name]).dims or (), strict=False)
                found |= {(old, new) for old, new in pairs if old != new}
        for where, part in self.after.module.named_modules():
            old_part = submodule(self.before.module, where)
            if old_part is not None and inside(where):
                counts = [(vars(old_part).get(n), v) for n, v in vars(part).items() if type(v) is int]
                found |= {(old, new) for old, new in counts if type(old) is int and old != new}
        return found

    def _further(self, writes: list[Write], failure: _Failure) -> tuple[list[Write], _Failure | None] | None:
        """Set attributes of the copy; if it runs further than before, return them with what fails next, else undo it."""
        old = [Write(w.path, w.name, getattr(self.copy.get_submodule(w.path), w.name)) for w in writes]
        for write in writes:
            setattr(self.copy.get_submodule(write.path), write.name, write.value)
        then = self._run()
        if then is None or then.calls > failure.calls:
            self.worked |= {write.name for write in writes}
            return writes, then
        for write in old:
            setattr(self.copy.get_submodule(write.path), write.name, write.value)
        return None

    def _refusal(self, failure: _Failure) -> NotInPlace:
        name = type(self.original).__name__
        added = [_described(self.after.module, node) for node in self.after.module.graph.nodes]
        needed = next(filter(None, added), None)
        if needed is not None:
            return NotInPlace(
                f"{name} cannot be cut in place: {needed}, and its forward cannot do that. Take sites whose channels go "
                f"together: find_sites(graph, 'coupled'), or shortcut='coupled' in the recipe."
            )
        if failure.error is None:
            first = f": the first layer that differs is {failure.different!r}" if failure.different else ""
            return NotInPlace(
                f"{name} cannot be cut in place: with narrower layers its forward runs, but gives something else than the "
                f"compacted network{first}. Leave that layer alone (ignore=...), or use the compacted one."
            )
        stored = [f"{w.path}.{w.name}".lstrip(".") for path in failure.modules for w in self._numbers_in(path)]
        numbers = f" It may depend on a width stored in {', '.join(dict.fromkeys(stored))}, or" if stored else " It depends on"
        frame = traceback.extract_tb(failure.error.__traceback__)
        files = [f for f in frame if "torch/nn/modules" not in f.filename and f.line]
        line = f' at "{files[-1].line}"' if files else ""
        where = failure.modules[0] if failure.modules else ""
        first = str(failure.error).partition("\n")[0]
        return NotInPlace(
            f"{name} cannot be cut in place: the forward of {where or 'the model'!r} fails{line} ({first}).{numbers} a number "
            f"written in its code. Leave that layer alone (ignore=...), or use the compacted network itself."
        )

    def _check_train_mode(self) -> None:
        """Compare outputs and BatchNorm statistics in train mode, where those of the uncut pair agree."""
        with copyable(self.before.module), copyable(self.original):
            uncut, own = copy.deepcopy(self.before.module).to(self.dtype), copy.deepcopy(self.original)
        pair = [_in_train_mode(m, self.probes[0]) for m in (uncut, self._positional(own))]
        theirs, _ = pair[1]
        if pair[0][0] is None or theirs is None:
            return  # in train mode the model takes other inputs, such as targets
        comparable = {
            name for name, value in pair[0][0].items() if name in theirs and same([theirs[name]], [value], self.tolerance)
        }
        wanted, _ = _in_train_mode(self.wanted, self.probes[0])
        got, error = _in_train_mode(self._positional(self.copy), self.probes[0])
        name = type(self.original).__name__
        if got is None:
            raise NotInPlace(
                f"{name} cannot be cut in place: in train mode its forward fails with narrower layers ({error}). A part that "
                f"runs in train mode only reads channels that were removed, and tracing did not see it. Switch it off, or use "
                f"the compacted network itself."
            ) from error
        assert wanted is not None
        for each in comparable & wanted.keys():
            if each not in got or not same([got[each]], [wanted[each]], self.tolerance):
                raise NotInPlace(
                    f"{name} cannot be cut in place: in train mode {each} is something else than in the compacted network."
                )

    def _positional(self, network: nn.Module) -> nn.Module:
        return ByPosition(network.to(self.dtype), self.call)


@dataclass(frozen=True)
class _Failure:
    """What failed in a trial: module calls before it, the modules it is inside, the error (None: another output).

    `different` is the first layer with another output, if there is one.
    """

    calls: int
    error: Exception | None
    modules: list[str]
    different: str = ""


def _around(path: str) -> list[str]:
    """Return the paths of the submodules around a layer, innermost first; the last is that of the model."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, -1, -1)]


def _in_train_mode(network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor] | None, Exception | None]:
    """Return outputs and buffers after a forward pass in train mode; None and the error if it raises."""
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), keeping_modes(network):
        torch.manual_seed(0)
        try:
            outputs = network.train()(*copy.deepcopy(inputs))
        except Exception as error:  # as in _run
            return None, error
        holder = network.model if isinstance(network, ByPosition) else network
        buffers = {f"the buffer {name!r}": b.clone() for name, b in holder.named_buffers() if b.is_floating_point()}
        found = {f"output {i}": t for i, t in enumerate(tensors_in(outputs))}
        network.load_state_dict(state)
    return {**buffers, **found}, None


def _described(module: fx.GraphModule, node: fx.Node) -> str | None:
    """Say what a node of the compacted graph does that was not in the model: aligns a sum, or adds a constant."""
    layer = called_module(module, node)
    if isinstance(layer, SumInto):
        return f"the sum {label_of(node)!r} adds tensors of which different channels are left"
    if isinstance(layer, Constant):
        return f"a branch was removed whole, and {str(node.target)!r} stands for it"
    sums = [label_of(user) for user in node.users if user.op != "output" and len(user.all_input_nodes) > 1]
    if isinstance(layer, Align) and sums and "_to_" in node.name:
        return f"{sums[0]!r} joins tensors of which different channels are left"
    return None
