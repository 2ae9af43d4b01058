"""Solve every layer again, in network order: from its input in the cut network it is to give its output in the original.

A layer whose output is a term of a sum makes up for everything that the sum lacks, so errors do not add up along shortcuts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from secateurs._util.modules import Device
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.consumers import LastTerm, LayerConsumer, find_layers
from secateurs.graph.masking import network_up_to
from secateurs.graph.trace import Graph
from secateurs.repair.observe import (
    GRAM_BYTES,
    ROWS,
    LayerTally,
    affine,
    channel_axis,
    converted,
    find_node,
    gram_size,
    kept_positions,
    layer_fit,
    run_both,
    select,
)
from secateurs.repair.reconstruction import Errors, write_

Target = Callable[..., Tensor]
"""From the original's output, and for a term of a sum the layer's output and the sum, to the target of the layer's output."""


def refit_(
    graph: Graph,
    original: Graph,
    examples: Examples,
    *,
    batch: int = 256,
    device: Device = None,
    rows: int | None = ROWS,
    gram_bytes: int = GRAM_BYTES,
    seed: int = 0,
) -> Mapping[str, Errors]:
    """Refit every layer of `graph`, in place, to its output in `original`, the network that `graph` was cut from.

    Returns the errors before and after by layer. Layers without a bias or a BatchNorm behind them, which cannot represent a
    mean, and layers whose Gram matrices would take more than `gram_bytes` stay as they are and are not in the result.
    """
    if len(examples) == 0:
        raise InvalidInput("refit: got no examples, wanted at least one.")
    errors = {}
    for consumer, term in find_layers(graph):
        layer: Any = graph.module.get_submodule(consumer.module)
        if (layer.bias is None and consumer.norm is None) or gram_size(layer) > gram_bytes:
            continue
        ours, theirs = spread_sums(graph.module), spread_sums(original.module)
        node = find_node(ours, consumer.node)
        seen, wanted = [node.all_input_nodes[0]], consumer.node
        target: Target = converted(graph, original, consumer)
        if term is not None:
            seen, wanted = [*seen, node, find_node(ours, term.end)], term.node
            target = _target_of_term(graph, original, consumer, term)
        reference = network_up_to(theirs, [find_node(theirs, wanted, whose="original")])
        tally = LayerTally(layer, examples=len(examples), rows=rows, seed=seed)
        add = partial(_add_batch, tally, target)
        run_both(network_up_to(ours, seen), reference, examples, add, batch=batch, device=device)
        weights, errors[consumer.module], _ = layer_fit(graph, consumer, tally).mend(torch.ones(0, dtype=torch.bool), None)
        write_(graph, weights)
    return errors


def _add_batch(tally: LayerTally, target: Target, first: int, seen: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    tally.add(seen[0], target(wanted[0], *seen[1:]), first)


def _target_of_term(graph: Graph, original: Graph, consumer: LayerConsumer, term: LastTerm) -> Target:
    """Return the function of the original's sum, the layer's output and the graph's sum that gives the layer's target."""
    chosen = kept_positions(graph, original, term.end)
    layer: Any = graph.module.get_submodule(consumer.module)
    axis = channel_axis(layer)
    gain = torch.ones(layer.weight.shape[0], dtype=torch.float64)
    if consumer.norm is not None:
        gain, _ = affine(graph.module.get_submodule(consumer.norm))
        gain = torch.where(gain.abs() > 1e-12 * gain.abs().max(), gain, torch.inf)  # a constant channel cannot be corrected

    def target(wanted: Tensor, own: Tensor, total: Tensor) -> Tensor:
        lack = (select(wanted, chosen, axis) - total).index_select(axis, term.place.to(total.device))
        return own + lack / gain.to(own).view([-1] + [1] * (-1 - axis))

    return target
