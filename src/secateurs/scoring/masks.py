"""Step 3 of 9: draws the masks of an ensemble. Pure: tensors out, the only randomness is the given generator.

Three designs. `exact` is the paper's: the same number of filters off in every mask. `bernoulli` switches every filter off
independently, so the number off varies and the linear model's constant is identified too. `balanced` is `exact` with every
filter off equally often over the whole ensemble and, as nearly as possible, every pair. An ensemble can be drawn in rounds, and
is balanced after each of them.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from secateurs.config import Design
from secateurs.errors import InvalidInput, suggest

MASKS_PER_FILTER = 10  # the paper's M = 10 C

_PICKS_PER_ROW = 16  # at most: in wide rows `balanced` picks several filters before it counts the pairs again


def sample_masks(
    channels: int,
    count: int | None = None,
    *,
    off: float = 0.3,
    design: Design = "exact",
    generator: torch.Generator,
    batch: tuple[int, ...] = (),
    after: Tensor | None = None,
) -> Tensor:
    """Draw `count` masks (default 10 for each filter) over `channels` filters, a share `off` of them switched off.

    Returns a bool tensor (*batch, count, channels) on the generator's device; True means kept. `exact` and `balanced`
    switch off exactly `filters_off(channels, off)` in every row. `bernoulli` switches off each filter with probability
    `off`; a row that would lose all its filters keeps one of them, drawn at random. `after` (*batch, M, channels) are masks
    already drawn, which these extend: `balanced` balances both together, the other designs ignore them.
    """
    count = MASKS_PER_FILTER * channels if count is None else count
    _check(channels, count, off, design, batch)
    _check_after(after, (*batch, channels))
    if design == "bernoulli":
        return _bernoulli(channels, (*batch, count), off, generator)
    if design == "balanced":
        return _balanced(channels, count, filters_off(channels, off), generator, batch, after)
    return _exact(channels, (*batch, count), filters_off(channels, off), generator)


def filters_off(channels: int, off: float) -> int:
    """How many of `channels` filters a mask switches off: `off` of them, rounded, but at least one, and not all."""
    return min(max(round(off * channels), 1), channels - 1)


def _exact(channels: int, rows: tuple[int, ...], off_count: int, generator: torch.Generator) -> Tensor:
    shuffled = _uniform((*rows, channels), generator).argsort(-1)
    kept = torch.ones((*rows, channels), dtype=torch.bool, device=generator.device)
    return kept.scatter_(-1, shuffled[..., :off_count], False)


def _bernoulli(channels: int, rows: tuple[int, ...], off: float, generator: torch.Generator) -> Tensor:
    kept = _uniform((*rows, channels), generator) >= off
    spared = torch.randint(channels, (*rows, 1), generator=generator, device=generator.device)
    # the spared filter is drawn for every row, needed or not, so that no row shifts the random numbers of the next
    only = torch.zeros_like(kept).scatter_(-1, spared, True)
    return torch.where(kept.any(-1, keepdim=True), kept, only)


def _balanced(
    channels: int, count: int, off_count: int, generator: torch.Generator, batch: tuple[int, ...], after: Tensor | None
) -> Tensor:
    """Switch off in mask after mask the filters off least often so far, and among them those least often off together."""
    size = math.prod(batch)
    kept = torch.ones(size, count, channels, dtype=torch.bool, device=generator.device)
    times_off, pairs_off = _times_off(after, size, channels, generator.device)
    for row in range(count):
        dealt = _deal(times_off, pairs_off, off_count, generator)
        kept[:, row] = ~dealt
        times_off += dealt
        off = dealt.to(pairs_off)
        pairs_off.baddbmm_(off[:, :, None], off[:, None, :])
    # early rows had fewer pairs to avoid: without a shuffle, halves and folds of the ensemble would differ in kind
    order = torch.randperm(count, generator=generator, device=generator.device)
    return kept[:, order].reshape(*batch, count, channels)


def _times_off(after: Tensor | None, size: int, channels: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """How often each filter (B, C) and each pair of filters (B, C, C) is off in masks already drawn."""
    if after is None:
        return torch.zeros(size, channels, device=device), torch.zeros(size, channels, channels, device=device)
    off = (~after).reshape(size, -1, channels).to(device, torch.float32)
    return off.sum(1), off.mT @ off


def _deal(times_off: Tensor, pairs_off: Tensor, off_count: int, generator: torch.Generator) -> Tensor:
    """The filters that the next row switches off, bool (B, C)."""
    size, channels = times_off.shape
    dealt = torch.zeros(size, channels, dtype=torch.bool, device=times_off.device)
    together = _uniform((size, channels), generator)  # times off with filters already in this row; the fraction breaks ties
    # How often a filter was off decides first: those counts never differ by more than one. Pairs decide within a count.
    ahead = times_off - times_off.amin(-1, keepdim=True)
    postponed = ahead * (off_count * times_off.amax(-1, keepdim=True) + 1)
    left, step = off_count, math.ceil(off_count / _PICKS_PER_ROW)
    while left:
        take = min(step, left)
        cost = (together + postponed).masked_fill_(dealt, math.inf)
        picked = cost.topk(take, -1, largest=False).indices
        dealt.scatter_(-1, picked, True)
        together += pairs_off.gather(1, picked[:, :, None].expand(-1, -1, channels)).sum(1)
        left -= take
    return dealt


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device)


def _check(channels: int, count: int, off: float, design: str, batch: tuple[int, ...]) -> None:
    if channels < 2:
        raise InvalidInput(f"channels: got {channels}, wanted 2 or more. A single filter cannot be ranked: leave its site out.")
    if count < 1:
        raise InvalidInput(f"count: got {count}, wanted at least 1 mask (default: {MASKS_PER_FILTER} for each filter).")
    if not 0 < off < 1:
        raise InvalidInput(f"off: got {off}, wanted a share between 0 and 1, both excluded (the paper uses 0.3).")
    if design not in get_args(Design):
        raise InvalidInput(f"design: got {design!r}.{suggest(design, get_args(Design))}")
    if any(size < 1 for size in batch):
        raise InvalidInput(f"batch: got {batch}, wanted sizes of at least 1.")


def _check_after(after: Tensor | None, shape: tuple[int, ...]) -> None:
    if after is not None and (after.dtype != torch.bool or (*after.shape[:-2], after.shape[-1]) != shape):
        wanted = ", ".join(map(str, (*shape[:-1], "M", shape[-1])))
        raise InvalidInput(
            f"after: got {after.dtype} of shape {tuple(after.shape)}, wanted masks drawn before, bool ({wanted})."
        )
