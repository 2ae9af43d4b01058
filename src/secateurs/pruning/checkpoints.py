"""What a run keeps of its network: as it came, after the latest cut, retrained, and at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateurs._util.tensors import digest
from secateurs.compaction.serialization import load, save
from secateurs.config import Recipe
from secateurs.data.splits import Data
from secateurs.errors import RunError
from secateurs.graph.structure import describe
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, changed, display_name, fingerprints
from secateurs.pruning.context import NetworkState, RunContext, measured
from secateurs.pruning.folder import Record, disk_errors, environment
from secateurs.pruning.journal import changed_files, read_journal
from secateurs.pruning.results import Result, Step, outcome_fields, step_fields
from secateurs.scoring.cache import MeasurementCache

START = "checkpoints/start"
TRAINING = "checkpoints/training"
RETRAINED = "checkpoints/retrained"


def keep_start(record: Record, graph: Graph) -> None:
    """Keep the network as it came; where it is kept, it has been described."""
    keep_description(record, graph)
    if record.path is not None:
        _save(record.path, START, graph)


def keep_description(record: Record, graph: Graph) -> None:
    """Describe the untouched network in the journal, once."""
    if record.path is not None and not record.units("network"):
        record.append("network", **describe(graph))


def keep_step(record: Record, standing: NetworkState, step: Step) -> None:
    """Write a step down, with a checkpoint in place of the earlier one if the network changed."""
    earlier, files = _latest_cut(record), {}
    if step.removed and record.path is not None:
        _save(record.path, _checkpoint(step.number), standing.graph)
        record.save_tensors(_momentum(step.number), standing.momentum, listed=True)
        files = record.file_digests(f"{_checkpoint(step.number)}.safetensors", f"{_momentum(step.number)}.safetensors")
    record.append("step", **step_fields(step), files=files)
    record.delete(TRAINING)
    if step.removed and earlier is not None:
        record.delete(_checkpoint(earlier["number"]))
        record.delete(_momentum(earlier["number"]))


def standing_kept(record: Record, model: nn.Module, original: Graph) -> NetworkState:
    """The network as the latest step left it; before any, as it came, not yet measured."""
    standing, steps, latest = NetworkState(original), record.units("step"), _latest_cut(record)
    if not steps:
        return standing
    if latest is not None and record.path is not None:
        record.check_files(latest)
        path = record.path / f"{_checkpoint(latest['number'])}.safetensors"
        graph, found = load(model, path, example_input=original.example), record.load_tensors(_momentum(latest["number"]))
        standing = NetworkState(graph, momentum={} if found is None else found[0])
    return replace(standing, accuracy=steps[-1]["accuracy"], loss=steps[-1]["loss"])


def keep_retrained(record: Record, standing: NetworkState) -> None:
    """Keep the weights of the retrained network."""
    record.save_tensors(RETRAINED, standing.graph.module.state_dict(), listed=True)
    files = record.file_digests(f"{RETRAINED}.safetensors")
    record.append("retrained", accuracy=standing.accuracy, loss=standing.loss, files=files)
    record.delete(TRAINING)


def load_retrained_(record: Record, graph: Graph) -> None:
    """Give the network the weights that it had after retraining."""
    record.check_files(record.units("retrained")[0])
    found = record.load_tensors(RETRAINED)
    if found is None:
        raise RunError(f"{record.path}: the retrained weights are missing. Restore checkpoints/ from a copy.")
    graph.module.load_state_dict(found[0])


def keep_outcome(record: Record, outcome: Result) -> None:
    """Keep the smaller network, its plan and its figures."""
    if record.path is None:
        return
    _save(record.path, "pruned", outcome.graph)
    with disk_errors(record.path):
        outcome.graph.plan.save(record.path / "plan.json")
    if not record.units("end"):
        record.append("end", **outcome_fields(outcome), files=record.file_digests("plan.json", "pruned.safetensors"))


def _latest_cut(record: Record) -> dict[str, Any] | None:
    """The entry of the latest step that changed the network."""
    cuts = [entry for entry in record.units("step") if entry["removed"]]
    return cuts[-1] if cuts else None


def _checkpoint(number: int) -> str:
    return f"checkpoints/{number:04d}"


def _momentum(number: int) -> str:
    return f"{_checkpoint(number)}-momentum"


def _save(folder: Path, name: str, graph: Graph) -> None:
    with disk_errors(folder):
        save(graph, folder / f"{name}.safetensors")


MEASURED = "measured.sqlite"


def example_for(model: nn.Module, data: Data) -> Tensor:
    """Two training inputs where the model is, and of the kind of numbers that it computes with."""
    inputs = data.train.batch(slice(0, 2)).inputs
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        return inputs
    return inputs.to(first.device, first.dtype if inputs.is_floating_point() else inputs.dtype)


def provenance(
    graph: Graph,
    data: Data,
    recipe: Recipe,
    *,
    measures: Mapping[str, Measure],
    store: str | Path | None,
    origin: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What a run folder keeps of where network, data and figures come from, as plain values."""
    return {
        "model": {"class": graph.plan.model, "weights_sha256": _weights_digest(graph), "leaves": list(graph.leaves)},
        "data": data.record(),
        "seed": recipe.seed,
        "measures": {role: display_name(measure) for role, measure in measures.items()},
        "fingerprints": fingerprints(measures),
        "store": None if store is None else str(Path(store).absolute()),
        "origin": dict(origin or {}),
        **environment(),
    }


def _weights_digest(graph: Graph) -> str:
    return digest({name: tensor.detach().cpu() for name, tensor in graph.module.state_dict().items()})


def check_data(path: Path, data: Data, known: Mapping[str, Any]) -> None:
    """Refuse data that the run in `path` was not started with; `known` is its provenance."""
    if data.digest() != known["data"].get("sha256"):
        raise RunError(
            f"{path}: was started on other data ({known['data'].get('name')}): contents or split have changed. Give the "
            f"data it was started with, or start a new run."
        )


def check_measures(path: Path, measures: Mapping[str, Measure], known: Mapping[str, Any]) -> None:
    """Refuse a loss or a metric that the run in `path` was not started with; `known` is its provenance."""
    names = known.get("measures", {})
    others = changed(measures, names, known.get("fingerprints", {}))
    if others:
        was = " and ".join(f"{role} ({names[role]}, now {display_name(measures[role])})" for role in others)
        raise RunError(f"{path}: was started with another {was}. Give what it was started with, or start a new run.")


def load_start(path: Path, model: nn.Module, data: Data, known: Mapping[str, Any]) -> Graph:
    """The network that the run in `path` was started with, whatever the weights of `model`; `known` is its provenance."""
    example, file = example_for(model, data), path / f"{START}.safetensors"
    if not file.exists():
        raise RunError(_without_start(path, file))
    graph = load(model, file, example_input=example)
    if _weights_digest(graph) != known["model"].get("weights_sha256"):
        raise RunError(
            f"{file}: holds other weights than the run was started with: it was swapped. Restore it from a copy, or start a "
            f"new run."
        )
    return graph


def _without_start(path: Path, file: Path) -> str:
    """Why a run without the file of its first network cannot be taken up, and what is left of it."""
    entries = read_journal(path)
    ended = [entry for entry in entries if entry["unit"] == "end"]
    if ended and not changed_files(path, ended[0]):
        return (
            f"{file}: is missing, so the run cannot be taken up; but it is finished, and its result is whole: "
            f"{path / 'pruned.safetensors'} and {path / 'plan.json'}. Look at it with: secateurs show {path}"
        )
    if any(entry["unit"] != "network" for entry in entries):
        return f"{file}: is missing, though the run got further. Restore checkpoints/ from a copy, or start a new run."
    return f"{path}: was stopped before its first checkpoint. Delete the folder and start the run again."


def open_store(record: Record, path: str | Path | None) -> MeasurementCache:
    """The store at `path`, or in the run folder, or in memory for a run that has none."""
    if path is not None:
        return MeasurementCache(Path(path))
    return MeasurementCache(None if record.path is None else record.path / MEASURED)


def measure_start(outfit: RunContext, standing: NetworkState) -> NetworkState:
    """The standing with its accuracy and loss known: those of the untouched network are measured once."""
    record = outfit.record
    if not record.units("start"):
        found = measured(outfit.workshop, standing)
        record.append("start", accuracy=found.accuracy, loss=found.loss)
    if record.units("step"):
        return standing
    known = record.units("start")[0]
    return replace(standing, accuracy=known["accuracy"], loss=known["loss"])
