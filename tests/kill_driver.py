"""Runs small prunings to their end, then again and again with SIGKILL at random moments; prints what it saw as JSON.

A process of its own: it imports torch once and forks a child for every attempt, so that a kill costs milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from engines import with_known_times
from secateurs import api
from secateurs.api import Pruner, resume
from secateurs.config import GENTLE, Recipe, TrainSettings
from secateurs.scoring.cache import MeasurementCache
from torture.journals import entries_of
from torture.runs import few_digits, perceptron

RECIPE = Recipe.paper(
    max_drop=0.05,
    rounds=2,
    search="bisect",
    masks_per_filter=30,
    scoring_examples=192,
    finetune=TrainSettings(epochs=3, batch=32, lr=0.02),
    retrain=TrainSettings(epochs=6, batch=32, lr=0.02, schedule="step", milestones=(3,)),
)
ALLOCATED = Recipe.fast(
    max_drop=0.1,
    confidence=0.9,
    allocation="global",
    criterion="portfolio",
    repair="least-squares",
    repair_examples=128,
    round_to=1,
    retrain=replace(GENTLE, epochs=4, batch=32, optimiser="adamw", average=0.99),
)
RECIPES = {"paper": RECIPE, "allocated": ALLOCATED}


def attempt(folder: Path, recipe: Recipe) -> None:
    """Start the run, or resume it."""
    data = few_digits(384)
    started = (folder / "checkpoints" / "start.safetensors").exists()
    if not started and folder.exists():  # killed before it could be resumed
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    run = resume(folder, perceptron(seed=1), data) if started else Pruner(perceptron(), data, recipe=recipe, folder=folder)
    run.finish()


def in_child(folder: Path, recipe: Recipe) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            attempt(folder, recipe)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def killed_at(folder: Path, measured_before: int) -> str:
    """The unit of work that was finished last; "masks" if the network was measured under some since."""
    try:
        entries = entries_of(folder)
    except Exception:
        return "nothing"
    last = entries[-1] if entries else {"unit": "nothing"}
    if last["unit"] in ("round", "step", "curve") and measured(folder) > measured_before:
        return "masks"
    return f"{last['unit']} {last.get('phase', '')}".strip()


def measured(folder: Path) -> int:
    """How many values the run's store holds."""
    path = folder / "measured.sqlite"
    return len(MeasurementCache(path)) if path.exists() else 0


def warm_up() -> None:
    """Have everything imported before forking, without running autograd, which does not survive a fork."""
    run = Pruner(perceptron(), few_digits(384), recipe=RECIPE)
    run.graph.module.eval()
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.SGD([weight], lr=0.1).step()


def seen_while_killing(root: Path, wanted: int, recipe: Recipe) -> dict[str, object]:
    began = time.monotonic()
    _, status = os.waitpid(in_child(root / "whole", recipe), 0)
    assert status == 0, "the uninterrupted run failed"
    took = time.monotonic() - began
    chance = random.Random(0)
    kills: list[str] = []
    finished = 0
    while len(kills) < wanted:
        folder = root / f"killed-{finished}"
        while True:
            known = measured(folder)
            pid = in_child(folder, recipe)
            time.sleep(chance.uniform(0.05, 0.6) * took)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert status == 0, f"resuming failed after {kills[-1:]}"
                break
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            kills.append(killed_at(folder, known))
        finished += 1
    return {"kills": kills, "finished": finished, "seconds": took}


def main(root: Path, *wanted: str) -> None:
    """For each 'recipe=number': kill runs of that recipe so many times, in a folder of its name."""
    torch.set_num_threads(1)
    api.engine_for = with_known_times(api.engine_for)
    warm_up()
    counts = {name: int(count) for name, _, count in (each.partition("=") for each in wanted)}
    json.dump({name: seen_while_killing(root / name, count, RECIPES[name]) for name, count in counts.items()}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
