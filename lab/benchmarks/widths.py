"""Widths and time: `python -m benchmarks.widths` (networks of timm at 224 × 224 in ONNX Runtime, batch 1, one thread).

Parts, all of them by default (`--parts random time hand`):

- `random`: 62 % of the channels of every site are kept at random, as many as come, or rounded down to multiples of 8, 16, and
  of what `round_to = "auto"` measures: the default.
- `time`: cuts are chosen by time (`target_latency = 0.5`), on random images, with L1 norms of random weights: the figures are
  about time only. Torch-Pruning (round_to 8) cuts the same network to the same MACs, and is timed in turns with it.
- `hand`: ResNet-20 compacted to 8, 16 and 32 channels, and one that is built with them, at batch 64.

Every network is timed in turns with the dense one. Rows are kept in lab/benchmarks/results/widths.jsonl, and a row that is
there is not measured again; `--again` measures all. `--render` only writes the page, lab/notes/performance.md.

Where torchvision is built for another torch: `python tests/integrations/run_script.py lab/benchmarks/widths.py`.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.conditions import conditions
from benchmarks.render import PAGE, with_part
from benchmarks.rival import torch_pruning
from secateurs import Graph, Pruner, Recipe, Site, compact, cost, find_sites, trace
from secateurs._util.files import write_text
from secateurs.config import Shortcut
from secateurs.data import Data
from secateurs.data.dataset import Examples
from secateurs.export.engines import OnnxEngine
from secateurs.models import example_input
from secateurs.models.resnet import resnet
from secateurs.pruning.results import SiteWidths, TimedAllocation
from secateurs.speed.engines import Engine, TorchEngine
from secateurs.speed.tables import preferred_multiple
from secateurs.speed.timing import SpeedUp, in_rounds, speedup
from secateurs.speed.widths import multiple_at

ROWS = Path(__file__).parent / "results" / "widths.jsonl"
COMMAND = "python -m benchmarks.widths"
NETWORKS = ("resnet18", "mobilenetv2_100")
PARTS = ("random", "time", "hand")
KEPT, IMAGES, TARGET, SIDE = 0.62, 4, 0.5, 224


def rows() -> dict[tuple[Any, ...], dict[str, Any]]:
    """All rows by their key, the latest of each."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return {tuple(row[name] for name in ("part", "network", "shortcut", "multiple")): row for row in found}


def once(part: str, network: str, shortcut: str, multiple: Any, again: bool, measure: Callable[[], dict[str, Any]]) -> None:
    """Measure a row and keep it, unless it is there."""
    if again or (part, network, shortcut, multiple) not in rows():
        began = time.monotonic()
        key = {"part": part, "network": network, "shortcut": shortcut, "multiple": multiple}
        row = {**key, **measure(), "seconds": round(time.monotonic() - began), "conditions": conditions().sentence()}
        with ROWS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, file=sys.stderr)


def network(name: str) -> nn.Module:
    """A network of timm with random weights, in eval mode."""
    import timm

    torch.manual_seed(0)
    found: nn.Module = timm.create_model(name).eval()
    return found


def dense(name: str) -> Graph:
    """The traced network."""
    return trace(network(name), torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)))


def in_turns(engine: Engine, rounds: int, **graphs: Graph) -> dict[str, Tensor]:
    """Seconds of networks in turns."""
    found = in_rounds({name: engine.network(graph)() for name, graph in graphs.items()}, threads=1, rounds=rounds)
    return {name: torch.tensor(seconds, dtype=torch.float64) for name, seconds in found.items()}


# ---- the parts -----------------------------------------------------------------------------------------------------------


def thinned(graph: Graph, shortcut: Shortcut, multiple: int) -> Graph:
    """Keep a random share of the channels of every site, rounded down to a multiple."""
    generator = torch.Generator().manual_seed(0)
    keep: dict[str | Site, Tensor] = {}
    for site in find_sites(graph, shortcut):
        step = multiple_at(site.channels, multiple)
        width = max(int(KEPT * site.channels / step), 1) * step
        chosen = torch.randperm(site.channels, generator=generator)[:width]
        keep[site.name] = torch.zeros(site.channels, dtype=torch.bool).index_fill(0, chosen, True)
    return compact(graph, keep, verify=False)


def at_random(name: str, shortcut: Shortcut, multiple: int | str, rounds: int) -> dict[str, Any]:
    """The speed of a randomly thinned network."""
    engine, whole = OnnxEngine(1, 1), dense(name)
    step = preferred_multiple(engine, whole) if multiple == "auto" else int(multiple)
    smaller = thinned(whole, shortcut, step)
    seconds = in_turns(engine, rounds, dense=whole, smaller=smaller)
    found = speedup(seconds["dense"], seconds["smaller"])
    return {**asdict(found), "step": step, "macs": cost(smaller).macs / cost(whole).macs}


def by_time(name: str, shortcut: Any, rounds: int) -> dict[str, Any]:
    """What a run with a target in time chooses, how well it predicted, and what Torch-Pruning makes of as many MACs."""
    generator = torch.Generator().manual_seed(0)

    def images(count: int) -> Examples:
        return Examples(torch.randn(count, 3, SIDE, SIDE, generator=generator), torch.arange(count) % 10)

    data = Data("random", images(IMAGES), images(IMAGES), images(2), classes=tuple(map(str, range(1000))))
    recipe = Recipe.fast(
        max_drop=1.0,
        confidence=0.0,
        criterion="l1",
        allocation="global",
        shortcut=shortcut,
        engine="onnxruntime",
        target_latency=TARGET,
        branches=False,  # with random weights a network loses nothing without them
        latency_batch=1,
        latency_threads=1,
        batch=8,
    )
    run = Pruner(network(name), data, recipe=recipe)
    result = run.finish()
    assert result.latency is not None
    macs = 1 - result.macs.removed
    row: dict[str, Any] = {
        "macs": macs,
        "kept": {step.site: [step.channels, step.kept] for step in result.steps},
        "left alone": [widths.site for widths in run.journal.of(SiteWidths) if not widths.widths],
        "rounds": [asdict(timed) for timed in run.journal.of(TimedAllocation)],
        "saved": 1 - (result.latency.predicted or 0.0) / (result.latency.original or 1.0),
    }
    graphs = {"dense": run.original, "smaller": result.graph}
    try:
        rival = by_torch_pruning(name, macs)
        graphs["rival"], row["rival macs"] = rival, cost(rival).macs / cost(run.original).macs
    except Exception as error:  # of a package of others, on a network that it may not follow
        row["rival error"] = f"{type(error).__name__}: {error}"[:200]
    seconds = in_turns(OnnxEngine(1, 1), rounds, **graphs)
    for label in seconds:
        row[label] = float(seconds[label].quantile(0.5))
        row[f"{label} speed"] = asdict(speedup(seconds["dense"], seconds[label]))
    return row


def by_torch_pruning(name: str, macs: float) -> Graph:
    """The network that Torch-Pruning leaves with about as many MACs, widths in multiples of 8."""
    tp, low, high, best = torch_pruning(), 0.0, 0.95, None
    whole, x = network(name), torch.randn(1, 3, SIDE, SIDE)
    for _ in range(6):
        share = (low + high) / 2
        smaller = copy.deepcopy(whole)
        head = [layer for layer in smaller.modules() if isinstance(layer, nn.Linear)][-1:]
        importance = tp.importance.MagnitudeImportance(p=2)
        tp.pruner.MagnitudePruner(
            smaller, x, importance=importance, pruning_ratio=share, ignored_layers=head, round_to=8
        ).step()
        graph = trace(smaller.eval(), torch.randn(2, 3, SIDE, SIDE))
        left = cost(graph).macs / cost(whole, torch.randn(1, 3, SIDE, SIDE)).macs
        low, high = (share, high) if left > macs else (low, share)
        if best is None or abs(left - macs) < best[0]:
            best = (abs(left - macs), graph)
    assert best is not None
    return best[1]


def hand_built(rounds: int) -> dict[str, Any]:
    """ResNet-20 compacted to half of its channels, those that a narrower one would have, beside one that is built so."""
    torch.manual_seed(0)
    example = example_input("resnet20")
    whole = trace(resnet(20).eval(), example)
    first = {"layer1": range(8), "layer2": range(4, 20), "layer3": range(12, 44)}  # of a stage; a shortcut pads on both sides
    keep: dict[str | Site, Tensor] = {}
    for site in find_sites(whole, "stream"):
        chosen = first[site.name.split(".")[0]] if site.name.endswith("stream") else range(site.channels // 2)
        keep[site.name] = torch.zeros(site.channels, dtype=torch.bool).index_fill(0, torch.tensor(list(chosen)), True)
    compacted, built = compact(whole, keep), trace(resnet(20, widths=(8, 16, 32)).eval(), example)
    assert cost(compacted).macs == cost(built).macs
    found = {}
    for engine in (OnnxEngine(64, 1), TorchEngine(64, 1)):
        seconds = in_turns(engine, rounds, built=built, compacted=compacted)
        found[engine.name] = asdict(speedup(seconds["built"], seconds["compacted"]))
    return found


# ---- the page ------------------------------------------------------------------------------------------------------------


def page() -> str:
    """The part of the page."""
    found = list(rows().values())
    lines = [
        f"ONNX Runtime, batch 1, one thread, {SIDE} × {SIDE} pixels, random weights; every network in turns with the dense "
        "one, with 95 % intervals.",
        "",
        f"{100 * KEPT:.0f} % of the channels of every site are kept at random:",
        "",
        "| network | masks | kept filters are multiples of | MACs left | speed |",
        "| --- | --- | --- | ---: | --- |",
    ]
    for row in (row for row in found if row["part"] == "random"):
        multiple = f"{row['step']} (the default, measured)" if row["multiple"] == "auto" else row["multiple"]
        speed = SpeedUp(row["ratio"], row["low"], row["high"]).summary()
        lines.append(f"| {row['network']} | {row['shortcut']} | {multiple} | {row['macs']:.2f} | {speed} |")
    timed = [row for row in found if row["part"] == "time"]
    if timed:
        lines += [
            "",
            f"Chosen by time, `target_latency = {TARGET:g}`; *predicted* is off by so much. Torch-Pruning 1.6.1 with "
            "`round_to=8` at the same MACs, in the same turns:",
            "",
            "| network | masks | MACs left | dense | pruned | predicted | speed | sites cut | branches gone | Torch-Pruning |",
            "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | --- |",
        ]
    for row in timed:
        predicted = row["dense"] * (1 - row["saved"])
        rival = "–"
        if "rival speed" in row:
            rival = f"{row['rival macs']:.2f} of the MACs, {SpeedUp(**row['rival speed']).summary()}"
        gone = sum(kept == 0 for _, kept in row["kept"].values())
        lines.append(
            f"| {row['network']} | {row['shortcut']} | {row['macs']:.2f} | {1e3 * row['dense']:.1f} ms | "
            f"{1e3 * row['smaller']:.1f} ms | {100 * (predicted / row['smaller'] - 1):+.1f} % | "
            f"{SpeedUp(**row['smaller speed']).summary()} | {len(row['kept'])} | {gone} | {rival} |"
        )
    for row in timed:
        gone = [site for site, (_, kept) in row["kept"].items() if kept == 0]
        if gone:
            lines += ["", f"Branches gone in {row['network']}, {row['shortcut']}: those of {', '.join(gone)}."]
    for row in (row for row in found if row["part"] == "hand"):
        speeds = ", ".join(f"{SpeedUp(**row[name]).summary()} in {name}" for name in ("onnxruntime", "torch"))
        lines += ["", f"ResNet-20 compacted to 8, 16 and 32 channels, beside one that is built with them, batch 64: {speeds}."]
    measured = dict.fromkeys(row["conditions"] for row in found)
    return "\n".join([*lines, "", *(f"Measured on: {where}." for where in measured)])


def main() -> None:
    """Measure what is missing, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only write the page")
    parser.add_argument("--again", action="store_true", help="measure rows that are there once more")
    parser.add_argument("--parts", nargs="+", default=PARTS)
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help="names of timm")
    parser.add_argument("--shortcuts", nargs="+", default=("before", "after"))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in () if options.render else options.networks:
        for shortcut in options.shortcuts:
            for multiple in (1, 8, 16, "auto") if "random" in options.parts else ():
                once(
                    "random",
                    name,
                    shortcut,
                    multiple,
                    options.again,
                    lambda n=name, s=shortcut, m=multiple: at_random(n, s, m, options.rounds),  # type: ignore[misc]
                )
            if "time" in options.parts:
                once("time", name, shortcut, 0, options.again, lambda n=name, s=shortcut: by_time(n, s, options.rounds))  # type: ignore[misc]
    if "hand" in options.parts and not options.render:
        once("hand", "resnet20", "stream", 0, options.again, lambda: hand_built(options.rounds))
    write_text(PAGE, with_part(PAGE.read_text(), COMMAND, page()))


if __name__ == "__main__":
    main()
