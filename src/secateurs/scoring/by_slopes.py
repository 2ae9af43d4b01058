"""The linear model from slopes of the loss: every example has masks of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from secateurs.costs import cost
from secateurs.ensemble import Ensemble
from secateurs.errors import InvalidInput
from secateurs.gradients import Pairs, fit_slopes, gains, joined
from secateurs.masking import device_of, split_at
from secateurs.measuring import Bench, Measured
from secateurs.noise import masks_per_example
from secateurs.scoring.work import PILOT, ROUNDS, Scored, Work
from secateurs.stability import agreement, resampled_means, settled

_FEWEST = 4  # examples under masks of their own
_SLICE = 64  # examples at once on a CPU: a round has so few that larger pieces would leave cores without work
GRADIENT_PASS = 2.4  # what a forward and backward pass costs, in forward passes


def by_slopes(work: Work) -> Scored:
    """Rounds of fresh examples, each under a few masks of its own, until the least important filters are the same twice."""
    found: list[Pairs] = []
    agreements: list[float] = []
    used, rounds = 0, _rounds_of_pairs(work)
    for number, pairs in enumerate(rounds):
        found.append(pairs)
        used += pairs.losses.numel()
        work.told(0, used)
        if work.scoring.adaptive:
            agreements.append(_agreement_of_slopes(joined(found), work.resampling(number)))
        if settled(agreements, work.scoring.agreement):
            break
    whole = joined(found)
    stable = settled(agreements, work.scoring.agreement) if work.scoring.adaptive else None
    ensemble = Ensemble(work.bench.site.name, whole.masks.flatten(0, 1), whole.losses.double().flatten())
    importance = fit_slopes(whole)
    return Scored(importance, ensemble, used, work.bound, stable, len(whole.losses))


def _rounds_of_pairs(work: Work) -> Iterator[Pairs]:
    """Examples and masks until the bound is reached or the examples are used up."""
    order = work.order()
    if len(order) < 2 or work.bound < 2 * _FEWEST:
        raise InvalidInput(
            f"site {work.bench.site.name!r}: {work.bound} masks on {len(order)} examples are too few for slopes: wanted "
            f"{2 * _FEWEST} masks or more, on 2 examples or more. estimator = 'losses' needs fewer masks."
        )
    size = min(max(work.bound // (2 * ROUNDS), PILOT), len(order))
    bench = _in_slices(work.bench)
    first = bench.on(work.pool.take(order[:size].sort().values))
    each = _masks_each(work, first, len(order))
    most = work.bound // each  # examples
    for number, start in enumerate(range(0, min(most, len(order)), size)):
        rows = order[start : min(start + size, most)].sort().values
        measured = first if len(rows) == size and number == 0 else bench.on(work.pool.take(rows))
        yield _pairs(work, measured, number, each)


def _in_slices(bench: Bench) -> Bench:
    """The bench with batches small enough to be shared out."""
    on_cpu = (device_of(bench.graph.module) if bench.device is None else torch.device(bench.device)).type == "cpu"
    return replace(bench, batch=min(bench.batch, _SLICE)) if on_cpu else bench


def _pairs(work: Work, measured: Measured, number: int, each: int) -> Pairs:
    """One round: its examples under `each` masks of their own."""
    masks = [work.masks(len(measured.examples), number, turn) for turn in range(each)]
    losses, slopes = measured.slopes(masks)
    return Pairs(torch.stack(masks, 1), losses.transpose(0, 1), slopes.transpose(0, 1))


def _masks_each(work: Work, first: Measured, available: int) -> int:
    """Masks for each example: as the noise in the first round says, more where the examples would not last.

    At least two, whose losses can be compared.
    """
    most = work.bound // _FEWEST  # so that some examples are seen, however few masks there may be
    least = min(max(math.ceil(work.bound / available), 2), most)
    if work.scoring.examples is not None:
        return least
    pilot = _pairs(work, first, 0, 2).finite()
    if len(pilot.losses) < 2:
        return least
    return min(max(least, masks_per_example(pilot.slopes, preparing=_preparing(work.bench))), most)


def _preparing(bench: Bench) -> float:
    """What it costs to bring an example to the site, in gradient passes from there on; counted in MACs."""
    before, whole = cost(split_at(bench.graph, bench.site).prefix, bench.graph.example).macs, cost(bench.graph).macs
    return before / (GRADIENT_PASS * max(whole - before, 1))


def _agreement_of_slopes(pairs: Pairs, generator: torch.Generator) -> float:
    """Examples are drawn again with all their masks: as these are their own, that resamples both."""
    each = gains(pairs.finite())
    return agreement(each.mean(0), resampled_means(each, generator=generator)) if len(each) > 1 else 0.0
