"""The user's DataLoaders, Datasets or pairs of tensors as `Data`, read once into memory."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from secateurs.data.dataset import Examples, Targets
from secateurs.data.forms import describe_batch
from secateurs.data.splits import Data, overlap_notes, refuse_copies, split, split_shares
from secateurs.data.storage import Storage
from secateurs.data.stream import rows_of, sample
from secateurs.errors import InvalidInput

Source = DataLoader[Any] | Dataset[Any] | tuple[Tensor, Targets] | Examples


def from_loaders(
    train: Source,
    val: Source | None = None,
    test: Source | None = None,
    *,
    name: str = "loaders",
    classes: tuple[str, ...] = (),
    val_share: float = 0.1,
    seed: int = 0,
) -> Data:
    """Read DataLoaders, Datasets or pairs of tensors; without `val`, the share `val_share` is split off from `train`.

    Every example is read once, in the order of the dataset, so random transforms are frozen: leave augmentation to
    training. Iterable datasets and unknown samplers are read in their own order.
    """
    roots: list[object] = []
    sets = {
        part: _read(source, "validation" if part == "search" else part, roots, seed=seed)
        for part, source in (("train", train), ("search", val), ("test", test))
        if source is not None
    }
    given = dict(sets)
    if "search" not in sets:
        sizes = split_shares(len(sets["train"]), val_share)
        sets["train"], sets["search"] = split(sets["train"], sizes, seed=seed)
    origin = {"seed": seed} if val is not None else {"seed": seed, "search_share": val_share}
    # Data compares rows of one dataset, which gives a better message than equal bytes: it comes first
    data = Data(name, sets["train"], sets["search"], sets.get("test"), classes=classes, origin=origin)
    refuse_copies({"validation" if part == "search" else part: examples for part, examples in given.items()})
    return replace(data, notes=overlap_notes(data))


def materialise(source: Source, *, name: str = "given", seed: int = 0) -> Examples:
    """Read all examples of one source into memory; random states are seeded meanwhile, and restored."""
    return sample(source, None, name=name, seed=seed, storage=Storage(memory=sys.maxsize))


def _read(source: Source, name: str, roots: list[object], *, seed: int) -> Examples:
    """Read one source, with ids that two sources share where both read the same row of one dataset; `roots` grows."""
    examples = materialise(source, name=name, seed=seed)
    root, rows = rows_of(source)
    if rows is None or len(rows) != len(examples):
        return examples if isinstance(source, Examples) else Examples(examples.inputs, examples.targets)
    if not any(known is root for known in roots):
        roots.append(root)
    number = 1 + next(i for i, known in enumerate(roots) if known is root)  # 0 is left to the ids of given Examples
    ids = number * (1 << 40) + torch.tensor(rows, dtype=torch.int64)
    return Examples(examples.inputs, examples.targets, examples.scaling, ids)


def as_sources(value: object, *, name: str) -> Data | tuple[Any, Any, Any]:
    """What a user's function returned: `Data`, or sources (train, val, test), where a missing test set is None."""
    if isinstance(value, Data):
        return value
    if isinstance(value, tuple | list) and len(value) in (2, 3):
        return value[0], value[1], value[2] if len(value) == 3 else None
    raise InvalidInput(
        f"{name} returned {describe_batch(value)}: wanted secateurs.data.Data, or loaders (train, val) or (train, val, test)."
    )
