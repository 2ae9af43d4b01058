"""Int8 networks in ONNX Runtime's QDQ form: each tensor that an int8 kernel reads or writes passes a pair of QuantizeLinear
and DequantizeLinear, and the runtime fuses what lies between two pairs into one int8 kernel.

Activations are uint8 with a zero point, for a whole tensor; weights are int8 without one, for each filter. Ops that only move
values (gathers, slices, pads, reshapes) run on the int8 values themselves, so that they never stand between a layer and its
pair. A ReLU or clip behind a layer becomes the edge of its int8 range.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from secateurs.errors import NonFinite
from secateurs.export.float_model import MOVES, PADS, SELECTS, SUMS, FloatModel, groups, pairs
from secateurs.export.onnx_forms import attribute

_BIAS_STEPS = 2.0**29  # of an int32, so that no sum of products and bias overflows

Range = tuple[float, float]


# ---- equalised channels --------------------------------------------------------------------------------------------------


def equalise_(model: FloatModel, largest: Mapping[str, Any]) -> None:
    """Scale channels between two layers so that none needs a range that the others do not fill; the outputs stay the same.

    `largest` has the largest magnitude (C,) of every channel of the tensors between (see `pairs`). A layer that was solved
    after a cut may read a channel of small values by large weights: alone among the weights of a filter, these would take
    its whole int8 range. Each channel gets the factor with which its values and the weights that read it are alike.
    """
    for first, tensor, second in pairs(model):
        weight, after = model.weights[first.input[1]], model.weights[second.input[1]]
        seen = np.asarray(largest[tensor], np.float64)
        if groups(second) == 1:
            read = np.abs(after).max(axis=(0, *range(2, after.ndim))).astype(np.float64)
        else:
            read = np.ones(len(seen))  # one filter for each channel, with a scale of its own
        usual = np.sqrt(seen * read)
        usual = np.where(usual > 0, usual, np.median(usual[usual > 0]) if np.any(usual > 0) else 1.0)
        # where calibration saw nothing, the weights that read it become as large as the others
        factor = np.where(seen > 0, usual / np.maximum(seen, 1e-30), read / usual)
        factor = np.where(read > 0, np.clip(factor / np.exp(np.log(np.maximum(factor, 1e-30)).mean()), 1e-6, 1e6), 1.0)
        model._replace_(first.input[1], (weight * factor.reshape(-1, *[1] * (weight.ndim - 1))).astype(np.float32))
        if len(first.input) > 2 and first.input[2]:
            name = f"{first.name}b"  # its own: others may share it
            model._replace_(name, (model.weights[first.input[2]] * factor).astype(np.float32))
            first.input[2] = name
        shape = (1, -1, *[1] * (after.ndim - 2)) if groups(second) == 1 else (-1, *[1] * (after.ndim - 1))
        model._replace_(second.input[1], (after / factor.reshape(shape)).astype(np.float32))


def quantised_model(model: FloatModel, ranges: Mapping[str, Range], *, floats: Collection[str] = (), bits: int = 8) -> bytes:
    """The model in QDQ form: activations within `ranges`, layers whose nodes are in `floats` in float32.

    `bits` of the weights: 7 where the CPU adds pairs of products in 16 bits, which 8 overflow.
    """
    return _Writer(model, ranges, frozenset(floats), bits).written()


class _Writer:
    """One pass over the nodes in order; `eight` maps tensors to the names of their int8 values with scale and zero point."""

    def __init__(self, model: FloatModel, ranges: Mapping[str, Range], floats: frozenset[str], bits: int) -> None:
        self.source, self.ranges, self.floats, self.most = model, ranges, floats, 2 ** (bits - 1) - 1
        self.nodes: list[Any] = []
        self.initialisers: dict[str, Any] = {}
        self.eight: dict[str, tuple[str, str, str]] = {}
        self.plain: dict[str, str] = {}  # float values of a tensor that exists only in int8
        self.params: dict[tuple[float, int], tuple[str, str]] = {}
        self.shapes = model.shapes

    def written(self) -> bytes:
        import onnx
        from onnx import helper

        graph = self.source.model.graph
        skipped: set[str] = set()
        for node in graph.node:
            if node.name in skipped:
                continue
            limit = self.source.limit_behind(node)
            selects = any(name.startswith(SELECTS) for name in node.input[1:2])
            if self.source._is_layer(node) and node.name not in self.floats and (not selects or node.input[0] in self.eight):
                self._layer(node, limit)
            elif node.op_type in SUMS and self._reads_eight(node) and self._fits(node):
                self._emit(node, [self._read(name) for name in node.input], limit)
            elif node.op_type == "HardSigmoid" and node.input[0] in self.eight:
                self._hard_sigmoid(node)
            elif node.op_type in MOVES and self._moved_in_eight(node) and self._moves(node):
                if node.input[0] not in self.eight:
                    self._quantise(node.input[0], node.input[0])
                self._move(node)
                limit = None
            else:
                given = [self._dequantised(name) if name not in self.source.weights else name for name in node.input]
                copied = onnx.NodeProto()
                copied.CopyFrom(node)
                del copied.input[:]
                copied.input.extend(given)
                self.nodes.append(copied)
                limit = None
            if limit is not None:
                skipped.add(limit.name)
        for name in {each.name for each in graph.output} & self.eight.keys():  # an output keeps its name
            self._dequantised(name)
            for node in self.nodes:
                for names in (node.input, node.output):
                    for place, each in enumerate(names):
                        names[place] = name if each == self.plain[name] else each
        used = {name for node in self.nodes for name in node.input}
        kept = [each for each in graph.initializer if each.name in used and each.name not in self.initialisers]
        made = helper.make_graph(
            self.nodes, "int8", graph.input, graph.output, [*kept, *(v for k, v in self.initialisers.items() if k in used)]
        )
        model = helper.make_model(made, opset_imports=self.source.model.opset_import)
        model.ir_version = self.source.model.ir_version
        model.producer_name = "secateurs"
        found: bytes = model.SerializeToString()
        return found

    # ---- ops ---------------------------------------------------------------------------------------------------------

    def _layer(self, node: Any, limit: Any) -> None:
        given, (scale, _) = node.input[0], self._parameters(node.input[0])
        weight = self.source.weights[node.input[1]]
        axis = 0 if node.op_type == "Conv" or attribute(node, "transB") else weight.ndim - 1
        others = tuple(i for i in range(weight.ndim) if i != axis)
        largest = np.abs(weight).max(axis=others).astype(np.float64)
        bias = self.source.weights.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        steps = np.maximum(largest / self.most, 1e-12)
        if bias is not None:  # a filter of tiny weights, or of none, still adds its bias exactly
            steps = np.maximum(steps, np.abs(bias.astype(np.float64)) / (scale * _BIAS_STEPS))
        steps = steps.astype(np.float32)
        shape = [-1 if i == axis else 1 for i in range(weight.ndim)]
        eight = np.clip(np.rint(weight / steps.reshape(shape)), -self.most, self.most).astype(np.int8)
        inputs = [self._read(given), self._constant(f"{node.name}w", eight, steps, axis)]
        if bias is not None:
            product = (np.float32(scale) * steps).astype(np.float32)
            whole = np.rint(bias.astype(np.float64) / product.astype(np.float64)).astype(np.int32)
            inputs.append(self._constant(f"{node.name}b", whole, product, 0))
        if node.op_type != "Conv" and limit is None and set(node.output) & set(self.source.outputs):
            self._append(node, inputs, node.output[0])  # the runtime has a kernel that gives float
        else:
            self._emit(node, inputs, limit)

    def _emit(self, node: Any, inputs: Sequence[str], limit: Any) -> None:
        """Add a node on dequantised inputs, and quantise what it gives; a limit behind it becomes the edge of the range."""
        name = node.output[0] if limit is None else limit.output[0]
        raw = f"{name}~"
        self._append(node, inputs, raw)
        self._quantise(name, raw)

    def _hard_sigmoid(self, node: Any) -> None:
        """Write max(0, min(1, αx + β)) as a sum: the int8 values of x with another scale, β, and a range from 0 to 1."""
        from onnx import helper, numpy_helper

        slope, offset = _slope_and_offset(node)
        (scale, zero), (eight, _, _) = self._parameters(node.input[0]), self.eight[node.input[0]]
        name = node.output[0]
        constant = f"{name}~b8"
        self.initialisers[constant] = numpy_helper.from_array(np.asarray(255, np.uint8), constant)
        terms = (f"{name}~a", eight, (scale * slope, zero)), (f"{name}~b", constant, (offset / 255, 0))
        for term, codes, (step, middle) in terms:
            names = self._named(float(np.float32(step)), middle)
            self.nodes.append(helper.make_node("DequantizeLinear", [codes, *names], [term]))
        self.nodes.append(helper.make_node("Add", [term for term, _, _ in terms], [f"{name}~"], name=node.name))
        names = self._named(float(np.float32(1 / 255)), 0)
        self.nodes.append(helper.make_node("QuantizeLinear", [f"{name}~", *names], [f"{name}~8"]))
        self.eight[name] = (f"{name}~8", *names)

    def _move(self, node: Any) -> None:
        """Run the op on the int8 values; its outputs have their scale and zero point."""
        import onnx

        eight, scale, zero = self.eight[node.input[0]]
        moved = onnx.NodeProto()
        moved.CopyFrom(node)
        moved.input[0], moved.output[0] = eight, f"{node.output[0]}~8"
        if node.op_type == "Pad":
            moved.input.extend([""] * (3 - len(moved.input)))
            moved.input[2] = zero
        self.nodes.append(moved)
        self.eight[node.output[0]] = (moved.output[0], scale, zero)

    def _append(self, node: Any, inputs: Sequence[str], output: str) -> None:
        import onnx

        made = onnx.NodeProto()
        made.CopyFrom(node)
        del made.input[:], made.output[:]
        made.input.extend(inputs)
        made.output.append(output)
        self.nodes.append(made)

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def _read(self, name: str) -> str:
        """The dequantised values of a tensor, quantised first if it is not yet."""
        if name in self.source.weights:
            return self._constant_activation(name)
        if name not in self.eight:
            self._quantise(name, name)
        return self._dequantised(name)

    def _quantise(self, name: str, raw: str) -> None:
        from onnx import helper

        scale, zero = self._named(*self._parameters(name))
        self.nodes.append(helper.make_node("QuantizeLinear", [raw, scale, zero], [f"{name}~8"]))
        self.eight[name] = (f"{name}~8", scale, zero)

    def _dequantised(self, name: str) -> str:
        """The float values of a tensor: those of its int8 values where it has them; dequantised when first read."""
        if name in self.eight and name not in self.plain:
            from onnx import helper

            self.plain[name] = f"{name}~f"
            self.nodes.append(helper.make_node("DequantizeLinear", list(self.eight[name]), [self.plain[name]]))
        return self.plain.get(name, name)

    def _parameters(self, name: str) -> tuple[float, int]:
        """Scale and zero point of a tensor."""
        known = self.eight.get(name)
        if known is not None:
            return next(pair for pair, names in self.params.items() if names == known[1:])
        while name in self.source.same_range:
            name = self.source.same_range[name]
            if name in self.eight:
                return self._parameters(name)
        return step_and_zero(*self._told_apart(name))

    def _told_apart(self, name: str) -> Range:
        """The range of a tensor, without what a hard sigmoid, or a hard swish, that reads it does not tell apart."""
        (low, high), readers = self.ranges[name], self.source.consumers.get(name, [])
        bends = [node for node in readers if node.op_type == "HardSigmoid"]
        if len(bends) != 1 or name in self.source.outputs:
            return low, high
        slope, offset = _slope_and_offset(bends[0])
        others = [node for node in readers if node is not bends[0]]
        if all(node.op_type == "Mul" and set(node.input) == {name, bends[0].output[0]} for node in others):
            low, high = max(low, -offset / slope), high if others else min(high, (1 - offset) / slope)
        return low, high

    def _named(self, scale: float, zero: int) -> tuple[str, str]:
        from onnx import numpy_helper

        if (scale, zero) not in self.params:
            names = f"s~{len(self.params)}", f"z~{zero}"
            self.initialisers[names[0]] = numpy_helper.from_array(np.asarray(scale, np.float32), names[0])
            self.initialisers[names[1]] = numpy_helper.from_array(np.asarray(zero, np.uint8), names[1])
            self.params[scale, zero] = names
        return self.params[scale, zero]

    def _constant(self, name: str, eight: Any, steps: Any, axis: int) -> str:
        """The dequantised values of a constant, with a scale for each index of `axis`."""
        from onnx import helper, numpy_helper

        parts = {f"{name}~8": eight, f"{name}~s": steps}
        if eight.dtype == np.int8:  # fully connected layers are only fused where a zero point is written
            parts[f"{name}~z"] = np.zeros(steps.shape, np.int8)
        for one, values in parts.items():
            self.initialisers[one] = numpy_helper.from_array(np.ascontiguousarray(values), one)
        self.nodes.append(helper.make_node("DequantizeLinear", list(parts), [f"{name}~f"], axis=axis))
        return f"{name}~f"

    def _constant_activation(self, name: str) -> str:
        """A constant that a sum adds, as uint8 like an activation."""
        from onnx import helper, numpy_helper

        value, made = self.source.weights[name], f"{name}~f"
        if name not in self.eight:
            step, zero = step_and_zero(float(value.min(initial=0.0)), float(value.max(initial=0.0)))
            names = self._named(step, zero)
            eight = np.clip(np.rint(value / np.float32(step)) + zero, 0, 255).astype(np.uint8)
            self.initialisers[f"{name}~8"] = numpy_helper.from_array(eight, f"{name}~8")
            self.nodes.append(helper.make_node("DequantizeLinear", [f"{name}~8", *names], [made]))
            self.eight[name], self.plain[name] = (f"{name}~8", *names), made
        return made

    # ---- what an op may do -------------------------------------------------------------------------------------------

    def _reads_eight(self, node: Any) -> bool:
        return any(name in self.eight and name not in self.source.weights for name in node.input)

    def _moved_in_eight(self, node: Any) -> bool:
        """Whether the op's input exists in int8; images are quantised before they are padded for an int8 layer."""
        pads = node.name.startswith(PADS)
        read = pads and any(each.name not in self.floats for each in self.source.consumers[node.output[0]])
        return node.input[0] in self.eight or read

    def _fits(self, node: Any) -> bool:
        """Whether all inputs of a sum are float tensors with known ranges."""
        return all(name in self.ranges or (name in self.source.weights and self._is_float(name)) for name in node.input)

    def _is_float(self, name: str) -> bool:
        return bool(self.source.weights[name].dtype == np.float32)

    def _moves(self, node: Any) -> bool:
        """Whether the op can run on int8 values: pads only by zero."""
        if node.op_type != "Pad":
            return len(node.output) == 1 or not any(node.output[1:])
        if any(each.name == "mode" and each.s != b"constant" for each in node.attribute):
            return False
        filled = node.input[2] if len(node.input) > 2 else ""
        return not filled or (filled in self.source.weights and not np.any(self.source.weights[filled]))


def step_and_zero(low: float, high: float) -> tuple[float, int]:
    """Scale and zero point of uint8 values for a range, which is widened to contain 0; 1 and 0 for an empty one."""
    low, high = min(low, 0.0), max(high, 0.0)
    if not (np.isfinite(low) and np.isfinite(high)):
        raise NonFinite(f"calibration gave the range {low} to {high}, wanted finite activations.")
    step = float(np.float32((high - low) / 255))
    if step < 1e-30:
        return 1.0, 0
    return step, int(np.clip(np.rint(-low / step), 0, 255))


def _slope_and_offset(node: Any) -> tuple[float, float]:
    """α and β of a HardSigmoid."""
    found = {"alpha": 0.2, "beta": 0.5} | {each.name: each.f for each in node.attribute}
    return found["alpha"], found["beta"]
