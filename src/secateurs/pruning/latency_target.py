"""Cuts of all sites weighed by the time that they save: tables, a knapsack, and measured networks that correct both.

The tables add up layers; what lies between them (sums, aligned channels, memory) they do not know. So networks are compacted
and timed in the engine, in turns with the original one. The first, with all those cuts that make channels of sums differ, tells
what aligning them costs. Then that of one allocation: savings are scaled to what was measured, and the allocations are
solved for again around it, with the layers timed at the sizes they have there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from secateurs.compaction import compact
from secateurs.errors import RunError
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.pruning.context import PruningContext
from secateurs.pruning.results import LayerTime, MeasuredSpeed, SiteCurve, TimedAllocation
from secateurs.selection.allocation import Allocation
from secateurs.selection.knapsack import ascending, best_allocations
from secateurs.speed.engines import Engine, batch_like
from secateurs.speed.nodes import aligning_share, by_module
from secateurs.speed.tables import LatencyModel
from secateurs.speed.timing import COMPARED_ROUNDS, Compared, compare

CORRECTIONS = 3  # networks that are compacted and timed before an allocation is chosen
PRICES = (2.0, 5.0)  # of folded branches, besides 1
CLOSE = 0.02  # relative error of the predicted time at which the tables are correct enough
BATCHES = (1, 64)  # at which results are timed, besides that of the recipe
LONGEST_PASS = 3.0  # seconds: networks are not timed at batches that take longer
_TIMED_ROUNDS = (15, 30)  # of two networks in turns, to correct the tables
FINAL_ROUNDS = COMPARED_ROUNDS  # of the result
_MEASURED_ROUNDS = (5, 5)  # by a function of the user's own, which may take long


def timed_allocations(context: PruningContext, curves: Mapping[str, SiteCurve]) -> dict[float, tuple[Allocation, ...]]:
    """The allocations of least predicted loss for every share of the time saved, from nothing removed on.

    By the price of folded branches, by which their losses are multiplied; only 1 if none can be folded. Everything measured is
    journaled, so that a resumed run finds the same ones.
    """
    solver = _Solver(context, curves)
    solver.price_alignment()
    found = solver.solve()
    for number in range(2, CORRECTIONS + 2):
        chosen = found[aimed(found, target_share(context, number - 1))]
        if not any(chosen.removed.values()):
            break
        timed = solver.time(number, chosen)
        solver.correct(timed)
        found = solver.solve()
        share, wanted = timed.seconds / timed.original, target_share(context, number)
        if abs(timed.predicted / timed.seconds - 1) <= CLOSE and (wanted is None or share <= wanted * (1 + CLOSE)):
            break
    dearer = PRICES if any(curve.curve.removed[-1] == len(curve.original) for curve in curves.values()) else ()
    return {1.0: found} | {price: solver.solve(price) for price in dearer}


def target_share(context: PruningContext, rounds: int = CORRECTIONS + 1) -> float | None:
    """The share of the original network's time that may remain; None without a target. The smaller of two counts.

    Milliseconds are compared with what the original network took in the first `rounds` rounds.
    """
    recipe = context.recipe
    wanted = [recipe.target_latency] if recipe.target_latency is not None else []
    if recipe.max_ms is not None:
        _original(context)
        times = [
            timed.original for timed in context.journal.of(TimedAllocation, **context.of_position) if timed.round <= rounds
        ]
        wanted.append(recipe.max_ms / 1e3 / median(times))
    return min(wanted, default=None)


def _original(context: PruningContext) -> TimedAllocation:
    """The time of the original network, measured once."""

    def measure() -> TimedAllocation:
        (seconds,) = network_seconds(context, context.original)
        return TimedAllocation(0, {}, seconds, seconds, seconds, **context.of_position)

    return context.journal.once_timed(TimedAllocation, measure, round=0, **context.of_position)


def network_seconds(context: PruningContext, *graphs: Graph) -> tuple[float, ...]:
    """Seconds of networks in the engine, run in turns."""
    return compared(context, context.engine, graphs, _TIMED_ROUNDS).medians


def compared(context: PruningContext, engine: Engine, graphs: Sequence[Graph], rounds: tuple[int, int]) -> Compared:
    """Networks timed in an engine, in turns."""
    known = engine is context.engine
    loads = [context.original_load if known and graph is context.original else engine.network(graph) for graph in graphs]
    if not engine.runs_layers:
        return compare(loads, rounds=_MEASURED_ROUNDS, shortest=0.0, times_loaded=1, clock=engine.clock)
    return compare(loads, threads=engine.threads, rounds=rounds, clock=engine.clock)


def measured_speed(
    context: PruningContext, engine: Engine, graph: Graph, inputs: tuple[Tensor, ...], saved: float | None
) -> MeasuredSpeed:
    """Time the smaller network in an engine, in turns with the original one; `saved` is the share that was predicted."""
    found = compared(context, engine, (context.original, graph), FINAL_ROUNDS)
    (speed,), (original, pruned) = found.speedups, found.medians
    predicted = original * (1 - saved) if saved is not None and context.by_time else None
    aligning = aligning_share(graph, inputs)
    return MeasuredSpeed(
        *(speed.ratio, speed.low, speed.high, engine.batch, aligning, engine.name, original, pruned, predicted), busy=speed.busy
    )


def layer_times(context: PruningContext, engine: Engine, graph: Graph, speed: MeasuredSpeed) -> tuple[LayerTime, ...]:
    """Seconds of every layer in the original network and in the smaller one, and of all else, as an entry without a name.

    By the tables where cuts were weighed by time in an engine that runs layers; otherwise layer by layer in eager mode.
    """
    if not engine.runs_layers:
        return ()
    if context.by_time and isinstance(context.latency_model, LatencyModel):
        model, kept = context.latency_model, dict[str, Tensor]()
        for name, gone in graph.plan.removed().items():
            if name in model.sites:
                kept[name] = torch.tensor([channel not in gone for channel in model.sites[name].original])
        before, after = (model.by_layer(masks) for masks in ({}, kept))
    else:
        before = by_module(context.original, batch_like(context.original, engine.batch), speed.original or 0.0)
        after = by_module(graph, batch_like(graph, engine.batch), speed.pruned or 0.0)
    each = [LayerTime(name, seconds, after.get(name, 0.0)) for name, seconds in before.items()]
    rest = [
        max((whole or 0.0) - math.fsum(found.values()), 0.0)
        for whole, found in ((speed.original, before), (speed.pruned, after))
    ]
    return (*each, LayerTime("", rest[0], rest[1]))


def aimed(allocations: Sequence[Allocation], wanted: float | None) -> int:
    """The index of the allocation that reaches the target first; without one, of the one with half of the largest saving."""
    saving = allocations[-1].saved / 2 if wanted is None else 1 - wanted
    return next((i for i, one in enumerate(allocations) if one.saved >= saving), len(allocations) - 1)


class _Solver:
    """The tables of a run, and what measured networks taught about them."""

    def __init__(self, context: PruningContext, curves: Mapping[str, SiteCurve]) -> None:
        self.context, self.curves, self.model = context, curves, context.latency_model
        self.around: Mapping[str, int] = {}  # filters removed by the network that was timed last
        # what a second saved in the tables saves of the whole: less than its share where other work takes time too
        self.scale = 1 / max(_original(context).original, self.model.seconds({}))
        self.price = 0.0  # share of the time that an aligned element of a sum costs
        for timed in context.journal.of(TimedAllocation, **context.of_position):
            if timed.round and any(name not in curves for name in timed.removed):
                raise RunError(
                    "journal.jsonl: a timed network does not fit the sites of this one. Restore the run from a copy, or start "
                    "a new one."
                )

    def masks(self, removed: Mapping[str, int]) -> dict[str, Tensor]:
        """What is kept at the sites that lose filters."""
        found = {}
        for name, m in removed.items():
            site = self.model.sites[name]
            if m:
                found[name] = self.curves[name].keep(m, site)
        return found

    def saved(self, removed: Mapping[str, int]) -> float:
        """Predicted share of the original network's time that is saved."""
        masks = self.masks(removed)
        saved = self.scale * (self.model.seconds({}) - self.model.seconds(masks))
        return saved - self.price * self.model.aligned(masks) if self.price else saved

    def price_alignment(self) -> None:
        """Time the network with all those sites cut whose cuts alone make channels of sums differ, as round 1; if any."""
        most = {name: max(m for m in curve.curve.removed if m < len(curve.original)) for name, curve in self.curves.items()}
        aligning = {name: m for name, m in most.items() if m and self.model.aligned(self.masks({name: m}))}
        if aligning:
            timed = self.time(1, Allocation(aligning, self.saved(aligning), 0.0))
            masks = self.masks(timed.removed)
            excess = self.saved(timed.removed) - (1 - timed.seconds / timed.original)
            self.price = max(excess, 0.0) / self.model.aligned(masks)

    def solve(self, price: float = 1.0) -> tuple[Allocation, ...]:
        """The best allocations, when every other site is as in the network that was timed last.

        `price` multiplies what the loss rises by where a branch is folded.
        """
        curves = []
        for name, curve in self.curves.items():
            points = [self.saved({**self.around, name: m}) for m in curve.curve.removed]
            folded = [m == len(curve.original) for m in curve.curve.removed]
            start = curve.curve.loss[0]
            losses = [
                start + price * (loss - start) if gone else loss for loss, gone in zip(curve.curve.loss, folded, strict=True)
            ]
            curves.append(replace(curve.curve, loss=tuple(losses), saved=tuple(point - points[0] for point in points)))

        def together(removed: Mapping[str, int]) -> float:
            """What cuts of the sites of one branch save together."""
            return self.saved({**self.around, **removed}) - self.saved({**self.around, **dict.fromkeys(removed, 0)})

        first, *others = best_allocations(curves, self.context.branches(self.curves), saved=together)
        return ascending([first, *(replace(one, saved=self.saved(one.removed)) for one in others)])

    def time(self, number: int, chosen: Allocation) -> TimedAllocation:
        """Compact the network by the allocation and time it in turns with the original one, once."""
        context = self.context

        def measure() -> TimedAllocation:
            context.progress.report("times", number - 1, CORRECTIONS + 1)
            masks: dict[str | Site, Tensor] = dict(self.masks(chosen.removed).items())
            smaller = structure(context, masks)
            original, seconds = network_seconds(context, context.original, smaller)
            removed = {name: m for name, m in chosen.removed.items() if m}
            return TimedAllocation(number, removed, original * (1 - chosen.saved), original, seconds, **context.of_position)

        return context.journal.once_timed(TimedAllocation, measure, round=number, **context.of_position)

    def correct(self, timed: TimedAllocation) -> None:
        """Time the layers at the sizes of that network, and scale savings to what was measured."""
        self.around, masks = timed.removed, self.masks(timed.removed)
        if isinstance(self.model, LatencyModel):
            self.context.time_layers(self.model, self.model.sizes(masks), timed.round)
        tables = self.model.seconds({}) - self.model.seconds(masks)
        measured = 1 - timed.seconds / timed.original + self.price * self.model.aligned(masks)
        if tables > 0:
            self.scale = max(measured, 0.0) / tables  # 0: such cuts save nothing, so none is made


def structure(context: PruningContext, masks: Mapping[str | Site, Tensor]) -> Graph:
    """The network without what the masks drop, with room for repairs if the recipe repairs; its weights are not repaired."""
    names = [site.name if isinstance(site, Site) else site for site in masks]
    return compact(context.original if context.recipe.repair == "none" else context.prepared(names), masks, verify=False)
