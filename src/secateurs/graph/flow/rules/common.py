"""What many rules return."""

from __future__ import annotations

from secateurs.graph.flow.kinds import Channelwise, Flow, Opaque
from secateurs.graph.flow.table import Op


def channelwise(op: Op, *, keeps_zero: bool, pointwise: bool = False, activation: bool = False) -> Flow:
    """The flow of an op without weights that treats every channel alone, wherever the channels lie."""
    return Channelwise(op.axis, op.axis, op.width, keeps_zero, pointwise, activation)


def opaque(op: Op, why: str) -> Opaque:
    """The flow of an op that needs all channels of its inputs; `why` completes the sentence that begins with its name."""
    return Opaque(f"{op.label} {why}")
