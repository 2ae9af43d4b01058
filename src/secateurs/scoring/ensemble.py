"""Step 4 of 9: takes a site, masks and scoring data, gives the losses of the masked network: an `Ensemble`.

The network is split at the site. What precedes it is run once for each batch of examples and cached while memory allows; only
what follows is run for every mask. Batching and caching never change a score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from secateurs._util.modules import Device
from secateurs.config import Scoring
from secateurs.data.dataset import Examples, class_labels, derive, generator_for
from secateurs.data.splits import stratified_order, subset
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, cross_entropy
from secateurs.scoring.cache import MeasurementCache
from secateurs.scoring.convergence import agreement, has_converged, required_examples, resampled_fits
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import Importance, fit_importance, scores
from secateurs.scoring.masks import sample_masks

ROUNDS = 16  # of masks in an adaptive ensemble, at most
PILOT = 256  # examples from which the noise is estimated

OnScored = Callable[[int, int], None]
"""Called with the number of masks measured so far and the most there may be."""


@dataclass(frozen=True, eq=False)
class Ensemble:
    """All masks drawn for one site, with the losses of the network under each."""

    site: str
    masks: Tensor  # (M, C) bool, True = kept
    losses: Tensor  # (M,) float64, mean over the scoring examples


def score_masks(
    graph: Graph,
    site: Site,
    masks: Tensor,
    examples: Examples,
    *,
    loss_fn: Measure = cross_entropy,
    batch: int = 256,
    device: Device = None,
    cache_bytes: int | None = None,
    store: MeasurementCache | None = None,
    on_scored: Callable[[int], None] | None = None,
) -> Ensemble:
    """Mean loss of the masked network over `examples` for every mask (M, C), True = kept.

    Losses that `store` holds are not measured again: an interrupted call, repeated with the same store, ends the same.
    `on_scored` gets the number of masks done so far.
    """
    evaluator = SiteEvaluator(graph, site, loss_fn, MeasurementCache() if store is None else store, batch, device, cache_bytes)
    return Ensemble(site.name, masks, evaluator.on(examples).means(masks, on_scored))


@dataclass(frozen=True, eq=False)
class EnsembleResult:
    """The fitted model of a site's filters, its ensemble, and the effort behind it."""

    importance: Importance
    ensemble: Ensemble  # by slopes, every loss is that of one example under its own mask
    used: int  # masks
    bound: int
    stable: bool | None  # None: not tested
    examples: int

    @property
    def note(self) -> str:
        """Such as "stable after 212 of 640 masks"."""
        if self.stable is None:
            return f"{self.used:,} masks"
        return f"{'stable' if self.stable else 'not stable'} after {self.used:,} of {self.bound:,} masks"


@dataclass(frozen=True)
class EnsembleJob:
    """One site to be scored: the evaluator, the pool of examples, the settings and the seeds."""

    evaluator: SiteEvaluator
    pool: Examples
    scoring: Scoring
    seed: int
    step: int
    on_scored: OnScored

    @property
    def channels(self) -> int:
        """Filters at the site."""
        return self.evaluator.site.channels

    @property
    def bound(self) -> int:
        """The most masks that may be measured."""
        return self.scoring.bound(self.channels)

    def masks(self, count: int, *purpose: int, after: Tensor | None = None) -> Tensor:
        """Draw `count` masks (count, C) for this purpose alone; `after` those drawn before."""
        generator = generator_for(self.seed, "masks", self.step, *purpose)
        scoring = self.scoring
        return sample_masks(self.channels, count, off=scoring.off, design=scoring.design, generator=generator, after=after)

    def subset(self, count: int) -> Examples:
        """A stratified subset of `count` examples of the pool; smaller subsets are contained in larger ones."""
        return self.pool if count >= len(self.pool) else subset(self.pool, count, seed=derive(self.seed, "scoring"))

    def order(self) -> Tensor:
        """Row numbers of the pool in the order of their use: every prefix is stratified by class."""
        generator = generator_for(derive(self.seed, "scoring"), "subset")
        labels, wanted = class_labels(self.pool.targets), self.scoring.examples
        if labels is None:
            order = torch.randperm(len(self.pool), generator=generator)
        else:
            order = stratified_order(labels.cpu(), generator)
        return order[:wanted] if isinstance(wanted, int) else order

    def report_progress(self, before: int, done: int) -> None:
        """Report that `done` masks are measured besides the `before` of earlier rounds."""
        self.on_scored(before + done, self.bound)

    def bootstrap_generator(self, *purpose: int) -> torch.Generator:
        """Generator of the bootstrap's draws."""
        return generator_for(self.seed, "resample", self.step, *purpose)


def by_fixed_masks(job: EnsembleJob) -> EnsembleResult:
    """The paper's procedure: all masks at once, and the mean loss under each."""
    measured = job.evaluator.on(_shared_examples(job))
    masks = job.masks(job.bound)
    ensemble = Ensemble(job.evaluator.site.name, masks, measured.means(masks, partial(job.report_progress, 0)))
    return EnsembleResult(_fit(job.scoring, ensemble), ensemble, len(masks), job.bound, None, len(measured.examples))


def by_rounds(job: EnsembleJob) -> EnsembleResult:
    """Rounds of masks, each balanced with those before it, until the set of the least important filters is the same twice."""
    measured = job.evaluator.on(_shared_examples(job))
    agreements: list[float] = []
    masks = torch.empty(0, job.channels, dtype=torch.bool)
    losses = torch.empty(0, len(measured.examples))
    for number in range(ROUNDS):
        count = job.bound * (number + 1) // ROUNDS - len(masks)
        if count == 0:
            continue
        drawn = job.masks(count, number, after=masks)
        losses = torch.cat([losses, measured.values(drawn, partial(job.report_progress, len(masks)))])
        masks = torch.cat([masks, drawn])
        if len(masks) > job.channels + 1:
            agreements.append(_agreement(job, masks, losses, number))
        if has_converged(agreements, job.scoring.agreement):
            break
    ensemble = Ensemble(job.evaluator.site.name, masks, losses.double().mean(1))
    stable = has_converged(agreements, job.scoring.agreement)
    return EnsembleResult(_fit(job.scoring, ensemble), ensemble, len(masks), job.bound, stable, len(measured.examples))


def _agreement(job: EnsembleJob, masks: Tensor, losses: Tensor, number: int) -> float:
    """Stability of the linear model."""
    score, ridge = partial(scores, transform=job.scoring.transform), job.scoring.ridge
    coef = fit_importance(masks, score(losses.double().mean(1)), ridge=ridge).coef
    return agreement(coef, resampled_fits(masks, losses, score, ridge=ridge, generator=job.bootstrap_generator(number)))


def _shared_examples(job: EnsembleJob) -> Examples:
    """The examples that all masks share: the number asked for, or as many as a pilot of two masks a filter calls for."""
    wanted = job.scoring.examples
    if wanted is not None:
        return job.pool if wanted == "all" else job.subset(wanted)
    if len(job.pool) <= PILOT:
        return job.pool
    masks = job.masks(max(2 * job.channels, job.channels + 16), ROUNDS)  # a purpose that no round has
    needed = required_examples(masks, job.evaluator.on(job.subset(PILOT)).values(masks), final=job.bound)
    return job.subset(max(needed, PILOT))


def _fit(scoring: Scoring, ensemble: Ensemble) -> Importance:
    """The linear model mask → score (Eq. 3)."""
    return fit_importance(ensemble.masks, scores(ensemble.losses, scoring.transform), ridge=scoring.ridge)
