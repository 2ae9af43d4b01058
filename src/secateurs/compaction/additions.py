"""What a network is given before filters leave it, so that weights can make up for them: biases, and offsets behind sums.

All of it starts at zero, so that the network computes what it did. It is structure: the plan says so, replay makes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from secateurs.errors import PlanError
from secateurs.graph.channels import free_name
from secateurs.graph.consumers import SumConsumer, find_consumers
from secateurs.graph.layers import Offset
from secateurs.graph.masking import copy_module
from secateurs.graph.plan import PlannedCut
from secateurs.graph.sites import Site, remember_names_
from secateurs.graph.trace import Graph


def with_additions(graph: Graph, site: Site, *, biases: Sequence[str] = (), offsets: Sequence[str] = ()) -> Graph:
    """A copy of the graph with a zero bias in the layers `biases` and a zero `Offset` behind the sums `offsets`.

    Layers are named by their paths, sums as their readers are. `site` is the one whose loss they are to make up for.
    """
    module = copy_module(graph)
    if not graph.plan.steps:
        remember_names_(graph, module)
    remaining = dict(graph.ids)
    for path in biases:
        _add_bias_(module, path)
    sums = {reader.name: reader for reader in find_consumers(graph, site).sums} if offsets else {}
    for name in offsets:
        if name not in sums or sums[name].offset is not None:
            raise PlanError(
                f"the plan puts an offset behind the sum {name!r}, but site {site.name!r} has no such reader without."
            )
        behind = _add_offset_(module, sums[name])
        if sums[name].node in remaining:
            remaining[behind.name] = remaining[sums[name].node]
    module.recompile()
    noted = PlannedCut(site.name, (), site.original_channels, tuple(biases), tuple(offsets))
    return replace(graph, module=module, plan=graph.plan.then([noted]), ids=remaining, kept={})


def _add_bias_(module: fx.GraphModule, path: str) -> None:
    try:
        layer: Any = module.get_submodule(path)
    except AttributeError as error:
        raise PlanError(f"the plan gives layer {path!r} a bias, but this network has no such layer.") from error
    filters = getattr(layer, "out_channels", None) or getattr(layer, "out_features", None)
    if filters is None or layer.bias is not None:
        raise PlanError(f"the plan gives layer {path!r} a bias, but it has one, or is a {type(layer).__name__}.")
    weight = layer.weight
    bias = torch.zeros(filters, dtype=weight.dtype, device=weight.device)
    layer.bias = nn.Parameter(bias, requires_grad=weight.requires_grad)


def _add_offset_(module: fx.GraphModule, reader: SumConsumer) -> fx.Node:
    add = next(node for node in module.graph.nodes if node.name == reader.node)
    first = next((t for t in module.parameters() if t.is_floating_point()), torch.zeros(0))
    name = free_name(module, f"offset_{add.name}")
    module.add_submodule(name, Offset(reader.covered, reader.axis, first.dtype).to(first.device).train(module.training))
    users = list(add.users)
    with module.graph.inserting_after(add):
        behind = module.graph.call_module(name, (add,))
    for user in users:
        user.replace_input_with(add, behind)
    passed_on = ("shape", "other_shapes", "original_channels", "unread", "site_names")
    behind.meta = {key: add.meta[key] for key in passed_on if key in add.meta}
    return behind
