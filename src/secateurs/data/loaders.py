"""What a user already has (DataLoaders, Datasets, pairs of tensors) as `Data`, read once into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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

from secateurs.data.dataset import Examples, Targets, map_targets, seeded, target_parts
from secateurs.data.splits import Data, overlap_notes, refuse_copies, split, split_shares
from secateurs.errors import DataError, InvalidInput

Source = DataLoader[Any] | Dataset[Any] | tuple[Tensor, Targets] | Examples
_BATCH = 256


def from_loaders(
    train: Source,
    test: Source,
    search: Source | None = None,
    *,
    name: str = "loaders",
    classes: tuple[str, ...] = (),
    search_share: float = 0.1,
    seed: int = 0,
) -> Data:
    """Data from two or three DataLoaders, Datasets or pairs of tensors; without `search`, it is cut off from `train`.

    Every example is read once, in the order of the dataset, so random transforms are frozen: leave augmentation to
    training. Iterable datasets and samplers of unknown kinds are read in the order in which they come.
    """
    roots: list[tuple[object, int]] = []
    sets = {
        part: _read(source, part, roots, seed=seed)
        for part, source in (("train", train), ("search", search), ("test", test))
        if source is not None
    }
    given = dict(sets)
    if "search" not in sets:
        sizes = split_shares(len(sets["train"]), search_share)
        sets["train"], sets["search"] = split(sets["train"], sizes, seed=seed)
    origin = {"seed": seed} if search is not None else {"seed": seed, "search_share": search_share}
    # rows of one dataset before equal bytes: the first error says more
    data = Data(name, sets["train"], sets["search"], sets["test"], classes=classes, origin=origin)
    refuse_copies(given)
    return replace(data, notes=overlap_notes(**data.splits()))


def materialise(source: Source, *, name: str = "given", seed: int = 0) -> Examples:
    """All examples of one source in memory; torch's random state is seeded meanwhile, and given back."""
    if isinstance(source, Examples):
        return source
    if isinstance(source, tuple):
        return Examples(source[0], source[1])
    if not isinstance(source, DataLoader):
        source = DataLoader(source, batch_size=_BATCH)
    with seeded(seed, "materialise", name):
        pairs = list(_pairs(_in_order(source), name))
    if not pairs:
        raise DataError(f"the {name} loader gave no batch: wanted at least one")
    return Examples(torch.cat([inputs for inputs, _ in pairs]), _concatenate([targets for _, targets in pairs]))


def _read(source: Source, name: str, roots: list[tuple[object, int]], *, seed: int) -> Examples:
    """The examples of one source, with ids that two sources share where both read the same row of one dataset."""
    examples = materialise(source, name=name, seed=seed)
    root, rows = _rows_of(source)
    if rows is None or len(rows) != len(examples):
        return examples if isinstance(source, Examples) else Examples(examples.inputs, examples.targets)
    ids = _number_of(root, roots) * (1 << 40) + torch.tensor(rows, dtype=torch.int64)
    return Examples(examples.inputs, examples.targets, examples.scaling, ids)


def _number_of(root: object, roots: list[tuple[object, int]]) -> int:
    for known, number in roots:
        if known is root:
            return number
    roots.append((root, len(roots) + 1))  # from 1 on: the ids of given Examples keep the numbers below
    return len(roots)


def _rows_of(source: Source) -> tuple[object, list[int] | None]:
    """The innermost dataset behind a source, and which of its rows are read; None where that cannot be known."""
    rows: list[int] | None
    if isinstance(source, DataLoader):
        dataset, rows = source.dataset, _sampled(source)
    elif isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        dataset, rows = source, list(range(len(source)))  # type: ignore[arg-type]
    else:
        return source, None
    while rows is not None and isinstance(dataset, Subset):
        rows, dataset = [int(dataset.indices[row]) for row in rows], dataset.dataset
    # two TensorDatasets over one tensor are the same rows too
    return (dataset.tensors[0] if isinstance(dataset, TensorDataset) else dataset), rows


def _sampled(loader: DataLoader[Any]) -> list[int] | None:
    """The rows of its dataset that a loader visits, ascending; None for samplers of unknown kinds."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    sampler = loader.sampler
    if isinstance(sampler, SubsetRandomSampler):
        return sorted(int(row) for row in sampler.indices)
    if isinstance(sampler, SequentialSampler | RandomSampler):
        return list(range(len(loader.dataset)))  # type: ignore[arg-type]
    return None


def _in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    rows = _sampled(loader)
    if rows is None:
        return loader
    return DataLoader(
        Subset(loader.dataset, rows),
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
    )


def _pairs(batches: Iterable[Any], name: str) -> Iterator[tuple[Tensor, Targets]]:
    for batch in batches:
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[0], Tensor):
            raise DataError(
                f"a batch of the {name} loader is {_describe(batch)}: wanted (inputs, targets) with a tensor of inputs"
            )
        yield batch[0], _targets(batch[1], name)


def _targets(given: Any, name: str) -> Targets:
    targets = tuple(given) if isinstance(given, list) else given
    parts = list(targets.values()) if isinstance(targets, dict) else targets if isinstance(targets, tuple) else [targets]
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise DataError(
            f"the targets of the {name} loader are {_describe(given)}: wanted a tensor, or a tuple or dict of tensors"
        )
    return map_targets(lambda part: part, targets)


def _concatenate(batches: list[Targets]) -> Targets:
    columns = [torch.cat(column) for column in zip(*map(target_parts, batches), strict=True)]
    first = batches[0]
    if isinstance(first, dict):
        return dict(zip(sorted(first), columns, strict=True))
    return tuple(columns) if isinstance(first, tuple) else columns[0]


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with {', '.join(map(repr, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(part).__name__ for part in value[:4])})"
    return f"a {type(value).__name__}"


def as_data(value: object, *, name: str) -> Data:
    """What a user's function returned, as `Data`: that itself, or (train, test) or (train, search, test) sources."""
    if isinstance(value, Data):
        return value
    if isinstance(value, tuple | list) and len(value) == 2:
        return from_loaders(value[0], value[1], name=name)
    if isinstance(value, tuple | list) and len(value) == 3:
        return from_loaders(value[0], value[2], value[1], name=name)
    raise InvalidInput(
        f"{name} returned {_describe(value)}: wanted secateurs.data.Data, or the loaders (train, test) or (train, search, test)"
    )
