"""Accuracy against milliseconds on CIFAR-10: `python -m benchmarks.faster` (ONNX Runtime).

For ResNet-20, 32 and 56, public weights, and ResNet-20 with the built-in ones (`builtin20`): cuts chosen by the time that they
save, and by the MACs, with the same criterion, repair and images. Networks of several sizes are made by each, their accuracy is
that of images of CIFAR-10's test set that decided nothing, and all of a network's sizes are timed together, in turns with the
dense one, at batches of 1 and 64, on one thread.

Every curve, network and row is kept (`~/.cache/secateurs/bench/faster`, lab/benchmarks/results/faster.jsonl), so a run that was
interrupted continues. Parts of the work: `--networks resnet56 --choices "time before" --shares 0.4`. `--render` only writes
lab/notes/performance.md; `--again` times the networks that are there once more; `--train 4 --choices … --shares …` trains those
networks for 4 epochs by distillation, at the settings of `benchmarks.finetuning`, and measures their accuracy again;
`--reconstruct` trains them without labels, to give at every layer what the dense one gives (repair `whole-network`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import conditions
from benchmarks.finetuning import Cell
from benchmarks.render import PAGE, with_part
from secateurs import Graph, Pruner, Recipe, cost, load, resume, save, trace
from secateurs._util.download import home
from secateurs._util.files import write_text
from secateurs.cli.inputs import BUILTIN, PUBLIC, Origin, build_model
from secateurs.cli.inputs import load_data as load_split
from secateurs.data import Data, subset
from secateurs.export.engines import OnnxEngine
from secateurs.metrics import evaluate
from secateurs.models import example_input
from secateurs.pruning.curves import measure_curves
from secateurs.pruning.frontiers import frontiers_of, joined
from secateurs.pruning.time_price import structure
from secateurs.repair import reconstruct_
from secateurs.speed.timing import SpeedUp, in_rounds, speedup
from secateurs.training import train_

ROWS = Path(__file__).parent / "results" / "faster.jsonl"
FOLDER = home() / "bench" / "faster"
COMMAND = "python -m benchmarks.faster"
NETWORKS = ("resnet20", "resnet32", "resnet56", "builtin20")
CHOICES = ("macs before", "time before", "time stream")
SHARES = {"macs": (0.35, 0.45, 0.55), "time": (0.3, 0.4, 0.5)}  # removed by prediction
BATCHES = (1, 64)
POINT = 0.01
RECONSTRUCTED = 2048  # images, without labels


def rows(kind: str) -> list[dict[str, Any]]:
    """The rows of a kind, of those with the same key the latest."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]  # a killed run may leave half a line
    return list({_key(row): row for row in found if row["kind"] == kind}.values())


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("kind", "network", "choice", "share", "batch", "epochs"))


def keep(row: dict[str, Any]) -> None:
    """Append a row, in one write."""
    ROWS.parent.mkdir(exist_ok=True)
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, file=sys.stderr)


def origin(network: str) -> Origin:
    """Where a network and its data come from."""
    return Origin(f"resnet{network[-2:]}", "cifar10", weights=BUILTIN if network == "builtin20" else PUBLIC).settled()


def data(network: str, images: int) -> Data:
    """CIFAR-10 with few training images for repairs, `images` to choose by, and images that decide nothing."""
    found = load_split(origin(network))
    return Data(
        "cifar10", subset(found.train, 2 * images, seed=0), subset(found.search, images, seed=0), found.test, found.classes
    )


def pruner(network: str, choice: str, images: int, engine_batch: int) -> Pruner:
    """The run of a choice, continued if it was begun; its curves are in its folder."""
    by, shortcut = choice.split()
    folder, model, given = FOLDER / f"{network}-{choice.replace(' ', '-')}", build_model(origin(network)), data(network, images)
    recipe = Recipe.fast(
        max_drop=POINT,
        confidence=0.0,
        criterion="obs",
        repair="every-layer",
        repair_examples=images,
        allocation="global",
        shortcut=shortcut,  # type: ignore[arg-type]
        batch=64,
        **({"engine": "onnxruntime", "latency_threads": 1, "latency_batch": engine_batch} if by == "time" else {}),  # type: ignore[arg-type]
    )
    return resume(folder, model, given) if folder.exists() else Pruner(model, given, recipe=recipe, folder=folder)


def make(network: str, choice: str, shares: Sequence[float], images: int, engine_batch: int) -> None:
    """Make a network for each share that is not there yet, and measure its accuracy."""
    known = {row["share"] for row in rows("network") if (row["network"], row["choice"]) == (network, choice)}
    if known.issuperset(shares):
        return
    began, run = time.monotonic(), pruner(network, choice, images, engine_batch)
    run.measure_original()
    curves = measure_curves(run, run.context)
    best = joined(frontiers_of(run.context, curves))
    allocations = best.allocations
    seconds, dense = time.monotonic() - began, cost(run.original)
    for share in shares:
        if share in known:
            continue
        began = time.monotonic()
        # by MACs, predictions count the weights between two cut layers twice: the share is that of the network itself
        place = bisect_left(allocations, share, key=lambda one: _removed(run, curves, one, choice))
        if place == len(allocations):
            most = _removed(run, curves, allocations[-1], choice)
            print(f"{network}, {choice}: no allocation saves {share:g}, the largest {most:.3f}", file=sys.stderr)
            continue
        chosen = allocations[place]
        graph = best.network(place)
        path = save(graph, FOLDER / f"{network}-{choice.replace(' ', '-')}-{share:g}.safetensors")
        assert run.data.test is not None
        dense_rows = [row["before"] for row in rows("network") if row["network"] == network]
        before = dense_rows[0] if dense_rows else evaluate(run.original.module, run.data.test, batch=64).accuracy
        after = evaluate(graph.module, run.data.test, batch=64).accuracy
        keep(
            {
                "kind": "network",
                "network": network,
                "choice": choice,
                "share": share,
                "file": path.name,
                "macs": cost(graph).macs / dense.macs,
                "before": before,
                "after": after,
                "predicted": chosen.saved,
                "branches": [s for s, m in chosen.removed.items() if m == len(curves[s].original)],
                "removed": {s: m for s, m in chosen.removed.items() if m},
                "seconds": round(time.monotonic() - began),
                "curves": round(seconds),
                "images": images,
                "conditions": conditions().sentence(),
            }
        )
    run.close()


def _removed(run: Pruner, curves: Any, allocation: Any, choice: str) -> float:
    if choice.startswith("time"):
        return float(allocation.saved)
    masks: Any = {
        name: curves[name].keep(m, site)
        for name, m in allocation.removed.items()
        if m and (site := run.context.site(run.original, name)) is not None
    }
    return run.context.shares_removed(structure(run.context, masks))[1] if masks else 0.0


def time_all(network: str, rounds: int, again: bool) -> None:
    """Time all sizes of a network in turns with the dense one."""
    found = [row for row in rows("network") if row["network"] == network]
    wanted = {_key({**row, "kind": "speed", "batch": batch}) for row in found for batch in BATCHES}
    if not found or (not again and {_key(row) for row in rows("speed")}.issuperset(wanted)):
        return
    graphs: dict[int, Graph] = {-1: trace(build_model(origin(network)), example_input("resnet20"))}
    graphs |= {i: load(build_model(origin(network)), FOLDER / row["file"]) for i, row in enumerate(found)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for batch in BATCHES:
        engine = OnnxEngine(batch, 1)
        seconds = in_rounds({i: engine.network(graph)() for i, graph in graphs.items()}, threads=1, rounds=rounds)
        for i, row in enumerate(found):
            faster = speedup(*(torch.tensor(seconds[j], dtype=torch.float64) for j in (-1, i)))
            medians = {name: float(torch.tensor(seconds[j]).median()) for name, j in (("dense", -1), ("pruned", i))}
            same = {name: row[name] for name in ("network", "choice", "share")}
            figures = {"ratio": faster.ratio, "low": faster.low, "high": faster.high, **medians}
            keep({"kind": "speed", **same, "batch": batch, **figures, "conditions": conditions().sentence()})
    torch.set_num_threads(threads)


def train(network: str, choice: str, shares: Sequence[float], epochs: int) -> None:
    """Train networks that were made, and measure their accuracy again: by distillation, or by reconstruction in 0 epochs."""
    whole, dense = load_split(origin(network)), build_model(origin(network))
    settings = Cell(network, choice, 0.0, "distillation", "live", 0.01, 0, epochs or 1, "bfloat16", None).settings()
    reconstructed = subset(whole.train, RECONSTRUCTED, seed=0)
    for row in rows("network"):
        if (row["network"], row["choice"]) != (network, choice) or row["share"] not in shares:
            continue
        graph, began = load(build_model(origin(network)), FOLDER / row["file"]), time.process_time()
        if epochs:
            train_(graph.module, whole.train, settings, teacher=dense)
        else:
            reconstruct_(graph, trace(dense, example_input("resnet20")), reconstructed)
        assert whole.test is not None
        same = {name: row[name] for name in ("network", "choice", "share", "before")}
        figures = {"start": row["after"], "after": evaluate(graph.module, whole.test, batch=64).accuracy, "epochs": epochs}
        seconds = round(time.process_time() - began)
        keep({"kind": "trained", **same, **figures, "seconds": seconds, "conditions": conditions().sentence()})


def at_one_point(found: Sequence[tuple[float, float]]) -> float | None:
    """Speed at one point of accuracy lost, interpolated between the two nearest (drop, speed); None where not bracketed."""
    below = [pair for pair in found if pair[0] <= POINT]
    above = [pair for pair in found if pair[0] > POINT]
    if not below:
        return None
    low = max(below, key=lambda pair: pair[1])
    if not above:
        return low[1]
    high = min(above, key=lambda pair: pair[0])
    if high[1] <= low[1]:
        return low[1]
    return low[1] + (high[1] - low[1]) * (POINT - low[0]) / (high[0] - low[0])


def page() -> str:
    """The part of the page."""
    networks, speeds = rows("network"), {_key({**row, "kind": "network"}): row for row in rows("speed")}
    lines = [
        "CIFAR-10, public weights (`builtin20`: those of the built-in ResNet-20), no training; criterion `obs`, every layer "
        "repaired; accuracy of test images that decided nothing. ONNX Runtime, one thread, in turns with the dense network, "
        "95 % intervals. At one point: speed at a point of test accuracy lost, interpolated between the two nearest networks.",
        "",
        "| network | cuts chosen by | masks | MACs left | test accuracy | batch 1 | batch 64 | branches gone |",
        "| --- | --- | --- | ---: | --- | --- | --- | ---: |",
    ]
    summary = []
    for network in dict.fromkeys(row["network"] for row in networks):
        for choice in dict.fromkeys(row["choice"] for row in networks if row["network"] == network):
            points: dict[int, list[tuple[float, float]]] = {batch: [] for batch in BATCHES}
            for row in sorted(
                (r for r in networks if (r["network"], r["choice"]) == (network, choice)), key=lambda r: -r["macs"]
            ):
                shown = []
                for batch in BATCHES:
                    timed = speeds.get(_key({**row, "batch": batch}))
                    shown.append("–" if timed is None else SpeedUp(timed["ratio"], timed["low"], timed["high"]).summary())
                    if timed is not None:
                        points[batch].append((row["before"] - row["after"], timed["ratio"]))
                by, shortcut = choice.split()
                accuracy = f"{100 * row['before']:.2f} → {100 * row['after']:.2f} %"
                lines.append(
                    f"| {network} | {by} | {shortcut} | {row['macs']:.2f} | {accuracy} | {' | '.join(shown)} | "
                    f"{len(row['branches'])} |"
                )
            reached = [at_one_point(points[batch]) for batch in BATCHES]
            words = " and ".join(
                f"{speed:.2f}× at batch {batch}" for speed, batch in zip(reached, BATCHES, strict=True) if speed is not None
            )
            summary.append(f"- {network}, by {choice.split()[0]}, masks {choice.split()[1]}: {words or 'not reached'}.")
    trained = []
    for row in rows("trained"):
        both = [speeds[_key({**row, "kind": "network", "batch": batch, "epochs": None})] for batch in BATCHES]
        how = f"{row['epochs']} epochs of distillation" if row["epochs"] else "reconstruction of the whole network, label-free,"
        speed = " and ".join(f"{one['ratio']:.2f}× at batch {batch}" for one, batch in zip(both, BATCHES, strict=True))
        trained.append(
            f"- {row['network']}, by {row['choice']}, {speed}: {100 * row['before']:.2f} → {100 * row['start']:.2f} %, "
            f"after {how} {100 * row['after']:.2f} % ({row['seconds']} s of one core)."
        )
    measured = dict.fromkeys(row["conditions"] for row in speeds.values())
    after = ["Trained:", "", *trained, ""] if trained else []
    return "\n".join([*lines, "", "At one point:", "", *summary, "", *after, *(f"Timed on: {where}." for where in measured)])


def main() -> None:
    """Make, time, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--render", action="store_true", help="only write the page")
    parser.add_argument("--again", action="store_true", help="time all networks once more")
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--choices", nargs="+", default=CHOICES)
    parser.add_argument("--shares", nargs="+", type=float, help="of the time or MACs that are to go")
    parser.add_argument("--images", type=int, default=1024, help="to choose by, and to repair on")
    parser.add_argument("--engine-batch", type=int, default=1, help="batch that cuts are chosen for")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--train", type=int, metavar="EPOCHS", help="only train the networks of these choices and shares")
    parser.add_argument("--reconstruct", action="store_true", help="only repair those networks as a whole, without labels")
    options = parser.parse_args()
    if options.train or options.reconstruct:
        for network in options.networks:
            for choice in options.choices:
                train(network, choice, options.shares or SHARES[choice.split()[0]], 0 if options.reconstruct else options.train)
    elif not options.render:
        for network in options.networks:
            for choice in options.choices:
                make(network, choice, options.shares or SHARES[choice.split()[0]], options.images, options.engine_batch)
            time_all(network, options.rounds, options.again)
    write_text(PAGE, with_part(PAGE.read_text(), COMMAND, page()))


if __name__ == "__main__":
    main()
