"""A table of text, and its form in Markdown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sheet:
    """A table ready to print."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def markdown(sheet: Sheet) -> str:
    """The sheet as a Markdown table under a bold title."""
    lines = [sheet.columns, ("---",) * len(sheet.columns), *sheet.lines]
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in lines)
    return f"**{sheet.title}**\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in escaped)
