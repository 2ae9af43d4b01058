"""Runs of every kind of recipe that are killed, interrupted, or meet a full disk, again and again until they are done.

Each must end like the run that was left alone: the same plan, the same pruned file byte for byte, the same journal but for
times. A run that weighs time ends as its own measurements say, and no two measure the same: it must keep all that was in its
journal when it was stopped, so that nothing is measured again. A worker imports torch once and forks a child for every
attempt, so that a kill costs a fraction of a second.
"""

from __future__ import annotations

import errno
import functools
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import sqlite3
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateurs.api import Pruner, resume
from secateurs.config import Recipe, TrainSettings
from secateurs.errors import SecateursError
from secateurs.pruning.run import Run

from .runs import ResidualNet, differing_file, few_digits, perceptron, without_times
from .tally import Tally

HUNG = 180  # seconds after which an attempt counts as hung
PATIENCE = 30  # kills of one run; then it is left alone


def residual() -> nn.Module:
    torch.manual_seed(0)
    return ResidualNet(5)


def _paper(**changes: Any) -> Recipe:
    return Recipe.paper(**{"max_drop": 0.1, "search": "bisect", "masks_per_filter": 6, "scoring_examples": 128, **changes})


_SHORT = TrainSettings(epochs=2, batch=32, lr=0.02)
_LONG = TrainSettings(epochs=4, batch=32, lr=0.02, schedule="step", milestones=(2,), augment="crop", pad=1)

RECIPES: dict[str, tuple[Callable[[], nn.Module], Recipe]] = {
    "paper": (perceptron, _paper()),
    "paper, backward, masks after the add": (residual, _paper(direction="backward", shortcut="after")),
    "fast": (perceptron, Recipe.fast(round_to=1, max_drop=0.1, confidence=0.9)),
    "fast, masks after the add": (residual, Recipe.fast(round_to=1, max_drop=0.2, confidence=0, shortcut="after")),
    "best": (
        perceptron,
        Recipe.fast(
            round_to=1,
            max_drop=0.1,
            confidence=0.9,
            criterion="portfolio",
            repair="every-layer",
            allocation="global",
            engine="none",
            repair_examples=128,
        ),
    ),
    "obs, every layer": (
        residual,
        Recipe.fast(
            round_to=1,
            max_drop=0.2,
            confidence=0.9,
            criterion="obs",
            repair="every-layer",
            allocation="global",
            engine="none",
            repair_examples=128,
        ),
    ),
    "whole network": (
        residual,
        Recipe.fast(
            max_drop=0.3,
            confidence=0,
            criterion="l1",
            repair="whole-network",
            allocation="global",
            engine="none",
            repair_examples=128,
        ),
    ),
    "by time": (residual, Recipe.fast(max_drop=0.3, confidence=0, criterion="l1", allocation="global", repair_examples=128)),
    "two rounds with fine-tuning": (perceptron, _paper(rounds=2, finetune=_SHORT)),
    "fine-tuning with the budget of the run": (residual, _paper(budget="run", finetune=_SHORT, recalibrate=128)),
    "global, with a target": (
        residual,
        Recipe.fast(round_to=1, max_drop=1.0, confidence=0, allocation="global", criterion="l1", target_macs=0.3),
    ),
    "global, trained": (
        perceptron,
        Recipe.fast(
            round_to=1,
            max_drop=0.2,
            confidence=0,
            allocation="global",
            engine="none",
            criterion="l1",
            finetune=_SHORT,
            retrain=_SHORT,
        ),
    ),
    "leave one out": (perceptron, Recipe.fast(round_to=1, max_drop=0.1, confidence=0, criterion="leave-one-out")),
    "obs": (
        perceptron,
        Recipe.fast(round_to=1, max_drop=0.1, confidence=0, criterion="obs", repair="least-squares", repair_examples=128),
    ),
    "contract, and the worst class": (
        perceptron,
        Recipe.fast(round_to=1, max_drop=0.3, confidence=0.7, worst_class=0.9, criterion="l2"),
    ),
    "retraining at the end": (perceptron, _paper(retrain=_LONG)),
    "retraining with a teacher": (
        residual,
        _paper(retrain=TrainSettings(epochs=3, batch=64, lr=0.05, distill=0.5, schedule="one-cycle")),
    ),
    "adaptive masks": (perceptron, _paper(adaptive=True, masks_per_filter=20)),
    "bernoulli masks, log scores": (perceptron, _paper(design="bernoulli", transform="log")),
    "balanced masks, ranks": (perceptron, _paper(design="balanced", transform="rank", off=0.5)),
    "taylor, recalibrated": (
        residual,
        Recipe.fast(round_to=1, max_drop=0.2, confidence=0, criterion="taylor", recalibrate=128),
    ),
    "batchnorm, the paper's search": (residual, _paper(criterion="batchnorm", search="paper")),
    "geometric median, scanned": (residual, _paper(criterion="fpgm", search="scan", round_to=2)),
}


def difference(whole: Path, other: Path) -> str:
    """In what the run's folder differs from that of the run that was left alone; empty if in nothing."""
    if name := differing_file(whole, other):
        return f"{name} differs"
    return "" if without_times(whole) == without_times(other) else "journal differs"


def journal_of(folder: Path) -> bytes:
    """The lines of a run that can be resumed, without one that is being written; nothing for one that starts again."""
    path = folder / "journal.jsonl"
    if not path.exists() or not (folder / "checkpoints" / "start.safetensors").exists():
        return b""
    return path.read_bytes().rpartition(b"\n")[0]


# ---- one attempt, in a child -------------------------------------------------------------------------------------------


def begin(folder: Path, name: str) -> Run:
    """Start the run, or resume it; one that was stopped before it could be resumed starts again."""
    make, recipe = RECIPES[name]
    if (folder / "checkpoints" / "start.safetensors").exists():
        return resume(folder, make(), few_digits(256))
    if folder.exists():
        with suppress(SecateursError):  # whatever else `resume` raises about such a folder is a failure
            resume(folder, make(), few_digits(256)).close()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # rmtree closes its folders twice when it is interrupted
        shutil.rmtree(folder)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    return Pruner(make(), few_digits(256), recipe=recipe, folder=folder)


def finish(folder: Path, name: str) -> None:
    begin(folder, name).finish()


def finish_after_interrupt(folder: Path, name: str) -> None:
    """As in a notebook: an interrupt ends the cell, and the next cell resumes in the same process."""
    run = None
    while True:
        try:
            before, run = run, begin(folder, name)  # the run that was interrupted is still there: its name is not yet free
            run.finish()
            del before
            return
        except KeyboardInterrupt:
            continue


class FullDisk:
    """From its n-th write on the disk is full: syncing, renaming, creating files and the store's inserts all fail."""

    def __init__(self, first: int) -> None:
        self.writes, self.first = 0, first

    def write(self) -> bool:
        self.writes += 1
        return self.writes >= self.first

    def install(self) -> None:
        def failing(real: Callable[..., Any], counts: Callable[..., bool]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if counts(*args) and self.write():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(*args, **kwargs)

            return call

        os.fsync = failing(os.fsync, lambda *args: True)
        os.replace = failing(os.replace, lambda *args: True)
        os.open = failing(os.open, lambda path, flags=0, *rest: bool(flags & os.O_CREAT))
        disk = self

        class Connection(sqlite3.Connection):
            def executemany(self, *args: Any) -> Any:
                if disk.write():
                    full = sqlite3.OperationalError("database or disk is full")
                    full.sqlite_errorcode = sqlite3.SQLITE_FULL  # as SQLite itself sets it
                    raise full
                return super().executemany(*args)

        sqlite3.connect = functools.partial(sqlite3.connect, factory=Connection)  # type: ignore[assignment]


def meet_full_disk(folder: Path, name: str, first: int) -> None:
    """Go on until the disk is full; the error must say so and what to do."""
    FullDisk(first).install()
    try:
        finish(folder, name)
    except SecateursError as error:
        if "full" not in str(error) or "resume" not in str(error):
            raise RuntimeError(f"a full disk is reported as: {error}") from error


# ---- the parent ----------------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """Forks children and stops them; counts what happened."""

    root: Path
    draw: random.Random
    quota: int
    traces: Path | None = None  # folder for the tracebacks of failures
    stops: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    known: list[bytes] = field(default_factory=list)  # what the journal of a disturbed run said whenever it was stopped

    def child(self, attempt: Callable[..., None], *args: Any) -> int:
        """A forked child that makes the attempt; it leaves the traceback of an error behind."""
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            attempt(*args)
            status = 0
        except KeyboardInterrupt:
            status = 130
        except BaseException:
            (self.root / "error.txt").write_text(traceback.format_exc())
        finally:
            os._exit(status)

    def wait(self, pid: int) -> int | None:
        """The child's exit status; None if it had to be killed because it hung."""
        until = time.monotonic() + HUNG
        while time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return None

    def fail(self, name: str, what: str) -> None:
        error = self.root / "error.txt"
        trace = error.read_text().strip() if error.exists() else ""
        text = trace.splitlines()[-1] if trace else ""
        self.outcomes[f"FAILED {what}"] += 1
        if self.traces is not None:
            self.traces.mkdir(parents=True, exist_ok=True)
            (self.traces / f"kills_{re.sub('[^a-z]+', '_', name)}_{len(self.failures)}.txt").write_text(
                f"{name}: {what}\n{trace}\n"
            )
        self.failures.append(f"{name}: {what} {text}".strip())
        error.unlink(missing_ok=True)

    def undisturbed(self, name: str) -> float | None:
        """Run the recipe once without disturbing it; how long that took, or None if it failed."""
        began = time.monotonic()
        if self.wait(self.child(finish, self.root / "whole", name)) != 0:
            self.fail(name, "the undisturbed run failed")
            return None
        return time.monotonic() - began

    def wrong(self, name: str, folder: Path) -> str:
        """What is wrong with a disturbed run that is done; empty if nothing is."""
        if not RECIPES[name][1].weighs_time:
            return difference(self.root / "whole", folder)
        final = journal_of(folder)
        return "" if all(final.startswith(lines) for lines in self.known) else "lines of the journal are gone"

    def disturbed(self, name: str, took: float) -> None:
        """Run the recipe once, killed or interrupted again and again."""
        folder = self.root / "disturbed"
        self.known.clear()
        same_process = self.draw.random() < 0.15
        attempt = finish_after_interrupt if same_process else finish
        stops = 0
        pid = self.child(attempt, folder, name)
        while True:
            patient = stops >= PATIENCE or self.stops >= self.quota
            if patient:
                status = self.wait(pid)
            else:
                time.sleep(took * 10 ** self.draw.uniform(-2.2, -0.3))
                done, raw = os.waitpid(pid, os.WNOHANG)
                status = os.waitstatus_to_exitcode(raw) if done else -1
            if status == 130:  # an interrupt that came before the attempt could catch it
                pid = self.child(attempt, folder, name)
                continue
            if status == 0:
                found = self.wrong(name, folder)
                self.fail(name, found) if found else self.outcomes.update(["runs that end like the undisturbed one"])
                break
            if status != -1:
                kind = "interrupted and resumed in one process" if same_process else "resumed"
                self.fail(name, "hung" if status is None else f"a run that was {kind} fails:")
                break
            stops += 1
            self.stops += 1
            interrupt = same_process or self.draw.random() < 0.3
            os.kill(pid, signal.SIGINT if interrupt else signal.SIGKILL)
            self.outcomes["interrupts" if interrupt else "kills"] += 1
            if same_process:
                continue
            code = self.wait(pid)
            self.known.append(journal_of(folder))
            if interrupt and code not in (130, 0):
                self.fail(name, f"an interrupt ends with exit code {code}")
                break
            pid = self.child(attempt, folder, name)
        shutil.rmtree(folder, ignore_errors=True)

    def full(self, name: str) -> None:
        """Run the recipe into a full disk at ever later writes, then to its end."""
        folder, first = self.root / "disturbed", self.draw.randrange(1, 4)
        self.known.clear()
        for _ in range(6):
            if self.wait(self.child(meet_full_disk, folder, name, first)) != 0:
                self.fail(name, "a full disk:")
                break
            self.known.append(journal_of(folder))
            self.outcomes["full disks"] += 1
            first += self.draw.randrange(1, 25)
        if self.wait(self.child(finish, folder, name)) != 0:
            self.fail(name, "after a full disk the run cannot go on:")
        elif found := self.wrong(name, folder):
            self.fail(name, f"after a full disk: {found}")
        shutil.rmtree(folder, ignore_errors=True)


def work(quota: int, seed: int, names: tuple[str, ...], traces: Path | None = None) -> tuple[int, dict[str, int], list[str]]:
    """Disturb runs of these recipes in turn until `quota` kills and interrupts are done."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a child that has not begun yet is still the worker
    torch.set_num_threads(1)
    # imports all there is, without autograd: it survives no fork
    warm = Pruner(perceptron(), few_digits(256), recipe=RECIPES["paper"][1])
    warm.close()
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.1).step()
    with tempfile.TemporaryDirectory() as root:
        worker = Worker(Path(root), random.Random(seed), quota, traces)
        for name in itertools.cycle(names):
            enough = min(quota, worker.stops + max(quota // len(names), 3))  # every recipe gets its share
            took = worker.undisturbed(name)
            while took is not None and worker.stops < enough and len(worker.failures) < 20:
                worker.disturbed(name, took)
            if took is not None:
                worker.full(name)
            shutil.rmtree(worker.root / "whole", ignore_errors=True)
            if worker.stops >= quota or worker.failures:
                break
    return worker.stops, dict(worker.outcomes), worker.failures


def run(
    count: int,
    seed: int,
    workers: int = 2,
    *,
    recipes: Sequence[str] = tuple(RECIPES),
    failures: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Tally:
    """Kill or interrupt runs `count` times; every recipe gets its share. Tracebacks are written to the folder `failures`."""
    began = time.monotonic()
    names = list(recipes)
    random.Random(seed).shuffle(names)
    jobs = [(n,) for n in names] if count >= 2 * len(names) else [tuple(names[i::workers]) for i in range(workers)]
    quotas = [count // len(jobs) + (i < count % len(jobs)) for i in range(len(jobs))]
    outcomes: Counter[str] = Counter()
    lines: list[str] = []
    tried = 0
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        found = pool.map(work, quotas, range(seed, seed + len(jobs)), jobs, [failures] * len(jobs))
        for stops, ended, failed in found:
            tried += stops
            outcomes.update(ended)
            lines += failed
            progress(f"kills: {tried} of {count}, {len(lines)} failures, {time.monotonic() - began:.0f} s")
    return Tally("kills", tried, dict(outcomes.most_common()), tuple(lines), time.monotonic() - began)
