"""Rewrites a graph so that only live channels exist: narrows modules, aligns where they differ, folds what is constant."""

from __future__ import annotations

import torch
from torch import fx

from secateurs.channels import none_of, positions
from secateurs.compaction.folding import constant_at
from secateurs.compaction.nodes import narrow_node
from secateurs.compaction.sizes import fix_sizes
from secateurs.compaction.state import Rewriting, hand_site_on
from secateurs.flow import Flow, Opaque
from secateurs.layers import Align, mask_channels
from secateurs.naming import name_of_alignment


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
            state.module.graph.erase_node(node)
