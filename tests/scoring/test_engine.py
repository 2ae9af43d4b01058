"""The engine measures the masked network itself: whatever the strategy, the batching, the memory and the threads."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nets import TOPOLOGIES, random_problem, seeded
from secateurs import Site, find_sites, masked, sample_masks, trace
from secateurs.config import Shortcut
from secateurs.data import Examples
from secateurs.errors import InvalidInput, InvalidMask
from secateurs.graph.sites import Sites
from secateurs.metrics import cross_entropy
from secateurs.metrics import loss as mean_loss
from secateurs.models import build, example_input
from secateurs.scoring.engine import MaskedNetwork, MaskingStrategy, split_for
from secateurs.scoring.engine.batches import free_memory
from secateurs.scoring.engine.forward import Masking, possible_maskings


def loss_of(outputs: Any, targets: Any) -> Tensor:
    """Cross-entropy, also for networks with one output."""
    return cross_entropy(F.pad(outputs, (1, 0)) if outputs.shape[1] == 1 else outputs, targets)


@cache
def naive(name: str, shortcut: Shortcut, place: int, dtype: torch.dtype = torch.float64) -> tuple[Site, Tensor, Tensor]:
    """A site, masks for it (the last two: all kept, and none), and the losses of the masked networks."""
    graph, examples = random_problem(name, dtype)
    sites = sites_of(name, shortcut, dtype)
    site = sites[place % len(sites)]
    drawn = sample_masks(site.channels, 3, generator=seeded(place))
    masks = torch.cat([drawn, torch.ones_like(drawn[:1]), torch.zeros_like(drawn[:1])])
    losses = [mean_loss(masked(graph, {site: mask}), examples, loss_fn=loss_of) for mask in masks]
    return site, masks, torch.tensor(losses, dtype=torch.float64)


@cache
def sites_of(name: str, shortcut: Shortcut, dtype: torch.dtype) -> Sites:
    return find_sites(random_problem(name, dtype)[0], shortcut)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measured(network: MaskedNetwork, masks: Tensor) -> Tensor:
    return network.measure(masks, [loss_of])[:, 0]


@cache
def allowed(name: str, shortcut: Shortcut, place: int) -> tuple[Masking, ...]:
    """The ways of masking that a site has: more than one where only convolutions and linear layers read it."""
    graph, examples = random_problem(name)
    return possible_maskings(split_for(graph, naive(name, shortcut, place)[0], examples).network)


STRATEGIES = st.builds(MaskingStrategy, rows=st.integers(1, 9), masking=st.sampled_from(["multiply", "subtract"]))


@settings(deadline=None, max_examples=16)
@given(
    name=st.sampled_from(sorted(TOPOLOGIES)),
    shortcut=st.sampled_from(["before", "after"]),
    place=st.integers(0, 3),
    batch=st.integers(1, 9),
    budget=st.sampled_from([0, 3_000, 40_000, None]),
    count=st.sampled_from([1, 2]),
    strategy=st.none() | STRATEGIES,
    cut=st.integers(1, 4),
)
def test_losses_are_those_of_the_masked_network(
    name: str,
    shortcut: Shortcut,
    place: int,
    batch: int,
    budget: int | None,
    count: int,
    strategy: MaskingStrategy | None,
    cut: int,
) -> None:
    site, masks, expected = naive(name, shortcut, place)
    graph, examples = random_problem(name)
    if strategy is not None and strategy.masking not in allowed(name, shortcut, place):
        strategy = replace(strategy, masking="multiply")
    with threads(count):
        network = split_for(graph, site, examples, batch=batch, cache_bytes=budget, strategy=strategy, workers=count)
        found = torch.cat([measured(network, some) for some in (masks[:cut], masks[cut:])])
        assert torch.get_num_threads() == count
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert strategy is None or network.strategy == strategy


@pytest.mark.parametrize("name", ["resnet8", "resnet8-b", "mobilenet-small", "unet-small"])
def test_float32_losses_are_those_of_the_masked_network(name: str) -> None:
    graph, examples = random_problem(name, torch.float32)
    for place in (0, 1):
        site, masks, expected = naive(name, "before", place, torch.float32)
        network = split_for(graph, site, examples)
        torch.testing.assert_close(measured(network, masks), expected, rtol=1e-5, atol=0)
        plain = split_for(graph, site, examples, strategy=MaskingStrategy(rows=3))
        torch.testing.assert_close(measured(plain, masks), expected, rtol=1e-5, atol=0)


def test_an_inner_site_of_a_resnet_is_subtracted_and_one_before_the_sum_multiplied() -> None:
    graph = trace(build("resnet8").eval(), example_input("resnet8"))
    examples = Examples(example_input("resnet8", 4), torch.arange(4))
    inner, before = find_sites(graph)[1:3]
    strategies: list[MaskingStrategy] = []
    for site in (inner, before):
        network = split_for(graph, site, examples)
        measured(network, sample_masks(site.channels, 2, generator=seeded(0)))
        assert network.strategy is not None
        strategies.append(network.strategy)
    assert [strategy.masking for strategy in strategies] == ["subtract", "multiply"]


@pytest.mark.parametrize("strategy", [None, MaskingStrategy(rows=4), MaskingStrategy(rows=2, masking="subtract")])
def test_the_same_strategy_gives_the_same_bits(strategy: MaskingStrategy | None) -> None:
    site, _, _ = naive("resnet8", "before", 1, torch.float32)
    graph, examples = random_problem("resnet8", torch.float32)
    masks = sample_masks(site.channels, 9, generator=seeded(8))
    once = measured(split_for(graph, site, examples, batch=5, strategy=strategy), masks)
    for workers, batch in ((2, 5), (3, 5)):
        again = split_for(graph, site, examples, batch=batch, strategy=strategy, cache_bytes=0, workers=workers)
        twice = torch.cat([measured(again, some) for some in (masks[:4], masks[4:8], masks[8:])])
        assert torch.equal(once, twice)


@pytest.mark.parametrize("batch", [1, 7])
def test_slopes_are_the_same_bits_in_any_number_of_threads(batch: int) -> None:
    site, _, _ = naive("resnet8", "before", 1, torch.float32)
    graph, examples = random_problem("resnet8", torch.float32)
    turns = [sample_masks(site.channels, len(examples), generator=seeded(seed)) for seed in range(3)]
    found = [split_for(graph, site, examples, batch=batch, workers=workers).slopes(turns, loss_of) for workers in (1, 2, 3)]
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def held(network: MaskedNetwork) -> int:
    """Bytes of all the tensors that its kept batches hold, each storage once."""
    tensors = [t for batch in network.batches.kept.values() for t in (batch.activations, *batch.carried, *batch.totals)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("budget", [0, 5_000, 20_000, 60_000, 10**9])
@pytest.mark.parametrize("place", [1, 2])
def test_what_is_kept_is_never_above_the_budget(budget: int, place: int) -> None:
    site, masks, _ = naive("resnet8", "before", place)
    graph, examples = random_problem("resnet8")
    network = split_for(graph, site, examples, batch=1, cache_bytes=budget, workers=2)
    runs: list[int] = []
    for _ in range(2):
        measured(network, masks)
        assert held(network) <= budget
        runs.append(len(network.batches.kept))
    assert runs[0] == runs[1]
    assert runs[0] == {0: 0, 10**9: len(examples)}.get(budget, runs[0])


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_prefix_runs_once_a_batch_if_it_fits_and_once_a_call_if_not(workers: int) -> None:
    site, masks, _ = naive("resnet8", "before", 2)
    graph, examples = random_problem("resnet8")
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    handle = graph.module.get_submodule("conv1").register_forward_hook(count)
    try:
        for budget, expected in ((10**9, [4, 4]), (0, [4, 8])):
            network = split_for(
                graph, site, examples, batch=2, cache_bytes=budget, strategy=MaskingStrategy(rows=2), workers=workers
            )
            calls = 0
            for so_far in expected:
                measured(network, masks)
                assert calls == so_far
    finally:
        handle.remove()


def test_by_default_a_quarter_of_the_free_memory_may_be_used() -> None:
    graph, examples = random_problem("mlp")
    free = free_memory(torch.device("cpu"))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free <= total
    budget = split_for(graph, find_sites(graph)[0], examples).batches.budget
    assert abs(budget / free - 0.25) < 0.1  # others use memory meanwhile


@pytest.mark.parametrize("name", ["resnet8", "mobilenet-small"])
def test_the_users_network_stays_as_it_was(name: str) -> None:
    graph, examples = random_problem(name, torch.float32)
    site = find_sites(graph)[0]
    graph.module.train()
    state = copy.deepcopy(graph.module.state_dict())
    code, formats = graph.module.code, [p.stride() for p in graph.module.parameters()]
    try:
        network = split_for(graph, site, examples)
        network.measure(sample_masks(site.channels, 2, generator=seeded(0)), [loss_of])
        network.slopes([torch.ones(len(examples), site.channels, dtype=torch.bool)], loss_of)
        assert all(part.training for part in graph.module.modules())
    finally:
        graph.module.eval()
    assert graph.module.code == code
    assert [p.stride() for p in graph.module.parameters()] == formats
    assert all(p.requires_grad and p.grad is None for p in graph.module.parameters())
    assert all(torch.equal(state[key], value) for key, value in graph.module.state_dict().items())


def test_values_are_the_losses_of_single_examples() -> None:
    site, masks, expected = naive("unet-small", "before", 2)
    graph, examples = random_problem("unet-small")
    network = split_for(graph, site, examples, batch=3)
    values = network.values(masks, loss_of)
    assert values.shape == (len(masks), len(examples))
    torch.testing.assert_close(values.mean(1), expected, rtol=1e-10, atol=0)
    alone = mean_loss(masked(graph, {site: masks[1]}), examples.take(torch.tensor([4])), loss_fn=loss_of)
    assert float(values[1, 4]) == pytest.approx(alone, rel=1e-10)
    with pytest.raises(InvalidInput, match="wanted one value for each example"):
        network.values(masks, lambda outputs, targets: loss_of(outputs, targets).mean())


def test_several_measures_and_means_come_out_side_by_side() -> None:
    site, masks, expected = naive("mlp", "before", 0)
    graph, examples = random_problem("mlp")
    both = split_for(graph, site, examples, batch=4).measure(masks, [loss_of, lambda o, t: loss_of(o, t).mean()])
    torch.testing.assert_close(both, expected[:, None].expand(-1, 2), rtol=1e-10, atol=0)


def test_masks_of_another_kind_or_width_are_refused() -> None:
    site, masks, _ = naive("mlp", "before", 0)
    network = split_for(*random_problem("mlp")[:1], site, random_problem("mlp")[1])
    with pytest.raises(InvalidMask, match="wanted bool"):
        network.measure(masks.double(), [loss_of])
    with pytest.raises(InvalidMask, match=f"\\(7, {site.channels}\\)"):
        network.slopes([masks], loss_of)
    with pytest.raises(InvalidInput, match="no examples"):
        split_for(random_problem("mlp")[0], site, random_problem("mlp")[1].take(torch.arange(0)))


def test_an_error_in_a_measure_comes_out_and_the_next_call_is_right() -> None:
    site, masks, expected = naive("resnet8", "before", 1)
    graph, examples = random_problem("resnet8")
    network = split_for(graph, site, examples, batch=2, cache_bytes=0, workers=2)
    seen: list[int] = []

    def fails_at_the_third(outputs: Any, targets: Any) -> Tensor:
        seen.append(1)
        if len(seen) == 3:
            raise RuntimeError("third")
        return loss_of(outputs, targets)

    with pytest.raises(RuntimeError, match="third"):
        network.measure(masks, [fails_at_the_third])
    torch.testing.assert_close(measured(network, masks), expected, rtol=1e-10, atol=0)
