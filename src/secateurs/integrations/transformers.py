"""Hugging Face transformers: train and measure image classifiers with a Trainer while they are pruned.

`secateurs.prune` takes most such models, and loaders of dicts with `pixel_values` and `labels`, as they are. A traced network
does not take labels: `WithLoss` makes it what a Trainer trains. This module does not import transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from secateurs._util.modules import device_of
from secateurs.errors import InvalidInput
from secateurs.metrics import logits_of

TrainerFactory = Callable[[nn.Module], Any]
"""Makes a new transformers.Trainer for a model that gives a loss and logits."""


class Logits(nn.Module):
    """An image classifier as a network of one tensor, logits (N, classes) out, where its own forward cannot be traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        logits: Tensor = self.model(pixel_values=pixel_values).logits
        return logits


class WithLoss(nn.Module):
    """A network of `pixel_values` as a Trainer calls it: logits, and with labels their mean cross-entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the logits of a batch, and its loss if `labels` are given."""
        logits = logits_of(self.network(pixel_values))
        return {"logits": logits} if labels is None else {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def finetune_with(trainer: TrainerFactory) -> Callable[[nn.Module], None]:
    """Make a `finetune` for `secateurs.prune`: a new Trainer trains the pruned network in place."""

    def finetune(network: nn.Module) -> None:
        place = device_of(network)
        trainer(WithLoss(network)).train()
        network.to(place)

    return finetune


def evaluate_with(trainer: TrainerFactory, *, monitor: str, mode: str = "max") -> Callable[[nn.Module], float]:
    """Make an `evaluate` for `secateurs.prune`: the metric `monitor` of a new Trainer's `evaluate`, such as "eval_accuracy".

    `mode` is "max" where higher is better, "min" where lower is, as for "eval_loss": the value is negated then.
    """
    if mode not in ("max", "min"):
        raise InvalidInput(f'mode: got {mode!r}, wanted "max" or "min".')

    def evaluate(network: nn.Module) -> float:
        place = device_of(network)
        found = trainer(WithLoss(network)).evaluate()
        network.to(place)
        if monitor not in found:
            raise InvalidInput(f"monitor: got {monitor!r}, wanted a metric of the Trainer: {', '.join(found)}.")
        return float(found[monitor]) if mode == "max" else -float(found[monitor])

    return evaluate
