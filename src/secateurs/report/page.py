"""The sections on sites and layers: one folding card for each step, and the table of the paper's kind."""

from __future__ import annotations

from secateurs._util.format import NOTHING, SPACE, change, clock, count, interval, large, percent, plain, plural, size
from secateurs.report.charts.accuracy import accuracy, agreement, changes, classes, worst
from secateurs.report.charts.allocation import division, frontier
from secateurs.report.charts.figure import Child, Html, el, join
from secateurs.report.charts.sites import importances, network
from secateurs.report.charts.timeline import timeline
from secateurs.report.provenance import how_to_use, origin
from secateurs.report.records import End, RunRecord, StepRecord
from secateurs.report.verdicts import fits_badly, run_warnings, step_warnings, verdict
from secateurs.report.widgets import copyable, facts, figure, panel, section, table, tile, warnings

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


_CONTENTS = (
    ("network", "Network"),
    ("division", "Division"),
    ("way", "The run"),
    ("sites", "Sites"),
    ("classes", "Classes"),
    ("table", "Table"),
    ("use", "Load and export"),
    ("origin", "Recipe and origin"),
)


def title(run: RunRecord) -> str:
    """What the page is called."""
    return f"{run.model} on {run.data}, pruned"


def page(run: RunRecord) -> Html:
    """The body of the report."""
    parts = {
        "network": _network(run),
        "division": _division(run),
        "way": _way(run),
        "sites": sites(run),
        "classes": _classes(run),
        "table": layer_table(run),
        "use": how_to_use(run),
        "origin": origin(run),
    }
    links = [el("a", name, href=f"#{key}") for key, name in _CONTENTS if parts[key] is not None]
    return join(
        el(
            "header",
            el("p", el("b", "secateurs"), f" · {run.name} · {_started(run)}", class_="eyebrow"),
            el("h1", f"{run.model} on {run.data} ", el("span", run.state, class_=f"state {run.state}")),
            el("p", *_headline(run), class_="headline"),
            _verdict(run),
            _tiles(run),
            _asked(run),
            warnings(run_warnings(run)),
            el("nav", *links, aria_label="Contents"),
        ),
        el("main", *parts.values()),
        el("footer", f"Made by secateurs {(run.provenance.get('versions') or {}).get('secateurs', '')} from {run.folder}."),
    )


def _started(run: RunRecord) -> str:
    return (
        f"started {str(run.provenance['started'])[:16].replace('T', ' ')}" if "started" in run.provenance else "start unknown"
    )


def _headline(run: RunRecord) -> list[Html | str]:
    """One sentence with the figures that matter."""
    if run.end is None:
        if not run.steps:
            return [f"No site is done yet; {run.at}."]
        last = run.steps[-1]
        gone = f"{percent(last.parameters_removed)} of the parameters and {percent(last.macs_removed)} of the MACs"
        return [
            "So far ",
            el("b", gone),
            f" are removed, at {run.metric.value(last.accuracy)} {run.metric.name} on the search set.",
        ]
    end = run.end
    return [
        el("b", f"{percent(end.parameters.removed)} of the parameters"),
        " and ",
        el("b", f"{percent(end.macs.removed)} of the MACs"),
        f" are gone. {run.metric.title} on the test set went from ",
        el("b", run.metric.value(end.test.before)),
        " to ",
        el("b", run.metric.value(end.test.after)),
        ".",
    ]


def _verdict(run: RunRecord) -> Html:
    found = verdict(run)
    kind = {True: "yes", False: "no", None: "unknown"}[found.kept]
    return el("div", el("div", el("b", found.headline), el("p", found.words)), class_=f"verdict {kind}")


def _tiles(run: RunRecord) -> Html | None:
    if run.end is None:
        return _tiles_so_far(run)
    end = run.end
    shown = [
        _cost_tile("Parameters", end.parameters.before, end.parameters.after, large),
        _cost_tile("MACs for one example", end.macs.before, end.macs.after, large),
        _cost_tile("Bytes of weights", end.bytes.before, end.bytes.after, size),
        _latency_tile(end),
        _metric_tile(run, "Test", end.test.before, end.test.after, end.test_count),
        _metric_tile(run, "Search", end.search.before, end.search.after, run.search_count),
        tile("Filters removed", count(sum(len(s.removed) for s in run.steps)), f"in {plural(len(run.steps), 'step')}"),
        tile("Time", clock(end.seconds), _where_time_went(run)),
    ]
    return el("dl", *shown, class_="tiles")


def _tiles_so_far(run: RunRecord) -> Html | None:
    if not run.steps:
        return None
    last = run.steps[-1]
    return el(
        "dl",
        tile("Parameters left", percent(1 - last.parameters_removed), "of the start's", share_left=1 - last.parameters_removed),
        tile("MACs left", percent(1 - last.macs_removed), "of the start's", share_left=1 - last.macs_removed),
        tile(f"Search {run.metric.name}", run.metric.value(last.accuracy), f"{run.metric.value(run.start)} at the start"),
        tile("Time", clock(sum(step.seconds for step in run.steps)), f"{plural(len(run.steps), 'step')} done"),
        class_="tiles",
    )


def _cost_tile(name: str, before: float, after: float, written: object) -> Html:
    assert callable(written)
    left = after / before if before else 1.0
    return tile(name, f"{written(before)} → {written(after)}", f"{percent(1 - left)} removed", share_left=left)


def _latency_tile(end: End) -> Html | None:
    """The measured speed, in whatever detail the journal has it."""
    known = end.latency or {}
    if end.speedup is None:
        return None
    low, high = known.get("low"), known.get("high")
    spread = ""
    if isinstance(low, int | float) and isinstance(high, int | float):
        spread = f"{plain(low)} to {plain(high)}× in this run{', not measurable' if low <= 1 <= high else ''}"
    batch = f"batch {known['batch']}" if "batch" in known else ""
    aligning = f"{percent(end.aligning)} of the time aligns channels" if end.aligning else ""
    return tile("Speed beside the original", f"{plain(end.speedup)}×", spread, batch, aligning)


def _metric_tile(run: RunRecord, which: str, before: float, after: float, examples: int) -> Html:
    """With its interval where the metric is a share of examples."""
    big = f"{run.metric.value(before)} → {run.metric.value(after)}"
    change = run.metric.change(after - before)
    if not run.metric.share or not examples:
        return tile(f"{which} {run.metric.name}", big, change)
    low, high = interval(after, examples)
    spread = f"95{SPACE}%: {percent(low)[:-2]} to {percent(high)}, n = {examples:,}"
    return tile(f"{which} {run.metric.name}", big, change, spread)


def _where_time_went(run: RunRecord) -> str:
    steps = sum(step.seconds for step in run.steps)
    return f"{clock(steps)} in the steps"


def _asked(run: RunRecord) -> Html | None:
    """What was asked, in one line of words."""
    recipe = run.recipe
    if not recipe:
        return None
    asked = [("allowed drop", None if run.max_drop is None else run.metric.amount(run.max_drop))]
    asked += [("counted", {"run": "over the whole run", "site": "at each site"}.get(str(recipe.get("budget"))))]
    asked += [(word, percent(recipe[key], 0)) for key, word in _TARGETS if isinstance(recipe.get(key), int | float)]
    asked += [
        ("direction", recipe.get("direction")),
        ("masks", f"{recipe['shortcut']} the add" if "shortcut" in recipe else None),
    ]
    asked += [("rounds", recipe.get("rounds")), ("seed", recipe.get("seed"))]
    words = [join(f"{name} ", el("b", value)) for name, value in asked if value is not None]
    return el("p", "Asked: ", *(join(" · " if place else "", word) for place, word in enumerate(words)), class_="asked")


_TARGETS = (("target_parameters", "parameters to remove"), ("target_macs", "MACs to remove"))


def _network(run: RunRecord) -> Html | None:
    drawn = network(run)
    if drawn is None:
        return None
    lead = "Each bar is a layer; dashed is its width before, filled what is left. Point at one for its numbers. "
    lead += (
        "Arcs are shortcuts, and rings the places where ways join."
        if run.nodes
        else "This folder does not say how layers join."
    )
    keys = ("none", "up to 20 %", "to 40 %", "to 60 %", "to 80 %", "more")
    scale = [
        el("li", el("svg", el("rect", width=12, height=12, rx=2, class_=f"s{k}"), class_="figure", viewBox="0 0 12 12"), word)
        for k, word in enumerate(keys)
    ]
    legend = el("ul", el("li", "Share of filters removed:"), *scale, class_="scale")
    return section(
        "network",
        "The network before and after",
        lead,
        panel(el("p", "Scroll sideways for the whole network.", class_="hint"), figure(drawn, wide=True), legend),
    )


def _division(run: RunRecord) -> Html | None:
    drawn = figure(division(run))
    if drawn is None or run.division is None:
        return None
    lead = (
        f"Every site's loss was measured once against the filters removed there. From these curves follows what any division "
        f"of cuts over the network would cost, so that one pass of measuring answers every budget. {len(run.division.tried)} "
        f"divisions were made and measured as whole networks."
    )
    return section("division", "How the cuts were divided", lead, panel(drawn))


def _way(run: RunRecord) -> Html | None:
    drawn = [panel(shown) for shown in (figure(timeline(run)), figure(frontier([run]))) if shown is not None]
    if not drawn:
        return None
    stopped = f" It stopped because {run.end.stopped}." if run.end and run.end.stopped else ""
    lead = f"A cut costs {run.metric.name}, training wins some of it back; every step leaves a smaller network.{stopped}"
    return section("way", "The run over time", lead, el("div", *drawn, class_="pair"))


def _classes(run: RunRecord) -> Html | None:
    drawn = figure(classes(run))
    if drawn is None:
        return None
    found = changes(run)
    loser = worst(found)
    if loser is None:
        lead = "No class lost test examples."
    else:
        lead = (
            f"Worst hit is class “{loser.name}”: {run.metric.value(loser.pair.before)} → {run.metric.value(loser.pair.after)} "
            f"({run.metric.change(loser.pair.change)})."
        )
    lowest = min(found, key=lambda change: change.pair.after)
    summary = facts(
        [
            ("classes that lost", count(sum(change.pair.change < 0 for change in found))),
            ("unchanged", count(sum(change.pair.change == 0 for change in found))),
            ("that gained", count(sum(change.pair.change > 0 for change in found))),
            ("lowest after", f"“{lowest.name}”: {run.metric.value(lowest.pair.after)}"),
        ]
    )
    shown = el("div", panel(drawn), panel(el("h3", "In short"), summary), class_="pair top")
    return section("classes", "Classes", lead, shown)
