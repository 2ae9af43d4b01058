"""Draws what a run kept at each site, and its accuracy along the way: python tools/picture.py RUN OUT.svg"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from secateurs.pruning.journal import read_journal


def draw(run: Path, out: Path) -> None:
    entries = read_journal(run)
    steps = [e for e in entries if e["unit"] == "step"]
    start = next(e for e in entries if e["unit"] == "start")
    sites = list(dict.fromkeys(step["site"] for step in steps))
    before = {step["site"]: step["channels"] for step in reversed(steps)}
    gone = {site: sum(len(step["removed"]) for step in steps if step["site"] == site) for site in sites}
    figure, (widths, way) = plt.subplots(1, 2, figsize=(10, 3.4), gridspec_kw={"width_ratios": [1.2, 1]})
    widths.barh(sites, [before[s] - gone[s] for s in sites], color="#2f7d4f", label="kept")
    widths.barh(sites, [gone[s] for s in sites], left=[before[s] - gone[s] for s in sites], color="#d9d4c7", label="removed")
    widths.invert_yaxis()
    widths.set(xlabel="filters", title="what is left at each site")
    widths.legend(frameon=False, loc="upper right")
    removed = [0.0, *[100 * step["parameters_removed"] for step in steps]]
    accuracy = [100 * start["accuracy"], *[100 * step["accuracy"] for step in steps]]
    way.plot(removed, accuracy, "o-", color="#2f7d4f")
    way.set(xlabel="% of the parameters removed", ylabel="accuracy on the search set, %", title="site by site")
    way.grid(alpha=0.3)
    for axes in (widths, way):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
