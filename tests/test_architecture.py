"""Imports point down only, each step's docstring is the table's row, only the command line prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "secateurs"

# bottom to top; what shares a row may not import each other, unless it is the same package
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "naming", "home", "usercode"),
    ("decode",),
    ("files", "channels", "layers", "costs", "tensorfile", "store"),
    ("normalise", "plan", "fetch", "timing", "journal"),
    ("graph",),
    ("flow", "sums"),
    ("sites",),
    ("readers",),
    ("masking",),
    ("compaction",),
    ("artefact", "data", "masks", "importance", "search", "contract", "allocation", "stability", "noise", "obs", "widths"),
    ("evaluate", "gradients"),
    ("engine", "divergence", "training", "identity"),
    ("ensemble", "measuring", "repair"),
    ("criteria", "scoring"),
    ("cutting", "ranking"),
    ("recipe", "steps"),
    ("record", "workshop", "report"),
    ("dividing",),
    ("journey",),
    ("run",),
    ("models", "export", "methods"),
    ("experiments", "integrations"),
    ("cli",),
)
LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
PURE = ("importance", "search", "masks", "contract", "allocation", "stability", "noise", "gradients", "obs")


def modules() -> list[Path]:
    return sorted(path for path in SRC.rglob("*.py") if path != SRC / "__init__.py")


def unit(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Top-level parts of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("secateurs."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "secateurs":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("secateurs.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path: Path) -> None:
    own = unit(path)
    assert own in LEVEL, f"{own} has no place in LAYERS: give it one"
    for other in imported(path) - {own}:
        if other in LEVEL:
            assert LEVEL[other] < LEVEL[own], f"{path.relative_to(SRC)} imports {other}, which does not lie below {own}"


@pytest.mark.parametrize("name", PURE)
def test_pure_maths_sees_no_model_path_or_clock(name: str) -> None:
    tree = ast.parse((SRC / f"{name}.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {n for n in names if n.split(".")[0] in ("pathlib", "os", "time", "datetime", "io")}
    assert imported(SRC / f"{name}.py") <= {"errors", "channels", "importance"}
    assert "nn" not in {alias.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names}


@pytest.mark.parametrize("path", [p for p in modules() if unit(p) != "cli"], ids=lambda p: str(p.relative_to(SRC)))
def test_only_the_command_line_prints(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_nothing_is_unpickled(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^\s*(import|from) pickle", text, re.M)
    for call in re.findall(r"(?<!safetensors\.)torch\.load\([^\n]*", text):
        assert "weights_only=True" in call


def steps_in_docstrings() -> dict[int, tuple[str, str]]:
    found = {}
    for path in modules():
        text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
        match = re.match(r"Step (\d) of 9: (takes .*)", text)
        if match:
            name = str(path.relative_to(SRC)).removesuffix("/__init__.py")
            found[int(match[1])] = (name if name.endswith(".py") else f"{name}/", match[2])
    return found


def test_the_table_of_steps_is_that_of_the_docstrings() -> None:
    rows = re.findall(r"^\| (\d) \| `([^`]+)` \| (.+?) \| (.+?) \|", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
    assert [int(number) for number, *_ in rows] == list(range(1, 10))
    documented = steps_in_docstrings()
    for number, module, takes, gives in rows:
        name, sentence = documented[int(number)]
        assert module == name
        assert sentence.startswith(f"takes {takes}, gives {gives}"), (module, sentence)


def test_architecture_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in modules():
        assert f"`{unit(path)}" in text, f"{unit(path)} is not mentioned in ARCHITECTURE.md"
