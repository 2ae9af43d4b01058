"""`shortcut="stream"` on the transformers and ConvNeXts of other packages: all but the output layer loses channels, exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from run_script import define_operators
from torch import nn

from nets import assert_compact_is_masked, random_keep, random_tensor, randomise_
from secateurs import cost, find_sites, trace


def timm_model(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: pytest.importorskip("timm", reason="make test-integrations").create_model(name, **options)


def torchvision_model(name: str, *args: object) -> Callable[[], nn.Module]:
    return lambda: getattr(pytest.importorskip("torchvision", reason="make test-integrations").models, name)(*args)


def hugging_face(name: str, **options: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers", reason="make test-integrations")
        network: nn.Module = getattr(transformers, f"{name}ForImageClassification")(
            getattr(transformers, f"{name}Config")(**options)
        )
        return network

    return build


VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32}
SWIN = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with the pixels of a square input
    "timm ViT": (timm_model("test_vit", img_size=32, patch_size=8), 32),
    "timm ConvNeXt": (timm_model("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 12, 16, 24)), 64),
    "timm Swin": (timm_model("swin_tiny_patch4_window7_224", img_size=64, **SWIN), 64),
    "timm pre-activation ResNet": (timm_model("resnetv2_18", channels=(16, 24, 32, 40)), 32),
    "torchvision ViT": (torchvision_model("VisionTransformer", 32, 8, 2, 4, 24, 48), 32),
    "torchvision Swin": (torchvision_model("SwinTransformer", [4, 4], 16, [2, 2], [2, 4], [4, 4]), 64),
    "torchvision MobileNetV2": (torchvision_model("mobilenet_v2"), 32),
    "transformers ViT": (hugging_face("ViT", patch_size=8, **VIT), 32),
    "transformers ConvNeXt": (hugging_face("ConvNext", depths=[1, 1, 1, 1], hidden_sizes=[8, 12, 16, 20]), 64),
    "transformers Swin": (hugging_face("Swin", image_size=64, **SWIN), 64),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", NETS)
def test_streams_of_other_packages(name: str) -> None:
    define_operators()
    build, pixels = NETS[name]
    model, x = randomise_(build(), 0), random_tensor(2, 3, pixels, pixels)
    graph = trace(model, x)
    sites = find_sites(graph, "stream")
    assert any("stream" in site.name for site in sites)
    locked = sum(refused.macs for refused in sites.unprunable if not refused.reason.startswith("it is the network's output"))
    assert locked <= 0.02 * cost(graph).macs, [refused.reason for refused in sites.unprunable]
    smaller = assert_compact_is_masked(graph, random_keep(list(sites), 1, 0.4), (random_tensor(3, 3, pixels, pixels, seed=4),))
    again = find_sites(smaller, "stream")
    assert [site.name for site in again] == [site.name for site in sites]
    assert_compact_is_masked(smaller, random_keep(list(again), 2, 0.3), (x,))
