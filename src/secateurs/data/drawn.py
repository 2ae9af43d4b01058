"""Data of a run from the user's loaders: a sample of the training set and the validation set in memory, kept in the folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from secateurs._util.decode import Malformed, decode_json
from secateurs._util.files import write_bytes
from secateurs._util.tensors import Damaged, dump, parse
from secateurs.data.dataset import Examples, Targets, target_parts
from secateurs.data.loaders import root_rows
from secateurs.data.splits import Data, refuse_copies, shared_inputs
from secateurs.data.stream import BatchForm, sample
from secateurs.errors import RunError

TRAIN_EXAMPLES = 16_384  # drawn from the training set: more than any criterion or repair reads
TRAIN_BYTES, VALIDATION_BYTES = 1 << 30, 2 << 30  # kept in memory at most


def drawn(
    train: Any,
    val: Any,
    *,
    form: BatchForm,
    seed: int = 0,
    train_bytes: int = TRAIN_BYTES,
    val_bytes: int = VALIDATION_BYTES,
) -> Data:
    """Draw what scoring, repair and the search read; the same loaders and seed give the same data.

    A validation set larger than `val_bytes` is sampled. Random transforms are drawn once for what is kept here.
    """
    sets = {
        "train": sample(train, TRAIN_EXAMPLES, name="train", seed=seed, max_bytes=train_bytes, form=form),
        "validation": sample(val, None, name="validation", seed=seed, max_bytes=val_bytes, form=form),
    }
    sources, roots = {"train": train, "validation": val}, list[object]()
    for name, examples in sets.items():
        sets[name] = replace(examples, ids=_ids(sources[name], examples, roots))
    refuse_copies(sets)
    shared, whole = shared_inputs(sets["validation"], sets["train"]), _length(val)
    notes = [f"{shared} of {len(sets['validation'])} validation inputs are also in the training sample"] if shared else []
    if whole is not None and whole > len(sets["validation"]):
        notes.append(f"{len(sets['validation']):,} of {whole:,} validation examples are kept in memory and used")
    return Data("loaders", sets["train"], sets["validation"], None, notes=tuple(notes), origin={"seed": seed})


def _ids(source: Any, examples: Examples, roots: list[object]) -> Tensor | None:
    """Numbers that two sources share only where both read the same row of one dataset; `roots` grows."""
    if examples.ids is None or not isinstance(source, DataLoader):
        return None
    root, rows = root_rows(source.dataset, examples.ids.tolist())
    if not any(known is root for known in roots):
        roots.append(root)
    number = 1 + next(i for i, known in enumerate(roots) if known is root)
    return number * (1 << 40) + torch.tensor(rows, dtype=torch.int64)


def _length(source: Any) -> int | None:
    try:
        return len(source.dataset) if isinstance(source, DataLoader) else len(source)  # type: ignore[arg-type]
    except TypeError:
        return None


def save_drawn(data: Data, folder: Path) -> None:
    """Write the sets to the run folder: a resumed run reads them again, whatever the loaders give then."""
    for name, examples in data.splits().items():
        targets = examples.targets
        kind = sorted(targets) if isinstance(targets, dict) else len(targets) if isinstance(targets, tuple) else None
        columns = {f"target/{place}": part for place, part in enumerate(target_parts(targets))}
        ids = {} if examples.ids is None else {"ids": examples.ids}
        header = {"targets": json.dumps(kind), "notes": json.dumps(data.notes), "origin": json.dumps(dict(data.origin))}
        write_bytes(_file(folder, name), dump({"inputs": examples.inputs, **columns, **ids}, header))


def has_drawn(folder: Path) -> bool:
    """Whether `save_drawn` wrote sets to the run folder."""
    return _file(folder, "train").exists()


def load_drawn(folder: Path) -> Data | None:
    """The sets that `save_drawn` wrote; None if there are none."""
    if not has_drawn(folder):
        return None
    sets: dict[str, Examples] = {}
    header: dict[str, str] = {}
    for name in ("train", "search"):
        path = _file(folder, name)
        try:
            tensors, header = parse(path.read_bytes())
            kind = decode_json(header["targets"], list[str] | int | None)
            columns = [tensors[f"target/{place}"] for place in range(sum(key.startswith("target/") for key in tensors))]
            targets: Targets = columns[0] if kind is None else tuple(columns)
            if isinstance(kind, list):
                targets = dict(zip(kind, columns, strict=True))
            sets[name] = Examples(tensors["inputs"], targets, ids=tensors.get("ids"))
        except (OSError, Damaged, Malformed, KeyError) as error:
            raise RunError(f"{path}: cannot be read ({error}). Restore it from a copy, or start a new run.") from error
    notes: list[str] = decode_json(header["notes"], list[str])
    origin: dict[str, int] = decode_json(header["origin"], dict[str, int])
    return Data("loaders", sets["train"], sets["search"], None, notes=tuple(notes), origin=origin)


def _file(folder: Path, name: str) -> Path:
    return folder / "data" / f"{name}.safetensors"
