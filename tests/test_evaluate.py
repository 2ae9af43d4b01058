"""Evaluation: values by hand, batching invisible, the module given back as it was lent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from secateurs._util.modules import eval_mode, on_device
from secateurs.data import Examples, Scaling
from secateurs.errors import InvalidInput
from secateurs.metrics import accuracy, correct, cross_entropy, evaluate, loss, outputs, predictions


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
    assert predictions(nn.Identity(), examples).tolist() == [0, 0]


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


def test_every_part_gets_its_own_mode_back_even_after_an_error() -> None:
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
    with pytest.raises(InvalidInput, match=r"cross-entropy needs a tensor of outputs, got a dict: give loss_fn="):
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
