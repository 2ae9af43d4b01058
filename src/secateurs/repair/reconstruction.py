"""The observed consumers of a site, and their repairs: one least-squares solution for each choice of filters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateurs.distributed import active
from secateurs.errors import InvalidInput, InvalidMask
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.repair.obs import Elimination, Quadratic, obs_order
from secateurs.repair.solve import RIDGES, ROUNDS, Moments, bias_from, choose_ridge, solve, weight_from

OBS_RIDGE = 1e-6


@dataclass(frozen=True)
class Errors:
    """Mean squared errors of a consumer's output before and after repair, as shares of its variance."""

    before: float
    after: float


@dataclass(frozen=True)
class Repair:
    """New weights for a site's consumers when only the filters in `keep` (C,) remain.

    `weights` holds parameters and buffers by name in the network's state dict, `errors` one entry for each consumer, `ridges`
    one for each layer.
    """

    site: str
    keep: Tensor
    weights: Mapping[str, Tensor]
    errors: Mapping[str, Errors]
    ridges: Mapping[str, float]

    @property
    def error_before(self) -> float:
        """Mean error over the consumers after the cut, without repair; NaN if none was repaired."""
        return _mean([e.before for e in self.errors.values()])

    @property
    def error_after(self) -> float:
        """Mean error over the consumers after the repair; NaN if none was repaired."""
        return _mean([e.after for e in self.errors.values()])


def apply_(graph: Graph, repair: Repair) -> None:
    """Write the repair's weights into the graph's network; if one of them does not fit, nothing is written."""
    state: dict[str, Any] = graph.module.state_dict(keep_vars=True)
    for name, tensor in repair.weights.items():
        if name not in state or state[name].shape != tensor.shape:
            there = tuple(state[name].shape) if name in state else "nothing"
            raise InvalidInput(
                f"repair of site {repair.site!r}: {name!r} of shape {tuple(tensor.shape)} meets {there} in this network. "
                f"Apply the repair to the graph that was observed."
            )
    write_(graph, repair.weights)


def write_(graph: Graph, weights: Mapping[str, Tensor]) -> None:
    """Write weights, by name in the state dict, into the graph's network; shapes must agree."""
    state: dict[str, Any] = graph.module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in weights.items():
            state[name].copy_(tensor)


@dataclass(frozen=True)
class LayerFit:
    """A layer that reads the site, with its moments over all examples and over those held back.

    `start` (G, p, O) are its weights, `source` (G, p) the site's channel that each feature comes from. `bias` names the tensor
    that takes the bias: the layer's own, or the mean of a BatchNorm, which was `mean`; None if there is neither.
    """

    name: str
    layer: Any
    start: Tensor
    source: Tensor
    total: Moments
    held: Moments | None
    bias: str | None
    mean: Tensor | None

    def kept(self, keep: Tensor) -> Tensor:
        """Return which features (G, p) remain with the filters in `keep` (C,): theirs, and those from elsewhere."""
        return _kept(self.source, keep)

    def mend(self, kept: Tensor, ridge: float | None) -> tuple[dict[str, Tensor], Errors, float]:
        """Return new weights by name, the errors, and the ridge, which is chosen on the examples held back if it is None.

        Only the features in `kept` (G, p) remain.
        """
        if self.bias is None:
            raise InvalidInput(f"layer {self.name!r} has no bias that a repair could set: call prepare(graph, sites) first.")
        if ridge is None and self.held is not None:
            ridge = choose_ridge(self.total - self.held, self.held, self.start, kept)
        elif ridge is None:
            ridge = RIDGES[0]
        found = solve(self.total, self.start, kept, ridge)
        better = self.total.errors(found, kept) < self.total.errors(self.start, kept)  # not so where only rounding is left
        found = torch.where(better[:, None], found, self.start)
        bias = bias_from(self.layer, found)
        if self.mean is not None:
            bias = (self.mean - found[:, -1].flatten()).to(bias)
        weights = {f"{self.name}.weight": weight_from(self.layer, found), self.bias: bias}
        return weights, Errors(self._error(self.start, kept), self._error(found, kept)), ridge

    def _error(self, weights: Tensor, kept: Tensor) -> float:
        return float(self.total.errors(weights, kept).sum()) / self._spread()

    def _spread(self) -> float:
        return max(float(self.total.spread.sum()), 1e-300)

    def quadratics(self, ridge: float, curvature: Tensor | None) -> list[Quadratic]:
        """Return the layer's error around its best weights, one quadratic for each group.

        It counts as a share of the outputs' variance, or by the `curvature` (G, O, O) of the loss along them: then it is the
        loss that the error is predicted to cost.
        """
        everything = torch.ones(self.source.shape, dtype=torch.bool)
        best = solve(self.total, self.start, everything, ridge)
        best = best / self._spread() ** 0.5 if curvature is None else best @ _root(curvature) / (2 * self.total.count) ** 0.5
        found = []
        for group, gram in enumerate(self.total.gram):
            size = gram.diagonal().clamp_min(0.0)
            regular = gram.clone()
            regular.diagonal().add_(ridge * torch.where(size > 0, size, 1.0))
            found.append(Quadratic(regular, best[group], self.source[group]))
        return found


@dataclass(frozen=True)
class SumFit:
    """A sum with the site as a term. `lack` is target minus sum, `part` the site's contribution to the sum.

    `sums` (7, C) adds up, over `count` examples and places, lack, part, lack², part², lack · part, target and target².
    `value` (C,) is the present offset, stored as `name` (None: there is no offset) in the dtype of `like`; only `covered`
    channels may have one.
    """

    node: str
    source: Tensor
    count: int
    sums: Tensor
    name: str | None
    value: Tensor
    covered: Tensor
    like: Tensor

    def mend(self, keep: Tensor, ridge: float) -> tuple[dict[str, Tensor], Errors]:
        """Return the new offset by name, and the errors."""
        if self.name is None and bool(self.covered.any()):
            raise InvalidInput(
                f"the sum {self.node!r} has no offset that a repair could set: call prepare(graph, sites) first."
            )
        removed = ~_kept(self.source, keep)
        best = (self.sums[0] + self.sums[1] * removed) / self.count
        share = 1 - (ridge / (1 + ridge)) ** ROUNDS if ridge < float("inf") else 0.0
        value = torch.where(self.covered, self.value + share * (best - self.value), self.value)
        weights = {} if self.name is None else {self.name: value.to(self.like)}
        return weights, Errors(self._error(self.value, removed), self._error(value, removed))

    def _error(self, value: Tensor, removed: Tensor) -> float:
        lack, part, lack_squared, part_squared, both = self.sums[:5]
        mean = lack + part * removed
        square = lack_squared + (2 * both + part_squared) * removed
        return max(float((square - 2 * value * mean + self.count * value**2).sum()), 0.0) / self._spread()

    def _spread(self) -> float:
        target, squared = self.sums[5:]
        return max(float((squared - target**2 / self.count).sum()), 1e-300)

    def costs(self, channels: int, curvature: Tensor | None) -> Tensor:
        """Return the error that removing each filter of the site adds when the offset keeps its mean: its variance, (C,).

        It counts as a share of the sum's variance, or by the `curvature` (C,) of the loss along the sum's channels.
        """
        lack, part, lack_squared, part_squared, both = self.sums[:5]
        with_part = lack_squared + 2 * both + part_squared - (lack + part) ** 2 / self.count
        without = lack_squared - lack**2 / self.count
        added = torch.where(self.covered, with_part - without, 2 * both + part_squared)
        added = added / self._spread() if curvature is None else added * curvature / (2 * self.count)
        costs = torch.zeros(channels + 1, dtype=torch.float64)
        return costs.index_add(0, self.source % (channels + 1), added)[:channels]


@dataclass(frozen=True)
class Reconstruction:
    """Second moments of inputs and targets of a site's consumers over the examples: all that repairs of the site need.

    `skipped` says by node why a consumer is left as it is.
    """

    site: Site
    layers: tuple[LayerFit, ...]
    sums: tuple[SumFit, ...]
    skipped: Mapping[str, str]

    @property
    def consumers(self) -> tuple[str, ...]:
        """Paths of the modules whose parameters and buffers a repair replaces."""
        names = [f"{fit.name}.weight" for fit in self.layers]
        names += [fit.bias for fit in self.layers if fit.bias is not None]
        names += [fit.name for fit in self.sums if fit.name is not None]
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))

    def solve(self, keep: Tensor, *, ridge: float | None = None) -> Repair:
        """Solve for the weights when the filters in `keep` (C,) remain, True = kept.

        `ridge` (a share of each feature's size; infinite: nothing changes) is chosen on examples held back if it is None. With
        a given ridge each layer costs one Cholesky factorisation.
        """
        if keep.dtype != torch.bool or keep.shape != (self.site.channels,):
            raise InvalidMask(
                f"repair of site {self.site.name!r}: got a mask of shape {tuple(keep.shape)} and {keep.dtype}, wanted bool "
                f"({self.site.channels},), True = kept."
            )
        if ridge is not None and not ridge >= 0:
            raise InvalidInput(f"ridge: got {ridge}, wanted 0 or more, or None to choose it on held-back examples.")
        keep = keep.detach().cpu()
        weights: dict[str, Tensor] = {}
        errors: dict[str, Errors] = {}
        ridges: dict[str, float] = {}
        for layer in self.layers:
            changed, errors[layer.name], ridges[layer.name] = layer.mend(layer.kept(keep), ridge)
            weights |= changed
        for total in self.sums:
            changed, errors[total.node] = total.mend(keep, 0.0 if ridge is None else ridge)
            weights |= changed
        return Repair(self.site.name, keep, weights, errors, ridges)

    def order(self, *, ridge: float = OBS_RIDGE, curvature: Mapping[str, Tensor] | None = None) -> Elimination:
        """Rank the site's filters by Optimal Brain Surgeon over all consumers, each error as a share of its variance.

        With the `curvature` of the loss at all of its consumers (by a layer's path, a sum's node) errors count by what they are
        predicted to cost, and the elimination's increases are those of the loss.
        """
        if not self.layers and not self.sums:
            reasons = "; ".join(self.skipped.values()) or "nothing reads it"
            raise InvalidInput(f"site {self.site.name!r}: no consumer was observed, so filters cannot be ranked ({reasons}).")
        bent = curvature or {}
        quadratics = [q for layer in self.layers for q in layer.quadratics(ridge, bent.get(layer.name))]
        alone = torch.zeros(self.site.channels, dtype=torch.float64)
        for total in self.sums:
            alone += total.costs(self.site.channels, bent.get(total.node))
        return obs_order(quadratics, self.site.channels, alone=alone)

    def is_predictable(self, curvature: Mapping[str, Tensor]) -> bool:
        """Whether the loss of a cut follows from the curvature: it is known at every consumer, and none was skipped."""
        names = [*(layer.name for layer in self.layers), *(total.node for total in self.sums)]
        return bool(names) and not self.skipped and all(name in curvature for name in names)


def solve_together(
    found: Mapping[str, Reconstruction], masks: Mapping[str, Tensor], solved: dict[bytes, dict[str, Tensor]] | None = None
) -> dict[str, Tensor]:
    """Solve for the weights, by name, when several sites are cut at once, each as it was observed in the same network.

    A layer that reads several of the sites is solved once, for what is left of all of them. `solved` keeps solutions from call
    to call.
    """
    known = {} if solved is None else solved
    layers: dict[str, tuple[LayerFit, Tensor]] = {}
    sums: dict[str, tuple[SumFit, Tensor]] = {}
    for name, each in found.items():
        for layer in each.layers:
            kept = layer.kept(masks[name])
            layers[layer.name] = layer, kept & layers[layer.name][1] if layer.name in layers else kept
        for total in each.sums:
            gone = total.sums[1] * ~_kept(total.source, masks[name])
            sums[total.node] = total, gone + sums[total.node][1] if total.node in sums else gone
    weights: dict[str, Tensor] = {}
    keys = {name: name.encode() + bytes(kept.flatten().tolist()) for name, (_, kept) in layers.items()}
    missing = [name for name, key in keys.items() if key not in known]

    def mended(ticket: int) -> list[Tensor]:
        layer, kept = layers[missing[ticket]]
        return list(layer.mend(kept, None)[0].values())

    for name, tensors in zip(missing, active().map("repairs", len(missing), mended), strict=True):
        known[keys[name]] = dict(zip((f"{name}.weight", str(layers[name][0].bias)), tensors, strict=True))
    for key in keys.values():
        weights |= known[key]
    for total, gone in sums.values():
        if total.name is not None:
            value = torch.where(total.covered, (total.sums[0] + gone) / total.count, total.value)
            weights[total.name] = value.to(total.like)
    return weights


def _root(matrices: Tensor) -> Tensor:
    """Return L with L Lᵀ = matrices (G, O, O), which are symmetric and not negative but for rounding."""
    values, vectors = torch.linalg.eigh(matrices)
    root: Tensor = vectors * values.clamp_min(0.0).sqrt()[:, None, :]
    return root


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _kept(source: Tensor, keep: Tensor) -> Tensor:
    """Return which features remain: those of kept channels, and those from elsewhere (-1, the last)."""
    return torch.cat([keep, torch.ones(1, dtype=torch.bool)])[source]
