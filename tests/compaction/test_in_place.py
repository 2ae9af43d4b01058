"""`cut_` narrows the user's own model: it equals the compacted graph, or is refused and stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nets import TOPOLOGIES, Net, assert_compact_is_masked, assert_same, conv, random_keep, random_tensor, randomise_, run
from secateurs import Graph, Recipe, compact, cut_, find_sites, load, prune, save, trace
from secateurs.config import Shortcut
from secateurs.errors import InvalidInput, NotInPlace, PlanError
from secateurs.models import build, example_input
from secateurs.repair import prepare

X = random_tensor(3, 3, 8, 8)


class Block(nn.Module):
    """A residual block, and half of the channels in a branch of their own, as in YOLO's C2f."""

    def __init__(self, width: int, *, stored: bool) -> None:
        super().__init__()
        self.c = width
        self.stored = stored
        self.a, self.bn = nn.Conv2d(3, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width)
        self.b = nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.Conv2d(3 * width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        whole = F.silu(self.bn(self.a(x)))
        one, other = whole.split((self.c, self.c), 1) if self.stored else whole.chunk(2, 1)
        return self.last(torch.cat([one, other, other + F.silu(self.b(other))], 1))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.all_head_size = 4, 12
        self.qkv, self.out = nn.Linear(6, 36), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        batch, places, _ = x.shape
        q, k, v = self.qkv(x).view(batch, places, 3, self.num_heads, 3).permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(found.reshape(batch, places, self.all_head_size))


class Stream(nn.Module):
    """A stream with a token and an embedding of places, read behind LayerNorm, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, stride=4)
        self.token, self.places = nn.Parameter(torch.ones(1, 1, 6)), nn.Parameter(torch.ones(1, 5, 6))
        self.norm, self.a, self.b = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.last, self.out = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.patches(x).flatten(2).transpose(1, 2)
        found = torch.cat([self.token.expand(x.shape[0], -1, -1), found], 1) + self.places
        return self.out(self.last(found + self.b(F.gelu(self.a(self.norm(found)))))[:, 0])


class Written(nn.Module):
    """Its forward has a width written in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.adaptive_avg_pool2d(F.relu(self.a(x)), 2).view(-1, 24))


class Auxiliary(nn.Module):
    """A head that runs in train mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = F.relu(self.a(x))
        return (self.b(hidden), self.aux(hidden)) if self.training else self.b(hidden)


class Named(nn.Module):
    """Takes two inputs by name and gives a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 1)

    def forward(self, *, left: Tensor, right: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"sum": self.c(F.relu(self.a(left) + scale * self.b(right)))}


def coupled(model: nn.Module, example: Any = X, share: float = 0.4) -> Graph:
    graph = trace(copy.deepcopy(model).eval(), example)
    sites = find_sites(graph, "coupled")
    assert sites
    return compact(graph, random_keep(list(sites), 0, share))


def same_state(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in ours.items())


@pytest.mark.parametrize("name", ["resnet8", "densenet-small", "mobilenet-small", "resnext-small", "split-small", "unet-small"])
def test_coupled_sites_are_cut_in_place_twice(name: str) -> None:
    model, x = randomise_(build(name, **TOPOLOGIES[name])), example_input(name, 2).double()
    graph = trace(model, x)
    smaller = compact(graph, random_keep(list(find_sites(graph, "coupled")), 1, 0.4), verify=False)
    twice = compact(smaller, random_keep(list(find_sites(smaller, "coupled")), 2, 0.3), verify=False)
    assert len(twice.plan.steps) == 2
    cut_(model, twice)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in twice.module.parameters())
    assert_same(run(model, x), run(twice.module, x))


@pytest.mark.parametrize("stored", [False, True], ids=["chunk", "stored width"])
def test_both_halves_of_a_chunk_lose_as_many(stored: bool) -> None:
    model, x = randomise_(Block(8, stored=stored)), random_tensor(3, 3, 9, 9)
    smaller = coupled(model, x)
    with nullcontext() if stored else pytest.warns(UserWarning, match=r"Block: c from 8 to \d, for forward\b"):
        assert cut_(model, smaller.plan, x) is model
    assert type(model) is Block
    width = model.b.out_channels
    assert width < 8
    assert model.a.out_channels == model.bn.num_features == 2 * width
    assert model.last.in_channels == 3 * width
    assert model.c == width
    for inputs in (x, random_tensor(5, 3, 12, 12, seed=1)):
        assert_same(run(model, inputs), run(smaller.module, inputs))


def test_heads_that_modules_count_are_set() -> None:
    model, x = randomise_(Heads()), random_tensor(2, 5, 6)
    graph = trace(model, x)
    (site,) = find_sites(graph, "coupled")
    smaller = compact(graph, {site.name: torch.tensor([True, False, True, True])})
    cut_(model, smaller.plan, x)
    assert (model.num_heads, model.all_head_size, model.qkv.out_features) == (3, 9, 27)
    assert_same(run(model, x), run(smaller.module, x))


class Reshaped(nn.Module):
    """With half of the heads it runs as it is: each of as many heads has half of the features then."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = 4, nn.Linear(6, 48), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_number_of_heads_is_set_where_the_model_runs_without_it_but_gives_something_else() -> None:
    model, x = randomise_(nn.Sequential(Reshaped(), Reshaped())), random_tensor(2, 5, 6)
    graph = trace(model, x)
    keep = torch.tensor([True, False, True, False])
    smaller = compact(graph, {site.name: keep for site in find_sites(graph, "coupled") if site.name.endswith("qkv")})
    cut_(model, smaller.plan, x)
    assert [(part.num_heads, part.qkv.out_features) for part in model] == [(2, 24)] * 2
    assert_same(run(model, x), run(smaller.module, x))


def recurrent(body: Callable[[Net, Tensor], Tensor], into: int, **options: Any) -> Net:
    return Net(body, a=nn.Linear(6, 8), r=nn.LSTM(8, 8, batch_first=True, **options), o=nn.Linear(into, 2))


COUPLED: dict[str, tuple[Net, list[str]]] = {  # and the sites that are offered, of which each can be cut in place
    "mean": (Net(lambda n, x: n.o(F.relu(n.a(x)).mean(1, True)), a=conv(3, 8), o=conv(1, 2)), []),
    "sum": (Net(lambda n, x: n.o(F.relu(n.a(x)).sum(1, True)), a=conv(3, 8), o=conv(1, 2)), ["a"]),
    "largest": (Net(lambda n, x: n.o(n.a(x).max(1, True)[0]), a=conv(3, 8), o=conv(1, 2)), []),
    "where": (
        Net(lambda n, x: n.o(torch.where(n.a(x) > 0, n.a(x), n.p)), a=conv(3, 8), o=conv(8, 2), p=torch.ones(8, 1, 1)),
        ["a.coupled"],
    ),
    "rows of a table": (
        Net(
            lambda n, x: n.o(F.relu(n.b(F.relu(n.a(x))) + n.t[n.i].permute(1, 0).unsqueeze(0)[..., :1, None])),
            **{"a": conv(3, 6), "b": conv(6, 8), "o": conv(8, 2)},
            **{"t": nn.Parameter(torch.ones(5, 8)), "i": torch.tensor([0, 3])},
        ),
        ["a"],
    ),
    "units": (recurrent(lambda n, x: n.o(n.r(n.a(x))[0][:, -1]), 8), ["a", "r"]),
    "part of the units": (recurrent(lambda n, x: n.o(n.r(n.a(x))[0][:, :, 2:]), 6), ["a"]),
    "half of the units": (recurrent(lambda n, x: n.o(n.r(n.a(x))[0].chunk(2, -1)[0]), 4), ["a"]),
    "sum with units": (recurrent(lambda n, x: n.o((h := n.a(x)) + n.r(h)[0]), 8), []),
    "both directions": (
        recurrent(lambda n, x: n.o(sum(n.r(n.a(x))[0].chunk(2, -1))), 8, bidirectional=True),  # type: ignore[arg-type]  # sum of tensors
        ["a", "r"],
    ),
}


@pytest.mark.parametrize("name", COUPLED)
def test_every_coupled_site_can_be_cut_in_place(name: str) -> None:
    model, offered = COUPLED[name]
    x = random_tensor(2, 5, 6) if hasattr(model, "r") else X
    graph = trace(randomise_(model), x)
    sites = find_sites(graph, "coupled")
    assert [site.name for site in sites] == offered
    for site in sites:
        smaller, own = compact(graph, {site: torch.arange(site.channels) != 1}), copy.deepcopy(model)
        cut_(own, smaller.plan, x)
        assert_same(run(own, x), run(smaller.module, x))


def test_a_stream_goes_with_its_norms_and_parameters() -> None:
    model = randomise_(Stream())
    smaller = coupled(model)
    cut_(model, smaller.plan, X)
    width = model.patches.out_channels
    assert width < 6
    assert model.norm.normalized_shape == model.last.normalized_shape == (width,)
    assert (model.token.shape[-1], model.places.shape[-1], model.b.out_features) == (width,) * 3
    assert model.a.out_features < 8
    assert_same(run(model, X), run(smaller.module, X))


class Words(nn.Module):
    """A stream that begins with embeddings, as in BERT; the same table may be read twice."""

    def __init__(self, *, norm: bool = True, tied: bool = False, max_norm: float | None = None) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 8, padding_idx=0, max_norm=max_norm), nn.Embedding(5, 8)
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()
        self.a, self.b, self.out = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 9, bias=False)
        if tied:
            self.out.weight = self.words.weight
        self.register_buffer("order", torch.arange(5))

    def forward(self, numbers: Tensor) -> Tensor:
        found = self.norm(self.words(numbers) + self.places(self.order) + self.words(numbers.flip(1)))
        return self.out(found + self.b(F.gelu(self.a(found))))


NUMBERS = torch.randint(9, (3, 5), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
def test_an_embedding_that_begins_a_stream_loses_its_columns(norm: bool) -> None:
    model = randomise_(Words(norm=norm))
    graph = trace(model, NUMBERS)
    sites = find_sites(graph, "coupled")
    assert {site.layers for site in sites} == {("a",), ("b",)}
    stream = next(site for site in sites if site.layers == ("b",))
    assert "places" not in {point.node for point in stream.points}  # it has no axis of examples, each with a mask of its own
    keep = torch.arange(8) % 3 > 0
    smaller = assert_compact_is_masked(graph, {stream.name: keep}, (NUMBERS.flip(0),))
    words = model.words.weight.detach().clone()
    cut_(model, smaller.plan, NUMBERS)
    assert torch.equal(model.words.weight, words[:, keep])
    assert (model.words.embedding_dim, model.places.weight.shape, model.a.in_features, model.b.out_features) == (
        5,
        (5, 5),
        5,
        5,
    )
    assert_same(run(model, NUMBERS), run(smaller.module, NUMBERS))


def test_a_stream_that_begins_with_a_norm_is_pruned_with_repair_and_cut_in_place() -> None:
    """Both terms of the sum behind the norm lose the same channels: nothing is left there that an offset could make up for."""
    graph = trace(randomise_(Words()), NUMBERS)
    for site in find_sites(graph, "coupled"):
        assert not any(cut.offsets for step in prepare(graph, [site]).plan.steps for cut in step)
    torch.manual_seed(0)
    model, x = Words(), torch.randint(9, (128, 5))
    batches = [[(x[start : start + 32], x[start : start + 32]) for start in (at, at + 32)] for at in (0, 64)]
    recipe = Recipe.fast(criterion="l1", repair="least-squares", max_drop=0.5, confidence=0, shortcut="coupled")
    result = prune(model, *batches, recipe=recipe, progress=False, loss=token_loss, metric=token_accuracy)
    assert result.macs.removed > 0
    result.cut_(model)
    torch.testing.assert_close(model.eval()(x), result.model.eval()(x))


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def token_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(2) == targets).double().mean(1)


@pytest.mark.parametrize("position", ["before", "after", "stream"])
def test_embeddings_lose_what_nobody_reads_and_are_loaded(position: Shortcut, tmp_path: Path) -> None:
    graph = trace(randomise_(Words()), NUMBERS)
    smaller = assert_compact_is_masked(graph, random_keep(list(find_sites(graph, position)), 0, 0.4))
    assert (smaller.module.get_submodule("words").embedding_dim < 8) is (position == "stream")
    save(smaller, tmp_path / "cut.safetensors")
    again = load(Words().double(), tmp_path / "cut.safetensors")
    assert_same(run(again.module, NUMBERS), run(smaller.module, NUMBERS))


class Normed(nn.Module):
    """A stream that begins with a norm of the network's own input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b, self.out = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm(x)
        return self.out(found + self.b(F.gelu(self.a(found))))


@pytest.mark.parametrize(
    ("model", "x"),
    [(Words(tied=True), NUMBERS), (Words(max_norm=1.0), NUMBERS), (Normed(), random_tensor(2, 5, 6))],
    ids=["tied to the output", "divided by norms", "the input"],
)
def test_a_stream_whose_beginning_keeps_its_channels_is_not_offered(model: nn.Module, x: Tensor) -> None:
    sites = find_sites(trace(randomise_(model), x), "coupled")
    assert [site.layers for site in sites] == [("a",)]
    assert any(u.name == "b" and "keeps all its channels" in u.reason for u in sites.unprunable)


def test_a_sum_of_different_channels_is_refused_and_nothing_is_changed() -> None:
    model = randomise_(build("resnet8-b", widths=(4, 6, 8)))
    before, x = copy.deepcopy(model), random_tensor(2, 3, 16, 16)
    graph = trace(model, x)
    smaller = compact(graph, random_keep(list(find_sites(graph)), 0, 0.4))
    with pytest.raises(
        NotInPlace, match=r"'layer1.0.add' (adds|joins) tensors of which different channels are left.*'coupled'"
    ):
        cut_(model, smaller.plan, x)
    assert same_state(model, before)
    assert all(
        vars(a).get("out_channels") == vars(b).get("out_channels")
        for a, b in zip(model.modules(), before.modules(), strict=True)
    )
    cut_(model, coupled(model, x).plan, x)


def test_a_width_in_the_code_is_refused() -> None:
    model = randomise_(Written())
    before = copy.deepcopy(model)
    graph = trace(model, X)
    smaller = compact(graph, {"a": torch.arange(6) > 1})
    with pytest.raises(NotInPlace, match=r"Written cannot be cut in place: .*a number written in its code"):
        cut_(model, smaller.plan, X)
    assert same_state(model, before)


def test_a_head_for_training_that_tracing_did_not_see_is_refused() -> None:
    model = randomise_(Auxiliary())
    before = copy.deepcopy(model)
    smaller = compact(trace(model, X), {"a": torch.arange(6) > 1})
    with pytest.raises(NotInPlace, match="in train mode its forward fails with narrower layers"):
        cut_(model, smaller.plan, X)
    assert same_state(model, before)


def test_a_model_with_named_inputs(tmp_path: Path) -> None:
    model = randomise_(Named()).train()
    example = {"right": X, "left": X.flip(0), "scale": 0.5}
    smaller = coupled(model, example)
    smaller.plan.save(tmp_path / "plan.json")
    cut_(model, tmp_path / "plan.json", example)
    assert model.training
    with torch.no_grad():
        assert_same(model.eval()(**example), smaller.module.eval()(left=X.flip(0), right=X))


def test_a_graph_gives_its_weights_and_a_state_dict_is_loaded_after_a_cut() -> None:
    x = random_tensor(2, 3, 16, 16)
    model = randomise_(build("resnet8-b", widths=(4, 6, 8)))
    smaller = coupled(model, x)
    with torch.no_grad():  # trained
        for parameter in smaller.module.parameters():
            parameter.mul_(1.1)
    cut_(model, smaller)
    assert_same(run(model.eval(), x), run(smaller.module.eval(), x))
    fresh = build("resnet8-b", widths=(4, 6, 8)).double()
    cut_(fresh, smaller.plan, x).load_state_dict(model.state_dict())
    assert_same(run(fresh.eval(), x), run(model, x))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(x).sum().backward()
    optimiser.step()


def test_what_does_not_fit_is_refused() -> None:
    model = randomise_(Block(8, stored=False))
    smaller = coupled(model)
    with pytest.raises(InvalidInput, match="A plan does not hold one"):
        cut_(model, smaller.plan)
    with pytest.raises(PlanError, match=r"it was made for a .*Block, but the model is a .*Written"):
        cut_(Written().double(), smaller)
    with pytest.raises(PlanError, match="plan: got int"):
        cut_(model, 3, X)  # type: ignore[arg-type]


def test_a_result_is_cut_into_the_model() -> None:
    torch.manual_seed(0)
    model = build("resnet8-b", widths=(4, 6, 8))
    x, y = torch.randn(96, 3, 16, 16), torch.randint(10, (96,))
    recipe = Recipe.fast(criterion="l1", repair="least-squares", max_drop=0.5, confidence=0, shortcut="coupled")
    result = prune(model, [(x[:48], y[:48])], [(x[48:], y[48:])], recipe=recipe, progress=False)
    assert result.macs.removed > 0
    assert result.cut_(model) is model
    torch.testing.assert_close(model.eval()(x), result.model.eval()(x))
