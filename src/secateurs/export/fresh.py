"""Runs an export in a process of its own in which secateurs cannot be imported: what works there works for others."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
from torch import Tensor

from secateurs.errors import ArtefactError

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
