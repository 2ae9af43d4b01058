"""The contract: bounds that hold at the stated rate, chances that add up, and a promise kept by whole runs on fresh data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nets import seeded
from secateurs.errors import InvalidInput, NonFinite
from secateurs.selection.contract import Contract, Promise, Verdict, _rate_slack, divide_images, paired_bound
from secateurs.selection.search import find_cut


def pairs(images: int, lost: int, won: int) -> tuple[Tensor, Tensor]:
    """Right or wrong before and after, with `lost` images lost and `won` images won."""
    before, after = torch.zeros(images), torch.zeros(images)
    before[: images - won], after[lost:] = 1, 1
    return before, after


def binomial_tail(most: int, images: int, rate: float) -> float:
    """P(count <= most), added up."""
    return math.fsum(math.comb(images, k) * rate**k * (1 - rate) ** (images - k) for k in range(most + 1))


# ---- one bound -------------------------------------------------------------------------------------------------------


def test_nothing_changed_leaves_what_the_images_cannot_show() -> None:
    # the rule of three: a share of 3 / N could be lost without one of N images showing it
    bound = paired_bound(*pairs(2_000, 0, 0), 0.95)
    assert (bound.estimate, bound.lost, bound.won, bound.images, bound.how) == (0, 0, 0, 2_000, "pairs")
    assert bound.upper == pytest.approx(1 - 0.05 ** (1 / 2_000), rel=1e-9)
    assert paired_bound(*pairs(20, 0, 0), 0.95).upper == pytest.approx(1 - (0.75 * 0.05) ** (1 / 20), rel=1e-9)


@pytest.mark.parametrize(
    ("images", "lost", "least", "most"),
    [(1_000, 7, 0.04, 0.05), (300, 40, 0.04, 0.05), (30, 3, 0.0375 - 1e-8, 0.0375 + 1e-8), (1, 1, 1.0, 1.0)],
)
def test_without_images_won_the_limit_is_close_to_the_exact_one(images: int, lost: int, least: float, most: float) -> None:
    # at most `lost` images lost have a chance of 0.05 at the exact limit, and a smaller one at a wider limit
    upper = paired_bound(*pairs(images, lost, 0), 0.95).upper
    assert least <= binomial_tail(lost, images, upper) <= most


@pytest.mark.parametrize(
    ("count", "images", "chance", "limit"),
    [
        (0, 30, 0.05, 1 - 0.05 ** (1 / 30)),
        (29, 30, 0.05, 0.95 ** (1 / 30)),
        (30, 30, 0.05, 1.0),
        # computed by a continued fraction for the incomplete beta function, and false position
        (2, 7, 0.0375, 0.6810607586586647),
        (5, 7, 0.0125, 1 - 0.025459542008817237),
        (50, 150, 0.005, 0.4399740143309354),
        (1, 1_000, 1e-4, 0.011693354636511534),
        (1_666, 5_000, 0.04, 0.345047955316591),
        (2_500, 5_000, 0.05, 1 - 0.48827132595905115),
        (2, 100_000, 1e-7, 0.00021666747673637244),
        (10, 30, 1e-12, 0.8876280323171081),
        (500, 1_000, 1e-50, 0.7239240471974812),
        (3, 7, 5e-302, 1.0),
    ],
)
def test_limits_of_a_rate_are_clopper_pearsons(count: int, images: int, chance: float, limit: float) -> None:
    assert count / images + _rate_slack(count, images, chance) == pytest.approx(limit, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("images", "chance", "quantile"),
    [
        (2, 0.05, 1 / math.tan(0.05 * math.pi)),  # one degree of freedom: Cauchy
        (3, 0.005, 0.99 / math.sqrt(2 * 0.005 * 0.995)),  # two: (1 - 2 chance) / sqrt(2 chance (1 - chance))
        (6, 0.005, 4.032142983557412),  # by the continued fraction
        (10, 1e-7, 14.04071874007008),
    ],
)
def test_few_real_values_get_students_t(images: int, chance: float, quantile: float) -> None:
    difference = torch.zeros(images, dtype=torch.float64)
    difference[: images // 2] = 0.9  # as much as an image has, so that every other limit is at most 0.9
    bound = paired_bound(torch.full_like(difference, 0.9), 0.9 - difference, 1 - chance)
    spread = np.std(difference.numpy(), ddof=1) / math.sqrt(images)
    assert bound.slack == pytest.approx(quantile * spread, rel=1e-8)


@pytest.mark.parametrize(("images", "lost", "won"), [(4_000, 50, 30), (1_000, 12, 5), (150, 9, 9), (2_500, 3, 0)])
def test_the_bound_is_the_score_bound_with_half_an_image(images: int, lost: int, won: int) -> None:
    """The score test for a drop, its nuisance rate found by trying rates, has its critical value at the bound."""
    drop = paired_bound(*pairs(images, lost, won), 0.95).upper
    rates = np.linspace(0, 0.5 * (1 - drop), 2_000_001)[1:-1]  # of images won
    same = images - lost - won
    likelihood = lost * np.log(rates + drop) + won * np.log(rates) + same * np.log1p(-2 * rates - drop)
    rate = float(rates[likelihood.argmax()]) if won else 0.0
    deviation = math.sqrt(images * (2 * rate + drop * (1 - drop)))
    assert (images * drop - (lost - won) - 0.5) / deviation == pytest.approx(1.6448536, rel=1e-4)


@pytest.mark.parametrize(("images", "lost", "won"), [(5_000, 60, 40), (10_000, 200, 200), (100_000, 700, 300)])
def test_many_pairs_give_the_normal_bound_and_a_little(images: int, lost: int, won: int) -> None:
    normal = 1.6449 * math.sqrt(lost + won - (lost - won) ** 2 / images) / images
    assert normal < paired_bound(*pairs(images, lost, won), 0.95).slack < 1.13 * normal


@pytest.mark.parametrize(("images", "quantile"), [(2, 6.3138), (10, 1.8331), (31, 1.6973), (121, 1.6577)])  # of t tables
def test_real_values_get_at_least_students_t(images: int, quantile: float) -> None:
    difference = torch.linspace(-1, 1.5, images, dtype=torch.float64)
    bound = paired_bound(torch.full((images,), 3.0), 3.0 - difference, 0.95)
    spread = np.std(difference.numpy(), ddof=1) / math.sqrt(images)
    assert bound.how == "mean"
    assert bound.estimate == pytest.approx(0.25)
    assert bound.slack >= quantile * spread * (1 - 1e-4)


@pytest.mark.parametrize("chance", [0.2, 0.05, 0.005])
def test_real_values_get_the_quantile_of_randomly_weighted_means(chance: float) -> None:
    """Gaffke's limit: draw the weights of 60 losses and of one that is as large as can be, instead of approximating."""
    draw = np.random.default_rng(0)
    losses = np.where(draw.random(60) < 0.05, 0.9, 0.02 * draw.normal(size=60))
    means = draw.dirichlet(np.ones(61), size=200_000) @ np.append(losses, 1.0)
    upper = paired_bound(torch.ones(60), torch.tensor(1 - losses), 1 - chance).upper
    assert upper == pytest.approx(np.quantile(means, 1 - chance), rel=0.01)


def skewed(family: str, images: int, draw: np.random.Generator) -> tuple[Tensor, Tensor, float]:
    """Values before and after whose differences are of the family, and the true drop."""
    before, noise = 0.9 + 0.02 * draw.random(images), 0.002 * draw.normal(size=images)
    if family.startswith("catastrophe"):
        rate = float(family.split()[1])
        lost, true = np.where(draw.random(images) < rate, before, noise), 0.91 * rate
    elif family == "lognormal":
        before, lost, true = -before, 0.01 * draw.lognormal(size=images), 0.01 * math.exp(0.5)
    elif family == "exponential":
        before, lost, true = -before, 0.2 * draw.exponential(size=images), 0.2
    else:
        lost, true = 0.01 + 0.05 * draw.normal(size=images), 0.01
    return torch.tensor(before), torch.tensor(before - lost), true


@pytest.mark.parametrize("images", [50, 400, 2_000])
@pytest.mark.parametrize(
    "family",
    ["catastrophe 0.005", "catastrophe 0.0115", "catastrophe 0.05", "lognormal", "exponential", "normal"],
)
def test_real_values_with_rare_large_losses_keep_the_promise(family: str, images: int) -> None:
    draw, trials = np.random.default_rng(1), 120
    missed = 0
    for _ in range(trials):
        before, after, true = skewed(family, images, draw)
        missed += paired_bound(before, after, 0.95).upper < true
    assert missed <= 12  # 6 are allowed on average; more than 12 would have a chance of 1 in 100


def test_well_behaved_real_values_pay_little_for_what_no_image_shows() -> None:
    draw = np.random.default_rng(2)
    before = torch.tensor(0.8 + 0.2 * draw.random(2_000))
    lost = 0.01 + 0.2 * draw.normal(size=2_000)
    normal = 1.6449 * float(np.std(lost)) / math.sqrt(2_000)
    assert paired_bound(before, before - torch.tensor(lost).clamp(max=0.8), 0.95).slack < 1.15 * normal


def test_real_values_that_all_agree_are_no_proof() -> None:
    values = torch.linspace(0, 1, 101)
    assert paired_bound(values, values, 0.95).upper == pytest.approx(1 - 0.05 ** (1 / 101), rel=0.005)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 600), st.data())
def test_more_confidence_means_a_wider_bound(images: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, images))
    won = data.draw(st.integers(0, images - lost))
    bounds = [paired_bound(*pairs(images, lost, won), c).upper for c in (None, 0.6, 0.8, 0.95, 0.99, 0.999999)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(bounds))
    assert bounds[0] == pytest.approx((lost - won) / images)


def miss(images: int, rates: tuple[float, float], upper: Callable[[int, int], float]) -> float:
    """The chance that the true drop is above the bound, added up over all outcomes that matter."""
    p, q = rates
    total = 0.0
    most = [math.ceil(images * rate + 7 * math.sqrt(images * rate) + 7) for rate in rates]
    for lost, won in itertools.product(range(most[0]), range(most[1])):
        rest = images - lost - won
        if rest >= 0 and upper(lost, won) < p - q:
            ways = math.lgamma(images + 1) - math.lgamma(lost + 1) - math.lgamma(won + 1) - math.lgamma(rest + 1)
            total += math.exp(ways + lost * math.log(p) + won * math.log(q) + rest * math.log(1 - p - q))
    return total


@pytest.mark.parametrize(
    ("images", "rates"),
    [
        *[(12, (0.2, 0.1)), (60, (0.03, 0.01)), (130, (0.05, 0.05)), (400, (0.02, 0.01)), (2_000, (0.004, 0.001))],
        *[(100, (0.0301, 1e-4)), (1_000, (0.0031, 1e-5)), (150, (0.3, 0.08)), (4_000, (0.0105, 0.0005))],
    ],
)
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.995, 0.999])
def test_the_bound_holds_over_all_outcomes(images: int, rates: tuple[float, float], confidence: float) -> None:
    def ours(lost: int, won: int) -> float:
        return paired_bound(*pairs(images, lost, won), confidence).upper

    assert miss(images, rates, ours) <= 1 - confidence


def test_the_score_bound_without_half_an_image_would_not_hold() -> None:
    def plain(lost: int, won: int) -> float:
        # Wilson's limit, which the score bound is without images won
        n, z = 1_000, 1.6449
        return (lost + z * z / 2 + z * math.sqrt(lost - lost * lost / n + z * z / 4)) / (n + z * z) - won / n

    assert miss(1_000, (0.00275, 1e-7), plain) > 0.06


def test_the_normal_bound_would_not_hold() -> None:
    def normal(lost: int, won: int) -> float:
        return (lost - won + 1.6449 * math.sqrt(lost + won)) / 400

    assert miss(400, (0.01, 0.001), normal) > 0.08


# ---- many looks ------------------------------------------------------------------------------------------------------


def test_the_chances_of_all_sequences_add_up() -> None:
    contract, looks = Contract(0.01), 12
    patterns = itertools.product([True, False], repeat=looks)
    # the positions of its refusals identify a sequence; what follows the last one is all yes
    shares = [contract.chance(pattern) or 0 for pattern in patterns]
    assert 0.047 < sum(shares) < 0.05
    assert contract.chance() == contract.chance([True] * 1_000) == pytest.approx(0.04)
    assert contract.chance([True, True, False, True]) == pytest.approx(0.05 * 0.8 * 0.2 / 12)


@pytest.mark.parametrize("reserve", [0.0, 0.2, 0.5])
def test_no_more_than_the_chance_of_error_is_ever_spent(reserve: float) -> None:
    """Every node of the tree of answers is a candidate of its own; a chain of yeses shares one error, whatever its length."""
    contract, looks = Contract(0.01, reserve=reserve), 11

    def spent(answers: tuple[bool, ...]) -> float:
        """What the sequence that begins after these answers takes, and all those that its noes open."""
        chances = {round(contract.chance(answers + (True,) * more) or 0.0, 15) for more in range(looks - len(answers))}
        assert len(chances) <= 1  # a yes is free
        opened = [(*answers, *(True,) * more, False) for more in range(looks - len(answers))]
        return (contract.chance(answers) or 0.0) + math.fsum(spent(each) for each in opened)

    assert spent(()) <= 0.05 + 1e-12
    assert spent(()) > 0.044


def test_repeated_tests_keep_the_promise() -> None:
    """12 candidates that are all a little too bad, tried until one is accepted."""
    rng, contract, images, runs = np.random.default_rng(0), Contract(0.02), 500, 200
    patient, careless = 0, 0
    for _ in range(runs):
        promise = Promise(contract, torch.ones(images))
        answers = []
        for _ in range(12):
            after = torch.from_numpy((rng.random(images) > 0.0201).astype(np.float32))
            patient += promise.certify(after).accepted
            answers.append(contract.judge(promise.before, after).accepted)
            if promise.answers[-1]:
                break
        careless += any(answers)
    assert patient <= 0.05 * runs + 2 * math.sqrt(0.05 * 0.95 * runs)
    assert careless > 0.2 * runs  # each look at the full chance: the test can fail


class World:
    """Images whose margin is normal; each filter removed adds its own noise, so the true drop is known in closed form."""

    MEAN = 1.4

    def __init__(self, images: int, seed: int, sites: int = 6, channels: int = 8) -> None:
        generator = seeded(seed)
        self.sizes = torch.linspace(0.05, 0.3, channels).repeat(sites, 1)  # variance that each filter adds
        self.margins = torch.randn(images, generator=generator) + self.MEAN
        noise = torch.randn(sites, channels, images, generator=generator) * self.sizes[..., None].sqrt()
        self.noise = torch.cat([torch.zeros(sites, 1, images), noise.cumsum(1)], 1)

    def right(self, cuts: list[int], images: Tensor) -> Tensor:
        moved = self.margins + sum((self.noise[site, m] for site, m in enumerate(cuts)), torch.zeros(()))
        return (moved > 0).float()[images]

    def drop(self, cuts: list[int]) -> float:
        variance = 1 + sum(float(self.sizes[site, :m].sum()) for site, m in enumerate(cuts))
        return NormalDist().cdf(self.MEAN) - NormalDist().cdf(self.MEAN / math.sqrt(variance))


def off(keep: Tensor) -> int:
    return int((~keep).sum())


def pruned(world: World, contract: Contract) -> tuple[list[int], Promise]:
    """Site after site, m found by bisection: half of the images steer, half certify (all steer without a bound)."""
    sides = divide_images(len(world.margins), certifying=0.0 if contract.confidence is None else 0.5)
    start = world.right([], sides.search)
    promise = Promise(contract, world.right([], sides.certification))
    cuts: list[int] = []

    def steer(keep: Tensor) -> Verdict:
        return contract.judge(start, world.right([*cuts, off(keep)], sides.search), answers=promise.answers)

    def certify(keep: Tensor) -> Verdict:
        return promise.certify(world.right([*cuts, off(keep)], sides.certification))

    for _ in range(len(world.sizes)):
        last_word = None if contract.confidence is None else certify
        cuts.append(find_cut(range(8), steer, baseline=1.0, max_drop=contract.max_drop, certify=last_word).m)
    return cuts, promise


def test_whole_runs_keep_the_promise_on_fresh_data_and_the_point_estimate_does_not() -> None:
    runs, max_drop = 60, 0.04
    broken = {0.95: 0, None: 0}
    removed = 0
    for run in range(runs):
        world = World(1_600, run)
        for confidence in broken:
            cuts, promise = pruned(world, Contract(max_drop, confidence))
            broken[confidence] += world.drop(cuts) > max_drop
            if confidence is not None:
                removed += sum(cuts)
                # the total budget, on the very images that certify: no sequence of sites exceeds it
                certifying = divide_images(len(world.margins)).certification
                assert float((promise.before - world.right(cuts, certifying)).mean()) <= max_drop
    assert broken[0.95] <= 0.05 * runs + 2 * math.sqrt(0.05 * 0.95 * runs)
    assert broken[None] > 0.4 * runs
    assert removed > runs  # it does remove something


# ---- contracts and verdicts ------------------------------------------------------------------------------------------


def test_the_worst_class_can_veto() -> None:
    classes = torch.arange(10).repeat(200)
    before = torch.ones(2_000)
    after = before.clone()
    after[(classes == 3).nonzero().flatten()[:12]] = 0  # 0.6 points in all, 6 points of class 3
    assert Contract(0.02).judge(before, after).accepted
    found = Contract(0.02, worst_class=0.05).judge(before, after, classes)
    assert not found.accepted
    assert not found.by_estimate
    assert found.worst_bound is not None
    assert (found.worst_class, found.worst_bound.lost, found.worst_bound.images) == (3, 12, 200)
    assert Contract(0.02, worst_class=0.12).judge(before, after, classes).accepted
    assert Contract(0.02, None, worst_class=0.06).judge(before, after, classes).accepted


def test_a_verdict_says_what_a_point_estimate_would_have_allowed() -> None:
    found = Contract(0.01).judge(*pairs(1_000, 9, 0))
    assert (found.accepted, found.by_estimate) == (False, True)
    assert found.accuracy == pytest.approx(0.991)
    assert Contract(0.01, None).judge(*pairs(1_000, 10, 0)).accepted  # exactly what is allowed
    assert not Contract(0.01, None).judge(*pairs(1_000, 11, 0)).accepted


def test_half_of_the_share_is_half_of_the_drop() -> None:
    values = pairs(2_000, 10, 0)  # 0.5 points and 0.4 of slack
    assert Contract(0.01).judge(*values).accepted
    assert Contract(0.01).predict(*values, images=2_000).accepted
    assert not Contract(0.01).predict(*values, images=2_000, share=0.5).accepted


def test_a_prediction_is_the_bound_of_as_many_images_at_the_same_rates() -> None:
    contract, few, many = Contract(0.01), pairs(500, 7, 3), pairs(2_000, 28, 12)
    assert contract.predict(*few, images=2_000).upper == pytest.approx(contract.judge(*many).upper, rel=1e-6)
    assert contract.predict(*few, images=2_000).bound.estimate == pytest.approx(0.008)
    # one standard deviation of the difference of two means: 10 of 500 changed
    unsure = math.sqrt(0.02 * (1 / 500 + 1 / 2_000))
    cautious = contract.predict(*few, images=2_000, caution=2.0).upper
    assert cautious == pytest.approx(contract.judge(*many).upper + 2 * unsure, rel=1e-6)


def test_after_a_final_rejection_nothing_is_accepted() -> None:
    contract, values = Contract(0.02, reserve=0.0), pairs(2_000, 0, 0)
    assert contract.judge(*values, answers=[True] * 9).bound.chance == pytest.approx(0.05)
    assert contract.judge(*values, answers=[True, False]).upper == math.inf
    assert contract.predict(*values, images=100, answers=[False, True]).upper == math.inf
    assert not contract.judge(*values, answers=[False]).accepted


def test_refusals_make_later_bounds_wider_and_never_break_them() -> None:
    values = pairs(2_000, 10, 4)
    uppers = [Contract(0.01).judge(*values, answers=[False] * refused).upper for refused in (0, 1, 2, 5, 20, 1_000)]
    assert all(a < b for a, b in itertools.pairwise(uppers[:5]))
    assert all(0 < upper <= 1 for upper in uppers)


def test_a_promise_records_the_answers_it_gave() -> None:
    promise = Promise(Contract(0.01), torch.ones(3_000))
    assert not promise.certify(torch.zeros(3_000)).accepted
    assert promise.certify(torch.ones(3_000)).accepted
    assert promise.answers == (False, True)


def test_images_are_divided_blindly_and_wholly() -> None:
    sides = divide_images(101, certifying=0.3, seed=5)
    assert sorted(torch.cat([sides.search, sides.certification]).tolist()) == list(range(101))
    assert len(sides.certification) == 30
    again = divide_images(101, certifying=0.3, seed=5)
    assert torch.equal(sides.certification, again.certification)
    assert not torch.equal(sides.certification, divide_images(101, certifying=0.3, seed=6).certification)


def test_a_network_that_gives_nan_is_refused() -> None:
    found = Contract(1.0).judge(torch.ones(4), torch.tensor([1.0, math.nan, 1.0, 1.0]))
    assert (found.accepted, found.by_estimate, found.upper) == (False, False, math.inf)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Contract(-0.1), InvalidInput, "max_drop: got -0.1"),
        (lambda: Contract(0.1, 95), InvalidInput, "confidence: got 95"),
        (lambda: Contract(0.1, reserve=1.0), InvalidInput, "reserve: got 1.0"),
        (lambda: Contract(0.1, worst_class=math.nan), InvalidInput, "worst_class: got nan"),
        (lambda: Contract(0.1, worst_class=0.1).judge(torch.ones(3), torch.ones(3)), InvalidInput, "classes: got none"),
        (lambda: paired_bound(torch.ones(3), torch.ones(2), 0.9), InvalidInput, r"shapes \(3,\) and \(2,\)"),
        (lambda: paired_bound(torch.ones(0), torch.ones(0), 0.9), InvalidInput, "N of 1 or more"),
        (lambda: paired_bound(torch.ones(2), torch.ones(2), 1.0), InvalidInput, "confidence: got 1.0"),
        (lambda: paired_bound(torch.tensor([math.nan]), torch.ones(1), 0.9), NonFinite, "before"),
        (lambda: divide_images(5, certifying=2), InvalidInput, "certifying: got 2"),
    ],
)
def test_wrong_arguments_are_explained(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
