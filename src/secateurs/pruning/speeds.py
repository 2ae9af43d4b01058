"""How fast a smaller network is, in turns with the original one; and the law that nobody gets a slower network back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from secateurs.graph.trace import Graph
from secateurs.pruning.results import ChosenAllocation, LayerTime, MeasuredSpeed, SiteWidths, SpeedTrial
from secateurs.selection.allocation import Allocation
from secateurs.speed.engines import Engine, at_batch, batch_like
from secateurs.speed.nodes import aligning_share, by_module
from secateurs.speed.timing import COMPARED_ROUNDS, SpeedUp, compare

if TYPE_CHECKING:
    from secateurs.pruning.context import PruningContext
    from secateurs.pruning.time_price import TimePrice

_MOST_TIMED = 4  # allocations that are timed against the original network before it is returned as it was
BATCHES = (1, 64)  # at which results are timed, besides those at which time counts
LONGEST_PASS = 3.0  # seconds: networks are not timed at batches that take longer
FINAL_ROUNDS = COMPARED_ROUNDS  # of the result
_MEASURED_ROUNDS = (5, 5)  # by a function of the user's own, which may take long


def measured_speed(
    context: PruningContext, engine: Engine, graph: Graph, inputs: tuple[Tensor, ...], saved: float | None
) -> MeasuredSpeed:
    """Time the smaller network in an engine, in turns with the original one; `saved` is the share that was predicted."""
    loads = [engine.network(context.original), engine.network(graph)]
    if engine.runs_layers:
        found = compare(loads, threads=engine.threads, rounds=FINAL_ROUNDS, clock=engine.clock)
    else:
        found = compare(loads, rounds=_MEASURED_ROUNDS, shortest=0.0, times_loaded=1, clock=engine.clock)
    (speed,), (original, pruned) = found.speedups, found.medians
    predicted = context.price.predicted(original, saved)
    aligning = aligning_share(graph, inputs)
    return MeasuredSpeed(
        *(speed.ratio, speed.low, speed.high, engine.batch, aligning, engine.name, original, pruned, predicted), busy=speed.busy
    )


def measured_speeds(
    context: PruningContext, graph: Graph, inputs: tuple[Tensor, ...], saved: float | None
) -> tuple[MeasuredSpeed, ...]:
    """The speed at the batch that is served first, then at single examples and other batches that people have."""
    limit = context.runtime.limit
    engines = context.price.engines(len(inputs[0]))
    every = [*engines, *(at_batch(engines[0], batch) for batch in BATCHES if engines[0].runs_layers)]
    by_batch = {engine.batch: engine for engine in reversed(every)}  # of two at one batch the first counts
    others = [by_batch[batch] for batch in dict.fromkeys(engine.batch for engine in every[1:]) if batch != every[0].batch]
    context.progress.report("timing", 0, 1 + len(others))
    first = measured_speed(context, engines[0], graph, inputs, saved)
    rest = list[MeasuredSpeed]()
    for number, engine in enumerate(others, 1):
        context.progress.report("timing", number, 1 + len(others))
        longest = (first.original or 0.0) * engine.batch / engines[0].batch
        if limit.within(engine.batch) == engine.batch and longest < LONGEST_PASS:
            rest.append(measured_speed(context, engine, graph, inputs, None))
    return (first, *rest)


def fastest(
    price: TimePrice,
    chosen: ChosenAllocation,
    allocations: Sequence[Allocation],
    passed: Mapping[int, float | None],
    network: Callable[[int], Graph],
) -> ChosenAllocation:
    """The allocation chosen, if it is faster than the original network; else the next of those that may be lost that is.

    Where none is, nothing is removed, and the note says so: nobody gets a slower network back. `passed` are the allocations
    that are within the allowed drop, with their bounds.
    """

    context = price.context
    if len(allocations) == 1:
        return _unchanged(price, chosen, "no cut that was weighed saves time in")
    if not any(chosen.removed.values()):
        return chosen

    def timed(place: int) -> SpeedTrial:
        if known := context.journal.of(SpeedTrial, place=place):
            return known[0]
        smaller = network(place)  # made by all workers together; the first one times it
        measure = lambda: SpeedTrial(place, tuple(judged(price, smaller).items()))  # noqa: E731
        return context.journal.once_timed(SpeedTrial, measure, place=place)

    tried = []
    smaller = sorted((place for place in passed if 0 < place < chosen.place), reverse=True)
    for number, place in enumerate([chosen.place, *smaller][:_MOST_TIMED]):
        context.progress.report("faster", number, number + 1)
        trial = timed(place)
        if is_faster(dict(trial.speeds)):
            if place == chosen.place:
                return chosen
            one = allocations[place]
            return replace(
                chosen, removed=dict(one.removed), saved=one.saved, loss=one.predicted_loss, bound=passed[place], place=place
            )
        tried.append(trial)
    return _unchanged(price, chosen, "nothing within the allowed drop is measurably faster in", tried[0].summary())


def _unchanged(price: TimePrice, chosen: ChosenAllocation, what: str, measured: str = "") -> ChosenAllocation:
    """Nothing is removed; the note says why, with the sites that no width makes faster, and what to try."""
    steady = list(dict.fromkeys(widths.site for widths in price.journal.of(SiteWidths) if not widths.widths))
    still = f"no width is faster at {', '.join(steady[:3])}{', …' * (len(steady) > 3)}" if steady else ""
    why = "; ".join(filter(None, (measured, still)))
    more = "allow a larger max_drop, train after the cuts (retrain='gentle'), " if measured else ""
    engine = "eager mode" if price.engine.name == "torch" else price.engine.name
    note = (
        f"{what} {engine}{f' ({why})' * bool(why)}, so the network is returned as it was: {more}name the engine that will run "
        f"it, or give a target in macs"
    )
    return replace(chosen, removed={}, saved=0.0, loss=0.0, bound=None, place=0, note=note)


def judged(price: TimePrice, graph: Graph) -> dict[int, SpeedUp]:
    """The speed of a network at the batches at which time counts, in turns with the original one."""
    return {
        engine.batch: price.compared(place, [price.loads[place], engine.network(graph)], FINAL_ROUNDS).speedups[0]
        for place, engine in enumerate(price.timed_in)
    }


def is_faster(speeds: Mapping[int, SpeedUp]) -> bool:
    """The law: measurably faster at one of the batches, and measurably slower at none."""
    return any(speed.low > 1 for speed in speeds.values()) and all(speed.high >= 1 for speed in speeds.values())


def layer_times(context: PruningContext, graph: Graph, speed: MeasuredSpeed) -> tuple[LayerTime, ...]:
    """Seconds of every layer in the original network and in the smaller one, and of all else, as an entry without a name.

    Node by node in eager mode; by the tables where cuts were weighed by time in another engine that runs layers. Both add up to
    the seconds of the whole networks.
    """
    whole = (speed.original or 0.0, speed.pruned or 0.0)
    if (known := context.price.layer_times(graph, speed)) is not None:
        before, after = known
    elif context.runtime.engine is None or context.runtime.engine.runs_layers:
        before = by_module(context.original, batch_like(context.original, speed.batch), whole[0])
        after = by_module(graph, batch_like(graph, speed.batch), whole[1])
    else:
        return ()
    before, after = (_within(found, seconds) for found, seconds in zip((before, after), whole, strict=True))
    each = [LayerTime(name, seconds, after.get(name, 0.0)) for name, seconds in before.items()]
    rest = [seconds - math.fsum(found.values()) for found, seconds in zip((before, after), whole, strict=True)]
    return (*each, LayerTime("", rest[0], rest[1]))


def _within(found: Mapping[str, float], whole: float) -> dict[str, float]:
    """The layers' seconds; less of each where they add up to more than the whole, as layers do that are timed alone."""
    scale = min(1.0, whole / max(math.fsum(found.values()), 1e-12))
    return {name: scale * seconds for name, seconds in found.items()}
