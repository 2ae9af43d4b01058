"""The label-free signal: zero for the same answers, and Kullback and Leibler's formula for others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from secateurs.data import Examples
from secateurs.errors import InvalidInput
from secateurs.metrics import divergence, with_answers


def test_a_network_does_not_diverge_from_itself() -> None:
    torch.manual_seed(0)
    network, x = nn.Linear(5, 3).double(), torch.randn(20, 5).double()
    answered = with_answers(Examples(x, torch.zeros(20, dtype=torch.long)), network, batch=7)
    torch.testing.assert_close(divergence(network(x), answered.targets), torch.zeros(20).double(), rtol=0, atol=1e-14)


def test_the_formula_by_hand() -> None:
    targets = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64)
    outputs = torch.tensor([[math.log(3.0), 0.0], [math.log(9.0), 0.0]], dtype=torch.float64)  # 3/4, 1/4 and 9/10, 1/10
    by_hand = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    torch.testing.assert_close(
        divergence(outputs, targets), torch.tensor([by_hand, 0.0], dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_pixels_are_averaged() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(2, 4, 3, 5).double(), torch.rand(2, 4, 3, 5).double().softmax(1)
    each = torch.stack([divergence(outputs[..., i, j], targets[..., i, j]) for i in range(3) for j in range(5)])
    torch.testing.assert_close(divergence(outputs, targets), each.mean(0))


def test_answers_that_are_no_logits_are_refused() -> None:
    with pytest.raises(InvalidInput, match="class logits"):
        with_answers(Examples(torch.randn(4, 3), torch.zeros(4)), nn.Flatten(0))
