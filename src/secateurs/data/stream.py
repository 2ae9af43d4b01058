"""The user's loaders, streamed: read batch by batch, never copied whole. Scoring draws a bounded, seeded sample of them once.

A loader is any iterable of batches that can be read more than once. A batch is (inputs, targets) by default; with a `forward`
of the user's own it may be any tuple or dict of tensors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from secateurs._util.modules import to_device
from secateurs.data.dataset import Batch, Examples, Targets, derive, map_targets, seeded, target_parts
from secateurs.data.loaders import describe_batch, sampled_rows
from secateurs.errors import DataError, InvalidInput

_READ_AHEAD = 4  # of an iterable without random access: examples read for each one that is drawn

Forward = Callable[[Any, Any], Any]
"""Calls a model on a batch, once: `forward(model, batch) -> outputs`."""


class _Called(Exception):
    """Raised to stop `forward` at its call of the model."""


@dataclass(frozen=True)
class BatchForm:
    """Where a batch holds the inputs of the network; everything else in it is passed to the loss and the metric.

    `forward` is the user's own; the network itself is called with the tensor at `key`.
    """

    forward: Forward | None = None
    key: int | str = 0

    def split(self, batch: Any, name: str) -> Batch:
        """Divide a batch into the inputs of the network and all other tensors."""
        if self.forward is None:
            if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[0], Tensor):
                raise DataError(
                    f"a batch of the {name} loader is {describe_batch(batch)}, wanted (inputs, targets) with a tensor of "
                    f"inputs. For other batches give forward=lambda model, batch: …, and loss and metric of (outputs, batch)."
                )
            return Batch(batch[0], _checked_targets(batch[1], name))
        rest: Targets
        if isinstance(batch, Mapping):
            rest = {str(key): value for key, value in batch.items() if key != self.key and isinstance(value, Tensor)}
            return Batch(batch[self.key], rest)
        rest = tuple(value for place, value in enumerate(batch) if place != self.key)
        return Batch(batch[self.key], _checked_targets(rest, name))

    def joined(self, targets: Any, count: int) -> Any:
        """The batch again, for `forward`, loss and metric; its inputs are an empty tensor (count, 0)."""
        empty = torch.empty(count, 0)
        if isinstance(targets, dict):
            return {**targets, self.key: empty}
        parts = list(targets)
        parts.insert(int(self.key), empty)
        return tuple(parts)

    def measure(self, function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """A loss or metric of (outputs, batch) as one of (network outputs, targets)."""
        if self.forward is None:
            return function
        forward = self.forward

        def measured(outputs: Any, targets: Any) -> Tensor:
            batch = self.joined(targets, len(target_parts(targets)[0]))
            return function(forward(lambda *args, **options: outputs, batch), batch)

        measured.__name__ = getattr(function, "__name__", type(function).__name__)
        return measured


def form_of(forward: Forward | None, batch: Any) -> BatchForm:
    """Find where `forward` takes the inputs of the network from, by calling it with a stand-in for the model."""
    if forward is None:
        return BatchForm()
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def recorder(*args: Any, **options: Any) -> Any:
        given.append((args, options))
        raise _Called

    with suppress(_Called):
        forward(recorder, batch)
    inputs = [value for args, options in given for value in (*args, *options.values())]
    if not given:
        raise InvalidInput("forward(model, batch) did not call the model: wanted exactly one call of it.")
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
        raise InvalidInput(
            f"forward calls the model with {describe_batch(tuple(inputs))}: networks with one tensor of inputs can be pruned "
            f"with loaders. Wrap the model so that it takes one tensor."
        )
    leaves = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, tuple | list) else ()
    found = [key for key, value in leaves if value is inputs[0]]
    if not found:
        raise InvalidInput(
            f"forward does not pass a tensor of the batch ({describe_batch(batch)}) to the model as it is: transform batches "
            f"in the loader."
        )
    return BatchForm(forward, found[0])


@dataclass(frozen=True, eq=False)
class Stream:
    """Batches of a loader, each on the device only while it is used."""

    loader: Iterable[Any]
    name: str
    form: BatchForm = BatchForm()

    def __post_init__(self) -> None:
        if isinstance(self.loader, Iterator):
            raise DataError(
                f"the {self.name} loader is a {type(self.loader).__name__}, which can be read only once: give a DataLoader, a "
                f"list of batches, or an object whose __iter__ starts from the beginning."
            )
        if not isinstance(self.loader, Iterable):
            raise DataError(f"{self.name}: got {type(self.loader).__name__}, wanted a loader: an iterable of batches.")

    def batches(self, size: int = 0, *, device: torch.device | str | None = None) -> Iterator[Batch]:
        """Read the loader from its beginning, batch by batch; larger ones than `size` in parts, with 0 as they come."""
        empty = True
        for batch in self.loader:
            empty = False
            inputs, targets = self.form.split(batch, self.name)
            for start in range(0, len(inputs), size or max(len(inputs), 1)):
                rows = slice(start, start + size) if size else slice(None)
                wanted = map_targets(lambda part, rows=rows: to_device(part[rows], device), targets)  # type: ignore[misc]
                yield Batch(to_device(inputs[rows], device), wanted)
        if empty:
            raise DataError(f"the {self.name} loader gave no batch: wanted at least one.")

    @property
    def length(self) -> int | None:
        """The number of batches, if the loader knows it."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None


def stream_of(source: Any, name: str, form: BatchForm | None = None, *, batch: int = 256) -> Stream:
    """Wrap a loader, a Dataset, a pair of tensors or `Examples` as a stream."""
    if isinstance(source, Examples):
        source = list(source.batches(batch))
    elif isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], Tensor):
        source = list(Examples(source[0], source[1]).batches(batch))
    elif isinstance(source, Dataset):
        source = DataLoader(source, batch_size=batch)
    return Stream(source, name, form or BatchForm())


def sample(source: Any, count: int | None, *, name: str, seed: int, max_bytes: int, form: BatchForm | None = None) -> Examples:
    """Draw at most `count` examples (None: all) within `max_bytes`, the same for the same seed, in the order of the source.

    Sources with random access are read only at the rows that are drawn. Of others, such as iterable datasets, the first
    `count` examples and three times as many are read, and the sample is drawn from these.
    """
    if isinstance(source, Examples) or (isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], Tensor)):
        whole = source if isinstance(source, Examples) else Examples(source[0], source[1])
        return whole if count is None or count >= len(whole) else whole.take(_chosen(len(whole), count, seed, name))
    stream = stream_of(source, name, form)
    with seeded_everywhere(seed, "sample", name):
        first = next(iter(stream.batches()))
    size = sum(part.numel() * part.element_size() for part in (first.inputs, *target_parts(first.targets)))
    fits = max(max_bytes // max(size // len(first.inputs), 1), 1)
    wanted = fits if count is None else min(count, fits)
    loader = stream.loader
    rows = sampled_rows(loader) if isinstance(loader, DataLoader) else None
    if rows is not None and isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        chosen = torch.tensor(rows)[_chosen(len(rows), wanted, seed, name)]
        part = DataLoader(
            Subset(loader.dataset, chosen.tolist()),
            batch_size=loader.batch_size,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
        )
        with seeded_everywhere(seed, "sample", name):
            found = _stacked(list(Stream(part, name, stream.form).batches()), name)
        return Examples(found.inputs, found.targets, ids=chosen) if len(found.inputs) == len(chosen) else Examples(*found)
    with seeded_everywhere(seed, "sample", name):
        return _reservoir(stream, wanted, derive(seed, "sample", name))


def _chosen(total: int, count: int, seed: int, name: str) -> Tensor:
    order = torch.randperm(total, generator=torch.Generator().manual_seed(derive(seed, "sample", name)))
    return order[: min(count, total)].sort().values


def _reservoir(stream: Stream, wanted: int, seed: int) -> Examples:
    """Draw `wanted` examples from the first batches of a stream, keeping no more than that in memory."""
    generator = torch.Generator().manual_seed(seed)
    kept: list[tuple[int, Tensor, list[Tensor]]] = []
    seen, form = 0, None
    for inputs, targets in stream.batches():
        form = targets
        for row in range(len(inputs)):
            place = seen if seen < wanted else int(torch.randint(seen + 1, (1,), generator=generator))
            if place < wanted:
                example = (seen, inputs[row].clone(), [part[row].clone() for part in target_parts(targets)])
                kept[place:] = [example] if place == len(kept) else [example, *kept[place + 1 :]]
            seen += 1
        if seen >= _READ_AHEAD * wanted:
            break
    kept.sort(key=lambda example: example[0])
    columns = [_stack([example[2][place] for example in kept], stream.name) for place in range(len(kept[0][2]))]
    return Examples(_stack([example[1] for example in kept], stream.name), _like(form, columns))


def _stacked(batches: list[Batch], name: str) -> Batch:
    parts = zip(*(target_parts(batch.targets) for batch in batches), strict=True)
    columns = [_concatenated(list(part), name) for part in parts]
    return Batch(_concatenated([batch.inputs for batch in batches], name), _like(batches[0].targets, columns))


def _concatenated(tensors: list[Tensor], name: str) -> Tensor:
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) > 1:
        raise DataError(
            f"the {name} loader gives examples of different shapes ({', '.join(map(str, sorted(shapes)[:3]))}): wanted one "
            f"shape, as for scoring a network. Resize or pad them in the loader."
        )
    return torch.cat(tensors)


def _stack(tensors: list[Tensor], name: str) -> Tensor:
    return _concatenated([tensor[None] for tensor in tensors], name)


def _like(targets: Any, columns: list[Tensor]) -> Targets:
    """The columns in the structure of `targets`."""
    if isinstance(targets, dict):
        return dict(zip(sorted(targets), columns, strict=True))
    return tuple(columns) if isinstance(targets, tuple) else columns[0]


def _checked_targets(targets: Any, name: str) -> Targets:
    found: Targets = tuple(targets) if isinstance(targets, list) else targets
    parts = target_parts(found)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise DataError(
            f"the targets of the {name} loader are {describe_batch(targets)}: wanted a tensor, or a tuple or dict of tensors."
        )
    return found


@contextmanager
def seeded_everywhere(seed: int, *purpose: str | int) -> Iterator[None]:
    """Seed the random states of torch, numpy and Python, which transforms may use, and restore them."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    value = derive(seed, *purpose)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002  # the state that transforms draw from
    try:
        with seeded(seed, *purpose):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
