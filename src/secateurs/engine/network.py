"""A network split at a site, measured under many masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from secateurs.data.examples import Examples, Targets
from secateurs.evaluate import Device, Measure, evaluating, on_device, total
from secateurs.graph import Graph
from secateurs.layers import mask_channels
from secateurs.masking import split_at
from secateurs.sites import Site

DEFAULT_CACHE = 2 * 1024**3


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
    cache_bytes: int | None = None,
) -> MaskedNetwork:
    """The network of `graph`, split at `site`, to be measured on `examples`."""
    parts = split_at(graph, site)
    return MaskedNetwork(
        parts.prefix, parts.suffix, parts.axis, examples, batch, device, DEFAULT_CACHE if cache_bytes is None else cache_bytes
    )
