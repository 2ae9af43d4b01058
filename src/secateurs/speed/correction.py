"""Savings that tables predict, brought to those that networks were measured to have. Pure maths."""

from __future__ import annotations

import math
from collections.abc import Sequence

_APART = 0.02  # predicted savings that are nearer than that tell of one place
_TINY = 1e-9


class Correction:
    """The saving to expect where one is predicted: as measured at the networks that were timed, by straight lines between them.

    `timed` are pairs of a predicted and a measured saving, shares of the original network's time, the latest last; of two that
    are close the later counts.
    """

    def __init__(self, timed: Sequence[tuple[float, float]] = ()) -> None:
        points = list[tuple[float, float]]()
        for predicted, measured in timed:
            points = [point for point in points if abs(point[0] - predicted) >= _APART]
            if predicted > 0:
                points.append((predicted, min(max(measured, 0.0), 1 - _TINY)))
        self.points = sorted(points)

    def __call__(self, predicted: float) -> float:
        """The saving to expect."""
        if not self.points:
            return predicted
        below = [point for point in self.points if point[0] <= predicted]
        above = [point for point in self.points if point[0] > predicted]
        if not below or not above:
            return _through((below[-1] if below else above[0]), predicted)
        (first, saved), (last, saved_last) = below[-1], above[0]
        return saved + (predicted - first) / (last - first) * (saved_last - saved)


def _through(point: tuple[float, float], predicted: float) -> float:
    """The saving on the curve through nothing and a point.

    Where less was saved than predicted, it is a line. Where it was more, it is a power of the time that is left: however much
    is saved, some is left.
    """
    first, measured = point
    if measured <= first:
        return predicted * measured / first
    power = math.log(1 - measured) / math.log(1 - first)
    return 1 - math.pow(max(1 - predicted, _TINY), power)
