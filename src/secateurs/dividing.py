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

from secateurs.allocation import Curve, Division, frontier
from secateurs.compaction import compact
from secateurs.costs import cost
from secateurs.cutting import Start
from secateurs.errors import NonFinite, RunError
from secateurs.graph import Graph
from secateurs.ranking import Ranking, cuts_along
from secateurs.search import Cut
from secateurs.sites import Site
from secateurs.workshop import Place, Workshop

_TINY = 1e-12  # sums of shares are rounded
_GRID = 8  # a curve has so many points between nothing and all filters
_RUNGS = (0.4, 0.5)  # of the saving at the predicted edge: the first rungs of the climb
FINE, COARSE = (
    1.06,
    1.3,
)  # what a rung saves, of the one before; coarse where training follows, which a "no" makes harder to certify


@dataclass(frozen=True, eq=False)
class Course:
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


def measure_course(workshop: Workshop, place: Place, ranking: Ranking, widths: Sequence[int] | None = None) -> Course:
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
    return Course(ranking, site.original, Curve(site.name, counts, tuple(losses), tuple(saved)))


def course_fields(course: Course) -> dict[str, Any]:
    """A course as plain values."""
    ranking, curve = course.ranking, course.curve
    names = ("criterion", "masks", "examples", "note", "r2_held_out", "split_half", "compared")
    return {
        "order": ranking.order.tolist(),
        **{name: getattr(curve, name) for name in ("removed", "loss", "saved")},
        **{name: getattr(ranking, name) for name in names},
    }


def course_from(site: Site, entry: Mapping[str, Any]) -> Course:
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
    return Course(ranking, site.original, Curve(site.name, *(tuple(entry[name]) for name in ("removed", "loss", "saved"))))


@dataclass(frozen=True)
class Divided:
    """The division that was chosen, and what led to it."""

    division: Division
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


def find_division(
    divisions: Sequence[Division],
    search: Callable[[int], Trial],
    certify: Callable[[int, Sequence[bool]], Trial] | None,
    *,
    growth: float = FINE,
    on_trial: Callable[[int, int], None] = lambda done, of: None,
) -> Divided:
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
    return Divided(
        division=divisions[best],
        tried=tuple((divisions[index].saved, found["accuracy"], bool(found["accepted"])) for index, found in tried.items()),
        answers=tuple(bool(verdict["accepted"]) for verdict in verdicts),
        bound=bounds[-1] if bounds else None,
        by_estimate=max((divisions[index].saved for index, found in tried.items() if found["by_estimate"]), default=0.0),
        frontier=tuple((division.saved, division.predicted_loss) for division in divisions),
    )


def ladder(divisions: Sequence[Division], edge: int, growth: float = FINE) -> tuple[int, ...]:
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


def with_cuts(workshop: Workshop, courses: Mapping[str, Course], division: Division, *, proved: bool = False) -> Graph:
    """The untouched network with all cuts of a division made in network order, each repaired after those before it."""
    graph = workshop.original
    for name, course in courses.items():
        m = division.removed.get(name, 0)
        site = workshop.site(graph, name) if m else None
        if site is not None:
            graph = workshop.made(workshop.place(graph, site), course.keep(m, site), proved=proved).graph
    return workshop.refitted(graph) if any(division.removed.values()) else graph


def divisions_for(workshop: Workshop, courses: Mapping[str, Course]) -> Sequence[Division]:
    """The frontier, up to the first division that reaches all targets by what its cuts really save together; else all of it."""
    if not courses:
        return (Division({}, 0.0, 0.0),)
    divisions = frontier([course.curve for course in courses.values()])
    recipe = workshop.recipe
    if recipe.target_macs is None and recipe.target_parameters is None:
        return divisions
    low, high = 0, len(divisions) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _reaches(workshop, courses, divisions[middle]) else (middle + 1, high)
    return divisions[: low + 1]


def _reaches(workshop: Workshop, courses: Mapping[str, Course], division: Division) -> bool:
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


def judged_by_search(workshop: Workshop, graph: Graph, start: Start | None, baseline: float) -> dict[str, Any]:
    """What the search images say of a network: see `Trial`."""
    if start is None:
        found = workshop.evaluate(graph, workshop.jury.steering).accuracy
        within = round(baseline - found, 12) <= workshop.recipe.max_drop
        return {"accuracy": found, "accepted": within, "by_estimate": within}
    verdict = workshop.steered(graph, start)
    return {"accuracy": verdict.accuracy, "accepted": verdict.accepted, "by_estimate": verdict.by_estimate}


def _saved(workshop: Workshop, graph: Graph) -> float:
    """The share of the MACs that is gone; of the parameters, if only for these there is a target."""
    before, after = cost(workshop.original), cost(graph)
    if workshop.recipe.target_macs is None and workshop.recipe.target_parameters is not None:
        return 1 - after.parameters / before.parameters
    return 1 - after.macs / max(before.macs, 1)
