"""Data of a run from the user's loaders: a sample of the training set and the whole validation set, kept in the run folder."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.utils.data import DataLoader

from secateurs._util.decode import Malformed, decode_json
from secateurs._util.files import replacing_path
from secateurs._util.tensors import Damaged, digest
from secateurs.data.dataset import Batch, Examples, Targets, target_parts
from secateurs.data.forms import PAIR, BatchForm, Forward, form_of
from secateurs.data.splits import Data, shared_inputs
from secateurs.data.storage import Storage
from secateurs.data.stream import Stream, restricted, rows_of, sample, sampled_rows, seeded_everywhere, stream_of
from secateurs.errors import DataError, RunError

TRAIN_EXAMPLES = 16_384  # drawn from the training set: more than any criterion or repair reads
TRAIN_BYTES, VALIDATION_BYTES = 1 << 30, 2 << 30  # kept in memory at most; larger sets lie on disk
_COPIED = 8  # a copy of a part of a set on disk is in memory up to this part of the set's own limit
_COMPARED = 64  # examples of the test set that are compared with the other sets


@dataclass(frozen=True)
class Loaders:
    """The user's loaders, as a run reads them."""

    data: Data
    train: Stream | None  # None: what `data` has is all there is
    test: Stream | None
    form: BatchForm
    first_test: Examples | None  # a few of its examples, to be checked before the work begins


def open_loaders(
    model: nn.Module,
    train: Any,
    val: Any,
    test: Any = None,
    *,
    forward: Forward | None = None,
    own: Collection[str] = (),
    seed: int = 0,
    folder: Path | None = None,
) -> Loaders:
    """Find the form of the batches, and draw what scoring, repair and the search read; the same for the same loaders and seed.

    `own`: which of "loss" and "metric" the user gives. Random transforms are drawn once for what is kept here. Sets that do not
    fit into memory lie on the disk of `folder`, which need not exist yet.
    """
    if val is None:
        raise DataError(
            "val: got None, wanted a validation loader: examples that the network was not trained on, which decide how much "
            "may be removed."
        )
    sources = {name: each for name, each in (("train", train), ("validation", val), ("test", test)) if each is not None}
    form = form_of(first_batch(train, "train", seed), model, forward, own=own)
    streams = {name: stream_of(source, name, form) for name, source in sources.items()}
    served = form.split(first_batch(val, "validation", seed), "validation").size
    place = None if folder is None else next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    sets = {
        "train": sample(train, TRAIN_EXAMPLES, name="train", seed=seed, storage=Storage(TRAIN_BYTES, place), form=form),
        "validation": sample(val, None, name="validation", seed=seed, storage=Storage(VALIDATION_BYTES, place), form=form),
    }
    compared = dict(sets)
    if test is not None:
        compared["test"] = sample(test, _COMPARED, name="test", seed=seed, storage=Storage(TRAIN_BYTES, place), form=form)
    notes = _check_disjoint(streams, compared, seed)
    for name, examples in sets.items():
        if examples.storage is not None:
            size = sum(part.nbytes for part in examples.stored.columns())
            notes.append(f"the {len(examples):,} {name} examples that are used take {size / 2**30:.1f} GiB and lie on disk")
            sets[name] = replace(examples, storage=replace(examples.storage, memory=examples.storage.memory // _COPIED))
    data = Data("loaders", sets["train"], sets["validation"], None, notes=tuple(notes), origin={"seed": seed, "batch": served})
    return Loaders(data, streams["train"], streams.get("test"), form, compared.get("test"))


def first_batch(source: Any, name: str, seed: int) -> Any:
    """The first batch of a source, with seeded random states."""
    with seeded_everywhere(seed, "first", name):
        return next(stream_of(source, name).raw())


def _check_disjoint(streams: Mapping[str, Stream], sets: Mapping[str, Examples], seed: int) -> list[str]:
    """Refuse sets that share examples: rows of one dataset, or all inputs byte for byte; note what is doubtful."""
    notes = list[str]()
    changing = [name for name, stream in streams.items() if _changes(stream, seed)]
    for name, other in combinations(sets, 2):
        small, large = (name, other) if len(sets[name]) < len(sets[other]) else (other, name)
        shared, count = shared_inputs(sets[small], sets[large]), len(sets[small])
        if shared == count:
            which = "of" if small == "validation" else "drawn from"
            raise DataError(f"all {count} inputs {which} the {small} set are in the {large} set too: give disjoint sets.")
        (root, rows), (other_root, other_rows) = (rows_of(streams[each].loader) for each in (name, other))
        known = rows is not None and other_rows is not None and root is other_root
        if known and (common := set(rows or ()).intersection(other_rows or ())):
            raise DataError(
                f"{len(common)} examples of one dataset are both in the {name} set and in the {other} set: sets must be "
                f"disjoint, or the measured accuracy is meaningless."
            )
        if shared:
            notes.append(f"{shared} of {count} {small} inputs are also in the {large} set")
        elif not known and (unsure := [each for each in (name, other) if each in changing]):
            notes.append(
                f"that the {name} and {other} sets share no examples cannot be checked: the {unsure[0]} loader gives other "
                f"inputs whenever it is read"
            )
    return notes


def _changes(stream: Stream, seed: int) -> bool:
    """Whether a loader gives other inputs when it is read again: by random transforms, or in another order."""
    loader, rows = stream.loader, sampled_rows(stream.loader)
    if rows is not None and isinstance(loader, DataLoader):  # two examples in their order show it, too
        stream = replace(stream, loader=restricted(loader, rows[:2]))
    found = list[Batch]()
    for turn in range(2):
        with seeded_everywhere(seed, "changes", turn):
            found.append(next(stream.batches()))
    return not all(torch.equal(one, other) for one, other in zip(found[0].args, found[1].args, strict=True))


# ---- in the run folder ---------------------------------------------------------------------------------------------------


def save_drawn(data: Data, folder: Path, *, whole: bool = False) -> Data:
    """Write the sets to the run folder: a resumed run reads them again, whatever the loaders give then.

    `whole`: measures depend on the form of batches. Returns the data; sets that lie on disk lie in the folder now.
    """
    for name, examples in data.splits().items():
        targets = examples.targets
        kind = sorted(targets) if isinstance(targets, dict) else len(targets) if isinstance(targets, tuple) else None
        columns = {f"input/{place}": part for place, part in enumerate(examples.stored.args)}
        columns |= {f"target/{place}": part for place, part in enumerate(target_parts(targets))}
        columns = {name: part.detach().cpu().contiguous() for name, part in columns.items()}
        header = {"targets": kind, "notes": data.notes, "origin": dict(data.origin), "whole": whole}
        known = {key: json.dumps(value) for key, value in header.items()}
        with replacing_path(_file(folder, name)) as path:
            safetensors.torch.save_file(columns, path, {**known, "digest": digest(columns, known)})
    if all(examples.storage is None for examples in data.splits().values()):
        return data
    found = load_drawn(folder)
    assert found is not None
    return found[0]


def has_drawn(folder: Path) -> bool:
    """Whether `save_drawn` wrote sets to the run folder."""
    return _file(folder, "train").exists()


def reopen_loaders(
    folder: Path, model: nn.Module, train: Any, test: Any, *, forward: Forward | None, own: Collection[str]
) -> tuple[Data, BatchForm, dict[str, Stream]]:
    """What the run in `folder` drew from its loaders, the form of their batches, and the loaders that are given again."""
    found = load_drawn(folder)
    if found is None:
        raise RunError(
            f"{folder}: was started with data in memory. Give the same: secateurs.resume(folder, model, data), or --data on "
            f"the command line."
        )
    data, whole = found
    given = {name: source for name, source in (("train", train), ("test", test)) if source is not None}
    if whole and not given:
        raise RunError(
            f"{folder}: its loss or metric depends on the form of batches, which a batch shows. Give the training loader, too: "
            f"resume(folder, model, train, …)."
        )
    form = PAIR
    for name, source in list(given.items())[:1]:
        form = form_of(first_batch(source, name, 0), model, forward, name=name, own=own)
    return data, form, {name: stream_of(source, name, form) for name, source in given.items()}


def load_drawn(folder: Path) -> tuple[Data, bool] | None:
    """The sets that `save_drawn` wrote, and whether measures depend on the form of batches; None if there are no sets."""
    if not has_drawn(folder):
        return None
    sets: dict[str, Examples] = {}
    header: dict[str, str] = {}
    for name, limit in (("train", TRAIN_BYTES), ("search", VALIDATION_BYTES)):
        path = _file(folder, name)
        try:
            with safe_open(path, "pt") as file:  # memory-mapped
                header = file.metadata() or {}
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no dict
            if header.pop("digest") != digest(tensors, header):
                raise Damaged("the contents do not match their digest: the file was changed or damaged")
            kind = decode_json(header["targets"], list[str] | int | None)
            small = sum(part.nbytes for part in tensors.values()) <= limit
            columns = {key: part.clone() if small else part for key, part in tensors.items()}
            inputs = tuple(columns[f"input/{place}"] for place in range(sum(key.startswith("input/") for key in columns)))
            parts = tuple(columns[f"target/{place}"] for place in range(len(columns) - len(inputs)))
            targets: Targets = dict(zip(kind, parts, strict=True)) if isinstance(kind, list) else parts
            storage = None if small else Storage(limit // _COPIED, folder)
            given = inputs[0] if len(inputs) == 1 else inputs
            sets[name] = Examples(given, parts[0] if kind is None else targets, storage=storage)
        except (OSError, SafetensorError, Damaged, Malformed, KeyError, ValueError) as error:
            raise RunError(f"{path}: cannot be read ({error}). Restore it from a copy, or start a new run.") from error
    notes: list[str] = decode_json(header["notes"], list[str])
    origin: dict[str, int] = decode_json(header["origin"], dict[str, int])
    data = Data("loaders", sets["train"], sets["search"], None, notes=tuple(notes), origin=origin)
    return data, decode_json(header["whole"], bool)


def _file(folder: Path, name: str) -> Path:
    return folder / "data" / f"{name}.safetensors"
