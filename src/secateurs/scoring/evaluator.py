"""Losses, metrics and slopes of a network under masks at one site: from the store where it has them, else measured and kept.

Masks are measured in the same groups whether a run was interrupted or not, and a group is kept as a whole. So what comes out is
the same to the bit, and a run that is made again measures nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor

from secateurs._util.modules import Device
from secateurs._util.tensors import digest
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph
from secateurs.metrics import Measure, fingerprint
from secateurs.scoring.cache import MeasurementCache, context_of, mask_key
from secateurs.scoring.engine import MaskedNetwork, MaskingStrategy, split_for

MASKS_PER_PASS = 32  # measured and kept together: at most so much is lost when a run is killed

_FORM = b"form"


@dataclass(frozen=True)
class SiteEvaluator:
    """A network and a site of it, what is measured (a loss, a metric), and how and where both are run."""

    graph: Graph
    site: Site
    measure: Measure
    store: MeasurementCache
    batch: int = 256
    device: Device = None
    cache_bytes: int | None = None
    weights: Callable[[Tensor], Mapping[str, Tensor]] | None = None  # by mask: what replaces the network's own, as repairs do
    unfolded: tuple[str, ...] = ()  # the modules whose weights those are
    variant: str = ""  # a name for them, so that what is measured with and without is not mixed up

    def on(self, examples: Examples, *, announced: int = 0) -> CachedEvaluator:
        """This network, to be measured on `examples`, under about so many masks as are `announced`."""
        return CachedEvaluator(self, examples.ready(_dtype_of(self.graph)), announced)

    @cached_property
    def context(self) -> str:
        """All that a value depends on besides the examples and the masks."""
        module = self.graph.module
        weights, structure = digest(dict(module.state_dict())), f"{module.code}{module}"
        return context_of(weights, structure, self.site.name, str(self.site.channels), fingerprint(self.measure), self.variant)


@dataclass(frozen=True)
class CachedEvaluator:
    """A bench with its examples. Nothing is computed before the first value that the store does not have."""

    bench: SiteEvaluator
    examples: Examples
    announced: int = 0

    def values(self, masks: Tensor, on_measured: Callable[[int], None] | None = None) -> Tensor:
        """What the measure says of every example under every mask: masks (M, C) to (M, N); it must give one value for each."""

        def measure(few: Tensor) -> Tensor:
            return self._split.values(few, self.bench.measure, weights=self.bench.weights).to(self._kept)

        return self._by_mask("values", masks, measure, on_measured)

    def means(self, masks: Tensor, on_measured: Callable[[int], None] | None = None) -> Tensor:
        """The mean over the examples under every mask: masks (M, C) to (M,) float64."""

        def measure(few: Tensor) -> Tensor:
            return self._split.measure(few, [self.bench.measure], weights=self.bench.weights)[:, 0]

        return self._by_mask("means", masks, measure, on_measured)

    def slopes(self, turns: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """In every turn, of masks (N, C), the loss of every example n under its own mask n, and its slopes along that mask.

        T turns give losses (T, N) and slopes (T, N, C).
        """
        context, keys = self._context("slopes"), [hashlib.sha256(mask_key(masks.flatten())).digest() for masks in turns]
        known = dict(zip(keys, self.bench.store.get(context, keys), strict=True))
        missing = {key: masks for key, masks in zip(keys, turns, strict=True) if known[key] is None}
        if missing:
            found = self._split.slopes(list(missing.values()), self.bench.measure)
            fresh = [torch.cat([one.losses[:, None], one.slopes], 1).cpu().to(self._kept) for one in found]
            self._keep(context, list(missing), fresh)
            known.update(zip(missing, fresh, strict=True))
        values = torch.stack([value for key in keys if (value := known[key]) is not None])
        return values[..., 0], values[..., 1:]

    def _by_mask(
        self, what: str, masks: Tensor, measure: Callable[[Tensor], Tensor], on_measured: Callable[[int], None] | None
    ) -> Tensor:
        context, store, rows = self._context(what), self.bench.store, []
        for group in torch.split(masks, MASKS_PER_PASS):
            keys = [mask_key(mask) for mask in group]
            known = dict(zip(keys, store.get(context, keys), strict=True))
            missing = [key for key, value in known.items() if value is None]
            if missing:
                found = measure(group[[keys.index(key) for key in missing]]).cpu()
                self._keep(context, missing, list(found))
                known.update(zip(missing, found, strict=True))
            rows += [value for key in keys if (value := known[key]) is not None]
            if on_measured is not None:
                on_measured(len(rows))
        return torch.stack(rows)

    def _keep(self, context: str, keys: list[bytes], values: list[Tensor]) -> None:
        store, form = self.bench.store, self._split.form
        if form is not None and store.get_fields(self.bench.context, _FORM) is None:
            # first, so that no value outlives the form that it was measured in
            store.put_fields(self.bench.context, _FORM, asdict(form))
        store.put(context, keys, values)

    @cached_property
    def _split(self) -> MaskedNetwork:
        bench = self.bench
        kept = bench.store.get_fields(bench.context, _FORM)
        if kept is not None:
            try:
                return self._made(MaskingStrategy(**kept))
            except InvalidInput:
                pass  # it was made on another device, which can do what this one cannot
        return self._made(None)

    def _made(self, form: MaskingStrategy | None) -> MaskedNetwork:
        bench = self.bench
        return split_for(
            bench.graph,
            bench.site,
            self.examples,
            batch=bench.batch,
            device=bench.device,
            cache_bytes=bench.cache_bytes,
            form=form,
            announced=self.announced,
            unfolded=bench.unfolded,
        )

    @property
    def _kept(self) -> torch.dtype:
        """What values are kept as: half the space where the network itself computes no finer."""
        return torch.float64 if _dtype_of(self.bench.graph) == torch.float64 else torch.float32

    def _context(self, what: str) -> str:
        return context_of(self.bench.context, self._examples_digest, what)

    @cached_property
    def _examples_digest(self) -> str:
        return self.examples.digest()


def _dtype_of(graph: Graph) -> torch.dtype:
    """The kind of numbers that the network computes with."""
    return next((p.dtype for p in graph.module.parameters() if p.is_floating_point()), torch.float32)
