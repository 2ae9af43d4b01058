"""The validation images, divided: some search for cuts, the others certify what was found. Both ask the accuracy contract.

Without a confidence the point estimate decides: all images search, none certify, and nothing is promised about others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from secateurs.config import Method, Recipe
from secateurs.data.dataset import Examples, class_labels
from secateurs.errors import InvalidInput
from secateurs.metrics import Measure
from secateurs.pruning.whole_metric import WholeMetric
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.selection.contract import Contract, Promise, Sides, Verdict, divide_images, paired_bound
from secateurs.selection.search import Cut, Judgement, find_cut

Side = Literal["search", "certification"]

CERTIFYING = 0.8  # share of the validation images that certify: the search needs few, a bound narrows with every image


def contract_of(recipe: Recipe, *, trains: bool = False) -> Contract:
    """The accuracy contract that a recipe asks for; `trains`: the user's own training follows cuts."""
    # without training, all that is asked after a refusal is more of what was refused: the first "no" may be final
    trains = trains or any(part is not None for part in (recipe.finetune, recipe.retrain, recipe.recalibrate))
    trains = trains or recipe.repair == "whole-network"
    final = recipe.budget == "run" and (not trains or recipe.train_trials)  # trained trials are judged as they will be
    return Contract(recipe.max_drop, recipe.confidence or None, recipe.worst_class, reserve=0.0 if final else 0.2)


@dataclass(frozen=True, eq=False)
class BaselineValues:
    """The metric of the baseline network on every acceptance image, float64."""

    search: Tensor  # (N,)
    certification: Tensor | None


@dataclass(frozen=True, eq=False)
class AcceptanceSets:
    """The images that accept cuts: the search set may be measured freely, certification only for what the search chose."""

    contract: Contract
    metric: Measure
    search: Examples  # what may be looked at freely
    certification: Examples | None  # None: the point estimate decides, or `whole` measures
    sides: Sides | None = None  # positions of the images; None: the point estimate decides
    whole: WholeMetric | None = None  # of the user: measures in place of `metric`

    @property
    def by_means(self) -> bool:
        """Whether the mean of the metric is all that counts, so that it need not give a value for each image."""
        return self.sides is None and self.contract.worst_class is None

    @property
    def certifying(self) -> int:
        """Images that certify; 0: the point estimate decides."""
        return 0 if self.sides is None else len(self.sides.certification)

    def side_of(self, every: Tensor, side: Side) -> Tensor:
        """The values of one side, of those (N,) of all images."""
        assert self.sides is not None
        return every[self.sides.search if side == "search" else self.sides.certification]

    def predict(
        self,
        baseline: BaselineValues,
        after: Tensor,
        *,
        answers: Sequence[bool] = (),
        share: float = 1.0,
        caution: float = 0.0,
    ) -> Verdict:
        """What the search images, with values `after` (N,), predict that certification will say: see `Contract.predict`."""
        images = self.certifying or len(after)
        classes = self._classes(self.search)
        return self.contract.predict(
            baseline.search, after, classes, images=images, answers=answers, share=share, caution=caution
        )

    def promise(self, baseline: BaselineValues, answers: Sequence[bool]) -> Promise:
        """What the certification images can still be asked, after they gave `answers`."""
        assert baseline.certification is not None
        classes = None if self.certification is None else self._classes(self.certification)
        return Promise(self.contract, baseline.certification, classes=classes, answers=answers)

    def _classes(self, examples: Examples) -> Tensor | None:
        """The classes of the images, if the contract says anything of classes."""
        return None if self.contract.worst_class is None else class_labels(examples.targets)


def split_acceptance_sets(
    validation: Examples,
    contract: Contract,
    metric: Measure,
    *,
    seed: int,
    certifying: float = CERTIFYING,
    whole: WholeMetric | None = None,
    others: Examples | None = None,
) -> AcceptanceSets:
    """Divide the validation images once, blindly, a share `certifying` to certify. Too few to certify anything: an error.

    Where `whole` measures, its values are divided. If there are as many as validation images, they are taken to be theirs,
    in order; else any validation image may be one that certifies, and `others` are looked at freely.
    """
    labels = class_labels(validation.targets)
    if whole is not None and contract.worst_class is not None:
        raise InvalidInput(
            f"worst_class={contract.worst_class:g} needs the class of every value, which evaluate does not give: give metric=… "
            f"instead of evaluate, or no worst_class."
        )
    count = len(validation) if whole is None or whole.count is None else whole.count
    check_contract(count, labels, contract, seed=seed, certifying=certifying)
    if contract.confidence is None:
        return AcceptanceSets(contract, metric, validation, None, whole=whole)
    sides = divide_images(count, certifying=certifying, seed=seed)
    if whole is None:
        return AcceptanceSets(contract, metric, validation.take(sides.search), validation.take(sides.certification), sides)
    if whole.count is None:
        raise InvalidInput(
            f"confidence={contract.confidence:g}: evaluate gives one number for the whole set, so nothing can be certified. "
            f"Set confidence=0, or let evaluate return a value for each example."
        )
    free = validation.take(sides.search) if count == len(validation) else others
    assert free is not None
    return AcceptanceSets(contract, metric, free, None, sides, whole)


def check_contract(
    images: int, labels: Tensor | None, contract: Contract, *, seed: int, certifying: float = CERTIFYING
) -> None:
    """Refuse a contract that this many validation images, with class `labels`, could not certify even if no answer changed."""
    if contract.worst_class is not None and labels is None:
        raise InvalidInput(f"worst_class={contract.worst_class:g} needs targets that are integer class labels of shape (N,).")
    if contract.confidence is None:
        return
    chosen = divide_images(images, certifying=certifying, seed=seed).certification
    least = _least_slack(contract, len(chosen))
    if least > contract.max_drop:
        raise InvalidInput(
            f"max_drop={contract.max_drop:g} cannot be certified at {100 * contract.confidence:g} % with {images:,} "
            f"validation images: with the {len(chosen):,} that certify, the smallest provable drop is {least:.2g}. "
            f"Use more images, a larger max_drop, or confidence=0."
        )
    if contract.worst_class is None or labels is None:
        return
    fewest = int(labels.cpu()[chosen].unique(return_counts=True)[1].min())  # type: ignore[no-untyped-call]  # torch's own
    least = _least_slack(contract, fewest)
    if least > contract.worst_class:
        raise InvalidInput(
            f"worst_class={contract.worst_class:g} cannot be certified with {fewest:,} certification images of one class: the "
            f"smallest provable drop is {least:.2g}. Use more images, a larger worst_class, or confidence=0."
        )


def _least_slack(contract: Contract, images: int) -> float:
    """The smallest bound on a drop that this number of images can give."""
    chance = contract.chance()
    assert chance is not None
    same = torch.ones(max(images, 1))
    return paired_bound(same, same, 1 - chance).upper


def largest_cut(
    evaluator: SiteEvaluator,
    order: Tensor,
    sets: AcceptanceSets,
    start: BaselineValues | None,
    *,
    baseline: float,
    max_drop: float,
    accuracy_now: float,
    method: Method = "bisect",
    largest_share: float = 1.0,
    round_to: int = 1,
    widths: Sequence[int] | None = None,
    answers: Sequence[bool] = (),
    share: float = 1.0,
    caution: float = 0.0,
    measure: Callable[[Tensor], Tensor] | None = None,
    on_trial: Callable[[], None] = lambda: None,
) -> tuple[Cut, tuple[bool, ...]]:
    """Find the largest cut of the evaluator's site along `order`; also return all answers of the certification images.

    The evaluator measures the sets' metric. `baseline` is the mean of the network that the drop counts from, `start` its
    single values (None if only means count). `share` of the allowed drop may be used up to here, and `caution` keeps
    certification from refusing (`Contract.predict`). `answers` were given before. Accuracies in the cut are on the search
    images. `measure` gives the values of the user's own metric (N,), or its number, for a mask (C,).
    """
    promise = None if start is None or sets.sides is None else sets.promise(start, answers)
    searching = evaluator.on(sets.search)

    def search(keep: Tensor) -> float | Judgement:
        on_trial()
        if start is None:
            return float(searching.means(keep[None])[0] if measure is None else measure(keep).mean())
        known = () if promise is None else promise.answers
        after = searching.values(keep[None])[0].double() if measure is None else sets.side_of(measure(keep), "search")
        return sets.predict(start, after, answers=known, share=share, caution=caution)

    def certify(keep: Tensor) -> Judgement:
        on_trial()
        assert promise is not None
        if measure is not None:
            return promise.certify(sets.side_of(measure(keep), "certification"))
        assert sets.certification is not None
        return promise.certify(evaluator.on(sets.certification).values(keep[None])[0].double())

    cut = find_cut(
        order,
        search,
        baseline=baseline,
        max_drop=share * max_drop,
        method=method,
        largest_share=largest_share,
        accuracy_now=accuracy_now,
        round_to=round_to,
        widths=widths,
        certify=None if promise is None else certify,
        retries=1 if sets.contract.reserve else 0,
    )
    return cut, tuple(answers) if promise is None else promise.answers
