"""The engine measures the masked network itself: whatever the form, the batching, the memory and the threads."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from secateurs import Graph, Site, find_sites, masked, sample_masks, trace
from secateurs.data import Examples
from secateurs.errors import InvalidInput, InvalidMask
from secateurs.graph.layers import Mask
from secateurs.graph.sites import Sites
from secateurs.metrics import cross_entropy
from secateurs.metrics import loss as mean_loss
from secateurs.models import build, example_input
from secateurs.scoring.engine import MaskedNetwork, MaskingStrategy, split_for
from secateurs.scoring.engine.memory import default_budget, free_memory
from secateurs.scoring.engine.strategies import Masking, possible_maskings

SMALL = {
    **{name: {} for name in ("fcn3", "mlp", "cnn1d", "split-small", "densenet-small", "mobilenet-small", "resnext-small")},
    "unet-small": {},
    "resnet8": {"widths": (4, 6, 8)},
    "resnet8-b": {"widths": (4, 6, 8)},
}
"""A network of every topology in `models`, as narrow as it gets; the deeper ResNets are resnet8 again."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def problem(name: str, dtype: torch.dtype = torch.float64, count: int = 7) -> tuple[Graph, Examples]:
    """A network with random BatchNorm statistics, and random examples for it."""
    torch.manual_seed(0)
    model = build(name, **SMALL[name]).eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(part.get_buffer("running_mean"), 0, 0.2, generator=seeded(1))
            nn.init.uniform_(part.get_buffer("running_var"), 0.5, 1.5, generator=seeded(2))
            nn.init.uniform_(part.weight, 0.5, 1.5, generator=seeded(3))
            nn.init.normal_(part.bias, 0, 0.2, generator=seeded(4))
    inputs = example_input(name, count).to(dtype)
    graph = trace(model.to(dtype), inputs[:2])
    shape = graph.module(inputs).shape
    classes = max(shape[1], 2) if len(shape) > 1 else 2
    return graph, Examples(inputs, torch.randint(classes, (count, *shape[2:]), generator=seeded(5)))


def loss_of(outputs: Any, targets: Any) -> Tensor:
    """Cross-entropy, also for networks with one output."""
    return cross_entropy(F.pad(outputs, (1, 0)) if outputs.shape[1] == 1 else outputs, targets)


@cache
def naive(name: str, shortcut: str, place: int, dtype: torch.dtype = torch.float64) -> tuple[Site, Tensor, Tensor]:
    """A site, masks for it (the last two: all kept, and none), and the losses of the masked networks."""
    graph, examples = problem(name, dtype)
    sites = sites_of(name, shortcut, dtype)
    site = sites[place % len(sites)]
    drawn = sample_masks(site.channels, 3, generator=seeded(place))
    masks = torch.cat([drawn, torch.ones_like(drawn[:1]), torch.zeros_like(drawn[:1])])
    network = masked(graph, {site: masks[-2]})
    (layer,) = (part for part in network.modules() if isinstance(part, Mask))
    losses = []
    for mask in masks:
        layer.keep = mask
        losses.append(mean_loss(network, examples, loss_fn=loss_of))
    return site, masks, torch.tensor(losses, dtype=torch.float64)


@cache
def sites_of(name: str, shortcut: str, dtype: torch.dtype) -> Sites:
    return find_sites(problem(name, dtype)[0], shortcut)  # type: ignore[arg-type]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even the smallest work be shared out to threads."""
    monkeypatch.setattr("secateurs.scoring.engine.workers.WORTH_SHARING", 0.0)
    monkeypatch.setattr("secateurs.scoring.engine.workers.LONG_OP", 0.0)


@pytest.fixture(scope="module", autouse=True)
def _shared() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shared_at_once(patch)
        yield


def measured(network: MaskedNetwork, masks: Tensor) -> Tensor:
    return network.measure(masks, [loss_of])[:, 0]


@cache
def allowed(name: str, shortcut: str, place: int) -> list[Masking]:
    """The ways of masking that a site has: more than one where only convolutions and linear layers read it."""
    return possible_maskings(split_for(problem(name)[0], naive(name, shortcut, place)[0], problem(name)[1])._parts)


FORMS = st.builds(
    MaskingStrategy,
    rows=st.integers(1, 9),
    masking=st.sampled_from(["multiply", "weights", "gather", "subtract"]),
) | st.builds(MaskingStrategy, rows=st.integers(1, 9), masks_per_pass=st.integers(1, 6))


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from(sorted(SMALL)),
    shortcut=st.sampled_from(["before", "after"]),
    place=st.integers(0, 3),
    batch=st.integers(1, 9),
    budget=st.sampled_from([0, 3_000, 40_000, None]),
    count=st.sampled_from([1, 2]),
    form=st.none() | FORMS,
    cut=st.integers(1, 4),
)
def test_losses_are_those_of_the_masked_network(
    name: str, shortcut: str, place: int, batch: int, budget: int | None, count: int, form: MaskingStrategy | None, cut: int
) -> None:
    site, masks, expected = naive(name, shortcut, place)
    graph, examples = problem(name)
    if form is not None and form.masking not in allowed(name, shortcut, place):
        form = replace(form, masking="multiply")
    with threads(count):
        network = split_for(graph, site, examples, batch=batch, cache_bytes=budget, form=form)
        found = torch.cat([measured(network, some) for some in (masks[:cut], masks[cut:])])
        assert torch.get_num_threads() == count
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert form is None or network.form == form


@pytest.mark.parametrize("name", ["resnet8", "resnet8-b", "mobilenet-small", "unet-small"])
def test_float32_losses_are_those_of_the_masked_network(name: str) -> None:
    graph, examples = problem(name, torch.float32)
    for place in (0, 1):
        site, masks, expected = naive(name, "before", place, torch.float32)
        network = split_for(graph, site, examples)
        torch.testing.assert_close(measured(network, masks), expected, rtol=1e-5, atol=0)
        plain = split_for(graph, site, examples, form=MaskingStrategy(rows=3, masks_per_pass=2))
        torch.testing.assert_close(measured(plain, masks), expected, rtol=1e-5, atol=0)


def test_an_inner_site_of_a_resnet_is_subtracted_and_one_before_the_sum_multiplied() -> None:
    graph = trace(build("resnet8").eval(), example_input("resnet8"))
    examples = Examples(example_input("resnet8", 4), torch.arange(4))
    inner, before = find_sites(graph)[1:3]
    forms: list[MaskingStrategy] = []
    for site in (inner, before):
        network = split_for(graph, site, examples)
        assert network.form is None
        measured(network, sample_masks(site.channels, 2, generator=seeded(0)))
        assert network.form is not None
        forms.append(network.form)
    assert [form.masking for form in forms] == ["subtract", "multiply"]


@pytest.mark.parametrize(
    "form",
    [None, MaskingStrategy(rows=4), MaskingStrategy(rows=3, masks_per_pass=4), MaskingStrategy(rows=2, masking="gather")],
)
def test_the_same_form_gives_the_same_bits(form: MaskingStrategy | None) -> None:
    site, _, _ = naive("resnet8", "before", 1, torch.float32)
    graph, examples = problem("resnet8", torch.float32)
    masks = sample_masks(site.channels, 9, generator=seeded(8))
    first = split_for(graph, site, examples, batch=5, form=form)
    once = measured(first, masks)
    assert first.form is not None
    again = split_for(
        graph, site, examples, batch=5, form=MaskingStrategy(**json.loads(json.dumps(asdict(first.form)))), cache_bytes=0
    )
    with threads(2):
        twice = torch.cat([measured(again, some) for some in (masks[:4], masks[4:8], masks[8:])])
    assert torch.equal(once, twice)


def test_a_race_finds_a_form_that_gives_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secateurs.scoring.engine.autotune.SHARE", 100.0)
    site, masks, expected = naive("resnet8", "before", 1, torch.float32)
    graph, examples = problem("resnet8", torch.float32)
    network = split_for(graph, site, examples, announced=50)
    torch.testing.assert_close(measured(network, masks), expected, rtol=1e-5, atol=0)
    assert network.form is not None
    assert not network.form.compiled  # seconds of work are not worth a compiler


def held(network: MaskedNetwork) -> int:
    """Bytes of all the tensors that its kept chunks hold, each storage once."""
    tensors = [t for chunk in network._chunks._kept.values() for t in chunk.arrival.tensors()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("budget", [0, 5_000, 20_000, 60_000, 10**9])
@pytest.mark.parametrize("place", [1, 2])
def test_what_is_kept_is_never_above_the_budget(budget: int, place: int) -> None:
    site, masks, _ = naive("resnet8", "before", place)
    graph, examples = problem("resnet8")
    network = split_for(graph, site, examples, batch=1, cache_bytes=budget)
    runs: list[int] = []
    for _ in range(2):
        measured(network, masks)
        assert held(network) <= budget
        assert not network._chunks._lent
        runs.append(len(network._chunks._kept))
    assert runs[0] == runs[1]
    assert runs[0] == {0: 0, 10**9: len(examples)}.get(budget, runs[0])


def test_the_prefix_runs_once_a_chunk_if_it_fits_and_once_a_call_if_not() -> None:
    site, masks, _ = naive("resnet8", "before", 2)
    graph, examples = problem("resnet8")
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    handle = graph.module.get_submodule("conv1").register_forward_hook(count)
    try:
        for budget, expected in ((10**9, [4, 4]), (0, [4, 8])):
            network = split_for(graph, site, examples, batch=2, cache_bytes=budget, form=MaskingStrategy(rows=2))
            calls = 0
            for so_far in expected:
                measured(network, masks)
                assert calls == so_far
    finally:
        handle.remove()


def test_by_default_a_quarter_of_the_free_memory_may_be_used() -> None:
    free = free_memory(torch.device("cpu"))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free <= total
    assert abs(default_budget(torch.device("cpu")) / free - 0.25) < 0.1  # others use memory meanwhile


@pytest.mark.parametrize("name", ["resnet8", "mobilenet-small"])
def test_the_users_network_stays_as_it_was(name: str) -> None:
    graph, examples = problem(name, torch.float32)
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
    graph, examples = problem("unet-small")
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
    graph, examples = problem("mlp")
    both = split_for(graph, site, examples, batch=4).measure(masks, [loss_of, lambda o, t: loss_of(o, t).mean()])
    torch.testing.assert_close(both, expected[:, None].expand(-1, 2), rtol=1e-10, atol=0)


def test_masks_of_another_kind_or_width_are_refused() -> None:
    site, masks, _ = naive("mlp", "before", 0)
    network = split_for(*problem("mlp")[:1], site, problem("mlp")[1])
    with pytest.raises(InvalidMask, match="wanted bool"):
        network.measure(masks.double(), [loss_of])
    with pytest.raises(InvalidMask, match=f"\\(7, {site.channels}\\)"):
        network.slopes([masks], loss_of)
    with pytest.raises(InvalidInput, match="no examples"):
        split_for(problem("mlp")[0], site, problem("mlp")[1].take(torch.arange(0)))
    with pytest.raises(InvalidInput, match="rows and masks_per_pass"):
        split_for(*problem("mlp")[:1], site, problem("mlp")[1], form=MaskingStrategy(rows=0))
    with pytest.raises(InvalidInput, match="fill"):
        split_for(*problem("mlp")[:1], site, problem("mlp")[1], fill=torch.zeros(1))


def test_an_error_in_a_measure_comes_out_and_nothing_stays_lent() -> None:
    site, masks, expected = naive("resnet8", "before", 1)
    graph, examples = problem("resnet8")
    network = split_for(graph, site, examples, batch=2, cache_bytes=0)
    seen: list[int] = []

    def fails_at_the_third(outputs: Any, targets: Any) -> Tensor:
        seen.append(1)
        if len(seen) == 3:
            raise RuntimeError("third")
        return loss_of(outputs, targets)

    with threads(2), pytest.raises(RuntimeError, match="third"):
        network.measure(masks, [fails_at_the_third])
    assert not network._chunks._lent
    torch.testing.assert_close(measured(network, masks), expected, rtol=1e-10, atol=0)
