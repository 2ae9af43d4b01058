"""Criteria: values worked out by hand on tiny layers, laws, and every criterion at every site of some networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import Net, assert_same_bits, random_keep, random_tensor, randomise_, traced, weights_of, with_few_blocks
from secateurs import Graph, Importance, Pruner, Recipe, Site, compact, find_site, find_sites, masked, trace
from secateurs.config import criterion_names
from secateurs.criteria import CRITERIA, CriterionContext, criterion, score_filters, user_function
from secateurs.criteria.filters import layers_behind
from secateurs.data import Examples
from secateurs.errors import InvalidInput, RecipeError
from secateurs.metrics import cross_entropy
from secateurs.models import build, example_input
from secateurs.scoring.evaluator import SiteEvaluator
from torture.runs import few_digits, perceptron

NOTHING = Examples(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long))  # norms of weights look at no data

SCORED = [name for name in criterion_names() if name not in ("ensemble", "obs", "portfolio")]


def coefs(name: str, graph: Graph, site: str, data: Examples = NOTHING, **options: Any) -> list[float]:
    found: list[float] = scored(name, graph, find_site(graph, site), data, **options).coef.tolist()
    return found


def scored(
    name: str,
    graph: Graph,
    site: Site,
    data: Examples | None = None,
    *,
    seed: int = 0,
    loss_fn: Any = cross_entropy,
    batch: int = 256,
) -> Importance:
    return score_filters(name, SiteEvaluator(graph, site, loss_fn, batch=batch), data, seed=seed)


def filled_(module: nn.Module, weight: list[Any], bias: list[float] | None = None) -> nn.Module:
    """In place: float64, with the given weights, filter by filter."""
    module.double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor(weight, dtype=torch.float64).view_as(module.weight))
        if module.bias is not None:
            module.bias.copy_(torch.tensor(bias or [9.0] * len(module.bias)))
    return module


def one_conv() -> Graph:
    """Three filters of two taps, with large biases and BatchNorm scales that must not count in norms of weights."""
    net = Net(
        lambda net, x: net.out(F.relu(net.norm(net.conv(x))).mean((2, 3))),
        conv=filled_(nn.Conv2d(1, 3, (1, 2)), [[3.0, -4.0], [0.0, 1.0], [6.0, 8.0]]),
        norm=filled_(nn.BatchNorm2d(3), [0.5, -2.0, 1.0], [1.0, 1.0, 1.0]),
        out=nn.Linear(3, 2).double(),
    )
    return trace(net.eval(), random_tensor(2, 1, 2, 3))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("l1", [7.0, 1.0, 14.0]),
        ("l2", [5.0, 1.0, 10.0]),
        # distances: 0-1 = |(3, -5)|, 0-2 = |(3, 12)|, 1-2 = |(6, 7)|
        ("fpgm", [34**0.5 + 153**0.5, 34**0.5 + 85**0.5, 153**0.5 + 85**0.5]),
        ("batchnorm", [0.5, 2.0, 1.0]),
    ],
)
def test_weights_by_hand(name: str, wanted: list[float]) -> None:
    assert coefs(name, one_conv(), "conv") == pytest.approx(wanted, rel=1e-14)


def test_only_the_coefficients_are_known() -> None:
    graph = one_conv()
    found = scored("l1", graph, find_site(graph, "conv"))
    assert isinstance(found, Importance)
    assert found.stderr.isnan().all()
    assert all(t.isnan() for t in (found.intercept, found.r2, found.r2_held_out, found.split_half))


def test_linear_neurons_by_hand() -> None:
    net = nn.Sequential(filled_(nn.Linear(2, 3), [[1, -1], [0.5, 0], [-3, 4]]), nn.ReLU(), nn.Linear(3, 1).double())
    graph = trace(net, random_tensor(2, 2))
    assert coefs("l1", graph, "0") == [2.0, 0.5, 7.0]
    assert coefs("l2", graph, "0") == pytest.approx([2**0.5, 0.5, 5.0])


def test_one_dimensional_filters_by_hand() -> None:
    conv = filled_(nn.Conv1d(2, 2, 2), [[[1, 2], [-3, 4]], [[0, 0], [0, -5]]])
    graph = trace(nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(6, 1).double()), random_tensor(2, 2, 4))
    assert coefs("l1", graph, "0") == [10.0, 5.0]


def test_transposed_filters_lie_along_the_second_axis_in_groups() -> None:
    """Weights (inputs, filters a group, taps): inputs 0 and 1 give filters 0 and 1, inputs 2 and 3 filters 2 and 3."""
    conv = filled_(nn.ConvTranspose1d(4, 4, 1, groups=2), [[1, 10], [2, 20], [3, 30], [4, 40]])
    graph = trace(nn.Sequential(conv, nn.ReLU(), nn.Conv1d(4, 1, 1).double()), random_tensor(2, 4, 3))
    assert coefs("l1", graph, "0") == [3.0, 30.0, 7.0, 70.0]


def test_a_site_fed_by_two_layers_counts_both() -> None:
    net = Net(
        lambda net, x: net.out(F.relu(net.norm(net.a(x)) + net.b(x))),
        a=filled_(nn.Conv1d(1, 2, 1, bias=False), [1, -2]),
        norm=filled_(nn.BatchNorm1d(2), [5, -7], [0, 0]),
        b=filled_(nn.Conv1d(1, 2, 1), [10, 20]),
        out=nn.Conv1d(2, 1, 1).double(),
    )
    graph = trace(net.eval(), random_tensor(2, 1, 3))
    (site,) = find_sites(graph, "after")
    assert {part.name for part in layers_behind(graph, site)} == {"a", "b"}
    assert scored("l1", graph, site).coef.tolist() == [11.0, 22.0]
    assert scored("fpgm", graph, site).coef.tolist() == [3.0 + 10.0] * 2
    assert scored("batchnorm", graph, site).coef.tolist() == [5.0, 7.0]


def test_an_identity_shortcut_brings_no_layer_in() -> None:
    """The layers before it keep their filters when the channel behind the sum goes."""
    graph = trace(build("resnet8").eval(), example_input("resnet8"))
    second = graph.module.get_submodule("layer1.0.conv2").weight
    assert isinstance(second, Tensor)
    wanted = second.detach().double().abs().sum((1, 2, 3))
    torch.testing.assert_close(scored("l1", graph, find_site(graph, "layer1.0.add")).coef, wanted)


def test_a_depthwise_filter_counts_with_the_one_before_it() -> None:
    net = nn.Sequential(
        filled_(nn.Conv1d(1, 2, 1, bias=False), [1, -2]),
        nn.ReLU(),
        filled_(nn.Conv1d(2, 2, 1, groups=2, bias=False), [30, 40]),
        nn.ReLU(),
        nn.Conv1d(2, 1, 1).double(),
    )
    graph = trace(net, random_tensor(2, 1, 3))
    (site,) = find_sites(graph)
    assert set(site.layers) == {"0", "2"}
    assert scored("l1", graph, site).coef.tolist() == [31.0, 42.0]


def test_norms_follow_the_channels_that_a_cut_left() -> None:
    """Ranking the narrow network is ranking what is left of the wide one, for filters that read no cut channel."""
    graph = one_conv()
    smaller = compact(graph, {"conv": torch.tensor([True, False, True])})
    assert coefs("l1", smaller, "conv") == [7.0, 14.0]
    assert coefs("batchnorm", smaller, "conv") == [0.5, 1.0]


def test_fpgm_finds_what_lies_nearest_to_the_geometric_median() -> None:
    """Weiszfeld's iteration finds the point itself; its sum of distances is below every filter's, and ranking by the
    sum puts the filter first that is the median where filters are spread evenly around one of them."""
    generator = np.random.default_rng(0)
    around = generator.normal(size=(6, 4))
    rows = np.concatenate([around, -around, np.zeros((1, 4))]) + generator.normal(size=4)
    point = rows.mean(0) + 1e-3
    for _ in range(500):
        near = 1 / np.maximum(np.linalg.norm(rows - point, axis=1), 1e-12)
        point = (near[:, None] * rows).sum(0) / near.sum()
    net = nn.Sequential(filled_(nn.Linear(4, 13), rows.tolist()), nn.ReLU(), nn.Linear(13, 1).double())
    found = np.array(coefs("fpgm", trace(net, random_tensor(2, 4)), "0"))
    brute = np.array([sum(np.sqrt(((a - b) ** 2).sum()) for b in rows) for a in rows])
    np.testing.assert_allclose(found, brute, rtol=1e-12)
    assert found.argmin() == 12
    np.testing.assert_allclose(rows[12], point, atol=1e-6)
    assert found.min() >= np.linalg.norm(rows - point, axis=1).sum() - 1e-9


def two_neurons(count: int = 5) -> tuple[Graph, Examples]:
    """out = 2 relu(x) - 3 relu(2x) + relu(3x), and a squared error: simple enough for slopes by hand."""
    net = nn.Sequential(
        filled_(nn.Linear(1, 3, bias=False), [1, 2, 3]), nn.ReLU(), filled_(nn.Linear(3, 1, bias=False), [2, -3, 1])
    )
    return trace(net, random_tensor(2, 1)), Examples(random_tensor(count, 1), random_tensor(count, 1, seed=1))


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).sum(1)


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_taylor_by_hand(batch: int) -> None:
    graph, data = two_neurons()
    x, y = data.inputs.numpy(), data.targets.numpy()  # type: ignore[union-attr]
    hidden = np.maximum(x * [1, 2, 3], 0)
    slopes = 2 * (hidden @ [[2.0], [-3.0], [1.0]] - y) * [2, -3, 1]
    wanted = np.abs(hidden * slopes).mean(0)
    assert coefs("taylor", graph, "0", data, loss_fn=squared_error, batch=batch) == pytest.approx(wanted, rel=1e-12)


def test_taylor_of_a_mean_loss_is_that_of_its_examples() -> None:
    graph, data = two_neurons()
    mean = coefs("taylor", graph, "0", data, loss_fn=lambda o, t: squared_error(o, t).mean(), batch=5)
    assert mean == pytest.approx(coefs("taylor", graph, "0", data, loss_fn=squared_error), rel=1e-12)


def test_taylor_is_the_change_of_loss_when_a_channel_shrinks_a_little() -> None:
    """Finite differences over space and behind a convolution: (loss with the channel scaled by 1 ± h) / 2h, an image each."""
    graph = traced(build("cnn1d", width=3, length=16), random_tensor(2, 1, 16))
    site = find_site(graph, "conv2")
    data = Examples(random_tensor(4, 1, 16), torch.tensor([1, 0, 3, 2]))
    node = next(n for n in graph.module.graph.nodes if n.name == site.node)

    def losses(channel: int, scale: float) -> Tensor:
        scaled = torch.ones(site.channels, 1, dtype=torch.float64)
        scaled[channel] = scale

        class Scaling(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                result = super().run_node(n)
                return result * scaled if n is node else result

        with torch.no_grad():
            return F.cross_entropy(Scaling(graph.module).run(data.inputs), data.targets, reduction="none")  # type: ignore[arg-type]

    step = 1e-5
    wanted = [float(((losses(c, 1 + step) - losses(c, 1 - step)) / (2 * step)).abs().mean()) for c in range(site.channels)]
    assert coefs("taylor", graph, "conv2", data, batch=3) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_taylor_needs_examples() -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        coefs("taylor", one_conv(), "conv")


def test_leave_one_out_is_the_loss_without_one_filter() -> None:
    graph, data = two_neurons()
    wanted = []
    with torch.no_grad():
        for mask in (torch.arange(3) != c for c in range(3)):
            without = squared_error(masked(graph, {"0": mask})(data.inputs), data.targets)  # type: ignore[arg-type]
            wanted.append(float((without - squared_error(graph(data.inputs), data.targets)).mean()))  # type: ignore[arg-type]
    assert coefs("leave-one-out", graph, "0", data, loss_fn=squared_error) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", ["l1", "l2", "taylor", "leave-one-out"])
def test_a_useless_filter_comes_first(name: str) -> None:
    """Its weights are zero, so it never changes the output."""
    graph = traced(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)), random_tensor(2, 3))
    first: Any = graph.module.get_submodule("0")
    with torch.no_grad():
        first.weight[2] = 0
        first.bias[2] = 0
    data = Examples(random_tensor(20, 3), torch.arange(20) % 4)
    found = coefs(name, graph, "0", data)
    assert found[2] == pytest.approx(0, abs=1e-12)
    if name != "leave-one-out":  # a filter that does harm is worth less than one that does nothing
        assert min(found) == found[2]


def test_random_scores_depend_on_seed_and_site_alone() -> None:
    graph = trace(build("resnet8").eval(), example_input("resnet8"))
    torch.manual_seed(0)
    one = coefs("random", graph, "conv1", seed=1)
    torch.manual_seed(5)
    assert coefs("random", graph, "conv1", seed=1) == one
    assert coefs("random", graph, "conv1", seed=2) != one
    assert coefs("random", graph, "layer1.0.conv1", seed=1) != one
    assert all(0 <= value < 1 for value in one)


@pytest.mark.parametrize("model", ["resnet8", "mobilenet-small", "cnn1d"])
def test_every_criterion_at_every_site(model: str) -> None:
    graph = trace(randomise_(with_few_blocks(model)), example_input(model).double())
    graph.module.train()
    weights = weights_of(graph.module)
    shape = graph.example[0].shape[1:]
    data = Examples(random_tensor(3, *shape), torch.tensor([0, 1, 2]))
    for site in {**{s.name: s for s in find_sites(graph)}, **{s.name: s for s in find_sites(graph, "after")}}.values():
        for name in SCORED:
            if name.startswith("maxplus"):
                with pytest.raises(InvalidInput, match="no max-plus layer"):
                    scored(name, graph, site, data)
                continue
            if name == "batchnorm" and site.name.split(".")[-1] in ("hidden", "reduce"):
                with pytest.raises(InvalidInput, match="no BatchNorm"):
                    scored(name, graph, site, data)
                continue
            coef = scored(name, graph, site, data, seed=1, batch=2).coef
            assert coef.shape == (site.channels,)
            assert coef.dtype == torch.float64
            assert coef.isfinite().all()
            assert coef.unique().numel() > 1, (name, site.name)
    assert all(part.training for part in graph.module.modules())
    assert_same_bits(weights, graph.module.state_dict())
    assert all(p.grad is None for p in graph.module.parameters())


def test_every_criterion_on_a_network_cut_before() -> None:
    graph = trace(randomise_(build("resnet8")), example_input("resnet8").double())
    smaller = compact(graph, random_keep(list(find_sites(graph, "after")), seed=3))
    data = Examples(random_tensor(2, 3, 32, 32), torch.tensor([0, 1]))
    for site in find_sites(smaller, "after"):
        for name in (name for name in SCORED if not name.startswith("maxplus")):
            assert scored(name, smaller, site, data).coef.isfinite().all()


def test_an_unknown_criterion_gets_a_suggestion() -> None:
    with pytest.raises(InvalidInput, match=r"'taylr'.*Did you mean 'taylor'"):
        scored("taylr", one_conv(), find_site(one_conv(), "conv"))


@pytest.mark.usefixtures("own_criteria")
def test_a_registered_function_is_a_criterion() -> None:
    with pytest.raises(RecipeError, match="by number"):
        Recipe.fast(criterion="by number")

    @criterion("by number")
    def by_number(context: CriterionContext) -> Tensor:
        return torch.arange(context.site.channels).flip(0)

    assert coefs("by number", one_conv(), "conv") == [2.0, 1.0, 0.0]
    with pytest.raises(InvalidInput, match="'by number' is registered already"):
        criterion("by number")(by_number)
    # recipes may name it: a run removes the filters that it scores lowest, the last ones
    recipe = Recipe.fast(criterion="by number", max_drop=1.0, confidence=0, sites=("layers.1",), largest_share=0.5)
    pruner = Pruner(perceptron(), few_digits(384), recipe=recipe)
    (step,) = pruner
    assert step.removed == (11, 10, 9, 8, 7, 6)
    # the recipe of a run names the function, so that a process which defines it again can resume
    assert pruner.recipe.criterion.endswith(".by_number")
    assert Pruner(perceptron(), few_digits(384), recipe=pruner.recipe).recipe == pruner.recipe


def test_a_function_without_a_module_is_a_criterion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secateurs.criteria._OWN", {})
    names: dict[str, Any] = {"torch": torch}
    exec("def alone(graph, site, data): return -torch.arange(site.channels)", names)
    recipe = Recipe.fast(max_drop=1.0, confidence=0, sites=("layers.1",), largest_share=0.5)
    pruner = Pruner(perceptron(), few_digits(384), recipe=recipe, criterion=names["alone"])
    assert pruner.recipe.criterion == "__main__:alone"
    (step,) = pruner
    assert (step.criterion, step.removed) == ("alone", (11, 10, 9, 8, 7, 6))


def test_every_criterion_that_a_recipe_may_name_exists() -> None:
    assert [name for name in criterion_names() if user_function(name) is not None] == []
    assert {*CRITERIA, "ensemble", "obs", "portfolio"} == set(criterion_names())
