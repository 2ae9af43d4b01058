"""The page of several runs side by side: outcomes, frontiers, widths at each site, and where their recipes differ."""

from __future__ import annotations

from collections.abc import Sequence

from secateurs.report.charts.frontier import frontier
from secateurs.report.judging import verdict
from secateurs.report.markup import Child, Html, el, join
from secateurs.report.parts import copyable, figure, panel, section, table, warnings
from secateurs.report.records import RunRecord
from secateurs.report.words import NOTHING, Metric, clock, count, percent


def title(runs: Sequence[RunRecord]) -> str:
    """What the page is called."""
    return f"{len(runs)} runs compared"


def page(runs: Sequence[RunRecord]) -> Html:
    """The body of the comparison."""
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    unfinished = [
        f"{run.name} is not finished ({run.at}): its figures are of its last step." for run in runs if run.end is None
    ]
    return join(
        el(
            "header",
            el("p", el("b", "secateurs"), " · comparison", class_="eyebrow"),
            el("h1", title(runs)),
            el("p", *_headline(runs), class_="headline"),
            warnings([*_unlike(runs), *unfinished, *notes]),
        ),
        el("main", _outcomes(runs), _frontier(runs), _widths(runs), _recipes(runs)),
        el("footer", "Each run's own report: secateurs report RUN"),
    )


def _headline(runs: Sequence[RunRecord]) -> list[Html | str]:
    done = [run for run in runs if run.end is not None]
    if not done:
        return ["None of them is finished yet."]
    most = max(done, key=lambda run: run.end.macs.removed if run.end else 0.0)
    best = max(done, key=lambda run: run.end.test.after if run.end else 0.0)
    assert most.end is not None
    assert best.end is not None
    if len({run.metric for run in runs}) > 1:
        return [el("b", most.name), f" removes the most MACs ({percent(most.end.macs.removed)})."]
    if most is best:
        shares = f"{percent(most.end.macs.removed)} of the MACs removed"
        return [
            el("b", most.name),
            f" leads in both: {shares}, test {most.metric.name} {most.metric.value(most.end.test.after)}.",
        ]
    return [
        el("b", most.name),
        f" removes the most MACs ({percent(most.end.macs.removed)}), ",
        el("b", best.name),
        f" keeps the highest test {best.metric.name} ({best.metric.value(best.end.test.after)}).",
    ]


def _metric(runs: Sequence[RunRecord]) -> Metric:
    """The metric that all runs were measured by; where there are several, a word for any of them."""
    return runs[0].metric if len({run.metric for run in runs}) == 1 else Metric("metric")


def _unlike(runs: Sequence[RunRecord]) -> list[str]:
    """What makes the comparison lame."""
    found = []
    digests = {str((run.provenance.get("data") or {}).get("sha256")) for run in runs}
    if len(digests) > 1:
        found.append("The runs saw different data or splits: compare their changes, not their accuracies.")
    if len({str((run.provenance.get("model") or {}).get("weights_sha256")) for run in runs}) > 1:
        found.append("The runs started from different weights.")
    if len({run.metric for run in runs}) > 1:
        found.append("The runs were measured by different metrics.")
    return found


def _outcomes(runs: Sequence[RunRecord]) -> Html:
    name = _metric(runs).name
    columns = (
        "Run",
        "Network",
        f"Test {name} before",
        "after",
        "change",
        "MACs removed",
        "Parameters removed",
        "Filters",
        "Drop",
        "Time",
    )
    rows = [_outcome(place, run) for place, run in enumerate(runs)]
    return section("outcomes", "What came out", "", copyable(table(columns, rows)))


def _outcome(place: int, run: RunRecord) -> list[Child]:
    kept = {True: "kept", False: "exceeded", None: NOTHING}[verdict(run).kept]
    gone = count(sum(len(step.removed) for step in run.steps))
    if run.end is not None:
        test, macs, parameters = run.end.test, run.end.macs.removed, run.end.parameters.removed
        measured = (run.metric.value(test.before), run.metric.value(test.after), run.metric.change(test.change))
        return [_name(place, run), run.model, *measured, percent(macs), percent(parameters), gone, kept, clock(run.end.seconds)]
    last = run.steps[-1] if run.steps else None
    shares = (NOTHING, NOTHING) if last is None else (percent(last.macs_removed), percent(last.parameters_removed))
    time = clock(sum(step.seconds for step in run.steps))
    return [_name(place, run), run.model, NOTHING, NOTHING, NOTHING, *shares, gone, kept, time]


def _name(place: int, run: RunRecord) -> Html:
    """The run's name with the colour of its line."""
    swatch = el("svg", el("circle", cx=6, cy=6, r=5, class_=f"point r{place % 8}"), class_="figure swatch", viewBox="0 0 12 12")
    return join(swatch, run.name)


def _frontier(runs: Sequence[RunRecord]) -> Html | None:
    drawn = []
    for metric in dict.fromkeys(run.metric for run in runs):  # different metrics have no axis in common
        places = [place for place, run in enumerate(runs) if run.metric == metric]
        drawn.append(figure(frontier([runs[place] for place in places], places)))
    drawn = [one for one in drawn if one is not None]
    if not drawn:
        return None
    key = el("ul", *(el("li", _name(place, run)) for place, run in enumerate(runs)), class_="scale")
    lead = "Every step of every run; filled points are beaten by no other of their run."
    return section("frontier", f"{_metric(runs).title} against MACs", lead, panel(*drawn, key))


def _widths(runs: Sequence[RunRecord]) -> Html | None:
    """Filters left in every layer that all runs have."""
    known = [{layer.name: layer for layer in run.layers} for run in runs]
    names = [name for name in known[0] if all(name in layers for layers in known)]
    if not names:
        return None
    columns = ("Layer", "Filters", *(f"left in {run.name}" for run in runs))
    rows = [[name, count(known[0][name].filters), *(count(layers[name].left) for layers in known)] for name in names]
    return section("widths", "Filters left in each layer", "", copyable(table(columns, rows)))


def _recipes(runs: Sequence[RunRecord]) -> Html:
    """The fields that differ, training settings included."""
    tables = {name for run in runs for name, value in run.recipe.items() if isinstance(value, dict)}
    lacking = {name for name in tables if any(name not in run.recipe for run in runs)}
    flat = [_flat({n: _in_short(v) if n in lacking else v for n, v in run.recipe.items()}) for run in runs]
    names = [
        name for name in dict.fromkeys(key for one in flat for key in one) if len({str(one.get(name)) for one in flat}) > 1
    ]
    if not names:
        return section("recipes", "Recipes", "All runs had the same recipe.")
    columns = ("Field", *(run.name for run in runs))
    rows = [[name, *(str(one.get(name, NOTHING)) for one in flat)] for name in names]
    return section("recipes", "Where the recipes differ", "", copyable(table(columns, rows)))


def _in_short(settings: dict[str, object]) -> str:
    """A training that not all runs have: all of its settings would drown what else differs."""
    return ", ".join(f"{name} {settings[name]}" for name in ("epochs", "batch", "lr") if name in settings) or "as by default"


def _flat(fields: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(fields, dict):
        return {prefix: fields}
    found: dict[str, object] = {}
    for key, value in fields.items():
        found |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found
