"""Part 1: the exact engine against the naive way, same masks, same images, in turns; and against the machine's roof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.scoring_setup import PAPER_MASKS, Bench, draw, means, seconds_of, stands_for
from secateurs import Graph, Site, cost, masked
from secateurs.data import Examples
from secateurs.graph.layers import Mask
from secateurs.graph.masking import split_at
from secateurs.metrics import cross_entropy, loss
from secateurs.scoring.engine import split_for
from secateurs.speed.timing import speedup

ROOF_CHANNELS, ROOF_SIDE, ROOF_IMAGES = 128, 32, 32


class Naive:
    """What one would write first: the whole masked network, run over all images for every mask."""

    def __init__(self, graph: Graph, site: Site) -> None:
        self.network = masked(graph, {site: torch.ones(site.channels, dtype=torch.bool)}).eval()
        (self.mask,) = [part for part in self.network.modules() if isinstance(part, Mask)]

    def losses(self, masks: Tensor, examples: Examples) -> Tensor:
        found = []
        for keep in masks:
            self.mask.keep.copy_(keep)
            found.append(loss(self.network, examples))
        return torch.tensor(found, dtype=torch.float64)


class Roof:
    """One large convolution: the most that this machine gets out of torch."""

    def __init__(self) -> None:
        self.layer: nn.Module = nn.Conv2d(ROOF_CHANNELS, ROOF_CHANNELS, 3, padding=1)
        self.layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = torch.randn(ROOF_IMAGES, ROOF_CHANNELS, ROOF_SIDE, ROOF_SIDE)
        self.images = images.to(memory_format=torch.channels_last)
        self.macs = ROOF_IMAGES * ROOF_SIDE**2 * ROOF_CHANNELS**2 * 9

    def run(self) -> None:
        with torch.inference_mode():
            self.layer(self.images)


def measure_speed(bench: Bench, model: str, site: Site) -> dict[str, Any]:
    """Seconds of both ways for the same masks over all turns, and what the engine needs before its first mask."""
    form, graph = bench.form, bench.graph(model)
    examples = bench.images(form.speed_images)
    masks = draw(site, form.speed_masks, "speed")
    naive, roof = Naive(graph, site), Roof()
    start = perf_counter()
    engine = split_for(graph, site, examples)
    ours = means(engine, masks, cross_entropy)
    first = perf_counter() - start
    theirs = naive.losses(masks, examples)
    roof.run()
    turns = [
        (
            seconds_of(lambda: naive.losses(masks, examples)),
            seconds_of(lambda: means(engine, masks, cross_entropy)),
            seconds_of(roof.run),
        )
        for _ in range(form.repeats)
    ]
    naive_times, engine_times, roof_times = torch.tensor(turns, dtype=torch.float64).T
    each = float(engine_times.quantile(0.5)) / len(masks)
    rate = suffix_macs(graph, site) * len(examples) / each
    return {
        "model": model,
        "site": site.name,
        "channels": site.channels,
        "masks": len(masks),
        "images": len(examples),
        "naive": (naive_times / len(masks)).tolist(),
        "engine": (engine_times / len(masks)).tolist(),
        "ahead": max(
            0.0, first - float(engine_times.quantile(0.5))
        ),  # seconds before the first mask: prefix, check of the strategy
        "ratio": asdict(speedup(naive_times, engine_times)),
        "difference": float(((ours - theirs) / theirs).abs().max()),
        "gmacs": rate / 1e9,
        "roof": roof.macs / float(roof_times.quantile(0.5)) / 1e9,
        "form": str(engine.strategy),
        "filters for": stands_for(bench.sites(model), [s.name for s in speed_sites(bench, model)])[site.name],
    }


def suffix_macs(graph: Graph, site: Site) -> int:
    """MACs behind the site for one image, masked channels included."""
    behind = {str(node.target) for node in split_at(graph, site).suffix.graph.nodes if node.op == "call_module"}
    return sum(layer.macs for layer in cost(graph).layers if layer.name in behind)


def speed_sites(bench: Bench, model: str) -> list[Site]:
    """The sites that are measured: all, where the form names none."""
    wanted = bench.form.speed_sites[model]
    return [site for site in bench.sites(model) if not wanted or site.name in wanted]


def weighted(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ratio for a whole network at ten masks a filter, with and without what comes before the first mask.

    The naive way runs the same network whatever the site. Where it took longer the machine was busier, and the engine in turns
    with it: both are scaled alike, or sites measured on a busy machine would count for more.
    """
    masks = torch.tensor([PAPER_MASKS * row["filters for"] for row in rows], dtype=torch.float64)
    naive, engine = (torch.tensor([row[way] for row in rows], dtype=torch.float64) for way in ("naive", "engine"))
    plain = speedup(masks @ naive, masks @ engine)
    busy = naive.median(1).values / naive.median()
    ahead = torch.tensor([row["ahead"] * row["filters for"] / row["channels"] for row in rows], dtype=torch.float64) / busy
    naive, engine = masks @ (naive / busy[:, None]), masks @ (engine / busy[:, None])
    times = [float(torch.tensor(row["engine"]).quantile(0.5)) * row["filters for"] for row in rows]
    shares = [row["gmacs"] / row["roof"] for row in rows]  # measured in turns, so that both met the same machine
    share = sum(share * time for share, time in zip(shares, times, strict=True)) / sum(times)
    return {
        "as measured": asdict(plain),
        "masks alone": asdict(speedup(naive, engine)),
        "with what comes before": asdict(speedup(naive, engine + ahead.sum())),
        "of the roof": share,
    }
