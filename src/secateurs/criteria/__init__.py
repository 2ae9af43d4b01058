"""Other ways to rank a site's filters, a file each, all `(graph, site, data) → Importance`: the ensembles' rivals."""

from __future__ import annotations

from collections.abc import Mapping

from secateurs.criteria.batchnorm import batchnorm
from secateurs.criteria.common import Criterion
from secateurs.criteria.drawn import drawn
from secateurs.criteria.geometric_median import geometric_median
from secateurs.criteria.l1 import l1
from secateurs.criteria.l2 import l2
from secateurs.criteria.leave_one_out import leave_one_out
from secateurs.criteria.taylor import taylor
from secateurs.errors import InvalidInput, suggest

__all__ = ["CRITERIA", "Criterion", "criterion"]

CRITERIA: Mapping[str, Criterion] = {
    "random": drawn,
    "l1": l1,
    "l2": l2,
    "fpgm": geometric_median,
    "batchnorm": batchnorm,
    "taylor": taylor,
    "leave-one-out": leave_one_out,
}


def criterion(name: str) -> Criterion:
    """The criterion of that name, one of `CRITERIA`."""
    if name not in CRITERIA:
        raise InvalidInput(f"criterion: got {name!r}.{suggest(name, CRITERIA)}")
    return CRITERIA[name]
