"""Threads that share out the chunks and masks among them, each with a copy of the network's modules of its own."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from secateurs.engine.chunks import Chunk, Chunks
from secateurs.engine.forms import Arrival, Form, Way
from secateurs.engine.parts import Parts
from secateurs.engine.sharing import Rota, Task, one_thread, share

Work = Callable[[Way, Chunk, Task], None]

WORTH_SHARING = 0.02  # seconds of work left: starting threads costs about a hundredth of that
LONG_OP = 50e-6  # seconds: with shorter ops, threads would only wait for each other's turn in Python


class Crew:
    """Does pieces of work in one form; the number of its members never shows in what comes out."""

    def __init__(self, parts: Parts, form: Form, chunks: Chunks) -> None:
        self.parts, self.form, self.chunks = parts, form, chunks
        self._ways = [Way(parts, form)]

    def work_through(self, work: Work, groups: int) -> None:
        """Call `work` once for each of `groups` and each chunk, without gradients, one op at a time in every thread.

        The first piece is done in the calling thread; how long it takes tells whether the others are worth sharing.
        """
        rota = Rota(len(self.chunks), groups)

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
    def way(self) -> Way:
        """That of the calling thread."""
        return self._ways[0]

    def first_arrival(self) -> Arrival:
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
            self._ways.append(self.way if self.form.compiled else Way(self.parts, self.form))
