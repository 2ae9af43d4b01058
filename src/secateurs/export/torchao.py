"""Int8 networks for torch.compile: torchao's PT2E quantisation for x86, saved as .pt2; needs the extra `int8-torch`.

What is saved has int8 weights and pairs of quantize and dequantize ops, which run as they are, slowly; `torch.compile` with
freezing fuses them into int8 kernels, for which it needs a C++ compiler.
"""

from __future__ import annotations

import io
import logging
import operator
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput, UnsupportedOp
from secateurs.export.deliver import Quantisation, first_line, prepared, quiet
from secateurs.export.float_model import Int8Layer
from secateurs.export.int8 import Quantised, output_distance, weight_bits
from secateurs.graph.cost import cost
from secateurs.graph.node_info import forget_source_
from secateurs.graph.trace import Graph

_SOURCES = {
    torch.ops.aten.conv2d.default: functional.conv2d,
    torch.ops.aten.linear.default: functional.linear,
    torch.ops.aten.relu.default: functional.relu,
    torch.ops.aten.add.Tensor: operator.add,
}


class ProgramModule(nn.Module):
    """A saved program that is called like the network that it was made from."""

    def __init__(self, file: bytes) -> None:
        super().__init__()
        _packages()
        with quiet():
            self._called = (torch.export.load(io.BytesIO(file)).module(),)  # no submodule: it refuses eval()

    def forward(self, *inputs: Tensor) -> Any:
        """Run the program."""
        return self._called[0](*inputs)


class ProgramQuantiser:
    """A float network and its int8 program; what `Quantiser` is for ONNX Runtime. No layer can go back to float32."""

    hurting: tuple[Int8Layer, ...] = ()
    by_harm: tuple[tuple[float, Int8Layer], ...] = ()

    def __init__(self, graph: Graph, calibration: Examples, held_out: Examples, *, classes: bool = True) -> None:
        pt2e, x86 = _packages()
        if not len(calibration) or not len(held_out):
            raise InvalidInput("int8: no examples to calibrate with, or to compare on. Give training and validation examples.")
        bits, ready = weight_bits(), prepared(graph)
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config(reduce_range=bits == 7))
        try:
            batches = tuple({0: torch.export.Dim("batch")} for _ in ready.inputs)
            with quiet(), torch.no_grad():
                captured = ready.program.module()
                for node in captured.graph.nodes:  # the quantizer finds layers by notes on their source, which are not kept
                    if node.target in _SOURCES:
                        node.meta["source_fn_stack"] = [(node.name, _SOURCES[node.target])]
                module = pt2e.prepare_pt2e(captured, quantizer)
                for batch in calibration.batches(64):
                    module(*batch.args)
                module = pt2e.convert_pt2e(module)
                program = torch.export.export(module, ready.inputs, dynamic_shapes=batches)
        except Exception as error:  # torchao raises its own classes, by what it could not follow
            raise UnsupportedOp(
                f"torchao cannot quantise {ready.name}: {first_line(error)}. Export it for ONNX Runtime."
            ) from error
        for node in program.graph.nodes:
            forget_source_(node)
        if not any(tensor.dtype == torch.int8 for tensor in (*program.state_dict.values(), *program.constants.values())):
            raise UnsupportedOp(f"torchao found no layer of {ready.name} that it can quantise. Export it for ONNX Runtime.")
        file = io.BytesIO()
        with quiet():
            torch.export.save(program, file)
        self.file, module = file.getvalue(), ProgramModule(file.getvalue())
        with torch.no_grad():
            pairs = [(module(*batch.args), ready.module(*batch.args)) for batch in held_out.batches(64)]
        off = float(torch.cat([output_distance(a, b, classes) for a, b in pairs]).mean())
        macs = cost(graph).macs
        layers = sum(isinstance(each, nn.Linear | nn.modules.conv._ConvNd) for each in graph.module.modules())
        self.how = Quantisation(
            method="histogram",
            compared=(("histogram", off),),
            divergence=off,
            calibrated=len(calibration),
            held_out=len(held_out),
            weight_bits=bits,
            layers=layers,
            float_layers=(),
            float_macs=0.0,
            bops=macs * 8.0 * bits,
            float_bops=macs * 32.0 * 32.0,
        )

    def quantised(self, floats: Sequence[Int8Layer] | None = None) -> Quantised:
        """The program; there is only one."""
        return Quantised(self.file, self.how, run=ProgramModule)


def _packages() -> tuple[Any, Any]:
    """PT2E and the quantizer for x86; InvalidInput where torchao is not installed."""
    if find_spec("torchao") is None:
        raise InvalidInput(
            "int8 as .pt2 needs torchao, not installed here. Install it: pip install 'secateurs[int8-torch]'; or export to "
            ".onnx, which needs 'secateurs[onnx]'."
        )
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it names the GPU kernels that it does without
    with quiet():
        from torchao.quantization.pt2e import quantize_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer
    return quantize_pt2e, x86_inductor_quantizer
