"""Counts are checked by arithmetic on shapes, never against another run of the counter."""

from __future__ import annotations

import copy
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from secateurs.errors import InvalidInput
from secateurs.graph.cost import ROOT, TOTAL, Cost, LayerCost, cost, table
from secateurs.models import build


class Twice(nn.Module):
    """One convolution called twice, beside one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(x))


class Functional(nn.Module):
    """A matrix product outside every submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(3, 5))
        self.register_buffer("shift", torch.zeros(7))
        self.register_buffer("scratch", torch.zeros(100), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        self.norm(self.first(x))
        raise RuntimeError("the lights went out")


def convolution_macs(layer: nn.Module, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> int:
    """Each output sums over the kernel and the inputs of its group; transposed, each input is spread likewise."""
    spread = layer.weight[0].numel()  # kernel size times channels of the other side, within a group
    return spread * torch.Size(inputs if layer.transposed else outputs).numel()


@pytest.mark.parametrize(
    ("layer", "space"),
    [
        (nn.Conv1d(6, 4, 3), (11,)),
        (nn.Conv2d(6, 4, 3, stride=2, padding=1), (9, 8)),
        (nn.Conv2d(6, 4, (1, 3), dilation=2), (9, 8)),
        (nn.Conv2d(6, 9, 3, groups=3), (9, 8)),
        (nn.Conv2d(6, 12, 3, groups=6, bias=False), (9, 8)),
        (nn.Conv3d(6, 4, 2), (5, 4, 3)),
        (nn.ConvTranspose1d(6, 4, 3, stride=2), (5,)),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1), (5, 4)),
        (nn.ConvTranspose2d(6, 9, 3, groups=3), (5, 4)),
        (nn.ConvTranspose3d(6, 4, 2), (3, 4, 3)),
    ],
    ids=str,
)
def test_convolutions_by_arithmetic(layer: nn.Module, space: tuple[int, ...]) -> None:
    inputs = (6, *space)
    outputs = tuple(layer(torch.zeros(1, *inputs)).shape[1:])
    counted = cost(nn.Sequential(layer), torch.zeros(3, *inputs))
    bias = 0 if layer.bias is None else layer.out_channels
    weights = layer.in_channels * layer.out_channels // layer.groups * torch.Size(layer.kernel_size).numel()
    assert counted.macs == convolution_macs(layer, inputs, outputs)
    assert counted.parameters == weights + bias
    assert counted.bytes == 4 * (weights + bias)


def test_one_convolution_written_out() -> None:
    # 3x3 kernel, 2 input channels a group, 8 filters, 5x5 outputs
    counted = cost(nn.Conv2d(4, 8, 3, groups=2), torch.zeros(2, 4, 7, 7))
    assert counted.layers == (LayerCost(ROOT, "Conv2d", 3 * 3 * 2 * 8 + 8, 3 * 3 * 2 * 8 * 25, 4 * (144 + 8)),)


def test_every_parameter_and_buffer_is_in_the_default_convention() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10)).double()
    counted = cost(net, torch.zeros(1, 3, 6, 6, dtype=torch.float64))
    assert [(layer.name, layer.kind) for layer in counted.layers] == [
        ("0", "Conv2d"),
        ("1", "BatchNorm2d"),
        ("4", "Linear"),
    ]
    assert counted.layer("1") == LayerCost("1", "BatchNorm2d", 16, 0, 8 * (4 * 8 + 1))  # and the int64 count of batches
    assert counted.parameters == (27 * 8 + 8) + 16 + (128 * 10 + 10)
    assert counted.macs == 27 * 8 * 16 + 128 * 10


def test_the_papers_convention_counts_weights_of_convolutions_and_linear_layers() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 10))
    counted = cost(net, torch.zeros(1, 3, 6, 6), convention="paper")
    assert counted.convention == "paper"
    assert counted.layers == (
        LayerCost("0", "Conv2d", 27 * 8, 27 * 8 * 16, 4 * 27 * 8),
        LayerCost("3", "Linear", 1280, 1280, 4 * 1280),
    )


def test_the_papers_network_by_arithmetic() -> None:
    # 3x3 convolutions on 32, 16 and 8 pixels: the stem, 6, 6 and 6; an option-A shortcut costs nothing
    first, second, third = 6 * 16 * 16 * 9, 16 * 32 * 9 + 5 * 32 * 32 * 9, 32 * 64 * 9 + 5 * 64 * 64 * 9
    stem, last = 3 * 16 * 9, 64 * 10
    macs = (stem + first) * 32 * 32 + second * 16 * 16 + third * 8 * 8 + last
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    model, x = build("resnet20"), torch.zeros(1, 3, 32, 32)
    assert cost(model, x, convention="paper").parameters == stem + first + second + third + last == 268_336
    assert cost(model, x, convention="paper").macs == macs == 40_551_040
    assert cost(model, x).parameters == 268_336 + norms + 10  # the linear layer's bias
    assert cost(model, x).macs == macs


def test_a_layer_called_twice_costs_its_macs_twice_and_its_weights_once() -> None:
    counted = cost(Twice(), torch.zeros(1, 4, 5, 5))
    assert counted.layer("shared") == LayerCost("shared", "Conv2d", 144, 2 * 144 * 25, 576)
    assert counted.layer("idle") == LayerCost("idle", "Linear", 6, 0, 24)


def test_tied_weights_count_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    counted = cost(net, torch.zeros(1, 4))
    assert (counted.parameters, counted.macs, counted.bytes) == (16, 32, 64)


def test_what_no_submodule_does_belongs_to_the_network() -> None:
    counted = cost(Functional(), torch.zeros(2, 3))
    assert counted.layers == (LayerCost(ROOT, "Functional", 15, 15, 4 * (15 + 7)),)


def test_a_parameter_may_be_an_input_of_a_module() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.inner = nn.Linear(3, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.scale) + self.inner(x)

    assert cost(Scaled(), torch.zeros(1, 3)).layer("inner").macs == 6 + 6


@pytest.mark.parametrize("fused", [True, False])
def test_attention_counts_on_every_path_that_torch_takes(fused: bool) -> None:
    torch.backends.mha.set_fastpath_enabled(fused)
    try:
        counted = cost(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.zeros(2, 5, 16))
        assert torch.backends.mha.get_fastpath_enabled() is fused
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    projections, attention, feedforward = 4 * 5 * 16 * 16, 2 * 5 * 5 * 16, 2 * 5 * 16 * 32
    assert counted.macs == projections + attention + feedforward


@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM(8, 16, 2, batch_first=True), 4), (nn.GRU(8, 16, 2), 3)])
def test_recurrent_layers_by_arithmetic(layer: nn.Module, gates: int) -> None:
    inputs = torch.zeros(2, 5, 8) if layer.batch_first else torch.zeros(5, 2, 8)
    batch = 2 if layer.batch_first else 5  # the first dimension is taken as the batch, whatever the layer calls it
    assert cost(layer, inputs).macs == 2 * 5 * gates * 16 * ((8 + 16) + (16 + 16)) // batch


def test_a_traced_network_brings_its_example() -> None:
    class Traced:
        module = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        example = (torch.zeros(7, 3),)

    counted = cost(Traced())
    assert [(layer.name, layer.macs) for layer in counted.layers] == [("0", 12), ("2", 8)]


def test_the_meta_device_is_enough() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)).to("meta")
    assert cost(net, torch.zeros(4, 3, 5, 5)).macs == 27 * 8 * 9


@settings(deadline=None, max_examples=25)
@given(
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    batch=st.integers(1, 4),
    size=st.integers(3, 7),
    kernel=st.sampled_from([1, 3]),
)
def test_layers_add_up_whatever_the_nesting(widths: list[int], batch: int, size: int, kernel: int) -> None:
    pairs = list(pairwise(widths))
    net: nn.Module = nn.Identity()
    for a, b in pairs:
        net = nn.Sequential(net, nn.Sequential(nn.Conv2d(a, b, kernel, padding=kernel // 2), nn.BatchNorm2d(b)))
    counted = cost(net, torch.zeros(batch, widths[0], size, size))
    assert counted.macs == sum(a * b * kernel**2 * size**2 for a, b in pairs)
    assert counted.parameters == sum(p.numel() for p in net.parameters())
    assert counted.bytes == sum(t.numel() * t.element_size() for t in (*net.parameters(), *net.buffers()))


def hooks_and_modes(net: nn.Module) -> list[tuple[bool, int, int]]:
    return [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()]


def test_counting_leaves_the_network_unchanged() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    net[1].eval()
    before, state = hooks_and_modes(net), copy.deepcopy(net.state_dict())
    cost(net, torch.ones(2, 3, 5, 5))
    assert hooks_and_modes(net) == before == [(True, 0, 0), (True, 0, 0), (False, 0, 0), (True, 0, 0)]
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_the_network_is_restored_even_when_it_raises() -> None:
    net = Failing()
    before = hooks_and_modes(net)
    with pytest.raises(InvalidInput, match=r"Failing does not run on the example input of shape \(2, 3\): the lights"):
        cost(net, torch.zeros(2, 3))
    assert hooks_and_modes(net) == before


def test_table_gives_the_share_removed_of_each_layer_and_in_total() -> None:
    before = Cost((LayerCost("a", "Conv2d", 100, 1000, 400), LayerCost("b", "Linear", 50, 0, 200)), "all")
    after = Cost((LayerCost("a", "Conv2d", 75, 500, 300), LayerCost("new", "Align", 0, 0, 10)), "all")
    a, b, total = table(before, after)
    assert (a.name, a.parameters, a.macs, a.bytes) == ("a", 0.25, 0.5, 0.25)
    assert (b.name, b.parameters, b.macs, b.bytes) == ("b", 1.0, 0.0, 1.0)
    assert (total.name, total.parameters, total.macs) == (TOTAL, 0.5, 0.5)
    assert total.bytes == pytest.approx(1 - 310 / 600)


def test_errors_say_what_to_do() -> None:
    net = nn.Linear(3, 2)
    with pytest.raises(InvalidInput, match="Linear came without an example input: give a tensor"):
        cost(net)
    with pytest.raises(InvalidInput, match="convention is 'papers', wanted one of 'all', 'paper'"):
        cost(net, torch.zeros(1, 3), convention="papers")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"the example input is \(\(0, 3\)\), wanted a tensor"):
        cost(net, torch.zeros(0, 3))
    with pytest.raises(InvalidInput, match=r"the example input is \(str\), wanted a tensor"):
        cost(net, ["x"])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match=r"no layer 'wieght' has a cost here\. Known: '\(network\)'"):
        cost(net, torch.zeros(1, 3)).layer("wieght")
    with pytest.raises(InvalidInput, match="'all' and 'paper' cannot be compared"):
        table(cost(net, torch.zeros(1, 3)), cost(net, torch.zeros(1, 3), convention="paper"))


def test_work_that_does_not_grow_with_the_batch_is_counted_for_one_example() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.ones(2, 5) + torch.ones(1, 3) @ torch.ones(3, 5)

    assert cost(Constant(), torch.zeros(1, 2)).macs == cost(Constant(), torch.zeros(4, 2)).macs == 10 + 15


def test_a_network_that_takes_one_batch_size_only_is_divided_by_it() -> None:
    class Rigid(nn.Module):
        def __init__(self, constant: bool) -> None:
            super().__init__()
            self.constant = constant

        def forward(self, x: Tensor) -> Tensor:
            x = x.reshape(2, 3) @ torch.ones(3, 4)
            return x + torch.ones(1, 1) @ torch.ones(1, 1) if self.constant else x

    assert cost(Rigid(constant=False), torch.zeros(2, 3)).macs == 12
    with pytest.raises(InvalidInput, match=r"\(network\) computes 50 FLOPs for a batch of 2.*any batch size"):
        cost(Rigid(constant=True), torch.zeros(2, 3))


def test_tracing_and_counting_a_small_network_do_not_load_the_compiler_of_torch() -> None:
    """It takes over a second, in every command and in every worker that is restarted."""
    code = (
        "import sys, torch; from secateurs import trace; from secateurs.graph.cost import cost; "
        "from secateurs.models import build; "
        "found = cost(trace(build('resnet20'), torch.zeros(2, 3, 32, 32))); "
        "assert 'torch._dynamo' not in sys.modules and 'scipy' not in sys.modules; print(found.macs)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "40551040"  # as in the test by hand above
