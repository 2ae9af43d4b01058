"""Figures on disk: the same bytes for the same figure."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from secateurs.files import write_bytes


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as `stem`.png and `stem`.svg; gives both paths."""
    files = []
    # without a fixed salt and date the same figure would be another file each time
    with matplotlib.rc_context({"svg.hashsalt": "secateurs", "svg.fonttype": "path"}):
        for kind, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, **options)
            files.append(stem.with_name(f"{stem.name}.{kind}"))
            write_bytes(files[-1], buffer.getvalue())
    return files
