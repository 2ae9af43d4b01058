"""A small problem with two inputs, an image and a mask of its pixels: a network, trained, and its data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import secateurs as sc
from secateurs.data import Examples, load_digits
from secateurs.training import train_

RECIPE = sc.Recipe.best(max_drop=0.05, criterion="l1", repair="none", confidence=0.0)
QUICK: dict[str, Any] = {"recipe": RECIPE, "progress": False}


class TwoInputs(nn.Module):
    """An image and a mask of its pixels, which is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU())
        self.mask = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.both = nn.Sequential(nn.Conv2d(14, 12, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.last = nn.Linear(48, 10)

    def forward(self, image: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        found: Tensor = self.last(self.both(torch.cat([self.image(image * mask), self.mask(mask)], 1)) * scale)
        return found


@cache
def sets() -> tuple[Examples, Examples, Examples]:
    """Digits with masks that hide a column, as (image, mask) and label."""
    data = load_digits(search=400, test=200)

    def two(examples: Examples) -> Examples:
        images = examples.ready().inputs
        mask = torch.ones_like(images)
        mask[torch.arange(len(mask)), :, :, torch.arange(len(mask)) % 8] = 0
        return Examples((images, mask), examples.targets)

    return two(data.train), two(data.search), two(data.test_set)


@cache
def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = TwoInputs()
    train_(model, sets()[0], sc.TrainSettings(epochs=6, lr=0.1, batch=64))
    return model.state_dict()


def trained() -> TwoInputs:
    model = TwoInputs()
    model.load_state_dict(weights())
    return model


def right(model: nn.Module, examples: Examples) -> float:
    """Accuracy by hand."""
    with torch.no_grad():
        return float((model.eval()(*examples.inputs).argmax(1) == examples.targets).double().mean())


class Rows(Dataset[Any]):
    """Examples of the two-input problem, in a form of the user's own."""

    def __init__(self, examples: Examples, form: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        self.examples, self.form = examples, form

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> Any:
        images, masks = self.examples.inputs
        assert isinstance(self.examples.targets, Tensor)
        return self.form(images[row], masks[row], self.examples.targets[row])


def loaders(form: Callable[[Tensor, Tensor, Tensor], Any], **options: Any) -> list[DataLoader[Any]]:
    return [DataLoader(Rows(part, form), 64, **options) for part in sets()]


def as_dict(image: Tensor, mask: Tensor, label: Tensor) -> dict[str, Tensor]:
    return {"label": label, "mask": mask, "image": image}
