"""One site's cut under a contract: steering images look for it, certifying images have the last word.

Without a confidence the point estimate decides: all images steer, none certify, and nothing is promised about others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateurs.contract import Contract, Promise, Verdict, divide_images, paired_bound
from secateurs.data.examples import Examples, class_labels
from secateurs.errors import InvalidInput
from secateurs.evaluate import Device, Measure, values
from secateurs.measuring import Bench
from secateurs.search import Cut, Judgement, Method, find_cut


@dataclass(frozen=True, eq=False)
class Jury:
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
class Start:
    """What the network that the drop counts from got on the images of a jury: a value each, float64."""

    steering: Tensor  # (N,)
    certifying: Tensor | None


@dataclass(frozen=True, eq=False)
class Looking:
    """How a cut is looked for."""

    method: Method = "bisect"
    largest_share: float = 1.0
    round_to: int = 1
    widths: Sequence[int] | None = None


def summon(search: Examples, contract: Contract, metric: Measure, *, seed: int) -> Jury:
    """The jury of a run: the images are divided once, blindly. Too few of them to certify anything are an error."""
    if contract.worst_class is not None and class_labels(search.targets) is None:
        raise InvalidInput(
            f"worst_class = {contract.worst_class}: the targets are no class numbers, so no class can be judged."
        )
    if contract.confidence is None:
        return Jury(contract, metric, search, None)
    sides = divide_images(len(search), seed=seed)
    least = _least_slack(contract, len(sides.certifying))
    if least > contract.max_drop:
        raise InvalidInput(
            f"max_drop = {contract.max_drop:g} at confidence {contract.confidence:g} cannot be shown with {len(search):,} "
            f"search images: half of them certify, and even if no answer changed, {least:.2g} could not be ruled out. "
            f"Allow more, give more search images, or set confidence = 0: the point estimate decides, nothing is promised."
        )
    _check_classes(contract, search.take(sides.certifying))
    return Jury(contract, metric, search.take(sides.steering), search.take(sides.certifying))


def _check_classes(contract: Contract, certifying: Examples) -> None:
    labels = class_labels(certifying.targets)
    if contract.worst_class is None or labels is None:
        return
    fewest = int(labels.unique(return_counts=True)[1].min())  # type: ignore[no-untyped-call]  # torch's own is untyped
    least = _least_slack(contract, fewest)
    if least > contract.worst_class:
        raise InvalidInput(
            f"worst_class = {contract.worst_class:g} cannot be shown with {fewest} certifying images of one class: even if no "
            f"answer changed, {least:.2g} could not be ruled out. Allow more, or give more search images."
        )


def _least_slack(contract: Contract, images: int) -> float:
    """The smallest bound on a drop that so many images can give."""
    chance = contract.chance()
    assert chance is not None
    same = torch.ones(max(images, 1))
    return paired_bound(same, same, 1 - chance).upper


def start_of(module: nn.Module, jury: Jury, *, batch: int, device: Device) -> Start:
    """What a network gets on the jury's images, to count drops from."""

    def measured(examples: Examples) -> Tensor:
        return values(module, examples, jury.metric, batch=batch, device=device)

    return Start(measured(jury.steering), None if jury.certifying is None else measured(jury.certifying))


def certify(module: nn.Module, jury: Jury, start: Start, answers: Sequence[bool], *, batch: int, device: Device) -> Verdict:
    """Ask the certifying images about a whole network, as it is after training."""
    assert jury.certifying is not None
    after = values(module, jury.certifying, jury.metric, batch=batch, device=device)
    return _promise(jury, start, answers).certify(after)


def find_site_cut(
    bench: Bench,
    order: Tensor,
    jury: Jury,
    start: Start | None,
    looking: Looking,
    *,
    baseline: float,
    accuracy_now: float,
    answers: Sequence[bool] = (),
    share: float = 1.0,
    on_look: Callable[[], None] = lambda: None,
) -> tuple[Cut, tuple[bool, ...]]:
    """The cut of the bench's site along `order`, and the answers of the certifying images so far, `answers` among them.

    The bench measures the jury's metric. `baseline` is the mean of the network that the drop counts from, `start` its single
    values (None if only means count); `share` of the allowed drop may be used up to here. Accuracies in the cut are on the
    steering images.
    """
    promise = None if start is None or jury.certifying is None else _promise(jury, start, answers)
    measured = bench.on(jury.steering)

    def steer(keep: Tensor) -> float | Judgement:
        on_look()
        if start is None:
            return float(measured.means(keep[None])[0])
        known = () if promise is None else promise.answers
        after = measured.values(keep[None])[0].double()
        return jury.contract.judge(start.steering, after, classes_of(jury.steering, jury), answers=known, share=share)

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
    )
    return cut, tuple(answers) if promise is None else promise.answers


def classes_of(examples: Examples, jury: Jury) -> Tensor | None:
    """The classes of the images, if the contract says anything of classes."""
    return None if jury.contract.worst_class is None else class_labels(examples.targets)


def _promise(jury: Jury, start: Start, answers: Sequence[bool]) -> Promise:
    assert jury.certifying is not None
    assert start.certifying is not None
    return Promise(jury.contract, start.certifying, classes=classes_of(jury.certifying, jury), answers=answers)
