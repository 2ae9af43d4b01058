"""What a method finds out about every site of the untouched network before it cuts.

Each is looked at once, and kept: in the method's folder, and in the store for the same method with other targets and budgets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from secateurs.criteria.ranking import Ranking
from secateurs.graph.sites import Site
from secateurs.methods.base import MethodRun
from secateurs.metrics import fingerprint
from secateurs.pruning.context import PreparedSite
from secateurs.pruning.folder import environment
from secateurs.pruning.global_allocation import SiteCurve, curve_fields, curve_from, measure_curve
from secateurs.scoring.cache import context_of
from secateurs.selection.allocation import Curve

THERE_AND_BACK = 3  # an image that is brought through a network and its gradient back counts so many passes

_BY_REPAIRS = ("obs", "portfolio")  # criteria that look at what a repair would make up for
_NOT_OF_A_COURSE = ("target_macs", "budget", "loss", "metric")  # the last two are told by more than a name
_COMPARED_AT = 3  # numbers of filters at which a portfolio compares orders


@dataclass(frozen=True, eq=False)
class SiteProfile:
    """A site's course, and what it took to find it."""

    course: SiteCurve
    passes: int
    seconds: float = 0.0


Look = Callable[[MethodRun, Site, int], SiteProfile]
"""Looks at a site of the untouched network; the number counts the sites from 1."""


def profile_sites(work: MethodRun, look: Look) -> dict[str, SiteProfile]:
    """What `look` finds at every site, in network order; not looked for again where it was found before.

    The passes are those that it took to find it, the seconds those that it took now.
    """
    found: dict[str, SiteProfile] = {}
    for number, site in enumerate(work.sites, 1):
        work.tell("score", number - 1, len(work.sites), site, number)
        if not work.record.units("course", site=site.name):
            began = time.monotonic()
            fields = _kept_or_looked_at(work, look, site, number)
            work.record.append("course", site=site.name, **fields, seconds=time.monotonic() - began)
        entry = work.record.units("course", site=site.name)[0]
        found[site.name] = SiteProfile(curve_from(site, entry), entry["passes"], entry["seconds"])
    return found


def _kept_or_looked_at(work: MethodRun, look: Look, site: Site, number: int) -> dict[str, Any]:
    """A site's course and passes as plain values, from the store if it has them."""
    store, context = work.workshop.tools.store, _context(work)
    key = site.name.encode()
    kept = store.get_fields(context, key)
    if kept is None:
        looked = look(work, site, number)
        kept = {**curve_fields(looked.course), "passes": looked.passes}
        store.put_fields(context, key, kept)
    return kept


def _context(work: MethodRun) -> str:
    """All that a course depends on besides the site: not what is to be removed, and not the training that comes after it."""
    task, module = work.task, work.task.graph.module
    asked = {name: value for name, value in work.asked.items() if name not in _NOT_OF_A_COURSE}
    measures = fingerprint(task.loss_fn), fingerprint(task.metric)
    structure, versions = f"{module.code}{module}", environment()["versions"]
    return context_of("courses", json.dumps([asked, versions], sort_keys=True), structure, *measures)


def look_at_curve(work: MethodRun, site: Site, number: int) -> SiteProfile:
    """The order of the site's filters by the recipe's criterion, and the loss along it."""
    place = work.workshop.place(work.task.graph, site)
    ranking, passes = ranked(work, place, number)
    course = measure_curve(work.workshop, place, ranking)
    looks = len(course.curve.removed) * len(work.workshop.held_out.examples)
    return SiteProfile(course, passes + looks + observing(work))


def look_at_order(work: MethodRun, site: Site, number: int) -> SiteProfile:
    """The order of the site's filters by the recipe's criterion; no loss is measured along it."""
    observed = work.workshop.recipe.criterion in _BY_REPAIRS
    place = work.workshop.place(work.task.graph, site) if observed else PreparedSite(work.task.graph, site, None)
    ranking, passes = ranked(work, place, number)
    course = SiteCurve(ranking, site.original, Curve(site.name, (0,), (0.0,), (0.0,)))
    return SiteProfile(course, passes + (observing(work) if observed else 0))


def ranked(work: MethodRun, place: PreparedSite, number: int) -> tuple[Ranking, int]:
    """The ranking of a site by the recipe's criterion, and the passes that it took."""
    scored = 0

    def noted(done: int, bound: int) -> None:
        nonlocal scored
        scored = done
        work.tell("score", done, bound, place.site, (number - 1) % len(work.sites) + 1)

    ranking = work.workshop.rank(place, step=number, on_scored=noted)
    return ranking, _passes(work, place.site, ranking, scored)


def observing(work: MethodRun) -> int:
    """The passes that a repair of one site takes; none where nothing is repaired."""
    recipe = work.workshop.recipe
    if recipe.repair == "none":
        return 0
    networks = 2 if recipe.finetune is None else 1  # what the readers see now, and what they gave in the untouched network
    return networks * len(work.workshop.repair_examples)


def _passes(work: MethodRun, site: Site, ranking: Ranking, scored: int) -> int:
    """Images brought through the network, or what of it follows the site, once for every mask."""
    name, recipe = work.workshop.recipe.criterion, work.workshop.recipe
    if name == "taylor":
        return THERE_AND_BACK * ranking.examples
    if name == "leave-one-out":
        return (site.channels + 1) * ranking.examples
    if name == "pairs" or recipe.estimator == "losses":
        return scored * ranking.examples
    comparing = len(ranking.compared) * _COMPARED_AT * len(work.workshop.held_out.examples) if ranking.compared else 0
    return THERE_AND_BACK * scored + comparing  # by slopes, every mask has an image of its own
