"""ONNX and torch.export's .pt2: both are written from the program that torch.export captures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.errors import InvalidInput, UnsupportedOp
from secateurs.export.deliver import TOLERANCE, Exported, Exporter, Inputs, Prepared, deliver, first_line, quiet, run_fresh
from secateurs.graph.trace import Example, Graph

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def to_onnx(
    graph: Graph | Prepared,
    path: str | Path,
    *,
    inputs: Example | None = None,
    original: Graph | nn.Module | Prepared | None = None,
    tolerance: float = TOLERANCE,
    repeats: int = 30,
) -> Exported:
    """Write the network as ONNX to `path`, for a batch of any size, in eval mode; needs the extra `onnx`.

    The file is run in ONNX Runtime. Its outputs for `inputs` may differ from the network's by `tolerance` times the largest
    output; otherwise `NotEqual`, and no file is written. With `original`, the unpruned network, the sizes and speeds of both
    are compared over `repeats` interleaved runs.
    """
    check_packages()
    exporter = Exporter("onnx", "ONNX Runtime", _write_onnx, _onnx_outputs, _bind_onnx)
    return deliver(exporter, graph, path, inputs=inputs, original=original, tolerance=tolerance, repeats=repeats)


def check_packages() -> None:
    """InvalidInput unless all that ONNX needs is installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise InvalidInput(f"ONNX needs {', '.join(missing)}, not installed here. Install it: pip install 'secateurs[onnx]'.")


def to_pt2(
    graph: Graph | Prepared,
    path: str | Path,
    *,
    inputs: Example | None = None,
    original: Graph | nn.Module | Prepared | None = None,
    tolerance: float = TOLERANCE,
    repeats: int = 30,
) -> Exported:
    """Write the network with torch.export to `path` (.pt2), for a batch of any size, in eval mode, for the CPU.

    The file is loaded in a new process that cannot import secateurs. Its outputs for `inputs` may differ from the network's by
    `tolerance` times the largest output; otherwise `NotEqual`, and no file is written. With `original`, the unpruned network,
    the sizes and speeds of both are compared over `repeats` interleaved runs.
    """
    exporter = Exporter(
        "pt2", "PyTorch", _write_pt2, partial(run_fresh, "pt2"), lambda network, _, x: partial(network.program.module(), *x)
    )
    return deliver(exporter, graph, path, inputs=inputs, original=original, tolerance=tolerance, repeats=repeats)


def _write_pt2(network: Prepared, path: Path) -> None:
    with quiet():
        torch.export.save(network.program, path)


def _write_onnx(network: Prepared, path: Path) -> None:
    path.write_bytes(onnx_bytes(network))


def onnx_bytes(network: Prepared) -> bytes:
    """The program as an ONNX file, without the names of code and folders."""
    program = network.program
    logger = logging.getLogger("torch.onnx")  # the exporter logs which optional packages it does without
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet():
            made = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:  # the exporter raises its own classes, by stage
        raise UnsupportedOp(
            f"{network.name} cannot be written as ONNX: {first_line(error)}. Use --pt2 or --source instead."
        ) from error
    finally:
        logger.setLevel(level)
    assert made is not None
    model = made.model_proto
    graph = model.graph
    for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")  # they name the code and folders that the network was exported from
        part.ClearField("doc_string")
    graph.ClearField("metadata_props")
    found: bytes = model.SerializeToString()
    return found


def _onnx_outputs(path: Path, batches: Sequence[Inputs]) -> list[list[Tensor]]:
    session = start_session(path.read_bytes())
    return [[torch.from_numpy(array) for array in session.run(None, feed(session, batch))] for batch in batches]


def _bind_onnx(network: Prepared, path: Path, inputs: Inputs) -> Callable[[], Any]:
    session = start_session(path.read_bytes())
    return partial(session.run, None, feed(session, inputs))


def start_session(model: bytes) -> Any:
    """Start ONNX Runtime with torch's number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def feed(session: Any, batch: Inputs) -> dict[str, Any]:
    """The inputs by the names that the session gives them."""
    return {given.name: t.contiguous().numpy() for given, t in zip(session.get_inputs(), batch, strict=True)}
