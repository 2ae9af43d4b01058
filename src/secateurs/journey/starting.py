"""How a run begins: an example to trace the network with, what is noted of where all comes from, and the first measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from secateurs.artefact import load
from secateurs.data.splits import Data
from secateurs.errors import RunError
from secateurs.evaluate import Measure
from secateurs.graph import Graph
from secateurs.identity import called, changed, fingerprints
from secateurs.journey.keeping import START
from secateurs.journey.outfit import Outfit
from secateurs.journey.standing import Standing, measured
from secateurs.recipe import Recipe
from secateurs.record import Record, environment
from secateurs.store import Store
from secateurs.tensorfile import digest

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
        "measures": {role: called(measure) for role, measure in measures.items()},
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
        was = " and ".join(f"{role} ({names[role]}, now {called(measures[role])})" for role in others)
        raise RunError(f"{path}: was started with another {was}. Give what it was started with, or start a new run.")


def load_start(path: Path, model: nn.Module, data: Data, known: Mapping[str, Any]) -> Graph:
    """The network that the run in `path` was started with, whatever the weights of `model`; `known` is its provenance."""
    example, file = example_for(model, data), path / f"{START}.safetensors"
    if not file.exists():
        raise RunError(f"{path}: was stopped before its first checkpoint. Delete the folder and start the run again.")
    graph = load(model, file, example_input=example)
    if _weights_digest(graph) != known["model"].get("weights_sha256"):
        raise RunError(
            f"{file}: holds other weights than the run was started with: it was swapped. Restore it from a copy, or start a "
            f"new run."
        )
    return graph


def open_store(record: Record, path: str | Path | None) -> Store:
    """The store at `path`, or in the run folder, or in memory for a run that has none."""
    if path is not None:
        return Store(Path(path))
    return Store(None if record.path is None else record.path / MEASURED)


def measure_start(outfit: Outfit, standing: Standing) -> Standing:
    """The standing with its accuracy and loss known: those of the untouched network are measured once."""
    record = outfit.record
    if not record.units("start"):
        found = measured(outfit.workshop, standing)
        record.append("start", accuracy=found.accuracy, loss=found.loss)
    if record.units("step"):
        return standing
    known = record.units("start")[0]
    return replace(standing, accuracy=known["accuracy"], loss=known["loss"])
