"""A network split at a site, measured under many masks over one set of examples, in several threads where that pays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from secateurs._util.modules import Device
from secateurs.config import Precision
from secateurs.data.dataset import Examples
from secateurs.distributed import Workers, active, local_size
from secateurs.errors import InvalidInput, InvalidMask
from secateurs.graph.masking import split_at
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, per_example, total
from secateurs.scoring.engine.batches import CachedBatches, free_memory, memory_of
from secateurs.scoring.engine.forward import CachedBatch, MaskedForward, MaskingStrategy, default_strategy, possible_maskings
from secateurs.scoring.engine.split import SplitNetwork, check_replacements, prepare

WORTH_SHARING = 0.02  # seconds of work left: starting threads costs about a hundredth of that
TICKETS = 2  # for each worker, at least; more of them would bring an example to the site more often
LONG_OP = 50e-6  # seconds: with shorter ops, threads would only wait for Python's lock

Weights = Callable[[Tensor], Mapping[str, Tensor]]
"""Takes a mask (C,), gives the tensors, by their names in the graph's module, that replace those behind the site."""


def split_for(
    graph: Graph,
    site: Site,
    examples: Examples,
    *,
    batch: int = 256,
    device: Device = None,
    cache_bytes: int | None = None,
    strategy: MaskingStrategy | None = None,
    unfolded: Collection[str] = (),
    workers: int | None = None,
    precision: Precision = "float32",
) -> MaskedNetwork:
    """Split the network of `graph`, as it is now, at `site`, to be measured on `examples` in batches of `batch`.

    `cache_bytes`: for cached activations; None: a quarter of the free memory. `strategy`: None: chosen by a rule that depends
    on the network and the machine alone. `unfolded`: modules whose tensors `weights` will replace. `workers`: threads; None:
    as many as torch uses, where the work is long enough. `precision`: of autocast; float32: the network's own.
    """
    if len(examples) == 0:
        raise InvalidInput(f"site {site.name!r}: no examples to measure on, wanted at least one.")
    if batch < 1:
        raise InvalidInput(f"batch size {batch}: wanted at least 1")
    few = examples.batch(slice(0, 3)).args
    network = prepare(split_at(graph, site), few, channels=site.channels, device=device, unfolded=unfolded)
    assert strategy is None or strategy.masking in possible_maskings(network), strategy
    budget = free_memory(network.device) // (4 * local_size()) if cache_bytes is None else cache_bytes
    return MaskedNetwork(network, CachedBatches(examples, batch, budget, network.device), strategy, workers, precision)


class MaskedNetwork:
    """A network split at a site, ready to be measured under many masks over one set of examples.

    It holds private copies: later changes of the user's module have no effect. On a CPU the work is shared among threads, and
    measures are called from any of them. Results do not depend on the number of threads.
    """

    def __init__(
        self,
        network: SplitNetwork,
        batches: CachedBatches,
        strategy: MaskingStrategy | None,
        workers: int | None,
        precision: Precision = "float32",
    ) -> None:
        self.network, self.batches, self._given, self._workers = network, batches, strategy, workers
        self.precision = precision
        self.strategy: MaskingStrategy | None = None  # of the batches in memory
        self._idle: list[MaskedForward] = []
        self._exact: bool | None = None  # whether subtraction is; None: not checked yet

    def measure(self, masks: Tensor, measures: Sequence[Measure], *, weights: Weights | None = None) -> Tensor:
        """Mean of each measure over the examples under each mask: masks (M, C) to float64 (M, number of measures).

        With `weights`, the network under a mask has the tensors that it gives for the mask instead of its own.
        """

        def sums(outputs: Any, batch: CachedBatch) -> Tensor:
            return torch.stack([total(measure(outputs, batch.targets), batch.count) for measure in measures])

        return torch.stack(self._by_batch(masks, sums, weights)).sum(0) / len(self.batches.examples)

    def values(self, masks: Tensor, measure: Measure, *, weights: Weights | None = None) -> Tensor:
        """The measure of each example under each mask: masks (M, C) to float64 (M, N)."""

        def each(outputs: Any, batch: CachedBatch) -> Tensor:
            return per_example(measure(outputs, batch.targets).detach().cpu(), batch.count)

        return torch.cat(self._by_batch(masks, each, weights), 1)

    def slopes(self, turns: Sequence[Tensor], loss_fn: Measure) -> list[Tensor]:
        """In every turn, of masks (N, C), the loss of each example n under its own mask n, then its slopes: (N, 1 + C) each.

        `loss_fn` must give one value for each example. A turn takes one forward and one backward pass for each batch.
        """
        for masks in turns:
            check_masks(masks, self.network.channels, len(self.batches.examples))
        placed = [masks.to(self.network.device) for masks in turns]
        self._use(self._given or default_strategy(self.network, self.batches.size, totals=False))

        def slopes(forward: MaskedForward, batch: CachedBatch, turn: int) -> Tensor:
            return forward.slopes(batch, placed[turn][batch.start : batch.start + batch.count], loss_fn)

        return [torch.cat(parts) for parts in zip(*self._run(slopes, len(turns)), strict=True)]

    def _by_batch(self, masks: Tensor, summary: Callable[[Any, CachedBatch], Tensor], weights: Weights | None) -> list[Tensor]:
        """The summary of the outputs under each mask, (M, …) for each batch."""
        check_masks(masks, self.network.channels)
        masks = masks.to(self.network.device)
        self._use(self._chosen(totals=weights is None))

        def run(first: int, some: Tensor, replaced: list[dict[str, Tensor]] | None) -> list[list[Tensor]]:
            def summarised(forward: MaskedForward, batch: CachedBatch, row: int) -> Tensor:
                return summary(forward.outputs(batch, some[row], None if replaced is None else replaced[row]), batch)

            return self._run(summarised, len(some), first)

        found = [run(0, masks, None)] if weights is None else [run(*group) for group in self._repaired(masks, weights)]
        return [torch.stack([row for rows in parts for row in rows]) for parts in zip(*found, strict=True)]

    def _repaired(self, masks: Tensor, weights: Weights) -> Iterator[tuple[int, Tensor, list[dict[str, Tensor]]]]:
        """Masks with the number of the first and the tensors given for each, as many as fit into a quarter of the budget."""
        given: list[dict[str, Tensor]] = []
        first = 0
        for number, mask in enumerate(masks):
            given.append(check_replacements(self.network, weights(mask)))
            size = memory_of(t for one in given for t in one.values())
            if number + 1 == len(masks) or size + size // len(given) > self.batches.budget // 4:
                yield first, masks[first : number + 1], given
                first, given = number + 1, []

    def _chosen(self, *, totals: bool) -> MaskingStrategy:
        """The given strategy, or the default one; plain multiplication where subtraction is not exact on the first batch."""
        if self._given is not None:
            return self._given
        strategy = default_strategy(self.network, self.batches.size, totals=totals)
        if strategy.masking == "subtract" and self._exact is None:
            self._use(strategy)
            with one_thread(self.network.device), self._forward() as forward:
                self._exact = forward.is_exact(self.batches.get(0, forward))
        return MaskingStrategy(self.batches.size) if self._exact is False else strategy

    def _use(self, strategy: MaskingStrategy) -> None:
        """Apply masks by `strategy` from now on; batches cached for another masking are dropped."""
        if self.strategy == strategy:
            return
        if self.strategy is None or self.strategy.masking != strategy.masking:
            self.batches.clear()
        self.strategy, self._idle = strategy, []

    @contextmanager
    def _forward(self) -> Iterator[MaskedForward]:
        """A forward pass that no other thread uses inside the block, without gradients, in this network's precision."""
        assert self.strategy is not None
        try:
            forward = self._idle.pop()
        except IndexError:
            forward = MaskedForward(self.network, self.strategy)
        kind, dtype = self.network.device.type, getattr(torch, self.precision)
        try:
            with torch.no_grad(), torch.autocast(kind, dtype) if dtype != torch.float32 else nullcontext():
                yield forward
        finally:
            self._idle.append(forward)

    def _run(
        self, work: Callable[[MaskedForward, CachedBatch, int], Tensor], count: int, offset: int = 0
    ) -> list[list[Tensor]]:
        """Results of `work(forward, batch, number)` for each batch and each number below `count`, without gradients.

        The workers of a run share them; `offset` is the place of number 0 among all masks that are asked for. In one process
        the first piece of work runs in the calling thread; how long it takes decides whether the others are shared. Threads
        then take a batch each or, where there are fewer batches, the numbers of one batch after another.
        """
        batches, workers = self.batches, active()
        if workers.size > 1:
            with one_thread(self.network.device):
                return self._shared(workers, work, count, offset)
        with one_thread(self.network.device) as threads:
            began = perf_counter()
            with self._forward() as forward:
                first_batch = batches.get(0, forward)
                first = work(forward, first_batch, 0)
            used = self._worthwhile(perf_counter() - began, len(batches) * count - 1, threads)

            def whole_batch(place: int) -> list[Tensor]:
                with self._forward() as forward:
                    batch = batches.get(place, forward) if place else first_batch
                    return [work(forward, batch, number) for number in range(0 if place else 1, count)]

            def one_piece(batch: CachedBatch, number: int) -> Tensor:
                with self._forward() as forward:
                    return work(forward, batch, number)

            if used == 1:
                found = [whole_batch(place) for place in range(len(batches))]
            else:
                with ThreadPoolExecutor(used, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                    if len(batches) >= count:
                        found = list(pool.map(whole_batch, range(len(batches))))
                    else:
                        found = []
                        for place in range(len(batches)):
                            with self._forward() as forward:
                                batch = batches.get(place, forward) if place else first_batch
                            numbers = range(0 if place else 1, count)
                            found.append(list(pool.map(one_piece, [batch] * len(numbers), numbers)))
        found[0].insert(0, first)
        return found

    def _shared(
        self, workers: Workers, work: Callable[[MaskedForward, CachedBatch, int], Tensor], count: int, offset: int
    ) -> list[list[Tensor]]:
        """The same results, from tickets: one for each batch, or for some of its numbers where there are few batches."""
        batches = self.batches
        blocks = min(count, -(-TICKETS * workers.size // len(batches)))
        numbers = [range(count * block // blocks, count * (block + 1) // blocks) for block in range(blocks)]

        def one(ticket: int) -> list[Tensor]:
            place, block = divmod(ticket, blocks)
            with self._forward() as forward:
                batch = batches.get(place, forward)
                return [work(forward, batch, number) for number in numbers[block]]

        what = f"{count} masks on {len(batches.examples)} examples"
        names = [f"{part} from {offset}, batch {place} of {batches.size}" for place in range(len(batches)) for part in numbers]
        found = workers.map(what, len(names), one, names=names)
        return [
            [each for part in found[place * blocks : (place + 1) * blocks] for each in part] for place in range(len(batches))
        ]

    def _worthwhile(self, seconds: float, left: int, threads: int) -> int:
        """How many threads to share `left` pieces of work among, if one takes `seconds`."""
        if self._workers is not None:
            return self._workers
        assert self.strategy is not None
        passes = -(-min(self.batches.size, len(self.batches.examples)) // self.strategy.rows)
        ops = len(self.network.suffix.graph.nodes) * passes
        if self.network.device.type != "cpu" or seconds < LONG_OP * ops or seconds * left < WORTH_SHARING:
            return 1
        return max(1, min(threads, left))


def check_masks(masks: Tensor, channels: int, count: int | None = None) -> None:
    """`InvalidMask` unless `masks` is bool (M, channels), with at least one row, or exactly `count`."""
    wanted = max(1, len(masks) if masks.ndim else 0) if count is None else count
    if masks.dtype != torch.bool or masks.shape != (wanted, channels):
        raise InvalidMask(
            f"masks: got {masks.dtype} of shape {tuple(masks.shape)}, wanted bool ({'M' if count is None else count}, "
            f"{channels}), True = kept. sample_masks({channels}, generator=...) draws some."
        )


@contextmanager
def one_thread(device: torch.device) -> Iterator[int]:
    """Let ops of the calling thread use one core inside the block if `device` is a CPU; gives the number used before."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)  # MKL and threads started later take the number that was set last, anywhere
