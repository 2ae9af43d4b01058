"""Hugging Face transformers: prune image classifiers, and train and measure them with a Trainer while they are pruned.

Batches are dicts with `pixel_values` and `labels`. Models answer with dicts, and most of their forwards take `**kwargs`, which
torch.fx cannot trace: `Logits` makes a model a network of one tensor, `WithLoss` makes a network what a Trainer trains.
This module does not import transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from secateurs._util.modules import device_of
from secateurs.errors import InvalidInput

TrainerFactory = Callable[[nn.Module], Any]
"""Makes a new transformers.Trainer for a model that gives a loss and logits."""


class Logits(nn.Module):
    """An image classifier of transformers as a network: pixel values in, logits (N, classes) out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        logits: Tensor = self.model(pixel_values=pixel_values).logits
        return logits


class WithLoss(nn.Module):
    """A network of `pixel_values` as a Trainer calls it: with labels it also gives the mean cross-entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the logits of a batch, and its loss if `labels` are given."""
        logits = self.network(pixel_values)
        return {"logits": logits} if labels is None else {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def forward(model: Callable[[Tensor], Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Call a network on a batch."""
    return model(batch["pixel_values"])


def loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of each example, (N,)."""
    return functional.cross_entropy(logits, batch["labels"], reduction="none")


def accuracy(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Whether each example is classified correctly, (N,)."""
    return (logits.argmax(1) == batch["labels"]).float()


DICT_BATCHES: Mapping[str, Any] = MappingProxyType({"forward": forward, "loss": loss, "metric": accuracy})
"""Options of `secateurs.prune` for loaders of such batches: `prune(Logits(model), train, val, **DICT_BATCHES)`."""


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
