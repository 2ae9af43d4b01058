"""What methods share that push filters to zero while training: the penalised stages of a budget, and the cut that follows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from secateurs.compaction import compact
from secateurs.errors import InvalidInput
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.training.objective import Penalty
from secateurs.training.resumable import CHECKPOINT
from secateurs.training.state import StateMeta
from secateurs_lab.methods.base import MethodRun, MethodState, Spent
from secateurs_lab.methods.training import epoch_seconds, train_next, training_stages


def train_penalised(
    run: MethodRun, graph: Graph, penalty: Penalty, after_step: Callable[[], None] | None = None
) -> MethodState:
    """Train with a penalty on top of what the budget minimises, through all its stages before the last, or that one if alone.

    What is trained is not the task's network, so that a killed method resumes from the checkpoint of the training alone.
    """
    stages = training_stages(run.task, len(run.sites))
    last = sum(stage.phase == "finetune" for stage in stages) or len(stages)
    found = run.journal.load_tensors(CHECKPOINT, StateMeta)
    done = min(found[1]["step"], last - 1) if found and last else 0
    seconds = sum(sum(epoch_seconds(run, stage).values()) for stage in range(done))
    state = MethodState(graph, Spent(stages=done, training_seconds=seconds))
    while state.spent.stages < last:
        state = train_next(run, state, after_step=after_step, penalty=penalty)
    return state


def cut_lowest(run: MethodRun, graph: Graph, scores: Mapping[str, Tensor]) -> Graph:
    """Remove the channels with the lowest scores of all sites together, as few as reach the target; each site keeps one.

    `scores` (C,) by site, higher = more important. Nothing is removed if the target is reached.
    """
    if run.reached(graph):
        return graph
    levels = torch.cat([values.double() for values in scores.values()]).unique()  # type: ignore[no-untyped-call]  # untyped in torch

    def masks(level: int) -> dict[str | Site, Tensor]:
        found: dict[str | Site, Tensor] = {}
        for name, values in scores.items():
            keep = values.double() > levels[level]
            keep[int(values.argmax())] = True
            if not bool(keep.all()):
                found[name] = keep
        return found

    def reaches(level: int) -> bool:
        cut = masks(level)
        return bool(cut) and run.reached(compact(graph, cut, verify=False))

    if not reaches(len(levels) - 1):
        raise InvalidInput(f"target_macs = {run.task.target_macs:g}: one filter at every site is still too much.")
    return compact(graph, masks(bisect_left(range(len(levels) - 1), True, key=reaches)))
