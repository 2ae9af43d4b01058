"""A network as it is served: plain torch, BatchNorms folded, in the memory format that is faster; not to be trained further."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import fx

from secateurs._util.modules import eval_mode
from secateurs.errors import NotEqual
from secateurs.export.deliver import TOLERANCE
from secateurs.export.plain import plain_module
from secateurs.graph.trace import Graph, tensors_in
from secateurs.scoring.engine.split import fold_norms_
from secateurs.speed.engines import TorchEngine, batch_like, on_device_of
from secateurs.speed.timing import SpeedUp, compare


@dataclass(frozen=True, eq=False)
class Deployed:
    """A network to be served, and the speed-up that decided its memory format: of channels last over the usual order."""

    module: fx.GraphModule
    folded: int  # BatchNorms
    channels_last: bool
    speedup: SpeedUp | None  # None: the network has no tensors of four axes


def deploy(graph: Graph, *, batch: int = 1) -> Deployed:
    """A copy of the network in plain torch and eval mode with BatchNorms folded, in the memory format that is faster here.

    Channels are last in memory where that is measurably faster for `batch` examples like the graph's, on the network's
    device. Its outputs are compared with the network's: `NotEqual` if they differ.
    """
    module = plain_module(graph)
    before = _norms(module)
    fold_norms_(module)
    module.delete_all_unused_submodules()
    inputs = on_device_of(module, batch_like(graph, batch))
    faster = None
    if any(parameter.dim() == 4 for parameter in module.parameters()):
        last = copy.deepcopy(module).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch has no overload for it
        engine = TorchEngine(batch)
        (faster,) = compare([engine.loaded(each, inputs) for each in (module, last)]).speedups
        module = last if faster.low > 1 else module
    _check(graph, module, inputs)
    return Deployed(module, before - _norms(module), faster is not None and faster.low > 1, faster)


def _norms(module: fx.GraphModule) -> int:
    return sum(isinstance(layer, torch.nn.modules.batchnorm._NormBase) for layer in module.modules())


def _check(graph: Graph, module: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> None:
    """NotEqual unless the outputs are those of the network."""
    with eval_mode(graph.module), torch.no_grad():
        wanted, got = (tensors_in(each(*inputs)) for each in (graph.module, module))
    scale = max((float(t.abs().max()) for t in wanted if t.numel()), default=0.0)
    worst = max((float((a - b).abs().max()) for a, b in zip(wanted, got, strict=True) if a.numel()), default=0.0)
    if not worst <= TOLERANCE * scale:
        raise NotEqual(
            f"the network to deploy differs by {worst:.3g} where outputs reach {scale:.3g}. This is a bug in secateurs: please "
            f"report the network."
        )
