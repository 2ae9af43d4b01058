"""Names of other packages, by entry points; and what is said where the lab, which adds some, is not installed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from secateurs import Recipe
from secateurs._util import extensions
from secateurs.data import load
from secateurs.errors import InvalidInput, RecipeError
from secateurs.models import NamedNetwork, build, example_input, names

LAB = Path(__file__).parents[2] / "lab"


@pytest.fixture
def without_the_lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(extensions, "entry_points", lambda group: ())
    extensions.added.cache_clear()
    yield
    extensions.added.cache_clear()


def test_all_names_of_the_lab_are_known_and_load() -> None:
    for kind, known in extensions.LAB.items():
        assert set(known) == set(extensions.added(kind))
        assert all(extensions.load_added(kind, name) is not None for name in known)


@pytest.mark.usefixtures("without_the_lab")
def test_a_name_of_the_lab_says_what_to_install() -> None:
    wanted = r"is of the lab, which is not installed: pip install \./lab, in a checkout of secateurs\."
    with pytest.raises(RecipeError, match=f"criterion = 'thinet'.* 'thinet' {wanted}"):
        Recipe(criterion="thinet")
    with pytest.raises(InvalidInput, match=f"unknown model 'vgg16'.* 'vgg16' {wanted}"):
        build("vgg16")
    with pytest.raises(InvalidInput, match=f"no data set 'mnist'.* 'mnist' {wanted}"):
        load("mnist")
    assert "vgg16" not in names()


@pytest.mark.parametrize("command", [["compare", "--render", "x"], ["reproduce", "xor"]])
def test_a_command_of_the_lab_says_what_to_install(command: list[str]) -> None:
    code = (
        "import importlib.metadata, sys; importlib.metadata.entry_points = lambda group: ();"
        f"from secateurs.cli import execute; sys.exit(execute({command!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(rf"Error: secateurs {command[0]}: .*not installed: pip install \./lab", done.stderr), done.stderr


def tiny(width: int = 2) -> nn.Module:
    return nn.Linear(3, width)


tiny_network = NamedNetwork(tiny, (3,))


def test_a_package_of_the_users_adds_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("tiny", f"{__name__}:tiny_network", "secateurs.models")
    monkeypatch.setattr(extensions, "entry_points", lambda group: (entry,) if group == "secateurs.models" else ())
    extensions.added.cache_clear()
    try:
        assert names()[-1] == "tiny"
        made: Tensor = build("tiny", width=5)(example_input("tiny"))
        assert made.shape == torch.Size([2, 5])
    finally:
        extensions.added.cache_clear()
