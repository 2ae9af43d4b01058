"""One site's cut under a contract: the search set looks for it, the certification set has the last word.

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

_CAUTION = 3.0  # of 1 to 4, what removed most in simulated runs (tests/torture/contracts.py)
CERTIFYING = 0.8  # share of the validation images that certify: the search needs few, a bound narrows with every image


def contract_of(recipe: Recipe) -> Contract:
    """The accuracy contract that a recipe asks for."""
    # without training, all that is asked after a refusal is more of what was refused: the first "no" may be final
    trains = recipe.finetune is not None or recipe.retrain is not None or recipe.recalibrate is not None
    final = recipe.budget == "run" and not trains
    return Contract(recipe.max_drop, recipe.confidence or None, recipe.worst_class, reserve=0.0 if final else 0.2)


@dataclass(frozen=True, eq=False)
class AcceptanceSets:
    """The images that judge cuts: `steering` ones may be looked at freely, `certifying` ones only judge what those chose."""

    contract: Contract
    metric: Measure
    steering: Examples
    certifying: Examples | None  # None: the point estimate decides

    @property
    def by_means(self) -> bool:
        """Whether the mean of the metric is all that counts, so that it need not give a value for each image."""
        return self.certifying is None and self.contract.worst_class is None


@dataclass(frozen=True, eq=False)
class BaselineValues:
    """What the network that the drop counts from got on the images of a jury: a value each, float64."""

    steering: Tensor  # (N,)
    certifying: Tensor | None


@dataclass(frozen=True, eq=False)
class SearchOptions:
    """How a cut is looked for."""

    method: Method = "bisect"
    largest_share: float = 1.0
    round_to: int = 1
    widths: Sequence[int] | None = None


def split_acceptance_sets(
    search: Examples, contract: Contract, metric: Measure, *, seed: int, certifying: float = CERTIFYING
) -> AcceptanceSets:
    """Divide the validation images once, blindly, a share `certifying` to certify. Too few to certify anything: an error."""
    if contract.worst_class is not None and class_labels(search.targets) is None:
        raise InvalidInput(
            f"worst_class = {contract.worst_class}: the targets are no class numbers, so no class can be judged."
        )
    if contract.confidence is None:
        return AcceptanceSets(contract, metric, search, None)
    sides = divide_images(len(search), certifying=certifying, seed=seed)
    least = _least_slack(contract, len(sides.certifying))
    if least > contract.max_drop:
        raise InvalidInput(
            f"max_drop={contract.max_drop:g} cannot be certified at {100 * contract.confidence:g} % with {len(search):,} "
            f"validation images: with the {len(sides.certifying):,} that certify, the smallest provable drop is {least:.2g}. "
            f"Use more images, a larger max_drop, or confidence=0."
        )
    _check_classes(contract, search.take(sides.certifying))
    return AcceptanceSets(contract, metric, search.take(sides.steering), search.take(sides.certifying))


def _check_classes(contract: Contract, certifying: Examples) -> None:
    labels = class_labels(certifying.targets)
    if contract.worst_class is None or labels is None:
        return
    fewest = int(labels.unique(return_counts=True)[1].min())  # type: ignore[no-untyped-call]  # torch's own is untyped
    least = _least_slack(contract, fewest)
    if least > contract.worst_class:
        raise InvalidInput(
            f"worst_class={contract.worst_class:g} cannot be certified with {fewest:,} certification images of one class: the "
            f"smallest provable drop is {least:.2g}. Use more images, a larger worst_class, or confidence=0."
        )


def _least_slack(contract: Contract, images: int) -> float:
    """The smallest bound on a drop that so many images can give."""
    chance = contract.chance()
    assert chance is not None
    same = torch.ones(max(images, 1))
    return paired_bound(same, same, 1 - chance).upper


def baseline_values(module: nn.Module, jury: AcceptanceSets, *, batch: int, device: Device) -> BaselineValues:
    """What a network gets on the jury's images, to count drops from."""

    def measured(examples: Examples) -> Tensor:
        return values(module, examples, jury.metric, batch=batch, device=device)

    return BaselineValues(measured(jury.steering), None if jury.certifying is None else measured(jury.certifying))


def certify(
    module: nn.Module, jury: AcceptanceSets, start: BaselineValues, answers: Sequence[bool], *, batch: int, device: Device
) -> Verdict:
    """Ask the certification images about a whole network."""
    assert jury.certifying is not None
    return certify_values(jury, start, values(module, jury.certifying, jury.metric, batch=batch, device=device), answers)


def certify_values(jury: AcceptanceSets, start: BaselineValues, after: Tensor, answers: Sequence[bool]) -> Verdict:
    """Ask the certification images, with values `after` (N,); `answers` are those that they gave before."""
    return _promise(jury, start, answers).certify(after)


def caution_at(done: float) -> float:
    """Standard deviations of caution when `done` of a run's sites are visited: an early "no" costs the most."""
    return _CAUTION * (1 - done)


def largest_cut(
    bench: SiteEvaluator,
    order: Tensor,
    jury: AcceptanceSets,
    start: BaselineValues | None,
    looking: SearchOptions,
    *,
    baseline: float,
    accuracy_now: float,
    answers: Sequence[bool] = (),
    share: float = 1.0,
    caution: float = 0.0,
    on_look: Callable[[], None] = lambda: None,
) -> tuple[Cut, tuple[bool, ...]]:
    """The cut of the bench's site along `order`, and all answers of the certification images, `answers` among them.

    The bench measures the jury's metric. `baseline` is the mean of the network that the drop counts from, `start` its single
    values (None if only means count). `share` of the allowed drop may be used up to here, and `caution` keeps certification
    from saying no (`Contract.predict`). Accuracies in the cut are on the search images.
    """
    promise = None if start is None or jury.certifying is None else _promise(jury, start, answers)
    measured = bench.on(jury.steering)

    def steer(keep: Tensor) -> float | Judgement:
        on_look()
        if start is None:
            return float(measured.means(keep[None])[0])
        known = () if promise is None else promise.answers
        after = measured.values(keep[None])[0].double()
        return predicted(jury, start, after, answers=known, share=share, caution=caution)

    def last_word(keep: Tensor) -> Judgement:
        on_look()
        assert promise is not None
        assert jury.certifying is not None
        return promise.certify(bench.on(jury.certifying).values(keep[None])[0].double())

    cut = find_cut(
        order,
        steer,
        baseline=baseline,
        max_drop=share * jury.contract.max_drop,
        method=looking.method,
        largest_share=looking.largest_share,
        accuracy_now=accuracy_now,
        round_to=looking.round_to,
        widths=looking.widths,
        certify=None if promise is None else last_word,
        retries=1 if jury.contract.reserve else 0,
    )
    return cut, tuple(answers) if promise is None else promise.answers


def predicted(
    jury: AcceptanceSets,
    start: BaselineValues,
    after: Tensor,
    *,
    answers: Sequence[bool] = (),
    share: float = 1.0,
    caution: float = 0.0,
) -> Verdict:
    """What the search images, with values `after` (N,), predict that certification will say: see `Contract.predict`."""
    images = len(jury.steering if jury.certifying is None else jury.certifying)
    return jury.contract.predict(
        start.steering,
        after,
        classes_of(jury.steering, jury),
        images=images,
        answers=answers,
        share=share,
        caution=caution,
    )


def classes_of(examples: Examples, jury: AcceptanceSets) -> Tensor | None:
    """The classes of the images, if the contract says anything of classes."""
    return None if jury.contract.worst_class is None else class_labels(examples.targets)


def _promise(jury: AcceptanceSets, start: BaselineValues, answers: Sequence[bool]) -> Promise:
    assert jury.certifying is not None
    assert start.certifying is not None
    return Promise(jury.contract, start.certifying, classes=classes_of(jury.certifying, jury), answers=answers)
