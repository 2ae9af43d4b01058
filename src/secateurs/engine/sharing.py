"""Work shared out to threads that run one op at a time each: what is computed never depends on who computed it.

Torch would rather split every op between the cores and wait for the slowest at each. Python's lock is released inside ops, so
that threads with a mask of their own each keep all cores busy, and an op's result never depends on how it was split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock

import torch

Task = tuple[int, int]
"""Number of a chunk of examples, number of a group of masks."""


class Rota:
    """Hands out every group of every chunk once. A worker stays with its chunk, then takes a new one, then helps elsewhere."""

    def __init__(self, chunks: int, groups: int) -> None:
        self._next = [0] * chunks
        self._open = [groups] * chunks
        self._groups = groups
        self._lock = Lock()
        self._stopped = False

    def take(self, own: int | None = None) -> Task | None:
        """The next task for a worker that last worked at chunk `own`; None if nothing is left."""
        with self._lock:
            waiting = [chunk for chunk, group in enumerate(self._next) if group < self._groups]
            if self._stopped or not waiting:
                return None
            fresh = [chunk for chunk in waiting if self._next[chunk] == 0]
            chunk = own if own in waiting else (fresh or waiting)[0]
            assert chunk is not None
            self._next[chunk] += 1
            return chunk, self._next[chunk] - 1

    def done(self, chunk: int) -> bool:
        """Note that a group of `chunk` is finished; True if it was the last one."""
        with self._lock:
            self._open[chunk] -= 1
            return self._open[chunk] == 0

    def stop(self) -> None:
        """Hand out nothing more."""
        self._stopped = True


def share(rota: Rota, work: Callable[[int, Task], None], workers: int) -> None:
    """Call `work(worker, task)` for all that is left of the rota, in `workers` threads; raises what one raises."""
    if workers == 1:
        _work(rota, work, 0)
        return
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                for future in [pool.submit(_work, rota, work, worker) for worker in range(workers)]:
                    future.result()
            finally:
                rota.stop()
    finally:
        torch.set_num_threads(threads)  # MKL and threads started later take the number that was set last, anywhere


def _work(rota: Rota, work: Callable[[int, Task], None], worker: int) -> None:
    chunk = None
    while (task := rota.take(chunk)) is not None:
        chunk = task[0]
        try:
            work(worker, task)
        except BaseException:
            rota.stop()
            raise


@contextmanager
def one_thread(device: torch.device) -> Iterator[int]:
    """Ops of the calling thread use one core inside the block, unless `device` is no CPU; gives the number used before."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield threads
        return
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)
