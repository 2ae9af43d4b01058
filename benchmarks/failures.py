"""Where plain ensembles fail: orders of one late site of ResNet-20, compared: `python -m benchmarks.failures` (three minutes).

Three suspects. Few masks: the same ensemble with ever more of them. Outliers: Eq. 2 on losses, on their logarithms and
ranks. Redundancy: filters that stand in for each other, found by removing them alone and together. Writes
benchmarks/results/failures.json and tables in docs/quality.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.conditions import conditions
from secateurs import find_sites, fit_importance, sample_masks, scores, trace
from secateurs.criteria import criterion
from secateurs.data import Examples, load, subset
from secateurs.data.seeding import derive, generator_for
from secateurs.evaluate import correct, cross_entropy
from secateurs.files import write_text
from secateurs.home import home
from secateurs.importance import Importance, PairImportance, Transform, fit_pairs, order
from secateurs.measuring import Bench
from secateurs.models import example_input, load_public
from secateurs.ranking import cuts_along
from secateurs.scoring import FAST, score_site
from secateurs.store import Store

RESULT = Path(__file__).parent / "results" / "failures.json"
PAGE = Path(__file__).parents[1] / "docs" / "quality.md"
BEGIN, END = "<!-- begin: made by `python -m benchmarks.failures` -->", "<!-- end: failures -->"
SITE = "layer3.2.conv1"
SHARES = (0.25, 0.5, 0.75)
IMAGES = 512  # training images that all masks share
COMPARED = 1_000  # search images
MOST_MASKS = 40  # for each filter
RANDOM = 20  # orders
ALONE_AND_TOGETHER = 256  # search images on which filters are removed one by one and two by two
STRONGEST = 50  # pairs


@dataclass(frozen=True)
class Row:
    """One order: what is left after 25, 50 and 75 %, and how far it can be trusted."""

    name: str
    losses: list[float]
    accuracies: list[float]
    split_half: float | None = None  # rank correlation of two halves of the masks
    r2_held_out: float | None = None  # share of the variance of scores of other masks that the model explains


@dataclass(frozen=True, eq=False)
class Found:
    name: str
    order: Tensor
    importance: Importance | PairImportance | None = None


def orders(bench: Bench, train: Examples) -> Iterator[Found]:
    """All orders but the random ones."""
    channels = bench.site.channels
    images = subset(train, IMAGES, seed=derive(0, "scoring"))
    masks = sample_masks(channels, MOST_MASKS * channels, generator=generator_for(0, "masks"))
    losses = bench.on(images, announced=len(masks)).means(masks)
    for each in (2, 10, MOST_MASKS):
        some = slice(0, each * channels)
        for transform in get_args(Transform):
            found = fit_importance(masks[some], scores(losses[some], transform))
            yield Found(f"losses, {each} C masks, {_said(transform)}", order(found), found)
    for each in (2, 10, MOST_MASKS):
        some = slice(0, each * channels)
        pairs = fit_pairs(masks[some], scores(losses[some]))
        yield Found(f"pairs, {each} C masks", order(pairs), pairs)
    fast = score_site(bench.graph, bench.site, train, FAST, store=bench.store)
    yield Found(f"fast: {fast.note}", order(fast.importance), fast.importance)
    for name in ("l1", "fpgm", "taylor", "leave-one-out"):
        yield Found(name, order(criterion(name)(bench.graph, bench.site, images)))


def _said(transform: str) -> str:
    return "Eq. 2" if transform == "linear" else f"Eq. 2 of {'logarithms' if transform == 'log' else 'ranks'}"


def measure(bench: Bench, train: Examples, search: Examples) -> dict[str, Any]:
    compare, channels = subset(search, COMPARED, seed=0), bench.site.channels
    found = list(orders(bench, train))
    drawn = [torch.randperm(channels, generator=generator_for(seed, "random")) for seed in range(RANDOM)]
    left = remaining(bench, compare, [one.order for one in found] + drawn)
    rows = [_row(one, figures) for one, figures in zip(found, left, strict=False)]
    random = left[len(found) :].mean(0)
    rows.append(Row(f"random, mean of {RANDOM}", random[:, 0].tolist(), random[:, 1].tolist()))
    chosen = {one.name: one.order for one in found}
    return {
        "site": bench.site.name,
        "channels": channels,
        "rows": [asdict(row) for row in rows],
        "random_half": {
            "losses": left[len(found) :, 1, 0].tolist(),
            "accuracies": left[len(found) :, 1, 1].tolist(),
        },
        "redundancy": redundancy(bench, subset(search, ALONE_AND_TOGETHER, seed=1), chosen),
    }


def remaining(bench: Bench, examples: Examples, orders: list[Tensor]) -> Tensor:
    """Loss and accuracy (orders, shares, 2) of the network without a share of the site's filters."""
    counts = [round(share * bench.site.channels) for share in SHARES]
    masks = torch.cat([cuts_along(one, counts) for one in orders])
    figures = [replace(bench, measure=measure).on(examples).means(masks) for measure in (cross_entropy, correct)]
    return torch.stack(figures, 1).view(len(orders), len(SHARES), 2)


def _row(found: Found, figures: Tensor) -> Row:
    model = found.importance
    split_half = float(model.split_half) if isinstance(model, Importance) else None
    held_out = None if model is None or bool(model.r2_held_out.isnan()) else float(model.r2_held_out)
    return Row(found.name, figures[:, 0].tolist(), figures[:, 1].tolist(), split_half, held_out)


def redundancy(bench: Bench, examples: Examples, orders: dict[str, Tensor]) -> dict[str, Any]:
    """Which pairs cost more together than the sum of both alone, and how many of these each order cuts in half or whole."""
    channels = bench.site.channels
    pairs = list(combinations(range(channels), 2))
    masks = torch.ones(1 + channels + len(pairs), channels, dtype=torch.bool)
    for row, gone in enumerate([(), *((c,) for c in range(channels)), *pairs]):
        masks[row, list(gone)] = False
    losses = bench.on(examples, announced=len(masks)).means(masks)
    alone = losses[1 : channels + 1] - losses[0]
    first, second = torch.tensor(pairs).T
    beyond = losses[channels + 1 :] - losses[0] - alone[first] - alone[second]
    strongest = beyond.argsort(descending=True)[:STRONGEST]
    lost = {}
    for name, found in orders.items():
        kept = cuts_along(found, [channels // 2])[0]
        lost[name] = int((~kept[first] & ~kept[second])[strongest].sum())
    return {
        "images": len(examples),
        "whole": float(losses[0]),
        "alone": alone.tolist(),
        "alone_below_zero": int((alone < 0).sum()),
        "beyond_mean": float(beyond.mean()),
        "beyond_strongest": [
            {"pair": list(pairs[i]), "alone": [float(alone[c]) for c in pairs[i]], "beyond": float(beyond[i])}
            for i in strongest[:5].tolist()
        ],
        "sum_alone": float(alone.sum()),
        "strongest": STRONGEST,
        "both_gone_at_half": lost,
    }


# ---- the page --------------------------------------------------------------------------------------------------------


def text(report: dict[str, Any]) -> str:
    """The table of orders, and what removing one by one and two by two says."""
    lines = [
        f"Measured on: {report['conditions']}. {report['site']}, {report['channels']} filters, no repair; {COMPARED:,} search "
        f"images compare; masks share {IMAGES} training images.\n",
        "| order | loss without 25 / 50 / 75 % | accuracy, % | split-half | r² on other masks | strong pairs, both gone |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    apart = report["redundancy"]
    for row in (Row(**fields) for fields in report["rows"]):
        losses = " / ".join(f"{value:.3f}" for value in row.losses)
        accuracies = " / ".join(f"{100 * value:.1f}" for value in row.accuracies)
        gone = apart["both_gone_at_half"].get(row.name)
        trust = [_or_dash(row.split_half), _or_dash(row.r2_held_out), "–" if gone is None else str(gone)]
        lines.append(f"| {row.name} | {losses} | {accuracies} | {' | '.join(trust)} |")
    half = torch.tensor(report["random_half"]["losses"])
    strongest = apart["beyond_strongest"][0]
    lines += [
        "",
        f"Random orders without half: loss {half.mean():.3f} ± {half.std():.3f}, {half.min():.3f} to {half.max():.3f}.",
        f"Removed alone ({apart['images']} search images, loss {apart['whole']:.3f}), {apart['alone_below_zero']} filters "
        f"lower the loss, and all {report['channels']} together add up to {apart['sum_alone']:+.3f}; two together cost "
        f"{apart['beyond_mean']:+.5f} beyond the sum of both in the mean, the strongest pair {strongest['beyond']:+.4f}. The "
        f"last column counts, of the {apart['strongest']} strongest pairs, those of which an order's first half has both.",
    ]
    return "\n".join(lines)


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def update_page(report: dict[str, Any]) -> None:
    """Put the text between the page's two marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    write_text(PAGE, f"{before}{BEGIN}\n\n{text(report)}\n\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", default=SITE)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--store", type=Path, default=home() / "bench" / "failures.sqlite", help="what was measured is kept here"
    )
    parser.add_argument("--render", action="store_true", help="only write the tables")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.render:
        options.store.parent.mkdir(parents=True, exist_ok=True)
        data, graph = load("cifar10", split="public", download=False), trace(load_public(20), example_input("resnet20"))
        site = next(site for site in find_sites(graph, "before") if site.name == options.site)
        report = measure(Bench(graph, site, cross_entropy, Store(options.store)), data.train, data.search)
        write_text(RESULT, json.dumps({"conditions": conditions().sentence(), **report}, indent=1) + "\n")
    update_page(json.loads(RESULT.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
