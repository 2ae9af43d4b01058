"""Workers as torchrun starts them, without torchrun: forked from one process that has imported torch, each with its rank.

Starting torchrun takes seconds, a fork milliseconds. A process of its own, which prints as JSON what each case gave: autograd
does not survive a fork. No worker outlives its case.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import secateurs.api
import secateurs.pruning.algorithm1
from engines import with_known_times
from secateurs import distributed
from secateurs._util.tensors import digest
from secateurs.config import GENTLE, Recipe, TrainSettings
from secateurs.data import Data
from secateurs.data.dataset import Examples
from secateurs.data.stream import stream_of
from secateurs.distributed.answers import KeptAnswers
from secateurs.errors import InvalidInput
from secateurs.pruning import context, speeds
from secateurs.training import train_
from torture.runs import ResidualNet, few_digits, perceptron

Found = dict[str, Any]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_workers(size: int, work: Callable[[int], Any], *, timeout: float = 30.0, seconds: float = 180.0) -> list[Found]:
    """Call `work(rank)` in `size` processes; gives for each {"value": …} or {"error": message}, or {} if it died.

    `timeout` is how long they wait for one another, `seconds` how long all of them may take.
    """
    port, pids, pipes = free_port(), [], []
    for rank in range(size):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                known = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in {**known, distributed.TIMEOUT: timeout}.items()})
                began = time.monotonic()
                try:
                    found = {"value": work(rank)}
                except Exception as error:
                    found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
                os.write(writing, json.dumps({**found, "seconds": time.monotonic() - began}).encode())
                time.sleep(0.3 if rank == 0 and size > 1 else 0.0)  # it has the store, which others may still read
            finally:
                os._exit(0)
        os.close(writing)
        pids.append(pid)
        pipes.append(reading)
    found, until = list[Found](), time.monotonic() + seconds
    for pipe in pipes:
        os.set_blocking(pipe, False)
        text, ended = b"", False
        while not ended and time.monotonic() < until:
            try:
                piece = os.read(pipe, 1 << 16)
                text, ended = text + piece, piece == b""
            except BlockingIOError:
                time.sleep(0.005)
        os.close(pipe)
        found.append(json.loads(text) if text else {})
    for pid in pids:
        if time.monotonic() >= until:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


# ---- whole runs ----------------------------------------------------------------------------------------------------------

PAPER = Recipe.paper(max_drop=0.05, rounds=1, search="bisect", masks_per_filter=30, scoring_examples=192, batch=64)
FAST = Recipe.fast(max_drop=0.1, confidence=0.9, batch=64)
BEST = Recipe.best(max_drop=0.3, confidence=0.0, repair_examples=200, batch=64, round_to=1)
ENSEMBLES = replace(BEST, criterion="ensemble", estimator="gradient", masks=256)
TRAINED = Recipe.fast(
    max_drop=0.3,
    confidence=0.0,
    criterion="l1",
    finetune=TrainSettings(epochs=1, batch=33, lr=0.02),
    retrain=replace(GENTLE, epochs=1, batch=64, average=0.99),
)


def residual() -> nn.Module:
    torch.manual_seed(0)
    return ResidualNet(8)


def pruned(rank: int, recipe: Recipe, build: Callable[[], nn.Module] = perceptron, folder: str = "", **options: Any) -> Found:
    """Prune a small network on digits."""
    place = Path(folder) if folder else None
    run = secateurs.api.start_or_continue(build(), few_digits(384), recipe=recipe, folder=place, **options)
    result = run.finish()
    weights, orders = dict(result.graph.module.state_dict()), [list(step.removed) for step in result.steps]
    return {"plan": result.graph.plan.to_json(), "weights": digest(weights), "search": repr(result.search), "removed": orders}


def runs_of(recipe: Recipe, build: Callable[[], nn.Module] = perceptron, sizes: tuple[int, ...] = (1, 2, 3)) -> list[Any]:
    return [[one.get("value", one) for one in run_workers(size, partial(pruned, recipe=recipe, build=build))] for size in sizes]


def folders(root: str) -> list[Any]:
    return [run_workers(size, partial(pruned, recipe=ENSEMBLES, build=residual, folder=f"{root}/{size}")) for size in (1, 2)]


# ---- one kind of trouble each --------------------------------------------------------------------------------------------


def mapped(rank: int, work: Callable[[int, int], list[Tensor]], count: int = 12, what: str = "numbers") -> Found:
    mine: list[int] = []

    def one(ticket: int) -> list[Tensor]:
        mine.append(ticket)
        return work(rank, ticket)

    found = distributed.join().map(what, count, one)
    return {"found": [float(each.sum()) for (each,) in found], "mine": mine}


def number(rank: int, ticket: int) -> list[Tensor]:
    return [torch.tensor([ticket, 0.5])]


def large(rank: int, ticket: int) -> list[Tensor]:
    return [torch.full((40_000,), float(ticket))]


def late(rank: int, ticket: int) -> list[Tensor]:
    time.sleep(0.2 if rank else 0.01)
    return number(rank, ticket)


def dies(rank: int, ticket: int) -> list[Tensor]:
    time.sleep(0.02)
    if rank == 1:
        os._exit(9)
    return number(rank, ticket)


def fails_once(rank: int, ticket: int, *, seen: set[int] = set()) -> list[Tensor]:  # noqa: B006  # of this process
    if ticket == 3 and rank not in seen:
        seen.add(rank)
        raise OSError("the disk hiccuped")
    return number(rank, ticket)


def fails(rank: int, ticket: int) -> list[Tensor]:
    if ticket == 3:
        raise OSError("the disk is gone")
    return number(rank, ticket)


def without_memory(rank: int, ticket: int) -> list[Tensor]:
    if ticket == 3:
        raise torch.OutOfMemoryError("a card is full")
    return large(rank, ticket)


def refuses(rank: int, ticket: int) -> list[Tensor]:
    if ticket == 3:
        raise InvalidInput("ticket 3 is wrong")
    return large(rank, ticket)


def elsewhere(rank: int) -> Found:
    return mapped(rank, number, what="losses" if rank else "curves")


def absent(rank: int) -> Found:
    if rank == 1:
        time.sleep(2.5)
        return {}
    return mapped(rank, number)


def other_weights(rank: int) -> Found:
    return pruned(rank, FAST, build=partial(perceptron, seed=rank))


def other_data(rank: int) -> Found:
    data = few_digits(384)
    shifted = Examples(data.train.inputs.flip(0), data.train.targets.flip(0), data.train.scaling)
    with mock.patch(f"{__name__}.few_digits", return_value=Data("digits", shifted if rank else data.train, data.search, None)):
        return pruned(rank, FAST)


def other_recipe(rank: int) -> Found:
    return pruned(rank, replace(FAST, max_drop=0.1 + 0.1 * rank))


def other_version(rank: int) -> Found:
    versions = {"versions": {"secateurs": f"1.{rank}"}, "machine": {"threads": 1}}
    with mock.patch("secateurs.api.environment", return_value=versions):
        return pruned(rank, FAST)


def other_network(rank: int) -> Found:
    """A rank whose network comes to differ on the way."""
    real = secateurs.pruning.algorithm1.Lines.remove

    def remove(self: Any, *given: Any) -> Any:
        found = real(self, *given)
        with torch.no_grad():
            next(iter(self.run.state.graph.module.parameters())).add_(rank)
        return found

    with mock.patch("secateurs.pruning.algorithm1.Lines.remove", remove):
        return pruned(rank, replace(FAST, max_drop=0.9, confidence=0.0))


def told_its_rank(rank: int) -> Found:
    told: list[list[int]] = []

    def finetune(model: nn.Module, *, rank: int, world_size: int) -> None:
        told.append([rank, world_size])

    return {**pruned(rank, replace(FAST, max_drop=0.9, confidence=0.0), finetune=finetune), "told": told}


def trains_apart(rank: int) -> Found:
    def finetune(model: nn.Module) -> None:
        with torch.no_grad():
            next(iter(model.parameters())).add_(rank)

    return pruned(rank, replace(FAST, max_drop=0.9, confidence=0.0), finetune=finetune)


def alone(rank: int) -> Found:
    """Prune in one process of two, as a script may ask for."""
    return pruned(rank, FAST, distributed=False) if rank == 0 else {}


# ---- a worker that is killed, and the restart ----------------------------------------------------------------------------


def kept_numbers(rank: int, folder: Path, dies: bool) -> Found:
    """Tickets whose answers are kept; rank 1 may be killed in its fourth one."""
    workers, mine = distributed.join(), list[int]()
    kept = workers.answers_in(folder)

    def one(ticket: int) -> list[Tensor]:
        time.sleep(0.02)
        if dies and rank == 1 and len(mine) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        mine.append(ticket)
        return number(rank, ticket)

    worth = mock.patch("secateurs.distributed.answers.WORTH_KEEPING", 0.0)
    with worth, workers.active(kept), workers.keeping("some"):
        found = workers.map("numbers", 12, one, names=[f"the number {ticket}" for ticket in range(12)])
    return {"found": [float(each.sum()) for (each,) in found], "mine": mine}


def restarted_tickets(root: str) -> Found:
    """Two workers of which one is killed, a damaged file, and three workers that go on."""
    folder = Path(root) / "numbers"
    first = run_workers(2, partial(kept_numbers, folder=folder, dies=True), timeout=1.5)
    files = sorted(folder.iterdir())
    (folder / "half-written.7.tmp").write_bytes(b"")
    files[0].write_bytes(files[0].read_bytes()[:-1])
    second = run_workers(3, partial(kept_numbers, folder=folder, dies=False))
    return {"first": first, "files": len(files), "second": second, "left": folder.exists()}


def noted_run(rank: int, folder: Path, recipe: Recipe, build: Callable[[], nn.Module], attempt: int, dies_at: int) -> Found:
    """A run that writes down which tickets it computed; rank 1 is killed when it would keep one more than `dies_at`."""
    computed, save = list[str](), KeptAnswers.save

    def noted(self: KeptAnswers, name: str, answer: list[Tensor], seconds: float) -> None:
        if rank == 1 and len(computed) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        computed.append(name)
        save(self, name, answer, 1.0)
        folder.with_suffix(f".{attempt}-{rank}").write_text(json.dumps(computed))
        if rank == 0 and dies_at >= 0:
            time.sleep(1.0)  # so that rank 1 draws the ticket at which it is killed

    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    with mock.patch.object(KeptAnswers, "save", noted):
        return pruned(rank, recipe, build=build, folder=str(folder))


def restarted_run(root: str, name: str, recipe: Recipe, build: Callable[[], nn.Module], dies_at: int) -> Found:
    """A run that is killed in the middle of an exchange and started again, and one that is not killed."""
    killed, whole = Path(root) / f"killed-{name}", Path(root) / f"whole-{name}"
    run = partial(noted_run, recipe=recipe, build=build)
    run_workers(2, partial(run, folder=killed, attempt=0, dies_at=dies_at), timeout=4.0)
    left = len(list((killed / "answers").iterdir()))
    second = run_workers(2, partial(run, folder=killed, attempt=1, dies_at=-1))
    first = run_workers(2, partial(run, folder=whole, attempt=0, dies_at=-1))

    def computed(folder: Path, attempt: int) -> list[str]:
        files = [folder.with_suffix(f".{attempt}-{rank}") for rank in range(2)]
        return [ticket for file in files if file.exists() for ticket in json.loads(file.read_text())]

    return {
        "before": computed(killed, 0),
        "after": computed(killed, 1),
        "whole": computed(whole, 0),
        "left by the kill": left,
        "left": (killed / "answers").exists(),
        "runs": [first, second],
    }


class OtherNorms(nn.Module):
    """InstanceNorm with running statistics, BatchNorm without, and BatchNorm that cannot normalise one example."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
        self.first, self.second = nn.BatchNorm2d(4, track_running_stats=False), nn.BatchNorm1d(6)
        self.hidden, self.last = nn.Linear(4, 6), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = self.hidden(self.first(self.features(x)).relu().mean((2, 3)))
        return self.last(self.second(input=found).relu())


def other_norms() -> nn.Module:
    torch.manual_seed(0)
    return OtherNorms()


def trained(rank: int, build: Callable[[], nn.Module] = residual, singles: bool = False, **settings: Any) -> list[float]:
    """All weights and statistics after a few steps, in float64; `singles`: of a loader whose last batch is one example."""
    asked = TrainSettings(**{"epochs": 1, "batch": 50, "lr": 0.1, "steps": 4, "momentum": 0.9, **settings})
    module, examples = build().double(), few_digits(384).train.ready(torch.float64)
    teacher = perceptron().double() if asked.distill else None
    given = stream_of(list(examples.take(torch.arange(151)).batches(50)), "train") if singles else examples
    with distributed.join().active():
        train_(module, given, asked, teacher=teacher)
    return [float(value) for tensor in module.state_dict().values() for value in tensor.flatten()]


def cases(root: str) -> dict[str, Callable[[], Any]]:
    short = partial(run_workers, timeout=1.5)
    return {
        "paper": lambda: runs_of(PAPER),
        "fast": lambda: runs_of(FAST, sizes=(1, 2)),
        "best": lambda: runs_of(BEST, residual, sizes=(1, 3)),
        "network": lambda: runs_of(replace(BEST, criterion="ensemble"), residual, sizes=(1, 2)),
        "trained run": lambda: runs_of(TRAINED, residual, sizes=(2,)),
        "folders": lambda: folders(root),
        "training": lambda: [run_workers(size, trained) for size in (1, 2, 3)],
        "frozen": lambda: [run_workers(size, partial(trained, freeze_batchnorm=True)) for size in (1, 2)],
        "mixed": lambda: [run_workers(size, partial(trained, distill=1.0, mixup=1.0)) for size in (1, 2)],
        "other norms": lambda: [run_workers(size, partial(trained, build=other_norms, singles=True)) for size in (1, 2)],
        "number": lambda: run_workers(3, partial(mapped, work=number)),
        "large": lambda: run_workers(3, partial(mapped, work=large)),
        "late": lambda: run_workers(2, partial(mapped, work=late)),
        "dies": lambda: short(2, partial(mapped, work=dies)),
        "fails once": lambda: run_workers(2, partial(mapped, work=fails_once)),
        "fails": lambda: run_workers(2, partial(mapped, work=fails)),
        "memory": lambda: run_workers(2, partial(mapped, work=without_memory)),
        "refuses": lambda: run_workers(2, partial(mapped, work=refuses)),
        "elsewhere": lambda: run_workers(2, elsewhere),
        "absent": lambda: short(2, absent),
        "other weights": lambda: run_workers(2, other_weights),
        "other data": lambda: run_workers(2, other_data),
        "other recipe": lambda: run_workers(2, other_recipe),
        "other version": lambda: run_workers(2, other_version),
        "other network": lambda: run_workers(3, other_network),
        "restarted tickets": lambda: restarted_tickets(root),
        "restarted curves": lambda: restarted_run(root, "curves", ENSEMBLES, residual, 1),
        "restarted masks": lambda: restarted_run(root, "masks", PAPER, perceptron, 7),
        "told its rank": lambda: run_workers(2, told_its_rank),
        "trains apart": lambda: run_workers(2, trains_apart),
        "alone": lambda: run_workers(2, alone),
    }


def main(root: str, *chosen: str) -> None:
    torch.set_num_threads(1)
    speeds.FINAL_ROUNDS = (6, 6)
    secateurs.api.engine_for = with_known_times(secateurs.api.engine_for)
    context.preferred_multiple = lambda *given: 8
    few_digits(384)
    if {"training", "trained run", "frozen", "mixed", "other norms"} & set(chosen):
        importlib.import_module("torch._dynamo")  # as DistributedDataParallel does, in every worker
    every, found = cases(root), {}
    for name in chosen or every:
        began = time.monotonic()
        found[name] = every[name]()
        sys.stderr.write(f"{name}: {time.monotonic() - began:.2f} s\n")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
