"""The choice of an allocation: whole networks are made, looked at, trained, certified and timed; every trial is journaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from secateurs._util.decode import brief
from secateurs.errors import EmptyLayer, RunError
from secateurs.graph.masking import copied
from secateurs.graph.trace import Graph
from secateurs.pruning.climb import COARSE, FINE, choose_allocation
from secateurs.pruning.context import PruningContext
from secateurs.pruning.frontiers import Frontier, JoinedFrontier, joined
from secateurs.pruning.judge import Judge
from secateurs.pruning.results import ChosenAllocation, Trial, TriedNetwork
from secateurs.pruning.trials import forget_trials, load_trial, train_trial

_KEPT = 2  # networks: the last one that was certified is timed when the next one has been refused


def choose(judge: Judge, found: Sequence[Frontier]) -> ChosenAllocation:
    """Choose how many filters each site loses: the most that is within the contract, or enough for the target.

    Every trial is journaled, and so is the choice: a killed run repeats none of them.
    """
    context = found[0].context
    chosen = context.journal.once(ChosenAllocation, lambda: _choose(context, judge, joined(found)))
    curves = next((each.curves for each in found if each.context.shortcut == chosen.shortcut), {})
    wrong = [name for name, m in chosen.removed.items() if name not in curves or m not in curves[name].curve.removed]
    if wrong:
        raise RunError(
            f"journal.jsonl: the allocation does not fit site {brief(repr(wrong[0]))}. Restore the run from a copy, or start a "
            f"new one."
        )
    if context.recipe.train_trials:
        forget_trials(context, chosen.place)
    return chosen


def _choose(context: PruningContext, judge: Judge, best: JoinedFrontier) -> ChosenAllocation:
    """Try allocations as whole networks."""
    allocations, train = best.allocations, context.recipe.train_trials
    networks: dict[int, Graph] = {}

    def network(index: int) -> Graph:
        if index not in networks:
            for oldest in list(networks)[: 1 - _KEPT]:
                del networks[oldest]
            networks[index] = best.network(index)
        return networks[index]

    def measure(by: Literal["trained", "steering"], index: int, graph: Graph) -> Trial:
        verdict = judge.look(graph)
        return Trial(by, index, verdict.accepted, verdict.accuracy, verdict.by_estimate)

    def once(by: Literal["steering", "trained", "certifying"], index: int, compute: Callable[[], Trial]) -> Trial:
        def tried() -> Trial:
            try:
                found = compute()
            except EmptyLayer:  # nothing of the input reaches the output: a stream that keeps channels of folded branches alone
                found = Trial(by, index, False, 0.0, False)
            return replace(found, seconds=context.clock.lap())

        found = context.journal.once(Trial, tried, judge=by, place=index)
        context.progress.tried = TriedNetwork(allocations[index].saved, context.price.currency, found.accuracy, found.accepted)
        return found

    def search_trained(index: int) -> Trial:
        judged = partial(measure, "trained", index)
        return once("trained", index, lambda: train_trial(context, network(index), index, judged))

    def ask(index: int, answers: Sequence[bool]) -> Trial:
        graph = load_trial(context, copied(network(index)), index) if train else network(index)
        verdict = judge.certify(graph, answers)
        return Trial("certifying", index, verdict.accepted, upper=verdict.upper)

    def certify(index: int, answers: Sequence[bool]) -> Trial | None:
        if train and not context.journal.of(Trial, judge="certifying", place=index) and not search_trained(index).accepted:
            tried = context.journal.of(Trial, judge="trained")
            if any(trial.accepted and trial.place > index for trial in tried):
                return None  # such as a training that diverged: a refusal here would end the questions
        return once("certifying", index, lambda: ask(index, answers))

    # where certification decides, the search only has to come near: its networks need not be what is returned
    looked_at = best.rough_network if judge.certifies else network

    def search(index: int) -> Trial:
        return once("steering", index, lambda: measure("steering", index, looked_at(index)))

    chosen = choose_allocation(
        allocations,
        search,
        certify if judge.certifies else None,
        search_trained=search_trained if train else None,
        bounded=context.recipe.has_target,
        growth=COARSE if judge.contract.reserve else FINE,
        images=judge.images,
        on_trial=context.progress.report,
    )
    last = "certifying" if judge.certifies else "trained" if train else "steering"
    passed = {each.place: each.upper for each in context.journal.of(Trial, judge=last) if each.accepted}
    paid = context.price.paid(chosen, allocations, passed, network)
    if paid.note and chosen.place and not judge.certifies:  # a search that succeeds at once has looked at nothing smaller
        smaller = {chosen.place * quarter // 4 for quarter in (1, 2, 3)} - {0, *passed}
        passed |= {place: None for place in sorted(smaller) if (search_trained if train else search)(place).accepted}
        paid = context.price.paid(chosen, allocations, passed, network)
    chosen = paid
    return replace(chosen, shortcut=best.sources[chosen.place].context.shortcut, seconds=context.clock.lap())
