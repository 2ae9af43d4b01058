"""Drawing in SVG: elements, axes, and the three marks that charts are made of: bars, curves, dots. Every text is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from markupsafe import Markup, escape

SMALL, MEDIUM = (360.0, 232.0), (540.0, 330.0)  # width and height of a figure at a site, and of one about a run
COLOURS = 8  # in figure.css

# ---- elements -----------------------------------------------------------------------------------------------------------


def el(tag: str, *children: Markup | str | None, **attributes: str | float | None) -> Markup:
    """One element with its children: text is escaped, `Markup` is not, None is left out.

    `class_` is written class, `data_tips` data-tips. An attribute that is None is left out. Numbers are coordinates (see
    `number`).
    """
    given = Markup("").join(
        Markup(' {}="{}"').format(name.removesuffix("_").replace("_", "-"), value if isinstance(value, str) else number(value))
        for name, value in attributes.items()
        if value is not None
    )
    inside = join(*children)
    return Markup("<{0}{1}>{2}</{0}>").format(tag, given, inside) if inside else Markup("<{}{}/>").format(tag, given)


def join(*children: Markup | str | None) -> Markup:
    """The children one after the other, as `el` treats them."""
    return Markup("").join(escape(child) for child in children if child is not None)


def number(value: float) -> str:
    """A coordinate to a tenth of a pixel: fine enough for a picture, and pages stay small."""
    return f"{value:.1f}".removesuffix(".0") if math.isfinite(value) else "0"


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return el("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def text(x: float, y: float, words: str, class_: str) -> Markup:
    """Words at a place; classes say how they are aligned."""
    return el("text", words, x=x, y=y, class_=class_)


def circle(x: float, y: float, radius: float, class_: str) -> Markup:
    """A point."""
    return el("circle", cx=x, cy=y, r=radius, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str) -> Markup:
    """A rectangle."""
    return el("rect", x=x, y=y, width=width, height=height, class_=class_)


def mark(shape: Markup, tip: str) -> Markup:
    """A shape that shows `tip` when it is pointed at."""
    return el("g", shape, el("title", tip), class_="mark")


def swatch(place: int) -> Markup:
    """The symbol in front of the name of a run or a method: as the points of its curve."""
    return el("svg", circle(6, 6, 4.5, f"point {colour_of(place)}"), class_="figure swatch", viewBox="0 0 12 12")


def colour_of(place: int) -> str:
    """The class of the colour of a run or a method, by its place; those beyond the eighth have hollow points."""
    return f"{'hollow ' if place >= COLOURS else ''}r{place % COLOURS}"


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

    _repr_html_ = _repr_svg_

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


def padded(values: Iterable[float], *, share: float = 0.08, least: float = 1e-9) -> tuple[float, float]:
    """The smallest and largest value with some room around them."""
    finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    room = max((high - low) * share, least)
    return low - room, high + room


@dataclass(frozen=True)
class Axis:
    """The values from one end of an axis to the other, its title, and its ticks: none without a `text` for their values.

    `text` gets a value, and the decimals that percentages on this axis need. `at` are the ticks; None: about `about` of them.
    """

    low: float
    high: float
    title: str = ""
    text: Callable[[float, int], str] | None = None
    about: int = 4
    at: Sequence[float] | None = None

    def labels(self) -> list[tuple[float, str]]:
        """The ticks and their texts."""
        if self.text is None:
            return []
        span = self.high - self.low
        digits = 0 if span > 0.04 else 1 if span > 0.004 else 2
        return [(v, self.text(v, digits)) for v in (ticks(self.low, self.high, self.about) if self.at is None else self.at)]

    def share(self, value: float) -> float:
        """Where a value lies between both ends, from 0 to 1."""
        return (value - self.low) / (self.high - self.low) if self.high != self.low else 0.5


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
        left: float = 54,
        right: float = 12,
        top: float = 26,
        bottom: float = 43,
    ) -> None:
        self.size, self.x_axis, self.y_axis = size, x, y
        self.left, self.right, self.top, self.bottom = left, size[0] - right, top, size[1] - bottom
        self.marks: list[Markup] = []
        for value, words in y.labels():
            self.add(line(left, self.y(value), self.right, self.y(value), "grid"))
            self.add(text(left - 6, self.y(value), words, "tick end"))
        self.add(*(text(self.x(value), self.bottom + 14, words, "tick middle") for value, words in x.labels()))
        self.add(line(left, self.bottom, self.right, self.bottom, "axis"))
        titles = ((self.right, self.bottom + 36, x.title, "name end"), (2, top - 15, y.title, "name"))
        self.add(*(text(*title) for title in titles if title[2]))

    def x(self, value: float) -> float:
        """The pixel of a value."""
        return self.left + self.x_axis.share(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        """The pixel of a value."""
        return self.bottom - self.y_axis.share(value) * (self.bottom - self.top)

    def add(self, *marks: Markup) -> None:
        """Add marks that the caller has drawn."""
        self.marks += marks

    def figure(self, title: str, words: str) -> Figure:
        """The finished figure."""
        return Figure(title, words, *self.size, join(*self.marks), "" if self.size == SMALL else "medium")

    # ---- marks ----------------------------------------------------------------------------------------------------------

    def level(self, value: float, class_: str, words: str = "") -> None:
        """A line across, at a value of y."""
        at = self.y(value)
        self.add(line(self.left, at, self.right, at, class_))
        if words:
            self.add(text(self.right, at - 5, words, "note end"))

    def chosen(self, value: float, words: str) -> None:
        """A line from top to bottom with its words beside it, at a value of x."""
        x = self.x(value)
        left = x > self.right - 60
        self.add(line(x, self.top, x, self.bottom, "chosen"))
        self.add(text(x - 8 if left else x + 8, self.top + 10, words, "note strong end" if left else "note strong"))

    def bars(self, values: Sequence[float], errors: Sequence[float], classes: Sequence[str]) -> None:
        """Bars from zero side by side, one path for each class, with error bars where the error is finite."""
        width = (self.right - self.left) / len(values)
        gap = min(width * 0.25, 2.0) if width > 3 else 0.0
        zero, shapes = self.y(0.0), dict.fromkeys((*classes, "whisker"), "")
        for place, (value, error, class_) in enumerate(zip(values, errors, classes, strict=True)):
            left, height = number(self.left + place * width + gap / 2), number(self.y(value) - zero)
            shapes[class_] += f"M{left} {number(zero)}v{height}h{number(width - gap)}V{number(zero)}z"
            if error and math.isfinite(error):
                middle, ends = number(self.left + (place + 0.5) * width), (self.y(value - error), self.y(value + error))
                shapes["whisker"] += f"M{middle} {number(ends[0])}V{number(ends[1])}"
        self.add(*(el("path", d=path, class_=class_) for class_, path in shapes.items()))

    def curve(self, points: Sequence[tuple[float, float]], dots: Iterable[Dot] = (), class_: str = "way") -> None:
        """A line through the points, with the dots on it. What lies below the axis is clipped."""
        way = el("polyline", points=" ".join(f"{number(self.x(x))},{number(self.y(y))}" for x, y in points), class_=class_)
        if any(y < self.y_axis.low for _, y in points):
            box = [number(v) for v in (self.left, self.top - 2, self.right - self.left, self.bottom - self.top + 2)]
            way = el("svg", way, x=box[0], y=box[1], width=box[2], height=box[3], viewBox=" ".join(box))
        self.add(way)
        for dot in dots:
            x, y = self.x(dot.x), self.y(dot.y)
            if dot.error:
                ends = max(dot.y - dot.error, self.y_axis.low), min(dot.y + dot.error, self.y_axis.high)
                self.add(line(x, self.y(ends[0]), x, self.y(ends[1]), "whisker"))
            # a wider transparent ring is easier to hit
            self.add(mark(join(circle(x, y, max(dot.radius + 6, 9), "hit"), circle(x, y, dot.radius, dot.class_)), dot.tip))

    def dots(self, points: Iterable[tuple[float, float]], class_: str, size: float = 4) -> None:
        """Dots without tips. One path of round-capped lines of no length: a dot costs ten bytes."""
        path = "".join(f"M{number(self.x(x))} {number(self.y(y))}h0" for x, y in points)
        # as a style: the page's own style would override an attribute
        self.add(el("path", d=path, class_=class_, style=f"stroke-width:{number(size)}"))

    def tips(self, tips: Sequence[str], summary: str, top: float | None = None) -> None:
        """A transparent rectangle over marks that stand side by side, with one tip for each; up to `top`."""
        top = self.top if top is None else top
        area = el(
            "rect",
            el("title", summary),
            x=self.left,
            y=top,
            width=self.right - self.left,
            height=self.bottom - top,
            class_="columns",
            data_start=self.left,
            data_step=f"{(self.right - self.left) / len(tips):.4g}",
            data_tips="|".join(tip.replace("|", "/") for tip in tips),
        )
        self.add(area)

    def legend(self, *items: tuple[str, str]) -> None:
        """Classes and words above the axes, flush right: a line for "allowed", a circle for a point, else a square."""
        x = self.right
        for class_, words in reversed(items):
            x -= len(words) * (6.3 if self.size == SMALL else 7.6)  # medium figures have larger letters on a phone
            if class_ == "allowed":
                self.add(line(x - 20, 7.5, x - 4, 7.5, class_))
            else:
                self.add(circle(x - 8, 7.5, 4, class_) if "point" in class_ else rect(x - 13, 3, 9, 9, class_))
            self.add(text(x, 11, words, "key"))
            x -= 26
