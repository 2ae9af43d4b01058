"""The latency of networks that sleep."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import Tensor, nn

from secateurs.errors import InvalidInput
from secateurs.speed.latency import latency, timing


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


def test_timing_is_median_and_the_middle_ninety_per_cent() -> None:
    measured = timing(torch.arange(101, dtype=torch.float64))
    assert (measured.low, measured.median, measured.high) == (5.0, 50.0, 95.0)
    assert measured.seconds == tuple(float(i) for i in range(101))


def test_a_slower_network_is_found_slower() -> None:
    measured = latency(Sleeper(0.008), Sleeper(0.002), example_input=torch.zeros(4, 1), repeats=8)
    slow, fast = measured.timings
    assert slow.median >= 0.008
    assert 0.002 <= fast.median < slow.median
    assert measured.speedups[0].measurable
    assert measured.speedups[0].ratio == pytest.approx(slow.median / fast.median, rel=0.2)
    assert measured.batch == 4
    assert measured.device == "cpu"


def test_networks_threads_and_collector_are_restored() -> None:
    net = Sleeper(0.0)
    threads = torch.get_num_threads()
    measured = latency(net, net, example_input=torch.zeros(1, 1), repeats=5, threads=threads + 1)
    assert set(net.seen) == {(False, True, threads + 1, False)}
    assert len(net.seen) >= 2 * (5 + 2)  # warmed up, and timed in every repeat
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
    measured = latency(Sleeper(0.003), example_input=torch.zeros(1, 1), repeats=5)
    assert measured.speedups == ()
    assert 3 <= float(measured.summary().split(" ms")[0]) < 30


def test_errors_say_what_is_wanted() -> None:
    net, example = nn.Linear(3, 2), torch.zeros(1, 3)
    with pytest.raises(InvalidInput, match="at least one network"):
        latency(example_input=example)
    with pytest.raises(InvalidInput, match="repeats is 4, wanted at least 5"):
        latency(net, example_input=example, repeats=4)
    with pytest.raises(InvalidInput, match="threads is 0"):
        latency(net, example_input=example, threads=0)
    with pytest.raises(InvalidInput, match="came without an example input"):
        latency(net)
    with pytest.raises(InvalidInput, match="meta device computes nothing"):
        latency(nn.Linear(3, 2, device="meta"), example_input=example)
