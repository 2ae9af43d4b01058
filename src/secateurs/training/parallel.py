"""Training on several workers: each has its part of every batch, and all of them end with the same weights.

The gradient is that of the mean over the whole batch, so the batch that was asked for is the one that counts. BatchNorm sees
the statistics of the whole batch, unless it is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from secateurs.data.dataset import Batch
from secateurs.distributed import Workers


def wrapped(module: nn.Module, workers: Workers, place: torch.device) -> nn.Module:
    """The module as it is trained: itself alone, else in DistributedDataParallel, made anew for every network."""
    if workers.size == 1:
        return module
    devices = [place] if place.type == "cuda" else None
    # a traced graph is static; what the loss does not depend on has no gradient, which is found in the first step
    return nn.parallel.DistributedDataParallel(module, device_ids=devices, process_group=workers.group(), static_graph=True)


def own_part(batch: Batch, workers: Workers) -> tuple[Batch, float]:
    """This worker's part of a batch, and the factor that makes the workers' average of its mean that of the whole batch.

    Of a batch with fewer examples than workers, all of them take all.
    """
    if workers.size == 1 or batch.size < workers.size:
        return batch, 1.0
    part = batch.mapped(lambda rows: rows[workers.rank :: workers.size])
    return part, part.size * workers.size / batch.size


def summed(values: Sequence[float], workers: Workers) -> list[float]:
    """The sums of numbers over all workers, in the order of their ranks."""
    if workers.size == 1:
        return list(values)
    own = torch.tensor(values, dtype=torch.float64)
    found = workers.map("sums of an epoch", workers.size, lambda rank: [own], own=[workers.rank])
    return torch.stack([each[0] for each in found]).sum(0).tolist()


@contextmanager
def synchronised(norms: Sequence[nn.Module], workers: Workers) -> Iterator[None]:
    """Inside the block, BatchNorms that train take the mean and variance of the whole batch."""
    if workers.size == 1:
        yield
        return
    for norm in norms:
        norm.forward = MethodType(_forward, norm)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def average_statistics_(module: nn.Module, factor: float, workers: Workers) -> None:
    """Give InstanceNorms that train the running statistics of the whole batch, of which this worker's part counts `factor`.

    They see their part alone, and nothing that a worker computes depends on them: only what it ends with.
    """
    for part in module.modules() if workers.size > 1 else ():
        if isinstance(part, _InstanceNorm) and part.training and part.track_running_stats:
            for own in (part.running_mean, part.running_var):
                assert own is not None
                own.copy_(_summed_tensor(own * (factor / workers.size)))


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all workers, with its gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor) -> Tensor:
        return _summed_tensor(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _summed_tensor(gradient)


def _summed_tensor(own: Tensor) -> Tensor:
    import torch.distributed as dist

    found = own.clone()
    dist.all_reduce(found)
    return found


def _forward(norm: Any, input: Tensor) -> Tensor:  # as BatchNorm's own forward names it
    """BatchNorm over the examples of all workers; torch's own SyncBatchNorm needs a GPU."""
    if not norm.training:
        found: Tensor = type(norm).forward(norm, input)
        return found
    axes, shape = [axis for axis in range(input.ndim) if axis != 1], [1, -1] + [1] * (input.ndim - 2)
    count = input.new_tensor(input.numel() / input.shape[1])
    sums: Tensor = _Sum.apply(torch.cat([input.sum(axes), count[None]]))  # type: ignore[no-untyped-call]  # untyped in torch
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centred = input - mean.view(shape)
    variance: Tensor = _Sum.apply(centred.square().sum(axes)) / total  # type: ignore[no-untyped-call]  # untyped in torch
    if norm.track_running_stats:
        with torch.no_grad():
            norm.num_batches_tracked += 1
            share = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean, share)
            norm.running_var.lerp_(variance * total / (total - 1).clamp_min(1), share)
    scaled = centred * (variance + norm.eps).rsqrt().view(shape)
    return scaled if norm.weight is None else torch.addcmul(norm.bias.view(shape), scaled, norm.weight.view(shape))
