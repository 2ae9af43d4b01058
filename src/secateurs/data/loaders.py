"""The user's DataLoaders, Datasets or pairs of tensors as `Data`, read once into memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from secateurs.data.dataset import Examples, Targets, seeded, target_parts
from secateurs.data.splits import Data, overlap_notes, refuse_copies, split, split_shares
from secateurs.errors import DataError, InvalidInput

Source = DataLoader[Any] | Dataset[Any] | tuple[Tensor, Targets] | Examples
_BATCH = 256


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
    """Read all examples of one source into memory; torch's random state is seeded meanwhile, and restored."""
    if isinstance(source, Examples):
        return source
    if isinstance(source, tuple):
        return Examples(source[0], source[1])
    if not isinstance(source, DataLoader):
        source = DataLoader(source, batch_size=_BATCH)
    with seeded(seed, "materialise", name):
        batches = [_checked(batch, name) for batch in _in_order(source)]
    if not batches:
        raise DataError(f"the {name} loader gave no batch: wanted at least one.")
    columns = [torch.cat(column) for column in zip(*(target_parts(targets) for _, targets in batches), strict=True)]
    first = batches[0][1]
    targets: Targets = tuple(columns) if isinstance(first, tuple) else columns[0]
    if isinstance(first, dict):
        targets = dict(zip(sorted(first), columns, strict=True))
    return Examples(torch.cat([inputs for inputs, _ in batches]), targets)


def root_rows(dataset: Any, rows: list[int]) -> tuple[object, list[int]]:
    """The innermost dataset below `dataset`, and the rows of it that `rows` name."""
    while isinstance(dataset, Subset):
        rows, dataset = [int(dataset.indices[row]) for row in rows], dataset.dataset
    # two TensorDatasets over one tensor share its rows
    return (dataset.tensors[0] if isinstance(dataset, TensorDataset) else dataset), rows


def _read(source: Source, name: str, roots: list[object], *, seed: int) -> Examples:
    """Read one source, with ids that two sources share where both read the same row of one dataset; `roots` grows."""
    examples = materialise(source, name=name, seed=seed)
    root, rows = _rows_of(source)
    if rows is None or len(rows) != len(examples):
        return examples if isinstance(source, Examples) else Examples(examples.inputs, examples.targets)
    if not any(known is root for known in roots):
        roots.append(root)
    number = 1 + next(i for i, known in enumerate(roots) if known is root)  # 0 is left to the ids of given Examples
    ids = number * (1 << 40) + torch.tensor(rows, dtype=torch.int64)
    return Examples(examples.inputs, examples.targets, examples.scaling, ids)


def _rows_of(source: Source) -> tuple[object, list[int] | None]:
    """Find the innermost dataset of a source and the rows of it that are read; None if they are unknown."""
    rows: list[int] | None
    if isinstance(source, DataLoader):
        dataset, rows = source.dataset, sampled_rows(source)
    elif isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        dataset, rows = source, list(range(len(source)))  # type: ignore[arg-type]
    else:
        return source, None
    return (source, None) if rows is None else root_rows(dataset, rows)


def sampled_rows(loader: DataLoader[Any]) -> list[int] | None:
    """Rows of its dataset that a loader reads, ascending; None for unknown samplers."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    sampler = loader.sampler
    if isinstance(sampler, SubsetRandomSampler):
        return sorted(int(row) for row in sampler.indices)
    if isinstance(sampler, SequentialSampler | RandomSampler):
        return list(range(len(loader.dataset)))  # type: ignore[arg-type]
    return None


def _in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    rows = sampled_rows(loader)
    if rows is None:
        return loader
    return DataLoader(
        Subset(loader.dataset, rows),
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
    )


def _checked(batch: Any, name: str) -> tuple[Tensor, Targets]:
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[0], Tensor):
        raise DataError(
            f"a batch of the {name} loader is {describe_batch(batch)}: wanted (inputs, targets) with a tensor of inputs."
        )
    targets: Targets = tuple(batch[1]) if isinstance(batch[1], list) else batch[1]
    parts = target_parts(targets)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise DataError(
            f"the targets of the {name} loader are {describe_batch(batch[1])}: wanted a tensor, or a tuple or dict of tensors."
        )
    return batch[0], targets


def describe_batch(value: Any) -> str:
    """What a batch is made of, for messages."""
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(repr, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(part).__name__ for part in value[:4])})"
    return f"a {type(value).__name__}"


def as_sources(value: object, *, name: str) -> Data | tuple[Any, Any, Any]:
    """What a user's function returned: `Data`, or sources (train, val, test), where a missing test set is None."""
    if isinstance(value, Data):
        return value
    if isinstance(value, tuple | list) and len(value) in (2, 3):
        return value[0], value[1], value[2] if len(value) == 3 else None
    raise InvalidInput(
        f"{name} returned {describe_batch(value)}: wanted secateurs.data.Data, or loaders (train, val) or (train, val, test)."
    )
