"""Rewrites a graph so that only live channels exist: narrows modules, aligns where they differ, folds what is constant.

The invariant: a channel that is present carries what it carries in the masked network; a channel that is absent is zero there,
or nobody needs it. So any op may be given more channels than are live, and a missing channel may be filled with zeros.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Any

import torch
from torch import Tensor, fx

from secateurs.channels import Kept, all_of, ids, none_of, positions
from secateurs.compaction.narrow import narrow_channelwise_, narrow_layer_
from secateurs.errors import EmptyLayer
from secateurs.flow import Blocks, Channelwise, Concat, Flow, Flows, Join, Layer, Liveness, Moved, Opaque, Source
from secateurs.flow.table import call_on
from secateurs.graph import shape_of
from secateurs.layers import Align, Constant
from secateurs.naming import free_name, module_path


@dataclass
class Rewriter:
    """One pass over the nodes of `module`, in order; `layout` says what each node's output carries afterwards."""

    module: fx.GraphModule
    flows: Flows
    live: Liveness
    masks: Mapping[fx.Node, Tensor]
    layout: dict[fx.Node, Tensor] = field(default_factory=dict)
    standing_for: dict[fx.Node, fx.Node] = field(default_factory=dict)
    constants: dict[fx.Node, Tensor] = field(default_factory=dict)
    emptied_by: dict[fx.Node, str] = field(default_factory=dict)
    kept: dict[str, Kept] = field(default_factory=dict)

    def run(self) -> None:
        """Rewrite the whole graph in place."""
        for node in list(self.module.graph.nodes):
            if node in self.flows.of:
                self._visit(node, self.flows.of[node])
            self._fix_sizes(node)
        self._erase_unused()
        self.module.graph.lint()
        self.module.delete_all_unused_submodules()
        self.module.recompile()

    # ---- what a node's inputs look like by now -----------------------------------------------------------------------

    def _carried(self, node: fx.Node, width: int) -> Tensor:
        """Layout of what `node` gives, all of it if nothing has been removed."""
        found = self.layout.get(node)
        return all_of(width) if found is None else found

    def present(self, node: fx.Node) -> fx.Node:
        """The node that now gives what `node` gave."""
        while node in self.standing_for:
            node = self.standing_for[node]
        return node

    def _align(self, reader: fx.Node, source: fx.Node, wanted: Tensor, axis: int) -> None:
        """Make `reader` see `source` laid out as `wanted`."""
        reader = reader if source in reader.all_input_nodes else reader.all_input_nodes[0]  # a part reads through its split
        carried = self._carried(source, len(wanted))
        current = self.present(source)
        if torch.equal(carried, wanted):
            reader.replace_input_with(source, current)
            return
        if not bool(carried.any()):
            raise EmptyLayer(self._empty_message(source, reader))
        take = positions(carried, wanted)
        before = self._align_at(current, axis)
        if before is not None:  # two alignments in a row are one
            take = torch.where(take < 0, -1, torch.tensor(before.take)[take])
            (current,) = current.all_input_nodes
        with self.module.graph.inserting_before(reader):
            aligned = self._insert(f"align_{source.name}_to_{reader.name}", Align(take, axis), (current,))
        reader.replace_input_with(source, aligned)

    def _align_at(self, node: fx.Node, axis: int) -> Align | None:
        """The alignment along `axis` that this pass put at `node`, if it did."""
        if node.op != "call_module" or node in self.flows.of:
            return None
        layer = self.module.get_submodule(str(node.target))
        return layer if isinstance(layer, Align) and layer.axis == axis else None

    def _insert(self, name: str, layer: torch.nn.Module, args: tuple[Any, ...]) -> fx.Node:
        path = free_name(self.module, name)
        device = next((t.device for t in self.module.parameters()), torch.device("cpu"))
        self.module.add_submodule(path, layer.to(device).train(self.module.training))
        return self.module.graph.call_module(path, args)

    def _empty_message(self, source: fx.Node, reader: fx.Node) -> str:
        layer = self.emptied_by.get(source) or str(source.meta.get("name", source.target))
        where = reader.meta.get("name", reader.target if reader.op != "output" else "the network's output")
        return (
            f"the cut leaves {layer!r} without a single channel, and {where!s} cannot do without it. "
            f"Keep at least one filter there."
        )

    # ---- one visit a node --------------------------------------------------------------------------------------------

    def _visit(self, node: fx.Node, flow: Flow) -> None:
        if not any(self._changed(i) for i in self.flows.inputs[node]) and not self._touched(node):
            return
        if flow.axis is None and not isinstance(flow, Opaque):
            for source in self.flows.inputs[node]:
                node.replace_input_with(source, self.present(source))
            return
        constant = self._constant(node, flow)
        if constant is not None:
            self.constants[node] = constant
            self.layout[node] = none_of(constant.numel())
            return
        if flow.axis is not None and not bool(self.live.live(node, self.flows.width(node)).any()):
            self._vanish(node)
            return
        self._narrow(flow, node)
        if node in self.masks:
            self._drop_masked(node)

    def _touched(self, node: fx.Node) -> bool:
        return node in self.live.zero or node in self.live.need

    def _changed(self, source: fx.Node) -> bool:
        return source in self.layout or source in self.standing_for or source in self.constants

    def _vanish(self, node: fx.Node) -> None:
        """Nobody needs it, or all of it is zero: leave it without readers."""
        self.layout[node] = none_of(self.flows.width(node))
        origin = next((self.emptied_by[i] for i in self.flows.inputs[node] if i in self.emptied_by), None)
        name = str(node.meta.get("name", node.target))
        self.emptied_by[node] = origin or (module_path(node) if node.op == "placeholder" else name)

    def _drop_masked(self, node: fx.Node) -> None:
        """Behind a site nothing masked may be carried: a layer that had to keep it hands on only the rest."""
        carried = self._carried(node, self.flows.width(node))
        wanted = carried & self.masks[node]
        if torch.equal(carried, wanted):
            return
        axis = self.flows.of[node].axis
        assert axis is not None
        with self.module.graph.inserting_after(self.present(node)):
            take = positions(carried, wanted)
            gathered = self._insert(f"align_{node.name}", Align(take, axis), (self.present(node),))
        self.standing_for[node] = gathered
        self.layout[node] = wanted

    @singledispatchmethod
    def _narrow(self, flow: Flow, node: fx.Node) -> None:
        raise AssertionError(f"no way to narrow {flow}")

    @_narrow.register
    def _(self, flow: Source, node: fx.Node) -> None:
        return

    @_narrow.register
    def _(self, flow: Opaque, node: fx.Node) -> None:
        for source in dict.fromkeys(self.flows.inputs[node]):
            axis = self.flows.of[source].axis
            if axis is None:
                node.replace_input_with(source, self.present(source))
            else:
                self._align(node, source, all_of(self.flows.width(source)), axis)

    @_narrow.register
    def _(self, flow: Channelwise, node: fx.Node) -> None:
        (source, *others) = self.flows.inputs[node]
        assert flow.axis is not None and flow.in_axis is not None
        carried = self._carried(source, flow.width)
        # an op that revives zeros needs the zero channels of its input in place
        wanted = carried if flow.keeps_zero else carried | self.live.live(node, flow.width)
        self._align(node, source, wanted, flow.in_axis)
        for other in others:
            node.replace_input_with(other, self.present(other))
        self._settle(node, wanted)
        if node.op == "call_module" and flow.params and not bool(wanted.all()):
            target = self.module.get_submodule(str(node.target))
            self._keep(node, narrow_channelwise_(target, flow, wanted))
        if flow.resize is not None:
            flow.resize(node, int(wanted.sum()))

    @_narrow.register
    def _(self, flow: Layer, node: fx.Node) -> None:
        (source,) = dict.fromkeys(self.flows.inputs[node])
        live = self.live.live(node, flow.filters)
        carried = all_of(flow.inputs) if flow.reads_all else self._carried(source, flow.inputs)
        if flow.reads_all:
            axis = self.flows.of[source].axis
            assert axis is not None
            self._align(node, source, all_of(self.flows.width(source)), axis)
        inputs, outputs, groups = carried, live, flow.groups
        if flow.groups > 1:
            inputs, outputs, groups = balanced(flow, carried, live)
            self._align(node, source, inputs, flow.in_axis)
        elif not flow.reads_all:
            node.replace_input_with(source, self.present(source))
        self._settle(node, outputs)
        if not (bool(inputs.all()) and bool(outputs.all())):
            target = self.module.get_submodule(str(node.target))
            self._keep(node, narrow_layer_(target, flow, inputs, outputs, groups))

    @_narrow.register
    def _(self, flow: Join, node: fx.Node) -> None:
        inputs = self.flows.inputs[node]
        dropped = [i for i in dict.fromkeys(inputs) if self._is_empty(i) and i not in self.constants]
        if dropped and self._fold_sum(node, flow, dropped):
            return
        wide = [
            self._carried(i, flow.width)
            for i, w in zip(inputs, flow.widths, strict=True)
            if w == flow.width and i not in self.constants
        ]
        same = bool(wide) and all(torch.equal(w, wide[0]) for w in wide[1:]) and not any(i in self.constants for i in inputs)
        wanted = wide[0] if same else self.live.live(node, flow.width)
        if flow.zero_if == "never":  # x + 3: what was zero and absent must be there to become 3
            wanted = wanted | self.live.live(node, flow.width)
        for source, axis, width in zip(inputs, flow.in_axes, flow.widths, strict=True):
            if source in self.constants:
                self._insert_constant(node, source, wanted, flow)
            elif axis is not None and width == flow.width and flow.width > 1:
                self._align(node, source, wanted, axis)
            elif axis is not None and self.flows.of[source].axis is not None:
                self._align(node, source, all_of(width), axis)
            else:
                node.replace_input_with(source, self.present(source))
        self._settle(node, wanted)

    @_narrow.register
    def _(self, flow: Concat, node: fx.Node) -> None:
        parts = []
        carried = []
        for source, width in zip(self.flows.inputs[node], flow.widths, strict=True):
            if source in self.constants:
                raise EmptyLayer(self._empty_message(source, node))
            layout = self._carried(source, width)
            carried.append(layout)
            if bool(layout.any()):
                parts.append(self.present(source))
        node.args, node.kwargs = (parts, flow.axis), {}
        self._settle(node, torch.cat(carried))

    @_narrow.register
    def _(self, flow: Moved, node: fx.Node) -> None:
        (source,) = dict.fromkeys(self.flows.inputs[node])
        carried = self._carried(source, flow.inputs)
        if flow.how == "same":
            node.replace_input_with(source, self.present(source))
            wanted = carried[flow.index]
            self._settle(node, wanted)
            if flow.resize is not None:
                flow.resize(node, int(wanted.sum()))
            return
        place = torch.cumsum(carried.long(), 0) - 1
        # all that is there, if it comes in order: then nothing has to be moved
        wanted = torch.cat([carried, none_of(1)])[flow.index]
        straight = torch.equal(place[flow.index[wanted]], torch.arange(int(carried.sum())))
        if not straight:
            wanted = self.live.live(node, flow.width)
        take = place[flow.index[wanted]]
        current = self.present(source)
        if not straight:
            with self.module.graph.inserting_before(node):
                current = self._insert(f"align_{node.name}", Align(take, flow.in_axis), (current,))
        if flow.how == "gather":
            self.standing_for[node] = current
        else:
            node.replace_input_with(source, current)
            assert flow.resize is not None
            flow.resize(node, int(wanted.sum()))
        self._settle(node, wanted)

    @_narrow.register
    def _(self, flow: Blocks, node: fx.Node) -> None:
        (source,) = dict.fromkeys(self.flows.inputs[node])
        carried = self._carried(source, flow.width * flow.size).view(flow.width, flow.size)
        wanted = carried.any(1)
        self._align(node, source, wanted.repeat_interleave(flow.size), flow.in_axis)
        self._settle(node, wanted)
        if flow.resize is not None:
            flow.resize(node, int(wanted.sum()))

    def _settle(self, node: fx.Node, layout: Tensor) -> None:
        if not bool(layout.all()):
            self.layout[node] = layout

    def _keep(self, node: fx.Node, survivors: Any) -> None:
        for name, kept in survivors:
            self.kept[f"{node.target}.{name}"] = kept

    # ---- constants: what is left of a branch that has no inputs any more ---------------------------------------------

    def _is_empty(self, node: fx.Node) -> bool:
        return node in self.layout and not bool(self.layout[node].any())

    def _constant(self, node: fx.Node, flow: Flow) -> Tensor | None:
        """The value that `node` gives for every input, if all that it reads is zero or constant by now and it still matters."""
        inputs = self.flows.inputs[node]
        if flow.axis is None or not inputs or not all(self._is_empty(i) for i in inputs):
            return None
        if not bool(self.live.live(node, self.flows.width(node)).any()):
            return None
        known = any(i in self.constants for i in inputs)
        steady = isinstance(flow, Channelwise) and flow.pointwise and len(inputs) == 1
        if not (steady or (isinstance(flow, Layer) and not known)) or flow.axis == 0:
            raise EmptyLayer(self._empty_message(inputs[0], node))
        self.emptied_by[node] = self.emptied_by.get(inputs[0], str(inputs[0].target))
        return self._value_of(node, flow)

    def _value_of(self, node: fx.Node, flow: Layer | Channelwise | Any) -> Tensor:
        dims = shape_of(node).dims
        assert dims is not None and flow.axis is not None
        shape = [1] * len(dims)
        shape[flow.axis] = dims[flow.axis]
        if isinstance(flow, Layer):
            bias: Any = self.module.get_submodule(str(node.target)).bias
            return torch.zeros(shape, dtype=self._dtype()) if bias is None else bias.detach().view(shape).clone()
        (source,) = self.flows.inputs[node]
        value = self.constants.get(source)
        if value is None:
            value = torch.zeros(shape, dtype=self._dtype(), device=self._device())
        return self._apply(node, value)

    def _apply(self, node: fx.Node, value: Tensor) -> Tensor:
        called = self.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        training = called is not None and called.training
        with torch.no_grad():
            result = call_on(node, called if called is None else called.eval(), value)
        if called is not None:
            called.train(training)
        assert isinstance(result, Tensor)
        return result

    def _dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

    def _device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def _insert_constant(self, reader: fx.Node, source: fx.Node, wanted: Tensor, flow: Join) -> None:
        value = self.constants[source]
        axis = self.flows.of[source].axis
        assert axis is not None
        rest = [i for i in self.flows.inputs[reader] if i not in self.constants and not self._is_empty(i)]
        if not any(shape_of(i).dims == shape_of(reader).dims for i in rest) or not flow.broadcasts:
            raise EmptyLayer(self._empty_message(source, reader))
        if value.shape[axis] == flow.width:
            value = value.index_select(axis, ids(wanted).to(value.device))
        with self.module.graph.inserting_before(reader):
            constant = self._insert(f"constant_{source.name}", Constant(value), ())
        reader.replace_input_with(source, constant)

    def _fold_sum(self, node: fx.Node, flow: Join, dropped: list[fx.Node]) -> bool:
        """Leave out the terms of a plain sum that have become zero; True if only one term is left and stands for the sum."""
        inputs = self.flows.inputs[node]
        rest = [i for i in inputs if i not in dropped]
        if not rest or not flow.broadcasts or flow.zero_if == "first":
            raise EmptyLayer(self._empty_message(dropped[0], node))
        plain_sum = node.target in (operator.add, torch.add, "add") and not node.kwargs and len(node.args) == 2
        left_out_last = node.target in (operator.sub, torch.sub, "sub") and not node.kwargs and node.args[1] in dropped
        if len(inputs) == 2 and (plain_sum or left_out_last) and rest[0] not in self.constants and self._fills(rest[0], node):
            (other,) = rest
            self.standing_for[node] = self.present(other)
            self._settle(node, self._carried(other, flow.width))
            return True
        for source in dropped:
            axis = self.flows.of[source].axis
            dims = shape_of(source).dims
            assert axis is not None and dims is not None
            shape = [1] * len(dims)
            shape[axis] = dims[axis]
            self.constants[source] = torch.zeros(shape, dtype=self._dtype(), device=self._device())
        return False

    def _fills(self, other: fx.Node, node: fx.Node) -> bool:
        """Whether the remaining term has the shape of the sum by itself."""
        return shape_of(other).dims == shape_of(node).dims

    # ---- tidying up --------------------------------------------------------------------------------------------------

    def _fix_sizes(self, node: fx.Node) -> None:
        """x.size(1) of a narrower tensor must still give the original number where arithmetic depends on it."""
        source = next(iter(node.all_input_nodes), None)
        if source is None:
            return
        asks = (node.op == "call_method" and node.target == "size") or (node.target is getattr and node.args[1] == "shape")
        if asks and self._changed(source):
            self._fix_size_call(node, source)
        elif node.target is operator.getitem and source.meta.get("asks_size_of") is not None:
            self._fix_size_item(node, source)

    def _fix_size_call(self, node: fx.Node, source: fx.Node) -> None:
        if self._is_empty(source):
            raise EmptyLayer(self._empty_message(source, node))
        node.replace_input_with(source, self.present(source))
        if source not in self.layout:
            return
        dim = node.args[1] if len(node.args) > 1 and node.op == "call_method" else node.kwargs.get("dim")
        if dim is None:
            node.meta["asks_size_of"] = source
        elif not isinstance(dim, int) or dim % len(shape_of(source).dims or ()) == self.flows.of[source].axis:
            self._substitute(node)

    def _fix_size_item(self, node: fx.Node, query: fx.Node) -> None:
        source = query.meta["asks_size_of"]
        axis, rank = self.flows.of[source].axis, len(shape_of(source).dims or ())
        item = node.args[1]
        if isinstance(item, int) and item % rank == axis:
            self._substitute(node)

    def _substitute(self, node: fx.Node) -> None:
        """Put the value that `node` gave for the example in its place: it depends on nothing but the network."""
        value = shape_of(node).value
        for user in list(node.users):
            swap = lambda n: value if n is node else n  # noqa: E731
            user.args = fx.map_arg(user.args, swap)
            user.kwargs = fx.map_arg(user.kwargs, swap)

    def _erase_unused(self) -> None:
        """Erase what nobody reads any more; what nobody ever read stays."""
        for node in reversed(list(self.module.graph.nodes)):
            if not node.users and node.op not in ("placeholder", "output") and not node.meta.get("unread"):
                self.module.graph.erase_node(node)


def balanced(flow: Layer, carried: Tensor, live: Tensor) -> tuple[Tensor, Tensor, int]:
    """Layouts of a grouped layer's inputs and outputs with as many channels in every group left, and how many groups are left.

    A group without live filters goes as a whole. Elsewhere dead channels stay where another group has more live ones.
    """
    outs, ins = live.view(flow.groups, -1), carried.view(flow.groups, -1)
    alive = outs.any(1)
    outs, ins = _fill(outs, alive), _fill(ins, alive)
    return ins.flatten(), outs.flatten(), int(alive.sum())


def _fill(layout: Tensor, alive: Tensor) -> Tensor:
    """Rows of the groups that are alive filled up to the fullest row (at least 1) with their first free channels."""
    layout = layout & alive[:, None]
    width = max(int(layout.sum(1).max()), 1)
    result = layout.clone()
    for row in ids(alive).tolist():
        missing = width - int(layout[row].sum())
        result[row, ids(~layout[row])[:missing]] = True
    return result
