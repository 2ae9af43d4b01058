"""A network as Python source, and who writes it.

A `Writer` adds one statement after the other and executes it at once: shapes are those that torch gave, and a statement
that does not run is taken back. Values are never 0 or 1 where that could hide something: every weight, bias, statistic and
buffer is drawn from the network's seed and its own name.
"""

from __future__ import annotations

import math
import operator
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADER = "import math, operator\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
LARGEST = 4096  # elements of a value that others may read; within a block values may be larger


@dataclass(frozen=True)
class Program:
    """A network: statements of `__init__` and `forward`, what it returns, and the shapes of its inputs."""

    parts: tuple[str, ...]
    steps: tuple[str, ...]
    result: str
    inputs: tuple[tuple[int, ...], ...]
    seed: int

    def source(self) -> str:
        """The class as text; the network is called Net."""
        names = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        init = "".join(f"        {part}\n" for part in self.parts)
        body = "".join(f"        {step}\n" for step in self.steps)
        return (
            f"class Net(nn.Module):\n    def __init__(s):\n        super().__init__()\n{init}"
            f"    def forward(s, {names}):\n{body}        return {self.result}\n"
        )

    def build(self, seed: int | None = None) -> nn.Module:
        """The network in float64 and eval mode, its weights drawn from `seed` (by default its own)."""
        space: dict[str, Any] = {"__name__": "generated"}
        exec(HEADER + self.source(), space)
        return randomise_(space["Net"](), self.seed if seed is None else seed)

    def example(self, batch: int | None = None, wider: int = 0, seed: int = 0) -> tuple[Tensor, ...]:
        """Random inputs, of another batch size and with images that are wider by some pixels if asked for."""
        return tuple(
            torch.randn(
                (batch or shape[0], *shape[1:2], *(n + wider for n in shape[2:])),
                generator=torch.Generator().manual_seed(self.seed + 7 * i + 101 * seed),
                dtype=torch.float64,
            )
            for i, shape in enumerate(self.inputs)
        )

    def without_unused(self) -> Program:
        """The same without parts that no statement mentions."""
        text = "\n".join((*self.steps, self.result))
        parts: list[str] = []
        for part in reversed(self.parts):  # a later part may mention an earlier one
            tied = re.fullmatch(r"s\.(\w+)\.weight = .*", part)
            name = tied or re.match(r"s\.register_buffer\('(\w+)'", part) or re.match(r"s\.(\w+) =", part)
            assert name is not None
            if re.search(rf"s\.{name[1]}\b", text) and (not tied or part.split()[-1].split(".")[1] in text):
                parts.append(part)
        return replace(self, parts=tuple(reversed(parts)))


def randomise_(model: nn.Module, seed: int, only: str = "") -> nn.Module:
    """In place: float64, eval, every float tensor drawn from the seed and its name, at a scale that keeps activations at 1.

    `only` leaves all tensors alone whose name does not begin so.
    """
    model.double().eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or not name.startswith(only):
            continue
        generator = torch.Generator().manual_seed(seed * 1000003 + zlib.crc32(name.encode()))
        with torch.no_grad():
            if name.endswith("var") or (tensor.dim() < 2 and name.endswith("weight")):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64))
            else:
                fan = max(tensor[0].numel(), 1) if tensor.dim() > 1 and len(tensor) > 1 else 2
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / fan**0.5)
    return model


class NotFitting(Exception):
    """The statement does not fit the values there are."""


class Writer:
    """Writes a network statement by statement."""

    def __init__(self, seed: int) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.net = nn.Module()
        self.space: dict[str, Any] = {"s": self.net, "torch": torch, "nn": nn, "F": F, "math": math, "operator": operator}
        self.parts: list[str] = []
        self.steps: list[str] = []
        self.values: list[str] = []
        self.number = 0
        self.images = self.draw.choice((0, 1, 2, 2, 2, 2, 2, 2, 3))  # dimensions of an image; 0: vectors
        batch = self.draw.choice((1, 2, 2, 2, 3))
        sizes = {0: (), 1: self.pick((5, 8, 12)), 2: self.pick((4, 5, 6, 7, 8)), 3: self.pick((3, 4))}[self.images]
        size = () if self.images == 0 else (sizes,) * self.images
        if self.images == 2 and self.chance(0.2):
            size = (size[0], size[0] + self.pick((1, 2, 3)))
        shape = (batch, self.pick((1, 2, 3, 3, 4, 6)), *size)
        self.inputs = [shape] * (2 if self.chance(0.12) else 1)
        if len(self.inputs) == 2 and self.chance(0.5):
            self.inputs[1] = (batch, self.pick((2, 3, 4)), *size)
        for i, shape in enumerate(self.inputs):
            self.space[f"x{i}"] = torch.randn(shape, generator=torch.Generator().manual_seed(seed + i), dtype=torch.float64)
            self.values.append(f"x{i}")

    # ---- small choices -----------------------------------------------------------------------------------------------

    def pick(self, options: Any) -> Any:
        return self.draw.choice(list(options))

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def fresh(self, letter: str) -> str:
        self.number += 1
        return f"{letter}{self.number}"

    def shape(self, value: str) -> tuple[int, ...]:
        return tuple(self.space[value].shape)

    def value(self, *ranks: int, least: int = 1, same: tuple[int, ...] | None = None) -> str:
        """A value of one of these ranks with at least that number of channels, most often the newest one that fits."""
        fitting = [v for v in self.values if not ranks or len(self.shape(v)) in ranks]
        fitting = [v for v in fitting if len(self.shape(v)) > 1 and self.shape(v)[1] >= least]
        if same is not None:
            fitting = [v for v in fitting if self.shape(v) == same]
        made = [v for v in fitting if not v.startswith("x")]
        if not fitting:
            raise NotFitting
        if made and self.chance(0.75):
            return made[-1] if self.chance(0.6) else self.pick(made)
        return self.pick(fitting)

    def image(self, least: int = 1) -> str:
        return self.value(3, 4, 5, least=least)

    def channels(self, factor: int = 1) -> int:
        return factor * self.pick((1, 2, 3) if factor > 1 else (1, 2, 3, 4, 5, 6, 8))

    def batch_of(self, value: str) -> str:
        return self.pick((f"{value}.size(0)", f"{value}.shape[0]", f"len({value})" if self.chance(0.1) else f"{value}.size(0)"))

    def made(self) -> list[str]:
        """The values that statements gave, in order."""
        return [v for v in self.values if not v.startswith("x")]

    # ---- statements --------------------------------------------------------------------------------------------------

    def part(self, expression: str, letter: str = "m") -> str:
        name = self.fresh(letter)
        if letter == "b":
            self.statement(f"s.register_buffer('{name}', {expression})")
        else:
            self.statement(f"s.{name} = {expression}")
        randomise_(self.net, self.seed, only=name)
        return f"s.{name}"

    def statement(self, text: str) -> None:
        exec(text, self.space)
        self.parts.append(text)

    def tensor(self, *shape: int) -> str:
        """A parameter or a buffer of that shape."""
        if self.chance(0.5):
            return self.part(f"nn.Parameter(torch.rand({shape}))" if shape else "nn.Parameter(torch.rand(()))", "p")
        return self.part(f"torch.rand({shape})" if shape else "torch.rand(())", "b")

    def parameter(self, *shape: int) -> str:
        return self.part(f"nn.Parameter(torch.rand({shape}))", "p")

    def let(self, expression: str, *, read: bool = True) -> str:
        """Name the expression's value; with `read` it can be used by later statements."""
        name = self.fresh("v")
        text = f"{name} = {expression}"
        with torch.no_grad():
            exec(text, self.space)
        found = self.space[name]
        self.steps.append(text)
        if isinstance(found, Tensor):
            if found.numel() > LARGEST * (1 if read else 8) or found.numel() == 0 or not found.is_floating_point():
                raise NotFitting
            if not bool(torch.isfinite(found).all()) or not 1e-6 < float(found.abs().max()) < 1e4:
                raise NotFitting
            if read:
                self.values.append(name)
        return name

    def do(self, text: str) -> None:
        """A statement without a value: an op in place."""
        with torch.no_grad():
            exec(text, self.space)
        self.steps.append(text)

    def attempt(self, block: Callable[[Writer], Any]) -> None:
        """Add a block; take everything back if it does not fit or torch refuses it."""
        parts, steps, values = list(self.parts), list(self.steps), list(self.values)
        try:
            block(self)
        except (NotFitting, RuntimeError, ValueError, TypeError, IndexError, AssertionError, ZeroDivisionError):
            self.parts, self.steps, self.values = parts, steps, values
