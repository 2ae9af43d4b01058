"""Pruned and quantised, for the file that runs: `python -m benchmarks.int8` (ONNX Runtime, one thread, no training).

ResNet-20 (built in) and ResNet-56 (public weights) on CIFAR-10: 30 % of the MACs removed and a quarter of the time, with
`deploy = "int8"` (criterion obs, every layer refitted), then quantised. Accuracy is that of test images that decided
nothing; the four files (unpruned and pruned, float32 and int8) are timed in turns at batches of 1 and 64. VGG-16 and a
MobileNet-like network have random weights and uniform cuts: times and bytes only.

Networks and rows are kept (`~/.cache/secateurs/bench/int8`, lab/benchmarks/results/int8.jsonl); `--networks` takes some. A
search continues where it was stopped, so what it times can be measured on an idle core: `--until tables`, then `--until
curves` on a busy one, then `--until times`, then without. `--file` quantises a network of `benchmarks.faster` instead.
`--time` only times the files again, `--profile` only shows where the time of the int8 files goes, `--torchao` only quantises
by torchao, `--render` only writes lab/notes/performance.md.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import conditions
from benchmarks.faster import FOLDER as FASTER
from benchmarks.faster import data, origin
from benchmarks.faster import rows as faster_rows
from benchmarks.render import PAGE, with_part
from secateurs import Graph, Pruner, Recipe, compact, cost, find_sites, load, resume, save, trace
from secateurs._util.download import home
from secateurs._util.files import write_bytes, write_text
from secateurs.cli.inputs import build_model
from secateurs.data import Data, subset
from secateurs.export.deliver import prepared
from secateurs.export.int8 import Quantised, Quantiser, in_int8
from secateurs.export.programs import onnx_bytes
from secateurs.metrics import evaluate
from secateurs.models import build, example_input
from secateurs.pruning.curves import measure_curves
from secateurs.pruning.frontiers import frontiers_of, joined
from secateurs.report.int8 import stage_times
from secateurs.speed.engines import cpu_flags
from secateurs.speed.timing import in_rounds, timed

ROWS = Path(__file__).parent / "results" / "int8.jsonl"
FOLDER = home() / "bench" / "int8"
COMMAND = "python -m benchmarks.int8"
TRAINED = ("resnet20", "resnet56")
UNTRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "vgg16": ("vgg16", {}),
    "mobilenet": ("mobilenet-small", {"width": 32, "expansion": 4}),
}
STAGES = ("unpruned, float32", "pruned, float32", "unpruned, int8", "pruned, int8")
SHARE, TIME = 0.3, 0.74  # of the MACs that go; of the time that may remain
IMAGES = {"resnet20": 1024, "resnet56": 512}  # to choose by; twice as many to repair on


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


def known_as(network: str) -> str:
    """What `benchmarks.faster` calls it: its resnet20 has public weights."""
    return "resnet56" if network == "resnet56" else "builtin20"


def dense_model(network: str) -> torch.nn.Module:
    return (
        build_model(origin(known_as(network))) if network in TRAINED else build(UNTRAINED[network][0], **UNTRAINED[network][1])
    )


def recipe(network: str) -> Recipe:
    return Recipe.fast(
        max_drop=0.5,  # the targets decide
        confidence=0.0,
        criterion="obs",
        repair="every-layer",
        repair_examples=IMAGES[network],
        allocation="global",
        shortcut="stream",
        batch=64,
        deploy="int8",
        latency_threads=1,
        latency_batch=64,
        latency_seconds=90,
        target_macs=SHARE,
        target_latency=TIME,
    )


def pruned(network: str, until: str) -> Graph | None:
    """The pruned network; None where the search is to stop before it."""
    given, model = data(known_as(network), IMAGES[network]), dense_model(network)
    folder = FOLDER / f"{network}-stream"
    run = resume(folder, model, given) if folder.exists() else Pruner(model, given, recipe=recipe(network), folder=folder)
    try:
        run.measure_original()
        if until == "tables":
            for site in find_sites(run.original, "stream"):
                run.context.price.widths_of(site)
            return None
        curves = measure_curves(run, run.context)
        if until == "times":
            run.context.price.frontiers(curves)
        if until != "network":
            return None
        best = joined(frontiers_of(run.context, curves))
        return best.network(len(best.allocations) - 1)  # the first within the targets
    finally:
        run.close()


def make(network: str, until: str) -> bool:
    """Prune a trained network, quantise both, and measure the accuracy of all four files; whether that is done."""
    began = time.monotonic()
    graph = pruned(network, until)
    if graph is None:
        return False
    save(graph, FOLDER / f"{network}.safetensors")
    given, dense = data(known_as(network), IMAGES[network]), trace(dense_model(network), example_input("resnet20"))
    accuracies, details = [], {}
    assert given.test is not None
    for name, each in (("unpruned", dense), ("pruned", graph)):
        quantised = quantised_by(each, given)
        write_bytes(FOLDER / f"{network}-{name}.onnx", onnx_bytes(prepared(each)))
        write_bytes(FOLDER / f"{network}-{name}.int8.onnx", quantised.model)
        accuracies += [evaluate(each.module, given.test, batch=64).accuracy]
        accuracies += [evaluate(quantised.module(), given.test, batch=64).accuracy]
        details[name] = quantised.how.summary()
    row = {
        "kind": "network",
        "network": network,
        "weights": {"resnet20": "built in", "resnet56": "public"}[network],
        "macs": cost(graph).macs / cost(dense).macs,
        "parameters": cost(graph).parameters / cost(dense).parameters,
        "accuracy": dict(zip(STAGES, (accuracies[0], accuracies[2], accuracies[1], accuracies[3]), strict=True)),
        "images": len(given.test),
        "removed": {str(site): len(gone) for site, gone in graph.plan.removed().items()},
        "how": details,
        "seconds": round(time.monotonic() - began),
        "conditions": conditions().sentence(),
    }
    keep(row)
    return True


def from_faster(network: str, file: str) -> None:
    """Quantise a network of `benchmarks.faster`, cut by its time in float32, and the unpruned one."""
    (known,) = (row for row in faster_rows("network") if row["file"] == file)
    given, dense = data(known_as(network), IMAGES[network]), trace(dense_model(network), example_input("resnet20"))
    small, accuracy = load(dense_model(network), FASTER / file), dict[str, float]()
    assert given.test is not None
    for name, each, at in (("unpruned", dense, known["before"]), ("pruned", small, known["after"])):
        quantised = quantised_by(each, given)
        write_bytes(FOLDER / f"{network}-{name}.onnx", onnx_bytes(prepared(each)))
        write_bytes(FOLDER / f"{network}-{name}.int8.onnx", quantised.model)
        accuracy[f"{name}, float32"] = at  # measured there, on the same images
        accuracy[f"{name}, int8"] = evaluate(quantised.module(), given.test, batch=64).accuracy
    made = {"network": network, "weights": "public", "file": file, "macs": known["macs"], "accuracy": accuracy}
    keep({"kind": "network", **made, "images": len(given.test), "conditions": conditions().sentence()})


def quantised_by(graph: Graph, given: Data) -> Quantised:
    """The int8 file, calibrated on training images and compared on those that chose the cuts."""
    return Quantiser(graph, subset(given.train, 256, seed=1).ready(), subset(given.search, 256, seed=1).ready()).quantised()


def make_untrained(network: str) -> bool:
    """Cut a network with random weights at every site to about 5 of 6 filters, multiples of 16 where that fits."""
    graph = trace(dense_model(network).eval(), example_input("resnet20"))
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
            "weights": "random",
            "macs": cost(small).macs / cost(graph).macs,
            "conditions": conditions().sentence(),
        }
    )
    return True


def time_all(network: str, rounds: int) -> None:
    """Time the four files in turns, on one thread."""
    files = [
        FOLDER / f"{network}-{name}" for name in ("unpruned.onnx", "pruned.onnx", "unpruned.int8.onnx", "pruned.int8.onnx")
    ]
    models = [file.read_bytes() for file in files]
    torch.set_num_threads(1)
    seconds = stage_times(models, (example_input("resnet20"),), rounds=(rounds, rounds))
    medians = {str(batch): dict(zip(STAGES, found.medians, strict=True)) for batch, found in seconds.items()}
    flags = " ".join(sorted(flag for flag in cpu_flags() if "vnni" in flag)) or "no VNNI"
    row = {"kind": "times", "network": network, "seconds": medians, "bytes": dict(zip(STAGES, map(len, models), strict=True))}
    keep({**row, "flags": flags, "conditions": conditions().sentence()})


def by_torchao(network: str, rounds: int) -> None:
    """Quantise both networks by torchao; their accuracy, and their times compiled, beside the float networks compiled."""
    from secateurs.export.torchao import ProgramQuantiser

    given, timers, accuracy = data(known_as(network), IMAGES[network]), {}, {}
    graphs = {"unpruned": trace(dense_model(network), example_input("resnet20"))}
    graphs["pruned"] = load(dense_model(network), FOLDER / f"{network}.safetensors")
    calibration, held_out = (subset(part, 256, seed=1).ready() for part in (given.train, given.search))
    torch.set_num_threads(1)
    torch._inductor.config.freezing = True
    batch = example_input("resnet20")[torch.arange(64) % 2]
    assert given.test is not None
    tested = given.test.take(torch.arange(2048))  # whole batches: another size is compiled anew
    with torch.no_grad():
        for name, graph in graphs.items():
            made = ProgramQuantiser(graph, calibration, held_out).quantised()
            program = torch.export.load(io.BytesIO(made.model)).module()
            for stage, module in ((f"{name}, float32", prepared(graph).module), (f"{name}, int8", program)):
                fast = torch.compile(module)
                accuracy[stage] = evaluate(RunAs(fast), tested, batch=64).accuracy
                timers[stage] = timed(partial(fast, batch))
        seconds = in_rounds(timers, threads=1, rounds=rounds)
    medians = {stage: float(torch.tensor(found).median()) for stage, found in seconds.items()}
    figures = {"accuracy": accuracy, "seconds": {"64": medians}}
    keep({"kind": "torchao", "network": network, **figures, "conditions": conditions().sentence()})


class RunAs(torch.nn.Module):
    """A compiled program as a module: a loaded one refuses to be set to eval mode."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = (call,)

    def forward(self, x: torch.Tensor) -> Any:
        return self.call[0](x)


def profile(network: str) -> None:
    """Print where the time of the int8 files goes, by op, in milliseconds at a batch of 64."""
    import onnxruntime

    for name in ("unpruned", "pruned"):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.enable_profiling = 1, True
        options.profile_file_prefix = str(FOLDER / "profile")
        model = (FOLDER / f"{network}-{name}.int8.onnx").read_bytes()
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        inputs = {session.get_inputs()[0].name: example_input("resnet20")[torch.arange(64) % 2].numpy()}
        runs = 12
        for _ in range(runs):
            session.run(None, inputs)
        path = Path(session.end_profiling())
        nodes: dict[tuple[str, str], list[float]] = {}
        for event in json.loads(path.read_text()):
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                shapes = [next(iter(shape.values())) for shape in event["args"].get("output_type_shape", [])]
                nodes.setdefault((event["args"]["op_name"], f"{event['name'][:-12]} {shapes}"), []).append(event["dur"] / 1e3)
        path.unlink()
        medians = {key: sorted(found)[len(found) // 2] for key, found in nodes.items()}
        print(f"{network}, {name}: {sum(medians.values()):.2f} ms")
        for op in dict.fromkeys(op for op, _ in medians):
            each = [ms for (kind, _), ms in medians.items() if kind == op]
            print(f"  {op}: {len(each)} nodes, {sum(each):.2f} ms")
        for (op, where), ms in medians.items():
            print(f"    {op} {where}: {ms:.3f}")


def page() -> str:
    networks, times = {row["network"]: row for row in rows("network")}, {row["network"]: row for row in rows("times")}
    lines = [
        "ONNX Runtime, one thread, the four files of a network in turns. Accuracy: CIFAR-10, test images that decided nothing "
        "(10,000, of ResNet-56 5,000); no training. – : random weights, so that there is no accuracy.",
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
    trained = [
        f"- {row['network']}: float32 {100 * row['float32']:.2f} %, int8 {100 * row['int8']:.2f} %, divergence of the two "
        f"{row['divergence']:.4f} ({row['images']:,} images, {row['seconds']} s of one core)."
        for row in rows("trained")
    ]
    said = "Trained after pruning, by distillation, in float32 or through int8 rounding (`--train` of commit 46e21a9):"
    after = ["", said, "", *trained] if trained else []
    for row in rows("torchao"):
        after += ["", f"{row['network']} by torchao, compiled by inductor, one thread (2,048 test images):", ""]
        after += [
            f"- {stage}: {100 * row['accuracy'][stage]:.2f} %, {1e3 * row['seconds']['64'][stage]:.1f} ms at batch 64."
            for stage in STAGES
        ]
    where = dict.fromkeys(f"{row['conditions']}, {row['flags']}" for row in times.values())
    return "\n".join([*lines, *after, "", *(f"Timed on: {each}." for each in where)])


def main() -> None:
    """Make, time, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=(*TRAINED, *UNTRAINED))
    parser.add_argument("--until", choices=("tables", "curves", "times", "network"), default="network", help="stop after this")
    parser.add_argument("--file", help="a network that `python -m benchmarks.faster` made, in place of a search")
    parser.add_argument("--make", action="store_true", help="only make the networks: do not time them")
    parser.add_argument("--time", action="store_true", help="only time the networks that are there")
    parser.add_argument("--profile", action="store_true", help="only show where the time of the int8 files goes")
    parser.add_argument("--torchao", action="store_true", help="only quantise by torchao, which is to be installed")
    parser.add_argument("--render", action="store_true", help="only write the page")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    for network in () if options.render else options.networks:
        if options.profile:
            profile(network)
        elif options.torchao:
            by_torchao(network, options.rounds)
        else:
            if options.file:
                from_faster(network, options.file)
            elif not options.time:
                done = make(network, options.until) if network in TRAINED else make_untrained(network)
                if not done:
                    continue
            if options.make:
                continue
            time_all(network, options.rounds)
    if not options.profile and options.until == "network":
        write_text(PAGE, with_part(PAGE.read_text(), COMMAND, page()))


if __name__ == "__main__":
    main()
