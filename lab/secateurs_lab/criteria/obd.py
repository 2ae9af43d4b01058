"""Optimal Brain Damage (LeCun, Denker, Solla, 1990): saliency h u² / 2 by the diagonal of the Hessian, in Gauss-Newton form.

The curvature of the cross-entropy at the logits is diag(p) - p pᵀ = Σ_k b_k b_kᵀ with b_k = √p_k (e_k - p). Going back once for
every b_k and adding up squares gives Σ_k (b_kᵀ ∂logits/∂u)², which is never negative. Where the logits are piecewise linear in
u, as in a ReLU network for any single weight or gate, that is the second derivative itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from secateurs._util.modules import Device, eval_mode, on_device
from secateurs.criteria import CriterionContext, criterion
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.masking import split_at
from secateurs.metrics import logits_of

WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def curvature_roots(logits: Tensor) -> Iterator[Tensor]:
    """Yield b_k (N, K) for each class: the outer products of the rows with themselves add up to diag(p) - p pᵀ."""
    p = logits.detach().softmax(1)
    for k in range(logits.shape[1]):
        root = -p * p[:, k : k + 1].sqrt()
        root[:, k] += p[:, k].sqrt()
        yield root


def squared_slopes(logits: Any, places: list[Tensor]) -> list[Tensor]:
    """The Gauss-Newton curvature of the summed cross-entropy at every value of `places`, in their shapes."""
    found = logits_of(logits)
    if not isinstance(found, Tensor) or found.ndim != 2 or found.shape[1] < 2:
        raise InvalidInput("obd: the network gives no class logits (N, K): wanted a classifier of 2 classes or more.")
    sums = [torch.zeros_like(place) for place in places]
    for root in curvature_roots(found):
        slopes = torch.autograd.grad((root * found).sum(), places, retain_graph=True)
        for total, slope in zip(sums, slopes, strict=True):
            total += slope.square()
    return sums


@criterion("obd", passes=lambda _, classes: 1 + 2 * max(1, classes))  # back once for every class
def obd(context: CriterionContext) -> Tensor:
    """Saliency of a gate of 1 on each channel: half the mean over the examples of the loss's curvature along the gate.

    A channel's gate acts at all its places at once, so its slope is the sum of activation · slope over them, then squared.
    """
    evaluator, site, examples = context.evaluator, context.site, context.examples
    if len(examples) == 0:
        raise InvalidInput("criterion 'obd': got no examples, wanted at least one to take gradients of.")
    parts = split_at(context.graph, site)
    total = torch.zeros(site.channels, dtype=torch.float64)
    with (
        on_device(parts.prefix, evaluator.device) as place,
        on_device(parts.suffix, place),
        eval_mode(parts.prefix, parts.suffix),
    ):
        for batch in examples.batches(evaluator.batch, device=place):
            with torch.no_grad():
                activations, *carried = parts.prefix(*batch.args)
            with torch.enable_grad():
                gates = torch.ones(batch.size, site.channels).to(activations).requires_grad_()
                if parts.several:
                    outputs = parts.suffix(activations, *carried, gates)
                else:
                    shape = [batch.size] + [1] * (activations.dim() - 1)
                    shape[parts.axis] = -1
                    outputs = parts.suffix(activations * gates.view(shape), *carried)
                (curvature,) = squared_slopes(outputs, [gates])
            total += curvature.double().cpu().sum(0)
    return total / (2 * len(examples))


def weight_curvatures(module: nn.Module, examples: Examples, *, batch: int = 256, device: Device = None) -> dict[str, Tensor]:
    """Diagonal Gauss-Newton curvature of the mean cross-entropy for every weight of linear layers and convolutions, by name.

    A weight that is used at several places gets the sum over them of curvature at the output · input², as LeCun has it: exact
    for linear layers, without the terms between places for convolutions.
    """
    layers = {name: part for name, part in module.named_modules() if isinstance(part, WEIGHTED)}
    found = {name: torch.zeros_like(part.weight, dtype=torch.float64, device="cpu") for name, part in layers.items()}
    calls: list[tuple[str, Tensor, Tensor]] = []

    def saw(name: str) -> Any:
        def hook(part: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            calls.append((name, inputs[0].detach(), output))

        return hook

    handles = [part.register_forward_hook(saw(name)) for name, part in layers.items()]
    try:
        with on_device(module, device) as place, eval_mode(module), torch.enable_grad():
            for each in examples.batches(batch, device=place):
                calls.clear()
                outputs = module(*(arg.requires_grad_() if arg.is_floating_point() else arg for arg in each.args))
                for (name, x, _), curvature in zip(calls, squared_slopes(outputs, [y for *_, y in calls]), strict=True):
                    found[name] += _weight_sums(layers[name], x.square(), curvature).double().cpu()
    finally:
        for handle in handles:
            handle.remove()
    return {name: total / len(examples) for name, total in found.items()}


def _weight_sums(layer: Any, x: Tensor, curvature: Tensor) -> Tensor:
    """Sum over examples and places of input · output, for every weight: what the weight's gradient is for these values."""
    weight = layer.weight.detach().clone().requires_grad_()
    out = torch.nn.functional.linear(x, weight) if isinstance(layer, nn.Linear) else layer._conv_forward(x, weight, None)
    sums: Tensor = torch.autograd.grad(out, weight, curvature)[0]
    return sums
