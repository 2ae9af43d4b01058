"""Rewrites a graph so that only live channels exist: narrows modules, aligns where they differ, folds what is constant."""

from __future__ import annotations

import operator

import torch
from torch import fx

from secateurs.compaction.constants import constant_at
from secateurs.compaction.nodes import narrow_node
from secateurs.compaction.state import Rewriting, hand_site_on
from secateurs.graph.channels import name_of_alignment, none_of, positions
from secateurs.graph.flow import Flow, Opaque
from secateurs.graph.layers import Align, mask_channels
from secateurs.graph.trace import shape_of


def rewrite_(state: Rewriting) -> None:
    """Rewrite the whole graph in place, node by node in order."""
    state.last |= {node for node in state.module.graph.nodes if not node.users}
    for node in list(state.module.graph.nodes):
        if node in state.flows.of:
            _visit(state, node, state.flows.of[node])
        fix_sizes(state, node)
    _erase_unused(state)
    state.module.graph.lint()
    state.module.delete_all_unused_submodules()
    state.module.recompile()


def _visit(state: Rewriting, node: fx.Node, flow: Flow) -> None:
    inputs = state.flows.inputs[node]
    touched = node in state.live.zero or node in state.live.need
    if not touched and not any(state.changed(i) for i in inputs):
        return
    if node.meta.get("unread") and any(state.is_empty(i) for i in inputs):
        state.vanish(node)  # nobody reads it, so it need not be kept alive by constants
        return
    if flow.axis is None and not isinstance(flow, Opaque):
        for source in inputs:
            state.redirect(node, source)
        return
    constant = constant_at(state, node, flow)
    if constant is not None:
        if node in state.masks:
            constant = mask_channels(constant, state.masks[node], state.axis_of(node))
        state.constants[node] = constant
        state.layout[node] = none_of(constant.numel())
    elif flow.axis is not None and not bool(state.live_at(node).any()):
        state.vanish(node)
    else:
        narrow_node(flow, node, state)
        if node in state.masks:
            _drop_masked(state, node)


def _drop_masked(state: Rewriting, node: fx.Node) -> None:
    """Behind a site nothing masked may be carried: a layer that had to keep it hands on only the rest."""
    carried = state.carried(node, state.flows.width(node))
    wanted = carried & state.masks[node]
    if torch.equal(carried, wanted):
        return
    state.physical[node] = carried
    current = state.present(node)
    with state.module.graph.inserting_after(current):
        take = positions(carried, wanted)
        gather = state.insert(name_of_alignment(node), Align(take, state.axis_of(node)), (current,))
    hand_site_on(node, gather)  # the site is what the gather lets through
    if node in state.last:
        state.last.add(gather)
        gather.meta["unread"] = True
    state.standing_for[node] = gather
    state.layout[node] = wanted


def _erase_unused(state: Rewriting) -> None:
    """Erase what nobody reads any more. What nobody ever read stays, unless nothing is left of it or of what it reads."""
    nodes = list(state.module.graph.nodes)
    gone = {node for node in nodes if state.is_empty(node)}
    for node in nodes:
        if node.meta.get("unread") and not gone.isdisjoint(node.all_input_nodes):
            gone.add(node)
    stays = state.last - gone - state.standing_for.keys()
    for node in reversed(nodes):
        if not node.users and node.op not in ("placeholder", "output") and node not in stays:
            if node in state.last and node not in gone:  # an unread shuffle goes; what it read is unread from now on, and stays
                stays |= set(node.all_input_nodes)
            state.module.graph.erase_node(node)


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
