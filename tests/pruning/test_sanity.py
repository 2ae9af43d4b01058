"""Answers that no trained network gives to its own labels, by hand; chance alone is never taken for a cause."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from secateurs.pruning.sanity import accuracy_note, better_than_guessing


def labels_of(count: int, classes: int, seed: int = 0) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


def test_a_shift_without_wrapping_is_said_without_a_modulus() -> None:
    labels = labels_of(200, 4)  # a network with a class for the background, first
    assert "shifted: with label + 1 it would be right on 100.0 %" in accuracy_note(labels + 1, labels, 5)
    assert "shifted: with label − 1 it would be right on 100.0 %" in accuracy_note(labels, labels + 1, 5)
    assert "shifted: with (label + 1) modulo 2 it would be right on 100.0 %" in accuracy_note(1 - labels % 2, labels % 2, 2)


def test_an_order_is_tested_on_examples_that_it_was_not_found_on() -> None:
    """Of 20 examples of 10 classes any answers fit some order."""
    labels = torch.arange(20) % 10
    for seed in range(50):
        assert "order" not in accuracy_note(labels_of(20, 10, seed), labels, 10)


def test_less_than_chance_is_told_from_chance() -> None:
    labels = labels_of(2000, 10)
    wrong = (labels + labels_of(2000, 9, seed=1) + 1) % 10  # any class but the right one
    assert "clearly less often than by chance (10.0 %)" in accuracy_note(wrong, labels, 10)
    assert "it seems untrained" in accuracy_note(labels_of(2000, 10, seed=2), labels, 10)
    rare = torch.full((2000,), 3)
    few = torch.where(torch.arange(2000) < 20, 3, labels % 3)  # one answer for all, that of a rare class: 1 % is its chance
    assert "it seems untrained" in accuracy_note(rare, few, 10)


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_untrained_networks_are_not_said_to_have_other_labels(classes: int) -> None:
    for seed in range(20):
        labels = labels_of(300, classes, seed)
        features = torch.randn(300, 8, generator=torch.Generator().manual_seed(seed)) + torch.nn.functional.one_hot(
            labels % 8, 8
        )
        answers = (features @ torch.randn(8, classes, generator=torch.Generator().manual_seed(seed + 100))).argmax(1)
        if not better_than_guessing(float((answers == labels).double().mean()), labels):
            assert "labels seem" not in accuracy_note(answers, labels, classes)


def test_one_class_tells_nothing() -> None:
    assert better_than_guessing(0.0, torch.zeros(5, dtype=torch.long))
    assert better_than_guessing(0.7, torch.tensor([0, 0, 1]))
    assert not better_than_guessing(0.67, torch.tensor([0, 0, 1]))
