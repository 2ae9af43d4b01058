"""Names inside a traced network: where a node comes from, and free names for modules that are added."""

from __future__ import annotations

from torch import fx, nn


def module_path(node: fx.Node) -> str:
    """Path of the submodule whose forward made `node`, '' for the model's own."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    return paths[-1] if paths else ""


def call_word(node: fx.Node) -> str:
    """The bare name of what a node calls: 'add', 'view'."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "op")


def name_of_alignment(source: fx.Node, reader: fx.Node | None = None) -> str:
    """What an alignment of `source` (for `reader`) is called; one that takes the place of another does not add to its name."""
    name = source.name
    while name.startswith("align_"):
        name = name.removeprefix("align_").partition("_to_")[0]
    return f"align_{name}" if reader is None else f"align_{name}_to_{reader.name}"


def free_name(module: nn.Module, wanted: str) -> str:
    """`wanted`, or `wanted` with a number behind it where something of that path exists already."""
    name, count = wanted, 0
    while _taken(module, name):
        count += 1
        name = f"{wanted}_{count}"
    return name


def _taken(module: nn.Module, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(module, part):
            return False
        found = getattr(module, part)
        if not isinstance(found, nn.Module):
            return True
        module = found
    return True
