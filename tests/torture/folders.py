"""Damaged run folders: finished and half-finished runs, mutated, then shown, reported and resumed.

A mutated folder must end with the same plan and the same network as the run that was left alone, or be refused by an error of
secateurs in at most 600 characters. Another network or any other exception is a failure. Where the journal was signed again it
may lie, and lead elsewhere, and so may a run that weighs time: then only other exceptions are failures.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from secateurs.api import Pruner, resume
from secateurs.cli.results import show
from secateurs.config import Recipe, TrainSettings
from secateurs.errors import SecateursError
from secateurs.models import build
from secateurs.pruning.results import Progress
from secateurs.report import write_report

from .journals import DIGEST, write_bodies
from .mutations import damaged, edited
from .runs import few_digits, perceptron
from .tally import Tally, Verdict, scratch, tally

CHARACTERS, SECONDS = 600, 120
SHORT = TrainSettings(epochs=2, batch=32, lr=0.02)
TIMED = "timed"  # ends as its own measurements say: another one may end otherwise
RECIPES: dict[str, Recipe] = {
    "paper": Recipe.paper(
        max_drop=0.1, search="bisect", masks_per_filter=4, scoring_examples=48, finetune=SHORT, retrain=replace(SHORT, epochs=3)
    ),
    "rounds": Recipe.fast(round_to=1, max_drop=0.1, confidence=0, criterion="l1", rounds=2, budget="site", finetune=SHORT),
    "allocated": Recipe.fast(
        round_to=1,
        max_drop=0.2,
        confidence=0.8,
        allocation="global",
        engine="none",
        criterion="l1",
        repair="least-squares",
        repair_examples=48,
        retrain=SHORT,
    ),
    TIMED: Recipe.fast(max_drop=0.2, confidence=0, allocation="global", criterion="l1"),
    "fast": Recipe.fast(round_to=1, max_drop=0.2, confidence=0.8, criterion="portfolio", portfolio=("l1", "fpgm")),
}
STOPS = ("after a step", "in training", "in the search", "at the end")


def run(count: int, seed: int, workers: int = 2) -> Tally:
    """Try `count` mutated folders."""
    return tally("folders", case, count, seed, workers=workers, chunk=10)


class Stop(BaseException):
    """Ends a run at once, as Ctrl-C does."""


@cache
def original(name: str, moment: str) -> Path:
    """The folder of a run of a recipe that was left alone: "finished", of "other" weights, or stopped at some moment."""
    folder, recipe = scratch() / name / moment, RECIPES[name]
    if moment in STOPS:
        _stopped(folder, recipe, moment)
    else:
        Pruner(perceptron((8, 6), seed=int(moment == "other")), few_digits(96), recipe=recipe, folder=folder).finish()
    return folder


def _stopped(folder: Path, recipe: Recipe, moment: str) -> None:
    phases = {"in training": ("finetune", "retrain"), "in the search": ("search", "divide"), "at the end": ("retrain",)}
    seen = 0

    def watch(progress: Progress) -> None:
        nonlocal seen
        seen += progress.phase in phases.get(moment, ())
        if seen == 2:
            raise Stop

    taken = Pruner(perceptron((8, 6)), few_digits(96), recipe=recipe, folder=folder, callback=watch)
    with contextlib.suppress(Stop):
        for step in taken:
            if moment == "after a step" and step.removed:
                break
    taken.close()


def case(number: int) -> Verdict:
    """Mutate one folder, then show, report and resume it."""
    rng = Random(number)
    name, moment = rng.choice(list(RECIPES)), rng.choice(("finished", *STOPS))
    folder = scratch() / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original(name, moment), folder)
    mutate = rng.choices(list(MUTATIONS), weights=list(MUTATIONS.values()))[0]
    what = mutate(folder, name, rng)
    lies = mutate is lie or name == TIMED
    outcomes, failures = [], []
    for action in (_show, _report, lambda path: _resume(path, original(name, "finished"), lies=lies)):
        try:
            with _in_time(), contextlib.redirect_stdout(io.StringIO()):
                outcomes.append(action(folder))
        except SecateursError as error:
            outcomes.append("refused")
            if len(str(error)) > CHARACTERS:
                failures.append(f"a message of {len(str(error))} characters: {str(error)[:200]}")
        except Exception as error:
            failures.append(f"{action.__name__}: {type(error).__name__}: {str(error)[:200]}")
            outcomes.append("another exception")
        if outcomes[-1] == "another network":
            failures.append("another network")
    shutil.rmtree(folder, ignore_errors=True)
    failure = f"{name}, {moment}, {what}: {'; '.join(failures)}" if failures else ""
    return Verdict(f"{mutate.__name__}: resume {outcomes[-1]}", failure)


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _show(folder: Path) -> str:
    show(folder)
    show(folder, as_json=True)
    return "shown"


def _report(folder: Path) -> str:
    write_report(folder)
    return "reported"


def _resume(folder: Path, whole: Path, *, lies: bool) -> str:
    taken = resume(folder, build("mlp", hidden=(8, 6)), few_digits(96))
    try:
        taken.finish()
    finally:
        taken.close()
    same = all((folder / name).read_bytes() == (whole / name).read_bytes() for name in ("plan.json", "pruned.safetensors"))
    return "the same" if same else "led elsewhere" if lies else "another network"


# ---- mutations: each changes the folder and says what it did -----------------------------------------------------------


def line(folder: Path, recipe: str, rng: Random) -> str:
    """Lines of the journal edited, swapped, deleted, repeated, cut off, damaged or put in."""
    path = folder / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.choice(("edit", "edit", "swap", "delete", "repeat", "cut", "tail", "damage", "garbage", "torn"))
    if kind == "edit":
        lines[place] = edited(json.loads(lines[place]), rng).encode() + b"\n"
    elif kind == "swap":
        lines[place], lines[other] = lines[other], lines[place]
    elif kind == "delete":
        del lines[place]
    elif kind == "repeat":
        lines.insert(other, lines[place])
    elif kind == "cut":
        del lines[place:]
    elif kind == "tail":
        lines = lines[place:]
    elif kind == "damage":
        lines[place] = damaged(lines[place], rng)
    elif kind == "garbage":
        lines.insert(place, rng.choice((b"\n", b"{}\n", b"garbage\n", b"null\n", b"[" * 99_999 + b"\n", b"\xff\xfe\n")))
    else:
        lines.append(lines[place][: rng.randrange(len(lines[place]))].rstrip(b"\n"))
    path.write_bytes(b"".join(lines))
    return f"journal line {place + 1}: {kind} (and {other + 1})"


def lie(folder: Path, recipe: str, rng: Random) -> str:
    """A field of the journal replaced, and all digests made again."""
    path = folder / "journal.jsonl"
    bodies = [part[:-DIGEST] + b"}" for part in path.read_bytes().splitlines()]
    place = rng.randrange(len(bodies))
    bodies[place] = edited(json.loads(bodies[place]), rng).encode()
    write_bodies(folder, bodies)
    return f"journal line {place + 1} replaced by {bodies[place][:300]!r}, signed"


def any_file(folder: Path, recipe: str, rng: Random) -> str:
    """Any file damaged, emptied, deleted, or replaced: by another one, by that of another run, by that of another moment."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    name, other = rng.choice(files), rng.choice(files)
    kind = rng.choice(("damage", "damage", "empty", "delete", "swap", "copy", "foreign", "foreign", "moment", "moment"))
    path = folder / name
    if kind == "damage":
        path.write_bytes(damaged(path.read_bytes(), rng))
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "delete":
        path.unlink()
    elif kind == "swap":
        one, two = path.read_bytes(), (folder / other).read_bytes()
        path.write_bytes(two)
        (folder / other).write_bytes(one)
    elif kind == "copy":
        path.write_bytes((folder / other).read_bytes())
    else:
        choices = ("other",) if kind == "foreign" else (*STOPS, "finished")
        there = [path for path in (original(recipe, choice) / name for choice in choices) if path.is_file()]
        if not there:
            path.unlink()
            kind = "delete"
        else:
            path.write_bytes(rng.choice(there).read_bytes())
    return f"{name}: {kind} (and {other})"


def what_decides(folder: Path, recipe: str, rng: Random) -> str:
    """Fields of the recipe or of the provenance changed."""
    name = rng.choice(("provenance.json", "provenance.json", "recipe.toml"))
    path = folder / name
    if name == "provenance.json":
        path.write_text(edited(json.loads(path.read_text()), rng))
        return name
    lines = path.read_text().splitlines()
    place = rng.randrange(len(lines))
    key = lines[place].partition("=")[0]
    lines[place] = f"{key} = {rng.choice(('1', '0', 'true', '[]', '[[]]', '0.5', '-3', 'nan', '{}', chr(34) + 'x' + chr(34)))}"
    path.write_text("\n".join(lines))
    return f"{name}: {lines[place]}"


Mutation = Callable[[Path, str, Random], str]
MUTATIONS: dict[Mutation, int] = {line: 4, lie: 3, any_file: 4, what_decides: 1}

if __name__ == "__main__":
    print(run(int(sys.argv[1]), int(sys.argv[2])))
