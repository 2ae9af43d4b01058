"""The built-in criteria: norms of weights, BatchNorm scales, chance, and the loss around the whole network."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from secateurs._util.modules import eval_mode, on_device
from secateurs.criteria import CriterionContext, criterion
from secateurs.criteria.filters import filter_weights, layers_behind, norms_behind, sum_over
from secateurs.data.dataset import generator_for
from secateurs.errors import InvalidInput
from secateurs.graph.masking import split_at
from secateurs.metrics import Measure

FilterScores = Callable[[Tensor], Tensor]
"""Takes the weights of a layer, a row for each filter; gives a number for each."""


def weight_criterion(name: str) -> Callable[[FilterScores], FilterScores]:
    """Register a function of a layer's weights, summed over the layers behind the site; biases and BatchNorm do not count."""

    def register(function: FilterScores) -> FilterScores:
        @criterion(name)
        def summed(context: CriterionContext) -> Tensor:
            return sum_over(layers_behind(context.graph, context.site), lambda layer: function(filter_weights(layer)))

        return function

    return register


@weight_criterion("l1")
def l1(weights: Tensor) -> Tensor:
    """Sum of absolute weights (Li et al., Pruning filters for efficient ConvNets, 2017)."""
    return weights.abs().sum(1)


@weight_criterion("l2")
def l2(weights: Tensor) -> Tensor:
    """Euclidean norm of the weights."""
    norms: Tensor = weights.norm(dim=1)
    return norms


@weight_criterion("fpgm")
def geometric_median(weights: Tensor) -> Tensor:
    """Sum of the distances to all other filters of the layer (He et al., Filter pruning via geometric median, 2019)."""
    # plain differences: the quicker way over products loses the small distances, which decide here
    distances: Tensor = torch.cdist(weights, weights, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.sum(1)


@criterion("batchnorm")
def batchnorm(context: CriterionContext) -> Tensor:
    """Absolute weight of each channel in the BatchNorm behind its filters, summed where several layers feed the site."""
    norms = norms_behind(context.graph, context.site)
    if not norms:
        raise InvalidInput(
            f"criterion 'batchnorm' at site {context.site.name!r}: no BatchNorm with weights lies between its filters and the "
            f"place where they are masked. Rank this site by 'l1' or 'l2' instead."
        )
    return sum_over(norms, lambda norm: norm.get_parameter("weight").abs())


@criterion("random")
def random_scores(context: CriterionContext) -> Tensor:
    """Uniform in [0, 1), drawn for each seed and site."""
    generator = generator_for(context.seed, "random criterion", context.site.name)
    return torch.rand(context.site.channels, generator=generator, dtype=torch.float64)


@criterion("leave-one-out", passes=lambda channels, _: channels + 1)
def leave_one_out(context: CriterionContext) -> Tensor:
    """Mean loss without the filter minus that of the whole network: one mask for each filter."""
    channels = context.site.channels
    masks = torch.cat([torch.ones(1, channels, dtype=torch.bool), ~torch.eye(channels, dtype=torch.bool)])
    losses = context.evaluator.on(context.examples).means(masks)
    return losses[1:] - losses[0]


@criterion("taylor", passes=lambda *_: 3)
def taylor(context: CriterionContext) -> Tensor:
    """Mean over the examples of |Σ over space of activation · slope of the example's loss|, at the whole network.

    To first order that is the change of one example's loss when the channel is set to zero (Molchanov et al., Pruning CNNs for
    efficient inference, 2017).
    """
    evaluator, site, examples = context.evaluator, context.site, context.examples
    if len(examples) == 0:
        raise InvalidInput("criterion 'taylor': got no examples, wanted at least one to take gradients of.")
    parts = split_at(context.graph, site)
    changes = torch.zeros(site.channels, dtype=torch.float64)
    with ExitStack() as stack:
        place = stack.enter_context(on_device(parts.prefix, evaluator.device))
        stack.enter_context(on_device(parts.suffix, evaluator.device))
        stack.enter_context(eval_mode(parts.prefix, parts.suffix))
        for batch in examples.batches(evaluator.batch, device=place):
            activations, *carried = parts.prefix(*batch.args)
            values = torch.ones(batch.size, site.channels).to(activations) if parts.several else activations

            def run(varied: Tensor, activations: Tensor = activations, carried: list[Any] = carried) -> Any:
                return parts.suffix(activations, *carried, varied) if parts.several else parts.suffix(varied, *carried)

            # the slope along a channel's factor is the sum over all places where the channel is masked
            slopes = _slopes(run, values, batch.targets, evaluator.measure)
            axis = 1 if parts.several else parts.axis
            by_channel = (values * slopes).movedim(axis, 1).reshape(batch.size, site.channels, -1).sum(2)
            changes += by_channel.abs().cpu().double().sum(0)
    return changes / len(examples)


def _slopes(outputs: Callable[[Tensor], Any], values: Tensor, targets: Any, loss_fn: Measure) -> Tensor:
    """The slope of each example's own loss along its row of `values`, in their shape."""
    with torch.enable_grad():
        varied = values.detach().requires_grad_()
        losses = loss_fn(outputs(varied), targets)
        count = len(values)
        # one example's loss does not depend on another's values, so the slope of the sum is that of each
        total = losses * count if losses.ndim == 0 else losses.reshape(count, -1).mean(1).sum()
        (slopes,) = torch.autograd.grad(total, varied)
    return slopes
