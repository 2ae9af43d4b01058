"""LeNets for MNIST, the networks that pruning began on: LeNet-300-100, LeNet-5 as Caffe has it, and one with a max-plus end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs.graph.flow import Flow, Layer, Op, rule
from secateurs_lab.models.mlp import MLP

ABSENT = -1e4
"""In place of an input of a max-plus layer that is exactly zero: below all that compete."""


def lenet300(*, hidden: tuple[int, int] = (300, 100), dropout: float = 0.0) -> nn.Module:
    """LeNet-300-100: two hidden layers on the 784 pixels, 266,610 parameters (LeCun et al., 1998)."""
    return MLP(28 * 28, hidden, 10, dropout=dropout)


class LeNet5(nn.Module):
    """LeNet-5 as Caffe has it: 5×5 convolutions of 20 and 50 filters, 800 features, 500 neurons; 431,080 parameters.

    ReLU follows the convolutions too. `widths` are filters, filters, neurons; dropout lies before the two linear layers.
    """

    def __init__(self, *, widths: tuple[int, int, int] = (20, 50, 500), dropout: float = 0.0) -> None:
        super().__init__()
        one, two, three = widths
        self.conv1, self.conv2 = nn.Conv2d(1, one, 5), nn.Conv2d(one, two, 5)
        self.fc1, self.fc2 = nn.Linear(16 * two, three), nn.Linear(three, 10)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, 10) of images (N, 1, 28, 28)."""
        x = self.pool(self.relu(self.conv2(self.pool(self.relu(self.conv1(x))))))
        x = self.relu(self.fc1(self.dropout1(torch.flatten(x, 1))))
        logits: Tensor = self.fc2(self.dropout2(x))
        return logits


class MaxPlus(nn.Module):
    """Output k is the largest of x_j + weight[k, j] (Zhang et al., 2019): (N, inputs) to (N, outputs).

    An input that is exactly zero takes no part, so that a masked or dropped filter is out of the competition.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        # far apart: with small weights the same input wins all outputs, and says nothing about the class
        self.weight = nn.Parameter(3 * torch.randn(outputs, inputs))
        self.bias = None
        self.in_channels, self.out_channels, self.groups = inputs, outputs, 1

    def sums(self, x: Tensor) -> Tensor:
        """All x_j + weight[k, j], (N, outputs, inputs)."""
        return torch.where(x == 0, ABSENT, x)[..., None, :] + self.weight

    def forward(self, x: Tensor) -> Tensor:
        """The largest sum for each output."""
        return self.sums(x).amax(-1)

    def functions(self, call: Callable[..., fx.Node], x: fx.Node, weight: fx.Node) -> fx.Node:
        """The same as calls, for plain source."""
        present = call(torch.where, call(torch.eq, x, 0), ABSENT, x)
        return call(torch.amax, call(torch.add, call(torch.unsqueeze, present, -2), weight), -1)


@rule(MaxPlus)
def max_plus(op: Op) -> Flow:
    """Outputs lie along the last axis; each reads all inputs, and a zero takes no part."""
    layer: Any = op.module
    axis, sizes = len(op.shape) - 1, (layer.in_channels, layer.out_channels, 1)
    return Layer(axis, axis, *sizes, bias=True, reads_all=op.axis not in (None, axis), linear=False)


class MaxPlusNet(nn.Module):
    """Linear filters without bias on the pixels, dropout, then max-plus: logits (N, 10) of images (N, 1, 28, 28)."""

    def __init__(self, *, filters: int = 144, dropout: float = 0.3) -> None:
        super().__init__()
        self.flatten, self.dropout = nn.Flatten(), nn.Dropout(dropout)
        self.filters, self.top = nn.Linear(28 * 28, filters, bias=False), MaxPlus(filters, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.top(self.dropout(self.filters(self.flatten(x))))
        return logits
