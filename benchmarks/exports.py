"""What pruning brings once a network has left for elsewhere: `python -m benchmarks.exports` (four networks, minutes).

Each network loses a random half of the channels of every site and is exported, checked and timed beside its unpruned self,
in turns. Writes benchmarks/results/exports.json and the table in docs/exports.md; `--render` only writes the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import Conditions, conditions
from secateurs import Graph, compact, cost, find_sites, trace
from secateurs.export import Exported, prepared, to_onnx, to_source
from secateurs.files import write_text
from secateurs.models import build, example_input
from secateurs.timing import SpeedUp

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "exports.json"
PAGE = ROOT / "docs" / "exports.md"
BEGIN, END = "<!-- begin: made by `python -m benchmarks.exports` -->", "<!-- end: made by `python -m benchmarks.exports` -->"


@dataclass(frozen=True)
class Subject:
    """A network to be exported, and how it is named in the table."""

    title: str
    name: str
    options: dict[str, Any]


SUBJECTS = (
    Subject("ResNet-20", "resnet20", {}),
    Subject("VGG-16, a quarter as wide", "vgg16", {"width": 16}),
    Subject("MobileNet-like, width 16", "mobilenet-small", {"width": 16}),
    Subject("MLP, 64-512-256-10", "mlp", {"hidden": [512, 256]}),
)


def halved(subject: Subject) -> tuple[Graph, Graph]:
    """The network as it is built, and without a random half of the channels of every site."""
    torch.manual_seed(0)
    graph = trace(build(subject.name, **subject.options).eval(), example_input(subject.name))
    generator, keep = torch.Generator().manual_seed(0), {}
    for site in find_sites(graph, shortcut="before"):
        keep[site.name] = torch.zeros(site.channels, dtype=torch.bool)
        keep[site.name][torch.randperm(site.channels, generator=generator)[: site.channels // 2]] = True
    return graph, compact(graph, keep)


def measure(subject: Subject, repeats: int) -> dict[str, Any]:
    """Both exports of one network, in both runtimes."""
    whole, small = halved(subject)
    x = example_input(subject.name, 64)
    ready, original = prepared(small, x), prepared(whole, x)
    with tempfile.TemporaryDirectory() as folder:
        exports: list[Exported] = [
            to_onnx(ready, Path(folder) / "model.onnx", original=original, repeats=repeats),
            to_source(ready, Path(folder), original=original, repeats=repeats),
        ]
    macs = cost(whole).macs / cost(small).macs
    found = [asdict(one) | {"path": one.path.name} for one in exports]
    return {"title": subject.title, "macs": macs, "exports": found}


def render(report: dict[str, Any]) -> str:
    """The generated part of the page."""
    lines = [
        f"Measured on: {Conditions(**report['conditions']).sentence()}. Ratios of medians of {report['repeats']} runs in "
        "turns, with 95 % intervals; speeds of source are those of PyTorch. The last column is the share of the pruned "
        "network's time in PyTorch, at batch 64, that goes into aligning channels.",
        "",
        "| network | MACs | export | file | difference | batch 1 | batch 64 | aligning |",
        "| --- | ---: | --- | ---: | ---: | --- | --- | --- |",
    ]
    for network in report["networks"]:
        for one in network["exports"]:
            one_at_a_time, many = (SpeedUp(**speed["speedup"]).summary() for speed in one["speeds"])
            align = one["alignment"]
            share = (
                f"{100 * align['share']:.1f} % ({align['gathers']} gathers, {align['slices']} slices)"
                if align["share"]
                else "none"
            )
            lines.append(
                f"| {network['title']} | {network['macs']:.2f}x fewer | {one['kind']} | "
                f"{one['original_bytes'] / one['bytes']:.2f}x smaller | {one['agreement']['difference']:.0e} | "
                f"{one_at_a_time} | {many} | {share} |"
            )
    return "\n".join(lines)


def update_page() -> str:
    """Rewrite the generated part of the page, and return it."""
    text = render(json.loads(RESULTS.read_text()))
    head, rest = PAGE.read_text().split(BEGIN)
    write_text(PAGE, f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--render", action="store_true", help="only write the table anew")
    chosen = parser.parse_args()
    if not chosen.render:
        torch.set_num_threads(1)
        networks = [measure(subject, chosen.repeats) for subject in SUBJECTS]
        report = {"conditions": asdict(conditions()), "repeats": chosen.repeats, "networks": networks}
        write_text(RESULTS, json.dumps(report, indent=1) + "\n")
    sys.stdout.write(update_page() + "\n")


if __name__ == "__main__":
    main()
