"""Every layer solved anew, in network order: from what it sees in the cut network it is to give what it gave in the original.

A layer whose output goes straight into a sum makes up for all that the sum lacks, so that errors do not add up along shortcuts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateurs._util.modules import Device
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.consumers import LastTerm, LayerConsumer, find_layers
from secateurs.graph.trace import Graph
from secateurs.repair.apply import write_
from secateurs.repair.observe import (
    GRAM_BYTES,
    ROWS,
    LayerTally,
    affine,
    channel_axis,
    converted,
    layer_fit,
    node_called,
    picked,
    running,
    tapped,
)
from secateurs.repair.reconstruction import Errors
from secateurs.repair.solve import gram_features, groups_of


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
    """Refit every layer of `graph`, in place, to what it gives in `original`, the network that it was cut from.

    Gives the errors before and after by layer. Layers with no bias and no BatchNorm behind, which have no place for a mean, and
    those whose Gram matrices would take more than `gram_bytes`, stay as they are, and are not in the result.
    """
    if len(examples) == 0:
        raise InvalidInput("refitting on no examples: wanted at least one.")
    errors = {}
    for reader, term in find_layers(graph):
        layer: Any = graph.module.get_submodule(reader.module)
        if (layer.bias is None and reader.norm is None) or 2 * 8 * groups_of(layer) * gram_features(layer) ** 2 > gram_bytes:
            continue
        lesson = _lesson(graph, original, reader, term)
        tally = LayerTally(layer, examples=len(examples), rows=rows, seed=seed)
        lesson.give(tally, examples, batch, device)
        fit = layer_fit(graph, reader, tally)
        weights, errors[reader.module], _ = fit.mend(torch.ones(0, dtype=torch.bool), None)
        write_(graph, weights)
    return errors


@dataclass(frozen=True)
class _Lesson:
    """What a layer sees and what it should give: `student` gives the first and all that `target` needs, `teacher` the rest."""

    student: Any
    teacher: Any
    target: Callable[[tuple[Tensor, ...], Tensor], Tensor]

    def give(self, tally: LayerTally, examples: Examples, batch: int, device: Device) -> None:
        first = 0
        with ExitStack() as stack:
            where = stack.enter_context(running(self.student, device))
            stack.enter_context(running(self.teacher, where))
            for inputs, _ in examples.batches(batch, device=where):
                seen, *more = self.student(inputs)
                tally.add(seen, self.target(tuple(more), self.teacher(inputs)[0]), first)
                first += len(inputs)


def _lesson(graph: Graph, original: Graph, reader: LayerConsumer, term: LastTerm | None) -> _Lesson:
    ours, theirs = spread_sums(graph.module), spread_sums(original.module)
    node = node_called(ours, reader.node)
    seen = node.all_input_nodes[0]
    if term is None:
        convert = converted(graph, original, reader)
        teacher = tapped(theirs, [node_called(theirs, reader.node, whose="original")])
        return _Lesson(tapped(ours, [seen]), teacher, lambda _, wanted: convert(wanted))
    student = tapped(ours, [seen, node, node_called(ours, term.end)])
    teacher = tapped(theirs, [node_called(theirs, term.node, whose="original")])
    chosen = picked(graph, original, term.end)
    axis, gain = channel_axis(graph.module.get_submodule(reader.module)), _gain(graph, reader)

    def target(given: tuple[Tensor, ...], wanted: Tensor) -> Tensor:
        """What the layer gives now, and what the sum lacks."""
        own, total = given
        whole = wanted if chosen is None else wanted.index_select(axis, chosen.to(wanted.device))
        lack = (whole - total).index_select(axis, term.place.to(total.device))
        return own + lack / gain.to(own).view([-1] + [1] * (-1 - axis))

    return _Lesson(student, teacher, target)


def _gain(graph: Graph, reader: LayerConsumer) -> Tensor:
    """What the BatchNorm behind a layer multiplies each channel by; infinite where it gives a constant: there nothing helps."""
    layer: Any = graph.module.get_submodule(reader.module)
    if reader.norm is None:
        return torch.ones(layer.weight.shape[0], dtype=torch.float64)
    gain, _ = affine(graph.module.get_submodule(reader.norm))
    return torch.where(gain.abs() > 1e-12 * gain.abs().max(), gain, torch.inf)
