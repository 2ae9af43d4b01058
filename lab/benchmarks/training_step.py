"""A step of training of a cut network beside one of the whole network: `python -m benchmarks.training_step` (two minutes).

ResNet-20 with random cuts of every site, channels last, in three ways that run in turns: whole, cut, and cut with channels
moved by plain selections, whose results and gradients lie in memory in the usual order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.conditions import conditions
from secateurs import compact, cost, find_sites, trace
from secateurs.graph import layers
from secateurs.models import build, example_input

BATCH = 128


@contextmanager
def plain_selections() -> Iterator[None]:
    """Channels of all tensors are selected alike, whatever their memory format."""
    known, layers.channels_last = layers.channels_last, lambda x, axis: False
    try:
        yield
    finally:
        layers.channels_last = known


def trained(module: nn.Module, images: Tensor, labels: Tensor) -> None:
    module.train()
    nn.functional.cross_entropy(module(images), labels).backward()
    module.zero_grad(set_to_none=True)


def evaluated(module: nn.Module, images: Tensor, labels: Tensor) -> None:
    module.eval()
    with torch.inference_mode():
        module(images)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="resnet20")
    parser.add_argument("--share", type=float, default=0.3, help="of the filters of every site that go")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--half", action="store_true", help="also in bfloat16, by autocast")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    graph = trace(build(given.network).eval(), example_input(given.network))
    masks = {}
    for site in find_sites(graph):
        kept = torch.randperm(site.channels)[round(given.share * site.channels) :]
        masks[site.name] = torch.zeros(site.channels, dtype=torch.bool).index_fill(0, kept, True)
    smaller = compact(graph, masks)
    whole, cut = (each.module.to(memory_format=torch.channels_last) for each in (graph, smaller))  # type: ignore[call-overload]
    images = torch.randn(BATCH, *example_input(given.network).shape[1:]).contiguous(memory_format=torch.channels_last)
    batch = images, torch.randint(10, (BATCH,))
    sys.stdout.write(f"{conditions().sentence()}; {1 - cost(smaller).macs / cost(graph).macs:.1%} of the MACs removed\n")
    for name, run in (("training", trained), ("inference", evaluated)):
        ways = ["whole", "cut", "cut, plain selections", *(["whole, bfloat16", "cut, bfloat16"] if given.half else [])]
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(given.rounds + 1):
            seconds["whole"].append(timed(run, whole, *batch))
            seconds["cut"].append(timed(run, cut, *batch))
            with plain_selections():
                seconds["cut, plain selections"].append(timed(run, cut, *batch))
            for way, module in (("whole", whole), ("cut", cut)) if given.half else ():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    seconds[f"{way}, bfloat16"].append(timed(run, module, *batch))
        middle = {way: median(found[1:]) for way, found in seconds.items()}  # the first round warms up
        for way, found in middle.items():
            ratios = sorted(one / other for one, other in zip(seconds["whole"][1:], seconds[way][1:], strict=True))
            faster = f"{median(ratios):.2f}x as fast as whole ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            sys.stdout.write(f"{name}, {way}: {1000 * found:.0f} ms, {faster}\n")
    return 0


def timed(run: Callable[..., None], *args: object) -> float:
    began = perf_counter()
    run(*args)
    return perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
