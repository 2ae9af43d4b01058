"""Evaluation: values by hand, batching invisible, the module restored."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from secateurs._util.modules import eval_mode, on_device
from secateurs.data import Examples, Scaling
from secateurs.errors import InvalidInput
from secateurs.metrics import (
    Measure,
    accuracy,
    changed,
    correct,
    cross_entropy,
    display_name,
    divergence,
    evaluate,
    fingerprint,
    fingerprints,
    loss,
    outputs,
    with_answers,
)


def problem(count: int = 37, seed: int = 0) -> tuple[nn.Module, Examples]:
    """A small network with BatchNorm and dropout in float64, and examples for it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        net(torch.randn(20, 5).double())  # random BatchNorm statistics
        return net, Examples(torch.randn(count, 5).double(), torch.randint(3, (count,)))


def test_values_worked_out_by_hand() -> None:
    # logits are the inputs: probabilities 3/4 and 1/4, then 1/2 and 1/2
    examples = Examples(torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]]), torch.tensor([1, 0]))
    found = evaluate(nn.Identity(), examples)
    assert found.loss == pytest.approx((math.log(4) + math.log(2)) / 2, rel=1e-6)
    assert found.accuracy == 0.5
    assert found.count == 2
    assert found.values is not None
    assert found.values.tolist() == [0.0, 1.0]
    assert evaluate(nn.Identity(), examples, metric=lambda given, targets: given.mean()).values is None  # a mean alone
    assert outputs(nn.Identity(), examples).argmax(1).tolist() == [0, 0]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 40), st.integers(1, 50))
def test_batching_is_invisible(count: int, batch: int) -> None:
    net, examples = problem(count)
    whole, parts = evaluate(net, examples, batch=count), evaluate(net, examples, batch=batch)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert parts.accuracy == whole.accuracy
    assert parts.values is not None
    assert whole.values is not None
    assert torch.equal(parts.values, whole.values)
    torch.testing.assert_close(outputs(net, examples, batch=batch), outputs(net, examples, batch=count), rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 7, 37])
def test_a_mean_and_a_value_for_each_example_are_the_same_loss(batch: int) -> None:
    net, examples = problem()

    def mean(given: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(given, targets)

    assert loss(net, examples, loss_fn=mean, batch=batch) == pytest.approx(loss(net, examples), rel=1e-12)


def test_small_losses_are_not_lost_beside_large_ones() -> None:
    # float32 sums would drop the ones: 2**24 + 1 == 2**24 there
    values = torch.ones(1001)
    values[0] = 2.0**24
    examples = Examples(values[:, None], values)
    found = loss(nn.Identity(), examples, loss_fn=lambda given, targets: given[:, 0], batch=100)
    assert found == (2**24 + 1000) / 1001


def test_stored_pixels_are_scaled() -> None:
    examples = Examples(torch.tensor([[10], [20]], dtype=torch.uint8), torch.zeros(2), Scaling(10.0, (1.0,), (0.5,)))
    assert outputs(nn.Identity(), examples).flatten().tolist() == [0.0, 2.0]


def test_modes_of_all_parts_are_restored_even_after_an_error() -> None:
    net, examples = problem()
    net.train()
    net[1].eval()  # a user's frozen BatchNorm
    before = [part.training for part in net.modules()]
    mean = net[1].running_mean.clone()
    evaluate(net, examples)
    assert [part.training for part in net.modules()] == before
    assert torch.equal(net[1].running_mean, mean)
    with pytest.raises(ZeroDivisionError):
        accuracy(net, examples, metric=lambda given, targets: 1 / 0)
    assert [part.training for part in net.modules()] == before
    assert torch.is_grad_enabled()


def test_no_gradients_are_recorded() -> None:
    net, examples = problem()
    assert not outputs(net, examples).requires_grad
    seen = []
    loss(net, examples, loss_fn=lambda given, targets: seen.append(given.requires_grad) or given.mean())
    assert seen == [False]
    with eval_mode(net):
        assert not net(examples.inputs).requires_grad


def test_the_users_random_state_is_untouched() -> None:
    net, examples = problem()
    state = torch.get_rng_state()
    evaluate(net, examples)
    assert torch.equal(torch.get_rng_state(), state)


def test_regression_with_a_loss_and_metric_of_ones_own() -> None:
    examples = Examples(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[1.0], [1.0], [1.0]]))
    found = evaluate(
        nn.Identity(),
        examples,
        loss_fn=lambda given, targets: (given - targets) ** 2,  # (n, 1): one value for each example
        metric=lambda given, targets: (given - targets).abs()[:, 0] < 2,
        batch=2,
    )
    assert found.loss == pytest.approx((0 + 1 + 9) / 3)
    assert found.accuracy == pytest.approx(2 / 3)


class TwoHeads(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"kind": x[:, :2], "size": x[:, 2]}


def test_several_outputs_and_targets() -> None:
    inputs = torch.tensor([[1.0, 0.0, 3.0], [0.0, 1.0, 5.0], [1.0, 0.0, 7.0]])
    examples = Examples(inputs, (torch.tensor([0, 1, 1]), torch.tensor([3.0, 4.0, 5.0])))
    found = evaluate(
        TwoHeads(),
        examples,
        loss_fn=lambda given, targets: (given["size"] - targets[1]).abs(),
        metric=lambda given, targets: correct(given["kind"], targets[0]),
        batch=2,
    )
    assert found.loss == pytest.approx((0 + 1 + 2) / 3)
    assert found.accuracy == pytest.approx(2 / 3)
    with pytest.raises(InvalidInput, match=r"cross-entropy needs a tensor of outputs, got a dict: give loss="):
        loss(TwoHeads(), examples)
    with pytest.raises(InvalidInput, match="give metric="):
        accuracy(TwoHeads(), examples)


def test_pixelwise_classes_are_averaged_over_each_example() -> None:
    # two 1×2 images of two classes: right in both pixels, right in one
    logits = torch.tensor([[[[9.0, 0.0]], [[0.0, 9.0]]], [[[9.0, 9.0]], [[0.0, 0.0]]]])
    examples = Examples(logits, torch.tensor([[[0, 1]], [[0, 1]]]))
    assert accuracy(nn.Identity(), examples, batch=1) == 0.75


def test_bad_measures_are_named() -> None:
    net, examples = problem()
    with pytest.raises(InvalidInput, match=r"shape \(2,\) for 37 examples"):
        loss(net, examples, loss_fn=lambda given, targets: torch.zeros(2))
    with pytest.raises(InvalidInput, match="no examples"):
        loss(net, problem(0)[1])
    with pytest.raises(InvalidInput, match="batch size 0"):
        loss(net, examples, batch=0)


def test_losses_may_be_infinite() -> None:
    examples = Examples(torch.tensor([[0.0], [1.0]]), torch.zeros(2))
    assert loss(nn.Identity(), examples, loss_fn=lambda given, targets: 1 / given[:, 0]) == math.inf


def test_label_smoothing_by_hand() -> None:
    # probabilities 3/4 and 1/4; smoothing 0.2 over two classes: 0.9 on the target, 0.1 on the other
    found = cross_entropy(torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([0]), label_smoothing=0.2)
    assert float(found) == pytest.approx(-0.9 * math.log(3 / 4) - 0.1 * math.log(1 / 4), rel=1e-6)


def test_a_module_moves_for_the_block_and_back() -> None:
    net = nn.Linear(2, 2)

    def fail_there() -> None:
        with on_device(net, "meta") as place:
            assert place.type == net.weight.device.type == "meta"
            net.to_empty(device="cpu")  # meta tensors hold no data to move back: this is the move of a real device
            raise KeyError

    with pytest.raises(KeyError):
        fail_there()
    assert net.weight.device.type == "cpu"
    weight = net.weight
    with on_device(net, None) as place:
        assert place.type == "cpu"
    assert net.weight is weight


def test_a_measure_that_gives_a_python_number_is_refused() -> None:
    def share(given: Tensor, wanted: Tensor) -> Any:
        return float((given.argmax(1) == wanted).float().mean())

    examples = Examples(torch.randn(6, 4), torch.zeros(6, dtype=torch.long))
    for measure in (evaluate, accuracy):
        with pytest.raises(InvalidInput, match=r"gave a float .*: wanted a tensor with one value for each example"):
            measure(nn.Linear(4, 3), examples, metric=share)


# ---- fingerprints of losses and metrics ----------------------------------------------------------------------------------


PAIRS: dict[str, tuple[Measure, Measure]] = {
    "instructions": (lambda o, t: o + t, lambda o, t: o - t),
    "constants": (lambda o, t: o.topk(1), lambda o, t: o.topk(5)),
    "names": (lambda o, t: o.argmax(1), lambda o, t: o.argmin(1)),
    "defaults": (lambda o, t, k=1: o.topk(k), lambda o, t, k=5: o.topk(k)),
    "keyword defaults": (lambda o, t, *, k=1: o.topk(k), lambda o, t, *, k=5: o.topk(k)),
    "what partial is given": (partial(cross_entropy, label_smoothing=0.0), partial(cross_entropy, label_smoothing=0.1)),
    "settings of a module": (nn.CrossEntropyLoss(reduction="none"), nn.CrossEntropyLoss(reduction="sum")),
    "functions": (correct, cross_entropy),
}


def top(k: int) -> Measure:
    return lambda o, t: (o.topk(k, 1).indices == t[:, None]).any(1)


class Top:
    def __init__(self, k: int) -> None:
        self.k, self.seen = k, [0]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.seen[0] += len(targets)
        return (outputs.topk(self.k, 1).indices == targets[:, None]).any(1)

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self(outputs, targets)


def may_resume(first: Measure, second: Measure) -> bool:
    """Whether a run that was started with the first may be resumed with the second."""
    return not changed({"metric": second}, {"metric": display_name(first)}, fingerprints({"metric": first}))


PAIRS |= {
    "what a closure holds": (top(1), top(5)),
    "settings of an object": (Top(1), Top(5)),
    "the object of a method": (Top(1).measure, Top(5).measure),
}


@pytest.mark.parametrize(("first", "second"), PAIRS.values(), ids=PAIRS)
def test_different_measures_have_different_fingerprints(first: Measure, second: Measure) -> None:
    assert fingerprint(first) != fingerprint(second)
    assert not may_resume(first, second)
    assert may_resume(first, first)
    assert may_resume(second, second)


@pytest.mark.parametrize("make", [lambda: top(3), lambda: Top(3), lambda: Top(3).measure, nn.CrossEntropyLoss])
def test_a_measure_made_again_has_the_same_fingerprint(make: Callable[[], Measure]) -> None:
    assert may_resume(make(), make())


def test_state_gathered_by_a_measure_does_not_change_its_fingerprint() -> None:
    used = Top(2)
    used(torch.randn(4, 10), torch.zeros(4, dtype=torch.long))
    assert used.seen == [4]
    assert may_resume(Top(2), used)


def test_a_measure_is_the_same_in_another_process_and_from_another_module() -> None:
    source = """
from secateurs.metrics import fingerprints
def metric(o, t): return o in {'a', 'b', 'c', 'd'}
found = [fingerprints({'metric': metric})['metric']]
metric.__module__ = 'mine'
found.append(fingerprints({'metric': metric})['metric'])
"""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    elsewhere = subprocess.run(
        [sys.executable, "-c", f"{source}print(*found)"],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    names: dict[str, Any] = {}
    exec(source, names)
    assert len(elsewhere) == 2
    assert len({*elsewhere, *names["found"]}) == 1


def test_another_python_compares_names_and_an_older_folder_nothing() -> None:
    kept = {**fingerprints({"metric": correct}), "python": "CPython 3.0.0"}
    names = {"metric": "accuracy"}
    assert changed({"metric": correct}, names, kept) == []
    assert changed({"metric": top(1)}, names, kept) == ["metric"]
    assert changed({"metric": top(1)}, names, {}) == []


def test_functions_of_torch_are_identified_by_name() -> None:
    def mse_loss(*given: Any) -> Tensor:
        raise AssertionError("a stand-in, never called")

    mse_loss.__module__, mse_loss.__qualname__ = "torch.nn.functional", "mse_loss"
    assert may_resume(nn.functional.mse_loss, mse_loss)  # as another version of torch may have it
    assert not may_resume(nn.functional.mse_loss, nn.functional.l1_loss)


# ---- divergence from a reference network ---------------------------------------------------------------------------------


def test_a_network_does_not_diverge_from_itself() -> None:
    torch.manual_seed(0)
    network, x = nn.Linear(5, 3).double(), torch.randn(20, 5).double()
    answered = with_answers(Examples(x, torch.zeros(20, dtype=torch.long)), network, batch=7)
    torch.testing.assert_close(divergence(network(x), answered.targets), torch.zeros(20).double(), rtol=0, atol=1e-14)


def test_divergence_by_hand() -> None:
    targets = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64)
    outputs = torch.tensor([[math.log(3.0), 0.0], [math.log(9.0), 0.0]], dtype=torch.float64)  # 3/4, 1/4 and 9/10, 1/10
    by_hand = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    torch.testing.assert_close(
        divergence(outputs, targets), torch.tensor([by_hand, 0.0], dtype=torch.float64), rtol=0, atol=1e-15
    )


def test_divergence_averages_pixels() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(2, 4, 3, 5).double(), torch.rand(2, 4, 3, 5).double().softmax(1)
    each = torch.stack([divergence(outputs[..., i, j], targets[..., i, j]) for i in range(3) for j in range(5)])
    torch.testing.assert_close(divergence(outputs, targets), each.mean(0))


def test_answers_that_are_no_logits_are_refused() -> None:
    with pytest.raises(InvalidInput, match="class logits"):
        with_answers(Examples(torch.randn(4, 3), torch.zeros(4)), nn.Flatten(0))
