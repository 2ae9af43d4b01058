"""Tables of lab/notes/performance.md from the saved measurements: `python -m benchmarks.render`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.conditions import Conditions
from benchmarks.scoring_page import render_scoring
from secateurs._util.files import write_text
from secateurs.speed.timing import SpeedUp

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "benchmarks" / "results" / "surgery.json"
SCORING = tuple(ROOT / "lab" / "benchmarks" / "results" / name for name in ("scoring.json", "scoring-quick.json"))  # best first
PAGE = ROOT / "lab" / "notes" / "performance.md"


def render(report: dict[str, Any]) -> str:
    """The generated part of the page."""
    return "\n\n".join(
        [
            f"Measured on: {Conditions(**report['conditions']).sentence()}. Batches of 128 images; ratios are of "
            "medians measured in turns, with 95 % intervals.",
            surgery_text(report["surgery"]),
            cuts_table(report["cuts"]),
            profile_text(report),
        ]
    )


def surgery_text(surgery: dict[str, Any]) -> str:
    ratio = SpeedUp(**surgery["ratio"])
    return (
        "### Time of surgery\n\n"
        f"ResNet-110: tracing takes {surgery['trace']:.2f} s, compaction at all sites {surgery['compact']:.2f} s; "
        f"one forward pass takes {surgery['forward']:.2f} s. Twenty passes take {ratio.ratio:.1f} times "
        f"as long as the whole surgery ({ratio.low:.1f} to {ratio.high:.1f})."
    )


def cuts_table(cuts: list[dict[str, Any]]) -> str:
    lines = [
        "### ResNet-56 with half of its filters\n",
        "| tool | shortcuts | filters removed | surgery | MACs | weights | speed | difference from masked |",
        "| --- | --- | --- | ---: | ---: | ---: | --- | --- |",
    ]
    for cut in cuts:
        wrong = cut["difference"] > 1e-10
        difference = f"**{100 * cut['difference']:.1f} % of the output: wrong**" if wrong else f"{cut['difference']:.0e}"
        lines.append(
            f"| {cut['tool']} | {cut['shortcuts']} | {cut['filters']} | {cut['seconds']:.2f} s | "
            f"{cut['macs']:.2f}x fewer | {cut['parameters']:.2f}x fewer | {SpeedUp(**cut['speed']).summary()} | "
            f"{difference} |"
        )
    return "\n".join(lines)


def profile_text(report: dict[str, Any]) -> str:
    """Where the time goes, and what keeps the speed-up below the saving in MACs."""
    uncut, cut = report["profile"]
    before, after = report["profile_macs"]
    total_before, total_after = sum(uncut.values()), sum(cut.values())
    lines = [
        "### Where the time goes (option A, before the add)\n",
        "| kind of node | uncut | cut | faster | share of the cut network |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for kind in (*uncut, "all"):
        had, has = (total_before, total_after) if kind == "all" else (uncut[kind], cut[kind])
        faster = f"{had / has:.2f}x" if had > 1e-5 and has > 0 else "–"
        lines.append(f"| {kind} | {1e3 * had:.1f} ms | {1e3 * has:.1f} ms | {faster} | {100 * has / total_after:.1f} % |")
    rates = [128 * macs / seconds / 1e9 for macs, seconds in ((before, uncut["Conv2d"]), (after, cut["Conv2d"]))]
    lines.append(
        f"\nThe MACs fall {before / after:.2f}x; convolutions get {uncut['Conv2d'] / cut['Conv2d']:.2f}x faster, since "
        f"they run at {rates[0]:.0f} GMAC/s when whole and at {rates[1]:.0f} GMAC/s when narrow. `Align` (where live "
        f"channels differ) takes {100 * cut['Align'] / total_after:.1f} % of the cut network's time, `SumInto` (a sum "
        f"with a narrow term) {100 * cut['SumInto'] / total_after:.1f} %."
    )
    return "\n".join(lines)


def update_page() -> str:
    """Rewrite the generated parts of the page for which there are results, and return them."""
    texts = {"make bench": render(json.loads(RESULTS.read_text()))} if RESULTS.exists() else {}
    measured = next((path for path in SCORING if path.exists()), None)
    if measured is not None:
        texts["make bench-scoring"] = render_scoring(json.loads(measured.read_text()))
    page = PAGE.read_text()
    for command, text in texts.items():
        page = with_part(page, command, text)
    write_text(PAGE, page)
    return "\n\n".join(texts.values())


def with_part(page: str, command: str, text: str) -> str:
    """The page with `text` between the lines that mark what `command` makes."""
    begin, end = f"<!-- begin: made by `{command}` -->", f"<!-- end: made by `{command}` -->"
    head, rest = page.split(begin)
    return f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    sys.stdout.write(update_page() + "\n")
