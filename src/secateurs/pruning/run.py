"""A run: its parts, what each step leaves behind, and its end. Which steps there are, a procedure says.

Every unit of work goes through the journal: a run that is killed and resumed ends as one that was not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from secateurs._util.tensors import digest
from secateurs.compaction.serialization import save
from secateurs.criteria.ranking import Ranking
from secateurs.data.dataset import Examples
from secateurs.data.stream import Stream, seeded_everywhere
from secateurs.errors import RunError
from secateurs.graph.cost import cost
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Evaluation
from secateurs.pruning.algorithm1 import algorithm1
from secateurs.pruning.context import NetworkState, PreparedSite, PruningContext
from secateurs.pruning.figures import NO_TEST, Change, ClassAccuracies, ResultFigures, RunResult, TestChange
from secateurs.pruning.folder import (
    call_to_resume,
    describe_network,
    load_state,
    save_result,
    save_start,
    save_step,
)
from secateurs.pruning.results import ChosenAllocation, Start, Step
from secateurs.pruning.speeds import layer_times, measured_speeds
from secateurs.pruning.together import together
from secateurs.pruning.trainer import retrain, trainer_at_end
from secateurs.selection.search import Cut

_TIMED = 64  # examples at once when the speed is measured in eager mode
PROCEDURES = {"sequential": algorithm1, "global": together}


class Run:
    """A pruning of one network. Iterating does the work, one `Step` at a time; `finish` does all of it."""

    def __init__(self, context: PruningContext) -> None:
        self.context, self.journal, self.recipe = context, context.journal, context.recipe
        self.workers = context.journal.workers
        self.original, self.data = context.original, context.data
        self.judge = context.judge()  # too few images for the contract are an error at once
        self.state = self.measured_original = NetworkState(context.original)
        self.steps: list[Step] = []
        self.result: RunResult | None = None
        self.stopped = ""  # why no further site is cut
        self.saved: float | None = None  # predicted share of what the procedure spends
        self.loss_cut, self.training_seconds = self.state.loss, 0.0  # right after the current cut; of training after it
        self._interrupted = False
        self._before = self.state  # the network when the current site was entered

    def __iter__(self) -> Iterator[Step]:
        if self._interrupted:
            path = self.journal.path
            again = "start it again" if path is None else f'resume it: secateurs.resume("{path}", model, …)'
            raise RunError(f"this run was interrupted, and its network may be half trained: {again}.")
        steps = PROCEDURES[self.recipe.allocation](self)
        try:
            while True:
                with self.workers.active(self.journal.answers):  # not while the caller looks at a step
                    step = next(steps, None)
                    if step is None:
                        self._finish()
                        return
                with self.context.paused():
                    yield step
        except GeneratorExit:  # a loop that was left may be continued
            raise
        except BaseException as error:  # Ctrl-C too: the run can then be resumed in the same process
            self._interrupted = True
            if isinstance(error, KeyboardInterrupt) and not error.args and self.journal.path is not None:
                error.args = (f"Interrupted. Finished work is kept. Resume with: {call_to_resume(self.journal.path)}",)
            self.workers.fail(error)
            self.close()
            raise

    def measure_original(self) -> None:
        """Measure the original network on the validation set, once; also describes it in the journal."""
        describe_network(self.journal, self.original, self.context.clock)
        whole = self.context.runtime.evaluate
        values = None if whole is None else whole.count

        def measure() -> Start:
            self.context.progress.report("original", 0, 1)
            found = self.context.measured(self.state)
            return Start(found.accuracy, found.loss, values, self.context.clock.lap())

        start = self.journal.once(Start, measure)
        if start.values != values:
            raise RunError(
                f"evaluate gives {values or 1} values, and gave {start.values or 1} when the run was started. Give the one "
                f"that it was started with, or start a new run."
            )
        self.measured_original = NetworkState(self.original, start.accuracy, start.loss)
        if not self.steps:
            self.state = self.measured_original

    # ---- what procedures are made of ------------------------------------------------------------------------------------

    def positions(self) -> Iterator[PruningContext]:
        """The context at each shortcut position that is compared; of a run that has chosen, at the one it chose."""
        known = self.journal.of(ChosenAllocation)
        for position in [known[0].shortcut] if known else self.context.positions:
            yield replace(self.context, position=position) if self.recipe.shortcut == "auto" else self.context

    @property
    def step_number(self) -> int:
        """The number of the current step, from 1."""
        return len(self.steps) + 1

    def done(self, site: str, number: int = 0) -> bool:
        """Whether the site had its step in the round of that number."""
        return any(step.round == number and step.site == site for step in self.steps)

    def enter(self, name: str) -> Site | None:
        """Begin a step at a site of the current network; None if it no longer has it."""
        self._before = self.state
        return self.context.site(self.state.graph, name)

    def rank(self, prepared: PreparedSite, number: int, context: PruningContext | None = None) -> Ranking:
        """Rank a site's filters by the recipe's criterion; its random draws depend on `number`."""
        context, progress = context or self.context, self.context.progress
        return context.rank(prepared, step=number, on_scored=lambda done, of: progress.report("score", done, of, prepared.site))

    def reached_target(self) -> str:
        """What is reached, in words, if all targets are; else empty."""
        shares, recipe = self.context.shares_removed(self.state.graph), self.recipe
        wanted = zip(("parameters", "MACs"), (recipe.target_parameters, recipe.target_macs), shares, strict=True)
        known = [
            (got >= want, f"{got:.1%} of the {what} are removed, of {want:.1%} wanted")
            for what, want, got in wanted
            if want is not None
        ]
        if recipe.target_memory is not None:
            left = self.context.memory_left(self.state.graph)
            words = f"the activations' peak takes {left:.1%} of the original's, of {recipe.target_memory:.1%} wanted"
            known.append((left <= recipe.target_memory, words))
        share = None if self.saved is None else self.context.price.target_share
        if self.saved is not None and share is not None:
            remains = 1 - self.saved
            known.append((remains <= share + 1e-9, f"{remains:.1%} of the time remain by prediction, of {share:.1%} wanted"))
        return " and ".join(words for _, words in known) if all(met for met, _ in known) else ""

    def record(self, site: Site, ranking: Ranking, cut: Cut) -> Step:
        """Journal the step, with a checkpoint if the network changed."""
        before = self._before
        parameters, macs = self.context.shares_removed(self.state.graph)
        repair = self.state.repair if cut.m else None
        step = Step(
            number=self.step_number,
            round=self.context.progress.round,
            site=site.name,
            channels=site.channels,
            noun=site.unit,
            removed=tuple(site.original[i] for i in cut.removed),
            accuracy_before=before.accuracy,
            accuracy_cut=cut.accuracy,
            accuracy=self.state.accuracy,
            loss=self.state.loss,
            parameters_removed=parameters,
            macs_removed=macs,
            evaluated=cut.evaluated,
            masks=ranking.masks,
            r2_held_out=ranking.r2_held_out,
            split_half=ranking.split_half,
            seconds=0.0,  # known when the checkpoint is written
            training_seconds=self.training_seconds,
            criterion=ranking.criterion,
            note=ranking.note,
            examples=ranking.examples,
            compared=ranking.compared,
            bound=cut.bound,
            bound_trained=self.judge.bound_trained,
            images=0 if cut.bound is None else self.judge.images,
            by_estimate=cut.by_estimate,
            refused=cut.refused,
            answers=tuple(self.judge.answers),
            repaired=None if repair is None else (repair.error_before, repair.error_after),
            loss_cut=self.loss_cut if cut.m else None,
            baseline=cut.baseline,
            loss_before=before.loss,
            importance=ranking.importance,
        )
        if self.workers.size > 1:
            now = {"network": digest(dict(self.state.graph.module.state_dict()))}
            self.workers.check_same(f"after the cut at site {site.name!r}", now)
        self.steps.append(save_step(self.journal, self.state, step, self.context.clock))
        self.judge.answers, self.judge.bound_trained = [], None
        return self.steps[-1]

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Retrain, then read the test set: once, for the original network and for the smaller one."""
        if any(step.removed for step in self.steps):
            self.state = retrain(self.context, trainer_at_end(self.context), self.judge, self.state, self.step_number)
        known = self.journal.of(ResultFigures)  # a finished run is not measured again: its test set need not be given
        measured = known[0] if known else self._measure_result()
        self.context.progress.report("write", 0, 1)
        figures = save_result(self.journal, self.state.graph, measured, self.context.clock)
        self.result = RunResult(
            **{each.name: getattr(figures, each.name) for each in fields(figures)},
            graph=self.state.graph,
            steps=tuple(self.steps),
            cost_before=self.context.cost_before,
            cost_after=cost(self.state.graph),
        )

    def _measure_result(self) -> ResultFigures:
        context, graph, original = self.context, self.state.graph, self.original
        given = context.runtime.test if self.data.test is None else self.data.test
        test = None if given is None else given.ready(context.dtype)
        context.progress.report("measure", 0, 2)
        before, after = (None if test is None else self._tested(network, test) for network in (original, graph))
        context.progress.report("measure", 1, 2)
        first, last = (context.measured(NetworkState(network)).accuracy for network in (original, graph))
        classes = [context.by_class(found, test) for found in (before, after) if isinstance(test, Examples) and found]
        cost_before, cost_after = context.cost_before, cost(graph)
        timed = test if isinstance(test, Examples) else context.validation
        return ResultFigures(
            stopped=self.stopped,
            metric=context.runtime.metric_name,
            search=Change(first, last),
            test=NO_TEST if before is None or after is None else TestChange(before.accuracy, after.accuracy, after.count),
            parameters=Change(cost_before.parameters, cost_after.parameters),
            macs=Change(cost_before.macs, cost_after.macs),
            bytes=Change(cost_before.bytes, cost_after.bytes),
            classes=ClassAccuracies(tuple(self.data.classes), *classes) if classes and all(classes) else ClassAccuracies(),
            **self._measure_times(timed)
            if any(step.removed for step in self.steps) and self.workers.first
            else {"latency": None},
            seconds=0.0,  # known when all is saved
        )

    def _tested(self, network: Graph, test: Examples | Stream) -> Evaluation:
        """What a network is worth on the test set; the user's random state, which a loader draws from, stays as it is."""
        with seeded_everywhere(self.recipe.seed, "test", loader=test.loader if isinstance(test, Stream) else None):
            return self.context.evaluate(network, test)

    def _measure_times(self, examples: Examples) -> dict[str, Any]:
        """The speed of the smaller network, also at batches of 1 and 64, and where the time goes in both networks."""
        context = self.context
        inputs = examples.batch(slice(0, context.runtime.limit.within(min(_TIMED, len(examples))))).args
        first, *others = measured_speeds(context, self.state.graph, inputs, self.saved)
        return {"latency": first, "speeds": tuple(others), "layer_times": layer_times(context, self.state.graph, first)}

    # ---- what a run can be asked for -------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The current network."""
        return self.state.graph

    def finish(self) -> RunResult:
        """Do all that is left, and return the result."""
        if self.result is None:
            for _ in self:
                pass
        assert self.result is not None
        return self.result

    def close(self) -> None:
        """Release the run folder, so that others can resume it; a finished or failed run has done so."""
        self.journal.close()
        self.context.runtime.cache.close()

    def save(self, path: str | Path) -> Path:
        """Save the current network (see `secateurs.save`)."""
        return save(self.graph, path)

    def save_start(self) -> None:
        """Save the original network, from which a run is resumed."""
        save_start(self.journal, self.original, self.context.clock)

    def restore(self) -> None:
        """Continue from what the journal and the checkpoints hold."""
        self.steps = list(self.journal.of(Step))
        self.state = load_state(self.journal, self.original)
