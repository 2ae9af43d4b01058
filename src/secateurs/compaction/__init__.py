"""Step 7 of 9: takes a Graph and masks by site, gives a narrower Graph that equals the masked network up to rounding.

`compact` rewrites the graph so that only live channels exist, `replay` does so by a plan, `verify` proves the equality.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from secateurs.channels import compose, ids
from secateurs.compaction.additions import with_additions
from secateurs.compaction.rewrite import rewrite_
from secateurs.compaction.state import Rewriting
from secateurs.errors import NotEqual, PlanError
from secateurs.flow import analyse, find_flows
from secateurs.graph import Graph, record_shapes_, tensors_in
from secateurs.layers import Align, Constant
from secateurs.masking import Masks, copy_module, masked
from secateurs.plan import Plan, PlannedCut
from secateurs.sites import Site, check_masks, remember_names_, resolve
from secateurs.sums import fuse_sums_, spread_sums

__all__ = ["Align", "Constant", "Verification", "compact", "replay", "verify"]


def compact(graph: Graph, masks: Masks | Plan) -> Graph:
    """The network without the channels that `masks` drop: ordinary narrower modules that compute what the masked network does.

    `masks` is {site or its name: bool tensor, True = kept}, or a `Plan` (see `replay`). A cut that empties a layer folds its
    branch into a constant where it is added or multiplied to something that still depends on the input; elsewhere it is
    `EmptyLayer`. The given graph is not changed.
    """
    if isinstance(masks, Plan):
        return replay(graph, masks)
    checked = check_masks(graph, masks)
    module = spread_sums(copy_module(graph))
    nodes = {node.name: node for node in module.graph.nodes}
    if not graph.plan.steps:
        remember_names_(graph, module)
    flows = find_flows(module)
    keep = {nodes[site.node]: mask for site, mask in checked.values() if not bool(mask.all())}
    widths = {node: flows.width(node) for node in flows.of if flows.of[node].axis is not None}
    names = {nodes[site.node]: name for name, (site, _) in checked.items()}
    state = Rewriting(module, flows, analyse(flows, keep), names, keep)
    rewrite_(state)
    remaining = dict(graph.ids)
    replaced = [node for node in state.standing_for if node.meta.get("ends_site")]  # a site's gather, narrower or not
    for node in dict.fromkeys([*state.layout, *replaced]):
        layout = state.carried(node, widths[node])
        wide = node.meta.setdefault("original_channels", widths[node])
        remaining[node.name] = compose(graph.ids.get(node.name), ids(state.physical.get(node, layout)))
        stand_in = state.present(node)
        if stand_in not in flows.of and (node in state.physical or node.meta.get("ends_site")):
            remaining[stand_in.name] = compose(graph.ids.get(node.name), ids(layout))
            stand_in.meta["original_channels"] = wide
    record_shapes_(module, graph.example)
    fuse_sums_(module)
    there = {node.name for node in module.graph.nodes}
    remaining = {name: found for name, found in remaining.items() if name in there}  # a name can come again for another node
    cuts = [_planned(site, mask) for site, mask in checked.values() if not bool(mask.all())]
    plan = graph.plan.then(cuts) if cuts else graph.plan
    return Graph(module, graph.example, plan, graph.leaves, remaining, state.kept)


def _planned(site: Site, keep: Tensor) -> PlannedCut:
    removed = tuple(site.original[i] for i in ids(~keep).tolist())
    return PlannedCut(site.name, removed, site.original_channels)


def replay(graph: Graph, plan: Plan) -> Graph:
    """Make the cuts of `plan`, step by step, on a graph of the untouched network (or one that has had some of them)."""
    for step in plan.steps:
        for cut in step:
            if cut.biases or cut.offsets:
                site = resolve(graph, [cut.site])[cut.site]
                graph = with_additions(graph, site, biases=cut.biases, offsets=cut.offsets)
        sites = resolve(graph, [cut.site for cut in step])
        masks: dict[str | Site, Tensor] = {}
        for cut in step:
            site = sites[cut.site]
            if site.original_channels != cut.channels:
                raise PlanError(
                    f"the plan cuts site {cut.site!r} of {cut.channels} channels, but this network has "
                    f"{site.original_channels} there. Use the network that the plan was made for."
                )
            gone = torch.tensor(cut.removed, dtype=torch.long)
            masks[cut.site] = ~torch.isin(torch.tensor(site.original, dtype=torch.long), gone)
        if any(cut.removed for cut in step):
            graph = compact(graph, masks)
    return graph


@dataclass(frozen=True)
class Verification:
    """How far the compacted network's outputs are from the masked one's: largest difference, and the outputs' own size."""

    difference: float
    scale: float
    examples: int


def verify(
    graph: Graph,
    masks: Masks,
    compacted: Graph | None = None,
    *,
    inputs: Tensor | tuple[Tensor, ...] | None = None,
    seed: int = 0,
    tolerance: float = 1e-10,
) -> Verification:
    """Prove in float64, in eval mode, that the compacted network gives what the masked one gives; `NotEqual` otherwise.

    `compacted` is compacted here if it is not given. Without `inputs`, four random batches like the graph's example are used.
    The largest difference may be `tolerance` times the largest output.
    """
    smaller = compact(graph, masks) if compacted is None else compacted
    networks = [copy.deepcopy(m).eval() for m in (masked(graph, masks), smaller.module)]
    batches = _random_batches(graph, seed) if inputs is None else [(inputs,) if isinstance(inputs, Tensor) else inputs]
    try:
        worst, scale = _differences([n.double() for n in networks], batches, torch.float64)
    except RuntimeError:  # a network that casts to a type of its own cannot run in float64
        dtype = next((t.dtype for t in graph.example if t.is_floating_point()), torch.float32)
        tolerance = max(tolerance, 1e-4)
        worst, scale = _differences([n.to(dtype) for n in networks], batches, dtype)
    if not worst <= tolerance * scale:
        raise NotEqual(
            f"the compacted network differs from the masked one by {worst:.3g} where outputs reach {scale:.3g} "
            f"(tolerance {tolerance:.1g}). Please report the network: this must not happen."
        )
    return Verification(worst, scale, sum(len(b[0]) for b in batches))


def _differences(networks: list[fx.GraphModule], batches: list[tuple[Tensor, ...]], dtype: torch.dtype) -> tuple[float, float]:
    """The largest difference between the outputs of two networks, and the largest output; NaN where either is."""
    worst = scale = 0.0
    for batch in batches:
        batch = tuple(b.to(dtype) if b.is_floating_point() else b for b in batch)
        with torch.no_grad():
            wanted, got = (tensors_in(network(*batch)) for network in networks)
        for a, b in zip(wanted, got, strict=True):
            if a.shape != b.shape:
                raise NotEqual(f"the compacted network gives shape {tuple(b.shape)}, the masked one {tuple(a.shape)}.")
            if a.numel():
                worst = max(float((a.double() - b.double()).abs().nan_to_num(nan=math.inf).max()), worst)
                scale = max(float(a.double().abs().max()), scale)
    return worst, scale


def _random_batches(graph: Graph, seed: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(_like(e, generator) for e in graph.example) for _ in range(4)]


def _like(example: Tensor, generator: torch.Generator) -> Tensor:
    """Random values for a float input; integer inputs (indices) stay as they are, since they must stay in range."""
    if not example.is_floating_point():
        return example
    return torch.randn(example.shape, generator=generator, dtype=torch.float64).to(example.device)
