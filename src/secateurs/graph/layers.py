"""The modules that secateurs adds to networks: masks, alignments where live channels differ, constants and offsets."""

from __future__ import annotations

from typing import Any

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


class KeptNorm(nn.Module):
    """A LayerNorm, RMSNorm or GroupNorm whose statistics are those of the kept channels; it has the norm's own parameters.

    `zeroes`: the other channels are set to zero; otherwise a mask behind it does that.
    """

    keep: Tensor

    def __init__(self, norm: Any, keep: Tensor, axis: int, *, zeroes: bool = True) -> None:
        super().__init__()
        self.groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else 0
        self.sizes = tuple(getattr(norm, "normalized_shape", ()))  # of the trailing axes of a LayerNorm or RMSNorm
        self.centred, self.eps = not isinstance(norm, nn.RMSNorm), norm.eps
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.axis, self.zeroes = axis, zeroes
        self.register_buffer("keep", keep.clone(), persistent=False)
        for name, child in norm.named_children():  # layers that are called themselves, such as an activation
            self.add_module(name, child)
        self.train(norm.training)

    def forward(self, x: Tensor, each: Tensor | None = None) -> Tensor:
        """Of the shape of `x`; `each`, of as many axes, has the factors of the channels instead of `keep`."""
        if tuple(x.shape[x.dim() - len(self.sizes) :]) != self.sizes:
            raise RuntimeError(f"got an input of shape {tuple(x.shape)}, wanted {list(self.sizes)} along its last axes.")
        if each is None:
            x = mask_channels(x, self.keep, self.axis)
            each = self.keep.to(x.dtype).view([-1 if axis == self.axis else 1 for axis in range(x.dim())])
        each = each.expand_as(x)
        values, share = (t.reshape(len(t), self.groups, -1, *t.shape[2:]) if self.groups else t for t in (x, each))
        over = tuple(range(2, values.dim())) if self.groups else tuple(range(-len(self.sizes), 0))
        count = share.sum(over, keepdim=True).clamp(min=1)  # nothing is left of a group that is removed
        if self.centred:
            values = values - (values * share).sum(over, keepdim=True) / count
        spread = (values.square() * share).sum(over, keepdim=True) / count
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        result = (values * (spread + eps).rsqrt()).view_as(x)
        shape = [1, -1, *[1] * (x.dim() - 2)] if self.groups else [*self.weight.shape] if self.weight is not None else []
        if self.weight is not None:
            result = result * self.weight.view(shape)
        if self.bias is not None:
            result = result + self.bias.view(shape)
        return result * each if self.zeroes else result


class Align(nn.Module):
    """Channel j of the output is channel `take[j]` of the input, or zero where that is -1.

    The cheapest form is chosen once: a slice of adjacent channels, a pad if zeros only surround them, otherwise a gather, and
    zeros are written over what stands in their places. The index is not in the state dict: the plan determines it.
    """

    index: Tensor
    picked: Tensor
    absent: Tensor
    filled: Tensor

    def __init__(self, take: Tensor, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.take = tuple(int(i) for i in take)
        present = [i for i in self.take if i >= 0]
        first = next((j for j, i in enumerate(self.take) if i >= 0), 0)
        self.before, self.after = first, len(self.take) - first - len(present)
        self.start, self.count = (present[0] if present else 0), len(present)
        self.in_order = present == list(range(self.start, self.start + self.count))
        inside = all(i >= 0 for i in self.take[first : first + self.count])
        self.slides = self.in_order and inside
        self.fills = self.count < len(self.take)
        self.register_buffer("index", take.clone(), persistent=False)
        self.register_buffer("picked", take.clamp(min=0), persistent=False)  # any channel where there is to be a zero
        self.register_buffer("absent", (take < 0).nonzero().flatten(), persistent=False)  # channels that are zero
        self.register_buffer("filled", (take >= 0).nonzero().flatten(), persistent=False)  # channels that are not zero

    def forward(self, x: Tensor) -> Tensor:
        """Select channels and insert zeros."""
        if self.slides:
            if self.start or self.count != x.shape[self.axis]:
                x = x.narrow(self.axis, self.start, self.count)
            return F.pad(x, [*[0, 0] * (x.dim() - 1 - self.axis), self.before, self.after]) if self.fills else x
        if channels_last(x, self.axis):
            return self._channels_last(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        picked = select(x, self.axis, self.picked)
        # in a third of the time that a pad takes, or a zero channel behind the others, which copy all of them first
        return picked.index_fill_(self.axis, self.absent, 0) if self.fills else picked

    def _channels_last(self, x: Tensor) -> Tensor:
        """The same for a tensor (N, H, W, C); what comes out lies in memory like it, and so does its gradient."""
        if self.training and multiplied(x):
            return x @ one_hot(self.index, x.shape[3], x).T
        if not self.fills:
            return select(x, 3, self.picked)
        if self.start or self.count != x.shape[3] or not self.in_order:
            x = select(x, 3, self.picked[self.filled])
        return x.new_zeros(*x.shape[:3], len(self.take)).index_add(3, self.filled, x)

    def extra_repr(self) -> str:
        """Widths and form, for printing."""
        form = "slice/pad" if self.slides else "gather"
        return f"{self.count} channels to {len(self.take)}, axis={self.axis}, {form}"


class SumInto(nn.Module):
    """Adds a narrow tensor to the channels `index` of a wide one, without widening the narrow one first.

    This is faster unless a channel has few values; then the narrow tensor is widened and added.
    """

    index: Tensor

    def __init__(self, align: Align, large: int = 64) -> None:
        super().__init__()
        self.large = large  # values of one channel over the batch; measured: at 64 both ways take equally long on a CPU
        self.axis = align.axis
        self.widen = align
        self.register_buffer("index", torch.tensor([j for j, i in enumerate(align.take) if i >= 0]), persistent=False)

    def forward(self, wide: Tensor, narrow: Tensor) -> Tensor:
        """Of the shape of `wide`."""
        last = channels_last(wide, self.axis) and channels_last(narrow, self.axis)
        if last and self.training and multiplied(wide, narrow):
            wide, narrow = (x.permute(0, 2, 3, 1) for x in (wide, narrow))
            chosen = one_hot(self.index, wide.shape[3], narrow)
            summed = torch.addmm(wide.flatten(0, 2), narrow.flatten(0, 2), chosen)
            return summed.view_as(wide).permute(0, 3, 1, 2)
        if torch.compiler.is_compiling() or narrow.numel() < self.large * narrow.shape[self.axis]:
            widened: Tensor = self.widen(narrow)
            return wide + widened
        if wide.dtype != narrow.dtype:  # under autocast; a sum promotes, index_add does not
            kind = torch.promote_types(wide.dtype, narrow.dtype)
            wide, narrow = wide.to(kind), narrow.to(kind)
        if last:
            return wide.permute(0, 2, 3, 1).index_add(3, self.index, narrow.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return wide.index_add(self.axis, self.index, narrow)


def select(x: Tensor, axis: int, index: Tensor) -> Tensor:
    """The channels `index` of `x`. Along the last of three axes or more `gather` takes a quarter of the time, on a CPU."""
    if axis == x.dim() - 1 > 1:
        return x.gather(axis, index.expand(*x.shape[:-1], len(index)))
    return x.index_select(axis, index)


def channels_last(x: Tensor, axis: int) -> bool:
    """Whether `x` is a batch of images whose channels, along `axis`, lie side by side in memory.

    Selecting along the channels of such a tensor gives one in the usual order, and BatchNorm's backward pass takes seven times
    as long where tensor and gradient differ in that.
    """
    if x.dim() != 4 or axis != 1 or torch.compiler.is_compiling() or x.stride(1) != 1:
        return False
    if torch._C._get_tracing_state() is not None:
        return False
    _, channels, _, width = x.shape
    return channels > 1 and x.stride()[1:] == (1, width * channels, channels)


def multiplied(*tensors: Tensor) -> bool:
    """Whether channels of these tensors can be moved by a product with zeros and ones, on a CPU.

    Forward and backward pass take a quarter of the time of a selection. The product is exact unless factors may be rounded, or
    one is infinite: for training alone, which an infinite value ends anyway.
    """
    first = tensors[0]
    if torch.is_autocast_enabled("cpu"):  # it rounds factors to its own type
        exact = first.dtype == torch.bfloat16 == torch.get_autocast_dtype("cpu")
    else:
        exact = first.dtype in (torch.float32, torch.float64) and _products_are_exact()
    return (
        torch.is_grad_enabled()
        and any(x.requires_grad for x in tensors)
        and all(x.dtype == first.dtype for x in tensors)
        and first.device.type == "cpu"
        and exact
    )


def _products_are_exact() -> bool:
    """Whether no setting of the user's allows products of float32 to be rounded."""
    try:
        highest = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it was set by the newer settings, one for each backend
        return False
    newer = getattr(torch.backends.mkldnn, "matmul", None)
    return highest and getattr(newer, "fp32_precision", "none") in ("none", "ieee")


def one_hot(index: Tensor, count: int, like: Tensor) -> Tensor:
    """A matrix (len(index), count) of the type of `like`: row j has a one in column `index[j]`, none if that is negative."""
    return (index[:, None] == torch.arange(count, device=index.device)).to(like)


class Constant(nn.Module):
    """One trainable value for each channel, broadcast over all other axes: replaces a branch without inputs."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self) -> Tensor:
        """The values, with length 1 along all axes but the channels'."""
        return self.value


class Offset(nn.Module):
    """Adds one trainable number to each covered channel, to make up for the mean of removed filters in a sum.

    Starts at zero. A channel that is not covered stays unchanged, so one that is always zero can still be removed. `covered`
    is not in the state dict: the plan determines it.
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
        return x + (self.value * self.covered).view(shape)


class Fixed(nn.Module):
    """Gives a tensor that is neither a parameter nor in the state dict of the network: a constant that its forward computed."""

    value: Tensor

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value.detach().clone(), persistent=False)

    def forward(self) -> Tensor:
        """The tensor."""
        return self.value


class FrozenNorm(nn.Module):
    """BatchNorm whose statistics never change, as `F.batch_norm(..., training=False)` computes it; weights are optional."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, eps: float, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> None:
        super().__init__()
        self.num_features = len(running_mean)
        self.eps = eps
        for name, tensor in {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`."""
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
