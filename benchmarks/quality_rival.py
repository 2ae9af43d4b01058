"""What Torch-Pruning makes of the same ResNet-20, whose shortcuts pad channels: by magnitude, Taylor and OBD-C, cut globally.

Each network is held against its own masked form, the whole network with the removed filters' outputs set to zero: a right cut
computes the same. Left to itself, the tool also narrows the trunk, where the padded shortcut shifts channels by an offset that
it does not follow. With all layers of the trunk ignored, what is left to cut are the first convolutions of the blocks; OBD-C
cannot do that (it raises a KeyError for layers that are read but ignored).
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
GRADIENTS = 512  # training images that Taylor and OBD-C take slopes on
IMPORTANCES = ("magnitude", "taylor", "obd-c")


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
    """Every importance, on all layers at one size and on inner layers at the targets."""
    subject = Subject("resnet20")
    model, images = load_public(20), subset(subject.data.train, GRADIENTS, seed=0)
    found = [_rival(subject, model, images, importance, "all", TARGETS[0]) for importance in IMPORTANCES]
    found += [_rival(subject, model, images, importance, "inner", t) for importance in IMPORTANCES[:2] for t in TARGETS]
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
    judge = _importance(tp, importance)
    ignored = [layer for layer, name in names.items() if name == "linear" or (layers == "inner" and _in_trunk(name))]
    pruner = tp.pruner.BasePruner(
        network, torch.zeros(2, 3, 32, 32), importance=judge, global_pruning=True, pruning_ratio=ratio, ignored_layers=ignored
    )
    _take_slopes(network, judge, pruner, images, importance)
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
    if name == "magnitude":
        return tp.importance.MagnitudeImportance(p=1)
    return tp.importance.TaylorImportance() if name == "taylor" else tp.importance.OBDCImportance(num_classes=10)


def _take_slopes(network: nn.Module, judge: Any, pruner: Any, images: Examples, importance: str) -> None:
    """Gradients as the tool's own examples take them: of the loss, or of losses of labels drawn from the answers."""
    if importance == "magnitude":
        return
    if importance == "obd-c":
        judge._prepare_model(network, pruner)  # as its own example does: there is no public way
    torch.manual_seed(0)
    network.zero_grad()
    for inputs, targets in images.batches(64):
        logits = network(inputs)
        assert isinstance(targets, Tensor)
        loss = functional.cross_entropy(logits, _drawn(logits) if importance == "obd-c" else targets)
        if importance == "obd-c":
            network.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if importance == "obd-c":
            judge.step()
    if importance == "obd-c":
        judge._rm_hooks(network)


def _drawn(logits: Tensor) -> Tensor:
    return torch.multinomial(functional.softmax(logits.detach(), 1), 1).squeeze(1)


def rivals_of(report: dict[str, Any], layers: str) -> Sequence[Rival]:
    return [rival for rival in (Rival(**fields) for fields in report["rivals"]) if rival.layers == layers]
