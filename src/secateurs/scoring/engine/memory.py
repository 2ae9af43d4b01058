"""How much memory is free, and how much of it activations may be kept in unless told."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

CGROUPS = (  # the limit of a container and what is used of it, in the second and the first version of cgroups
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
UNKNOWN = 4 * 1024**3  # taken as free where the system does not tell


def default_budget(device: torch.device) -> int:
    """A quarter of the memory that is free on `device` now, in bytes."""
    return free_memory(device) // 4


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on `device` without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [value for value in (_available(), *map(_left_of, CGROUPS)) if value is not None]
    return max(min(known, default=_installed() or UNKNOWN), 0)


def memory_of(tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> int:
    """Bytes that keeping `tensors` keeps occupied: whole storages, each once, but for those that `besides` occupy anyway."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    anyway = {t.untyped_storage().data_ptr() for t in besides}
    return sum(size for place, size in storages.items() if place not in anyway)


def _available() -> int | None:
    """What Linux says new programs can have: free memory, and caches it would give up."""
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left_of(files: tuple[str, str]) -> int | None:
    limit, used = (_read(name).strip() for name in files)
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else None


def _installed() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # not a Unix
        return None


def _read(name: str) -> str:
    try:
        return Path(name).read_text()
    except OSError:  # another system, or a container that hides it
        return ""
