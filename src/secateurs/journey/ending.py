"""How a run ends: the test set is read, once, for the network as it came and as it is now, and the speed is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from secateurs.costs import cost
from secateurs.data.examples import Examples
from secateurs.evaluate import Evaluation
from secateurs.graph import Graph
from secateurs.identity import called
from secateurs.journey.outfit import Outfit
from secateurs.report import aligning_share
from secateurs.steps import Outcome, Step
from secateurs.timing import SpeedUp, latency
from secateurs.workshop import Workshop

_TIMED, _TIMINGS = 64, 12  # examples at once, and how often, when the speed is measured


def find_outcome(outfit: Outfit, graph: Graph, steps: Sequence[Step], *, stopped: str, began: float) -> Outcome:
    """What the run gives, with `graph` as its last network; `began` is by the monotonic clock."""
    workshop, original = outfit.workshop, outfit.workshop.original
    test, search = workshop.data.test.ready(workshop.dtype), workshop.search
    before, after = (workshop.evaluate(network, test) for network in (original, graph))
    timed = test.batch(slice(0, _TIMED)).inputs if any(step.removed for step in steps) else None
    return Outcome(
        graph=graph,
        steps=tuple(steps),
        stopped=stopped,
        metric=called(workshop.tools.metric),
        search_before=workshop.evaluate(original, search),
        search_after=workshop.evaluate(graph, search),
        test_before=before,
        test_after=after,
        cost_before=outfit.cost_before,
        cost_after=cost(graph),
        classes=_classes(workshop, (before, after), test),
        speed=None if timed is None else _speed(workshop, graph, timed),
        batch=0 if timed is None else len(timed),
        aligning=0.0 if timed is None else aligning_share(graph, timed),
        seconds=time.monotonic() - began,
    )


def _classes(workshop: Workshop, found: Sequence[Evaluation], test: Examples) -> tuple[tuple[str, float, float], ...]:
    """Test accuracy of every class before and after."""
    each = [workshop.by_class(one, test) for one in found]
    return tuple(zip(workshop.data.classes, *each, strict=True)) if all(each) else ()


def _speed(workshop: Workshop, graph: Graph, inputs: Tensor) -> SpeedUp:
    """How much faster the smaller network is here."""
    found = latency(workshop.original, graph, example_input=inputs, repeats=_TIMINGS, device=workshop.tools.device)
    return found.speedups[0]
