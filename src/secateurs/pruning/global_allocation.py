"""All cuts weighed against each other: every site's curve is measured once, and the allowed loss goes where it saves most.

A curve holds the loss of the network, repaired if repairs are made, against the filters removed at one site alone. From all
curves follows the frontier of predicted loss against saving; the cuts of one of its divisions are made together and judged.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateurs._util.decode import brief
from secateurs.compaction import compact
from secateurs.criteria.ranking import Ranking, cuts_along
from secateurs.errors import NonFinite, RunError
from secateurs.graph.cost import cost
from secateurs.graph.sites import Site, find_sites
from secateurs.graph.trace import Graph
from secateurs.pruning.budget import BaselineValues
from secateurs.pruning.context import PreparedSite, PruningContext, RunContext
from secateurs.pruning.folder import Record
from secateurs.pruning.order import sites_of_round
from secateurs.pruning.visiting import allowed_widths, rank_site
from secateurs.selection.allocation import Allocation, Curve, frontier
from secateurs.selection.search import Cut

_TINY = 1e-12  # sums of shares are rounded
_GRID = 8  # a curve has so many points between nothing and all filters
_RUNGS = (0.4, 0.5)  # of the saving at the predicted edge: the first rungs of the climb
FINE, COARSE = (
    1.06,
    1.3,
)  # what a rung saves, of the one before; coarse where training follows, which a "no" makes harder to certify


@dataclass(frozen=True, eq=False)
class SiteCurve:
    """One site's filters in the order they would go, and what that costs and saves. Ids are positions at the start."""

    ranking: Ranking
    original: tuple[int, ...]  # the site's original channel ids, by position
    curve: Curve

    def keep(self, m: int, site: Site) -> Tensor:
        """The mask (C,) without the first m filters, for the site as it is now; filters that are gone anyway stay gone."""
        gone = {self.original[i] for i in self.ranking.order[:m].tolist()}
        return torch.tensor([channel not in gone for channel in site.original])

    def cut(self, m: int, site: Site, before: float, after: float) -> Cut:
        """The cut that was made, as a record; it was chosen by the division, not by a search."""
        keep = self.keep(m, site)
        positions = {channel: place for place, channel in enumerate(site.original)}
        removed = [positions[self.original[i]] for i in self.ranking.order[:m].tolist() if self.original[i] in positions]
        return Cut(keep, tuple(removed), len(removed), before, after, before - after, ())


def counts_of(channels: int, largest_share: float, round_to: int, widths: Sequence[int] | None = None) -> tuple[int, ...]:
    """Numbers of filters at which a curve is measured, from 0 on; kept ones are multiples of `round_to`, and in `widths`."""
    most = min(math.floor(round(largest_share * channels, 12)), channels - 1)
    wanted = {round(channels * step / _GRID) for step in range(1, _GRID)}
    allowed = [m for m in range(1, most + 1) if (channels - m) % round_to == 0 and (widths is None or channels - m in widths)]
    return (0, *sorted({min(allowed, key=lambda m: abs(m - want)) for want in wanted} if allowed else ()))


def measure_curve(
    workshop: PruningContext, place: PreparedSite, ranking: Ranking, widths: Sequence[int] | None = None
) -> SiteCurve:
    """The loss on held-out images along the ranking, and what the cuts save, which is in proportion to their filters."""
    recipe, site = workshop.recipe, place.site
    counts = counts_of(site.channels, recipe.largest_share, recipe.round_to, widths)
    measured = workshop.bench(place, workshop.held_out.loss_fn).on(workshop.held_out.examples)
    losses = measured.means(cuts_along(ranking.order, counts)).tolist()
    if not math.isfinite(losses[0]):
        raise NonFinite(
            f"site {site.name!r}: the loss of the uncut network on {len(measured.examples)} search examples is {losses[0]}. "
            f"Check its outputs and the examples for NaN."
        )
    most = _saved(workshop, compact(workshop.original, {site.name: cuts_along(ranking.order, counts[-1:])[0]}, verify=False))
    saved = [most * count / max(counts[-1], 1) for count in counts]
    return SiteCurve(ranking, site.original, Curve(site.name, counts, tuple(losses), tuple(saved)))


def curve_fields(course: SiteCurve) -> dict[str, Any]:
    """A course as plain values."""
    ranking, curve = course.ranking, course.curve
    names = ("criterion", "masks", "examples", "note", "r2_held_out", "split_half", "compared")
    return {
        "order": ranking.order.tolist(),
        **{name: getattr(curve, name) for name in ("removed", "loss", "saved")},
        **{name: getattr(ranking, name) for name in names},
    }


def curve_from(site: Site, entry: Mapping[str, Any]) -> SiteCurve:
    """The course of a site that was written down as plain values."""
    curve = [entry[name] for name in ("removed", "loss", "saved")]
    if sorted(entry["order"]) != list(range(site.channels)) or len({len(values) for values in curve}) > 1 or not curve[0]:
        raise RunError(
            f"journal.jsonl: the curve of site {site.name!r} does not fit its {site.channels} channels. Restore the run from a "
            f"copy, or start a new one."
        )
    compared = tuple((str(name), float(loss)) for name, loss in entry["compared"])
    figures = {name: entry[name] for name in ("masks", "examples", "note", "r2_held_out", "split_half")}
    ranking = Ranking(entry["criterion"], torch.tensor(entry["order"]), compared=compared, **figures)
    return SiteCurve(ranking, site.original, Curve(site.name, *(tuple(entry[name]) for name in ("removed", "loss", "saved"))))


@dataclass(frozen=True)
class ChosenAllocation:
    """The division that was chosen, and what led to it."""

    division: Allocation
    tried: tuple[tuple[float, float, bool], ...]  # saved, accuracy on the search images, predicted to be certified
    answers: tuple[bool, ...]  # of the certification images
    bound: float | None  # upper bound on the drop of what was chosen; None: not certified
    by_estimate: float  # largest saving tried whose drop, as seen on the search images alone, is within what is allowed
    frontier: tuple[tuple[float, float], ...]  # saved, predicted increase of the loss: what one measuring pass tells


Trial = Mapping[str, Any]
"""What was found of one division, as plain values.

By the search images: `accuracy`, `accepted` (predicted to be certified) and `by_estimate` (the drop seen is within what is
allowed). By the certification images: `accepted` and `upper`, the upper bound on the drop.
"""


def choose_allocation(
    divisions: Sequence[Allocation],
    search: Callable[[int], Trial],
    certify: Callable[[int, Sequence[bool]], Trial] | None,
    *,
    growth: float = FINE,
    on_trial: Callable[[int, int], None] = lambda done, of: None,
) -> ChosenAllocation:
    """Choose the division that saves most within the contract; each saves more than the one before, the first nothing.

    `search` measures a division, by its index, on the search images. The edge, the largest one that they predict to be
    certified, is found by halving. The certification images then climb a ladder of divisions (`ladder`) that was laid without
    them; `certify` takes an index and their answers so far. Every yes is free, the first no ends the climb, and the last
    division that was accepted is taken. Without `certify` the edge itself is.
    """
    tried: dict[int, Trial] = {}
    verdicts: list[Trial] = []

    def accepted(index: int) -> bool:
        on_trial(len(tried) + 1, max(len(divisions).bit_length() + 1, len(tried) + 1) + (0 if certify is None else 1))
        tried[index] = search(index)
        return bool(tried[index]["accepted"])

    best = _largest(len(divisions), accepted)
    if certify is not None:
        rungs, best = ladder(divisions, best, growth), 0
        for rung in rungs:
            on_trial(len(tried) + len(verdicts) + 1, len(tried) + len(rungs))
            verdicts.append(certify(rung, [bool(verdict["accepted"]) for verdict in verdicts]))
            if not verdicts[-1]["accepted"]:
                break
            best = rung
    bounds = [verdict["upper"] for verdict in verdicts if verdict["accepted"]]
    return ChosenAllocation(
        division=divisions[best],
        tried=tuple((divisions[index].saved, found["accuracy"], bool(found["accepted"])) for index, found in tried.items()),
        answers=tuple(bool(verdict["accepted"]) for verdict in verdicts),
        bound=bounds[-1] if bounds else None,
        by_estimate=max((divisions[index].saved for index, found in tried.items() if found["by_estimate"]), default=0.0),
        frontier=tuple((division.saved, division.predicted_loss) for division in divisions),
    )


def ladder(divisions: Sequence[Allocation], edge: int, growth: float = FINE) -> tuple[int, ...]:
    """Indices of the divisions that certification climbs, ascending: from 0.4 of the saving at `edge` to the largest.

    The search images are few, so the true edge may lie well below the predicted one, or above it.
    """
    if len(divisions) < 2:
        return ()
    savings = [share * divisions[max(edge, 1)].saved for share in _RUNGS]
    while savings[-1] < divisions[-1].saved:
        savings.append(savings[-1] * growth)
    reached = {bisect_right([each.saved for each in divisions], saving + _TINY) - 1 for saving in savings}
    return tuple(sorted(reached - {0}))


def apply_allocation(
    workshop: PruningContext, courses: Mapping[str, SiteCurve], division: Allocation, *, proved: bool = False
) -> Graph:
    """The untouched network with all cuts of a division made in network order, each repaired after those before it."""
    graph = workshop.original
    for name, course in courses.items():
        m = division.removed.get(name, 0)
        site = workshop.site(graph, name) if m else None
        if site is not None:
            graph = workshop.made(workshop.place(graph, site), course.keep(m, site), proved=proved).graph
    return workshop.refitted(graph) if any(division.removed.values()) else graph


def allocations_for(workshop: PruningContext, courses: Mapping[str, SiteCurve]) -> Sequence[Allocation]:
    """The frontier, up to the first division that reaches all targets by what its cuts really save together; else all of it."""
    if not courses:
        return (Allocation({}, 0.0, 0.0),)
    divisions = frontier([course.curve for course in courses.values()])
    recipe = workshop.recipe
    if recipe.target_macs is None and recipe.target_parameters is None:
        return divisions
    low, high = 0, len(divisions) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _reaches(workshop, courses, divisions[middle]) else (middle + 1, high)
    return divisions[: low + 1]


def _reaches(workshop: PruningContext, courses: Mapping[str, SiteCurve], division: Allocation) -> bool:
    """Whether the cuts of a division, all made at once, save what the recipe wants; nothing is repaired or measured for it."""
    masks: dict[str | Site, Tensor] = {}
    for name, course in courses.items():
        site, m = workshop.site(workshop.original, name), division.removed[name]
        if m and site is not None:
            masks[name] = course.keep(m, site)
    smaller = compact(workshop.original, masks, verify=False) if masks else workshop.original
    before, after = cost(workshop.original), cost(smaller)
    parameters, macs = 1 - after.parameters / before.parameters, 1 - after.macs / max(before.macs, 1)
    recipe = workshop.recipe
    return macs >= (recipe.target_macs or 0.0) and parameters >= (recipe.target_parameters or 0.0)


def _largest(count: int, accepted: Callable[[int], bool]) -> int:
    """The largest of the numbers below `count` that is accepted, if acceptance only ever ends; 0 is not asked about."""
    passing, failing = 0, count
    if count > 1 and accepted(count - 1):
        return count - 1
    failing = count - 1
    while failing - passing > 1:
        middle = (passing + failing) // 2
        passing, failing = (middle, failing) if accepted(middle) else (passing, middle)
    return passing


def judged_by_search(workshop: PruningContext, graph: Graph, start: BaselineValues | None, baseline: float) -> dict[str, Any]:
    """What the search images say of a network: see `Trial`."""
    if start is None:
        found = workshop.evaluate(graph, workshop.jury.steering).accuracy
        within = round(baseline - found, 12) <= workshop.recipe.max_drop
        return {"accuracy": found, "accepted": within, "by_estimate": within}
    verdict = workshop.steered(graph, start)
    return {"accuracy": verdict.accuracy, "accepted": verdict.accepted, "by_estimate": verdict.by_estimate}


def _saved(workshop: PruningContext, graph: Graph) -> float:
    """The share of the MACs that is gone; of the parameters, if only for these there is a target."""
    before, after = cost(workshop.original), cost(graph)
    if workshop.recipe.target_macs is None and workshop.recipe.target_parameters is not None:
        return 1 - after.parameters / before.parameters
    return 1 - after.macs / max(before.macs, 1)


def find_curves(outfit: RunContext) -> dict[str, SiteCurve]:
    """The order and the curve of every site of the untouched network, by name, in network order."""
    workshop, here = outfit.workshop, outfit.whereabouts
    places = [site.name for site in find_sites(workshop.original, workshop.recipe.shortcut)]
    listed = sites_of_round(outfit, workshop.original, 0)
    unknown = [name for name in listed if name not in places]
    if unknown:
        raise RunError(
            f"journal.jsonl: the first round has site {brief(repr(unknown[0]))}, which the network has not. Restore the run "
            f"from a copy, or start a new one."
        )
    names = sorted(listed, key=places.index)
    found = {}
    for number, name in enumerate(names, 1):
        here.number, here.sites = number, len(names)
        site = workshop.site(workshop.original, name)
        if site is not None:
            found[name] = _course(outfit, site)
    return found


def _course(outfit: RunContext, site: Site) -> SiteCurve:
    """The course of the site at hand, measured once."""
    workshop, record, number = outfit.workshop, outfit.record, outfit.whereabouts.number
    if not record.units("curve", site=site.name):
        place = workshop.place(workshop.original, site)
        ranking = rank_site(outfit, place, number=number, name=_curve(number))
        course = measure_curve(workshop, place, ranking, allowed_widths(outfit, workshop.original, site))
        record.append("curve", site=site.name, **curve_fields(course))
    return curve_from(site, record.units("curve", site=site.name)[0])


def _curve(number: int) -> str:
    """What the ranking is called that belongs to the curve of the site with this number."""
    return f"curve-{number:04d}"


def allocate(outfit: RunContext, courses: Mapping[str, SiteCurve]) -> Allocation:
    """How many filters go at each site: the most that is within the contract, or enough for the target."""
    if not outfit.record.units("division"):
        _note(outfit, _found(outfit, courses))
    entry = outfit.record.units("division")[0]
    wrong = [name for name, m in entry["removed"].items() if name not in courses or m >= len(courses[name].ranking.order)]
    if wrong:
        raise RunError(
            f"journal.jsonl: the division does not fit site {brief(repr(wrong[0]))}. Restore the run from a copy, or "
            f"start a new one."
        )
    return Allocation(entry["removed"], entry["saved"], entry["loss"])


def _found(outfit: RunContext, courses: Mapping[str, SiteCurve]) -> ChosenAllocation:
    """Try divisions as whole networks. Every trial is journaled: a killed run does not make it again."""
    workshop, record, counted = outfit.workshop, outfit.record, outfit.judge.untouched
    divisions, start = allocations_for(workshop, courses), counted.start
    networks: dict[int, Graph] = {}

    def network(index: int) -> Graph:
        if index not in networks:
            networks.clear()  # one at a time: they are as large as the user's
            networks[index] = apply_allocation(workshop, courses, divisions[index])
        return networks[index]

    def search(index: int) -> Trial:
        measure = lambda: judged_by_search(workshop, network(index), start, counted.accuracy)  # noqa: E731
        return _trial(record, "steering", index, measure)

    def certify(index: int, answers: Sequence[bool]) -> Trial:
        def measure() -> dict[str, Any]:
            assert start is not None
            found = workshop.certified(network(index), start, list(answers))
            return {"accepted": found.accepted, "upper": found.upper}

        return _trial(record, "certifying", index, measure)

    return choose_allocation(
        divisions,
        search,
        None if start is None or workshop.jury.certifying is None else certify,
        growth=COARSE if workshop.jury.contract.reserve else FINE,
        on_trial=lambda done, of: outfit.whereabouts.tell("divide", done, of),
    )


def _trial(record: Record, judge: str, place: int, measure: Callable[[], dict[str, Any]]) -> Mapping[str, Any]:
    """What a division of the frontier was found to be, measured once: a killed run does not try it again."""
    if not record.units("trial", judge=judge, place=place):
        record.append("trial", judge=judge, place=place, **measure())
    return record.units("trial", judge=judge, place=place)[0]


def _note(outfit: RunContext, found: ChosenAllocation) -> None:
    """Write the division down."""
    certifying = outfit.judge.jury.certifying
    outfit.record.append(
        "division",
        removed=dict(found.division.removed),
        saved=found.division.saved,
        loss=found.division.predicted_loss,
        tried=[list(trial) for trial in found.tried],
        answers=list(found.answers),
        bound=found.bound,
        images=0 if certifying is None else len(certifying),
        by_estimate=found.by_estimate,
        frontier=[list(point) for point in found.frontier],
    )


def bound_of_division(record: Record) -> float | None:
    """The upper bound on the drop of the whole division; None: not certified."""
    bound: float | None = record.units("division")[0]["bound"]
    return bound


def file_ranking(outfit: RunContext) -> None:
    """Keep the ranking of the site at hand under the number of its step, too."""
    found = outfit.record.load_tensors(f"ensembles/{_curve(outfit.whereabouts.number)}")
    if found is not None:
        outfit.record.save_tensors(f"ensembles/{outfit.step:04d}", *found)
