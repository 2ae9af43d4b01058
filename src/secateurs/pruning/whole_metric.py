"""The user's `evaluate(model)`: the metric of the whole validation set, as one number or as a value for each example."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateurs._util.modules import device_of, keeping_modes
from secateurs._util.tensors import digest
from secateurs.distributed import ALONE, active, pack, unpack
from secateurs.errors import InvalidInput, NonFinite
from secateurs.graph.masking import copied
from secateurs.graph.trace import Graph
from secateurs.metrics import display_name

Evaluate = Callable[[nn.Module], Any]
"""Gives one number for a network, or a tensor (N,) with a value for each example; higher is better."""

_KEPT = 64  # networks whose values are remembered: a search comes back to few of those that it measured


@dataclass(frozen=True, eq=False)
class WholeMetric:
    """An `evaluate` of the user that was called for the original network, so that it is known what it gives."""

    function: Evaluate
    count: int | None  # values that it gives; None: one number
    seconds: float  # that it took for the original network
    _known: dict[str, Tensor] = field(default_factory=dict)  # by weights and structure of the network

    @staticmethod
    def of(function: Evaluate, original: Graph) -> WholeMetric:
        """Call it for the original network; twice where it gives values, whose pairs need one order."""
        began = time.perf_counter()
        first = _called(function, original.module)
        seconds = time.perf_counter() - began
        if not bool(first.isfinite().all()):
            raise NonFinite(
                f"evaluate(model) gave {_described(first)} for the original network: wanted finite values, from which drops "
                f"are counted. Check the network's outputs and the metric."
            )
        if first.ndim:
            second = _called(function, original.module)
            _check_count(second, len(first))
            differs = (~torch.isclose(first, second, rtol=1e-4, atol=1e-6)).nonzero().flatten().tolist()
            if differs:
                place = differs[0]
                raise InvalidInput(
                    f"evaluate(model) gave other values when it was called again for the same network: value {place} was "
                    f"{float(first[place]):g}, then {float(second[place]):g} ({len(differs)} of {len(first)} differ). Wanted "
                    f"the same examples in the same order: read them from a loader that does not shuffle or augment."
                )
        return WholeMetric(function, len(first) if first.ndim else None, seconds, {_key(original): first})

    def check_tells_networks_apart(self, original: Graph) -> None:
        """InvalidInput if it gives the original network what it gives one with all weights at zero, and one with random ones.

        A metric that measures another network than the one it is given, or nothing, would let everything be removed. One more
        call; two where the first is in doubt. A network that it cannot measure has another value.
        """
        known, generator = self(original), torch.Generator().manual_seed(0)
        for replaced in (torch.zeros_like, partial(_drawn_like, generator=generator)):
            damaged = copied(original).module
            with torch.no_grad():
                for weight in damaged.parameters():
                    if weight.is_floating_point() and weight.ndim > 1:
                        weight.copy_(replaced(weight))
            if not torch.equal(_called(_or_nan(self.function), damaged), known):
                return
        gave = f"{float(known):g}" if known.ndim == 0 else f"the same {len(known):,} values"
        raise InvalidInput(
            f"evaluate(model) gave {gave} for the network, for a copy with all weights at zero and for one with random "
            f"weights: it does not see what is removed. Measure the network that it is given, not another one; a network that "
            f"is no better than these, such as an untrained one, cannot be pruned by this metric."
        )

    @property
    def name(self) -> str:
        """As the user calls it."""
        return display_name(self.function)

    def __call__(self, graph: Graph) -> Tensor:
        """Its values (N,) for a network, or its number as a scalar, float64; NaN where it has none.

        A network that was measured before is not measured again.
        """
        key = _key(graph)
        if key not in self._known:
            found = _called(self.function, graph.module)
            _check_count(found, self.count)
            while len(self._known) >= _KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[key] = torch.where(found.isfinite(), found, torch.nan)
        return self._known[key]

    def of_module(self, module: nn.Module) -> Tensor:
        """Its values for a network that is no graph: an exported file."""
        found = _called(self.function, module)
        _check_count(found, self.count)
        return torch.where(found.isfinite(), found, torch.nan)


def _key(graph: Graph) -> str:
    """Weights and structure; weights may change in place."""
    return f"{digest(dict(graph.module.state_dict()))} {graph.module.code}"


def _called(function: Evaluate, module: nn.Module) -> Tensor:
    """What the function gives for a network in eval mode, which it must not change; modes and device are restored."""
    workers = active()
    if workers.size > 1:  # it may train or measure on all of them; the values of the first are everybody's
        with ALONE.active():
            own = _called(function, module)
        sent = workers.shared("evaluate(model)", lambda: pack([own]).numpy().tobytes())
        return unpack(torch.frombuffer(bytearray(sent), dtype=torch.uint8))[0]
    before, place = digest(dict(module.state_dict())), device_of(module)
    with keeping_modes(module):
        module.eval()
        found = function(module)
    if not any(tensor.is_meta for tensor in module.state_dict().values()):
        module.to(place)
    if place != device_of(module) or digest(dict(module.state_dict())) != before:
        raise InvalidInput(
            "evaluate(model) changed the network's weights or buffers: wanted them as they were. Measure a copy, or stay in "
            "eval mode: in train mode BatchNorm changes its statistics."
        )
    given = torch.as_tensor(found) if isinstance(found, np.ndarray) and found.dtype.kind in "fiub" else found
    if isinstance(given, Real):
        return torch.tensor(float(given), dtype=torch.float64)
    if isinstance(given, Tensor) and not given.is_complex() and given.ndim <= 1 and given.numel():
        values = given.detach().cpu().double()
        return values if values.numel() > 1 else values.reshape(())
    what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    raise InvalidInput(
        f"evaluate(model) returned {what}, wanted one number for the whole validation set, or a tensor (N,) with a value for "
        f"each example; higher is better."
    )


def _or_nan(function: Evaluate) -> Evaluate:
    """The same function, with NaN for a network that it fails on."""

    def measured(module: nn.Module) -> Any:
        try:
            return function(module)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of a damaged network alone: it may find nothing to divide by
            return float("nan")

    return measured


def _drawn_like(weight: Tensor, *, generator: torch.Generator) -> Tensor:
    """Random weights of the same spread."""
    drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
    return (drawn * weight.detach().float().std(correction=0).cpu()).to(weight)


def _check_count(found: Tensor, wanted: int | None) -> None:
    got = len(found) if found.ndim else None
    if got != wanted:
        raise InvalidInput(
            f"evaluate(model) returned {_amount(got)}, wanted {_amount(wanted)} as for the original network: measure the same "
            f"examples for every network."
        )


def _amount(count: int | None) -> str:
    return "one number" if count is None else f"{count:,} values"


def _described(values: Tensor) -> str:
    bad = (~values.isfinite()).sum()
    return f"{float(values)}" if values.ndim == 0 else f"{int(bad)} NaN or infinite values of {len(values)}"
