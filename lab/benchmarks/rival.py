"""Torch-Pruning on the same networks: which filters it removes, how long it takes, and whether the result is right.

It is installed into an environment of its own, laid over ours: it is never a dependency.
"""

from __future__ import annotations

import copy
import site
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
VERSION = "1.6.1"
FOLDER = ".venv-bench"


@dataclass(frozen=True)
class Pruned:
    """A network that Torch-Pruning cut, and what it says it removed."""

    network: nn.Module
    removed: dict[str, list[int]]  # BatchNorm layer: channels
    seconds: float


def torch_pruning() -> Any:
    """The package, installed first where it is missing."""
    if find_spec("torch_pruning") is None:
        subprocess.run([ROOT / "tools" / "layered_env.sh", FOLDER, f"torch-pruning=={VERSION}"], check=True)
        for packages in (ROOT / FOLDER).glob("lib/python*/site-packages"):
            site.addsitedir(str(packages))
    import torch_pruning

    return torch_pruning


def prune_half(model: nn.Module, x: Tensor) -> Pruned:
    """Let Torch-Pruning remove half of the filters everywhere, least magnitude first, from a copy of `model`."""
    tp = torch_pruning()
    network = copy.deepcopy(model).eval()
    names = {module: name for name, module in network.named_modules()}
    removed: dict[str, list[int]] = {}
    start = perf_counter()
    pruner = tp.pruner.MagnitudePruner(
        network,
        x,
        importance=tp.importance.MagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=[network.linear],
    )
    for group in pruner.step(interactive=True):
        for dependency, channels in group:
            layer = dependency.target.module
            if isinstance(layer, nn.BatchNorm2d) and dependency.handler == tp.prune_batchnorm_out_channels:
                removed[names[layer]] = sorted({*removed.get(names[layer], []), *channels})
        group.prune()
    return Pruned(network, removed, perf_counter() - start)


def zeroed(model: nn.Module, removed: dict[str, list[int]]) -> nn.Module:
    """A copy of `model` whose removed channels are zero behind every BatchNorm: what a right cut must compute."""
    network = copy.deepcopy(model).eval()
    for name, channels in removed.items():
        norm = network.get_submodule(name)
        with torch.no_grad():
            norm.weight[channels] = 0
            norm.bias[channels] = 0
    return network
