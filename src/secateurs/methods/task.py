"""What every method of a comparison gets and gives: the same network, data, goal and training for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from secateurs.data.splits import Data
from secateurs.errors import InvalidInput
from secateurs.evaluate import Device, Measure, correct, cross_entropy
from secateurs.graph import Graph
from secateurs.sites import Shortcut
from secateurs.training import TrainSettings


@dataclass(frozen=True)
class Budget:
    """All the training that a method does, no more and no less.

    A method that cuts step by step divides the steps of `between` over its cuts, and does what is left of them after the last
    one; a method that cuts at once does them all straight after the cut. Then `after` follows for everybody.
    """

    name: str
    between: TrainSettings | None = None  # at a constant rate, so that its pieces add up to the whole
    after: TrainSettings | None = None

    def __post_init__(self) -> None:
        if self.between is not None and (self.between.schedule != "constant" or self.between.steps is None):
            raise InvalidInput(
                f"budget {self.name!r}: training between cuts has schedule = {self.between.schedule!r} and "
                f"steps = {self.between.steps}: wanted 'constant' and a number of steps, which the cuts can share"
            )


NO_TRAINING = Budget("none")


@dataclass(frozen=True, eq=False)
class Task:
    """One network to be made smaller. Methods never read the test set."""

    graph: Graph  # trained, and left as it is
    data: Data
    target_macs: float  # share of the MACs that has to go, counted on the compacted network
    budget: Budget = NO_TRAINING
    shortcut: Shortcut = "before"
    seed: int = 0
    loss_fn: Measure = cross_entropy
    metric: Measure = correct
    batch: int = 256  # examples at once outside training
    device: Device = None
    folder: Path | None = None  # where a killed method finds what it had done
    store: Path | None = None  # of measurements that several methods share


@dataclass(frozen=True)
class Trained:
    """What a stretch of training was: the settings in words are the budget's, these are the sums that must be equal."""

    images: int  # training examples seen, each as often as it was
    rate_sum: float  # learning rate times images, added up


@dataclass(frozen=True, eq=False)
class Pruned:
    """What a method gives."""

    graph: Graph  # compacted
    trained: Trained
    passes: int  # images brought through the network to decide what goes (search cost); training is not in it
    search_seconds: float
    training_seconds: float
    note: str = ""  # what the method says of its choice, such as thresholds
