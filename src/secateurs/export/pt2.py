"""torch.export's own format: a .pt2 file that torch alone loads and runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.export.deliver import TOLERANCE, Batches, calling, deliver, run_fresh
from secateurs.export.prepare import Exported, Kind, Prepared, quiet
from secateurs.graph.trace import Example, Graph


class _Pt2:
    kind: Kind = "pt2"
    runtime = "PyTorch"

    def write(self, network: Prepared, path: Path) -> None:
        with quiet():
            torch.export.save(network.program, path)

    def outputs(self, path: Path, batches: Batches) -> list[list[Tensor]]:
        return run_fresh(self.kind, path, batches)

    def runner(self, network: Prepared, path: Path) -> Callable[[tuple[Tensor, ...]], Callable[[], Any]]:
        return calling(network.program.module())


def to_pt2(
    graph: Graph | Prepared,
    path: str | Path,
    *,
    inputs: Example | None = None,
    original: Graph | nn.Module | Prepared | None = None,
    tolerance: float = TOLERANCE,
    repeats: int = 30,
) -> Exported:
    """Write the network with torch.export to `path` (.pt2), for a batch of any size, in eval mode, for the CPU.

    The file is loaded in a fresh process that cannot import secateurs and must give what the network gives for `inputs`, up
    to `tolerance` times the largest output; else `NotEqual`, and no file. With `original`, the unpruned network, its size
    and speed are compared, `repeats` runs in turns.
    """
    return deliver(_Pt2(), graph, path, inputs=inputs, original=original, tolerance=tolerance, repeats=repeats)
