"""Exports in general: prepare a network, write it, check and time what was written, and only then put it in place."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, fx, nn

from secateurs._util.files import sync_folder
from secateurs._util.modules import eval_mode
from secateurs.errors import ArtefactError, InvalidInput, NotEqual, UnsupportedOp
from secateurs.export.pad import padded
from secateurs.export.plain import alignments, plain_module
from secateurs.graph.node_info import forget_source_
from secateurs.graph.trace import Example, Graph, as_example, like_network, tensors_in, trace
from secateurs.speed.engines import on_one_thread
from secateurs.speed.nodes import node_seconds
from secateurs.speed.timing import SpeedUp, Timer, compare, timed

Kind = Literal["onnx", "pt2", "source", "int8", "pt2-int8"]
CalibrationMethod = Literal["minmax", "entropy", "percentile", "histogram"]
Inputs = tuple[Tensor, ...]
Write = Callable[["Prepared", Path], None]
"""Writes an export to a file, or to the folder of its files."""
Bind = Callable[["Prepared", Path, Inputs], Callable[[], Any]]
"""Makes one run of a written export on the inputs, in this process."""

TOLERANCE = 1e-4  # of the largest output: float32 through 100 layers stays below 1e-5
TIMED_BATCHES = (1, 64)
ONNX_RUNTIME = "ONNX Runtime"
INT8_RUNTIME = f"{ONNX_RUNTIME}, both in int8"
PROFILED_BATCH = 64


@dataclass(frozen=True)
class Agreement:
    """The largest difference between the outputs of the export and of the network."""

    difference: float
    scale: float  # the largest output
    examples: int  # run in one batch, and the first of them once more alone
    given: bool  # inputs of the caller; else random ones like the graph's example

    def summary(self) -> str:
        """Describe it in one sentence."""
        inputs = "inputs" if self.given else "random inputs"
        return f"differs by {self.difference:.1e} at most where outputs reach {self.scale:.3g} ({self.examples} {inputs})"


@dataclass(frozen=True)
class Speed:
    """The unpruned network's export and this one, run in turns on batches of one size."""

    batch: int
    original: float  # seconds, median
    pruned: float  # seconds, median
    speedup: SpeedUp
    runtime: str  # "ONNX Runtime", also "both in int8", or "PyTorch"
    threads: int


@dataclass(frozen=True)
class Alignment:
    """The cost of aligning the channels of the terms of sums, in PyTorch, timed node by node."""

    gathers: int  # alignments that pick channels one by one
    slices: int  # alignments that slice or pad, which is cheaper
    share: float  # of the pruned network's time, in [0, 1]; 0 if there is nothing to align
    batch: int

    def summary(self) -> str:
        """Describe it in one sentence."""
        if not self.gathers + self.slices:
            return "no channels to align"
        return (
            f"aligning channels ({self.gathers} gathers, {self.slices} slices or pads) takes {100 * self.share:.1f} % of the "
            f"time at batch {self.batch}"
        )


@dataclass(frozen=True)
class Quantisation:
    """How an int8 file was made, and how far its outputs are from those of the float network."""

    method: CalibrationMethod
    compared: tuple[tuple[CalibrationMethod, float], ...]  # divergence on held-out examples
    divergence: float  # of the file
    calibrated: int  # training examples
    held_out: int
    weight_bits: int  # 7 where the CPU has no VNNI: 8 would overflow there
    layers: int
    float_layers: tuple[str, ...]
    float_macs: float  # share of the MACs that stays in float32
    bops: float  # multiplications of single bits for one example
    float_bops: float  # of the same network in float32

    def summary(self) -> str:
        """One sentence."""
        kept = ", ".join(self.float_layers[:3]) + ", …" * (len(self.float_layers) > 3)
        floats = f", {len(self.float_layers)} of {self.layers} layers in float32 ({kept})" if self.float_layers else ""
        return (
            f"int8 by {self.method} of {self.calibrated} training examples, {self.weight_bits}-bit weights for each filter"
            f"{floats}; divergence from the float network {self.divergence:.2g} on {self.held_out} held-out examples"
        )


@dataclass(frozen=True)
class Stage:
    """A network on the way to the int8 file: as it was, pruned, and both in int8."""

    name: str
    bytes: int
    bits: int  # of the weights of its layers, but for those that stay in float32
    bops: float
    accuracy: float | None = None  # on the test set; else on the validation set
    seconds: tuple[tuple[int, float], ...] = ()  # by batch, median, all stages in turns


@dataclass(frozen=True)
class Int8Figures:
    """What is promised of an int8 file, and what led to it. Drops are fractions, on the images that certify if some do."""

    how: Quantisation
    sha256: str  # of the file
    accuracy: float  # on those images
    drop_pruning: float  # of the pruned network, in float32
    drop_quantising: float  # of the file, besides
    max_drop: float
    bound: float | None  # upper bound on both drops together; None: by point estimate
    confidence: float
    images: int
    answers: tuple[bool, ...]  # of the images that certify, asked for this file
    counted_in: str  # what the metric is called
    stages: tuple[Stage, ...] = ()
    tested: int = 0  # test examples that the stages' accuracies are of; 0: validation examples

    def summary(self) -> str:
        """One sentence: what is promised, and where the drop comes from."""
        unit, scale = ("points", 100) if self.counted_in == "accuracy" else (f"of {self.counted_in}", 1)
        parts = f"{scale * self.drop_pruning:.2f} {unit} by pruning and {scale * self.drop_quantising:.2f} by quantising"
        if self.bound is None:
            return f"nothing is promised of the int8 file: its drop was measured as {parts} on {self.images} examples"
        return (
            f"at {100 * self.confidence:g} % confidence the drop of the int8 file is at most {scale * self.bound:.2f} {unit}: "
            f"{parts} were measured on the {self.images} examples that certify"
        )


@dataclass(frozen=True, kw_only=True)
class ExportFigures:
    """What is measured of an export; `original_bytes` and `speeds` compare it with the unpruned network if that was given."""

    kind: Kind
    bytes: int
    agreement: Agreement
    alignment: Alignment
    original_bytes: int | None = None
    speeds: tuple[Speed, ...] = ()
    int8: Int8Figures | None = None

    @property
    def alignment_outweighs(self) -> bool:
        """Whether, in PyTorch, aligning channels takes longer than all that pruning saves."""
        share, batch = self.alignment.share, self.alignment.batch
        return any(
            share * timed.pruned > max(timed.original - timed.pruned, 0.0)
            for timed in self.speeds
            if share and timed.runtime == "PyTorch" and timed.batch == batch
        )


@dataclass(frozen=True, kw_only=True)
class Exported(ExportFigures):
    """One checked export."""

    path: Path  # the file; the folder for source


@dataclass(frozen=True, eq=False)
class Prepared:
    """A network in plain torch, and what it must compute: `wanted` holds its outputs for each of `batches`."""

    name: str  # of the class that was pruned
    module: fx.GraphModule
    batches: tuple[Inputs, ...]  # all inputs, and the first example alone
    wanted: tuple[list[Tensor], ...]
    given: bool  # the inputs are the caller's, not random

    @property
    def inputs(self) -> Inputs:
        """All inputs in one batch: two examples or more."""
        return self.batches[0]

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The network as torch.export captures it, for a batch of any size."""
        batch = torch.export.Dim("batch")
        try:
            with quiet(), torch.no_grad():
                found = torch.export.export(self.module, self.inputs, dynamic_shapes=tuple({0: batch} for _ in self.inputs))
        except Exception as error:  # torch raises its own classes, by what it could not follow
            raise UnsupportedOp(
                f"torch.export cannot follow {self.name} for a batch of any size: {first_line(error)}. Its forward may fix the "
                f"number of examples, or call functions that are not torch's. Try an export as source."
            ) from error
        for node in found.graph.nodes:  # the files must not name the code and folders that they were made from
            forget_source_(node)
        return found

    @cached_property
    def alignment(self) -> Alignment:
        """The measured cost of aligning channels."""
        aligning = alignments(self.module)
        if not aligning:
            return Alignment(0, 0, 0.0, PROFILED_BATCH)
        gathers = sum(node.target is torch.index_select for node in aligning)
        first = sum(not any(source in aligning for source in node.all_input_nodes) for node in aligning)
        seconds = node_seconds(self.module, resized(self.inputs, PROFILED_BATCH))
        share = sum(seconds[node] for node in aligning) / sum(seconds.values())
        return Alignment(gathers, max(first - gathers, 0), share, PROFILED_BATCH)


def prepared(graph: Graph | Prepared, inputs: Example | None = None, pad_to: int = 1) -> Prepared:
    """Prepare a traced network for several exports; a prepared one is returned unchanged.

    Outputs are compared on `inputs`, at best real ones; by default on random ones like the graph's example. The first axis of
    every input counts the examples. With `pad_to`, widths are padded to multiples of it by filters of zero weights.
    """
    if isinstance(graph, Prepared):
        return graph
    all_inputs = _checked_inputs(graph, inputs)
    batches = (all_inputs, tuple(t[:1] for t in all_inputs))
    with eval_mode(graph.module), torch.no_grad():
        wanted = tuple([t.detach().cpu() for t in tensors_in(graph.module(*batch))] for batch in batches)
    name = graph.plan.model.rpartition(".")[2] or "Network"
    on_cpu = tuple(tuple(t.cpu() for t in batch) for batch in batches)
    written = graph if pad_to == 1 else padded(graph, pad_to)
    return Prepared(name, plain_module(written).cpu(), on_cpu, wanted, inputs is not None)


def _checked_inputs(graph: Graph, inputs: Example | None) -> Inputs:
    """Two examples or more, on the network's device and in its precision; random ones by default."""
    if inputs is None:
        generator = torch.Generator().manual_seed(0)
        example = graph.example
        given = tuple(torch.randn(e.shape, generator=generator).to(e) if e.is_floating_point() else e for e in example)
    else:
        given = as_example(inputs)
    shapes = [tuple(t.shape) for t in given]
    if len(given) != len(graph.example) or any(g.shape[1:] != e.shape[1:] for g, e in zip(given, graph.example, strict=True)):
        wanted = [(None, *e.shape[1:]) for e in graph.example]
        raise InvalidInput(f"inputs: got shapes {shapes}, wanted {wanted}, where None is any number of examples.")
    if any(t.dim() == 0 for t in given) or len({len(t) for t in given}) > 1 or not len(given[0]):
        raise InvalidInput(
            f"inputs: got shapes {shapes}. An export takes batches of any size, so the first axis of every input must count "
            f"the same examples. Wrap the network in a module whose inputs do."
        )
    if len(given[0]) == 1:  # torch.export takes a single example for a size that never changes
        given = tuple(torch.cat([t, t]) for t in given)
    return like_network(graph.module, given)


def resized(inputs: Sequence[Tensor], batch: int) -> Inputs:
    """Repeat or truncate the inputs to `batch` examples."""
    return tuple(t[torch.arange(batch) % len(t)] for t in inputs)


def quiet() -> warnings.catch_warnings[None]:
    """Suppress torch's warnings about its own internals."""
    return warnings.catch_warnings(action="ignore")


def first_line(error: BaseException) -> str:
    """The class and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")


class ExportOptions(TypedDict, total=False):
    """How an export is checked and compared, the same for all kinds.

    Its outputs for `inputs` (by default random ones like the graph's example) may differ from the network's by `tolerance`
    times the largest output; otherwise `NotEqual`, and nothing is written. With `original`, the unpruned network, the sizes
    and speeds of both are compared over `repeats` interleaved runs. `pad_to` pads widths to multiples, which some engines run
    faster, by filters of zero weights.
    """

    inputs: Example | None
    original: Graph | nn.Module | Prepared | None
    tolerance: float
    repeats: int
    pad_to: int


def deliver(
    kind: Kind,
    write: Write,
    bind: Bind,
    graph: Graph | Prepared,
    path: str | Path,
    *,
    inputs: Example | None = None,
    original: Graph | nn.Module | Prepared | None = None,
    tolerance: float = TOLERANCE,
    repeats: int = 30,
    pad_to: int = 1,
) -> Exported:
    """Write an export, check it, compare it with the unpruned network's, and put it in place; on any error write nothing."""
    if not tolerance >= 0:
        raise InvalidInput(f"tolerance is {tolerance}, wanted 0 or more: a share of the largest output.")
    if repeats < 5:
        raise InvalidInput(f"repeats is {repeats}, wanted at least 5: fewer give no interval.")
    path = Path(path)
    network = prepared(graph, inputs, pad_to)
    with staged(path, folder=kind == "source") as draft:
        write(network, draft)
        if kind == "onnx":
            found = [[torch.from_numpy(array) for array in bind(network, draft, batch)()] for batch in network.batches]
        else:
            found = run_fresh(kind, draft, network.batches)
        agreement = _agreement(found, network, tolerance, kind)
        exported = Exported(kind=kind, path=path, bytes=_bytes(draft), agreement=agreement, alignment=network.alignment)
        if original is not None:
            if isinstance(original, nn.Module):
                original = trace(original, like_network(original, network.inputs))
            compared = prepared(original, network.inputs)
            with tempfile.TemporaryDirectory() as folder, staged(Path(folder) / draft.name, folder=kind == "source") as theirs:
                write(compared, theirs)
                calls = [partial(bind, compared, theirs), partial(bind, network, draft)]
                speeds = tuple(_speed(kind, calls, resized(network.inputs, batch), repeats) for batch in TIMED_BATCHES)
                exported = replace(exported, original_bytes=_bytes(theirs), speeds=speeds)
    return exported


def _agreement(found: list[list[Tensor]], network: Prepared, tolerance: float, kind: Kind) -> Agreement:
    worst = scale = 0.0
    for ours, theirs in zip(found, network.wanted, strict=True):
        if [t.shape for t in ours] != [t.shape for t in theirs]:
            shapes = [[tuple(t.shape) for t in tensors] for tensors in (ours, theirs)]
            raise NotEqual(f"the {kind} export gives shapes {shapes[0]}, the network {shapes[1]}. Nothing was written.")
        for a, b in zip(ours, theirs, strict=True):
            if b.numel():
                worst = max(float((a.double() - b.double()).abs().nan_to_num(nan=torch.inf).max()), worst)
                scale = max(float(b.double().abs().max()), scale)
    if not worst <= tolerance * scale:
        raise NotEqual(
            f"the {kind} export differs from the network by {worst:.3g} where outputs reach {scale:.3g}; allowed is "
            f"{tolerance:.1g} of that. Nothing was written. Raise the tolerance if the difference is acceptable."
        )
    return Agreement(worst, scale, len(network.inputs[0]), network.given)


def _speed(kind: Kind, binds: Sequence[Callable[[Inputs], Callable[[], Any]]], inputs: Inputs, repeats: int) -> Speed:
    """Run the exports of the unpruned network and of the pruned one in turns."""
    alone = on_one_thread(None)

    def load(bind: Callable[[Inputs], Callable[[], Any]]) -> Timer:
        return timed(bind(inputs), alone=alone)

    found = compare([partial(load, bind) for bind in binds], rounds=(repeats, 3 * repeats))
    before, after = found.medians
    runtime = ONNX_RUNTIME if kind in ("onnx", "int8") else "PyTorch"
    return Speed(len(inputs[0]), before, after, found.speedups[0], runtime, torch.get_num_threads())


@contextmanager
def staged(path: Path, *, folder: bool) -> Iterator[Path]:
    """Give a temporary place on the same disk; on success move what was written there to `path`."""
    home = path if folder else path.parent
    try:
        if path.exists() and path.is_dir() != folder:
            raise InvalidInput(f"{path}: is a {'file' if folder else 'folder'}, wanted a {'folder' if folder else 'file'}.")
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=home) as temporary:
            draft = Path(temporary) / ("source" if folder else path.name)
            if folder:
                draft.mkdir()
            yield draft
            for file in _files(draft):
                with file.open("rb") as written:
                    os.fsync(written.fileno())
                os.replace(file, home / file.name)
        sync_folder(home)
    except OSError as error:
        raise ArtefactError(
            f"{path}: cannot be written ({error.strerror or error}). Choose a folder that you may write to."
        ) from error


def _files(draft: Path) -> list[Path]:
    return [file for file in sorted(draft.iterdir()) if file.is_file()] if draft.is_dir() else [draft]


def _bytes(draft: Path) -> int:
    return sum(file.stat().st_size for file in _files(draft))


_SCRIPT = """
import runpy, sys
sys.modules["secateurs"] = None  # importing it is an error from here on
import torch

kind, path, exchange = sys.argv[1:]
network = torch.export.load(path).module() if kind == "pt2" else runpy.run_path(path + "/model.py")["load"]()

def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [t for item in items for t in tensors(item)]

with torch.no_grad():
    outputs = [tensors(network(*inputs)) for inputs in torch.load(exchange + "/inputs.pt", weights_only=True)]
torch.save(outputs, exchange + "/outputs.pt")
"""


def run_fresh(kind: Kind, path: Path, batches: Sequence[Inputs]) -> list[list[Tensor]]:
    """Run the export at `path` ("pt2": a file, "source": a folder) in a new process that cannot import secateurs.

    Returns the output tensors for each batch.
    """
    with tempfile.TemporaryDirectory() as exchange:
        torch.save(list(batches), f"{exchange}/inputs.pt")
        command = [sys.executable, "-I", "-c", _SCRIPT, kind, str(path), exchange]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            message = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ArtefactError(
                f"the {kind} export does not run in a process of its own, without secateurs ({message}). Nothing was written. "
                f"Layers of your own must be importable there."
            )
        outputs: list[list[Tensor]] = torch.load(f"{exchange}/outputs.pt", weights_only=True)
        return outputs
