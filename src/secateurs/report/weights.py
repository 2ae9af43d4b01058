"""How wide every layer was and is: the shapes of the weights at the start and of the latest network, without loading them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from secateurs.report.records import Layer
from secateurs.report.structure import Node
from secateurs.tensorfile import Damaged, read_header

_Shapes = dict[str, tuple[int, ...]]


def layers_of(folder: Path, nodes: Sequence[Node], cuts: Sequence[int], notes: list[str]) -> tuple[Layer, ...]:
    """Every layer of the network in the order of its picture, or of the names where there is no picture.

    `cuts` are the numbers of the steps that removed something. A layer that the latest network no longer has was folded away:
    nothing is left of it.
    """
    before = _shapes(folder / "checkpoints/start.safetensors", notes)
    if before is None:
        return ()
    latest = [
        folder / "pruned.safetensors",
        *(folder / f"checkpoints/{n:04d}.safetensors" for n in sorted(cuts, reverse=True)),
    ]
    found = next((path for path in latest if path.exists()), None)
    if found is None and cuts:
        notes.append("checkpoints/: the network after the latest cut is missing: the widths of the layers are not shown.")
        return ()
    after = before if found is None else _shapes(found, notes)
    if after is None:
        return ()
    pictured = {node.name: node for node in nodes if node.is_layer}
    names = [name for name in pictured if f"{name}.weight" in before]
    if pictured and not names:
        notes.append("checkpoints/start.safetensors: not the network of this run: the widths of the layers are not shown.")
        return ()
    if not names:
        weights = [name for name, shape in before.items() if name.endswith(".weight") and len(shape) > 1]
        names = sorted((name.removesuffix(".weight") for name in weights), key=_natural)
    return tuple(_layer(name, pictured.get(name), before, after) for name in dict.fromkeys(names))


def _layer(name: str, node: Node | None, before: _Shapes, after: _Shapes) -> Layer:
    had = before[f"{name}.weight"]
    has = after.get(f"{name}.weight", (0,) * len(had))
    axis = 0 if node is None or node.axis >= min(len(had), len(has)) else node.axis
    filters = had[axis] if node is None else node.filters
    left = round(filters * has[axis] / had[axis]) if had[axis] else 0
    return Layer(name, filters, left, math.prod(had), math.prod(has), None if node is None else node.macs)


def _shapes(path: Path, notes: list[str]) -> _Shapes | None:
    try:
        return read_header(path)[1]
    except (OSError, Damaged) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        notes.append(f"{path.parent.name}/{path.name}: {what}: the widths of the layers are not shown.")
        return None


def _natural(name: str) -> list[tuple[int, str]]:
    """conv2 before conv10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
