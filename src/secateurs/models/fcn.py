"""FCN: the fully connected networks of the paper's XOR experiment."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FCN(nn.Module):
    """One hidden ReLU layer: (N, inputs) → logits (N, outputs).

    The paper separates XOR with lines through the origin, so the hidden layer has no bias unless asked for.
    """

    def __init__(self, inputs: int = 2, hidden: int = 10, outputs: int = 1, *, bias: bool = False) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden, bias=bias)
        self.output = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits; the paper's sigmoid belongs to the loss."""
        logits: Tensor = self.output(F.relu(self.hidden(x)))
        return logits
