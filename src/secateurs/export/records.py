"""What an export tells: where it lies, how far its numbers are from the network's, how small and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from secateurs.timing import SpeedUp

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
