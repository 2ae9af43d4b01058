"""Int8 networks in ONNX Runtime's QDQ form: each tensor that an int8 kernel reads or writes passes a pair of QuantizeLinear
and DequantizeLinear, and the runtime fuses what lies between two pairs into one int8 kernel.

Activations are uint8 with a zero point, for a whole tensor; weights are int8 without one, for each filter. Ops that only move
values (gathers, slices, pads, reshapes) run on the int8 values themselves, so that they never stand between a layer and its
pair. A ReLU or clip behind a layer becomes the edge of its int8 range.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from secateurs.errors import NonFinite

LAYERS = ("Conv", "Gemm", "MatMul")
_SUMS = ("Add", "Mul", "GlobalAveragePool", "AveragePool", "Concat", "Sigmoid", "LeakyRelu")
_MOVES = ("Gather", "Slice", "Pad", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "MaxPool", "Identity")
_LIMITS = ("Relu", "Clip")
SELECTS = "select~"  # begins the names of weights that only pick channels
PADS = "pads~"  # begins the names of pads of the network's inputs, and of nodes that pad them
BLOCK, READ_AT_ONCE = 16, 4  # filters and inputs of the fastest int8 kernels come in multiples of these
_FLOAT = 1  # onnx.TensorProto.FLOAT
_BIAS_STEPS = 2.0**29  # of an int32, so that no sum of products and bias overflows

Range = tuple[float, float]


@dataclass(frozen=True)
class Int8Layer:
    """A layer that can run in int8."""

    name: str  # of its weight, as in the network
    node: str  # of the ONNX graph
    macs: int  # of one example


class FloatModel:
    """An ONNX model in float32 with what its quantisation asks of it: types, shapes, layers, candidates for calibration."""

    def __init__(self, model: bytes) -> None:
        import onnx

        self.model = onnx.load_from_string(model)
        graph = self.model.graph
        _shorten_names_(graph)
        self.model = onnx.shape_inference.infer_shapes(self.model, strict_mode=False)
        graph = self.model.graph
        _pool_instead_of_mean_(graph, self.shapes)
        _multiply_instead_of_hard_swish_(graph, self.shapes)
        self.weights = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
        self.outputs = [each.name for each in graph.output]
        self.inputs = [each.name for each in graph.input if each.name not in self.weights]
        self.same_range: dict[str, str] = {}  # tensors that hold values of another
        self.macs = sum(layer.macs for layer in self.layers)  # before alignments are folded into layers
        fold_alignments_(self)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of float tensors, 0 where a size is free."""
        graph = self.model.graph
        return {
            each.name: tuple(int(dim.dim_value) for dim in each.type.tensor_type.shape.dim)
            for each in (*graph.value_info, *graph.input, *graph.output)
            if each.type.tensor_type.elem_type == _FLOAT
        }

    def bytes(self) -> bytes:
        """The model as a file."""
        found: bytes = self.model.SerializeToString()
        return found

    def forget_(self) -> None:
        """Look at the graph anew: its nodes have changed."""
        for name in ("consumers", "layers", "ranged"):
            self.__dict__.pop(name, None)

    @cached_property
    def consumers(self) -> dict[str, list[Any]]:
        """The nodes that read a tensor."""
        found: dict[str, list[Any]] = {}
        for node in self.model.graph.node:
            for name in node.input:
                found.setdefault(name, []).append(node)
        return found

    @cached_property
    def layers(self) -> tuple[Int8Layer, ...]:
        """The layers with constant weights, in network order."""
        shapes, found = self.shapes, []
        for node in self.model.graph.node:
            if self._is_layer(node) and not node.input[1].startswith(SELECTS):
                weight, out = self.weights[node.input[1]], shapes.get(node.output[0], ())
                positions = int(np.prod([max(n, 1) for n in (out[2:] if node.op_type == "Conv" else out[1:-1])]))
                found.append(Int8Layer(node.input[1].removesuffix(".weight"), node.name, int(weight.size) * positions))
        return tuple(found)

    def _is_layer(self, node: Any) -> bool:
        if node.op_type not in LAYERS or node.input[1] not in self.weights or node.input[0] in self.weights:
            return False
        named = {each.name: each for each in node.attribute}
        plain = node.op_type != "Gemm" or (
            all(named[key].f == 1.0 for key in ("alpha", "beta") if key in named)
            and not ("transA" in named and named["transA"].i)
        )
        return plain and self.weights[node.input[1]].dtype == np.float32 and self.weights[node.input[1]].ndim >= 2

    def limit_behind(self, node: Any) -> Any:
        """The ReLU or clip that is all that reads a node's output; its own output is then the one to quantise."""
        readers = self.consumers.get(node.output[0], [])
        if len(readers) != 1 or readers[0].op_type not in _LIMITS or node.output[0] in self.outputs:
            return None
        return readers[0] if node.op_type in (*LAYERS, *_SUMS) and node.op_type != "Sigmoid" else None

    @cached_property
    def ranged(self) -> tuple[str, ...]:
        """The activations whose range calibration measures: all float tensors that may be quantised."""
        shapes, found = self.shapes, dict[str, None]()
        nodes = [node for node in self.model.graph.node if node.op_type in (*LAYERS, *_SUMS, *_MOVES, *_LIMITS)]
        for node in nodes:
            found |= {name: None for name in (*node.input, *node.output) if name in shapes and name not in self.weights}
        inner = {node.output[0] for node in nodes if self.limit_behind(node) is not None}
        return tuple(name for name in found if name not in inner)

    def _replace_(self, name: str, value: Any) -> None:
        """Give an initialiser another value, or add it."""
        from onnx import numpy_helper

        graph = self.model.graph
        for each in graph.initializer:
            if each.name == name:
                graph.initializer.remove(each)
                break
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        self.weights[name] = value


# ---- alignments ----------------------------------------------------------------------------------------------------------


def fold_alignments_(model: FloatModel) -> None:
    """Let convolutions write, or read, the channels that a gather, slice or pad next to them picks, by filters and weights of
    zeros: the outputs stay the same, and nothing stands between int8 kernels.

    Only where that adds few products: int8 kernels compute filters in blocks of 16.
    """
    nodes = list(model.model.graph.node)
    for node in nodes:
        if node.op_type != "Conv" or not model._is_layer(node) or _groups(node) != 1:
            continue
        if len(model.consumers[node.input[1]]) == 1:
            _fold_behind_(model, node)
            _fold_before_(model, node, nodes)
    _select_by_convolutions_(model)
    _add_constants_by_convolutions_(model)
    model.forget_()
    _widen_narrow_(model)
    _pad_images_(model)
    _infer_again_(model)


def _fold_behind_(model: FloatModel, node: Any) -> None:
    """Fold the channels that follow a convolution's output, behind a ReLU too, into its filters."""
    weight, last = model.weights[node.input[1]], node
    readers = _only_reader(model, last)
    if readers is not None and readers.op_type == "Relu":
        last = readers
    channels, ops = list(range(len(weight))), list[Any]()
    picked, reader = channels, _only_reader(model, last)
    while reader is not None and (found := _picked(model, reader, picked)) is not None:
        picked, ops = found, [*ops, reader]
        reader = _only_reader(model, reader)
    if not ops or not _cheap(len(picked), len(channels)):
        return
    model._replace_(node.input[1], _taken(weight, picked, 0))
    if len(node.input) > 2 and node.input[2]:
        name = f"{node.name}b"
        model._replace_(name, _taken(model.weights[node.input[2]], picked, 0))
        node.input[2] = name
    _remove_(model, ops, last.output[0])


def _fold_before_(model: FloatModel, node: Any, nodes: Sequence[Any]) -> None:
    """Fold the channels that a convolution's input is picked from into its weights."""
    writers = {name: each for each in nodes for name in each.output}
    shapes, ops, source = model.shapes, list[Any](), node.input[0]
    while source in writers and len(model.consumers.get(source, ())) == 1 and source not in model.outputs:
        above = writers[source]
        width = shapes.get(above.input[0], (0, 0))[1:2]
        if not width or not width[0] or _picked(model, above, list(range(width[0]))) is None:
            break
        ops, source = [above, *ops], above.input[0]
    if not ops:
        return
    weight, read = model.weights[node.input[1]], shapes[source][1]
    picked: list[int] = list(range(read))
    for each in ops:
        picked = _picked(model, each, picked) or []
    if len(picked) != weight.shape[1] or read > 1.5 * weight.shape[1]:
        return
    wide = np.zeros((len(weight), read, *weight.shape[2:]), np.float32)
    for place, channel in enumerate(picked):
        if channel >= 0:
            wide[:, channel] += weight[:, place]
    model._replace_(node.input[1], wide)
    node.input[0] = source
    for each in ops:
        model.model.graph.node.remove(each)
    model.forget_()


def _widen_narrow_(model: FloatModel) -> None:
    """Give a convolution of fewer than 16 filters, which only the next one reads, zero filters up to 16.

    ONNX Runtime's fastest int8 kernels want multiples of 16 filters. Six 3×3 layers on 32×32 pixels took 8.6 ms with 16
    filters each at batch 64, 13.7 with 12 and 12.1 with 8 (AMD EPYC with AVX-512 VNNI, one thread); from 20 filters on,
    padding to the next multiple cost more than it saved.
    """
    for first, _, second in pairs(model):
        weight, after = model.weights[first.input[1]], model.weights[second.input[1]]
        if len(weight) >= BLOCK or _groups(first) != 1 or _groups(second) != 1 or after.ndim != 4:
            continue
        rows = [*range(len(weight)), *[-1] * (BLOCK - len(weight))]
        model._replace_(first.input[1], _taken(weight, rows, 0))
        if len(first.input) > 2 and first.input[2]:
            name = f"{first.name}b"
            model._replace_(name, _taken(model.weights[first.input[2]], rows, 0))
            first.input[2] = name
        columns = np.swapaxes(_taken(np.swapaxes(after, 0, 1), rows, 0), 0, 1)
        model._replace_(second.input[1], np.ascontiguousarray(columns))


def _pad_images_(model: FloatModel) -> None:
    """Pad images to a multiple of 4 channels, by zeros that weights of zeros read.

    ONNX Runtime's fastest int8 kernels read channels in fours: the three of an image make the first layer slow.
    """
    from onnx import helper

    graph = model.model.graph
    for node in list(graph.node):
        if node.op_type != "Conv" or not model._is_layer(node) or _groups(node) != 1 or node.input[0] not in model.inputs:
            continue
        weight, given = model.weights[node.input[1]], node.input[0]
        missing = -weight.shape[1] % READ_AT_ONCE
        if not missing or len(weight) % BLOCK or weight.ndim != 4 or len(model.consumers[node.input[1]]) > 1:
            continue
        pads, padded = f"{PADS}{given}", f"{given}~p"
        model._replace_(node.input[1], np.pad(weight, ((0, 0), (0, missing), (0, 0), (0, 0))))
        node.input[0] = padded
        if padded not in model.same_range:
            model._replace_(pads, np.array([0, 0, 0, 0, 0, missing, 0, 0], np.int64))
            graph.node.insert(0, helper.make_node("Pad", [given, pads], [padded], name=pads))
            model.same_range[padded] = given
        model.forget_()


def _select_by_convolutions_(model: FloatModel) -> None:
    """Write what gathers channels elsewhere as a 1×1 convolution with weights of 0 and 1, strided where positions are skipped.

    ONNX Runtime keeps int8 channels last in memory; a gather along the second axis makes it transpose before and after, and
    so at every sum behind it.
    """
    from onnx import helper

    graph, done = model.model.graph, set[str]()
    for node in list(graph.node):
        shapes = model.shapes
        width = (*shapes.get(node.input[0], ()), 0, 0)[1] if node.input else 0
        rank = len(shapes.get(node.output[0], ()))
        if node.name in done or rank != 4 or not width:
            continue
        picked, strides, ops, reader = list(range(width)), [1, 1], list[Any](), node
        while reader is not None:
            channels, skipped = _picked(model, reader, picked), _skipped(model, reader)
            if channels is None and skipped is None:
                break
            picked = picked if channels is None else channels
            strides = strides if skipped is None else [a * b for a, b in zip(strides, skipped, strict=True)]
            ops, reader = [*ops, reader], _only_reader(model, reader)
        if not any(each.op_type == "Gather" for each in ops) and strides == [1, 1]:
            continue
        weight = np.zeros((len(picked), width, 1, 1), np.float32)
        for row, channel in enumerate(picked):
            weight[row, max(channel, 0)] = float(channel >= 0)
        name, last = f"{SELECTS}{len(done)}", ops[-1].output[0]
        model._replace_(name, weight)
        made = helper.make_node("Conv", [node.input[0], name], [last], name=node.name, kernel_shape=[1, 1], strides=strides)
        graph.node.insert(list(graph.node).index(node), made)
        for each in ops:
            graph.node.remove(each)
        done |= {each.name for each in ops}
        model.same_range[last] = node.input[0]
        model.forget_()


def _add_constants_by_convolutions_(model: FloatModel) -> None:
    """Write a sum with one constant for each channel, which a folded branch leaves, as a 1×1 convolution of ones with a bias.

    ONNX Runtime adds them channel by channel: 2.1 ms for 16 channels of 32×32 at batch 64, more than a convolution there.
    """
    from onnx import helper

    graph, shapes = model.model.graph, model.shapes
    for number, node in enumerate(list(graph.node)):
        if node.op_type != "Add" or sum(name in model.weights for name in node.input) != 1:
            continue
        constant, given = sorted(node.input, key=lambda name: name not in model.weights)
        value, channels = model.weights[constant], (*shapes.get(given, ()), 0, 0)[1]
        by_channel = value.dtype == np.float32 and value.shape in ((channels, 1, 1), (1, channels, 1, 1))
        if not channels or not by_channel or len(shapes[given]) != 4:
            continue
        weight, bias = f"{SELECTS}c{number}", f"{node.name}c"
        model._replace_(weight, np.eye(channels, dtype=np.float32)[:, :, None, None])
        model._replace_(bias, value.reshape(-1))
        made = helper.make_node("Conv", [given, weight, bias], list(node.output), name=node.name, kernel_shape=[1, 1])
        graph.node.insert(list(graph.node).index(node), made)
        graph.node.remove(node)
        model.forget_()


def _skipped(model: FloatModel, node: Any) -> tuple[int, int] | None:
    """The strides of a slice that takes every n-th row or column, from the first one on; None for other nodes."""
    constants = [model.weights.get(name) for name in node.input[1:]]
    if node.op_type != "Slice" or len(constants) != 4 or any(each is None for each in constants):
        return None
    start, end, axes, steps = (each.tolist() for each in constants if each is not None)
    sizes = model.shapes.get(node.input[0], ())
    if (
        len(axes) != 1
        or axes[0] not in (2, 3)
        or len(sizes) != 4
        or start != [0]
        or steps[0] < 1
        or end[0] < (sizes[axes[0]] or 1 << 30)
    ):
        return None
    return (steps[0], 1) if axes[0] == 2 else (1, steps[0])


def _picked(model: FloatModel, node: Any, channels: Sequence[int]) -> list[int] | None:
    """The channels that a gather, slice or pad along the channels makes of `channels`, -1 for zeros; None for other nodes."""
    constants = [model.weights.get(name) if name else None for name in node.input[1:]]
    if node.op_type == "Gather" and _attribute(node, "axis") == 1 and constants[0] is not None and constants[0].ndim == 1:
        return [channels[int(i)] for i in constants[0]]
    rank = len(model.shapes.get(node.output[0], ()))
    if node.op_type == "Pad" and constants[0] is not None and len(constants[0]) == 2 * rank > 2:
        pads = constants[0].tolist()
        others = [n for i, n in enumerate(pads) if i not in (1, rank + 1)]
        filled = constants[1] if len(constants) > 1 else None
        named = len(constants) > 1 and bool(node.input[2])
        plain = all(each.name != "mode" or each.s == b"constant" for each in node.attribute)
        zero = not named or (filled is not None and not np.any(filled))
        if plain and zero and not any(others) and min(pads) >= 0 and len(node.input) < 4:
            return [*[-1] * pads[1], *channels, *[-1] * pads[rank + 1]]
    known = [each.tolist() for each in constants if each is not None]
    if node.op_type == "Slice" and 3 <= len(known) == len(constants):
        (start, end, axes), steps = known[:3], known[3] if len(known) > 3 else [1]
        if axes == [1] and steps == [1]:
            return list(channels)[slice(start[0], end[0])]
    return None


def _cheap(now: int, before: int) -> bool:
    return now <= 1.5 * before or -(-now // 16) == -(-before // 16)


def _taken(values: Any, rows: Sequence[int], axis: int) -> Any:
    """Rows of an array, zeros for -1."""
    padded = np.concatenate([values, np.zeros((1, *values.shape[1:]), values.dtype)], axis)
    return np.take(padded, [row if row >= 0 else len(values) for row in rows], axis)


def _only_reader(model: FloatModel, node: Any) -> Any:
    readers = model.consumers.get(node.output[0], [])
    return readers[0] if len(readers) == 1 and node.output[0] not in model.outputs else None


def _remove_(model: FloatModel, ops: Sequence[Any], source: str) -> None:
    """Take ops out of the graph: what reads the last of them reads `source`."""
    for reader in model.consumers.get(ops[-1].output[0], []):
        for place, name in enumerate(reader.input):
            if name == ops[-1].output[0]:
                reader.input[place] = source
    for each in ops:
        model.model.graph.node.remove(each)
    _infer_again_(model)


def _infer_again_(model: FloatModel) -> None:
    """Shapes of tensors after widths have changed."""
    import onnx

    del model.model.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(model.model, strict_mode=False)
    model.model.graph.value_info.extend(inferred.graph.value_info)
    model.forget_()


# ---- equalised channels --------------------------------------------------------------------------------------------------


def pairs(model: FloatModel) -> tuple[tuple[Any, str, Any], ...]:
    """Layers whose output only the next layer reads, through a ReLU or nothing: the first, the tensor between, the second.

    Channel j of that tensor may be multiplied by any factor above 0 if the second layer's weights for it are divided by it.
    """
    found = []
    for node in model.model.graph.node:
        if node.op_type != "Conv" or not model._is_layer(node) or node.input[1].startswith(SELECTS):
            continue
        tensor, readers = node.output[0], model.consumers.get(node.output[0], [])
        if len(readers) == 1 and readers[0].op_type in ("Relu", "LeakyRelu") and tensor not in model.outputs:
            tensor, readers = readers[0].output[0], model.consumers.get(readers[0].output[0], [])
        once = sum(node.input[1] in each.input for each in model.model.graph.node) == 1
        if len(readers) != 1 or tensor in model.outputs or not once:
            continue
        second = readers[0]
        alone = len(model.consumers.get(second.input[1], ())) == 1 if len(second.input) > 1 else False
        channels = len(model.weights[node.input[1]])
        selects = len(second.input) > 1 and second.input[1].startswith(SELECTS)
        if second.op_type == "Conv" and model._is_layer(second) and alone and not selects and _groups(second) in (1, channels):
            found.append((node, tensor, second))
    return tuple(found)


def equalise_(model: FloatModel, largest: Mapping[str, Any]) -> None:
    """Scale channels between two layers so that none needs a range that the others do not fill; the outputs stay the same.

    `largest` has the largest magnitude (C,) of every channel of the tensors between (see `pairs`). A layer that was solved
    after a cut may read a channel of small values by large weights: alone among the weights of a filter, these would take
    its whole int8 range. Each channel gets the factor with which its values and the weights that read it are alike.
    """
    for first, tensor, second in pairs(model):
        weight, after = model.weights[first.input[1]], model.weights[second.input[1]]
        seen = np.asarray(largest[tensor], np.float64)
        if _groups(second) == 1:
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
        shape = (1, -1, *[1] * (after.ndim - 2)) if _groups(second) == 1 else (-1, *[1] * (after.ndim - 1))
        model._replace_(second.input[1], (after / factor.reshape(shape)).astype(np.float32))


def _groups(node: Any) -> int:
    return _attribute(node, "group") or 1


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
            elif node.op_type in _SUMS and self._reads_eight(node) and self._fits(node):
                self._emit(node, [self._read(name) for name in node.input], limit)
            elif node.op_type == "HardSigmoid" and node.input[0] in self.eight:
                self._hard_sigmoid(node)
            elif node.op_type in _MOVES and self._moved_in_eight(node) and self._moves(node):
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
        axis = 0 if node.op_type == "Conv" or _attribute(node, "transB") else weight.ndim - 1
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


def _multiply_instead_of_hard_swish_(graph: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write HardSwish as the product of its input and a HardSigmoid, which both have int8 forms."""
    from onnx import helper

    for place in reversed(range(len(graph.node))):
        node = graph.node[place]
        if node.op_type == "HardSwish" and node.input[0] in shapes:
            given, output, name = node.input[0], node.output[0], node.name
            graph.node.remove(node)
            bent = f"{output}~h"
            graph.node.insert(place, helper.make_node("HardSigmoid", [given], [bent], name=f"{name}h", alpha=1 / 6, beta=0.5))
            graph.node.insert(place + 1, helper.make_node("Mul", [given, bent], [output], name=name))
            graph.value_info.append(helper.make_tensor_value_info(bent, _FLOAT, [n or None for n in shapes[given]]))


def _attribute(node: Any, name: str) -> int:
    return next((int(each.i) for each in node.attribute if each.name == name), 0)


def _shorten_names_(graph: Any) -> None:
    """Number tensors inside the graph: their names would be a tenth of a small file. Inputs, outputs, weights keep theirs."""
    kept = {each.name for each in (*graph.input, *graph.output, *graph.initializer)} | {""}
    new: dict[str, str] = {}
    for number, node in enumerate(graph.node):
        for place, name in enumerate(node.output):
            if name not in kept:
                new[name] = node.output[place] = f"t{len(new)}"
        for place, name in enumerate(node.input):
            node.input[place] = new.get(name, name)
        node.name = f"n{number}"
    del graph.value_info[:]


def _pool_instead_of_mean_(graph: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write means over all positions as GlobalAveragePool, for which the runtime has an int8 kernel."""
    import onnx
    from onnx import helper

    constants = {each.name: each for each in graph.initializer}
    for place in reversed(range(len(graph.node))):
        node = graph.node[place]
        rank = len(shapes.get(node.input[0], ())) if node.input else 0
        if node.op_type != "ReduceMean" or len(node.input) < 2 or node.input[1] not in constants or rank < 3:
            continue
        axes = {int(axis) % rank for axis in onnx.numpy_helper.to_array(constants[node.input[1]]).ravel()}
        if axes != set(range(2, rank)):
            continue
        keeps = next((each.i for each in node.attribute if each.name == "keepdims"), 1)
        pooled = node.output[0] if keeps else f"{node.output[0]}~p"
        source, output, name = node.input[0], node.output[0], node.name
        graph.node.remove(node)
        graph.node.insert(place, helper.make_node("GlobalAveragePool", [source], [pooled], name=name))
        if not keeps:
            graph.node.insert(place + 1, helper.make_node("Flatten", [pooled], [output], name=f"{name}f", axis=1))
            batch = helper.make_tensor_value_info(pooled, _FLOAT, [None, *shapes[source][1:2], *([1] * (rank - 2))])
            graph.value_info.append(batch)
