"""The shape of the package and of the lab beside it: rows whose imports point down only, few entries at the root, one name
for one class, pure maths apart from models and disks, and a run that calls the steps of Algorithm 1 in their order."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "secateurs"

# bottom to top; what shares a row may not import each other
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("distributed",),
    ("_util",),
    ("config",),
    ("data",),
    ("graph", "metrics", "models"),
    ("compaction",),
    ("scoring", "repair", "training"),
    ("criteria", "selection"),
    ("speed",),
    ("pruning", "export"),
    ("report",),
    ("api",),
    ("cli", "integrations"),
)
LAB = ROOT / "lab" / "secateurs_lab"
LAB_ROWS: tuple[tuple[str, ...], ...] = (
    ("sheets", "data", "models"),
    ("criteria",),
    ("methods",),
    ("compare",),
    ("reproduce",),
)
PURE = (
    *("scoring/importance", "scoring/masks", "scoring/convergence", "repair/obs"),
    *("selection/search", "selection/contract", "selection/allocation", "selection/knapsack", "speed/widths"),
)
PURE_MAY_SEE = {"errors", "config", "graph.channels", "scoring.importance", "selection.allocation"}


def modules(top: Path = SRC) -> list[Path]:
    return sorted(path for path in top.rglob("*.py") if path.parent != top or not path.name.startswith("__"))


def unit(path: Path, top: Path = SRC) -> str:
    return path.relative_to(top).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path, package: str = "secateurs") -> set[str]:
    """Modules of a package that a file imports, anywhere in it, without the package's own name."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package}."):
            found.add(node.module.removeprefix(f"{package}."))
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix(f"{package}.") for alias in node.names if alias.name.startswith(f"{package}.")}
    return found


def imported_roots(path: Path) -> set[str]:
    """The first parts of all that a file imports: packages and modules of anybody's."""
    nodes = list(ast.walk(tree_of(path)))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in names}


def every(offences: Iterable[str]) -> None:
    """Fail with all offences at once, a line each."""
    found = list(offences)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("top", "rows"), [(SRC, ROWS), (LAB, LAB_ROWS)], ids=["package", "lab"])
def test_imports_point_down(top: Path, rows: tuple[tuple[str, ...], ...]) -> None:
    level = {name: place for place, row in enumerate(rows) for name in row}
    assert modules(top)
    every(f"{name} has no place in the rows: give it one" for name in {unit(path, top) for path in modules(top)} - set(level))
    every(
        f"{path.relative_to(top)} imports {other}, which does not lie below {own}"
        for path in modules(top)
        for own in [unit(path, top)]
        for other in sorted({name.split(".")[0] for name in imported(path, top.name)} - {own})
        if level[other] >= level[own]
    )


def test_the_package_never_imports_the_lab() -> None:
    lab = {"secateurs_lab", "benchmarks"}
    every(
        f"{path.relative_to(SRC)} imports {', '.join(found)}"
        for path in SRC.rglob("*.py")
        if (found := imported_roots(path) & lab)
    )


def test_the_wheel_holds_none_of_the_lab() -> None:
    """The files that hatchling would put into each wheel."""
    package, lab = (
        {file.distribution_path for file in WheelBuilder(str(place)).recurse_included_files()} for place in (ROOT, ROOT / "lab")
    )
    assert {f"secateurs/{path.relative_to(SRC)}" for path in SRC.rglob("*.py")} <= package
    assert {path.split("/")[0] for path in package} == {"secateurs"}
    assert {path for path in package if path.startswith("secateurs/recipes/")} == {
        f"secateurs/recipes/{path.name}" for path in (ROOT / "recipes").iterdir()
    }
    assert {path.split("/")[0] for path in lab} == {"secateurs_lab"}
    assert "secateurs_lab/recipes/budgets/27-epochs.toml" in lab


def test_the_package_has_few_top_level_modules() -> None:
    entries = [entry.name for entry in SRC.iterdir() if entry.name not in ("__pycache__", "py.typed")]
    loose = {name for name in entries if name.endswith(".py")}
    assert loose == {"__init__.py", "__main__.py", "api.py", "errors.py", "metrics.py"}
    assert len(entries) <= 25


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(SRC)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_pure_maths_sees_no_model_path_or_clock() -> None:
    def seen(path: Path) -> set[str]:
        taken = {alias.name for n in ast.walk(tree_of(path)) if isinstance(n, ast.ImportFrom) for alias in n.names}
        outside = imported_roots(path) & {"pathlib", "os", "time", "datetime", "io"}
        return outside | (taken & {"nn"}) | (imported(path) - PURE_MAY_SEE)

    every(f"{name} sees {', '.join(sorted(found))}" for name in PURE if (found := seen(SRC / f"{name}.py")))


def test_config_needs_no_torch() -> None:
    may_see = {"errors", "_util.decode", "_util.files", "_util.extensions"}
    paths = [path for path in modules() if unit(path) == "config"]
    assert paths
    for path in paths:
        rooms = {name for name in imported(path) if name.split(".")[0] != "config"}
        every(f"{path.relative_to(SRC)} imports {name}" for name in (rooms - may_see) | (imported_roots(path) & {"torch"}))


def test_only_the_command_line_prints() -> None:
    """Ruff's T201 lets a print into an open file pass, so it is no substitute."""
    every(
        f"{path.relative_to(ROOT)}:{node.lineno} prints"
        for path in [*(p for p in modules() if unit(p) != "cli"), *modules(LAB)]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    )


def test_nothing_is_unpickled() -> None:
    """Neither by pickle nor by `torch.load`, which no stable rule of ruff knows."""
    every(
        f"{path.relative_to(ROOT)}: {found.strip()}"
        for path in [*modules(), *modules(LAB)]
        for found in re.findall(
            r"^\s*(?:import|from) pickle.*|(?<!safetensors\.)torch\.load\((?![^\n]*weights_only=True).*", path.read_text(), re.M
        )
    )


def spying(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Callable[[Any, str, str], None]]:
    """The steps that were called, in order, and a function that watches one: (owner, name, what the step is called here)."""
    calls: list[str] = []

    def spy(owner: Any, name: str, step: str) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            calls.append(step)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, wrapped)

    return calls, spy


def test_a_run_calls_the_steps_of_algorithm_1_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every site: masks are drawn (3), the masked network is measured (4), importances are fitted (5), the cut is
    searched (6), the network is compacted (7) and trained (8)."""
    from secateurs import Pruner, Recipe, TrainSettings
    from secateurs.pruning import context, judge
    from secateurs.scoring import ensemble, evaluator
    from secateurs.training import resumable
    from torture.runs import few_digits, perceptron

    calls, spy = spying(monkeypatch)
    spy(ensemble, "sample_masks", "3 masks")
    spy(evaluator.CachedEvaluator, "means", "4 losses")
    spy(ensemble, "fit_importance", "5 importance")
    spy(judge, "find_cut", "6 cut")
    spy(context, "compact", "7 compact")
    spy(resumable, "train_", "8 train")
    recipe = Recipe.paper(
        max_drop=1.0, masks=24, scoring_examples=64, sites=("layers.1",), finetune=TrainSettings(epochs=1, batch=64, lr=0.01)
    )
    Pruner(perceptron(), few_digits(384), recipe=recipe).finish()
    order = [step for place, step in enumerate(calls) if place == 0 or calls[place - 1] != step]
    first = [step for place, step in enumerate(order) if step not in order[:place]]
    assert first == ["3 masks", "4 losses", "5 importance", "6 cut", "7 compact", "8 train"], order


def test_a_run_weighs_all_sites_together_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves of every site, then the frontier, then whole networks: looked at, certified, timed; then cuts, which are
    measured once all are made."""
    from secateurs import Pruner
    from secateurs.pruning import choice, curves, frontiers, judge, speeds
    from secateurs.pruning.run import Run
    from torture.runs import few_digits, perceptron

    calls, spy = spying(monkeypatch)
    spy(Run, "measure_original", "1 original")
    spy(curves, "measure_curve", "2 curve")
    spy(frontiers, "_up_to_target", "3 frontier")
    spy(choice, "choose_allocation", "4 climb")
    spy(judge.ByValues, "look", "5 look")
    spy(judge.Certified, "certify", "6 certify")
    spy(speeds, "is_faster", "7 faster?")
    spy(Run, "record", "8 step")
    Pruner(perceptron(), few_digits(384, 300), max_drop=0.2).finish()
    order = [step for place, step in enumerate(calls) if step not in calls[:place]]
    assert order == ["1 original", "2 curve", "3 frontier", "4 climb", "5 look", "6 certify", "7 faster?", "8 step"], calls


@pytest.mark.parametrize("name", ["together", "algorithm1"])
def test_architecture_shows_the_procedures_as_they_run(name: str) -> None:
    """Each is one function of at most a screen, and the page shows its very text."""
    from secateurs.pruning.algorithm1 import algorithm1
    from secateurs.pruning.together import together

    source = inspect.getsource({"together": together, "algorithm1": algorithm1}[name])
    assert source in (ROOT / "ARCHITECTURE.md").read_text()
    assert len(source.splitlines()) <= 40


def test_architecture_names_every_room_and_every_step() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for row in ROWS:
        for name in row:
            assert f"`{name}" in text, f"{name} is not mentioned in ARCHITECTURE.md"
    steps = re.findall(r"^\| (\d) \| `([^`]+\.py)` \|", text, re.M)
    assert [int(number) for number, _ in steps] == list(range(1, 10))
    for _, place in steps:
        assert (SRC / place).exists(), f"{place} is not there"
