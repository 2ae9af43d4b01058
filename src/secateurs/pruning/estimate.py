"""Roughly how long a run takes, and how much memory, before it starts; and a cheaper recipe where it takes too long.

The time is that of the passes that it may need times the measured time of one. The memory is that of the largest things that
are alive together: networks, cached activations, a batch on its way, and the moments of a repair.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch

from secateurs._util.modules import device_of, eval_mode, on_device
from secateurs._util.terminal import clock
from secateurs.config import MOST_PAIRS, REFITTED, Recipe
from secateurs.data.splits import Data
from secateurs.graph.cost import WEIGHTED, cost
from secateurs.graph.node_info import shape_of
from secateurs.graph.sites import find_sites
from secateurs.graph.trace import Graph
from secateurs.pruning.context import PruningContext, Runtime
from secateurs.pruning.run import chosen_sites
from secateurs.repair.observe import CHUNK_BYTES, GRAM_BYTES, gram_size
from secateurs.scoring.engine.batches import free_memory
from secateurs.scoring.ensemble import PILOT, ROUNDS

_BACK = 3  # passes that an image counts whose gradient is wanted
_SUFFIX = 0.6  # share of the network behind a site, on average: what precedes it runs once
_CURVE, _COMPARED = 8, 3  # points of a curve; cuts at which a portfolio compares orders
_CALIBRATED = 1  # points of a predicted curve: two, on half the examples
_TIMED = 32  # examples
_NETWORKS = 5  # alive together: the original, a smaller one, one that is repaired, one split at a site
_ALIVE = 3  # of the largest activations of a batch, and of a layer's moments
_SITE, _CUT = 0.3, 0.05  # seconds for surgery, proofs and least squares of small layers: at a site, and for a cut that is tried


@dataclass(frozen=True)
class Estimate:
    """Of a run without its training: rather too long than too short where ranking may stop early."""

    seconds: float
    passes: int  # images brought through the network
    images_a_second: float
    bytes: int  # besides the data and torch itself


def within_time(seconds: float, recipe: Recipe, graph: Graph, data: Data, runtime: Runtime, notes: list[str]) -> Recipe:
    """The recipe, or a cheaper one where it may take longer than `seconds`: OBS alone, then weights alone without repair."""
    cheaper = [replace(recipe, criterion="obs")] if recipe.repair != "none" else []
    for one in (recipe, *cheaper, replace(recipe, criterion="fpgm", repair="none")):
        needed = estimate(PruningContext(graph, data, one, runtime)).seconds
        if needed <= seconds:
            break
    if one is not recipe:
        chosen = f"criterion {one.criterion!r} and repair {one.repair!r} are used"
        notes.append(f"the recipe may take longer than the time budget of {clock(seconds)}: {chosen}")
    if needed > seconds:
        notes.append(f"even so it takes up to {clock(needed)} on this machine")
    return one


def estimate(context: PruningContext) -> Estimate:
    """Time one batch, and count the passes that the recipe may need at all sites, and the bytes."""
    recipe, held_out = context.recipe, len(context.held_out.examples)
    chosen = chosen_sites(recipe, context.original)
    original, widths = context.original, recipe.head_widths
    found = (site for shortcut in recipe.shortcuts for site in find_sites(original, shortcut, head_widths=widths))
    every = {(site.name, site.node): site for site in found}
    sites = [site for site in every.values() if site.name in chosen and site.channels > 1]
    criteria = recipe.portfolio if recipe.criterion == "portfolio" else (recipe.criterion,)
    pool, validation = len(context.ranker.pool), len(context.validation)
    repairs = 0 if recipe.repair == "none" else 2 * len(context.repair_examples)
    together = recipe.allocation == "global" and repairs > 0  # all sites are observed at once
    passes = float(repairs // 2 + _BACK * held_out // 2) if together else 0.0
    if "ensemble" in criteria and recipe.estimator == "network":
        passes += _BACK * min(1024, pool) * (1 if recipe.allocation == "global" else recipe.rounds * len(sites))
    for site in sites:
        for name in criteria:
            passes += _SUFFIX * _ranking_passes(context, name, site.channels, pool)
        passes += _SUFFIX * held_out * (_COMPARED * len(criteria) if recipe.criterion == "portfolio" else 0)
        passes += 0 if together else repairs
        if recipe.allocation == "global":
            passes += _SUFFIX * held_out * (_CALIBRATED if together and recipe.criterion == "obs" else _CURVE)
        else:
            passes += recipe.rounds * (_SUFFIX * math.log2(site.channels + 1) + 1) * validation
    overhead = _SITE * len(sites)
    trials = recipe.rounds * sum(math.log2(site.channels + 1) + 1 for site in sites)  # networks that are measured
    if recipe.allocation == "global":
        trials = 10 if recipe.confidence == 0 else 25  # networks that are built and measured
        repaired = repairs if recipe.repair in REFITTED else len(sites) * repairs  # a refit needs no repair before it
        passes += trials * (repaired + validation)
        overhead += _CUT * trials * len(sites)
    if context.runtime.evaluate is not None:
        overhead += trials * context.runtime.evaluate.seconds
    speed = context.runtime.limit.run(_TIMED, lambda batch: _images_a_second(context, batch))
    return Estimate(passes / speed + overhead, round(passes), speed, _bytes(context))


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


def _ranking_passes(context: PruningContext, name: str, channels: int, pool: int) -> float:
    """Passes that a criterion needs at most at a site."""
    settings = context.recipe.ensemble_settings()
    if name == "taylor":
        return _BACK * min(1024, pool)
    if name == "obd":  # back once for every class
        return (1 + 2 * max(1, len(context.data.classes))) * min(1024.0, pool)
    if name == "leave-one-out":
        return (channels + 1) * min(1024, pool)
    if name not in ("ensemble", "pairs") or (name == "ensemble" and settings.estimator == "network"):
        return 0.0
    masks = settings.masks or settings.masks_per_filter * channels
    if settings.estimator == "gradient" and name == "ensemble":
        return _BACK * (settings.masks or MOST_PAIRS)
    return float(masks) * (settings.examples if isinstance(settings.examples, int) else pool)


def _images_a_second(context: PruningContext, batch: int) -> float:
    module, best = context.original.module, math.inf
    with on_device(module, context.runtime.device) as place, eval_mode(module), torch.no_grad():
        timed = context.validation.batch(slice(0, batch), device=place)
        for _ in range(3):
            began = time.perf_counter()
            module(*timed.args)
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            best = min(best, time.perf_counter() - began)
    return timed.size / best
