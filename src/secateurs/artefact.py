"""Saves a pruned network as one safetensors file with its plan inside, and loads it onto a freshly built model; no pickle.

Loading traces the fresh model, replays the plan, and fills in the weights: the result is the saved network, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.compaction import replay
from secateurs.errors import ArtefactError, InvalidInput, PlanError, SecateursError
from secateurs.files import write_bytes
from secateurs.graph import Graph, trace
from secateurs.plan import Plan
from secateurs.tensorfile import Damaged, dump, parse

FORMAT = "1"


def save(graph: Graph, path: str | Path, *, metadata: Mapping[str, str] | None = None) -> Path:
    """Write the network of `graph` to `path`: weights, the plan that made it, and the example's shapes, whole or not at all.

    `metadata` adds own entries (text) to the file's header.
    """
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
    """The network saved at `path`, on `model`: a freshly built one of the class that was pruned; its weights do not matter.

    `model` itself is not changed. The example input is made from the file unless it is given (integer inputs become zeros).
    """
    path = Path(path)
    header, tensors = read(path)
    plan = _plan(header, path)
    ours = f"{type(model).__module__}.{type(model).__qualname__}"
    if plan.model != ours:
        raise ArtefactError(f"{path}: holds a {plan.model}, but the model given is a {ours}. Build the class that was pruned.")
    example = _example(header, path, model) if example_input is None else example_input
    try:
        graph = replay(trace(model, example, leaves=json.loads(header.get("leaves", "[]"))), plan, verify=False)
    except SecateursError as error:
        raise ArtefactError(
            f"{path}: its plan does not fit this {ours}: {error} Build the model with the options it was pruned with."
        ) from error
    _fill_(graph.module, tensors, path)
    return graph


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of a saved file, with its digest checked."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read ({error.strerror}).") from error
    try:
        tensors, header = parse(data)
    except Damaged as error:
        raise ArtefactError(f"{path}: {error}. Was it cut short? Copy or make it again.") from error
    if header.get("secateurs_format") != FORMAT:
        raise ArtefactError(
            f"{path}: got format {header.get('secateurs_format')!r}, wanted {FORMAT!r}: not saved by secateurs, or by another "
            f"release. Plain weights are loaded with model.load_state_dict."
        )
    if "digest" not in header:
        raise ArtefactError(f"{path}: its digest is gone: the file was changed or damaged. Copy or make it again.")
    return header, tensors


def _plan(header: Mapping[str, str], path: Path) -> Plan:
    try:
        return Plan.from_json(header["plan"], where=str(path))
    except KeyError as error:
        raise PlanError(f"{path}: has no plan in its header.") from error


def _example(header: Mapping[str, str], path: Path, model: nn.Module) -> tuple[Tensor, ...]:
    try:
        listed: list[Any] = json.loads(header["example"])
        kinds = [(tuple(shape), getattr(torch, kind)) for shape, kind in listed]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ArtefactError(f"{path}: the example's shapes are missing or damaged ({error}).") from error
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape, kind in kinds:
        if kind.is_floating_point:
            value = torch.randn(shape, generator=generator).to(kind if first is None else first.dtype)
        else:
            value = torch.zeros(shape, dtype=kind)
        made.append(value if first is None else value.to(first.device))
    return tuple(made)


def _fill_(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Put the saved tensors in place, in the saved precision, on the module's device."""
    state = module.state_dict()
    missing, extra = sorted(state.keys() - tensors.keys()), sorted(tensors.keys() - state.keys())
    if missing or extra:
        raise ArtefactError(
            f"{path}: layers differ from the model's: missing in the file {missing[:5]}, unknown to the model {extra[:5]}. "
            f"Build the model with the options it was pruned with."
        )
    for name, tensor in tensors.items():
        if state[name].shape != tensor.shape:
            raise ArtefactError(
                f"{path}: {name!r} has shape {tuple(tensor.shape)}, the pruned model wants {tuple(state[name].shape)}."
            )
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
