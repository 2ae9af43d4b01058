"""The engines that a recipe can name: PyTorch in eager mode or compiled, and ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateurs._util.modules import Device
from secateurs.config import Recipe
from secateurs.errors import InvalidInput
from secateurs.export.deliver import prepared
from secateurs.export.programs import check_packages, feed, onnx_bytes, start_session
from secateurs.graph.engine import Engine, MeasureEngine, Timer, TorchEngine, batch_like, timed
from secateurs.graph.latency import using_threads
from secateurs.graph.trace import Graph

_OPSET = 18


def engine_for(recipe: Recipe, measure: Callable[[nn.Module], float] | None = None, device: Device = None) -> Engine:
    """The engine that the recipe names, or the user's own function `measure(module) -> seconds`."""
    batch, threads = recipe.latency_batch or 1, recipe.latency_threads
    if measure is not None:
        if recipe.engine is not None:
            raise InvalidInput(f"measure and engine = {recipe.engine!r}: give one of them.")
        return MeasureEngine(measure)
    if recipe.engine == "onnxruntime":
        return OnnxEngine(batch, threads)
    if recipe.engine == "compile":
        return CompileEngine(batch, threads, device)
    return TorchEngine(batch, threads, device)


class CompileEngine(TorchEngine):
    """Networks by torch.compile. Single layers run in eager mode: compiled convolutions call the same kernels."""

    name = "compile"

    def callable(self, module: nn.Module) -> Callable[..., Any]:
        """The module, compiled for this batch."""
        found: Callable[..., Any] = torch.compile(module, dynamic=False)
        return found


class OnnxEngine:
    """ONNX Runtime on the CPU, on networks as `to_onnx` writes them."""

    name, runs_layers = "onnxruntime", True

    def __init__(self, batch: int = 1, threads: int | None = None) -> None:
        check_packages()
        self.batch, self.threads = batch, threads

    def network(self, graph: Graph) -> Timer:
        """Export the network, and load it."""
        ready = prepared(graph)
        return self._timer(onnx_bytes(ready), tuple(t.cpu() for t in batch_like(graph, self.batch)))

    def layer(self, layer: nn.Module, shape: Sequence[int], times: int) -> Timer:
        """Load a model of `times` copies of the layer, side by side, with weights of their own: equal ones would be merged."""
        parameter = next(layer.parameters())
        if parameter.dtype != torch.float32 or not isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
            return TorchEngine(self.batch, self.threads).layer(layer, shape, times)
        return self._timer(layer_model(layer, shape, times), (torch.rand(*shape, generator=torch.Generator().manual_seed(0)),))

    def _timer(self, model: bytes, inputs: tuple[Tensor, ...]) -> Timer:
        with using_threads(self.threads):
            session = start_session(model)
        given = feed(session, inputs)
        return timed(lambda: session.run(None, given))


def layer_model(layer: nn.Linear | nn.modules.conv._ConvNd, shape: Sequence[int], times: int) -> bytes:
    """An ONNX model of the layer and a ReLU, `times` times on one input: exporting it would take a second for each width."""
    from onnx import TensorProto, helper, numpy_helper

    nodes, weights = [], []
    for i in range(times):
        names = ["x", f"w{i}"]
        drawn = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(i)) * 1e-2
        weights.append(
            numpy_helper.from_array((drawn.T if isinstance(layer, nn.Linear) else drawn).contiguous().numpy(), names[1])
        )
        if isinstance(layer, nn.Linear):
            nodes.append(helper.make_node("MatMul", names, [f"y{i}"]))
        else:
            if layer.bias is not None:
                names.append(f"b{i}")
                weights.append(numpy_helper.from_array(torch.zeros(len(layer.bias)).numpy(), names[2]))
            kind = "ConvTranspose" if layer.transposed else "Conv"
            nodes.append(helper.make_node(kind, names, [f"y{i}"], **_attributes(layer)))
        nodes.append(helper.make_node("Relu", [f"y{i}"], [f"z{i}"]))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))
    outputs = [helper.make_tensor_value_info(f"z{i}", TensorProto.FLOAT, None) for i in range(times)]
    model = helper.make_model(
        helper.make_graph(nodes, "layer", [given], outputs, weights), opset_imports=[helper.make_opsetid("", _OPSET)]
    )
    model.ir_version = 10
    found: bytes = model.SerializeToString()
    return found


def _attributes(layer: nn.modules.conv._ConvNd) -> dict[str, Any]:
    """The attributes of a convolution in ONNX."""
    found: dict[str, Any] = {
        "kernel_shape": list(layer.kernel_size),
        "strides": list(layer.stride),
        "dilations": list(layer.dilation),
        "group": layer.groups,
    }
    if layer.transposed:
        found["output_padding"] = list(layer.output_padding)
    if isinstance(layer.padding, str):
        wanted = [d * (k - 1) * (layer.padding == "same") for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return found | {"pads": [*(pad // 2 for pad in wanted), *(pad - pad // 2 for pad in wanted)]}
    return found | {"pads": [*layer.padding, *layer.padding]}
