"""Whatever is wrong with what a user gives: the error says where, what it got, what it wanted, and what to do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import Net, assert_compact_is_masked, assert_same_bits, random_tensor, randomise_, run, seeded, traced
from secateurs import Graph, compact, find_sites, masked, trace, verify
from secateurs.errors import InvalidInput, InvalidMask, NonFinite, NotEqual, SecateursError, UnknownSite, Untraceable

X = random_tensor(2, 3, 8, 8)


def chain(**changes: nn.Module) -> Net:
    parts = {"a": nn.Conv2d(3, 6, 3), "n": nn.BatchNorm2d(6), "b": nn.Conv2d(6, 2, 1)} | changes
    return Net(lambda net, x: net.b(F.relu(net.n(net.a(x)))), **parts)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return traced(chain(), X)


# ---- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [masked, compact, verify])
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(6), "mask of site 'a': got torch.float32, wanted a bool tensor, True = kept. Use mask.bool()"),
        (torch.ones(6, dtype=torch.long), "got torch.int64, wanted a bool tensor"),
        ([True] * 6, "got list, wanted a bool tensor"),
        (None, "got NoneType, wanted a bool tensor"),
        (torch.ones(5, dtype=torch.bool), r"got shape \(5,\), wanted \(6,\), one value for each channel"),
        (torch.ones(7, dtype=torch.bool), r"got shape \(7,\), wanted \(6,\)"),
        (torch.ones(1, 6, dtype=torch.bool), r"got shape \(1, 6\), wanted \(6,\)"),
        (torch.tensor(True), r"got shape \(\), wanted \(6,\)"),
    ],
)
def test_wrong_masks(graph: Graph, use: Callable[..., Any], mask: Any, message: str) -> None:
    with pytest.raises(InvalidMask, match=message):
        use(graph, {"a": mask})


def test_a_mask_of_the_width_before_an_earlier_cut(graph: Graph) -> None:
    smaller = compact(graph, {"a": torch.arange(6) > 1})
    with pytest.raises(InvalidMask, match=r"wanted \(4,\).*An earlier cut may have narrowed it: look it up again"):
        compact(smaller, {"a": torch.arange(6) > 1})


@pytest.mark.parametrize("use", [masked, compact, verify])
def test_unknown_sites(graph: Graph, use: Callable[..., Any]) -> None:
    keep = torch.ones(6, dtype=torch.bool)
    with pytest.raises(UnknownSite, match=r"no site 'layer1' in this graph. Known: 'a'\. find_sites"):
        use(graph, {"layer1": keep})
    with pytest.raises(UnknownSite, match="'b' is not a site: it is the network's output"):
        use(graph, {"b": keep})
    with pytest.raises(UnknownSite, match="no site 'n'"):
        use(graph, {"n": keep})


def test_the_nearest_names_are_suggested() -> None:
    net = Net(
        lambda net, x: net.out(F.relu(net.conv_second(F.relu(net.conv_first(x))))),
        conv_first=nn.Conv2d(3, 6, 3),
        conv_second=nn.Conv2d(6, 6, 3),
        out=nn.Conv2d(6, 2, 1),
    )
    with pytest.raises(UnknownSite, match="Did you mean 'conv_first'"):
        masked(traced(net, X), {"conv_frist": torch.ones(6, dtype=torch.bool)})


def test_one_site_given_twice(graph: Graph) -> None:
    site = find_sites(graph)[0]
    with pytest.raises(InvalidInput, match=r"'a'.*twice"):
        compact(graph, {site: torch.arange(6) > 1, "a": torch.arange(6) > 2})


def test_a_site_that_was_folded_away() -> None:
    net = Net(
        lambda net, x: net.d(F.relu((y := F.relu(net.a(x))) + net.c(F.relu(net.b(y))))),
        a=nn.Conv2d(3, 6, 3),
        b=nn.Conv2d(6, 4, 1),
        c=nn.Conv2d(4, 6, 1),
        d=nn.Conv2d(6, 2, 1),
    )
    folded = compact(traced(net, X), {"b": torch.zeros(4, dtype=torch.bool)})
    with pytest.raises(UnknownSite, match="site 'b' is gone: an earlier cut folded its branch away"):
        compact(folded, {"b": torch.ones(4, dtype=torch.bool)})


def test_cuts_of_no_filters_change_nothing(graph: Graph) -> None:
    for keep in ({}, {"a": torch.ones(6, dtype=torch.bool)}):
        same = assert_compact_is_masked(graph, keep)
        assert same.plan == graph.plan
        assert {k: v.shape for k, v in same.module.state_dict().items()} == {
            k: v.shape for k, v in graph.module.state_dict().items()
        }
        assert verify(graph, keep).difference == 0
    with torch.no_grad():  # and nothing is shared with the graph it came from
        same.module.a.weight.zero_()
    assert graph.module.a.weight.any()


# ---- weights, devices, kinds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["a.weight", "n.running_var", "b.bias"])
def test_weights_that_are_not_finite(name: str, value: float) -> None:
    net = randomise_(chain())
    with torch.no_grad():
        dict([*net.named_parameters(), *net.named_buffers()])[name].view(-1)[0] = value
    with pytest.raises(NonFinite, match=f"'{name}' holds NaN or infinite values.*Load finite weights"):
        trace(net, X)


def test_outputs_that_are_not_finite() -> None:
    with pytest.raises(NonFinite, match="Net gives NaN or infinite outputs for the example input"):
        trace(Net(lambda net, x: net.a(x) / 0, a=nn.Conv2d(3, 2, 1)).double(), X)


def test_another_device() -> None:
    with pytest.raises(InvalidInput, match=r"example input is on 'cpu' but the model is on 'meta'.*example_input.to"):
        trace(chain().double().to("meta"), X)
    with pytest.raises(InvalidInput, match="example input is on 'meta' but the model is on 'cpu'"):
        trace(chain().double(), X.to("meta"))


def test_on_the_meta_device_shapes_are_cut_without_weights() -> None:
    graph = trace(chain().to("meta").eval(), torch.empty(2, 3, 8, 8, device="meta"))
    smaller = compact(graph, {"a": torch.arange(6) > 1})
    assert smaller.module.a.weight.is_meta
    assert smaller.module.a.out_channels == smaller.module.b.in_channels == 4
    assert smaller.module(torch.empty(5, 3, 8, 8, device="meta")).shape == (5, 2, 6, 6)


def test_another_dtype() -> None:
    with pytest.raises(InvalidInput, match=r"example input is torch.float64 but the model is torch.float32.*Convert one"):
        trace(chain(), X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_cut_and_verified_in_float64(dtype: torch.dtype) -> None:
    graph = trace(randomise_(chain()).to(dtype), X.to(dtype))
    keep = {"a": torch.arange(6) > 1}
    assert verify(graph, keep).difference < 1e-12
    assert compact(graph, keep).module.a.weight.dtype == dtype


@pytest.mark.parametrize("move", [lambda m: m.float(), lambda m: m.half(), lambda m: m.to("meta")])
def test_a_network_that_was_moved_after_tracing(move: Callable[[nn.Module], nn.Module]) -> None:
    """As fine-tuning on another device does between two cuts."""
    graph = traced(chain(), X)
    weight = move(graph.module).a.weight
    smaller = compact(graph, {"a": torch.arange(6) > 1}).module.a.weight
    assert (smaller.dtype, smaller.device) == (weight.dtype, weight.device)
    assert smaller.shape[0] == 4


@pytest.mark.parametrize("example", [None, [X], {"x": 2}, {}, (), 3, (X, 2)])
def test_examples_that_are_none(example: Any) -> None:
    with pytest.raises(InvalidInput, match=r"example_input: got .*, wanted a tensor, or a tuple of tensors"):
        trace(chain().double(), example)


def test_an_example_within_a_tuple_that_the_model_does_not_take() -> None:
    with pytest.raises(InvalidInput, match="Net does not run on the example input"):
        trace(chain().double(), ((X,),))


def test_an_example_that_does_not_fit() -> None:
    with pytest.raises(
        InvalidInput, match=r"Net does not run on the example input of shape \(2, 5, 8, 8\).*Pass an input that"
    ):
        trace(chain().double(), random_tensor(2, 5, 8, 8))


def test_an_example_that_was_computed() -> None:
    """It requires gradients, and is no leaf: copied, not complained about."""
    example = random_tensor(2, 3, 8, 8).requires_grad_() * 2
    assert not trace(randomise_(chain()), example).example[0].requires_grad


@pytest.mark.parametrize("model", [nn.Conv2d, "resnet20", None, lambda x: x])
def test_models_that_are_none(model: Any) -> None:
    with pytest.raises(InvalidInput, match=r"model: got \w+, wanted a torch.nn.Module \(an instance, not a class\)"):
        trace(model, X)


def test_lazy_layers_that_have_no_weights_yet() -> None:
    with pytest.raises(InvalidInput, match=r"(?i)lazy|initiali[sz]ed"):
        trace(chain(a=nn.LazyConv2d(6, 3)), torch.randn(2, 3, 8, 8, generator=seeded(0)))


# ---- train mode -------------------------------------------------------------------------------------------------------


def test_models_in_train_mode_are_traced_and_modes_kept() -> None:
    model = randomise_(chain()).train()
    model.n.eval()  # a frozen BatchNorm
    state = copy.deepcopy(model.state_dict())
    graph = trace(model, X)
    smaller = compact(graph, {"a": torch.arange(6) > 1})
    assert verify(graph, {"a": torch.arange(6) > 1}).difference < 1e-12
    for module in (model, graph.module, smaller.module, masked(graph, {"a": torch.arange(6) > 1})):
        assert module.training
        assert module.a.training
        assert not module.n.training
    assert_same_bits(model.state_dict(), state)
    assert_same_bits(graph.module.state_dict(), state)


class OtherPath(nn.Module):
    """Gives a second output while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.a(x))
        return (self.b(y), self.aux(y)) if self.training else self.b(y)


def test_a_model_that_takes_another_path_in_train_mode() -> None:
    model = randomise_(OtherPath())
    assert_compact_is_masked(trace(model, X), {"a": torch.arange(6) > 1})
    with pytest.raises(Untraceable, match=r"in train mode.*another path.*call model.eval\(\) before trace"):
        trace(model.train(), X)
    assert model.training


# ---- what cannot be followed ------------------------------------------------------------------------------------------


class Dynamic(nn.Module):
    """Decides by the values of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line that the error names
            return x
        return -x


def test_dynamic_control_flow_names_the_users_line() -> None:
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("error names"))
    net = Net(lambda net, x: net.b(net.own(net.a(x))), a=nn.Conv2d(3, 6, 3), own=Dynamic(), b=nn.Conv2d(6, 2, 1))
    message = rf'torch.fx cannot follow Net: line {line} of .*{Path(__file__).name}, in forward: "if x.sum\(\) > 0:.*leaves=\['
    with pytest.raises(Untraceable, match=message):
        trace(randomise_(net), X)
    graph = trace(net, X, leaves=["own"])
    assert [u.name for u in find_sites(graph).unprunable] == ["a", "b"]
    assert trace(net, X, leaves=[Dynamic]).module.own is not net.own


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x: net.a(x[: int(x.sum())]),
        lambda net, x: list(net.a(x)),
        lambda net, x: net.a(x) if bool((x > 0).all()) else net.a(-x),
        lambda net, x: net.a(x) * float(x.mean()),
        lambda net, x: torch.tensor([len(x)]) * net.a(x),
        lambda net, x: net.absent(x),
    ],
)
def test_other_things_that_cannot_be_traced(body: Callable[..., Any]) -> None:
    with pytest.raises(SecateursError, match=r"cannot follow Net|does not run on the example input"):
        trace(Net(body, a=nn.Conv2d(3, 2, 1)).double().eval(), X)


def test_writing_into_a_tensor() -> None:
    def by_index(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        y[:, 0] = 0
        return net.b(y)

    def by_function(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        torch.mul(y, 2, out=y)
        return net.b(y)

    for body, message in (
        (by_index, r'in by_index: "y\[:, 0\] = 0" .*Rewrite that line, or mark the submodule.*leaves='),
        (by_function, "writes into a tensor in place.*torch.cat or torch.where.*leaves="),
    ):
        net = Net(body, a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(6, 2, 1)).double().requires_grad_(False)
        with pytest.raises(Untraceable, match=message):
            trace(net, X, engine="fx")
        assert torch.equal(trace(net, X).module(X), net(X))  # the other engines follow it


def test_changes_behind_a_view_and_chance() -> None:
    def behind_a_view(net: Net, x: Tensor) -> Tensor:
        y = net.a(x)
        y[:, :3].relu_()
        return net.b(y)

    def by_chance(net: Net, x: Tensor) -> Tensor:
        return net.b(net.a(x) + torch.rand_like(x[:, :1]))

    for body, engine in ((behind_a_view, "fx"), (behind_a_view, "record"), (by_chance, "auto")):
        net = randomise_(Net(body, a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(6, 2, 1)))
        with pytest.raises(Untraceable, match=r"gives another output than the model itself.*random.*in place behind a view"):
            trace(net, X, engine=engine)


def test_any_number_of_arguments() -> None:
    class Starred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 1)

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.b(F.relu(self.a(inputs[0])))

    with pytest.raises(SecateursError, match="Starred"):
        trace(randomise_(Starred()), X, engine="fx")
    assert_compact_is_masked(traced(Starred(), X), {"a": torch.arange(6) > 1})


def test_scripted_models_and_unknown_leaves() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 2, 1)).double())
    with pytest.raises(SecateursError, match=r"ScriptModule|scripted"):
        trace(scripted, X)
    with pytest.raises(InvalidInput, match="leaves: the model has no submodule 'layer9'"):
        trace(chain().double(), X, leaves=["layer9"])


# ---- shared layers ----------------------------------------------------------------------------------------------------


def in_a_row(*names: str) -> Callable[[Net, Tensor], Tensor]:
    """The named layers with a ReLU between them."""

    def body(net: Net, x: Tensor) -> Tensor:
        x = net.get_submodule(names[0])(x)
        for name in names[1:]:
            x = net.get_submodule(name)(F.relu(x))
        return x

    return body


def test_tied_layers_are_unprunable_with_the_reason() -> None:
    net = Net(
        in_a_row("a", "b", "b", "c", "d", "out"),
        a=nn.Conv2d(3, 6, 1),
        b=nn.Conv2d(6, 6, 1),
        c=nn.Conv2d(6, 6, 1),
        d=nn.Conv2d(6, 6, 1),
        out=nn.Conv2d(6, 2, 1),
    )
    net.d.weight = net.c.weight
    graph = traced(net, X)
    sites = find_sites(graph)
    reasons = {u.name: u.reason for u in sites.unprunable}
    assert [site.name for site in sites] == ["a"]
    assert reasons["b"] == "Conv2d at node 'c' shares its weights with 'd' (it is called 2 times)"
    assert reasons["c"] == "Conv2d at node 'c' shares its weights with 'd'"
    assert reasons["d"] == "Conv2d at node 'd' shares its weights with 'c'"
    with pytest.raises(UnknownSite, match=r"'b' is not a site: .*is called 2 times"):
        compact(graph, {"b": torch.ones(6, dtype=torch.bool)})
    same = compact(graph, {})
    assert same.module.c.weight is same.module.d.weight  # still tied


def test_tied_weights_stay_tied_when_others_are_cut() -> None:
    net = Net(
        in_a_row("a", "b", "c", "d"),
        a=nn.Linear(3, 6),
        b=nn.Linear(6, 4),
        c=nn.Linear(4, 4),
        d=nn.Linear(4, 4),
    )
    net.d.weight = net.c.weight
    graph = traced(net, random_tensor(2, 3))
    assert [site.name for site in find_sites(graph)] == ["a"]
    smaller = assert_compact_is_masked(graph, {"a": torch.arange(6) > 1})
    assert smaller.module.c.weight is smaller.module.d.weight


# ---- verify -----------------------------------------------------------------------------------------------------------


def test_verify_notices_a_network_that_is_not_the_masked_one(graph: Graph) -> None:
    keep = {"a": torch.arange(6) > 1}
    wrong = compact(graph, {"a": torch.arange(6) < 4})
    with pytest.raises(NotEqual, match=r"differs from the masked one by .* where outputs reach .*tolerance"):
        verify(graph, keep, wrong)
    nearly = compact(graph, keep)
    with torch.no_grad():
        nearly.module.b.bias += 1e-6
    with pytest.raises(NotEqual, match="by 1e-06"):
        verify(graph, keep, nearly)
    assert verify(graph, keep, nearly, tolerance=1e-5).difference == pytest.approx(1e-6)
    assert verify(graph, keep, inputs=random_tensor(7, 3, 5, 5)).examples == 7


def test_verify_notices_nan(graph: Graph) -> None:
    broken = compact(graph, {"a": torch.arange(6) > 1})
    with torch.no_grad():
        broken.module.b.bias[0] = float("nan")
    with pytest.raises(NotEqual, match=r"differs from the masked one by (nan|inf)"):
        verify(graph, {"a": torch.arange(6) > 1}, broken)
    assert run(graph.module, X).isfinite().all()


def test_verify_notices_another_shape(graph: Graph) -> None:
    other = traced(chain(b=nn.Conv2d(6, 3, 1)), X)
    with pytest.raises(NotEqual, match=r"gives shape \(2, 3, 6, 6\), the masked one \(2, 2, 6, 6\)"):
        verify(graph, {}, other)
