"""Runs the torture: `python -m tests.torture [--part graphs ...] [--scale 0.1] [--seed N] [--failures DIR] [--write FILE]`.

Finished parts are kept in lab/benchmarks/results/torture.json, so that parts can be run one at a time; the table is made from
all that are there. The exit code is 1 if any part that was run has a failure.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import platform
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .tally import Tally

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "benchmarks" / "results" / "torture.json"
COUNTS = {"graphs": 10_000, "files": 100_000, "folders": 1_000, "kills": 1_000, "contracts": 400}
BEGIN, END = "<!-- begin: made by `make torture` -->", "<!-- end: made by `make torture` -->"
SHOWN = 8  # outcomes of a part in the table; the rest is counted together


def main(argv: list[str] | None = None) -> int:
    there = [part for part in COUNTS if importlib.util.find_spec(f"{__package__}.{part}")]
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=there, default=there, help="the parts to run (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full counts")
    parser.add_argument("--seed", type=int, default=0, help="where the seeds begin")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--failures", type=Path, help="folder for what failed, as files that run")
    parser.add_argument("--write", type=Path, help="the document whose table is replaced, e.g. docs/reliability.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where finished parts are kept")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failed = False
    for part in asked.part:
        count = max(1, round(COUNTS[part] * asked.scale))
        say(f"{part}: {count:,} from seed {asked.seed}")
        tally = run_part(part, count, asked.seed, asked.workers, asked.failures)
        keep(asked.results, tally, asked.seed)
        for line in tally.failures[:20]:
            say(f"  {line}")
        failed = failed or bool(tally.failures)
    found = json.loads(asked.results.read_text())
    print(table(found))
    if asked.write is not None:
        write_table(asked.write, found)
    return int(failed)


def say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def run_part(part: str, count: int, seed: int, workers: int, failures: Path | None) -> Tally:
    """Run one part; parts that take them get the folder for failures and a progress callback."""
    run = importlib.import_module(f"{__package__}.{part}").run
    able = inspect.signature(run).parameters
    options: dict[str, Any] = {"failures": failures, "progress": say}
    tally = run(count, seed, workers, **{name: value for name, value in options.items() if name in able})
    assert isinstance(tally, Tally)
    return tally


def keep(path: Path, tally: Tally, seed: int) -> None:
    """Put the part into the file of results, with what it was run on, beside the parts that are there."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found[tally.part] = {**asdict(tally), "seed": seed, **conditions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def conditions() -> dict[str, str]:
    """Date, commit, processor and versions."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "cpu": cpu or platform.processor() or platform.machine(),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def table(found: dict[str, Any]) -> str:
    """All finished parts as a table, with the conditions they were run under."""
    lines = ["| part | tried | failures | how they ended | time |", "| --- | ---: | ---: | --- | ---: |"]
    for part in [p for p in COUNTS if p in found]:
        row = found[part]
        outcomes = list(row["outcomes"].items())
        shown = [f"{count:,} {name}" for name, count in outcomes[:SHOWN]]
        rest = sum(count for _, count in outcomes[SHOWN:])
        ended = "; ".join([*shown, f"{rest:,} otherwise"] if rest else shown)
        lines.append(f"| {part} | {row['tried']:,} | {len(row['failures']):,} | {ended} | {row['seconds'] / 60:.1f} min |")
    runs = {(r["date"], r["commit"], r["cpu"], r["versions"]): [] for r in found.values()}
    for part, r in found.items():
        runs[r["date"], r["commit"], r["cpu"], r["versions"]].append(f"{part} from seed {r['seed']}")
    for (date, commit, cpu, versions), parts in runs.items():
        lines.append(f"\n{date}, commit {commit}, {cpu}, {versions}: {', '.join(parts)}.")
    return "\n".join(lines)


def write_table(path: Path, found: dict[str, Any]) -> None:
    """Replace what is between the two markers."""
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{path}: wanted the lines {BEGIN!r} and {END!r}, between which the table goes.")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
