"""How channels flow: one rule per op (`rules`), made of few kinds of flow (`kinds`), and what masks kill (`liveness`)."""

from secateurs.graph.flow.kinds import Blocks, Channelwise, Concat, Flow, Join, Layer, Moved, Opaque, Source
from secateurs.graph.flow.liveness import Flows, Liveness, analyse, find_flows, revivals
from secateurs.graph.flow.rules import channelwise, opaque
from secateurs.graph.flow.table import Op, rule

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
