"""State of a rewriting of a graph: the channels that each node carries, the nodes that replace others, and alignment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs._util.modules import device_of
from secateurs.errors import EmptyLayer
from secateurs.graph.channels import Kept, all_of, free_name, name_of_alignment, none_of, positions
from secateurs.graph.channels import take as selected
from secateurs.graph.coupling import KEPT_SHAPES, RESHAPES
from secateurs.graph.flow import Flows, Layer, Liveness, Moved
from secateurs.graph.layers import Align, Constant
from secateurs.graph.node_info import called_module, dims_of, info, label_of, shape_of


@dataclass
class Rewriting:
    """One pass over the nodes of `module`, in order.

    The invariant: a channel that is present has the values of the masked network; a channel that is absent is zero there, or
    not needed. So any op may get more channels than are live, and a missing channel may be filled with zeros.
    """

    module: fx.GraphModule
    flows: Flows
    live: Liveness
    sites: Mapping[fx.Node, str]  # names of the sites that are cut
    masks: Mapping[fx.Node, Tensor]  # behind these nodes only the channels in the mask remain
    ids: Mapping[str, Tensor]  # in the uncut network, of the channels of a node, where an earlier cut removed some
    layout: dict[fx.Node, Tensor] = field(default_factory=dict)  # channels behind a node, where not all remain
    physical: dict[fx.Node, Tensor] = field(default_factory=dict)  # channels of a node's own output, where a gather drops more
    replaced_by: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inserted: dict[fx.Node, tuple[fx.Node, Tensor]] = field(default_factory=dict)  # alignments: channels of which node, which
    constants: dict[fx.Node, Tensor] = field(default_factory=dict)  # outputs that are the same for every input
    emptied_by: dict[fx.Node, str] = field(default_factory=dict)  # the layer that left a node without channels
    size_queries: dict[fx.Node, tuple[fx.Node, range]] = field(default_factory=dict)  # x.shape, x.shape[:2]: a narrower x, axes
    asked: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)  # sizes and kinds of nodes without channels
    unused: set[fx.Node] = field(default_factory=set)  # nodes that had no users before the cut
    kept: dict[str, Kept] = field(default_factory=dict)  # by parameter: the entries that remain
    narrowing: dict[str, Callable[[], Iterable[tuple[str, Kept]]]] = field(default_factory=dict)  # by module, done at the end
    calls: dict[str, list[fx.Node]] = field(default_factory=dict)  # of each module, in order

    def carried(self, node: fx.Node, width: int) -> Tensor:
        """Return the layout of the output of `node`."""
        return self.layout.get(node, all_of(width))

    def numbers(self, node: fx.Node) -> tuple[Tensor, int]:
        """Return the ids of a node's channels in the uncut network, before this cut, and how many there were."""
        width = self.flows.width(node)
        return self.ids.get(node.name, torch.arange(width)), info(node).get("original_channels", width)

    def changed(self, node: fx.Node) -> bool:
        """Whether the output of `node` was narrowed, replaced or folded."""
        return node in self.layout or node in self.replaced_by or node in self.constants

    def is_empty(self, node: fx.Node) -> bool:
        """Whether no channel of `node` remains."""
        return node in self.layout and not bool(self.layout[node].any())

    def live_at(self, node: fx.Node) -> Tensor:
        """Return the live channels of `node`."""
        return self.live.live(node, self.flows.width(node))

    def axis_of(self, node: fx.Node) -> int:
        """Return the channel axis of the output of `node`."""
        axis = self.flows.of[node].axis
        assert axis is not None
        return axis

    def present(self, node: fx.Node) -> fx.Node:
        """Return the node that replaces `node`, or `node` itself."""
        while node in self.replaced_by:
            node = self.replaced_by[node]
        return node

    def settle(self, node: fx.Node, layout: Tensor) -> None:
        """Record the layout of the output of `node`."""
        if not bool(layout.all()):
            self.layout[node] = layout

    def __post_init__(self) -> None:
        for node in self.flows.of:
            if node.op == "call_module":
                self.calls.setdefault(str(node.target), []).append(node)

    def live_in_any_call(self, node: fx.Node) -> tuple[Tensor | None, Tensor] | None:
        """Return the live channels of the first input and of the output of a module, in any of its calls.

        All calls share the module's weights, so they get and give the same channels. None if `node` is the only call, and no
        input channels where those of a call are unknown, or lie along another axis than it reads: it reads all of them.
        """
        calls = self.calls.get(str(node.target), []) if node.op == "call_module" else []
        if len(calls) < 2:
            return None
        sources = [self.flows.inputs[call][0] for call in calls]
        across = any(isinstance(flow := self.flows.of[call], Layer) and flow.reads_all for call in calls)
        known = not across and all(self.flows.of[source].axis is not None for source in sources)
        read = torch.stack([self.live_at(source) for source in sources]).any(0) if known else None
        return read, torch.stack([self.live_at(call) for call in calls]).any(0)

    def keep(self, path: str, survivors: Iterable[tuple[str, Kept]]) -> None:
        """Record which entries of a module's tensors remain."""
        for name, kept in survivors:
            self.kept[f"{path}.{name}"] = kept

    def vanish(self, node: fx.Node) -> None:
        """Record that no channel of `node` remains: none is needed, or all are zero."""
        self.layout[node] = none_of(0 if self.flows.of[node].axis is None else self.flows.width(node))
        origin = next((self.emptied_by[i] for i in self.flows.inputs[node] if i in self.emptied_by), None)
        self.emptied_by[node] = self.sites.get(node) or origin or label_of(node)

    def redirect(self, user: fx.Node, source: fx.Node) -> None:
        """Make `user` read the replacement of `source`."""
        user.replace_input_with(source, self.present(source))

    def align(self, user: fx.Node, source: fx.Node, wanted: Tensor, axis: int) -> None:
        """Make `user` read `source` in the layout `wanted`."""
        user = user if source in user.all_input_nodes else user.all_input_nodes[0]  # a part reads through its split
        carried, current = self.carried(source, len(wanted)), self.present(source)
        if torch.equal(carried, wanted):
            user.replace_input_with(source, current)
            return
        if not bool(carried.any()):
            found = self.before_zeros(source)
            if found is None:
                raise self.empty(source, user)
            current = found
        take = positions(carried, wanted)
        earlier, part = self._alignment_at(current, axis), False
        # two alignments in a row are one, but a site keeps its own, and so do several readers: a stream may enter there
        if earlier is not None and not info(current).get("ends_site") and len(self.flows.users[source]) == 1:
            take = torch.where(take < 0, -1, torch.tensor(earlier.take)[take])
            part = info(current).get("part", False)
            (current,) = current.all_input_nodes
        constant = called_module(self.module, current)
        if isinstance(constant, Constant) and len(current.users) == 1 and bool((take >= 0).all()):
            # narrowed itself: two cuts leave the constant that one would have left
            self.keep(str(current.target), [("value", (*(None,) * axis, take))])
            narrower = constant.value.detach().index_select(axis, take.to(constant.value.device))
            constant.value = nn.Parameter(narrower, requires_grad=constant.value.requires_grad)
            user.replace_input_with(source, current)
            return
        if bool((take >= 0).all()) and self._narrow_tensor(current, axis, take):
            user.replace_input_with(source, current)
            return
        with self.module.graph.inserting_before(user):
            aligned = self.insert(name_of_alignment(source, user), Align(take, axis), (current,))
        info(aligned)["part"] = part
        self.inserted[aligned] = source, wanted
        user.replace_input_with(source, aligned)

    def before_zeros(self, node: fx.Node) -> fx.Node | None:
        """Return what remains before an earlier cut's alignment of which nothing does: zeros of its size are made of it."""
        flow = self.flows.of[node]
        if not isinstance(flow, Moved) or not flow.added or not self.is_empty(node):
            return None
        (source,) = self.flows.inputs[node]
        if self.is_empty(source) or self.flows.of[source].axis is None:
            return self.before_zeros(source)
        return self.present(source)

    def _narrow_tensor(self, node: fx.Node, axis: int, take: Tensor) -> bool:
        """Narrow the parameter or buffer that `node` gives, repeated or with axes of length 1, if nothing else reads it."""
        if node not in self.flows.of or len(node.users) != 1 or dims_of(node)[axis] == 1:
            return False
        if node.op in ("call_method", "call_function") and node.target in (*KEPT_SHAPES, *RESHAPES):
            source, *sizes = node.args
            listed = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
            if not isinstance(source, fx.Node) or source not in self.flows.of or node.kwargs or shape_of(source).dims is None:
                return False  # among others an alignment of this cut, which gives no parameter
            if node.target in RESHAPES:
                wide = [dim for dim, n in enumerate(dims_of(source)) if n > 1]
                sized = node.target in ("view", "reshape", torch.reshape)
                if len(wide) != 1 or math.prod(dims_of(node)) != dims_of(node)[axis] or (sized and listed[axis] != -1):
                    return False
                return self._narrow_tensor(source, wide[0], take)
            unchanged = {"expand": -1, "repeat": 1}.get(str(node.target))
            if unchanged is not None and (len(listed) != len(dims_of(source)) or listed[axis] != unchanged):
                return False
            return self._narrow_tensor(source, axis, take)
        if node.op != "get_attr":
            return False
        path, _, name = str(node.target).rpartition(".")
        owner = self.module.get_submodule(path)
        tensor = getattr(owner, name)
        held = [*self.module.named_parameters(remove_duplicate=False), *self.module.named_buffers(remove_duplicate=False)]
        readers = [n for n in self.module.graph.nodes if n.op == "get_attr" and n.target == node.target]
        if sum(t is tensor for _, t in held) != 1 or len(readers) != 1 or tensor.dim() != len(dims_of(node)):
            return False
        kept = (*(None,) * axis, take)
        replace_(owner, name, kept)
        self.kept[str(node.target)] = kept
        return True

    def _alignment_at(self, node: fx.Node, axis: int) -> Align | None:
        """Return the alignment along `axis` at `node` if this pass inserted it."""
        layer = None if node in self.flows.of else called_module(self.module, node)
        return layer if isinstance(layer, Align) and layer.axis == axis else None

    def insert(self, name: str, layer: torch.nn.Module, args: tuple[Any, ...]) -> fx.Node:
        """Add a module, and a call of it at the graph's insertion point."""
        path = free_name(self.module, name)
        self.module.add_submodule(path, layer.to(device_of(self.module)).train(self.module.training))
        return self.module.graph.call_module(path, args)

    def empty(self, source: fx.Node, user: fx.Node) -> EmptyLayer:
        """Return the error for a user that needs `source`, of which no channel remains."""
        layer = self.emptied_by.get(source) or label_of(source)
        where = "the network's output" if user.op == "output" else label_of(user)
        kept = all(bool(mask.any()) for mask in self.masks.values())  # the cut itself empties no site
        why = " that counts, though every mask keeps some (they are always zero there, or nothing reads them)" if kept else ""
        return EmptyLayer(
            f"the cut leaves {layer!r} without a single channel{why}, and {where} cannot do without it. "
            f"Keep at least one filter there{' that is read' if kept else ''}."
        )


def replace_(module: nn.Module, name: str, kept: Kept) -> None:
    """Keep only the entries `kept` of a parameter or buffer of `module`."""
    tensor = getattr(module, name)
    narrower = selected(tensor.detach(), kept).clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, nn.Parameter):
        setattr(module, name, nn.Parameter(narrower, requires_grad=tensor.requires_grad))
    else:
        module.register_buffer(name, narrower, persistent=name not in module._non_persistent_buffers_set)
