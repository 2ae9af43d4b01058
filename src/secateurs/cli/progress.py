"""Progress of trainings on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from secateurs._util.terminal import percent
from secateurs.report.progress import Display, RunWatcher, Screen, Status, display

if TYPE_CHECKING:
    from secateurs.training import EpochRecord

__all__ = ["Display", "RunWatcher", "Screen", "Status", "TrainWatcher", "display"]


class TrainWatcher:
    """Turns the steps and epochs of a training into what a display shows."""

    def __init__(self, shown: Display, epochs: int, title: str, *, lines: bool = True) -> None:
        self.shown, self.epochs, self.title, self.lines = shown, epochs, title, lines
        self.latest = ""

    def step(self, done: int, total: int) -> None:
        """Show an optimiser step."""
        self.shown.update(Status(self.title, "optimiser steps", done, total, self.latest))

    def epoch(self, record: EpochRecord) -> None:
        """Show a finished epoch."""
        self.latest = f"loss {record.loss:.4f}"
        if record.search_accuracy is not None:
            self.latest += f", accuracy on the validation set {percent(record.search_accuracy, 2)}"
        if self.lines or record.epoch + 1 == self.epochs:
            self.shown.line(f"epoch {record.epoch + 1} of {self.epochs}: {self.latest}, learning rate {record.lr:.3g}")
