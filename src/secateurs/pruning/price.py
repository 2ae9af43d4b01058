"""Prices: what cuts save, in MACs, parameters, activations or seconds, and the allocations that save most for what they lose.

`price_for` makes the one that a run spends. All prices have one face; `time_price.TimePrice` is that of seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from secateurs.compaction import compact
from secateurs.criteria.ranking import Ranking, cuts_along
from secateurs.graph.sites import Site
from secateurs.graph.structure import activations
from secateurs.graph.trace import Graph
from secateurs.pruning.results import ChosenAllocation, MeasuredSpeed, SiteCurve
from secateurs.selection.allocation import Allocation, frontier
from secateurs.speed.engines import Engine, TorchEngine

if TYPE_CHECKING:
    from secateurs.pruning.context import PruningContext

_PROBED_BATCH = 4  # examples at once where the multiple of widths is measured in eager mode


class Price(Protocol):
    """What a run spends."""

    currency: str  # time, MACs, parameters or activations
    makes_up_for_branches: bool  # a folded branch is weighed after the layers behind it have made up for it

    @property
    def target_share(self) -> float | None:
        """The share of the original network's time that may remain; None: no target in time."""

    @property
    def engine(self) -> Engine:
        """The engine that widths are chosen for."""

    def prepare(self) -> None:
        """Measure what all curves need."""

    def widths_of(self, site: Site) -> tuple[int, ...] | None:
        """The numbers of filters that may be kept at a site; None: all."""

    def alone(self, site: Site, ranking: Ranking, counts: Sequence[int]) -> tuple[float, ...]:
        """What cuts of a site save alone, by the number of filters removed: shares of the original network."""

    def frontiers(self, curves: Mapping[str, SiteCurve]) -> Mapping[str, Sequence[Allocation]]:
        """Allocations, each of which saves more than the last, by what cuts were weighed by."""

    def paid(
        self,
        chosen: ChosenAllocation,
        allocations: Sequence[Allocation],
        passed: Mapping[int, float | None],
        network: Callable[[int], Graph],
    ) -> ChosenAllocation:
        """The choice, if it saves what it was made for; else another of those that `passed` (with their bounds), or none."""

    def engines(self, batch: int) -> list[Engine]:
        """Those in which the result is timed, the first one at the batch that is served."""

    def predicted(self, original: float, saved: float | None) -> float | None:
        """Seconds of the result, where they were predicted."""

    def layer_times(self, graph: Graph, speed: MeasuredSpeed) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
        """Seconds of layers in the original network and in the smaller one, by name; None: not known by tables."""


@dataclass(eq=False)
class Counted:
    """What can be counted in a network: `share` of it is removed. Any saving is as good as promised."""

    context: PruningContext
    currency: str
    share: Callable[[Graph], float]
    makes_up_for_branches: bool = False  # narrow layers are worth as much as whole branches, and lose less

    @property
    def target_share(self) -> None:
        """No target in time."""
        return None

    @property
    def engine(self) -> Engine:
        """Eager mode, at few examples."""
        return TorchEngine(_PROBED_BATCH, device=self.context.runtime.device)

    def prepare(self) -> None:
        """Nothing is measured."""

    def widths_of(self, site: Site) -> tuple[int, ...] | None:
        """All numbers of filters are allowed."""
        return None

    def alone(self, site: Site, ranking: Ranking, counts: Sequence[int]) -> tuple[float, ...]:
        """In proportion to the filters removed; all filters, where the branch is folded away, by itself."""
        some, *whole = (counts[:-1], counts[-1]) if counts[-1] == site.channels else (counts,)
        most = self._without(site, ranking, some[-1])
        found = [most * count / max(some[-1], 1) for count in some]
        return (*found, *(self._without(site, ranking, count) for count in whole))

    def _without(self, site: Site, ranking: Ranking, count: int) -> float:
        masks: dict[str | Site, Tensor] = {site.name: cuts_along(ranking.order, [count])[0]}
        return self.share(compact(self.context.original, masks, verify=False))

    def frontiers(self, curves: Mapping[str, SiteCurve]) -> Mapping[str, Sequence[Allocation]]:
        """One."""
        return {self.currency: frontier([each.curve for each in curves.values()], self.context.branches(curves))}

    def paid(
        self,
        chosen: ChosenAllocation,
        allocations: Sequence[Allocation],
        passed: Mapping[int, float | None],
        network: Callable[[int], Graph],
    ) -> ChosenAllocation:
        """As it was chosen."""
        return chosen

    def engines(self, batch: int) -> list[Engine]:
        """The one that was asked for, or eager mode."""
        return [self.context.runtime.engine or TorchEngine(batch, device=self.context.runtime.device)]

    def predicted(self, original: float, saved: float | None) -> float | None:
        """Nothing is predicted of time."""
        return None

    def layer_times(self, graph: Graph, speed: MeasuredSpeed) -> None:
        """There are no tables."""
        return


def macs(context: PruningContext) -> Counted:
    """Multiplications of the network."""
    return Counted(context, "MACs", lambda graph: context.shares_removed(graph)[1])


def price_for(context: PruningContext) -> Price:
    """Seconds where an engine is known and all sites are weighed together; else what the target counts, or MACs."""
    from secateurs.pruning.time_price import TimePrice

    recipe = context.recipe
    if context.by_time:
        return TimePrice(context)
    if recipe.target_macs is None and recipe.target_parameters is not None:
        return Counted(context, "parameters", lambda graph: context.shares_removed(graph)[0])
    if recipe.target_macs is None and recipe.target_memory is not None:
        before = activations(context.original).total
        return Counted(context, "activations", lambda graph: 1 - activations(graph).total / before)
    return macs(context)
