"""Examples, and random numbers for a purpose: derived from one seed, never drawn from torch's global state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateurs._util.modules import to_device
from secateurs.data.storage import Rows, Storage
from secateurs.errors import InvalidInput


def derive(seed: int, *purpose: str | int) -> int:
    """Derive a seed for `purpose`, so that two uses of one seed never share random numbers."""
    digest = hashlib.sha256(repr((int(seed), *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator_for(seed: int, *purpose: str | int) -> torch.Generator:
    """CPU generator that gives the same numbers for the same seed and purpose, on every machine."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


@contextmanager
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Seed torch's global random state inside the block, and restore it afterwards, even after an error."""
    value = derive(seed, *purpose)
    state = torch.get_rng_state()
    # torch.manual_seed would queue a seed for devices that are not in use yet, which would outlive the block
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        torch.default_generator.manual_seed(value)
        if device_states:
            torch.cuda.manual_seed_all(value)
        yield
    finally:
        torch.set_rng_state(state)
        if device_states:
            torch.cuda.set_rng_state_all(device_states)


Inputs = Tensor | tuple[Tensor, ...]
"""What a network takes: a tensor, or a tuple of two or more, its arguments in their order."""

Targets = Tensor | tuple[Tensor, ...] | dict[str, Tensor]

_CHUNK = 256  # rows of a set on disk that are in memory at once


class Batch(NamedTuple):
    """Inputs (n, …) as the network takes them, and their n targets."""

    inputs: Inputs
    targets: Targets

    @property
    def args(self) -> tuple[Tensor, ...]:
        """The arguments of the network: `network(*batch.args)`."""
        return input_parts(self.inputs)

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.args[0])

    def columns(self) -> list[Tensor]:
        """All tensors: inputs, then targets."""
        return [*self.args, *target_parts(self.targets)]

    def with_columns(self, columns: Sequence[Tensor]) -> Batch:
        """Other tensors in the same structure."""
        given = iter(columns)
        return Batch(map_inputs(lambda _: next(given), self.inputs), _with_parts(self.targets, list(given)))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply `function` to each tensor."""
        return Batch(map_inputs(function, self.inputs), map_targets(function, self.targets))


@dataclass(frozen=True)
class Scaling:
    """Normalisation of stored pixels to network inputs: (pixel / full - mean) / std, channel by channel."""

    full: float  # the stored value that means 1.0: 255 for photographs
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, stored: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Convert stored pixels (n, channels, …) to network inputs of the given dtype."""
        shape = (1, -1) + (1,) * (stored.ndim - 2)
        mean = torch.tensor(self.mean, dtype=dtype, device=stored.device).view(shape)
        std = torch.tensor(self.std, dtype=dtype, device=stored.device).view(shape)
        return stored.to(dtype).div_(self.full).sub_(mean).div_(std)


IMAGENET = Scaling(full=255.0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""Normalisation of 8-bit colour images by ImageNet's statistics."""


@dataclass(frozen=True, eq=False)
class Examples:
    """N inputs with their targets; `batch` and `batches` give them as a network takes them.

    Byte images stay bytes (a quarter of the memory) and are scaled batch by batch: read `inputs` only for its shape, or
    after `ready()`. A set that does not fit into memory is memory-mapped, and so are large subsets of it.
    """

    inputs: Inputs = field(repr=False)  # (N, …), as stored; a tuple for networks with several arguments
    targets: Targets = field(repr=False)  # (N, …), or a tuple or dict of such tensors
    scaling: Scaling | None = None  # None: stored as the network takes them; else `inputs` is one tensor
    ids: Tensor | None = field(default=None, repr=False)  # (N,) row numbers in the source; disjoint splits share none
    storage: Storage | None = None  # of subsets and copies; None: memory

    def __post_init__(self) -> None:
        count = len(self)
        for part in self.stored.args:
            if len(part) != count:
                raise InvalidInput(f"inputs with {count} and {len(part)} rows: wanted one row of each for every example.")
        for part in target_parts(self.targets):
            if part.ndim == 0 or len(part) != count:
                raise InvalidInput(f"targets of shape {tuple(part.shape)} for {count} inputs: wanted one for each input.")
        if self.ids is not None and self.ids.shape != (count,):
            raise InvalidInput(f"ids of shape {tuple(self.ids.shape)} for {count} inputs: wanted ({count},).")
        if self.scaling is None:
            return
        if not isinstance(self.inputs, Tensor):
            raise InvalidInput(f"scaling with {len(self.inputs)} tensors of inputs: wanted one. Store inputs scaled.")
        channels = self.inputs.shape[1] if self.inputs.ndim > 1 else 0
        if {len(self.scaling.mean), len(self.scaling.std)} - {1, channels}:
            raise InvalidInput(
                f"scaling with {len(self.scaling.mean)} means and {len(self.scaling.std)} standard deviations "
                f"for inputs of shape {tuple(self.inputs.shape)}: wanted 1 or {channels} of each."
            )

    def __len__(self) -> int:
        return self.stored.size

    @property
    def stored(self) -> Batch:
        """All examples as they are stored."""
        return Batch(self.inputs, self.targets)

    @property
    def place(self) -> torch.device:
        """The device that the examples are stored on."""
        return self.stored.args[0].device

    def batch(self, rows: Tensor | slice, *, device: torch.device | str | None = None) -> Batch:
        """Inputs and targets of the given rows, scaled, on `device` (None: where they are stored)."""
        found = self.stored.mapped(lambda part: to_device(part[rows], device))
        return Batch(self.scaled(found.inputs), found.targets)

    def batches(self, size: int, *, device: torch.device | str | None = None) -> Iterator[Batch]:
        """Iterate over all examples in order, `size` at a time; the last batch may be smaller."""
        if size < 1:
            raise InvalidInput(f"batch size {size}: wanted at least 1.")
        for start in range(0, len(self), size):
            yield self.batch(slice(start, start + size), device=device)

    def scaled(self, stored: Inputs, dtype: torch.dtype = torch.float32) -> Inputs:
        """Convert stored inputs to network inputs."""
        return stored if self.scaling is None or not isinstance(stored, Tensor) else self.scaling(stored, dtype)

    def take(self, rows: Tensor) -> Examples:
        """Select examples by row numbers (int64), in that order, or by a bool mask."""
        ids = None if self.ids is None else self.ids[rows.to(self.ids.device)]
        return replace(self, **self._copied(rows, lambda batch: batch), ids=ids)

    def ready(self, dtype: torch.dtype = torch.float32) -> Examples:
        """Copy with the inputs stored scaled, those of a floating-point type as `dtype`."""

        def converted(batch: Batch) -> Batch:
            inputs = self.scaled(batch.inputs, dtype)
            return Batch(map_inputs(lambda t: t.to(dtype) if t.is_floating_point() else t, inputs), batch.targets)

        types = {part.dtype for part in self.stored.args if part.is_floating_point()}
        if self.scaling is None and types <= {dtype}:
            return self
        return replace(self, **self._copied(slice(None), converted), scaling=None)

    def _copied(self, rows: Tensor | slice, convert: Callable[[Batch], Batch]) -> dict[str, Any]:
        """The fields of a copy with the given rows, converted; those of a set on disk are copied piece by piece."""
        if self.storage is None:
            found = convert(self.stored.mapped(lambda part: part[rows]))
            return {"inputs": found.inputs, "targets": found.targets}
        collected = Rows(self.storage, "selected")
        like = convert(self.stored.mapped(lambda part: part[:0]))
        for chunk in torch.split(torch.arange(len(self))[rows], _CHUNK):
            collected.write(convert(self.stored.mapped(lambda part, chunk=chunk: part[chunk])).columns())  # type: ignore[misc]
        found = like.with_columns(collected.tensors())
        return {"inputs": found.inputs, "targets": found.targets, "storage": self.storage if collected.on_disk else None}

    def to(self, device: torch.device | str) -> Examples:
        """Copy stored on `device`."""
        found = self.stored.mapped(lambda part: part.to(device))
        return replace(self, inputs=found.inputs, targets=found.targets)

    def digest(self) -> str:
        """SHA-256 of inputs, targets and scaling, in order."""
        hasher = hashlib.sha256(repr(self.scaling).encode())
        for place, part in enumerate(self.stored.args):
            _update(hasher, f"inputs {place}" if place else "inputs", part)
        parts = target_parts(self.targets)
        names = sorted(self.targets) if isinstance(self.targets, dict) else range(len(parts))
        for name, part in zip(names, parts, strict=True):
            _update(hasher, f"targets {name}", part)
        return hasher.hexdigest()

    def ids_digest(self) -> str | None:
        """SHA-256 of the row numbers in the source; None without ids."""
        if self.ids is None:
            return None
        hasher = hashlib.sha256()
        _update(hasher, "ids", self.ids)
        return hasher.hexdigest()


def input_parts(inputs: Inputs) -> tuple[Tensor, ...]:
    """The arguments of the network."""
    return inputs if isinstance(inputs, tuple) else (inputs,)


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Apply `function` to each tensor of the inputs; the structure stays."""
    return tuple(map(function, inputs)) if isinstance(inputs, tuple) else function(inputs)


def target_parts(targets: Targets) -> list[Tensor]:
    """Tensors of the targets; those of a dict in the order of their names."""
    if isinstance(targets, dict):
        return [targets[name] for name in sorted(targets)]
    return list(targets) if isinstance(targets, tuple) else [targets]


def map_targets(function: Callable[[Tensor], Tensor], targets: Targets) -> Targets:
    """Apply `function` to each tensor of the targets; the structure stays."""
    if isinstance(targets, dict):
        return {name: function(part) for name, part in targets.items()}
    return tuple(function(part) for part in targets) if isinstance(targets, tuple) else function(targets)


def _with_parts(targets: Targets, parts: list[Tensor]) -> Targets:
    """The parts, as `target_parts` lists them, in the structure of `targets`."""
    if isinstance(targets, dict):
        return dict(zip(sorted(targets), parts, strict=True))
    return tuple(parts) if isinstance(targets, tuple) else parts[0]


def class_labels(targets: Targets) -> Tensor | None:
    """Return the targets if they are class labels (one integer each), else None."""
    if not isinstance(targets, Tensor) or targets.ndim != 1:
        return None
    return None if targets.is_floating_point() or targets.is_complex() else targets


def _update(hasher: hashlib._Hash, name: str, tensor: Tensor) -> None:
    hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
    hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
