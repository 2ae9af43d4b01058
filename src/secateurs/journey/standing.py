"""The network as it stands: how well it does, the momentum that its training left, and what a cut makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from secateurs.graph import Graph
from secateurs.repair import Repair
from secateurs.training import carry_momentum
from secateurs.workshop import Place, Workshop


@dataclass(frozen=True, eq=False)
class Standing:
    """A network and how well it does on the search set; NaN until that is measured."""

    graph: Graph
    accuracy: float = float("nan")
    loss: float = float("nan")
    momentum: dict[str, Tensor] = field(default_factory=dict)  # of the optimiser, by parameter name
    repair: Repair | None = None  # that the latest cut was made with


def measured(workshop: Workshop, standing: Standing) -> Standing:
    """The same network, its accuracy and loss on the search set measured."""
    found = workshop.evaluate(standing.graph, workshop.search)
    return replace(standing, accuracy=found.accuracy, loss=found.loss)


def with_cut(workshop: Workshop, standing: Standing, place: Place, keep: Tensor) -> Standing:
    """The smaller network, repaired if repairs are made, and measured; the momentum of the weights that are left comes along.

    `keep` is a mask (C,) over the channels of the place's site.
    """
    made = workshop.made(place, keep)
    parameters = dict(made.graph.module.named_parameters())
    momentum = carry_momentum(standing.momentum, made.graph.kept, parameters)
    return measured(workshop, replace(standing, graph=made.graph, momentum=momentum, repair=made.repair))


def refitted(workshop: Workshop, standing: Standing) -> Standing:
    """Every layer solved anew and the network measured, if the recipe wants that; else the network as it stands."""
    graph = workshop.refitted(standing.graph)
    return standing if graph is standing.graph else measured(workshop, replace(standing, graph=graph))
