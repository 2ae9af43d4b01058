"""The statistics are checked on made-up times, the stop-watch on networks that sleep."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import Tensor, nn

from nets import seeded
from secateurs.errors import InvalidInput
from secateurs.graph.latency import SpeedUp, in_turns, latency, speedup, timing


class Sleeper(nn.Module):
    """Takes `seconds` for every call, and keeps what it saw."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.drop = nn.Dropout()
        self.seen: list[tuple[bool, bool, int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.drop.training, torch.is_inference_mode_enabled(), torch.get_num_threads(), gc.isenabled()))
        time.sleep(self.seconds)
        return x


def noisy(center: float, seed: int, repeats: int = 60) -> Tensor:
    generator = seeded(seed)
    return center * (1 + 0.05 * torch.randn(repeats, dtype=torch.float64, generator=generator).abs())


def test_timing_is_median_and_the_middle_ninety_per_cent() -> None:
    measured = timing(torch.arange(101, dtype=torch.float64))
    assert (measured.low, measured.median, measured.high) == (5.0, 50.0, 95.0)
    assert measured.seconds == tuple(float(i) for i in range(101))


def test_a_constant_ratio_has_an_interval_of_no_width() -> None:
    slow = noisy(2.0, seed=0)
    compared = speedup(slow, slow / 2.5)
    assert (compared.ratio, compared.low, compared.high) == pytest.approx((2.5, 2.5, 2.5))
    assert compared.measurable


def test_a_drift_that_hits_both_networks_does_not_hide_their_ratio() -> None:
    drift = torch.linspace(1, 5, 60, dtype=torch.float64)
    compared = speedup(2 * drift * noisy(1, seed=0), drift * noisy(1, seed=1))
    assert 1.8 < compared.low < compared.ratio < compared.high < 2.2


def test_equal_networks_are_rarely_found_to_differ() -> None:
    verdicts = [speedup(noisy(1, seed), noisy(1, 1000 + seed)).measurable for seed in range(100)]
    assert sum(verdicts) <= 12  # 5 expected of a 95 % interval


def test_the_interval_covers_the_true_ratio() -> None:
    true = 1.3
    intervals = [speedup(true * noisy(1, seed), noisy(1, 1000 + seed)) for seed in range(100)]
    assert sum(interval.low <= true <= interval.high for interval in intervals) >= 88


@pytest.mark.parametrize(
    ("compared", "words"),
    [
        (SpeedUp(1.93, 1.85, 2.01), "1.93x faster (1.85 to 2.01)"),
        (SpeedUp(0.5, 0.4, 0.8), "2.00x slower (1.25 to 2.50)"),
        (SpeedUp(1.02, 0.97, 1.04), "no measurable speed-up (0.97 to 1.04)"),
    ],
)
def test_summary_in_words(compared: SpeedUp, words: str) -> None:
    assert compared.summary() == words


def test_every_repeat_runs_each_once_and_starts_one_later() -> None:
    order: list[int] = []
    calls = [lambda which=which: order.append(which) for which in range(3)]
    seconds = in_turns(calls, warmup=1, repeats=3)
    assert order == [2, 0, 1, 0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert seconds.shape == (3, 3)
    assert (seconds > 0).all()


def test_a_slower_network_is_found_slower() -> None:
    measured = latency(Sleeper(0.008), Sleeper(0.002), example_input=torch.zeros(4, 1), repeats=8, warmup=1)
    slow, fast = measured.timings
    assert slow.median >= 0.008
    assert 0.002 <= fast.median < slow.median
    assert measured.speedups[0].measurable
    assert measured.summary().split("x faster")[0] == f"{slow.median / fast.median:.2f}"
    assert measured.batch == 4
    assert measured.device == "cpu"


def test_networks_threads_and_collector_are_restored() -> None:
    net = Sleeper(0.0)
    threads = torch.get_num_threads()
    measured = latency(net, net, example_input=torch.zeros(1, 1), repeats=5, warmup=2, threads=threads + 1)
    assert set(net.seen) == {(False, True, threads + 1, False)}
    assert len(net.seen) == 2 * (5 + 2)
    assert measured.threads == threads + 1
    assert net.training
    assert net.drop.training
    assert torch.get_num_threads() == threads
    assert gc.isenabled()


def test_a_network_that_raises_is_restored_too() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        latency(net, example_input=torch.zeros(1, 4), threads=torch.get_num_threads() + 1)
    assert net[0].training
    assert gc.isenabled()


def test_a_device_gets_copies() -> None:
    net = nn.Linear(3, 2)
    weight = net.weight
    assert latency(net, example_input=torch.zeros(1, 3), repeats=5, device="cpu").device == "cpu"
    assert net.weight is weight


def test_one_network_alone_is_timed_in_milliseconds() -> None:
    measured = latency(Sleeper(0.003), example_input=torch.zeros(1, 1), repeats=5, warmup=0)
    assert measured.speedups == ()
    assert 3 <= float(measured.summary().split(" ms")[0]) < 30


def test_errors_say_what_is_wanted() -> None:
    net, example = nn.Linear(3, 2), torch.zeros(1, 3)
    with pytest.raises(InvalidInput, match="at least one network"):
        latency(example_input=example)
    with pytest.raises(InvalidInput, match="repeats is 4, wanted at least 5"):
        latency(net, example_input=example, repeats=4)
    with pytest.raises(InvalidInput, match="warmup is -1"):
        latency(net, example_input=example, warmup=-1)
    with pytest.raises(InvalidInput, match="threads is 0"):
        latency(net, example_input=example, threads=0)
    with pytest.raises(InvalidInput, match="came without an example input"):
        latency(net)
    with pytest.raises(InvalidInput, match="meta device computes nothing"):
        latency(nn.Linear(3, 2, device="meta"), example_input=example)
