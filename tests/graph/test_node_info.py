"""Facts at the nodes of a graph: one file writes them, copies carry them, and every key is declared."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import torch
from tests.nets import randomise_

import secateurs
from secateurs import compact, find_sites, trace
from secateurs.graph.masking import copied
from secateurs.graph.node_info import NodeInfo, info, kept_facts
from secateurs.models.resnet import ResNet

SRC = Path(secateurs.__file__).parent

CHANGES = ("update", "setdefault", "pop", "popitem", "clear")
OF_TORCH = {"stack_trace", "fx_traceback"}  # keys that torch.fx may set and secateurs does not read


def writes_meta(path: Path) -> bool:
    """Whether a file assigns to `.meta` or to a key of it, deletes one, or calls a method that changes it."""

    def is_meta(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "meta"

    for node in ast.walk(ast.parse(path.read_text())):
        stored = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        if stored and (is_meta(node) or (isinstance(node, ast.Subscript) and is_meta(node.value))):
            return True
        method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if method is not None and is_meta(method.value) and method.attr in CHANGES:
            return True
    return False


def test_only_node_info_writes_the_metadata_of_nodes() -> None:
    found = {path.relative_to(SRC) for path in SRC.rglob("*.py") if writes_meta(path)}
    assert found == {Path("graph/node_info.py"), Path("export/torchao.py")}  # the latter: a key of torch's own quantisers


def test_every_recorded_key_is_declared() -> None:
    graph = trace(randomise_(ResNet(1)), torch.randn(2, 3, 32, 32, dtype=torch.float64))
    site = find_sites(graph)[1]
    smaller = compact(graph, {site.name: torch.arange(site.channels) % 2 == 0})
    keys = {key for each in (graph, smaller) for node in each.module.graph.nodes for key in node.meta}
    assert {"shape", "name", "unused", "original_channels", "site_names"} <= keys
    assert keys - OF_TORCH <= set(NodeInfo.__annotations__)


def test_copies_carry_facts_and_do_not_share_them() -> None:
    graph = trace(randomise_(ResNet(1)), torch.randn(2, 3, 32, 32, dtype=torch.float64))
    for other in (copied(graph), copy.deepcopy(graph)):
        for ours, theirs in zip(graph.module.graph.nodes, other.module.graph.nodes, strict=True):
            assert info(ours) == info(theirs)
            assert info(ours) is not info(theirs)
        assert tuple(find_sites(other)) == tuple(find_sites(graph))


def test_a_copy_of_a_cut_network_has_its_facts_and_hooks_of_its_own() -> None:
    graph = trace(randomise_(ResNet(1)), torch.randn(2, 3, 32, 32, dtype=torch.float64))
    site = find_sites(graph)[1]
    smaller = compact(graph, {site.name: torch.arange(site.channels) % 2 == 0})
    other = copied(smaller)
    ours, theirs = kept_facts(smaller.module), kept_facts(other.module)
    assert ours is not None
    assert theirs is not None
    assert ours[0] == theirs[0] == smaller.plan
    for part in other.module.modules():
        part.register_forward_hook(lambda module, given, out: None)
    assert not any(part._forward_hooks for part in smaller.module.modules())
