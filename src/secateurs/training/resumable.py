"""Training that survives a crash: a checkpoint and a journal entry after every epoch, and the same weights in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from secateurs._util.journal import Journal
from secateurs.config import TrainSettings
from secateurs.data.dataset import Examples, derive
from secateurs.data.stream import Stream
from secateurs.training.loop import find_rate, train_
from secateurs.training.state import EpochRecord, History, RateTrials, StateMeta, TrainState, packed

CHECKPOINT = "checkpoints/training"


def seeded_for(settings: TrainSettings, seed: int, *purpose: str | int) -> TrainSettings:
    """The settings for one training of a run: its seed is made of the run's, the purpose, and the one asked for, if not 0."""
    return replace(settings, seed=derive(seed, *purpose, *([settings.seed] if settings.seed else [])))


def train_resumably_(
    journal: Journal,
    module: nn.Module,
    examples: Examples | Stream,
    settings: TrainSettings,
    *,
    phase: str = "train",
    step: int = 0,
    after_epoch: Callable[[list[EpochRecord]], None] | None = None,
    **options: Any,
) -> History:
    """Train as `train_` does (`options` are its own), resumed from the checkpoint of the same phase and step if there is one.

    The rate that "auto" stands for is journaled before the training begins, and not looked for again.

    `after_epoch` may change the weights after every epoch, before they are saved: training continues from what it leaves,
    with the momentum unchanged.
    """
    if settings.lr == "auto":
        names = ("held_out", "teacher", "features", "loss_fn", "penalty", "device", "momentum")
        own = {name: options[name] for name in names if name in options}
        trials = journal.once(
            RateTrials,
            lambda: replace(find_rate(module, examples, settings, **own), phase=phase, step=step),
            phase=phase,
            step=step,
        )
        settings = replace(settings, lr=trials.lr)
    found = journal.load_tensors(CHECKPOINT, StateMeta)
    resumed = TrainState(*found) if found and (found[1]["phase"], found[1]["step"]) == (phase, step) else None
    if resumed is not None:  # killed between the checkpoint and its line in the journal
        _journal_epochs(journal, resumed, phase, step)

    def save(state: TrainState) -> None:
        if after_epoch is not None:
            after_epoch(state.records())
            state = replace(state, tensors={**state.tensors, **packed(module, {})})
        journal.save_tensors(CHECKPOINT, state.tensors, {**state.meta, "phase": phase, "step": step})
        _journal_epochs(journal, state, phase, step)

    return train_(module, examples, settings, resume=resumed, save=save, **options)


def _journal_epochs(journal: Journal, state: TrainState, phase: str, step: int) -> None:
    """Append the epochs that the checkpoint holds and the journal does not."""
    known = len(journal.of(EpochRecord, phase=phase, step=step))
    for record in state.records()[known:]:
        journal.append(replace(record, phase=phase, step=step))
