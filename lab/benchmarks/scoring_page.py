"""Text and figure of lab/notes/performance.md from the saved measurements of scoring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from benchmarks.conditions import Conditions
from benchmarks.scoring_growth import cached
from benchmarks.scoring_headline import cheapest, share_of_paper
from benchmarks.scoring_quality import SHARES
from benchmarks.scoring_setup import PAPER_MASKS
from benchmarks.scoring_speed import weighted
from secateurs.speed.timing import SpeedUp

FIGURE = Path(__file__).parents[2] / "lab" / "notes" / "scoring-quality.svg"
CURVES = {
    "paper": ("tab:blue", "o"),  # budgets in two dimensions, masks and images: points, no line
    "losses in rounds": ("tab:cyan", "D"),
    "leave-one-out": ("tab:green", "o-"),
    "taylor": ("tab:purple", "o-"),
    "gradient": ("tab:orange", "o-"),
    "fast": ("tab:red", "*"),
}
COLUMNS = 4  # of the figure
LEVELS = {"l1": "black", "fpgm": "dimgrey", "random": "silver"}  # cost nothing: a line across

Unit = dict[str, Any]


def render_scoring(report: dict[str, Any]) -> str:
    """The generated part of the page; units that are missing are left out."""
    form = "the full form" if report["form"] == "full" else "the 5-minute form: few sites, a small reference"
    parts = [
        f"Measured on: {Conditions(**report['conditions']).sentence()}; {form}. Speed and growth with one thread, the "
        "rest on all cores. CIFAR-10, public weights; ensembles are scored on training images, accuracy is that of search "
        "images."
    ]
    for name, text in (("speed", speed_text), ("quality", quality_text), ("reliability", headline_text)):
        units = units_of(report, name)
        parts += [text(units, report)] if units else []
    parts += [whole_text(report)] if "paper" in report["units"] and units_of(report, "whole") else []
    parts += [growth_text(report["units"])] if "growth" in report["units"] else []
    return "\n\n".join(parts)


def units_of(report: dict[str, Any], part: str) -> list[Unit]:
    return [unit for name, unit in report["units"].items() if name.split("/")[0] == part]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first two are numbers."""
    rule = ["---"] * 2 + ["---:"] * (len(heads) - 2)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def ratio_text(ratio: Unit) -> str:
    return f"{ratio['ratio']:.1f}x ({ratio['low']:.1f} to {ratio['high']:.1f})"


def speed_text(units: list[Unit], report: dict[str, Any]) -> str:
    rows = [
        [
            unit["model"],
            unit["site"],
            str(unit["channels"]),
            f"{1e3 * median(unit['naive']) / unit['images']:.2f} ms",
            f"{1e3 * median(unit['engine']) / unit['images']:.2f} ms",
            ratio_text(unit["ratio"]),
            f"{unit['ahead']:.1f} s",
            f"{unit['gmacs']:.0f}",
            f"{100 * unit['gmacs'] / unit['roof']:.0f} %",
            f"{unit['difference']:.0e}",
        ]
        for unit in units
    ]
    heads = ["network", "site", "filters", "naive", "engine", "faster", "ahead", "GMAC/s", "of the roof", "difference"]
    return "\n\n".join(
        [
            "### The exact engine against the naive way",
            f"Milliseconds for one mask and one image: the whole masked network, eager, mask after mask, and the engine, the "
            f"same {units[0]['masks']} masks and {units[0]['images']} images in turns ({len(units[0]['naive'])} turns, 95 % "
            f"intervals). *Ahead*: what comes before the first mask (activations before the site, the check of the strategy). "
            f"GMAC/s count what lies behind the site with all its channels, masked or not; the roof is one large convolution "
            f"({median(unit['roof'] for unit in units):.0f} GMAC/s here). *Difference*: the largest of any loss, relative.",
            table(heads, rows),
            *[network_speed(model, [unit for unit in units if unit["model"] == model]) for model in models_of(units)],
        ]
    )


def models_of(units: list[Unit]) -> list[str]:
    return list(dict.fromkeys(unit["model"] for unit in units))


def network_speed(model: str, units: list[Unit]) -> str:
    """The weighted mean over one network."""
    found = weighted(units)
    alone, both = SpeedUp(**found["masks alone"]), SpeedUp(**found["with what comes before"])
    plain = SpeedUp(**found["as measured"])
    return (
        f"{model}, weighted by filters: **{alone.ratio:.1f}x** ({alone.low:.1f} to {alone.high:.1f}); with what comes ahead, "
        f"at {PAPER_MASKS} masks a filter on these images: {both.ratio:.1f}x ({both.low:.1f} to {both.high:.1f}). "
        f"{100 * found['of the roof']:.0f} % of the roof, weighted by time. Both ways met the same machine at each site, but "
        f"not the same at all sites: these figures scale every site to the same naive time. The seconds as they were measured, "
        f"simply added up, give {plain.ratio:.1f}x ({plain.low:.1f} to {plain.high:.1f}); sites measured on a busier machine "
        f"count for more."
    )


def quality_text(units: list[Unit], report: dict[str, Any]) -> str:
    draw_figure(units)
    methods = list(dict.fromkeys(row["method"] for unit in units for row in unit["rows"]))
    rows = [quality_row(method, [default_row(unit, method) for unit in units]) for method in methods]
    sizes = units[0]["reference"]
    halves = [unit["reference split half"] for unit in units]
    sites = ", ".join(f"{unit['model']} {unit['site']}" for unit in units)
    heads = ["ranked by", "budget at the last site", "seconds", "image-passes", "agreement"]
    return "\n\n".join(
        [
            "### Rankings over their cost",
            f"{'At' if len(units) == 1 else 'Means over'} {sites}. *Agreement*: rank correlation with a reference of "
            f"{sizes['masks'] // units[0]['channels']} masks a filter on {sizes['images']:,} other images (its halves agree to "
            f"{min(halves):.2f} to {max(halves):.2f}). Then the accuracy on {units[0]['search images']} search images without "
            f"25, 50 and 75 % of the site's filters, nothing else changed. An image-pass is one image through what lies behind "
            f"the site, a backward pass counts as two; seconds count all. All budgets are in the figure.",
            table([*heads, *(f"{100 * share:.0f} % gone" for share in SHARES)], rows),
            f"![Agreement and accuracy over cost]({FIGURE.name})",
        ]
    )


def default_row(unit: Unit, method: str) -> Unit:
    """The row of a method as it is used: `fast` as it comes, the others at their largest budget."""
    rows = [row for row in unit["rows"] if row["method"] == method]
    return next((row for row in rows if row["default"]), rows[-1])


def quality_row(method: str, rows: Sequence[Unit]) -> list[str]:
    seconds, passes = mean(row["seconds"] or 0.0 for row in rows), mean(row["passes"] or 0.0 for row in rows)
    cells = [method, rows[-1]["budget"], f"{seconds:.2g}" if seconds else "–", f"{passes:,.0f}" if passes else "–"]
    cells.append("–" if method == "reference" else f"{mean(row['correlation'] for row in rows):.2f}")
    return cells + [f"{100 * mean(row['accuracy'][i] for row in rows):.1f} %" for i in range(len(SHARES))]


def draw_figure(units: list[Unit]) -> None:
    """For each site agreement above, accuracy without half of the filters below; at most so many sites in a row."""
    wide, bands = min(len(units), COLUMNS), -(-len(units) // COLUMNS)
    figure, axes = plt.subplots(2 * bands, wide, figsize=(2.9 * wide + 1.6, 5.2 * bands), squeeze=False)
    for place, unit in enumerate(units):
        band, column = divmod(place, COLUMNS)
        above, below = axes[2 * band][column], axes[2 * band + 1][column]
        draw_curves(above, unit, lambda row: row["correlation"])
        draw_curves(below, unit, lambda row: 100 * row["accuracy"][1])
        above.set_title(f"{unit['model']} {unit['site']}", fontsize=9)
        below.set_xlabel("seconds", fontsize=8)
        if column == 0:
            above.set_ylabel("agreement with the reference", fontsize=8)
            below.set_ylabel("accuracy, half of the site gone (%)", fontsize=8)
    for empty in axes[-2:, len(units) - COLUMNS * (bands - 1) :].flat:
        empty.set_axis_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1 - 1.4 / (2.9 * wide + 1.6), 1))
    with plt.rc_context({"svg.hashsalt": "scoring", "svg.fonttype": "none"}):
        figure.savefig(FIGURE, metadata={"Date": None} if FIGURE.suffix == ".svg" else None)
    plt.close(figure)


def draw_curves(axes: Axes, unit: Unit, value: Callable[[Unit], float]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    for method, colour in LEVELS.items():
        axes.axhline(value(default_row(unit, method)), color=colour, linestyle="--", linewidth=1, label=method)
    for method, (colour, style) in CURVES.items():
        rows = sorted((row for row in unit["rows"] if row["method"] == method), key=lambda row: float(row["seconds"]))
        size = 11 if style == "*" else 4
        axes.plot([row["seconds"] for row in rows], [value(row) for row in rows], style, ms=size, color=colour, label=method)


def headline_text(units: list[Unit], report: dict[str, Any]) -> str:
    size = units[0]["paper"]
    heads = ["network", "site", "paper's halves agree", "seconds for a half"]
    heads += ["`fast` agrees", "seconds", "share", "agrees as well with", "seconds", "share"]
    return "\n\n".join(
        [
            "### `fast` at the reliability of the paper's procedure",
            f"The paper's procedure, {size['masks'] // units[0]['channels']} masks a filter on {size['images']:,} images, on "
            f"the exact engine: how far the rankings from two halves of its masks agree (rank correlation, mean of 20 ways to "
            f"halve them; 5 to 95 %). Beside it how far two runs of `fast` agree, with other masks and other images, and the "
            f"cost of one run as a share of a half's. Last the cheapest run, by `fast` as it is or held to fewer masks, that "
            f"agrees as well. {told(units)}",
            table(heads, [headline_row(unit) for unit in units]),
        ]
    )


def told(units: list[Unit]) -> str:
    """The median share over the sites."""
    reached = [unit for unit in units if unit["fast"]["agreement"] >= unit["paper"]["split half"]]
    share = median(share_of_paper(unit, unit["fast"]) for unit in units)
    best = [share_of_paper(unit, run) for unit in units if (run := cheapest(unit))]
    words = f"Median over sites: `fast` takes **{share_text(share)}** of the time; it agrees as well at {len(reached)} of "
    words += f"{len(units)} sites"
    return words + (f"; the cheapest that does takes {share_text(median(best))}." if best else ".")


def share_text(share: float) -> str:
    return f"1/{1 / share:.0f}" if share < 0.4 else f"{share:.2f}"


def headline_row(unit: Unit) -> list[str]:
    paper, fast, least = unit["paper"], unit["fast"], cheapest(unit)
    last = ["none", "–", "–"]
    if least is not None:
        last = [least["budget"], f"{least['seconds']:.1f}", share_text(share_of_paper(unit, least))]
    return [
        unit["model"],
        unit["site"],
        f"{paper['split half']:.2f} ({paper['low']:.2f} to {paper['high']:.2f})",
        f"{paper['seconds'] / 2:.1f}",
        f"{fast['agreement']:.2f}",
        f"{fast['seconds']:.1f}",
        share_text(share_of_paper(unit, fast)),
        *last,
    ]


def whole_text(report: dict[str, Any]) -> str:
    """All of ResNet-20 by `fast`, and the paper's way beside it."""
    units, naive = units_of(report, "whole"), report["units"]["paper"]
    minutes = sum(unit["seconds"] * unit["filters for"] / unit["channels"] for unit in units) / 60
    all_sites = all(unit["filters for"] == unit["channels"] for unit in units)
    how = f"all {len(units)} sites" if all_sites else f"extrapolated by filters from {len(units)} of the sites"
    return (
        "### The whole of ResNet-20\n\n"
        f"By `fast`, {naive['cores']} cores: **{minutes:.1f} minutes** ({how}). The paper's procedure, {naive['masks']:,} "
        f"masks on {naive['images']:,} images, the naive way on {naive['cores']} cores: **{naive['hours']:.0f} hours**, "
        f"extrapolated from {1e3 * naive['seconds for a mask and an image']:.2f} ms for a mask and an image."
    )


def growth_text(units: dict[str, Unit]) -> str:
    growth = units["growth"]
    rows = [
        [
            name,
            ", ".join(f"{size:.0f}" for size in growth[name]["sizes"]),
            ", ".join(f"{seconds:.2f}" for seconds in growth[name]["seconds"]),
            f"{growth[name]['r2']:.4f}",
        ]
        for name in ("masks", "images", "filters")
    ]
    parts = [
        "### Growth",
        f"The engine at {growth['site']} of {growth['model']}: seconds for so many masks ({growth['few images']} images), "
        f"images (8 masks), and filters left at the site (as many masks, {growth['few images']} images), with r² of a "
        f"straight line.",
        table(["grows", "sizes", "seconds", "r²"], rows),
    ]
    if "memory" in units:
        parts.append(memory_text(units["memory"]))
    return "\n\n".join(parts)


def memory_text(unit: Unit) -> str:
    rows = [
        [f"{row['budget'] / 2**20:.0f} MiB", f"{kept / 2**20:.1f} MiB", f"{row['peak'] / 2**20:.1f} MiB"]
        for row, kept in zip(unit["rows"], cached(unit["rows"]), strict=True)
    ]
    return (
        f"Tensors of the engine for {unit['images']:,} images, counted by Python's garbage collector: what is kept between two "
        f"calls, above what a budget of 0 keeps, and the most while it works, weights and the batch in work included.\n\n"
        + table(["`cache_bytes`", "kept", "most"], rows)
    )
