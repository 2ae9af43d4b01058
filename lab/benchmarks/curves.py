"""What curves should measure, cross-entropy or divergence from the untouched network: `python -m benchmarks.curves`.

Cuts of the public ResNet-20 by L1 norm, nothing repaired, are divided over the network by curves of either kind, on the same
1,000 search images, and the networks for four MAC targets are measured on the 4,000 search images that no curve has seen. The
test half has no part in this, as a default follows from it. Writes a table in lab/notes/quality.md (ten minutes of one core).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.conditions import conditions
from benchmarks.quality_ladder import Ladder
from benchmarks.quality_setup import BATCH, STEERING, Method, Subject
from benchmarks.render import with_part
from secateurs import cost, find_sites
from secateurs._util.files import write_text
from secateurs.data.splits import split
from secateurs.metrics import Measure, accuracy, cross_entropy
from secateurs.pruning.curves import measure_curve
from secateurs.scoring.cache import MeasurementCache

PAGE = Path(__file__).parents[2] / "lab" / "notes" / "quality.md"
TARGETS = (0.05, 0.1, 0.15, 0.2)


def plain(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy under a name of its own: the usual one would give way to the divergence."""
    return cross_entropy(outputs, targets)


MEASURES: dict[str, Measure] = {"cross-entropy": plain, "divergence": cross_entropy}


def line(subject: Subject, name: str) -> str:
    """One row of the table: MACs removed and accuracy, for every target."""
    seen, unseen = split(subject.data.search, (STEERING, len(subject.data.search) - STEERING), seed=0)
    context = subject.context(Method("l1", "none"), 0, MeasurementCache(None))
    runtime = replace(context.runtime, loss_fn=MEASURES[name])
    context = replace(context, data=replace(subject.data, search=seen), runtime=runtime)
    courses = {}
    for number, site in enumerate(find_sites(context.original, "before"), 1):
        place = context.prepare(context.original, site)
        ranking = context.rank(place, step=number, on_scored=lambda done, of: None)
        courses[site.name] = measure_curve(context, place, ranking)
    ladder, whole = Ladder(context, courses), cost(context.original).macs
    cells = []
    for target in TARGETS:
        graph = ladder.network(target)
        right = accuracy(graph.module, unseen, batch=BATCH)
        cells.append(f"{100 * (1 - cost(graph).macs / whole):.1f} → {100 * right:.2f}")
    sys.stdout.write(f"{name}: {', '.join(cells)}\n")
    return f"| {name} | {', '.join(cells)} |"


def main() -> int:
    torch.set_num_threads(1)
    subject = Subject("resnet20")
    lines = ["| curves | MACs removed → accuracy, % |", "| --- | --- |", *(line(subject, name) for name in MEASURES)]
    text = "\n".join([f"Measured on: {conditions().sentence()}.\n", *lines])
    write_text(PAGE, with_part(PAGE.read_text(), "python -m benchmarks.curves", text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
