"""The examples in chunks, as they arrive at a site: computed once and kept while memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from time import perf_counter

import torch
from torch import Tensor

from secateurs.data.dataset import Examples, Targets, target_parts
from secateurs.scoring.engine.memory import memory_of
from secateurs.scoring.engine.split import SplitNetwork
from secateurs.scoring.engine.strategies import MaskedForward, MaskingStrategy, SiteActivations


@dataclass(frozen=True)
class CachedBatch:
    """Some examples as they arrive at a site, and their targets."""

    arrival: SiteActivations
    targets: Targets
    examples: int


class CachedBatches:
    """All chunks of a set of examples; those that fit into `budget` bytes are computed once, the others when asked for.

    Threads may ask at the same time. Which chunks are kept depends on who comes first, what they hold never does.
    """

    def __init__(self, examples: Examples, batch: int, budget: int, device: torch.device) -> None:
        self.examples, self.batch, self.budget, self.device = examples, batch, budget, device
        self._kept: dict[int, CachedBatch] = {}
        self._lent: dict[int, CachedBatch] = {}
        self._lock = Lock()
        self._locks = [Lock() for _ in range(0, len(examples), batch)]
        self.used = 0

    def __len__(self) -> int:
        return len(self._locks)

    def count(self, number: int) -> int:
        """Examples in one chunk."""
        return min(self.batch, len(self.examples) - number * self.batch)

    def get(self, number: int, arrive: Callable[[Tensor], SiteActivations]) -> CachedBatch:
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

    def _make(self, number: int, arrive: Callable[[Tensor], SiteActivations]) -> CachedBatch:
        start = number * self.batch
        inputs, targets = self.examples.batch(slice(start, start + self.batch), device=self.device)
        return CachedBatch(arrive(inputs), targets, len(inputs))

    def _keep(self, number: int, chunk: CachedBatch) -> None:
        tensors = [*chunk.arrival.tensors(), *target_parts(chunk.targets)]
        size = memory_of(tensors, besides=[self.examples.inputs, *target_parts(self.examples.targets)])
        with self._lock:
            if self.used + size <= self.budget:
                self._kept[number] = chunk
                self.used += size
            else:
                self._lent[number] = chunk


Task = tuple[int, int]
"""Number of a chunk of examples, number of a group of masks."""


class TaskQueue:
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


def share(rota: TaskQueue, work: Callable[[int, Task], None], workers: int) -> None:
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


def _work(rota: TaskQueue, work: Callable[[int, Task], None], worker: int) -> None:
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


Work = Callable[[MaskedForward, CachedBatch, Task], None]

WORTH_SHARING = 0.02  # seconds of work left: starting threads costs about a hundredth of that
LONG_OP = 50e-6  # seconds: with shorter ops, threads would only wait for each other's turn in Python


class WorkerPool:
    """Does pieces of work in one form; the number of its members never shows in what comes out."""

    def __init__(self, parts: SplitNetwork, form: MaskingStrategy, chunks: CachedBatches) -> None:
        self.parts, self.form, self.chunks = parts, form, chunks
        self._ways = [MaskedForward(parts, form)]

    def work_through(self, work: Work, groups: int) -> None:
        """Call `work` once for each of `groups` and each chunk, without gradients, one op at a time in every thread.

        The first piece is done in the calling thread; how long it takes tells whether the others are worth sharing.
        """
        rota = TaskQueue(len(self.chunks), groups)

        def one_piece(worker: int, task: Task) -> None:
            way, number = self._ways[worker], task[0]
            with torch.no_grad():
                work(way, self.chunks.get(number, way.arrive), task)
            if rota.done(number):
                self.chunks.release(number)

        try:
            with one_thread(self.parts.device) as threads:
                first = rota.take()
                if first is None:
                    return
                began = perf_counter()
                one_piece(0, first)
                workers = self._worth(perf_counter() - began, groups * len(self.chunks) - 1, threads)
                self._employ(workers)
                share(rota, one_piece, workers)
        finally:
            self.chunks.release_all()

    @property
    def way(self) -> MaskedForward:
        """That of the calling thread."""
        return self._ways[0]

    def first_arrival(self) -> SiteActivations:
        """The first chunk at the site."""
        return self.chunks.get(0, self.way.arrive).arrival

    def _worth(self, seconds: float, left: int, threads: int) -> int:
        """How many threads to share `left` pieces of work out to."""
        passes = -(-self.chunks.count(0) // self.form.rows)
        ops = len(self.parts.suffix.graph.nodes) * passes
        if self.parts.device.type != "cpu" or seconds < LONG_OP * ops or seconds * left < WORTH_SHARING:
            return 1
        return max(1, min(threads, left))

    def _employ(self, workers: int) -> None:
        while len(self._ways) < workers:
            # what is compiled has no state that threads could mix up, and compiling it again would take long
            self._ways.append(self.way if self.form.compiled else MaskedForward(self.parts, self.form))
