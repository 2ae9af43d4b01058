"""Layers of torch.nn as the calls that build them anew, and the containers around them."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.errors import UnsupportedOp
from secateurs.export.source_text import Call, Expression, is_same, value
from secateurs.graph import ruled_class

SIZES = ("kernel_size", "stride", "padding", "dilation", "output_padding")  # (3, 3) is written 3
UNWRITTEN = ("device", "dtype")


def constructor(layer: nn.Module, where: str) -> Call:
    """The call that builds a layer like `layer`, weights aside; `UnsupportedOp` names the node where there is none."""
    kind = type(layer) if _is_torchs(type(layer)) else ruled_class(type(layer))
    if kind is None or not _is_torchs(kind):
        raise _unwritable(layer, where, "is not a layer of torch.nn")
    given = inspect.signature(kind).parameters.values()
    parameters = [p for p in given if p.name not in UNWRITTEN and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    chosen = {p.name: _setting(layer, p, where) for p in parameters}
    _check_same(layer, kind, chosen, where)
    args: list[tuple[str, Expression]] = []
    for p in parameters:
        found = chosen[p.name]
        required = p.default is p.empty
        implied = p.name == "stride" and p.default is None and found == chosen.get("kernel_size")
        if required or not (implied or is_same(found, p.default)):
            args.append(("" if required else f"{p.name}=", _spelled(found, layer, where)))
    return Call(f"nn.{kind.__name__}", tuple(args))


def _is_torchs(kind: type[nn.Module]) -> bool:
    return getattr(nn, kind.__name__, None) is kind


def _setting(layer: nn.Module, parameter: inspect.Parameter, where: str) -> Any:
    """What `parameter` was when the layer was built: layers keep their settings under the same names."""
    found = getattr(layer, parameter.name, parameter.default)
    if found is parameter.empty:
        raise _unwritable(layer, where, f"does not keep its setting {parameter.name!r}")
    if isinstance(parameter.default, bool) and (isinstance(found, Tensor) or found is None):
        return found is not None  # bias=True has become a tensor
    if parameter.name in SIZES and isinstance(found, tuple) and len(found) > 1 and len(set(found)) == 1:
        return found[0]
    return found


def _check_same(layer: nn.Module, kind: type[nn.Module], chosen: Mapping[str, Any], where: str) -> None:
    """A layer built anew must have the same tensors and print the same: settings may be kept under other names."""
    try:
        with torch.device("meta"):
            again = kind(**chosen)
    except Exception as error:
        raise _unwritable(layer, where, f"cannot be built from its settings ({error})") from error
    ours, theirs = ({name: t.shape for name, t in m.state_dict().items()} for m in (again, layer))
    if ours != theirs or again.extra_repr() != layer.extra_repr():
        raise _unwritable(layer, where, "is not what its settings say")


def _spelled(found: Any, layer: nn.Module, where: str) -> str:
    if isinstance(found, tuple | list):
        inside = ", ".join(_spelled(item, layer, where) for item in found)
        return f"[{inside}]" if isinstance(found, list) else f"({inside},)" if len(found) == 1 else f"({inside})"
    text = value(found)
    if text is None:
        raise _unwritable(layer, where, f"has a setting that has no spelling: {found!r}")
    return text


def _unwritable(layer: nn.Module, where: str, why: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"{type(layer).__name__} at node {where!r} cannot be written out as source: it {why}. Export to ONNX or .pt2 instead, "
        f"or build the layer from torch.nn's."
    )


@dataclass
class Container:
    """The layers and tensors of a network as a tree, by the parts of their names."""

    parts: dict[str, Container | Expression] = field(default_factory=dict)

    def put(self, path: str, expression: Expression) -> None:
        """Store what builds the layer or tensor at `path`."""
        *parents, name = path.split(".")
        here = self
        for parent in parents:
            inner = here.parts.setdefault(parent, Container())
            assert isinstance(inner, Container)
            here = inner
        here.parts[name] = expression

    @property
    def numbered(self) -> bool:
        """Whether its parts are called 0, 1, 2 …, as in nn.Sequential."""
        return list(self.parts) == [str(n) for n in range(len(self.parts))]

    def sort_(self) -> None:
        """Bring numbered parts into their order; a network may call them in another."""
        if all(name.isdigit() for name in self.parts):
            self.parts = dict(sorted(self.parts.items(), key=lambda item: int(item[0])))
        for part in self.parts.values():
            if isinstance(part, Container):
                part.sort_()

    def built(self) -> Call:
        """The call that builds it: nn.Sequential, or a `Part` with named layers."""
        made = {name: part.built() if isinstance(part, Container) else part for name, part in self.parts.items()}
        if self.numbered and not any(isinstance(p, str) for p in made.values()):
            return Call("nn.Sequential", tuple(("", part) for part in made.values()))
        return Call("Part", tuple((f"{argument_name(name)}=", part) for name, part in made.items()))

    @property
    def uses_part(self) -> bool:
        """Whether a `Part` is among what is inside."""
        return any(isinstance(p, Container) and (not p.numbered or p.uses_part) for p in self.parts.values())

    def access(self, path: str) -> str:
        """How forward reads what is stored at `path`."""
        text, here = "self", self
        for name in path.split("."):
            if here is not self and here.numbered:
                text += f"[{name}]"
            elif is_name(name):
                text += f".{name}"
            else:
                text = f'getattr({text}, "{name}")'
            inner = here.parts[name]
            here = inner if isinstance(inner, Container) else Container()
        return text


def is_name(text: str) -> bool:
    """Whether it can stand behind a dot."""
    return text.isidentifier() and not keyword.iskeyword(text)


def argument_name(name: str) -> str:
    """How `Part` is told a name: one that is no identifier (3, for, …) gets an underscore before it, which `Part` takes off."""
    return name if is_name(name) and not name.startswith("_") else f"_{name}"
