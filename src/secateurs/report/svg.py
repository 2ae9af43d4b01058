"""Drawing in SVG: elements, axes, and the marks that charts are made of. Every text is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeAlias

from markupsafe import Markup, escape

Child: TypeAlias = "Markup | str | None"
Symbol: TypeAlias = "Callable[[float], Markup]"  # draws a legend's symbol around an x
SMALL, MEDIUM = (360.0, 232.0), (540.0, 330.0)  # width and height of a figure at a site, and of one about a run
COLOURS = 8  # in figure.css

# ---- elements -----------------------------------------------------------------------------------------------------------


def el(tag: str, *children: Child, **attributes: str | int | float | None) -> Markup:
    """One element with its children: text is escaped, `Markup` is not, None is left out.

    `class_` is written class, `data_tips` data-tips. An attribute that is None is left out. Floats are coordinates (see
    `number`).
    """
    given = Markup("").join(
        Markup(' {}="{}"').format(
            name.removesuffix("_").replace("_", "-"), number(value) if isinstance(value, float) else value
        )
        for name, value in attributes.items()
        if value is not None
    )
    inside = join(*children)
    return Markup("<{0}{1}>{2}</{0}>").format(tag, given, inside) if inside else Markup("<{}{}/>").format(tag, given)


def join(*children: Child) -> Markup:
    """The children one after the other, as `el` treats them."""
    return Markup("").join(escape(child) for child in children if child is not None)


def number(value: float) -> str:
    """A coordinate to a tenth of a pixel: fine enough for a picture, and pages stay small."""
    return f"{value:.1f}".removesuffix(".0") if math.isfinite(value) else "0"


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return el("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def text(x: float, y: float, words: str, class_: str) -> Markup:
    """Words at a place; classes say how they are aligned."""
    return el("text", words, x=float(x), y=float(y), class_=class_)


def circle(x: float, y: float, radius: float, class_: str) -> Markup:
    """A point."""
    return el("circle", cx=float(x), cy=float(y), r=float(radius), class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str) -> Markup:
    """A rectangle."""
    return el("rect", x=float(x), y=float(y), width=float(width), height=float(height), class_=class_)


def mark(shape: Markup, tip: str) -> Markup:
    """A shape that shows `tip` when it is pointed at."""
    return el("g", shape, el("title", tip), class_="mark")


@dataclass(frozen=True)
class Figure:
    """A drawing with its title and a sentence for those who cannot see it; notebooks show it as it is."""

    title: str
    text: str
    width: float
    height: float
    body: Markup
    kind: str = ""  # a class for the style

    @property
    def svg(self) -> str:
        """The SVG with its own style: a file of its own, or a cell of a notebook."""
        style = el("style", Markup((files("secateurs.report") / "assets" / "figure.css").read_text()))
        return str(self._element(join(style, self.body), xmlns="http://www.w3.org/2000/svg"))

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        return self.svg

    def __html__(self) -> Markup:
        """The SVG for a page that brings the style: what templates show."""
        return self._element(self.body)

    def _element(self, body: Markup, xmlns: str | None = None) -> Markup:
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


# ---- axes ---------------------------------------------------------------------------------------------------------------


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """About `about` round values from `low` to `high`."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    step = 10 ** math.floor(math.log10(span / about))
    step *= next((m for m in (1, 2, 5, 10) if span / (step * m) <= about + 1), 10)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def digits(span: float) -> int:
    """Decimals that percentages on an axis of this span (a fraction) need."""
    return 0 if span > 0.04 else 1 if span > 0.004 else 2


def padded(values: Iterable[float], *, share: float = 0.08, least: float = 1e-9) -> tuple[float, float]:
    """The smallest and largest value with some room around them."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    room = max((high - low) * share, least)
    return low - room, high + room


@dataclass(frozen=True)
class Axis:
    """The values from one end of an axis to the other, its title and its ticks."""

    low: float
    high: float
    title: str = ""
    ticks: Sequence[float] = ()
    text: Callable[[float], str] = str


@dataclass(frozen=True)
class Dot:
    """A point of a curve."""

    x: float
    y: float
    tip: str
    class_: str = "point"
    radius: float = 4.0
    error: float = 0.0  # half the length of its error bar


class Plot:
    """A chart in the making: two axes, and marks in the order in which they are added."""

    def __init__(
        self,
        size: tuple[float, float],
        x: Axis,
        y: Axis,
        *,
        left: float = 52,
        right: float = 10,
        top: float = 26,
        bottom: float = 43,
    ) -> None:
        self.size, self.x_axis, self.y_axis = size, x, y
        self.left, self.right, self.top, self.bottom = left, size[0] - right, top, size[1] - bottom
        self._marks: list[Markup] = []
        for value in y.ticks:
            self.add(line(left, self.y(value), self.right, self.y(value), "grid"))
            self.add(text(left - 6, self.y(value), y.text(value), "tick end"))
        self.add(*(text(self.x(value), self.bottom + 14, x.text(value), "tick middle") for value in x.ticks))
        self.add(line(left, self.bottom, self.right, self.bottom, "axis"))
        self.add(text(self.right, self.bottom + 36, x.title, "name end") if x.title else None)
        self.add(text(2, top - 15, y.title, "name") if y.title else None)

    def x(self, value: float) -> float:
        """The pixel of a value."""
        return self.left + _share(value, self.x_axis) * (self.right - self.left)

    def y(self, value: float) -> float:
        """The pixel of a value."""
        return self.bottom - _share(value, self.y_axis) * (self.bottom - self.top)

    def add(self, *marks: Markup | None) -> None:
        """Add marks that the caller has drawn."""
        self._marks += [one for one in marks if one is not None]

    @property
    def body(self) -> Markup:
        """All marks."""
        return join(*self._marks)

    def figure(self, title: str, words: str) -> Figure:
        """The finished figure."""
        return Figure(title, words, *self.size, self.body, "" if self.size == SMALL else "medium")

    # ---- marks ----------------------------------------------------------------------------------------------------------

    def bars(self, values: Sequence[float], errors: Sequence[float], classes: Sequence[str]) -> None:
        """Bars from zero side by side, one path for each class, with error bars where the error is finite."""
        width = (self.right - self.left) / len(values)
        gap = min(width * 0.25, 2.0) if width > 3 else 0.0
        zero = self.y(0.0)
        for class_ in dict.fromkeys(classes):
            path = "".join(
                f"M{number(self.left + place * width + gap / 2)} {number(zero)}v{number(self.y(value) - zero)}"
                f"h{number(width - gap)}V{number(zero)}z"
                for place, value in enumerate(values)
                if classes[place] == class_
            )
            self.add(el("path", d=path, class_=class_))
        whiskers = "".join(
            f"M{number(self.left + (place + 0.5) * width)} {number(self.y(value - error))}V{number(self.y(value + error))}"
            for place, (value, error) in enumerate(zip(values, errors, strict=False))
            if math.isfinite(error)
        )
        self.add(el("path", d=whiskers, class_="whisker"))

    def curve(self, points: Sequence[tuple[float, float]], dots: Iterable[Dot] = (), class_: str = "way") -> None:
        """A line through the points, with the dots on it. What lies below the axis is clipped."""
        corners = " ".join(f"{number(self.x(x))},{number(self.y(y))}" for x, y in points)
        way = el("polyline", points=corners, class_=class_)
        if any(y < self.y_axis.low for _, y in points):
            box = [number(v) for v in (self.left, self.top - 2, self.right - self.left, self.bottom - self.top + 2)]
            way = el("svg", way, x=box[0], y=box[1], width=box[2], height=box[3], viewBox=" ".join(box))
        self.add(way)
        for dot in dots:
            x, y = self.x(dot.x), self.y(dot.y)
            if dot.error:
                low = max(dot.y - dot.error, self.y_axis.low)
                self.add(line(x, self.y(low), x, self.y(min(dot.y + dot.error, self.y_axis.high)), "whisker"))
            # a wider transparent ring is easier to hit
            self.add(mark(join(circle(x, y, max(dot.radius + 6, 9), "hit"), circle(x, y, dot.radius, dot.class_)), dot.tip))

    def scatter(self, points: Iterable[tuple[float, float]], tip: str | None = None, *, size: float = 4, class_: str) -> None:
        """Dots without tips of their own. One path of round-capped lines of no length: a dot costs ten bytes."""
        path = "".join(f"M{number(self.x(x))} {number(self.y(y))}h0" for x, y in points)
        # as a style: the page's own style would override an attribute
        self.add(
            el("path", None if tip is None else el("title", tip), d=path, class_=class_, style=f"stroke-width:{number(size)}")
        )

    def tips(self, tips: Sequence[str], summary: str, top: float | None = None) -> None:
        """A transparent rectangle over marks that stand side by side, with one tip for each; up to `top`."""
        top = self.top if top is None else top
        self.add(
            el(
                "rect",
                el("title", summary),
                x=float(self.left),
                y=float(top),
                width=float(self.right - self.left),
                height=float(self.bottom - top),
                class_="columns",
                data_start=float(self.left),
                data_step=f"{(self.right - self.left) / len(tips):.4g}",
                data_tips="|".join(tip.replace("|", "/") for tip in tips),
            )
        )

    def legend(self, *items: tuple[Symbol, str]) -> None:
        """Symbols with their words above the axes, flush right."""
        x = self.right
        for symbol, words in reversed(items):
            x -= len(words) * (6.3 if self.size == SMALL else 7.6)  # medium figures have larger letters on a phone
            self.add(symbol(x - 8), text(x, 11, words, "key"))
            x -= 26


def _share(value: float, axis: Axis) -> float:
    return (value - axis.low) / (axis.high - axis.low) if axis.high != axis.low else 0.5


def ring(class_: str) -> Symbol:
    """The legend's symbol of a point."""
    return lambda x: circle(x, 7.5, 4, class_)


def square(class_: str) -> Symbol:
    """The legend's symbol of a bar."""
    return lambda x: rect(x - 5, 3, 9, 9, class_)


def colour_of(place: int) -> str:
    """The class of the colour of a run or a method, by its place; those beyond the eighth have hollow points."""
    return f"{'hollow ' if place >= COLOURS else ''}r{place % COLOURS}"


@cache
def swatch(place: int) -> Markup:
    """The symbol in front of the name of a run or a method: as the points of its curve."""
    return el("svg", circle(6, 6, 4.5, f"point {colour_of(place)}"), class_="figure swatch", viewBox="0 0 12 12")
