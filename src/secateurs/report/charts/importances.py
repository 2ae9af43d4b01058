"""The importances of a site's filters, sorted, with error bars; kept and removed are told apart."""

from __future__ import annotations

import math

from secateurs.report.figure import SMALL_LETTER, Figure, Frame, Scale, axes, columns, legend, padded, square, ticks
from secateurs.report.markup import el, join, number
from secateurs.report.records import Ranking, StepRecord
from secateurs.report.words import plural, short

_WIDTH, _HEIGHT = 360.0, 232.0


def importances(step: StepRecord) -> Figure | None:
    """The figure of one step; None where its importances are not known."""
    ranking = step.ranking
    if ranking is None or not ranking.coef:
        return None
    order = sorted(range(len(ranking.coef)), key=lambda i: ranking.coef[i])
    gone = set(step.removed)
    frame = _frame(ranking)
    width = (frame.right - frame.left) / len(order)
    removed = [place for place, i in enumerate(order) if ranking.ids[i] in gone]
    kept = [place for place, i in enumerate(order) if ranking.ids[i] not in gone]
    coef = [ranking.coef[i] for i in order]
    errors = [ranking.stderr[i] for i in order] if ranking.stderr else []
    body = join(
        axes(
            frame,
            x_title="filters, least important first",
            y_title="importance",
            y_ticks=ticks(frame.y.low, frame.y.high),
            y_text=short,
        ),
        el("path", d=_bars(frame, width, kept, coef), class_="kept"),
        el("path", d=_bars(frame, width, removed, coef), class_="removed"),
        el("path", d=_error_bars(frame, width, errors, coef), class_="whisker"),
        legend(
            frame.right,
            [(square("removed"), f"removed {len(removed)}"), (square("kept"), f"kept {len(kept)}")],
            letter=SMALL_LETTER,
        ),
        columns(
            frame,
            [_tip(ranking, i, ranking.ids[i] in gone) for i in order],
            start=frame.left,
            step=width,
            summary=f"Filter {ranking.ids[order[0]]} counts least, filter {ranking.ids[order[-1]]} most",
        ),
    )
    words = f"Importances of {plural(len(order), 'filter')} of {step.site}, of which {len(removed)} were removed"
    return Figure("Importance of each filter", words, _WIDTH, _HEIGHT, body)


def _frame(ranking: Ranking) -> Frame:
    errors = ranking.stderr or (0.0,) * len(ranking.coef)
    reach = [e if math.isfinite(e) else 0.0 for e in errors]
    low, high = padded([0.0, *(c + s * e for c, e in zip(ranking.coef, reach, strict=True) for s in (-1, 1))], share=0.05)
    return Frame(Scale(0, 1, 50, _WIDTH - 4), Scale(low, high, _HEIGHT - 42, 26))


def _bars(frame: Frame, width: float, places: list[int], coef: list[float]) -> str:
    """All bars in one path: from zero to the importance, with a gap where there is room for one."""
    gap = min(width * 0.25, 2.0) if width > 3 else 0.0
    zero = frame.y(0.0)
    return "".join(
        f"M{number(frame.left + place * width + gap / 2)} {number(zero)}v{number(frame.y(coef[place]) - zero)}"
        f"h{number(width - gap)}V{number(zero)}z"
        for place in places
    )


def _error_bars(frame: Frame, width: float, errors: list[float], coef: list[float]) -> str:
    return "".join(
        f"M{number(frame.left + (place + 0.5) * width)} {number(frame.y(c - e))}V{number(frame.y(c + e))}"
        for place, (c, e) in enumerate(zip(coef, errors, strict=False))
        if math.isfinite(e)
    )


def _tip(ranking: Ranking, i: int, gone: bool) -> str:
    error = f" ± {short(ranking.stderr[i])}" if ranking.stderr else ""
    return f"filter {ranking.ids[i]}, {'removed' if gone else 'kept'}: {short(ranking.coef[i])}{error}"
