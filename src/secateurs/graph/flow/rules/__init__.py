"""One op, one rule, one table: how channels flow through each op that secateurs knows.

Every op is listed once, in module, functional and method form together. An op without a rule is opaque: it gets its inputs at
full width, and what it touches is not pruned. Users add rules with the same decorator.
"""

from secateurs.graph.flow.rules import layers, shapes, values
from secateurs.graph.flow.rules.parts import PARTED, SPLITS

__all__ = ["PARTED", "SPLITS", "layers", "shapes", "values"]
