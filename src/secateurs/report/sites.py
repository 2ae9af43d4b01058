"""The sections on sites and layers: one folding card for each step, and the table of the paper's kind."""

from __future__ import annotations

from secateurs.report.charts.accuracy import accuracy
from secateurs.report.charts.agreement import agreement
from secateurs.report.charts.importances import importances
from secateurs.report.judging import fits_badly, step_warnings
from secateurs.report.markup import Child, Html, el, join
from secateurs.report.parts import copyable, facts, figure, section, table, warnings
from secateurs.report.records import RunRecord, StepRecord
from secateurs.report.words import NOTHING, change, clock, count, large, percent, plain

_ALL_OPEN = 12  # with more steps, only those that need care are unfolded


def sites(run: RunRecord) -> Html | None:
    """A card for each step, in the order of the run."""
    if not run.steps:
        return None
    lead = "How much every filter counts, what it costs to remove the least important ones, and how well the linear model fits."
    return section("sites", "Sites", lead, *(_card(step, run) for step in run.steps))


def _card(step: StepRecord, run: RunRecord) -> Html:
    cautions = step_warnings(step, run)
    drawn = [figure(importances(step)), figure(accuracy(step, run.metric, run.max_drop)), figure(agreement(step))]
    inside = el("div", warnings(cautions), el("div", *drawn, class_="three"), _figures(step, run), class_="inside")
    several = f", round {step.round + 1}" if run.steps[-1].round else ""
    summary = el(
        "summary",
        el("span", step.site, el("small", f"  step {step.number}{several}"), class_="what"),
        el("span", "fits badly" if fits_badly(step, run) else "with care", class_="flag") if cautions else None,
        el("span", el("b", f"{step.channels} → {step.kept}"), " filters", class_="fact"),
        el("span", f"{run.metric.name} ", el("b", run.metric.value(step.accuracy)), class_="fact"),
    )
    return el("details", summary, inside, class_="site", open=len(run.steps) <= _ALL_OPEN or bool(cautions))


def _figures(step: StepRecord, run: RunRecord) -> Html:
    metric, (predicted, realised) = run.metric, step.loss_rise
    known: list[tuple[str, Child]] = [
        ("held-out r²", plain(step.r2) if step.masks else None),
        ("split-half correlation", plain(step.split_half) if step.masks else None),
        ("masks used" if step.masks else "ranked by", step.note or (count(step.masks) if step.masks else None)),
        ("criterion", step.criterion or None),
        ("criteria compared", ", ".join(f"{name} {plain(loss, 3)}" for name, loss in step.compared) or None),
        ("scoring examples", count(step.examples) if step.examples else None),
        (f"{metric.name} before", metric.value(step.accuracy_before)),
        ("right after the cut", metric.value(step.accuracy_cut)),
        ("after training", metric.value(step.accuracy) if run.recipe.get("finetune") else None),
        ("drop at the cut", metric.amount(step.drop)),
        ("loss rise predicted", change(predicted)),
        ("loss rise realised", change(realised)),
        ("drop at most", None if step.bound is None else f"{metric.amount(step.bound)} ({step.images:,} images)"),
        (
            "within the drop as seen on the search images",
            None if step.by_estimate is None else f"{step.by_estimate} of {step.channels} filters",
        ),
        ("error repaired", None if step.repaired is None else f"{percent(step.repaired[0])} → {percent(step.repaired[1])}"),
        ("parameters left", percent(1 - step.parameters_removed)),
        ("MACs left", percent(1 - step.macs_removed)),
        ("time", clock(step.seconds)),
    ]
    return facts(known)


def layer_table(run: RunRecord) -> Html | None:
    """Filters, weights and MACs of every layer, as the paper's Table 2 has them, and the totals."""
    if not run.layers:
        return None
    macs = all(layer.macs is not None for layer in run.layers)
    columns = ["Layer", "Filters", "Removed", "Left", "Weights", *(["MACs"] if macs else []), "Weights and MACs removed"]
    rows = [
        [
            layer.name,
            count(layer.filters),
            count(layer.filters - layer.left),
            count(layer.left),
            count(layer.weights),
            *([large(layer.macs)] if macs else []),
            _share(layer.weights_removed),
        ]
        for layer in run.layers
    ]
    lead = "Weights of convolutions and linear layers, without biases and BatchNorm: shares compare with the paper's."
    return section("table", "Layer by layer", lead, _outcome_table(run), copyable(table(columns, rows, _total(run, macs=macs))))


def _total(run: RunRecord, *, macs: bool) -> list[Child]:
    layers = run.layers
    filters, left = sum(layer.filters for layer in layers), sum(layer.left for layer in layers)
    weights, weights_left = sum(layer.weights for layer in layers), sum(layer.weights_left for layer in layers)
    share = percent(1 - weights_left / weights if weights else 0.0, 2)
    total: list[Child] = ["Total", count(filters), count(filters - left), count(left), count(weights)]
    if not macs:
        return [*total, share]
    cost = sum(layer.macs or 0 for layer in layers)
    after = sum((layer.macs or 0) * (1 - layer.weights_removed) for layer in layers)
    return [*total, large(cost), f"{share} / {percent(1 - after / cost if cost else 0.0, 2)}"]


def _outcome_table(run: RunRecord) -> Html | None:
    """One line of the paper's Table 3."""
    if run.end is None:
        return None
    name, metric, end = run.metric.name, run.metric, run.end
    columns = ("Network", f"Test {name} before", "after", "MACs removed", "Parameters removed")
    row = (
        run.model,
        metric.value(end.test.before),
        metric.value(end.test.after),
        percent(end.macs.removed, 2),
        percent(end.parameters.removed, 2),
    )
    return copyable(table(columns, [row]))


def _share(share: float) -> Html:
    bar = el("span", el("i", style=f"width:{100 * min(max(share, 0.0), 1.0):.0f}%"), class_="bar")
    return join(percent(share, 2) if share else NOTHING, bar)
