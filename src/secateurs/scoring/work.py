"""The work at one site: what is asked for, where, and of which examples; and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from secateurs.data.examples import Examples, class_labels
from secateurs.data.seeding import derive, generator_for
from secateurs.data.splits import stratified_order, subset
from secateurs.ensemble import Ensemble
from secateurs.importance import Importance, PairImportance
from secateurs.masks import sample_masks
from secateurs.measuring import Bench
from secateurs.scoring.settings import Scoring

OnScored = Callable[[int, int], None]

ROUNDS = 16  # an ensemble comes in at most so many
PILOT = 256  # examples by which the noise is judged


@dataclass(frozen=True, eq=False)
class Scored:
    """How the filters of a site rank, and what that took."""

    importance: Importance | PairImportance
    ensemble: Ensemble  # by slopes, every loss is that of one example under its own mask
    used: int  # masks
    bound: int
    stable: bool | None  # None: it was not asked
    examples: int

    @property
    def note(self) -> str:
        """Such as "stable after 212 of 640 masks"."""
        if self.stable is None:
            return f"{self.used:,} masks"
        return f"{'stable' if self.stable else 'not stable'} after {self.used:,} of {self.bound:,} masks"


@dataclass(frozen=True)
class Work:
    """What is asked for, where, and of which examples."""

    bench: Bench
    pool: Examples
    scoring: Scoring
    seed: int
    step: int
    on_scored: OnScored

    @property
    def channels(self) -> int:
        """Filters at the site."""
        return self.bench.site.channels

    @property
    def bound(self) -> int:
        """The most masks that it gets."""
        return self.scoring.bound(self.channels)

    def masks(self, count: int, *purpose: int, after: Tensor | None = None) -> Tensor:
        """So many masks (count, C), drawn for this purpose alone; `after` those drawn before."""
        generator = generator_for(self.seed, "masks", self.step, *purpose)
        scoring = self.scoring
        return sample_masks(self.channels, count, off=scoring.off, design=scoring.design, generator=generator, after=after)

    def chosen(self, count: int) -> Examples:
        """So many of the pool, every class in its share; fewer are part of more."""
        if count >= len(self.pool):
            return self.pool
        return subset(self.pool, count, seed=derive(self.seed, "scoring"))

    def order(self) -> Tensor:
        """Row numbers of the pool in the order in which examples are used: every prefix has each class in its share."""
        generator = generator_for(derive(self.seed, "scoring"), "subset")
        labels, wanted = class_labels(self.pool.targets), self.scoring.examples
        if labels is None:
            order = torch.randperm(len(self.pool), generator=generator)
        else:
            order = stratified_order(labels.cpu(), generator)
        return order[:wanted] if isinstance(wanted, int) else order

    def told(self, before: int, done: int) -> None:
        """Report so many masks more than `before`."""
        self.on_scored(before + done, self.bound)

    def resampling(self, *purpose: int) -> torch.Generator:
        """What the bootstrap draws by."""
        return generator_for(self.seed, "resample", self.step, *purpose)
