"""The paper's Table 3: pruned ResNets on CIFAR-10, ours beside Li et al., soft filter pruning and the geometric median."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from secateurs._util.tables import Sheet, markdown
from secateurs.methods.compare.rows import Row, budget_words, budgets_of, check_comparable, methods_of
from secateurs.methods.compare.tables import MISSED, NOTHING, conditions, spread

DEPTHS = (20, 32, 56, 110)
METHODS = ("paper", "portfolio+refit", "li", "sfp", "fpgm:uniform", "fpgm-sfp", "random:uniform")
BESIDE = ("random:uniform", "li")  # what no comparison goes without: by chance, and by L1 norms
TARGETS = (0.30, 0.45)
COLUMNS = ("ResNet", "method", "seeds", "acc. before, %", "acc. after, %", "change", "FLOPs ↓, %", "params ↓, %")

_OURS = ("paper", "ensemble", "pairs", "portfolio")  # how the names of methods begin that are no rivals


@dataclass(frozen=True)
class Published:
    """A line of the paper's table; all in per cent."""

    who: str
    method: str  # what it is called here
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


def table3_text(by_depth: Mapping[int, Sequence[Row]]) -> str:
    """All depths that have rows as Markdown, a table for each budget, and what that says beside the published figures."""
    for rows in by_depth.values():
        check_comparable(rows)
    known = {depth: rows for depth, rows in sorted(by_depth.items()) if rows}
    if not known:
        return "No row is there yet.\n"
    parts = []
    for budget in dict.fromkeys(name for rows in known.values() for name in budgets_of(rows)):
        parts.append(markdown(table3_sheet(known, budget)))
        parts.append("\n".join(f"- {sentence}" for sentence in findings(known, budget)) + "\n")
    for depth, rows in known.items():
        parts.append(f"**ResNet-{depth}**\n\n" + "\n".join(f"- {sentence}" for sentence in conditions(rows)) + "\n")
    return "\n".join(parts)


def table3_sheet(by_depth: Mapping[int, Sequence[Row]], budget: str) -> Sheet:
    """The layout of the paper: published lines first, then what was made here, by the share of the MACs that was to go."""
    lines: list[tuple[str, ...]] = []
    words = ""
    for depth, rows in by_depth.items():
        here = [row for row in rows if row.budget_name == budget]
        if not here:
            continue
        words = words or budget_words(here[0].budget)
        lines += [_published(depth, line) for line in PAPER.get(depth, ())]
        for target, method in product(sorted({row.target for row in here}), methods_of(here)):
            made = [row for row in here if (row.target, row.method) == (target, method)]
            lines += [_measured(depth, made)] if made else []
    return Sheet(f"Table 3, budget {budget} ({words}); published figures first, then ours", COLUMNS, tuple(lines))


def findings(by_depth: Mapping[int, Sequence[Row]], budget: str) -> list[str]:
    """Who leads at each share, how the paper's method fares among its rivals, and how far it is from its published line."""
    sentences = []
    for depth, rows in by_depth.items():
        here = sorted((row for row in rows if row.budget_name == budget), key=lambda row: row.target)
        for target, group in groupby(here, key=lambda row: row.target):
            sentences.append(_standing(depth, target, list(group)))
        sentences += _against_the_paper(depth, here)
    return sentences


def _standing(depth: int, target: float, rows: Sequence[Row]) -> str:
    after = {method: _mean_after([row for row in rows if row.method == method]) for method in methods_of(rows)}
    ranked = sorted(after, key=lambda method: -after[method])
    order = ", ".join(f"{method} {100 * after[method]:.2f}" for method in ranked)
    told = f"ResNet-{depth}, {100 * target:g} % of the FLOPs: {order}."
    rivals = [method for method in ranked if not method.startswith(_OURS)]
    if "paper" in after and rivals:
        lead = 100 * (after["paper"] - after[rivals[0]])
        where = "ahead of" if lead >= 0 else "behind"
        told += f" The paper's method is {abs(lead):.2f} points {where} the best rival ({rivals[0]})."
    return told


def _against_the_paper(depth: int, rows: Sequence[Row]) -> list[str]:
    """The network of the paper's method nearest to the published share, beside the published change."""
    published = next((line for line in PAPER.get(depth, ()) if line.method == "paper"), None)
    ours = [row for row in rows if row.method == "paper"]
    if published is None or not ours:
        return []
    target = min({row.target for row in ours}, key=lambda share: abs(100 * share - published.flops))
    near = [row for row in ours if row.target == target]
    change = 100 * (_mean_after(near) - near[0].test.before)
    theirs = published.after - published.before
    verdict = "reached" if change >= theirs else f"missed by {theirs - change:.2f} points"
    removed = spread([row.macs.removed for row in near], 1)
    return [
        f"ResNet-{depth}, the paper's method: published {theirs:+.2f} points at {published.flops:g} % of the FLOPs; here "
        f"{change:+.2f} at {removed} %: {verdict}."
    ]


def _published(depth: int, line: Published) -> tuple[str, ...]:
    change = f"{line.after - line.before:+.2f}"
    figures = (f"{line.before:.2f}", f"{line.after:.2f}", change, f"{line.flops:.2f}", f"{line.parameters:.2f}")
    return (str(depth), f"{line.who}, published", NOTHING, *figures)


def _measured(depth: int, rows: Sequence[Row]) -> tuple[str, ...]:
    first = rows[0]
    mark = "" if all(row.reached for row in rows) else MISSED
    return (
        str(depth),
        f"{first.method}, {100 * first.target:g} %{mark}",
        str(len(rows)),
        f"{100 * first.test.before:.2f}",
        spread([row.test.after for row in rows]),
        f"{100 * (_mean_after(rows) - first.test.before):+.2f}",
        spread([row.macs.removed for row in rows]),
        spread([row.counted_weights.removed for row in rows]),
    )


def _mean_after(rows: Sequence[Row]) -> float:
    return sum(row.test.after for row in rows) / len(rows)
