"""Runs the torture: `python -m tests.torture [--part graphs ...] [--scale 0.1] [--seed N] [--failures DIR] [--write FILE]`.

What is finished is kept in lab/benchmarks/results/torture.json, a long part in pieces: parts can be run one at a time, and
`--resume` goes on where an earlier run was stopped, and tries again what failed. The table is made from all that is there;
each piece says which commit it was made at. The exit code is 1 if any part that was run has a failure.
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
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from secateurs._util.files import write_text

from .tally import Tally

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "benchmarks" / "results" / "torture.json"
COUNTS = {"graphs": 10_000, "files": 100_000, "folders": 1_000, "kills": 1_000, "contracts": 400}
BEGIN, END = "<!-- begin: made by `make torture` -->", "<!-- end: made by `make torture` -->"
PIECES = {"graphs": 250}  # cases after which results are kept; the other parts take minutes
SHOWN = 8  # outcomes of a part in the table; the rest is counted together


def main(argv: list[str] | None = None) -> int:
    there = [part for part in COUNTS if importlib.util.find_spec(f"{__package__}.{part}")]
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=there, default=there, help="the parts to run (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full counts")
    parser.add_argument("--seed", type=int, default=0, help="where the seeds begin")
    parser.add_argument("--resume", action="store_true", help="keep what is finished without a failure, and try the rest")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--failures", type=Path, help="folder for what failed, as files that run")
    parser.add_argument("--write", type=Path, help="the document whose table is replaced, e.g. docs/reliability.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where finished parts are kept")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failed = False
    now = conditions()  # of the code that runs: a commit that is made meanwhile is not it
    for part in asked.part:
        count = max(1, round(COUNTS[part] * asked.scale))
        say(f"{part}: {count:,} from seed {asked.seed}")
        wanted = pieces(part, count, asked.seed)
        known = read(asked.results).get(part, []) if asked.resume else []
        ended = [piece for piece in known if (piece["seed"], piece.get("cases")) in wanted and not piece["failures"]]
        for first, size in wanted:
            if any((piece["seed"], piece["cases"]) == (first, size) for piece in ended):
                continue
            tally = run_part(part, size, first, asked.workers, asked.failures)
            ended = [*ended, {**asdict(tally), "seed": first, "cases": size, **now}]
            write(asked.results, part, ended)
            say(f"{part}: seed {first}, {tally.tried:,} tried, {len(tally.failures)} failures in {tally.seconds:.0f} s")
            for line in tally.failures[:20]:
                say(f"  {line}")
        failed = failed or any(piece["failures"] for piece in ended)
    found = read(asked.results)
    print(table(found))
    if asked.write is not None:
        write_table(asked.write, found)
    return int(failed)


def pieces(part: str, count: int, seed: int) -> list[tuple[int, int]]:
    """The first seed and the number of cases of each piece."""
    size = PIECES.get(part, count)
    return [(seed + done, min(size, count - done)) for done in range(0, count, size)]


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


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The finished pieces of every part."""
    found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(path: Path, part: str, ended: list[dict[str, Any]]) -> None:
    """Put the pieces of a part into the file of results, in place of those that are there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({**read(path), part: ended}, indent=1) + "\n")


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


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """All finished parts as a table, with the conditions they were run under."""
    lines = ["| part | tried | failures | how they ended | time |", "| --- | ---: | ---: | --- | ---: |"]
    runs: dict[tuple[str, ...], list[str]] = {}
    for part in [p for p in COUNTS if p in found]:
        outcomes: Counter[str] = Counter()
        for piece in found[part]:
            outcomes.update(piece["outcomes"])
        tried, failures, seconds = (sum(n) for n in zip(*map(_sizes, found[part]), strict=True))
        most = outcomes.most_common() if len(found[part]) > 1 else list(outcomes.items())  # else in the order of the part
        shown = [f"{count:,} {name}" for name, count in most[:SHOWN]]
        rest = sum(count for _, count in most[SHOWN:])
        ended = "; ".join([*shown, f"{rest:,} otherwise"] if rest else shown)
        lines.append(f"| {part} | {tried:,} | {failures:,} | {ended} | {seconds / 60:.1f} min |")
        for key, same in groupby(found[part], lambda r: (r["date"], r["commit"], r["cpu"], r["versions"])):
            first = list(same)
            runs.setdefault(key, []).append(f"{sum(r['tried'] for r in first):,} {part} from seed {first[0]['seed']}")
    lines += [
        f"\n{date}, commit {commit}, {cpu}, {versions}: {', '.join(parts)}."
        for (date, commit, cpu, versions), parts in runs.items()
    ]
    return "\n".join(lines)


def _sizes(piece: dict[str, Any]) -> tuple[int, int, float]:
    return piece["tried"], len(piece["failures"]), piece["seconds"]


def write_table(path: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    """Replace what is between the two markers."""
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{path}: wanted the lines {BEGIN!r} and {END!r}, between which the table goes.")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
