"""Numbers of filters worth keeping at a site: multiples that an engine runs well, and the edges of measured steps. Pure maths.

Latency does not fall with every filter: kernels work in blocks, so that 57 filters can take as long as 64, or longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MARGIN = 4.0  # standard errors: of 100 simulated sites with 48 equal widths and 7 rounds, 1 to 4 then had an edge (3.0: 6 to 9)
ALL_UP_TO = 32  # filters: narrower sites are measured at every width
POINTS = 16  # of the grid of a wider site
RESAMPLES = 500  # bootstrap samples: 80 lie outside either end of the interval
PROBED = (32, 40, 45, 48, 56, 59, 64)  # widths: multiples of 16, two more of 8, two odd ones
HARMLESS = 1.15  # time for the same work, relative to multiples of 16


def multiple_at(channels: int, multiple: int) -> int:
    """The multiple for a site of `channels` filters: `multiple`, but at most a quarter of them, down to a power of two.

    A narrow site can then still lose filters in three steps or more: one of 16 keeps 12, 8 or 4.
    """
    return min(multiple, 1 << max((channels // 4).bit_length() - 1, 0))


def preferred(seconds: Mapping[int, float]) -> int:
    """The smallest of 1, 8 and 16 whose multiples cost the engine little more than multiples of 16.

    `seconds` holds the time of a layer with as many inputs as filters, at each of `PROBED`. Harmless are up to 15 % more
    time for each product of inputs and filters, on average, than at the two nearest multiples of 16.
    """
    work = {width: seconds[width] / width**2 for width in PROBED}

    def excess(low: int, high: int) -> float:
        """Mean of two ratios, each to the mean of two neighbours."""
        return work[low] / (work[32] + work[48]) + work[high] / (work[48] + work[64])

    if excess(45, 59) <= HARMLESS:
        return 1
    return 8 if excess(40, 56) <= HARMLESS else 16


def candidates(channels: int, multiple: int) -> list[int]:
    """Widths to measure at a site, descending, the full one first.

    With a multiple: its multiples, at most 16 of them. Without (1): every width of a site of up to 32 filters, and of a wider
    one the multiples of the smallest 4·2^k that gives at most 16, each with its two neighbours.
    """
    step = multiple if multiple > 1 else 1 if channels <= ALL_UP_TO else 4
    while step > 1 and channels / step > POINTS:
        step *= 2
    near = (-1, 0, 1) if multiple == 1 and step > 1 else (0,)
    found = {point + by for point in range(step, channels + 1, step) for by in near}
    return sorted({channels, *(width for width in found if 0 < width < channels)}, reverse=True)


def edges(seconds: Mapping[int, Sequence[float]], margin: float = MARGIN) -> tuple[int, ...]:
    """Find the widths that are faster than the widest and than every wider edge, descending: their medians strictly fall.

    `seconds` holds for every width its times in the same rounds, or in fewer of them where it was timed later. Faster means by
    more than `margin` standard errors of the difference of two medians. Where nothing is faster than the widest there is no
    edge: filters removed there would cost accuracy and save no time.
    """
    widths = sorted(seconds, reverse=True)
    rounds = min((len(each) for each in seconds.values()), default=0)
    times = torch.tensor([tuple(seconds[width][:rounds]) for width in widths], dtype=torch.float64)
    medians, steady = times.quantile(0.5, dim=-1), _without_drift(times.log())
    center, error = steady.quantile(0.5, dim=-1), _standard_errors(steady)
    found, last = [], 0
    for i in range(1, len(widths)):
        faster = center[last] - center[i] > margin * torch.hypot(error[i], error[last])
        if faster and medians[i] < medians[last]:
            found.append(widths[i])
            last = i
    return tuple(found)


def _without_drift(logs: Tensor) -> Tensor:
    """Logarithms of seconds (W, R) less what each round adds at most widths alike: a slow minute says nothing of a width."""
    return logs - (logs - logs.quantile(0.5, dim=-1, keepdim=True)).quantile(0.5, dim=0)


def _standard_errors(steady: Tensor) -> Tensor:
    """Standard error (W,) of the median of each row (W, R), by resampling rounds: half the width of the middle 68 %.

    A few rounds of one width can agree by chance, so no width counts as less noisy than half of the others.
    """
    rounds = steady.shape[1]
    drawn = torch.randint(rounds, (RESAMPLES, rounds), generator=torch.Generator().manual_seed(0))
    low, high = steady[:, drawn].quantile(0.5, dim=-1).quantile(torch.tensor([0.16, 0.84], dtype=steady.dtype), dim=1)
    own = (high - low) / 2
    return torch.maximum(own, own.quantile(0.5))
