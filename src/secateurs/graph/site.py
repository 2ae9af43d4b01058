"""Sites as records: where a mask is applied (`MaskPoint`), which layers lose filters (`Site`), and what has none, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from secateurs.graph.channels import all_of


@dataclass(frozen=True)
class MaskPoint:
    """A node behind which a site's mask is applied: to some of its `width` channels, each by one of the site's, its source.

    At an op that takes statistics over channels (LayerNorm, RMSNorm, GroupNorm), these are the statistics of the kept channels;
    it need not give zeros if an activation follows behind which the mask is applied again (`zeroes`).
    """

    node: str
    axis: int
    width: int
    channels: tuple[int, ...]
    sources: tuple[int, ...]
    zeroes: bool = True

    def mask(self, keep: Tensor) -> Tensor:
        """Return the mask of the node's channels, bool (width,), for the site's mask `keep` (C,)."""
        mask = all_of(self.width)
        mask[list(self.channels)] = keep[list(self.sources)]
        return mask

    def source(self) -> Tensor:
        """Return the site's channel that each channel of the node goes with (width,), -1 for one of another site."""
        source = torch.full((self.width,), -1)
        source[list(self.channels)] = torch.tensor(self.sources)
        return source


@dataclass(frozen=True)
class Site:
    """A place where a channel can be zeroed and stays zero until it is read.

    The mask goes behind the graph node `node`, along `axis`, the first of `points`: the others are the places behind the other
    calls of the layer, and those where it is applied again. The first `own` points lie behind layers of their own, which lose
    filters together: a coupled site. `layers` lose their filters with the removed channels. `original` holds the ids, in the
    uncut network, of the channels that remain; of a coupled site, those of the first channel of each at `node`.
    """

    name: str
    channels: int
    layers: tuple[str, ...]
    original: tuple[int, ...]
    original_channels: int
    points: tuple[MaskPoint, ...]
    own: int = 1
    inside: bool = False  # its channels are features within the heads of attention, the same in every head
    unit: str = "filters"  # what one calls its channels: filters, heads, units of a recurrent module, or features within heads

    @property
    def node(self) -> str:
        """The first node behind which the mask goes."""
        return self.points[0].node

    @property
    def axis(self) -> int:
        """The channel axis of `node`."""
        return self.points[0].axis

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Unprunable:
    """A layer without a site, the reason, and its MACs for one example."""

    name: str
    node: str
    reason: str
    macs: int


class Sites(Sequence[Site]):
    """The sites of a graph in network order; `unprunable` lists the layers without a site, with reasons."""

    def __init__(self, sites: Iterable[Site], unprunable: Iterable[Unprunable] = ()) -> None:
        self._sites = tuple(sites)
        self.unprunable = tuple(unprunable)

    @overload
    def __getitem__(self, index: int) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Site, ...]: ...
    def __getitem__(self, index: int | slice) -> Site | tuple[Site, ...]:
        return self._sites[index]

    def __len__(self) -> int:
        return len(self._sites)

    def __repr__(self) -> str:
        return f"Sites({list(self._sites)!r}, unprunable={list(self.unprunable)!r})"


def node_masks(cuts: Iterable[tuple[Site, Tensor]]) -> dict[str, tuple[int, Tensor]]:
    """Return the channel axis and the mask of each node, by name, behind which the sites' masks are applied; True = kept.

    The sites are all of features within heads, or none is: at one node these lie along another axis than heads.
    """
    found: dict[str, tuple[int, Tensor]] = {}
    for site, keep in cuts:
        for point in site.points:
            mask = point.mask(keep)
            found[point.node] = (point.axis, found[point.node][1] & mask if point.node in found else mask)
    return found
