"""Where output goes: results (or one JSON document) to stdout, progress and warnings to stderr."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPED_WIDTH = 160  # rich folds at 80 columns where there is no terminal: names of sites would be cut


def stdout() -> Console:
    """The console for results."""
    return _console(stderr=False)


def stderr() -> Console:
    """The console for progress and warnings."""
    return _console(stderr=True)


def say(text: str, *, console: Console | None = None) -> None:
    """Print a line as it is: no markup, no colours, no folding."""
    (console or stdout()).print(Text(text), soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    say(f"Warning: {text}", console=stderr())


def print_json(document: Any) -> None:
    """Print one JSON document; what JSON cannot hold (NaN, infinities) becomes null."""
    stdout().print(Text(json.dumps(_plain(document), indent=1, ensure_ascii=False, allow_nan=False)), soft_wrap=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)) -> None:
    """Print a table; the columns numbered in `left` are flush left, the others right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    stdout().print(table)


def percent(share: float, digits: int = 1) -> str:
    """A fraction as a percentage."""
    return f"{100 * share:.{digits}f} %"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
