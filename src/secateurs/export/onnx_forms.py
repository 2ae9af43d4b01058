"""Ops of an ONNX file in forms that int8 kernels have: pools for means, products for hard swishes; short names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FLOAT = 1  # onnx.TensorProto.FLOAT


def multiply_instead_of_hard_swish_(graph: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
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
            graph.value_info.append(helper.make_tensor_value_info(bent, FLOAT, [n or None for n in shapes[given]]))


def attribute(node: Any, name: str) -> int:
    """An integer attribute of a node; 0 where it has none of that name."""
    return next((int(each.i) for each in node.attribute if each.name == name), 0)


def shorten_names_(graph: Any) -> None:
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


def pool_instead_of_mean_(graph: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
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
            batch = helper.make_tensor_value_info(pooled, FLOAT, [None, *shapes[source][1:2], *([1] * (rank - 2))])
            graph.value_info.append(batch)
