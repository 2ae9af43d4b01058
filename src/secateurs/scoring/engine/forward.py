"""The masked forward pass behind a site: masks multiplied in, or the share of the masked channels subtracted.

Both give the masked network's outputs up to rounding.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.func import functional_call
from torch.utils import _pytree as pytree

from secateurs.data.dataset import Batch, Targets, map_targets, target_parts
from secateurs.errors import InvalidInput
from secateurs.graph.channels import free_name
from secateurs.graph.layers import mask_channels
from secateurs.graph.masking import network_up_to
from secateurs.graph.node_info import copy_node_info_
from secateurs.metrics import Measure, per_example
from secateurs.scoring.engine.split import SplitNetwork, close, consumers, dims_of, layer_of, names_in, shallow_clone

PASS_BYTES = 4 * 1024**2  # of the largest tensor in a pass: more of them fall out of a core's caches before they are read
SMALL_LAYER = 2**16  # multiplications for an example: picking channels costs more than it saves
FEW = 8  # examples that a strategy is checked on

SUMS = (operator.add, torch.add, "add")

Masking = Literal["multiply", "subtract"]


@dataclass(frozen=True)
class MaskingStrategy:
    """How masks are applied: the same network, strategy and machine give the same bits.

    "multiply" multiplies the activations by the mask. "subtract" computes once what the layers behind the site give for all
    channels, and subtracts for each mask what its masked channels contribute.
    """

    rows: int  # examples in one pass, at most
    masking: Masking = "multiply"


@dataclass(frozen=True)
class CachedBatch:
    """Some examples as they reach the site, what else the suffix reads, and their targets."""

    activations: Tensor
    carried: tuple[Any, ...]
    targets: Targets
    count: int  # examples
    start: int  # number of the first example
    totals: tuple[Tensor, ...] = ()  # what the consumers give without a mask, for "subtract"
    finite: bool = True

    def tensors(self) -> list[Tensor]:
        """All tensors that it holds."""
        given = (self.activations, *self.carried, *self.totals, *target_parts(self.targets))
        return [t for t in given if isinstance(t, Tensor)]


def possible_maskings(network: SplitNetwork) -> tuple[Masking, ...]:
    """The maskings that the site allows."""
    return ("multiply", "subtract") if network.separable and consumers(network.suffix, network.axis) else ("multiply",)


def default_strategy(network: SplitNetwork, batch: int, *, totals: bool = True) -> MaskingStrategy:
    """The strategy that is fastest most often, the same whenever it is asked for; without `totals`, one that needs none."""
    subtracts = totals and "subtract" in possible_maskings(network) and _consumer_work(network) >= SMALL_LAYER
    rows = batch
    if network.separable and network.device.type == "cpu":
        largest = max((prod(dims[1:]) for n in network.suffix.graph.nodes if (dims := dims_of(n))), default=1)
        rows = min(batch, max(1, PASS_BYTES // (largest * torch.finfo(network.dtype).bits // 8)))
    return MaskingStrategy(rows, "subtract" if subtracts else "multiply")


def _consumer_work(network: SplitNetwork) -> int:
    """Multiplications for an example in the layers that read the site, strides left out."""
    places = prod((dims_of(next(iter(network.suffix.graph.nodes))) or ())[2:])
    return sum(layer_of(network.suffix, node).weight.numel() * places for node in consumers(network.suffix, network.axis))


class MaskedForward:
    """Runs prefix and suffix by one strategy in one thread: threads may share the network, but not this."""

    def __init__(self, network: SplitNetwork, strategy: MaskingStrategy) -> None:
        self.network, self.strategy = network, strategy
        self.prefix, self.suffix = shallow_clone(network.prefix), shallow_clone(network.suffix)

    @cached_property
    def _difference(self) -> Difference:
        network = self.network
        return take_difference(network.suffix, consumers(network.suffix, network.axis))

    def batch(self, given: Batch, start: int) -> CachedBatch:
        """Run the prefix over a batch, and what no mask changes."""
        laid_out = self.network.laid_out
        activations, *carried = self.prefix(*map(laid_out, given.args))
        finite = bool(torch.isfinite(activations).all())
        batch = CachedBatch(
            laid_out(activations), tuple(map(laid_out, carried)), given.targets, given.size, start, finite=finite
        )
        if self.strategy.masking != "subtract" or not finite:
            return batch
        totals = [self._difference.whole(piece.activations, *piece.carried) for piece in self.pieces(batch)]
        return replace(batch, totals=tuple(torch.cat(rows) for rows in zip(*totals, strict=True)))

    def pieces(self, batch: CachedBatch) -> list[CachedBatch]:
        """The examples, at most `rows` at a time; all at once if the network mixes them."""
        rows, carried_rows = self.strategy.rows, self.network.carried_rows
        if not self.network.separable or batch.count <= rows:
            return [batch]
        return [
            replace(
                batch,
                activations=batch.activations[start : start + rows],
                carried=tuple(
                    v[start : start + rows] if has else v for v, has in zip(batch.carried, carried_rows, strict=True)
                ),
                targets=map_targets(lambda part, start=start: part[start : start + rows], batch.targets),  # type: ignore[misc]
                count=min(rows, batch.count - start),
                start=batch.start + start,
                totals=tuple(total[start : start + rows] for total in batch.totals),
            )
            for start in range(0, batch.count, rows)
        ]

    def outputs(self, batch: CachedBatch, mask: Tensor, replaced: Mapping[str, Tensor] | None = None) -> Any:
        """The masked network's outputs for the batch under `mask` (C,).

        `replaced`: tensors, named as in the user's module, that stand in for the suffix's own.
        """
        pieces = self.pieces(batch)
        if self.strategy.masking == "subtract" and batch.finite and replaced is None:
            found = self._subtracted(pieces, mask)
        else:
            known = self.network.names
            given = {new: t for name, t in (replaced or {}).items() for new in names_in(self.suffix, known[name])}
            found = [functional_call(self.suffix, given, self._masked(piece, mask), tie_weights=False) for piece in pieces]
        if len(found) == 1:
            return found[0]
        return pytree.tree_map(lambda *parts: None if parts[0] is None else torch.cat(parts), *found)

    def _masked(self, piece: CachedBatch, mask: Tensor) -> tuple[Any, ...]:
        """The suffix's inputs under a mask (C,)."""
        if not piece.finite and not self.network.several:  # zero times infinity is not zero
            return mask_channels(piece.activations, mask, self.network.axis), *piece.carried
        # multiplied, not filled: masked_fill with a broadcast mask gives images back in another layout
        return self._multiplied(piece, mask[None].to(piece.activations.dtype))

    def _multiplied(self, piece: CachedBatch, factors: Tensor) -> tuple[Any, ...]:
        """The suffix's inputs with the site's channels times factors, (1, C) for all examples or (n, C) for each its own."""
        if self.network.several:
            return piece.activations, *piece.carried, factors
        shape = [len(factors)] + [1] * (piece.activations.ndim - 1)
        shape[self.network.axis] = -1
        return piece.activations * factors.view(shape), *piece.carried

    def _subtracted(self, pieces: list[CachedBatch], mask: Tensor) -> list[Any]:
        """The known totals minus what the masked channels contribute to them."""
        difference, off = self._difference, (~mask).nonzero()[:, 0]
        # a layer needs something to read: where nothing is masked it reads channel 0 with weights of zero
        index, factor = (off, -1.0) if len(off) else (off.new_zeros(1), 0.0)
        weights = {name: weight.index_select(1, index) * factor for name, weight in difference.weights.items()}
        return [
            functional_call(
                difference.changed,
                weights,
                (pick(piece.activations, index, self.network.axis), *piece.carried, *piece.totals),
                tie_weights=False,
            )
            for piece in pieces
        ]

    def slopes(self, batch: CachedBatch, masks: Tensor, loss_fn: Measure) -> Tensor:
        """Loss of each example under its own of `masks` (n, C), then its slope along every channel: float64 (n, 1 + C)."""
        if not self.network.rows_each:
            raise InvalidInput(
                "the first axis of the site's activations does not hold the examples one after another, so each cannot have a "
                "mask of its own. Use estimator = 'losses'."
            )
        found = []
        for piece in self.pieces(batch):
            start = piece.start - batch.start
            factors = masks[start : start + piece.count].to(piece.activations.dtype).requires_grad_()
            with torch.enable_grad():
                each = 1 if self.network.several else self.network.rows_each
                outputs = self.suffix(*self._multiplied(piece, factors.repeat_interleave(each, 0)))
                losses = per_example(loss_fn(outputs, piece.targets), piece.count)
                if not losses.requires_grad:
                    raise InvalidInput("the loss has no slope: it does not depend on the outputs in a differentiable way.")
                (slopes,) = torch.autograd.grad(losses.sum(), factors, materialize_grads=True)
            found.append(torch.cat([losses.detach()[:, None], slopes], 1).cpu().double())
        return torch.cat(found)

    def is_exact(self, batch: CachedBatch) -> bool:
        """Whether the strategy gives what plain multiplication gives for a few examples with every other channel masked."""
        plain = MaskedForward(self.network, MaskingStrategy(FEW))
        few, mask = plain.pieces(batch)[0], torch.arange(self.network.channels, device=self.network.device) % 2 == 0
        try:
            return close(self.outputs(few, mask), plain.outputs(few, mask))
        except Exception:  # a kernel that this machine lacks; if it is something else, the plain strategy will raise it, too
            return False


# ---- subtraction -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """`whole(activations, *carried)` gives the known totals; `changed(picked channels, *carried, *totals)` the outputs.

    The tensors of `changed` that `weights` names must be replaced by the picked columns of those weights, negated.
    """

    whole: fx.GraphModule
    changed: fx.GraphModule
    weights: Mapping[str, Tensor]


def take_difference(suffix: fx.GraphModule, consumers: list[fx.Node]) -> Difference:
    """Split what `consumers`, nodes of `suffix`, compute into what no mask changes and what masked channels contribute."""
    touched = {next(iter(suffix.graph.nodes))}
    for node in suffix.graph.nodes:
        if any(source in touched for source in node.all_input_nodes):
            touched.add(node)
    anchors = [_anchor(node, touched) for node in consumers]
    changed = shallow_clone(suffix)
    same = dict(zip(suffix.graph.nodes, changed.graph.nodes, strict=True))
    weights = {}
    for node, anchor in zip(consumers, anchors, strict=True):
        layer = copy.deepcopy(layer_of(suffix, node))
        layer.bias = None
        name = free_name(changed, f"change_{node.name}")
        weights[f"{name}.weight"] = layer_of(suffix, node).weight
        changed.add_submodule(name, layer)
        _replace(changed.graph, same[anchor], name)
    changed.graph.eliminate_dead_code()
    changed.recompile()
    return Difference(network_up_to(suffix, anchors), changed, weights)


def _anchor(node: fx.Node, touched: set[fx.Node]) -> fx.Node:
    """The last of the sums directly behind `node` that add what no mask touches."""
    follower = _only_user(node)
    if follower is None or not _is_plain_sum(follower) or all(n in touched for n in follower.all_input_nodes):
        return node
    return _anchor(follower, touched)


def _replace(graph: fx.Graph, anchor: fx.Node, layer: str) -> None:
    """Let the users of `anchor` read the known total, a new input, plus what `layer` makes of the activations."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        total = graph.placeholder(f"total_{anchor.name}")
    with graph.inserting_before(anchor):
        change = graph.call_module(layer, (inputs[0],))
        new = graph.call_function(operator.add, (total, change))
    copy_node_info_(anchor, total, change, new)
    anchor.replace_all_uses_with(new)


def pick(activations: Tensor, index: Tensor, axis: int) -> Tensor:
    """The channels `index` of the activations, in the layout that they have."""
    is_last = axis == 1 and activations.ndim == 4 and activations.is_contiguous(memory_format=torch.channels_last)
    if not is_last:
        return activations.index_select(axis, index)
    # on the two-dimensional view, since index_select would give another layout back, which would slow all further layers
    count, channels, height, width = activations.shape
    rows = activations.permute(0, 2, 3, 1).reshape(-1, channels).index_select(1, index)
    return rows.view(count, height, width, len(index)).permute(0, 3, 1, 2)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_plain_sum(node: fx.Node) -> bool:
    """Whether `node` adds two different tensors of the same shape."""
    if node.op == "output" or node.target not in SUMS or node.kwargs or len(node.args) != 2 or len(node.all_input_nodes) != 2:
        return False
    shapes = {dims_of(n) for n in (node, *node.all_input_nodes)}
    return len(shapes) == 1 and None not in shapes
