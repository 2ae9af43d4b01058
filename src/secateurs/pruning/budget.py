"""The accuracy budget of a run: what drops count from, whether a network keeps within it, and the largest cut that does."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from torch import Tensor

from secateurs.criteria.ranking import Ranking
from secateurs.errors import RunError
from secateurs.pruning.acceptance import BaselineValues, largest_cut
from secateurs.pruning.context import NetworkState, PreparedSite, PruningContext
from secateurs.pruning.results import ChosenAllocation, Retrained, SiteCut, Start, Step
from secateurs.selection.contract import Verdict
from secateurs.selection.search import Cut

_CAUTION = 3.0  # of 1 to 4, what removed most in simulated runs (tests/torture/contracts.py)


@dataclass(frozen=True, eq=False)
class Baseline:
    """The network that drops count from."""

    accuracy: float  # on the validation set
    values: BaselineValues | None  # on every acceptance image; None where only means count


@dataclass(eq=False)
class AccuracyBudget:
    """Decides which networks of a run are within the allowed drop; remembers the certification's answers in this step."""

    context: PruningContext
    max_drop: float = field(init=False)  # that a cut may cost by the point estimate
    answers: list[bool] = field(init=False, default_factory=list)
    trained_bound: float | None = field(
        init=False, default=None
    )  # on the drop of the network that was trained and certified last
    refusal: str = field(init=False, default="not within the allowed drop")  # of the network that was refused last: why
    _at_this_site: Baseline | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.max_drop = self.context.drop_of_cuts

    @cached_property
    def original(self) -> Baseline:
        """The original network as a baseline."""
        (start,) = self.context.journal.of(Start)
        return Baseline(start.accuracy, self.context.baseline_values(self.context.original))

    def baseline(self, state: NetworkState) -> Baseline:
        """Baseline for the next site's drop: the original network (`budget="run"`) or the current one (`budget="site"`)."""
        if self.context.recipe.budget == "run":
            return self.original
        self._at_this_site = Baseline(state.accuracy, self.context.baseline_values(state.graph))
        return self._at_this_site

    def earlier_answers(self) -> list[bool]:
        """What the certification images answered before this step."""
        journal = self.context.journal
        asked: list[ChosenAllocation | Step | Retrained] = [*journal.of(ChosenAllocation), *journal.of(Step)]
        return [answer for record in (*asked, *journal.of(Retrained)) for answer in record.answers]

    @property
    def spent(self) -> bool:
        """Whether nothing can be certified any more: the first refusal was final."""
        sets = self.context.acceptance_sets
        return sets.sides is not None and sets.contract.chance(self.earlier_answers()) == 0

    def allows(self, accuracy: float, *, baseline: float) -> bool:
        """Whether an accuracy is within the drop from `baseline`."""
        return round(baseline - accuracy, 12) <= self.max_drop

    def bound(self, state: NetworkState) -> float | None:
        """Upper bound on the drop of a network that is within the budget of the run; None where nothing is certified."""
        values = self.original.values
        if values is None or self.context.acceptance_sets.sides is None:
            return None
        # no question: the network was accepted, and the answer is not used
        return self.context.certified(state.graph, values, [*self.earlier_answers(), *self.answers]).upper

    def still_within(self, state: NetworkState, *, bound: float | None = None) -> bool:
        """Whether the network keeps the budget of this site; the certification images are asked where there are any.

        With a `bound` the certified drop must not be larger than that, either. `refusal` says why where it is not.
        """
        counted = self.original if self.context.recipe.budget == "run" else self._at_this_site
        assert counted is not None
        self.refusal = "not within the allowed drop"
        if counted.values is None or self.context.acceptance_sets.sides is None:
            return self.allows(state.accuracy, baseline=counted.accuracy)
        if not self.context.predicted(state.graph, counted.values).by_estimate:
            self.refusal = "not within the allowed drop on the images that search"
            return False  # which costs nothing: certification need not be asked
        answers = [*self.earlier_answers(), *self.answers]
        verdict = self.context.certified(state.graph, counted.values, answers)
        accepted = verdict.accepted and (bound is None or verdict.upper <= bound)
        self.answers.append(accepted)
        if accepted:
            self.trained_bound = verdict.upper
        elif verdict.accepted and bound is not None:
            self.refusal = f"of a larger bound on its drop: {self._amount(verdict.upper)}, before {self._amount(bound)}"
        else:
            self.refusal = self._not_certified(verdict, refused=answers.count(False))
        return accepted

    def _not_certified(self, verdict: Verdict, *, refused: int) -> str:
        """Why certification refused a network, after `refused` others: each refusal leaves less confidence to what follows."""
        contract, upper, of = self.context.acceptance_sets.contract, verdict.upper, "its drop"
        allowed = contract.max_drop
        if upper <= allowed and verdict.worst_bound is not None and contract.worst_class is not None:
            upper, allowed, of = verdict.worst_bound.upper, contract.worst_class, f"the drop of class {verdict.worst_class}"
        after = f"after {refused} refusal{'s' if refused > 1 else ''} before it, the confidence that is left gives "
        found = f"a bound of {self._amount(upper)} on {of}, where {self._amount(allowed)} are allowed"
        return f"not certified: {after if refused else ''}{found}"

    def _amount(self, drop: float) -> str:
        """A drop in words; a metric of the user's own has no points."""
        return f"{100 * drop:.2f} points" if self.context.runtime.metric_name == "accuracy" else f"{drop:.4g}"

    def largest_cut(
        self,
        state: NetworkState,
        prepared: PreparedSite,
        ranking: Ranking,
        *,
        step: int,
        widths: tuple[int, ...] | None,
        share_visited: float,
    ) -> Cut:
        """The most of the least important filters that may be removed, journaled once.

        `share_visited` of the run's visits are done with this one.
        """
        counted, site = self.baseline(state), prepared.site

        def measure(keep: Tensor) -> Tensor:
            whole = self.context.runtime.evaluate
            assert whole is not None
            return whole(self.context.compacted(prepared, keep, verify=False)[0])

        def find() -> SiteCut:
            context, trials = self.context, count(1)
            recipe, earlier = context.recipe, self.earlier_answers()
            trains = recipe.finetune is not None or context.runtime.finetune is not None
            total = site.channels.bit_length() + 1
            cut, answers = largest_cut(
                context.evaluator(prepared, context.runtime.metric),
                ranking.order,
                context.acceptance_sets,
                counted.values,
                baseline=counted.accuracy,
                max_drop=self.max_drop,
                accuracy_now=state.accuracy,
                method=recipe.search,
                largest_share=recipe.largest_share,
                round_to=context.round_to(site.name),
                widths=widths,
                answers=earlier,
                # with one budget for all sites and no training between, ever more of the drop may be used
                share=1.0 if recipe.budget == "site" or trains else share_visited,
                caution=caution_at(share_visited),
                measure=None if context.runtime.evaluate is None else measure,
                on_trial=lambda: context.progress.report("search", next(trials), total, site),
            )
            return SiteCut(step, site.name, cut, answers[len(earlier) :])

        found = self.context.journal.once(SiteCut, find, step=step)
        if found.site != site.name or found.cut.channels != site.channels:
            raise RunError(
                f"journal.jsonl: the cut of step {step} does not fit site {site.name!r} of {site.channels} channels. Restore "
                f"the run from a copy, or start a new one."
            )
        self.answers = list(found.answers)
        return found.cut


def caution_at(visited: float) -> float:
    """Standard deviations of caution when `visited` of a run's visits are done: an early refusal costs the most."""
    return _CAUTION * (1 - visited)
