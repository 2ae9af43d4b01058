"""Which values of a split network have a row for every example: only those can be cut into passes or stacked for many masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from secateurs.graph import Shape

TOLERANCE = {torch.float64: 1e-9}  # of the largest output; 1e-4 in other precisions


@dataclass(frozen=True)
class Batching:
    """What was seen when two and three examples were run."""

    carried: tuple[bool, ...]  # which of the carried values have a row for every example
    apart: bool  # every example can be run apart from the others: all outputs have its row, which no other one changes


def probe(prefix: fx.GraphModule, suffix: fx.GraphModule, inputs: Tensor) -> Batching:
    """Run the first two and the first three of `inputs` (at least one) and see what changes; notes shapes at all nodes."""
    rows = torch.arange(3, device=inputs.device) % len(inputs)
    try:
        seen = [_Seen(prefix, suffix, inputs[rows[:count]]) for count in (2, 3)]
    except Exception:  # made for batches of one size only: whatever it raised, it is run as it is asked for and no other way
        return Batching((), False)
    two, three = seen
    carried = tuple(_is_row(a, 2) and _is_row(b, 3) for a, b in zip(two.carried, three.carried, strict=True))
    fixed = all(isinstance(c, Tensor) for c in three.carried)  # a size that is carried is that of the whole batch
    return Batching(carried, fixed and _is_row(two.activations, 2) and _same_rows(two.outputs, three.outputs))


class _Seen:
    def __init__(self, prefix: fx.GraphModule, suffix: fx.GraphModule, inputs: Tensor) -> None:
        self.activations, *self.carried = _Noting(prefix).run(inputs)
        self.outputs = _Noting(suffix).run(self.activations, *self.carried)


class _Noting(fx.Interpreter):
    """Runs a graph and writes down the shape of what each node gives."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        n.meta["shape"] = Shape(tuple(result.shape) if isinstance(result, Tensor) else None)
        return result


def _is_row(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == count


def _same_rows(two: Any, three: Any) -> bool:
    """Whether both are made of tensors with a row for each example, and the first two rows agree."""
    pairs = list(zip(pytree.tree_leaves(two), pytree.tree_leaves(three), strict=True))
    return all(_is_row(a, 2) and _is_row(b, 3) and close(a, b[:2]) for a, b in pairs)


def close(one: Any, other: Any) -> bool:
    """Whether all tensors in two outputs are the same up to rounding."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(_close(a, b) for a, b in pairs)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape and bool(torch.equal(one, other))
    finite = other[torch.isfinite(other)].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(one, other, rtol=0, atol=TOLERANCE.get(one.dtype, 1e-4) * scale, equal_nan=True)


def cut(values: tuple[Any, ...], rowed: tuple[bool, ...], start: int, stop: int) -> tuple[Any, ...]:
    """The rows from `start` to `stop` of each value that has rows; the others whole."""
    return tuple(v[start:stop] if has else v for v, has in zip(values, rowed, strict=True))


def stacked(values: tuple[Any, ...], rowed: tuple[bool, ...], times: int) -> tuple[Any, ...]:
    """Each value that has rows repeated as a whole `times` times."""
    return tuple(_repeated(v, times) if has else v for v, has in zip(values, rowed, strict=True))


def _repeated(value: Tensor, times: int) -> Tensor:
    return value.expand(times, *value.shape).flatten(0, 1)


def joined(parts: list[Any]) -> Any:
    """Outputs for some examples each, as the outputs for all of them."""
    if len(parts) == 1:
        return parts[0]
    return _over_leaves(lambda leaves: torch.cat(leaves), parts)


def unstacked(outputs: Any, times: int) -> list[Any]:
    """Outputs of `times` stacked batches, batch by batch."""
    if times == 1:
        return [outputs]
    return [pytree.tree_map(lambda leaf, k=k: leaf.unflatten(0, (times, -1))[k], outputs) for k in range(times)]


def _over_leaves(function: Callable[[list[Tensor]], Tensor], parts: list[Any]) -> Any:
    leaves = [pytree.tree_leaves(part) for part in parts]
    return pytree.tree_unflatten([function(list(row)) for row in zip(*leaves, strict=True)], pytree.tree_structure(parts[0]))
