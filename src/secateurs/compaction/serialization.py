"""Saves a pruned network as one safetensors file with its plan inside, and loads it onto a newly built model; no pickle.

Loading traces the new model, replays the plan, and copies the weights: the result is the saved network, bit for bit.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor, nn

from secateurs._util.decode import Malformed, brief, decode_json
from secateurs._util.files import write_bytes
from secateurs._util.modules import copyable
from secateurs._util.tensors import Damaged, dump, first_non_finite, parse
from secateurs.compaction import replay
from secateurs.errors import ArtefactError, InvalidInput, PlanError, SecateursError
from secateurs.graph.plan import Plan
from secateurs.graph.trace import Graph, copy_modes_, trace

FORMAT = "1"

_MAX_EXAMPLE = 1 << 26  # values in the example input that is made from a file: 256 MB of float32
_Shape = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=_MAX_EXAMPLE)]], msgspec.Meta(max_length=16)]
_Dtype = Literal["float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64"]
_Example = Annotated[list[tuple[_Shape, _Dtype]], msgspec.Meta(min_length=1, max_length=64)]


def save(graph: Graph, path: str | Path, *, metadata: Mapping[str, str] | None = None) -> Path:
    """Write the network of `graph` to `path`: weights, its plan, and the example's shapes. The file is complete or absent.

    `metadata` adds entries (text) to the file's header.
    """
    if not isinstance(graph, Graph):
        raise InvalidInput(
            f"graph: got {type(graph).__name__}, wanted a Graph. Make one: secateurs.trace(model, example_input)."
        )
    path = Path(path)
    for name, value in (metadata or {}).items():
        if not isinstance(value, str):
            raise InvalidInput(f"metadata {name!r}: got {type(value).__name__}, wanted text. Use str(...) or json.dumps(...).")
    header = {
        **(metadata or {}),
        "secateurs_format": FORMAT,
        "plan": graph.plan.to_json(),
        "leaves": json.dumps(graph.leaves),
        "example": json.dumps([[list(e.shape), str(e.dtype).removeprefix("torch.")] for e in graph.example]),
    }
    try:
        write_bytes(path, dump(graph.module.state_dict(), header))
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be written ({error.strerror}). Nothing was changed.") from error
    return path


def load(model: nn.Module, path: str | Path, *, example_input: Tensor | tuple[Tensor, ...] | None = None) -> Graph:
    """Load the network saved at `path`. `model` is a new instance of the class that was pruned; its weights do not matter.

    `model` is not changed. Without `example_input`, one is made from the shapes in the file (integer inputs become zeros).
    """
    path = Path(path)
    header, tensors = read(path)
    if "plan" not in header:
        raise PlanError(f"{path}: has no plan in its header.")
    plan = Plan.from_json(header["plan"], where=str(path))
    ours = f"{type(model).__module__}.{type(model).__qualname__}"
    if plan.model != ours:
        raise ArtefactError(
            f"{path}: holds a {brief(plan.model)}, but the model given is a {ours}. Build the class that was pruned."
        )
    example = _example(header, path, model) if example_input is None else example_input
    try:
        with copyable(model):
            fresh = copy.deepcopy(model).eval()  # a new model is in train mode, whose path may differ
        graph = replay(trace(fresh, example, leaves=_leaves(header, path)), plan, verify=False)
    except SecateursError as error:
        raise ArtefactError(
            f"{path}: its plan does not fit this {ours}: {brief(error, 300)} Build the model with the "
            f"options it was pruned with."
        ) from error
    _fill_(graph.module, tensors, path)
    copy_modes_(model, graph.module)
    return graph


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read header and tensors of a saved file, and check its digest."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read ({error.strerror}).") from error
    try:
        tensors, header = parse(data)
    except Damaged as error:
        raise ArtefactError(
            f"{path}: {error}. Wanted what result.save or secateurs.save wrote: was it cut short? Copy it again, or save the "
            f"network again. A state dict of torch.save is loaded with model.load_state_dict."
        ) from error
    if header.get("secateurs_format") != FORMAT:
        raise ArtefactError(
            f"{path}: got format {brief(repr(header.get('secateurs_format')), 40)}, wanted {FORMAT!r}: not saved by "
            f"secateurs, or by another release. Plain weights are loaded with model.load_state_dict."
        )
    if "digest" not in header:
        raise ArtefactError(
            f"{path}: its digest is missing: the file was changed or damaged. Copy it again, or save the network again."
        )
    wrong = first_non_finite(tensors)
    if wrong is not None:
        raise ArtefactError(f"{path}: {brief(repr(wrong))} holds NaN or infinite values. Save the network with finite weights.")
    return header, tensors


def _example(header: Mapping[str, str], path: Path, model: nn.Module) -> tuple[Tensor, ...]:
    try:
        listed: list[tuple[list[int], str]] = decode_json(header["example"], _Example)
    except (KeyError, Malformed) as error:
        raise ArtefactError(f"{path}: the example's shapes are missing or damaged ({brief(error)}).") from error
    values = sum(math.prod(shape) for shape, _ in listed)
    if values > _MAX_EXAMPLE:
        raise ArtefactError(f"{path}: the example input would have {values:,} values. Pass your own: load(…, example_input=…).")
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape, name in listed:
        kind = getattr(torch, name)
        if kind.is_floating_point:
            value = torch.randn(shape, generator=generator).to(kind if first is None else first.dtype)
        else:
            value = torch.zeros(shape, dtype=kind)
        made.append(value if first is None else value.to(first.device))
    return tuple(made)


def _leaves(header: Mapping[str, str], path: Path) -> list[str]:
    try:
        return decode_json(header.get("leaves", "[]"), list[str])
    except Malformed as error:
        raise ArtefactError(f"{path}: the names of its leaves are damaged ({error}).") from error


def _fill_(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy the saved tensors into the module, in the saved precision, on the module's device."""
    state = module.state_dict()
    missing, extra = sorted(state.keys() - tensors.keys()), sorted(tensors.keys() - state.keys())
    if missing or extra:
        raise ArtefactError(
            f"{path}: layers differ from the model's: missing in the file {brief(missing[:5])}, unknown to the model "
            f"{brief(extra[:5])}. Build the model with the options it was pruned with."
        )
    for name, tensor in tensors.items():
        if state[name].shape != tensor.shape:
            raise ArtefactError(
                f"{path}: {name!r} has shape {tuple(tensor.shape)}, the pruned model wants {tuple(state[name].shape)}."
            )
        ours, theirs = state[name].dtype, tensor.dtype
        if ours != theirs and not (ours.is_floating_point and theirs.is_floating_point):
            raise ArtefactError(f"{path}: {name!r} holds {theirs}, the pruned model wants {ours}. Save the network again.")
    for name, tensor in tensors.items():
        *parents, leaf = name.split(".")
        owner = module.get_submodule(".".join(parents))
        placed = tensor.to(state[name].device)
        if leaf in owner._parameters:
            old = owner._parameters[leaf]
            assert old is not None
            owner._parameters[leaf] = nn.Parameter(placed, requires_grad=old.requires_grad)
        else:
            owner._buffers[leaf] = placed
