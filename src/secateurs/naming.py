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
