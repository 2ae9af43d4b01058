"""What Torch-Pruning makes of the same ResNet-20, whose shortcuts pad channels: by magnitude and by Taylor, cut globally.

Each network is held against its own masked form, the whole network with the removed filters' outputs set to zero: a right cut
computes the same. Left to itself, the tool also narrows the trunk, where the padded shortcut shifts channels by an offset that
it does not follow. With all layers of the trunk ignored, what is left to cut are the first convolutions of the blocks. Its
OBD-C importance cannot be compared: in this version its preparation raises a TypeError for any group without attention.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.conditions import conditions
from benchmarks.quality_setup import RESULTS, Subject
from benchmarks.rival import VERSION, torch_pruning, zeroed
from secateurs import cost
from secateurs.data import Examples, subset
from secateurs.evaluate import accuracy
from secateurs.files import write_text
from secateurs.models import load_public

RIVALS = RESULTS / "quality_rivals.json"
TARGETS = (0.1, 0.2, 0.3)
GRADIENTS = 512  # training images that Taylor takes slopes on
IMPORTANCES = ("magnitude", "taylor")


@dataclass(frozen=True)
class Rival:
    """One network that Torch-Pruning made. `difference` is the largest from its masked form, over the largest output."""

    importance: str
    layers: str
    macs_removed: float
    search: float
    test: float
    test_of_masked_form: float
    difference: float


def measure_rivals() -> None:
    """Every importance at every target, on all layers and on inner ones."""
    subject = Subject("resnet20")
    model, images = load_public(20), subset(subject.data.train, GRADIENTS, seed=0)
    asked = [(importance, layers, t) for layers in ("all", "inner") for importance in IMPORTANCES for t in TARGETS]
    found = [_rival(subject, model, images, importance, layers, target) for importance, layers, target in asked]
    report = {
        "version": VERSION,
        "conditions": conditions().sentence(),
        "test_before": subject.test(subject.graph).accuracy,
        "rivals": [asdict(rival) for rival in found],
    }
    write_text(RIVALS, json.dumps(report, indent=1) + "\n")


def _rival(subject: Subject, model: nn.Module, images: Examples, importance: str, layers: str, target: float) -> Rival:
    """The smallest cut, to a hundredth of the channels, that removes the target's share of the MACs."""
    low, high = 0, 90
    while high - low > 1:
        middle = (low + high) // 2
        network, _ = _cut(model, images, importance, layers, middle / 100)
        low, high = (low, middle) if _macs_removed(model, network) >= target else (middle, high)
    network, removed = _cut(model, images, importance, layers, high / 100)
    masked = zeroed(model, removed)
    x = images.batch(slice(0, 16)).inputs.double()
    with torch.inference_mode():
        wanted = copy.deepcopy(masked).double()(x)
        difference = float((copy.deepcopy(network).double()(x) - wanted).abs().max() / wanted.abs().max())
    data = subject.data
    return Rival(
        importance,
        layers,
        _macs_removed(model, network),
        accuracy(network, data.search),
        accuracy(network, data.test),
        accuracy(masked, data.test),
        difference,
    )


def _macs_removed(model: nn.Module, network: nn.Module) -> float:
    x = torch.zeros(1, 3, 32, 32)
    return 1 - cost(network, x).macs / cost(model, x).macs


def _cut(
    model: nn.Module, images: Examples, importance: str, layers: str, ratio: float
) -> tuple[nn.Module, dict[str, list[int]]]:
    """A copy cut by Torch-Pruning, and the channels that it says it removed behind every BatchNorm."""
    tp = torch_pruning()
    network = copy.deepcopy(model).eval()
    names = {module: name for name, module in network.named_modules()}
    ignored = [layer for layer, name in names.items() if name == "linear" or (layers == "inner" and _in_trunk(name))]
    pruner = tp.pruner.BasePruner(
        network,
        torch.zeros(2, 3, 32, 32),
        importance=_importance(tp, importance),
        global_pruning=True,
        pruning_ratio=ratio,
        ignored_layers=ignored,
    )
    if importance == "taylor":
        _take_slopes(network, images)
    removed: dict[str, list[int]] = {}
    for group in pruner.step(interactive=True):
        for dependency, channels in group:
            layer = dependency.target.module
            if isinstance(layer, nn.BatchNorm2d) and dependency.handler == tp.prune_batchnorm_out_channels:
                removed[names[layer]] = sorted({*removed.get(names[layer], []), *channels})
        group.prune()
    return network, removed


def _in_trunk(name: str) -> bool:
    """Whether a layer writes into the sums: the first convolution, and the second of every block."""
    return name == "conv1" or name.endswith(".conv2")


def _importance(tp: Any, name: str) -> Any:
    return tp.importance.MagnitudeImportance(p=1) if name == "magnitude" else tp.importance.TaylorImportance()


def _take_slopes(network: nn.Module, images: Examples) -> None:
    """Gradients of the loss, which Taylor reads from the weights."""
    network.zero_grad()
    for inputs, targets in images.batches(64):
        assert isinstance(targets, Tensor)
        loss = functional.cross_entropy(network(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]


def rivals_of(report: dict[str, Any], layers: str) -> Sequence[Rival]:
    return [rival for rival in (Rival(**fields) for fields in report["rivals"]) if rival.layers == layers]
