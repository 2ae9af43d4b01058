"""Reports: a run folder as one self-contained page, several as a comparison, and the same figures as objects for notebooks."""

from secateurs.report.alignment import aligning_share
from secateurs.report.figure import Figure
from secateurs.report.plots import Plots, plots
from secateurs.report.reading import read_run
from secateurs.report.structure import describe
from secateurs.report.writing import write_report

__all__ = ["Figure", "Plots", "aligning_share", "describe", "plots", "read_run", "write_report"]
