"""The page of one run: what was asked and what came out at the top, then the network, the way, the sites, the classes."""

from __future__ import annotations

from secateurs.report.charts.classes import changes, classes, worst
from secateurs.report.charts.division import division
from secateurs.report.charts.frontier import frontier
from secateurs.report.charts.network import network
from secateurs.report.charts.timeline import timeline
from secateurs.report.judging import run_warnings, verdict
from secateurs.report.markup import Html, el, join
from secateurs.report.origin import how_to_use, origin
from secateurs.report.parts import facts, figure, panel, section, tile, warnings
from secateurs.report.records import End, RunRecord
from secateurs.report.sites import layer_table, sites
from secateurs.report.words import SPACE, clock, count, interval, large, percent, plain, plural, size

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
