"""Facts recorded at the nodes of a traced network. Every access to `Node.meta` in the package goes through `info`.

torch.fx hands a node's dictionary on when it copies the node, so facts survive copies of a graph and all cuts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from torch import Tensor, fx, nn


@dataclass(frozen=True)
class Shape:
    """Output of a node: the shape of a tensor, or, for anything else, the value itself."""

    dims: tuple[int, ...] | None
    value: Any = None

    @property
    def is_tensor(self) -> bool:
        """Whether the output is a single tensor."""
        return self.dims is not None


class NodeInfo(TypedDict, total=False):
    """Keys of `Node.meta` that secateurs sets, and torch.fx's own that it reads."""

    shape: Shape  # output for the example input
    other_shapes: tuple[Shape, ...]  # outputs for inputs of other batch and image sizes; absent after a cut
    varies: str  # why the op is opaque: it treats channels differently for another size of input
    name: str  # of a call of a function or method, e.g. 'layer1.0.add'; stays the same after cuts
    unused: bool  # no path leads from the node to an output
    filters_a_channel: int  # of a depthwise layer in the uncut network; 0 for all other nodes
    norm_groups: int  # of a GroupNorm in the uncut network, once a cut has removed channels
    follows_mode: bool  # the call was made with `training=self.training`
    original_channels: int  # channels in the uncut network, once a cut has removed some
    channel_axis: int  # of the output, once a cut has removed channels
    classes: tuple[
        int | None, Tensor
    ]  # in the uncut network: the channel axis, and equal numbers for channels that go together
    features: tuple[
        tuple[int, ...], int
    ]  # within heads: ids in the uncut network of those left, once a cut has removed some, of how many
    ends_site: bool  # a gather of an earlier cut: the site ends behind it
    part: bool  # an alignment in the place of a slice or a part of the model's own
    site_names: dict[str, str]  # name of the site at this node in the uncut network, by shortcut position
    alignment: bool  # in an exported network: the op is part of an alignment
    follows_mode_at: int | str  # in an exported network: the argument that is `self.training` in source, False elsewhere
    nn_module_stack: dict[str, Any]  # torch.fx: the submodules whose forward was running, outermost first


def info(node: fx.Node) -> NodeInfo:
    """Return the node's metadata as a typed view: what is written to it is written to the node."""
    return cast(NodeInfo, node.meta)


def copy_info_(source: fx.Graph, target: fx.Graph) -> None:
    """Give every node of `target`, a copy of `source`, a copy of its counterpart's metadata."""
    for old, new in zip(source.nodes, target.nodes, strict=True):
        copy_node_info_(old, new)


def copy_node_info_(source: fx.Node, *targets: fx.Node) -> None:
    """Give each of `targets` a copy of the metadata of `source`."""
    for target in targets:
        target.meta = dict(source.meta)


def pass_on_(source: fx.Node, target: fx.Node, *keys: str) -> None:
    """Give `target` the facts of `source` that `keys` name and `source` has."""
    target.meta.update({key: source.meta[key] for key in keys if key in source.meta})


def forget_source_(node: fx.Node) -> None:
    """Drop torch's record of the source lines that the node was traced from."""
    node.meta.pop("stack_trace", None)


PRESERVED = "_user_preserved_attributes"  # torch.fx sets the attributes that this key of `meta` holds on copies of a network
TRACED_ONLY = ("nn_module_stack", "stack_trace")  # facts about the source, which no later cut reads


def keep_facts_(module: fx.GraphModule, facts: tuple[Any, ...]) -> None:
    """Keep facts about a whole network, and those at its nodes, with it; copies and pickles of the network carry them."""
    nodes = [
        (
            n.name,
            n.op,
            str(n.target),
            {k: v for k, v in n.meta.items() if k in NodeInfo.__annotations__ and k not in TRACED_ONLY},
        )
        for n in module.graph.nodes
    ]
    module.secateurs_facts = (facts, nodes)  # type: ignore[assignment]  # torch says that attributes are tensors or modules
    module.meta[PRESERVED] = {**module.meta.get(PRESERVED, {}), "secateurs_facts": module.secateurs_facts}


def facts_held(module: nn.Module) -> Any:
    """Return the record that `keep_facts_` left in a network, as it is; None if there is none."""
    return getattr(module, "secateurs_facts", None)


def kept_facts(module: nn.Module) -> tuple[Any, ...] | None:
    """Return the facts kept with a network; None if there are none, or if nodes were added to it since.

    Pickling loses the facts at nodes, since torch.fx builds the graph of a pickled network anew: they are put back.
    """
    kept = facts_held(module)
    if not isinstance(module, fx.GraphModule) or kept is None:
        return None
    (plan, leaves, ids), known = kept
    nodes = list(module.graph.nodes)
    if not any("shape" in node.meta for node in nodes):
        if [(n.op, str(n.target)) for n in nodes] != [(op, target) for _, op, target, _ in known]:
            return None
        for node, (_, _, _, facts) in zip(nodes, known, strict=True):
            node.meta.update(facts)
        names = {name: node.name for node, (name, _, _, _) in zip(nodes, known, strict=True)}
        ids = {names[name]: channels for name, channels in ids.items()}
    return (plan, leaves, ids) if all("shape" in node.meta for node in nodes) else None


def shape_of(node: fx.Node, size: int = 0) -> Shape:
    """Return the recorded output shape for the example input; for `size` > 0, for an input of another size."""
    return info(node)["shape"] if size == 0 else info(node)["other_shapes"][size - 1]


def dims_of(node: fx.Node) -> tuple[int, ...]:
    """Return the recorded shape of a node whose output is a single tensor."""
    dims = shape_of(node).dims
    assert dims is not None
    return dims


def values_of_an_example(module: fx.GraphModule) -> int:
    """Return how many values all nodes together give for one example, by the recorded shapes."""
    return sum(math.prod(dims[1:]) for node in module.graph.nodes if (dims := shape_of(node).dims))


def called_module(module: nn.Module, node: fx.Node) -> nn.Module | None:
    """Return the submodule of `module` that `node` calls; None if it calls something else."""
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def label_of(node: fx.Node) -> str:
    """Return the name of a node in messages: 'layer1.0.add' for a call of a function, the path of a submodule, 'output'."""
    return info(node).get("name", str(node.target))
