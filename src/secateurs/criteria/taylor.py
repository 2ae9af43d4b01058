"""First-order Taylor expansion of the loss, as Molchanov et al. rank filters (Pruning CNNs for efficient inference, 2017)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from secateurs._util.modules import Device, eval_mode, on_device
from secateurs.criteria.filters import importance_of
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.masking import split_at
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, cross_entropy
from secateurs.scoring.importance import Importance


def taylor(
    graph: Graph,
    site: Site,
    data: Examples,
    *,
    seed: int = 0,
    loss_fn: Measure = cross_entropy,
    batch: int = 256,
    device: Device = None,
) -> Importance:
    """Mean over the examples of |Σ over space of activation · slope of the example's loss|, at the whole network.

    To first order that is how much one example's loss changes when the channel is set to zero.
    """
    if len(data) == 0:
        raise InvalidInput("criterion 'taylor': got no examples, wanted at least one to take gradients of.")
    parts = split_at(graph, site)
    changes = torch.zeros(site.channels, dtype=torch.float64)
    with ExitStack() as stack:
        place = stack.enter_context(on_device(parts.prefix, device))
        stack.enter_context(on_device(parts.suffix, device))
        stack.enter_context(eval_mode(parts.prefix))
        stack.enter_context(eval_mode(parts.suffix))
        for inputs, targets in data.batches(batch, device=place):
            activations, *carried = parts.prefix(inputs)
            slopes = _slopes(parts.suffix, activations, tuple(carried), targets, loss_fn)
            by_channel = (activations * slopes).movedim(parts.axis, 1).reshape(len(inputs), site.channels, -1).sum(2)
            changes += by_channel.abs().double().sum(0).cpu()
    return importance_of(changes / len(data))


def _slopes(suffix: nn.Module, activations: Tensor, carried: tuple[Tensor, ...], targets: Any, loss_fn: Measure) -> Tensor:
    """How each example's own loss changes with its activations; of the activations' shape."""
    with torch.enable_grad():
        varied = activations.detach().requires_grad_()
        losses = loss_fn(suffix(varied, *carried), targets)
        count = len(activations)
        # one example's loss does not depend on another's activations, so the slope of the sum is that of each
        total = losses * count if losses.ndim == 0 else losses.reshape(count, -1).mean(1).sum()
        (slopes,) = torch.autograd.grad(total, varied)
    return slopes
