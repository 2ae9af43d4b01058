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

Which m are tried at all can be narrowed: numbers of kept filters that are multiples of `round_to`, or the `widths` that
are fast on a device. "m + 1" above then means the next larger m that may be tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

import torch
from torch import Tensor

from secateurs.config import Method
from secateurs.errors import InvalidInput, NonFinite, suggest

_DIGITS = 12  # 0.92 - 0.91 is 0.010000000000000009 in binary: a drop of one point must count as 0.01


class Judgement(Protocol):
    """What a measurement may return in place of an accuracy: one that was judged already (see `contract.Verdict`)."""

    @property
    def accuracy(self) -> float:
        """As measured."""

    @property
    def accepted(self) -> bool:
        """Whether this network may be kept."""

    @property
    def upper(self) -> float:
        """Upper bound on its drop."""

    @property
    def by_estimate(self) -> bool:
        """Whether the point estimate alone would have accepted it."""


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
    by_estimate: int | None = None  # largest m measured whose drop, as seen by `measure`, is allowed; None: not known
    bound: float | None = None  # upper bound on the drop of this cut; None without judgements, or when m is 0
    refused: tuple[int, ...] = ()  # the m that the search chose and `certify` refused, in the order asked


def find_cut(
    order: Tensor | Sequence[int],
    measure: Callable[[Tensor], float | Judgement],
    *,
    baseline: float,
    max_drop: float,
    method: Method = "bisect",
    largest_share: float = 1.0,
    max_remove: int | None = None,
    accuracy_now: float | None = None,
    round_to: int = 1,
    widths: Sequence[int] | None = None,
    certify: Callable[[Tensor], Judgement] | None = None,
    retries: int = 1,
) -> Cut:
    """The m least important filters whose removal costs at most `max_drop` accuracy (a fraction, 0.01 = 1 point).

    `order` holds every filter id once, least important first; `measure` takes a mask (C,), True = kept, and returns an
    accuracy, where NaN counts as too low, or a `Judgement`, which then decides in place of `max_drop`. Removing nothing
    is always allowed and never measured: its accuracy is `accuracy_now`, or `baseline` when that is None (they differ
    when the drop is counted from an earlier network). At most `largest_share` of the filters and `max_remove` are
    removed, and one is always kept. The module's docstring says which m each `method` returns.

    The number of kept filters is a multiple of `round_to`, and one of `widths` if they are given; where no smaller
    number is, nothing is removed. `certify` is asked about the m that was found and has the last word: when it
    refuses, the largest m of at most half as many that passes is asked about, up to `retries` times, then nothing is
    removed.
    """
    ids = _filter_ids(order)
    _check(baseline, max_drop, method, retries)
    counts = _counts(len(ids), _limit(len(ids), largest_share, max_remove), round_to, widths)
    trials = _Trials(ids, measure, baseline, max_drop)
    m = {"bisect": _bisect, "paper": _put_back, "scan": _scan}[method](trials, counts)
    bound = trials.bounds.get(m)
    refused: tuple[int, ...] = ()
    if certify is not None:
        m, bound, refused = _certified(trials, counts, m, certify, retries)
    accuracy = trials.seen[m] if m else (baseline if accuracy_now is None else accuracy_now)
    return Cut(
        keep=trials.keep(m),
        removed=tuple(ids[:m]),
        m=m,
        baseline=baseline,
        accuracy=accuracy,
        drop=_drop(baseline, accuracy),
        evaluated=tuple(trials.seen.items()),
        by_estimate=max(trials.by_estimate, default=0),
        bound=bound,
        refused=refused,
    )


class _Trials:
    """Measures each m at most once and remembers it."""

    def __init__(
        self, ids: list[int], measure: Callable[[Tensor], float | Judgement], baseline: float, max_drop: float
    ) -> None:
        self._ids, self._measure, self._baseline, self._max_drop = ids, measure, baseline, max_drop
        self._passing: dict[int, bool] = {0: True}
        self.seen: dict[int, float] = {}
        self.bounds: dict[int, float] = {}
        self.by_estimate: set[int] = set()

    def keep(self, m: int) -> Tensor:
        mask = torch.ones(len(self._ids), dtype=torch.bool)
        mask[self._ids[:m]] = False
        return mask

    def passes(self, m: int) -> bool:
        if m not in self._passing:
            self._passing[m] = self._try(m)
        return self._passing[m]

    def _try(self, m: int) -> bool:
        found = self._measure(self.keep(m))
        if isinstance(found, (int, float, Tensor)):
            self.seen[m] = float(found)
            accepted = by_estimate = _drop(self._baseline, self.seen[m]) <= self._max_drop  # False for NaN
        else:
            self.seen[m], self.bounds[m] = found.accuracy, found.upper
            accepted, by_estimate = found.accepted, found.by_estimate
        if by_estimate:
            self.by_estimate.add(m)
        return accepted


def _put_back(trials: _Trials, counts: list[int]) -> int:
    return next((m for m in reversed(counts) if trials.passes(m)), 0)


def _scan(trials: _Trials, counts: list[int]) -> int:
    last = 0
    for m in counts:
        if not trials.passes(m):
            break
        last = m
    return last


def _bisect(trials: _Trials, counts: list[int]) -> int:
    if not counts or trials.passes(counts[-1]):
        return counts[-1] if counts else 0
    tried = [0, *counts]
    passing, failing = 0, len(counts)
    while failing - passing > 1:
        middle = (passing + failing) // 2
        if trials.passes(tried[middle]):
            passing = middle
        else:
            failing = middle
    return tried[passing]


def _certified(
    trials: _Trials, counts: list[int], m: int, certify: Callable[[Tensor], Judgement], retries: int
) -> tuple[int, float | None, tuple[int, ...]]:
    """The m that `certify` accepts, its bound, and those that it refused."""
    refused: list[int] = []
    while m and len(refused) <= retries:
        judgement = certify(trials.keep(m))
        if judgement.accepted:
            return m, judgement.upper, tuple(refused)
        refused.append(m)
        m = next((fewer for fewer in reversed(counts) if 2 * fewer <= m and trials.passes(fewer)), 0)
    return 0, None, tuple(refused)


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


def _counts(channels: int, limit: int, round_to: int, widths: Sequence[int] | None) -> list[int]:
    """The numbers of filters that may be removed, ascending, without 0."""
    if round_to < 1:
        raise InvalidInput(f"round_to: got {round_to}, wanted 1 or more (8: kept filters come in eights).")
    if widths is not None and any(width < 1 for width in widths):
        raise InvalidInput(f"widths: got {list(widths)}, wanted numbers of kept filters, 1 or more each.")
    allowed = None if widths is None else set(widths)
    return [m for m in range(1, limit + 1) if (channels - m) % round_to == 0 and (allowed is None or channels - m in allowed)]


def _check(baseline: float, max_drop: float, method: str, retries: int) -> None:
    if not math.isfinite(baseline):
        raise NonFinite(f"baseline: got {baseline}, wanted the accuracy of the network before the cut. Check its outputs.")
    if not max_drop >= 0:
        raise InvalidInput(f"max_drop: got {max_drop}, wanted a fraction of 0 or more (0.005 is half a point).")
    if method not in get_args(Method):
        raise InvalidInput(f"method: got {method!r}.{suggest(method, get_args(Method))}")
    if retries < 0:
        raise InvalidInput(f"retries: got {retries}, wanted 0 or more.")
