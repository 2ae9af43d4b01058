"""What a run keeps of its network: as it came, after the latest cut, retrained, and at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from secateurs.artefact import load, save
from secateurs.errors import RunError
from secateurs.graph import Graph
from secateurs.journey.standing import Standing
from secateurs.record import Record, disk_errors
from secateurs.report import describe
from secateurs.steps import Outcome, Step, outcome_fields, step_fields

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


def keep_step(record: Record, standing: Standing, step: Step) -> None:
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


def standing_kept(record: Record, model: nn.Module, original: Graph) -> Standing:
    """The network as the latest step left it; before any, as it came, not yet measured."""
    standing, steps, latest = Standing(original), record.units("step"), _latest_cut(record)
    if not steps:
        return standing
    if latest is not None and record.path is not None:
        record.check_files(latest)
        path = record.path / f"{_checkpoint(latest['number'])}.safetensors"
        graph, found = load(model, path, example_input=original.example), record.load_tensors(_momentum(latest["number"]))
        standing = Standing(graph, momentum={} if found is None else found[0])
    return replace(standing, accuracy=steps[-1]["accuracy"], loss=steps[-1]["loss"])


def keep_retrained(record: Record, standing: Standing) -> None:
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


def keep_outcome(record: Record, outcome: Outcome) -> None:
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
