"""BatchNorm statistics measured again, without training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateurs._util.modules import Device, keeping_modes, on_device
from secateurs.data.dataset import Examples, generator_for
from secateurs.errors import InvalidInput
from secateurs.training.state import undone_on_error


def recalibrate_(
    module: nn.Module,
    examples: Examples,
    batches: int | None = None,
    *,
    batch: int = 256,
    device: Device = None,
    seed: int = 0,
) -> None:
    """Replace every BatchNorm's mean and variance by their plain average over `batches` batches (None: all examples).

    Examples come in a seeded order; a last batch that is not full is left out, unless it is the only one. Weights,
    modes, momenta and dropout are untouched; after an error the old statistics are back.
    """
    if batch < 2 or (batches is not None and batches < 1):
        raise InvalidInput(f"recalibration with batch={batch}, batches={batches}: wanted at least 2 examples and 1 batch")
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    if not norms:
        return
    full = max(1, len(examples) // batch)
    order = torch.randperm(len(examples), generator=generator_for(seed, "recalibrate"))
    chosen = order[: (full if batches is None else min(full, batches)) * batch]
    with on_device(module, device) as place, undone_on_error(module), _averaging(module, norms), torch.no_grad():
        for rows in torch.split(chosen, batch):
            module(*examples.batch(rows.to(examples.place), device=place).args)


@contextmanager
def _averaging(module: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Inside the block the norms average their inputs from scratch; all else is in eval mode."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    with keeping_modes(module):
        module.eval()
        for norm in norms:
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked = norm.num_batches_tracked.clone()
            norm.reset_running_stats()
            norm.momentum = None  # torch's way to say: cumulative average
            norm.train()
        try:
            yield
        finally:
            for norm, momentum, tracked in before:
                norm.momentum, norm.num_batches_tracked = momentum, tracked
