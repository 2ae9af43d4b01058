"""`secateurs reproduce table3`: pruned ResNets on CIFAR-10, the paper's method and its rivals, published figures above ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Annotated

from cyclopts import Parameter

from secateurs._util.files import write_text
from secateurs._util.format import NOTHING
from secateurs._util.terminal import print_json, print_table, say, warn
from secateurs.cli.inputs import BUILTIN, PUBLIC, RUNS, Json, Origin, check_device
from secateurs.cli.progress import display
from secateurs.errors import InvalidInput
from secateurs_lab.compare.command import ComparisonRequest, Many, comparison_of, refuse, rendered, shares, split, work_through
from secateurs_lab.compare.page import Summary
from secateurs_lab.compare.rows import Row, budget_words, budgets_of, check_comparable, comparison_rows, row_fields
from secateurs_lab.compare.run import ROWS
from secateurs_lab.compare.tables import MISSED, by_target, conditions, mean_spread, summaries
from secateurs_lab.sheets import Sheet

FRESH = "fresh"
METHODS = ("paper", "portfolio+refit", "li", "sfp", "fpgm:uniform", "fpgm-sfp", "random:uniform")
ALWAYS = ("random:uniform", "li", "untouched")  # added to every comparison: random choice, L1 norms, training alone
COLUMNS = ("ResNet", "method", "seeds", "acc. before, %", "acc. after, %", "change", "FLOPs ↓, %", "params ↓, %")

_OURS = ("paper", "ensemble", "pairs", "portfolio", "obs")  # prefixes of the methods that are not rivals


@dataclass(frozen=True)
class Published:
    """A line of the paper's table; all in per cent."""

    who: str
    method: str  # its name in this package
    before: float
    after: float
    flops: float
    parameters: float


PAPER: Mapping[int, tuple[Published, ...]] = {
    20: (
        Published("SFP", "sfp", 92.20, 90.38, 42.20, 41.54),
        Published("FPGM", "fpgm-sfp", 92.20, 91.99, 54.00, 53.59),
        Published("the paper", "paper", 92.13, 91.42, 45.05, 46.42),
    ),
    32: (
        Published("SFP", "sfp", 92.63, 92.08, 41.5, 41.24),
        Published("FPGM", "fpgm-sfp", 92.63, 92.82, 53.2, 53.2),
        Published("the paper", "paper", 92.97, 92.42, 46.4, 49.35),
    ),
    56: (
        Published("Li et al.", "li", 93.04, 93.06, 27.6, 13.7),
        Published("SFP", "sfp", 93.59, 93.35, 47.14, 52.6),
        Published("FPGM", "fpgm-sfp", 93.59, 93.49, 47.14, 52.6),
        Published("the paper", "paper", 93.44, 93.18, 57.64, 68.14),
    ),
    110: (
        Published("Li et al.", "li", 93.53, 93.30, 38.6, 32.40),
        Published("SFP", "sfp", 93.68, 93.86, 40.8, 40.72),
        Published("FPGM", "fpgm-sfp", 93.68, 93.85, 52.3, 52.7),
        Published("the paper", "paper", 94.05, 93.48, 63.68, 60.08),
    ),
}


def table3(
    *,
    depth: Annotated[tuple[int, ...], Many] = (20,),
    budget: str = "2core",
    methods: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", show_default=" ".join(METHODS))] = (),
    only: Annotated[bool, Parameter(negative="")] = False,
    seeds: Annotated[tuple[int, ...], Many] = (0,),
    targets: Annotated[tuple[str, ...], Many] = ("0.30", "0.45"),
    weights: Annotated[str | None, Parameter(show_default="builtin for depth 20, else public")] = None,
    out: Path = Path("lab/results/table3"),
    runs: Path = RUNS / "table3",
    examples: int | None = None,
    render: Annotated[bool, Parameter(negative="")] = False,
    device: str | None = None,
    as_json: Json = False,
) -> None:
    """Table 3: ResNets on CIFAR-10 made smaller by the paper's method and by its rivals, under one budget of training.

    Accuracy before and after, FLOPs and parameters removed, with the published figures above ours. Rows go to
    OUT/resnetN/rows.jsonl; tables, curves and pages are made of them alone: OUT/table3.md, and in each folder tables.md,
    accuracy-BUDGET.png and .svg (with the extra `figures`), comparison.html. Give the same command again after Ctrl-C or a
    crash, and it resumes. Rows of other budgets, seeds and targets are kept.

    Parameters
    ----------
    depth
        One or more of 20, 32, 56 and 110.
    budget
        none; gentle or short (1 epoch at the end); 2core (1.7 epochs between the cuts and 2 at the end); paper (10 a cut, 80
        at the end); a TOML file; each also at another learning rate, as gentle@0.01. See `secateurs compare --help`.
    methods
        Methods to compare: see `secateurs compare --help`.
    only
        Leave out random:uniform, li and untouched unless they are named.
    seeds
        Each seed runs everything again.
    targets
        Shares of the FLOPs to remove.
    weights
        builtin, public, a file with a state dict, or fresh: untrained, to test the command.
    out
        Folder for the rows, tables, curves and pages.
    runs
        Folder for the runs of the methods and their networks.
    examples
        Use at most this number of images of each set: to try the command out, not to report from.
    render
        Make tables, curves and pages again from the rows, and nothing else.
    device
        Where to compute.
    """
    for one in depth:
        if one not in PAPER:
            raise InvalidInput(f"--depth {one}: wanted {', '.join(map(str, PAPER))}.")
    check_device(device)
    asked = ComparisonRequest(split(methods) or METHODS, (budget,), shares(targets), seeds, () if only else ALWAYS)
    failures = []
    with display(quiet=as_json) as shown:
        for name in () if render else (f"resnet{one}" for one in depth):
            chosen = weights or (BUILTIN if name == "resnet20" else PUBLIC)
            if chosen == FRESH:
                warn(f"{name} is untrained: its rows show that everything runs, and nothing else.")
            origin = Origin(name, "cifar10", weights=None if chosen == FRESH else chosen, device=device).settled()
            comparison = comparison_of(origin, out / name, runs / name, examples=examples)
            shown.line(f"Table 3, {name}, weights {chosen}: rows in {comparison.rows}, networks in {comparison.runs}")
            failures += work_through(comparison, asked, shown)
    _write(out, as_json=as_json)
    refuse(failures)


def _write(out: Path, *, as_json: bool) -> None:
    """Write the table, and the tables, curves and pages of each depth; print the table."""
    found = {depth: comparison_rows(out / f"resnet{depth}" / ROWS) for depth in PAPER}
    by_depth = {depth: rows for depth, rows in found.items() if rows}
    write_text(out / "table3.md", table3_text(by_depth))
    files = [out / "table3.md", *(file for depth in by_depth for file in rendered(out / f"resnet{depth}"))]
    if as_json:
        plain = {str(depth): [row_fields(row) for row in rows] for depth, rows in by_depth.items()}
        print_json({"out": str(out), "rows": plain, "files": [str(file) for file in files]})
        return
    for budget in _budgets(by_depth):
        sheet = table3_sheet(by_depth, budget)
        say(sheet.title)
        print_table(sheet.columns, sheet.lines, left=(0, 1))
        for sentence in findings(by_depth, budget):
            say(sentence)
    say(f"Written: {', '.join(str(file) for file in files)}")


def table3_text(by_depth: Mapping[int, Sequence[Row]]) -> str:
    """Return all depths as Markdown: a table for each budget, and its distance from the published figures."""
    for rows in by_depth.values():
        check_comparable(rows)
    if not by_depth:
        return "No rows yet.\n"
    parts = []
    for budget in _budgets(by_depth):
        parts += [table3_sheet(by_depth, budget).markdown(), *(f"- {sentence}" for sentence in findings(by_depth, budget)), ""]
    for depth, rows in by_depth.items():
        parts += [f"**ResNet-{depth}**\n", *(f"- {sentence}" for sentence in conditions(rows)), ""]
    return "\n".join(parts)


def _budgets(by_depth: Mapping[int, Sequence[Row]]) -> tuple[str, ...]:
    return budgets_of(row for rows in by_depth.values() for row in rows)


def table3_sheet(by_depth: Mapping[int, Sequence[Row]], budget: str) -> Sheet:
    """Return the paper's layout: published lines first, then ours, by the share of the MACs to remove."""
    lines: list[tuple[str, ...]] = []
    words = ""
    for depth, rows in by_depth.items():
        here = [row for row in rows if row.budget.name == budget]
        if not here:
            continue
        words = words or budget_words(here[0].budget)
        for line in PAPER.get(depth, ()):
            values = (
                f"{line.before:.2f} {line.after:.2f} {line.after - line.before:+.2f} {line.flops:.2f} {line.parameters:.2f}"
            )
            lines.append((str(depth), f"{line.who}, published", NOTHING, *values.split()))
        lines += [_measured(depth, group) for _, group in sorted(by_target(here).items(), key=lambda item: item[0][1])]
    return Sheet(f"Table 3, budget {budget} ({words}); published figures first, then ours", COLUMNS, tuple(lines))


def _measured(depth: int, rows: Sequence[Row]) -> tuple[str, ...]:
    first = rows[0]
    return (
        str(depth),
        f"{first.method}, {100 * first.target:g} %{'' if all(row.reached for row in rows) else MISSED}",
        str(len(rows)),
        f"{100 * first.test.before:.2f}",
        mean_spread([row.test.after for row in rows]),
        f"{100 * (mean(row.test.after for row in rows) - first.test.before):+.2f}",
        mean_spread([row.macs.removed for row in rows]),
        mean_spread([row.counted_weights.removed for row in rows]),
    )


def findings(by_depth: Mapping[int, Sequence[Row]], budget: str) -> list[str]:
    """Rank the methods at each target, and compare the paper's method with its rivals and with its published line."""
    sentences = []
    for depth, rows in by_depth.items():
        points = sorted(summaries(rows, budget), key=lambda point: point.target)
        for target, group in groupby(points, key=lambda point: point.target):
            sentences.append(f"ResNet-{depth}, {100 * target:g} % of the FLOPs: {_ranking(list(group))}")
        published = next((line for line in PAPER.get(depth, ()) if line.method == "paper"), None)
        ours = [point for point in points if point.method == "paper"]
        if published is None or not ours:
            continue
        near = min(ours, key=lambda point: abs(100 * point.target - published.flops))
        removed = [
            row.macs.removed for row in by_target(row for row in rows if row.budget.name == budget)["paper", near.target]
        ]
        change, theirs = 100 * (near.test - rows[0].test.before), published.after - published.before
        verdict = "reached" if change >= theirs else f"missed by {theirs - change:.2f} points"
        sentences.append(
            f"ResNet-{depth}, the paper's method: published {theirs:+.2f} points at {published.flops:g} % of the FLOPs; "
            f"here {change:+.2f} at {mean_spread(removed, 1)} %: {verdict}."
        )
    return sentences


def _ranking(points: Sequence[Summary]) -> str:
    ranked = sorted(points, key=lambda point: -point.test)
    text = ", ".join(f"{point.method} {100 * point.test:.2f}" for point in ranked) + "."
    ours = next((point for point in ranked if point.method == "paper"), None)
    rival = next((point for point in ranked if not point.method.startswith(_OURS)), None)
    if ours is not None and rival is not None:
        lead = 100 * (ours.test - rival.test)
        where = "ahead of" if lead >= 0 else "behind"
        text += f" The paper's method is {abs(lead):.2f} points {where} the best rival ({rival.method})."
    return text
