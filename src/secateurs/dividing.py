"""All cuts weighed against each other: every site's curve is measured once, and the allowed loss goes where it saves most.

A curve holds the loss of the network, repaired if repairs are made, against the filters removed at one site alone. From all
curves follows the frontier of predicted loss against saving; the cuts of one of its divisions are made together and judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateurs.allocation import Curve, Division, frontier
from secateurs.compaction import compact
from secateurs.costs import cost
from secateurs.cutting import Start
from secateurs.errors import NonFinite
from secateurs.graph import Graph
from secateurs.ranking import Ranking, cuts_along
from secateurs.search import Cut
from secateurs.sites import Site
from secateurs.workshop import Place, Workshop

_GRID = 8  # a curve has so many points between nothing and all filters
_CLIMB = (0.5, 0.7, 0.85, 1.0)  # of what steering images would allow: what certifying ones are asked about, in this order


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
    compared = tuple((str(name), float(loss)) for name, loss in entry["compared"])
    figures = {name: entry[name] for name in ("masks", "examples", "note", "r2_held_out", "split_half")}
    ranking = Ranking(entry["criterion"], torch.tensor(entry["order"]), compared=compared, **figures)
    return Course(ranking, site.original, Curve(site.name, *(tuple(entry[name]) for name in ("removed", "loss", "saved"))))


@dataclass(frozen=True)
class Divided:
    """The division that was chosen, and what led to it."""

    division: Division
    tried: tuple[tuple[float, float, bool], ...]  # saved, accuracy on the steering images, accepted
    answers: tuple[bool, ...]  # of the certifying images
    bound: float | None  # upper bound on the drop of what was chosen; None: not certified
    by_estimate: float  # saved by the division that a point estimate would have allowed
    frontier: tuple[tuple[float, float], ...]  # saved, predicted increase of the loss: what one measuring pass tells


Remember = Callable[[str, int, Callable[[], dict[str, Any]]], Mapping[str, Any]]
"""Takes who judged, the place of a division on the frontier, and what measures it; gives what was measured, then or earlier."""


def _measured_anew(judge: str, place: int, measure: Callable[[], dict[str, Any]]) -> Mapping[str, Any]:
    return measure()


def find_division(
    workshop: Workshop,
    courses: Mapping[str, Course],
    start: Start | None,
    *,
    baseline: float,
    on_trial: Callable[[int, int], None],
    remember: Remember = _measured_anew,
) -> Divided:
    """The division that saves most within the contract, or just enough for the recipe's target, found by halving.

    All cuts of a division are made and repaired, and the network is judged by the steering images, by estimate. Certifying ones
    are then asked about divisions of rising size up to that one, an order that they had no part in, so that every yes is free;
    their first no ends the climb, and what they accepted last is taken. `remember` may know what an earlier trial gave.
    """
    divisions: Sequence[Division] = (Division({}, 0.0, 0.0),)
    if courses:
        divisions = _wanted(workshop, courses, frontier([course.curve for course in courses.values()]))
    certifying = start is not None and workshop.jury.certifying is not None
    networks: dict[int, Graph] = {}
    tried: list[tuple[float, float, bool]] = []
    verdicts: list[Mapping[str, Any]] = []

    def network(index: int) -> Graph:
        if index not in networks:
            networks.clear()  # one at a time: they are as large as the user's
            networks[index] = with_cuts(workshop, courses, divisions[index])
        return networks[index]

    def accepted(index: int) -> bool:
        expected = max(len(divisions).bit_length() + 1, len(tried) + 1)
        on_trial(len(tried) + 1, expected + len(_CLIMB) * certifying)
        found = remember("steering", index, lambda: _judged(workshop, network(index), start, baseline))
        tried.append((divisions[index].saved, found["accuracy"], found["accepted"]))
        return tried[-1][2]

    def certified(index: int) -> bool:
        assert start is not None
        on_trial(len(tried) + len(verdicts) + 1, len(tried) + len(_CLIMB))
        verdicts.append(remember("certifying", index, lambda: certificate(network(index), start)))
        return bool(verdicts[-1]["accepted"])

    def certificate(graph: Graph, start: Start) -> dict[str, Any]:
        found = workshop.certified(graph, start, [bool(verdict["accepted"]) for verdict in verdicts])
        return {"accepted": found.accepted, "upper": found.upper}

    highest = best = _largest(len(divisions), accepted)
    if certifying:
        best = _climbed(divisions, highest, certified)
    accepted_last = [verdict["upper"] for verdict in verdicts if verdict["accepted"]][-1:]
    return Divided(
        division=divisions[best],
        tried=tuple(tried),
        answers=tuple(bool(verdict["accepted"]) for verdict in verdicts),
        bound=accepted_last[0] if accepted_last else None,
        by_estimate=divisions[highest].saved,
        frontier=tuple((division.saved, division.predicted_loss) for division in divisions),
    )


def with_cuts(workshop: Workshop, courses: Mapping[str, Course], division: Division, *, proved: bool = False) -> Graph:
    """The untouched network with all cuts of a division made in network order, each repaired after those before it."""
    graph = workshop.original
    for name, course in courses.items():
        m = division.removed.get(name, 0)
        site = workshop.site(graph, name) if m else None
        if site is not None:
            graph = workshop.made(workshop.place(graph, site), course.keep(m, site), proved=proved).graph
    return workshop.refitted(graph) if any(division.removed.values()) else graph


def _wanted(workshop: Workshop, courses: Mapping[str, Course], divisions: Sequence[Division]) -> Sequence[Division]:
    """The divisions up to the first that reaches all targets, by what its cuts really save together; without targets, all."""
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


def _climbed(divisions: Sequence[Division], highest: int, certified: Callable[[int], bool]) -> int:
    """The last division that is certified on the way up to `highest`; 0, nothing cut, if already the first is not."""
    steps = {max(i for i in range(highest + 1) if divisions[i].saved <= share * divisions[highest].saved) for share in _CLIMB}
    reached = 0
    for index in sorted(steps - {0}):
        if not certified(index):
            break
        reached = index
    return reached


def _judged(workshop: Workshop, graph: Graph, start: Start | None, baseline: float) -> dict[str, Any]:
    """Accuracy of a network on the steering images, and whether it is within the drop by that estimate."""
    if start is None:
        found = workshop.evaluate(graph, workshop.jury.steering).accuracy
        return {"accuracy": found, "accepted": round(baseline - found, 12) <= workshop.recipe.max_drop}
    verdict = workshop.steered(graph, start, [])
    return {"accuracy": verdict.accuracy, "accepted": verdict.by_estimate}


def _saved(workshop: Workshop, graph: Graph) -> float:
    """The share of the MACs that is gone; of the parameters, if only for these there is a target."""
    before, after = cost(workshop.original), cost(graph)
    if workshop.recipe.target_macs is None and workshop.recipe.target_parameters is not None:
        return 1 - after.parameters / before.parameters
    return 1 - after.macs / max(before.macs, 1)
