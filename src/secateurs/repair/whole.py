"""Train the whole network, without labels, to give at every layer what the original gives.

The sum over layers of the squared error, relative to the original's output, as in global AdaPrune (Frantar and Alistarh 2022).
A term of a sum is compared as the sum that it completes, as in `refit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from secateurs._util.modules import Device, eval_mode, keeping_gradients, on_device
from secateurs.data.dataset import Examples, generator_for
from secateurs.errors import InvalidInput
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.consumers import find_layers
from secateurs.graph.features import kept_positions, select
from secateurs.graph.masking import network_up_to
from secateurs.graph.trace import Graph
from secateurs.repair.targets import channel_axis, converted, find_node

RATE, PASSES, BATCH = 1e-4, 8, 64


@dataclass(frozen=True, eq=False)
class LayerTargets:
    """Both networks up to all their layers, and what turns an output of the original into the target of the cut one."""

    ours: fx.GraphModule
    theirs: fx.GraphModule
    targets: tuple[Callable[[Tensor], Tensor], ...]
    trained: Mapping[str, Tensor]  # weights and biases of the layers, by name

    @staticmethod
    def of(graph: Graph, original: Graph) -> LayerTargets:
        """Pair the layers of `graph` with those of `original`, the network that it was cut from."""
        ours, theirs = spread_sums(graph.module), spread_sums(original.module)
        seen, wanted, trained = dict[str, fx.Node](), dict[str, fx.Node](), dict[str, Tensor]()
        targets: dict[str, Callable[[Tensor], Tensor]] = {}
        for consumer, term in find_layers(graph):
            layer: Any = graph.module.get_submodule(consumer.module)
            own = layer.named_parameters(recurse=False)
            trained |= {f"{consumer.module}.{name}": weight for name, weight in own if weight.requires_grad}
            node, place = (consumer.node, consumer.node) if term is None else (term.end, term.node)
            if node not in seen:  # several layers may be terms of one sum
                seen[node], wanted[node] = find_node(ours, node), find_node(theirs, place, whose="original")
                targets[node] = converted(graph, original, consumer) if term is None else _kept(graph, original, node, layer)
        both = network_up_to(ours, list(seen.values())), network_up_to(theirs, list(wanted.values()))
        return LayerTargets(*both, tuple(targets.values()), trained)

    def error(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The sum over layers of the squared error, relative to the target."""
        with torch.no_grad():
            wanted = [target(value) for target, value in zip(self.targets, self.theirs(*inputs), strict=True)]
        found = zip(self.ours(*inputs), wanted, strict=True)
        return torch.stack([(own - target).square().sum() / _positive(target.square().sum()) for own, target in found]).sum()


def _kept(graph: Graph, original: Graph, node: str, layer: Any) -> Callable[[Tensor], Tensor]:
    chosen, axis = kept_positions(graph, original, node), channel_axis(layer)
    return lambda value: select(value, chosen, axis)


def _positive(energy: Tensor) -> Tensor:
    return torch.where(energy > 0, energy, 1.0)


def reconstruct_(
    graph: Graph,
    original: Graph,
    examples: Examples,
    *,
    passes: int = PASSES,
    rate: float = RATE,
    batch: int = BATCH,
    device: Device = None,
    seed: int = 0,
) -> tuple[float, float]:
    """Train the layers of `graph`, in place, by `passes` over the examples; returns the errors per layer.

    They are means over the first and over the last pass. Adam, from `rate` down along a line, in eval mode: BatchNorm, its
    statistics included, stays as it is. Where no weight of a layer requires a gradient, the errors are measured and nothing is
    trained. Gradients that parameters have are as before afterwards.
    """
    if len(examples) == 0:
        raise InvalidInput("reconstruction: got no examples, wanted at least one.")
    errors = []
    both = graph.module, original.module
    with ExitStack() as stack:
        stack.enter_context(keeping_gradients(*both))
        place = stack.enter_context(on_device(both[0], device))
        stack.enter_context(on_device(both[1], place))
        stack.enter_context(eval_mode(*both))
        pairs = LayerTargets.of(graph, original)
        if not pairs.trained:
            batches = examples.batches(batch, device=place)
            mean = sum(float(pairs.error(each.args)) * each.size for each in batches) / len(examples)
            error = mean / max(len(pairs.targets), 1)
            return error, error
        stack.enter_context(torch.enable_grad())
        optimiser = torch.optim.Adam(pairs.trained.values(), lr=rate)
        steps = passes * -(-len(examples) // batch)
        falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 1.0 / steps, total_iters=max(steps - 1, 1))
        for number in range(passes):
            order, total = torch.randperm(len(examples), generator=generator_for(seed, "reconstruct", number)), 0.0
            for rows in torch.split(order, batch):
                optimiser.zero_grad(set_to_none=True)
                found = pairs.error(examples.batch(rows.to(examples.place), device=place).args)
                found.backward()  # type: ignore[no-untyped-call]  # untyped in torch
                optimiser.step()
                falling.step()
                total += float(found.detach()) * len(rows)
            errors.append(total / len(examples) / max(len(pairs.targets), 1))
    return errors[0], errors[-1]
