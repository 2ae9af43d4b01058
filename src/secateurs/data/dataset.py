"""Random numbers that belong to a purpose: derived from one seed, never drawn from the user's global state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from secateurs.errors import InvalidInput


def derive(seed: int, *purpose: str | int) -> int:
    """A seed of its own for `purpose`, so that two uses of one seed never share random numbers."""
    digest = hashlib.sha256(repr((int(seed), *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator_for(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator that starts at the same place for the same seed and purpose, on every machine."""
    generator = torch.Generator()
    generator.manual_seed(derive(seed, *purpose))
    return generator


@contextmanager
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Seed torch's global random state inside the block, and give the user's back afterwards, even after an error."""
    value = derive(seed, *purpose)
    state = torch.get_rng_state()
    # torch.manual_seed would queue a seed for devices that are not in use yet, and so reach past the end of the block
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


Targets = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


class Batch(NamedTuple):
    """What a network and a loss take: inputs (n, …) as the network wants them, and their n targets."""

    inputs: Tensor
    targets: Targets


@dataclass(frozen=True)
class Scaling:
    """The way from stored pixels to network inputs: (pixel / full - mean) / std, channel by channel."""

    full: float  # the stored value that means 1.0: 255 for photographs
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, stored: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Network inputs of the given dtype for stored pixels (n, channels, …)."""
        shape = (1, -1) + (1,) * (stored.ndim - 2)
        mean = torch.tensor(self.mean, dtype=dtype, device=stored.device).view(shape)
        std = torch.tensor(self.std, dtype=dtype, device=stored.device).view(shape)
        return stored.to(dtype).div_(self.full).sub_(mean).div_(std)


@dataclass(frozen=True, eq=False)
class Examples:
    """N inputs with their targets, held in memory as stored; `batch` and `batches` give what a network takes.

    Images are stored as bytes where they came as bytes (a quarter of the memory) and scaled batch by batch: read
    `inputs` only for its shape, or after `ready()`.
    """

    inputs: Tensor = field(repr=False)  # (N, …), as stored
    targets: Targets = field(repr=False)  # (N, …), or a tuple or dict of such tensors
    scaling: Scaling | None = None  # None: stored as the network takes them
    ids: Tensor | None = field(
        default=None, repr=False
    )  # (N,) row numbers in the source, by which splits are shown to be disjoint

    def __post_init__(self) -> None:
        count = len(self.inputs)
        for part in target_parts(self.targets):
            if part.ndim == 0 or len(part) != count:
                raise InvalidInput(f"targets of shape {tuple(part.shape)} for {count} inputs: wanted one for each input")
        if self.ids is not None and self.ids.shape != (count,):
            raise InvalidInput(f"ids of shape {tuple(self.ids.shape)} for {count} inputs: wanted ({count},)")
        if self.scaling is not None:
            _check_scaling(self.inputs, self.scaling)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: Tensor | slice, *, device: torch.device | str | None = None) -> Batch:
        """The inputs and targets of the given rows, scaled, on `device` (where they are stored, unless told)."""
        inputs = self.scaled(self.inputs[rows].to(device))
        return Batch(inputs, map_targets(lambda part: part[rows].to(device), self.targets))

    def batches(self, size: int, *, device: torch.device | str | None = None) -> Iterator[Batch]:
        """All examples in order, `size` at a time; the last batch holds what is left."""
        if size < 1:
            raise InvalidInput(f"batch size {size}: wanted at least 1")
        for start in range(0, len(self), size):
            yield self.batch(slice(start, start + size), device=device)

    def scaled(self, stored: Tensor) -> Tensor:
        """Stored inputs as the network takes them."""
        return stored if self.scaling is None else self.scaling(stored)

    def take(self, rows: Tensor) -> Examples:
        """The examples of the given row numbers (int64) or of a bool mask, in that order."""
        return replace(
            self,
            inputs=self.inputs[rows],
            targets=map_targets(lambda part: part[rows], self.targets),
            ids=None if self.ids is None else self.ids[rows.to(self.ids.device)],
        )

    def ready(self, dtype: torch.dtype = torch.float32) -> Examples:
        """The same examples with their inputs stored scaled, as `dtype`."""
        inputs = self.inputs.to(dtype) if self.scaling is None else self.scaling(self.inputs, dtype)
        return replace(self, inputs=inputs, scaling=None)

    def to(self, device: torch.device | str) -> Examples:
        """The same examples stored on `device`."""
        return replace(self, inputs=self.inputs.to(device), targets=map_targets(lambda part: part.to(device), self.targets))

    def digest(self) -> str:
        """SHA-256 of everything a network and a loss can see of these examples, and of their order."""
        hasher = hashlib.sha256(repr(self.scaling).encode())
        _update(hasher, "inputs", self.inputs)
        names = sorted(self.targets) if isinstance(self.targets, dict) else None
        for place, part in enumerate(target_parts(self.targets)):
            _update(hasher, f"targets {names[place] if names else place}", part)
        return hasher.hexdigest()

    def ids_digest(self) -> str | None:
        """SHA-256 of the row numbers in the source; None where the source has none."""
        if self.ids is None:
            return None
        hasher = hashlib.sha256()
        _update(hasher, "ids", self.ids)
        return hasher.hexdigest()


def target_parts(targets: Targets) -> list[Tensor]:
    """The tensors that targets consist of; those of a dict in the order of their names."""
    if isinstance(targets, dict):
        return [targets[name] for name in sorted(targets)]
    return list(targets) if isinstance(targets, tuple) else [targets]


def map_targets(function: Callable[[Tensor], Tensor], targets: Targets) -> Targets:
    """Targets of the same structure, each tensor replaced by what `function` makes of it."""
    if isinstance(targets, dict):
        return {name: function(part) for name, part in targets.items()}
    return tuple(function(part) for part in targets) if isinstance(targets, tuple) else function(targets)


def class_labels(targets: Targets) -> Tensor | None:
    """The targets if they are class numbers (one integer each), else None."""
    if not isinstance(targets, Tensor) or targets.ndim != 1:
        return None
    return None if targets.is_floating_point() or targets.is_complex() else targets


def _check_scaling(inputs: Tensor, scaling: Scaling) -> None:
    channels = inputs.shape[1] if inputs.ndim > 1 else 0
    if {len(scaling.mean), len(scaling.std)} - {1, channels}:
        raise InvalidInput(
            f"scaling with {len(scaling.mean)} means and {len(scaling.std)} standard deviations "
            f"for inputs of shape {tuple(inputs.shape)}: wanted 1 or {channels} of each"
        )


def _update(hasher: hashlib._Hash, name: str, tensor: Tensor) -> None:
    hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
    hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
