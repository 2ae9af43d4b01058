"""The cuts of an allocation, made together in the original network and repaired."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from secateurs.compaction import compact
from secateurs.config import REFITTED
from secateurs.data.dataset import Examples
from secateurs.graph.masking import copied
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.pruning.context import PruningContext
from secateurs.pruning.results import SiteCurve
from secateurs.repair import solve_together, write_
from secateurs.selection.allocation import Allocation


class CutsTogether:
    """The cuts of an allocation, in network order, each repaired as the survey of the original network says.

    What each layer really sees between the others' cuts comes with the refit, after the last one.
    """

    def __init__(self, context: PruningContext, curves: Mapping[str, SiteCurve], removed: Mapping[str, int]) -> None:
        self.context, self.masks, self._solved = context, dict[str, Tensor](), dict[bytes, dict[str, Tensor]]()
        for name, curve in curves.items():
            site = context.site(context.original, name) if removed.get(name, 0) else None
            if site is not None:
                self.masks[name] = curve.keep(removed[name], site)
        survey = context.survey
        self.surveyed = {} if survey is None else survey.reconstructions
        self.possible = context.recipe.repair in REFITTED and bool(self.masks) and set(self.masks) <= set(self.surveyed)

    def up_to(self, last: str, *, verify: bool = False) -> Graph:
        """The network with the cuts up to that at the site `last` made and repaired, not refitted."""
        names = list(self.masks)
        masks: dict[str | Site, Tensor] = {name: self.masks[name] for name in names[: names.index(last) + 1]}
        # what a folded branch gave is made up for by the refit, behind the sum; a bias for that would leave a constant
        # in its place, which a concatenation cannot take
        read = [name for name in names if bool(self.masks[name].any())]
        graph, some = copied(self.context.prepared(read)), {name: self.masks[name] for name in read if name in masks}
        write_(graph, solve_together({name: self.surveyed[name] for name in some}, some, self._solved))
        return compact(graph, masks, verify=verify)


def apply_allocation(
    context: PruningContext,
    curves: Mapping[str, SiteCurve],
    allocation: Allocation,
    *,
    verify: bool = False,
    examples: Examples | None = None,
) -> Graph:
    """The original network with all cuts of an allocation made, repaired, and refitted if the recipe wants that.

    The refit reads all examples for repairs, or those given.
    """
    together = CutsTogether(context, curves, allocation.removed)
    if together.possible:
        return context.refit(together.up_to(list(together.masks)[-1], verify=verify), examples=examples)
    graph = context.original
    for name, curve in curves.items():  # in network order, each repaired after those before it
        m = allocation.removed.get(name, 0)
        site = context.site(graph, name) if m else None
        if site is not None:
            graph, _ = context.compacted(context.prepare(graph, site), curve.keep(m, site), verify=verify)
    return context.refit(graph, examples=examples) if any(allocation.removed.values()) else graph
