"""Roughly how long a run takes, before it starts: the passes that it may need times the measured time of one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from secateurs._util.modules import eval_mode, on_device
from secateurs.config import MOST_PAIRS
from secateurs.graph.sites import find_sites
from secateurs.pruning.context import PruningContext

_BACK = 3  # passes that an image counts whose gradient is wanted
_SUFFIX = 0.6  # share of the network behind a site, on average: what precedes it runs once
_CURVE, _COMPARED = 8, 3  # points of a curve; cuts at which a portfolio compares orders
_TIMED = 32  # examples
_OVERHEAD = 4.0  # seconds a site for surgery, proofs and least squares of small layers


@dataclass(frozen=True)
class Estimate:
    """Of a run without its training: rather too long than too short where ranking may stop early."""

    seconds: float
    passes: int  # images brought through the network
    images_a_second: float


def estimate(context: PruningContext) -> Estimate:
    """Time one batch, and count the passes that the recipe may need at all sites."""
    recipe, held_out = context.recipe, len(context.held_out.examples)
    sites = [site for site in find_sites(context.original, recipe.shortcut) if site.channels > 1]
    criteria = recipe.portfolio if recipe.criterion == "portfolio" else (recipe.criterion,)
    pool, validation = len(context.ranker.pool), len(context.validation)
    repairs = 0 if recipe.repair == "none" else 2 * len(context.repair_examples)
    passes = 0.0
    for site in sites:
        for name in criteria:
            passes += _SUFFIX * _ranking_passes(context, name, site.channels, pool)
        passes += _SUFFIX * held_out * (_COMPARED * len(criteria) if recipe.criterion == "portfolio" else 0) + repairs
        if recipe.allocation == "global":
            passes += _SUFFIX * held_out * _CURVE
        else:
            passes += recipe.rounds * (_SUFFIX * math.log2(site.channels + 1) + 1) * validation
    if recipe.allocation == "global":
        trials = 10 if recipe.confidence == 0 else 25  # networks that are built and measured
        passes += trials * (len(sites) * repairs + (repairs if recipe.repair == "every-layer" else 0) + validation)
    speed = _images_a_second(context)
    return Estimate(passes / speed + _OVERHEAD * len(sites), round(passes), speed)


def _ranking_passes(context: PruningContext, name: str, channels: int, pool: int) -> float:
    """Passes that a criterion needs at most at a site."""
    settings = context.recipe.ensemble_settings()
    if name == "taylor":
        return _BACK * min(1024, pool)
    if name == "leave-one-out":
        return (channels + 1) * min(1024, pool)
    if name not in ("ensemble", "pairs"):
        return 0.0
    masks = settings.masks or settings.masks_per_filter * channels
    if settings.estimator == "gradient" and name == "ensemble":
        return _BACK * (settings.masks or MOST_PAIRS)
    return float(masks) * (settings.examples if isinstance(settings.examples, int) else pool)


def _images_a_second(context: PruningContext) -> float:
    module, best = context.original.module, math.inf
    with on_device(module, context.runtime.device) as place, eval_mode(module), torch.no_grad():
        timed = context.validation.batch(slice(0, _TIMED), device=place)
        for _ in range(3):
            began = time.perf_counter()
            module(*timed.args)
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            best = min(best, time.perf_counter() - began)
    return timed.size / best
