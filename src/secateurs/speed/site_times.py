"""What the layers of each site cost in time: now, a filter, and the widths that are faster than all larger ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.speed.engines import Engine
from secateurs.speed.sizes import Sizing
from secateurs.speed.tables import SECONDS, LatencyModel, TableFile, fast_widths, preferred_multiple
from secateurs.speed.timing import in_rounds
from secateurs.speed.widths import candidates, multiple_at


@dataclass(frozen=True)
class SiteTimes:
    """What a site costs in time: of the layers that a cut of it changes."""

    site: str
    seconds: float  # with all filters
    a_filter: float  # seconds saved for each filter removed, on the way to the fastest width
    widths: tuple[int, ...]  # that are faster than all larger ones


@dataclass(frozen=True)
class NetworkTimes:
    """What a network and its sites cost in time."""

    network: float  # seconds
    sites: tuple[SiteTimes, ...]


def site_times(
    graph: Graph,
    sites: Sequence[Site],
    engine: Engine,
    *,
    seconds: float = SECONDS,
    on_layer: Callable[[int, int], None] = lambda done, of: None,
) -> NetworkTimes:
    """Time a network and the layers of its sites in an engine, before anything is pruned."""
    file = TableFile(engine)
    multiple = preferred_multiple(engine, graph, file)
    steps = {site.name: multiple_at(site.channels, multiple) for site in sites}
    model = LatencyModel(Sizing(graph, sites), engine.batch)
    sizes = model.wanted({site.name: candidates(site.channels, steps[site.name]) for site in sites})
    model.measure(engine, sizes, file, seconds=seconds, on_layer=on_layer)
    found = []
    for site in sites:
        widths, times = fast_widths(model, site, steps[site.name])
        fastest = widths[-1] if widths else site.channels
        saved = times.get(site.channels, 0.0) - times.get(fastest, 0.0)
        found.append(SiteTimes(site.name, times.get(site.channels, 0.0), saved / max(site.channels - fastest, 1), widths))
    whole = in_rounds({0: engine.network(graph)()}, threads=engine.threads)[0]
    return NetworkTimes(median(whole), tuple(found))
