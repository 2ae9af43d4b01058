"""The rows of a comparison as tables: mean ± standard deviation over seeds at every target, cost of the search, every row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import mean, stdev

from secateurs._util.format import NOTHING
from secateurs_lab.compare.page import Summary
from secateurs_lab.compare.paired import lead_of
from secateurs_lab.compare.rows import Row, budget_words, budgets_of, check_comparable, methods_of, stem_of
from secateurs_lab.sheets import Sheet

MISSED = "†"  # marks cells with a network that kept more MACs than its target


def by_target(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """Group rows by method, in order of first appearance, and rising target; each group holds one row a seed and budget."""
    rows = list(rows)
    keys = [(method, target) for method in methods_of(rows) for target in sorted({row.target for row in rows})]
    grouped = {key: [row for row in rows if (row.method, row.target) == key] for key in keys}
    return {key: group for key, group in grouped.items() if group}


def summaries(rows: Sequence[Row], budget: str) -> list[Summary]:
    """Summarise the rows of one budget, method by method, targets rising."""
    found = []
    for (method, target), group in by_target(row for row in rows if row.budget.name == budget).items():
        test = [row.test.after for row in group]
        removed, spread = mean(row.macs.removed for row in group), stdev(test) if len(test) > 1 else 0.0
        found.append(Summary(method, target, removed, mean(test), spread, len(test), all(row.reached for row in group)))
    return found


def mean_spread(values: Sequence[float], digits: int = 2, scale: float = 100) -> str:
    """Format mean ± standard deviation, in per cent by default; for a single value the mean alone."""
    if not values:
        return NOTHING
    middle = f"{scale * mean(values):,.{digits}f}"
    return f"{middle} ± {scale * stdev(values):,.{digits}f}" if len(values) > 1 else middle


def sheets_of(rows: Sequence[Row], budget: str) -> list[Sheet]:
    """Return the tables of one budget: test accuracy, what was really removed, and the cost of the search."""
    here = [row for row in rows if row.budget.name == budget]
    test = here[0].test
    title = f"Test accuracy (%); {100 * test.before:.2f} before, on {test.count:,} images; budget {budget} "
    quantised = [row for row in here if row.int8 is not None]
    in_int8 = _target_sheet(quantised, f"Test accuracy (%) of the int8 files; budget {budget}", lambda row: row.int8.after)  # type: ignore[union-attr]  # quantised
    return [
        _target_sheet(here, f"{title}({budget_words(here[0].budget)})", lambda row: row.test.after),
        *([in_int8] if quantised else []),
        _target_sheet(here, f"MACs really removed (%); budget {budget}", lambda row: row.macs.removed),
        _target_sheet(here, f"Parameters removed (%); budget {budget}", lambda row: row.parameters.removed),
        _cost_sheet(here, budget),
    ]


def _target_sheet(
    rows: Sequence[Row],
    title: str,
    value: Callable[[Row], float],
    words: Callable[[Sequence[Row]], str] = lambda group: "",
) -> Sheet:
    targets, grouped, lines = sorted({row.target for row in rows if row.target} or {0.0}), by_target(rows), []
    for method in methods_of(rows):
        # the untouched network is the same at every target
        groups = [grouped.get((method, target)) or grouped.get((method, 0.0)) or [] for target in targets]
        marks = [("" if all(row.reached for row in group) else MISSED) + (words(group) if group else "") for group in groups]
        cells = [mean_spread([value(row) for row in group]) for group in groups]
        lines.append((method, *map("".join, zip(cells, marks, strict=True))))
    return Sheet(title, ("method", *(f"{100 * target:g} % gone" for target in targets)), tuple(lines))


def own_rate_sheet(rows: Sequence[Row], stem: str) -> Sheet | None:
    """Test accuracy of each method at its own best learning rate, by the validation set; None where all rows have one rate."""
    best = _at_own_rates(rows, stem)
    if len({row.budget.name for row in rows if stem_of(row.budget) == stem}) < 2:
        return None
    words = {key: f" @ {_rate(group[0]):g} of {tried}" for key, (group, tried) in best.items()}
    title = f"Test accuracy (%), every method at the best of its learning rates by the validation set; budget {stem}"
    shown = [row for group, _ in best.values() for row in group]
    return _target_sheet(shown, title, lambda row: row.test.after, lambda group: words[group[0].method, group[0].target])


def _at_own_rates(rows: Sequence[Row], stem: str) -> dict[tuple[str, float], tuple[list[Row], int]]:
    """Return by method and target the rows at the rate that the validation set chooses, and how many rates it chose from."""
    found = {}
    for key, group in by_target(row for row in rows if stem_of(row.budget) == stem).items():
        rates = {name: [row for row in group if row.budget.name == name] for name in budgets_of(group)}
        most = max(len(same) for same in rates.values())  # seeds: a rate that some have not run is not compared
        whole = {name: same for name, same in rates.items() if len(same) == most}
        chosen = max(whole, key=lambda name: mean(row.search.after for row in whole[name]))
        found[key] = whole[chosen], len({_rate(same[0]) for same in whole.values()})
    return found


def leads_sheet(rows: Sequence[Row]) -> Sheet | None:
    """By how much the best method is ahead of every other on the same test examples; None where no rows say which are right.

    The best by mean test accuracy at each budget and target; each at its own best rate where there are several.
    """
    lines = []
    for stem in dict.fromkeys(stem_of(row.budget) for row in rows):
        best = {key: group for key, (group, _) in _at_own_rates(rows, stem).items()}
        for target in sorted({target for _, target in best if target}):
            ranked = [group for (_, share), group in best.items() if share == target and all(row.reached for row in group)]
            ranked.sort(key=lambda group: -mean(row.test.after for row in group))
            for other in ranked[1:]:
                lead = lead_of(ranked[0], other)
                if lead is not None:
                    ahead = f"{100 * lead.difference:.2f} ± {100 * lead.error:.2f}"
                    only = (f"{lead.only_first:,}", f"{lead.only_second:,}")
                    methods = ranked[0][0].method, other[0].method
                    lines.append((stem, f"{100 * target:g} %", *methods, str(lead.seeds), *only, ahead))
    columns = ("budget", "MACs ↓", "best", "other", "seeds", "right in the best alone", "in the other alone", "ahead, points")
    title = "Lead of the best method on the same test images, all seeds together, ± standard error over the images"
    return Sheet(title, columns, tuple(lines)) if lines else None


def _rate(row: Row) -> float:
    settings = row.budget.after or row.budget.between
    return 0.0 if settings is None else settings.rate


def minutes_sheet(rows: Sequence[Row], minutes: Sequence[float] = (5, 10, 15, 30, 60, 120)) -> Sheet | None:
    """Test accuracy within a number of minutes of search and training: of all budgets that fit, the best by the validation set.

    A budget fits if all its seeds do; budgets are compared by the seeds that all of them have run, if there are any. A seed's
    search counts as that of its dearest row, as targets may share measurements.
    """
    lines, searched = [], dict[tuple[str, int], float]()
    for row in rows:
        searched[row.method, row.seed] = max(row.search_seconds, searched.get((row.method, row.seed), 0.0))
    for (method, target), group in sorted(by_target(rows).items(), key=lambda found: found[0][1]):
        cells = []
        for bound in minutes:
            runs = [[row for row in group if row.budget.name == name] for name in budgets_of(group)]
            fitting = [
                run for run in runs if all(searched[method, row.seed] + row.training_seconds <= 60 * bound for row in run)
            ]
            best = max(fitting, key=partial(_validation, seeds=_common_seeds(fitting)), default=[])
            cells.append(f"{mean_spread([row.test.after for row in best])} ({best[0].budget.name})" if best else NOTHING)
        lines.append((f"{100 * target:g} %", method, *cells))
    used = [place for place in range(len(minutes)) if len({line[place + 2] for line in lines} - {NOTHING})]
    if not used or len({row.budget.name for row in rows}) < 2:
        return None
    columns = ("MACs ↓", "method", *(f"{minutes[place]:g} min" for place in used))
    kept = [(line[0], line[1], *(line[place + 2] for place in used)) for line in lines]
    title = "Test accuracy (%) within minutes of search and training together: the best budget that fits, by the validation set"
    return Sheet(title, columns, tuple(kept))


def _common_seeds(runs: Sequence[Sequence[Row]]) -> set[int]:
    return set.intersection(*({row.seed for row in run} for run in runs)) if runs else set()


def _validation(run: Sequence[Row], seeds: set[int]) -> float:
    """Mean validation accuracy over the seeds, or over all where the run has none of them."""
    return mean([row.search.after for row in run if row.seed in seeds] or [row.search.after for row in run])


def _cost_sheet(rows: Sequence[Row], budget: str) -> Sheet:
    """What search and training of a method took: the dearest row of each seed, as its targets share measurements."""
    lines = []
    for method in methods_of(rows):
        found = [row for row in rows if row.method == method]
        seeds = [[row for row in found if row.seed == seed] for seed in sorted({row.seed for row in found})]
        lines.append(
            (
                method,
                mean_spread([max(row.passes for row in group) for group in seeds], 0, 1),
                mean_spread([max(row.search_seconds for row in group) for group in seeds], 1, 1),
                f"{found[0].images_trained:,}",
                f"{found[0].rate_sum:,.4g}",
                mean_spread([row.training_seconds for row in found], 1, 1),
            )
        )
    columns = ("method", "images through the network", "search, s", "images trained on", "rate × images", "training, s")
    return Sheet(f"Cost of the search, of each seed the dearest row, and of training; budget {budget}", columns, tuple(lines))


def rows_sheet(rows: Iterable[Row]) -> Sheet:
    """Return a table of every row: one network each."""
    rows = list(rows)
    quantised = any(row.int8 is not None for row in rows)
    columns = "method; budget; target; seed; MACs removed, %; parameters removed, %; search before, %; after, %; "
    columns += "test before, %; after, %; test right after"
    lines = tuple(
        (
            row.method,
            row.budget.name,
            f"{100 * row.target:g} %{'' if row.reached else MISSED}",
            str(row.seed),
            f"{100 * row.macs.removed:.2f}",
            f"{100 * row.parameters.removed:.2f}",
            *(f"{100 * share:.2f}" for found in (row.search, row.test) for share in (found.before, found.after)),
            f"{row.test.right_after:,g} of {row.test.count:,}",
            *((NOTHING if row.int8 is None else f"{100 * row.int8.after:.2f}",) if quantised else ()),
        )
        for row in rows
    )
    columns += "; int8 file, %" if quantised else ""
    return Sheet("Every network", tuple(columns.split("; ")), lines)


def conditions(rows: Sequence[Row]) -> list[str]:
    """Describe in sentences what holds for all rows."""
    first = rows[0]
    seeds = len({row.seed for row in rows})
    versions = ", ".join(f"{name} {number}" for name, number in first.versions.items())
    options = "".join(f", {name} = {value}" for name, value in first.model_options.items())
    error = 100 * math.sqrt(max(first.test.before * (1 - first.test.before), 0) / first.test.count)
    sets = ", ".join(f"{first.images[name]:,} {name}" for name in ("train", "search", "test"))
    return [
        f"Network: {first.model}{options}; weights {first.weights} ({first.weights_sha256[:12]}). Data: {first.data} "
        f"({first.data_sha256[:12]}): {sets}.",
        f"Mean ± standard deviation over seeds where there are several ({seeds} at most). The test set was read once, at the "
        f"end of a row, and decided nothing. Sampling error of an accuracy on {first.test.count:,} images: {error:.2f} points.",
        f"MACs and parameters are {first.convention}. The last filters of a residual block are masked {first.shortcut} the "
        f"add.",
        f"Under one budget every method was trained on the same number of images, and its learning rates added up to the same. "
        f"Made with {versions}.",
        *([f"{MISSED}: fewer MACs were removed than the target."] if not all(row.reached for row in rows) else []),
    ]


def best_words(rows: Sequence[Row], budget: str) -> str:
    """Name the best and second best method at every target of a budget."""
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
    """Return all tables as Markdown; raise if the rows cannot be compared."""
    check_comparable(rows)
    parts = ["\n".join(f"- {sentence}" for sentence in conditions(rows)) + "\n"]
    for budget in budgets_of(rows):
        best = best_words(rows, budget)
        parts += [f"Highest mean test accuracy, budget {budget}: {best}.\n"] if best else []
        parts += [sheet.markdown() for sheet in sheets_of(rows, budget)]
    parts += [sheet.markdown() for sheet in across_budgets(rows)]
    return "\n".join([*parts, rows_sheet(rows).markdown()])


def across_budgets(rows: Sequence[Row]) -> list[Sheet]:
    """Return the tables of all budgets together: leads, each method at its own best rate, and at equal minutes."""
    stems = dict.fromkeys(stem_of(row.budget) for row in rows)
    found = [leads_sheet(rows), *(own_rate_sheet(rows, stem) for stem in stems), minutes_sheet(rows)]
    return [sheet for sheet in found if sheet is not None]
