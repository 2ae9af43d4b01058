"""Chains that are timed in ONNX Runtime compute what torch does; recipes name engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nets import seeded
from secateurs import Recipe, trace
from secateurs.errors import InvalidInput
from secateurs.export.engines import CompileEngine, OnnxEngine, chain_model, engine_for
from secateurs.export.programs import feed, start_session
from secateurs.speed.engines import MeasureEngine, TorchEngine


@pytest.mark.parametrize(
    ("layer", "shape", "size"),
    [
        (nn.Conv2d(6, 9, 3, stride=2, padding=1), (2, 6, 9, 9), (5, 5)),
        (nn.Conv2d(6, 6, (3, 1), padding=(1, 0), groups=6, bias=False), (1, 6, 5, 5), (5, 5)),
        (nn.Conv2d(8, 4, 3, padding="same", dilation=2), (1, 8, 7, 7), (7, 7)),
        (nn.Conv1d(4, 6, 5, padding=2, groups=2), (3, 4, 11), (11,)),
        (nn.Conv3d(2, 3, 3), (1, 2, 5, 5, 5), (5, 5, 5)),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1), (1, 6, 5, 5), (10, 10)),
        (nn.Linear(12, 7), (3, 12), ()),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_chain_computes_a_layer_and_its_reverse(layer: Any, shape: tuple[int, ...], size: tuple[int, ...]) -> None:
    """Against torch, with the weights that the model draws: as many MACs as the layer, at the size of its output."""
    session, x = start_session(chain_model(layer, shape, 2)), torch.randn((*shape[:2], *size), generator=seeded(9))
    (output,) = session.run(None, feed(session, (x,)))
    groups = getattr(layer, "groups", 1)
    filters = layer(torch.zeros(shape)).shape[1]
    call = {0: F.linear, 1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(size)]
    options = {"padding": "same", "dilation": layer.dilation, "groups": groups} if size else {}
    wanted = x
    for link in range(4):
        one, other = (filters, shape[1]) if link % 2 == 0 else (shape[1], filters)
        weight = torch.randn(one, other // groups, *layer.weight.shape[2:], generator=seeded(link))
        weight *= (2 / weight[0].numel()) ** 0.5
        wanted = call(wanted, weight, **options).relu()
    assert wanted.shape == x.shape
    torch.testing.assert_close(torch.from_numpy(output), wanted, rtol=1e-3, atol=1e-5)


def test_a_network_is_timed_as_it_is_exported() -> None:
    graph = trace(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval(), torch.randn(2, 1, 8, 8))
    assert OnnxEngine(batch=5, threads=1).network(graph)()() > 0
    assert OnnxEngine().layer(nn.Conv2d(3, 4, 3).double(), (1, 3, 8, 8), 1)() > 0  # in torch: the model would be another


def test_recipes_name_engines() -> None:
    found = engine_for(Recipe.fast(engine="onnxruntime", latency_batch=8, latency_threads=2))
    assert (type(found), found.name, found.batch, found.threads) == (OnnxEngine, "onnxruntime", 8, 2)
    assert type(engine_for(Recipe.fast(engine="compile"))) is CompileEngine
    assert type(engine_for(Recipe.fast())) is TorchEngine
    assert type(engine_for(Recipe.fast(), lambda module: 1.0)) is MeasureEngine
    with pytest.raises(InvalidInput, match="give one of them"):
        engine_for(Recipe.fast(engine="torch"), lambda module: 1.0)
