"""Laws that hold for every network and every cut: float64, random BatchNorm statistics, generated networks.

Expected values come from the masked network, and what `masked` does is itself checked against hooks on the user's model.
"""

from __future__ import annotations

import copy
import operator
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nets import (
    BLOCKS,
    HEADS,
    Generated,
    Net,
    add_as_if_large_,
    assert_compact_is_masked,
    assert_same,
    conv,
    random_keep,
    random_tensor,
    randomise_,
    run,
    traced,
)
from secateurs import Graph, Plan, compact, find_site, find_sites, load, masked, replay, save, trace, verify
from secateurs.config import Shortcut
from secateurs.errors import EmptyLayer
from secateurs.graph.channels import take
from secateurs.graph.layers import Align, Constant, Mask, SumInto
from secateurs.graph.masking import split_at
from secateurs.graph.normalise import FollowsMode
from secateurs.graph.sites import resolve
from secateurs.models import build, example_input, names

OTHER = (random_tensor(3, 3, 8, 8, seed=99),)
"""A batch of another size than the example's."""


@dataclass(frozen=True)
class Case:
    """A generated network, where masks go, and how much they drop; `seed` decides all else."""

    blocks: tuple[str, ...]
    head: str
    shortcut: Shortcut
    share: float
    seed: int

    def model(self, weights: int = 0) -> nn.Module:
        return randomise_(Generated(self.blocks, self.head, self.seed), self.seed + weights)

    def graph(self) -> Graph:
        return trace(self.model(), random_tensor(2, 3, 8, 8, seed=self.seed))

    def keep(self, graph: Graph, seed: int = 0) -> dict[str, Tensor]:
        return random_keep(find_sites(graph, self.shortcut), self.seed + seed, self.share)


cases = st.builds(
    Case,
    blocks=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=3).map(tuple),
    head=st.sampled_from(HEADS),
    shortcut=st.sampled_from(["before", "after", "stream"]),
    share=st.sampled_from([0.2, 0.4, 0.7]),
    seed=st.integers(0, 10_000),
)


def law(examples: int):  # type: ignore[no-untyped-def]
    """A test over generated cases."""

    def decorate(test):  # type: ignore[no-untyped-def]
        quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
        return settings(deadline=None, max_examples=examples, suppress_health_check=quiet)(given(case=cases)(test))

    return decorate


def compacted_or_empty(graph: Graph, keep: dict[str, Tensor]) -> Graph | None:
    """The compacted graph; None where a cut leaves a layer nothing to read, which must really be so."""
    try:
        return compact(graph, keep)
    except EmptyLayer:
        assert_something_is_constant(masked(graph, keep))
        return None


def assert_something_is_constant(module: nn.Module) -> None:
    """Some submodule gives the same for two different inputs of the network: a cut above left it nothing to read."""
    seen: list[list[Tensor]] = [[], []]
    for round_, outputs in enumerate(seen):
        hooks = [
            part.register_forward_hook(lambda m, i, o, outputs=outputs: outputs.append(o.clone()))
            for part in module.modules()
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d | nn.Linear | Mask)
        ]
        run(module, random_tensor(2, 3, 8, 8, seed=round_))
        for hook in hooks:
            hook.remove()
    assert any(torch.equal(a, b) for a, b in zip(*seen, strict=True))


# ---- compact = masked -------------------------------------------------------------------------------------------------


@law(32)
def test_compact_equals_masked(case: Case) -> None:
    graph = case.graph()
    keep = case.keep(graph)
    smaller = compacted_or_empty(graph, keep)
    if smaller is not None:
        reference = masked(graph, keep)
        for batch in (graph.example, OTHER):
            assert_same(run(smaller.module, *batch), run(reference, *batch))
        add_as_if_large_(smaller.module)
        for batch in (graph.example, OTHER):
            assert_same(run(smaller.module, *batch), run(reference, *batch))


def sum_of(join: Callable[[Tensor, Tensor], Tensor]) -> Net:
    return Net(
        lambda net, x: net.b(torch.relu(join(torch.relu(net.a(x)), net.c(x)))),
        a=nn.Conv2d(3, 8, 1),
        c=nn.Conv2d(3, 8, 1),
        b=nn.Conv2d(8, 3, 1),
    )


@pytest.mark.parametrize("size", [(2, 3, 4, 4), (2, 3, 32, 32)])
@pytest.mark.parametrize(
    "join",
    [
        lambda y, z: y + z,
        lambda y, z: torch.channel_shuffle(y, 2) + z,  # the narrow term comes in another order
        lambda y, z: z + y[:1],  # and is broadcast over the batch
        lambda y, z: y.mean((2, 3), keepdim=True) + z,
        lambda y, z: torch.cat([y[:, 4:], y[:, :4]], 1) + z,
    ],
)
def test_sums_with_a_narrow_term_at_every_size(size: tuple[int, ...], join: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = random_tensor(*size)
    graph = traced(sum_of(join), x)
    for seed in range(3):
        keep = random_keep(find_sites(graph), seed, share=0.3)
        smaller = assert_compact_is_masked(graph, keep)
        add_as_if_large_(smaller.module)
        assert_same(run(smaller.module, x), run(masked(graph, keep), x))


@law(12)
def test_compact_equals_masked_while_training(case: Case) -> None:
    """BatchNorm of a removed channel changes nothing else, so batch statistics give the same too (dropout left out)."""
    graph = case.graph()
    keep = case.keep(graph)
    smaller = compacted_or_empty(graph, keep)
    if smaller is None or any(isinstance(m, Constant) for m in smaller.module.modules()):
        return  # a folded branch has no batch statistics any more
    reference = masked(graph, keep)
    for module in (smaller.module, reference):
        module.train()
        for part in module.modules():
            if isinstance(part, nn.Dropout2d):
                part.eval()
    assert_same(run(smaller.module, *OTHER), run(reference, *OTHER), atol=1e-11)


DEEPER = [n for n in names() if n.startswith("resnet") and n not in ("resnet8", "resnet20", "resnet14-b")]


@pytest.mark.parametrize("name", [n for n in names() if n not in (*DEEPER, "vgg16")])
@pytest.mark.parametrize("shortcut", ["before", "after", "stream"])
def test_compact_equals_masked_on_the_built_in_networks(name: str, shortcut: Shortcut) -> None:
    graph = trace(randomise_(build(name)), example_input(name).double())
    sites = find_sites(graph, shortcut)
    assert sites
    for seed, share in enumerate((0.3, 0.6)):
        keep, others = random_keep(sites, seed, share), (example_input(name, batch=3).double(),)
        assert_compact_is_masked(graph, keep, others, prove=seed == 0)


def test_masked_zeroes_what_a_hook_on_the_users_model_zeroes() -> None:
    model = randomise_(build("resnet8"))
    x = random_tensor(2, 3, 16, 16)
    graph = trace(model, x)
    keep = {"layer1.0.conv2": torch.arange(16) % 3 > 0, "layer3.0.conv2": torch.arange(64) % 5 > 0}

    def zeroing(mask: Tensor):  # type: ignore[no-untyped-def]
        return lambda module, inputs, output: output * mask.view(1, -1, 1, 1)

    hooked = copy.deepcopy(model)
    for name, mask in keep.items():
        hooked.get_submodule(name.replace("conv2", "bn2")).register_forward_hook(zeroing(mask))
    assert_same(run(masked(graph, keep), x), run(hooked, x))
    after = {"layer1.0.add": torch.arange(16) % 4 > 0}
    hooked = copy.deepcopy(model)
    hooked.get_submodule("layer1.0").register_forward_hook(zeroing(after["layer1.0.add"]))
    assert_same(run(masked(graph, after), x), run(hooked, x))


# ---- steps, plans, files ----------------------------------------------------------------------------------------------


def second_masks(graph: Graph, keep: dict[str, Tensor]) -> dict[str, Tensor]:
    """Masks over original channels, restricted to what each site still has."""
    return {name: keep[name][list(site.original)] for name, site in resolve(graph, keep).items()}


@example(case=Case(blocks=("Chain", "Parts"), head="mean", shortcut="before", share=0.4, seed=2510))  # a gathered constant
@example(case=Case(blocks=("Products", "Parts"), head="mean", shortcut="after", share=0.4, seed=10000))  # a narrowed one
@example(case=Case(blocks=("PreActivation",), head="mean", shortcut="stream", share=0.4, seed=1))  # a stream of one channel
@example(case=Case(blocks=("Parts",), head="mean", shortcut="before", share=0.7, seed=1))  # a constant with zeros
@example(case=Case(("Hourglass", "Grouped", "PreActivation"), "pixels", "stream", 0.7, 9308))  # a shuffle that moves nothing
@example(case=Case(blocks=("Dense", "Mixed"), head="mean", shortcut="stream", share=0.2, seed=0))  # a layer that joins a stream
@example(case=Case(("Dense", "PreActivation"), "mean", "stream", 0.4, 4164))  # a stream enters behind a gather
@example(case=Case(("Grouped", "PreActivation", "Residual"), "view", "stream", 0.4, 6431))  # the same behind a grouped layer
@example(case=Case(("Grouped", "Residual"), "mean", "after", 0.4, 431))  # what was a shuffle is read twice, once narrower
@example(case=Case(("Grouped", "Mixed"), "conv", "stream", 0.2, 9379))  # a norm behind what was a shuffle
@example(case=Case(("Products", "PreActivation", "Products"), "view", "after", 0.7, 2119))  # a factor without any channel
@example(case=Case(("PreActivation", "Products"), "view", "after", 0.7, 2700))  # zeros that are stacked below something else
@example(case=Case(("Parts", "Mixed"), "flatten", "after", 0.7, 2503))  # a norm reads what was a term of a sum
@example(case=Case(("Separable", "Dense", "Grouped"), "conv", "after", 0.7, 6653))  # a layer's filters go with those of a sum
@example(case=Case(("PreActivation", "Residual"), "flatten", "stream", 0.7, 2063))  # a stream whose only sum is folded away
@law(16)
def test_two_steps_equal_one(case: Case) -> None:
    graph = case.graph()
    first, second = case.keep(graph), case.keep(graph, seed=1)
    for name in first:
        if not (first[name] & second[name]).any():  # emptied sites are another law
            second[name] = first[name]
    half = compacted_or_empty(graph, first)
    if half is None:
        return
    before = {site.name: site for site in find_sites(graph, case.shortcut)}
    remaining = {site.name: site for site in find_sites(half, case.shortcut)}
    both = dict(first)
    for name in before.keys() & remaining.keys():
        site = remaining[name]
        assert len(site.original) == site.channels <= site.original_channels == len(first[name])
        assert set(site.original) <= set(first[name].nonzero().flatten().tolist())
        both[name] = first[name] & second[name]
    # a site is gone only if its layers are, or if another has their filters now: that of a stream, or of a sum that a constant
    # became a term of; or, with the other term of a sum folded away, if a norm over channels reads what the sum gave
    present, taken = dict(half.module.named_modules()), {layer for site in remaining.values() for layer in site.layers}
    folded = {n.name for n in graph.module.graph.nodes if n.target is operator.add} - {n.name for n in half.module.graph.nodes}
    refused = {u.name for u in find_sites(half, case.shortcut).unprunable if folded and "takes statistics" in u.reason}
    for name in before.keys() - remaining.keys():
        assert all(layer not in present or layer in taken | refused for layer in before[name].layers), name
    once = compacted_or_empty(graph, both)
    if once is None:
        return
    second = {name: mask for name, mask in second.items() if name in remaining}
    twice = compact(half, second_masks(half, second))
    for batch in (graph.example, OTHER):
        assert_same(run(twice.module, *batch), run(once.module, *batch))
    assert {name: tuple(p.shape) for name, p in twice.module.named_parameters()} == {
        name: tuple(p.shape) for name, p in once.module.named_parameters()
    }
    again = replay(graph, Plan.from_json(twice.plan.to_json()), verify=False)
    assert again.plan == twice.plan
    assert_bit_equal(again.module, twice.module)
    assert torch.equal(run(again.module, *graph.example), run(twice.module, *graph.example))


@law(12)
def test_a_replayed_plan_gives_the_network_bit_for_bit(case: Case) -> None:
    graph = case.graph()
    half = compacted_or_empty(graph, case.keep(graph))
    if half is None:
        return
    direct = compacted_or_empty(half, random_keep(find_sites(half, case.shortcut), case.seed, 0.2)) or half
    again = replay(graph, Plan.from_json(direct.plan.to_json()), verify=False)
    assert again.plan == direct.plan
    assert_bit_equal(again.module, direct.module)
    assert torch.equal(run(again.module, *graph.example), run(direct.module, *graph.example))


def assert_bit_equal(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert list(ours) == list(theirs)
    assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)


@law(12)
def test_loading_gives_what_was_saved_bit_for_bit(case: Case) -> None:
    graph = case.graph()
    smaller = compacted_or_empty(graph, case.keep(graph))
    if smaller is None:
        return
    with torch.no_grad():
        for parameter in smaller.module.parameters():  # as after fine-tuning: not the weights that the plan would give
            parameter += 0.01
    with tempfile.TemporaryDirectory() as folder:
        fresh = load(case.model(weights=1), save(smaller, Path(folder) / "net.safetensors"))
    assert fresh.plan == smaller.plan
    assert_bit_equal(fresh.module, smaller.module)
    for batch in (graph.example, OTHER):
        assert torch.equal(run(fresh.module, *batch), run(smaller.module, *batch))


# ---- what comes out is an ordinary network ----------------------------------------------------------------------------


@law(16)
def test_gradients_are_those_of_the_masked_network_on_the_kept_weights(case: Case) -> None:
    graph = case.graph()
    keep = case.keep(graph)
    smaller = compacted_or_empty(graph, keep)
    if smaller is None:
        return
    reference = masked(graph, keep)
    for module in (smaller.module, reference):
        out = module(*OTHER)
        (out * random_tensor(*out.shape, seed=7)).sum().backward()
    wide = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in smaller.module.named_parameters():
        if name not in wide:
            assert isinstance(smaller.module.get_submodule(name.rpartition(".")[0]), Constant)
            continue
        wanted = None if wide[name] is None else take(wide[name], smaller.kept.get(name, ()))
        if wanted is None or parameter.grad is None:
            assert all(grad is None or not grad.any() for grad in (wanted, parameter.grad)), name
        else:
            assert_same(parameter.grad, wanted, atol=1e-11)


@law(12)
def test_narrowed_modules_are_ordinary_and_consistent(case: Case) -> None:
    graph = case.graph()
    smaller = compacted_or_empty(graph, case.keep(graph))
    if smaller is None:
        return
    for name, part in smaller.module.named_modules():
        if name:
            assert type(part).__module__.startswith("torch.nn") or isinstance(part, Align | Constant | FollowsMode | SumInto), (
                name
            )
        assert_consistent(part)
    whole = dict(graph.module.named_parameters())
    for name, kept in smaller.kept.items():
        if name in whole:
            assert_bit_equal_tensor(take(whole[name], kept), smaller.module.get_parameter(name))


def assert_bit_equal_tensor(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert torch.equal(a, b)


def assert_consistent(part: nn.Module) -> None:
    """The sizes that a layer names are those of its tensors."""
    if isinstance(part, nn.ConvTranspose2d):
        assert part.weight.shape[:2] == (part.in_channels, part.out_channels // part.groups)
    elif isinstance(part, nn.Conv2d):
        assert part.weight.shape[:2] == (part.out_channels, part.in_channels // part.groups)
        assert part.in_channels % part.groups == part.out_channels % part.groups == 0
    elif isinstance(part, nn.Linear):
        assert part.weight.shape == (part.out_features, part.in_features)
    elif isinstance(part, nn.BatchNorm2d | nn.BatchNorm1d):
        for tensor in (part.weight, part.bias, part.running_mean, part.running_var):
            assert tensor is not None
            assert tensor.shape == (part.num_features,)
    elif isinstance(part, nn.PReLU):
        assert part.weight.shape == (part.num_parameters,)
    if isinstance(part, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
        filters = part.out_features if isinstance(part, nn.Linear) else part.out_channels
        assert filters > 0
        assert part.bias is None or part.bias.shape == (filters,)
        assert part.weight.is_leaf
        assert part.weight.requires_grad


@law(10)
def test_the_users_model_is_untouched(case: Case) -> None:
    model = case.model()
    part = next(iter(model.blocks))
    part.train()  # a model in mixed modes
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    graph = trace(model, random_tensor(2, 3, 8, 8))
    whole = copy.deepcopy(graph.module.state_dict())
    keep = case.keep(graph)
    if compacted_or_empty(graph, keep) is not None:
        verify(graph, keep)
    assert [m.training for m in model.modules()] == modes
    for now, then in ((model.state_dict(), state), (graph.module.state_dict(), whole)):
        assert list(now) == list(then)
        assert all(torch.equal(now[name], then[name]) for name in then)


@law(10)
def test_a_network_split_at_a_site_is_the_masked_network(case: Case) -> None:
    graph = case.graph()
    for site in find_sites(graph, case.shortcut)[:4]:
        keep = random_keep([site], case.seed)
        split = split_at(graph, site)
        activations, *carried = run(split.prefix, *OTHER)
        if split.several:
            got = run(split.suffix, activations, *carried, keep[site.name][None].double())
        else:
            got = run(split.suffix, Mask(keep[site.name], split.axis)(activations), *carried)
        assert_same(got, run(masked(graph, keep), *OTHER))


# ---- emptied layers ---------------------------------------------------------------------------------------------------


def residual_net(kernel: int = 1, *, bias: bool = True, normed: bool = True) -> Net:
    """A convolution, a residual block of two, and another convolution."""

    def body(net: Net, x: Tensor) -> Tensor:
        x = torch.relu(net.a(x))
        return net.d(torch.relu(x + net.norm(net.c(torch.relu(net.b(x))))))

    return Net(
        body,
        a=nn.Conv2d(3, 6, 3),
        b=conv(6, 5, kernel, bias=bias),
        c=conv(5, 6, kernel, bias=bias),
        norm=nn.BatchNorm2d(6) if normed else nn.Identity(),
        d=nn.Conv2d(6, 2, 1),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("emptied", [("b",), ("c",), ("b", "c")])
@pytest.mark.parametrize("normed", [True, False])
def test_an_emptied_residual_branch_is_folded_away(bias: bool, emptied: tuple[str, ...], normed: bool) -> None:
    graph = traced(residual_net(3, bias=bias, normed=normed), random_tensor(2, 3, 8, 8))
    keep = {name: torch.zeros(6 if name == "c" else 5, dtype=torch.bool) for name in emptied}
    smaller = assert_compact_is_masked(graph, keep, OTHER)
    left = {name for name, part in smaller.module.named_modules() if isinstance(part, nn.Conv2d | nn.BatchNorm2d)}
    assert left == {"a", "d"}
    gives_a_constant = "c" not in emptied and (bias or normed)
    assert any(isinstance(part, Constant) for part in smaller.module.modules()) == gives_a_constant


SCALED: dict[str, Callable[[Net, Tensor], Tensor]] = {  # a branch that is scaled channel by channel, as in ConvNeXt and CaiT
    "gamma * x": lambda net, x: net.gamma.view(-1, 1, 1) * x,
    "x.mul(gamma)": lambda net, x: x.mul(net.gamma.reshape(1, -1, 1, 1)),
    "channels last": lambda net, x: (x.permute(0, 2, 3, 1) * net.gamma).permute(0, 3, 1, 2),
    "sizes of the branch": lambda net, x: x * net.gamma.view(-1, 1, 1).expand(x.shape[1], 1, 1),
    "and shifted": lambda net, x: x * net.gamma[:, None, None] + net.beta[:, None, None],
}


@pytest.mark.parametrize("emptied", ["b", "c"])
@pytest.mark.parametrize("form", SCALED)
def test_an_emptied_branch_with_a_layer_scale_is_folded_away(form: str, emptied: str) -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        x = torch.relu(net.a(x))
        out: Tensor = net.d(torch.relu(x + SCALED[form](net, net.c(torch.relu(net.b(x))))))
        return out

    layers = {"a": conv(3, 6), "b": conv(6, 5), "c": conv(5, 6), "d": conv(6, 2, 1)}
    gamma, beta = nn.Parameter(random_tensor(6, seed=3)), nn.Parameter(random_tensor(6, seed=4))
    graph = traced(Net(body, **layers, gamma=gamma, beta=beta), random_tensor(2, 3, 8, 8))
    if form == "sizes of the branch" and emptied == "b":
        with pytest.raises(EmptyLayer, match="the cut leaves 'b' without a single channel"):
            compact(graph, {"b": torch.zeros(5, dtype=torch.bool)})
        return
    channels = {site.name: site.channels for site in find_sites(graph)}[emptied]
    smaller = assert_compact_is_masked(graph, {emptied: torch.zeros(channels, dtype=torch.bool)}, OTHER)
    constants = [name for name in smaller.module.state_dict() if name.startswith("constant_")]
    assert len(constants) == (emptied == "b" or "shifted" in form)
    assert smaller.module.state_dict().keys() - set(constants) == {"a.weight", "a.bias", "d.weight", "d.bias"}


def test_a_folded_constant_obeys_its_own_mask() -> None:
    graph = traced(residual_net(), random_tensor(2, 3, 8, 8))
    assert_compact_is_masked(graph, {"b": torch.zeros(5, dtype=torch.bool), "c": torch.arange(6) % 2 > 0}, OTHER)


def test_an_emptied_branch_of_a_concatenation_is_removed() -> None:
    net = Net(
        lambda net, x: net.c(torch.cat([torch.relu(net.a(x)), torch.relu(net.b(x))], 1)),
        a=nn.Conv2d(3, 6, 3),
        b=nn.Conv2d(3, 5, 3),
        c=nn.Conv2d(11, 2, 1),
    )
    graph = traced(net, random_tensor(2, 3, 8, 8))
    smaller = assert_compact_is_masked(graph, {"a": torch.zeros(6, dtype=torch.bool)}, OTHER)
    assert smaller.module.get_submodule("c").in_channels == 5
    assert "a" not in dict(smaller.module.named_modules())


def test_an_emptied_gate_becomes_a_constant_factor() -> None:
    def gated(net: Net, x: Tensor) -> Tensor:
        y = torch.relu(net.a(x))
        return net.b(y * torch.sigmoid(net.excite(torch.relu(net.squeeze(y.mean((2, 3), keepdim=True))))))

    net = Net(gated, a=nn.Conv2d(3, 6, 3), squeeze=nn.Conv2d(6, 3, 1), excite=nn.Conv2d(3, 6, 1), b=nn.Conv2d(6, 2, 1))
    graph = traced(net, random_tensor(2, 3, 8, 8))
    keep = {"squeeze": torch.zeros(3, dtype=torch.bool), "a": torch.arange(6) > 1}
    smaller = assert_compact_is_masked(graph, keep, OTHER)
    assert "excite" not in dict(smaller.module.named_modules())


@pytest.mark.parametrize("layer", ["a", "b"])
def test_emptying_a_layer_of_a_chain_is_an_error(layer: str) -> None:
    net = Net(
        lambda net, x: net.c(torch.relu(net.b(torch.relu(net.a(x))))),
        a=nn.Conv2d(3, 4, 3),
        b=nn.Conv2d(4, 4, 3),
        c=nn.Conv2d(4, 2, 1),
    )
    graph = traced(net, random_tensor(2, 3, 8, 8))
    with pytest.raises(EmptyLayer, match=f"the cut leaves '{layer}' without a single channel.*Keep at least one filter"):
        compact(graph, {layer: torch.zeros(4, dtype=torch.bool)})


GATED: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "multiplied by a part that was cut": lambda net, x: (lambda y: net.out((y * y[:, :1]).mean((2, 3))))(net.a(x)),
    "a part that was cut is all that is read": lambda net, x: net.out(
        net.a(x).split([2, 4], 1)[1].mean((2, 3)).repeat(1, 2)[:, :6]
    ),
    "products of what two cuts leave": lambda net, x: net.out((net.a(x) * net.b(x)).mean((2, 3))),
}


@pytest.mark.parametrize("form", GATED)
def test_a_refused_cut_that_keeps_channels_everywhere_is_one_that_leaves_a_constant(form: str) -> None:
    graph = traced(Net(GATED[form], a=conv(3, 6), b=conv(3, 6), out=nn.Linear(6, 2)), random_tensor(2, 3, 8, 8))
    keep = {"a": torch.arange(6) == 1}
    if "two cuts" in form:
        keep["b"] = torch.arange(6) == 4
    cut = masked(graph, keep)
    assert_same(run(cut, random_tensor(2, 3, 8, 8, seed=1)), run(cut, random_tensor(2, 3, 8, 8, seed=2)))
    with pytest.raises(EmptyLayer, match=r"though every mask keeps some.*Keep at least one filter there that is read"):
        compact(graph, keep)


def test_a_site_down_to_one_channel_can_still_be_emptied() -> None:
    graph = traced(residual_net(), random_tensor(2, 3, 8, 8))
    nearly = compact(graph, {"b": torch.arange(5) == 3})
    assert find_site(nearly, "b").original == (3,)
    twice = compact(nearly, {"b": torch.tensor([False])})
    once = compact(graph, {"b": torch.zeros(5, dtype=torch.bool)})
    assert_same(run(twice.module, *OTHER), run(once.module, *OTHER))


def test_both_terms_of_a_sum_are_folded_away_one_after_the_other() -> None:
    """The first leaves a constant with zeros, the second nothing: what is left of the sum is a constant again."""

    def body(net: Net, x: Tensor) -> Tensor:
        x = torch.relu(net.a(x))
        both = torch.relu(net.b(x)) + net.d(torch.relu(net.c(x)))
        out: Tensor = net.e(x + torch.relu(both))
        return out

    layers = {"a": conv(3, 6), "b": conv(6, 6), "c": conv(6, 5), "d": conv(5, 6), "e": conv(6, 2)}
    graph = traced(Net(body, **layers), random_tensor(2, 3, 8, 8))
    first = {"c": torch.zeros(5, dtype=torch.bool), "d": torch.arange(6) % 2 > 0}
    second = {"b": torch.zeros(6, dtype=torch.bool)}
    once, twice = compact(graph, {**first, **second}), compact(compact(graph, first), second)
    assert_same(run(twice.module, *OTHER), run(once.module, *OTHER))
    assert [(name, p.shape) for name, p in twice.module.named_parameters()] == [
        (name, p.shape) for name, p in once.module.named_parameters()
    ]
