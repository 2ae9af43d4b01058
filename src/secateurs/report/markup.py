"""HTML and SVG elements out of plain values: every text is escaped, whoever wrote it."""

from __future__ import annotations

import math
from html import escape
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
