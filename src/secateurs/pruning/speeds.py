"""How fast a smaller network is, in turns with the original one; and the law that nobody gets a slower network back."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from secateurs.graph.trace import Graph
from secateurs.pruning.context import PruningContext
from secateurs.pruning.results import LayerTime, MeasuredSpeed
from secateurs.speed.engines import Engine, TorchEngine, at_batch, batch_like
from secateurs.speed.nodes import aligning_share, by_module
from secateurs.speed.tables import LatencyModel
from secateurs.speed.timing import COMPARED_ROUNDS, SpeedUp, compare

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
    predicted = original * (1 - saved) if saved is not None and context.by_time else None
    aligning = aligning_share(graph, inputs)
    return MeasuredSpeed(
        *(speed.ratio, speed.low, speed.high, engine.batch, aligning, engine.name, original, pruned, predicted), busy=speed.busy
    )


def measured_speeds(
    context: PruningContext, graph: Graph, inputs: tuple[Tensor, ...], saved: float | None
) -> tuple[MeasuredSpeed, ...]:
    """The speed at the batch that is served first, then at single examples and other batches that people have."""
    limit = context.runtime.limit
    if context.by_time:
        engines = list(context.time_price.engines)
    else:
        engines = [context.runtime.engine or TorchEngine(len(inputs[0]), device=context.runtime.device)]
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


def judged(context: PruningContext, graph: Graph) -> dict[int, SpeedUp]:
    """The speed of a network at the batches at which time counts, in turns with the original one."""
    price = context.time_price
    return {
        engine.batch: price.compared(place, [price.loads[place], engine.network(graph)], FINAL_ROUNDS).speedups[0]
        for place, engine in enumerate(price.engines)
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
    if speed.engine != TorchEngine.name and context.by_time and isinstance(context.time_price.model, LatencyModel):
        model, widths = context.time_price.model, dict[str, int]()
        for name, gone in graph.plan.removed().items():
            if name in model.sites:
                widths[name] = sum(channel not in gone for channel in model.sites[name].original)
        before, after = model.by_layer({}), model.by_layer(widths)
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
