"""How long surgery takes, and how much faster it makes a network: `python -m benchmarks.surgery` (or `make bench`).

Ratios, measured in turns in one process. Writes benchmarks/results/surgery.json and the tables in docs/performance.md.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.conditions import Conditions, conditions
from benchmarks.profile import profile
from benchmarks.rival import Pruned, prune_half, zeroed
from secateurs import Graph, compact, cost, find_sites, latency, masked, trace
from secateurs.files import write_text
from secateurs.models import build
from secateurs.timing import Latency, SpeedUp, speedup

RESULTS = Path(__file__).parent / "results" / "surgery.json"
BATCH = 128
PASSES = 20  # forward passes that surgery must not outlast


@dataclass(frozen=True)
class SurgeryTime:
    """Tracing and compacting beside forward passes, in seconds (medians)."""

    trace: float
    compact: float
    forward: float  # one batch
    ratio: SpeedUp  # the passes' time over the surgery's: above 1, surgery is shorter


@dataclass(frozen=True)
class Cut:
    """One network after one cut, beside the uncut one."""

    tool: str
    network: str
    filters: str  # which were removed
    seconds: float  # of surgery
    macs: float  # uncut over cut
    parameters: float  # uncut over cut
    speed: SpeedUp
    difference: float  # from the masked network, relative to the largest output, in float64


@dataclass(frozen=True)
class Report:
    """All that the page shows."""

    conditions: Conditions
    surgery: SurgeryTime
    cuts: tuple[Cut, ...]
    profile: tuple[dict[str, float], dict[str, float]]  # seconds by kind of node: uncut, cut
    profile_macs: tuple[int, int]


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


def half(graph: Graph) -> dict[str, Tensor]:
    """Masks that keep a random half of the channels of every site, before the add."""
    generator = torch.Generator().manual_seed(0)
    keep = {}
    for site in find_sites(graph, shortcut="before"):
        keep[site.name] = torch.zeros(site.channels, dtype=torch.bool)
        keep[site.name][torch.randperm(site.channels, generator=generator)[: site.channels // 2]] = True
    return keep


def time_surgery(name: str, repeats: int) -> SurgeryTime:
    """Trace and compact at all sites, in turns with a forward pass."""
    model, x = randomised(name), torch.randn(BATCH, 3, 32, 32)
    keep = half(trace(model, x[:2]))
    rows: list[tuple[float, float, float]] = []
    with torch.inference_mode(False):
        for _ in range(repeats + 1):
            start = perf_counter()
            graph = trace(model, x[:2])
            traced = perf_counter()
            compact(graph, keep)
            done = perf_counter()
            with torch.inference_mode():
                model(x)
            rows.append((traced - start, done - traced, perf_counter() - done))
    tracing, compacting, forward = zip(*rows[1:], strict=True)  # the first turn warms up
    passes = PASSES * torch.tensor(forward, dtype=torch.float64)
    whole = torch.tensor(tracing, dtype=torch.float64) + torch.tensor(compacting, dtype=torch.float64)
    return SurgeryTime(median(tracing), median(compacting), median(forward), speedup(passes, whole))


def relative_difference(network: nn.Module, reference: nn.Module) -> float:
    """Largest difference between two networks' outputs in float64, over the largest output."""
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    with torch.inference_mode():
        wanted = copy.deepcopy(reference).double()(x)
        return float((copy.deepcopy(network).double()(x) - wanted).abs().max() / wanted.abs().max())


def cut_half(name: str) -> tuple[Graph, Graph, float, float]:
    """The traced network, what is left of it, the seconds of surgery, and the difference from the masked network."""
    model = randomised(name)
    keep = half(trace(model, torch.randn(2, 3, 32, 32)))
    start = perf_counter()
    graph = trace(model, torch.randn(2, 3, 32, 32))
    narrow = compact(graph, keep)
    seconds = perf_counter() - start
    return graph, narrow, seconds, relative_difference(narrow.module, masked(graph, keep))


def cut_alike(model: nn.Module, pruned: Pruned) -> tuple[Graph, float, float]:
    """Remove with secateurs what Torch-Pruning removed: the network, the seconds, the difference from masked."""
    start = perf_counter()
    graph = trace(model, torch.randn(2, 3, 32, 32))
    keep = {}
    for site in find_sites(graph, shortcut="after"):
        norm = site.layers[0].replace("conv", "bn")
        keep[site.name] = torch.ones(site.channels, dtype=torch.bool)
        keep[site.name][pruned.removed[norm]] = False
    narrow = compact(graph, keep)
    seconds = perf_counter() - start
    return narrow, seconds, relative_difference(narrow.module, masked(graph, keep))


def ratios(model: nn.Module, narrow: nn.Module | Graph) -> tuple[float, float]:
    """MACs and parameters of the uncut network over those of the cut one."""
    x = torch.randn(2, 3, 32, 32)
    before, after = cost(model, x), cost(narrow, x)
    return before.macs / after.macs, before.parameters / after.parameters


def measure(repeats: int) -> Report:
    """Everything, in about three minutes on two cores."""
    x = torch.randn(BATCH, 3, 32, 32)
    compare = partial(latency, example_input=x, repeats=repeats)

    a, b = randomised("resnet56"), randomised("resnet56-b")
    graph, narrow, seconds, difference = cut_half("resnet56")
    ours_a: Latency = compare(a, narrow)
    rival_a, rival_b = (prune_half(model, x[:2]) for model in (a, b))
    same_b, same_seconds, same_difference = cut_alike(b, rival_b)
    speeds_b = compare(b, same_b, rival_b.network).speedups
    whole = "half of every layer's"
    cuts = (
        Cut(
            "secateurs",
            "option A",
            f"{whole}, before the add",
            seconds,
            *ratios(a, narrow),
            ours_a.speedups[0],
            difference,
        ),
        Cut(
            "Torch-Pruning",
            "option A",
            whole,
            rival_a.seconds,
            *ratios(a, rival_a.network),
            compare(a, rival_a.network).speedups[0],
            relative_difference(rival_a.network, zeroed(a, rival_a.removed)),
        ),
        Cut(
            "secateurs",
            "option B",
            f"{whole}, as Torch-Pruning",
            same_seconds,
            *ratios(b, same_b),
            speeds_b[0],
            same_difference,
        ),
        Cut(
            "Torch-Pruning",
            "option B",
            whole,
            rival_b.seconds,
            *ratios(b, rival_b.network),
            speeds_b[1],
            relative_difference(rival_b.network, zeroed(b, rival_b.removed)),
        ),
    )
    uncut, cut = profile((graph, narrow), x, repeats)
    return Report(
        conditions(),
        time_surgery("resnet110", max(5, repeats // 4)),
        cuts,
        (uncut, cut),
        (cost(graph).macs, cost(narrow).macs),
    )


def main() -> int:
    from benchmarks.render import update_page

    report = measure(repeats=20)
    write_text(RESULTS, json.dumps(asdict(report), indent=1) + "\n")
    sys.stdout.write(update_page() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
