"""Biases and offsets added to a network before filters are removed, so that weights can make up for them.

All start at zero, so the network computes the same as before. They are part of the plan, and `replay` adds them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from secateurs._util.modules import device_of
from secateurs.errors import PlanError
from secateurs.graph.consumers import find_consumers
from secateurs.graph.layers import Offset
from secateurs.graph.masking import copy_module, insert_behind_
from secateurs.graph.node_info import pass_on_
from secateurs.graph.plan import PlannedCut
from secateurs.graph.sites import Site, remember_sites_
from secateurs.graph.trace import Graph, dtype_of


def with_additions(graph: Graph, sites: Mapping[str, Site], additions: Sequence[PlannedCut]) -> Graph:
    """Return a copy of the graph with a zero bias in layers, and a zero `Offset` behind sums, as planned for the `sites`.

    Layers are named by path, sums by the name of their `SumConsumer`. They are to make up for filters removed at these sites.
    Nothing is added twice; what is planned to be cut is not cut here.
    """
    module, plan = copy_module(graph), graph.plan
    if not graph.plan.steps:
        remember_sites_(graph, module)
    remaining = dict(graph.ids)
    for cut in additions:
        site = sites[cut.site]
        for path in cut.biases:
            add_bias_(module, path)
        sums = {consumer.name: consumer for consumer in find_consumers(graph, site).sums} if cut.offsets else {}
        for name in cut.offsets:
            if name not in sums or sums[name].offset is not None:
                raise PlanError(
                    f"the plan adds an offset behind the sum {name!r}, but no sum of that name without an offset reads site "
                    f"{site.name!r}. Use the network that the plan was made for."
                )
            add = next(node for node in module.graph.nodes if node.name == sums[name].node)
            offset = Offset(sums[name].covered, sums[name].axis, dtype_of(module)).to(device_of(module)).train(module.training)
            behind = insert_behind_(module, add, f"offset_{add.name}", offset)
            pass_on_(add, behind, "shape", "other_shapes", "original_channels", "unused", "site_names")
            if add.name in remaining:
                remaining[behind.name] = remaining[add.name]
        plan = plan.then([PlannedCut(site.name, (), site.original_channels, cut.biases, cut.offsets)])
    module.recompile()
    return replace(graph, module=module, plan=plan, ids=remaining, kept={})


def add_bias_(module: nn.Module, path: str) -> None:
    """Give the layer at `path` a bias of zeros."""
    try:
        layer: Any = module.get_submodule(path)
    except AttributeError as error:
        raise PlanError(
            f"the plan gives layer {path!r} a bias, but this network has no such layer. "
            f"Use the network that the plan was made for."
        ) from error
    filters = getattr(layer, "out_channels", None) or getattr(layer, "out_features", None)
    if filters is None or layer.bias is not None:
        raise PlanError(
            f"the plan gives layer {path!r} a bias, but it has one, or is a {type(layer).__name__}. "
            f"Use the network that the plan was made for."
        )
    weight = layer.weight
    bias = torch.zeros(filters, dtype=weight.dtype, device=weight.device)
    layer.bias = nn.Parameter(bias, requires_grad=weight.requires_grad)
