"""Step 2 of 9: find the `Site`s of a Graph in network order: places where a zeroed channel stays zero until it is read.

A layer's site lies behind the activation that follows it. In a residual block the last layer's site lies before the add, or
behind the add's activation (the two shortcut positions of the paper), or all adds of a stage have one site: its stream. Where
an op makes something else of a zero before it is read (BatchNorm, a depthwise filter with a bias), the mask is applied again
behind that op. A layer that is called several times has one site over all its calls. A layer without a site is listed with the
reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from secateurs._util.modules import with_real_tensors
from secateurs.config import Shortcut
from secateurs.errors import InvalidInput, InvalidMask, UnknownSite, suggest
from secateurs.graph.coupling import remember_classes_
from secateurs.graph.flow import find_flows
from secateurs.graph.node_info import info
from secateurs.graph.site import MaskPoint, Site, Sites, Unprunable, node_masks
from secateurs.graph.site_search import Position, search_sites
from secateurs.graph.trace import Example, Graph, trace

__all__ = [
    "MaskPoint",
    "Site",
    "Sites",
    "Unprunable",
    "check_masks",
    "find_site",
    "find_sites",
    "node_masks",
    "remember_sites_",
    "resolve",
    "share_sites",
]

POSITIONS: tuple[Position, ...] = (*get_args(Shortcut), "widths")

_KNOWN: WeakKeyDictionary[Graph, dict[Position, Sites]] = WeakKeyDictionary()
"""Sites by graph: a graph's structure does not change once it is made."""


@with_real_tensors
def find_sites(
    graph: Graph | nn.Module,
    example_input: Example | Position | None = None,
    shortcut: Position = "before",
    *,
    head_widths: bool = False,
) -> Sites:
    """Find all sites of a traced network, or of a module that is traced with `example_input`.

    `shortcut` says whether the end of a residual block is masked before or after the add, or with the whole stage ("stream");
    for a graph it may come second. "coupled": all channels that the model's own code ties to one another go together, so that
    nothing has to be aligned, and `cut_` can cut the model itself. "widths": the features within the heads of attention, the
    same in every head: those of queries and keys, and those of values; `head_widths` adds them to the sites of a position.
    """
    if isinstance(example_input, str):
        shortcut = example_input
    elif isinstance(graph, nn.Module) and example_input is not None:
        graph = trace(graph, example_input)
    if not isinstance(graph, Graph):
        raise InvalidInput(
            f"graph: got {type(graph).__name__} without an example, wanted a Graph, or a module and an example input: "
            f"find_sites(model, example_input)."
        )
    if shortcut not in POSITIONS:
        raise InvalidInput(
            f"shortcut: got {shortcut!r}, wanted 'before' or 'after' (the add), 'stream' (one mask for a stage), 'coupled' "
            f"(as the model's own code allows), or 'widths' (features within heads)."
        )
    known = _KNOWN.setdefault(graph, {})
    for position in (shortcut, "widths") if head_widths else (shortcut,):
        if position not in known:
            known[position] = search_sites(graph, position)
    if not head_widths or shortcut == "widths" or not (known["widths"] or known["widths"].unprunable):
        return known[shortcut]
    place = {node.name: order for order, node in enumerate(graph.module.graph.nodes)}
    found, within = known[shortcut], known["widths"]
    return Sites(sorted([*found, *within], key=lambda site: place[site.node]), [*found.unprunable, *within.unprunable])


def share_sites(source: Graph, target: Graph) -> None:
    """Let `target`, a graph of the same structure as `source`, reuse the sites that were found for `source`."""
    _KNOWN[target] = dict(_KNOWN.get(source, {}))


def remember_sites_(graph: Graph, module: fx.GraphModule) -> None:
    """Record the names of the sites in `module`, a copy of the uncut network, and which channels are coupled.

    A cut may remove the layer that a site names. The names are those of the paper's two positions: the others name their sites
    by what there is at the time.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    for shortcut in get_args(Shortcut)[:2]:
        for site in find_sites(graph, shortcut):
            info(nodes[site.node]).setdefault("site_names", {})[shortcut] = site.name
    remember_classes_(find_flows(module))


def find_site(graph: Graph, name: str) -> Site:
    """Find the site called `name`, at any shortcut position; `UnknownSite` names similar ones, or the reason."""
    return resolve(graph, [name])[name]


def resolve(graph: Graph, names: Iterable[str | Site]) -> dict[str, Site]:
    """Look up sites by name in `graph`: an earlier cut may have narrowed them."""
    wanted = [n.name if isinstance(n, Site) else n for n in names]
    before = find_sites(graph, "before")
    known = {site.name: site for site in before}
    for position in ("widths", *POSITIONS[1:-1]):
        if any(name not in known for name in wanted):
            known |= {site.name: site for site in find_sites(graph, position) if site.name not in known}
    for name in wanted:
        if name not in known:
            reasons = [u.reason for u in before.unprunable if u.name == name]
            if reasons:
                raise UnknownSite(f"{name!r} is not a site: {reasons[-1]}.")
            if name in graph.plan.removed():
                raise UnknownSite(f"site {name!r} is gone: an earlier cut folded its branch away.")
            raise UnknownSite(f"no site {name!r} in this graph.{suggest(str(name), known)} find_sites(graph) lists them all.")
    return {name: known[name] for name in wanted}


def check_masks(graph: Graph, masks: Mapping[str | Site, Tensor]) -> dict[str, tuple[Site, Tensor]]:
    """Look up the sites of `masks` in `graph` and check the masks: bool, one value for each channel that the site has now."""
    if not isinstance(masks, Mapping):
        raise InvalidMask(f"masks: got {type(masks).__name__}, wanted a dict of bool tensors by site or its name.")
    sites = resolve(graph, masks)
    checked: dict[str, tuple[Site, Tensor]] = {}
    for key, keep in masks.items():
        name = key.name if isinstance(key, Site) else key
        site = sites[name]
        if name in checked:
            raise InvalidMask(f"site {name!r} is given twice, as a Site and by its name. Pass one mask for each site.")
        if isinstance(keep, Tensor) and keep.is_meta:
            raise InvalidMask(
                f"mask of site {name!r}: got a tensor on the meta device, which has no values. Create it on the CPU."
            )
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
            got = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
            raise InvalidMask(
                f"mask of site {name!r}: got {got}, wanted a bool tensor, True = kept. Use mask.bool() if 1 means kept."
            )
        if keep.shape != (site.channels,):
            raise InvalidMask(
                f"mask of site {name!r}: got shape {tuple(keep.shape)}, wanted ({site.channels},), one value for each channel "
                f"it has now. An earlier cut may have narrowed it: look it up again with find_sites(graph)."
            )
        checked[name] = (site, keep.detach().cpu())
    return checked
