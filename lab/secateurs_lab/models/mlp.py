"""Plain multi-layer perceptron: linear, ReLU, dropout in a chain."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class MLP(nn.Module):
    """Chain of linear layers over flattened inputs, of any shape with `inputs` values each: logits (N, outputs)."""

    def __init__(self, inputs: int = 64, hidden: Sequence[int] = (64, 32), outputs: int = 10, *, dropout: float = 0.1) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout)]
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.output(self.layers(x))
        return logits
