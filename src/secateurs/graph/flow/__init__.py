"""How channels flow: one rule per op (`rules`), a few kinds of flow (`kinds`), and dead channels under masks (`liveness`)."""

from secateurs.graph.flow.kinds import (
    ELSEWHERE,
    Blocks,
    Channelwise,
    Concat,
    Contracted,
    Flow,
    Join,
    Layer,
    Lookup,
    Moved,
    Norm,
    Opaque,
    Recurrent,
    Reduced,
    Source,
)
from secateurs.graph.flow.liveness import Flows, Liveness, analyse, find_flows, find_revivals
from secateurs.graph.flow.table import Op, channelwise, opaque, rule

__all__ = [
    "ELSEWHERE",
    "Blocks",
    "Channelwise",
    "Concat",
    "Contracted",
    "Flow",
    "Flows",
    "Join",
    "Layer",
    "Liveness",
    "Lookup",
    "Moved",
    "Norm",
    "Op",
    "Opaque",
    "Recurrent",
    "Reduced",
    "Source",
    "analyse",
    "channelwise",
    "find_flows",
    "find_revivals",
    "opaque",
    "rule",
]
