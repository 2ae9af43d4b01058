"""Step 6 of 9: takes an ordering of filters and a callable that measures accuracy, gives a `Cut`.

Accuracy need not fall monotonically as filters are removed, so the largest m within the drop is expensive to find. The
methods differ in what they return:

- `paper` starts at the largest m allowed and restores filters one at a time until the drop is small enough: the
  largest m that passes, for any curve. Up to C measurements.
- `scan` removes one filter after another and stops at the first m that fails: the last m before the first failure.
- `bisect` halves the range: an m that passes while m + 1 fails (or the largest m allowed), in about log2(C)
  measurements.

Where accuracy falls monotonically all three return the same m. None returns an m > 0 that was not measured to be within
the drop.

The m to try can be restricted: numbers of kept filters that are multiples of `round_to`, or the `widths` that
are fast on a device. "m + 1" above then means the next larger m that may be tried.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol, get_args

import torch
from torch import Tensor

from secateurs.config import Method
from secateurs.errors import InvalidInput, NonFinite, suggest

_DIGITS = 12  # 0.92 - 0.91 is 0.010000000000000009 in binary: a drop of one point must count as 0.01


class Judgement(Protocol):
    """A measurement that carries its own decision, in place of a bare accuracy (see `contract.Verdict`)."""

    @property
    def accuracy(self) -> float:
        """The measured accuracy."""

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
    """Decision for one site: the filters to remove, and the accuracies that decided it."""

    channels: int  # filters of the site before the cut
    removed: tuple[int, ...]  # filter ids, least important first
    baseline: float  # the accuracy that the drop is counted from
    accuracy: float  # measured with `keep`; when nothing is removed, `accuracy_now` of the caller
    drop: float  # baseline - accuracy, a fraction; negative when the cut helps
    evaluated: tuple[tuple[int, float], ...]  # (m, accuracy) in the order measured, each m once
    by_estimate: int | None = None  # largest m measured whose drop, as seen by `measure`, is allowed; None: unknown
    bound: float | None = None  # upper bound on the drop of this cut; None without judgements, or when m is 0
    refused: tuple[int, ...] = ()  # the m that the search proposed and `certify` refused, in that order

    def __post_init__(self) -> None:
        if len(set(self.removed)) < len(self.removed) or not all(0 <= i < self.channels for i in self.removed):
            raise InvalidInput(
                f"cut: got the filters {list(self.removed)} to remove, wanted ids from 0 to {self.channels - 1}, each once."
            )

    @property
    def m(self) -> int:
        """How many filters are removed."""
        return len(self.removed)

    @property
    def keep(self) -> Tensor:
        """The mask (C,), True = kept."""
        mask = torch.ones(self.channels, dtype=torch.bool)
        mask[list(self.removed)] = False
        return mask


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
    """Find the m least important filters whose removal costs at most `max_drop` accuracy (a fraction, 0.01 = 1 point).

    `order` holds every filter id once, least important first; `measure` takes a mask (C,), True = kept, and returns an
    accuracy, where NaN counts as too low, or a `Judgement`, which then decides in place of `max_drop`. Removing nothing
    is always allowed and never measured: its accuracy is `accuracy_now`, or `baseline` when that is None (they differ
    when the drop is counted from an earlier network). At most `largest_share` of the filters and `max_remove` are
    removed, and one is always kept. The module's docstring says which m each `method` returns.

    The number of kept filters is a multiple of `round_to`, and one of `widths` if they are given; where no smaller
    number is, nothing is removed. `certify` accepts or refuses the m that was found: when it refuses, it is asked about the
    largest passing m of at most half as many, up to `retries` times. If it refuses all of them, nothing is removed.
    """
    if not math.isfinite(baseline):
        raise NonFinite(f"baseline: got {baseline}, wanted the accuracy of the network before the cut. Check its outputs.")
    if not max_drop >= 0:
        raise InvalidInput(f"max_drop: got {max_drop}, wanted a fraction of 0 or more (0.005 is half a point).")
    if method not in get_args(Method):
        raise InvalidInput(f"method: got {method!r}.{suggest(method, get_args(Method))}")
    if retries < 0:
        raise InvalidInput(f"retries: got {retries}, wanted 0 or more.")
    ids = _filter_ids(order)
    counts = _counts(len(ids), largest_share, max_remove, round_to, widths)
    trials = _Trials(ids, measure, baseline, max_drop)
    m = _largest(trials, counts, method)
    bound = trials.bounds.get(m)
    refused: tuple[int, ...] = ()
    if certify is not None:
        m, bound, refused = _certified(trials, counts, m, certify, retries)
    accuracy = trials.seen[m] if m else (baseline if accuracy_now is None else accuracy_now)
    return Cut(
        channels=len(ids),
        removed=tuple(ids[:m]),
        baseline=baseline,
        accuracy=accuracy,
        drop=_drop(baseline, accuracy),
        evaluated=tuple(trials.seen.items()),
        by_estimate=max(trials.by_estimate, default=0),
        bound=bound,
        refused=refused,
    )


class _Trials:
    """Measures each m at most once and caches the result."""

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
        if m in self._passing:
            return self._passing[m]
        found = self._measure(self.keep(m))
        if isinstance(found, (int, float, Tensor)):
            self.seen[m] = float(found)
            self._passing[m] = by_estimate = _drop(self._baseline, self.seen[m]) <= self._max_drop  # False for NaN
        else:
            self.seen[m], self.bounds[m] = found.accuracy, found.upper
            self._passing[m], by_estimate = found.accepted, found.by_estimate
        if by_estimate:
            self.by_estimate.add(m)
        return self._passing[m]


def _largest(trials: _Trials, counts: list[int], method: Method) -> int:
    """Search `counts` by `method`, as the module's docstring says; 0 always passes."""
    if method == "scan":
        return max(takewhile(trials.passes, counts), default=0)
    descending = [*reversed(counts), 0]
    if method == "paper" or trials.passes(descending[0]):
        return next(m for m in descending if trials.passes(m))
    return descending[bisect_left(descending, True, 1, len(counts), key=trials.passes)]


def _certified(
    trials: _Trials, counts: list[int], m: int, certify: Callable[[Tensor], Judgement], retries: int
) -> tuple[int, float | None, tuple[int, ...]]:
    """Return the m that `certify` accepts, its bound, and the m that it refused."""
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


def _counts(
    channels: int, largest_share: float, max_remove: int | None, round_to: int, widths: Sequence[int] | None
) -> list[int]:
    """Numbers of filters that may be removed, ascending, without 0."""
    if not 0 <= largest_share <= 1:
        raise InvalidInput(f"largest_share: got {largest_share}, wanted a share from 0 to 1.")
    if max_remove is not None and max_remove < 0:
        raise InvalidInput(f"max_remove: got {max_remove}, wanted 0 or more filters, or None for no limit.")
    if round_to < 1:
        raise InvalidInput(f"round_to: got {round_to}, wanted 1 or more (8: the number of kept filters is a multiple of 8).")
    if widths is not None and any(width < 1 for width in widths):
        raise InvalidInput(f"widths: got {list(widths)}, wanted numbers of kept filters, 1 or more each.")
    limit = min(
        math.floor(round(largest_share * channels, _DIGITS)), channels - 1, channels if max_remove is None else max_remove
    )
    allowed = range(channels) if widths is None else set(widths)
    return [m for m in range(1, limit + 1) if (channels - m) % round_to == 0 and channels - m in allowed]
