"""What the figures of a run mean, in sentences: whether the allowed drop was kept, and which figures to distrust."""

from __future__ import annotations

from dataclasses import dataclass

from secateurs._util.format import interval, percent, plain, plural
from secateurs.pruning.results import ChosenAllocation, Step
from secateurs.report.exports import aligning_warning, export_warnings
from secateurs.report.load import RunReport

GOOD_FIT, LITTLE_FIT = 0.5, 0.2  # r² on held-out masks
STEADY = 0.5  # rank correlation of two halves of the masks


@dataclass(frozen=True)
class ReportVerdict:
    """Whether the allowed drop was kept; None while that is not known."""

    kept: bool | None
    headline: str
    words: str


def verdict(run: RunReport) -> ReportVerdict:
    """Compare the most expensive cut with the allowed drop, on the validation set and before any training."""
    recipe, allowed = run.recipe, run.max_drop
    if recipe is None or allowed is None:
        return ReportVerdict(None, "Allowed drop not known", "The recipe is missing or damaged.")
    cuts = [step for step in run.steps if step.removed]
    if not cuts:
        what = "No filter could be removed within the allowed drop." if run.end else "No cut has been made yet."
        return ReportVerdict(None, "Nothing removed", what)
    if run.allocation is not None:
        return _of_allocation(run, run.allocation, cuts[-1], allowed)
    worst = max(cuts, key=lambda step: step.decisive_drop)
    scope = "from the start of the run" if recipe.budget == "run" else "at each site"
    words = (
        f"Right after the most expensive cut ({worst.site}), {_measured(run, worst.drop)}; "
        f"{run.metric.amount(allowed)} were allowed, counted {scope}."
    )
    if worst.bound is not None:
        words += _certified(run, "this cut costs", worst.bound, worst.images)
    return _verdict(run, worst.decisive_drop, allowed, words)


def _of_allocation(run: RunReport, chosen: ChosenAllocation, last: Step, allowed: float) -> ReportVerdict:
    """All cuts together count: the networks between them are not results."""
    drop = (last.baseline if run.start is None else run.start.accuracy) - last.accuracy_cut
    words = f"After all cuts, {_measured(run, drop)}; {run.metric.amount(allowed)} were allowed."
    if chosen.bound is not None:
        words += _certified(run, "all cuts together cost", chosen.bound, chosen.images)
        if chosen.by_estimate > chosen.saved:
            words += (
                f" By the measured drop alone, the largest allocation tried within the allowed drop saves "
                f"{percent(chosen.by_estimate)} of the {run.saving}, summed over the sites' curves; the certified one saves "
                f"{percent(chosen.saved)}."
            )
    return _verdict(run, drop if chosen.bound is None else chosen.bound, allowed, words)


def _verdict(run: RunReport, drop: float, allowed: float, words: str) -> ReportVerdict:
    """The verdict on the drop that decides, with what happened by the end of the run."""
    kept, end, metric = round(drop, 12) <= allowed, run.end, run.metric
    headline = f"Allowed drop {'kept' if kept else 'exceeded'}{'' if end else ' so far'}"
    if end is not None:
        words += (
            f" At the end, {metric.name} has changed by {metric.change(end.search.change)} on the validation set and by "
            f"{metric.change(end.test.change)} on the held-out test set."
        )
        if round(-end.test.change, 12) > allowed:
            words += " The loss on the test set is larger than the allowed drop."
    return ReportVerdict(kept, headline, words)


def _measured(run: RunReport, drop: float) -> str:
    change = f"{run.metric.amount(abs(drop))} {'higher' if drop < 0 else 'lower'}"
    return f"{run.metric.name} on the validation set was {change} than the baseline"


def _certified(run: RunReport, what: str, bound: float, images: int) -> str:
    if run.recipe is None:
        return ""
    return (
        f" With {percent(run.recipe.confidence, 0)} confidence, {what} at most {run.metric.amount(bound)} on new images of the "
        f"same kind (certified on {images:,} images that decided nothing else)."
    )


def fits_badly(step: Step, run: RunReport) -> bool:
    """Whether the linear model predicts the scores of unseen masks too badly to be trusted."""
    return step.r2_held_out < _good_fit(run)


def _good_fit(run: RunReport) -> float:
    # From slopes, r² is about the losses of single examples: they vary so much that even a good model explains little.
    return 0.0 if run.recipe is not None and run.recipe.estimator == "gradient" else GOOD_FIT


def step_warnings(step: Step, run: RunReport) -> tuple[str, ...]:
    """Which figures of the step to distrust, in sentences."""
    found = [_bad_fit(step.r2_held_out, run)] if fits_badly(step, run) else []
    if step.split_half < STEADY:
        found.append(
            f"Two halves of the masks rank the filters differently (rank correlation {plain(step.split_half)}): score more "
            f"masks."
        )
    if step.removed and step.accuracy < step.accuracy_cut:
        lost = run.metric.amount(step.accuracy_cut - step.accuracy)
        found.append(f"Training after the cut lost {lost} more on the validation set instead of recovering some.")
    return tuple(found)


def _bad_fit(r2: float, run: RunReport) -> str:
    if r2 < 0:
        return (
            f"The linear model predicts unseen masks worse than their mean does (held-out r² {plain(r2)}): its ranking "
            f"of the filters is close to arbitrary. Score more masks or more examples."
        )
    if r2 < LITTLE_FIT:
        return (
            f"The linear model explains only {percent(r2, 0)} of the variance of unseen masks' scores: trust the measured "
            f"{run.metric.name}, not the ranking of the filters."
        )
    return (
        f"The linear model fits badly: it explains {percent(r2, 0)} of the variance of unseen masks' scores. The filters "
        f"interact more than a sum can express."
    )


def run_warnings(run: RunReport) -> tuple[str, ...]:
    """What is missing, unfinished or to be distrusted in the whole run, in sentences."""
    found = list(run.notes)
    if run.state != "finished":
        advice = f" Resume it with: secateurs resume {run.folder}" if run.state == "stopped" else " This page is a snapshot."
        found.insert(0, f"The run is {'still running' if run.state == 'running' else 'not finished'} ({run.at}).{advice}")
    poor = list(dict.fromkeys(step.site for step in run.steps if fits_badly(step, run)))
    if poor:
        names = ", ".join(poor[:4]) + (f" and {len(poor) - 4} more" if len(poor) > 4 else "")
        found.append(
            f"The linear model fits badly (held-out r² below {_good_fit(run)}) at {plural(len(poor), 'site')}: {names}."
        )
    if run.end is not None and run.metric.share and run.end.test.count:
        low, high = interval(run.end.test.after, run.end.test.count)
        if run.end.test.change and abs(run.end.test.change) < (high - low) / 2:
            change = run.metric.amount(abs(run.end.test.change))
            found.append(
                f"The test set has {run.end.test.count:,} examples: the change of {change} is smaller than the uncertainty of "
                f"the {run.metric.name} itself (95 % interval {percent(low)} to {percent(high)})."
            )
    found += export_warnings(run.exports)
    speed = None if run.end is None else run.end.latency
    if speed is not None and speed.alignment_outweighs and not any(one.alignment_outweighs for one in run.exports):
        found.append(aligning_warning(speed.aligning))
    return tuple(found)
