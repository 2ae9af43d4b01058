"""Modules with fewer channels: their tensors and their counts, in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.compaction.state import replace_
from secateurs.graph.channels import Kept, all_of, ids
from secateurs.graph.flow import Channelwise, Layer, Norm
from secateurs.graph.weight_norm import narrow_weight_norm_, weight_norm_of

Survivors = Iterator[tuple[str, Kept]]


def balanced(flow: Layer, carried: Tensor, live: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return layouts of a grouped layer's inputs and outputs with as many channels in each group, and the number of groups.

    A group without live filters is removed, unless the layer reads along another axis than its input's channels, which cannot
    be aligned. In the other groups dead channels stay where another group has more live ones.
    """
    outs, ins = live.view(flow.groups, -1), carried.view(flow.groups, -1)
    alive = all_of(flow.groups) if flow.reads_all else outs.any(1)
    outs, ins = _fill(outs, alive), _fill(ins, alive)
    return ins.flatten(), outs.flatten(), int(alive.sum())


def _fill(layout: Tensor, alive: Tensor) -> Tensor:
    """Fill the rows of live groups up to the fullest row (at least 1) with their first free channels."""
    layout = layout & alive[:, None]
    width = max(int(layout.sum(1).max()), 1)
    result = layout.clone()
    for row in ids(alive).tolist():
        missing = width - int(layout[row].sum())
        result[row, ids(~layout[row])[:missing]] = True
    return result


def narrow_channelwise_(module: nn.Module, flow: Channelwise, layout: Tensor) -> Survivors:
    """Narrow a module in place to the channels in `layout`; yields the tensors' names and the entries that remain."""
    kept = (ids(layout),)
    for name in flow.params:
        if getattr(module, name, None) is not None:
            replace_(module, name, kept)
            yield name, kept
    if flow.count is not None:
        setattr(module, flow.count, int(layout.sum()))


def narrow_embedding_(module: Any, layout: Tensor) -> Survivors:
    """Narrow an embedding in place to the features in `layout`; yields the name of its table and the entries that remain."""
    kept = (None, ids(layout))
    replace_(module, "weight", kept)
    yield "weight", kept
    module.embedding_dim = int(layout.sum())


def narrow_norm_(module: Any, flow: Norm, layout: Tensor) -> Survivors:
    """Narrow a LayerNorm, RMSNorm or GroupNorm in place to the channels in `layout`; yields names and remaining entries."""
    kept = (*(None,) * flow.along, ids(layout))
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None:
            replace_(module, name, kept)
            yield name, kept
    if isinstance(module, nn.GroupNorm):
        module.num_channels, module.num_groups = int(layout.sum()), int(layout.view(flow.groups, -1).any(1).sum())
    else:
        shape = list(module.normalized_shape)
        shape[flow.along] = int(layout.sum())
        module.normalized_shape = tuple(shape)


def narrow_layer_(module: Any, flow: Layer, inputs: Tensor, outputs: Tensor, groups: int) -> Survivors:
    """Narrow a layer in place to the filters in `outputs` and the channels in `inputs`, equally many in every group.

    Yields the tensors' names and the entries that remain.
    """
    kept = _grouped(flow, inputs, outputs) if flow.groups > 1 else (ids(outputs), ids(inputs))
    if flow.transposed and flow.groups == 1:
        kept = (kept[1], kept[0])
    if weight_norm_of(module) is not None:
        yield from narrow_weight_norm_(module, kept)
    else:
        replace_(module, "weight", kept)
        yield "weight", kept
    if module.bias is not None:
        replace_(module, "bias", (ids(outputs),))
        yield "bias", (ids(outputs),)
    into, out = int(inputs.sum()), int(outputs.sum())
    if isinstance(module, nn.Linear):
        module.in_features, module.out_features = into, out
    else:
        module.in_channels, module.out_channels, module.groups = into, out, groups


def _grouped(flow: Layer, inputs: Tensor, outputs: Tensor) -> Kept:
    """Return the rows of the weight, and for each row the columns of its group."""
    rows, columns = (inputs, outputs) if flow.transposed else (outputs, inputs)
    a_group = columns.view(flow.groups, -1)
    width = int(a_group.sum(1).max())
    group_of_row = ids(rows) // (len(rows) // flow.groups)
    local = torch.stack([ids(group) if bool(group.any()) else torch.zeros(width, dtype=torch.long) for group in a_group])
    return ids(rows), local[group_of_row]
