"""The examples in batches as they reach a site, computed once and kept while memory allows."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from secateurs.data.dataset import Examples
from secateurs.scoring.engine.forward import CachedBatch, MaskedForward

CGROUPS = (  # the limit of a container and what is used of it, in the second and the first version of cgroups
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
UNKNOWN = 4 * 1024**3  # bytes taken as free where the system does not say


class CachedBatches:
    """All batches of a set of examples; those that fit into `budget` bytes are computed once, the others on every request.

    Several threads may request different batches. Which ones are kept depends on who comes first, what they hold never does.
    """

    def __init__(self, examples: Examples, size: int, budget: int, device: torch.device) -> None:
        self.examples, self.size, self.budget, self.device = examples, size, budget, device
        self.kept: dict[int, CachedBatch] = {}
        self._used = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return -(-len(self.examples) // self.size)

    def get(self, number: int, forward: MaskedForward) -> CachedBatch:
        """One batch, from memory or computed by `forward`."""
        if number in self.kept:
            return self.kept[number]
        start = number * self.size
        batch = forward.batch(self.examples.batch(slice(start, start + self.size), device=self.device), start)
        size = memory_of(batch.tensors(), besides=self.examples.stored.columns())
        with self._lock:
            if self._used + size <= self.budget:
                self.kept[number] = batch
                self._used += size
        return batch

    def clear(self) -> None:
        """Forget all batches."""
        self.kept.clear()
        self._used = 0


def memory_of(tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> int:
    """Bytes of the storages of `tensors`, each counted once, without those that `besides` occupy anyway."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    anyway = {t.untyped_storage().data_ptr() for t in besides}
    return sum(size for place, size in storages.items() if place not in anyway)


def free_memory(device: torch.device) -> int:
    """Bytes available on `device` without swapping, within the limits of a container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    known = [int(fields[1]) * 1024 for fields in lines if fields[:1] == ["MemAvailable:"]]
    for limit, used in (map(_read, files) for files in CGROUPS):
        if limit.isdigit() and used.isdigit():
            known.append(int(limit) - int(used))
    return max(min(known, default=_half_of_installed()), 0)


def _half_of_installed() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # not a Unix
        return UNKNOWN


def _read(name: str) -> str:
    try:
        return Path(name).read_text().strip()
    except OSError:  # another system, or a container that hides it
        return ""
