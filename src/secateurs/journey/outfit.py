"""What a run has with it all the way: its workshop, its record, its judge, and somebody to tell where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from secateurs.costs import Cost, cost
from secateurs.graph import Graph
from secateurs.journey.judging import Judge
from secateurs.record import Record
from secateurs.sites import Site
from secateurs.steps import Progress
from secateurs.workshop import Workshop

Watch = Callable[[Progress], None]


@dataclass(eq=False)
class Whereabouts:
    """The round and the site at hand, and who wants to know."""

    watch: Watch | None
    round: int = 0
    number: int = 0  # of the site in this round, from 1
    sites: int = 0

    def tell(self, phase: str, done: int, total: int, site: Site | None = None) -> None:
        """Say that `done` of `total` units of a phase are done."""
        if self.watch is not None:
            name = "" if site is None else site.name
            self.watch(Progress(phase, done, total, name, self.number, self.sites, self.round))


@dataclass(frozen=True, eq=False)
class Outfit:
    """What all parts of a run share."""

    workshop: Workshop
    record: Record
    judge: Judge
    whereabouts: Whereabouts

    @property
    def step(self) -> int:
        """The number of the step at hand, from 1."""
        return len(self.record.units("step")) + 1

    @cached_property
    def cost_before(self) -> Cost:
        """What the untouched network costs."""
        return cost(self.workshop.original)

    def shares_removed(self, graph: Graph) -> tuple[float, float]:
        """The shares of the parameters and of the MACs that `graph` no longer has."""
        now, before = cost(graph), self.cost_before
        return 1 - now.parameters / before.parameters, 1 - now.macs / max(before.macs, 1)
