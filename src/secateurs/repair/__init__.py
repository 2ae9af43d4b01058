"""Repair in closed form: readers of a cut site get the weights that best reproduce what they gave, by least squares.

In order: `prepare` the graph (a bias where there is none, an offset behind sums), `observe` a site over examples, `solve` the
`Reconstruction` for any choice of filters, `apply_` one of the repairs, compact. `repair_` does all but the first and the last.
When all cuts are made, `refit_` solves every layer once more against the original.
"""

from secateurs.repair.apply import apply_, prepare, repair_
from secateurs.repair.observe import observe
from secateurs.repair.reconstruction import Errors, Reconstruction, Repair
from secateurs.repair.refit import refit_

__all__ = ["Errors", "Reconstruction", "Repair", "apply_", "observe", "prepare", "refit_", "repair_"]
