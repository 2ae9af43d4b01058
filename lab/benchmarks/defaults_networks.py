"""The networks of `benchmarks.defaults`, trained, with their loaders; from the cheapest to the dearest.

Those without public weights are trained here, for a minute of one core at most, with a seed, and kept under runs/defaults.
Those of timm need timm: `make test-integrations` makes an environment that has it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from secateurs.cli.inputs import PUBLIC, Origin, build_model, load_data
from secateurs.data import load, subset
from secateurs.data.dataset import Examples
from secateurs.models import build

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "runs" / "defaults"
BATCH = 64  # of the loaders, at which time counts
TRAIN, VALIDATION, TEST = 10_000, 5_000, 5_000  # images at most
SIZE = 224  # pixels of the networks of timm
FEW = {"train": 192, "validation": 96, "test": 64}  # images of that size


class NotInstalled(Exception):
    """A network's package is not there."""


class Loaders(NamedTuple):
    """What the call takes: training, validation and test."""

    train: DataLoader[Any]
    val: DataLoader[Any]
    test: DataLoader[Any]


@dataclass(frozen=True)
class Subject:
    """A network with weights, its loaders, and what the call takes besides them."""

    name: str
    kind: str  # "digits", "mnist", "cifar10", "224 pixels"
    build: Callable[[], nn.Module]  # untrained
    loaders: Callable[[], Loaders]
    trained: Callable[[nn.Module, Loaders], nn.Module]  # gives it its weights, in place
    max_drop: float = 0.01
    options: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # of the call

    def ready(self) -> tuple[nn.Module, Loaders]:
        """The network with its weights, and loaders; trained once."""
        model, path = self.build(), RUNS / f"{self.name}-dense.safetensors"
        if path.exists():
            model.load_state_dict(load_file(path))
            model.eval()
        loaders = self.loaders()
        if not path.exists():
            torch.manual_seed(0)
            self.trained(model, loaders)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
        return model.eval(), loaders if self.kind != "224 pixels" else with_answers(model.eval(), loaders)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A network whose first weights do not depend on what ran before."""
    torch.manual_seed(0)
    return make()


def loader(*tensors: Tensor, shuffled: bool = False) -> DataLoader[Any]:
    """Batches of the tensors."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(*tensors), batch_size=BATCH, shuffle=shuffled, generator=generator)


def loaders_of(parts: tuple[Examples, Examples, Examples], change: Callable[..., Any] | None = None) -> Loaders:
    """Loaders of the parts, of large ones of as many examples as enough; `change(images, labels)` makes others of them."""
    found = []
    for part, most in zip(parts, (TRAIN, VALIDATION, TEST), strict=True):
        images, labels = (part if len(part) <= most else subset(part, most, seed=0)).batch(slice(None))
        found.append(loader(*((images, labels) if change is None else change(images, labels))))
    return Loaders(*found)


def parts_of(data: str, change: Callable[..., Any] | None = None) -> Loaders:
    """Loaders of a data set that is called by its name."""
    found = load(data)
    return loaders_of((found.train, found.search, found.test_set), change)


def public(name: str) -> Subject:
    """A CIFAR-10 ResNet with public weights; its loaders are those that these weights have not seen."""
    origin = Origin(name, "cifar10", weights=PUBLIC).settled()

    def parts() -> Loaders:
        data = load_data(origin)
        return loaders_of((data.train, data.search, data.test_set))

    return Subject(name, "cifar10", lambda: build_model(origin), parts, lambda model, _: model)


def train(model: nn.Module, loaders: Loaders, *, epochs: int, lr: float = 0.01) -> nn.Module:
    """Train in place, by AdamW with one cycle of the learning rate."""
    batches = loader(*loaders.train.dataset.tensors, shuffled=True)  # type: ignore[attr-defined]
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=lr, total_steps=epochs * len(batches))
    model.train()
    for _ in range(epochs):
        for inputs, targets in batches:
            optimiser.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimiser.step()
            schedule.step()
    return model


# ---- the networks of the pages ---------------------------------------------------------------------------------------------


def readme_network() -> nn.Module:
    """The network that README's test prunes."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(384, 10),
    )


def tutorial() -> ModuleType:
    """mynet.py of docs/tutorial.md, as a module of that name."""
    if "mynet" not in sys.modules:
        found = ModuleType("mynet")
        exec(_blocks()[0], found.__dict__)
        sys.modules["mynet"] = found
    return sys.modules["mynet"]


def train_as_the_tutorial(model: nn.Module, _: Loaders) -> nn.Module:
    """Run the tutorial's training, and take the weights that it saves."""
    RUNS.mkdir(parents=True, exist_ok=True)
    tutorial()
    with chdir(RUNS):
        exec(_blocks()[1], {})
        model.load_state_dict(torch.load("mynet.pt", weights_only=True))
    return model


def _blocks() -> list[str]:
    """The tutorial's Python."""
    return re.findall(r"^```python.*?\n(.*?)^```$", (ROOT / "docs" / "tutorial.md").read_text(), re.M | re.S)


# ---- small ones ------------------------------------------------------------------------------------------------------------


class RowReader(nn.Module):
    """An LSTM over the rows of an image: (N, 1, 8, 8) → logits."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, hidden, num_layers=2, batch_first=True)
        self.answer = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows, _ = self.lstm(x.squeeze(1))
        logits: Tensor = self.answer(rows[:, -1])
        return logits


class Block(nn.Module):
    """Attention and two linear layers, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, _ = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).reshape(n, tokens, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, -1)
        x = x + self.project(mixed)
        total: Tensor = x + self.mlp(self.norm2(x))
        return total


class SmallViT(nn.Module):
    """Patches of 2×2 pixels, four blocks, mean over the patches: (N, 1, 8, 8) → logits."""

    def __init__(self, width: int = 64, blocks: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.place = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.answer = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.place
        logits: Tensor = self.answer(self.norm(self.blocks(x)).mean(1))
        return logits


def strokes(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy images, and for each pixel whether it is background, or the stroke of an even or odd digit."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(len(images)))
    stroke = images[:, 0] > images.mean()
    return images + 0.3 * images.std() * noise, torch.where(stroke, 1 + labels[:, None, None] % 2, 0)


# ---- 224 pixels ------------------------------------------------------------------------------------------------------------


def timm_network(name: str) -> nn.Module:
    """A network of timm with random weights that do something: no branch begins at zero."""
    try:
        import timm
    except ImportError as error:
        raise NotInstalled(
            "it is a network of timm, which is not installed here. `make test-integrations` makes an environment that has it; "
            f"run this there: .venv-integrations/bin/python -m benchmarks.defaults --networks {name}"
        ) from error
    model = timm.create_model(name, pretrained=False)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("gamma") or (key.endswith("weight") and not parameter.any()):
                parameter.fill_(1.0)
    return model


def pictures() -> Loaders:
    """Smooth noise of 224×224 pixels."""
    generator, found = torch.Generator().manual_seed(0), []
    for count in FEW.values():
        coarse = torch.randn(count, 3, 14, 14, generator=generator)
        fine = torch.randn(count, 3, SIZE, SIZE, generator=generator)
        found.append(loader(functional.interpolate(coarse, SIZE, mode="bicubic") + 0.3 * fine))
    return Loaders(*found)


def calibrated(model: nn.Module, loaders: Loaders) -> nn.Module:
    """Give BatchNorms the statistics of the pictures, and the last layer biases that make the mean of the outputs zero."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    with torch.no_grad():
        model.train()
        for (images,) in loaders.train:
            model(images)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.eval()
        mean = torch.cat([model(images) for (images,) in loaders.train]).mean(0)
        model.get_classifier().bias.sub_(mean)  # type: ignore[operator, union-attr]
    return model


def with_answers(model: nn.Module, loaders: Loaders) -> Loaders:
    """The pictures, with the network's own outputs as targets."""
    with torch.no_grad():
        answered = [
            (torch.cat([images for (images,) in part]), torch.cat([model(images) for (images,) in part])) for part in loaders
        ]
    return Loaders(*(loader(*each) for each in answered))


def divergence(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error of each example, as a share of what the targets vary by."""
    return (outputs - targets).square().sum(1) / targets.square().sum(1).mean()


def agreement(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 for the outputs of the dense network, less for others."""
    return 1 - divergence(outputs, targets)


def _small(name: str, kind: str, make: Callable[[], nn.Module], change: Any = None, **settings: Any) -> Subject:
    return Subject(name, kind, partial(seeded, make), partial(parts_of, kind, change), partial(train, **settings))


def _tutorial_loaders() -> Loaders:
    return Loaders(*tutorial().loaders())


_OWN_OUTPUTS = {"loss": divergence, "metric": agreement}
SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(
            *("readme", "digits", partial(seeded, readme_network), partial(parts_of, "digits"), partial(train, epochs=6)),
            max_drop=0.03,
        ),
        Subject(
            *("tutorial", "digits", lambda: tutorial().build(), _tutorial_loaders, train_as_the_tutorial),
            max_drop=0.02,
        ),
        _small("lstm", "digits", RowReader, epochs=15),
        _small("unet", "digits", lambda: build("unet-small", in_channels=1, classes=3), strokes, epochs=8),
        _small("mobilenet-small", "digits", lambda: build("mobilenet-small", in_channels=1), epochs=15),
        _small("densenet-small", "digits", lambda: build("densenet-small", in_channels=1), epochs=10),
        _small("vit", "digits", SmallViT, epochs=20, lr=0.003),
        _small("lenet5", "mnist", lambda: build("lenet5"), epochs=3, lr=0.003),
        _small("resnet8-mnist", "mnist", lambda: build("resnet8", in_channels=1), epochs=1),
        _small("vgg16-quarter", "cifar10", lambda: build("vgg16", width=16), epochs=2),
        *(public(name) for name in ("resnet20", "resnet32", "resnet56")),
        *(
            Subject(
                *(name, "224 pixels", partial(seeded, partial(timm_network, name)), pictures, calibrated),
                max_drop=0.1,
                options=_OWN_OUTPUTS,
            )
            for name in ("mobilenetv2_100", "convnext_atto", "efficientnet_lite0", "resnet18")
        ),
    )
}
"""By name. Where pages say another drop than 0.01 it is theirs; with random weights it is a share of the outputs' variance."""
