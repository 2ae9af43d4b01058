"""Step 8 of 9: takes a network, examples and settings, gives the network trained in place, and its history.

The only training loop: deterministic, resumable after every epoch, on any device. `resumable` adds the checkpoints.
"""

from __future__ import annotations

from secateurs.config import GENTLE, PAPER_FINETUNE, PAPER_RESNET, PAPER_RETRAIN, TrainSettings
from secateurs.training.guard import KeptWeights, candidates, keep_best_
from secateurs.training.loop import find_rate, train_
from secateurs.training.recalibrate import recalibrate_
from secateurs.training.schedule import learning_rate
from secateurs.training.state import EpochRecord, History, RateTrials, TrainState, carry_momentum, carry_optimizer, restore_

__all__ = [
    "GENTLE",
    "PAPER_FINETUNE",
    "PAPER_RESNET",
    "PAPER_RETRAIN",
    "EpochRecord",
    "History",
    "KeptWeights",
    "RateTrials",
    "TrainSettings",
    "TrainState",
    "candidates",
    "carry_momentum",
    "carry_optimizer",
    "find_rate",
    "keep_best_",
    "learning_rate",
    "recalibrate_",
    "restore_",
    "train_",
]
