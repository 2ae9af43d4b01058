"""The examples in chunks, as they arrive at a site: computed once and kept while memory allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from secateurs.data.examples import Examples, Targets, target_parts
from secateurs.engine.forms import Arrival
from secateurs.engine.memory import memory_of


@dataclass(frozen=True)
class Chunk:
    """Some examples as they arrive at a site, and their targets."""

    arrival: Arrival
    targets: Targets
    examples: int


class Chunks:
    """All chunks of a set of examples; those that fit into `budget` bytes are computed once, the others when asked for.

    Threads may ask at the same time. Which chunks are kept depends on who comes first, what they hold never does.
    """

    def __init__(self, examples: Examples, batch: int, budget: int, device: torch.device) -> None:
        self.examples, self.batch, self.budget, self.device = examples, batch, budget, device
        self._kept: dict[int, Chunk] = {}
        self._lent: dict[int, Chunk] = {}
        self._lock = Lock()
        self._locks = [Lock() for _ in range(0, len(examples), batch)]
        self.used = 0

    def __len__(self) -> int:
        return len(self._locks)

    def count(self, number: int) -> int:
        """Examples in one chunk."""
        return min(self.batch, len(self.examples) - number * self.batch)

    def get(self, number: int, arrive: Callable[[Tensor], Arrival]) -> Chunk:
        """One chunk, as it was kept or as `arrive` makes it from inputs; hand it back with `release`."""
        with self._locks[number]:
            found = self._kept.get(number) or self._lent.get(number)
            if found is None:
                found = self._make(number, arrive)
                self._keep(number, found)
            return found

    def release(self, number: int) -> None:
        """Nobody needs the chunk for now: it goes, unless there is room for it."""
        self._lent.pop(number, None)

    def release_all(self) -> None:
        """Let go of all chunks for which there was no room."""
        self._lent.clear()

    def clear(self) -> None:
        """Forget all chunks."""
        self._kept.clear()
        self._lent.clear()
        self.used = 0

    def _make(self, number: int, arrive: Callable[[Tensor], Arrival]) -> Chunk:
        start = number * self.batch
        inputs, targets = self.examples.batch(slice(start, start + self.batch), device=self.device)
        return Chunk(arrive(inputs), targets, len(inputs))

    def _keep(self, number: int, chunk: Chunk) -> None:
        tensors = [*chunk.arrival.tensors(), *target_parts(chunk.targets)]
        size = memory_of(tensors, besides=[self.examples.inputs, *target_parts(self.examples.targets)])
        with self._lock:
            if self.used + size <= self.budget:
                self._kept[number] = chunk
                self.used += size
            else:
                self._lent[number] = chunk
