"""Size and speed of exported networks: `python -m benchmarks.exports` (four networks, about 10 minutes).

Each network loses a random half of the channels of every site, is saved and exported, checked, and timed against the unpruned
network, in turns, with one thread. Writes lab/benchmarks/results/exports.json and its part of lab/notes/performance.md;
`--render` only writes the page. `--quick` is a smoke test: it measures narrow networks a few times, prints the page and writes
nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.conditions import Conditions, conditions
from benchmarks.render import PAGE, with_part
from secateurs import Graph, Site, compact, cost, find_sites, load, save, trace
from secateurs._util.files import write_text
from secateurs.export import Exported, prepared, to_onnx, to_pt2, to_source
from secateurs.export.deliver import TIMED_BATCHES, resized
from secateurs.models import build, example_input
from secateurs.speed.engines import TorchEngine
from secateurs.speed.timing import SpeedUp, compare

RESULTS = Path(__file__).parent / "results" / "exports.json"
COMMAND = "python -m benchmarks.exports"
EXAMPLES = 64
Shortcut = Literal["before", "after"]


@dataclass(frozen=True)
class Subject:
    """A network to be exported, and how it is named in the table."""

    title: str
    name: str
    options: dict[str, Any]

    def fresh(self) -> nn.Module:
        """Build the network, untrained: speed does not depend on the weights."""
        torch.manual_seed(0)
        return build(self.name, **self.options).eval()


SUBJECTS = (
    Subject("ResNet-20", "resnet20", {}),
    Subject("VGG-16", "vgg16", {}),
    Subject("MobileNet-like, width 16", "mobilenet-small", {"width": 16}),
    Subject("MLP, 64-512-256-10", "mlp", {"hidden": [512, 256]}),
)
NARROW = (
    Subject("ResNet-20, narrow", "resnet20", {"widths": (4, 8, 8)}),
    Subject("VGG-16, narrow", "vgg16", {"width": 4}),
    Subject("MobileNet-like, narrow", "mobilenet-small", {"width": 4}),
    Subject("MLP, 64-512-256-10", "mlp", {"hidden": [512, 256]}),
)


def halved(graph: Graph, less: int = 0, shortcut: Shortcut = "before") -> Graph:
    """Keep a random half of the channels of every site, minus `less`; the same choice every time."""
    generator = torch.Generator().manual_seed(0)
    keep: dict[str | Site, Tensor] = {}
    for site in find_sites(graph, shortcut=shortcut):
        chosen = torch.randperm(site.channels, generator=generator)[: site.channels // 2 - less]
        keep[site.name] = torch.zeros(site.channels, dtype=torch.bool).index_fill(0, chosen, True)
    return compact(graph, keep)


def measure(subject: Subject, repeats: int) -> dict[str, Any]:
    """Measure one network in every form: bytes, difference, and seconds beside the same form of the unpruned network."""
    whole = trace(subject.fresh(), example_input(subject.name))
    small, x = halved(whole), example_input(subject.name, EXAMPLES)
    ready, original = prepared(small, x), prepared(whole, x)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        exports: list[Exported] = [
            write(ready, path, original=original, repeats=repeats)
            for write, path in ((to_onnx, home / "model.onnx"), (to_pt2, home / "model.pt2"), (to_source, home / "source"))
        ]
        saved = measure_saved(subject, whole, small, home, repeats)
    rows = [saved, *(row_of(one) for one in exports)]
    macs = cost(whole).macs / cost(small).macs
    return {"title": subject.title, "macs": macs, "forms": rows, "alignment": asdict(ready.alignment)}


def measure_saved(subject: Subject, whole: Graph, small: Graph, folder: Path, repeats: int) -> dict[str, Any]:
    """Measure the network saved and loaded again, which needs secateurs."""
    files = [save(graph, folder / f"{name}.safetensors") for graph, name in ((whole, "whole"), (small, "small"))]
    loaded = load(subject.fresh(), files[1]).module.eval()
    x = (example_input(subject.name, EXAMPLES),)
    with torch.inference_mode():
        difference = float((loaded(*x) - small.module.eval()(*x)).abs().max())
        speeds = [timed(whole.module.eval(), loaded, resized(x, batch), batch, repeats) for batch in TIMED_BATCHES]
    sizes = [file.stat().st_size for file in files]
    return {"form": "saved and loaded", "bytes": sizes, "difference": difference, "speeds": speeds}


def timed(whole: nn.Module, small: nn.Module, x: tuple[torch.Tensor, ...], batch: int, repeats: int) -> dict[str, Any]:
    engine = TorchEngine(batch)
    found = compare([engine.loaded(module, x) for module in (whole, small)], rounds=(repeats, repeats))
    return {"batch": batch, "seconds": list(found.medians), "speedup": asdict(found.speedups[0])}


def row_of(one: Exported) -> dict[str, Any]:
    speeds = [{"batch": s.batch, "seconds": [s.original, s.pruned], "speedup": asdict(s.speedup)} for s in one.speeds]
    words = {"onnx": "ONNX, in ONNX Runtime", "pt2": ".pt2", "source": "source"}[one.kind]
    return {
        "form": words,
        "bytes": [one.original_bytes, one.bytes],
        "difference": one.agreement.difference,
        "speeds": speeds,
    }


def measure_widths(repeats: int) -> list[dict[str, Any]]:
    """Time ResNet-20 with multiples of eight, and with one filter less, against the whole network."""
    graph, x, rows = trace(SUBJECTS[0].fresh(), example_input("resnet20")), example_input("resnet20", EXAMPLES), []
    whole = prepared(graph, x)
    for shortcut in ("before", "after"):
        for less, words in ((0, "half"), (1, "one less")):
            small = halved(graph, less, shortcut)
            with tempfile.TemporaryDirectory() as folder:
                ready = prepared(small, x)
                exports = (
                    to_source(ready, Path(folder), original=whole, repeats=repeats),
                    to_onnx(ready, Path(folder) / "model.onnx", original=whole, repeats=repeats),
                )
            faster = {one.speeds[0].runtime: {str(s.batch): asdict(s.speedup) for s in one.speeds} for one in exports}
            rows.append({"shortcut": shortcut, "kept": words, "macs": cost(graph).macs / cost(small).macs, "faster": faster})
    return rows


def render_widths(rows: list[dict[str, Any]]) -> str:
    """The table of widths."""
    columns = [(runtime, batch) for runtime in rows[0]["faster"] for batch in rows[0]["faster"][runtime]]
    lines = [
        "### Multiples of eight, and a filter less\n",
        "ResNet-20 with 8, 16 and 32 filters left in the layers of its stages, and with 7, 15 and 31: fewer MACs, but no "
        "multiples of eight. Speeds are beside the whole network.\n",
        f"| left | masks | MACs | {' | '.join(f'{runtime}, batch {batch}' for runtime, batch in columns)} |",
        f"| --- | --- | ---: | {' | '.join('---' for _ in columns)} |",
    ]
    for row in rows:
        speeds = " | ".join(SpeedUp(**row["faster"][runtime][batch]).summary() for runtime, batch in columns)
        lines.append(f"| {row['kept']} | {row['shortcut']} the add | {row['macs']:.2f}x fewer | {speeds} |")
    return "\n".join(lines)


def render(report: dict[str, Any]) -> str:
    """The generated part of the page."""
    lines = [
        f"Measured on: {Conditions(**report['conditions']).sentence()}. Milliseconds of the unpruned network and of the pruned "
        f"one, medians of {report['repeats']} runs in turns; ratios with 95 % intervals. All forms but ONNX run in PyTorch. "
        "*Difference*: the largest between any output and the pruned network's before it was written. *Aligning*: the share "
        "of the pruned network's time in PyTorch, at batch 64, that goes into aligning channels.\n",
        "| network | form | file | difference | batch 1 | batch 64 | aligning |",
        "| --- | --- | ---: | ---: | --- | --- | --- |",
    ]
    for network in report["networks"]:
        title, aligning = f"{network['title']}, {network['macs']:.2f}x fewer MACs", aligning_words(network["alignment"])
        for place, one in enumerate(network["forms"]):
            before, after = one["bytes"]
            speeds = " | ".join(speed_words(speed) for speed in one["speeds"])
            cells = [title if not place else "", one["form"], f"{before / after:.2f}x smaller", f"{one['difference']:.0e}"]
            lines.append(f"| {' | '.join([*cells, speeds, aligning if not place else ''])} |")
    return "\n\n".join(["\n".join(lines), render_widths(report["widths"])])


def speed_words(speed: dict[str, Any]) -> str:
    before, after = (f"{1e3 * seconds:.3g}" for seconds in speed["seconds"])
    return f"{before} → {after} ms: {SpeedUp(**speed['speedup']).summary()}"


def aligning_words(align: dict[str, Any]) -> str:
    if not align["share"]:
        return "none"
    return f"{100 * align['share']:.1f} % ({align['gathers']} gathers, {align['slices']} slices)"


def update_page() -> str:
    """Rewrite and return the generated part of the page."""
    text = render(json.loads(RESULTS.read_text()))
    write_text(PAGE, with_part(PAGE.read_text(), COMMAND, text))
    return text


def measured(subjects: tuple[Subject, ...], repeats: int) -> dict[str, Any]:
    """Measure everything on the page, with the conditions at the start."""
    torch.set_num_threads(1)
    under = asdict(conditions())
    networks = [measure(subject, repeats) for subject in subjects]
    return {
        "conditions": under,
        "repeats": repeats,
        "networks": networks,
        "widths": measure_widths(repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--render", action="store_true", help="only rewrite the page")
    parser.add_argument("--quick", action="store_true", help="narrow networks, 5 runs each; prints, and writes nothing")
    chosen = parser.parse_args()
    if chosen.quick:
        sys.stdout.write(render(measured(NARROW, repeats=5)) + "\n")
        return
    if not chosen.render:
        write_text(RESULTS, json.dumps(measured(SUBJECTS, chosen.repeats), indent=1) + "\n")
    sys.stdout.write(update_page() + "\n")


if __name__ == "__main__":
    main()
