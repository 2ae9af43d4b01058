"""The folder of a run: recipe, provenance, journal and checkpoints; started, opened again, and checked against its origin."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from secateurs._util.decode import Malformed, checked, decode_json, read_text_file
from secateurs._util.files import LOCK, write_text
from secateurs._util.folders import disk_errors
from secateurs._util.journal import JOURNAL, PROVENANCE, Journal, changed_files, read_records, records_of
from secateurs._util.tensors import digest, dump, parse
from secateurs.compaction import replay
from secateurs.compaction.serialization import load, read, save
from secateurs.config import CHANGED_DEFAULTS, Recipe, read_fields, read_recipe, recipe_fields, recipe_from, write_recipe
from secateurs.criteria.ranking import Ranking
from secateurs.data.drawn import has_drawn
from secateurs.data.splits import Data
from secateurs.distributed import ALONE, Workers
from secateurs.errors import RunError
from secateurs.graph.plan import Plan
from secateurs.graph.sites import Site
from secateurs.graph.structure import describe, nodes_from
from secateurs.graph.trace import Graph, like_network
from secateurs.metrics import changed, display_name, fingerprints
from secateurs.pruning.context import NetworkState, Stopwatch
from secateurs.pruning.figures import KINDS, ResultFigures, phase_seconds
from secateurs.pruning.results import Count, Step, Structure
from secateurs.scoring.cache import MeasurementCache
from secateurs.training.resumable import CHECKPOINT

RECIPE, MEASURED, START = "recipe.toml", "measured.sqlite", "checkpoints/start"
_OURS = {LOCK, JOURNAL, RECIPE, MEASURED, "checkpoints", "data", "ensembles"}  # what a run that was killed early may have left
_KEPT_MASKS = 20_000  # a larger ensemble, as slopes have, is not worth its place in the folder
FORMAT = 4  # of the folder: 4 has a recipe without the fields that 3 had (signal, scoring, repaired_masks, …)


# ---- provenance ----------------------------------------------------------------------------------------------------------


class ModelOrigin(TypedDict, total=False):
    """The network that a run was started with."""

    weights_sha256: str
    leaves: list[str]


class SetOrigin(TypedDict):
    """One set of examples."""

    count: Count
    sha256: NotRequired[str]


class DataOrigin(TypedDict, total=False):
    """The data that a run was started with."""

    name: str
    sha256: str
    sets: dict[str, SetOrigin]
    classes: list[Any]
    origin: dict[str, Any]


class Provenance(TypedDict, total=False):
    """What provenance.json holds. The folder of a run has all of it; a report is also made of less."""

    format: int
    model: ModelOrigin
    data: DataOrigin
    seed: int
    measures: dict[str, str]
    fingerprints: dict[str, Any]
    again: list[str]
    notes: list[str]
    store: str | None
    origin: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    started: str
    recipe_sha256: str


def provenance(
    graph: Graph,
    data: Data,
    recipe: Recipe,
    *,
    measures: Mapping[str, Callable[..., Any]],
    again: Sequence[str],
    notes: Sequence[str],
    store: str | Path | None,
    origin: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Where network, data and figures of a run come from, as plain values; `again`: what is given again to resume it."""
    return {
        "model": {"class": graph.plan.model, "weights_sha256": _weights_digest(graph), "leaves": list(graph.leaves)},
        "data": data.record(),
        "seed": recipe.seed,
        "measures": {role: display_name(measure) for role, measure in measures.items()},
        "fingerprints": fingerprints(measures),
        "again": list(again),
        "notes": list(notes),
        "store": None if store is None else str(Path(store).absolute()),
        "origin": dict(origin or {}),
        **environment(),
    }


def environment() -> dict[str, Any]:
    """Versions and machine, as provenance keeps them."""
    names = ("secateurs", "torch", "numpy", "safetensors")
    return {
        "versions": {name: _version(name) for name in names} | {"python": platform.python_version()},
        "machine": {"processor": platform.machine(), "system": platform.system(), "threads": torch.get_num_threads()},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def parse_provenance(folder: Path) -> dict[str, Any]:
    """What provenance.json says, every field of its type; `Malformed` or OSError if it cannot be read.

    RunError for the folder of another release, whose other files are not to be read.
    """
    found: dict[str, Any] = decode_json(read_text_file(folder / PROVENANCE), dict[str, Any])
    checked(found, Provenance)
    check_format(folder / PROVENANCE, found)
    return found


def check_format(path: Path, known: Mapping[str, Any]) -> None:
    """Refuse the folder of another release; `known` is what its first file, `path`, says."""
    if known.get("format", FORMAT) != FORMAT:
        raise RunError(
            f"{path}: got folder format {known['format']!r}, wanted {FORMAT}: another release wrote it, and it is whole. "
            f"Use that release, or start a new run."
        )


def read_provenance(path: Path) -> dict[str, Any]:
    """What was recorded when the run was started."""
    try:
        return parse_provenance(path)
    except OSError as error:
        raise RunError(f"{path}: not the folder of a run: no {PROVENANCE} ({error.strerror}).") from error
    except Malformed as error:
        raise RunError(f"{path / PROVENANCE}: damaged ({error}). Restore it from a copy, or start a new run.") from error


def call_to_resume(path: Path) -> str:
    """The call that resumes a run that was started from Python, with all that it was given."""
    known, recipe, drawn = read_provenance(path), read_recipe(path / RECIPE), has_drawn(path)
    again = list(known.get("again", ()))
    reads = recipe.finetune is not None or recipe.retrain is not None or {"loss", "metric"} & {*again}
    words = [repr(str(path)), "model", *([] if drawn else ["data"]), *(["train"] if drawn and reads else [])]
    own = ":" in recipe.criterion or (recipe.criterion == "portfolio" and any(":" in name for name in recipe.portfolio))
    words += [f"{name}={name}" for name in (*again, *(["criterion"] if own else []))]
    return f"secateurs.resume({', '.join(words)}).finish()"


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 of all fields of the recipe."""
    return _fields_digest(recipe_fields(recipe))


def _fields_digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


# ---- opening -------------------------------------------------------------------------------------------------------------


def create_folder(path: Path, recipe: Recipe, origin: Mapping[str, Any], workers: Workers = ALONE) -> Journal:
    """Start a new run in `path`, which must not hold one; `origin` is its provenance. Of several workers the first has it."""
    if not workers.first:
        return Journal(path, KINDS, workers)
    try:
        return _create_folder(path, recipe, origin, workers)
    except BaseException as error:
        workers.fail(error)
        raise


def refuse_run(path: Path) -> None:
    """RunError if there is a run in `path` already."""
    if (path / PROVENANCE).exists():
        raise RunError(f"{path}: holds a run already. Resume it (secateurs resume {path}), or choose another folder.")


def _create_folder(path: Path, recipe: Recipe, origin: Mapping[str, Any], workers: Workers) -> Journal:
    refuse_run(path)
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        others = sorted(found.name for found in path.iterdir() if found.name not in _OURS)
    if others:
        raise RunError(
            f"{path}: holds other files ({', '.join(others[:3])}{', …' * (len(others) > 3)}). Choose an empty or a new folder."
        )
    journal = Journal(path, KINDS, workers)
    try:
        with disk_errors(path):
            write_recipe(path / RECIPE, recipe)
            known = {"format": FORMAT, **origin, "recipe_sha256": recipe_digest(recipe)}
            write_text(path / PROVENANCE, json.dumps(known, indent=1) + "\n")
    except BaseException:
        journal.close()
        raise
    return journal


def open_folder(path: Path, workers: Workers = ALONE) -> tuple[Journal, Recipe, dict[str, Any]]:
    """Open a run that was started in `path`: its journal, recipe and provenance. All workers read the last two there."""
    known = read_provenance(path)
    missing = sorted(Provenance.__annotations__.keys() - known.keys())
    if missing:
        raise RunError(f"{path / PROVENANCE}: damaged (no {', '.join(missing)}). Restore it from a copy, or start a new run.")
    journal = Journal(path, KINDS, workers)
    try:
        fields = read_fields(path / RECIPE)
        # a field that came later has the default that it always had; these had others once, so none may be filled in
        absent = sorted(CHANGED_DEFAULTS - fields.keys())
        if absent:
            raise RunError(
                f"{path / RECIPE}: no {', '.join(absent)}: the release that started the run had other defaults. Use that "
                f"release, or start a new run."
            )
        recipe = recipe_from(fields, where=str(path / RECIPE))
        # of the fields in the file: a release with more settings, at their defaults, resumes the run
        if _fields_digest(fields) != known.get("recipe_sha256"):
            raise RunError(
                f"{path / RECIPE}: was changed since the run started, so its earlier steps would not fit the later ones. Undo "
                f"the change, or start a new run with the changed recipe."
            )
    except BaseException:
        journal.close()
        raise
    return journal, recipe, known


def is_resumable(path: Path) -> bool:
    """Whether `path` holds a run that can be resumed; one that was killed before that is removed, so that it can be started."""
    if not (path / PROVENANCE).exists():
        return False
    if (path / f"{START}.safetensors").exists():
        return True
    with disk_errors(path):
        for name in (JOURNAL, PROVENANCE):
            (path / name).unlink(missing_ok=True)
    return False


def open_cache(journal: Journal, path: str | Path | None) -> MeasurementCache:
    """The cache of measurements at `path`, or in the run folder, or in memory for a run that has none."""
    if path is not None and journal.workers.first:
        return MeasurementCache(Path(path))
    return MeasurementCache(None if journal.path is None else journal.path / MEASURED)


def check_origin(path: Path, data: Data, measures: Mapping[str, Callable[..., Any]], known: Mapping[str, Any]) -> None:
    """Refuse data, a loss or a metric that the run in `path` was not started with; `known` is its provenance."""
    if data.digest() != known["data"].get("sha256"):
        raise RunError(
            f"{path}: was started on other data ({known['data'].get('name')}): contents or split have changed. Give the "
            f"data it was started with, or start a new run."
        )
    names = known.get("measures", {})
    others = changed(measures, names, known.get("fingerprints", {}))
    if others:
        was = " and ".join(f"{role} ({names[role]}, now {display_name(measures[role])})" for role in others)
        raise RunError(f"{path}: was started with another {was}. Give what it was started with, or start a new run.")


def example_for(model: nn.Module, data: Data) -> tuple[Tensor, ...]:
    """Two training examples as the model's arguments: on its device, in the type that it computes in."""
    return like_network(model, data.train.batch(slice(0, 2)).args)


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
    """Why a run without the file of its original network cannot be resumed, and what is left of it."""
    records = read_records(path, KINDS)
    ended = records_of(records, ResultFigures)
    if ended and not changed_files(path, ended[0]):
        return (
            f"{file}: is missing, so the run cannot be resumed; but it is finished, and its result is whole: "
            f"{path / 'pruned.safetensors'} and {path / 'plan.json'}. Show it with: secateurs show {path}"
        )
    if any(not isinstance(record, Structure) for record in records):
        return f"{file}: is missing, though the run got further. Restore checkpoints/ from a copy, or start a new run."
    return f"{path}: was stopped before its first checkpoint. Delete the folder and start the run again."


def _weights_digest(graph: Graph) -> str:
    return digest({name: tensor.detach().cpu() for name, tensor in graph.module.state_dict().items()})


# ---- checkpoints ---------------------------------------------------------------------------------------------------------


def save_start(journal: Journal, graph: Graph, clock: Stopwatch) -> None:
    """Save the original network, after its structure is journaled."""
    describe_network(journal, graph, clock)
    _save(journal, START, graph)


def describe_network(journal: Journal, graph: Graph, clock: Stopwatch) -> None:
    """Journal the structure of the original network, once."""
    journal.once(Structure, lambda: Structure(nodes_from(describe(graph)), clock.lap()))


def save_step(journal: Journal, state: NetworkState, step: Step, clock: Stopwatch) -> Step:
    """Journal a step, with a checkpoint in place of the earlier one if the network changed."""
    earlier = _latest_cut(journal)
    if step.removed and journal.path is not None:
        names = _checkpoint(step.number)
        _save(journal, names[0], state.graph)
        journal.save_tensors(names[1], state.momentum, listed=True)
        step = replace(step, files=journal.file_digests(*(f"{name}.safetensors" for name in names)))
    step = replace(step, seconds=clock.lap())
    journal.append(step)
    journal.delete(CHECKPOINT)
    for name in _checkpoint(earlier.number) if step.removed and earlier is not None else ():
        journal.delete(name)
    return step


def load_state(journal: Journal, original: Graph) -> NetworkState:
    """The network as the latest step left it; before any, the original, not yet measured."""
    state, steps, latest = NetworkState(original), journal.of(Step), _latest_cut(journal)
    if not steps:
        return state
    if latest is not None:
        network, momentum = _checkpoint(latest.number)

        file = f"{network}.safetensors"

        def checked_file() -> tuple[dict[str, str], dict[str, Tensor]]:
            journal.check_files(latest)
            assert journal.path is not None
            return read(journal.path / file)

        if journal.workers.size == 1:
            header, tensors = checked_file()
        else:
            tensors, header = parse(journal.workers.shared(file, lambda: _dumped(*checked_file())))
        graph = replay(original, Plan.from_json(header["plan"], where=file), verify=False)
        graph.module.load_state_dict(tensors)
        found = journal.load_tensors(momentum)
        state = NetworkState(graph, momentum={} if found is None else found[0])
    return replace(state, accuracy=steps[-1].accuracy, loss=steps[-1].loss)


def _dumped(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    return dump(tensors, {name: text for name, text in header.items() if name != "digest"})


def save_result(journal: Journal, graph: Graph, figures: ResultFigures, clock: Stopwatch) -> ResultFigures:
    """Save the smaller network and its plan, and journal the figures; returns those in the journal, with their times."""
    files: dict[str, str] = {}
    if journal.path is not None:
        _save(journal, "pruned", graph)
        with disk_errors(journal.path):
            graph.plan.save(journal.path / "plan.json")
        files = journal.file_digests("plan.json", "pruned.safetensors")

    def timed() -> ResultFigures:
        phases = (*phase_seconds(journal.records), ("final measurement", clock.lap()))
        return replace(figures, files=files, phases=phases, seconds=sum(seconds for _, seconds in phases))

    return journal.once(ResultFigures, timed)


def _latest_cut(journal: Journal) -> Step | None:
    """The latest step that changed the network."""
    return next((step for step in reversed(journal.of(Step)) if step.removed), None)


def _checkpoint(number: int) -> tuple[str, str]:
    """The names of a step's network and momentum."""
    return f"checkpoints/{number:04d}", f"checkpoints/{number:04d}-momentum"


def _save(journal: Journal, name: str, graph: Graph) -> None:
    if journal.path is not None:
        with disk_errors(journal.path):
            save(graph, journal.path / f"{name}.safetensors")


def save_ranking(journal: Journal, name: str, site: Site, ranking: Ranking) -> None:
    """Save the order of a site's filters with what it rests on: importances, and the masks and losses where they are few."""
    tensors = {"order": ranking.order}
    ensemble, importance = ranking.ensemble, ranking.importance
    if ensemble is not None and len(ensemble.masks) <= _KEPT_MASKS:
        tensors |= {"masks": ensemble.masks, "losses": ensemble.losses}
    if importance is not None:
        tensors |= {"coef": importance.coef, "stderr": importance.stderr}
    origin = {"site": site.name, "original": list(site.original)}
    journal.save_tensors(f"ensembles/{name}", tensors, {**origin, "criterion": ranking.criterion, "note": ranking.note})


def copy_ranking(journal: Journal, name: str, other: str) -> None:
    """Save the ranking `name` under another name, too."""
    found = journal.load_tensors(f"ensembles/{name}")
    if found is not None:
        journal.save_tensors(f"ensembles/{other}", *found)
