"""Step 8 of 9: takes a network, examples and settings, gives the network trained in place, and its history.

The only training loop: deterministic, resumable after every epoch, on any device. `resumable` adds the checkpoints.
"""

from __future__ import annotations

from secateurs.config import PAPER_FINETUNE, PAPER_RESNET, PAPER_RETRAIN, TrainSettings
from secateurs.training.loop import recalibrate_, train_
from secateurs.training.schedule import learning_rate
from secateurs.training.state import EpochRecord, History, TrainState, carry_momentum, carry_optimizer, restore_

__all__ = [
    "PAPER_FINETUNE",
    "PAPER_RESNET",
    "PAPER_RETRAIN",
    "EpochRecord",
    "History",
    "TrainSettings",
    "TrainState",
    "carry_momentum",
    "carry_optimizer",
    "learning_rate",
    "recalibrate_",
    "restore_",
    "train_",
]
