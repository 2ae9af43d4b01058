"""Scoring of ensembles, measured on the real CIFAR-10 and public ResNets: `make bench-scoring`, or python -m benchmarks.scoring

Four parts: the exact engine's speed, the quality of rankings over their cost, what `fast` costs at the reliability of the
paper's procedure, and growth. Every unit (a part at a site) is written when it is done; --resume goes on from there, and
inside an ensemble from the last block of masks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.render import update_page
from benchmarks.scoring_growth import measure_growth, measure_memory
from benchmarks.scoring_headline import WHOLE, measure_naive, measure_reliability, measure_whole_site, whole_sites
from benchmarks.scoring_page import render_scoring
from benchmarks.scoring_quality import measure_quality
from benchmarks.scoring_setup import FULL, QUICK, Bench, Form, Sites
from benchmarks.scoring_speed import measure_speed, speed_sites
from secateurs.errors import SecateursError

RESULTS = Path(__file__).parent / "results"


def speed(bench: Bench) -> None:
    for model in bench.form.speed_sites:
        for site in speed_sites(bench, model):
            bench.unit(f"speed/{model}/{site.name}", partial(measure_speed, bench, model, site))


def rankings(bench: Bench) -> None:
    for model, names in bench.form.quality_sites.items():
        for name in names:
            site = bench.site(model, name)
            bench.unit(f"quality/{model}/{name}", partial(measure_quality, bench, model, site))
            bench.unit(f"reliability/{model}/{name}", partial(measure_reliability, bench, model, site))


def whole(bench: Bench) -> None:
    bench.unit("paper", partial(measure_naive, bench))
    for site in whole_sites(bench):
        bench.unit(f"whole/{WHOLE}/{site.name}", partial(measure_whole_site, bench, site))


def growth(bench: Bench) -> None:
    bench.unit("growth", partial(measure_growth, bench))
    bench.unit("memory", partial(measure_memory, bench))


PARTS: dict[str, Callable[[Bench], None]] = {"speed": speed, "growth": growth, "whole": whole, "rankings": rankings}


def only(form: Form, models: list[str] | None) -> Form:
    """The form with these networks alone; all for None."""

    def chosen(sites: Sites) -> Sites:
        return {model: names for model, names in sites.items() if models is None or model in models}

    return replace(form, speed_sites=chosen(form.speed_sites), quality_sites=chosen(form.quality_sites))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all sites and the large reference: hours instead of minutes")
    parser.add_argument(
        "--out", type=Path, help="JSON to write (default: lab/benchmarks/results/scoring.json, or scoring-quick.json)"
    )
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run has measured")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="measure only these")
    parser.add_argument("--models", nargs="+", choices=list(FULL.speed_sites), help="measure only these networks")
    options = parser.parse_args()
    form = only(FULL if options.full else QUICK, options.models)
    out = options.out or RESULTS / ("scoring.json" if options.full else "scoring-quick.json")
    torch.set_num_threads(1)
    try:
        bench = Bench(form, out, resume=options.resume)
        for part in options.parts:
            PARTS[part](bench)
    except SecateursError as error:
        sys.exit(f"bench-scoring: {error}")
    sys.stdout.write(render_scoring(bench.report) + "\n")
    update_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
