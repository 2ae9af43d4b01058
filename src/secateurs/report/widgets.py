"""Pieces that several sections of the page are built from: tables, tiles, figures, blocks that can be copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from secateurs.report.charts.figure import Child, Figure, Html, el, join


def section(name: str, title: str, lead: str, *children: Child) -> Html:
    """A part of the page with an anchor, a heading and a line that says how to read it."""
    return el("section", el("h2", title), el("p", lead) if lead else None, *children, id=name)


def figure(drawn: Figure | None, caption: str | None = None, *, wide: bool = False) -> Html | None:
    """A figure; a wide one scrolls inside its panel."""
    if drawn is None:
        return None
    shown = el("div", drawn.inline, class_="wide", tabindex="0") if wide else drawn.inline
    return el("figure", shown, el("figcaption", caption) if caption else None)


def panel(*children: Child) -> Html:
    """A white box."""
    return el("div", *children, class_="panel")


def table(columns: Sequence[str], rows: Iterable[Sequence[Child]], last: Sequence[Child] | None = None) -> Html:
    """A table that scrolls inside its box: the first column flush left, numbers flush right, `last` as a total."""
    head = el("thead", el("tr", *(el("th", name) for name in columns)))
    body = el("tbody", *(el("tr", *(el("td", cell) for cell in row)) for row in rows))
    foot = None if last is None else el("tfoot", el("tr", *(el("td", cell) for cell in last)))
    return el("div", el("table", head, body, foot), class_="scroll", tabindex="0")


def copyable(child: Html) -> Html:
    """A table or a block of code that the page's script gives a button."""
    return el("div", child, class_="copyable table" if "<table" in child else "copyable")


def code(text: str) -> Html:
    """Lines to be copied."""
    return copyable(el("pre", text))


def facts(pairs: Iterable[tuple[str, Child]], class_: str = "facts") -> Html:
    """Names and values side by side; a value of None is left out."""
    shown = [(name, value) for name, value in pairs if value is not None]
    if class_ == "facts":
        return el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in shown), class_=class_)
    return el("dl", *(join(el("dt", name), el("dd", value)) for name, value in shown), class_=class_)


def tile(name: str, big: str, *small: str, share_left: float | None = None) -> Html:
    """A figure that matters, with what it was; a bar shows the share that is left."""
    meter = None
    if share_left is not None:
        width = f"width:{100 * min(max(share_left, 0.0), 1.0):.1f}%"
        meter = el("dd", el("i", style=width), class_="meter")
    lines = [el("dd", one, class_="from") for one in small if one]
    return el("div", el("dt", name), el("dd", big, class_="big"), meter, *lines, class_="tile")


def warnings(sentences: Iterable[str]) -> Html:
    """One box for each sentence."""
    return join(*(el("p", sentence, class_="warning") for sentence in sentences))
