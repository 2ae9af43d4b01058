"""Hidden units of nn.LSTM, nn.GRU and nn.RNN: what removing one means, the network with some masked, and the narrower module.

A unit is removed where nothing reads its state h any more: not the recurrence, not the next layer of the stack, not what lies
behind. So the masked network is the same module with zero columns for that unit in every weight that reads h, and with zeros in
its outputs; the gates of the unit itself then have no effect. That is exact at every step, and differentiable along a mask. A
module has one hidden size for all its layers and directions, so unit j of each of them goes together.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs.graph.channels import Kept, ids
from secateurs.graph.node_info import called_module, shape_of

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)


def recurrent_call(node: fx.Node) -> fx.Node | None:
    """Return the call of a recurrent module that `node` is, or takes a part of the results of; None for any other node."""
    owner = node.graph.owning_module
    while node.op == "call_function" and node.target is operator.getitem:
        source = node.args[0]
        if not isinstance(source, fx.Node) or shape_of(source).is_tensor:
            return None
        node = source
    return node if owner is not None and isinstance(called_module(owner, node), RECURRENT) else None


class _Units:
    """A recurrent module whose units are multiplied by factors wherever their state is read: (1, H), or (n, H) for rows."""

    factors: Tensor
    _flat_weights: list[Any]

    def forward(self, inputs: Tensor, hx: Any = None, factors: Tensor | None = None) -> Any:
        """What the module gives, if the units' states are what they are times the factors."""
        module: Any = self
        factors = module.factors if factors is None else factors
        parts = [inputs]
        rows = 0 if module.batch_first else 1
        if len(factors) > 1:
            parts = list(inputs.chunk(len(factors), rows))
        found = [self._run(part, hx, row) for part, row in zip(parts, factors, strict=True)]
        if len(found) == 1:
            return found[0]
        output, states = zip(*found, strict=True)
        if isinstance(states[0], tuple):
            return torch.cat(output, rows), tuple(torch.cat(each, 1) for each in zip(*states, strict=True))
        return torch.cat(output, rows), torch.cat(states, 1)

    def _run(self, inputs: Tensor, hx: Any, factors: Tensor) -> Any:
        module: Any = self
        whole = module._flat_weights
        masked = []
        for name, weight in zip(module._flat_weights_names, whole, strict=True):
            if name.startswith("weight_hh"):
                weight = weight * factors
            elif name.startswith("weight_ih") and not name.startswith("weight_ih_l0"):
                weight = weight * factors.repeat(1 + module.bidirectional)
            masked.append(weight)
        module.__dict__["_flat_weights"] = masked
        try:
            output, states = super().forward(inputs, hx)  # type: ignore[misc]  # of the recurrent module
        finally:
            module.__dict__["_flat_weights"] = whole
        output = output * factors.repeat(1 + module.bidirectional)
        return output, tuple(s * factors for s in states) if isinstance(states, tuple) else states * factors


class UnitsOfLSTM(_Units, nn.LSTM):  # type: ignore[misc]  # a call takes factors besides
    """An nn.LSTM with factors for its units."""


class UnitsOfGRU(_Units, nn.GRU):  # type: ignore[misc]  # a call takes factors besides
    """An nn.GRU with factors for its units."""


class UnitsOfRNN(_Units, nn.RNN):  # type: ignore[misc]  # a call takes factors besides
    """An nn.RNN with factors for its units."""


def with_factors(module: nn.Module, factors: Tensor | None = None) -> nn.Module:
    """Return the recurrent module, its tensors shared, with factors for its units: those given, or an argument of each call."""
    masked: Any = copy.copy(module)
    masked.__dict__ = {name: dict(v) if isinstance(v, dict) else v for name, v in module.__dict__.items()}
    masked.__dict__["_flat_weights"] = list(module.__dict__["_flat_weights"])
    kinds = {nn.LSTM: UnitsOfLSTM, nn.GRU: UnitsOfGRU, nn.RNN: UnitsOfRNN}
    masked.__class__ = next(kind for base, kind in kinds.items() if isinstance(module, base))
    if factors is not None:
        masked.register_buffer("factors", factors, persistent=False)
    return masked  # type: ignore[no-any-return]  # torch types copies as Any


def unit_weights(module: Any) -> Tensor:
    """Return the weights of a recurrent module, a row for each unit: those of all its gates, layers and directions."""
    weights = [getattr(module, name) for name in module._flat_weights_names if name.startswith("weight")]
    gates = [w.detach().unflatten(0, (-1, module.hidden_size)).transpose(0, 1).flatten(1) for w in weights]
    return torch.cat(gates, 1)


def narrow_units_(module: Any, inputs: Tensor, units: Tensor) -> Iterator[tuple[str, Kept]]:
    """Narrow a recurrent module in place to the features in `inputs` and the hidden units in `units`, bool vectors both.

    Yields the tensors' names and the entries that remain.
    """
    hidden, kept = module.hidden_size, ids(units)
    for name in list(module._flat_weights_names):
        tensor = getattr(module, name)
        rows = torch.cat([gate * hidden + kept for gate in range(len(tensor) // hidden)])
        if name.startswith("bias"):
            found: Kept = (rows,)
        elif name.startswith("weight_hh"):
            found = (rows, kept)
        elif name.startswith("weight_ih_l0"):
            found = (rows, ids(inputs))
        else:
            found = (rows, torch.cat([direction * hidden + kept for direction in range(1 + module.bidirectional)]))
        narrower = tensor.detach()
        for dim, index in enumerate(found):
            narrower = narrower.index_select(dim, index.to(tensor.device))  # type: ignore[union-attr]  # all axes are cut
        setattr(module, name, nn.Parameter(narrower, requires_grad=tensor.requires_grad))
        yield name, found
    module.input_size, module.hidden_size = int(inputs.sum()), len(kept)
    module._init_flat_weights()
