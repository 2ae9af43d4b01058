"""L0 regularisation (Louizos, Welling, Kingma, 2018): hard-concrete gates on the filters, and the expected number of weights.

A gate is z = clamp(s (ζ - γ) + γ, 0, 1) with s = sigmoid((log u - log(1 - u) + log α) / β), u uniform: exactly 0 and exactly 1
have probability, and yet it has a slope. The penalty is λ / N times the weights that are expected to stay. After training the
gates take their typical value; filters whose gate is 0 are removed, the others' gates are multiplied into their weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from secateurs._util.modules import eval_mode
from secateurs.compaction import compact
from secateurs.criteria.filters import layers_behind, norms_behind
from secateurs.data.dataset import generator_for
from secateurs.errors import InvalidInput
from secateurs.graph.cost import cost
from secateurs.graph.masking import copied, copy_module, insert_behind_
from secateurs.graph.sites import MaskPoint, Site
from secateurs.graph.trace import Graph
from secateurs_lab.methods.base import MethodRun, MethodState, Pruned, Task, Watch, opened, recipe_for
from secateurs_lab.methods.penalised import cut_lowest, train_penalised
from secateurs_lab.methods.training import finished, train_rest

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
_BOUNDS = (math.log(0.01), math.log(100.0))  # of log alpha
_SPREAD = 0.01  # of its start


def sample(log_alpha: Tensor, u: Tensor) -> Tensor:
    """Gates in [0, 1] for uniform numbers `u` in (0, 1), with slopes along log_alpha."""
    s = ((u.log() - (-u).log1p() + log_alpha) / BETA).sigmoid()
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def chance_open(log_alpha: Tensor) -> Tensor:
    """The probability that a gate is not 0."""
    return (log_alpha - BETA * math.log(-GAMMA / ZETA)).sigmoid()


def typical(log_alpha: Tensor) -> Tensor:
    """The gates that are used after training."""
    return (log_alpha.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


class Gate(nn.Module):
    """Multiplies the channels of one mask point by the gates of a site, drawn for every example while training."""

    def __init__(self, point: MaskPoint, theta: nn.Parameter, rate: float, first: Gate | None) -> None:
        super().__init__()
        self.axis, self.theta, self.rate, self.first = point.axis, theta, rate, [first]  # a list: no submodule
        source = torch.full((point.width,), -1)  # the last of the padded gates, which is 1
        source[list(point.channels)] = torch.tensor(point.sources)
        self.register_buffer("source", source, persistent=False)
        self.drawn: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of `x`; all points of a site share one draw."""
        if not self.training:
            gates = typical(self.rate * self.theta)[None]
        elif self.first[0] is not None and self.first[0].drawn is not None:
            gates = self.first[0].drawn
        else:
            u = torch.rand(len(x), len(self.theta), device=x.device).clamp(1e-6, 1 - 1e-6)
            gates = self.drawn = sample(self.rate * self.theta, u)
        source: Any = self.source
        shape = [len(gates)] + [1] * (x.dim() - 1)
        shape[self.axis] = -1
        return x * torch.nn.functional.pad(gates, (0, 1), value=1.0)[:, source].view(shape).to(x.dtype)


def gated(
    graph: Graph, sites: tuple[Site, ...], *, droprate: float, rate: float = 1.0, seed: int = 0
) -> tuple[Graph, dict[str, nn.Parameter]]:
    """A copy of the network with gates at its sites, and their parameters by site: log α is `rate` times those."""
    module, gates = copy_module(graph), dict[str, nn.Parameter]()
    nodes = {node.name: node for node in module.graph.nodes}
    for site in sites:
        noise = torch.randn(site.channels, generator=generator_for(seed, "l0", site.name))
        theta = gates[site.name] = nn.Parameter((math.log((1 - droprate) / droprate) + _SPREAD * noise) / rate)
        first: Gate | None = None
        for point in site.points:
            gate = Gate(point, theta, rate, first)
            insert_behind_(module, nodes[point.node], f"gate_{point.node}", gate)
            first = first or gate
    module.recompile()
    return graph.with_module(module), gates


def prices(run: MethodRun, by: Literal["weights", "macs"]) -> dict[str, float]:
    """What a filter of each site is worth: the number of weights, or of MACs, that go when half of the site goes."""
    whole = cost(run.task.graph)
    found = {}
    for site in run.sites:
        half = torch.arange(site.channels) >= site.channels // 2
        smaller = cost(compact(run.task.graph, {site.name: half}, verify=False))
        count = site.channels // 2
        if by == "weights":
            found[site.name] = (whole.parameters - smaller.parameters) / count
        else:
            found[site.name] = (whole.macs - smaller.macs) / count * whole.parameters / whole.macs
    return found


def l0(
    task: Task,
    *,
    price: float = 0.1,
    by: Literal["weights", "macs"] = "weights",
    droprate: float = 0.5,
    gate_rate: float = 10.0,
    watch: Watch | None = None,
) -> Pruned:
    """Train with gates on all filters; `price` is λ, divided by the number of training images; `by` what is priced.

    `droprate` is the share of gates that are closed at the start. `gate_rate` multiplies log α: gates then learn faster by
    that factor, for trainings that are shorter than the published 200 epochs. The price decides how much goes; where that is
    less than the target, the filters with the smallest gates go too.
    """
    with opened(task, f"l0 {price:g} {by} {droprate:g} {gate_rate:g}", recipe_for(task, "l1"), watch) as run:
        state = run.load()
        if state is None:
            state = run.save(_trained(run, price, by, droprate, gate_rate))
        return finished(run, train_rest(run, state))


def _trained(run: MethodRun, price: float, by: Literal["weights", "macs"], droprate: float, gate_rate: float) -> MethodState:
    """The network after training with gates, without the filters that they closed."""
    graph, gates = gated(run.task.graph, run.sites, droprate=droprate, rate=gate_rate, seed=run.task.seed)
    worth, count = prices(run, by), len(run.task.data.train)
    places = [part for part in graph.module.modules() if isinstance(part, Gate)]

    def penalty() -> Tensor:
        for place in places:
            place.drawn = None  # the next pass draws again
        return (
            price
            / count
            * sum((worth[name] * chance_open(gate_rate * theta).sum() for name, theta in gates.items()), torch.zeros(()))
        )

    def clamp_() -> None:
        with torch.no_grad():
            for theta in gates.values():
                theta.clamp_(*(bound / gate_rate for bound in _BOUNDS))

    state = train_penalised(run, graph, penalty, clamp_)
    began = time.monotonic()
    values = {name: typical(gate_rate * theta.detach().cpu()) for name, theta in gates.items()}
    folded = fold(run, graph, values)
    for name, z in values.items():
        if not bool(z.any()):  # no layer can lose all its filters
            z[int(gates[name].argmax())] = 1.0
    masks: dict[str | Site, Tensor] = {name: z > 0 for name, z in values.items() if not bool((z > 0).all())}
    smaller = compact(folded, masks)
    left = {name: values[name][values[name] > 0] for name in values}
    closed = sum(int((z == 0).sum()) for z in values.values())
    note = f"λ = {price:g} by {by}: {closed} gates of {sum(map(len, values.values()))} closed"
    smaller = cut_lowest(run, smaller, left)
    spent = replace(state.spent, search_seconds=state.spent.search_seconds + time.monotonic() - began, note=note)
    return MethodState(smaller, spent)


def fold(run: MethodRun, graph: Graph, values: Mapping[str, Tensor]) -> Graph:
    """The task's network with the trained weights of `graph`, and every open gate multiplied into the filters behind it.

    A gate commutes with what lies between the filter and its site only where that is ReLU, pooling and the like: an error if
    the folded network gives something else than the gated one.
    """
    plain = copied(run.task.graph)
    trained = dict(graph.module.state_dict())
    plain.module.load_state_dict({name: trained[name] for name in plain.module.state_dict()})
    for site in run.sites:
        factors = torch.where(values[site.name] > 0, values[site.name], 1.0).double()
        parts = norms_behind(plain, site) or layers_behind(plain, site)
        for part in parts:
            each = torch.where(part.makes, factors[:, None], 1.0).prod(0)
            module: Any = part.module
            with torch.no_grad():
                module.weight.mul_(each.view(-1, *[1] * (module.weight.dim() - 1)).to(module.weight))
                if module.bias is not None:
                    module.bias.mul_(each.to(module.bias))
    masks: dict[str | Site, Tensor] = {
        name: z > 0 for name, z in values.items() if bool((z > 0).any()) and not bool((z > 0).all())
    }
    few = run.task.data.train.batch(slice(0, min(16, len(run.task.data.train))))
    smaller = compact(plain, masks, verify=False)
    with torch.no_grad(), eval_mode(smaller.module, graph.module):
        got, wanted = smaller.module(*few.args), graph.module(*few.args)
    if all(bool(z.any()) for z in values.values()) and not torch.allclose(
        got, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())
    ):
        raise InvalidInput(
            "l0: a gate cannot be multiplied into the filters of this network, because an activation between them is not "
            "positively homogeneous. Use a network with ReLU, or another method."
        )
    return plain
