"""What networks are worth on the validation set: by a metric of each example, or by the user's `evaluate`.

The images have two sides. Those of `look` may be measured as often as one likes. Those of `certify` are asked about networks
that were chosen without them, and choose nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from secateurs._util.modules import BatchLimit, Device
from secateurs.data.dataset import Examples, class_labels
from secateurs.graph.trace import Graph
from secateurs.metrics import Evaluation, Measure, display_name, evaluate, loss, values
from secateurs.pruning.whole_metric import WholeMetric
from secateurs.scoring.evaluator import CachedEvaluator, SiteEvaluator
from secateurs.selection.contract import Contract, Sides, divide_images

Side = Literal["look", "certify"]
SIDES: tuple[Side, ...] = ("look", "certify")
T = TypeVar("T")

CERTIFYING = 0.8  # share of the validation images that certify: looking needs few, a bound narrows with every image


@dataclass(frozen=True, eq=False)
class Batches:
    """How networks are run: examples at once, fewer where memory runs out, and where."""

    size: int
    device: Device = None
    limit: BatchLimit = field(default_factory=BatchLimit)

    def run(self, work: Callable[[int], T]) -> T:
        """Work in batches of that size, or of as many examples as fit into memory."""
        return self.limit.run(self.size, work)


class UnderMasks(Protocol):
    """What the network is worth with a mask (C,) at a site."""

    def mean(self, keep: Tensor) -> float:
        """On the images that may be looked at."""

    def values(self, keep: Tensor, side: Side) -> Tensor:
        """For each image of a side, float64 (N,)."""


class Metric(Protocol):
    """What a network is worth; higher is better."""

    @property
    def sides(self) -> Sides | None:
        """Positions of the images of each side; None: all may be looked at, and none certify."""

    @property
    def name(self) -> str:
        """As the user calls it; "accuracy" for ours."""

    @property
    def free(self) -> Examples:
        """Examples that may be looked at."""

    def classes(self, side: Side) -> Tensor | None:
        """The class (N,) of each image of a side; None where there are none."""

    def measured(self, graph: Graph) -> tuple[float, float]:
        """The mean, and the mean loss, on the validation set."""

    def to_choose(self, graph: Graph, held_out: Examples) -> tuple[float, float]:
        """The same without images that certify: weights may be chosen by it."""

    def mean(self, graph: Graph) -> float:
        """The mean on the images that may be looked at."""

    def values(self, graph: Graph, side: Side) -> Tensor:
        """For each image of a side, float64 (N,)."""

    def of_file(self, module: nn.Module, side: Side) -> Tensor:
        """The same of a file that runs outside of torch."""

    def every(self, module: nn.Module) -> Tensor:
        """On all images (N,); the mean (1,) where there is nothing else."""

    def under_masks(self, evaluator: SiteEvaluator, cut: Callable[[Tensor], Graph]) -> UnderMasks:
        """At a site, that the evaluator measures, and that `cut` removes filters from."""


def divided(count: int, contract: Contract, *, seed: int, certifying: float = CERTIFYING) -> Sides | None:
    """The sides of that many images, divided once and blindly; None where nothing is certified."""
    return None if contract.confidence is None else divide_images(count, certifying=certifying, seed=seed)


# ---- a value for each example ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PerExample:
    """A metric of each validation example, ours or the user's; where nothing is certified, it may give means alone."""

    metric: Measure
    loss_fn: Measure
    validation: Examples
    sides: Sides | None
    batches: Batches

    @property
    def name(self) -> str:
        """As the user calls it; "accuracy" for ours."""
        return display_name(self.metric)

    @cached_property
    def _sets(self) -> dict[Side, Examples]:
        if self.sides is None:
            return {"look": self.validation}
        return {"look": self.validation.take(self.sides.search), "certify": self.validation.take(self.sides.certification)}

    def examples(self, side: Side) -> Examples:
        """The images of a side."""
        return self._sets[side]

    @property
    def free(self) -> Examples:
        """Examples that may be looked at."""
        return self._sets["look"]

    def classes(self, side: Side) -> Tensor | None:
        """The class (N,) of each image of a side; None where targets are no classes."""
        return class_labels(self._sets[side].targets)

    def _evaluated(self, graph: Graph, examples: Examples) -> Evaluation:
        measures = {"loss_fn": self.loss_fn, "metric": self.metric, "device": self.batches.device}
        return self.batches.run(lambda batch: evaluate(graph.module, examples, batch=batch, **measures))  # type: ignore[arg-type]  # of a dict

    def measured(self, graph: Graph) -> tuple[float, float]:
        """Mean metric and loss on the validation set."""
        return self.to_choose(graph, self.validation)

    def to_choose(self, graph: Graph, held_out: Examples) -> tuple[float, float]:
        """Mean metric and loss on these examples."""
        found = self._evaluated(graph, held_out)
        return found.accuracy, found.loss

    def mean(self, graph: Graph) -> float:
        """The mean on the images that may be looked at."""
        return self._evaluated(graph, self.free).accuracy

    def values(self, graph: Graph, side: Side) -> Tensor:
        """For each image of a side, float64 (N,)."""
        examples, device = self._sets[side], self.batches.device
        return self.batches.run(lambda batch: values(graph.module, examples, self.metric, batch=batch, device=device))

    def of_file(self, module: nn.Module, side: Side) -> Tensor:
        """The same of a file that runs outside of torch."""
        return values(module, self._sets[side], self.metric, batch=self.batches.size)

    def every(self, module: nn.Module) -> Tensor:
        """On all images (N,), or the mean (1,) where the metric gives no more."""
        found = evaluate(module, self.validation, metric=self.metric, batch=self.batches.size)
        return torch.tensor([found.accuracy], dtype=torch.float64) if found.values is None else found.values

    def under_masks(self, evaluator: SiteEvaluator, cut: Callable[[Tensor], Graph]) -> UnderMasks:
        """By the evaluator, which runs what a mask changes alone, and keeps what it measured."""
        return _Masked(evaluator, self._sets)


@dataclass(frozen=True, eq=False)
class _Masked:
    """A site's masks, on the images of both sides."""

    evaluator: SiteEvaluator
    sets: dict[Side, Examples]

    @cached_property
    def _looking(self) -> CachedEvaluator:
        return self.evaluator.on(self.sets["look"])

    def mean(self, keep: Tensor) -> float:
        return float(self._looking.means(keep[None])[0])

    def values(self, keep: Tensor, side: Side) -> Tensor:
        measured = self._looking if side == "look" else self.evaluator.on(self.sets[side])
        return measured.values(keep[None])[0].double()


# ---- the user's evaluate -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WholeSet:
    """The user's `evaluate`: a value for each example, or one number, which cannot be certified."""

    whole: WholeMetric
    loss_fn: Measure
    validation: Examples
    free: Examples  # that may be looked at: none of the values that certify need be theirs
    sides: Sides | None
    batches: Batches

    @staticmethod
    def of(
        whole: WholeMetric, loss_fn: Measure, validation: Examples, train: Examples, sides: Sides | None, batches: Batches
    ) -> WholeSet:
        """Its values are divided. If there are as many as validation images, they are taken to be theirs, in order.

        Else any validation image may be one that certifies, and training examples are looked at.
        """
        free = validation
        if sides is not None:
            free = validation.take(sides.search) if whole.count == len(validation) else train
        return WholeSet(whole, loss_fn, validation, free, sides, batches)

    @property
    def name(self) -> str:
        """As the user calls it."""
        return self.whole.name

    def classes(self, side: Side) -> Tensor | None:
        """Of what evaluate measures, no class is known."""
        return None

    def _loss(self, graph: Graph, examples: Examples) -> float:
        measure = {"loss_fn": self.loss_fn, "device": self.batches.device}
        return self.batches.run(lambda batch: loss(graph.module, examples, batch=batch, **measure))  # type: ignore[arg-type]  # of a dict

    def _side(self, every: Tensor, side: Side) -> Tensor:
        if self.sides is None:
            return every
        return every[self.sides.search if side == "look" else self.sides.certification]

    def measured(self, graph: Graph) -> tuple[float, float]:
        """The mean of what it gives, and our loss on the validation set."""
        mean = self._loss(graph, self.validation)
        return float(self.whole(graph).mean()), mean

    def to_choose(self, graph: Graph, held_out: Examples) -> tuple[float, float]:
        """The mean without the values that certify, and our loss on these examples."""
        return self.mean(graph), self._loss(graph, held_out)

    def mean(self, graph: Graph) -> float:
        """The mean of the values that may be looked at."""
        return float(self._side(self.whole(graph), "look").mean())

    def values(self, graph: Graph, side: Side) -> Tensor:
        """Of a side, float64 (N,)."""
        return self._side(self.whole(graph), side)

    def of_file(self, module: nn.Module, side: Side) -> Tensor:
        """The same of a file that runs outside of torch."""
        return self._side(self.whole.of_module(module), side)

    def every(self, module: nn.Module) -> Tensor:
        """All values (N,), or its number (1,)."""
        return self.whole.of_module(module).reshape(-1)

    def under_masks(self, evaluator: SiteEvaluator, cut: Callable[[Tensor], Graph]) -> UnderMasks:
        """By networks that are cut: evaluate takes whole ones."""
        return _Cut(self, cut)


@dataclass(frozen=True, eq=False)
class _Cut:
    """Networks with filters of a site removed."""

    metric: WholeSet
    cut: Callable[[Tensor], Graph]

    def mean(self, keep: Tensor) -> float:
        return self.metric.mean(self.cut(keep))

    def values(self, keep: Tensor, side: Side) -> Tensor:
        return self.metric.values(self.cut(keep), side)
