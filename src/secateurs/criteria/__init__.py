"""Other ways to rank a site's filters, a file each, all `(graph, site, data) → Importance`: the ensembles' rivals."""

from __future__ import annotations

from collections.abc import Mapping

from secateurs.criteria.filters import Criterion
from secateurs.criteria.leave_one_out import leave_one_out
from secateurs.criteria.magnitude import batchnorm, geometric_median, l1, l2, random_scores
from secateurs.criteria.taylor import taylor
from secateurs.errors import InvalidInput, suggest

__all__ = ["CRITERIA", "Criterion", "criterion"]

CRITERIA: Mapping[str, Criterion] = {
    "random": random_scores,
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
