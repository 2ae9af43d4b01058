"""Which form to measure in: a good one by rule, and a better one by a race where there is work enough to pay for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from time import perf_counter, thread_time

import torch
from torch import Tensor

from secateurs.scoring.engine.split import SplitNetwork, called, close, dims_of, readers
from secateurs.scoring.engine.strategies import (
    MaskedForward,
    MaskingStrategy,
    SiteActivations,
    can_be_fused,
    in_pieces,
    plain_outputs,
    possible_maskings,
)

PASS_BYTES = 4 * 1024**2  # of the largest tensor in a pass: more of them fall out of a core's caches before they are read
ROUNDS = 3
FEW = 8  # examples that a form is checked on
SHARE = 0.05  # of the announced work that racing may cost
GAIN = 0.97  # of the time of the best form so far: what must be beaten, since timings are noisy
COMPILING = 40.0  # seconds, seen between 5 and 38: worth it from 20 times that
STACKS = (4, 16, 64)
STACKED_ROWS = 2048  # in a pass, at most: larger ones gain nothing by being larger still
SMALL_LAYER = 2**16  # multiplications for an example: picking channels costs more than it saves


def default_form(parts: SplitNetwork, batch: int, *, totals: bool = True) -> MaskingStrategy:
    """The form that is right most often, always the same for a network; without `totals`, one that needs none."""
    subtracts = totals and "subtract" in possible_maskings(parts) and _reading_work(parts) >= SMALL_LAYER
    return MaskingStrategy(rows=_rows(parts, batch), masking="subtract" if subtracts else "multiply", fused=can_be_fused(parts))


def _reading_work(parts: SplitNetwork) -> int:
    """Multiplications for an example in the layers that read the site, but for strides."""
    places = prod((dims_of(next(iter(parts.suffix.graph.nodes))) or ())[2:])
    return sum(called(parts.suffix, node).weight.numel() * places for node in readers(parts.suffix, parts.axis))


def _rows(parts: SplitNetwork, batch: int) -> int:
    """So many examples that a pass fits into the caches of a core; on other devices, the whole batch."""
    if not parts.batching.apart:
        return batch
    largest = max((prod(dims[1:]) for n in parts.suffix.graph.nodes if (dims := dims_of(n))), default=1)
    one = largest * torch.finfo(parts.dtype).bits // 8
    return batch if parts.device.type != "cpu" else min(batch, max(1, PASS_BYTES // one))


def is_right(way: MaskedForward, arrival: SiteActivations, masks: Tensor) -> bool:
    """Whether `way` gives what plain masking gives for a few examples under the first of `masks`."""
    few, first = in_pieces(arrival, way.parts, FEW)[0], masks[:1]
    try:
        return close(way.outputs(few, first)[0], plain_outputs(way.parts, few, first))
    except Exception:  # a kernel that this machine lacks; if it is something else, the plain form will raise it, too
        return False


def race(
    parts: SplitNetwork, start: MaskingStrategy, arrival: SiteActivations, masks: Tensor, *, passes: int
) -> MaskingStrategy:
    """The fastest form for one chunk of examples, starting from `start` and changing one thing at a time.

    `passes`: how often a chunk will be run under a mask in all; only a small share of that is spent here. A form that gives
    other outputs than the plain one is never taken.
    """
    with torch.no_grad():
        judge = _Judge(parts, arrival, masks)
        best, seconds = judge.fastest(start, [])
        budget = SHARE * passes * seconds
        size = len(arrival.activations)
        for variants in (_maskings, _rowses, _stackings, _fusings):
            rivals = [form for form in variants(parts, best, size) if form != best]
            runs = (ROUNDS + 1) * sum(form.masks_per_pass for form in (best, *rivals))
            if not rivals or judge.spent + runs * seconds > budget:
                continue
            best, seconds = judge.fastest(best, rivals)
        if passes * seconds > 20 * COMPILING:
            best, seconds = judge.fastest(best, [replace(best, masking="multiply", fused=False, compiled=True)])
    return best


def _maskings(parts: SplitNetwork, best: MaskingStrategy, size: int) -> list[MaskingStrategy]:
    return [replace(best, masking=masking) for masking in possible_maskings(parts)]


def _rowses(parts: SplitNetwork, best: MaskingStrategy, size: int) -> list[MaskingStrategy]:
    several = (best.rows // 4, best.rows // 2, 2 * best.rows) if parts.batching.apart else ()
    return [replace(best, rows=rows) for rows in several if 8 <= rows <= size]


def _stackings(parts: SplitNetwork, best: MaskingStrategy, size: int) -> list[MaskingStrategy]:
    several = STACKS if parts.batching.apart else ()
    fitting = [stack for stack in several if stack * min(best.rows, size) <= STACKED_ROWS]
    return [replace(best, masking="multiply", masks_per_pass=stack) for stack in fitting]


def _fusings(parts: SplitNetwork, best: MaskingStrategy, size: int) -> list[MaskingStrategy]:
    return [replace(best, fused=not best.fused)] if can_be_fused(parts) else []


class _Judge:
    """Times forms on one chunk of examples, and sends off those whose outputs are not the plain ones."""

    def __init__(self, parts: SplitNetwork, arrival: SiteActivations, masks: Tensor) -> None:
        self.parts, self.arrival, self.masks, self.spent = parts, arrival, masks, 0.0
        self.expected = plain_outputs(parts, arrival, masks[:1])

    def fastest(self, best: MaskingStrategy, rivals: list[MaskingStrategy]) -> tuple[MaskingStrategy, float]:
        """The fastest of them, and the seconds that it takes a mask; run in turns, so that all see the same noise."""
        runners = {form: runner for form in (best, *rivals) if (runner := self._runner(form)) is not None}
        times = dict.fromkeys([best, *runners], float("inf"))
        for _ in range(ROUNDS):
            for form, run in runners.items():
                times[form] = min(times[form], run())
        winner = min(times, key=times.__getitem__)
        return (winner, times[winner]) if times[winner] < GAIN * times[best] else (best, times[best])

    def _runner(self, form: MaskingStrategy) -> Callable[[], float] | None:
        """What runs the form once a call and gives the seconds of a mask; None if it fails or gives other outputs."""
        began = perf_counter()
        try:
            way = MaskedForward(self.parts, form)
            arrival = way.completed(self.arrival)
            masks = self.masks[torch.arange(form.masks_per_pass) % len(self.masks)]
            right = close(way.outputs(arrival, masks)[0], self.expected)
        except Exception:  # no compiler, or one that gives up; an op without a kernel: then this is no form for this machine
            return None
        finally:
            self.spent += perf_counter() - began
        return (lambda: self._seconds(way, arrival, masks)) if right else None

    def _seconds(self, way: MaskedForward, arrival: SiteActivations, masks: Tensor) -> float:
        device = self.parts.device
        clock = thread_time if device.type == "cpu" else perf_counter  # another program on this core must not decide
        _wait_for(device)
        start, began = clock(), perf_counter()
        way.outputs(arrival, masks)
        _wait_for(device)
        self.spent += perf_counter() - began
        return (clock() - start) / len(masks)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
