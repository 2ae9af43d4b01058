"""Step 4 of 9: takes a site, masks and scoring data, gives the losses of the masked network: an Ensemble.

The network is split at the site. What lies before it is run once for each chunk of examples and kept while memory allows;
only what lies behind is run for every mask. Batching and caching never change a score: each mask meets the same chunks.
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
from secateurs.errors import InvalidMask
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, correct, cross_entropy
from secateurs.scoring.convergence import agreement, has_converged, required_examples, resampled_fits
from secateurs.scoring.engine import MaskedNetwork, split_for
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.scoring.importance import Importance, PairImportance, fit_importance, fit_pairs, scores
from secateurs.scoring.masks import sample_masks


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
    masks_per_pass: int = 32,
    device: Device = None,
    cache_bytes: int | None = None,
    known: Tensor | None = None,
    on_scored: Callable[[int, Tensor], None] | None = None,
) -> Ensemble:
    """Mean loss of the masked network over `examples` for every mask (M, C), True = kept.

    After every `masks_per_pass` masks `on_scored` gets the number of the first one and their losses. Losses already `known`,
    those of the first masks, are not measured again: an interrupted ensemble goes on where it stopped and ends the same.
    """
    check_ensemble(site, masks)
    losses = [] if known is None or len(known) == 0 else [known.double()]
    done = sum(map(len, losses))
    network = split_for(graph, site, examples, batch=batch, device=device, cache_bytes=cache_bytes)
    for start in range(done, len(masks), masks_per_pass):
        found = network.measure(masks[start : start + masks_per_pass], [loss_fn])[:, 0]
        losses.append(found)
        if on_scored is not None:
            on_scored(start, found)
    return Ensemble(site.name, masks, torch.cat(losses))


def accuracy_under(network: MaskedNetwork, keep: Tensor, metric: Measure = correct) -> float:
    """Mean metric of the split network with only the channels in `keep` (C,)."""
    return float(network.measure(keep[None], [metric])[0, 0])


def check_ensemble(site: Site, masks: Tensor) -> None:
    """Refuse masks that are not bool, or not one value for each channel of the site."""
    if masks.dtype != torch.bool or masks.ndim != 2 or masks.shape[1] != site.channels or len(masks) == 0:
        raise InvalidMask(
            f"masks of site {site.name!r}: got {masks.dtype} of shape {tuple(masks.shape)}, wanted bool (M, {site.channels}), "
            f"True = kept. sample_masks({site.channels}, generator=...) draws some."
        )


OnScored = Callable[[int, int], None]

ROUNDS = 16  # an ensemble comes in at most so many
PILOT = 256  # examples by which the noise is judged


@dataclass(frozen=True, eq=False)
class EnsembleResult:
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
class EnsembleJob:
    """What is asked for, where, and of which examples."""

    bench: SiteEvaluator
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


def by_fixed_masks(work: EnsembleJob) -> EnsembleResult:
    """The paper's way: all masks at once, and the mean loss under each."""
    measured = work.bench.on(_examples_for_masks(work), announced=work.bound)
    masks = work.masks(work.bound)
    ensemble = Ensemble(work.bench.site.name, masks, measured.means(masks, partial(work.told, 0)))
    return EnsembleResult(_fit(work.scoring, ensemble), ensemble, len(masks), work.bound, None, len(measured.examples))


def by_rounds(work: EnsembleJob) -> EnsembleResult:
    """Rounds of masks, each balanced with those before it, until the least important filters are the same twice."""
    measured = work.bench.on(_examples_for_masks(work), announced=work.bound)
    agreements: list[float] = []
    masks = torch.empty(0, work.channels, dtype=torch.bool)
    losses = torch.empty(0, len(measured.examples))
    for number in range(ROUNDS):
        count = work.bound * (number + 1) // ROUNDS - len(masks)
        if count == 0:
            continue
        drawn = work.masks(count, number, after=masks)
        losses = torch.cat([losses, measured.values(drawn, partial(work.told, len(masks)))])
        masks = torch.cat([masks, drawn])
        if len(masks) > work.channels + 1:
            agreements.append(_agreement_of_losses(work, masks, losses, number))
        if has_converged(agreements, work.scoring.agreement):
            break
    ensemble = Ensemble(work.bench.site.name, masks, losses.double().mean(1))
    stable = has_converged(agreements, work.scoring.agreement)
    return EnsembleResult(_fit(work.scoring, ensemble), ensemble, len(masks), work.bound, stable, len(measured.examples))


def _agreement_of_losses(work: EnsembleJob, masks: Tensor, losses: Tensor, number: int) -> float:
    """With pairwise terms too it is the linear model that is judged: its order is the main part of theirs."""
    score, ridge = partial(scores, transform=work.scoring.transform), work.scoring.ridge
    coef = fit_importance(masks, score(losses.double().mean(1)), ridge=ridge).coef
    return agreement(coef, resampled_fits(masks, losses, score, ridge=ridge, generator=work.resampling(number)))


def _examples_for_masks(work: EnsembleJob) -> Examples:
    """The examples that all masks share: as many as asked for, or as a pilot of two masks a filter says."""
    wanted = work.scoring.examples
    if wanted is not None:
        return work.pool if wanted == "all" else work.chosen(wanted)
    if len(work.pool) <= PILOT:
        return work.pool
    pilot = work.bench.on(work.chosen(PILOT), announced=work.bound)
    masks = work.masks(max(2 * work.channels, work.channels + 16), ROUNDS)  # a purpose that no round has
    needed = required_examples(masks, pilot.values(masks), final=work.bound)
    return work.chosen(max(needed, PILOT))


def _fit(scoring: Scoring, ensemble: Ensemble) -> Importance | PairImportance:
    """The linear model mask → score (Eq. 3), or the one with pairwise terms."""
    scored = scores(ensemble.losses, scoring.transform)
    if scoring.model == "pairs":
        return fit_pairs(ensemble.masks, scored, ridge=scoring.ridge or 1e-4)
    return fit_importance(ensemble.masks, scored, ridge=scoring.ridge)
