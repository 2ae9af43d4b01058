"""HTML and SVG elements out of plain values: every text is escaped, whoever wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import TypeAlias

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})
_SHAPES = frozenset({"circle", "line", "path", "polyline", "rect"})


class Html(str):
    """Text that is markup already: it goes into a page as it is."""

    __slots__ = ()


Child: TypeAlias = "Html | str | int | float | None"
Attribute: TypeAlias = "str | int | float | bool | None"


def el(tag: str, *children: Child, **attributes: Attribute) -> Html:
    """One element with its children; text is escaped, `Html` is not, None is left out.

    `class_` is written class, `data_tips` data-tips. An attribute that is True stands alone; one that is None or False is
    left out. Floats are coordinates (see `number`).
    """
    given = "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in _VOID:
        return Html(f"<{tag}{given}>")
    if tag in _SHAPES and not children:
        return Html(f"<{tag}{given}/>")
    return Html(f"<{tag}{given}>{join(*children)}</{tag}>")


def join(*children: Child) -> Html:
    """The children one after the other, as `el` treats them."""
    return Html("".join(_child(child) for child in children if child is not None))


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel: fine enough for a picture, and pages stay small."""
    return f"{value:.1f}".removesuffix(".0") if math.isfinite(value) else "0"


def _child(child: Html | str | int | float) -> str:
    return child if isinstance(child, Html) else escape(str(child), quote=False)


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    written = name.removesuffix("_").replace("_", "-")
    if value is True:
        return f" {written}"
    text = number(value) if isinstance(value, float) else str(value)
    return f' {written}="{escape(text)}"'


Symbol: TypeAlias = "Callable[[float], Html]"  # draws a legend's symbol around an x
WIDE_LETTER, SMALL_LETTER = 7.6, 6.3  # pixels a character may need: figures of medium width have larger letters on a phone


@dataclass(frozen=True)
class Figure:
    """A drawing with its title and a sentence for those who cannot see it; notebooks show it as it is."""

    title: str
    text: str
    width: float
    height: float
    body: Html
    kind: str = ""  # a class for the style

    @property
    def svg(self) -> str:
        """The SVG with its own style: a file of its own, or a cell of a notebook."""
        return str(self._element(join(el("style", Html(asset("figure.css"))), self.body), xmlns="http://www.w3.org/2000/svg"))

    @property
    def inline(self) -> Html:
        """The SVG for a page that brings the style."""
        return self._element(self.body)

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return self.svg

    def _element(self, body: Html, xmlns: str | None = None) -> Html:
        return el(
            "svg",
            body,
            xmlns=xmlns,
            class_=f"figure {self.kind}".strip(),
            viewBox=f"0 0 {number(self.width)} {number(self.height)}",
            width=round(self.width),
            height=round(self.height),
            role="img",
            aria_label=f"{self.title}. {self.text}",
        )


@cache
def asset(name: str) -> str:
    """A file that the report carries inside: style, script, the page's frame."""
    return (files("secateurs.report") / "assets" / name).read_text()


@dataclass(frozen=True)
class Scale:
    """A straight line from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value; what lies outside is put on the edge."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + min(max(share, -0.02), 1.02) * (self.end - self.start)


@dataclass(frozen=True)
class Frame:
    """The rectangle that marks are drawn in, with both scales."""

    x: Scale
    y: Scale

    @property
    def left(self) -> float:
        """Of the rectangle."""
        return self.x.start

    @property
    def right(self) -> float:
        """Of the rectangle."""
        return self.x.end

    @property
    def top(self) -> float:
        """Of the rectangle."""
        return self.y.end

    @property
    def bottom(self) -> float:
        """Of the rectangle."""
        return self.y.start

    def points(self, values: Iterable[tuple[float, float]]) -> str:
        """Corners of a polyline."""
        return " ".join(f"{number(self.x(x))},{number(self.y(y))}" for x, y in values)


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values from `low` to `high`, about so many."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    step = 10 ** math.floor(math.log10(span / about))
    step *= next((m for m in (1, 2, 5, 10) if span / (step * m) <= about + 1), 10)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def digits(span: float) -> int:
    """Digits behind the point that percentages on an axis of this span (a fraction) need."""
    return 0 if span > 0.04 else 1 if span > 0.004 else 2


def padded(values: Iterable[float], *, share: float = 0.08, least: float = 1e-9) -> tuple[float, float]:
    """The smallest and largest value with some room around them."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    room = max((high - low) * share, least)
    return low - room, high + room


def axes(
    frame: Frame,
    *,
    x_title: str,
    y_title: str,
    x_ticks: Sequence[float] = (),
    y_ticks: Sequence[float] = (),
    x_text: Callable[[float], str] = str,
    y_text: Callable[[float], str] = str,
) -> Html:
    """Grid lines, tick labels and the titles of both axes: below at the right end, and above at the left."""
    rows = [
        join(
            line(frame.left, frame.y(v), frame.right, frame.y(v), "grid"),
            text(frame.left - 6, frame.y(v), y_text(v), "tick end"),
        )
        for v in y_ticks
    ]
    columns_ = [text(frame.x(v), frame.bottom + 14, x_text(v), "tick middle") for v in x_ticks]
    base = line(frame.left, frame.bottom, frame.right, frame.bottom, "axis")
    titles = join(
        text(frame.right, frame.bottom + 36, x_title, "name end") if x_title else None,
        text(2, 11, y_title, "name") if y_title else None,
    )
    return join(*rows, *columns_, base, titles)


def legend(right: float, items: Sequence[tuple[Symbol, str]], *, letter: float) -> Html:
    """Symbols with their words above the frame, flush right at about `letter` pixels a character."""
    drawn = []
    x = right
    for symbol, words in reversed(items):
        x -= len(words) * letter
        drawn.append(join(symbol(x - 8), text(x, 11, words, "key")))
        x -= 26
    return join(*drawn)


def ring(class_: str) -> Symbol:
    """The symbol of a point."""
    return lambda x: el("circle", cx=x, cy=7.5, r=4, class_=class_)


def square(class_: str) -> Symbol:
    """The symbol of a bar."""
    return lambda x: el("rect", x=x - 5, y=3.0, width=9, height=9, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    """A straight line."""
    return el("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def text(x: float, y: float, words: str, class_: str, **attributes: str) -> Html:
    """Words at a place; classes say how they are aligned."""
    return el("text", words, x=float(x), y=float(y), class_=class_, **attributes)


def mark(shape: Html, tip: str) -> Html:
    """A shape that tells `tip` when it is pointed at."""
    return el("g", shape, el("title", tip), class_="mark")


def dot(x: float, y: float, radius: float, class_: str) -> Html:
    """A point, with a wider transparent ring that is easier to hit."""
    return join(
        el("circle", cx=float(x), cy=float(y), r=float(max(radius + 6, 9)), class_="hit"),
        el("circle", cx=float(x), cy=float(y), r=float(radius), class_=class_),
    )


def columns(frame: Frame, tips: Sequence[str], *, start: float, step: float, summary: str) -> Html:
    """The transparent rectangle over marks that stand `step` pixels apart from `start` on, with one tip for each."""
    return el(
        "rect",
        el("title", summary),
        x=float(frame.left),
        y=float(frame.top),
        width=float(frame.right - frame.left),
        height=float(frame.bottom - frame.top),
        class_="columns",
        data_start=float(start),
        data_step=f"{step:.4g}",
        data_tips="|".join(tip.replace("|", "/") for tip in tips),
    )
