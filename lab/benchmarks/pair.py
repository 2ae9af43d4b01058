"""ResNet-56 whole and with half of its filters, two networks in turns: python -m benchmarks.pair"""

from __future__ import annotations

import torch

from secateurs import compact, find_sites, latency, trace
from secateurs.models import build, example_input


def main() -> None:
    torch.set_num_threads(1)
    graph = trace(build("resnet56").eval(), example_input("resnet56"))
    generator = torch.Generator().manual_seed(0)
    masks = {}
    for site in find_sites(graph):
        kept = torch.randperm(site.channels, generator=generator)[: site.channels // 2]
        masks[site] = torch.zeros(site.channels, dtype=torch.bool).index_fill(0, kept, True)
    smaller = compact(graph, masks)
    images = torch.randn(128, 3, 32, 32, generator=generator)
    for _ in range(2):
        print(latency(graph.module, smaller.module, example_input=images, repeats=8).summary())


if __name__ == "__main__":
    main()
