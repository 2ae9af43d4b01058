"""The modules that secateurs adds to networks: `Mask`, `Align`, `SumInto` where live channels differ, `Constant`, `Offset`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mask(nn.Module):
    """Zeroes the channels that are not kept, along `axis`; even infinite values become zero."""

    keep: Tensor

    def __init__(self, keep: Tensor, axis: int) -> None:
        super().__init__()
        self.register_buffer("keep", keep.clone())
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        return mask_channels(x, self.keep, self.axis)


def mask_channels(x: Tensor, keep: Tensor, axis: int) -> Tensor:
    """`x` with zeros in the channels that are not in `keep` (C,)."""
    shape = [1] * x.dim()
    shape[axis] = -1
    return x.masked_fill(~keep.to(x.device).view(shape), 0)


class Align(nn.Module):
    """Channel j of the result is channel `take[j]` of the input, or zero where that is -1.

    Chooses the cheapest form once: a slice where the channels lie together, a pad where zeros only surround them, otherwise a
    gather, from the input widened by one zero channel if zeros are needed. The index is not part of the state dict: it follows
    from the plan.
    """

    index: Tensor

    def __init__(self, take: Tensor, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.take = tuple(int(i) for i in take)
        present = [i for i in self.take if i >= 0]
        first = next((j for j, i in enumerate(self.take) if i >= 0), 0)
        self.before, self.after = first, len(self.take) - first - len(present)
        self.start, self.count = (present[0] if present else 0), len(present)
        together = present == list(range(self.start, self.start + self.count))
        inside = all(i >= 0 for i in self.take[first : first + self.count])
        self.slides = together and inside
        self.fills = self.count < len(self.take)
        self.register_buffer("index", take.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The input with its channels picked and widened."""
        if not self.slides:
            index = self.index
            if self.fills:  # from the input with one zero channel behind it: cheaper than a pad, which fills all of it first
                index = torch.where(index < 0, x.shape[self.axis], index)
                x = torch.cat([x, torch.zeros_like(x.narrow(self.axis, 0, 1))], self.axis)
            return x.index_select(self.axis, index)
        if self.start or self.count != x.shape[self.axis]:
            x = x.narrow(self.axis, self.start, self.count)
        return self._pad(x, self.before, self.after) if self.fills else x

    def _pad(self, x: Tensor, before: int, after: int) -> Tensor:
        amounts = [0, 0] * (x.dim() - 1 - self.axis)
        return F.pad(x, [*amounts, before, after])

    def extra_repr(self) -> str:
        """Widths and form, for printing."""
        form = "slice/pad" if self.slides else "gather"
        return f"{self.count} channels to {len(self.take)}, axis={self.axis}, {form}"


class SumInto(nn.Module):
    """Adds a narrow tensor onto the channels `index` of a wide one: a sum that does not widen its narrow term first.

    Adding channel by channel pays where a channel is large; small ones are gathered and added at once.
    """

    index: Tensor
    LARGE = 2048  # values of one channel over the batch: measured on a CPU, where either way takes equally long

    def __init__(self, align: Align) -> None:
        super().__init__()
        self.axis = align.axis
        self.widen = align
        self.register_buffer("index", torch.tensor([j for j, i in enumerate(align.take) if i >= 0]), persistent=False)

    def forward(self, wide: Tensor, narrow: Tensor) -> Tensor:
        """Of the shape of `wide`."""
        if torch.compiler.is_compiling() or narrow.numel() < self.LARGE * narrow.shape[self.axis]:
            widened: Tensor = self.widen(narrow)
            return wide + widened
        return wide.index_add(self.axis, self.index, narrow)


class Constant(nn.Module):
    """One value a channel, broadcast over all else: what a branch without inputs adds to the rest. Trainable."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self) -> Tensor:
        """The values, with length 1 along all axes but the channels'."""
        return self.value


class Offset(nn.Module):
    """Adds one number to each covered channel, everywhere: what a sum gets back of the mean of filters that left. Trainable.

    Starts at zero. A channel that is not covered passes as it is, so that one that is always zero can still be removed.
    Which are covered is not part of the state dict: it follows from the plan.
    """

    covered: Tensor

    def __init__(self, covered: Tensor, axis: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.axis = axis
        self.value = nn.Parameter(torch.zeros(len(covered), dtype=dtype))
        self.register_buffer("covered", covered.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return x + self.value.where(self.covered, 0).view(shape)
