"""Step 6 of 9: takes an ordering of filters and a callable that measures accuracy, gives a `Cut`.

Accuracy need not fall steadily as filters go, so "the largest m within the drop" is expensive to know for sure. The
three methods say what they return instead:

- `paper` starts at the largest m allowed and puts filters back one at a time until the drop is small enough: the
  largest m that passes, whatever the curve. Up to C measurements.
- `scan` removes more and more and stops at the first m that fails: the last m before the first failure.
- `bisect` halves the range: some m that passes while m + 1 fails (or the largest m allowed), in about log2(C)
  measurements.

Where accuracy falls steadily all three return the same m. None returns an m > 0 that was not measured to be within the
drop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from secateurs.errors import InvalidInput, NonFinite, suggest

Method = Literal["bisect", "paper", "scan"]

_DIGITS = 12  # 0.92 - 0.91 is 0.010000000000000009 in binary: a drop of one point must count as 0.01


@dataclass(frozen=True)
class Cut:
    """What one site loses: the filters to remove, and the accuracies that decided it."""

    keep: Tensor  # (C,) bool, True = kept
    removed: tuple[int, ...]  # filter ids, least important first
    m: int  # how many are removed
    baseline: float  # the accuracy that the drop is counted from
    accuracy: float  # measured with `keep`; when m is 0, what the caller said it is with nothing removed
    drop: float  # baseline - accuracy, a fraction; negative when the cut helps
    evaluated: tuple[tuple[int, float], ...]  # (m, accuracy) in the order measured, each m once


def find_cut(
    order: Tensor | Sequence[int],
    measure: Callable[[Tensor], float],
    *,
    baseline: float,
    max_drop: float,
    method: Method = "bisect",
    largest_share: float = 1.0,
    max_remove: int | None = None,
    accuracy_now: float | None = None,
) -> Cut:
    """The m least important filters whose removal costs at most `max_drop` accuracy (a fraction, 0.01 = 1 point).

    `order` holds every filter id once, least important first; `measure` takes a mask (C,), True = kept, and returns an
    accuracy, where NaN counts as too low. Removing nothing is always allowed and never measured: its accuracy is
    `accuracy_now`, or `baseline` when that is None (they differ when the drop is counted from an earlier network). At
    most `largest_share` of the filters and `max_remove` are removed, and one is always kept. The module's docstring
    says which m each `method` returns.
    """
    ids = _filter_ids(order)
    limit = _limit(len(ids), largest_share, max_remove)
    _check(baseline, max_drop, method)
    trials = _Trials(ids, measure, baseline, max_drop)
    m = {"bisect": _bisect, "paper": _put_back, "scan": _scan}[method](trials, limit)
    accuracy = trials.seen[m] if m else (baseline if accuracy_now is None else accuracy_now)
    return Cut(
        keep=trials.keep(m),
        removed=tuple(ids[:m]),
        m=m,
        baseline=baseline,
        accuracy=accuracy,
        drop=_drop(baseline, accuracy),
        evaluated=tuple(trials.seen.items()),
    )


class _Trials:
    """Measures each m at most once and remembers it."""

    def __init__(self, ids: list[int], measure: Callable[[Tensor], float], baseline: float, max_drop: float) -> None:
        self._ids, self._measure, self._baseline, self._max_drop = ids, measure, baseline, max_drop
        self.seen: dict[int, float] = {}

    def keep(self, m: int) -> Tensor:
        mask = torch.ones(len(self._ids), dtype=torch.bool)
        mask[self._ids[:m]] = False
        return mask

    def passes(self, m: int) -> bool:
        if m == 0:
            return True
        if m not in self.seen:
            self.seen[m] = float(self._measure(self.keep(m)))
        return _drop(self._baseline, self.seen[m]) <= self._max_drop  # False for NaN


def _put_back(trials: _Trials, limit: int) -> int:
    return next(m for m in range(limit, -1, -1) if trials.passes(m))


def _scan(trials: _Trials, limit: int) -> int:
    return next((m - 1 for m in range(1, limit + 1) if not trials.passes(m)), limit)


def _bisect(trials: _Trials, limit: int) -> int:
    if trials.passes(limit):
        return limit
    passing, failing = 0, limit
    while failing - passing > 1:
        middle = (passing + failing) // 2
        if trials.passes(middle):
            passing = middle
        else:
            failing = middle
    return passing


def _drop(baseline: float, accuracy: float) -> float:
    return round(baseline - accuracy, _DIGITS)


def _filter_ids(order: Tensor | Sequence[int]) -> list[int]:
    ids = order.tolist() if isinstance(order, Tensor) else [int(i) for i in order]
    if not isinstance(ids, list) or not ids or sorted(ids) != list(range(len(ids))):
        shown = str(ids) if len(str(ids)) < 60 else f"{str(ids)[:60]}…"
        raise InvalidInput(f"order: got {shown}, wanted every filter id from 0 to C - 1 exactly once, least important first.")
    return ids


def _limit(channels: int, largest_share: float, max_remove: int | None) -> int:
    if not 0 <= largest_share <= 1:
        raise InvalidInput(f"largest_share: got {largest_share}, wanted a share from 0 to 1.")
    if max_remove is not None and max_remove < 0:
        raise InvalidInput(f"max_remove: got {max_remove}, wanted 0 or more filters, or None for no limit.")
    of_share = math.floor(round(largest_share * channels, _DIGITS))
    return min(of_share, channels - 1, channels if max_remove is None else max_remove)


def _check(baseline: float, max_drop: float, method: str) -> None:
    if not math.isfinite(baseline):
        raise NonFinite(f"baseline: got {baseline}, wanted the accuracy of the network before the cut. Check its outputs.")
    if not max_drop >= 0:
        raise InvalidInput(f"max_drop: got {max_drop}, wanted a fraction of 0 or more (0.005 is half a point).")
    if method not in get_args(Method):
        raise InvalidInput(f"method: got {method!r}.{suggest(method, get_args(Method))}")
