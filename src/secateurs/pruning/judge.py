"""Judges: what a network may lose, counted from a baseline. A look is free; certification counts, and decides alone.

`judge_for` makes the one that a recipe asks for: by the mean, by a value for each example, or certified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from secateurs._util.journal import Journal
from secateurs.config import Recipe
from secateurs.errors import InvalidInput
from secateurs.graph.trace import Graph
from secateurs.pruning.measure import CERTIFYING, SIDES, Metric, Side, UnderMasks
from secateurs.pruning.results import ChosenAllocation, Retrained, Start, Step
from secateurs.pruning.whole_metric import WholeMetric
from secateurs.selection.contract import Contract, DropBound, Promise, Verdict, divide_images, paired_bound
from secateurs.selection.search import Cut, Judgement, find_cut

_CAUTION = 3.0  # of 1 to 4, what removed most in simulated runs (tests/torture/contracts.py)


@dataclass(frozen=True, eq=False)
class Baseline:
    """The network that drops count from."""

    accuracy: float  # on the validation set
    values: Mapping[Side, Tensor]  # for each image, of both sides; nothing where only the mean counts


class Judge:
    """Decides by the mean of the metric on the validation set, which promises nothing of other images."""

    images = 0  # that certify
    certifies = False
    spent = False  # whether nothing can be certified any more
    retries = 0  # after certification refused a cut

    def __init__(
        self, metric: Metric, contract: Contract, *, original: Graph, journal: Journal, max_drop: float, of_run: bool
    ) -> None:
        self.metric, self.contract, self.journal = metric, contract, journal
        self.max_drop = max_drop  # by the point estimate; a part of the contract's is left where files are certified
        self.of_run = of_run  # the drop counts from the original network; else from the start of each site
        self.answers: list[bool] = []  # of the images that certify, in this step
        self.bound_trained: float | None = None  # on the drop of the network that was trained and certified last
        self.refusal = "not within the allowed drop"  # why the last network was refused
        self._network, self._at_site = original, Baseline(float("nan"), {})

    # ---- what drops count from -------------------------------------------------------------------------------------------

    @cached_property
    def original(self) -> Baseline:
        """The original network as a baseline."""
        (start,) = self.journal.of(Start)
        return self.measured_from(self._network, start.accuracy)

    def measured_from(self, graph: Graph, accuracy: float) -> Baseline:
        """A network as a baseline."""
        return Baseline(accuracy, {})

    def enter(self, graph: Graph, accuracy: float) -> Baseline:
        """The baseline of the next site's drop: the original network, or the current one where each site has its budget."""
        self._at_site = self.original if self.of_run else self.measured_from(graph, accuracy)
        return self._at_site

    @property
    def _counted(self) -> Baseline:
        return self.original if self.of_run else self._at_site

    # ---- verdicts --------------------------------------------------------------------------------------------------------

    def allows(self, accuracy: float, *, baseline: float) -> bool:
        """Whether the mean is within the drop from `baseline`."""
        return round(baseline - accuracy, 12) <= self.max_drop

    def confirms(self, accuracy: float, *, baseline: float) -> bool:
        """Whether a cut that was accepted under a mask is within the drop when it is made: rounding may differ."""
        return self.allows(accuracy, baseline=baseline)

    def look(self, graph: Graph) -> Verdict:
        """What the images that may be looked at say of a network; may be asked any number of times."""
        found = self.metric.mean(graph)
        within, drop = self.allows(found, baseline=self.original.accuracy), self.original.accuracy - found
        return Verdict(within, found, DropBound(drop, drop, float("nan"), 0, 0, 0, "estimate"), None, None, within)

    def predict(
        self, since: Baseline, after: Tensor, *, answers: Sequence[bool] = (), share: float = 1.0, caution: float = 0.0
    ) -> Verdict:
        """What values `after` (N,) of the images that may be looked at predict of all: see `Contract.predict`."""
        contract = replace(self.contract, max_drop=self.max_drop)
        before, classes, images = since.values["look"], self._classes("look"), self.images or len(after)
        return contract.predict(before, after, classes, images=images, answers=answers, share=share, caution=caution)

    def _classes(self, side: Side) -> Tensor | None:
        return None if self.contract.worst_class is None else self.metric.classes(side)

    def certify(self, graph: Graph, answers: Sequence[bool]) -> Verdict:
        """What the images that certify say, after these answers of theirs; the caller keeps the new one."""
        raise AssertionError("nothing is certified")

    def bound(self, graph: Graph) -> float | None:
        """Upper bound on the drop of a network that was accepted; None where nothing is certified."""
        return None

    def still_within(self, graph: Graph, accuracy: float, *, bound: float | None = None) -> bool:
        """Whether a trained network keeps within the drop; certification is asked where there is one.

        With a `bound` the certified drop must not be larger than that, either. `refusal` says why where it is not.
        """
        self.refusal = "not within the allowed drop"
        return self.allows(accuracy, baseline=self._counted.accuracy)

    def earlier_answers(self) -> list[bool]:
        """What the images that certify answered before this step."""
        asked: list[Any] = [*self.journal.of(ChosenAllocation), *self.journal.of(Step), *self.journal.of(Retrained)]
        return [answer for record in asked for answer in record.answers]

    # ---- cuts of one site ------------------------------------------------------------------------------------------------

    def largest_cut(
        self,
        order: Tensor,
        at: UnderMasks,
        since: Baseline,
        *,
        visited: float,
        trains: bool,
        on_trial: Callable[[], None] = lambda: None,
        **how: Any,
    ) -> Cut:
        """The most of the least important filters, along `order`, that may be removed at a site.

        A share `visited` of the run's visits is done with this one. With one budget for all sites and no training between,
        ever more of the drop may be used. `how` is how the search goes about it (see `find_cut`).
        """
        share = visited if self.of_run and not trains else 1.0
        looked, certified = self._asking(at, since, share, caution_at(visited))

        def counted(ask: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
            def asked(keep: Tensor) -> Any:
                on_trial()
                return ask(keep)

            return asked

        return find_cut(
            order,
            counted(looked),
            baseline=since.accuracy,
            max_drop=share * self.max_drop,
            certify=None if certified is None else counted(certified),
            retries=self.retries,
            **how,
        )

    def _asking(
        self, at: UnderMasks, since: Baseline, share: float, caution: float
    ) -> tuple[Callable[[Tensor], float | Judgement], Callable[[Tensor], Judgement] | None]:
        """A look at a mask, and its certification, if there is one."""
        return at.mean, None


class ByValues(Judge):
    """Decides by a value for each image, which the limit for the worst class needs, and promises nothing."""

    def measured_from(self, graph: Graph, accuracy: float) -> Baseline:
        """A network as a baseline, measured on each image."""
        return Baseline(accuracy, {"look": self.metric.values(graph, "look")})

    def confirms(self, accuracy: float, *, baseline: float) -> bool:
        """What was accepted image by image is not asked again."""
        return True

    def look(self, graph: Graph) -> Verdict:
        """What the images that may be looked at predict that certification will say."""
        return self.predict(self.original, self.metric.values(graph, "look"))

    def _asking(self, at: UnderMasks, since: Baseline, share: float, caution: float) -> Any:
        return lambda keep: self.predict(since, at.values(keep, "look"), share=share, caution=caution), None


class Certified(ByValues):
    """Decides by the certification images: the drop is within the contract with its confidence."""

    certifies = True

    def __init__(self, *given: Any, ask: Callable[[Graph], Tensor] | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        assert self.metric.sides is not None
        self.images = len(self.metric.sides.certification)
        self.retries = 1 if self.contract.reserve else 0
        self._ask = ask or (lambda graph: self.metric.values(graph, "certify"))

    @property
    def spent(self) -> bool:  # type: ignore[override]  # the others never are
        """Whether nothing can be certified any more: the first refusal was final."""
        return self.contract.chance(self.earlier_answers()) == 0

    def measured_from(self, graph: Graph, accuracy: float) -> Baseline:
        """A network as a baseline, measured on each image of both sides."""
        return Baseline(accuracy, {side: self.metric.values(graph, side) for side in SIDES})

    def promise(self, since: Baseline, answers: Sequence[bool]) -> Promise:
        """What the images that certify can still be asked, after these answers."""
        return Promise(self.contract, since.values["certify"], classes=self._classes("certify"), answers=answers)

    def certify(self, graph: Graph, answers: Sequence[bool]) -> Verdict:
        """What the images that certify say of a network, or of the file that is made of it."""
        return self.promise(self.original, answers).certify(self._ask(graph))

    def bound(self, graph: Graph) -> float | None:
        """Upper bound on the drop of a network that was accepted: no question, as the answer is not used."""
        return self.certify(graph, [*self.earlier_answers(), *self.answers]).upper

    def still_within(self, graph: Graph, accuracy: float, *, bound: float | None = None) -> bool:
        """Whether a trained network keeps within the drop: looked at first, which costs nothing, then certified."""
        since = self._counted
        if not self.predict(since, self.metric.values(graph, "look")).by_estimate:
            self.refusal = "not within the allowed drop on the images that search"
            return False
        answers = [*self.earlier_answers(), *self.answers]
        verdict = self.promise(since, answers).certify(self._ask(graph))
        accepted = verdict.accepted and (bound is None or verdict.upper <= bound)
        self.answers.append(accepted)
        if accepted:
            self.bound_trained = verdict.upper
        elif verdict.accepted and bound is not None:
            self.refusal = f"of a larger bound on its drop: {self._amount(verdict.upper)}, before {self._amount(bound)}"
        else:
            self.refusal = self._not_certified(verdict, refused=answers.count(False))
        return accepted

    def _not_certified(self, verdict: Verdict, *, refused: int) -> str:
        """Why certification refused a network, after `refused` others: each refusal leaves less confidence to what follows."""
        upper, of, allowed = verdict.upper, "its drop", self.contract.max_drop
        if upper <= allowed and verdict.worst_bound is not None and self.contract.worst_class is not None:
            upper, allowed, of = (
                verdict.worst_bound.upper,
                self.contract.worst_class,
                f"the drop of class {verdict.worst_class}",
            )
        after = f"after {refused} refusal{'s' if refused > 1 else ''} before it, the confidence that is left gives "
        found = f"a bound of {self._amount(upper)} on {of}, where {self._amount(allowed)} are allowed"
        return f"not certified: {after if refused else ''}{found}"

    def _amount(self, drop: float) -> str:
        """A drop in words; a metric of the user's own has no points."""
        return f"{100 * drop:.2f} points" if self.metric.name == "accuracy" else f"{drop:.4g}"

    def _asking(self, at: UnderMasks, since: Baseline, share: float, caution: float) -> Any:
        earlier = self.earlier_answers()

        def look(keep: Tensor) -> Verdict:
            return self.predict(since, at.values(keep, "look"), answers=[*earlier, *self.answers], share=share, caution=caution)

        def certify(keep: Tensor) -> Verdict:
            found = self.promise(since, [*earlier, *self.answers]).certify(at.values(keep, "certify"))
            self.answers.append(found.accepted)
            return found

        return look, certify


def judge_for(metric: Metric, contract: Contract, *, ask: Callable[[Graph], Tensor] | None = None, **options: Any) -> Judge:
    """The judge of a contract. `ask` gives the values of the images that certify where a file of the network is certified."""
    if metric.sides is not None:
        return Certified(metric, contract, ask=ask, **options)
    return (Judge if contract.worst_class is None else ByValues)(metric, contract, **options)


def caution_at(visited: float) -> float:
    """Standard deviations of caution when `visited` of a run's visits are done: an early refusal costs the most."""
    return _CAUTION * (1 - visited)


# ---- contracts that can be kept ----------------------------------------------------------------------------------------------


def contract_of(recipe: Recipe, *, trains: bool = False) -> Contract:
    """The accuracy contract that a recipe asks for; `trains`: the user's own training follows cuts."""
    # without training, all that is asked after a refusal is more of what was refused: the first "no" may be final
    trains = trains or any(part is not None for part in (recipe.finetune, recipe.retrain, recipe.recalibrate))
    trains = trains or recipe.repair == "whole-network"
    final = recipe.budget == "run" and (not trains or recipe.train_trials)  # trained trials are judged as they will be
    return Contract(recipe.max_drop, recipe.confidence or None, recipe.worst_class, reserve=0.0 if final else 0.2)


def check_metric(contract: Contract, whole: WholeMetric | None) -> None:
    """Refuse a contract that the user's evaluate cannot tell anything of."""
    if whole is not None and contract.worst_class is not None:
        raise InvalidInput(
            f"worst_class={contract.worst_class:g} needs the class of every value, which evaluate does not give: give metric=… "
            f"instead of evaluate, or no worst_class."
        )
    if whole is not None and whole.count is None and contract.confidence is not None:
        raise InvalidInput(
            f"confidence={contract.confidence:g}: evaluate gives one number for the whole set, so nothing can be certified. "
            f"Set confidence=0, or let evaluate return a value for each example."
        )


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
