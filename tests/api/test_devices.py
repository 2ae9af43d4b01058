"""Devices: where a run computes, what it does when memory runs out, and in which precision. By injection, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from digit_loaders import ONE_CUT, QUICK, RECIPE, digits, loader, loaders, trained
from torch import Tensor, nn

import secateurs as sc
from secateurs._util import modules
from secateurs._util.modules import to_device
from secateurs.errors import InvalidInput, OutOfMemory
from secateurs.repair import observe, prepare
from secateurs.scoring.importance import rank_correlation

RANKED = replace(
    RECIPE,
    criterion="portfolio",
    portfolio=("ensemble", "taylor", "l1"),
    repair="every-layer",
    masks=256,
    max_drop=0.2,
    estimator="gradient",
)


def test_the_first_lines_say_by_what_and_where_and_how_long_and_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    sc.prune(trained(), *loaders(), recipe=RECIPE)
    currency, place, *_ = capsys.readouterr().err.splitlines()
    assert currency.startswith("Cuts are weighed by the MACs that they save, not by time: ")
    assert "engine='torch'" in currency
    assert place.startswith("Pruning on cpu, at ")
    assert re.search(r"images a second: all of it takes about \d+ s, and up to [\d.]+ MB of memory besides the data\.$", place)


@pytest.mark.parametrize("device", ["cuda", "gpu", "cuda:7"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    if torch.cuda.is_available() and device == "cuda":
        pytest.skip("there is one")
    with pytest.raises(InvalidInput, match=f"device: got '{device}', which cannot be used here .* or give 'cpu'"):
        sc.prune(trained(), *loaders(), device=device, **QUICK)


# ---- memory --------------------------------------------------------------------------------------------------------------


def allow(monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Let convolutions run out of memory for more than `most` examples; gives the sizes of the batches that fitted."""
    real, seen = nn.Conv2d._conv_forward, list[int]()

    def limited(self: nn.Conv2d, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(given) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        seen.append(len(given))
        return real(self, given, weight, bias)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", limited)
    return seen


def test_out_of_memory_halves_the_batch_and_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    small = sc.prune(
        trained(), *loaders(), test=loader(digits()[2]), recipe=replace(RANKED, batch=16, scoring_examples=128), progress=False
    )
    seen = allow(monkeypatch, 16)
    large = sc.prune(
        trained(), *loaders(), test=loader(digits()[2]), recipe=replace(RANKED, batch=256, scoring_examples=128), progress=False
    )
    assert max(seen) == 16
    assert large.plan == small.plan
    assert large.test == small.test
    for (name, wanted), (_, got) in zip(small.model.state_dict().items(), large.model.state_dict().items(), strict=True):
        torch.testing.assert_close(got, wanted, msg=name)


def test_too_little_memory_for_one_example_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    pruner = sc.Pruner(trained(), *loaders(), recipe=RECIPE)
    allow(monkeypatch, 0)
    with pytest.raises(OutOfMemory, match=r"not enough memory for a single example. Use .* or the CPU \(device='cpu'\)"):
        pruner.finish()


def test_an_out_of_memory_of_the_users_own_is_theirs() -> None:
    calls: list[int] = []

    def evaluate(model: nn.Module) -> float:
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("theirs")
        return 0.9

    with pytest.raises(torch.OutOfMemoryError, match="theirs"):
        sc.prune(trained(), *loaders(), evaluate=evaluate, **ONE_CUT)
    assert len(calls) == 2


# ---- precision -----------------------------------------------------------------------------------------------------------


def importance(recipe: sc.Recipe) -> Tensor:
    (step,) = sc.Pruner(trained(), *loaders(), recipe=recipe)
    found: Tensor = step.importance.coef
    return found


@pytest.mark.parametrize("estimator", ["gradient", "losses"])
def test_mixed_precision_ranks_filters_alike(estimator: Any) -> None:
    recipe = sc.Recipe.fast(sites=("3",), masks=512, scoring_examples=256, confidence=0, adaptive=False, estimator=estimator)
    full, mixed = importance(recipe), importance(replace(recipe, scoring_precision="bfloat16"))
    assert not torch.equal(full, mixed)  # it was used
    assert rank_correlation(full, mixed) > 0.95


def test_a_device_without_float64_accumulates_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = sc.trace(trained(), digits()[0].inputs[:2])
    ready, few = prepare(graph, ["0"]), digits()[0].take(torch.arange(64))
    keep = torch.arange(12) % 2 == 0
    exact = observe(ready, "0", few, original=graph).solve(keep).weights
    monkeypatch.setattr(modules, "WITHOUT_FLOAT64", {"cpu"})
    rounded = observe(ready, "0", few, original=graph).solve(keep).weights
    assert any(not torch.equal(exact[name], rounded[name]) for name in exact)  # summed in float32
    for name, wanted in exact.items():
        torch.testing.assert_close(rounded[name], wanted, rtol=1e-2, atol=1e-3)
    result = sc.prune(trained(), *loaders(), **ONE_CUT)
    assert result.macs.removed > 0
    assert result.bound is not None


class Recorder:
    """Stands in for a tensor on the CPU of a machine with CUDA."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def pin_memory(self) -> Recorder:
        self.calls.append("pinned")
        return self

    def to(self, device: Any, **options: Any) -> Recorder:
        self.calls.append((device, options))
        return self


def test_copies_to_cuda_come_from_pinned_memory_and_do_not_wait() -> None:
    tensor: Any = Recorder()
    to_device(tensor, "cuda")
    to_device(tensor, "cpu")
    assert tensor.calls == ["pinned", ("cuda", {"non_blocking": True}), ("cpu", {})]
