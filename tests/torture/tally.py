"""What a torture part has tried and found, and how its cases are spread over processes."""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path

MEMORY = 8 << 30  # bytes of address space a worker may have: a file that makes it allocate more is a failure
CHUNK = 200  # cases handed to a worker at once


@dataclass(frozen=True)
class Tally:
    """Counts by outcome, and a line for each failure that says how to make it again."""

    part: str
    tried: int
    outcomes: dict[str, int]
    failures: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case in a word; `failure` says what was wrong, empty if nothing was."""

    outcome: str
    failure: str = ""


def tally(part: str, case: Callable[[int], Verdict], count: int, seed: int, *, workers: int, chunk: int = CHUNK) -> Tally:
    """Try `count` cases, numbered from `seed` × 1,000,000; in this process, where no memory is limited, without `workers`."""
    began = time.monotonic()
    first = seed * 1_000_000
    pieces = [range(n, min(n + chunk, first + count)) for n in range(first, first + count, chunk)]
    if not workers:
        found = [_tried(case, piece) for piece in pieces]
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_limited) as pool:
            found = list(pool.map(_tried, [case] * len(pieces), pieces))
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    for counted, failed in found:
        outcomes.update(counted)
        failures += failed
    return Tally(part, count, dict(sorted(outcomes.items())), tuple(failures), time.monotonic() - began)


def _tried(case: Callable[[int], Verdict], numbers: range) -> tuple[Counter[str], list[str]]:
    outcomes: Counter[str] = Counter()
    failures = []
    for number in numbers:
        verdict = case(number)
        outcomes["failure" if verdict.failure else verdict.outcome] += 1
        if verdict.failure:
            failures.append(f"{case.__module__}.{case.__name__}({number}): {verdict.outcome}: {verdict.failure}")
    return outcomes, failures


@cache
def scratch() -> Path:
    """A folder for this process that goes when it ends, in memory where there is such a place."""
    place = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=place if place.is_dir() else None))
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=1)  # in the processes of a pool, too
    return folder


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
