"""One method on one network: every site's course once, then networks of falling size, each measured whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from benchmarks.conditions import conditions
from benchmarks.quality_setup import FOLDER, UNTOUCHED, Key, Method, Row, Subject, append_row, store_of
from secateurs import Graph, compact, cost, find_sites
from secateurs._util.files import write_text
from secateurs._util.journal import plain, record_from
from secateurs.config import TrainSettings, recipe_fields
from secateurs.criteria.ranking import Ranking
from secateurs.graph.masking import copied
from secateurs.graph.sites import Site
from secateurs.metrics import fingerprint
from secateurs.pruning.context import PreparedSite, PruningContext
from secateurs.pruning.curves import measure_curve
from secateurs.pruning.cuts import apply_allocation
from secateurs.pruning.results import SiteCurve
from secateurs.scoring.cache import context_of
from secateurs.selection.allocation import Allocation, frontier
from secateurs.training import train_

TOO_MUCH = 0.025  # a search drop above which a ladder ends
FIRST_REPAIRED = 0.1  # the first rung with repair: smaller cuts lose next to nothing

Tell = Callable[[str], None]


class Lesson(NamedTuple):
    """The training that every network gets."""

    epochs: int
    rate: float  # at the start; falls along a cosine


NO_LESSON = Lesson(0, 0.0)


class Seeded:
    """A network with a seed. What repairs need of the untouched network is the same for all methods, and kept."""

    def __init__(self, subject: Subject, seed: int, tell: Tell) -> None:
        self.subject, self.seed, self.tell = subject, seed, tell
        self._store = store_of(subject.model, seed)
        self._places: dict[tuple[str, str], PreparedSite] = {}
        self._ladders: dict[Method, Ladder] = {}

    def context(self, method: Method) -> PruningContext:
        return self.subject.context(method, self.seed, self._store)

    def place(self, context: PruningContext, site: Site) -> PreparedSite:
        key = context.recipe.repair, site.name
        if key not in self._places:
            self._places[key] = context.prepare(context.original, site)
        return self._places[key]

    def network(self, method: Method, target: float) -> Graph:
        """What a method makes for a target. Refitting comes after the cuts, so that cuts and courses are the repair's."""
        cuts = Method(method.criterion, "none" if method.repair == "none" else "least-squares")
        if cuts not in self._ladders:
            self._ladders[cuts] = Ladder(self.context(cuts), self.courses(cuts))
        return self.context(method).refit(self._ladders[cuts].network(target))

    def courses(self, method: Method) -> dict[str, SiteCurve]:
        """Order and curve of every site; from a file, where they were measured before."""
        context, began = self.context(method), perf_counter()
        sites = [site for site in find_sites(context.original, "before") if site.channels > 1]
        path = FOLDER / f"{self.subject.model}-{self.seed}-{method.name}-{_kind(context)}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        if set(known) != {site.name for site in sites}:
            for number, site in enumerate(sites, 1):
                if site.name not in known:
                    place = self.place(context, site)
                    ranking = context.rank(place, step=number, on_scored=lambda done, of: None)
                    known[site.name] = plain(measure_curve(context, place, ranking))
                    write_text(path, json.dumps(known) + "\n")
            self.tell(f"{path.stem}: courses of {len(sites)} sites, {perf_counter() - began:.0f} s")
        return {site.name: record_from(known[site.name], SiteCurve) for site in sites}


def _kind(context: PruningContext) -> str:
    """Names all that courses depend on besides the network: files of another recipe or another measure are left alone."""
    fields = {name: value for name, value in recipe_fields(context.recipe).items() if name != "batch"}
    told = json.dumps(fields, sort_keys=True)
    of_rankings = " ".join(field.name for field in dataclasses.fields(Ranking))
    return context_of(told, fingerprint(context.held_out.loss_fn), context.held_out.examples.digest(), of_rankings)[:12]


def climb(seeded: Seeded, method: Method, targets: Sequence[float], known: Mapping[Key, Row], lesson: Lesson) -> Iterator[Row]:
    """Networks of one method for rising MAC targets, until one loses too much; rows that are `known` are not measured.

    With a lesson of some epochs each network gives a second row, after training.
    """
    before = _start(seeded.subject, known)
    for target in sorted(targets):
        if target < FIRST_REPAIRED and method.repair != "none":
            continue
        key = (seeded.subject.model, seeded.seed, method.criterion, method.repair, target)
        row = known.get((*key, *NO_LESSON))
        missing = row is None or (lesson.epochs and (*key, *lesson) not in known)
        if missing:
            began = perf_counter()
            graph = seeded.network(method, target)
            if row is None:
                row = _measured(seeded, method, target, graph, before, began, NO_LESSON)
                yield row
            if lesson.epochs:
                graph = copied(graph)
                train_(graph.module, seeded.subject.data.train, _training(lesson, seeded.seed))
                yield _measured(seeded, method, target, graph, before, began, lesson)
        assert row is not None
        if row.search_drop > TOO_MUCH and not lesson.epochs:
            return


def untouched(seeded: Seeded, known: Mapping[Key, Row], lesson: Lesson) -> Iterator[Row]:
    """The uncut network, trained like all others: what training alone does to it."""
    if (seeded.subject.model, seeded.seed, UNTOUCHED, "none", 0.0, *lesson) in known:
        return
    began, fresh = perf_counter(), Subject(seeded.subject.model)
    train_(fresh.graph.module, seeded.subject.data.train, _training(lesson, seeded.seed))
    before = _start(seeded.subject, known)
    yield _measured(seeded, Method(UNTOUCHED, "none"), 0.0, fresh.graph, before, began, lesson)


@dataclass(frozen=True, eq=False)
class Ladder:
    """The divisions of one method's courses, and the networks that were made of them."""

    context: PruningContext
    courses: Mapping[str, SiteCurve]
    made: dict[float, Graph] = field(default_factory=dict)
    removed: dict[int, float] = field(default_factory=dict)

    def network(self, target: float) -> Graph:
        """All cuts made and repaired of the first division that really removes so many of the MACs; the last, if none does."""
        if target not in self.made:
            self.made[target] = apply_allocation(self.context, self.courses, self._reaching(target))
        return self.made[target]

    @cached_property
    def _divisions(self) -> Sequence[Allocation]:
        return frontier([course.curve for course in self.courses.values()])

    def _reaching(self, target: float) -> Allocation:
        divisions = self._divisions
        # predicted savings count what two neighbours save together twice: real ones are looked up, by halving
        low, high = 0, len(divisions) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._removed(middle) >= target else (middle + 1, high)
        return divisions[low]

    def _removed(self, place: int) -> float:
        """The share of the MACs that the masks of a division remove."""
        if place not in self.removed:
            self.removed[place] = self._counted(self._divisions[place])
        return self.removed[place]

    def _counted(self, division: Allocation) -> float:
        whole = self.context.original
        sites = {site.name: site for site in find_sites(whole, "before")}
        masks: dict[str | Site, Tensor] = {
            name: self.courses[name].keep(m, sites[name]) for name, m in division.removed.items() if m
        }
        return 1 - cost(compact(whole, masks)).macs / cost(whole).macs


def _start(subject: Subject, known: Mapping[Key, Row]) -> tuple[float, float]:
    """Search and test accuracy of the untouched network, from any row that has them."""
    for row in known.values():
        if row.model == subject.model:
            return row.search_before, row.test_before
    return subject.search(subject.graph).accuracy, subject.test(subject.graph).accuracy


def _measured(
    seeded: Seeded, method: Method, target: float, graph: Graph, before: tuple[float, float], began: float, lesson: Lesson
) -> Row:
    whole, left, subject = cost(seeded.subject.graph), cost(graph), seeded.subject
    search_after, test_after = subject.search(graph).accuracy, subject.test(graph).accuracy
    row = Row(
        subject.model,
        seeded.seed,
        method.criterion,
        method.repair,
        target,
        lesson.epochs,
        1 - left.macs / whole.macs,
        1 - left.parameters / whole.parameters,
        before[0],
        search_after,
        before[1],
        test_after,
        perf_counter() - began,
        conditions().sentence(),
        lesson.rate,
    )
    append_row(row)
    return row


def _training(lesson: Lesson, seed: int) -> TrainSettings:
    return TrainSettings(epochs=lesson.epochs, lr=lesson.rate, augment="crop-flip", seed=seed)
