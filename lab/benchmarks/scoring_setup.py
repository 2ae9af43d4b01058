"""What the benchmark of scoring works on: networks, images, sites, and how much of everything the two forms measure."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import conditions
from secateurs import Graph, Site, find_sites, sample_masks, trace
from secateurs._util.download import home
from secateurs._util.files import write_text
from secateurs.data import Data, Examples, load_cifar10, split, subset
from secateurs.data.dataset import generator_for
from secateurs.errors import InvalidInput
from secateurs.metrics import Measure, cross_entropy
from secateurs.models import example_input, load_public
from secateurs.scoring.cache import MeasurementCache, context_of, mask_key
from secateurs.scoring.engine import MaskedNetwork, split_for
from secateurs.speed.timing import using_threads

CORES = os.cpu_count() or 1
PAPER_MASKS = 10  # for each filter
PAPER_IMAGES = 45_000
BLOCK = 32  # masks that are measured between two writes to the store

Sites = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Size:
    """Of an ensemble: masks for each filter, and images."""

    masks: float
    images: int

    def count(self, site: Site) -> int:
        return max(2, round(self.masks * site.channels))


@dataclass(frozen=True)
class Form:
    """How much is measured."""

    name: str
    speed_sites: Sites
    speed_masks: int
    speed_images: int
    repeats: int
    quality_sites: Sites
    reference: Size
    paper: Size  # the ensemble that stands for the paper's procedure
    search_images: int
    seeds: int  # runs of each estimator that draws by chance
    whole_sites: tuple[str, ...]  # of ResNet-20, where `fast` is timed, each for those around it; empty: all
    growth: int  # repeats
    growth_images: int  # times as many as the quick form takes


QUICK = Form(
    name="quick",
    speed_sites={"resnet20": ("conv1", "layer1.1.conv2", "layer2.1.conv1", "layer3.1.conv2")},
    speed_masks=6,
    speed_images=256,
    repeats=3,
    quality_sites={"resnet20": ("layer3.1.conv1",)},
    reference=Size(4, 512),
    paper=Size(3, 256),
    search_images=1000,
    seeds=2,
    whole_sites=("layer1.1.conv1", "layer2.1.conv1", "layer3.1.conv1"),
    growth=2,
    growth_images=1,
)
# an inner site and one before the shortcut of each stage, one of each stage first: a run that is stopped has seen them all
INNER_AND_BEFORE = (
    *("layer3.1.conv1", "layer2.1.conv2", "layer1.1.conv1"),
    *("layer3.1.conv2", "layer2.1.conv1", "layer1.1.conv2"),
)
FULL = Form(
    name="full",
    speed_sites={"resnet20": (), "resnet56": ("layer1.4.conv1", "layer2.4.conv2", "layer3.4.conv1")},
    speed_masks=4,
    speed_images=256,
    repeats=3,
    quality_sites={"resnet20": INNER_AND_BEFORE, "resnet56": ("layer3.4.conv1", "layer2.4.conv2")},
    reference=Size(20, 4096),
    paper=Size(PAPER_MASKS, 2048),
    search_images=5000,
    seeds=3,
    whole_sites=(),
    growth=5,
    growth_images=4,
)


class Bench:
    """Networks and images, loaded when first wanted; measured masks, kept on disk; results, written as they come."""

    def __init__(self, form: Form, out: Path, *, resume: bool) -> None:
        self.form, self.out = form, out
        self.folder = home() / "bench" / f"scoring-{form.name}"
        self.folder.mkdir(parents=True, exist_ok=True)
        database = self.folder / "measured.sqlite"
        if not resume:
            database.unlink(missing_ok=True)
        self.store = MeasurementCache(database)
        self.report = self._known(resume)
        self._graphs: dict[str, Graph] = {}
        self.memory: dict[Hashable, Any] = {}  # what two parts need and one has measured

    def _known(self, resume: bool) -> dict[str, Any]:
        if resume and self.out.exists():
            known: dict[str, Any] = json.loads(self.out.read_text())
            if known["form"] != self.form.name:
                raise InvalidInput(
                    f"{self.out} holds the {known['form']} form, not the {self.form.name} one: give another --out."
                )
            return known
        return {"form": self.form.name, "conditions": asdict(conditions()), "units": {}}

    def unit(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure what is called `name` unless it is known, and write it down."""
        if name in self.report["units"]:
            return
        sys.stderr.write(f"{name} …\n")
        start, load = perf_counter(), os.getloadavg()[0]
        result = measure()
        took = perf_counter() - start
        self.report["units"][name] = {**result, "took": round(took, 1), "load": round(load, 1)}
        write_text(self.out, json.dumps(self.report, indent=1) + "\n")
        sys.stderr.write(f"{name}: {took:.0f} s\n")

    def graph(self, model: str) -> Graph:
        """The traced network with its public weights."""
        if model not in self._graphs:
            depth = int(model.removeprefix("resnet"))
            self._graphs[model] = trace(load_public(depth), example_input(model))
        return self._graphs[model]

    def sites(self, model: str) -> list[Site]:
        return list(find_sites(self.graph(model)))

    def site(self, model: str, name: str) -> Site:
        return next(site for site in self.sites(model) if site.name == name)

    @cached_property
    def data(self) -> Data:
        """CIFAR-10 as the public weights demand it: they have seen all training images."""
        return load_cifar10("public", download=False)

    @cached_property
    def pools(self) -> tuple[Examples, Examples]:
        """Training images for the reference, and for what is compared with it: none in common."""
        reference, compared = split(self.data.train, (10_000, len(self.data.train) - 10_000), seed=0)
        return reference, compared

    def images(self, count: int, *, seed: int = 0) -> Examples:
        return subset(self.pools[1], count, seed=seed).ready()

    @cached_property
    def search(self) -> Examples:
        return subset(self.data.search, self.form.search_images, seed=0).ready()


@dataclass(frozen=True, eq=False)
class Losses:
    """The loss of every mask on every image, and what measuring it took."""

    masks: Tensor  # (M, C)
    values: Tensor  # (M, N) float64
    seconds: float  # for all of them, what precedes the first mask included


def draw(site: Site, count: int, purpose: str) -> Tensor:
    """Masks of the paper's design."""
    return sample_masks(site.channels, count, generator=generator_for(0, purpose, site.name))


def measured_losses(bench: Bench, model: str, site: Site, masks: Tensor, examples: Examples) -> Losses:
    """The losses of every mask on every image on all cores, those in the store not measured again."""
    about = context_of(model, site.name, examples.digest())
    keys = [mask_key(mask) for mask in masks]
    network: MaskedNetwork | None = None
    with using_threads(CORES):
        for start in range(0, len(masks), BLOCK):
            block = [i for i in range(start, min(start + BLOCK, len(masks))) if bench.store.get(about, [keys[i]])[0] is None]
            if not block:
                continue
            began = perf_counter()
            network = network or split_for(bench.graph(model), site, examples)
            values = network.values(masks[block], cross_entropy).float()
            each = torch.full((len(block), 1), (perf_counter() - began) / len(block))
            bench.store.put(about, [keys[i] for i in block], list(torch.cat([each, values], 1)))
    rows = torch.stack([row for row in bench.store.get(about, keys) if row is not None]).double()
    return Losses(masks, rows[:, 1:], float(rows[:, 0].sum()))


def stands_for(sites: Sequence[Site], measured: Collection[str]) -> dict[str, int]:
    """For each measured site, the filters of all the sites to which it is the nearest in network order."""
    places = [place for place, site in enumerate(sites) if site.name in measured]
    filters = dict.fromkeys(places, 0)
    for place, site in enumerate(sites):
        filters[min(places, key=lambda other: abs(other - place))] += site.channels
    return {sites[place].name: count for place, count in filters.items()}


def removal_masks(orders: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Masks (orders × shares, C) without the given share of the filters, the first of each order gone first."""
    channels = len(orders[0])
    masks = torch.ones(len(orders) * len(shares), channels, dtype=torch.bool)
    for row, (ids, share) in enumerate((ids, share) for ids in orders for share in shares):
        masks[row, ids[: round(share * channels)]] = False
    return masks


def seconds_of(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def means(network: MaskedNetwork, masks: Tensor, measure: Measure) -> Tensor:
    """Mean of one measure under each mask, (M,)."""
    return network.measure(masks, [measure])[:, 0]
