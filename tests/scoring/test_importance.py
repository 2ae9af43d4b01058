"""Eq. 2 by hand, Eq. 3 against NumPy and known truths, honest error bars, pairwise terms and the search over them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nets import seeded
from secateurs.config import Design
from secateurs.errors import InvalidInput, NonFinite
from secateurs.scoring.importance import (
    Importance,
    PairImportance,
    best_subset,
    fit_importance,
    fit_pairs,
    order,
    rank_correlation,
    scores,
)
from secateurs.scoring.masks import sample_masks

INF, NAN = math.inf, math.nan


def close(actual: Tensor, expected: object, atol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.double), rtol=0, atol=atol)


# ---- Eq. 2


@pytest.mark.parametrize(
    ("losses", "transform", "expected"),
    [
        ([2.0, 1.0, 3.0, 1.5], "linear", [0.5, 1.0, 0.0, 0.75]),
        ([1.0, 10.0, 100.0], "log", [1.0, 0.5, 0.0]),
        ([0.0, 1e-12, 1.0], "log", [1.0, 1.0, 0.0]),
        ([7.0, 1.0, 100.0, 2.0, 3.0], "rank", [0.25, 1.0, 0.0, 0.75, 0.5]),
        ([1.0, 1.0, 2.0, 3.0], "rank", [1.0, 1.0, 0.4, 0.0]),  # ranks 0.5, 0.5, 2, 3
        ([4.0, 4.0, 4.0], "linear", [1.0, 1.0, 1.0]),
        ([4.0, 4.0, 4.0], "rank", [1.0, 1.0, 1.0]),
        ([5.0], "linear", [1.0]),
        ([2.0, NAN, 1.0, INF, 3.0], "linear", [0.5, 0.0, 1.0, 0.0, 0.0]),
        ([2.0, NAN, 1.0, INF, 3.0], "rank", [0.5, 0.0, 1.0, 0.0, 0.0]),
        ([-INF, 1.0, 2.0], "linear", [0.0, 1.0, 0.0]),
        ([NAN, 2.0, 2.0], "linear", [0.0, 1.0, 1.0]),
    ],
)
def test_scores_worked_out_by_hand(losses: list[float], transform: str, expected: list[float]) -> None:
    close(scores(torch.tensor(losses), transform), expected)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=20), st.sampled_from(["linear", "log", "rank"]))
def test_scores_are_shares_in_the_reverse_order_of_losses(losses: list[float], transform: str) -> None:
    values = scores(torch.tensor(losses, dtype=torch.double), transform)  # type: ignore[arg-type]
    assert bool(((values >= 0) & (values <= 1)).all())
    ascending = torch.tensor(losses, dtype=torch.double).argsort()
    assert bool((values[ascending].diff() <= 1e-12).all())


def test_scores_of_a_batch_are_those_of_its_rows() -> None:
    losses = torch.rand(4, 3, 20, generator=seeded(0))
    losses[1, 2, 5] = NAN
    for transform in ("linear", "log", "rank"):
        together = scores(losses, transform)  # type: ignore[arg-type]
        for place in itertools.product(range(4), range(3)):
            close(together[place], scores(losses[place], transform), atol=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("losses", "transform", "error", "message"),
    [
        ([NAN, INF], "linear", NonFinite, "every one is NaN or infinite"),
        ([-1.0, 2.0], "log", InvalidInput, "wants none below 0, got -1"),
        ([1.0, 2.0], "logs", InvalidInput, "Did you mean 'log'"),
        ([], "linear", InvalidInput, "one loss for each mask"),
    ],
)
def test_losses_that_cannot_be_scored_are_explained(
    losses: list[float], transform: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        scores(torch.tensor(losses), transform)  # type: ignore[arg-type]


# ---- Eq. 3


@pytest.mark.parametrize("design", ["exact", "bernoulli", "balanced"])
def test_fit_recovers_an_additive_score(design: Design) -> None:
    masks = sample_masks(12, 200, design=design, generator=seeded(0))
    true = torch.linspace(-1, 1, 12).double()  # adds up to zero, as the smallest-norm solution does
    fit = fit_importance(masks, masks.double() @ true + 3.0)
    close(fit.coef, true)
    close(fit.intercept, 3.0)
    close(fit.r2, 1.0)
    close(fit.r2_held_out, 1.0)
    close(fit.split_half, 1.0)
    assert fit.stderr.max() < 1e-10


def test_masks_of_varying_size_identify_every_coefficient() -> None:
    masks = sample_masks(12, 200, design="bernoulli", generator=seeded(0))
    true = torch.linspace(0.5, 4, 12).double()
    fit = fit_importance(masks, masks.double() @ true - 2.0)
    close(fit.coef, true)
    close(fit.intercept, -2.0)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 30), st.integers(2, 120), st.integers(0, 9), st.sampled_from(["exact", "bernoulli", "balanced"]))
def test_fit_agrees_with_numpy(channels: int, count: int, seed: int, design: Design) -> None:
    masks = sample_masks(channels, count, design=design, generator=seeded(seed))
    target = torch.rand(count, generator=seeded(seed + 1)).double()
    z, s = masks.double().numpy(), target.numpy()
    sizes = np.linalg.svd(z - z.mean(0), compute_uv=False)
    assume(sizes[sizes > 1e-9].min(initial=1) > 0.01)  # worse conditioned, two good solvers may differ by more
    expected = np.linalg.lstsq(z - z.mean(0), s - s.mean(), rcond=1e-12)[0]
    close(fit_importance(masks, target).coef, expected)


def test_the_papers_fit_without_an_intercept_is_the_same_up_to_a_constant() -> None:
    masks = sample_masks(20, generator=seeded(0))
    target = torch.rand(200, generator=seeded(1)).double()
    papers = np.linalg.lstsq(masks.double().numpy(), target.numpy(), rcond=None)[0]
    fit = fit_importance(masks, target)
    close(fit.coef + fit.intercept / 14, papers)  # 14 of 20 filters are kept
    assert order(fit).tolist() == np.argsort(papers).tolist()


@pytest.mark.parametrize("design", ["exact", "bernoulli"])
def test_standard_errors_cover_the_truth(design: Design) -> None:
    repetitions, true = 2_000, torch.linspace(-1, 1, 10).double()
    masks = sample_masks(10, 100, design=design, generator=seeded(0), batch=(repetitions,))
    noise = torch.randn(repetitions, 100, generator=seeded(1)).double()
    fit = fit_importance(masks, masks.double() @ true + 0.5 * noise)
    covered = ((fit.coef - true).abs() <= 1.96 * fit.stderr).double().mean(0)
    # 95 % by the normal quantile is 94.7 % by Student's with 90 degrees of freedom; 5 standard errors of a share are
    # 2.5 points.
    assert (covered - 0.947).abs().max() < 0.025
    assert float(covered.mean()) == pytest.approx(0.947, abs=0.008)


def test_standard_errors_are_those_of_the_textbook() -> None:
    masks = sample_masks(6, 50, design="bernoulli", generator=seeded(0))
    target = torch.rand(50, generator=seeded(1)).double()
    x = np.column_stack([np.ones(50), masks.double().numpy()])
    beta = np.linalg.lstsq(x, target.numpy(), rcond=None)[0]
    residual = target.numpy() - x @ beta
    expected = np.sqrt(np.diag(np.linalg.inv(x.T @ x)) * (residual @ residual) / (50 - 7))
    fit = fit_importance(masks, target)
    close(fit.stderr, expected[1:])
    close(fit.r2, 1 - residual.var() / target.numpy().var())


def test_coefficients_that_masks_cannot_identify_have_infinite_errors() -> None:
    masks = sample_masks(6, 40, design="bernoulli", generator=seeded(0))
    masks[:, 2] = True  # never off
    fit = fit_importance(masks, torch.rand(40, generator=seeded(1)))
    assert float(fit.coef[2]) == pytest.approx(0, abs=1e-12)
    assert fit.stderr.isinf().tolist() == [False, False, True, False, False, False]
    assert bool(fit_importance(masks[:2], torch.tensor([0.0, 1.0])).stderr.isinf().all())  # two masks leave no residual


def test_held_out_masks_separate_noise_from_signal() -> None:
    masks = sample_masks(32, generator=seeded(0))
    true = torch.randn(32, generator=seeded(2)).double()
    noise = torch.randn(320, generator=seeded(3)).double()
    signal, nothing = fit_importance(masks, masks.double() @ true), fit_importance(masks, noise)
    assert float(signal.r2_held_out) > 0.999
    assert float(nothing.r2) > 0.03 > 0 > float(nothing.r2_held_out)
    assert abs(float(nothing.split_half)) < 0.6 < float(signal.split_half)


def test_held_out_r2_is_that_of_a_cross_validation_by_hand() -> None:
    masks = sample_masks(5, 30, design="bernoulli", generator=seeded(0))
    target = torch.rand(30, generator=seeded(1)).double()
    x, s = np.column_stack([np.ones(30), masks.double().numpy()]), target.numpy()
    predicted = np.empty(30)
    for part in range(3):
        test = np.arange(30) % 3 == part
        predicted[test] = x[test] @ np.linalg.lstsq(x[~test], s[~test], rcond=None)[0]
    expected = 1 - ((s - predicted) ** 2).sum() / ((s - s.mean()) ** 2).sum()
    close(fit_importance(masks, target, held_out=1 / 3).r2_held_out, expected)


def test_generator_shuffles_the_parts_but_not_the_coefficients() -> None:
    masks, target = sample_masks(8, 40, generator=seeded(0)), torch.rand(40, generator=seeded(1))
    plain, shuffled = fit_importance(masks, target), fit_importance(masks, target, generator=seeded(2))
    close(plain.coef, shuffled.coef)
    assert float(plain.r2_held_out) != float(shuffled.r2_held_out)


def test_ridge_shrinks_as_the_closed_form_says() -> None:
    masks, target = sample_masks(8, 60, generator=seeded(0)), torch.rand(60, generator=seeded(1)).double()
    x, y = masks.double().numpy(), target.numpy()
    x, y = x - x.mean(0), y - y.mean()
    expected = np.linalg.solve(x.T @ x + 60 * 0.1 * np.eye(8), x.T @ y)
    close(fit_importance(masks, target, ridge=0.1).coef, expected)


def test_a_batch_is_fitted_as_its_members_are() -> None:
    masks = sample_masks(7, 30, generator=seeded(0), batch=(2, 3))
    target = torch.rand(2, 3, 30, generator=seeded(1))
    together = fit_importance(masks, target)
    pairs = fit_pairs(masks, target)
    for place in itertools.product(range(2), range(3)):
        alone, pairs_alone = fit_importance(masks[place], target[place]), fit_pairs(masks[place], target[place])
        for field in ("coef", "intercept", "stderr", "r2", "r2_held_out", "split_half"):
            close(getattr(together, field)[place], getattr(alone, field))
        for field in ("linear", "pairs", "intercept", "r2", "r2_held_out"):
            close(getattr(pairs, field)[place], getattr(pairs_alone, field))


def test_equal_scores_give_no_importance_and_nothing_to_explain() -> None:
    fit = fit_importance(sample_masks(6, 30, generator=seeded(0)), torch.ones(30))
    close(fit.coef, torch.zeros(6))
    assert bool(fit.r2.isnan())
    assert order(fit).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"scores": torch.rand(9)}, InvalidInput, r"masks \(10, 4\) and scores \(9,\) do not fit"),
        ({"masks": torch.ones(1, 4), "scores": torch.ones(1)}, InvalidInput, "got 1, wanted at least 2"),
        ({"scores": torch.full((10,), NAN)}, NonFinite, "some are NaN or infinite"),
        ({"ridge": -1.0}, InvalidInput, "ridge: got -1.0"),
        ({"held_out": 0.0}, InvalidInput, "held_out: got 0.0"),
    ],
)
def test_wrong_arguments_are_explained(wrong: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"masks": sample_masks(4, 10, generator=seeded(0)), "scores": torch.rand(10)} | wrong
    with pytest.raises(error, match=message):
        fit_importance(**arguments)  # type: ignore[arg-type]


def test_rank_correlation_by_hand() -> None:
    left = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    close(rank_correlation(left, torch.tensor([5.0, 6.0, 7.0, 8.0, 7.0])), 0.8207826816681233)  # as scipy's spearmanr has it
    close(rank_correlation(left, -left.exp()), -1.0)
    assert bool(rank_correlation(left, torch.ones(5)).isnan())


# ---- Pairs


def all_masks(channels: int) -> Tensor:
    return torch.tensor(list(itertools.product([False, True], repeat=channels)))


def quadratic(channels: int, seed: int) -> PairImportance:
    linear = torch.randn(channels, generator=seeded(seed)).double()
    pairs = torch.randn(channels, channels, generator=seeded(seed + 1)).double().triu(1)
    nothing = torch.tensor(0.0).double()
    return PairImportance(linear, pairs + pairs.T, nothing + 0.7, nothing, nothing)


def test_prediction_of_pairs_is_the_sum_written_out() -> None:
    model, mask = quadratic(5, 0), [True, False, True, True, False]
    kept = [c for c in range(5) if mask[c]]
    written_out = 0.7 + sum(float(model.linear[c]) for c in kept)
    written_out += sum(float(model.pairs[c, d]) for c, d in itertools.combinations(kept, 2))
    close(model.predict(torch.tensor([mask])), [written_out])


def test_pairs_recover_a_quadratic_score() -> None:
    model, masks = quadratic(6, 3), all_masks(6)
    fit = fit_pairs(masks, model.predict(masks), ridge=0.0)
    close(fit.linear, model.linear)
    close(fit.pairs, model.pairs)
    close(fit.intercept, 0.7)
    close(fit.r2_held_out, 1.0)


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_solving_for_masks_or_for_terms_gives_the_same_model(ridge: float) -> None:
    """27 masks of 7 filters are fewer than the 28 terms, with one mask twice there are 28: the same sum to minimise."""
    masks, target = sample_masks(7, 27, design="bernoulli", generator=seeded(0)), torch.rand(27, generator=seeded(1))
    u = masks.double() - masks.double().mean(0)
    first, second = np.triu_indices(7, 1)
    x = np.column_stack([u.numpy(), u.numpy()[:, first] * u.numpy()[:, second]])
    scale = np.sqrt((x[:, :7] ** 2).sum() / (x[:, 7:] ** 2).sum())  # all pairs together vary as all single filters do
    x[:, 7:] *= scale
    x, y = x - x.mean(0), (target.double() - target.double().mean()).numpy()
    closed_form = np.linalg.solve(x.T @ x + 27 * 1e-3 * np.eye(28), x.T @ y)
    coef = closed_form if ridge else np.linalg.lstsq(x, y, rcond=1e-12)[0]
    pairs = fit_pairs(masks, target, ridge=ridge).pairs
    close(pairs[torch.from_numpy(first), torch.from_numpy(second)], scale * coef[7:], atol=1e-8)
    twice, target_twice = torch.cat([masks, masks]), torch.cat([target, target])
    close(fit_pairs(twice, target_twice, ridge=ridge).pairs, pairs, atol=1e-8)


def test_pairs_see_two_filters_that_cancel_each_other() -> None:
    """The paper's example: filters 0 and 1 work against each other; off together they do no harm, off alone they do."""
    masks = sample_masks(8, design="bernoulli", generator=seeded(0))
    others = torch.tensor([0, 0, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07]).double()
    target = 1 - (masks[:, 0] != masks[:, 1]).double() - (~masks).double() @ others
    leave_one_out = [float(1 + others[c] if c < 2 else others[c]) for c in range(8)]
    assert sorted(range(8), key=leave_one_out.__getitem__)[-2:] == [0, 1]  # both look most important of all
    fit = fit_pairs(masks, target, ridge=0.0)
    assert best_subset(fit, 6).tolist() == [False, False, *[True] * 6]
    assert set(order(fit)[:2].tolist()) == {0, 1}


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 7))
def test_no_single_swap_improves_on_the_best_subset(seed: int, keep: int) -> None:
    model = quadratic(8, seed)
    chosen = best_subset(model, keep)
    assert int(chosen.sum()) == keep
    swaps = [m for m in all_masks(8) if int(m.sum()) == keep and int((m != chosen).sum()) == 2]
    best_swap = model.predict(torch.stack(swaps)).max() if swaps else -INF
    assert float(model.predict(chosen[None])) >= float(best_swap) - 1e-9


def test_best_subset_is_mostly_the_best_of_all() -> None:
    subsets = [m for m in all_masks(8) if int(m.sum()) == 3]
    hits = 0
    for seed in range(40):
        model = quadratic(8, 10 * seed)
        best = model.predict(torch.stack(subsets)).max()
        hits += abs(float(best - model.predict(best_subset(model, 3)[None]))) < 1e-9
    assert hits >= 30


def test_order_removes_the_lesser_of_the_two_that_cost_least_together() -> None:
    model = quadratic(6, 5)

    def score(kept: set[int]) -> float:
        return float(model.predict(torch.tensor([[c in kept for c in range(6)]])))

    kept, expected = set(range(6)), []
    while len(kept) > 1:
        pair = max(itertools.combinations(sorted(kept), 2), key=lambda two: score(kept - set(two)))
        expected.append(max(pair, key=lambda c: score(kept - {c})))
        kept -= {expected[-1]}
    assert order(model).tolist() == [*expected, *kept]


def test_order_without_interactions_is_that_of_the_linear_terms() -> None:
    linear = torch.randn(9, generator=seeded(0)).double()
    nothing = torch.tensor(0.0).double()
    assert (
        order(PairImportance(linear, torch.zeros(9, 9).double(), nothing, nothing, nothing)).tolist()
        == linear.argsort().tolist()
    )


def test_orders_break_ties_by_index() -> None:
    zero = torch.zeros(3).double()
    tied = Importance(torch.tensor([1.0, 0.0, 0.0]), zero, zero, zero, zero, zero)
    assert order(tied).tolist() == [1, 2, 0]
    assert order(PairImportance(zero, torch.zeros(3, 3).double(), zero[0], zero[0], zero[0])).tolist() == [0, 1, 2]


def test_wide_layers_fit_pairs_without_writing_the_terms_down() -> None:
    masks = sample_masks(256, 400, generator=seeded(0))  # 32,896 terms
    fit = fit_pairs(masks, masks.double() @ torch.linspace(-1, 1, 256).double())
    assert best_subset(fit, 100).sum() == 100
    assert rank_correlation(order(fit).argsort().double(), torch.arange(256).double()) > 0.5


def test_best_subset_checks_its_size() -> None:
    with pytest.raises(InvalidInput, match="keep: got 0, wanted 1 to 6"):
        best_subset(quadratic(6, 0), 0)
    assert bool(best_subset(quadratic(6, 0), 6).all())
