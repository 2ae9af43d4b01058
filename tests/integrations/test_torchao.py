"""Int8 programs by torchao: near the float network, saved and loaded, with int8 weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")

from secateurs import trace
from secateurs.data import Examples
from secateurs.errors import InvalidInput
from secateurs.export.torchao import ProgramModule, ProgramQuantiser


@pytest.mark.filterwarnings("ignore")
def test_a_program_gives_what_the_network_gives_to_int8_rounding() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)).eval()
    data = Examples(torch.randn(64, 2, 6, 6), torch.randint(3, (64,)))
    made = ProgramQuantiser(trace(net, data.inputs[:2]), data, data, classes=False).quantised()
    found, wanted = made.module().eval()(data.inputs), net(data.inputs).detach()
    error = float((found - wanted).square().mean() / wanted.square().mean())
    assert 0 < error < 1e-3
    assert made.how.divergence == pytest.approx(error, rel=0.2)
    held = ProgramModule(made.model)._called[0].state_dict().values()
    assert any(tensor.dtype == torch.int8 for tensor in held)
    with pytest.raises(InvalidInput, match="no examples"):
        ProgramQuantiser(trace(net, data.inputs[:2]), data.take(torch.arange(0)), data)
