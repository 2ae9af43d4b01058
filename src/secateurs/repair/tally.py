"""Second moments of what a reader sees and is to give, summed over examples a little at a time: memory stays bounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from secateurs.repair.matrix import gram_features, groups_of, patches, target_rows
from secateurs.repair.solve import Moments

CHUNK_BYTES = 2**25
"""Features that are spread out at once."""

HELD = 3
"""Every third example is held back to choose a ridge by."""


class LayerTally:
    """Moments of a layer's features, and of its targets if they are given, over all examples and over those held back.

    With more than `rows` places over `examples` examples, each example gets equally many, drawn from a seed: how the examples
    are batched changes nothing.
    """

    def __init__(self, layer: Any, *, examples: int, rows: int | None, seed: int) -> None:
        self.layer = layer
        self.each = None if rows is None else math.ceil(rows / max(examples, 1))
        self.generator = torch.Generator().manual_seed(seed)
        self.sums: list[list[Tensor]] = [[], []]  # of all, of those held back
        self.chunk = max(1, CHUNK_BYTES // (8 * groups_of(layer) * gram_features(layer)))

    def add(self, x: Tensor, y: Tensor | None, first: int) -> None:
        """Take in a batch, of which the first example is number `first`: its input, and what the layer should give."""
        patched = patches(self.layer, x)
        images, places = self._choose(len(patched.view), math.prod(patched.places))
        is_held = (images + first) % HELD == HELD - 1
        for held in (False, True):
            chosen = (is_held == held).nonzero().flatten()
            for part in torch.split(chosen, self.chunk):
                image, place = images[part].to(x.device), places[part].to(x.device)
                features = patched.rows(image, place)
                self._sum(held, features, None if y is None else target_rows(self.layer, y, image, place))

    def _choose(self, count: int, places: int) -> tuple[Tensor, Tensor]:
        """Numbers of images and of their places that are taken in."""
        each = places if self.each is None else min(places, self.each)
        if each == places:
            return torch.arange(count).repeat_interleave(places), torch.arange(places).repeat(count)
        drawn = [torch.randperm(places, generator=self.generator)[:each] for _ in range(count)]
        return torch.arange(count).repeat_interleave(each), torch.cat(drawn)

    def _sum(self, held: bool, features: Tensor, targets: Tensor | None) -> None:
        found = [features.mT @ features]
        if targets is not None:
            found += [features.mT @ targets, (targets**2).sum(1)]
        for kind in (0, 1) if held else (0,):
            if self.sums[kind]:
                for total, new in zip(self.sums[kind], found, strict=True):
                    total += new
            else:
                self.sums[kind] = [f.clone() for f in found]

    def moments(self, start: Tensor) -> Iterator[Moments | None]:
        """Those of all examples, then those of the ones held back (None without any), on the CPU.

        Without targets the layer is to give what its weights `start` (G, p, O) make of all features.
        """
        for found in self.sums:
            if not found:
                yield None
            elif len(found) == 1:
                gram = found[0].cpu()
                cross = gram @ start
                yield Moments(gram, cross, (start * cross).sum(1))
            else:
                gram, cross, energy = (f.cpu() for f in found)
                yield Moments(gram, cross, energy)


class SumTally:
    """First and second moments, channel by channel, of what a sum lacks and of what the site adds to it."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.count = 0

    def add(self, there: Tensor, without: Tensor, target: Tensor, axis: int) -> None:
        """Take in the sum as it is, without the site, and as it should be; channels lie along `axis`."""
        there, without, target = (_by_channel(t, axis) for t in (there, without, target))
        lacking, part = target - there, there - without
        terms = [lacking, part, lacking**2, part**2, lacking * part, target, target**2]
        found = torch.stack([t.sum(1) for t in terms])
        self.sums = found if self.sums is None else self.sums + found
        self.count += there.shape[1]


def _by_channel(value: Tensor, axis: int) -> Tensor:
    return value.transpose(0, axis).flatten(1).double()
