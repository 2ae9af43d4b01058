"""Layers that are timed in ONNX Runtime compute what torch's do; recipes name engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nets import seeded
from secateurs import Recipe, trace
from secateurs.errors import InvalidInput
from secateurs.export.engines import CompileEngine, OnnxEngine, engine_for, layer_model
from secateurs.export.programs import feed, start_session
from secateurs.graph.engine import MeasureEngine, TorchEngine


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(6, 9, 3, stride=2, padding=1), (2, 6, 9, 9)),
        (nn.Conv2d(6, 6, (3, 1), padding=(1, 0), groups=6, bias=False), (1, 6, 5, 5)),
        (nn.Conv2d(8, 4, 3, padding="same", dilation=2), (1, 8, 7, 7)),
        (nn.Conv1d(4, 6, 5, padding=2, groups=2), (3, 4, 11)),
        (nn.Conv3d(2, 3, 3), (1, 2, 5, 5, 5)),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1), (1, 6, 5, 5)),
        (nn.Linear(12, 7), (3, 12)),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_timed_layer_computes_what_torchs_does(layer: Any, shape: tuple[int, ...]) -> None:
    session, x = start_session(layer_model(layer, shape, 2)), torch.randn(shape, generator=seeded(9))
    outputs = session.run(None, feed(session, (x,)))
    assert len(outputs) == 2
    for copy, output in enumerate(outputs):
        with torch.no_grad():
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=seeded(copy)) * 1e-2)  # as the model draws them
            if layer.bias is not None:
                layer.bias.zero_()
            torch.testing.assert_close(torch.from_numpy(output), layer(x).relu(), rtol=1e-4, atol=1e-5)


def test_a_network_is_timed_as_it_is_exported() -> None:
    graph = trace(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval(), torch.randn(2, 1, 8, 8))
    assert OnnxEngine(batch=5, threads=1).network(graph)() > 0
    assert OnnxEngine().layer(nn.Conv2d(3, 4, 3).double(), (1, 3, 8, 8), 1)() > 0  # in torch: the model would be another


def test_recipes_name_engines() -> None:
    found = engine_for(Recipe(engine="onnxruntime", latency_batch=8, latency_threads=2))
    assert (type(found), found.name, found.batch, found.threads) == (OnnxEngine, "onnxruntime", 8, 2)
    assert type(engine_for(Recipe(engine="compile"))) is CompileEngine
    assert type(engine_for(Recipe())) is TorchEngine
    assert type(engine_for(Recipe(), lambda module: 1.0)) is MeasureEngine
    with pytest.raises(InvalidInput, match="give one of them"):
        engine_for(Recipe(engine="torch"), lambda module: 1.0)
