"""Ensembles with pairwise terms: they see two filters that work against each other, which the linear model cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from secateurs import fit_pairs, sample_masks, scores
from secateurs.criteria import CriterionContext, criterion
from secateurs.data.dataset import generator_for
from secateurs.errors import InvalidInput
from secateurs.scoring.importance import order

EACH = 10  # masks for each filter, as the paper has; more did not help (lab/notes/quality.md)


@criterion("pairs", passes=lambda channels, _: EACH * channels)
def pairs(context: CriterionContext) -> Tensor:
    """The place of each filter in the order in which the model with pairwise terms removes them, the first one 0."""
    channels = context.site.channels
    if len(context.examples) == 0:
        raise InvalidInput("criterion 'pairs': got no examples, wanted at least one to measure losses on.")
    masks = sample_masks(channels, EACH * channels, generator=generator_for(context.seed, "masks"))
    losses = context.evaluator.on(context.examples).means(masks)
    places = torch.empty(channels, dtype=torch.float64)
    places[order(fit_pairs(masks, scores(losses)))] = torch.arange(channels, dtype=torch.float64)
    return places
