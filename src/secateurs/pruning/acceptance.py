"""The validation images, divided: some search for cuts, the others certify what was found. Both ask the accuracy contract.

Without a confidence the point estimate decides: all images search, none certify, and nothing is promised about others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateurs._util.modules import Device
from secateurs.config import Method, Recipe
from secateurs.data.dataset import Examples, class_labels
from secateurs.errors import InvalidInput
from secateurs.metrics import Measure, values
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.selection.contract import Contract, Promise, Verdict, divide_images, paired_bound
from secateurs.selection.search import Cut, Judgement, find_cut

CERTIFYING = 0.8  # share of the validation images that certify: the search needs few, a bound narrows with every image


def contract_of(recipe: Recipe, *, trains: bool = False) -> Contract:
    """The accuracy contract that a recipe asks for; `trains`: the user's own training follows cuts."""
    # without training, all that is asked after a refusal is more of what was refused: the first "no" may be final
    trains = trains or recipe.finetune is not None or recipe.retrain is not None or recipe.recalibrate is not None
    final = recipe.budget == "run" and not trains
    return Contract(recipe.max_drop, recipe.confidence or None, recipe.worst_class, reserve=0.0 if final else 0.2)


@dataclass(frozen=True, eq=False)
class BaselineValues:
    """The metric of the baseline network on every acceptance image, float64."""

    search: Tensor  # (N,)
    certification: Tensor | None


@dataclass(frozen=True, eq=False)
class AcceptanceSets:
    """The images that accept cuts: `search` may be measured freely, `certification` only for what the search chose."""

    contract: Contract
    metric: Measure
    search: Examples
    certification: Examples | None  # None: the point estimate decides

    @property
    def by_means(self) -> bool:
        """Whether the mean of the metric is all that counts, so that it need not give a value for each image."""
        return self.certification is None and self.contract.worst_class is None

    def values(self, module: nn.Module, *, batch: int, device: Device) -> BaselineValues:
        """Measure the network that drops count from."""
        sets = (self.search, self.certification)
        found = [None if each is None else values(module, each, self.metric, batch=batch, device=device) for each in sets]
        assert found[0] is not None
        return BaselineValues(found[0], found[1])

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
        images = len(self.search if self.certification is None else self.certification)
        classes = self._classes(self.search)
        return self.contract.predict(
            baseline.search, after, classes, images=images, answers=answers, share=share, caution=caution
        )

    def promise(self, baseline: BaselineValues, answers: Sequence[bool]) -> Promise:
        """What the certification images can still be asked, after they gave `answers`."""
        assert self.certification is not None
        assert baseline.certification is not None
        classes = self._classes(self.certification)
        return Promise(self.contract, baseline.certification, classes=classes, answers=answers)

    def _classes(self, examples: Examples) -> Tensor | None:
        """The classes of the images, if the contract says anything of classes."""
        return None if self.contract.worst_class is None else class_labels(examples.targets)


def split_acceptance_sets(
    validation: Examples, contract: Contract, metric: Measure, *, seed: int, certifying: float = CERTIFYING
) -> AcceptanceSets:
    """Divide the validation images once, blindly, a share `certifying` to certify. Too few to certify anything: an error."""
    check_contract(validation, contract, seed=seed, certifying=certifying)
    if contract.confidence is None:
        return AcceptanceSets(contract, metric, validation, None)
    sides = divide_images(len(validation), certifying=certifying, seed=seed)
    return AcceptanceSets(contract, metric, validation.take(sides.search), validation.take(sides.certification))


def check_contract(validation: Examples, contract: Contract, *, seed: int, certifying: float = CERTIFYING) -> None:
    """Refuse a contract that these validation images could not certify even if no answer changed."""
    labels = class_labels(validation.targets)
    if contract.worst_class is not None and labels is None:
        raise InvalidInput(f"worst_class={contract.worst_class:g} needs targets that are integer class labels of shape (N,).")
    if contract.confidence is None:
        return
    chosen = divide_images(len(validation), certifying=certifying, seed=seed).certification
    least = _least_slack(contract, len(chosen))
    if least > contract.max_drop:
        raise InvalidInput(
            f"max_drop={contract.max_drop:g} cannot be certified at {100 * contract.confidence:g} % with {len(validation):,} "
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
    measure: Callable[[Tensor], float] | None = None,
    on_trial: Callable[[], None] = lambda: None,
) -> tuple[Cut, tuple[bool, ...]]:
    """Find the largest cut of the evaluator's site along `order`; also return all answers of the certification images.

    The evaluator measures the sets' metric. `baseline` is the mean of the network that the drop counts from, `start` its
    single values (None if only means count). `share` of the allowed drop may be used up to here, and `caution` keeps
    certification from refusing (`Contract.predict`). `answers` were given before. Accuracies in the cut are on the search
    images, or what `measure` gives for a mask (C,): then point estimates decide.
    """
    promise = None if start is None or sets.certification is None else sets.promise(start, answers)
    searching = evaluator.on(sets.search)

    def search(keep: Tensor) -> float | Judgement:
        on_trial()
        if measure is not None:
            return measure(keep)
        if start is None:
            return float(searching.means(keep[None])[0])
        known = () if promise is None else promise.answers
        return sets.predict(start, searching.values(keep[None])[0].double(), answers=known, share=share, caution=caution)

    def certify(keep: Tensor) -> Judgement:
        on_trial()
        assert promise is not None
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
