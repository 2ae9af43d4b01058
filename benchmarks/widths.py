"""Widths and time: `python -m benchmarks.widths` (two networks of timm at 224 × 224 in ONNX Runtime, about 15 minutes).

First, 62 % of the channels of every site are kept at random: as many as come, multiples of 8, of 16, and of what `round_to =
"auto"` measures. Then cuts are chosen by time (`target_latency`), on random images, with the L1 norms of random weights: the
figures are about time only. Every network is timed in turns with the dense one, batch 1, one thread. Writes
benchmarks/results/widths.json and its part of docs/performance.md; `--render` only writes the page.

Where torchvision is built for another torch: `python tests/integrations/run_script.py benchmarks/widths.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.conditions import Conditions, conditions
from benchmarks.render import PAGE, with_part
from secateurs import Graph, Pruner, Recipe, Site, compact, cost, find_sites, trace
from secateurs._util.files import write_text
from secateurs.config import Shortcut
from secateurs.data import Data
from secateurs.data.dataset import Examples
from secateurs.export.engines import OnnxEngine
from secateurs.graph.engine import in_rounds
from secateurs.graph.latency import SpeedUp, speedup
from secateurs.pruning.latency_tables import preferred_multiple
from secateurs.pruning.results import SiteWidths, TimedAllocation
from secateurs.selection.widths import multiple_at

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "widths.json"
COMMAND = "python -m benchmarks.widths"
NETWORKS = ("resnet18", "mobilenetv2_100")
KEPT, IMAGES, TARGET, SIDE = 0.62, 4, 0.5, 224
ENGINE = OnnxEngine(batch=1, threads=1)


def network(name: str) -> nn.Module:
    """A network of timm with random weights, in eval mode."""
    import timm

    torch.manual_seed(0)
    found: nn.Module = timm.create_model(name).eval()
    return found


def thinned(graph: Graph, shortcut: Shortcut, multiple: int) -> Graph:
    """Keep a random share of the channels of every site, rounded to the nearest multiple."""
    generator = torch.Generator().manual_seed(0)
    keep: dict[str | Site, Tensor] = {}
    for site in find_sites(graph, shortcut):
        step = multiple_at(site.channels, multiple)
        width = min(max(round(KEPT * site.channels / step), 1) * step, site.channels)
        chosen = torch.randperm(site.channels, generator=generator)[:width]
        keep[site.name] = torch.zeros(site.channels, dtype=torch.bool).index_fill(0, chosen, True)
    return compact(graph, keep, verify=False)


def ratio(dense: Graph, other: Graph, rounds: int) -> dict[str, float]:
    """How many times faster the other network is, in turns, and its share of the MACs."""
    rows = in_rounds({0: ENGINE.network(dense), 1: ENGINE.network(other)}, threads=1, rounds=rounds)
    found = speedup(*(torch.tensor(rows[i], dtype=torch.float64) for i in (0, 1)))
    return {**asdict(found), "macs": cost(other).macs / cost(dense).macs}


def at_random(name: str, rounds: int) -> list[dict[str, Any]]:
    """The speeds of randomly thinned networks, by mask position and multiple."""
    dense = trace(network(name), torch.randn(2, 3, SIDE, SIDE))
    auto, rows = preferred_multiple(ENGINE, dense), []
    for shortcut in ("before", "after"):
        for multiple in sorted({1, 8, 16, auto}):
            found = ratio(dense, thinned(dense, shortcut, multiple), rounds)
            rows.append({"network": name, "shortcut": shortcut, "multiple": multiple, "auto": multiple == auto, **found})
            print(rows[-1], file=sys.stderr)
    return rows


def by_time(name: str, shortcut: Shortcut) -> dict[str, Any]:
    """What a run with a target in time chooses, and how well it predicted the time."""
    generator = torch.Generator().manual_seed(0)

    def images(count: int) -> Examples:
        return Examples(torch.randn(count, 3, SIDE, SIDE, generator=generator), torch.arange(count) % 10)

    data = Data("random", images(IMAGES), images(IMAGES), images(2), classes=tuple(map(str, range(1000))))
    recipe = Recipe(
        max_drop=1.0,
        confidence=0.0,
        criterion="l1",
        allocation="global",
        shortcut=shortcut,
        engine="onnxruntime",
        target_latency=TARGET,
        latency_batch=1,
        latency_threads=1,
        batch=8,
    )
    began, run = time.monotonic(), Pruner(network(name), data, recipe=recipe)
    result = run.finish()
    assert result.latency is not None
    timed = [{"predicted": t.predicted, "seconds": t.seconds, "original": t.original} for t in run.journal.of(TimedAllocation)]
    left = [widths.site for widths in run.journal.of(SiteWidths) if not widths.widths]
    return {
        "network": name,
        "shortcut": shortcut,
        "macs": 1 - result.macs.removed,
        "kept": {step.site: [step.channels, step.kept] for step in result.steps},
        "left alone": left,
        "rounds": timed,
        "seconds": time.monotonic() - began,
        **asdict(result.latency),
    }


def page(found: dict[str, Any]) -> str:
    """The part of the page."""
    measured = Conditions(**found["conditions"]).sentence()
    lines = [
        f"Measured on: {measured}. ONNX Runtime, batch 1, one thread, {SIDE} × {SIDE} pixels, random weights; every network in "
        "turns with the dense one, with 95 % intervals.",
        "",
        f"{100 * KEPT:.0f} % of the channels of every site are kept at random:",
        "",
        "| network | masks | kept filters are multiples of | MACs left | speed |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for row in found["random"]:
        multiple = f"{row['multiple']}{' (auto)' if row['auto'] else ''}"
        speed = SpeedUp(row["ratio"], row["low"], row["high"]).summary()
        lines.append(f"| {row['network']} | {row['shortcut']} the add | {multiple} | {row['macs']:.2f} | {speed} |")
    lines += (
        []
        if not found["by time"]
        else [
            "",
            f"Chosen by time, `target_latency = {TARGET:g}`, widths in multiples by default. With random weights a larger "
            "cut may have the smaller measured loss, so that more than asked can go:",
            "",
            "| network | masks | MACs left | dense | pruned | predicted | speed | sites cut |",
            "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |",
        ]
    )
    for row in found["by time"]:
        speed = SpeedUp(row["speedup"], row["low"], row["high"]).summary()
        times = " | ".join(f"{1e3 * row[key]:.1f} ms" for key in ("original", "pruned", "predicted"))
        lines.append(
            f"| {row['network']} | {row['shortcut']} the add | {row['macs']:.2f} | {times} | {speed} | {len(row['kept'])} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, keep the figures, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="only write the page")
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help="names of timm")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if not options.render:
        torch.set_num_threads(1)
        found: dict[str, Any] = {"conditions": asdict(conditions()), "random": [], "by time": []}
        for name in options.networks:
            found["random"] += at_random(name, options.rounds)
            for shortcut in ("before", "after"):
                found["by time"].append(by_time(name, shortcut))
                print(found["by time"][-1], file=sys.stderr)
            write_text(RESULTS, json.dumps(found, indent=1) + "\n")
    write_text(PAGE, with_part(PAGE.read_text(), COMMAND, page(json.loads(RESULTS.read_text()))))


if __name__ == "__main__":
    main()
