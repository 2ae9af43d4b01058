"""Part 4: how the engine's time grows with masks, images and filters, and its memory with the budget it is given."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.scoring_setup import Bench, draw, means, seconds_of
from secateurs import Graph, Site, compact, find_site
from secateurs.data import Examples
from secateurs.metrics import cross_entropy
from secateurs.scoring.engine import split_for

MODEL, SITE = "resnet20", "layer2.1.conv1"
MASKS = (8, 16, 24, 32)  # on FEW_IMAGES
IMAGES = (128, 256, 384, 512)  # under FEW_MASKS
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the site's filters, as many masks as filters are left, on FEW_IMAGES
FEW_MASKS, FEW_IMAGES = 8, 128
BUDGETS = (0, 4 * 2**20, 16 * 2**20, 64 * 2**20)
MEMORY_IMAGES = 768

Series = list[tuple[float, Callable[[], Any]]]


def measure_growth(bench: Bench) -> dict[str, Any]:
    """Seconds for growing masks, images and filters, each with the straight line through them."""
    graph, site = bench.graph(MODEL), bench.site(MODEL, SITE)
    series = {
        "masks": by_masks(bench, graph, site),
        "images": by_images(bench, graph, site),
        "filters": by_filters(bench, graph, site),
    }
    return {
        "model": MODEL,
        "site": SITE,
        "few images": len(images(bench, FEW_IMAGES)),
        **{name: line(points, bench.form.growth) for name, points in series.items()},
    }


def by_masks(bench: Bench, graph: Graph, site: Site) -> Series:
    network, masks = split_for(graph, site, images(bench, FEW_IMAGES)), draw(site, max(MASKS), "growth")
    return [(count, partial(means, network, masks[:count], cross_entropy)) for count in MASKS]


def by_images(bench: Bench, graph: Graph, site: Site) -> Series:
    masks = draw(site, FEW_MASKS, "growth")
    sets = [images(bench, count) for count in IMAGES]
    networks = [split_for(graph, site, examples) for examples in sets]
    return [
        (len(examples), partial(means, network, masks, cross_entropy)) for examples, network in zip(sets, networks, strict=True)
    ]


def images(bench: Bench, count: int) -> Examples:
    """So many images, and more in the full form."""
    return bench.images(count * bench.form.growth_images)


def by_filters(bench: Bench, graph: Graph, site: Site) -> Series:
    """The same site with some of its filters removed, and as many masks as filters are left."""
    series: Series = []
    for share in SHARES:
        count = round(share * site.channels)
        narrow = compact(graph, {site: torch.arange(site.channels) < count}) if count < site.channels else graph
        place = find_site(narrow, site.name)
        network, masks = split_for(narrow, place, images(bench, FEW_IMAGES)), draw(place, count, "growth")
        series.append((count, partial(means, network, masks, cross_entropy)))
    return series


def line(series: Series, repeats: int) -> dict[str, Any]:
    """Least of the seconds over turns that visit every size, and the least-squares line through them."""
    for _, call in series:
        call()  # fills the cache and lets the engine choose its form
    turns = torch.tensor([[seconds_of(call) for _, call in series] for _ in range(repeats)], dtype=torch.float64)
    sizes = torch.tensor([size for size, _ in series], dtype=torch.float64)
    seconds = turns.amin(0)  # other programs only ever add time
    slope, start, r2 = fitted(sizes, seconds)
    return {"sizes": sizes.tolist(), "seconds": seconds.tolist(), "slope": slope, "start": start, "r2": r2}


def fitted(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Slope, value at 0 and r² of the line y ≈ start + slope · x."""
    dx, dy = x - x.mean(), y - y.mean()
    slope = (dx * dy).sum() / dx.square().sum()
    rest = dy - slope * dx
    return float(slope), float(y.mean() - slope * x.mean()), float(1 - rest.square().sum() / dy.square().sum())


def measure_memory(bench: Bench) -> dict[str, Any]:
    """Bytes of tensors that the engine keeps, and the most that are alive while it works, for growing budgets."""
    graph, site = bench.graph(MODEL), bench.site(MODEL, SITE)
    examples, masks = bench.images(MEMORY_IMAGES), draw(site, 1, "memory")
    rows = []
    for budget in BUDGETS:
        kept, peak = held_bytes(graph, site, examples, masks, budget)
        rows.append({"budget": budget, "kept": kept, "peak": peak})
    return {"model": MODEL, "site": SITE, "images": MEMORY_IMAGES, "rows": rows}


def held_bytes(graph: Graph, site: Site, examples: Examples, masks: Tensor, budget: int) -> tuple[int, int]:
    """Bytes kept between two calls, and most bytes when a loss is computed, above those before there was an engine.

    Counted by the garbage collector, not by the engine's own account.
    """
    seen: list[int] = []

    def watching(outputs: Any, targets: Any) -> Tensor:
        seen.append(live_bytes())
        return cross_entropy(outputs, targets)

    before = live_bytes()
    network = split_for(graph, site, examples, cache_bytes=budget)
    means(network, masks, cross_entropy)
    kept = live_bytes()
    means(network, masks, watching)
    return kept - before, max(seen) - before


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and found.device.type == "cpu":
            storage = found.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def cached(rows: Sequence[dict[str, int]]) -> list[int]:
    """What each budget keeps above what a budget of 0 keeps: without the split network's own weights."""
    weights = next(row["kept"] for row in rows if row["budget"] == 0)
    return [row["kept"] - weights for row in rows]
