"""Losses, metrics and slopes of a network under masks at one site: taken from the cache, or measured and stored in it.

Masks are measured in the same groups whether a run was interrupted or not, and a group is stored as a whole. So results are the
same to the bit, and a repeated run measures nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from secateurs._util.modules import BatchLimit, Device
from secateurs._util.tensors import digest
from secateurs.config import Precision
from secateurs.data.dataset import Examples
from secateurs.distributed import active, pack, unpack
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, cross_entropy, fingerprint
from secateurs.scoring.cache import MeasurementCache, context_of, mask_key
from secateurs.scoring.engine import MaskedNetwork, check_masks, split_for

MASKS_PER_PASS = 32  # measured and stored together: a killed run loses at most as many


@dataclass(frozen=True)
class SiteEvaluator:
    """A network and one of its sites, the measure (a loss or a metric), and how the network is run."""

    graph: Graph
    site: Site
    measure: Measure = cross_entropy
    store: MeasurementCache = field(default_factory=MeasurementCache)
    batch: int = 256
    device: Device = None
    cache_bytes: int | None = None
    weights: Callable[[Tensor], Mapping[str, Tensor]] | None = None  # by mask: tensors in place of the network's, as repairs
    unfolded: tuple[str, ...] = ()  # the modules whose weights those are
    variant: str = ""  # names them, so that values with and without are kept apart
    precision: Precision = "float32"  # of autocast; float32: the network's own
    limit: BatchLimit = field(default_factory=BatchLimit)  # of `batch`

    def on(self, examples: Examples) -> CachedEvaluator:
        """Measure on `examples`."""
        return CachedEvaluator(self, examples.ready(self.dtype))

    def unrepaired(self, measure: Measure) -> SiteEvaluator:
        """The network with its own weights under every mask, and another measure."""
        return replace(self, measure=measure, weights=None, unfolded=(), variant="")

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the network's first floating-point parameter; float32 if it has none."""
        return next((p.dtype for p in self.graph.module.parameters() if p.is_floating_point()), torch.float32)

    @cached_property
    def context(self) -> str:
        """Identifies everything that a value depends on besides the examples and the masks."""
        module = self.graph.module
        weights, structure = digest(dict(module.state_dict())), f"{module.code}{module}"
        variant = self.variant if self.precision == "float32" else f"{self.variant} {self.precision}"
        return context_of(weights, structure, self.site.name, str(self.site.channels), fingerprint(self.measure), variant)


@dataclass(frozen=True)
class CachedEvaluator:
    """A site evaluator with its examples. Nothing is computed before the first value that the cache does not hold."""

    site_evaluator: SiteEvaluator
    examples: Examples
    _splits: dict[int, MaskedNetwork] = field(default_factory=dict)  # by batch: the latest one

    def values(self, masks: Tensor, on_measured: Callable[[int], None] | None = None) -> Tensor:
        """The measure of every example under every mask: masks (M, C) to (M, N); it must give one value for each."""
        at = self.site_evaluator
        return self._by_mask("values", masks, lambda split, few: split.values(few, at.measure, weights=at.weights), on_measured)

    def means(self, masks: Tensor, on_measured: Callable[[int], None] | None = None) -> Tensor:
        """The mean over the examples under every mask: masks (M, C) to (M,) float64."""
        at = self.site_evaluator
        return self._by_mask(
            "means", masks, lambda split, few: split.measure(few, [at.measure], weights=at.weights)[:, 0], on_measured
        )

    def slopes(self, turns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """In every turn, of masks (N, C), the loss of every example n under its own mask n, and its slopes along that mask.

        T turns give losses (T, N) and slopes (T, N, C).
        """
        keys = [hashlib.sha256(mask_key(masks.flatten())).digest() for masks in turns]
        found = torch.stack(
            self._cached(
                "slopes",
                keys,
                lambda split, rows: split.slopes([turns[row] for row in rows], self.site_evaluator.measure),
            )
        )
        return found[..., 0], found[..., 1:]

    def _by_mask(
        self,
        what: str,
        masks: Tensor,
        measure: Callable[[MaskedNetwork, Tensor], Tensor],
        on_measured: Callable[[int], None] | None,
    ) -> Tensor:
        check_masks(masks, self.site_evaluator.site.channels)
        found: list[Tensor] = []
        for group in torch.split(masks, MASKS_PER_PASS):
            keys = [mask_key(mask) for mask in group]
            found += self._cached(what, keys, lambda split, rows, group=group: measure(split, group[rows]))  # type: ignore[misc]
            if on_measured is not None:
                on_measured(len(found))
        return torch.stack(found)

    def _cached(
        self, what: str, keys: list[bytes], measure: Callable[[MaskedNetwork, list[int]], Iterable[Tensor]]
    ) -> list[Tensor]:
        """The value of each key; those of the rows that the cache does not hold are measured and stored together."""
        at, workers = self.site_evaluator, active()
        context, store = context_of(at.context, self._examples_digest, what), at.store
        known = dict(zip(keys, _known(store, context, keys), strict=True))
        missing = [key for key, value in known.items() if value is None]
        if missing:
            dtype = torch.float64 if what == "means" else self._stored_dtype
            rows = [keys.index(key) for key in missing]
            with workers.keeping(f"{context} {hashlib.sha256(b''.join(missing)).hexdigest()}"):
                measured = at.limit.run(at.batch, lambda batch: list(measure(self._split(batch), rows)))
                fresh = [value.cpu().to(dtype) for value in measured]
                if workers.first:
                    store.put(context, missing, fresh)
            known.update(zip(missing, fresh, strict=True))
        return [value for key in keys if (value := known[key]) is not None]

    def _split(self, batch: int) -> MaskedNetwork:
        """The network split at the site, with what it keeps for batches of that size."""
        at = self.site_evaluator
        if batch not in self._splits:
            self._splits.clear()
            self._splits[batch] = split_for(
                at.graph,
                at.site,
                self.examples,
                batch=batch,
                device=at.device,
                cache_bytes=at.cache_bytes,
                unfolded=at.unfolded,
                precision=at.precision,
            )
        return self._splits[batch]

    @property
    def _stored_dtype(self) -> torch.dtype:
        """Precision of stored values: half the space where the network itself computes no finer."""
        return torch.float64 if self.site_evaluator.dtype == torch.float64 else torch.float32

    @cached_property
    def _examples_digest(self) -> str:
        return self.examples.digest()


def _known(store: MeasurementCache, context: str, keys: list[bytes]) -> Sequence[Tensor | None]:
    """What the store holds of each key; of several workers the first looks it up for all."""
    workers = active()
    if workers.size == 1:
        return store.get(context, keys)

    def looked_up() -> bytes:
        found = store.get(context, keys)
        have = [place for place, value in enumerate(found) if value is not None]
        return pack([torch.tensor(have), *(value for value in found if value is not None)]).numpy().tobytes()

    have, *values = unpack(torch.frombuffer(bytearray(workers.shared("stored measurements", looked_up)), dtype=torch.uint8))
    given = dict(zip(have.tolist(), values, strict=True))
    return [given.get(place) for place in range(len(keys))]
