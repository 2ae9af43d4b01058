"""Runs an export in a process of its own in which secateurs cannot be imported: what works there works for others."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn

from secateurs._util.files import sync_folder
from secateurs.errors import ArtefactError, InvalidInput, NotEqual
from secateurs.export.prepare import Agreement, Exported, Kind, Prepared, Speed, prepared, resized
from secateurs.graph.latency import in_turns, median, speedup, undisturbed
from secateurs.graph.trace import Example, Graph, like_network, trace

Batches = Sequence[tuple[Tensor, ...]]

_SCRIPT = """
import runpy, sys
sys.modules["secateurs"] = None  # importing it is an error from here on
import torch
from safetensors.torch import load_file, save_file

kind, path, exchange = sys.argv[1:]
network = torch.export.load(path).module() if kind == "pt2" else runpy.run_path(path + "/model.py")["load"]()

def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [t for item in items for t in tensors(item)]

given = load_file(exchange + "/inputs.safetensors")
found = {}
with torch.no_grad():
    for batch in range(1 + max(int(name.split(".")[0]) for name in given)):
        inputs = [given[f"{batch}.{n}"] for n in range(sum(name.startswith(f"{batch}.") for name in given))]
        found |= {f"{batch}.{n}": t.contiguous().clone() for n, t in enumerate(tensors(network(*inputs)))}
save_file(found, exchange + "/outputs.safetensors")
"""


def run_fresh(kind: str, path: Path, batches: Batches) -> list[list[Tensor]]:
    """The outputs of the export at `path` ("pt2": a file, "source": a folder) for each batch."""
    with tempfile.TemporaryDirectory() as exchange:
        given = {f"{b}.{n}": t.contiguous().clone() for b, batch in enumerate(batches) for n, t in enumerate(batch)}
        safetensors.torch.save_file(given, f"{exchange}/inputs.safetensors")
        command = [sys.executable, "-I", "-c", _SCRIPT, kind, str(path), exchange]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ArtefactError(
                f"the {kind} export does not run in a process of its own, without secateurs ({said}). A layer of your own must "
                f"be importable there; nothing was left behind."
            )
        found = safetensors.torch.load_file(f"{exchange}/outputs.safetensors")
    counts = [sum(name.startswith(f"{b}.") for name in found) for b in range(len(batches))]
    return [[found[f"{b}.{n}"] for n in range(count)] for b, count in enumerate(counts)]


TOLERANCE = 1e-4  # of the largest output: float32 through 100 layers stays below 1e-5
TIMED_BATCHES = (1, 64)
WARMUP = 3


class Exporter(Protocol):
    """One kind of export: how it is written, how it is run elsewhere, and how it is run to be timed."""

    kind: Kind
    runtime: str

    def write(self, network: Prepared, path: Path) -> None:
        """Write the network to `path`: a file, or the folder that the files go to."""

    def outputs(self, path: Path, batches: Batches) -> list[list[Tensor]]:
        """What the export gives for each batch, run as others will run it."""

    def runner(self, network: Prepared, path: Path) -> Callable[[tuple[Tensor, ...]], Callable[[], Any]]:
        """What prepares one run of the export on given inputs."""


def deliver(
    form: Exporter,
    graph: Graph | Prepared,
    path: str | Path,
    *,
    inputs: Example | None,
    original: Graph | nn.Module | Prepared | None,
    tolerance: float,
    repeats: int,
) -> Exported:
    """Write, check, compare with the unpruned network's export, and put in place; on any error nothing is left behind."""
    if not tolerance >= 0:
        raise InvalidInput(f"tolerance is {tolerance}, wanted 0 or more: a share of the largest output.")
    if repeats < 5:
        raise InvalidInput(f"repeats is {repeats}, wanted at least 5: fewer give no interval.")
    path = Path(path)
    network = prepared(graph, inputs)
    with _staged(path, folder=form.kind == "source") as draft:
        form.write(network, draft)
        agreement = _agreement(form.outputs(draft, network.batches), network, tolerance, form.kind)
        exported = Exported(form.kind, path, _bytes(draft), agreement, network.alignment)
        if original is not None:
            before, speeds = _compared(form, network, draft, _unpruned(original, network), repeats)
            exported = replace(exported, original_bytes=before, speeds=speeds)
    return exported


def _unpruned(original: Graph | nn.Module | Prepared, network: Prepared) -> Prepared:
    if isinstance(original, nn.Module):
        original = trace(original, like_network(original, network.inputs))
    return prepared(original, network.inputs)


def _agreement(found: list[list[Tensor]], network: Prepared, tolerance: float, kind: Kind) -> Agreement:
    worst = scale = 0.0
    for ours, theirs in zip(found, network.wanted, strict=True):
        if [t.shape for t in ours] != [t.shape for t in theirs]:
            shapes = [[tuple(t.shape) for t in tensors] for tensors in (ours, theirs)]
            raise NotEqual(f"the {kind} export gives shapes {shapes[0]}, the network {shapes[1]}. Nothing was left behind.")
        for a, b in zip(ours, theirs, strict=True):
            if b.numel():
                worst = max(float((a.double() - b.double()).abs().nan_to_num(nan=torch.inf).max()), worst)
                scale = max(float(b.double().abs().max()), scale)
    if not worst <= tolerance * scale:
        raise NotEqual(
            f"the {kind} export differs from the network by {worst:.3g} where outputs reach {scale:.3g} (tolerance "
            f"{tolerance:.1g} of that). Nothing was left behind. Raise the tolerance if that is good enough for you."
        )
    return Agreement(worst, scale, len(network.inputs[0]), network.given)


def _compared(
    form: Exporter, network: Prepared, draft: Path, original: Prepared, repeats: int
) -> tuple[int, tuple[Speed, ...]]:
    """The size of the unpruned network's export, and the speed of both, run in turns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / draft.name
        if form.kind == "source":
            path.mkdir()
        form.write(original, path)
        runners = [form.runner(original, path), form.runner(network, draft)]
        speeds = tuple(_speed(form, [r(resized(network.inputs, n)) for r in runners], n, repeats) for n in TIMED_BATCHES)
        return _bytes(path), speeds


def _speed(form: Exporter, calls: list[Callable[[], Any]], batch: int, repeats: int) -> Speed:
    with torch.inference_mode(), undisturbed():
        seconds = in_turns(calls, WARMUP, repeats)
    original, pruned = median(seconds).tolist()
    return Speed(batch, original, pruned, speedup(*seconds), form.runtime, torch.get_num_threads())


def calling(module: Callable[..., Any]) -> Callable[[tuple[Tensor, ...]], Callable[[], Any]]:
    """A runner of a module of torch."""
    return lambda inputs: partial(module, *inputs)


@contextmanager
def _staged(path: Path, *, folder: bool) -> Iterator[Path]:
    """A place on the same disk to write to; on success what was written there takes its place at `path`."""
    home = path if folder else path.parent
    try:
        if path.exists() and path.is_dir() != folder:
            raise InvalidInput(f"{path}: is a {'file' if folder else 'folder'}, wanted a {'folder' if folder else 'file'}.")
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=home) as room:
            draft = Path(room) / ("source" if folder else path.name)
            if folder:
                draft.mkdir()
            yield draft
            for file in _files(draft):
                os.replace(file, home / file.name)
        sync_folder(home)
    except OSError as error:
        raise ArtefactError(
            f"{path}: cannot be written ({error.strerror or error}). Choose a folder that you may write to."
        ) from error


def _files(draft: Path) -> Sequence[Path]:
    return [file for file in sorted(draft.iterdir()) if file.is_file()] if draft.is_dir() else [draft]


def _bytes(draft: Path) -> int:
    return sum(file.stat().st_size for file in _files(draft))
