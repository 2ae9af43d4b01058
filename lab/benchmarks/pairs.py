"""Whether pairwise terms pay, and how many masks they need: `python -m benchmarks.pairs` (ten minutes of one core).

At six sites of the public ResNet-20 the same masks and losses are fitted twice, filter by filter and with pairwise terms, and
the networks that the orders leave are measured, with and without repair, on search images that ranked nothing. Writes
lab/benchmarks/results/pairs.json and a table in lab/notes/quality.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditions import conditions
from benchmarks.render import with_part
from secateurs import Graph, Recipe, find_sites, fit_importance, sample_masks, scores, trace
from secateurs._util.download import home
from secateurs._util.files import write_text
from secateurs.criteria import score_filters
from secateurs.criteria.ranking import cuts_along
from secateurs.data import Data, Examples, load, split, subset
from secateurs.data.dataset import derive, generator_for
from secateurs.graph.sites import Site
from secateurs.metrics import correct, cross_entropy
from secateurs.models import example_input, load_public
from secateurs.pruning.context import PreparedSite, PruningContext, Runtime
from secateurs.scoring.cache import MeasurementCache
from secateurs.scoring.engine import split_for
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import fit_pairs, order

RESULT = Path(__file__).parent / "results" / "pairs.json"
PAGE = Path(__file__).parents[2] / "lab" / "notes" / "quality.md"
PART = "python -m benchmarks.pairs"
SITES = tuple(f"layer{stage}.1.conv{place}" for stage in (1, 2, 3) for place in (1, 2))
SHARES = (0.25, 0.5, 0.75)
COMPARED = 1_000  # search images, of the half that ranks nothing
REPAIRED = 512  # training images that repairs are solved on
IMAGES = 256  # training images that all masks share
EACH = (2, 5, 10, 20)  # masks for each filter
RANDOM = 5  # orders


@dataclass(frozen=True, eq=False)
class Setting:
    """The network, the data with one half of the search images, and the other half."""

    graph: Graph
    data: Data
    compare: Examples
    store: MeasurementCache
    seed: int

    def context(self, *, repaired: bool) -> PruningContext:
        recipe = Recipe.fast(
            criterion="ensemble",
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


def remaining(place: PreparedSite, examples: Examples, orders: Sequence[Tensor]) -> Tensor:
    """Accuracy (orders, shares) of the network without a share of the site's filters, repaired if it can be."""
    counts = [round(share * place.site.channels) for share in SHARES]
    masks = torch.cat([cuts_along(order, counts) for order in orders])
    different, back = torch.unique(masks, dim=0, return_inverse=True)
    repair = place.reconstruction
    network = split_for(place.graph, place.site, examples, unfolded=() if repair is None else repair.consumers)
    weights = None if repair is None else lambda keep: repair.solve(keep).weights
    found = network.measure(different, [correct], weights=weights)
    return found[back].view(len(orders), len(SHARES))


def orders(given: Setting, site: Site) -> Iterator[tuple[str, Tensor]]:
    """Names and orders (C,) from the same masks, first to go first; norms and chance beside them."""
    images = subset(given.data.train, IMAGES, seed=derive(given.seed, "scoring"))
    masks = sample_masks(site.channels, EACH[-1] * site.channels, generator=generator_for(given.seed, "masks"))
    bench = SiteEvaluator(given.graph, site, cross_entropy, given.store)
    losses = bench.on(images).means(masks)
    for each in EACH:
        some = slice(0, each * site.channels)
        yield f"filter by filter, {each} C masks", order(fit_importance(masks[some], scores(losses[some])))
        yield f"with pairs, {each} C masks", order(fit_pairs(masks[some], scores(losses[some])))
    yield "l1", order(score_filters("l1", bench, images))
    for number in range(RANDOM):
        generator = generator_for(derive(given.seed, "random"), str(number))
        yield "random", torch.randperm(site.channels, generator=generator)


def measure_site(given: Setting, name: str) -> list[dict[str, Any]]:
    """Accuracies without shares of the site's filters, by order and repair; those of random orders as their mean."""
    site = next(site for site in find_sites(given.graph, "before") if site.name == name)
    found = list(orders(given, site))
    rows = []
    for repaired in (False, True):
        place = given.context(repaired=repaired).prepare(given.graph, site)
        left = remaining(place, given.compare, [one for _, one in found])
        for called in dict.fromkeys(called for called, _ in found):
            own = torch.stack([figures for (one, _), figures in zip(found, left, strict=True) if one == called])
            rows.append({"site": name, "order": called, "repair": repaired, "accuracies": own.mean(0).tolist()})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Each order: accuracies at every site, and their means."""
    sites = list(dict.fromkeys(row["site"] for row in rows))
    lines = []
    for repaired in (False, True):
        here = [row for row in rows if row["repair"] == repaired]
        lines += [
            f"{'With' if repaired else 'Without'} repair: accuracy (%) without 25 / 50 / 75 % of the filters.\n",
            f"| order | {' | '.join(sites)} | mean |",
            "| --- " * (len(sites) + 2) + "|",
        ]
        for called in dict.fromkeys(row["order"] for row in here):
            own = [row["accuracies"] for row in here if row["order"] == called]
            means = [mean(figures[i] for figures in own) for i in range(len(SHARES))]
            shown = f"random, mean of {RANDOM}" if called == "random" else called
            lines.append(f"| {shown} | {' | '.join(percent(figures) for figures in own)} | {percent(means)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def percent(values: Sequence[float]) -> str:
    """Fractions as per cent, side by side."""
    return " / ".join(f"{100 * value:.1f}" for value in values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", nargs="+", default=SITES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--render", action="store_true", help="only write the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.render:
        store = home() / "bench" / "pairs.sqlite"  # what was measured is kept here
        store.parent.mkdir(parents=True, exist_ok=True)
        given, rows = setting(MeasurementCache(store), options.seed), []
        for name in options.sites:
            rows += measure_site(given, name)
            sys.stdout.write(f"{name} is done\n")
            sys.stdout.flush()
        report = {"conditions": conditions().sentence(), "seed": options.seed, "rows": rows}
        write_text(RESULT, json.dumps(report, indent=1) + "\n")
    report = json.loads(RESULT.read_text())
    said = (
        f"Measured on: {report['conditions']}; seed {report['seed']}; masks share {IMAGES} training images, {COMPARED:,} "
        f"search images compare."
    )
    write_text(PAGE, with_part(PAGE.read_text(), PART, f"{said}\n\n{table(report['rows'])}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
