"""The tables of lab/notes/training.md from the rows of `benchmarks.finetuning`: `python -m benchmarks.finetuning_page`.

Three of them: what the validation images chose for each start, what each setting changes on its own (pairs of trainings that
differ in nothing else), and every training.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.finetuning import LOSSES, PAGE, RATES, STARTS, UNTOUCHED, Row
from benchmarks.render import with_part
from secateurs._util.files import write_text
from secateurs_lab.compare.rows import read_rows

ROWS = Path(__file__).parents[1] / "results" / "finetuning" / "rows.jsonl"
COMMAND = "python -m benchmarks.finetuning_page"
NORMS = ("live", "frozen")
GRID = ("cross-entropy", "distillation")  # losses that all starts were trained by
SUBJECT = ("network", "target", "start", "precision", "epochs", "examples", "seed")  # what is trained, and for how long
SETTINGS = ("loss", "batchnorm", "rate", "averaged")


@dataclass(frozen=True)
class Change:
    """A training that has the settings `given`, against the one that is alike but for `instead`."""

    name: str
    given: Mapping[str, Any]
    instead: Mapping[str, Any]


def changes() -> Iterator[Change]:
    """One setting at a time."""
    for norm in NORMS:
        given = {"loss": "cross-entropy", "batchnorm": norm}
        yield Change(f"distillation for cross-entropy, {norm}", given, {"loss": "distillation"})
    for rate in RATES:
        yield Change(f"frozen for live, {rate:g}", {"batchnorm": "live", "rate": rate}, {"batchnorm": "frozen"})
    for low, high in pairwise(RATES):
        yield Change(f"{high:g} for {low:g}, live", {"batchnorm": "live", "rate": low}, {"rate": high})
    yield Change("averaged weights for the last", {"averaged": False}, {"averaged": True})


def gains(rows: Iterable[Row], change: Change) -> tuple[list[float], int]:
    """Points of test accuracy that the change is worth in each pair of rows, and in how many of them it makes training fail."""
    known = {_fields(row, (*SUBJECT, *SETTINGS)): row for row in rows}
    found, failed = list[float](), 0
    for row in known.values():
        if any(getattr(row, name) != value for name, value in change.given.items()):
            continue
        other = known.get(tuple(change.instead.get(name, getattr(row, name)) for name in (*SUBJECT, *SETTINGS)))
        if other is None or _failed(row):
            continue
        if _failed(other):
            failed += 1
        else:
            found.append(100 * ((other.test_after or 0.0) - (row.test_after or 0.0)))
    return found, failed


def _failed(row: Row) -> bool:
    """Whether the training diverged, or left less than half of the untouched network's right answers."""
    return row.test_after is None or row.test_after < row.test_dense / 2


def changes_table(rows: Sequence[Row]) -> str:
    """What each setting changes for the cut networks, by network and share."""
    lines = ["| network | MACs ↓ | change | pairs | ahead | mean | range | failed |", "| --- " * 8 + "|"]
    for network, target in dict.fromkeys((row.network, row.target) for row in rows):
        here = [row for row in rows if (row.network, row.target) == (network, target)]
        for change in changes():
            found, failed = gains(here, change)
            if found or failed:
                ahead = sum(gain > 0 for gain in found)
                size = f"{mean(found):+.2f} | {min(found):+.2f} to {max(found):+.2f}" if found else "– | –"
                count = len(found) + failed
                lines.append(f"| {network} | {target:.0%} | {change.name} | {count} | {ahead} | {size} | {failed or '–'} |")
    return "\n".join(lines)


def chosen_table(rows: Sequence[Row]) -> str:
    """Each start before and after the training that the validation set likes best."""
    lines = ["| network | MACs ↓ | start | validation, % | test, % | by |", "| --- " * 6 + "|"]
    for group in _groups(rows):
        best = max(group, key=lambda row: row.validation_after or 0.0)
        weights = "averaged" if best.averaged else "last"
        lines.append(
            f"| {best.network} | {best.target:.0%} | {best.start} | {_way(best.validation_before, best.validation_after)} | "
            f"{_way(best.test_before, best.test_after)} | {best.loss}, {best.batchnorm}, {best.rate:g}, {weights} |"
        )
    return "\n".join(lines)


def every_table(rows: Sequence[Row]) -> str:
    """Test accuracies by rate; the best of a start by the validation set is bold."""
    rates = sorted({row.rate for row in rows})
    lines = [
        f"| network | MACs ↓ | start | before | loss | BatchNorm | {' | '.join(f'{rate:g}' for rate in rates)} |",
        "| --- " * (6 + len(rates)) + "|",
    ]
    for group in _groups(rows):
        best = max(row.validation_after or 0.0 for row in group)
        name = ", ".join(str(each) for each in (group[0].network, group[0].precision, group[0].examples) if each)
        for loss, norm in product(LOSSES, NORMS):
            here = sorted((row for row in group if (row.loss, row.batchnorm) == (loss, norm)), key=lambda row: row.averaged)
            if here:
                cells = [_cell([row for row in here if row.rate == rate], best) for rate in rates]
                start = f"{here[0].target:.0%} | {here[0].start} | {100 * mean(row.test_before for row in here):.2f}"
                lines.append(f"| {name} | {start} | {loss} | {norm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def render(rows: Sequence[Row]) -> str:
    """The generated part of the page."""
    rows = sorted(rows, key=lambda row: (row.network, row.target, _order(row.start), row.precision))
    grid = [
        row for row in rows if row.loss in GRID and row.rate in RATES and row.start in STARTS and row.precision == "bfloat16"
    ]
    return "\n\n".join(
        [
            "**What the validation images chose** for each start, of cross-entropy and distillation at the three rates:",
            chosen_table(grid),
            "**What each setting changes** for cut networks: points of test accuracy, over pairs of rows alike in all else:",
            changes_table([row for row in grid if row.start != UNTOUCHED]),
            "**Every training**, one epoch each: test accuracy with the weights of the last step / with their average.",
            every_table(rows),
        ]
    )


def _fields(row: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in names)


def _groups(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """Rows of the same subject together, in the order of their first."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(_fields(row, SUBJECT), []).append(row)
    return found.values()


def _order(start: str) -> tuple[int, str]:
    return STARTS.index(start) if start in STARTS else len(STARTS), start


def _cell(rows: Sequence[Row], best: float) -> str:
    """One training: the weights of the last step, then their average."""
    if not rows:
        return "–"
    shown = [(f"{100 * row.test_after:.2f}", row.validation_after == best) for row in rows if row.test_after is not None]
    return " / ".join(f"**{text}**" if wins else text for text, wins in shown) or "diverged"


def _way(before: float, after: float | None) -> str:
    return f"{100 * before:.2f} → " + ("diverged" if after is None else f"{100 * after:.2f}")


def main() -> int:
    text = render(read_rows(ROWS, Row))
    write_text(PAGE, with_part(PAGE.read_text(), COMMAND, text))
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
