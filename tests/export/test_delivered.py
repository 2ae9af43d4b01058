"""Networks as they are delivered: padded to multiples, or with BatchNorms folded; both compute what they computed before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nets import TOPOLOGIES, assert_same, random_keep, random_problem, randomise_, run
from secateurs import compact, find_sites, trace
from secateurs.errors import InvalidInput
from secateurs.export import deploy, to_onnx
from secateurs.export.pad import padded
from secateurs.speed.timing import Compared, SpeedUp


def widths(module: nn.Module) -> dict[str, int]:
    return {
        name: layer.weight.shape[0]
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
    }


@pytest.mark.parametrize("shortcut", ["before", "after"])
@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_a_padded_network_computes_the_same(name: str, shortcut: Any) -> None:
    graph, examples = random_problem(name)
    smaller = compact(graph, random_keep(list(find_sites(graph, shortcut)), seed=3), verify=False)
    wider = padded(smaller, 4)
    inputs = examples.batch(slice(0, 3)).args
    assert_same(run(wider.module, *inputs), run(smaller.module, *inputs))
    before, after = widths(smaller.module), widths(wider.module)
    changed = {layer for layer in before if after[layer] != before[layer]}
    assert changed
    assert all(after[layer] % 4 == 0 and after[layer] - before[layer] < 4 for layer in changed)


def test_what_is_padded_and_what_is_not() -> None:
    """By hand: of 5, 7 and 3 channels the inner ones become 8, the classes stay 3; a concatenation keeps its terms."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 7, 3, padding=1), nn.Conv2d(7, 6, 1)
            self.depth, self.norm, self.out = nn.Conv2d(7, 7, 3, padding=1, groups=7), nn.BatchNorm2d(7), nn.Linear(13, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.sigmoid(self.norm(self.depth(torch.relu(self.b(torch.relu(self.a(x)))))))
            y = y * y.mean((2, 3), keepdim=True)
            z = torch.cat([y, self.c(y)], 1)
            logits: torch.Tensor = self.out(z.mean((2, 3)))
            return logits

    graph = trace(randomise_(Net()), torch.randn(2, 2, 6, 6, dtype=torch.float64))
    wider = padded(graph, 8)
    assert widths(wider.module) == {"a": 8, "b": 7, "depth": 7, "c": 6, "out": 3}
    graph = trace(
        randomise_(nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 3))),
        torch.randn(2, 2, 6, 6).double(),
    )
    assert widths(padded(graph, 8).module) == {"0": 5, "3": 3}  # a flattened image
    with pytest.raises(InvalidInput, match="pad_to: got 0"):
        padded(graph, 0)


def test_an_export_is_padded_and_checked(tmp_path: Path) -> None:
    import onnx

    graph, _ = random_problem("resnet8", torch.float32)
    smaller = compact(graph, random_keep(list(find_sites(graph)), seed=3), verify=False)
    found = to_onnx(smaller, tmp_path / "net.onnx", pad_to=4)
    assert found.agreement.difference <= 1e-4 * found.agreement.scale
    filters = [tensor.dims[0] for tensor in onnx.load(found.path).graph.initializer if len(tensor.dims) == 4]
    assert filters
    assert all(count % 4 == 0 for count in filters)


@pytest.mark.parametrize("ratio", [0.8, 1.0, 2.0])
def test_a_deployed_network_has_no_batchnorms_and_the_faster_memory_format(
    monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    measured = Compared(torch.ones(2, 5), (SpeedUp(ratio, ratio - 0.1, ratio + 0.1),))
    monkeypatch.setattr("secateurs.export.deployment.compare", lambda loads: measured)
    graph, examples = random_problem("resnet8")
    smaller = compact(graph, random_keep(list(find_sites(graph)), seed=3), verify=False)
    found = deploy(smaller, batch=2)
    assert found.folded == sum(isinstance(layer, nn.BatchNorm2d) for layer in smaller.module.modules())
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in found.module.modules())
    assert found.channels_last == (ratio == 2.0)
    weight = next(p for p in found.module.parameters() if p.dim() == 4 and p.shape[2] > 1 and p.shape[1] > 1)
    assert weight.is_contiguous(memory_format=torch.channels_last) == found.channels_last
    inputs = examples.batch(slice(0, 3)).args
    assert_same(run(found.module, *inputs), run(smaller.module, *inputs))
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in smaller.module.modules())  # the trainable one is as it was
