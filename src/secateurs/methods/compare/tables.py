"""The rows of a comparison as tables: mean ± standard deviation over seeds at every target, cost of the search, every row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from secateurs._util.tables import Sheet, markdown
from secateurs.methods.compare.rows import Row, budget_words, budgets_of, check_comparable, methods_of

MISSED = "†"  # marks cells of which a network kept more MACs than it was to keep
NOTHING = "–"


@dataclass(frozen=True)
class Summary:
    """One method under one budget at one target, over its seeds. Shares are fractions."""

    method: str
    budget: str
    target: float
    macs_removed: float
    test: float
    test_spread: float  # standard deviation over seeds; 0 of one
    seeds: int
    reached: bool


def summaries(rows: Sequence[Row], budget: str) -> list[Summary]:
    """All that is known under one budget, method by method, targets rising."""
    return [
        _summary([row for row in of_method if row.target == target])
        for method in methods_of(rows)
        if (of_method := [row for row in rows if row.method == method and row.budget_name == budget])
        for target in sorted({row.target for row in of_method})
    ]


def spread(values: Sequence[float], digits: int = 2, scale: float = 100) -> str:
    """Mean ± standard deviation, in per cent unless told; the mean alone of one."""
    if not values:
        return NOTHING
    middle = f"{scale * mean(values):,.{digits}f}"
    return f"{middle} ± {scale * stdev(values):,.{digits}f}" if len(values) > 1 else middle


def sheets_of(rows: Sequence[Row], budget: str) -> list[Sheet]:
    """The tables of one budget: test accuracy, what is really gone, and what the search took."""
    here = [row for row in rows if row.budget_name == budget]
    words = f"budget {budget} ({budget_words(here[0].budget)})"
    test = here[0].test
    return [
        _by_target(
            here,
            f"Test accuracy (%); {100 * test.before:.2f} before, on {test.count:,} images; {words}",
            lambda row: row.test.after,
        ),
        _by_target(here, f"MACs really removed (%); budget {budget}", lambda row: row.macs.removed),
        _by_target(here, f"Parameters removed (%); budget {budget}", lambda row: row.parameters.removed),
        cost_sheet(here, budget),
    ]


def cost_sheet(rows: Sequence[Row], budget: str) -> Sheet:
    """What a method's search and training took: of each seed the dearest row, as its targets share what is measured."""
    lines = []
    for method in methods_of(rows):
        found = [row for row in rows if row.method == method]
        dearest = [
            max((r for r in found if r.seed == seed), key=lambda r: r.passes) for seed in sorted({r.seed for r in found})
        ]
        seconds = [max(r.search_seconds for r in found if r.seed == seed) for seed in sorted({r.seed for r in found})]
        lines.append(
            (
                method,
                spread([row.passes for row in dearest], 0, 1),
                spread(seconds, 1, 1),
                f"{found[0].images_trained:,}",
                f"{found[0].rate_sum:,.4g}",
                spread([row.training_seconds for row in found], 1, 1),
            )
        )
    columns = ("method", "images through the network", "search, s", "images trained on", "rate × images", "training, s")
    return Sheet(f"Cost of the search, of each seed the dearest row, and of training; budget {budget}", columns, tuple(lines))


def rows_sheet(rows: Iterable[Row]) -> Sheet:
    """Every row: one network each."""
    columns = (
        "method",
        "budget",
        "target",
        "seed",
        "MACs removed, %",
        "parameters removed, %",
        "search before, %",
        "after, %",
        "test before, %",
        "after, %",
        "test right after",
    )
    lines = tuple(
        (
            row.method,
            row.budget_name,
            f"{100 * row.target:g} %{'' if row.reached else MISSED}",
            str(row.seed),
            f"{100 * row.macs.removed:.2f}",
            f"{100 * row.parameters.removed:.2f}",
            *(f"{100 * share:.2f}" for found in (row.search, row.test) for share in (found.before, found.after)),
            f"{row.test.right_after:,g} of {row.test.count:,}",
        )
        for row in rows
    )
    return Sheet("Every network", columns, lines)


def conditions(rows: Sequence[Row]) -> list[str]:
    """What holds for all rows, in sentences."""
    first = rows[0]
    seeds = len({row.seed for row in rows})
    versions = ", ".join(f"{name} {number}" for name, number in first.versions.items())
    options = "".join(f", {name} = {value}" for name, value in first.model_options.items())
    error = 100 * math.sqrt(max(first.test.before * (1 - first.test.before), 0) / first.test.count)
    sets = ", ".join(f"{first.images[name]:,} {name}" for name in ("train", "search", "test"))
    return [
        f"Network: {first.model}{options}; weights {first.weights} ({first.weights_sha256[:12]}). Data: {first.data} "
        f"({first.data_sha256[:12]}): {sets}.",
        f"Mean ± standard deviation over seeds where there are several ({seeds} at most). The test set was read at the end of "
        f"a row and chose nothing; chance alone moves an accuracy on {first.test.count:,} images by about {error:.2f} points.",
        f"MACs and parameters are {first.convention}. The last filters of a residual block are masked {first.shortcut} the "
        f"add.",
        f"Under one budget every method was trained on the same number of images, and its learning rates added up to the same. "
        f"Made with {versions}.",
        *([f"{MISSED}: fewer MACs are gone than were to go."] if not all(row.reached for row in rows) else []),
    ]


def best_words(rows: Sequence[Row], budget: str) -> str:
    """Who is first and second at every target of a budget."""
    found = summaries(rows, budget)
    sentences = []
    for target in sorted({one.target for one in found}):
        ranked = sorted((one for one in found if one.target == target and one.reached), key=lambda one: -one.test)
        if len(ranked) > 1:
            first, second = ranked[:2]
            lead = 100 * (first.test - second.test)
            ahead = "level with" if lead < 0.005 else f"{lead:.2f} points before"
            sentences.append(f"{100 * target:g} %: {first.method} {100 * first.test:.2f} %, {ahead} {second.method}")
    return "; ".join(sentences)


def tables_text(rows: Sequence[Row]) -> str:
    """All tables as Markdown; an error if the rows cannot be compared."""
    check_comparable(rows)
    if not rows:
        return "No row is there yet.\n"
    parts = ["\n".join(f"- {sentence}" for sentence in conditions(rows)) + "\n"]
    for budget in budgets_of(rows):
        first = best_words(rows, budget)
        parts += [f"Highest mean test accuracy, budget {budget}: {first}.\n"] if first else []
        parts += [markdown(sheet) for sheet in sheets_of(rows, budget)]
    return "\n".join([*parts, markdown(rows_sheet(rows))])


def _by_target(rows: Sequence[Row], title: str, value: Callable[[Row], float]) -> Sheet:
    targets = sorted({row.target for row in rows})
    lines = []
    for method in methods_of(rows):
        cells = []
        for target in targets:
            found = [row for row in rows if row.method == method and row.target == target]
            cells.append(spread([value(row) for row in found]) + ("" if all(row.reached for row in found) else MISSED))
        lines.append((method, *cells))
    return Sheet(title, ("method", *(f"{100 * target:g} % gone" for target in targets)), tuple(lines))


def _summary(rows: Sequence[Row]) -> Summary:
    found = [row.test.after for row in rows]
    return Summary(
        rows[0].method,
        rows[0].budget_name,
        rows[0].target,
        mean(row.macs.removed for row in rows),
        mean(found),
        stdev(found) if len(found) > 1 else 0.0,
        len(found),
        all(row.reached for row in rows),
    )
