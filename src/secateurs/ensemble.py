"""Step 4 of 9: takes a site, masks and scoring data, gives the losses of the masked network: an Ensemble.

The network is split at the site. What lies before it is run once for each chunk of examples and kept while memory allows;
only what lies behind is run for every mask. Batching and caching never change a score: each mask meets the same chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from secateurs.data.examples import Examples
from secateurs.engine import MaskedNetwork, split_for
from secateurs.errors import InvalidMask
from secateurs.evaluate import Device, Measure, correct, cross_entropy
from secateurs.graph import Graph
from secateurs.sites import Site


@dataclass(frozen=True, eq=False)
class Ensemble:
    """All masks drawn for one site, with the losses of the network under each."""

    site: str
    masks: Tensor  # (M, C) bool, True = kept
    losses: Tensor  # (M,) float64, mean over the scoring examples


def score_masks(
    graph: Graph,
    site: Site,
    masks: Tensor,
    examples: Examples,
    *,
    loss_fn: Measure = cross_entropy,
    batch: int = 256,
    masks_per_pass: int = 32,
    device: Device = None,
    cache_bytes: int | None = None,
    known: Tensor | None = None,
    on_scored: Callable[[int, Tensor], None] | None = None,
) -> Ensemble:
    """Mean loss of the masked network over `examples` for every mask (M, C), True = kept.

    After every `masks_per_pass` masks `on_scored` gets the number of the first one and their losses. Losses already `known`,
    those of the first masks, are not measured again: an interrupted ensemble goes on where it stopped and ends the same.
    """
    check_ensemble(site, masks)
    losses = [] if known is None or len(known) == 0 else [known.double()]
    done = sum(map(len, losses))
    network = split_for(graph, site, examples, batch=batch, device=device, cache_bytes=cache_bytes)
    for start in range(done, len(masks), masks_per_pass):
        found = network.measure(masks[start : start + masks_per_pass], [loss_fn])[:, 0]
        losses.append(found)
        if on_scored is not None:
            on_scored(start, found)
    return Ensemble(site.name, masks, torch.cat(losses))


def accuracy_under(network: MaskedNetwork, keep: Tensor, metric: Measure = correct) -> float:
    """Mean metric of the split network with only the channels in `keep` (C,)."""
    return float(network.measure(keep[None], [metric])[0, 0])


def check_ensemble(site: Site, masks: Tensor) -> None:
    """Refuse masks that are not bool, or not one value for each channel of the site."""
    if masks.dtype != torch.bool or masks.ndim != 2 or masks.shape[1] != site.channels or len(masks) == 0:
        raise InvalidMask(
            f"masks of site {site.name!r}: got {masks.dtype} of shape {tuple(masks.shape)}, wanted bool (M, {site.channels}), "
            f"True = kept. sample_masks({site.channels}, generator=...) draws some."
        )
