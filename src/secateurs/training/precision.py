"""Which precision a processor can train in: some report bfloat16 and stop with an illegal instruction when they use it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from secateurs.config import Precision

_PROBE = """
import torch
from torch import nn
net = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 16))
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = net(torch.ones(32, 16, 8, 8)).square().mean()
loss.backward()
raise SystemExit(not bool(torch.isfinite(loss)))
"""
_PATIENCE = 600  # seconds: importing torch on a busy machine


@cache
def bfloat16_works() -> bool:
    """Whether this processor trains a small network in bfloat16; tried once, in a process of its own, which may crash."""
    try:
        # -P: the current folder, which may be a stranger's run, is not where torch is looked up
        done = subprocess.run([sys.executable, "-P", "-c", _PROBE], capture_output=True, check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def usable_precision(wanted: Precision, place: torch.device, weights: Iterable[Tensor] = ()) -> tuple[Precision, str]:
    """The precision to train the weights in, and a note where it is not the one wanted; "float32" leaves theirs as it is."""
    if wanted != "float32" and {weight.dtype for weight in weights} == {torch.float64}:  # which autocast leaves alone
        return "float32", f"a network of float64 cannot compute in {wanted}: trained in float64"
    if wanted != "bfloat16" or place.type != "cpu" or bfloat16_works():
        return wanted, ""
    return "float32", "bfloat16 fails on this processor: trained in float32"
