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

from secateurs._util.format import SPACE

_PIPED_WIDTH = 160  # without a terminal rich folds at 80 columns, which cuts names of sites


def console(*, stderr: bool = False) -> Console:
    """The console for results, or for progress and warnings; of several workers only the first one's says anything."""
    follows = os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0"
    found = Console(stderr=stderr, highlight=False, quiet=follows)
    if not found.is_terminal and "COLUMNS" not in os.environ:
        found.width = _PIPED_WIDTH
    return found


def say(text: str, *, on: Console | None = None) -> None:
    """Print a line without markup, colours or folding, by default to stdout."""
    (on or console()).print(Text(text.replace(SPACE, " ")), soft_wrap=True)


def warn(text: str) -> None:
    """Print a warning to stderr."""
    say(f"Warning: {text}", on=console(stderr=True))


def print_json(document: Any) -> None:
    """Print one JSON document; what JSON cannot hold (NaN, infinities) becomes null."""
    say(json.dumps(_plain(document), indent=1, ensure_ascii=False, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int] = (0,)) -> None:
    """Print a table; the columns numbered in `left` are flush left, the others right."""
    shown = [[cell.replace(SPACE, " ") for cell in row] for row in rows]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        words = [word for text in (column, *(row[place] for row in shown)) for word in text.split()]
        longest = max(map(len, words), default=1)  # columns fold between words, not within them
        table.add_column(column, justify="left" if place in left else "right", overflow="fold", min_width=longest)
    for row in shown:
        table.add_row(*map(Text, row))
    console().print(table)


def percent(share: float, digits: int = 1) -> str:
    """A fraction as a percentage."""
    return f"{100 * share:.{digits}f} %"


def clock(seconds: float) -> str:
    """Seconds as 42 s, 3 min 05 s or 2 h 03 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
