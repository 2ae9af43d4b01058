"""Training by feature maps: which are compared, their error by hand, its gradient, and a training that survives a kill."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from small import seeded_net
from torch import Tensor, nn

from nets import assert_same_bits, randomise_, seeded, weights_of
from secateurs import Graph, compact, find_sites, prune, trace
from secateurs.config import Recipe, TrainSettings
from secateurs.data import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.features import FeaturePairs, paired_features
from secateurs.graph.masking import copied
from secateurs.models import build
from secateurs.training import TrainState, train_
from secateurs.training.objective import objective_for
from secateurs_lab.methods import Budget, Task, method
from torture.runs import few_digits, perceptron

ASKED = TrainSettings(epochs=2, batch=6, lr=0.01, distill=1.0, temperature=4.0, features=3.0)


def images(count: int = 20, dtype: torch.dtype = torch.float32) -> Examples:
    generator = seeded(0)
    return Examples(
        torch.randn(count, 3, 8, 8, generator=generator, dtype=dtype), torch.randint(10, (count,), generator=generator)
    )


def resnet(dtype: torch.dtype = torch.float32) -> Graph:
    return trace(randomise_(build("resnet8"), 0).to(dtype).eval(), torch.randn(2, 3, 8, 8, dtype=dtype))


def cut(graph: Graph, shortcut: Any = "before", share: float = 0.4) -> Graph:
    masks = {}
    for number, site in enumerate(find_sites(graph, shortcut)):
        masks[site.name] = torch.rand(site.channels, generator=seeded(number)) > share
        masks[site.name][0] = True
    return compact(graph, masks, verify=False)


def pairs_of(graph: Graph, original: Graph) -> FeaturePairs:
    found = paired_features(graph, original)
    assert found is not None
    return found


def test_the_error_by_hand() -> None:
    """No sums: the first layer is compared behind its ReLU, in the two filters that are left; the output is none of them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    graph = trace(model, torch.randn(2, 4).double())
    smaller = compact(graph, {"0": torch.tensor([True, False, True])})
    with torch.no_grad():
        smaller.module.get_parameter("0.weight").mul_(1.5)
    x = torch.randn(60, 4).double()
    pairs = pairs_of(smaller, graph)
    (own, outputs), (wanted, answers) = pairs.ours(x), pairs.theirs(x)
    target = model[:2](x)[:, [0, 2]]
    expected = (smaller.module.get_submodule("0")(x).relu() - target).square().sum() / target.square().sum()
    torch.testing.assert_close(pairs.error([own], [wanted]), expected)
    torch.testing.assert_close(outputs, smaller(x))
    torch.testing.assert_close(answers, model(x))


@pytest.mark.parametrize("shortcut", ["before", "after", "stream"])
def test_places_are_the_ends_of_blocks_and_a_network_that_lost_nothing_has_no_error(shortcut: Any) -> None:
    """Filters that give zero are removed: what is left computes the same at every place, whichever channels it has."""
    model = randomise_(build("resnet8"), 0).double().eval()
    graph, masks = trace(model, torch.randn(2, 3, 8, 8).double()), dict[str, Tensor]()
    for number, site in enumerate(find_sites(graph, shortcut)):
        masks[site.name] = torch.rand(site.channels, generator=seeded(number)) > 0.4
        masks[site.name][0] = True
    smaller = compact(graph, masks, verify=False)
    pairs, x = pairs_of(smaller, graph), torch.randn(3, 3, 8, 8).double()
    assert len(pairs.kept) == 3  # resnet8 has three blocks
    *own, outputs = pairs.ours(x)
    torch.testing.assert_close(outputs, smaller(x))
    for one, other, (positions, axis) in zip(own, pairs.theirs(x), pairs.kept, strict=False):
        assert one.shape[axis] == (other.shape[axis] if positions is None else len(positions))
    twin = pairs_of(copied(graph), graph)
    *own, _ = twin.ours(x)
    *wanted, _ = twin.theirs(x)
    assert float(twin.error(own, wanted).detach()) == 0


def test_gradients_equal_finite_differences() -> None:
    original = resnet(torch.float64)
    smaller = cut(original)
    pairs, data = pairs_of(smaller, original), images(4, torch.float64)
    smaller.module.eval()
    settings = replace(ASKED, distill=0.7)
    objective = objective_for(settings, loss_fn=None, teacher=original.module, pairs=pairs)
    x, y = data.batch(slice(0, 4))

    def value() -> Tensor:
        return objective((x,), pairs.ours(x), y)

    value().backward()  # type: ignore[no-untyped-call]
    parameters = dict(smaller.module.named_parameters())
    for name in ("conv1.weight", "layer2.0.conv2.weight", "layer3.0.bn1.weight", "linear.bias"):
        weight = parameters[name]
        assert weight.grad is not None
        for place in (0, weight.numel() // 2):
            slopes = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    weight.view(-1)[place] += step
                    slopes.append(float(value()))
                    weight.view(-1)[place] -= step
            slope = (slopes[0] - slopes[1]) / 2e-6
            assert float(weight.grad.view(-1)[place]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_the_weight_counts_and_features_come_nearer() -> None:
    original = resnet()
    before, after = dict[float, float](), dict[float, float]()
    for weight in (0.0, 30.0):
        smaller = cut(original)
        pairs, (x, _) = pairs_of(smaller, original), images().batch(slice(0, 20))

        def error(smaller: Graph = smaller, pairs: FeaturePairs = pairs, x: Tensor = x) -> float:
            smaller.module.eval()
            with torch.no_grad():
                return float(pairs.error(pairs.ours(x)[:-1], pairs.theirs(x)[:-1]))

        before[weight] = error()
        asked = replace(ASKED, epochs=12, lr=0.02, features=weight)
        train_(smaller.module, images(), asked, teacher=original.module, features=partial(paired_features, smaller, original))
        after[weight] = error()
    assert before[0.0] == before[30.0]
    assert after[30.0] < 0.5 * after[0.0]
    assert after[30.0] < 0.5 * before[30.0]


def test_a_killed_training_ends_with_the_same_bits() -> None:
    original, states = resnet(), list[TrainState]()
    asked = replace(ASKED, epochs=3, average=0.8, channels_last=True)

    def keep(state: TrainState) -> None:
        states.append(TrainState(load(save(state.tensors)), json.loads(json.dumps(state.meta))))

    def trained(**options: Any) -> Graph:
        smaller = cut(original)
        features = partial(paired_features, smaller, original)
        train_(smaller.module, images(), asked, teacher=original.module, features=features, **options)
        return smaller

    known = weights_of(original.module)
    whole = trained(save=keep)
    assert len(states) == 3
    for state in states[:2]:
        assert_same_bits(weights_of(trained(resume=state).module), weights_of(whole.module))
    assert_same_bits(weights_of(original.module), known)
    assert not original.module.training


class Dictionary(nn.Module):
    """Gives more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(x)}


def test_without_feature_maps_outputs_alone_are_compared_and_that_is_said() -> None:
    for net in (Dictionary(), nn.Linear(4, 3)):
        graph = trace(seeded_net(lambda net=net: copy.deepcopy(net)).eval(), torch.randn(2, 4))
        assert paired_features(graph, graph) is None
        data = Examples(torch.randn(12, 4, generator=seeded(0)), torch.arange(12) % 3)
        ends = []
        for weight in (0.0, 3.0):
            student = copied(graph)
            with torch.no_grad():
                next(student.module.parameters()).mul_(0.5)
            history = train_(
                *(student.module, data, replace(ASKED, features=weight)),
                teacher=graph.module,
                features=partial(paired_features, student, graph),
            )
            ends.append(weights_of(student.module))
        assert history.note == (
            "feature maps are compared in networks that give one tensor, behind sums or layers: here outputs alone are"
        )
        assert_same_bits(*ends)


class Ensemble(nn.Module):
    """Two branches, whose sum is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x)


def test_where_the_only_sum_is_the_output_layers_are_compared() -> None:
    graph = trace(seeded_net(Ensemble).eval(), torch.randn(2, 4))
    # two layers of each branch: behind the ReLU of the first, and the second
    assert len(pairs_of(cut(graph), graph).kept) == 4


def test_features_of_another_network_than_the_one_trained_are_refused() -> None:
    graph = resnet()
    small, other = cut(graph), cut(graph)
    for pair, message in (
        (partial(paired_features, other, graph), "features pair another network than the one that is trained"),
        (partial(paired_features, small, small), "features pair the network with itself"),
    ):
        with pytest.raises(InvalidInput, match=message):
            train_(small.module, images(), ASKED, teacher=graph.module, features=pair)


def test_maps_whose_energy_exceeds_half_precision_have_the_error_of_full_precision() -> None:
    graph = resnet()
    pairs, x = pairs_of(cut(graph), graph), images().inputs
    with torch.no_grad():
        found = [[*each(x)][:-1] for each in (pairs.ours, pairs.theirs)]
    found = [[100 / part.abs().max() * part for part in parts] for parts in found]  # squares add up to more than 65,504
    halves = [[part.half() for part in parts] for parts in found]
    assert all(float(part.square().sum()) > 65_504 for part in found[1])
    assert float(pairs.error(*halves)) == pytest.approx(float(pairs.error(*found)), rel=1e-2)


def test_settings_and_arguments_that_are_missing_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"features = 2 with distill = 0: feature maps are a teacher's"):
        TrainSettings(features=2.0)
    graph = resnet()
    with pytest.raises(InvalidInput, match=r"features = 3 needs to know which feature maps are compared"):
        train_(copied(graph).module, images(), ASKED, teacher=graph.module)


def test_every_method_of_a_comparison_gets_them() -> None:
    data = few_digits(60)
    graph = trace(perceptron(), data.train.batch(slice(0, 2)).args)
    with_them, without = (
        method("l1:uniform")(Task(graph, data, 0.3, Budget("b", after=replace(ASKED, features=weight))))
        for weight in (30.0, 0.0)
    )
    one, other = weights_of(with_them.graph.module), weights_of(without.graph.module)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert with_them.trained == without.trained


def test_a_run_trains_by_them() -> None:
    data = few_digits(60)
    results = [
        prune(
            *(perceptron(), data.train, data.search),
            recipe=Recipe.fast(target_macs=0.3, confidence=0.0, retrain=replace(ASKED, features=weight), keep_best=False),
        )
        for weight in (30.0, 0.0)
    ]
    one, other = (weights_of(result.model) for result in results)
    assert any(not torch.equal(one[name], other[name]) for name in one)
