"""What an export tells: where it lies, how far its numbers are from the network's, how small and how fast it is."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, fx

from secateurs._util.modules import eval_mode
from secateurs.errors import InvalidInput, UnsupportedOp
from secateurs.export.layout import lay_out
from secateurs.export.plain import alignments, plain_module
from secateurs.graph.latency import SpeedUp
from secateurs.graph.trace import Example, Graph, as_example, like_network, tensors_in

Kind = Literal["onnx", "pt2", "source"]


@dataclass(frozen=True)
class Agreement:
    """The largest difference between the outputs of the export and of the network it was made from."""

    difference: float
    scale: float  # the largest output
    examples: int  # run at once, and the first of them once more alone
    given: bool  # by the caller: real inputs; else random ones like the graph's example

    def summary(self) -> str:
        """One sentence."""
        inputs = "inputs" if self.given else "random inputs"
        return f"differs by {self.difference:.1e} at most where outputs reach {self.scale:.3g} ({self.examples} {inputs})"


@dataclass(frozen=True)
class Speed:
    """The unpruned network's export and this one, run in turns on batches of one size."""

    batch: int
    original: float  # seconds, median
    pruned: float  # seconds, median
    speedup: SpeedUp
    runtime: str  # "ONNX Runtime" or "PyTorch"
    threads: int


@dataclass(frozen=True)
class Alignment:
    """What it costs that live channels differ between the terms of sums, in PyTorch, node by node."""

    gathers: int  # alignments that pick channels one by one
    slices: int  # alignments that slice or pad, which is cheaper
    share: float  # of the pruned network's time, in [0, 1]; 0 where there is nothing to align
    batch: int

    def summary(self) -> str:
        """One sentence."""
        if not self.gathers + self.slices:
            return "no channels to align"
        return (
            f"aligning channels ({self.gathers} gathers, {self.slices} slices or pads) takes {100 * self.share:.1f} % of the "
            f"time at batch {self.batch}"
        )


@dataclass(frozen=True)
class Exported:
    """One export, checked; `original_bytes` and `speeds` compare it with the unpruned network where that was given."""

    kind: Kind
    path: Path  # the file; the folder for source
    bytes: int
    agreement: Agreement
    alignment: Alignment
    original_bytes: int | None = None
    speeds: tuple[Speed, ...] = ()


PROFILED_BATCH = 64
PROFILES = 7


@dataclass(frozen=True, eq=False)
class Prepared:
    """A plain network and what it must compute: `wanted` holds its outputs for each of `batches`."""

    name: str  # of the class that was pruned
    module: fx.GraphModule
    batches: tuple[tuple[Tensor, ...], ...]  # all inputs at once, and the first of them alone
    wanted: tuple[list[Tensor], ...]
    given: bool  # the inputs are the caller's, not random

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """All inputs at once: two examples or more."""
        return self.batches[0]

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The network as torch.export sees it, for a batch of any size."""
        batch = torch.export.Dim("batch")
        try:
            with quiet(), torch.no_grad():
                found = torch.export.export(self.module, self.inputs, dynamic_shapes=tuple({0: batch} for _ in self.inputs))
        except Exception as error:  # torch raises its own classes, by what it could not follow
            raise UnsupportedOp(
                f"torch.export cannot follow {self.name} for a batch of any size: {first_line(error)}. "
                f"Its forward may fix the number of examples, or call what is not torch's; source may still work."
            ) from error
        for node in found.graph.nodes:  # notes about the code and the folders that it was exported from
            node.meta.pop("stack_trace", None)
        return found

    @cached_property
    def alignment(self) -> Alignment:
        """What aligning channels costs, measured."""
        return measure_alignment(self.module, resized(self.inputs, PROFILED_BATCH))


def prepared(graph: Graph | Prepared, inputs: Example | None = None) -> Prepared:
    """Make a traced network ready; what is ready stays as it is.

    `inputs` are what outputs are compared on, real ones at best; random ones like the graph's example otherwise. Of every
    input the first axis counts the examples.
    """
    if isinstance(graph, Prepared):
        return graph
    whole = _checked(graph, inputs)
    batches = (whole, tuple(t[:1] for t in whole))
    with eval_mode(graph.module), torch.no_grad():
        wanted = tuple([t.detach().cpu() for t in tensors_in(graph.module(*batch))] for batch in batches)
    module = plain_module(lay_out(graph)).cpu()
    ready = tuple(tuple(t.cpu() for t in batch) for batch in batches)
    return Prepared(graph.plan.model.rpartition(".")[2] or "Network", module, ready, wanted, inputs is not None)


def _checked(graph: Graph, inputs: Example | None) -> tuple[Tensor, ...]:
    """Two examples or more, on the network's device and in its precision."""
    given = _random_like(graph.example) if inputs is None else as_example(inputs)
    shapes = [tuple(t.shape) for t in given]
    if len(given) != len(graph.example) or any(g.shape[1:] != e.shape[1:] for g, e in zip(given, graph.example, strict=True)):
        wanted = [(None, *e.shape[1:]) for e in graph.example]
        raise InvalidInput(f"inputs: got shapes {shapes}, wanted {wanted}, where None is any number of examples.")
    if any(t.dim() == 0 for t in given) or len({len(t) for t in given}) > 1 or not len(given[0]):
        raise InvalidInput(
            f"inputs: got shapes {shapes}: an export takes batches of any size, so the first axis of every input must count "
            f"the same examples. Wrap the network in a module whose inputs do."
        )
    if len(given[0]) == 1:  # torch.export takes a single example for a size that never changes
        given = tuple(torch.cat([t, t]) for t in given)
    return like_network(graph.module, given)


def _random_like(example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(e.shape, generator=generator).to(e) if e.is_floating_point() else e for e in example)


def resized(inputs: Sequence[Tensor], batch: int) -> tuple[Tensor, ...]:
    """The inputs repeated, or cut short, to `batch` examples."""
    return tuple(t[torch.arange(batch) % len(t)] for t in inputs)


def measure_alignment(module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> Alignment:
    """Count the ops that align channels, and time them among all others; medians of several runs."""
    aligning = alignments(module)
    gathers = sum(node.target is torch.index_select for node in aligning)
    groups = sum(not any(source in aligning for source in node.all_input_nodes) for node in aligning) - gathers
    if not aligning:
        return Alignment(0, 0, 0.0, len(inputs[0]))
    shares = []
    with torch.inference_mode():
        for run in range(PROFILES + 1):
            watch = _StopWatch(module)
            watch.run(*inputs)
            if run:  # the first run warms up
                total = sum(watch.seconds.values())
                shares.append(sum(watch.seconds[node] for node in aligning) / total)
    return Alignment(gathers, max(groups, 0), float(torch.tensor(shares).median()), len(inputs[0]))


class _StopWatch(fx.Interpreter):
    """Runs a network node by node, on the CPU, where nothing runs behind its back."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        start = perf_counter()
        result = super().run_node(n)
        self.seconds[n] = perf_counter() - start
        return result


def quiet() -> warnings.catch_warnings[None]:
    """Keep torch's warnings about its own insides away from the user."""
    return warnings.catch_warnings(action="ignore")


def first_line(error: BaseException) -> str:
    """The class and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
