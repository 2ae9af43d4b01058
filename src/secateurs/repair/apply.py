"""Puts repairs into networks: the structure that they need, and the weights themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from secateurs._util.modules import Device
from secateurs.compaction.additions import with_additions
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.consumers import find_consumers
from secateurs.graph.masking import Masks, copied
from secateurs.graph.sites import Site, check_masks, resolve
from secateurs.graph.trace import Graph
from secateurs.repair.observe import ROWS, observe
from secateurs.repair.reconstruction import Repair


def prepare(graph: Graph, sites: Iterable[Site | str]) -> Graph:
    """A copy of the graph in which all readers of `sites` have what a repair sets: a bias, a BatchNorm behind, or an offset.

    What is missing is added, at zero, so that the network computes what it did; the plan says what. Not needed twice.
    """
    prepared = copied(graph)
    current = resolve(prepared, sites)
    for name in list(current):
        site = current[name]
        readers = find_consumers(prepared, site)
        layers = {r.module: prepared.module.get_submodule(r.module) for r in readers.layers if r.norm is None}
        biases = [path for path, layer in layers.items() if layer.bias is None]
        offsets = [r.name for r in readers.sums if r.offset is None and bool(r.covered.any())]
        if biases or offsets:
            prepared = with_additions(prepared, site, biases=biases, offsets=offsets)
            current = resolve(prepared, current)  # a site may lie behind an offset now
    return prepared


def apply_(graph: Graph, repair: Repair) -> None:
    """Write the repair's weights into the graph's network; nothing is written if one of them does not fit."""
    state: dict[str, Any] = graph.module.state_dict(keep_vars=True)
    for name, tensor in repair.weights.items():
        if name not in state or state[name].shape != tensor.shape:
            there = tuple(state[name].shape) if name in state else "nothing"
            raise InvalidInput(
                f"repair of site {repair.site!r}: {name!r} of shape {tuple(tensor.shape)} meets {there} in this network. "
                f"Apply it to the graph that was observed."
            )
    write_(graph, repair.weights)


def write_(graph: Graph, weights: Mapping[str, Tensor]) -> None:
    """Write weights, by their names in the state dict and of the shapes there, into the graph's network."""
    state: dict[str, Any] = graph.module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in weights.items():
            state[name].copy_(tensor)


def repair_(
    graph: Graph,
    masks: Masks,
    examples: Examples,
    *,
    original: Graph | None = None,
    ridge: float | None = None,
    batch: int = 256,
    device: Device = None,
    rows: int | None = ROWS,
    seed: int = 0,
) -> dict[str, Repair]:
    """Give the readers of every site in `masks` the weights that make up best for what the masks drop; the repairs by site.

    Sites are taken in network order, each with the cuts and repairs before it. `graph` must come from `prepare`; it is changed
    in place and still has all its channels: `compact(graph, masks)` comes next.
    """
    checked = check_masks(graph, masks)
    order = {node.name: place for place, node in enumerate(graph.module.graph.nodes)}
    done: dict[str | Site, torch.Tensor] = {}
    repairs: dict[str, Repair] = {}
    for name, (site, keep) in sorted(checked.items(), key=lambda item: order[item[1][0].node]):
        found = observe(graph, site, examples, original=original, masks=done, batch=batch, device=device, rows=rows, seed=seed)
        repairs[name] = found.solve(keep, ridge=ridge)
        apply_(graph, repairs[name])
        done[name] = keep
    return repairs
