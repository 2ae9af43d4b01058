"""Pruned and quantised, for the file that runs: `python -m benchmarks.int8` (ONNX Runtime, one thread, no training).

ResNet-20 (built in) and ResNet-56 (public weights) on CIFAR-10: 30 % of the MACs removed with `deploy = "int8"` (criterion
obs, every layer refitted), then quantised. Accuracy is that of the 5,000 test images that decided nothing; the four files
(unpruned and pruned, float32 and int8) are timed in turns at batches of 1 and 64. VGG-16 and a MobileNet-like network have
random weights and uniform cuts: times and bytes only.

Networks and rows are kept (`~/.cache/secateurs/bench/int8`, benchmarks/results/int8.jsonl); `--networks` takes some,
`--time` only times again, `--render` only writes docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import conditions
from benchmarks.faster import data
from benchmarks.render import PAGE, with_part
from secateurs import Pruner, Recipe, compact, cost, find_sites, resume, save, trace
from secateurs._util.download import home
from secateurs._util.files import write_bytes, write_text
from secateurs.data import subset
from secateurs.export.deliver import prepared
from secateurs.export.int8 import Quantiser, in_int8
from secateurs.export.programs import onnx_bytes
from secateurs.graph.engine import cpu_flags
from secateurs.metrics import evaluate
from secateurs.models import build, example_input, load_builtin, load_public
from secateurs.report.int8 import stage_times

ROWS = Path(__file__).parent / "results" / "int8.jsonl"
FOLDER = home() / "bench" / "int8"
COMMAND = "python -m benchmarks.int8"
TRAINED, UNTRAINED = ("resnet20", "resnet56"), ("vgg16", "mobilenet-small")
STAGES = ("unpruned, float32", "pruned, float32", "unpruned, int8", "pruned, int8")
SHARE, IMAGES = 0.3, {"resnet20": 512, "resnet56": 256}  # images to choose by; twice as many to repair on


def rows(kind: str) -> list[dict[str, Any]]:
    """The rows of a kind, of those of one network the latest."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return list({row["network"]: row for row in found if row["kind"] == kind}.values())


def keep(row: dict[str, Any]) -> None:
    ROWS.parent.mkdir(exist_ok=True)
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, file=sys.stderr)


def dense_model(network: str) -> torch.nn.Module:
    if network == "resnet20":
        return load_builtin("resnet20")
    return load_public(int(network[6:])) if network.startswith("resnet") else build(network)


def recipe(shortcut: str) -> Recipe:
    return Recipe(
        max_drop=0.3,  # the target decides
        confidence=0.0,
        criterion="obs",
        repair="every-layer",
        repair_examples=512,
        allocation="global",
        shortcut=shortcut,  # type: ignore[arg-type]
        batch=64,
        deploy="int8",
        latency_threads=1,
        latency_batch=64,
        latency_seconds=90,
        target_macs=SHARE,
    )


def make(network: str, shortcut: str) -> None:
    """Prune a trained network, quantise both, and measure the accuracy of all four files."""
    began, given, model = time.monotonic(), data(IMAGES[network]), dense_model(network)
    folder = FOLDER / f"{network}-{shortcut}"
    run = resume(folder, model, given) if folder.exists() else Pruner(model, given, recipe=recipe(shortcut), folder=folder)
    graph = run.finish().graph
    seconds = time.monotonic() - began
    calibration, held_out = subset(given.train, 256, seed=1).ready(), subset(given.search, 256, seed=1).ready()
    dense = trace(dense_model(network), example_input(network))
    accuracies, details = [], {}
    assert given.test is not None
    for name, each in (("unpruned", dense), ("pruned", graph)):
        file = onnx_bytes(prepared(each))
        quantised = Quantiser(each, calibration, held_out).quantised()
        write_bytes(FOLDER / f"{network}-{name}.onnx", file)
        write_bytes(FOLDER / f"{network}-{name}.int8.onnx", quantised.model)
        accuracies += [evaluate(each.module, given.test, batch=64).accuracy]
        accuracies += [evaluate(quantised.module(), given.test, batch=64).accuracy]
        details[name] = quantised.how.summary()
    save(graph, FOLDER / f"{network}.safetensors")
    row = {
        "kind": "network",
        "network": network,
        "shortcut": shortcut,
        "macs": cost(graph).macs / cost(dense).macs,
        "parameters": cost(graph).parameters / cost(dense).parameters,
        "accuracy": dict(zip(STAGES, (accuracies[0], accuracies[2], accuracies[1], accuracies[3]), strict=True)),
        "images": len(given.test),
        "how": details,
        "seconds": round(seconds),
        "conditions": conditions().sentence(),
    }
    keep(row)


def make_untrained(network: str) -> None:
    """Cut a network with random weights at every site to about 5 of 6 filters, multiples of 16 where that fits."""
    graph = trace(build(network).eval(), example_input(network))
    masks: dict[Any, torch.Tensor] = {}
    for site in find_sites(graph, "coupled"):
        step = 16 if site.channels >= 64 else 8 if site.channels >= 32 else 4
        kept = max(step * round(0.83 * site.channels / step), step)
        masks[site.name] = torch.arange(site.channels) < kept
    small = compact(graph, masks)
    for name, each in (("unpruned", graph), ("pruned", small)):
        file = onnx_bytes(prepared(each))
        inputs = tuple(t[torch.arange(8) % len(t)] for t in each.example)
        write_bytes(FOLDER / f"{network}-{name}.onnx", file)
        write_bytes(FOLDER / f"{network}-{name}.int8.onnx", in_int8(file, inputs))
    keep(
        {
            "kind": "network",
            "network": network,
            "macs": cost(small).macs / cost(graph).macs,
            "conditions": conditions().sentence(),
        }
    )


def time_all(network: str, rounds: int) -> None:
    """Time the four files in turns, on one thread."""
    files = [
        FOLDER / f"{network}-{name}" for name in ("unpruned.onnx", "pruned.onnx", "unpruned.int8.onnx", "pruned.int8.onnx")
    ]
    models = [file.read_bytes() for file in files]
    torch.set_num_threads(1)
    seconds = stage_times(models, (example_input(network),), rounds=rounds)
    medians = {
        str(batch): {stage: float(torch.tensor(row).median()) for stage, row in zip(STAGES, found, strict=True)}
        for batch, found in seconds.items()
    }
    flags = " ".join(sorted(flag for flag in cpu_flags() if "vnni" in flag)) or "no VNNI"
    row = {"kind": "times", "network": network, "seconds": medians, "bytes": dict(zip(STAGES, map(len, models), strict=True))}
    keep({**row, "flags": flags, "conditions": conditions().sentence()})


def page() -> str:
    networks, times = {row["network"]: row for row in rows("network")}, {row["network"]: row for row in rows("times")}
    lines = [
        "ONNX Runtime, one thread, the four files of a network in turns. Accuracy: CIFAR-10, the 5,000 test images that "
        "decided nothing; no training. – : random weights, so that there is no accuracy.",
        "",
        "| network | file | MACs left | test accuracy | bytes | ms, batch 1 | ms, batch 64 | × dense float32, batch 64 | "
        "× dense int8, batch 64 |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, row in networks.items():
        timed = times.get(name)
        if timed is None:
            continue
        at = timed["seconds"]
        for stage in STAGES:
            share = f"{row['macs']:.2f}" if stage.startswith("pruned") else "1"
            accuracy = f"{100 * row['accuracy'][stage]:.2f} %" if "accuracy" in row else "–"
            one, many = (1e3 * at[batch][stage] for batch in ("1", "64"))
            faster = [at["64"][base] / at["64"][stage] for base in ("unpruned, float32", "unpruned, int8")]
            cells = [name, stage, share, accuracy, f"{timed['bytes'][stage]:,}", f"{one:.2f}", f"{many:.1f}"]
            lines.append(f"| {' | '.join([*cells, *(f'{each:.2f}' for each in faster)])} |")
    where = dict.fromkeys(f"{row['conditions']}, {row['flags']}" for row in times.values())
    return "\n".join([*lines, "", *(f"Timed on: {each}." for each in where)])


def main() -> None:
    """Make, time, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="only write the page")
    parser.add_argument("--time", action="store_true", help="only time the networks that are there")
    parser.add_argument("--networks", nargs="+", default=(*TRAINED, *UNTRAINED))
    parser.add_argument("--shortcut", default="before")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for network in () if options.render else options.networks:
        if not options.time:
            make(network, options.shortcut) if network in TRAINED else make_untrained(network)
        time_all(network, options.rounds)
    write_text(PAGE, with_part(PAGE.read_text(), COMMAND, page()))


if __name__ == "__main__":
    main()
