"""The user's loaders, streamed: read batch by batch, never copied whole. Scoring draws a bounded, seeded sample of them once.

A loader is any iterable of batches that can be read more than once.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
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

from secateurs._util.modules import to_device
from secateurs.data.dataset import Batch, Examples, derive, map_inputs, seeded
from secateurs.data.forms import PAIR, BatchForm
from secateurs.data.storage import Rows, Storage
from secateurs.errors import DataError

_READ_AHEAD = 4  # of an iterable without random access: examples read for each one that is drawn
_SIZE = 256  # of batches of datasets and tensors


@dataclass(frozen=True, eq=False)
class Stream:
    """Batches of a loader, each on the device only while it is used."""

    loader: Iterable[Any]
    name: str
    form: BatchForm = PAIR
    dtype: torch.dtype | None = None  # of floating-point inputs; None: as they come

    def __post_init__(self) -> None:
        if isinstance(self.loader, Iterator):
            raise DataError(
                f"the {self.name} loader is a {type(self.loader).__name__}, which can be read only once: give a DataLoader, a "
                f"list of batches, or an object whose __iter__ starts from the beginning."
            )
        if not hasattr(self.loader, "__iter__"):
            raise DataError(f"{self.name}: got {type(self.loader).__name__}, wanted a loader: an iterable of batches.")

    def raw(self) -> Iterator[Any]:
        """Read the loader from its beginning; its batches are as they come."""
        empty = True
        try:
            for batch in self.loader:
                empty = False
                yield batch
        except RuntimeError as error:
            if "stack expects each tensor to be equal size" not in str(error):
                raise
            raise DataError(
                f"the {self.name} loader cannot make a batch of examples of different shapes ({str(error).splitlines()[-1]}): "
                f"wanted one shape. Resize or pad them in the dataset."
            ) from error
        if empty:
            raise DataError(
                f"the {self.name} loader gave no batch: wanted at least one. If it gave some before, it can be read only once: "
                f"give an object whose __iter__ starts from the beginning."
            )

    def batches(self, size: int = 0, *, device: torch.device | str | None = None) -> Iterator[Batch]:
        """Read the loader from its beginning, batch by batch; larger ones than `size` in parts, with 0 as they come."""
        for batch in self.raw():
            found = self.form.split(batch, self.name)
            if self.dtype is not None:
                found = found._replace(inputs=map_inputs(self._converted, found.inputs))
            for start in range(0, found.size, size or max(found.size, 1)):
                rows = slice(start, start + size) if size else slice(None)
                yield found.mapped(lambda part, rows=rows: to_device(part[rows], device))  # type: ignore[misc]

    def share(self, number: int, of: int, size: int, *, device: torch.device | str | None = None) -> Iterator[list[Batch]]:
        """Every `of`-th batch of the loader, from batch `number` on, each in parts of at most `size` examples.

        Of a `DataLoader` without shuffling only the examples of these batches are read. A share may be empty.
        """
        loader, rows = self.loader, sampled_rows(self.loader)
        if isinstance(loader, DataLoader) and rows is not None and isinstance(loader.sampler, SequentialSampler):
            each = loader.batch_size or 1
            used = len(rows) // each * each if loader.drop_last else len(rows)
            own = [row for start in range(number * each, used, of * each) for row in rows[start : min(start + each, used)]]
            chosen: Iterable[Any] = restricted(loader, own) if own else ()
        else:
            chosen = (batch for place, batch in enumerate(self.raw()) if place % of == number)
        for batch in chosen:
            yield list(replace(self, loader=[batch]).batches(size, device=device))

    def without_singles(self, *, device: torch.device | str | None = None) -> Iterator[Batch]:
        """Read the loader for a network that may not be able to train on one example, as one with BatchNorm.

        A single example gets the last one of the batch before as company, which comes twice then: the number of batches stays
        what the loader says. Nothing is done where that batch is a single example, too, or has examples of other shapes.
        """
        last: Batch | None = None
        for batch in self.batches(device=device):
            if batch.size == 1 and last is not None and _stackable(last, batch):
                pairs = zip(last.columns(), batch.columns(), strict=True)
                batch, last = batch.with_columns([torch.cat(pair) for pair in pairs]), None
            else:
                # a copy: a row that is a view would keep the whole batch in memory
                last = batch.mapped(lambda part: part[-1:].clone()) if batch.size > 1 else None
            yield batch

    def parts(self, rank: int, size: int, order: torch.Generator, *, singles: bool = True) -> tuple[Stream, list[int]] | None:
        """One of `size` parts of every batch, for training, and the sizes of the whole batches.

        A `DataLoader` that shuffles gives the rows in the `order` drawn here, the same on every worker, and only the rows of
        the part are read. None where the rows of the batches are unknown. Of a batch of fewer rows than parts, all have all.
        `singles`: whether a batch may be a single example; else see `without_singles`.
        """
        loader, rows = self.loader, sampled_rows(self.loader)
        if not isinstance(loader, DataLoader) or rows is None:
            return None
        if not isinstance(loader.sampler, SequentialSampler):
            rows = [rows[place] for place in torch.randperm(len(rows), generator=order).tolist()]
        each = loader.batch_size or 1
        wholes = [rows[start : start + each] for start in range(0, len(rows), each)]
        wholes = [whole for whole in wholes if len(whole) == each] if loader.drop_last else wholes
        if not singles and len(wholes) > 1 and len(wholes[-1]) == 1 < each:
            wholes[-1] = [wholes[-2][-1], *wholes[-1]]
        own = [whole if len(whole) < size else whole[rank::size] for whole in wholes]
        chosen = DataLoader(
            loader.dataset,
            batch_sampler=own,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )
        return replace(self, loader=chosen), [len(whole) for whole in wholes]

    def ready(self, dtype: torch.dtype) -> Stream:
        """The same stream with floating-point inputs as `dtype`, in which the network computes."""
        return replace(self, dtype=dtype)

    def _converted(self, inputs: Tensor) -> Tensor:
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs

    @property
    def length(self) -> int | None:
        """The number of batches, if the loader knows it."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None


def _stackable(one: Batch, other: Batch) -> bool:
    """Whether two examples make a batch of two."""
    kinds = [[(tuple(part.shape), part.dtype) for part in batch.columns()] for batch in (one, other)]
    return kinds[0] == kinds[1] and all(shape[0] == 1 for shape, _ in kinds[0])


def stream_of(source: Any, name: str, form: BatchForm | None = None) -> Stream:
    """Wrap a loader, a Dataset, a pair of tensors or `Examples` as a stream."""
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], Tensor):
        source = Examples(source[0], source[1])
    if isinstance(source, Examples):
        source = list(source.batches(_SIZE))
    elif isinstance(source, Dataset):
        source = DataLoader(source, batch_size=_SIZE)
    return Stream(source, name, form or PAIR)


def sample(
    source: Any, count: int | None, *, name: str, seed: int, storage: Storage, form: BatchForm | None = None
) -> Examples:
    """Draw at most `count` examples (None: all), the same for the same seed, and keep them in `storage`.

    Sources with random access are read only at the rows that are drawn, in their order. Of others, such as iterable datasets,
    the first `count` examples and three times as many are read, and the sample is drawn from these.
    """
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], Tensor):
        source = Examples(source[0], source[1])
    generator = torch.Generator().manual_seed(derive(seed, "sample", name))
    if isinstance(source, Examples):
        return source if count is None or count >= len(source) else source.take(_chosen(len(source), count, generator))
    stream = stream_of(source, name, form)
    loader, rows, collected = stream.loader, sampled_rows(stream.loader), Rows(storage, name)
    chosen = None if rows is None else torch.tensor(rows)[_chosen(len(rows), count, generator)]
    like: Batch | None = None
    with seeded_everywhere(seed, "sample", name):
        if chosen is not None and isinstance(loader, DataLoader):
            for like in Stream(restricted(loader, chosen.tolist()), name, stream.form).batches():
                collected.write(like.columns())
        else:
            seen = 0
            for like in stream.batches():
                columns, left = like.columns(), like.size if count is None else max(min(count - seen, like.size), 0)
                if left:
                    collected.write([column[:left] for column in columns])
                for row in range(left, like.size):  # reservoir sampling: every example seen is equally likely to be kept
                    place = int(torch.randint(seen + row + 1, (1,), generator=generator))
                    if place < (count or 0):
                        collected.write([column[row : row + 1] for column in columns], place)
                seen += like.size
                if count is not None and seen >= _READ_AHEAD * count:
                    break
    if like is None:
        raise DataError(f"the {name} loader gave batches without examples: wanted at least one example.")
    found = like.with_columns(collected.tensors())
    return Examples(found.inputs, found.targets, storage=storage if collected.on_disk else None)


def _chosen(total: int, count: int | None, generator: torch.Generator) -> Tensor:
    return torch.randperm(total, generator=generator)[:count].sort().values


def restricted(loader: DataLoader[Any], rows: list[int]) -> DataLoader[Any]:
    """The same loader, of the given rows of its dataset in their order; its workers begin as the user has them begin."""
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=rows,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def sampled_rows(loader: Any) -> list[int] | None:
    """Rows of its dataset that a loader reads, ascending; None for iterable datasets, unknown samplers and other loaders."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    sampler = loader.sampler
    if isinstance(sampler, SubsetRandomSampler):
        return sorted(int(row) for row in sampler.indices)
    if isinstance(sampler, SequentialSampler | RandomSampler):
        return list(range(len(loader.dataset)))  # type: ignore[arg-type]
    return None


def rows_of(source: Any) -> tuple[object, list[int] | None]:
    """The innermost dataset of a source and the rows of it that are read; None if they are unknown."""
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        source = DataLoader(source)
    rows = sampled_rows(source)
    if rows is None:
        return source, None
    dataset: Any = source.dataset
    while isinstance(dataset, Subset):
        rows, dataset = [int(dataset.indices[row]) for row in rows], dataset.dataset
    # two TensorDatasets over one tensor share its rows
    return (dataset.tensors[0] if isinstance(dataset, TensorDataset) else dataset), rows


def _generators(loader: Any) -> list[torch.Generator]:
    """The random generators that a `DataLoader` and its samplers have of their own."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [generator for part in parts if isinstance(generator := getattr(part, "generator", None), torch.Generator)]
    return list({id(generator): generator for generator in found}.values())


@contextmanager
def seeded_everywhere(seed: int, *purpose: str | int, loader: Any = None) -> Iterator[None]:
    """Seed the random states of torch, numpy and Python, which transforms may use, and restore them.

    Those of a `DataLoader` and its samplers, too.
    """
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    value = derive(seed, *purpose)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002  # the state that transforms draw from
    owned = [(generator, generator.get_state()) for generator in _generators(loader)]
    for generator, _ in owned:
        generator.manual_seed(value)
    try:
        with seeded(seed, *purpose):
            yield
    finally:
        for generator, state in owned:
            generator.set_state(state)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
