"""Step 4 of 9: takes a site, masks and scoring data, gives the losses of the masked network: an Ensemble.

The network is split at the site. What lies before it is run once for each chunk of examples and kept while memory allows;
only what lies behind is run for every mask. Batching and caching never change a score: each mask meets the same chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from secateurs.data.examples import Examples, Targets
from secateurs.errors import InvalidMask
from secateurs.evaluate import Device, Measure, correct, cross_entropy, evaluating, on_device, total
from secateurs.graph import Graph
from secateurs.layers import mask_channels
from secateurs.masking import split_at
from secateurs.sites import Site

DEFAULT_CACHE = 2 * 1024**3


@dataclass(frozen=True, eq=False)
class Ensemble:
    """All masks drawn for one site, with the losses of the network under each."""

    site: str
    masks: Tensor  # (M, C) bool, True = kept
    losses: Tensor  # (M,) float64, mean over the scoring examples


@dataclass(frozen=True)
class Chunk:
    """Some examples as they arrive at a site: its activations, what else the suffix reads, and their targets."""

    activations: Tensor
    carried: tuple[Tensor, ...]
    targets: Targets
    examples: int

    @property
    def bytes(self) -> int:
        """Memory of the activations and what is carried past the site."""
        return sum(t.numel() * t.element_size() for t in (self.activations, *self.carried))


@dataclass
class MaskedNetwork:
    """A network split at a site, ready to be measured under many masks over one set of examples."""

    prefix: nn.Module
    suffix: nn.Module
    axis: int
    examples: Examples
    batch: int = 256
    device: Device = None
    cache_bytes: int = DEFAULT_CACHE
    _cache: list[Chunk] = field(default_factory=list)
    _used: int = 0

    def measure(self, masks: Tensor, measures: Sequence[Measure]) -> Tensor:
        """Mean of each measure over the examples under each mask: masks (M, C) to float64 (M, number of measures)."""
        sums = torch.zeros(len(masks), len(measures), dtype=torch.float64)
        with ExitStack() as stack:
            place = stack.enter_context(on_device(self.prefix, self.device))
            stack.enter_context(on_device(self.suffix, self.device))
            stack.enter_context(evaluating(self.prefix))
            stack.enter_context(evaluating(self.suffix))
            for chunk in self._chunks(place):
                for row, mask in enumerate(masks):
                    outputs = self.suffix(mask_channels(chunk.activations, mask, self.axis), *chunk.carried)
                    sums[row] += torch.stack([total(m(outputs, chunk.targets), chunk.examples) for m in measures])
        return sums / len(self.examples)

    def _chunks(self, place: torch.device) -> Iterator[Chunk]:
        """The examples in order; those whose activations fit into the budget are computed once."""
        for number, (inputs, targets) in enumerate(self.examples.batches(self.batch, device=place)):
            if number < len(self._cache):
                yield self._cache[number]
                continue
            activations, *carried = self.prefix(inputs)
            chunk = Chunk(activations, tuple(carried), targets, len(inputs))
            if number == len(self._cache) and self._used + chunk.bytes <= self.cache_bytes:
                self._cache.append(chunk)
                self._used += chunk.bytes
            yield chunk


def split_for(
    graph: Graph,
    site: Site,
    examples: Examples,
    *,
    batch: int = 256,
    device: Device = None,
    cache_bytes: int = DEFAULT_CACHE,
) -> MaskedNetwork:
    """The network of `graph`, split at `site`, to be measured on `examples`."""
    parts = split_at(graph, site)
    return MaskedNetwork(parts.prefix, parts.suffix, parts.axis, examples, batch, device, cache_bytes)


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
    cache_bytes: int = DEFAULT_CACHE,
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
