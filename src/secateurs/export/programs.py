"""ONNX and torch.export's .pt2: both are written from the program that torch.export captures."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack

import torch
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from secateurs.errors import InvalidInput, UnsupportedOp
from secateurs.export.deliver import Exported, ExportOptions, Inputs, Prepared, deliver, first_line, quiet
from secateurs.graph.trace import Graph

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def to_onnx(graph: Graph | Prepared, path: str | Path, **options: Unpack[ExportOptions]) -> Exported:
    """Write the network as ONNX to `path`, for a batch of any size, in eval mode; needs the extra `onnx`.

    Inputs have the names of the forward's arguments, outputs their keys in a dict, else `output`, or `output_0` and so on; the
    free axis is `batch`.

    The file is run in ONNX Runtime, checked and compared as the `ExportOptions` say.
    """
    check_packages()
    return deliver("onnx", _write_onnx, _bind_onnx, graph, path, **options)


def check_packages() -> None:
    """InvalidInput unless all that ONNX needs is installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise InvalidInput(f"ONNX needs {', '.join(missing)}, not installed here. Install it: pip install 'secateurs[onnx]'.")


def to_pt2(graph: Graph | Prepared, path: str | Path, **options: Unpack[ExportOptions]) -> Exported:
    """Write the network with torch.export to `path` (.pt2), for a batch of any size, in eval mode, for the CPU.

    The file is loaded in a new process that cannot import secateurs, checked and compared as the `ExportOptions` say.
    """

    def write(network: Prepared, path: Path) -> None:
        with quiet():
            torch.export.save(network.program, path)

    def bind(network: Prepared, path: Path, inputs: Inputs) -> Callable[[], Any]:
        return partial(network.program.module(), *inputs)

    return deliver("pt2", write, bind, graph, path, **options)


def _write_onnx(network: Prepared, path: Path) -> None:
    path.write_bytes(onnx_bytes(network))


def onnx_bytes(network: Prepared) -> bytes:
    """The program as an ONNX file, without the names of code and folders."""
    program = network.program
    logger = logging.getLogger("torch.onnx")  # the exporter logs which optional packages it does without
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet(), _translations_read_once():
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
    _name_batch_(graph)
    _name_outputs_(graph, _output_names(program))
    found: bytes = model.SerializeToString()
    return found


def _output_names(program: torch.export.ExportedProgram) -> list[str]:
    """What the outputs are called: `output` if there is one, else by its key in a dict, or by its place: `output_0`."""
    spec, signature = program.call_spec.out_spec, program.graph_signature
    assert spec is not None
    structure, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
    paths = ["_".join(str(_step(key)) for key in path) for path, _ in structure]
    names = [f"output_{path}".rstrip("_") if not path or path[0].isdigit() else path for path in paths]
    returned = [each.arg for each in signature.output_specs if each.kind == OutputKind.USER_OUTPUT]
    return [name for name, arg in zip(names, returned, strict=True) if isinstance(arg, TensorArgument)]


def _step(key: Any) -> object:
    """The index, key or name of a field, by which a nested output is reached."""
    return next(getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name))


def _name_batch_(graph: Any) -> None:
    """Call the free first axis of the inputs `batch`, wherever it counts; torch numbers it, such as s77."""
    first = graph.input[0].type.tensor_type.shape.dim[0].dim_param if graph.input else ""
    if not first:
        return
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:  # may be a term, such as 4*s77
                dim.dim_param = re.sub(rf"\b{re.escape(first)}\b", "batch", dim.dim_param)


def _name_outputs_(graph: Any, names: Sequence[str]) -> None:
    """Give the outputs these names; left alone where they are no tensors of their own, as inputs that are handed on."""
    given, fixed = [each.name for each in graph.output], {each.name for each in (*graph.input, *graph.initializer)}
    wanted = [f"output_{name}" if name in fixed else name for name in names]
    if len(given) != len(wanted) or len(set(given)) < len(given) or len(set(wanted)) < len(wanted) or fixed.intersection(given):
        return
    new = dict(zip(given, wanted, strict=True))
    inside = {name for node in graph.node for name in node.output} - set(given)
    new |= {name: f"{name}_inside" for name in inside.intersection(wanted)}
    for value in (*graph.output, *graph.value_info):
        value.name = new.get(value.name, value.name)
    _rename_(graph, new)


def _rename_(graph: Any, new: Mapping[str, str]) -> None:
    """Call tensors otherwise in all nodes, those of branches and loops too."""
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename_(inner, new)


@contextmanager
def _translations_read_once() -> Iterator[None]:
    """Within the block, torch's exporter has its table of translated ops from an earlier export of this process, if any.

    It would make the same table for every export, which takes longer than all else for a small network: a run for int8 makes
    dozens of files. The table is private to torch: where it is not found, nothing is changed.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        own: Any = ONNXRegistry.__dict__["from_torchlib"]
        read_once = staticmethod(partial(_translations, own.__func__, ONNXRegistry))
    except (ImportError, KeyError, AttributeError):
        yield
        return
    try:
        ONNXRegistry.from_torchlib = read_once  # type: ignore[method-assign]
        yield
    finally:
        ONNXRegistry.from_torchlib = own  # type: ignore[method-assign]


@cache
def _translations(read: Callable[..., Any], kind: type, **options: Any) -> Any:
    return read(kind, **options)


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
