"""Why the mean slope of an ensemble ranks filters badly, and what does not: `python -m benchmarks.ensembles` (minutes).

Random masks at all sites at once, on training images. Filters are ranked by the signed mean of single images' slopes (the
linear model of the mean loss), the same of log losses, or the mean size of the slopes; then the same share is removed at every
site, without repair, and the accuracy is measured on validation images. L1 norms are beside them. Rows go to
results/ensembles.jsonl; `--render` prints their table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import process_time

import torch
from torch import Tensor

from benchmarks.conditions import conditions
from benchmarks.finetuning import NETWORKS, Subject
from secateurs import find_sites
from secateurs._util.tables import Sheet
from secateurs.criteria import score_filters
from secateurs.data.splits import subset
from secateurs.graph.masking import masked
from secateurs.graph.sites import Site
from secateurs.metrics import accuracy, cross_entropy
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import rank_correlation
from secateurs.scoring.network import network_slopes

RESULTS = Path(__file__).parent / "results" / "ensembles.jsonl"
Scores = Mapping[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One order of all filters. Accuracies and shares are fractions."""

    network: str
    order: str
    off: float  # filters that masks switch off, a share of one site's, spread over all sites
    images: int  # that the slopes are from
    split_half: float  # rank correlation of halves of the images, median of the sites
    cpu_seconds: float  # for the slopes of all filters
    share: float  # of every site's filters that is removed
    accuracy: float
    dense: float
    conditions: str


def scores_of(subject: Subject, sites: list[Site], images: int, off: float) -> Iterator[tuple[str, Scores, float, float]]:
    """Name, scores, split-half correlation and seconds of each way to sum up the same slopes."""
    few, began = subset(subject.data.train, images, seed=1).ready(torch.float32), process_time()
    ways = ("signed", "signed log", "size")
    halves = {way: {site.name: torch.zeros(2, site.channels, dtype=torch.float64) for site in sites} for way in ways}
    for losses, slopes in network_slopes(subject.graph, sites, few, cross_entropy, off=off):
        sides = torch.arange(len(losses)) % 2
        for name, slope in slopes.items():  # the loss rises by minus the slope when the filter goes
            found = {"signed": -slope, "signed log": -slope / losses.clamp_min(1e-12)[:, None], "size": slope.abs()}
            for way, each in found.items():
                halves[way][name].index_add_(0, sides, each)
    seconds = process_time() - began
    for way, sums in halves.items():
        half = median(float(rank_correlation(each[0], each[1])) for each in sums.values())
        yield way, {name: each.sum(0) for name, each in sums.items()}, half, seconds


def measured(subject: Subject, images: int, validation: int, shares: list[float], offs: list[float]) -> Iterator[Row]:
    sites = [site for site in find_sites(subject.graph, "before") if site.channels > 1]
    val = subset(subject.data.search, validation, seed=2)
    dense = accuracy(subject.graph.module, val)
    norms = {site.name: score_filters("l1", SiteEvaluator(subject.graph, site)).coef for site in sites}
    orders = [("l1", 0.0, norms, float("nan"), 0.0)]
    for off in offs:
        orders += [(way, off, scores, half, spent) for way, scores, half, spent in scores_of(subject, sites, images, off)]
    for way, off, scores, half, spent in orders:
        for share in shares:
            masks: dict[str | Site, Tensor] = {}
            for site in sites:
                masks[site.name] = torch.ones(site.channels, dtype=torch.bool)
                masks[site.name][scores[site.name].argsort()[: round(share * site.channels)]] = False
            left = accuracy(masked(subject.graph, masks), val)
            told = conditions().sentence()
            yield Row(subject.network, way, off, images, half, round(spent, 1), share, left, dense, told)


def rendered() -> str:
    rows = [Row(**json.loads(line)) for line in RESULTS.read_text().splitlines()]
    heads = ("network", "order", "off", "split-half", "CPU s", "share removed", "accuracy, %")
    lines = tuple(
        (
            row.network,
            row.order,
            "–" if row.order == "l1" else f"{row.off:g}",
            "–" if row.order == "l1" else f"{row.split_half:.2f}",
            f"{row.cpu_seconds:.1f}",
            f"{row.share:.1%}",
            f"{100 * row.accuracy:.1f}",
        )
        for row in rows
    )
    return Sheet("Accuracy without a share of every site's filters", heads, lines).markdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["resnet20"], choices=list(NETWORKS))
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--validation", type=int, default=1000)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25])
    parser.add_argument("--off", type=float, nargs="+", default=[0.0, 0.9, 1.9, 5.7])
    parser.add_argument("--render", action="store_true", help="only print the table of the rows")
    given = parser.parse_args()
    if not given.render:
        for network in given.networks:
            subject = Subject(network, Path("runs") / "ensembles", None)
            for row in measured(subject, given.images, given.validation, given.shares, given.off):
                with RESULTS.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
                sys.stdout.write(f"{row.network} {row.order} off {row.off:g}: {row.share:.1%} removed, {row.accuracy:.2%}\n")
                sys.stdout.flush()
    sys.stdout.write(rendered() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
