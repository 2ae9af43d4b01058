"""Accuracy contract: how much accuracy a run may lose, and how certain that must be before a cut is accepted. Pure maths.

The promise: with probability `confidence`, the true drop of the network (on all images like the validation images) is at most
`max_drop`. A network is accepted only if an upper confidence bound on its drop is at most `max_drop`. The bound is paired: it
compares the same images before and after, so only images whose answer changed add noise.

A run asks about many networks, and which it asks about depends on earlier answers. The chance of error accounts for that:

- `divide_images` splits the validation images once, at random. The *search set* may be evaluated any number of times; it
  chooses the candidates. The *certification set* only answers "yes, within the drop" or "no", and only about candidates that
  were chosen without it.
- A "yes" costs nothing. As long as all answers are yes, the certification set has not influenced what is asked next, so the
  whole sequence of candidates was fixed before. The promise can only break if the first bad candidate in it gets a yes,
  and the bound limits the chance of that. (If it gets a no, another sequence follows: see the next point.) This is
  fixed-sequence testing: a run that stops at its first "no" may spend all of 1 - confidence on every candidate (`reserve` 0).
- A "no" changes what is asked next, so a run that continues after it opens a new sequence, and every sequence that could have
  been opened needs its own chance of error. All of them share ε = 1 - confidence. With ρ = reserve, a sequence after
  refusals at gaps g₁…g_r (a refusal is the g-th answer since the last one) gets ε (1 - ρ) ρʳ · Π 1 / (gᵢ (gᵢ + 1)). Over all
  sequences, of any length, these sum to ε. The number of questions need not be known in advance.

Where the drop counts from the untouched network, the promise is about the final network, for any number of sites. Where it
counts from the start of each site, no site loses more than `max_drop` (with the same probability); the total is not bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from secateurs.errors import InvalidInput, NonFinite

How = Literal["pairs", "mean", "estimate"]

_DIGITS = 12  # 0.92 - 0.91 is 0.010000000000000009 in binary: a drop of one point must count as 0.01
_FEW = 40  # below this · ln(1 / chance) images, limits must not be squared and added
_RARE = 1e-7  # nor for chances smaller than this
_TINY = 1e-300  # stands for a chance that underflows
_CAUTION = 1.05  # square-and-add uses chance ** this: see `_cautious_slack`
_SCORE_CHANCES = (0.005, 0.1)  # the score bound was enumerated, and holds, between these chances,
_SCORE_IMAGES = 100  # for this many images or more,
_SCORE_LARGEST = 0.25  # and up to this drop


@dataclass(frozen=True)
class DropBound:
    """Estimate and upper confidence bound of a drop, from the same images before and after."""

    estimate: float  # mean of before - after over these images; NaN if the network gives NaN
    upper: float  # the true drop exceeds this with a chance of at most `chance`; inf if the network gives NaN
    chance: float  # that the true drop is above `upper`; NaN for a point estimate
    images: int
    lost: int  # images that are worse after
    won: int  # images that are better after
    how: How  # "pairs": right or wrong; "mean": real-valued metric; "estimate": no bound was asked for

    @property
    def slack(self) -> float:
        """What certainty costs: upper - estimate."""
        return self.upper - self.estimate


@dataclass(frozen=True)
class Verdict:
    """Whether a network is within a contract, and the bounds that decided it."""

    accepted: bool
    accuracy: float  # mean of `after`
    bound: DropBound
    worst_class: int | None  # label of the class with the largest upper bound; None: the contract does not limit classes
    worst_bound: DropBound | None  # the bound of that class
    by_estimate: bool  # whether the point estimates alone would have accepted it

    @property
    def upper(self) -> float:
        """The upper bound on the drop."""
        return self.bound.upper


@dataclass(frozen=True)
class Contract:
    """Accuracy that may be lost: `max_drop` over all images, and `worst_class` in any single class, with `confidence`.

    Drops are fractions (0.01 = 1 point). With `confidence` None the point estimate decides and nothing is promised about
    other images. `reserve` is the share of the chance of error that is kept for candidates after a "no"; with 0 the first
    "no" is final, and nothing is accepted after it.
    """

    max_drop: float
    confidence: float | None = 0.95
    worst_class: float | None = None
    reserve: float = 0.2

    def __post_init__(self) -> None:
        for name, value in (("max_drop", self.max_drop), ("worst_class", self.worst_class)):
            if value is not None and not value >= 0:
                raise InvalidInput(f"{name}: got {value}, wanted a fraction of 0 or more (0.005 is half a point).")
        _check_confidence(self.confidence)
        if not 0 <= self.reserve < 1:
            raise InvalidInput(f"reserve: got {self.reserve}, wanted a share of 0 or more and less than 1.")

    def chance(self, answers: Sequence[bool] = ()) -> float | None:
        """Chance of error that the next question may take after these answers (True = accepted); None: point estimate."""
        if self.confidence is None:
            return None
        share, since = 1 - self.reserve, 0
        for accepted in answers:
            since += 1
            if not accepted:
                share, since = share * self.reserve / (since * (since + 1)), 0
        return (1 - self.confidence) * (max(share, _TINY) if self.reserve else share)

    def judge(self, before: Tensor, after: Tensor, classes: Tensor | None = None, *, answers: Sequence[bool] = ()) -> Verdict:
        """Whether a network with values `after` (N,) is within the contract, counted from one with `before` (N,).

        `answers` are the earlier answers of the same images. With `worst_class`, `classes` (N,) holds the class of every
        image; classes without an image are not judged. A bad network has at least one bound above its limit and needs all
        of them within to be accepted, so every bound may take the whole chance of error.
        """
        chance = self.chance(answers)
        return self._verdict(before, after, classes, lambda x, y: _bound(x, y, chance))

    def predict(
        self,
        before: Tensor,
        after: Tensor,
        classes: Tensor | None = None,
        *,
        images: int,
        answers: Sequence[bool] = (),
        share: float = 1.0,
        caution: float = 0.0,
    ) -> Verdict:
        """Predict from the search set, before and after, what `images` certification images with these answers will say.

        The bound is the one that they would give if answers changed at the same rates among them. It guides the
        search and promises nothing. `caution` is how many standard deviations of the prediction are added, so that a "no"
        becomes unlikely. `share` is the part of a run that is done: the drop is extrapolated to its end, so that a cut is
        accepted if a run that keeps losing at this pace ends with a network that is within the contract.
        """
        chance, scale = self.chance(answers), images / len(before)
        return self._verdict(before, after, classes, lambda x, y: _predicted(x, y, chance, scale, share, caution))

    def _verdict(
        self, before: Tensor, after: Tensor, classes: Tensor | None, bound_of: Callable[[Tensor, Tensor], DropBound]
    ) -> Verdict:
        bound = bound_of(before, after)
        by_class: dict[int, DropBound] = {}
        if self.worst_class is not None:
            if classes is None or classes.shape != before.shape:
                got = "none" if classes is None else f"shape {tuple(classes.shape)}"
                raise InvalidInput(f"classes: got {got}, wanted the class of each of the {len(before)} images for worst_class.")
            labels = classes.to(before.device)
            by_class = {x: bound_of(before[labels == x], after[labels == x]) for x in sorted(set(classes.tolist()))}
        limits = [(bound, self.max_drop), *((each, self.worst_class or 0.0) for each in by_class.values())]
        worst = max(by_class, key=lambda label: by_class[label].upper, default=None)
        return Verdict(
            accepted=all(_within(each.upper, limit) for each, limit in limits),
            accuracy=float(after.double().mean()),
            bound=bound,
            worst_class=worst,
            worst_bound=None if worst is None else by_class[worst],
            by_estimate=all(_within(each.estimate, limit) for each, limit in limits),
        )


class Promise:
    """A contract, the baseline values (N,) on its certification images, and the answers that these images have given."""

    def __init__(
        self, contract: Contract, before: Tensor, *, classes: Tensor | None = None, answers: Sequence[bool] = ()
    ) -> None:
        self.contract, self.before, self.classes, self.answers = contract, before, classes, tuple(answers)

    def certify(self, after: Tensor) -> Verdict:
        """Judge `after` (N,) and record the answer: a "no" widens all later bounds. Never ask twice about one network."""
        verdict = self.contract.judge(self.before, after, self.classes, answers=self.answers)
        self.answers = (*self.answers, verdict.accepted)
        return verdict


@dataclass(frozen=True)
class Sides:
    """Positions of images, ascending and disjoint."""

    search: Tensor  # long: the search set, evaluated freely
    certification: Tensor  # long: the certification set, only asked about what was chosen without it


def divide_images(count: int, *, certifying: float = 0.5, seed: int = 0) -> Sides:
    """Divide `count` images at random, a share `certifying` (rounded) to certify; the images' contents play no part."""
    if not 0 <= certifying <= 1:
        raise InvalidInput(f"certifying: got {certifying}, wanted a share from 0 to 1.")
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    chosen = round(certifying * count)
    return Sides(search=shuffled[chosen:].sort().values, certification=shuffled[:chosen].sort().values)


def paired_bound(before: Tensor, after: Tensor, confidence: float | None) -> DropBound:
    """Upper confidence bound on the drop in a metric, from its values (N,) on the same images before and after.

    Right or wrong (values 0 and 1): the score bound for paired proportions, or exact (Clopper-Pearson) limits for the shares
    of images lost and won, as `_pairs_slack` says. Other values: the larger of Student's t for the mean difference and
    Gaffke's limit, which holds for skewed differences too and accounts for what N images cannot show: that a few
    of all images lose everything (`_mean_slack`). With `confidence` None the bound is the estimate. A NaN in `after` makes
    the bound infinite; one in `before` is an error.
    """
    _check_confidence(confidence)
    return _bound(before, after, None if confidence is None else 1 - confidence)


def _bound(before: Tensor, after: Tensor, chance: float | None) -> DropBound:
    if before.ndim != 1 or before.shape != after.shape or len(before) == 0:
        raise InvalidInput(
            f"before and after: got shapes {tuple(before.shape)} and {tuple(after.shape)}, wanted one value for each of the "
            f"same images, (N,) with N of 1 or more."
        )
    x, y = before.detach().cpu().double(), after.detach().cpu().double()
    if not bool(x.isfinite().all()):
        raise NonFinite("before: the network that the drop counts from gives NaN or infinite values. Check its outputs.")
    lost, won, images = int((y < x).sum()), int((y > x).sum()), len(x)
    binary = _is_binary(x) and _is_binary(y)
    how: How = "estimate" if chance is None else ("pairs" if binary else "mean")
    if not bool(y.isfinite().all()):
        estimate, slack = math.nan, math.inf
    else:
        estimate = (lost - won) / images if binary else float((x - y).mean())
        slack = 0.0 if chance is None else (_pairs_slack(lost, won, images, chance) if binary else _mean_slack(x, y, chance))
    upper = math.inf if slack == math.inf else estimate + slack
    return DropBound(estimate, upper, math.nan if chance is None else chance, images, lost, won, how)


def _is_binary(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _within(drop: float, limit: float) -> bool:
    return round(drop - limit, _DIGITS) <= 0 if math.isfinite(drop) else drop < limit  # False for NaN


def _check_confidence(confidence: float | None) -> None:
    if confidence is not None and not 0.5 < confidence < 1:
        raise InvalidInput(f"confidence: got {confidence}, wanted more than 0.5 and less than 1, or None for no bound.")


def _pairs_slack(lost: int, won: int, images: int, chance: float) -> float:
    """How far the true drop may lie above (lost - won) / images: the score bound where it is known to hold, else a wider one.

    For chances from 0.005 to 0.1, 100 images or more and drops up to 0.25 all outcomes were enumerated over a grid of true
    rates: the score bound is exceeded with at most the chance it was given (`python -m benchmarks.contract enumerate`).
    """
    if chance == 0:
        return math.inf
    wide, (least, most) = _cautious_slack(lost, won, images, chance), _SCORE_CHANCES
    if images < _SCORE_IMAGES:
        return wide
    if chance > most:  # a bound for a smaller chance holds for a larger one
        return min(wide, _pairs_slack(lost, won, images, most))
    if chance < least:
        return max(wide, _pairs_slack(lost, won, images, least))
    estimate, upper = (lost - won) / images, _score_upper(lost, won, images, chance)
    if lost == 0:  # exact: with a true drop of d, none of N images is lost with a chance of at most (1 - d)^N
        upper = min(upper, 1 - math.pow(chance, 1 / images))
    return upper - estimate if upper <= _SCORE_LARGEST else max(upper - estimate, wide)


def _score_upper(lost: float, won: float, images: float, chance: float) -> float:
    """The largest drop that the score test for paired proportions (Tango 1998) does not reject; half an image is added.

    For a drop d, the test compares lost - won with its mean N d in standard deviations; the rate of images won, on which
    the standard deviation depends, is the most likely one given d. Half an image is the continuity correction for
    counts, which are whole numbers.
    """
    z = NormalDist().inv_cdf(1 - chance)

    def rejected(drop: float) -> bool:
        linear = (2 * images - lost + won) * drop - lost - won
        rate_won = (math.sqrt(linear * linear + 8 * images * won * drop * (1 - drop)) - linear) / (4 * images)
        variance = images * max(2 * rate_won + drop * (1 - drop), 0.0)
        return lost - won + 0.5 - images * drop < -z * math.sqrt(variance)

    low, high = (lost - won) / images, 1.0
    while high - low > 1e-13:
        middle = (low + high) / 2
        low, high = (low, middle) if middle > 0 and rejected(middle) else (middle, high)
    return high


def _cautious_slack(lost: int, won: int, images: int, chance: float) -> float:
    """The wider bound: for few images, small chances, and drops above 0.25.

    For few images the two exact limits are added, each with a part of the chance: always valid, and wide. With
    more they are squared and added (with the correlation of the two counts), which for large counts is the normal bound
    z · sqrt(lost + won) / images, and for none lost or won the exact one. No theorem covers the counts in between, so
    all outcomes were enumerated over a grid of true rates: raising the chance to the power 1.05 is necessary and sufficient
    for every drop of 0 or more and chances down to 1e-7.
    """
    if chance < _RARE or images < _FEW * math.log(1 / chance):
        return _rate_slack(lost, images, 0.75 * chance) + _rate_slack(images - won, images, 0.25 * chance)
    p, q, cautious = lost / images, won / images, math.pow(chance, _CAUTION)
    above, below = _rate_slack(lost, images, cautious), _rate_slack(images - won, images, cautious)
    correlation = math.sqrt(p * q / ((1 - p) * (1 - q))) if 0 < p < 1 and 0 < q < 1 else 0.0
    return math.sqrt(above**2 + below**2 + 2 * correlation * above * below)


def _rate_slack(count: int, images: int, chance: float) -> float:
    """How far a true rate may lie above count / images: Clopper-Pearson's limit, exact."""
    from scipy.special import betainccinv  # half a second: only where a bound is asked for

    rate = 1.0 if count == images else float(betainccinv(count + 1, images - count, chance))
    return (1.0 if math.isnan(rate) else rate) - count / images  # SciPy gives NaN for some chances below 1e-100


def _predicted(before: Tensor, after: Tensor, chance: float | None, scale: float, share: float, caution: float) -> DropBound:
    """The bound that `scale` times as many images would give at the same rates: see `Contract.predict`.

    From `share` of a run to its end the drop grows in proportion, and the images whose answer changed with its square root:
    cuts add noise to what a network computes, and noise adds up in squares.
    """
    seen = _bound(before, after, None)
    if chance is None or chance == 0 or not math.isfinite(seen.estimate):
        return replace(seen, upper=seen.estimate / share if chance is None else math.inf)
    images, at_end = max(scale * seen.images, 1.0), seen.estimate / share
    spread = float((before - after).double().square().mean().sqrt())
    if _is_binary(before) and _is_binary(after):
        changed = max((seen.lost + seen.won) / math.sqrt(share), abs(at_end) * seen.images)
        now = _score_upper(scale * seen.lost, scale * seen.won, images, chance)
        lost, won = scale * (changed + at_end * seen.images) / 2, scale * (changed - at_end * seen.images) / 2
        then = _score_upper(lost, won, images, chance)
    else:
        slack = _mean_slack(before.detach().cpu().double(), after.detach().cpu().double(), chance, repeats=scale)
        now, then = seen.estimate + slack, at_end + slack / math.pow(share, 0.25)
    deviation = max(spread, math.sqrt(1 / seen.images)) * math.sqrt(1 / seen.images + 1 / images)
    upper = max(now + caution * deviation, then)
    return replace(seen, upper=upper, chance=chance, how="pairs" if _is_binary(before) else "mean")


def _mean_slack(before: Tensor, after: Tensor, chance: float, *, repeats: float = 1.0) -> float:
    """How far the true drop in a real-valued metric may lie above the mean difference; each image counts `repeats` times.

    The largest of three upper limits: Student's t; Gaffke's, which only assumes that no image loses more than `largest`;
    and what no image can have shown, that a share of 1 - chance^(1/N) of all images loses that much.
    """
    if chance == 0:
        return math.inf
    # an image loses at most all of its value where none is negative, else twice the range of the values seen
    lowest, highest = float(torch.cat([before, after]).min()), float(torch.cat([before, after]).max())
    largest = float(before.max()) if lowest >= 0 else 2 * (highest - lowest)
    difference = before - after
    mean, images = float(difference.mean()), repeats * len(before)
    upper = max(_gaffke_upper(difference, largest, chance, repeats), largest * (1 - math.pow(chance, 1 / images)))
    if len(before) > 1:
        from scipy.special import stdtrit

        quantile = -float(stdtrit(max(round(images) - 1, 1), chance))
        upper = max(upper, mean + quantile * float(difference.std()) / math.sqrt(images))
    return upper - mean


def _gaffke_upper(losses: Tensor, largest: float, chance: float, repeats: float) -> float:
    """Upper confidence limit for a mean of values that are at most `largest` (Gaffke 2005; Learned-Miller and Thomas 2020).

    Add `largest` to the values and weigh all of them at random, uniformly over all weights that add up to 1: the weighted
    mean exceeds the limit with this chance. For values 0 and `largest` it is Clopper-Pearson's limit. With exponential E,
    the weighted mean exceeds t where sum E_i (x_i - t) > 0; the chance of that is found by the saddlepoint approximation of
    Lugannani and Rice, where the tilt `theta` gives t and its tail in closed form.
    """
    mean = float(losses.mean())
    reach = largest - mean
    if reach <= 0:
        return largest
    x = (losses - mean) / reach  # mean 0, at most 1

    def limit_and_tail(logit: float) -> tuple[float, float]:
        theta, rest = 1 / (1 + math.exp(-logit)), 1 / (1 + math.exp(logit))
        tilted = 1 / (1 - theta * x)
        limit = (repeats * float((x * tilted).sum()) + 1 / rest) / (repeats * float(tilted.sum()) + 1 / rest)
        scale = 1 - theta * limit
        if scale <= 0:
            return limit, 0.0
        cumulant = repeats * float((scale * tilted).log().sum()) + math.log(scale / rest)
        variance = repeats * float(((x - limit) * scale * tilted).square().sum()) + ((1 - limit) * scale / rest) ** 2
        root, tilt = math.sqrt(max(-2 * cumulant, 0.0)), theta / scale * math.sqrt(variance)
        if min(root, tilt) < 1e-3:  # the middle of the distribution, where 1 / tilt - 1 / root cancels
            return limit, 0.5
        density = math.exp(-root * root / 2) / math.sqrt(2 * math.pi)
        return limit, math.erfc(root / math.sqrt(2)) / 2 + density * (1 / tilt - 1 / root)

    low, high = -36.0, 36.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if limit_and_tail(middle)[1] > chance else (low, middle)
    return mean + reach * limit_and_tail(high)[0]
