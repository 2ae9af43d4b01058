"""The same share of filters at every site, up to one filter: the smallest that reaches the target, by any criterion."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from secateurs.config import Repair
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.methods.allocations import Counts, Reached, first_reaching
from secateurs.methods.base import ENDINGS, MethodRun, MethodState, Pruned, Task, Watch, opened, recipe_for
from secateurs.methods.profiles import look_at_order, observing, profile_sites
from secateurs.methods.training import finished, train_rest
from secateurs.pruning.global_allocation import SiteCurve


def uniform(task: Task, *, criterion: str, repair: Repair = "none", watch: Watch | None = None) -> Pruned:
    """Prune every site by the same share along a criterion's order, all at once, then spend the budget."""
    name = f"{criterion}:uniform{ENDINGS[repair]}"
    with opened(task, name, recipe_for(task, criterion, repair=repair), watch) as work:
        return finished(work, train_rest(work, work.standing() or work.keep(_cut(work))))


def shares(sites: Sequence[Site]) -> list[float]:
    """All shares at which some site loses one filter more, ascending from 0; one filter is left everywhere."""
    return sorted({count / site.channels for site in sites for count in range(site.channels)})


def of_share(sites: Sequence[Site], share: float) -> Counts:
    """The filters that each site loses, its share rounded down."""
    return {site.name: min(math.floor(round(share * site.channels, 9)), site.channels - 1) for site in sites}


def smallest_share(work: MethodRun, courses: Mapping[str, SiteCurve], graph: Graph | None = None) -> Reached:
    """The smallest share of the filters that reaches the target; the sites before lose one filter more than those behind."""
    return first_reaching(work, courses, [of_share(work.sites, share) for share in shares(work.sites)], graph)


def share_note(work: MethodRun, chosen: Reached) -> str:
    """The share in words."""
    share = shares(work.sites)[chosen.rung]
    return f"up to {share:.1%} of the filters of every site, {chosen.filters} in all"


def _cut(work: MethodRun) -> MethodState:
    looked = profile_sites(work, look_at_order)
    courses, began = {name: found.course for name, found in looked.items()}, time.monotonic()
    chosen = smallest_share(work, courses)
    return MethodState(
        chosen.graph,
        passes=sum(found.passes for found in looked.values()) + observing(work) * chosen.cuts,
        search_seconds=sum(found.seconds for found in looked.values()) + time.monotonic() - began,
        note=share_note(work, chosen),
    )
