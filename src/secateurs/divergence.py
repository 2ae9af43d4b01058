"""A loss that needs no labels: how far a network's answers are from those of the network it was pruned from.

A network that has memorised its training images has almost no loss left on them, so their labels say little about which
filter matters. What the unpruned network answers, with all its doubts, says more, and can be had for unlabelled images too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateurs.data.examples import Examples
from secateurs.errors import InvalidInput
from secateurs.evaluate import Device, outputs


def with_answers(examples: Examples, module: nn.Module, *, batch: int = 256, device: Device = None) -> Examples:
    """The same inputs, with the module's class probabilities (N, K, …) in place of their targets."""
    logits = outputs(module, examples, batch=batch, device=device)
    if not isinstance(logits, Tensor) or logits.ndim < 2 or not logits.is_floating_point():
        raise InvalidInput(
            f"the signal 'divergence' compares class logits (N, K, …); this network gives {_described(logits)}. "
            f'Use signal = "loss" with a loss of your own.'
        )
    return replace(examples, targets=functional.softmax(logits, 1))


def divergence(outputs: Any, targets: Any) -> Tensor:
    """Kullback-Leibler divergence of the class logits `outputs` (n, K, …) from the probabilities `targets`, for every example.

    Never negative, and zero where both say the same; a mean over what follows the class axis.
    """
    each = functional.kl_div(functional.log_softmax(outputs, 1), targets, reduction="none").sum(1)
    return each.reshape(len(each), -1).mean(1)


def _described(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
