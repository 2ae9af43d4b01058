"""What the figures of a run mean, in sentences: whether the allowed drop was kept, and which figures to distrust."""

from __future__ import annotations

from dataclasses import dataclass

from secateurs._util.format import interval, percent, plain, plural
from secateurs.pruning.results import Step
from secateurs.report.exports import aligning_warning, export_warnings
from secateurs.report.load import RunReport

STEADY = 0.5  # rank correlation of two halves of the masks
_BAD_FITS = (  # r² on held-out masks below which the linear model is not to be trusted, and why
    (
        0.0,
        "The linear model predicts unseen masks worse than their mean does (held-out r² {r2}): its ranking of the filters is "
        "close to arbitrary. Score more masks or more examples.",
    ),
    (
        0.2,
        "The linear model explains only {share} of the variance of unseen masks' scores: trust the measured {metric}, not the "
        "ranking of the filters.",
    ),
    (
        0.5,
        "The linear model fits badly: it explains {share} of the variance of unseen masks' scores. The filters interact more "
        "than a sum can express.",
    ),
)


@dataclass(frozen=True)
class ReportVerdict:
    """Whether the allowed drop was kept, None while that is not known, and the drop that decides."""

    kept: bool | None
    headline: str
    words: str
    drop: float | None = None  # measured on the validation set, before any training
    bound: float | None = None  # what is promised: its upper bound at the recipe's confidence


def verdict(run: RunReport) -> ReportVerdict:
    """Compare the most expensive cut, or all cuts of an allocation together, with the allowed drop, before any training."""
    recipe, chosen, end, metric = run.recipe, run.allocation, run.end, run.metric
    if recipe is None:
        return ReportVerdict(None, "Allowed drop not known", "The recipe is missing or damaged.")
    cuts = [step for step in run.steps if step.removed]
    if not cuts:
        what = "No filter could be removed within the allowed drop." if end else "No cut has been made yet."
        return ReportVerdict(None, "Nothing removed", what)
    if chosen is None:
        worst = max(cuts, key=lambda step: step.decisive_drop)
        drop, bound, images = worst.drop, worst.bound, worst.images
        when, costs = f"Right after the most expensive cut ({worst.site})", "this cut costs"
    else:  # the networks between the cuts are not results
        drop = (cuts[-1].baseline if run.start is None else run.start.accuracy) - cuts[-1].accuracy_cut
        bound, images, when, costs = chosen.bound, chosen.images, "After all cuts", "all cuts together cost"
    scope = "from the start of the run" if recipe.budget == "run" else "at each site"
    words = (
        f"{when}, {metric.name} on the validation set was {metric.amount(abs(drop))} {'higher' if drop < 0 else 'lower'} than "
        f"the baseline; {metric.amount(recipe.max_drop)} were allowed, counted {scope}."
    )
    if bound is not None:
        words += (
            f" With {percent(recipe.confidence, 0)} confidence, {costs} at most {metric.amount(bound)} on new images of the "
            f"same kind (certified on {images:,} images that decided nothing else)."
        )
        if chosen is not None and chosen.by_estimate > chosen.saved:
            more, made = (percent(min(run.saving_scale * saved, 1.0), 0) for saved in (chosen.by_estimate, chosen.saved))
            words += (
                f" Without that promise, by the measured drop alone, more could have gone: by estimate up to {more} of the "
                f"{run.saving} instead of {made}."
            )
    if end is not None:
        words += f" At the end, {metric.name} has changed by {metric.change(end.search.change)} on the validation set"
        words += f" and by {metric.change(end.test.change)} on the held-out test set." if end.test.count else "."
        if round(-end.test.change, 12) > recipe.max_drop:
            words += " The loss on the test set is larger than the allowed drop."
    kept = round(drop if bound is None else bound, 12) <= recipe.max_drop
    headline = f"Allowed drop {'kept' if kept else 'exceeded'}{'' if end else ' so far'}"
    return ReportVerdict(kept, headline, words, drop, bound)


def bad_fit(step: Step, run: RunReport) -> str | None:
    """Why the linear model of a site is not to be trusted; None where it is."""
    # From slopes, r² is about the losses of single examples: they vary so much that even a good model explains little.
    known = _BAD_FITS[:1] if run.recipe is not None and run.recipe.estimator == "gradient" else _BAD_FITS
    r2 = step.r2_held_out
    words = next((words for limit, words in known if r2 < limit), None)
    return words and words.format(r2=plain(r2), share=percent(r2, 0), metric=run.metric.name)


def step_warnings(step: Step, run: RunReport) -> tuple[str, ...]:
    """Which figures of the step to distrust, in sentences."""
    found = [bad_fit(step, run)]
    if step.split_half < STEADY:
        found.append(
            f"Two halves of the masks rank the filters differently (rank correlation {plain(step.split_half)}): score more "
            f"masks."
        )
    if step.removed and step.accuracy < step.accuracy_cut:
        lost = run.metric.amount(step.accuracy_cut - step.accuracy)
        found.append(f"Training after the cut lost {lost} more on the validation set instead of recovering some.")
    return tuple(filter(None, found))


def run_warnings(run: RunReport) -> tuple[str, ...]:
    """What is missing, unfinished or to be distrusted in the whole run, in sentences."""
    found, end = list(run.notes), run.end
    found += [f"{note[:1].upper()}{note[1:]}." for note in run.provenance.get("notes", ())]
    if run.state != "finished":
        advice = f" Resume it with: secateurs resume {run.folder}" if run.state == "stopped" else " This page is a snapshot."
        found.insert(0, f"The run is {'still running' if run.state == 'running' else 'not finished'} ({run.at}).{advice}")
    poor = list(dict.fromkeys(step.site for step in run.steps if bad_fit(step, run)))
    if poor:
        names = ", ".join(poor[:4]) + (f" and {len(poor) - 4} more" if len(poor) > 4 else "")
        found.append(f"The linear model of the filters' importances fits badly at {plural(len(poor), 'site')}: {names}.")
    if end is not None and run.metric.share and end.test.count:
        low, high = interval(end.test.after, end.test.count)
        if 0 < abs(end.test.change) < (high - low) / 2:
            found.append(
                f"The test set has {end.test.count:,} examples: the change of {run.metric.amount(abs(end.test.change))} is "
                f"smaller than the uncertainty of the {run.metric.name} itself (95 % interval {percent(low)} to "
                f"{percent(high)})."
            )
    shortcut = "before" if run.recipe is None else run.recipe.shortcut
    found += export_warnings(run.exports, shortcut)
    speed = None if end is None else end.latency
    if speed is not None and speed.alignment_outweighs and not any(one.alignment_outweighs for one in run.exports):
        found.append(aligning_warning(speed.aligning, shortcut))
    return tuple(found)
