"""What is asked of a ranking: the estimator, how many masks and examples, when to stop. The paper's way and the fast one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from secateurs.errors import InvalidInput, suggest
from secateurs.importance import Transform
from secateurs.masks import Design

Estimator = Literal["losses", "gradient"]
Model = Literal["linear", "pairs"]

MOST_PAIRS = 16_384  # of masks and examples, unless told: a slope tells of all filters at once, so wide layers need no more


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How filters are ranked. `masks` and `masks_per_filter` bound the number of masks; `adaptive` may stop before it."""

    estimator: Estimator = "gradient"  # the linear model from losses at masks, or from their slopes along the masks
    adaptive: bool = True  # stop when the set of the least important filters is settled
    agreement: float = 0.85  # of resampled sets with it, beyond chance, that counts as settled
    masks_per_filter: int = 256
    masks: int | None = None  # so many at every site, whatever its width
    examples: int | Literal["all"] | None = None  # None: as many as the noise asks for
    off: float = 0.3  # share of a site's filters that a mask switches off (the paper's P)
    design: Design = "exact"
    transform: Transform = "linear"  # of losses; slopes are those of the loss itself
    model: Model = "linear"
    ridge: float = 0.0

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise InvalidInput(f"{name}: got {getattr(self, name)!r}.{suggest(str(getattr(self, name)), get_args(kind))}")
        if self.estimator == "gradient" and (self.model, self.transform, self.ridge) != ("linear", "linear", 0.0):
            raise InvalidInput(
                f"estimator 'gradient' fits the linear model to slopes of the loss: model={self.model!r}, "
                f"transform={self.transform!r}, ridge={self.ridge:g} belong to estimator='losses'."
            )
        if self.examples is not None and self.examples != "all" and self.examples < 2:
            raise InvalidInput(
                f"examples: got {self.examples}, wanted 2 or more, 'all', or None: as many as the noise asks for."
            )
        if not 0 < self.agreement <= 1:
            raise InvalidInput(f"agreement: got {self.agreement}, wanted a share above 0 and up to 1.")
        if self.masks_per_filter < 1 or (self.masks is not None and self.masks < 4):
            raise InvalidInput(
                f"masks_per_filter: got {self.masks_per_filter}, wanted 1 or more; masks: got {self.masks}, wanted 4 or more."
            )

    def bound(self, channels: int) -> int:
        """The most masks that a site with so many filters gets."""
        if self.masks is not None:
            return self.masks
        masks = self.masks_per_filter * channels
        return min(masks, MOST_PAIRS) if self.estimator == "gradient" else masks


_CHOICES = {"estimator": Estimator, "design": Design, "transform": Transform, "model": Model}

PAPER = Scoring(estimator="losses", adaptive=False, masks_per_filter=10, examples="all")
FAST = Scoring()
PRESETS = {"paper": PAPER, "fast": FAST}
