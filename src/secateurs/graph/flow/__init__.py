"""How channels flow: one rule per op (`rules`), a few kinds of flow (`kinds`), and dead channels under masks (`liveness`)."""

from secateurs.graph.flow.kinds import Blocks, Channelwise, Concat, Flow, Join, Layer, Moved, Opaque, Source
from secateurs.graph.flow.liveness import Flows, Liveness, analyse, find_flows, revivals
from secateurs.graph.flow.table import Op, channelwise, opaque, rule

__all__ = [
    "Blocks",
    "Channelwise",
    "Concat",
    "Flow",
    "Flows",
    "Join",
    "Layer",
    "Liveness",
    "Moved",
    "Op",
    "Opaque",
    "Source",
    "analyse",
    "channelwise",
    "find_flows",
    "opaque",
    "revivals",
    "rule",
]
