"""Makes one module narrower in place, and says which entries of each weight survived."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.channels import Kept, ids, take
from secateurs.flow import Channelwise, Layer

Survivors = Iterator[tuple[str, Kept]]


def narrow_channelwise_(module: nn.Module, flow: Channelwise, layout: Tensor) -> Survivors:
    """Keep the entries of the channels in `layout`."""
    kept = (ids(layout),)
    for name in flow.params:
        if getattr(module, name, None) is not None:
            _replace_(module, name, kept)
            yield name, kept
    if flow.count is not None:
        setattr(module, flow.count, int(layout.sum()))


def narrow_layer_(module: Any, flow: Layer, inputs: Tensor, outputs: Tensor, groups: int) -> Survivors:
    """Keep the filters in `outputs` and what they read of `inputs`; layouts of a grouped layer hold as many a group."""
    kept = _grouped(flow, inputs, outputs) if flow.groups > 1 else (ids(outputs), ids(inputs))
    if flow.transposed and flow.groups == 1:
        kept = (kept[1], kept[0])
    _replace_(module, "weight", kept)
    yield "weight", kept
    if module.bias is not None:
        _replace_(module, "bias", (ids(outputs),))
        yield "bias", (ids(outputs),)
    into, out = int(inputs.sum()), int(outputs.sum())
    if isinstance(module, nn.Linear):
        module.in_features, module.out_features = into, out
    else:
        module.in_channels, module.out_channels, module.groups = into, out, groups


def _grouped(flow: Layer, inputs: Tensor, outputs: Tensor) -> Kept:
    """Rows of the weight, and for each row the columns of its own group."""
    rows, columns = (inputs, outputs) if flow.transposed else (outputs, inputs)
    a_group = columns.view(flow.groups, -1)
    width = int(a_group.sum(1).max())
    group_of_row = ids(rows) // (len(rows) // flow.groups)
    local = torch.stack([ids(group) if bool(group.any()) else torch.zeros(width, dtype=torch.long) for group in a_group])
    return ids(rows), local[group_of_row]


def _replace_(module: nn.Module, name: str, kept: Kept) -> None:
    tensor = getattr(module, name)
    narrower = take(tensor.detach(), kept).clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, nn.Parameter):
        setattr(module, name, nn.Parameter(narrower, requires_grad=tensor.requires_grad))
    else:
        module.register_buffer(name, narrower, persistent=name not in module._non_persistent_buffers_set)
