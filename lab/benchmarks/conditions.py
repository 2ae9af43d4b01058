"""Where and with what a figure was measured: no number without its conditions."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h


@dataclass(frozen=True)
class Conditions:
    cpu: str
    cores: int
    threads: int
    python: str
    torch: str
    date: str
    load: float  # processes that wanted a core in the last minute, this one included

    def sentence(self) -> str:
        return (
            f"{self.cpu}, {self.cores} cores (load average {self.load:.1f}), torch threads: {self.threads}, "
            f"Python {self.python}, torch {self.torch}, {self.date}"
        )


def conditions() -> Conditions:
    """Those of this process."""
    return Conditions(
        cpu=cpu_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        date=date.today().isoformat(),
        load=os.getloadavg()[0],
    )


def cpu_name() -> str:
    """The processor's name where Linux tells it, its architecture elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def keep_pages() -> None:
    """Let the allocator of Linux keep memory that is freed, for as long as the process lives.

    It gives large tensors back and fetches them anew, page by page, or not: which of two networks that happens to is chance,
    and makes up to half of the time at batches of 64.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
                libc.mallopt(option, 2**30)
