"""XOR records as tables of words, for a terminal, a document, or a machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from secateurs._util.tables import Sheet
from secateurs.reproduce.xor.experiment import PAPER_EXPERIMENTS, ExperimentRow, Share, SweptPoint


def paper_sheet(rows: Sequence[ExperimentRow], tables: Sequence[Sequence[ExperimentRow]], seeds: Sequence[int]) -> Sheet:
    """Table 1: the paper's figure beside ours, over all seeds and, where there are several, for each."""
    several = len(seeds) > 1
    by_key = [{row.key: row for row in table} for table in tables]
    lines = tuple(
        (
            _name(row),
            f"{row.paper:.1f}",
            f"{row.training.percent:.1f}",
            _interval(row.training),
            "yes" if row.training.interval[0] <= row.paper <= row.training.interval[1] else "no",
            _difference(row.paper, row.training),
            *([f"{table[row.key].training.percent:.1f}" for table in by_key] if several else []),
            f"{row.fresh.percent:.1f}",
        )
        for row in rows
        if row.paper is not None
    )
    title = f"Table 1: % of {rows[0].training.experiments:,} experiments that reach 95 % accuracy on the training points"
    each = tuple(f"seed {seed}" for seed in seeds) if several else ()
    columns = ("row", "paper", "ours", "95 %", "inside", "ours − paper", *each, "fresh")
    return Sheet(title, columns, lines)


def methods_sheet(rows: Sequence[ExperimentRow]) -> Sheet:
    """Every pruning method that was run both in one shot and iteratively, best one-shot success first."""
    found = {(row.method, row.schedule): row for row in rows}
    methods = [method for method, schedule in found if schedule == "iterative"]
    methods.sort(key=lambda method: -found[method, "one-shot"].training.successes)
    lines = tuple(
        (method, *(cell for schedule in ("one-shot", "iterative") for cell in _cells(found[method, schedule])))
        for method in methods
    )
    columns = ("method", "one-shot", "95 %", "fresh", "iterative", "95 %", "fresh")
    return Sheet("Ways to choose the 3 neurons: % of successes on the training points, and on fresh ones", columns, lines)


def _cells(row: ExperimentRow) -> tuple[str, str, str]:
    return f"{row.training.percent:.1f}", _interval(row.training), f"{row.fresh.percent:.1f}"


def sweep_sheet(points: Sequence[SweptPoint]) -> Sheet:
    """Success of one-shot ensembles: a line for each share off, a column for each number of masks."""
    counts = tuple(dict.fromkeys(point.masks for point in points))
    shares = tuple(dict.fromkeys(point.off for point in points))
    found = {(point.off, point.masks): point for point in points}
    lines = [(f"{off:.1f}", *(_swept_cell(found[off, count]) for count in counts)) for off in shares]
    title = "One-shot ensembles by share of neurons off (P) and number of masks (M), training points"
    return Sheet(title, ("P", *(f"M = {count}" for count in counts)), tuple(lines))


def plain(record: ExperimentRow | SweptPoint) -> dict[str, object]:
    """The record as JSON takes it, shares with their percent and interval."""
    fields: dict[str, object] = asdict(record)
    for name in ("training", "fresh"):
        share: Share = getattr(record, name)
        fields[name] = {**asdict(share), "percent": share.percent, "interval": share.interval}
    return {**fields, "paper": record.paper} if isinstance(record, ExperimentRow) else fields


def _name(row: ExperimentRow) -> str:
    if not row.method:
        return f"train {row.network}"
    return row.method if row.method == "random" else f"{row.method}, {row.schedule}"


def _swept_cell(point: SweptPoint) -> str:
    return f"{point.training.percent:.1f} ({_interval(point.training)})"


def _interval(share: Share) -> str:
    low, high = share.interval
    return f"{low:.1f}–{high:.1f}"


def _difference(paper: float, share: Share) -> str:
    """Ours less the paper's, ± 95 %: the paper's figure is a count among 1,000 experiments and has its own chance error."""
    variances = [
        rate * (1 - rate) / n for rate, n in ((paper / 100, PAPER_EXPERIMENTS), (share.percent / 100, share.experiments))
    ]
    return f"{share.percent - paper:+.1f} ± {196 * math.sqrt(sum(variances)):.1f}"
