"""The allocation that a run chooses from the frontier: the search predicts an edge, certification tests up to it and beyond."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secateurs.pruning.climb import COARSE, FINE, choose_allocation, to_certify
from secateurs.pruning.results import Trial
from secateurs.selection.allocation import Allocation


def allocations(count: int) -> list[Allocation]:
    """Divisions that save 0, 1, 2, … thousandths."""
    return [Allocation({"site": i}, i / 1000, i * 1e-4) for i in range(count)]


def searched(edge: int, within: int) -> Callable[[int], Trial]:
    return lambda i: Trial("steering", i, i <= edge, 1 - i / 1000, i <= within)


def certified(limit: int, asked: list[int]) -> Callable[[int, Sequence[bool]], Trial]:
    def certify(index: int, answers: Sequence[bool]) -> Trial:
        assert list(answers) == [True] * len(asked)  # nothing is asked after a no
        asked.append(index)
        return Trial("certifying", index, index <= limit, upper=index / 1e4)

    return certify


@pytest.mark.parametrize("edge", [100, 200, 333])
@pytest.mark.parametrize("truth", [0.55, 0.8, 1.0, 1.7])
def test_certification_ends_within_a_trial_of_what_can_be_certified(edge: int, truth: float) -> None:
    asked: list[int] = []
    limit = round(truth * edge)
    found = choose_allocation(allocations(600), searched(edge, 2 * edge), certified(limit, asked))
    assert asked == sorted(asked)
    assert found.answers == (*[True] * (len(asked) - 1), False)
    assert limit / 1.12 - 1 <= found.removed["site"] <= limit
    assert found.bound == pytest.approx(found.removed["site"] / 1e4)


def test_a_rejected_first_trial_leaves_the_network_unchanged() -> None:
    found = choose_allocation(allocations(600), searched(200, 300), certified(10, []))
    assert (found.saved, found.answers, found.bound) == (0, (False,), None)


def test_a_prediction_that_nothing_can_be_removed_is_still_tested() -> None:
    asked: list[int] = []
    found = choose_allocation(allocations(50), searched(0, 0), certified(30, asked))
    assert asked[0] == 1
    assert 27 <= found.removed["site"] <= 30


def test_without_certification_the_predicted_edge_is_chosen() -> None:
    found = choose_allocation(allocations(600), searched(123, 123), None)
    assert found.removed["site"] == 123
    assert (found.answers, found.bound) == ((), None)


def test_the_largest_saving_within_the_drop_on_the_validation_images_is_one_that_was_tried() -> None:
    found = choose_allocation(allocations(600), searched(200, 260), certified(150, []))
    tried = {round(1000 * saved) for saved, _, _ in found.tried}
    assert round(1000 * found.by_estimate) == max(i for i in tried if i <= 260)


@pytest.mark.parametrize(("growth", "most"), [(FINE, 66), (COARSE, 30)])
def test_trials_grow_by_their_factor_up_to_the_largest(growth: float, most: int) -> None:
    trials = to_certify(allocations(1000), 500, growth)
    assert trials[0] == 200
    assert trials[1] == 250
    assert trials[-1] == 999
    assert all(b / a <= growth + 0.01 for a, b in pairwise(trials[1:]))
    assert all((1000 - a) / (1000 - b) <= growth + 0.02 for a, b in pairwise(trials[1:]) if b < 900)  # of the time that is left
    assert len(trials) <= most
    assert len(trials) >= math.log(999 / 250) / math.log(growth)


@pytest.mark.parametrize("most", [0.3, 0.999, 1.0, 1.7])
def test_trials_end_however_much_is_saved(most: float) -> None:
    found = [Allocation({"site": i}, most * i / 10, i / 100) for i in range(11)]
    assert to_certify(found, 5)[-1] == 10


def test_an_empty_frontier_has_no_trials() -> None:
    assert to_certify(allocations(1), 0) == ()
    assert choose_allocation(allocations(1), searched(0, 0), certified(0, [])).saved == 0


def trained(limit: int, asked: list[int]) -> Callable[[int], Trial]:
    """What the search images say after training, which up to `limit` is within the contract."""

    def search(index: int) -> Trial:
        asked.append(index)
        return Trial("trained", index, index <= limit, 1 - index / 2000, index <= limit)

    return search


@given(edge=st.integers(1, 500), gain=st.floats(1, 4), bounded=st.booleans())
def test_trained_trials_find_the_deepest_within_a_tenth_and_train_few(edge: int, gain: float, bounded: bool) -> None:
    asked: list[int] = []
    limit = min(round(gain * edge), 599)
    found = choose_allocation(
        allocations(600), searched(edge, edge), None, search_trained=trained(limit, asked), bounded=bounded
    )
    assert found.place == found.removed["site"] <= limit
    assert found.place >= limit / 1.1 - 1
    assert len(asked) == len(set(asked)) <= 10
    assert {saved for saved, _, _ in found.tried} == {index / 1000 for index in asked}
    if bounded:
        assert asked[0] == 599  # the target itself comes first


@given(edge=st.integers(1, 300), gain=st.floats(1, 2), truth=st.floats(0.1, 3))
def test_certification_is_asked_about_few_trained_networks_and_ends_at_the_first_no(
    edge: int, gain: float, truth: float
) -> None:
    asked: list[int] = []
    predicted, limit = min(round(gain * edge), 599), round(truth * edge)
    found = choose_allocation(
        allocations(600), searched(edge, edge), certified(limit, asked), search_trained=trained(predicted, [])
    )
    assert found.place <= limit
    assert len(asked) <= 5
    assert found.answers[-1:] != (True,) or limit >= asked[-1]
    assert False not in found.answers[:-1]
    if truth >= 1:  # an allocation within the contract even before training is not lost
        assert found.place >= 0.7 * edge - 1


def test_where_training_helps_nothing_the_choice_is_that_without_it() -> None:
    asked: list[int] = []
    found = choose_allocation(allocations(600), searched(200, 200), None, search_trained=trained(200, asked))
    assert found.place == 200
    assert choose_allocation(allocations(600), searched(200, 200), None, search_trained=trained(0, [])).place == 0
    assert choose_allocation(allocations(1), searched(0, 0), None, search_trained=trained(0, [])).place == 0


def test_an_allocation_that_certification_is_not_asked_about_is_passed_over_and_ends_nothing() -> None:
    asked: list[int] = []
    answer = certified(300, asked)

    def certify(index: int, answers: Sequence[bool]) -> Trial | None:
        return None if index == 140 else answer(index, answers)  # 0.7 of the saving at the edge: the first in turn

    found = choose_allocation(allocations(600), searched(200, 200), certify, search_trained=trained(250, []))
    assert asked[0] > 140
    assert found.place == max(index for index in asked if index <= 300)
    assert len(found.answers) == len(asked)
    assert choose_allocation(allocations(600), searched(200, 200), lambda *_: None, search_trained=trained(250, [])).place == 0
