"""Widths that modules store, and that evaluation does not read: set where one value is right, refused by name otherwise."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nets import assert_same, random_tensor, randomise_, run
from secateurs import Graph, compact, cut_, find_sites, trace
from secateurs.errors import NotInPlace

X = random_tensor(3, 3, 8, 8)


class Halves(nn.Module):
    """YOLO's C2f: evaluation takes chunks, an exporter calls `forward_split`, which reads a stored width."""

    def __init__(self, before: int, after: int, *, inner: int = 8) -> None:
        super().__init__()
        self.c = 8
        self.seen = 8  # nobody reads it
        self.first, self.last = nn.Conv2d(before, 16, 1), nn.Conv2d(24, after, 1)
        self.m = nn.ModuleList([nn.Sequential(nn.Conv2d(8, inner, 3, padding=1), nn.SiLU(), nn.Conv2d(inner, 8, 1))])

    def forward(self, x: Tensor) -> Tensor:
        found = list(F.silu(self.first(x)).chunk(2, 1))
        found.extend(part(found[-1]) for part in self.m)
        return self.last(torch.cat(found, 1))

    def forward_split(self, x: Tensor) -> Tensor:
        found = list(F.silu(self.first(x)).split((self.c, self.c), 1))
        found.extend(part(found[-1]) for part in self.m)
        return self.last(torch.cat(found, 1))


class Branches(nn.Module):
    """Two branches of stored widths; a training or an exporter may ask for them."""

    def __init__(self, *, widths: Any = (6, 10)) -> None:
        super().__init__()
        self.channels = widths
        self.a, self.b = nn.Conv2d(3, widths[0], 3), nn.Conv2d(3, widths[1], 3)
        self.out = nn.Conv2d(sum(widths), 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(torch.cat([self.a(x), self.b(x)], 1)))


class SplitBranches(Branches):
    def _forward_parts(self, x: Tensor) -> Tensor:
        both = torch.cat([self.a(x), self.b(x)], 1).split(list(self.channels), 1)
        return self.out(torch.cat([F.relu(part) for part in both], 1))


class Headed(nn.Module):
    """Makes another head of a stored width, as timm's `reset_classifier` does."""

    def __init__(self) -> None:
        super().__init__()
        self.features = self._width(12)
        self.gain = 12  # the same number, which evaluation reads
        self.body = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.ReLU())
        self.head = nn.Linear(12, 5)

    def _width(self, width: int) -> int:
        self.made = width
        return self.made

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)) * self.gain)

    def reset_classifier(self, classes: int) -> None:
        self.head = nn.Linear(self.features, classes).double()


class Written(Halves):
    """A second forward with its width in the code."""

    def forward_split(self, x: Tensor) -> Tensor:
        found = list(F.silu(self.first(x)).split((8, 8), 1))
        found.extend(part(found[-1]) for part in self.m)
        return self.last(torch.cat(found, 1))


class Trained(nn.Module):
    """Reads its width in train mode only, and returns something else by a method that is called like a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.a, self.bn, self.b = 7, nn.Conv2d(3, 14, 3), nn.BatchNorm2d(14), nn.Conv2d(14, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.bn(self.a(x))
        one, other = parts.split(self.c, 1) if self.training else parts.chunk(2, 1)
        return self.b(torch.cat([F.relu(other), F.relu(one)], 1))

    def forward_features(self, x: Tensor) -> Tensor:
        return self.a(x)


def pruned(model: nn.Module, **dropped: int) -> Graph:
    """The graph without the first channels, as many as given, of the sites of some layers; of the others, one channel less."""
    graph = trace(copy.deepcopy(model).eval(), X)
    keep = {}
    for site in find_sites(graph, "coupled"):
        gone = next((count for path, count in dropped.items() if path.replace("_", ".") in site.layers), 1)
        keep[site.name] = torch.arange(site.channels) >= gone
    return compact(graph, keep)


def assert_untouched(model: nn.Module, before: nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True))
    for one, other in zip(model.modules(), before.modules(), strict=True):
        assert {n: v for n, v in vars(one).items() if type(v) in (int, tuple, list)} == {
            n: v for n, v in vars(other).items() if type(v) in (int, tuple, list)
        }


def test_a_second_forward_gives_after_the_cut_what_the_first_gives() -> None:
    """The inner layers have eight channels too, and lose more of them: what a submodule does inside is not the block's."""
    model = randomise_(nn.Sequential(Halves(3, 6), nn.ReLU(), Halves(6, 4)))
    cut_(model, pruned(model, **{"0_m_0_0": 5, "2_m_0_0": 3}))
    for block in (model[0], model[2]):
        assert block.c == 7 == block.first.out_channels // 2
        assert block.seen == 8
        x = random_tensor(2, block.first.in_channels, 5, 5)
        assert_same(block.forward_split(x), run(block, x))
    assert (model[0].m[0][0].out_channels, model[2].m[0][0].out_channels) == (3, 5)


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_widths_are_set_element_by_element(kind: type) -> None:
    model = randomise_(SplitBranches(widths=kind((6, 10))))
    cut_(model, pruned(model, a=2, b=1))
    assert model.channels == kind((4, 9))
    assert_same(model._forward_parts(X), run(model, X))


def test_a_second_forward_tells_which_of_two_widths_is_meant() -> None:
    class Chosen(Branches):
        def forward_parts(self, x: Tensor) -> Tensor:
            one, other = torch.cat([self.a(x), self.b(x)], 1).split((self.first, self.b.out_channels), 1)
            return self.out(F.relu(torch.cat([one, other], 1)))

    model = Chosen(widths=(6, 6))
    model.first = 6
    del model.channels
    cut_(randomise_(model), pruned(model, a=2, b=1))
    assert model.first == 4 == model.a.out_channels
    assert_same(model.forward_parts(X), run(model, X))


def test_a_width_that_no_run_reads_is_set_with_a_warning() -> None:
    model = randomise_(Headed())
    with pytest.warns(UserWarning, match=r"Headed: features from 12 to 9, for reset_classifier"):
        cut_(model, pruned(model, body_0=3, body_2=3))
    assert (model.features, model.gain, model.made) == (9, 12, 12)
    model.reset_classifier(2)
    assert run(model, X).shape == (3, 2)


@pytest.mark.parametrize("gone", [1, 2], ids=["one meaning", "two meanings"])
def test_a_width_that_code_outside_the_model_may_ask_for(gone: int) -> None:
    model = randomise_(Branches(widths=(8, 8)))
    del model.channels
    model.num_features = 8
    one = gone == 1
    with nullcontext() if one else pytest.warns(UserWarning, match="Branches: num_features stays 8, and could be 6 or 7"):
        cut_(model, pruned(model, a=gone, b=1))
    assert model.num_features == (7 if one else 8)


def test_a_number_that_may_be_the_size_of_an_image_stays() -> None:
    class Sized(Branches):
        def resize(self, x: Tensor) -> Tensor:
            return F.interpolate(x, self.size)

    model = Sized(widths=(6, 6))
    del model.channels
    model.size = (6, 6)  # of what the convolutions give, too
    with pytest.warns(UserWarning, match=r"Sized: size stays \(6, 6\), which may be no width"):
        cut_(randomise_(model), pruned(model))
    assert model.resize(X).shape[-2:] == (6, 6)


def test_a_number_with_two_meanings_is_refused_by_name() -> None:
    class Asked(Branches):
        def describe(self, level: int) -> int:
            return self.channels[level]

    model = randomise_(Asked(widths=[8, 8]))
    before, smaller = copy.deepcopy(model), pruned(model, a=2, b=1)
    with pytest.raises(
        NotInPlace,
        match=r"Asked stores channels = \[8, 8\], which describe may read, and which could be \[6, 6\] or \[7, 7\] now",
    ):
        cut_(model, smaller)
    assert_untouched(model, before)


def test_a_second_forward_that_no_longer_works_is_refused() -> None:
    model = randomise_(nn.Sequential(Written(3, 4)))
    before = copy.deepcopy(model)
    with pytest.raises(NotInPlace, match=r"forward_split of Written at '0' gave what its forward gives, and .* does not"):
        cut_(model, pruned(model))
    assert_untouched(model, before)


def test_a_width_that_training_reads_is_set() -> None:
    model = randomise_(Trained())
    smaller = pruned(model)
    with pytest.warns(UserWarning, match=r"Trained: c from 7 to 6, for forward\b"):
        cut_(model, smaller)
    assert_same(run(model, X), run(smaller.module, X))
    assert model.train()(X).shape == (3, 4, 6, 6)
