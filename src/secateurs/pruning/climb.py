"""The climb along a frontier: which of its allocations are looked at, trained and certified, and which is taken."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from secateurs.pruning.results import ChosenAllocation, Trial
from secateurs.selection.allocation import Allocation

_TINY = 1e-12  # sums of shares are rounded
_FIRST = (0.4, 0.5)  # of the saving at the predicted edge: the first allocations that are certified
FINE = 1.12  # of the next allocation that is certified: its saving relative to the one before, or what that leaves to its own
_LEAST_STEP = 0.005  # of the saving between two of them
COARSE = 1.3  # the same where training follows, which a refusal makes harder to certify
_TRAINED_FROM, _TRAINED_STEP = 0.7, 1.1  # of the saving at the edge before training: where trained trials begin; their steps


def choose_allocation(
    allocations: Sequence[Allocation],
    search: Callable[[int], Trial],
    certify: Callable[[int, Sequence[bool]], Trial | None] | None,
    *,
    search_trained: Callable[[int], Trial] | None = None,
    bounded: bool = False,
    growth: float = FINE,
    images: int = 0,
    on_trial: Callable[[str, int, int], None] = lambda phase, done, of: None,
) -> ChosenAllocation:
    """Choose the allocation that saves most within the contract; each saves more than the one before, the first nothing.

    `search` measures an allocation, by its index, on the search images. The edge, the largest one that they predict to be
    certified, is found by bisection. The certification images are then asked about ever larger allocations (`to_certify`),
    which were fixed without them; `certify` takes an index and their answers so far. Every acceptance is free, the first
    refusal is final, and the last accepted allocation is taken. Without `certify` the edge itself is. Where it gives None, the
    search images alone decided not to ask about this allocation, which is passed over.

    `search_trained` measures an allocation after its training: first the one at the edge before training, or the last where
    a target is what `bounded` them, and few in all (`to_train`). `certify` is then asked about trained ones.
    """
    tried: dict[int, Trial] = {}
    verdicts: list[Trial] = []

    def accepted(index: int) -> bool:
        on_trial("divide", len(tried), max(len(allocations).bit_length(), len(tried) + 1))
        tried[index] = search(index)
        return tried[index].accepted

    def accepted_trained(index: int) -> bool:
        assert search_trained is not None
        on_trial("trained", len(tried), max(len(ladder).bit_length(), len(tried) + 1))
        tried[index] = search_trained(index)
        return tried[index].accepted

    best = _largest(len(allocations), accepted)
    ladder, asked = to_train(allocations, best), to_certify(allocations, best, growth)
    if search_trained is not None:
        tried.clear()  # what trained networks lose is what counts
        start = len(ladder) - 1 if bounded or best not in ladder else ladder.index(best)
        rung = _climbed(len(ladder), start, lambda rung: accepted_trained(ladder[rung]))
        best = 0 if rung is None else ladder[rung]
        asked = tuple(ladder[place] for place in _few_up_to(rung or 0, len(ladder)))
    if certify is not None:
        likely = min(sum(index <= best for index in asked) + 1, len(asked))  # the first one beyond the edge is refused
        best = 0
        for done, index in enumerate(asked):
            on_trial("certify", done, max(likely, done + 1))
            verdict = certify(index, [earlier.accepted for earlier in verdicts])
            if verdict is None:
                continue
            verdicts.append(verdict)
            if not verdict.accepted:
                break
            best = index
    bounds = [verdict.upper for verdict in verdicts if verdict.accepted]
    chosen = allocations[best]
    return ChosenAllocation(
        removed=dict(chosen.removed),
        saved=chosen.saved,
        loss=chosen.predicted_loss,
        tried=tuple((allocations[index].saved, trial.accuracy or 0.0, trial.accepted) for index, trial in tried.items()),
        answers=tuple(verdict.accepted for verdict in verdicts),
        bound=bounds[-1] if bounds else None,
        images=images,
        by_estimate=max((allocations[index].saved for index, trial in tried.items() if trial.by_estimate), default=0.0),
        frontier=tuple((each.saved, each.predicted_loss) for each in allocations),
        place=best,
    )


def to_certify(allocations: Sequence[Allocation], edge: int, growth: float = FINE) -> tuple[int, ...]:
    """Indices of the allocations that certification is asked about, ascending: from 0.4 of the saving at `edge` to the last.

    The search images are few, so the true edge may lie well below the predicted one, or above it.
    """
    if len(allocations) < 2:
        return ()
    savings = [share * allocations[max(edge, 1)].saved for share in _FIRST]
    while savings[-1] < allocations[-1].saved:
        # where much is saved, a little more of it is much faster: what is left shrinks by that factor at most
        nearer = max(1 - (1 - savings[-1]) / growth, savings[-1] + _LEAST_STEP)
        savings.append(min(savings[-1] * growth, nearer))
    reached = {bisect_right([each.saved for each in allocations], saving + _TINY) - 1 for saving in savings}
    return tuple(sorted(reached - {0}))


def to_train(allocations: Sequence[Allocation], edge: int) -> tuple[int, ...]:
    """Indices of the allocations that may be trained, ascending: from 0.7 of the saving at `edge`, that, and ever a tenth more.

    `edge` is the largest allocation that is within the contract before training, which rarely takes anything away.
    """
    if len(allocations) < 2:
        return ()
    savings = [_TRAINED_FROM * allocations[max(edge, 1)].saved, allocations[max(edge, 1)].saved]
    while savings[-1] < allocations[-1].saved:
        savings.append(savings[-1] * _TRAINED_STEP)
    reached = {bisect_right([each.saved for each in allocations], saving + _TINY) - 1 for saving in savings}
    return tuple(sorted(reached - {0}))


def _few_up_to(rung: int, count: int) -> list[int]:
    """Rungs that certification is asked about, each of which takes a training: few up to the predicted one, and the next."""
    return sorted({0, rung // 2, rung * 4 // 5, rung, min(rung + 1, count - 1)}) if count else []


def _climbed(count: int, start: int, accepted: Callable[[int], bool]) -> int | None:
    """The largest rung that is accepted, if acceptance only ever ends; None if there is none.

    From `start` on, in steps that double, so that rungs far above what is accepted are not asked about.
    """
    passing, failing, step = -1, count, 1
    rung = min(start, count - 1)
    while failing - passing > 1:
        if accepted(rung):
            passing, step = rung, 2 * step
            rung = min(passing + step, failing - 1) if failing == count else (passing + failing) // 2
        else:
            failing = rung
            rung = (passing + failing) // 2
        rung = max(rung, passing + 1)
    return None if passing < 0 else passing


def _largest(count: int, accepted: Callable[[int], bool]) -> int:
    """The largest index below `count` that is accepted, if acceptance only ever ends; 0 is not asked about."""
    if count > 1 and accepted(count - 1):
        return count - 1
    passing, failing = 0, count - 1
    while failing - passing > 1:
        middle = (passing + failing) // 2
        passing, failing = (middle, failing) if accepted(middle) else (passing, middle)
    return passing
