"""The tables of lab/notes/quality.md from the rows that exist: budgets, MAC targets, the aim in numbers, results of rivals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import mean, stdev

from benchmarks.quality_figure import draw
from benchmarks.quality_rival import RIVALS, rivals_of
from benchmarks.quality_setup import METHODS, PAGE, UNTOUCHED, Row, read_rows, series
from secateurs._util.files import write_text

FIGURE = PAGE.with_suffix(".svg")
BEGIN, END = "<!-- begin: made by `python -m benchmarks.quality --render` -->", "<!-- end: quality -->"
BUDGETS = (0.005, 0.01, 0.02)
OURS = "portfolio+refit"
AIM = 2.0
_TESTED = 5_000  # images of the test half
NETWORKS = {"resnet20": "ResNet-20", "resnet56": "ResNet-56"}

Drop = Callable[[Row], float]


def render_page() -> str:
    """Write the generated part of the page and its figure; gives the path of the page."""
    rows = read_rows()
    text = "\n\n".join(_parts(rows)) if rows else "Nothing is measured yet."
    before, _, rest = (PAGE.read_text() if PAGE.exists() else BEGIN + END + "\n").partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text(PAGE, f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    if rows:
        draw(rows, FIGURE)
    return str(PAGE)


def _parts(rows: list[Row]) -> Iterator[str]:
    yield f"Measured on: {rows[-1].conditions}. Means over seeds, ± standard deviation where there are several."
    for model in dict.fromkeys(model for (model, _), _ in series(rows)):
        here = [row for row in rows if row.model == model]
        start = here[0]
        yield (
            f"### {NETWORKS[model]}\n\n{start.search_before:.2%} on the search half and {start.test_before:.2%} on the test "
            f"half before; seeds: {len({row.seed for row in here})}."
        )
        for budget in BUDGETS:
            yield budget_table(here, budget)
        yield target_table(here)
        yield drop_table(here)
        yield aim_text(here)
        for lesson in sorted({(row.finetune, row.rate) for row in here if row.finetune}, reverse=True):
            yield lesson_table(here, *lesson)
    yield f"![Test accuracy against MACs removed]({FIGURE.name})"
    if RIVALS.exists():
        yield rivals_text()


# ---- one network -----------------------------------------------------------------------------------------------------


def budget_table(rows: list[Row], budget: float) -> str:
    """The largest rung of every ladder that loses at most `budget` on the search half."""
    lines = [
        f"#### At most {100 * budget:g} points lost on the search half\n",
        "| method | MACs removed, largest rung | parameters removed | search, % | test, % | MACs removed, between rungs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (_, name), found in series(rows):
        chosen = [largest_within(ladder, budget) for ladder in ladders(found)]
        between = [crossing(ladder, budget, lambda row: row.search_drop) for ladder in ladders(found)]
        cells = [
            spread([row.macs_removed if row else 0.0 for row in chosen]),
            spread([row.parameters_removed if row else 0.0 for row in chosen]),
            spread([row.search_after if row else found[0].search_before for row in chosen], 2),
            spread([row.test_after if row else found[0].test_before for row in chosen], 2),
            spread(between),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def target_table(rows: list[Row]) -> str:
    """Test accuracy at every MAC target."""
    targets = sorted({row.target for row in rows if row.target and not row.finetune})
    lines = [
        "#### Test accuracy (%) when a share of the MACs is gone\n",
        f"| method | {' | '.join(f'{target:.0%}' for target in targets)} |",
        "| --- " * (len(targets) + 1) + "|",
    ]
    for (_, name), found in series(rows):
        at = {target: [row.test_after for row in found if row.target == target] for target in targets}
        lines.append(f"| {name} | {' | '.join(spread(at[target]) if at[target] else '–' for target in targets)} |")
    return "\n".join(lines)


def drop_table(rows: list[Row]) -> str:
    """MACs removed where every ladder first crosses a drop on the test half."""
    lines = [
        "#### MACs removed (%) at the same drop on the test half, between rungs\n",
        f"| method | {' | '.join(f'{100 * drop:g} points' for drop in BUDGETS)} |",
        "| --- " * (len(BUDGETS) + 1) + "|",
    ]
    for (_, name), found in series(rows):
        cells = [
            ("≥ " if any(ends_before(one, drop) for one in ladders(found)) else "")
            + spread([crossing(one, drop, lambda row: row.test_drop) for one in ladders(found)])
            for drop in BUDGETS
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def aim_text(rows: list[Row]) -> str:
    """Whether the portfolio with all repairs removes twice the MACs of the best without repair, at the same test drop."""
    found = {name: ladders(many) for (_, name), many in series(rows)}
    rivals = {name: many for name, many in found.items() if METHODS[name].repair == "none"}
    if OURS not in found or not rivals:
        return "The aim cannot be judged yet: rows are missing."
    sentences = []
    for drop in BUDGETS:
        ours = {ladder[0].seed: crossing(ladder, drop, lambda row: row.test_drop) for ladder in found[OURS]}
        best, theirs = max(
            (
                (name, {one[0].seed: crossing(one, drop, lambda row: row.test_drop) for one in many})
                for name, many in rivals.items()
            ),
            key=lambda entry: mean(entry[1].values()),
        )
        ratios = [ours[seed] / theirs[seed] for seed in ours.keys() & theirs.keys() if theirs[seed] > 0]
        if not ratios:
            sentences.append(f"{100 * drop:g} points: no rival removes anything.")
            continue
        short = any(ends_before(ladder, drop) for ladder in found[OURS])
        verdict = "reached" if mean(ratios) >= AIM else "open, our ladder ends before that drop" if short else "missed"
        sentences.append(
            f"{100 * drop:g} points: {spread(list(ours.values()))} % of the MACs against {spread(list(theirs.values()))} % of "
            f"the best rival ({best}), {spread(ratios, 2, 1)} times as many: {verdict}."
        )
    missing = [name for name, method in METHODS.items() if method.repair == "none" and name not in rivals]
    caveat = f"\n\nNot measured here: {', '.join(missing)}." if missing else ""
    return (
        f"#### The aim\n\n{OURS} is to remove at least {AIM:g} times the MACs of the best method without repair at the same "
        "test drop (where the ladder first crosses it, between rungs):\n\n"
        + "\n".join(f"- {sentence}" for sentence in sentences)
        + caveat
    )


def lesson_table(rows: list[Row], epochs: int, rate: float) -> str:
    """Test accuracy before and after training, at the targets that were trained."""
    trained = [row for row in rows if (row.finetune, row.rate) == (epochs, rate)]
    plain = {row.key[:-2]: row for row in rows if not row.finetune}
    lines = [
        f"#### After {epochs} epoch{'s' if epochs > 1 else ''} of training for everybody "
        f"(learning rate from {rate:g}, cosine, crop and flip)\n",
        "| method | target | MACs removed | test before training, % | test after, % |",
        "| --- | --- | --- | --- | --- |",
    ]
    alone = [row for row in trained if row.method == UNTOUCHED]
    if alone:
        lines.append(
            f"| untouched | – | 0 | {spread([alone[0].test_before], 2)} | {spread([r.test_after for r in alone], 2)} |"
        )
    for target in sorted({row.target for row in trained if row.target}):
        for (_, name), found in series(trained, finetune=epochs):
            here = [row for row in found if row.target == target]
            if here:
                before = [plain[row.key[:-2]].test_after for row in here if row.key[:-2] in plain]
                cells = spread([row.macs_removed for row in here]), spread(before, 2), spread([r.test_after for r in here], 2)
                lines.append(f"| {name} | {target:.0%} | {' | '.join(cells)} |")
        lines.append(f"\n{_leader([row for row in trained if row.target == target])}")
    return "\n".join(lines)


def _leader(rows: Sequence[Row]) -> str:
    """Who has most after training, in words."""
    after = {name: mean(row.test_after for row in found) for (_, name), found in series(rows, finetune=rows[0].finetune)}
    first = max(after, key=after.__getitem__)
    ours = "" if first == OURS or OURS not in after else f" {OURS} has {after[OURS]:.2%}, and is not ahead."
    error = (after[first] * (1 - after[first]) / _TESTED) ** 0.5
    return (
        f"Most right after training: {first}, {after[first]:.2%}.{ours} A standard error of one such accuracy is "
        f"{100 * error:.1f} points, of a difference on the same images less."
    )


# ---- ladders ---------------------------------------------------------------------------------------------------------


def ladders(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of one method, a list for each seed, by MACs removed."""
    seeds = sorted({row.seed for row in rows})
    return [sorted((row for row in rows if row.seed == seed), key=lambda row: row.macs_removed) for seed in seeds]


def largest_within(ladder: Sequence[Row], budget: float) -> Row | None:
    """The row that removes most within a search drop; None: even the first loses more."""
    return max((row for row in ladder if row.search_drop <= budget), key=lambda row: row.macs_removed, default=None)


def crossing(ladder: Sequence[Row], budget: float, drop: Drop) -> float:
    """The share of the MACs at which the drop first exceeds the budget, on straight lines from rung to rung.

    The last rung's share where that never happens: a lower bound.
    """
    points = [(0.0, 0.0), *((row.macs_removed, drop(row)) for row in ladder)]
    for (macs, lost), (more, beyond) in pairwise(points):
        if beyond > budget:
            return macs + (more - macs) * (budget - lost) / (beyond - lost)
    return points[-1][0]


def ends_before(ladder: Sequence[Row], drop: float) -> bool:
    """Whether no rung loses so much on the test half: where it would is not known."""
    return all(row.test_drop <= drop for row in ladder)


def spread(values: Sequence[float], digits: int = 1, scale: float = 100) -> str:
    """Mean ± standard deviation, in percent unless told; the mean alone of one."""
    if not values:
        return "–"
    middle = f"{scale * mean(values):.{digits}f}"
    return f"{middle} ± {scale * stdev(values):.{digits}f}" if len(values) > 1 else middle


# ---- rivals ----------------------------------------------------------------------------------------------------------


def rivals_text() -> str:
    """What Torch-Pruning makes of the same network."""
    report = json.loads(RIVALS.read_text())
    header = (
        "| importance | MACs removed, % | test, % | its masked form on the test half, % | difference of outputs |\n"
        "| --- | --- | --- | --- | --- |"
    )

    def table(layers: str) -> str:
        lines = [
            f"| {r.importance} | {100 * r.macs_removed:.1f} | {100 * r.test:.2f} | {100 * r.test_of_masked_form:.2f} | "
            f"{r.difference:.1e} |"
            for r in rivals_of(report, layers)
        ]
        return "\n".join([header, *lines])

    return (
        f"### What one would take today: Torch-Pruning {report['version']}, ResNet-20\n\n"
        f"Global pruning, {100 * report['test_before']:.2f} % on the test half before. The masked form is the whole network "
        "with the outputs of the removed filters set to zero, which a right cut computes too; the difference is the largest "
        "of 16 images, over the largest output, in float64. The hooks of OBD-C were set by hand: the tool's own "
        "preparation raises a TypeError. On all layers it fails even so, with a RuntimeError: the padded shortcut leaves only "
        "a part of a layer's channels in a group.\n\n"
        "All layers, as the tool does it by itself. It does not follow the shortcuts that pad channels: where it narrows the "
        "trunk, what it makes runs and computes something else. Where its importance happens to leave the trunk alone, the cut "
        f"is right.\n\n{table('all')}\n\n"
        f"Only the first convolution of every block, all layers of the trunk ignored: right, and a rival.\n\n{table('inner')}"
    )
