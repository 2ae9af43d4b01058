"""Repair in closed form: consumers of a cut site get, by least squares, the weights that best reproduce their outputs.

In order: `prepare` the graph (a bias where there is none, an offset behind sums), `observe` a site over examples, `solve` the
`Reconstruction` for any choice of filters, `apply_` one of the repairs, compact. `repair_` does all but the first and the last.
When all cuts are made, `refit_` solves every layer once more against the original.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from secateurs._util.modules import Device
from secateurs.compaction.additions import with_additions
from secateurs.data.dataset import Examples
from secateurs.graph.consumers import find_consumers
from secateurs.graph.masking import Masks, copied
from secateurs.graph.plan import PlannedCut
from secateurs.graph.sites import Site, check_masks, resolve
from secateurs.graph.trace import Graph
from secateurs.repair.observe import ROWS, observe
from secateurs.repair.reconstruction import Errors, Reconstruction, Repair, apply_, solve_together, write_
from secateurs.repair.refit import refit_
from secateurs.repair.survey import Survey, survey
from secateurs.repair.whole import reconstruct_

__all__ = [
    "Errors",
    "Reconstruction",
    "Repair",
    "Survey",
    "apply_",
    "observe",
    "prepare",
    "reconstruct_",
    "refit_",
    "repair_",
    "solve_together",
    "survey",
    "write_",
]


def prepare(graph: Graph, sites: Iterable[Site | str]) -> Graph:
    """Return a copy of the graph in which all consumers of `sites` have what a repair sets: a bias, a BatchNorm, or an offset.

    What is missing is added, at zero, so the network computes the same as before; the plan records it.
    """
    found, additions = resolve(graph, sites), list[PlannedCut]()
    biased, behind = set[str](), set[str]()  # layers and sums that several sites share are prepared once
    for name, site in found.items():
        consumers = find_consumers(graph, site)
        layers = {c.module: graph.module.get_submodule(c.module) for c in consumers.layers if c.norm is None}
        biases = [path for path, layer in layers.items() if layer.bias is None and path not in biased]
        offsets = [c.name for c in consumers.sums if c.offset is None and bool(c.covered.any()) and c.name not in behind]
        if biases or offsets:
            additions.append(PlannedCut(name, (), site.original_channels, tuple(biases), tuple(offsets)))
            biased, behind = biased | {*biases}, behind | {*offsets}
    return with_additions(graph, found, additions) if additions else copied(graph)


def repair_(
    graph: Graph,
    masks: Masks,
    examples: Examples,
    *,
    original: Graph | None = None,
    ridge: float | None = None,
    batch: int = 256,
    device: Device = None,
    rows: int | None = ROWS,
    seed: int = 0,
) -> dict[str, Repair]:
    """Write into the consumers of every site in `masks` the weights that best make up for the dropped channels.

    Returns the repairs by site. Sites are repaired in network order, each with the cuts and repairs before it. `graph` must
    come from `prepare`; it is changed in place and keeps all its channels: `compact(graph, masks)` comes next.
    """
    checked = check_masks(graph, masks)
    order = {node.name: place for place, node in enumerate(graph.module.graph.nodes)}
    done: dict[str | Site, Tensor] = {}
    repairs: dict[str, Repair] = {}
    for name, (site, keep) in sorted(checked.items(), key=lambda item: order[item[1][0].node]):
        found = observe(graph, site, examples, original=original, masks=done, batch=batch, device=device, rows=rows, seed=seed)
        repairs[name] = found.solve(keep, ridge=ridge)
        apply_(graph, repairs[name])
        done[name] = keep
    return repairs
