"""A table of text, and its form in Markdown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sheet:
    """A table ready to print."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return a Markdown table under a bold title."""
        lines = [self.columns, ("---",) * len(self.columns), *self.lines]
        escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in lines)
        return f"**{self.title}**\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in escaped)
