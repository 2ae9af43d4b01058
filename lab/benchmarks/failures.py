"""Where plain ensembles fail: orders of one late site of ResNet-20, compared: `python -m benchmarks.failures` (three minutes).

Three suspects. Few masks: the same ensemble with ever more of them. Outliers: Eq. 2 on losses, on their logarithms and
ranks. Redundancy: filters that stand in for each other, seen in the pairwise terms of a model fitted to many masks, and by
removing filters one by one and two by two. Writes lab/benchmarks/results/failures.json and a table in lab/notes/quality.md.
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
from torch.nn import functional

from benchmarks.conditions import conditions
from secateurs import find_sites, fit_importance, sample_masks, scores, trace
from secateurs._util.download import home
from secateurs._util.files import write_text
from secateurs.config import FAST, Transform
from secateurs.criteria import score_filters
from secateurs.criteria.ranking import cuts_along
from secateurs.data import Examples, load, subset
from secateurs.data.dataset import derive, generator_for
from secateurs.metrics import correct, cross_entropy
from secateurs.models import example_input, load_public
from secateurs.scoring import score_site
from secateurs.scoring.cache import MeasurementCache
from secateurs.scoring.engine import split_for
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import Importance, PairImportance, fit_pairs, order

RESULT = Path(__file__).parent / "results" / "failures.json"
PAGE = Path(__file__).parents[2] / "lab" / "notes" / "quality.md"
BEGIN, END = "<!-- begin: made by `python -m benchmarks.failures` -->", "<!-- end: failures -->"
SITE = "layer3.2.conv1"
SHARES = (0.25, 0.5, 0.75)
IMAGES = 512  # training images that all masks share
COMPARED = 1_000  # search images
MOST_MASKS = 40  # for each filter
RANDOM = 20  # orders
ALONE_AND_TOGETHER = 256  # search images on which filters are removed one by one and two by two


@dataclass(frozen=True)
class Row:
    """One order: what is left after 25, 50 and 75 %, and how far it can be trusted."""

    name: str
    losses: list[float]
    accuracies: list[float]
    split_half: float | None = None  # rank correlation of two halves of the masks
    r2_held_out: float | None = None  # share of the variance of scores of other masks that the model explains
    scoring_loss: float = float("nan")  # without half, on the images that masks were scored on
    within: float = float("nan")  # pairwise worth within the first half: below 0, its filters stand in for each other
    two_by_two: float = float("nan")  # loss beyond the sum of both alone, over all pairs within the first half
    answers: float = float("nan")  # share of the answers, without half, that name the most named class


@dataclass(frozen=True, eq=False)
class Found:
    name: str
    order: Tensor
    importance: Importance | PairImportance | None = None


def orders(bench: SiteEvaluator, train: Examples) -> Iterator[Found]:
    """All orders but the random ones."""
    channels = bench.site.channels
    images = subset(train, IMAGES, seed=derive(0, "scoring"))
    masks = sample_masks(channels, MOST_MASKS * channels, generator=generator_for(0, "masks"))
    losses = bench.on(images).means(masks)
    for each in (2, 10, MOST_MASKS):
        some = slice(0, each * channels)
        for transform in get_args(Transform):
            found = fit_importance(masks[some], scores(losses[some], transform))
            yield Found(f"losses, {each} C masks, {_said(transform)}", order(found), found)
    for each in (2, 10, MOST_MASKS):
        some = slice(0, each * channels)
        pairs = fit_pairs(masks[some], scores(losses[some]))
        yield Found(f"pairs, {each} C masks", order(pairs), pairs)
    fast = score_site(bench, train, FAST)
    yield Found(f"fast: {fast.note}", order(fast.importance), fast.importance)
    for name in ("l1", "fpgm", "taylor", "leave-one-out"):
        yield Found(name, order(score_filters(name, bench, images)))


def _said(transform: str) -> str:
    return "Eq. 2" if transform == "linear" else f"Eq. 2 of {'logarithms' if transform == 'log' else 'ranks'}"


def measure(bench: SiteEvaluator, train: Examples, search: Examples) -> dict[str, Any]:
    channels, found = bench.site.channels, list(orders(bench, train))
    shuffled = [torch.randperm(channels, generator=generator_for(seed, "random")) for seed in range(RANDOM)]
    tried = found + [Found("random", one) for one in shuffled]
    halves = torch.cat([cuts_along(one.order, [channels // 2]) for one in tried])
    compare, scored = subset(search, COMPARED, seed=0), subset(train, IMAGES, seed=derive(0, "scoring"))
    left = remaining(bench, compare, [one.order for one in tried])
    answers = most_named(bench, compare, halves)
    scoring = bench.on(scored).means(halves)
    model = next(one.importance for one in found if one.name == f"pairs, {MOST_MASKS} C masks")
    assert isinstance(model, PairImportance)
    apart = two_by_two(bench, subset(search, ALONE_AND_TOGETHER, seed=1))
    figures = [scoring, _within(model.pairs, halves), _within(apart.beyond, halves), answers]
    rows = [_row(*given) for given in zip(tried, left, *figures, strict=True)]
    return {
        "site": bench.site.name,
        "channels": channels,
        "whole": float(bench.on(compare).means(torch.ones(1, channels, dtype=torch.bool))),
        "rows": [asdict(row) for row in rows],
        "alone_below_zero": int((apart.alone < 0).sum()),
        "alone_together": float(apart.alone.sum()),
    }


def _within(worth: Tensor, keeps: Tensor) -> Tensor:
    """The sum (M,) of what is said of pairs (C, C) over those of which a mask (M, C) keeps neither."""
    gone = (~keeps).to(worth)
    return ((gone @ worth) * gone).sum(1) / 2


def most_named(bench: SiteEvaluator, examples: Examples, keeps: Tensor) -> Tensor:
    """Under each mask, the share of the examples that get the answer given most often."""

    def answer(outputs: Any, targets: Any) -> Tensor:
        return torch.as_tensor(outputs.argmax(1))

    given = split_for(bench.graph, bench.site, examples).values(keeps, answer).long()
    return torch.stack([functional.one_hot(row).double().mean(0).amax() for row in given])


def remaining(bench: SiteEvaluator, examples: Examples, orders: list[Tensor]) -> Tensor:
    """Loss and accuracy (orders, shares, 2) of the network without a share of the site's filters."""
    counts = [round(share * bench.site.channels) for share in SHARES]
    masks = torch.cat([cuts_along(one, counts) for one in orders])
    figures = [replace(bench, measure=measure).on(examples).means(masks) for measure in (cross_entropy, correct)]
    return torch.stack(figures, 1).view(len(orders), len(SHARES), 2)


def _row(found: Found, figures: Tensor, scoring: Tensor, within: Tensor, two_by_two: Tensor, answers: Tensor) -> Row:
    model = found.importance
    split_half = float(model.split_half) if isinstance(model, Importance) else None
    held_out = None if model is None or bool(model.r2_held_out.isnan()) else float(model.r2_held_out)
    last = [float(value) for value in (scoring, within, two_by_two, answers)]
    return Row(found.name, figures[:, 0].tolist(), figures[:, 1].tolist(), split_half, held_out, *last)


@dataclass(frozen=True, eq=False)
class Apart:
    """What filters cost alone (C,), and two of them beyond the sum of both (C, C), in loss at the whole network."""

    alone: Tensor
    beyond: Tensor


def two_by_two(bench: SiteEvaluator, examples: Examples) -> Apart:
    """All filters removed one by one and two by two."""
    channels = bench.site.channels
    pairs = list(combinations(range(channels), 2))
    masks = torch.ones(1 + channels + len(pairs), channels, dtype=torch.bool)
    for row, gone in enumerate([(), *((c,) for c in range(channels)), *pairs]):
        masks[row, list(gone)] = False
    losses = bench.on(examples).means(masks)
    alone = losses[1 : channels + 1] - losses[0]
    first, second = torch.tensor(pairs).T
    beyond = torch.zeros(channels, channels, dtype=torch.float64)
    beyond[first, second] = losses[channels + 1 :] - losses[0] - alone[first] - alone[second]
    return Apart(alone, beyond + beyond.T)


# ---- the page --------------------------------------------------------------------------------------------------------


def text(report: dict[str, Any]) -> str:
    """The table of orders, random ones as their mean."""
    rows = [Row(**fields) for fields in report["rows"]]
    random = [row for row in rows if row.name == "random"]
    half = torch.tensor([row.losses[1] for row in random])
    lines = [
        f"Measured on: {report['conditions']}. {report['site']}, {report['channels']} filters, no repair; {COMPARED:,} search "
        f"images compare (loss {report['whole']:.3f} before); masks share {IMAGES} training images.\n",
        "| order | loss without 25 / 50 / 75 % | accuracy, % | split-half | r² on other masks | without half: loss on the "
        "scoring images | most given answer, % | pairwise worth within | two by two |",
        "| --- " * 9 + "|",
        *(_line(row.name, row) for row in rows if row.name != "random"),
        _line(f"random, mean of {len(random)}", _mean_row(random)),
        "",
        f"Random orders without half: loss {half.mean():.3f} ± {half.std():.3f}, {half.min():.3f} to {half.max():.3f}. Removed "
        f"alone, {report['alone_below_zero']} of the filters lower the loss; all {report['channels']} such changes add up to "
        f"{report['alone_together']:+.3f}.",
    ]
    return "\n".join(lines)


def _mean_row(rows: list[Row]) -> Row:
    def means(name: str) -> list[float]:
        found: list[float] = torch.tensor([getattr(row, name) for row in rows]).mean(0).tolist()
        return found

    single = {name: float(torch.tensor([getattr(row, name) for row in rows]).mean()) for name in _SINGLE}
    return Row("random", means("losses"), means("accuracies"), **single)


_SINGLE = ("scoring_loss", "within", "two_by_two", "answers")


def _line(name: str, row: Row) -> str:
    cells = [
        " / ".join(f"{value:.3f}" for value in row.losses),
        " / ".join(f"{100 * value:.1f}" for value in row.accuracies),
        _or_dash(row.split_half),
        _or_dash(row.r2_held_out),
        f"{row.scoring_loss:.3f}",
        f"{100 * row.answers:.0f}",
        f"{row.within:+.2f}",
        f"{row.two_by_two:+.2f}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


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
        report = measure(SiteEvaluator(graph, site, cross_entropy, MeasurementCache(options.store)), data.train, data.search)
        write_text(RESULT, json.dumps({"conditions": conditions().sentence(), **report}, indent=1) + "\n")
    update_page(json.loads(RESULT.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
