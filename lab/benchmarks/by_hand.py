"""A cut ResNet-56 beside the same widths written by hand, in eager mode, in turns: python -m benchmarks.by_hand

Half of every inner layer, of random filters: the hand-built network gets the same weights and gives the same outputs.
Half of every stream: `resnet(56, widths=(8, 16, 32))`, which widens its shortcuts by a pad, where the cut one has to select.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from benchmarks.conditions import keep_pages
from secateurs import Graph, compact, find_sites, latency, trace
from secateurs.config import Shortcut
from secateurs.models import example_input
from secateurs.models.resnet import Block, resnet

BATCHES = ((1, 60), (64, 20))  # batch, repeats


def inner(network: nn.Module) -> nn.Module:
    """The network, in place, with half as many filters in the first layer of every block."""
    for block in network.modules():
        if isinstance(block, Block):
            into, out = block.conv1.in_channels, block.conv2.out_channels
            half = block.conv1.out_channels // 2
            block.conv1 = nn.Conv2d(into, half, 3, block.conv1.stride, 1, bias=False)
            block.bn1 = nn.BatchNorm2d(half)
            block.conv2 = nn.Conv2d(half, out, 3, 1, 1, bias=False)
    return network


def cut(graph: Graph, shortcut: Shortcut, layers: str) -> Graph:
    """The network with a random half of every site whose first layer's path ends with `layers`."""
    generator = torch.Generator().manual_seed(0)
    masks: dict[str, Tensor] = {}
    for site in find_sites(graph, shortcut):
        kept = torch.randperm(site.channels, generator=generator)[: site.channels // 2]
        if site.layers[0].endswith(layers) and (shortcut == "stream" or site.name.startswith("layer")):
            masks[site.name] = torch.zeros(site.channels, dtype=torch.bool).index_fill(0, kept, True)
    return compact(graph, masks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=56)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_pages()
    torch.manual_seed(0)
    graph = trace(resnet(options.depth).eval(), example_input("resnet56"))
    images = torch.randn(64, 3, 32, 32)
    halved = cut(graph, "before", "conv1").module
    by_hand = inner(resnet(options.depth)).eval()
    by_hand.load_state_dict(halved.state_dict())
    with torch.inference_mode():
        assert torch.equal(by_hand(images[:4]), halved(images[:4]))
    pairs = {
        "half of every inner layer": (by_hand, halved),
        "half of every stream": (resnet(options.depth, widths=(8, 16, 32)).eval(), cut(graph, "stream", "").module),
    }
    for batch, repeats in BATCHES:
        for name, pair in pairs.items():
            found = latency(*pair, example_input=images[:batch], repeats=repeats)
            theirs, ours = (1e3 * timing.median for timing in found.timings)
            speed = found.speedups[0]
            print(
                f"batch {batch}, {name}: {ours:.3g} ms, by hand {theirs:.3g} ms; "
                f"{1 / speed.ratio:.3f} of the time by hand ({1 / speed.high:.3f} to {1 / speed.low:.3f})"
            )


if __name__ == "__main__":
    main()
