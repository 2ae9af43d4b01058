"""Sizes that a network asks for: x.size(1) of a narrower x must still give the number that arithmetic relies on."""

from __future__ import annotations

import operator

from torch import fx

from secateurs.compaction.state import Rewriting
from secateurs.graph import shape_of


def fix_sizes(state: Rewriting, node: fx.Node) -> None:
    """If `node` asks for the number of channels of a tensor that was narrowed, put the original number in its place."""
    source = next(iter(node.all_input_nodes), None)
    if source is None:
        return
    word = node.target if node.op == "call_method" else (node.args[1] if node.target is getattr else None)
    if word in ("size", "shape") and state.changed(source):
        _fix_call(state, node, source)
    elif word in ("dim", "ndimension", "ndim", "dtype", "device") and state.changed(source):
        if not state.is_empty(source):
            state.redirect(node, source)
        elif word in ("dim", "ndimension", "ndim"):
            _substitute(node)
        elif not node.meta.get("unread"):
            raise state.empty(source, node)
    elif node.target is operator.getitem and source in state.size_queries:
        _fix_item(state, node, state.size_queries[source])


def _fix_call(state: Rewriting, node: fx.Node, source: fx.Node) -> None:
    if state.is_empty(source):
        if node.meta.get("unread"):  # an assertion about what is gone goes too
            return
        raise state.empty(source, node)
    state.redirect(node, source)
    if source not in state.layout:
        return
    dim = node.args[1] if len(node.args) > 1 and node.op == "call_method" else node.kwargs.get("dim")
    if dim is None:
        state.size_queries[node] = source
    elif not isinstance(dim, int) or dim % _rank(source) == state.flows.of[source].axis:
        _substitute(node)


def _fix_item(state: Rewriting, node: fx.Node, source: fx.Node) -> None:
    item = node.args[1]
    if isinstance(item, int) and item % _rank(source) == state.flows.of[source].axis:
        _substitute(node)


def _rank(node: fx.Node) -> int:
    return len(shape_of(node).dims or ())


def _substitute(node: fx.Node) -> None:
    """Put the value that `node` gave for the example in its place: it depends on nothing but the network."""
    value = shape_of(node).value

    def swap(argument: fx.Node) -> object:
        return value if argument is node else argument

    for user in list(node.users):
        user.args = fx.map_arg(user.args, swap)  # type: ignore[arg-type]
        user.kwargs = fx.map_arg(user.kwargs, swap)  # type: ignore[arg-type]
