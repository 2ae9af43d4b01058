"""All sites of a network observed at once: one pass for second moments, one there and back for what errors cost.

An error of a consumer's output costs, to second order, half its product with the curvature of the loss there. The curvature is
taken as in K-FAC (Martens and Grosse, 2015): a matrix over the consumer's channels, the mean product of gradients, as if errors
at different places were independent. So the loss without some filters is predicted in closed form, up to a factor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from secateurs._util.modules import Device, accumulation_dtype, keeping_modes, on_device
from secateurs.data.dataset import Examples
from secateurs.distributed import active
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.consumers import find_consumers
from secateurs.graph.masking import copy_module
from secateurs.graph.node_info import values_of_an_example
from secateurs.graph.sites import Site, resolve
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure
from secateurs.repair.observe import GRAM_BYTES, gram_size, observe_sites
from secateurs.repair.reconstruction import Reconstruction
from secateurs.repair.solve import groups_of
from secateurs.repair.targets import channel_axis

_BATCH = 64  # examples at once there and back, when all activations are in memory
_ACTIVATION_BYTES = 2**31  # that they may take

Curvature = Mapping[str, Tensor]
"""Of the loss at a network's consumers: (G, O, O) by the path of a layer, (C,) by the node of a sum."""


@dataclass(frozen=True, eq=False)
class Survey:
    """The sites of a network, all observed: `graph` is the network, prepared for the repair of each of them."""

    graph: Graph
    reconstructions: Mapping[str, Reconstruction]  # by site
    curvature: Curvature


def survey(
    graph: Graph,
    sites: Iterable[Site | str],
    examples: Examples,
    curved: Examples,
    loss_fn: Measure,
    *,
    batch: int = 256,
    device: Device = None,
    gram_bytes: int = GRAM_BYTES,
    seed: int = 0,
) -> Survey:
    """Observe all `sites` of a graph from `prepare` on `examples`, and the curvature of the loss on the examples `curved`.

    Sites are left out from the first one on with which the Gram matrices of all would take more than `gram_bytes`.
    """
    chosen, layers = [], dict[str, int]()
    for name, site in resolve(graph, sites).items():
        layers |= {c.module: gram_size(graph.module.get_submodule(c.module)) for c in find_consumers(graph, site).layers}
        if sum(size for size in layers.values() if size <= gram_bytes) > gram_bytes:
            break
        chosen.append(name)
    if not chosen:
        return Survey(graph, {}, {})
    found = observe_sites(graph, chosen, examples, batch=batch, device=device, gram_bytes=gram_bytes, seed=seed)
    fits = _ACTIVATION_BYTES // max(8 * values_of_an_example(graph.module), 1)  # there and back
    few = max(min(batch, _BATCH, fits), 1)
    return Survey(graph, found, curvature_of(graph, chosen, curved, loss_fn, batch=few, device=device))


def curvature_of(
    graph: Graph,
    sites: Iterable[Site | str],
    examples: Examples,
    loss_fn: Measure,
    *,
    batch: int = _BATCH,
    device: Device = None,
) -> Curvature:
    """Return the mean products of the gradients of each example's loss along the outputs of all consumers of `sites`.

    They are summed over a layer's places. What the loss does not depend on, or has no gradient along, is left out.
    """
    module = copy_module(graph).requires_grad_(True)
    module = spread_sums(module)
    layers: dict[str, str] = {}
    sums: dict[str, int] = {}
    for site in resolve(graph, sites).values():
        consumers = find_consumers(graph, site)
        layers |= {consumer.node: consumer.module for consumer in consumers.layers}
        sums |= {total.node: total.axis for total in consumers.sums}
    found: dict[str, Tensor] = {}
    with on_device(module, device) as where, keeping_modes(module), torch.enable_grad():
        module.eval()
        nodes = [*layers, *(name for name in sums if name not in layers)]

        def products(ticket: int) -> list[Tensor]:
            """The products of one batch, each after the number of its node; nothing if the loss has no gradient."""
            each = examples.batch(slice(ticket * batch, (ticket + 1) * batch), device=where)
            run = _Recorded(module, set(nodes))
            losses = loss_fn(run.run(*each.args), each.targets)
            # one example's loss does not depend on another's outputs, so the gradient of the sum is that of each
            total = losses * each.size if losses.ndim == 0 else losses.reshape(each.size, -1).mean(1).sum()
            known = {name: value for name, value in run.values.items() if value.requires_grad}
            if not total.requires_grad or not known:
                return []
            slopes, new = torch.autograd.grad(total, list(known.values()), allow_unused=True), list[Tensor]()
            for name, slope in zip(known, slopes, strict=True):
                if slope is not None:
                    own = name in layers
                    product = _products(slope, module.get_submodule(layers[name])) if own else _squares(slope, sums[name])
                    new += [torch.tensor(nodes.index(name)), product]
            return new

        for new in active().map("curvature", -(-len(examples) // batch), products):
            if not new:
                return {}
            for number, product in zip(new[::2], new[1::2], strict=True):
                key = layers.get(nodes[int(number)], nodes[int(number)])
                found[key] = found[key] + product if key in found else product
    return {name: total.cpu().double() / len(examples) for name, total in found.items()}


class _Recorded(fx.Interpreter):
    """Runs a network and keeps the values of some nodes."""

    def __init__(self, module: fx.GraphModule, names: Collection[str]) -> None:
        super().__init__(module)
        self.names, self.values = names, dict[str, Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        found = super().run_node(n)
        if n.name in self.names and isinstance(found, Tensor):
            self.values[n.name] = found
        return found


def _products(slope: Tensor, layer: Any) -> Tensor:
    """Sum of products of a layer's output gradient over examples and places: (G, O, O)."""
    rows = slope.movedim(channel_axis(layer), 0).flatten(1).to(accumulation_dtype(slope.device))
    grouped = rows.view(groups_of(layer), -1, rows.shape[1])
    return grouped @ grouped.mT


def _squares(slope: Tensor, axis: int) -> Tensor:
    rows = slope.movedim(axis, 0).flatten(1).to(accumulation_dtype(slope.device))
    return (rows**2).sum(1)
