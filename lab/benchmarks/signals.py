"""What an ensemble should measure: losses or divergences, on training or on held-out images: `python -m benchmarks.signals`.

At six sites of the public ResNet-20 the filters are ranked by `FAST` ensembles with each of four signals, and the network
that each order leaves is measured, with and without repair. Held-out signals see one half of the search images; the other
half compares, so no order is judged on images that made it, and the test half chooses nothing. Writes
lab/benchmarks/results/signals.json and a table in lab/notes/quality.md (six minutes of one core).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import conditions
from secateurs import Graph, find_sites, trace
from secateurs._util.download import home
from secateurs._util.files import write_text
from secateurs.config import Pool, Recipe, Signal
from secateurs.criteria.ranking import cuts_along
from secateurs.data import Data, Examples, load, split, subset
from secateurs.metrics import correct, cross_entropy
from secateurs.models import example_input, load_public
from secateurs.pruning.context import PreparedSite, PruningContext, Runtime
from secateurs.scoring.cache import MeasurementCache
from secateurs.scoring.engine import split_for

RESULT = Path(__file__).parent / "results" / "signals.json"
PAGE = Path(__file__).parents[2] / "lab" / "notes" / "quality.md"
BEGIN, END = "<!-- begin: made by `python -m benchmarks.signals` -->", "<!-- end: signals -->"
SITES = tuple(f"layer{stage}.1.conv{place}" for stage in (1, 2, 3) for place in (1, 2))
SIGNALS: dict[str, tuple[Pool, Signal]] = {
    "loss, training images": ("train", "loss"),
    "loss, held-out images": ("search", "loss"),
    "divergence, training images": ("train", "divergence"),
    "divergence, held-out images": ("search", "divergence"),
}
SHARES = (0.25, 0.5, 0.75)
COMPARED = 1_000  # images of the other half
REPAIRED = 512  # training images that repairs are solved on


@dataclass(frozen=True)
class Row:
    """What is left of the network after a site lost a share of its filters in the order of one signal."""

    site: str
    signal: str
    repair: bool
    losses: list[float]  # one for each of SHARES
    accuracies: list[float]
    seconds: float  # of ranking


@dataclass(frozen=True, eq=False)
class Setting:
    """The network, the data with one half of the search images, and the other half."""

    graph: Graph
    data: Data
    compare: Examples
    store: MeasurementCache
    seed: int

    def context(self, *, scoring: Pool = "train", signal: Signal = "loss", repaired: bool = False) -> PruningContext:
        recipe = Recipe.fast(
            criterion="ensemble",
            scoring=scoring,
            signal=signal,
            repair="least-squares" if repaired else "none",
            repair_examples=REPAIRED,
            confidence=0,
            round_to=1,
            seed=self.seed,
        )
        return PruningContext(self.graph, self.data, recipe, Runtime(cross_entropy, correct, None, self.store, None))


def setting(store: MeasurementCache, seed: int) -> Setting:
    data = load("cifar10", split="public", download=False)
    ranking, comparing = split(data.search, (len(data.search) // 2, len(data.search) - len(data.search) // 2), seed=seed)
    graph = trace(load_public(20), example_input("resnet20"))
    return Setting(graph, replace(data, search=ranking), subset(comparing, COMPARED, seed=seed), store, seed)


def measure_site(given: Setting, rankers: Sequence[PruningContext], name: str) -> list[Row]:
    """All signals at one site, and both ways of leaving the network behind."""
    site = next(site for site in find_sites(given.graph, "before") if site.name == name)
    orders, seconds = [], []
    for context in rankers:
        began = perf_counter()
        ranking = context.rank(context.prepare(given.graph, site), step=1, on_scored=lambda done, of: None)
        orders.append(ranking.order)
        seconds.append(perf_counter() - began)
    rows = []
    for repaired in (False, True):
        place = given.context(repaired=repaired).prepare(given.graph, site)
        left = remaining(place, given.compare, orders)
        for signal_name, taken, figures in zip(SIGNALS, seconds, left, strict=True):
            rows.append(Row(name, signal_name, repaired, figures[:, 0].tolist(), figures[:, 1].tolist(), taken))
    return rows


def remaining(place: PreparedSite, examples: Examples, orders: Sequence[Tensor]) -> Tensor:
    """Loss and accuracy (orders, shares, 2) of the network without a share of the site's filters, repaired if it can be."""
    counts = [round(share * place.site.channels) for share in SHARES]
    masks = torch.cat([cuts_along(order, counts) for order in orders])
    different, back = torch.unique(masks, dim=0, return_inverse=True)
    repair = place.reconstruction
    network = split_for(place.graph, place.site, examples, unfolded=() if repair is None else repair.consumers)
    weights = None if repair is None else lambda keep: repair.solve(keep).weights
    found = network.measure(different, [cross_entropy, correct], weights=weights)
    return found[back].view(len(orders), len(SHARES), 2)


# ---- the page --------------------------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> str:
    """Each signal: accuracies at every site, and means over the sites."""
    rows = [Row(**fields) for fields in report["rows"]]
    lines = []
    for repaired in (False, True):
        here = [row for row in rows if row.repair == repaired]
        sites = list(dict.fromkeys(row.site for row in here))
        lines += [
            f"{'With' if repaired else 'Without'} repair: accuracy (%) without 25 / 50 / 75 % of the filters.\n",
            f"| signal | {' | '.join(sites)} | mean | mean loss |",
            "| --- " * (len(sites) + 3) + "|",
        ]
        for signal in SIGNALS:
            own = [row for row in here if row.signal == signal]
            cells = [percent(next(row for row in own if row.site == site).accuracies) for site in sites]
            means = [mean(row.accuracies[i] for row in own) for i in range(len(SHARES))]
            losses = " / ".join(f"{mean(row.losses[i] for row in own):.3f}" for i in range(len(SHARES)))
            lines.append(f"| {signal} | {' | '.join(cells)} | {percent(means)} | {losses} |")
        lines.append("")
    return "\n".join(lines)


def percent(values: Sequence[float]) -> str:
    """Fractions as per cent, side by side."""
    return " / ".join(f"{100 * value:.1f}" for value in values)


def update_page(report: dict[str, Any]) -> None:
    """Put the table between the page's two marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    said = f"Measured on: {report['conditions']}; seed {report['seed']}, {report['compared']:,} images compare."
    write_text(PAGE, f"{before}{BEGIN}\n\n{said}\n\n{table(report)}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", nargs="+", default=SITES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--store", type=Path, default=home() / "bench" / "signals.sqlite", help="what was measured is kept here"
    )
    parser.add_argument("--render", action="store_true", help="only write the table")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.render:
        options.store.parent.mkdir(parents=True, exist_ok=True)
        given, rows = setting(MeasurementCache(options.store), options.seed), []
        rankers = [given.context(scoring=scoring, signal=signal) for scoring, signal in SIGNALS.values()]
        for name in options.sites:
            rows += measure_site(given, rankers, name)
            sys.stdout.write(f"{name}: {sum(row.seconds for row in rows[-4:]):.0f} s of ranking\n")
            sys.stdout.flush()
        report = {"conditions": conditions().sentence(), "seed": options.seed, "compared": COMPARED}
        write_text(RESULT, json.dumps({**report, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    update_page(json.loads(RESULT.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
