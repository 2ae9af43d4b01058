"""Figures of the package's shape: `python tools/figures.py` prints them, with the limits that they are held to.

Lines are physical; code lines are without blanks, comments and docstrings. The import chain is the longest path of imports at
module level. Frames are those of the package between `prune` and the first masked forward of a default run, which is made.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "secateurs"
FACE = {"prune", "resume", "__init__", "train", "export", "compare"}  # what users call may have more parameters


def modules() -> dict[str, ast.Module]:
    """The parsed modules by name."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function on which a statement or a part of one begins, without its docstring and its signature."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return len({line for part in body for inner in ast.walk(part) if (line := getattr(inner, "lineno", None)) is not None})


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = node.args
    return len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - any(a.arg in ("self", "cls") for a in given.args[:1])


def imports(tree: ast.Module, known: set[str]) -> set[str]:
    """Modules of the package that one imports when it is loaded itself."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {name for a in node.names if (name := f"{node.module}.{a.name}") in known} or {node.module} & known
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
    return found


def longest_chain(trees: dict[str, ast.Module]) -> list[str]:
    edges = {name: imports(tree, set(trees)) - {name} for name, tree in trees.items()}
    on_the_way: set[str] = set()

    @cache
    def longest(name: str) -> tuple[str, ...]:
        on_the_way.add(name)
        found = max((longest(other) for other in edges[name] if other not in on_the_way), key=len, default=())
        on_the_way.discard(name)
        return (name, *found)

    return list(max(map(longest, edges), key=len))


def frames() -> list[str]:
    """The package's frames from `prune` to the first masked forward of a default run."""
    sys.path.insert(0, str(ROOT / "tests"))
    import secateurs as sc
    from secateurs.scoring.engine.forward import MaskedForward
    from torture.runs import few_digits, perceptron

    found: list[str] = []

    class Reached(BaseException):
        pass

    def outputs(self: Any, *given: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if "secateurs" in code.co_filename:
                found.append(f"{Path(code.co_filename).stem}.{code.co_name}")
            frame = frame.f_back  # type: ignore[assignment]
        raise Reached

    MaskedForward.outputs = outputs  # type: ignore[method-assign]
    data = few_digits(384, 300)
    with contextlib.suppress(Reached):
        sc.prune(perceptron(), data, max_drop=0.1, engine="none", progress=False)
    return found[::-1]


def main() -> None:
    """Print all figures."""
    trees = modules()
    import secateurs as sc
    from secateurs.config import TrainSettings

    lines = {path: path.read_text().count("\n") for path in SRC.rglob("*.py")}
    classes = [
        (name, c.name, sum(isinstance(b, ast.FunctionDef) for b in c.body))
        for name, tree in trees.items()
        for c in ast.walk(tree)
        if isinstance(c, ast.ClassDef)
    ]
    wide = [(parameters(f), f"{name}.{f.name}") for name, tree in trees.items() for f in functions(tree) if f.name not in FACE]
    large = [(code_lines(f), f"{name}.{f.name}") for name, tree in trees.items() for f in functions(tree)]
    chain, way = longest_chain(trees), frames()

    def row(what: str, found: object, wanted: object, which: list[str] | None = None) -> None:
        print(f"{what:<62} {found!s:>7}   {wanted}{'   ' + ', '.join(which[:8]) if which else ''}")

    row("files of the package", len(lines), "")
    row("lines of the package", sum(lines.values()), "<= 32000")
    row("modules above 450 lines", sum(n > 450 for n in lines.values()), 0, [p.stem for p, n in lines.items() if n > 450])
    row("classes above 25 methods", sum(n > 25 for *_, n in classes), 0, [f"{c} ({n})" for _, c, n in classes if n > 25])
    row("functions above 60 code lines", sum(n > 60 for n, _ in large), 0, [f"{f} ({n})" for n, f in large if n > 60])
    row(
        "functions above 10 parameters, the face aside",
        sum(n > 10 for n, _ in wide),
        0,
        [f"{f} ({n})" for n, f in wide if n > 10],
    )
    row("longest import chain", len(chain), "<= 25")
    row("frames from prune to the masked forward", len(way), "<= 14")
    row("parameters of prune", len(inspect.signature(sc.prune).parameters), "<= 20")
    row(
        "fields of Recipe (and of a training)",
        f"{len(dataclasses.fields(sc.Recipe))} ({len(dataclasses.fields(TrainSettings))})",
        "<= 32",
    )
    print("\nchain:", " -> ".join(name.removeprefix("secateurs.") for name in chain))
    print("frames:", " -> ".join(way))


if __name__ == "__main__":
    main()
