"""Heads of attention: whole heads are removed, with all their features in the layers that make them and that read them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import Net, assert_compact_is_masked, assert_same, conv, random_keep, random_tensor, randomise_, run, traced, without
from secateurs import Graph, compact, find_site, find_sites, masked, replay, trace
from secateurs.data import Examples
from secateurs.graph.channels import compose_kept, take
from secateurs.metrics import cross_entropy
from secateurs.scoring.engine import split_for

X = random_tensor(3, 5, 4, seed=2)


def as_timm(net: Net, x: Tensor) -> Tensor:
    b, n, c = x.shape
    q, k, v = net.qkv(x).reshape(b, n, 3, 3, c // 3).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)


def by_hand(net: Net, x: Tensor) -> Tensor:
    """With a bias for each head, as in Swin."""
    b, n, c = x.shape
    qkv = net.qkv(x).reshape(b, n, 3, 3, c // 3).permute(2, 0, 3, 1, 4)
    scores = (qkv[0] * 0.5) @ qkv[1].transpose(-2, -1) + net.bias
    return (net.drop(scores.softmax(-1)) @ qkv[2]).transpose(1, 2).reshape(b, n, c)


def as_transformers(net: Net, x: Tensor) -> Tensor:
    """Three layers, functions instead of methods."""
    q, k, v = (layer(x).view(x.size(0), -1, 3, 4).transpose(1, 2) for layer in (net.q, net.k, net.v))
    weights = F.softmax(torch.matmul(q, torch.transpose(k, -1, -2)) / 2, dim=-1)
    return torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous().view(x.size(0), -1, 12)


def as_traced_transformers(net: Net, x: Tensor) -> Tensor:
    """With views that change nothing behind attention, as where transformers' own function for it is captured."""
    b, n, _ = x.shape
    q, k, v = (part.view(b, n, -1, 4).transpose(1, 2) for part in net.qkv(x).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v).reshape(b, -1, n, 4)
    return y.transpose(1, 2).view(b, n, -1, 4).reshape(b, n, -1).contiguous()


def in_chunks(net: Net, x: Tensor) -> Tensor:
    b, n, c = x.shape
    q, k, v = net.qkv(x).chunk(3, -1)
    q, k, v = (part.view(b, n, 3, c // 3).transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=0.7).transpose(1, 2).flatten(2)


def by_einsum(net: Net, x: Tensor) -> Tensor:
    b, n, c = x.shape
    q, k, v = net.qkv(x).reshape(b, n, 3, 3, c // 3).permute(2, 0, 3, 1, 4)
    return torch.einsum("b h i j, b h j d -> b i h d", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v).flatten(2)


def of_images(net: Net, x: Tensor) -> Tensor:
    """Channels before the places, as behind a convolution."""
    qkv = net.qkv(x).transpose(1, 2).reshape(x.size(0), 3, 3, 4, -1).permute(1, 0, 2, 4, 3)
    y = (qkv[0] @ qkv[1].transpose(-2, -1)).softmax(dim=-1) @ qkv[2]
    return y.permute(0, 1, 3, 2).reshape(x.size(0), 12, -1).transpose(1, 2)


FORMS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    form.__name__: form for form in (as_timm, by_hand, as_transformers, as_traced_transformers, in_chunks, by_einsum, of_images)
}


def attention_net(form: str) -> Graph:
    separate = (
        {name: nn.Linear(12, 12) for name in ("q", "k", "v")} if form == "as_transformers" else {"qkv": nn.Linear(12, 36)}
    )
    return traced(
        Net(
            lambda net, x: net.out(net.proj(FORMS[form](net, net.stem(x))).mean(1)),
            **{
                "stem": nn.Linear(4, 12),
                **separate,
                "drop": nn.Dropout(0.1),
                "proj": nn.Linear(12, 12),
                "out": nn.Linear(12, 3),
            },
            bias=nn.Parameter(torch.zeros(3, 5, 5)),
        ),
        X,
    )


@pytest.mark.parametrize("form", FORMS)
def test_heads_are_removed_whole(form: str) -> None:
    graph = attention_net(form)
    makers = ("q", "k", "v") if form == "as_transformers" else ("qkv",)
    site = next(site for site in find_sites(graph) if site.layers == makers)
    assert (site.channels, site.unit) == (3, "heads")
    smaller = assert_compact_is_masked(graph, {site: without(3, 1), "stem": without(12, 0)}, (X[:2],))
    assert {smaller.module.get_submodule(name).out_features for name in makers} == {24 // len(makers)}
    assert smaller.module.proj.in_features == 8
    last = find_site(smaller, site.name)
    assert last.original == (0, 2)
    twice = assert_compact_is_masked(smaller, {last: torch.tensor([False, True])}, (X[:2],))
    once = compact(graph, {site: torch.tensor([False, False, True]), "stem": without(12, 0)})
    assert_same(run(twice.module, X), run(once.module, X))


def test_a_removed_head_is_a_zeroed_slice_of_what_the_projection_reads() -> None:
    graph = attention_net("as_timm")
    hooked = attention_net("as_timm").module
    kept = without(12, 4, 5, 6, 7)
    hooked.proj.register_forward_pre_hook(lambda module, inputs: (inputs[0] * kept,))
    assert_same(run(compact(graph, {"qkv": without(3, 1)}).module, X), run(hooked, X))


def test_heads_are_measured_under_masks() -> None:
    graph = attention_net("by_hand")
    examples = Examples(X, torch.tensor([0, 1, 2]))
    masks = torch.stack([without(3, 0), without(3, 1, 2)])
    wanted = [cross_entropy(run(masked(graph, {"qkv": mask}), X), examples.targets).mean() for mask in masks]
    found = split_for(graph, find_site(graph, "qkv"), examples, batch=2).measure(masks, [cross_entropy])
    assert_same(found[:, 0], torch.stack(wanted), atol=1e-11)


def test_slopes_of_heads_in_windows() -> None:
    """Two windows of an image each are a row of their own, as in Swin; a mask goes with its image."""

    def body(net: Net, x: Tensor) -> Tensor:
        x = x.reshape(x.size(0) * 2, 3, 4)
        q, k, v = net.qkv(x).reshape(-1, 3, 3, 3, 4).permute(2, 0, 3, 1, 4)
        y = net.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return net.out(y.reshape(-1, 6, 4).mean(1))

    x = random_tensor(3, 6, 4, seed=8)
    graph = traced(Net(body, qkv=nn.Linear(4, 36), proj=nn.Linear(12, 4), out=nn.Linear(4, 3)), x)
    examples, masks = Examples(x, torch.tensor([0, 1, 2])), torch.stack([without(3, 0), without(3, 1), without(3, 2)])
    (found,) = split_for(graph, find_site(graph, "qkv"), examples, batch=3).slopes([masks], cross_entropy)
    for row, (mask, target) in enumerate(zip(masks, examples.targets, strict=True)):
        loss = cross_entropy(run(masked(graph, {"qkv": mask}), x)[row : row + 1], target[None])
        assert_same(found[row, :1], loss)


# ---- widths within heads: features of queries and keys, and of values ----------------------------------------------------


def with_zeros(graph: Graph, **features: tuple[int, ...]) -> nn.Module:
    """The network of `attention_net` in which these features of all heads are zero, of queries, keys or values."""
    module = copy.deepcopy(graph.module)
    for part, removed in features.items():
        rows = [head * 4 + feature for head in range(3) for feature in removed]
        layer = getattr(module, part, None)
        if layer is None:
            layer, rows = module.qkv, [row + 12 * "qkv".index(part) for row in rows]
        with torch.no_grad():
            layer.weight[rows] = 0
            layer.bias[rows] = 0
    return module


@pytest.mark.parametrize("form", FORMS)
def test_features_are_removed_from_every_head(form: str) -> None:
    """Queries' features that are zero in every head do not count, whatever the keys'; the scale stays that of whole heads."""
    graph = attention_net(form)
    names = ["q.query_key", "v.value"] if form == "as_transformers" else ["qkv.query_key", "qkv.value"]
    sites = find_sites(graph, "widths")
    assert [(site.name, site.channels, site.unit) for site in sites] == [(name, 4, "features") for name in names]
    smaller = assert_compact_is_masked(graph, {names[0]: without(4, 1), names[1]: without(4, 0, 2)}, (X[:2],))
    assert_same(run(smaller.module, X), run(with_zeros(graph, q=(1,), v=(0, 2)), X))
    assert_same(run(smaller.module, X), run(with_zeros(graph, k=(1,), v=(0, 2)), X))
    made = {name: part.out_features for name, part in smaller.module.named_modules() if isinstance(part, nn.Linear)}
    if form == "as_transformers":
        assert (made["q"], made["k"], made["v"]) == (9, 9, 6)
    else:
        assert made["qkv"] == 9 + 9 + 6
    assert smaller.module.proj.in_features == 6
    left = {site.name: site.original for site in find_sites(smaller, "widths")}
    assert left == {names[0]: (0, 2, 3), names[1]: (1, 3)}
    heads = next(site for site in find_sites(smaller) if site.channels == 3)
    fewer = assert_compact_is_masked(smaller, {heads: without(3, 1)}, (X[:2],))
    least = assert_compact_is_masked(fewer, {names[0]: without(3, 0)}, (X[:2],))
    assert find_site(least, names[0]).original == (2, 3)
    assert_same(run(replay(graph, least.plan).module, X), run(least.module, X))


@pytest.mark.parametrize("itself", [True, False])
def test_features_are_removed_from_multihead_attention(itself: bool) -> None:
    graph = attention_module(itself=itself, batch_first=True)
    names = [site.name for site in find_sites(graph, "widths")]
    assert names == [f"attention.{c}_proj.{n}" if not itself else f"attention.in_proj.{n}" for c, n in WORDS]
    smaller = assert_compact_is_masked(graph, {name: without(4, 1) for name in names}, (X[:2],))
    assert smaller.module.get_submodule("attention.out_proj").in_features == 9


WORDS = (("q", "query_key"), ("v", "value"))


@pytest.mark.parametrize("engine", ["fx", "record", "export"])
def test_features_within_heads_by_every_engine(engine: Any) -> None:
    graph = trace(attention_net("as_timm").module, X, engine=engine)
    sites = find_sites(graph, "widths")
    assert [site.name.rpartition(".")[2] for site in sites] == ["query_key", "value"]
    assert_compact_is_masked(graph, {site: without(4, 3) for site in sites}, (X[:2],))


@pytest.mark.parametrize("form", FORMS)
def test_neurons_heads_and_features_are_cut_together(form: str) -> None:
    """As a network in which the features are zero loses the heads; weights that are left are entries of the original's."""
    graph = attention_net(form)
    first, heads = ("q", "v") if form == "as_transformers" else ("qkv", "qkv")
    names = [f"{first}.query_key", f"{heads}.value"]
    sites = find_sites(graph, head_widths=True)
    assert [site.name for site in sites] == ["stem", *names, heads, "proj"]
    masks = {"stem": without(12, 0), heads: without(3, 1), names[0]: without(4, 1), names[1]: without(4, 0, 2)}
    smaller = assert_compact_is_masked(graph, masks, (X[:2],))
    zeroed = graph.with_module(with_zeros(graph, q=(1,), v=(0, 2)))
    assert_same(run(smaller.module, X), run(masked(zeroed, {"stem": without(12, 0), heads: without(3, 1)}), X))
    made = [part.out_features for name, part in smaller.module.named_modules() if name in ("q", "k", "v", "qkv")]
    assert sum(made) == 2 * (3 + 3 + 2)
    assert smaller.module.proj.in_features == 2 * 2
    assert {site.name: site.original for site in find_sites(smaller, head_widths=True) if site.channels < 11} == {
        names[0]: (0, 2, 3),
        names[1]: (1, 3),
        heads: (0, 2),
    }
    weights = graph.module.state_dict()
    for name, left in smaller.module.state_dict().items():
        assert_same(take(weights[name], smaller.kept.get(name, ())), left, atol=0)
    assert len(smaller.plan.steps) == 2
    assert_same(run(replay(graph, smaller.plan).module, X), run(smaller.module, X))


def test_features_of_an_attention_that_is_folded_away_go_with_it() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        x = net.stem(x)
        return net.out((x + net.proj(as_timm(net, x))).mean(1))

    layers = {"stem": nn.Linear(4, 12), "qkv": nn.Linear(12, 36), "proj": nn.Linear(12, 12), "out": nn.Linear(12, 3)}
    graph = traced(Net(body, **layers), X)
    masks = {"qkv": without(3, 0, 1, 2), "qkv.value": without(4, 1), "qkv.query_key": without(4, 0)}
    smaller = assert_compact_is_masked(graph, masks, (X[:2],))
    assert not find_sites(smaller, "widths")
    assert [name for name, part in smaller.module.named_modules() if isinstance(part, nn.Linear)] == ["stem", "out"]


def test_features_that_stay_do_not_hinder_a_cut_of_heads() -> None:
    graph = attention_net("as_timm")
    smaller = assert_compact_is_masked(graph, {"qkv": without(3, 1), "qkv.value": without(4)}, (X[:2],))
    assert [len(step) for step in smaller.plan.steps] == [1]


def test_two_selections_of_entries_are_one() -> None:
    """Also where every row keeps columns of its own, as in a grouped convolution."""
    x = random_tensor(4, 6, 3)
    rows, columns, each = torch.tensor([3, 1, 0]), torch.tensor([5, 0, 2, 4]), torch.tensor([[0, 2], [1, 3], [3, 3]])
    again, other = torch.tensor([2, 0]), torch.tensor([[1, 0], [0, 1]])
    chosen = [((rows,), (None, columns)), ((rows, columns), (again, torch.tensor([1]))), ((rows, each), (again,))]
    for first, then in [*chosen, ((rows, each), (None, torch.tensor([1]))), ((rows, each), (again, other)), ((), (rows,))]:
        assert_same(take(take(x, first), then), take(x, compose_kept(first, then)), atol=0)


def test_normed_queries_keep_their_features() -> None:
    """A norm over the features of a head counts all of them."""

    def body(net: Net, x: Tensor) -> Tensor:
        q, k, v = net.qkv(x).reshape(x.size(0), 5, 3, 3, 4).permute(2, 0, 3, 1, 4)
        return net.out(F.scaled_dot_product_attention(net.norm(q), net.norm(k), v).transpose(1, 2).flatten(2))

    graph = traced(Net(body, qkv=nn.Linear(4, 36), norm=nn.LayerNorm(4), out=nn.Linear(12, 2)), X)
    assert [site.name for site in find_sites(graph, "widths")] == ["qkv.value"]


@pytest.mark.parametrize("form", ["matmul", "einsum", "scaled_dot_product_attention"])
def test_queries_and_keys_without_heads_lose_features_together(form: str) -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        q, k, v = net.q(x), net.k(x), net.v(x)
        if form == "scaled_dot_product_attention":
            return net.out(F.scaled_dot_product_attention(q, k, v))
        scores = q @ k.transpose(1, 2) if form == "matmul" else torch.einsum("bid,bjd->bij", q, k)
        return net.out(scores.softmax(-1) @ v)

    layers = {"q": nn.Linear(4, 6), "k": nn.Linear(4, 6), "v": nn.Linear(4, 8), "out": nn.Linear(8, 3)}
    graph = traced(Net(body, **layers), X)
    assert {site.name: site.layers for site in find_sites(graph)} == {"q": ("q", "k"), "k": ("q", "k"), "v": ("v",)}
    smaller = assert_compact_is_masked(graph, {"q": without(6, 0, 3), "k": without(6, 3, 4), "v": without(8, 7)}, (X[:2],))
    assert [smaller.module.get_submodule(name).out_features for name in "qkv"] == [3, 3, 7]


def test_a_single_head_loses_features() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        q, k, v = net.qkv(x).reshape(x.size(0), 5, 3, 1, 4).permute(2, 0, 3, 1, 4)
        return net.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    graph = traced(Net(body, qkv=nn.Linear(4, 12), out=nn.Linear(4, 2)), X)
    assert [(site.name, site.channels) for site in find_sites(graph)] == [("qkv", 12)]
    assert not find_sites(graph, "widths")
    smaller = assert_compact_is_masked(graph, {"qkv": without(12, 0, 5, 9)}, (X[:2],))  # of queries, keys and values
    assert (smaller.module.qkv.out_features, smaller.module.out.in_features) == (2 + 2 + 3, 3)
    least = assert_compact_is_masked(smaller, {"qkv": without(7, 0)}, (X[:2],))
    assert find_site(least, "qkv").original == (3, 7, 8, 10, 11)


def test_heads_of_a_single_feature_are_heads() -> None:
    """Two cuts leave one feature of queries and keys, one of values, and one head; each of them is found by its name."""
    graph = attention_net("as_timm")
    alone = {"qkv.query_key": without(4, 0, 1, 3), "qkv.value": without(4, 1, 2, 3)}
    thin = assert_compact_is_masked(graph, alone, (X[:2],))
    assert [(s.name, s.channels, s.unit) for s in find_sites(thin, head_widths=True) if s.channels < 12] == [
        ("qkv.query_key", 1, "features"),
        ("qkv.value", 1, "features"),
        ("qkv", 3, "heads"),
    ]
    last = assert_compact_is_masked(thin, {"qkv": without(3, 0, 2)}, (X[:2],))
    assert {s.name: s.original for s in find_sites(last, head_widths=True) if s.channels < 12} == {
        "qkv.query_key": (2,),
        "qkv.value": (0,),
        "qkv": (1,),
    }
    together = compact(graph, {**alone, "qkv": without(3, 0, 2)})
    assert_same(run(together.module, X), run(last.module, X))


def test_sites_of_linear_attention_with_shared_keys_have_names_of_their_own() -> None:
    """Where two queries' heads of one feature share keys and values, the same filter could go behind two nodes."""

    def body(net: Net, x: Tensor) -> Tensor:
        q = net.q(x).view(x.size(0), 5, 6, 1).transpose(1, 2).softmax(-1)
        k, v = (layer(x).view(x.size(0), 5, 3, 1).transpose(1, 2).repeat_interleave(2, 1) for layer in (net.k, net.v))
        return net.out((q @ (k.softmax(-2).transpose(-2, -1) @ v)).transpose(1, 2).flatten(2))

    graph = traced(Net(body, q=nn.Linear(4, 6), k=nn.Linear(4, 3), v=nn.Linear(4, 3), out=nn.Linear(6, 2)), X)
    names = [site.name for site in find_sites(graph)]
    assert "q" in names
    assert len(set(names)) == len(names)
    smaller = assert_compact_is_masked(graph, {"q": without(6, 1)}, (X[:2],))
    assert [smaller.module.get_submodule(name).out_features for name in "qkv"] == [5, 3, 3]


def test_one_norm_of_the_features_of_queries_and_of_a_shared_key() -> None:
    """Heads of queries that are turned by their places are a stream: the norm is not over them, and reads one key, too."""

    def body(net: Net, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(x.size(0), 5, -1, 4).transpose(1, 2) for layer in (net.q, net.k, net.v))
        q, k = (y * 0.3 + torch.cat([-y[..., 2:], y[..., :2]], -1) * 0.7 for y in (net.norm(q), net.norm(k)))
        k, v = (y.repeat_interleave(3, 1) for y in (k, v))
        return net.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean(1)

    layers = {
        "q": nn.Linear(4, 12),
        "k": nn.Linear(4, 4),
        "v": nn.Linear(4, 4),
        "norm": nn.LayerNorm(4),
        "out": nn.Linear(12, 2),
    }
    graph = traced(Net(body, **layers), X)
    site = next(site for site in find_sites(graph, "stream") if "q" in site.layers)
    assert {point.axis for point in site.points} == {1}
    assert_compact_is_masked(graph, {site: without(3, 1)}, (X[:2],))
    examples, mask = Examples(X, torch.tensor([0, 1, 1])), without(3, 1)
    wanted = cross_entropy(run(masked(graph, {site: mask}), X), examples.targets).mean()
    assert_same(split_for(graph, site, examples, batch=2).measure(mask[None], [cross_entropy])[0, 0], wanted, atol=1e-11)


def attention_module(*, itself: bool, **options: Any) -> Graph:
    """With nn.MultiheadAttention, of one tensor or of two, the second of other widths."""
    weights = options.pop("need_weights", True)
    other = {} if itself else {"kdim": 6, "vdim": 6}

    def body(net: Net, x: Tensor) -> Tensor:
        query = net.stem(x)
        key = query if itself else net.other(x)
        return net.out(net.attention(query, key, key, need_weights=weights, attn_mask=net.mask)[0])

    attention = nn.MultiheadAttention(12, 3, **other, **options)
    layers = {"stem": nn.Linear(4, 12), "other": nn.Linear(4, 6), "attention": attention, "out": nn.Linear(12, 3)}
    mask = torch.ones(5 if options.get("batch_first") else 3, 5 if options.get("batch_first") else 3).triu(1).bool()
    return traced(Net(body, **layers, mask=mask), X)


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize(
    "options", [{"batch_first": True}, {"bias": False}, {"dropout": 0.1, "need_weights": False}, {"dropout": 0.1}], ids=str
)
def test_heads_of_multihead_attention_are_removed(itself: bool, options: dict[str, Any]) -> None:
    graph = attention_module(itself=itself, **options)
    site = next(site for site in find_sites(graph) if site.channels == 3)
    assert site.layers == (("attention.in_proj",) if itself else tuple(f"attention.{c}_proj" for c in "qkv"))
    masks = {site: without(3, 1), "stem": without(12, 0), "attention.out_proj": without(12, 4)}
    smaller = assert_compact_is_masked(graph, masks, (X[:2],) if options.get("batch_first") else (X[:, :2],))
    assert smaller.module.get_submodule("attention.out_proj").in_features == 8
    last = find_site(smaller, site.name)
    assert last.original == (0, 2)
    alone = assert_compact_is_masked(smaller, {last: torch.tensor([False, True])})
    assert not any(layer in site.layers for layer in last.layers for site in find_sites(alone) if site.channels > 1)


@pytest.mark.parametrize("second", ["of the first", "with its keys", "with its queries", "unread"])
def test_heads_of_one_attention_right_behind_another_are_removed(second: str) -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        h = net.stem(x)
        y, _ = net.first(h, h, h)
        query, key = {"with its keys": (h, y), "with its queries": (y, h)}.get(second, (y, y))
        z, _ = net.second(query, key, key)
        return net.out(y if second == "unread" else z)

    first, again = (nn.MultiheadAttention(12, 3, batch_first=True) for _ in range(2))
    graph = traced(Net(body, stem=nn.Linear(4, 12), first=first, second=again, out=nn.Linear(12, 3)), X)
    heads = [site for site in find_sites(graph) if site.unit == "heads"]
    assert [site.channels for site in heads] == [3, 3]
    smaller = assert_compact_is_masked(graph, {site: without(3, 1) for site in heads}, (X[:2],))
    assert smaller.module.get_submodule("first.out_proj").in_features == 8


@pytest.mark.parametrize("keys", ["its own result", "the input"])
def test_heads_of_an_attention_that_reads_its_own_result_are_removed(keys: str) -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        h = net.stem(x)
        y, _ = net.attention(h, h, h, need_weights=False)
        key = y if keys == "its own result" else h
        return net.out(net.attention(y, key, key, need_weights=False)[0])

    attention = nn.MultiheadAttention(12, 3, batch_first=True)
    graph = traced(Net(body, stem=nn.Linear(4, 12), attention=attention, out=nn.Linear(12, 3)), X)
    (heads,) = (site for site in find_sites(graph) if site.unit == "heads")
    smaller = assert_compact_is_masked(graph, {heads: without(3, 1)}, (X[:2],))
    assert smaller.module.get_submodule("attention.out_proj").in_features == 8


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention_is_traced_in_double_precision(heads: int, bias: bool) -> None:
    attention = nn.MultiheadAttention(12, heads, bias=bias, batch_first=True)
    x = random_tensor(3, 5, 12)
    assert x.dtype is torch.float64
    model = Net(
        lambda net, x: net.out(net.attention(x, x, x, need_weights=False)[0]), attention=attention, out=nn.Linear(12, 3)
    )
    graph = trace(randomise_(model.double().eval()), x)
    assert "attention.out_proj" in [site.name for site in find_sites(graph)]
    assert_same(run(graph.module, x), run(model, x))


def test_multihead_attention_computes_what_torch_does_in_train_mode() -> None:
    """With the same random numbers, dropout drops the same weights; gradients reach the thirds of the packed weight."""
    attention = nn.MultiheadAttention(12, 3, dropout=0.3, batch_first=True)
    model = Net(lambda net, x: net.attention(x, x, x, need_weights=False)[0], attention=attention).double().train()
    x = random_tensor(2, 5, 12)
    graph = trace(model, x)
    found = []
    for network in (model, graph.module):
        torch.manual_seed(3)
        network(x).square().sum().backward()
        found.append(dict(network.named_parameters()))
    theirs, ours = found
    assert_same(ours["attention.in_proj.weight"].grad, theirs["attention.in_proj_weight"].grad)
    assert_same(ours["attention.out_proj.weight"].grad, theirs["attention.out_proj.weight"].grad)


@pytest.mark.parametrize("changed", ["weights are read", "its result is an output", "padding", "bias_kv", "leaf"])
def test_attention_that_is_not_of_this_form_keeps_its_heads(changed: str) -> None:
    def body(net: Net, x: Tensor) -> Any:
        h = net.stem(x)
        if changed == "its result is an output":
            return net.attention(h, h, h)
        y, weights = net.attention(h, h, h, key_padding_mask=net.padding if changed == "padding" else None)
        return (net.out(y), weights) if changed == "weights are read" else net.out(y)

    attention = nn.MultiheadAttention(12, 3, batch_first=True, add_bias_kv=changed == "bias_kv")
    padding = torch.tensor([[False, False, False, False, True]] * 3)
    x = random_tensor(3, 5, 4)
    model = randomise_(Net(body, stem=nn.Linear(4, 12), attention=attention, out=nn.Linear(12, 3), padding=padding))
    graph = trace(model, x, leaves=["attention"] if changed == "leaf" else None)
    assert not list(find_sites(graph))
    assert "no rule for MultiheadAttention" in {refused.reason.split(" at ")[0] for refused in find_sites(graph).unprunable}


def test_heads_and_hidden_layers_of_torchs_transformer_are_removed() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    graph = traced(
        Net(lambda net, x: net.out(net.encoder(net.stem(x))), stem=nn.Linear(4, 12), encoder=encoder, out=nn.Linear(12, 3)), X
    )
    sites = {site.name: site.channels for site in find_sites(graph)}
    for i in (0, 1):
        assert sites[f"encoder.layers.{i}.self_attn.in_proj"] == 3
        assert sites[f"encoder.layers.{i}.linear1"] == 20
    assert_compact_is_masked(graph, random_keep(list(find_sites(graph)), 0), (X[:2],))


# ---- what windows of attention need: rolls, parts of an image by computed sizes, functions that torch.fx does not enter ---

PARTS: dict[str, tuple[Callable[[Net, Tensor], Tensor], bool]] = {  # and whether layer `a` can lose filters
    "rows": (lambda net, x: net.o(net.a(x)[:, :, : net.b(x).size(2) - 1].relu()), True),
    "as many rows as channels": (lambda net, x: net.o(net.a(x)[:, :, : net.b(x).size(1) - 2]) + net.p(net.b(x)).mean(), True),
    "as many channels": (lambda net, x: net.o(net.a(x)[:, : net.b(x).size(1)].relu()) + net.p(net.b(x)), False),
    "rolled": (lambda net, x: net.o(torch.roll(net.a(x), (1, 2), (2, 3))), True),
    "rolled channels": (lambda net, x: net.o(torch.roll(net.a(x), 1, 1)), False),
    "rolled as a whole": (lambda net, x: net.o(net.a(x).roll(3)), False),
}


@pytest.mark.parametrize("engine", ["fx", "record"])
@pytest.mark.parametrize("part", PARTS)
def test_parts_and_rolls_of_an_image(part: str, engine: Any) -> None:
    body, prunable = PARTS[part]
    x = random_tensor(2, 3, 10, 10)
    graph = traced(Net(body, a=conv(3, 8), b=conv(3, 8), o=conv(8, 2), p=conv(8, 2)), x, engine=engine)
    sites = list(find_sites(graph))
    assert ("a" in [site.name for site in sites]) == prunable
    assert_compact_is_masked(graph, random_keep(sites, 1), (random_tensor(3, 3, 10, 10),))


def hidden(net: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(net(x)) if x.dim() == 4 else x


torch.fx.wrap("hidden")


def test_a_function_that_torch_fx_does_not_enter_is_recorded() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        return net.o(hidden(net.b, net.a(x)))

    graph = traced(Net(body, a=conv(3, 6), b=conv(6, 8), o=conv(8, 2)), random_tensor(2, 3, 8, 8))
    assert [site.name for site in find_sites(graph)] == ["a", "b"]
    assert_compact_is_masked(graph, random_keep(list(find_sites(graph)), 0))


def test_a_network_that_changes_its_settings_for_small_images_is_captured_as_it_is_for_the_example() -> None:
    """Swin of transformers keeps the smaller window that it takes for a small image."""

    def body(net: Any, x: Tensor) -> Tensor:
        net.window = min(getattr(net, "window", 64), int(x.shape[-1]))
        assert x.shape[-1] % 64 or net.window == 64, "windows of a smaller image"
        return net.o(torch.relu(net.a(x)))

    graph = traced(Net(body, a=conv(3, 6), o=conv(6, 2)), random_tensor(2, 3, 64, 64))
    assert_compact_is_masked(graph, {"a": without(6, 2)}, (random_tensor(3, 3, 64, 64),))
