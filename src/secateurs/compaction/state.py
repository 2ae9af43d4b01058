"""Where a rewriting of a graph stands: what each node carries by now, who stands in for whom, and how to align the two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from secateurs.errors import EmptyLayer
from secateurs.graph.channels import Kept, all_of, free_name, name_of_alignment, none_of, positions
from secateurs.graph.flow import Flows, Liveness
from secateurs.graph.layers import Align


@dataclass
class Rewriting:
    """One pass over the nodes of `module`, in order.

    The invariant: a channel that is present carries what it carries in the masked network; a channel that is absent is zero
    there, or nobody needs it. So any op may be given more channels than are live, and a missing one may be filled with zeros.
    """

    module: fx.GraphModule
    flows: Flows
    live: Liveness
    sites: Mapping[fx.Node, str]  # names of the sites that are cut
    masks: Mapping[fx.Node, Tensor]  # behind these nodes only the channels in the mask are left
    layout: dict[fx.Node, Tensor] = field(default_factory=dict)  # what a node carries, where that is not everything
    physical: dict[fx.Node, Tensor] = field(default_factory=dict)  # what a node gives, where a gather drops more
    standing_for: dict[fx.Node, fx.Node] = field(default_factory=dict)  # who gives now what a node gave
    constants: dict[fx.Node, Tensor] = field(default_factory=dict)  # nodes that give the same for every input
    emptied_by: dict[fx.Node, str] = field(default_factory=dict)  # the layer that is to blame for a node without channels
    size_queries: dict[fx.Node, fx.Node] = field(default_factory=dict)  # x.shape of a narrower x
    last: set[fx.Node] = field(default_factory=set)  # nodes that nobody ever read
    kept: dict[str, Kept] = field(default_factory=dict)  # by parameter: the entries that survive

    def carried(self, node: fx.Node, width: int) -> Tensor:
        """Layout of what `node` gives, all of it if nothing has been removed."""
        found = self.layout.get(node)
        return all_of(width) if found is None else found

    def changed(self, node: fx.Node) -> bool:
        """Whether `node` no longer gives what it gave, in full."""
        return node in self.layout or node in self.standing_for or node in self.constants

    def is_empty(self, node: fx.Node) -> bool:
        """Whether nothing is left of what `node` gave."""
        return node in self.layout and not bool(self.layout[node].any())

    def live_at(self, node: fx.Node) -> Tensor:
        """The channels that `node` must give."""
        return self.live.live(node, self.flows.width(node))

    def axis_of(self, node: fx.Node) -> int:
        """The axis of the channels of what `node` gives."""
        axis = self.flows.of[node].axis
        assert axis is not None
        return axis

    def present(self, node: fx.Node) -> fx.Node:
        """The node that now gives what `node` gave."""
        while node in self.standing_for:
            node = self.standing_for[node]
        return node

    def settle(self, node: fx.Node, layout: Tensor) -> None:
        """Note what `node` carries from now on."""
        if not bool(layout.all()):
            self.layout[node] = layout

    def keep(self, node: fx.Node, survivors: Iterable[tuple[str, Kept]]) -> None:
        """Note which entries of a module's tensors survive."""
        for name, kept in survivors:
            self.kept[f"{node.target}.{name}"] = kept

    def vanish(self, node: fx.Node) -> None:
        """Nobody needs it, or all of it is zero: leave it without readers."""
        self.layout[node] = none_of(0 if self.flows.of[node].axis is None else self.flows.width(node))
        origin = next((self.emptied_by[i] for i in self.flows.inputs[node] if i in self.emptied_by), None)
        self.emptied_by[node] = self.sites.get(node) or origin or str(node.meta.get("name", node.target))

    def redirect(self, reader: fx.Node, source: fx.Node) -> None:
        """Make `reader` read whoever stands in for `source`."""
        reader.replace_input_with(source, self.present(source))

    def align(self, reader: fx.Node, source: fx.Node, wanted: Tensor, axis: int) -> None:
        """Make `reader` see `source` laid out as `wanted`."""
        reader = reader if source in reader.all_input_nodes else reader.all_input_nodes[0]  # a part reads through its split
        carried, current = self.carried(source, len(wanted)), self.present(source)
        if torch.equal(carried, wanted):
            reader.replace_input_with(source, current)
            return
        if not bool(carried.any()):
            raise self.empty(source, reader)
        take = positions(carried, wanted)
        earlier = self._alignment_at(current, axis)
        if earlier is not None and source not in self.physical:  # two alignments in a row are one, but a site keeps its own
            take = torch.where(take < 0, -1, torch.tensor(earlier.take)[take])
            (current,) = current.all_input_nodes
        with self.module.graph.inserting_before(reader):
            aligned = self.insert(name_of_alignment(source, reader), Align(take, axis), (current,))
        reader.replace_input_with(source, aligned)

    def _alignment_at(self, node: fx.Node, axis: int) -> Align | None:
        """The alignment along `axis` that this pass put at `node`, if it did."""
        if node.op != "call_module" or node in self.flows.of:
            return None
        layer = self.module.get_submodule(str(node.target))
        return layer if isinstance(layer, Align) and layer.axis == axis else None

    def insert(self, name: str, layer: torch.nn.Module, args: tuple[Any, ...]) -> fx.Node:
        """Add a module and a call of it where the graph's insertion point is."""
        path = free_name(self.module, name)
        self.module.add_submodule(path, layer.to(self.device).train(self.module.training))
        return self.module.graph.call_module(path, args)

    @property
    def device(self) -> torch.device:
        """Where the network lies."""
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The network's precision."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

    def empty(self, source: fx.Node, reader: fx.Node) -> EmptyLayer:
        """The error for a reader that cannot do without what has been emptied."""
        layer = self.emptied_by.get(source) or str(source.meta.get("name", source.target))
        where = reader.meta.get("name", reader.target if reader.op != "output" else "the network's output")
        return EmptyLayer(
            f"the cut leaves {layer!r} without a single channel, and {where!s} cannot do without it. "
            f"Keep at least one filter there."
        )


def hand_site_on(node: fx.Node, gather: fx.Node) -> None:
    """Mark `gather` as the place where the site at `node` ends from now on."""
    gather.meta["ends_site"] = True
    gather.meta["site_names"] = dict(node.meta.get("site_names", {}))
