"""How ensembles of masks rank filters: the settings, the paper's, the fast ones, and those of a whole network at once."""

# ruff: noqa: RUF009 - `setting` returns a dataclasses.field
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from secateurs.config.declared import MOST_EXAMPLES, Checked, setting
from secateurs.errors import RecipeError

Transform = Literal["linear", "log", "rank"]
Design = Literal["exact", "bernoulli", "balanced"]
Estimator = Literal["losses", "gradient", "network"]

MOST_PAIRS = 16_384  # of masks and examples, unless `masks` is given: a slope covers all filters, so wide layers need no more

OFF, OFF_IN_NETWORK = 0.3, 0.9
"""Share off that masks have by default: of one site (the paper's P), and of a network, spread over its sites."""

NETWORK_WIDE: dict[str, Any] = {"estimator": "network", "off": OFF_IN_NETWORK}
"""How ensembles rank filters where all sites are ranked in one network."""


@dataclass(frozen=True, kw_only=True)
class EnsembleSettings(Checked):
    """How an ensemble of masks ranks the filters of a site."""

    estimator: Estimator = setting(
        None,
        "Fit the linear model to losses at masks (the paper), or to their slopes along the masks; network: one for each "
        "example, to slopes at masks of all sites at once. By default network where all sites are weighed together and nothing "
        "else is said about ensembles, else gradient.",
        "scoring",
    )
    adaptive: bool = setting(True, "Stop scoring a site when the set of its least important filters is stable.", "scoring")
    masks_per_filter: int = setting(256, "Largest number of masks for each filter of a site.", "scoring", low=1, high=100_000)
    masks: int | None = setting(None, "Number of masks at every site, whatever its width.", "scoring", low=4, high=10_000_000)
    off: float = setting(
        None,
        "Share of a site's filters that a mask switches off, by default 0.3 (the paper's P); estimator network: spread over "
        "all sites, by default 0.9.",
        "scoring",
        above=0,
        below=1,
    )
    design: Design = setting(
        "exact", "How masks are drawn: exactly the share off, each filter by chance, or every filter off equally often."
    )
    transform: Transform = setting("linear", "Transform of the losses before the fit; not for slopes.")
    ridge: float = setting(0.0, "Ridge penalty of the fit.", low=0, high=1e9)

    def __post_init__(self) -> None:
        if self.estimator is None:
            object.__setattr__(self, "estimator", "gradient")
        if self.off is None:
            object.__setattr__(self, "off", OFF_IN_NETWORK if self.estimator == "network" else OFF)
        super().__post_init__()
        if self.estimator == "network" and self.masks is not None:
            raise RecipeError(
                f"masks = {self.masks} with estimator = 'network', where every example has one mask at all sites: set "
                f"scoring_examples."
            )
        if self.estimator != "losses" and (self.transform, self.ridge) != ("linear", 0.0):
            raise RecipeError(
                f"estimator {self.estimator!r} fits the linear model to slopes of the loss: transform={self.transform!r}, "
                f"ridge={self.ridge:g} belong to estimator='losses'."
            )


@dataclass(frozen=True, kw_only=True)
class Scoring(EnsembleSettings):
    """How filters are ranked. `masks` and `masks_per_filter` bound the number of masks; `adaptive` may stop before it."""

    agreement: float = setting(
        0.85, "Share of resampled sets of least important filters that must agree, beyond chance.", above=0, high=1
    )
    examples: int | Literal["all"] | None = setting(
        None, "Number of examples; None: as many as the noise requires.", low=2, high=MOST_EXAMPLES
    )

    def bound(self, channels: int) -> int:
        """Largest number of masks for a site of `channels` filters."""
        if self.masks is not None:
            return self.masks
        masks = self.masks_per_filter * channels
        return min(masks, MOST_PAIRS) if self.estimator == "gradient" else masks


PAPER = Scoring(estimator="losses", adaptive=False, masks_per_filter=10, examples="all")
FAST = Scoring()
