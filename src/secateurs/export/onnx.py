"""ONNX through torch's exporter, checked by running the file in ONNX Runtime."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.errors import InvalidInput, UnsupportedOp
from secateurs.export.deliver import TOLERANCE, Batches, deliver
from secateurs.export.prepare import Exported, Kind, Prepared, first_line, quiet
from secateurs.graph.trace import Example, Graph

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class _Onnx:
    kind: Kind = "onnx"
    runtime = "ONNX Runtime"

    def write(self, network: Prepared, path: Path) -> None:
        program = network.program
        try:
            with quiet(), _without_log():
                made = torch.onnx.export(program, dynamo=True, verbose=False)
        except Exception as error:  # the exporter raises its own classes, by stage
            raise UnsupportedOp(
                f"{network.name} cannot be written as ONNX: {first_line(error)}. Take --pt2 or --source instead."
            ) from error
        assert made is not None
        model = made.model_proto
        _forget_origin_(model.graph)
        path.write_bytes(model.SerializeToString())

    def outputs(self, path: Path, batches: Batches) -> list[list[Tensor]]:
        session = _session(path)
        return [[torch.from_numpy(array) for array in session.run(None, _feed(session, batch))] for batch in batches]

    def runner(self, network: Prepared, path: Path) -> Callable[[tuple[Tensor, ...]], Callable[[], Any]]:
        session = _session(path)
        return lambda inputs: partial(session.run, None, _feed(session, inputs))


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

    The file is run in ONNX Runtime and must give what the network gives for `inputs`, up to `tolerance` times the largest
    output; else `NotEqual`, and no file. With `original`, the unpruned network, its size and speed are compared, `repeats`
    runs in turns.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise InvalidInput(f"ONNX needs {', '.join(missing)}, not installed here. Install it: pip install 'secateurs[onnx]'.")
    return deliver(_Onnx(), graph, path, inputs=inputs, original=original, tolerance=tolerance, repeats=repeats)


def _session(path: Path) -> Any:
    """A session with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    return onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])


def _feed(session: Any, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    return {given.name: t.contiguous().numpy() for given, t in zip(session.get_inputs(), batch, strict=True)}


def _forget_origin_(graph: Any) -> None:
    """Take out notes about the code and the folders that the network was exported from."""
    for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    graph.ClearField("metadata_props")


@contextmanager
def _without_log() -> Iterator[None]:
    """Keep the exporter's remarks about packages that it does without away from the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
