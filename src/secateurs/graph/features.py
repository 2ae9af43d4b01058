"""Where a cut network is compared with the one it was cut from: the same places in both, the channels that are left.

The places are the ends of residual blocks: behind every sum and the activation that follows it. A network without sums is
compared behind every layer, its BatchNorm and its activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from secateurs.errors import InvalidInput
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.consumers import SUMS
from secateurs.graph.flow import Join, Layer, find_flows
from secateurs.graph.flow.liveness import activation_behind
from secateurs.graph.layers import channels_last
from secateurs.graph.masking import network_up_to
from secateurs.graph.node_info import shape_of
from secateurs.graph.trace import Graph


@dataclass(frozen=True, eq=False)
class FeaturePairs:
    """Two networks that give what they compute at their common places, then their outputs: (*features, outputs).

    They share all weights and modules with the networks that they were made of.
    """

    ours: fx.GraphModule
    theirs: fx.GraphModule
    kept: tuple[tuple[Tensor | None, int], ...]  # for each place the positions of our channels in theirs, and their axis

    def error(self, own: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
        """The mean over places of the squared error, relative to what is wanted."""
        errors = []
        for one, other, (positions, axis) in zip(own, wanted, self.kept, strict=True):
            target = select(other, positions, axis)
            if torch.float16 in (one.dtype, target.dtype):  # a sum of squares exceeds its range
                one, target = one.float(), target.float()
            energy = target.square().sum()
            errors.append((one - target).square().sum() / torch.where(energy > 0, energy, 1.0))
        return torch.stack(errors).mean()


def paired_features(graph: Graph, original: Graph) -> FeaturePairs | None:
    """Pair the places of `graph` with those of `original`, the network that it was cut from.

    None if there are none, or if the network gives anything but one tensor.
    """
    ends = [_output(each.module) for each in (graph, original)]
    if ends[0] is None or ends[1] is None:
        return None
    ours, theirs = ({node.name: node for node in each.module.graph.nodes} for each in (graph, original))
    pairs: list[tuple[fx.Node, fx.Node]] = []
    kept: list[tuple[Tensor | None, int]] = []
    for name, axis in _places(original, ends[1].name).items():
        if name not in ours or name not in theirs:
            continue
        positions, wanted = kept_positions(graph, original, name), list(shape_of(theirs[name]).dims or ())
        if positions is not None and wanted:
            wanted[axis] = len(positions)
        if wanted and list(shape_of(ours[name]).dims or ()) == wanted:
            pairs.append((ours[name], theirs[name]))
            kept.append((positions, axis))
    if not pairs:
        return None
    parts = [[pair[side] for pair in pairs] for side in (0, 1)]
    return FeaturePairs(
        network_up_to(graph.module, [*parts[0], ends[0]]), network_up_to(original.module, [*parts[1], ends[1]]), tuple(kept)
    )


def _places(graph: Graph, output: str) -> dict[str, int]:
    """The names of the places to compare at, in network order, with the axes of their channels; the output is none."""
    flows = find_flows(spread_sums(graph.module))
    sums = [node for node, flow in flows.of.items() if isinstance(flow, Join) and node.target in SUMS]
    layers = [node for node, flow in flows.of.items() if isinstance(flow, Layer)]
    for nodes in (sums, layers):
        ends = {end.name: flows.of[end].axis for end in (activation_behind(flows, node) for node in nodes)}
        found = {name: axis for name, axis in ends.items() if axis is not None and name != output}
        if found:
            return found
    return {}


def _output(module: fx.GraphModule) -> fx.Node | None:
    """The node whose value the network gives; None if it gives several, or something else than a node's value."""
    (end,) = [node for node in module.graph.nodes if node.op == "output"]
    return end.args[0] if isinstance(end.args[0], fx.Node) else None


def kept_positions(graph: Graph, original: Graph, node: str) -> Tensor | None:
    """Return the positions in `original` of the channels that a node of `graph` has; None for all of them."""
    ours, theirs = graph.ids.get(node), original.ids.get(node)
    if ours is None or theirs is None:
        if theirs is not None:
            raise InvalidInput(f"original has fewer channels at {node!r} than graph: it must be the less cut of the two.")
        return ours
    matches = ours[:, None] == theirs
    if not bool(matches.any(1).all()):
        raise InvalidInput(f"original lacks channels at {node!r} that graph has: it must be the less cut of the two.")
    return matches.long().argmax(1)


def select(value: Tensor, positions: Tensor | None, axis: int) -> Tensor:
    """Return the channels at `positions` along `axis`; all of them for None."""
    if positions is None:
        return value
    if channels_last(value, axis):
        return value.permute(0, 2, 3, 1).index_select(3, positions.to(value.device)).permute(0, 3, 1, 2)
    return value.index_select(axis, positions.to(value.device))
