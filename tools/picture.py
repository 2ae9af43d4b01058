"""Draws what a run kept of each layer, and its accuracy over the run: python tools/picture.py RUN OUT.svg"""

from __future__ import annotations

import sys
from pathlib import Path

from markupsafe import Markup

from secateurs.report import Figure, plots
from secateurs.report.svg import el, join

GAP = 24.0


def draw(run: Path, out: Path) -> None:
    """Write the widths of the layers above the timeline and the frontier as one SVG."""
    shown = plots(run)
    widths, timeline, frontier = shown.widths(), shown.timeline(), shown.frontier()
    width = max(widths.width, timeline.width + GAP + frontier.width)
    below = widths.height + GAP
    body = join(
        placed(widths, (width - widths.width) / 2, 0.0),
        placed(timeline, 0.0, below),
        placed(frontier, width - frontier.width, below),
    )
    text = ". ".join(figure.text for figure in (widths, timeline, frontier))
    out.write_text(
        Figure("The network before and after, and the run over time", text, width, below + timeline.height, body).svg
    )


def placed(figure: Figure, x: float, y: float) -> Markup:
    """A figure at a place of a larger one."""
    box = f"0 0 {figure.width:.0f} {figure.height:.0f}"
    return el(
        "svg", figure.body, x=x, y=y, width=float(figure.width), height=float(figure.height), viewBox=box, overflow="visible"
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
