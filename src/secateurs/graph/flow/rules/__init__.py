"""One op, one rule, one table: how channels flow through each op that secateurs knows.

Every op stands here once, in module, functional and method form together; a file a kind of op. An op without a rule is opaque:
it gets its inputs at full width, and what it touches is not pruned. Users add rules with the same decorator.
"""

from secateurs.graph.flow.rules import binary, dense, pointwise, reshape, slicing, spatial
from secateurs.graph.flow.rules.common import channelwise, opaque
from secateurs.graph.flow.rules.slicing import SPLITS

__all__ = ["SPLITS", "binary", "channelwise", "dense", "opaque", "pointwise", "reshape", "slicing", "spatial"]
