"""The ways to put a mask on a site and run what lies behind it: all give the masked network's outputs, up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx

from secateurs.errors import InvalidInput
from secateurs.graph.layers import mask_channels
from secateurs.scoring.engine.memory import memory_of
from secateurs.scoring.engine.split import (
    SplitNetwork,
    called,
    cut,
    joined,
    readers,
    replacements,
    shallow_clone,
    slots_of,
    stacked,
    swapped_tensors,
    unstacked,
)
from secateurs.scoring.engine.subtraction import Difference, can_fuse, fuse_, pick, take_difference

Masking = Literal["multiply", "weights", "gather", "subtract"]


@dataclass(frozen=True)
class MaskingStrategy:
    """How masks are measured: plain values, with which a later measurement on the same machine gives the same bits.

    `masking`: "multiply" the activations; or the "weights" of the layers that read the site, for their masked channels; or
    "gather" the kept channels, and let those layers read only them; or "subtract" what the masked channels give from what all
    channels give.
    """

    rows: int  # examples in one pass, at most
    masks_per_pass: int = 1
    masking: Masking = "multiply"
    fused: bool = False  # sums and ReLUs done by the convolution before them
    compiled: bool = False  # by torch.compile


@dataclass(frozen=True)
class SiteActivations:
    """What arrives at a site for some examples, and what else the suffix reads."""

    activations: Tensor
    carried: tuple[Any, ...]
    totals: tuple[Tensor, ...] = ()  # what the readers give without a mask, where masked channels are subtracted
    finite: bool = True

    def tensors(self) -> list[Tensor]:
        """All that it keeps in memory."""
        return [t for t in (self.activations, *self.carried, *self.totals) if isinstance(t, Tensor)]

    @property
    def bytes(self) -> int:
        """Memory of all that is kept."""
        return memory_of(self.tensors())


def possible_maskings(parts: SplitNetwork) -> list[Masking]:
    """The ways of masking that this site allows."""
    found: list[Masking] = ["multiply"]
    if parts.fill is None and parts.batching.apart and readers(parts.suffix, parts.axis):
        found += ["weights", "gather", "subtract"]
    return found


def can_be_fused(parts: SplitNetwork) -> bool:
    """Whether convolutions of this network can take sums and ReLUs along."""
    return parts.device.type == "cpu" and parts.dtype == torch.float32 and can_fuse()


def check_form(parts: SplitNetwork, form: MaskingStrategy) -> None:
    """`InvalidInput` if this network cannot be measured in that form."""
    wrong = [
        (form.rows < 1 or form.masks_per_pass < 1, "rows and masks_per_pass must be at least 1"),
        (form.masking not in possible_maskings(parts), f"the site allows only {possible_maskings(parts)}"),
        (form.masks_per_pass > 1 and form.masking != "multiply", "several masks in a pass need masking='multiply'"),
        (form.masks_per_pass > 1 and not parts.batching.apart, "this network mixes the examples of a batch"),
        (form.fused and not can_be_fused(parts), "fused convolutions need float32 and oneDNN on a CPU"),
        (form.compiled and form.masking != "multiply", "a compiled suffix needs masking='multiply'"),
    ]
    reasons = [reason for is_wrong, reason in wrong if is_wrong]
    if reasons:
        raise InvalidInput(f"{form}: {reasons[0]}. Leave form=None to have one chosen.")


class MaskedForward:
    """Runs prefix and suffix in one form, in one thread: threads may share `parts` but not a way."""

    def __init__(self, parts: SplitNetwork, form: MaskingStrategy) -> None:
        self.parts, self.form = parts, form
        self.prefix = shallow_clone(parts.prefix)

    @cached_property
    def suffix(self) -> fx.GraphModule:
        """What lies behind the site, as far as this form changes it for all masks alike."""
        suffix = shallow_clone(self.parts.suffix)
        if self.form.fused:
            fuse_(suffix)
        return suffix

    @cached_property
    def differentiable(self) -> fx.GraphModule:
        """The suffix without ops that know no gradients."""
        return shallow_clone(self.parts.suffix)

    @cached_property
    def _difference(self) -> Difference:
        return take_difference(self.parts.suffix, readers(self.parts.suffix, self.parts.axis), fused=self.form.fused)

    @cached_property
    def _read(self) -> list[Tensor]:
        """The weights of the layers that read the site."""
        return [called(self.parts.suffix, node).weight for node in readers(self.parts.suffix, self.parts.axis)]

    @cached_property
    def _eager(self) -> Callable[..., Any]:
        return _Multiply(self.suffix, self.parts)

    @cached_property
    def _multiply(self) -> Callable[..., Any]:
        return torch.compile(self._eager, dynamic=False) if self.form.compiled else self._eager

    def arrive(self, inputs: Tensor) -> SiteActivations:
        """Run the prefix over a whole batch, and over it what no mask changes."""
        activations, *carried = self.prefix(self.parts.laid_out(inputs))
        arrival = SiteActivations(self.parts.laid_out(activations), tuple(map(self.parts.laid_out, carried)))
        if not bool(torch.isfinite(activations).all()):  # zero times infinity is not zero: masked by other means
            return replace(arrival, finite=False)
        return self.completed(arrival)

    def completed(self, arrival: SiteActivations) -> SiteActivations:
        """With the totals that this form needs, if it needs any."""
        if self.form.masking != "subtract" or not arrival.finite:
            return arrival
        totals = [self._difference.whole(piece.activations, *piece.carried) for piece in self.pieces(arrival)]
        return replace(arrival, totals=tuple(torch.cat(rows) for rows in zip(*totals, strict=True)))

    def outputs(self, arrival: SiteActivations, masks: Tensor, given: Mapping[str, Tensor] | None = None) -> list[Any]:
        """What the masked network gives for all the examples, for each of `masks` (g, C).

        `given`: tensors, named as in the user's module, that replace the suffix's own.
        """
        if given is not None:
            with swapped_tensors(replacements(self.parts, self.suffix, given)):
                return self._passes(arrival, masks, self._eager)
        if not arrival.finite or self.form.masking == "multiply":
            return self._passes(arrival, masks, self._multiply if arrival.finite else self._eager)
        if self.form.masking == "subtract":
            return self._subtracting(arrival, masks)
        return self._reweighing(arrival, masks)

    def _passes(self, arrival: SiteActivations, masks: Tensor, run: Callable[..., Any]) -> list[Any]:
        """Each pass of at most `rows` examples; what several masks gave for the passes, mask by mask."""
        passes = []
        for piece in self.pieces(arrival):
            # a compiled suffix knows one shape: the tail of a batch is not worth compiling once more
            way = run if len(piece.activations) == self.form.rows else self._eager
            passes.append(unstacked(way(piece, masks), len(masks)))
        return [joined(list(parts)) for parts in zip(*passes, strict=True)]

    def pieces(self, arrival: SiteActivations) -> list[SiteActivations]:
        """The examples, at most `rows` at a time; all at once if the network mixes them."""
        return in_pieces(arrival, self.parts, self.form.rows)

    def _reweighing(self, arrival: SiteActivations, masks: Tensor) -> list[Any]:
        """Readers whose weights for the masked channels are zero, or that have no others than those for the kept ones."""
        outputs = []
        for mask in masks:
            if self.form.masking == "weights":
                weights = [weight * _along(mask.to(weight.dtype), 1, weight.ndim) for weight in self._read]
                index = None
            else:
                index = _picked(mask)
                weights = _columns(self._read, index, mask)
            slots = [slots_of(self.suffix, weight) for weight in self._read]
            with swapped_tensors(list(zip(slots, weights, strict=True))):
                passes = [self.suffix(self._pick(piece, index), *piece.carried) for piece in self.pieces(arrival)]
            outputs.append(joined(passes))
        return outputs

    def _subtracting(self, arrival: SiteActivations, masks: Tensor) -> list[Any]:
        """The known totals minus what the masked channels add to them."""
        outputs, difference = [], self._difference
        for mask in masks:
            index = _picked(~mask)
            weights = [weight.neg() for weight in _columns(difference.weights, index, ~mask)]
            slots = [[(layer, "weight")] for layer in difference.layers]
            with swapped_tensors(list(zip(slots, weights, strict=True))):
                passes = [
                    difference.changed(self._pick(piece, index), *piece.carried, *piece.totals)
                    for piece in self.pieces(arrival)
                ]
            outputs.append(joined(passes))
        return outputs

    def _pick(self, piece: SiteActivations, index: Tensor | None) -> Tensor:
        return piece.activations if index is None else pick(piece.activations, index, self.parts.axis)


def in_pieces(arrival: SiteActivations, parts: SplitNetwork, rows: int) -> list[SiteActivations]:
    """The examples, at most `rows` at a time; all at once if the network mixes them."""
    count, rowed = len(arrival.activations), parts.batching.carried
    if not parts.batching.apart or count <= rows:
        return [arrival]
    always = (True,) * len(arrival.totals)
    return [
        SiteActivations(
            arrival.activations[start : start + rows],
            cut(arrival.carried, rowed, start, start + rows),
            cut(arrival.totals, always, start, start + rows),
            arrival.finite,
        )
        for start in range(0, count, rows)
    ]


class _Multiply:
    """The suffix behind activations that are multiplied by masks, which come in as numbers."""

    def __init__(self, suffix: fx.GraphModule, parts: SplitNetwork) -> None:
        self.suffix, self.parts = suffix, parts

    def __call__(self, arrival: SiteActivations, masks: Tensor) -> Any:
        """Outputs for the examples under the first mask, then the second, and so on."""
        masked = self.masked(arrival.activations, masks, arrival.finite)
        if len(masks) == 1:
            return self.suffix(masked[0], *arrival.carried)
        carried = stacked(arrival.carried, self.parts.batching.carried, len(masks))
        return self.suffix(masked.flatten(0, 1), *carried)

    def masked(self, activations: Tensor, masks: Tensor, finite: bool) -> Tensor:
        """The activations under each mask, (g, n, …)."""
        axis, fill = self.parts.axis, self.parts.fill
        if not finite:
            return torch.stack(
                [mask_channels(activations, mask, axis) + _filling(activations, mask, axis, fill) for mask in masks]
            )
        # multiplied, not filled: masked_fill with a broadcast mask gives images back in another layout
        factors = masks.to(activations.dtype)
        shape = [len(masks)] + [1] * activations.ndim
        shape[1 + axis] = -1
        kept = activations.unsqueeze(0) * factors.view(shape)
        return kept if fill is None else kept + ((1 - factors) * fill.to(factors.dtype)).view(shape)


def plain_outputs(parts: SplitNetwork, arrival: SiteActivations, masks: Tensor) -> Any:
    """What the masked network gives, in the simplest form: for comparison."""
    return _Multiply(parts.suffix, parts)(replace(arrival, totals=()), masks)


def _filling(activations: Tensor, mask: Tensor, axis: int, fill: Tensor | None) -> Tensor | int:
    return 0 if fill is None else _along(fill.to(activations.dtype) * ~mask, axis, activations.ndim)


def _along(values: Tensor, axis: int, ndim: int) -> Tensor:
    """Values (C,) shaped to be broadcast along `axis` of a tensor."""
    shape = [1] * ndim
    shape[axis] = -1
    return values.view(shape)


def _picked(mask: Tensor) -> Tensor:
    """The numbers of the channels in `mask`; the first one if there is none, since a layer needs something to read."""
    index = mask.nonzero()[:, 0]
    return index if len(index) else index.new_zeros(1)


def _columns(weights: Sequence[Tensor], index: Tensor, mask: Tensor) -> list[Tensor]:
    """Each weight for the picked channels only; zero where a channel was picked only to have one."""
    columns = [weight.index_select(1, index) for weight in weights]
    return columns if bool(mask.any()) else [torch.zeros_like(column) for column in columns]
