"""How long surgery takes, and how much faster it makes a network: `python -m benchmarks.surgery` (or `make bench`).

Ratios, measured in turns in one process. Writes lab/benchmarks/results/surgery.json and the tables in lab/notes/performance.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.conditions import Conditions, conditions
from benchmarks.profile import profile
from benchmarks.render import RESULTS, update_page
from benchmarks.rival import prune_half, zeroed
from secateurs import Graph, compact, cost, find_sites, latency, masked, trace
from secateurs._util.files import write_text
from secateurs.models import build
from secateurs.speed.timing import SpeedUp, speedup

BATCH = 128
PASSES = 20  # forward passes that surgery must not outlast
Masks = dict[str, Tensor]


@dataclass(frozen=True)
class SurgeryTime:
    """Tracing and compacting beside forward passes, in seconds (medians)."""

    trace: float
    compact: float
    forward: float  # one batch
    ratio: SpeedUp  # the passes' time over the surgery's: above 1, surgery is shorter


@dataclass(frozen=True)
class Operated:
    """A network that lost filters, how long that took, and what it must compute."""

    tool: str
    filters: str  # which were removed
    network: nn.Module
    seconds: float
    reference: nn.Module  # the whole network with those filters' outputs set to zero


@dataclass(frozen=True)
class Cut:
    """One network after one cut, beside the uncut one."""

    tool: str
    shortcuts: str
    filters: str
    seconds: float  # of surgery
    macs: float  # uncut over cut
    parameters: float  # uncut over cut
    speed: SpeedUp
    difference: float  # from the reference, relative to the largest output, in float64


@dataclass(frozen=True)
class Report:
    """All that the page shows."""

    conditions: Conditions
    surgery: SurgeryTime
    cuts: tuple[Cut, ...]
    profile: tuple[dict[str, float], dict[str, float]]  # seconds by kind of node: uncut, cut
    profile_macs: tuple[int, int]


def images(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random CIFAR-sized images, the same at every call."""
    return torch.randn(count, 3, 32, 32, dtype=dtype, generator=torch.Generator().manual_seed(0))


def randomised(name: str) -> nn.Module:
    """A built-in network in eval mode, with random BatchNorm statistics: fresh ones would hide mistakes."""
    torch.manual_seed(0)
    model = build(name).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
    return model


def random_half(graph: Graph) -> Masks:
    """Masks that keep a random half of the channels of every site, before the add."""
    generator = torch.Generator().manual_seed(0)
    keep = {}
    for site in find_sites(graph, shortcut="before"):
        keep[site.name] = torch.zeros(site.channels, dtype=torch.bool)
        keep[site.name][torch.randperm(site.channels, generator=generator)[: site.channels // 2]] = True
    return keep


def removed_alike(graph: Graph, removed: dict[str, list[int]]) -> Masks:
    """Masks, after the add, that drop the channels removed behind each BatchNorm."""
    keep = {}
    for site in find_sites(graph, shortcut="after"):
        keep[site.name] = torch.ones(site.channels, dtype=torch.bool)
        keep[site.name][removed[site.layers[0].replace("conv", "bn")]] = False
    return keep


def operate(model: nn.Module, keep: Masks, filters: str) -> tuple[Graph, Graph, Operated]:
    """Trace and compact: the graphs before and after, and the record of it."""
    start = perf_counter()
    graph = trace(model, images(2))
    narrow = compact(graph, keep)
    seconds = perf_counter() - start
    return graph, narrow, Operated("secateurs", filters, narrow.module, seconds, masked(graph, keep))


def compare(model: nn.Module, shortcuts: str, operated: list[Operated], repeats: int) -> list[Cut]:
    """Run the uncut network and all that was made of it in turns."""
    measured = latency(model, *(o.network for o in operated), example_input=images(BATCH), repeats=repeats)
    whole = cost(model, images(1))
    cuts = []
    for one, speed in zip(operated, measured.speedups, strict=True):
        left = cost(one.network, images(1))
        shrunk = whole.macs / left.macs, whole.parameters / left.parameters
        difference = relative_difference(one.network, one.reference)
        cuts.append(Cut(one.tool, shortcuts, one.filters, one.seconds, *shrunk, speed, difference))
    return cuts


def relative_difference(network: nn.Module, reference: nn.Module) -> float:
    """Largest difference between two networks' outputs in float64, over the largest output."""
    x = images(4, torch.float64)
    with torch.inference_mode():
        wanted = copy.deepcopy(reference).double()(x)
        return float((copy.deepcopy(network).double()(x) - wanted).abs().max() / wanted.abs().max())


def time_surgery(name: str, repeats: int) -> SurgeryTime:
    """Trace and compact at all sites, in turns with a forward pass."""
    model, x = randomised(name), images(BATCH)
    keep = random_half(trace(model, x[:2]))
    turns: list[tuple[float, float, float]] = []
    for _ in range(repeats + 1):
        start = perf_counter()
        graph = trace(model, x[:2])
        traced = perf_counter()
        compact(graph, keep)
        compacted = perf_counter()
        with torch.inference_mode():
            model(x)
        turns.append((traced - start, compacted - traced, perf_counter() - compacted))
    tracing, compacting, forward = torch.tensor(turns[1:], dtype=torch.float64).T  # the first turn warms up
    ratio = speedup(PASSES * forward, tracing + compacting)
    return SurgeryTime(*(median(row.tolist()) for row in (tracing, compacting, forward)), ratio)


def measure(repeats: int) -> Report:
    """Everything, in about two minutes on an idle core."""
    half = "half of every layer's"
    a, b = randomised("resnet56"), randomised("resnet56-b")
    graph, narrow, ours = operate(a, random_half(trace(a, images(2))), f"{half}, before the add")
    theirs_a, theirs_b = prune_half(a, images(2)), prune_half(b, images(2))
    alike = removed_alike(trace(b, images(2)), theirs_b.removed)
    operated_a = [ours, Operated("Torch-Pruning", half, theirs_a.network, theirs_a.seconds, zeroed(a, theirs_a.removed))]
    operated_b = [
        operate(b, alike, f"{half}, those that Torch-Pruning takes")[2],
        Operated("Torch-Pruning", half, theirs_b.network, theirs_b.seconds, zeroed(b, theirs_b.removed)),
    ]
    cuts = compare(a, "option A", operated_a, repeats) + compare(b, "option B", operated_b, repeats)
    uncut, cut = profile((graph, narrow), images(BATCH), repeats)
    return Report(
        conditions(),
        time_surgery("resnet110", repeats),
        tuple(cuts),
        (uncut, cut),
        (cost(graph).macs, cost(narrow).macs),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; one is least disturbed by other programs")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    write_text(RESULTS, json.dumps(asdict(measure(options.repeats)), indent=1) + "\n")
    sys.stdout.write(update_page() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
