"""Predicted against realised scores of an ensemble's masks: on the diagonal the linear model is right."""

from __future__ import annotations

from secateurs.report.figure import Figure, Frame, Scale, axes, line, padded, ticks
from secateurs.report.markup import el, join, number
from secateurs.report.records import StepRecord
from secateurs.report.words import plain, short

_WIDTH, _HEIGHT = 360.0, 232.0


def agreement(step: StepRecord) -> Figure | None:
    """The figure of one step; None where its masks and losses were not kept."""
    pairs = step.ranking.agreement if step.ranking else ()
    if not pairs:
        return None
    low, high = padded([v for pair in pairs for v in pair], share=0.04, least=1e-3)
    frame = Frame(Scale(low, high, 50, _WIDTH - 10), Scale(low, high, _HEIGHT - 42, 26))
    marks = ticks(low, high)
    # one path of round-capped lines of no length: a dot costs ten bytes
    dots = "".join(f"M{number(frame.x(p))} {number(frame.y(r))}h0" for p, r in pairs)
    body = join(
        axes(
            frame,
            x_title="score that the model predicts",
            y_title="realised score of each mask",
            x_ticks=marks,
            y_ticks=marks,
            x_text=lambda v: short(v),
            y_text=lambda v: short(v),
        ),
        line(frame.x(low), frame.y(low), frame.x(high), frame.y(high), "diagonal"),
        el("path", el("title", f"{len(pairs)} masks; on the line the prediction is right"), d=dots, class_="dots"),
    )
    words = f"{len(pairs)} masks of {step.site}; held-out r² {plain(step.r2)}"
    return Figure("Predicted against realised score", words, _WIDTH, _HEIGHT, body)
