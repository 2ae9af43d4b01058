"""Two workers with one thread each against one worker with one thread, interleaved; kills; and many workers, simulated.

    python -m benchmarks.workers --score --rounds 3       scoring of ResNet-20 at all sites
    python -m benchmarks.workers --best --rounds 2        a whole run by the recipe best, without training
    python -m benchmarks.workers --kills 100              random kills of any rank, over all phases
    python -m benchmarks.workers --simulate 1000          the scheduler with that many workers, and failing tickets

Rows go to lab/results/workers/*.jsonl.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kills import KINDS, kills, small_run

ROWS = Path(__file__).parent.parent / "results" / "workers"


def keep(name: str, row: dict[str, Any]) -> None:
    """Print a row, and keep it."""
    ROWS.mkdir(parents=True, exist_ok=True)
    with (ROWS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def torchrun(workers: int, *command: str, restarts: int = 0) -> list[str]:
    """The command line that starts a module on some workers of this machine."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    return [*launch, f"--max-restarts={restarts}", "--monitor-interval=0.2", "-m", *command]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


# ---- speed ---------------------------------------------------------------------------------------------------------------


def measured(what: str, images: int, sites: str, validation: int, folder: Path | None) -> dict[str, Any]:
    """What one worker does: the scoring, or the run; the seconds of it alone, without starting, and a digest of the result.

    Scoring has a run folder, so that answers are kept; how many processor seconds that took is in the row, too.
    """
    import torch

    from secateurs._util.tensors import digest
    from secateurs.api import Pruner
    from secateurs.cli import inputs
    from secateurs.config import Recipe
    from secateurs.data.splits import subset
    from secateurs.distributed.answers import KeptAnswers
    from secateurs.pruning.curves import measure_curves

    torch.set_num_threads(1)
    origin = inputs.named_origin("resnet20", "cifar10", (), (), "public", None, 0)
    model, (data, _, _) = inputs.build_model(origin), inputs.load_sources(origin)
    data = replace(data, search=subset(data.search, validation, seed=0))
    if what == "best":
        recipe = Recipe.best(max_drop=0.01, confidence=0.0, round_to=8, repair_examples=images, batch=images // 4)
        recipe = replace(recipe, sites=(sites,))
        run = Pruner(model, data, recipe=recipe)
        began, used = time.perf_counter(), time.process_time()
        for _ in run:  # the last step comes before the final measurement, whose clock needs the machine alone
            seconds, cpu = time.perf_counter() - began, time.process_time() - used
        steps = {"steps": len(run.steps), "with the final measurement": time.perf_counter() - began}
        return {"seconds": seconds, **busy(run, cpu), "digest": digest(dict(run.graph.module.state_dict())), **steps}
    run = Pruner(model, data, recipe=Recipe.fast(allocation="global", max_drop=0.01, round_to=8, masks=images), folder=folder)
    kept, save = list[float](), KeptAnswers.save

    def timed(self: KeptAnswers, *given: Any) -> None:
        before = time.process_time()
        save(self, *given)
        kept.append(time.process_time() - before)

    KeptAnswers.save = timed  # type: ignore[assignment, method-assign]
    began, used = time.perf_counter(), time.process_time()
    with run.workers.active(run.journal.answers):
        curves = measure_curves(run, next(run.positions()))
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    return {
        "seconds": seconds,
        **busy(run, cpu),
        "kept": len(kept),
        "keeping": round(sum(kept), 4),
        "digest": digest({name: curve.ranking.order for name, curve in curves.items()}),
    }


def busy(run: Any, cpu: float) -> dict[str, Any]:
    """The processor seconds of every rank, which other processes on the machine do not change much, and its load."""
    import torch

    found = run.workers.map(
        "cpu", run.workers.size, lambda rank: [torch.tensor(cpu)], own=range(run.workers.rank, run.workers.rank + 1)
    )
    return {"cpu": [round(float(each), 2) for (each,) in found], "load": os.getloadavg()[0]}


def speed(what: str, rounds: int, images: int, sites: str, validation: int) -> None:
    """One worker without torchrun and two workers with it, in turns; all results must be the same to the bit."""
    times: dict[int, list[float]] = {1: [], 2: []}
    busiest: dict[int, list[float]] = {1: [], 2: []}
    digests = set()
    for _ in range(rounds):
        for workers in times:
            own = ["benchmarks.workers", "--one", what, "--images", str(images)]
            own += ["--sites", sites, "--validation", str(validation)]
            with tempfile.TemporaryDirectory(prefix="secateurs-workers-") as place:
                own += ["--folder", f"{place}/run"]
                command = [sys.executable, "-m", *own] if workers == 1 else torchrun(workers, *own)
                done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
            row = json.loads(done.stdout.strip().splitlines()[-1])
            times[workers].append(row["seconds"])
            busiest[workers].append(max(row["cpu"]))
            digests.add(row["digest"])
            keep(what, {"workers": workers, "images": images, "sites": sites, "validation": validation, **row})
    ratio = statistics.median(times[1]) / statistics.median(times[2])
    each = [one / two for one, two in zip(times[1], times[2], strict=True)]
    cpu = statistics.median(busiest[1]) / statistics.median(busiest[2])
    keep(
        what,
        {
            "ratio": ratio,
            "ratio of processor seconds": cpu,
            "lowest": min(each),
            "highest": max(each),
            "rounds": rounds,
            "same": len(digests) == 1,
        },
    )


# ---- many workers, simulated ---------------------------------------------------------------------------------------------


class CountingStore:
    """The store of a simulation: one server, which answers one request after the other."""

    def __init__(self, seconds: float) -> None:
        self.values: Counter[str] = Counter()
        self.seconds, self.free, self.now = seconds, 0.0, 0.0

    def add(self, key: str, amount: int) -> int:
        self.values[key] += amount
        self.free = self.now = max(self.free, self.now) + self.seconds
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        """A message without an answer."""


def simulate(workers: int, tickets: int, seconds: float, failing: float, seed: int) -> None:
    """Draw tickets as workers do, with the scheduler's own code: tickets that fail are drawn again in a further round.

    A ticket takes `seconds`, give or take a third. A request to the store takes 60 µs, and each of the headers that each
    worker reads at the end of a round 2.6 µs (both measured).
    """
    from secateurs.distributed import drawn

    chance, store = random.Random(seed), CountingStore(60e-6)
    left, counted, failed, rounds, useful = list(range(tickets)), Counter[int](), 0, 0, 0.0
    began = 0.0
    while left:
        rounds += 1
        draws = [drawn(store, f"{rounds}", left, rank) for rank in range(workers)]
        ready = [(began, rank) for rank in range(workers)]
        heapq.heapify(ready)
        answered, end = set(), began
        while ready:
            store.now, rank = heapq.heappop(ready)
            ticket = next(draws[rank], None)
            if ticket is None:
                end = max(end, store.now)
                continue
            took = seconds * chance.uniform(2 / 3, 4 / 3)
            if chance.random() < failing:
                failed, took = failed + 1, took * chance.random()  # somewhere on the way
            else:
                answered.add(ticket)
                counted[ticket] += 1
                useful += took
            heapq.heappush(ready, (store.now + took, rank))
        began = end + workers * (store.seconds + workers * 2.6e-6)
        left = [ticket for ticket in left if ticket not in answered]
    row = {"workers": workers, "tickets": tickets, "seconds a ticket": seconds, "failing": failing, "failed": failed}
    once = len(counted) == tickets and set(counted.values()) == {1}
    row |= {"rounds": rounds, "each counted once": once, "hours": began / 3600, "efficiency": useful / (workers * began)}
    keep("simulated", row)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--simulate", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=1024, help="pairs of masks and images a site, or images of a repair")
    parser.add_argument("--sites", default="*", help="of the run by the recipe best")
    parser.add_argument("--validation", type=int, default=5000, help="images that are evaluated")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=7200.0, help="after which runs with kills are stopped")
    parser.add_argument("--tickets", type=int, default=0)
    parser.add_argument("--ticket-seconds", type=float, default=0.5)
    parser.add_argument("--failing", type=float, default=0.01)
    parser.add_argument("--one", choices=("score", "best", "kills"), help="what a single worker does")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="of the run in which workers are killed")
    given = parser.parse_args()
    if given.one == "kills":
        small_run(given.folder, given.kind)
    elif given.one:
        row = measured(given.one, given.images, given.sites, given.validation, given.folder)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(row), flush=True)
    for what in ("score", "best"):
        if getattr(given, what):
            speed(what, given.rounds, given.images, given.sites, given.validation)
    if given.kills:
        kills(given.kills, given.workers, given.seconds, environment(), lambda row: keep("kills", row))
    if given.simulate:
        simulate(given.simulate, given.tickets or 50 * given.simulate, given.ticket_seconds, given.failing, seed=0)


if __name__ == "__main__":
    main()
