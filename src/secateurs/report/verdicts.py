"""What the figures of a run mean, in words: was the allowed drop kept, and where does the linear model fit badly."""

from __future__ import annotations

from dataclasses import dataclass

from secateurs._util.format import interval, percent, plain, plural
from secateurs.report.exports import aligning_warning, export_warnings
from secateurs.report.records import DivisionRecord, RunRecord, StepRecord

GOOD_FIT, LITTLE_FIT = 0.5, 0.2  # r² on held-out masks
STEADY = 0.5  # rank correlation of two halves of the masks


@dataclass(frozen=True)
class ReportVerdict:
    """Whether the allowed drop was kept: None while nothing can be said."""

    kept: bool | None
    headline: str
    words: str


def verdict(run: RunRecord) -> ReportVerdict:
    """Compare the worst cut with what was allowed; the journal has both on the search set, before any training."""
    allowed = run.max_drop
    if allowed is None:
        return ReportVerdict(None, "Allowed drop not known", "The recipe is missing or damaged.")
    cuts = [step for step in run.steps if step.removed]
    if not cuts:
        what = "No filter could go within the allowed drop." if run.end else "No cut has been made yet."
        return ReportVerdict(None, "Nothing removed", what)
    if run.division is not None:
        return _of_division(run, run.division, cuts[-1], allowed)
    worst = max(cuts, key=lambda step: step.decisive_drop)
    kept = round(worst.decisive_drop, 12) <= allowed
    scope = "from the start of the run" if run.recipe.get("budget") == "run" else "at each site"
    words = (
        f"Right after the most expensive cut ({worst.site}) {run.metric.name} on the search set stood "
        f"{_loss(run, worst.drop)}; {run.metric.amount(allowed)} were allowed, counted {scope}."
    )
    if worst.bound is not None:
        words += _certified(run, "that cut costs", worst.bound, worst.images)
    return ReportVerdict(kept, _headline(run, kept), words + _at_the_end(run))


def _of_division(run: RunRecord, division: DivisionRecord, last: StepRecord, allowed: float) -> ReportVerdict:
    """All cuts together count: what lies between them is no network that anybody gets."""
    drop = (last.baseline if run.start is None else run.start) - last.accuracy_cut
    kept = round(drop if division.bound is None else division.bound, 12) <= allowed
    words = (
        f"When all cuts were made, {run.metric.name} on the search set stood {_loss(run, drop)}; "
        f"{run.metric.amount(allowed)} were allowed."
    )
    if division.bound is not None:
        words += _certified(run, "they cost", division.bound, division.images)
    if division.bound is not None and division.by_estimate is not None and division.by_estimate > division.saved:
        words += (
            f" Of the divisions tried, the largest whose drop, as seen on the search images alone, is within that saves "
            f"{percent(division.by_estimate)} of the {run.saving}, as the sites' curves add it up; what was certified saves "
            f"{percent(division.saved)}."
        )
    return ReportVerdict(kept, _headline(run, kept), words + _at_the_end(run))


def _headline(run: RunRecord, kept: bool) -> str:
    return f"Allowed drop {'kept' if kept else 'exceeded'}{'' if run.end else ' so far'}"


def _certified(run: RunRecord, what: str, bound: float, images: int) -> str:
    confidence = run.recipe.get("confidence")
    if not isinstance(confidence, int | float):
        return ""
    return (
        f" With {percent(confidence, 0)} confidence {what} at most {run.metric.amount(bound)} on other images of the kind "
        f"({images:,} images that chose nothing certify it)."
    )


def _at_the_end(run: RunRecord) -> str:
    end = run.end
    if end is None:
        return ""
    name = run.metric.name
    words = f" At the end, {name} has changed by {run.metric.change(end.search.change)} on the search set"
    words += f" and by {run.metric.change(end.test.change)} on the test set, which chose nothing"
    more = run.max_drop is not None and round(-end.test.change, 12) > run.max_drop
    return words + (": more there than was allowed." if more else ".")


def _loss(run: RunRecord, drop: float) -> str:
    if drop < 0:
        return f"{run.metric.amount(-drop)} higher"
    return f"{run.metric.amount(drop)} lower"


def fits_badly(step: StepRecord, run: RunRecord) -> bool:
    """Whether the linear model predicts the scores of unseen masks too badly to be trusted."""
    return step.r2 is not None and step.r2 < _good_fit(run)


def _good_fit(run: RunRecord) -> float:
    # From slopes, r² is about the losses of single examples: they vary so much that even a good model explains little.
    return 0.0 if run.recipe.get("estimator") == "gradient" else GOOD_FIT


def step_warnings(step: StepRecord, run: RunRecord) -> tuple[str, ...]:
    """Where this step's figures ask for care, in sentences."""
    found = [_bad_fit(step.r2, run)] if step.r2 is not None and fits_badly(step, run) else []
    if step.split_half is not None and step.split_half < STEADY:
        found.append(
            f"Two halves of the masks order the filters differently (rank correlation {plain(step.split_half)}): more masks "
            f"would settle the order."
        )
    if step.removed and step.accuracy < step.accuracy_cut:
        lost = run.metric.amount(step.accuracy_cut - step.accuracy)
        found.append(f"Training after the cut lost {lost} more on the search set instead of winning some back.")
    return tuple(found)


def _bad_fit(r2: float, run: RunRecord) -> str:
    if r2 < 0:
        return (
            f"The linear model predicts unseen masks worse than their mean does (held-out r² {plain(r2)}): this order of "
            f"filters is close to arbitrary. Score more masks or more examples."
        )
    if r2 < LITTLE_FIT:
        return (
            f"The linear model explains only {percent(r2, 0)} of how the scores of unseen masks vary: trust the measured "
            f"{run.metric.name}, not the order of filters."
        )
    return (
        f"The linear model fits badly: it explains {percent(r2, 0)} of how the scores of unseen masks vary. Filters "
        f"work together here more than a sum can say."
    )


def run_warnings(run: RunRecord) -> tuple[str, ...]:
    """What the reader of the whole run should know, in sentences."""
    found = list(run.notes)
    if run.state != "finished":
        go_on = f" Go on with: secateurs resume {run.folder}" if run.state == "stopped" else " This page is a snapshot."
        found.insert(0, f"The run is {'still running' if run.state == 'running' else 'not finished'} ({run.at}).{go_on}")
    poor = [step for step in run.steps if fits_badly(step, run)]
    if poor:
        found.append(
            f"The linear model fits badly at {len(poor)} of {plural(len(run.steps), 'step')} "
            f"(held-out r² below {_good_fit(run)}): {_names(poor)}."
        )
    if run.end is not None and run.metric.share and run.end.test_count:
        low, high = interval(run.end.test.after, run.end.test_count)
        if run.end.test.change and abs(run.end.test.change) < (high - low) / 2:
            change = run.metric.amount(abs(run.end.test.change))
            found.append(
                f"The test set has {run.end.test_count:,} examples: the change of {change} is smaller than the uncertainty of "
                f"the {run.metric.name} itself (95 % interval {percent(low)} to {percent(high)})."
            )
    if run.end is not None and run.end.alignment_outweighs:
        found.append(aligning_warning(run.end.aligning))
    else:
        found += export_warnings(run.exports)
    return tuple(found)


def _names(steps: list[StepRecord], most: int = 4) -> str:
    names = list(dict.fromkeys(step.site for step in steps))
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
