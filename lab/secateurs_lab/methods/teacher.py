"""A teacher that is asked once: what it answered to a batch is kept for the next training that sees the same batch.

Under one budget and seed all methods train on the same batches, so that a comparison pays for the teacher's answers in one row
instead of in every row. An answer is found by what was asked, to the bit: whatever else differs between two trainings does
not matter.
"""

from __future__ import annotations

import copy
import hashlib
from time import monotonic
from typing import Any, Self

import torch
from torch import Tensor, nn

from secateurs._util.modules import network_digest
from secateurs.scoring.cache import MeasurementCache, context_of

_LARGEST = 1 << 20  # bytes of the answer to one batch; a larger one (of a segmentation, say) is cheaper to compute than to keep
_TAKEN = b" seconds"  # behind the key of an answer: what it took


class RecallingTeacher(nn.Module):
    """Answers as `teacher` does now, in eval mode, from the cache where it holds the answer.

    It has a copy of its own: what is done to the network later changes no answer. `spared` counts the seconds that were saved.
    """

    def __init__(self, teacher: nn.Module, cache: MeasurementCache) -> None:
        super().__init__()
        self.teacher, self.spared = copy.deepcopy(teacher).requires_grad_(False).eval(), 0.0
        self._cache, self._context = cache, context_of("teacher", network_digest(self.teacher))

    def train(self, mode: bool = True) -> Self:
        """A teacher is never trained: eval mode is kept."""
        return super().train(False)

    def forward(self, *inputs: Tensor) -> Any:
        """The teacher's outputs; what is kept is one floating-point tensor, in float32 or float64."""
        key = _key(inputs)
        known, seconds = self._cache.get(self._context, [key, key + _TAKEN])
        if known is not None and seconds is not None:
            self.spared += float(seconds)
            return known.to(inputs[0].device)
        began = monotonic()
        answer = self.teacher(*inputs)
        if not isinstance(answer, Tensor) or not answer.is_floating_point() or answer.nbytes > _LARGEST:
            return answer
        answer = answer.detach().to(torch.promote_types(answer.dtype, torch.float32))  # exact: half precision fits
        taken = torch.tensor(monotonic() - began, dtype=torch.float64)
        self._cache.put(self._context, [key, key + _TAKEN], [answer, taken])
        return answer


def _key(inputs: tuple[Tensor, ...]) -> bytes:
    """All that an answer depends on besides the teacher's weights: the batch, and the precision that it is computed in."""
    sha = hashlib.blake2b(digest_size=32)
    kind = inputs[0].device.type
    sha.update(str(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None).encode())
    for part in inputs:
        sha.update(f"{part.dtype} {tuple(part.shape)}".encode())
        sha.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.digest()
