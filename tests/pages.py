"""Python blocks of a Markdown page, run in order; and the network and loaders that pages speak of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from secateurs.data import load

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block: its language, the file that it is to be saved as, its text and its line."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page that name a language."""
    text = page.read_text()
    return [Block(m[1], m[2] or "", m[3], text[: m.start()].count("\n") + 2) for m in FENCE.finditer(text)]


def run_block(block: Block, page: Path, names: dict[str, Any]) -> None:
    """Run a block with `names`, which grow; tracebacks give the page's own lines."""
    exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)


def digits_loaders() -> list[DataLoader[Any]]:
    """Loaders of real digits for training, validation and test."""
    digits = load("digits")
    parts = (digits.train, digits.search, digits.test)
    return [DataLoader(TensorDataset(*part.batch(slice(None))), batch_size=64) for part in parts]


def build() -> nn.Module:
    """A small network of two convolutions."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(384, 10),
    )


def trained(train: DataLoader[Any]) -> nn.Module:
    """The small network, trained on digits for six epochs."""
    torch.manual_seed(0)
    model = build()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(6):
        for inputs, targets in train:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimiser.step()
    return model.eval()
