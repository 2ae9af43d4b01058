"""All sites weighed against each other: every curve is measured once, then a division of the cuts is chosen and made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from secateurs.allocation import Division
from secateurs.decode import brief
from secateurs.dividing import (
    COARSE,
    FINE,
    Course,
    Divided,
    Trial,
    course_fields,
    course_from,
    divisions_for,
    find_division,
    judged_by_search,
    measure_course,
    with_cuts,
)
from secateurs.errors import RunError
from secateurs.graph import Graph
from secateurs.journey.itinerary import sites_of_round
from secateurs.journey.outfit import Outfit
from secateurs.journey.visiting import allowed_widths, rank
from secateurs.record import Record
from secateurs.sites import Site, find_sites


def find_courses(outfit: Outfit) -> dict[str, Course]:
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


def _course(outfit: Outfit, site: Site) -> Course:
    """The course of the site at hand, measured once."""
    workshop, record, number = outfit.workshop, outfit.record, outfit.whereabouts.number
    if not record.units("curve", site=site.name):
        place = workshop.place(workshop.original, site)
        ranking = rank(outfit, place, number=number, name=_curve(number))
        course = measure_course(workshop, place, ranking, allowed_widths(outfit, workshop.original, site))
        record.append("curve", site=site.name, **course_fields(course))
    return course_from(site, record.units("curve", site=site.name)[0])


def _curve(number: int) -> str:
    """What the ranking is called that belongs to the curve of the site with this number."""
    return f"curve-{number:04d}"


def divide(outfit: Outfit, courses: Mapping[str, Course]) -> Division:
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
    return Division(entry["removed"], entry["saved"], entry["loss"])


def _found(outfit: Outfit, courses: Mapping[str, Course]) -> Divided:
    """Try divisions as whole networks. Every trial is journaled: a killed run does not make it again."""
    workshop, record, counted = outfit.workshop, outfit.record, outfit.judge.untouched
    divisions, start = divisions_for(workshop, courses), counted.start
    networks: dict[int, Graph] = {}

    def network(index: int) -> Graph:
        if index not in networks:
            networks.clear()  # one at a time: they are as large as the user's
            networks[index] = with_cuts(workshop, courses, divisions[index])
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

    return find_division(
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


def _note(outfit: Outfit, found: Divided) -> None:
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


def file_ranking(outfit: Outfit) -> None:
    """Keep the ranking of the site at hand under the number of its step, too."""
    found = outfit.record.load_tensors(f"ensembles/{_curve(outfit.whereabouts.number)}")
    if found is not None:
        outfit.record.save_tensors(f"ensembles/{outfit.step:04d}", *found)
