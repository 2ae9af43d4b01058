"""A network as an ONNX file in float32, made ready for integers: what stands beside its convolutions is folded into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from secateurs.export.onnx_forms import FLOAT, attribute, multiply_instead_of_hard_swish_, pool_instead_of_mean_, shorten_names_

LAYERS = ("Conv", "Gemm", "MatMul")
SUMS = ("Add", "Mul", "GlobalAveragePool", "AveragePool", "Concat", "Sigmoid", "LeakyRelu")
MOVES = ("Gather", "Slice", "Pad", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "MaxPool", "Identity")
_LIMITS = ("Relu", "Clip")
SELECTS = "select~"  # begins the names of weights that only pick channels
PADS = "pads~"  # begins the names of pads of the network's inputs, and of nodes that pad them
BLOCK, READ_AT_ONCE = 16, 4  # filters and inputs of the fastest int8 kernels come in multiples of these


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
        shorten_names_(graph)
        self.model = onnx.shape_inference.infer_shapes(self.model, strict_mode=False)
        graph = self.model.graph
        pool_instead_of_mean_(graph, self.shapes)
        multiply_instead_of_hard_swish_(graph, self.shapes)
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
            if each.type.tensor_type.elem_type == FLOAT
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
        return readers[0] if node.op_type in (*LAYERS, *SUMS) and node.op_type != "Sigmoid" else None

    @cached_property
    def ranged(self) -> tuple[str, ...]:
        """The activations whose range calibration measures: all float tensors that may be quantised."""
        shapes, found = self.shapes, dict[str, None]()
        nodes = [node for node in self.model.graph.node if node.op_type in (*LAYERS, *SUMS, *MOVES, *_LIMITS)]
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


def fold_alignments_(model: FloatModel) -> None:
    """Let convolutions write, or read, the channels that a gather, slice or pad next to them picks, by filters and weights of
    zeros: the outputs stay the same, and nothing stands between int8 kernels.

    Only where that adds few products: int8 kernels compute filters in blocks of 16.
    """
    nodes = list(model.model.graph.node)
    for node in nodes:
        if node.op_type != "Conv" or not model._is_layer(node) or groups(node) != 1:
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
        if len(weight) >= BLOCK or groups(first) != 1 or groups(second) != 1 or after.ndim != 4:
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
        if node.op_type != "Conv" or not model._is_layer(node) or groups(node) != 1 or node.input[0] not in model.inputs:
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
    if node.op_type == "Gather" and attribute(node, "axis") == 1 and constants[0] is not None and constants[0].ndim == 1:
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
        if second.op_type == "Conv" and model._is_layer(second) and alone and not selects and groups(second) in (1, channels):
            found.append((node, tensor, second))
    return tuple(found)


def groups(node: Any) -> int:
    """The groups of a convolution."""
    return attribute(node, "group") or 1
