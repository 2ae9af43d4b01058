"""Filters ranked once by any criterion, the cuts divided over the sites by measured loss per MAC, all made at once."""

from __future__ import annotations

import time

from secateurs.config import Repair
from secateurs.methods.allocations import first_reaching
from secateurs.methods.base import ENDINGS, MethodRun, MethodState, Pruned, Task, Watch, opened, recipe_for
from secateurs.methods.profiles import look_at_curve, observing, profile_sites
from secateurs.methods.training import finished, train_rest
from secateurs.selection.allocation import frontier


def divided(task: Task, *, criterion: str, repair: Repair = "none", watch: Watch | None = None) -> Pruned:
    """Make the cuts of the first division on the frontier of all sites' curves that reaches the target; spend the budget."""
    name = f"{criterion}{ENDINGS[repair]}"
    with opened(task, name, recipe_for(task, criterion, repair=repair), watch) as work:
        return finished(work, train_rest(work, work.standing() or work.keep(_cut(work))))


def _cut(work: MethodRun) -> MethodState:
    looked = profile_sites(work, look_at_curve)
    courses, began = {name: found.course for name, found in looked.items()}, time.monotonic()
    divisions = frontier([course.curve for course in courses.values()])
    chosen = first_reaching(work, courses, [division.removed for division in divisions])
    answering = len(work.workshop.held_out.examples)  # the untouched network, whose answers curves are measured against
    return MethodState(
        chosen.graph,
        passes=answering + sum(found.passes for found in looked.values()) + observing(work) * chosen.cuts,
        search_seconds=sum(found.seconds for found in looked.values()) + time.monotonic() - began,
        note=f"division {chosen.rung} of {len(divisions) - 1}, {chosen.filters} filters",
    )
