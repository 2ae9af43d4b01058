"""Cuts of all sites weighed by the time that they save: tables, a knapsack, and measured networks that correct both.

The tables add up layers, and sums that align channels; what lies between (activations, norms, pooling) is the rest of the
network's time, which gets less as channels and branches go. So networks are compacted and timed in the engine, in turns with
the original one: savings are scaled to what was measured, and the allocations are solved for again around it, with the layers
timed at the sizes they have there.

Time is weighed at the batch that is served, and watched at single examples: what saves most at the one may not be slower at the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from statistics import median
from typing import TYPE_CHECKING

from torch import Tensor

from secateurs.compaction import compact
from secateurs.criteria.ranking import Ranking, cuts_along
from secateurs.errors import EmptyLayer, RunError
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.pruning.engine_times import EngineTimes
from secateurs.pruning.price import macs
from secateurs.pruning.results import (
    ChosenAllocation,
    MeasuredSpeed,
    SiteCurve,
    SiteWidths,
    TimedAllocation,
    TimedBatches,
    TimeTable,
)
from secateurs.pruning.speeds import fastest
from secateurs.selection.allocation import Allocation, Curve, frontier
from secateurs.selection.knapsack import ascending, best_allocations
from secateurs.speed.engines import Engine, TorchEngine, at_batch, batch_like
from secateurs.speed.nodes import node_seconds
from secateurs.speed.sizes import Size, Sizing
from secateurs.speed.tables import SECONDS, LatencyModel, NetworkModel, Rounds, Sizes, TableFile, fast_widths
from secateurs.speed.timing import Compared, Load, compare, in_rounds
from secateurs.speed.widths import candidates

if TYPE_CHECKING:
    from secateurs.pruning.context import PruningContext

AIMS = (0.5, 0.85, 0.5)  # of the largest saving: what networks save that are timed before an allocation is chosen
PRICES = (2.0, 5.0)  # of folded branches, besides 1
CLOSE = 0.02  # relative error of the predicted time at which the tables are correct enough
WATCHED = (0.0, 0.5, 1.0)  # weights of single examples, until what saves time at the served batch takes none of theirs
SERVED = 64  # examples at once where the data do not say
LONGEST_SERVED = 1.0  # seconds: a batch that takes longer is timed at half of it
_TIMED_ROUNDS = (12, 24)  # of two networks in turns, to correct the tables
_MEASURED_ROUNDS = (5, 5)  # by a function of the user's own, which may take long
_FEW_WIDTHS = 6  # at which whole networks are timed, for each site


class TimePrice:
    """What cuts of the original network save in seconds, and the allocations that save most for what they lose.

    The price of time among those of `pruning.price`.
    """

    currency = "time"
    makes_up_for_branches = True

    def __init__(self, context: PruningContext) -> None:
        self.context, self.recipe, self.journal = context, context.recipe, context.journal
        assert context.runtime.engine is not None
        self.timed_in = [at_batch(context.runtime.engine, batch) for batch in self._batches()]
        self.engine = self.timed_in[0]

    # ---- conditions ------------------------------------------------------------------------------------------------------

    def _batches(self) -> tuple[int, ...]:
        """The batch sizes at which time counts, the one that is served first."""
        engine, planned = self.context.runtime.engine, self.context.planned_batches
        assert engine is not None
        if self.recipe.latency_batch is not None or not engine.runs_layers:
            return planned

        def choose() -> TimedBatches:
            served = planned[0]
            while served > 1:
                timer = at_batch(engine, served).network(self.context.original)()
                if median(in_rounds({0: timer}, rounds=1, shortest=0.0, threads=engine.threads)[0]) <= LONGEST_SERVED:
                    break
                served = max(served // 2, 1)
            return TimedBatches(tuple(dict.fromkeys((served, 1))))

        return self.journal.once_timed(TimedBatches, choose).batches

    @cached_property
    def file(self) -> TableFile:
        """The times that are known on this machine."""
        return TableFile(self.engine)

    @cached_property
    def loads(self) -> list[Load]:
        """The original network, prepared for every engine."""
        return [engine.network(self.context.original) for engine in self.timed_in]

    # ---- tables ----------------------------------------------------------------------------------------------------------

    @cached_property
    def times(self) -> list[EngineTimes]:
        """The tables of every engine, measured."""
        sites = [site for site in self.context.sites(self.context.original) if site.channels > 1]
        widths = {site.name: candidates(site.channels, self.context.round_to(site.name)) for site in sites}
        sizing, found = Sizing(self.context.original, sites), []
        if isinstance(self.engine, TorchEngine):
            sizing.weigh(self._ops())
        for place, engine in enumerate(self.timed_in):
            model = self._layers(engine, sizing, widths) if engine.runs_layers else self._networks(engine, sites, widths)
            found.append(EngineTimes(engine, model, self._original(place)))
        return found

    def _ops(self) -> dict[str, float]:
        """Seconds of every node of the original network in eager mode."""
        module, engine = self.context.original.module, self.engine
        names = [node.name for node in module.graph.nodes]

        def compute() -> dict[Size, Rounds]:
            found = node_seconds(module, batch_like(self.context.original, engine.batch))
            return {(place, 0, 0): (found[node],) for place, node in enumerate(module.graph.nodes)}

        return {names[place]: seconds for (place, _, _), (seconds,) in self._journaled("nodes", (), compute).items()}

    @property
    def model(self) -> LatencyModel | NetworkModel:
        """The tables at the batch that is served."""
        return self.times[0].model

    def _layers(self, engine: Engine, sizing: Sizing, widths: Mapping[str, Sequence[int]]) -> LatencyModel:
        model = LatencyModel(sizing, engine.batch)
        self._measure(engine, model, model.wanted(widths))
        model.measure_alignments(engine, widths, self.file, once=self._journaled)
        return model

    def _networks(self, engine: Engine, sites: Sequence[Site], widths: Mapping[str, Sequence[int]]) -> NetworkModel:
        model = NetworkModel(self.context.original, sites)
        share = (self.recipe.latency_seconds or SECONDS) / max(len(sites), 1)
        for done, (name, each) in enumerate(widths.items()):
            self.context.progress.report("times", done, len(sites))
            few = each[:: max(len(each) // _FEW_WIDTHS, 1)]
            compute = partial(model.measure, engine, name, few, share)
            model.keep(name, self._journaled(f"{name}, {self.context.shortcut}", [(width, width, 1) for width in few], compute))
        return model

    def _measure(self, engine: Engine, model: LatencyModel, sizes: Mapping[str, Sizes], phase: str = "times") -> None:
        """Time layers at these sizes, once."""

        def on_layer(done: int, of: int) -> None:
            before = self.timed_in.index(engine) * of
            self.context.progress.report(phase, before + done, len(self.timed_in) * of)

        model.measure(
            engine,
            sizes,
            self.file,
            seconds=self.recipe.latency_seconds or SECONDS,
            once=self._journaled,
            on_layer=on_layer,
        )

    def _journaled(
        self, of: str, wanted: Sequence[Size], compute: Callable[[], Mapping[Size, Rounds]]
    ) -> Mapping[Size, Rounds]:
        """The times of the `wanted` sizes, the full one first; none: of whatever `compute` measures.

        A size is measured once in a run, also for another shortcut position, and whatever happens in between. Sizes that are
        added are brought to the time of the full one before, which may be of a less busy hour, or of another machine.
        """
        tables, known = self.journal.of(TimeTable, of=of), dict[Size, Rounds]()
        for table in tables:
            known = dict(table.seconds) | known
        if not tables or not known.keys() >= set(wanted):

            def measure() -> TimeTable:
                found = dict(compute())
                full = wanted[0] if wanted else next(iter(found))
                scale = median(known[full]) / median(found[full]) if full in known else 1.0
                scaled = {size: tuple(scale * seconds for seconds in rounds) for size, rounds in found.items()}
                return TimeTable(of, len(tables), tuple(scaled.items()))

            known = dict(self.journal.once_timed(TimeTable, measure, of=of, round=len(tables)).seconds) | known
        return {size: known[size] for size in wanted} if wanted else known

    def _original(self, place: int) -> float:
        """Seconds of the original network at one of the batches, measured once."""

        def measure() -> TimedAllocation:
            seconds = self.compared(place, [self.loads[place]], _TIMED_ROUNDS).medians[0]
            return TimedAllocation(0, {}, seconds, seconds, seconds, self.timed_in[place].batch)

        return self.journal.once_timed(TimedAllocation, measure, round=0, batch=self.timed_in[place].batch).original

    def compared(self, place: int, loads: Sequence[Load], rounds: tuple[int, int]) -> Compared:
        """Networks timed in turns in one of the engines."""
        engine = self.timed_in[place]
        if not engine.runs_layers:
            return compare(loads, rounds=_MEASURED_ROUNDS, shortest=0.0, times_loaded=1, clock=engine.clock)
        return compare(loads, threads=engine.threads, rounds=rounds, clock=engine.clock)

    # ---- allocations -----------------------------------------------------------------------------------------------------

    def widths(self, removed: Mapping[str, int]) -> dict[str, int]:
        """The widths of the sites that lose filters."""
        return {name: self.model.sites[name].channels - m for name, m in removed.items() if m}

    def prepare(self) -> None:
        """Measure the tables."""
        assert self.times

    def widths_of(self, site: Site) -> tuple[int, ...] | None:
        """The numbers of filters that run fast at a site, measured once."""
        step = self.context.round_to(site.name)

        def measure() -> SiteWidths:
            widths, seconds = fast_widths(self.model, site, step)
            allowed = tuple(width for width in widths if width < site.channels)
            return SiteWidths(site.name, site.channels, allowed, tuple(seconds.items()), **self.context.at_node(site))

        known = {"site": site.name, "channels": site.channels, **self.context.at_node(site)}
        return self.journal.once(SiteWidths, measure, **known).widths

    def alone(self, site: Site, ranking: Ranking, counts: Sequence[int]) -> tuple[float, ...]:
        """What cuts of a site save alone, by the number of filters removed: shares of the layers' time in the tables."""
        widths = (int(keep.sum()) for keep in cuts_along(ranking.order, counts))
        seconds = [self.model.seconds({site.name: width}) for width in widths]
        return tuple((seconds[0] - each) / seconds[0] for each in seconds)

    def frontiers(self, curves: Mapping[str, SiteCurve]) -> dict[str, tuple[Allocation, ...]]:
        """The allocations of least predicted loss for every share of the time saved, from nothing removed on.

        Where branches can be folded, also with their losses multiplied; and those of least loss for the MACs saved. Everything
        measured is journaled, so that a resumed run finds the same ones.
        """
        for timed in self.journal.of(TimedAllocation, **self.context.of_position):
            if timed.round and any(name not in curves for name in timed.removed):
                raise RunError(
                    "journal.jsonl: a timed network does not fit the sites of this one. Restore the run from a copy, or start "
                    "a new one."
                )
        around: Mapping[str, int] = {}  # filters removed by the network that was timed last where most choices end
        found = self._solve(curves, around)
        for number, share_of_most in enumerate(AIMS, 1):
            chosen = found[aimed(found, self.target_share, share_of_most)]
            if not any(chosen.removed.values()):
                break
            try:
                timed = self._time(number, curves, chosen)
            except EmptyLayer:  # nothing of the input reaches the output; less may be cut
                continue
            if self.target_share is not None or share_of_most == AIMS[-1]:  # the others only tell how far tables are right
                around = timed.removed
            found = self._solve(curves, around)
            share, wanted = timed.seconds / timed.original, self.target_share
            close = abs(timed.predicted / timed.seconds - 1) <= CLOSE
            if close and (share <= wanted * (1 + CLOSE) if wanted is not None else number > 1):
                break
        dearer = PRICES if any(curve.curve.removed[-1] == len(curve.original) for curve in curves.values()) else ()
        by_price = {f"time, branches {price:g} times": self._solve(curves, around, price) for price in dearer}
        return {self.currency: found, **by_price, "MACs": self._by_macs(curves)}

    def _by_macs(self, curves: Mapping[str, SiteCurve]) -> tuple[Allocation, ...]:
        """What would be chosen by MACs, with the time that it saves.

        Time is solved for around one network, so it misses cuts that save nothing alone and much in pairs; all MACs save some.
        """
        counted, weighed = macs(self.context), list[Curve]()
        for name, curve in curves.items():
            site = self.context.site(self.context.original, name)
            assert site is not None
            weighed.append(replace(curve.curve, saved=counted.alone(site, curve.ranking, curve.curve.removed)))
        first_one, *others = frontier(weighed, self.context.branches(curves))
        timed = [replace(one, saved=self.times[0].saved(self.widths(one.removed))) for one in others]
        return ascending([first_one, *(one for one in timed if self._slower_alone(one) <= 0)])

    @property
    def target_share(self) -> float | None:
        """The share of the original network's time that may remain; None without a target. The smaller of two counts."""
        wanted = [] if self.recipe.target_latency is None else [self.recipe.target_latency]
        if self.recipe.max_ms is not None:
            wanted.append(self.recipe.max_ms / 1e3 / self._original(0))
        return min(wanted, default=None)

    def _solve(self, curves: Mapping[str, SiteCurve], around: Mapping[str, int], price: float = 1.0) -> tuple[Allocation, ...]:
        """The best allocations, when every other site is as in the network that was timed last.

        Savings are those at the served batch; where these cost time at single examples, their savings are mixed in until they
        do not. `price` multiplies what the loss rises by where a branch is folded.
        """
        self.context.progress.report("solve", 0, 1)
        best: tuple[Allocation, ...] = ()
        for weight in WATCHED if len(self.times) > 1 else (0.0,):
            found = self._solved(curves, around, price, weight)
            allowed = ascending([found[0], *(one for one in found[1:] if self._slower_alone(one) <= 0)])
            if not best or allowed[-1].saved > best[-1].saved:
                best = allowed
            reached = found[-1].saved / 2 if self.target_share is None else min(1 - self.target_share, found[-1].saved)
            if best[-1].saved >= reached:
                break
        return best

    def _slower_alone(self, one: Allocation) -> float:
        """What the other batches lose of their time, as a share; below 0 where all gain."""
        return max((-times.saved(self.widths(one.removed)) for times in self.times[1:]), default=0.0)

    def _solved(
        self, curves: Mapping[str, SiteCurve], around: Mapping[str, int], price: float, weight: float
    ) -> tuple[Allocation, ...]:
        weights = (1.0,) if len(self.times) == 1 else (1 - weight, weight)

        def saved(removed: Mapping[str, int]) -> float:
            widths = self.widths(removed)
            return math.fsum(w * times.saved(widths) for w, times in zip(weights, self.times, strict=True) if w)

        weighed = []
        for name, curve in curves.items():
            site, channels, first = self.context.site(self.context.original, name), len(curve.original), curve.curve.loss[0]
            assert site is not None
            fast = self.widths_of(site)
            losses = {
                m: first + price * (loss - first) if m == channels else loss
                for m, loss in zip(curve.curve.removed, curve.curve.loss, strict=True)
                if m in (0, channels) or fast is None or channels - m in fast
            }
            alone = {m: saved({**around, name: m}) for m in losses}
            savings = tuple(alone[m] - alone[0] for m in losses)
            weighed.append(Curve(name, tuple(losses), tuple(losses.values()), savings))

        without: dict[frozenset[str], float] = {}  # what is saved where none of some sites is cut

        def together(removed: Mapping[str, int]) -> float:
            """What cuts of the sites of one branch save together."""
            sites = frozenset(removed)
            if sites not in without:
                without[sites] = saved({**around, **dict.fromkeys(removed, 0)})
            return saved({**around, **removed}) - without[sites]

        first_one, *others = best_allocations(weighed, self.context.branches(curves), saved=together)
        by_served = [replace(one, saved=self.times[0].saved(self.widths(one.removed))) for one in others]
        return ascending([first_one, *by_served])

    def _time(self, number: int, curves: Mapping[str, SiteCurve], chosen: Allocation) -> TimedAllocation:
        """Compact the network by the allocation, time it in turns with the original one, once, and correct the tables by it."""
        context, own = self.context, self.context.of_position
        removed = {name: m for name, m in chosen.removed.items() if m}

        sites = {name: context.site(context.original, name) for name in removed}
        graph = structure(context, {name: curves[name].keep(removed[name], site) for name, site in sites.items() if site})
        found = []
        for place, times in enumerate(self.times):

            def measure(place: int = place, times: EngineTimes = times) -> TimedAllocation:
                context.progress.report("timed", place, len(self.times))
                smaller = times.engine.network(graph)
                original, seconds = self.compared(place, [self.loads[place], smaller], _TIMED_ROUNDS).medians
                predicted = original * (1 - times.saved(self.widths(removed)))
                return TimedAllocation(number, removed, predicted, original, seconds, times.engine.batch, **own)

            found.append(self.journal.once_timed(TimedAllocation, measure, round=number, batch=times.engine.batch, **own))
            widths = self.widths(found[-1].removed)
            if isinstance(times.model, LatencyModel):
                self._measure(times.engine, times.model, times.model.unmeasured(widths), "sizes")
            times.correct(found[-1], widths)
        return found[0]

    # ---- results ---------------------------------------------------------------------------------------------------------

    def paid(
        self,
        chosen: ChosenAllocation,
        allocations: Sequence[Allocation],
        passed: Mapping[int, float | None],
        network: Callable[[int], Graph],
    ) -> ChosenAllocation:
        """The choice, if it is faster than the original network (see `pruning.speeds`)."""
        return fastest(self, chosen, allocations, passed, network)

    def engines(self, batch: int) -> list[Engine]:
        """Those in which time counts."""
        return list(self.timed_in)

    def predicted(self, original: float, saved: float | None) -> float | None:
        """Seconds of the result, of the original network's and the share that was predicted to be saved."""
        return None if saved is None else original * (1 - saved)

    def layer_times(self, graph: Graph, speed: MeasuredSpeed) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
        """By the tables; eager mode is timed node by node instead."""
        if speed.engine == TorchEngine.name or not isinstance(self.model, LatencyModel):
            return None
        widths = dict[str, int]()
        for name, gone in graph.plan.removed().items():
            if name in self.model.sites:
                widths[name] = sum(channel not in gone for channel in self.model.sites[name].original)
        return self.model.by_layer({}), self.model.by_layer(widths)


def aimed(allocations: Sequence[Allocation], wanted: float | None, share: float = AIMS[-1]) -> int:
    """The index of the allocation that reaches the target first; without one, of the one with that `share` of the largest."""
    saving = share * allocations[-1].saved if wanted is None else 1 - wanted
    return next((i for i, one in enumerate(allocations) if one.saved >= saving), len(allocations) - 1)


def structure(context: PruningContext, masks: Mapping[str | Site, Tensor]) -> Graph:
    """The network without what the masks drop, with room for repairs if the recipe repairs; its weights are not repaired."""
    # a site without filters has no consumer left to repair: room for it would be a constant, which not every op can take
    names = [site.name if isinstance(site, Site) else site for site, keep in masks.items() if bool(keep.any())]
    return compact(context.original if context.recipe.repair == "none" else context.prepared(names), masks, verify=False)
