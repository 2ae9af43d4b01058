"""What a method measures at every site of the original network before it cuts.

Each site is measured once: kept in the method's folder, and in the store for the same method with other targets and budgets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from secateurs._util.decode import Malformed
from secateurs._util.journal import plain, record_from
from secateurs.criteria.ranking import Ranking
from secateurs.errors import RunError
from secateurs.graph.sites import Site
from secateurs.methods.base import MethodRun, SiteProfile
from secateurs.metrics import fingerprint
from secateurs.pruning.context import PreparedSite
from secateurs.pruning.folder import environment
from secateurs.pruning.global_allocation import measure_curve
from secateurs.pruning.results import SiteCurve
from secateurs.scoring.cache import context_of
from secateurs.selection.allocation import Curve

THERE_AND_BACK = 3  # passes that an image counts which is run through a network and its gradient back

_BY_REPAIRS = ("obs", "portfolio")  # criteria that consider what a repair would make up for
_NOT_OF_A_PROFILE = ("target_macs", "budget", "loss", "metric")  # the last two are identified by more than a name
_COMPARED_AT = 3  # numbers of filters at which a portfolio compares orders

Profile = Callable[[MethodRun, Site, int], SiteProfile]
"""Measures a site of the original network; the number counts the sites from 1."""


def profile_sites(run: MethodRun, profile: Profile) -> dict[str, SiteProfile]:
    """What `profile` measures at every site, in network order; not measured again where it was before.

    Passes are those of the measurement, seconds those spent now.
    """
    found: dict[str, SiteProfile] = {}
    for number, site in enumerate(run.sites, 1):
        run.report("score", number - 1, len(run.sites), site, number)
        found[site.name] = run.journal.once(SiteProfile, partial(_profiled, run, profile, site, number), site=site.name)
        if found[site.name].curve.original != site.original:
            raise RunError(f"{run.journal.path}: the profile of site {site.name!r} does not fit its {site.channels} channels.")
    return found


def _profiled(run: MethodRun, profile: Profile, site: Site, number: int) -> SiteProfile:
    """The profile from the store, if it has one; else measured and stored."""
    cache, context, key, began = run.context.runtime.cache, _context(run), site.name.encode(), time.monotonic()
    kept = cache.get_fields(context, key)
    if kept is None:
        found = profile(run, site, number)
        cache.put_fields(context, key, plain(found))
    else:
        try:
            found = record_from(kept, SiteProfile)
        except Malformed as error:
            raise RunError(f"{cache.path}: the profile of site {site.name!r} is damaged ({error}). Delete the file.") from error
    return replace(found, seconds=time.monotonic() - began)


def _context(run: MethodRun) -> str:
    """All that a profile depends on besides the site: neither the target nor the training that follows."""
    task, module = run.task, run.task.graph.module
    asked = {name: value for name, value in run.asked.items() if name not in _NOT_OF_A_PROFILE}
    measures = fingerprint(task.loss_fn), fingerprint(task.metric)
    structure, versions = f"{module.code}{module}", environment()["versions"]
    return context_of("profiles", json.dumps([asked, versions], sort_keys=True), structure, *measures)


def loss_profile(run: MethodRun, site: Site, number: int) -> SiteProfile:
    """The ranking of the site's filters by the recipe's criterion, and the loss along it."""
    prepared = run.context.prepare(run.task.graph, site)
    ranking, passes = ranked(run, prepared, number)
    curve = measure_curve(run.context, prepared, ranking)
    measured = len(curve.curve.removed) * len(run.context.held_out.examples)
    return SiteProfile(curve, passes + measured + repair_passes(run))


def order_profile(run: MethodRun, site: Site, number: int) -> SiteProfile:
    """The ranking of the site's filters by the recipe's criterion; no loss is measured along it."""
    observed = run.context.recipe.criterion in _BY_REPAIRS
    prepared = run.context.prepare(run.task.graph, site) if observed else PreparedSite(run.task.graph, site, None)
    ranking, passes = ranked(run, prepared, number)
    return SiteProfile(unmeasured(site, ranking), passes + (repair_passes(run) if observed else 0))


def unmeasured(site: Site, ranking: Ranking) -> SiteCurve:
    """A ranking without any loss measured along it."""
    return SiteCurve(ranking, site.original, Curve(site.name, (0,), (0.0,), (0.0,)))


def ranked(run: MethodRun, prepared: PreparedSite, number: int) -> tuple[Ranking, int]:
    """The ranking of a site by the recipe's criterion, and the passes that it took."""
    scored = 0

    def on_scored(done: int, bound: int) -> None:
        nonlocal scored
        scored = done
        run.report("score", done, bound, prepared.site, (number - 1) % len(run.sites) + 1)

    ranking = run.context.rank(prepared, step=number, on_scored=on_scored)
    return ranking, ranking_passes(run, prepared.site, ranking, scored)


def ranking_passes(run: MethodRun, site: Site, ranking: Ranking, scored: int) -> int:
    """Images run through the network, or its part behind the site, once for each of the `scored` masks."""
    name, recipe = run.context.recipe.criterion, run.context.recipe
    if name == "taylor":
        return THERE_AND_BACK * ranking.examples
    if name == "leave-one-out":
        return (site.channels + 1) * ranking.examples
    if name == "pairs" or recipe.estimator == "losses":
        return scored * ranking.examples
    comparing = len(ranking.compared) * _COMPARED_AT * len(run.context.held_out.examples) if ranking.compared else 0
    return THERE_AND_BACK * scored + comparing  # by slopes, every mask has an image of its own


def repair_passes(run: MethodRun) -> int:
    """The passes that a repair of one site takes; none where nothing is repaired."""
    recipe = run.context.recipe
    if recipe.repair == "none":
        return 0
    networks = 2 if recipe.finetune is None else 1  # the consumers' inputs now, and their outputs in the original network
    return networks * len(run.context.repair_examples)
