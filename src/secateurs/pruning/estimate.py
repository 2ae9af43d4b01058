"""Roughly how long a run takes, and how much memory, before it starts; and a cheaper recipe where it takes too long.

The time is that of the phases of the run, each priced by its units: passes through the network, whose speed is measured,
surgery, of which a cut is measured, and timers, which run for as long as they are told to. The memory is that of the largest
things that are alive together: networks, cached activations, a batch on its way, and the moments of a repair.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import median

import torch

from secateurs._util.format import size
from secateurs._util.modules import device_of, eval_mode, on_device
from secateurs._util.terminal import clock
from secateurs.compaction import compact
from secateurs.config import MOST_PAIRS, REFITTED, Recipe, Shortcut, TrainSettings
from secateurs.criteria import passes_of
from secateurs.data.splits import Data
from secateurs.errors import EmptyLayer, InvalidInput
from secateurs.graph.cost import ROOT, WEIGHTED, cost
from secateurs.graph.masking import copied
from secateurs.graph.node_info import shape_of
from secateurs.graph.sites import Site, find_sites
from secateurs.graph.structure import is_bypassed
from secateurs.graph.trace import Graph, tensors_in
from secateurs.pruning.context import PruningContext, Runtime
from secateurs.pruning.curves import chosen_sites
from secateurs.pruning.forecast import Phase
from secateurs.pruning.results import ComparedFrontiers, SiteCurve, Step, Trial
from secateurs.pruning.speeds import BATCHES, LONGEST_PASS
from secateurs.pruning.time_price import AIMS, PRICES
from secateurs.repair.observe import CHUNK_BYTES, EACH_FEATURE, GRAM_BYTES, ROWS, gram_size
from secateurs.repair.solve import gram_features, groups_of
from secateurs.scoring.engine.batches import free_memory
from secateurs.scoring.ensemble import PILOT, ROUNDS
from secateurs.speed.engines import TorchEngine, at_batch
from secateurs.speed.sizes import Sizing
from secateurs.speed.tables import SECONDS, LatencyModel, TableFile
from secateurs.speed.timing import LOADS, LONGEST_COMPARED, MOST_CALLS, SHORTEST
from secateurs.speed.timing import ROUNDS as TIMED_ROUNDS
from secateurs.speed.widths import ALL_UP_TO, POINTS

_BACK = 3  # passes that an image counts whose gradient is wanted
_SUFFIX = 0.6  # share of the network behind a site, on average: what precedes it runs once
_CURVE, _COMPARED = 8, 3  # points of a curve; cuts at which a portfolio compares orders
_TIMED = 32  # examples
_NETWORKS = 5  # alive together: the original, a smaller one, one that is repaired, one split at a site
_ALIVE = 3  # of the largest activations of a batch, and of a layer's moments
_SEARCHED, _CERTIFIED = 8, 8  # allocations that are tried: by bisection, and on the way from 0.4 of the saving to the edge
_TRAINED = 4  # that are trained, of those
_GATHERED = 400  # products that a feature costs which is gathered for them
_BUILT = 3  # single cuts that building a whole network takes as long as, with the solutions of its layers
_RATES = 3 * 50  # steps of training by which a learning rate is found
_ROUNDS = (18, 36)  # of a comparison that corrects tables, and of one that judges: as many as their spread takes, often
_LOADED = {"torch": 0.05}  # seconds of a comparison besides its rounds; in other engines half a second
_SIZE = 5e-3  # seconds that a layer of one size is timed for in a round, with what it takes to make it
_SHORT = 0.2  # seconds of surgery that need not be repeated
_WIDTHS = 1.0  # seconds of the convolution whose widths are timed
_SOLVED = 0.02  # seconds of the knapsack for a site
_WRITTEN = 0.3  # seconds: the network, the plan, the report
_FEWER = (512, 256)  # images, where time is short


@dataclass(frozen=True)
class Estimate:
    """Of a whole run, with all that it times, certifies and trains. Training by the user's own function is a guess."""

    seconds: float
    images_a_second: float
    bytes: int  # besides the data and torch itself
    phases: tuple[Phase, ...]


def within_time(seconds: float, recipe: Recipe, graph: Graph, data: Data, runtime: Runtime, notes: list[str]) -> Recipe:
    """The best recipe that takes no longer than `seconds` (see `cheaper`), or the cheapest."""
    found = [(one, estimate(PruningContext(graph, data, one, runtime)).seconds) for one in [recipe]]
    for one in cheaper(recipe) if found[0][1] > seconds else ():
        try:
            found.append((one, estimate(PruningContext(graph, data, one, runtime)).seconds))
        except InvalidInput:  # the position has none of the sites that were asked for
            continue
        if found[-1][1] <= seconds:
            break
    one, needed = found[-1]
    if one is not recipe:
        given = [(name, getattr(recipe, name), getattr(one, name)) for name in CHEAPER]
        taken = ", ".join(f"{name}={new!r}" for name, old, new in given if old != new)
        notes.append(f"the recipe may take longer than the time budget of {clock(seconds)}: {taken}")
    if needed > seconds:
        notes.append(f"even so it takes about {clock(needed)} on this machine")
    return one


CHEAPER = ("repair_examples", "curve_examples", "shortcut", "criterion", "repair")
"""The fields in which recipes differ that take less time."""


def cheaper(recipe: Recipe) -> Iterator[Recipe]:
    """Ever cheaper recipes: fewer images, on which curves have as many points, one position, another criterion; repair last."""
    one, repairs = recipe, recipe.repair != "none"
    for count in _FEWER:
        fewer = {name: count for name in CHEAPER[:2] if getattr(one, name) > count and (repairs or name != "repair_examples")}
        if fewer:
            one = replace(one, **fewer)  # type: ignore[arg-type]  # both are numbers
            yield one
    if one.shortcut == "auto":
        one = replace(one, shortcut="stream")
        yield one
    if repairs and one.criterion != "obs":
        one = replace(one, criterion="obs")
        yield one
    if one.repair == "whole-network":
        one = replace(one, repair="every-layer")
        yield one
    if (one.criterion, one.repair) != ("fpgm", "none"):
        yield replace(one, criterion="fpgm", repair="none")


def estimate(context: PruningContext) -> Estimate:
    """Time one batch and one cut, and price the phases of what is left of a run by them."""
    prices = _Prices(context)
    together = context.recipe.allocation == "global"
    phases = (*(_together(prices) if together else _in_turn(prices)), *_end(prices))
    return Estimate(math.fsum(phase.total for phase in phases), prices.images_a_second, _bytes(context), phases)


def opening(context: PruningContext, found: Estimate) -> tuple[str, str]:
    """The first lines of a run: what cuts are weighed by and what else could be asked for; how long it takes."""
    place, total = context.runtime.device or device_of(context.original.module), clock(found.seconds)
    guessed = ", with an epoch for your own training" if context.runtime.finetune is not None else ""
    return (
        f"Cuts are weighed by {_currency(context)}.",
        f"Pruning on {place}, at {found.images_a_second:,.0f} images a second: all of it takes about {total}{guessed}, and up "
        f"to {size(found.bytes)} of memory besides the data.",
    )


def _currency(context: PruningContext) -> str:
    """What a run spends, and what else it could."""
    recipe, engine = context.recipe, context.runtime.engine
    if not context.by_time or engine is None:
        return f"the {context.price.currency} that they save, not by time: {to_weigh_time(recipe)}"
    if not engine.runs_layers:
        return "the time that they save, as measure() gives it"
    batches = context.planned_batches
    which = (
        f"at batch {batches[0]}" + (", as the validation loader gives," * (len(batches) > 1)) + " and 1" * (len(batches) > 1)
    )
    names = {"torch": "PyTorch's eager mode", "compile": "torch.compile", "onnxruntime": "ONNX Runtime"}
    others = [f"engine={name!r}" for name in names if name != engine.name]
    others += ["deploy='int8'"] * (recipe.deploy is None)
    return (
        f"the time that they save in {names.get(engine.name, engine.name)} {which}; if something else will run the network, "
        f"give {', '.join(others)}, latency_batch=1, or a size: macs=0.5, parameters=0.5"
    )


def to_weigh_time(recipe: Recipe) -> str:
    """What to ask for where a run does not weigh time."""
    if recipe.allocation != "global":
        return "for time take a recipe with allocation='global', as Recipe() has"
    leave = "leave out engine='none'" if recipe.engine == "none" else "give no size"
    return f"for time {leave}, or name the engine that will run the network: engine='torch', 'onnxruntime' or 'compile'"


class _Prices:
    """Seconds of the units that runs are made of, as measured on this machine."""

    def __init__(self, context: PruningContext) -> None:
        self.context, self.recipe, self.journal = context, context.recipe, context.journal
        self.repairs = len(context.repair_examples) if self.recipe.repair != "none" else 0
        self.few = len(context.few_repair_examples) if self.repairs else 0
        self.held_out, self.validation = len(context.held_out.examples), len(context.validation)
        self._timed = set[str]()  # layers that an earlier position has timed

    @cached_property
    def images_a_second(self) -> float:
        """Of the original network, forwards."""
        return self.context.runtime.limit.run(_TIMED, lambda batch: _images_a_second(self.context, batch))

    def passes(self, images: float) -> float:
        """Seconds to bring images through the network."""
        return images / self.images_a_second

    def sites(self, shortcut: Shortcut) -> list[Site]:
        """The sites of a position that are pruned."""
        chosen = set(chosen_sites(self.recipe, self.context.original, shortcut))
        found = find_sites(self.context.original, shortcut, head_widths=self.recipe.head_widths)
        return [site for site in found if site.name in chosen and site.channels > 1]

    @cached_property
    def cut(self) -> float:
        """Surgery of one site, with its proofs; of short surgery the fastest of three, as the first meets cold caches."""
        sites = [site for site in self.sites(self.context.positions[0]) if not site.inside]
        fastest = math.inf if sites else 0.0
        for _ in range(3 if sites else 0):
            site, began = sites[len(sites) // 2], time.perf_counter()
            with suppress(EmptyLayer):
                compact(self.context.original, {site.name: torch.arange(site.channels) > 0}, verify=False)
            fastest = min(fastest, time.perf_counter() - began)
            if fastest > _SHORT:
                break
        return fastest

    def folds(self, sites: Sequence[Site]) -> bool:
        """Whether a branch of a sum may go as a whole."""
        graph = self.context.original.module.graph
        nodes = {node.name: node for node in graph.nodes}
        return self.recipe.branches and any(not site.inside and is_bypassed(graph, nodes[site.node]) for site in sites)

    @property
    def measured(self) -> float:
        """The validation set, or by a function of the user's own."""
        whole = self.context.runtime.evaluate
        return self.passes(self.validation) if whole is None else whole.seconds

    @cache  # noqa: B019  # lives as long as an estimate takes
    def solved(self, images: int) -> float:
        """Passes that an image counts as, of which every layer is solved: products of all that it reads with one another."""
        network, found = cost(self.context.original), 0.0
        for layer in network.layers:
            module = self.context.original.module.get_submodule(layer.name) if layer.macs and layer.name != ROOT else None
            if isinstance(module, WEIGHTED) and gram_size(module) <= GRAM_BYTES:
                features, places = gram_features(module), layer.macs / module.weight.numel()
                used = min(places, math.ceil(min(ROWS, EACH_FEATURE * features) / max(images, 1)))
                found += used * groups_of(module) * features * (features + _GATHERED)
        return 1 + found / max(network.macs, 1)

    def network(self, repairs: int) -> float:
        """A whole network with all cuts made, repaired, and refitted on that number of images."""
        refitted = self.recipe.repair in REFITTED
        sites = 1 if refitted else len(self.sites(self.context.positions[-1]))
        return _BUILT * self.cut * sites + self.passes((1 + self.solved(repairs)) * repairs * (1 if refitted else sites))

    def training(self, settings: TrainSettings) -> list[float]:
        """Seconds of every epoch."""
        images, teacher = len(self.context.data.train), self.passes(settings.batch) if settings.distill else 0.0
        most = -(-images // settings.batch)
        left = [max((settings.steps or math.inf) - done * most, 0) for done in range(settings.epochs)]
        found = [(self.step(settings.batch) + teacher) * min(most, each) + self.passes(self.validation) for each in left]
        if settings.lr == "auto" and found:
            found[0] += _RATES * (self.step(settings.batch) + teacher)
        return found

    @cache  # noqa: B019  # lives as long as an estimate takes
    def step(self, batch: int) -> float:
        """A step of training."""
        module, few = copied(self.context.original).module.train(), min(batch, _TIMED)
        with on_device(module, self.context.runtime.device) as place, torch.enable_grad():
            args = self.context.train.batch(slice(0, few), device=place).args
            times = []
            for _ in range(2):
                began = time.perf_counter()
                means = [found.float().mean() for found in tensors_in(module(*args)) if found.requires_grad]
                torch.autograd.backward(means)
                times.append(time.perf_counter() - began)
        return times[-1] * batch / few

    @property
    def own_training(self) -> float:
        """Of a function of the user's own nothing is known: an epoch is taken for it."""
        return self.step(_TIMED) * len(self.context.data.train) / _TIMED

    # ---- timers ----------------------------------------------------------------------------------------------------------

    @cached_property
    def call(self) -> float:
        """Seconds of one call of a function of the user's own that measures networks; 0 for engines."""
        engine = self.context.runtime.engine
        if engine is None or engine.runs_layers:
            return 0.0
        began = time.perf_counter()
        engine.network(self.context.original)()()
        return time.perf_counter() - began

    @cached_property
    def single(self) -> float:
        """Seconds of a single example, of which small networks spend most between their layers."""
        return 1 / _images_a_second(self.context, 1)

    def compared(self, batch: int, rounds: int) -> float:
        """Two networks in turns, at a batch."""
        if self.call:
            return self.call * 2 * 7
        call, engine = 1.2 * (self.single + self.passes(batch)), self.context.runtime.engine
        each = max(call, min(SHORTEST, MOST_CALLS * call))
        loaded = _LOADED.get(TorchEngine.name if engine is None else engine.name, 0.5)
        return loaded + min(2 * each * rounds, LONGEST_COMPARED) + 2 * each * LOADS

    def tables(self, shortcut: Shortcut) -> list[float]:
        """Every kind of layer that the sites of a position narrow, at all its sizes, at every batch; 0 for those known."""
        context, sites = self.context, self.sites(shortcut)
        engine = context.runtime.engine
        assert engine is not None
        if not engine.runs_layers:
            return [min(self.call * 3 * 6, (self.recipe.latency_seconds or SECONDS) / len(sites)) for _ in sites]
        sizing, found = Sizing(context.original, sites), list[float]()
        widths = max((min(site.channels, ALL_UP_TO, POINTS) for site in sites), default=1)
        for batch in self.context.planned_batches:
            file = TableFile(at_batch(engine, batch))
            for key in dict.fromkeys(LatencyModel(sizing, batch).keys.values()):
                known = file.layer(key) or key in self._timed
                found.append(0.0 if known else widths * TIMED_ROUNDS * _SIZE)
                self._timed.add(key)
        return found


def _together(prices: _Prices) -> Iterator[Phase]:
    """All cuts weighed at once: curves of every position, then whole networks that are tried."""
    context, recipe, journal = prices.context, prices.recipe, prices.journal
    by_time, refitted, positions = context.by_time, recipe.repair in REFITTED, context.positions
    yield Phase("original", (prices.measured,), "measure")
    if by_time:
        yield Phase("widths", (_WIDTHS if recipe.round_to == "auto" else 0.0,), "table")
    seen = {(curve.site, curve.node) for curve in journal.of(SiteCurve)}
    if recipe.shortcut != "auto":
        seen |= {(site, node) for site, _ in seen for node in [s.node for s in prices.sites(positions[0]) if s.name == site]}
    frontiers = 0
    for shortcut in positions:
        sites = prices.sites(shortcut)
        if by_time:
            yield Phase("times", tuple(prices.tables(shortcut)), "table")
        if prices.repairs:
            observed = prices.passes((1 + prices.solved(prices.repairs)) * prices.repairs + _BACK * prices.held_out)
            yield Phase("survey", (observed + _BUILT * prices.cut * math.sqrt(len(sites)),))
        costs = [0.0 if (site.name, site.node) in seen else _curve(prices, site) for site in sites]
        seen |= {(site.name, site.node) for site in sites}
        yield Phase("curve", tuple(costs))
        frontiers += 1
        if by_time:
            timed = tuple(prices.compared(batch, _ROUNDS[0]) for batch in prices.context.planned_batches)
            solved, folds = Phase("solve", (_SOLVED * len(sites),), "solve"), prices.folds(sites)
            yield solved
            for number in range(len(AIMS)):  # the last one is often not needed
                yield Phase("timed", tuple(each / (1 + number) for each in timed), "timer")
                yield solved
            for _ in PRICES if folds else ():
                yield solved
                frontiers += refitted
            frontiers += refitted  # that of MACs
    if frontiers > 1 and not journal.of(ComparedFrontiers):
        yield Phase("compare", (prices.network(prices.few) + prices.passes(2 * prices.held_out),) * frontiers, "trial")
    yield from _tried(prices)
    if by_time:
        yield Phase("faster", (sum(prices.compared(batch, _ROUNDS[1]) for batch in prices.context.planned_batches),), "timer")
    sites = prices.sites(positions[-1])
    done = len(journal.of(Step))
    yield Phase("cut", (prices.cut * _BUILT + prices.passes(min(512, prices.validation)),) * max(len(sites) - done, 1), "trial")


def _tried(prices: _Prices) -> Iterator[Phase]:
    """Whole networks: on the images that search, trained if the recipe says so, and on those that certify."""
    context, recipe = prices.context, prices.recipe
    certifies, done = context.metric.sides is not None, len(prices.journal.of(Trial))
    measured = prices.measured / (2 if certifies else 1)
    one, rough = prices.network(prices.repairs) + measured, prices.network(prices.few) + measured
    yield Phase("divide", (rough if certifies else one,) * max(_SEARCHED - done, 1), "trial")
    if recipe.train_trials:
        training = math.fsum(prices.training(recipe.retrain)) if recipe.retrain else 0.0
        training += prices.own_training if context.runtime.finetune else 0.0
        yield Phase("trained", (one + training,) * _TRAINED, "training")
    if certifies:
        yield Phase("certify", (one,) * (3 if recipe.train_trials else _CERTIFIED), "trial")


def _in_turn(prices: _Prices) -> Iterator[Phase]:
    """Site after site, in rounds."""
    context, recipe = prices.context, prices.recipe
    yield Phase("original", (prices.measured,), "measure")
    costs = []
    for site in prices.sites(context.positions[0]):
        ranked = prices.passes(_SUFFIX * _ranked(context, recipe, site.channels) + 2 * prices.repairs)
        trials = math.log2(site.channels + 1) + 1
        tried = trials * (prices.passes(_SUFFIX * prices.validation) if context.runtime.evaluate is None else prices.measured)
        trained = math.fsum(prices.training(recipe.finetune)) if recipe.finetune else 0.0
        trained += prices.own_training if context.runtime.finetune else 0.0
        costs.append(ranked + tried + trained + prices.measured + 2 * prices.cut)
    yield Phase("site", tuple(costs * recipe.rounds)[len(prices.journal.of(Step)) :] or (0.0,))


def _end(prices: _Prices) -> Iterator[Phase]:
    """Training after all cuts, and what is measured of the result."""
    context, recipe = prices.context, prices.recipe
    if recipe.allocation == "global" and not recipe.train_trials:
        if recipe.repair == "whole-network":
            yield Phase("reconstruct", (prices.passes(20 * _BACK * prices.repairs),), "training")
        if context.runtime.finetune is not None or recipe.finetune is not None:
            settings = None if context.runtime.finetune else recipe.finetune
            each = [prices.own_training] if settings is None else prices.training(settings)
            yield Phase("finetune", tuple(each), "training")
    if recipe.retrain is not None and not recipe.train_trials:
        yield Phase("retrain", tuple(prices.training(recipe.retrain)), "training")
    test = 0 if context.data.test is None else len(context.data.test)
    yield Phase("measure", (prices.passes(2 * test), 2 * prices.measured), "measure")
    batches = dict.fromkeys((*prices.context.planned_batches, *(BATCHES if not prices.call else ())))
    longest = [batch for batch in batches if prices.passes(batch) < LONGEST_PASS]
    yield Phase("timing", tuple(prices.compared(batch, _ROUNDS[1]) for batch in longest) or (0.0,), "timer")
    yield Phase("write", (_WRITTEN,), "measure")


def _curve(prices: _Prices, site: Site) -> float:
    """Ranking a site, and measuring what its cuts cost."""
    context, recipe = prices.context, prices.recipe
    predicted = prices.repairs > 0 and recipe.criterion == "obs" and prices.held_out > len(context.held_out_few.examples)
    points = prices.held_out if predicted else (_CURVE - 1) * prices.held_out
    return (2 + points / prices.held_out) / 4 * prices.cut + prices.passes(
        _SUFFIX * (points + _ranked(context, recipe, site.channels))
    )


def _bytes(context: PruningContext) -> int:
    """What is alive together at most; activations that are cached stay within their budget."""
    recipe, runtime, original = context.recipe, context.runtime, context.original
    dims = [shape_of(node).dims for node in original.module.graph.nodes]
    largest = max((math.prod(known[1:]) for known in dims if known), default=1) * context.dtype.itemsize  # of one example
    measured = len(context.held_out.examples) if recipe.allocation == "global" else len(context.validation)
    scored = min(max(MOST_PAIRS // (2 * ROUNDS), PILOT), len(context.ranker.pool))
    device = device_of(original.module) if runtime.device is None else torch.device(runtime.device)
    budget = free_memory(device) // 4 if runtime.cache_bytes is None else runtime.cache_bytes
    grams = [gram_size(layer) for layer in original.module.modules() if isinstance(layer, WEIGHTED)]
    repair = 0 if recipe.repair == "none" else _ALIVE * (max((g for g in grams if g <= GRAM_BYTES), default=0) + CHUNK_BYTES)
    batch = min(recipe.batch, max(measured, scored))
    return _NETWORKS * cost(original).bytes + min(budget, largest * max(measured, scored)) + _ALIVE * largest * batch + repair


def _ranked(context: PruningContext, recipe: Recipe, channels: int) -> float:
    """Passes that the recipe's criterion needs at most at a site, with the comparisons of a portfolio."""
    portfolio = recipe.criterion == "portfolio"
    criteria: Sequence[str] = recipe.portfolio if portfolio else (recipe.criterion,)
    compared = _COMPARED * len(criteria) * len(context.held_out.examples) if portfolio else 0
    return compared + sum(_ranking_passes(context, name, channels, len(context.ranker.pool)) for name in criteria)


def _ranking_passes(context: PruningContext, name: str, channels: int, pool: int) -> float:
    """Passes that a criterion needs at most at a site."""
    settings = context.recipe.ensemble_settings()
    if name == "ensemble" and settings.estimator == "network":  # of all sites at once, which share it
        return _BACK * min(1024, pool) / max(len(chosen_sites(context.recipe, context.original)), 1)
    if name != "ensemble":
        return float(passes_of(name, channels, len(context.data.classes)) * min(1024, pool))
    masks = settings.masks or settings.masks_per_filter * channels
    if settings.estimator == "gradient":
        return _BACK * (settings.masks or MOST_PAIRS)
    return float(masks) * (settings.examples if isinstance(settings.examples, int) else pool)


def _images_a_second(context: PruningContext, batch: int) -> float:
    module, times = context.original.module, list[float]()
    with on_device(module, context.runtime.device) as place, eval_mode(module), torch.no_grad():
        timed = context.validation.batch(slice(0, batch), device=place)
        for _ in range(4):
            began = time.perf_counter()
            module(*timed.args)
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            times.append(time.perf_counter() - began)
    return timed.size / median(times[1:])
