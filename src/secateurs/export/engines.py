"""The engines that a recipe can name: PyTorch in eager mode or compiled, and ONNX Runtime in float32 or int8."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secateurs._util.modules import Device
from secateurs.config import Recipe
from secateurs.errors import InvalidInput
from secateurs.export.deliver import prepared
from secateurs.export.int8 import in_int8
from secateurs.export.programs import check_packages, feed, onnx_bytes, start_session
from secateurs.graph.trace import Graph
from secateurs.speed.engines import Engine, MeasureEngine, TorchEngine, batch_like, on_one_thread
from secateurs.speed.timing import CLOCK, Clock, Load, Timer, timed, using_threads

_OPSET = 18
_LINKS = 3  # of a chain, at least: what its ends cost is spread over twice as many layers


def engine_for(recipe: Recipe, measure: Callable[[nn.Module], float] | None = None, device: Device = None) -> Engine:
    """The engine that the recipe names, or the user's own function `measure(module) -> seconds`."""
    batch, threads = recipe.latency_batch or 1, recipe.latency_threads
    if measure is not None:
        if recipe.engine != "auto":
            raise InvalidInput(f"measure and engine = {recipe.engine!r}: give one of them.")
        if recipe.deploy is not None:
            raise InvalidInput(f"measure and deploy = {recipe.deploy!r}, which is timed in ONNX Runtime: give one of them.")
        return MeasureEngine(measure)
    if recipe.deploy == "int8":
        return Int8Engine(batch, threads)
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

    def network(self, graph: Graph) -> Load:
        """Loaded once: compiling takes long."""
        timer = super().network(graph)()
        return lambda: timer


class OnnxEngine:
    """ONNX Runtime on the CPU, on networks as `to_onnx` writes them."""

    name, runs_layers = "onnxruntime", True
    clock: Clock = CLOCK

    def __init__(self, batch: int = 1, threads: int | None = None) -> None:
        check_packages()
        self.batch, self.threads = batch, threads

    def network(self, graph: Graph) -> Load:
        """Export the network."""
        model, inputs = onnx_bytes(prepared(graph)), tuple(t.cpu() for t in batch_like(graph, self.batch))
        model = self.delivered(model, inputs)
        return lambda: self._timer(model, inputs)

    def delivered(self, model: bytes, inputs: tuple[Tensor, ...]) -> bytes:
        """The file that runs."""
        return model

    def layer(self, layer: nn.Module, shape: Sequence[int], times: int) -> Timer:
        """Load a chain of the layer and its reverse (see `chain_model`); the timer gives the share of `times` layers."""
        parameter, links = next(layer.parameters()), max(times, _LINKS)
        if parameter.dtype != torch.float32 or not isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
            return TorchEngine(self.batch, self.threads).layer(layer, shape, times)
        given = (_given(layer, shape),)
        whole = self._timer(self.delivered(chain_model(layer, shape, links), given), given)
        return lambda: whole() * times / (2 * links)

    def _timer(self, model: bytes, inputs: tuple[Tensor, ...]) -> Timer:
        with using_threads(self.threads):
            session = start_session(model)
        given = feed(session, inputs)
        return timed(lambda: session.run(None, given), alone=on_one_thread(self.threads), clock=self.clock)


class Int8Engine(OnnxEngine):
    """ONNX Runtime on the CPU in int8: networks as `result.export(…, int8=True)` writes them, calibrated on random inputs."""

    name = "onnxruntime-int8"

    def delivered(self, model: bytes, inputs: tuple[Tensor, ...]) -> bytes:
        """The file in int8, calibrated on the inputs alone, which is as fast."""
        return in_int8(model, inputs)


def _given(layer: nn.Linear | nn.modules.conv._ConvNd, shape: Sequence[int]) -> Tensor:
    """Input of the chain: as large as the layer's output where the layer strides, so that no link does."""
    if isinstance(layer, nn.Linear):
        size = tuple(shape)
    elif layer.transposed:
        size = (*shape[:2], *(n * s for n, s in zip(shape[2:], layer.stride, strict=True)))
    else:
        size = (*shape[:2], *(-(-n // s) for n, s in zip(shape[2:], layer.stride, strict=True)))
    return torch.rand(*size, generator=torch.Generator().manual_seed(0))


def chain_model(layer: nn.Linear | nn.modules.conv._ConvNd, shape: Sequence[int], links: int) -> bytes:
    """An ONNX model of `links` times the layer, a layer from its outputs back to its inputs, and a ReLU after each.

    Inside a chain a layer costs what it does inside a network: ONNX Runtime keeps channels in blocks between layers whose
    widths allow it, and reorders them where they do not; alone, every layer would pay for that. Strides are left out, on an
    input as large as the output, and so are paddings that change its size. Exporting would take a second for each width.
    """
    from onnx import TensorProto, helper, numpy_helper

    convolution = layer if isinstance(layer, nn.modules.conv._ConvNd) else None
    groups = 1 if convolution is None else convolution.groups
    sizes = [int(n) for n in layer.weight.shape]
    filters, inputs = sizes[0], sizes[1] * groups
    if convolution is not None and convolution.transposed:
        filters, inputs = sizes[1] * groups, sizes[0]
    kind, attributes = ("MatMul", {}) if convolution is None else ("Conv", _attributes(convolution))
    nodes, weights, last = [], [], "x"
    for i in range(2 * links):
        one, other = (filters, inputs) if i % 2 == 0 else (inputs, filters)
        drawn = torch.randn(one, other // groups, *sizes[2:], generator=torch.Generator().manual_seed(i))
        drawn *= math.sqrt(2 / drawn[0].numel())  # values keep their size along the chain: denormal ones would be slow
        weights.append(numpy_helper.from_array((drawn.T if convolution is None else drawn).contiguous().numpy(), f"w{i}"))
        nodes.append(helper.make_node(kind, [last, f"w{i}"], [f"y{i}"], **attributes))
        nodes.append(helper.make_node("Relu", [f"y{i}"], [f"z{i}"]))
        last = f"z{i}"
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(_given(layer, shape).shape))
    output = helper.make_tensor_value_info(last, TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph(nodes, "layer", [given], [output], weights), opset_imports=[helper.make_opsetid("", _OPSET)]
    )
    model.ir_version = 10
    found: bytes = model.SerializeToString()
    return found


def _attributes(layer: nn.modules.conv._ConvNd) -> dict[str, Any]:
    """The attributes of a convolution in ONNX that keeps the size of its input."""
    wanted = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return {
        "kernel_shape": list(layer.kernel_size),
        "dilations": list(layer.dilation),
        "group": layer.groups,
        "pads": [*(pad // 2 for pad in wanted), *(pad - pad // 2 for pad in wanted)],
    }
