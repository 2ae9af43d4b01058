"""What Torch-Pruning makes of the same ResNet-20, whose shortcuts pad channels: magnitude, Taylor and OBD-C, cut globally.

Each network is held against its own masked form, the whole network with the removed filters' outputs set to zero: a right cut
computes the same. Left to itself, the tool also narrows the trunk, where the padded shortcut shifts channels by an offset that
it does not follow. With all layers of the trunk ignored, what is left to cut are the first convolutions of the blocks. The
hooks of its OBD-C importance are set here by hand: in this version its own preparation raises a TypeError for any group
without attention. On all layers OBD-C fails even so, where a padded shortcut leaves a part of a layer's channels in a group.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.conditions import conditions
from benchmarks.quality_setup import RESULTS, Subject
from benchmarks.rival import VERSION, torch_pruning, zeroed
from secateurs import cost
from secateurs._util.files import write_text
from secateurs.data import Examples, subset
from secateurs.metrics import accuracy
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
    """Every importance at every target, on all layers and on inner ones."""
    subject = Subject("resnet20")
    images = subset(subject.data.train, GRADIENTS, seed=0)
    informed = [_informed(name, images) for name in IMPORTANCES]
    able = {"all": informed[:2], "inner": informed}
    asked = [(one, layers, target) for layers, ones in able.items() for one in ones for target in TARGETS]
    found = [_rival(subject, images, one, layers, target) for one, layers, target in asked]
    report = {
        "version": VERSION,
        "conditions": conditions().sentence(),
        "test_before": subject.test(subject.graph).accuracy,
        "rivals": [asdict(rival) for rival in found],
    }
    write_text(RIVALS, json.dumps(report, indent=1) + "\n")


@dataclass(frozen=True, eq=False)
class Informed:
    """The network with the slopes that an importance reads, and the importance."""

    name: str
    model: nn.Module
    importance: Any

    def copies(self) -> tuple[nn.Module, Any]:
        """Of both, still belonging together."""
        model, importance = copy.deepcopy((self.model, self.importance))
        for old, new in zip(self.model.parameters(), model.parameters(), strict=True):
            new.grad = None if old.grad is None else old.grad.clone()
        return model, importance


def _informed(name: str, images: Examples) -> Informed:
    tp, model = torch_pruning(), load_public(20).eval()
    if name == "magnitude":
        return Informed(name, model, tp.importance.MagnitudeImportance(p=1))
    if name == "taylor":
        _take_slopes(model, images)
        return Informed(name, model, tp.importance.TaylorImportance())
    importance = tp.importance.OBDCImportance(num_classes=10)
    hooks = []
    for layer in (layer for layer in model.modules() if isinstance(layer, nn.Conv2d)):
        importance.modules.append(layer)
        hooks.append(layer.register_forward_pre_hook(importance._save_input))
        hooks.append(layer.register_full_backward_hook(importance._save_grad_output))
    _take_slopes(model, images, after_batch=importance.step)
    for hook in hooks:
        hook.remove()
    return Informed(name, model, importance)


def _rival(subject: Subject, images: Examples, informed: Informed, layers: str, target: float) -> Rival:
    """The smallest cut, to a hundredth of the channels, that removes the target's share of the MACs."""
    low, high, model = 0, 90, informed.model
    while high - low > 1:
        middle = (low + high) // 2
        network, _ = _cut(informed, layers, middle / 100)
        low, high = (low, middle) if _macs_removed(model, network) >= target else (middle, high)
    network, removed = _cut(informed, layers, high / 100)
    masked = zeroed(model, removed)
    x = images.batch(slice(0, 16)).inputs.double()
    with torch.inference_mode():
        wanted = copy.deepcopy(masked).double()(x)
        difference = float((copy.deepcopy(network).double()(x) - wanted).abs().max() / wanted.abs().max())
    data = subject.data
    return Rival(
        informed.name,
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


def _cut(informed: Informed, layers: str, ratio: float) -> tuple[nn.Module, dict[str, list[int]]]:
    """A copy cut by Torch-Pruning, and the channels that it says it removed behind every BatchNorm."""
    tp = torch_pruning()
    network, importance = informed.copies()
    names = {module: name for name, module in network.named_modules()}
    ignored = [layer for layer, name in names.items() if name == "linear" or (layers == "inner" and _in_trunk(name))]
    pruner = tp.pruner.BasePruner(
        network,
        torch.zeros(2, 3, 32, 32),
        importance=importance,
        global_pruning=True,
        pruning_ratio=ratio,
        ignored_layers=ignored,
    )
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


def _take_slopes(network: nn.Module, images: Examples, after_batch: Callable[[], None] = lambda: None) -> None:
    """Gradients of the loss, which stay with the weights."""
    network.zero_grad()
    for inputs, targets in images.batches(64):
        assert isinstance(targets, Tensor)
        loss = functional.cross_entropy(network(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        after_batch()


def rivals_of(report: dict[str, Any], layers: str) -> Sequence[Rival]:
    return [rival for rival in (Rival(**fields) for fields in report["rivals"]) if rival.layers == layers]
