"""Reports: a run folder as one self-contained page, several as a comparison, and the same figures as objects for notebooks.

Names load when they are asked for, so that `report.progress` comes without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secateurs.report.charts import Plots, plots
    from secateurs.report.load import read_run, state_of, where_it_stands
    from secateurs.report.page import write_report
    from secateurs.report.svg import Figure

__all__ = ["Figure", "Plots", "plots", "read_run", "state_of", "where_it_stands", "write_report"]
_HOMES = {"Figure": "svg", "Plots": "charts", "plots": "charts", "write_report": "page"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'load')}"), name)
