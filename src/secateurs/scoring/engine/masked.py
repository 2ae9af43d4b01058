"""Slopes of the loss along all channels of a site at once: one pass back through the suffix."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateurs._util.modules import Device
from secateurs.data.dataset import Examples, map_targets
from secateurs.errors import InvalidInput, InvalidMask
from secateurs.graph.masking import split_at
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, total
from secateurs.scoring.engine.autotune import default_form, is_right, race
from secateurs.scoring.engine.memory import default_budget, memory_of
from secateurs.scoring.engine.split import SplitNetwork, check_replacements, prepare
from secateurs.scoring.engine.strategies import MaskedForward, MaskingStrategy, SiteActivations, check_form
from secateurs.scoring.engine.workers import CachedBatch, CachedBatches, Task, WorkerPool, one_thread


@dataclass(frozen=True, eq=False)
class Slopes:
    """Losses under masks, and how each changes with the mask's own values."""

    losses: Tensor  # (N,) float64: example n under mask n
    slopes: Tensor  # (N, C) float64: dloss_n / dmask_nc, for kept and masked channels alike


def joined(parts: Sequence[Slopes]) -> Slopes:
    """Those of several chunks, one after the other."""
    return Slopes(torch.cat([part.losses for part in parts]), torch.cat([part.slopes for part in parts]))


def slopes_of(way: MaskedForward, chunk: CachedBatch, masks: Tensor, loss_fn: Measure) -> Slopes:
    """Losses and slopes of a chunk's n examples, each under its own of `masks` (n, C)."""
    losses, slopes, start = [], [], 0
    for piece in way.pieces(chunk.arrival):
        rows = slice(start, start + len(piece.activations))
        factors = masks[rows].to(piece.activations.dtype).requires_grad_()
        with torch.enable_grad():
            outputs = way.differentiable(_masked(way, piece, factors), *piece.carried)
            targets = map_targets(lambda part, rows=rows: part[rows], chunk.targets)  # type: ignore[misc]  # bound at once
            found = per_example(loss_fn(outputs, targets), len(factors))
            slopes.append(_backward(found.sum(), factors))
        losses.append(found.detach())
        start = rows.stop
    return Slopes(torch.cat(losses).cpu(), torch.cat(slopes).cpu().double())


def per_example(values: Tensor, count: int) -> Tensor:
    """One float64 value for each of `count` examples, the mean over further dimensions."""
    if values.ndim == 0 or len(values) != count:
        raise InvalidInput(
            f"a loss or metric gave a tensor of shape {tuple(values.shape)} for {count} examples: wanted one value for each "
            f"example, not their mean. A loss of torch does that with reduction='none'; one that gives only a mean works with "
            f"estimator = 'losses', adaptive = false and scoring_examples = 'all' or a number."
        )
    return values.double().reshape(count, -1).mean(1)


def _masked(way: MaskedForward, piece: SiteActivations, factors: Tensor) -> Tensor:
    """Each example times its own mask, with the fill where the mask is zero."""
    shape = [len(factors)] + [1] * (piece.activations.ndim - 1)
    shape[way.parts.axis] = -1
    masked = piece.activations * factors.view(shape)
    fill = way.parts.fill
    return masked if fill is None else masked + ((1 - factors) * fill.to(factors.dtype)).view(shape)


def _backward(loss: Tensor, factors: Tensor) -> Tensor:
    if not loss.requires_grad:
        raise InvalidInput("the loss has no slope: it does not depend on the outputs in a differentiable way.")
    (found,) = torch.autograd.grad(loss, factors, materialize_grads=True)
    return found


Weights = Callable[[Tensor], Mapping[str, Tensor]]
"""Takes a mask (C,), gives the tensors, by their names in the graph's module, that replace those behind the site."""

Given = dict[str, Tensor]
Summary = Callable[[Any, CachedBatch], Tensor]

RACED_MASKS = 16  # at most so many different ones in a race


def split_for(
    graph: Graph,
    site: Site,
    examples: Examples,
    *,
    batch: int = 256,
    device: Device = None,
    cache_bytes: int | None = None,
    form: MaskingStrategy | None = None,
    announced: int = 0,
    unfolded: Collection[str] = (),
    fill: Tensor | None = None,
) -> MaskedNetwork:
    """The network of `graph`, as it is now, split at `site`, to be measured on `examples` in batches of `batch`.

    `cache_bytes`: for activations that are kept; None: a quarter of the memory that is free. `form`: one that an earlier
    network had, to measure in the same way. `announced`: how many masks will be measured in all; where it is worth it the
    form is then found by a race, otherwise it follows a rule. `unfolded`: modules that `weights` will replace tensors of.
    `fill` (C,): what a masked channel holds instead of zero.
    """
    if len(examples) == 0:
        raise InvalidInput(f"site {site.name!r}: no examples to measure on, wanted at least one.")
    if batch < 1:
        raise InvalidInput(f"batch size {batch}: wanted at least 1")
    if fill is not None and fill.shape != (site.channels,):
        raise InvalidInput(f"fill of site {site.name!r}: shape {tuple(fill.shape)}, wanted ({site.channels},).")
    few = examples.batch(slice(0, 3)).inputs
    parts = prepare(split_at(graph, site), few, channels=site.channels, device=device, unfolded=unfolded, fill=fill)
    if form is not None:
        check_form(parts, form)
    budget = default_budget(parts.device) if cache_bytes is None else cache_bytes
    return MaskedNetwork(parts, CachedBatches(examples, batch, budget, parts.device), form, announced)


class MaskedNetwork:
    """A network split at a site, ready to be measured under many masks over one set of examples.

    It holds private copies: later changes of the user's module do not show. On a CPU the work is shared out to as many
    threads as torch uses; measures are then called from any of them. Losses do not depend on the number of threads.
    """

    form: MaskingStrategy | None
    """How it measures: None until it has."""

    def __init__(self, parts: SplitNetwork, chunks: CachedBatches, form: MaskingStrategy | None, announced: int) -> None:
        self.form = form
        self._parts, self._chunks, self._announced = parts, chunks, announced
        self._crew: WorkerPool | None = None

    def measure(self, masks: Tensor, measures: Sequence[Measure], *, weights: Weights | None = None) -> Tensor:
        """Mean of each measure over the examples under each mask: masks (M, C) to float64 (M, number of measures).

        With `weights`, the network under a mask has the tensors that it gives for the mask instead of its own.
        """

        def sums(outputs: Any, chunk: CachedBatch) -> Tensor:
            return torch.stack([total(m(outputs, chunk.targets), chunk.examples) for m in measures])

        found = torch.stack(self._measured(masks, sums, weights))
        return found.sum(0).reshape(len(masks), len(measures)) / len(self._chunks.examples)

    def values(self, masks: Tensor, measure: Measure, *, weights: Weights | None = None) -> Tensor:
        """The measure of each example under each mask: masks (M, C) to float64 (M, N)."""

        def each(outputs: Any, chunk: CachedBatch) -> Tensor:
            return per_example(measure(outputs, chunk.targets).detach().cpu(), chunk.examples)

        return torch.cat(self._measured(masks, each, weights), 1)

    def slopes(self, turns: Sequence[Tensor], loss_fn: Measure) -> list[Slopes]:
        """In every turn, of masks (N, C), the loss of each example n under its own mask n, and its slope along every channel.

        `loss_fn` must give one value for each example. A turn takes one pass forward and one back for each chunk.
        """
        for masks in turns:
            self._check(masks, len(self._chunks.examples))
        placed = [masks.to(self._parts.device) for masks in turns]
        found: dict[Task, Slopes] = {}

        def work(way: MaskedForward, chunk: CachedBatch, task: Task) -> None:
            number, turn = task
            start = number * self._chunks.batch
            found[task] = slopes_of(way, chunk, placed[turn][start : start + chunk.examples], loss_fn)

        crew = self._crew_for(self.form or default_form(self._parts, self._chunks.batch, totals=False))
        crew.work_through(work, len(turns))
        return [joined([found[number, turn] for number in range(len(self._chunks))]) for turn in range(len(turns))]

    def _measured(self, masks: Tensor, summary: Summary, weights: Weights | None) -> list[Tensor]:
        """The summary of each mask's outputs, for each chunk (M, …)."""
        self._check(masks)
        masks = masks.to(self._parts.device)
        crew = self._crew_for(self.form or self._chosen(masks))
        self.form = crew.form
        if weights is None:
            return _run(crew, _groups(masks, crew.form.masks_per_pass), None, summary, len(masks))
        found = [_run(crew, list(some[:, None]), given, summary, len(given)) for some, given in self._repaired(masks, weights)]
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _repaired(self, masks: Tensor, weights: Weights) -> Iterator[tuple[Tensor, list[Given]]]:
        """Masks with the tensors given for each, as many at a time as fit into a quarter of the budget."""
        given: list[Given] = []
        first = 0
        for number, mask in enumerate(masks):
            given.append(check_replacements(self._parts, weights(mask)))
            size = memory_of(t for one in given for t in one.values())
            if number + 1 == len(masks) or size + size // len(given) > self._chunks.budget // 4:
                yield masks[first : number + 1], given
                first, given = number + 1, []

    def _chosen(self, masks: Tensor) -> MaskingStrategy:
        """The form by rule, if it is right for this network, or the winner of a race on the first chunk."""
        parts, batch = self._parts, self._chunks.batch
        form = default_form(parts, batch)
        with one_thread(parts.device), torch.no_grad():
            crew = self._crew_for(form)
            arrival = crew.first_arrival()
            if len(masks) and not is_right(crew.way, arrival, masks):
                return MaskingStrategy(rows=batch)
            work = self._announced * len(self._chunks)
            return race(parts, form, arrival, masks[:RACED_MASKS], passes=work) if work else form

    def _crew_for(self, form: MaskingStrategy) -> WorkerPool:
        """Those who work in that form; chunks that were kept for another one are forgotten."""
        if self._crew is None or self._crew.form != form:
            keeps = self._crew is not None and self._crew.form.masking == form.masking
            if not keeps:
                self._chunks.clear()
            self._crew = WorkerPool(self._parts, form, self._chunks)
        return self._crew

    def _check(self, masks: Tensor, count: int | None = None) -> None:
        wanted = (len(masks) if count is None else count, self._parts.channels)
        if masks.dtype != torch.bool or masks.shape != wanted:
            raise InvalidMask(
                f"masks: got {masks.dtype} of shape {tuple(masks.shape)}, wanted bool ({'M' if count is None else count}, "
                f"{self._parts.channels}), True = kept."
            )


def _groups(masks: Tensor, size: int) -> list[Tensor]:
    """Masks `size` at a time; the last one again to fill up, since a kernel may round otherwise for another size."""
    filled = torch.cat([masks, masks[-1:].expand(-len(masks) % size, -1)])
    return [filled[start : start + size] for start in range(0, len(filled), size)]


def _run(crew: WorkerPool, groups: Sequence[Tensor], given: list[Given] | None, summary: Summary, count: int) -> list[Tensor]:
    """The summary of the outputs of `count` masks, in groups, for each chunk; what is `given` for a mask replaces weights."""
    found: dict[Task, list[Tensor]] = {}

    def work(way: MaskedForward, chunk: CachedBatch, task: Task) -> None:
        group = task[1]
        outputs = way.outputs(chunk.arrival, groups[group], None if given is None else given[group])
        found[task] = [summary(one, chunk) for one in outputs]

    crew.work_through(work, len(groups))
    rows = [[row for group in range(len(groups)) for row in found[number, group]] for number in range(len(crew.chunks))]
    return [torch.stack(row[:count]) if row else torch.zeros(0, 0, dtype=torch.float64) for row in rows]
