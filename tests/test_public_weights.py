"""The public ResNet-20 on real CIFAR-10 test images: cutting it changes no prediction of the masked network.

Its accuracy of 91.73 % is checked in test_models.py, on all 10,000 images.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nets import random_keep
from secateurs import compact, find_sites, masked, trace, verify
from secateurs._util.download import home
from secateurs.models import PUBLIC_MEAN, PUBLIC_STD, load_public

IMAGES = 2_000


@pytest.fixture(scope="module")
def images() -> Tensor:
    """The first test images, normalised as the weights want them."""
    records = np.fromfile(home() / "data" / "cifar-10-batches-bin" / "test_batch.bin", dtype=np.uint8).reshape(-1, 3073)
    pixels = torch.from_numpy(records[:IMAGES, 1:].reshape(-1, 3, 32, 32)).float() / 255
    return (pixels - torch.tensor(PUBLIC_MEAN).view(3, 1, 1)) / torch.tensor(PUBLIC_STD).view(3, 1, 1)


def logits(module: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([module(batch) for batch in images.split(250)])


@pytest.mark.realdata
@pytest.mark.parametrize("shortcut", ["before", "after"])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_masked_and_compacted_predict_the_same_class_for_every_image(images: Tensor, shortcut: str, share: float) -> None:
    graph = trace(load_public(20), images[:2])
    keep = random_keep(find_sites(graph, shortcut), seed=int(10 * share), share=share)
    assert len(keep) == 19
    smaller, reference = compact(graph, keep), masked(graph, keep)
    ours, theirs = logits(smaller.module, images), logits(reference, images)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # float32
    best = theirs.topk(2).values
    told_apart = best[:, 0] - best[:, 1] > 1e-3  # rounding may turn a tie
    assert told_apart.float().mean() > 0.99
    assert torch.equal(ours.argmax(1)[told_apart], theirs.argmax(1)[told_apart])
    assert verify(graph, keep, smaller, inputs=images[:50]).difference < 1e-10


@pytest.mark.realdata
@pytest.mark.parametrize("shortcut", ["before", "after"])
def test_each_site_alone(images: Tensor, shortcut: str) -> None:
    """One random cut at every site, one after the other, in float64: equal image by image, and still a good network."""
    few = images[:10].double()
    graph = trace(load_public(20).double(), few[:2])
    whole = logits(graph.module, few).argmax(1)
    for seed, site in enumerate(find_sites(graph, shortcut)):
        keep = random_keep([site], seed, share=0.25)
        wanted = logits(masked(graph, keep), few)
        torch.testing.assert_close(logits(compact(graph, keep).module, few), wanted, rtol=0, atol=1e-11)
        assert (wanted.argmax(1) == whole).float().mean() > 0.2  # far from chance: the masks lie where they should
