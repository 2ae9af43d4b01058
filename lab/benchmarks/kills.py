"""Random SIGKILLs for the ranks of runs under torchrun, over all phases; started by `python -m benchmarks.workers --kills 100`.

Two small runs are made to the end first, one by the recipe best with a training after it and one by Algorithm 1 with a training
after every cut. Then they are started again and again. A worker writes down which phase it is in; the killer draws a phase that
is still to come and a rank, waits for them, waits some share of the phase longer, and kills. Plan and weights must be those of
the uninterrupted runs. A kill counts where it came before the end of the run's record. The same notes give what a restart is
made up of.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

RESULTS = ("plan.json", "pruned.safetensors")
STARTING, BETWEEN = "starting", "between"  # imports, joining, opening the folder; none of the phases
PHASES = {  # in the order in which they begin; of phases within one another the innermost is the one that counts
    "baseline": "secateurs.pruning.run:Run.measure_original",
    "curves": "secateurs.pruning.together:measure_curves",
    "survey": "secateurs.pruning.context:survey",
    "rank": "secateurs.pruning.run:Run.rank",
    "search": "secateurs.pruning.algorithm1:Lines.find_cut",
    "trials": "secateurs.pruning.together:choose",
    "refit": "secateurs.pruning.context:PruningContext.refit",
    "cut": "secateurs.pruning.together:ChosenCuts.make",
    "training": "secateurs.pruning.trainer:train_resumably_",
    "guard": "secateurs.pruning.trainer:keep_best_",
    "step": "secateurs.pruning.run:Run.record",
    "final measurement": "secateurs.pruning.run:Run._measure_result",
    "results": "secateurs.pruning.run:save_result",
}
PARTS = ("stopped", "started", "torch", "secateurs", "joined", "opened", "going on")  # moments of a restart, in order
KINDS = ("best", "paper")
DRAWS = 2  # of phases, of which the earlier one is taken
POLL = 0.002  # seconds; phases shorter than that cannot be hit
LONGEST_RUN = 900.0  # seconds, with all its kills; then it is lost


# ---- what a worker does ----------------------------------------------------------------------------------------------------


@dataclass
class Notes:
    """The file in which one rank writes down what it does: time, processor seconds, process, event, phase from then on."""

    path: Path
    phase: str = STARTING

    def say(self, event: str, at: float | None = None) -> None:
        with self.path.open("a") as file:
            when, used = (time.monotonic(), time.process_time()) if at is None else (at, 0.0)
            file.write(f"{when:.4f}\t{used:.3f}\t{os.getpid()}\t{event}\t{self.phase}\n")

    def within(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which says when its phase begins and when it ends."""

        @functools.wraps(function)
        def noted(*args: Any, **options: Any) -> Any:
            outer, self.phase = self.phase, phase
            self.say(f"> {phase}")
            try:
                return function(*args, **options)
            finally:
                self.phase = outer
                self.say(f"< {phase}")

        return noted

    def after(self, function: Callable[..., Any], event: str) -> Callable[..., Any]:
        """The function, which says that it has come to its end."""

        @functools.wraps(function)
        def noted(*args: Any) -> Any:
            found = function(*args)
            self.say(event)
            return found

        return noted


def notes_of(folder: Path, rank: int) -> Path:
    return folder.parent / f"{folder.name}.rank-{rank}"


def small_run(folder: Path, kind: str) -> None:
    """A small run in which workers are killed: by the recipe best, or by Algorithm 1 with ensembles of masks."""
    notes = Notes(notes_of(folder, int(os.environ["RANK"])))
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    notes.say("started", ticks - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic())
    import torch

    notes.say("torch")
    import secateurs.api
    from secateurs._util.journal import Journal
    from secateurs.config import GENTLE, Recipe
    from secateurs.data import load
    from secateurs.distributed import answers, join
    from secateurs.models import build

    notes.say("secateurs")
    join()
    notes.say("joined")
    for phase, place in PHASES.items():
        module, _, name = place.partition(":")
        *owners, last = name.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        setattr(owner, last, notes.within(phase, getattr(owner, last)))
    Journal.append = notes.after(Journal.append, "line")  # type: ignore[method-assign]
    answers.KeptAnswers.load = notes.after(answers.KeptAnswers.load, "read")  # type: ignore[method-assign]
    answers.WORTH_KEEPING = 0.0  # tickets of milliseconds are kept, too
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training = replace(GENTLE, epochs=2, batch=64, optimiser="sgd", lr=0.01, average=0.99)
    if kind == "best":
        recipe = Recipe.best(max_drop=0.1, confidence=0.9, repair_examples=256, batch=64, round_to=1, retrain=training)
    else:
        recipe = Recipe.fast(
            masks=96, max_drop=0.05, confidence=0.0, batch=64, round_to=1, scoring_examples=256, finetune=training
        )
    run = secateurs.api.start_or_continue(build("mlp", hidden=(24, 20)), load("digits"), recipe=recipe, folder=folder)
    notes.phase = BETWEEN
    notes.say("opened")
    run.finish()


# ---- who kills -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """One line of a rank's notes."""

    at: float
    used: float
    process: int
    event: str
    phase: str


def read_notes(path: Path) -> list[Note]:
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    found = [line.split("\t") for line in whole.splitlines()]
    return [Note(float(at), float(used), int(process), event, phase) for at, used, process, event, phase in found]


def latest_phase(folder: Path, rank: int, process: int | None) -> str:
    """The phase that a process of that rank is in, by the last line of its notes."""
    path = notes_of(folder, rank)
    if not path.exists():
        return STARTING
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 300))
        lines = file.read().decode().split("\n")[:-1]
    *_, pid, _, phase = lines[-1].split("\t") if lines else ("", "0", "", STARTING)
    return phase if int(pid) == process else STARTING


@dataclass(frozen=True)
class Event:
    """A phase of an uninterrupted run: how many lines the record had when it began and when it ended, and how long it took."""

    phase: str
    first: int
    last: int
    seconds: float


def events_of(notes: list[Note]) -> list[Event]:
    """The phases that rank 0 went through."""
    lines, began, found = 0, list[tuple[float, int]](), list[Event]()
    for note in notes:
        lines += note.event == "line"
        if note.event[0] == ">":
            began.append((note.at, lines))
        elif note.event[0] == "<":
            at, before = began.pop()
            found.append(Event(note.event[2:], before, lines, note.at - at))
        elif note.event == "opened":
            found.append(Event(STARTING, 0, 0, note.at - notes[0].at))
    return [event for event in found if event.seconds > POLL]


def processes(agent: int) -> dict[int, int]:
    """The workers of an agent by rank."""
    found = {}
    for pid in children(agent):
        try:
            text = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it has ended
            continue
        rank = [each for each in text.split(b"\0") if each.startswith(b"RANK=")]
        if rank:
            found[int(rank[0][5:])] = pid
    return found


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def mentioning(word: str) -> list[int]:
    """All processes but this one whose command line has a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


def lines_of(folder: Path) -> list[bytes]:
    """The whole lines of a run's record."""
    path = folder / "journal.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def has_ended(folder: Path) -> bool:
    """Whether the record of a run has its last unit."""
    return any(line.startswith(b'{"unit": "end"') for line in lines_of(folder)[-1:])


@dataclass
class Killer:
    """Kills ranks of runs in a folder of its own, until as many kills were made as wanted, or the time is over."""

    wanted: int
    workers: int
    until: float  # CLOCK_MONOTONIC, after which no run is begun and none waited for
    root: Path
    environment: dict[str, str]
    chance: random.Random = field(default_factory=lambda: random.Random(time.time_ns()))
    phases: Counter[str] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    restarts: list[dict[str, tuple[float, float]]] = field(default_factory=list)  # parts: seconds, and those of the processor
    read: int = 0  # answers of killed workers that were not computed again
    late: int = 0  # kills after the end of the record, which do not count

    @contextmanager
    def started(self, folder: Path, kind: str, restarts: int) -> Iterator[subprocess.Popen[bytes]]:
        """A run under torchrun; it and all its workers are gone after the block."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.workers}"]
        launch += [f"--max-restarts={restarts}", "-m", "benchmarks.workers", "--one", "kills"]
        with (self.root / f"{folder.name}.log").open("wb") as log:
            agent = subprocess.Popen(
                [*launch, "--folder", str(folder), "--kind", kind], env=self.environment, stdout=log, stderr=log
            )
            try:
                yield agent
            finally:
                for pid in [] if agent.poll() is not None else [*mentioning(str(folder)), agent.pid]:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                agent.wait()

    def whole(self, kind: str) -> tuple[list[bytes], list[Event]]:
        """The results of an uninterrupted run, and its phases."""
        folder = self.root / f"whole-{kind}"
        with self.started(folder, kind, restarts=0) as agent:
            if agent.wait(max(1.0, self.until - time.monotonic())):
                raise SystemExit((self.root / f"{folder.name}.log").read_text()[-3000:])
        return [(folder / name).read_bytes() for name in RESULTS], events_of(read_notes(notes_of(folder, 0)))

    def run(self, number: int, kind: str, wholes: list[bytes], events: list[Event]) -> dict[str, Any]:
        """One run with kills up to its end; its row."""
        folder, made = self.root / f"run-{number}", list[dict[str, Any]]()
        until = min(self.until, time.monotonic() + LONGEST_RUN)
        with self.started(folder, kind, restarts=1000) as agent:
            while agent.poll() is None and time.monotonic() < until and self.phases.total() < self.wanted:
                time.sleep(POLL)
                hit = None if has_ended(folder) else self.kill(agent, folder, events, until)
                made += [hit] if hit else []
                self.phases.update([hit["phase"]] if hit else [])
                self.ranks.update([hit["rank"]] if hit else [])
            while agent.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            exit_code = agent.poll()
        found = [(folder / name).read_bytes() if (folder / name).exists() else b"" for name in RESULTS]
        row = {"workers": self.workers, "kind": kind, "kills": made, "exit": exit_code, "same": found == wholes}
        if exit_code != 0 or not row["same"]:
            row["end of the log"] = (self.root / f"{folder.name}.log").read_text()[-3000:]
        self.read += sum(note.event == "read" for note in read_notes(notes_of(folder, 0)))
        shutil.rmtree(folder, ignore_errors=True)
        return row

    def kill(self, agent: subprocess.Popen[bytes], folder: Path, events: list[Event], until: float) -> dict[str, Any] | None:
        """Kill a random rank in a random phase that is still to come; None if that phase, or the run, was over before."""
        length, rank = len(lines_of(folder)), self.chance.randrange(self.workers)
        starts = latest_phase(folder, rank, processes(agent.pid).get(rank)) == STARTING
        left = [event for event in events if (starts if event.phase == STARTING else event.last >= length)]
        phases = sorted({event.phase for event in left})
        chosen = self.chance.choices(phases, [1 / (1 + self.phases[name]) ** 2 for name in phases], k=DRAWS)
        events = [self.chance.choice([event for event in left if event.phase == name]) for name in chosen]
        event = min(events, key=lambda event: event.last)  # so that the others can still be hit in the same run
        phase = event.phase
        while agent.poll() is None and time.monotonic() < until:
            length, pid = len(lines_of(folder)), processes(agent.pid).get(rank)
            here = latest_phase(folder, rank, pid)
            if has_ended(folder) or (here != STARTING if phase == STARTING else length > event.last):
                return None
            if pid is not None and here == phase and (phase == STARTING or length >= event.first):
                time.sleep(self.chance.uniform(0, event.seconds))
                return self._killed(agent, folder, rank, pid, until)
            time.sleep(POLL)
        return None

    def _killed(self, agent: subprocess.Popen[bytes], folder: Path, rank: int, pid: int, until: float) -> dict[str, Any] | None:
        """Kill a process, unless the run has ended, and watch the restart."""
        old = set(processes(agent.pid).values())
        if pid not in old or not alive(pid) or has_ended(folder):
            return None
        os.kill(pid, signal.SIGKILL)
        at = time.monotonic()
        if has_ended(folder):
            self.late += 1
            return None
        phase = latest_phase(folder, rank, pid)
        while any(map(alive, old)) and time.monotonic() < until:
            time.sleep(0.002)
        stopped = time.monotonic()
        if self.chance.random() < 0.5:  # else the next kill may come at any moment of the restart
            self._watch(agent, folder, at, stopped, old, until)
        return {"phase": phase, "rank": rank}

    def _watch(
        self, agent: subprocess.Popen[bytes], folder: Path, at: float, stopped: float, old: set[int], until: float
    ) -> None:
        """Wait until the run goes on, and keep the parts of the restart."""
        while agent.poll() is None and time.monotonic() < until:
            notes = [note for note in read_notes(notes_of(folder, 0)) if note.process not in old and note.at > at]
            opened = next((note.at for note in notes if note.event == "opened"), math.inf)
            going = next((note for note in notes if note.at > opened and note.event == "line"), None)
            if going is not None:
                first = {note.event: note for note in reversed(notes)}
                moments = [(at, 0.0), (stopped, 0.0), *((first[word].at, first[word].used) for word in PARTS[1:-1])]
                moments.append((going.at, going.used))
                parts = {
                    name: (after[0] - before[0], after[1] - before[1])
                    for name, before, after in zip(PARTS, moments, moments[1:], strict=False)
                }
                self.restarts.append({**parts, "in all": (going.at - at, going.used)})
                return
            time.sleep(0.005)

    def summary(self, rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
        """One row for all runs."""
        parts = {
            name: [round(statistics.median(each[name][place] for each in self.restarts), 2) for place in range(2)]
            for name in (*PARTS, "in all")
            if self.restarts
        }
        return {
            "kills": self.phases.total(),
            "runs": len(rows),
            "lost": sum(row["exit"] != 0 for row in rows),
            "same": sum(row["same"] for row in rows),
            "by phase": dict(self.phases.most_common()),
            "by rank": {"0": self.ranks[0], "others": self.ranks.total() - self.ranks[0]},
            "after the end, not counted": self.late,
            "restarts timed": len(self.restarts),
            "a restart, medians of seconds and of processor seconds of rank 0": parts,
            "answers read after a restart": self.read,
            "minutes": round(seconds / 60, 1),
            "load": os.getloadavg()[1],
            "workers": self.workers,
            "processes left behind": len(mentioning(str(self.root))),
        }


def kills(
    wanted: int, workers: int, seconds: float, environment: dict[str, str], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Kill until `wanted` kills are made, or the seconds are over; every run gives a row, and all of them a summary."""
    began, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="secateurs-kills-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no worker is left behind
    killer = Killer(wanted, workers, began + seconds, root, environment)
    rows = list[dict[str, Any]]()
    try:
        wholes = {kind: killer.whole(kind) for kind in KINDS}
        while killer.phases.total() < wanted and time.monotonic() < killer.until:
            kind = KINDS[len(rows) % len(KINDS)]
            rows.append(killer.run(len(rows), kind, *wholes[kind]))
            keep(rows[-1])
        found = killer.summary(rows, time.monotonic() - began)
        keep(found)
        return found
    finally:
        shutil.rmtree(root, ignore_errors=True)
