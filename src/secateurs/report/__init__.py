"""Reports: a run folder as one self-contained page, several as a comparison, and the same figures as objects for notebooks."""

from secateurs.graph.latency import aligning_share
from secateurs.graph.structure import describe
from secateurs.report.charts.figure import Figure
from secateurs.report.load import read_run
from secateurs.report.write import Plots, plots, write_report

__all__ = ["Figure", "Plots", "aligning_share", "describe", "plots", "read_run", "write_report"]
