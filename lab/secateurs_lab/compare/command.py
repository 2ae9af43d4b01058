"""`secateurs compare`: any methods on any network and data, under one budget of training, as rows, tables and curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from secateurs._util.terminal import print_json, print_table, say, warn
from secateurs.cli import inputs
from secateurs.cli.progress import Display, display
from secateurs.config import Shortcut
from secateurs.errors import InvalidInput, RunError, SecateursError
from secateurs_lab.compare.progress import RowWatcher, words

if TYPE_CHECKING:
    from secateurs_lab.compare.rows import Entry
    from secateurs_lab.compare.run import Comparison
    from secateurs_lab.methods import Method

Many = Parameter(consume_multiple=True, negative="")
ALWAYS = ("random", "l1", "untouched")  # in every comparison; the last where there is training


def compare(
    *,
    model: inputs.OptionalModelName = None,
    data: inputs.OptionalDataName = None,
    methods: Annotated[tuple[str, ...], Many] = (),
    targets: Annotated[tuple[str, ...], Many] = ("0.1", "0.2", "0.3", "0.4", "0.5"),
    budgets: Annotated[tuple[str, ...], Many] = ("none",),
    seeds: Annotated[tuple[int, ...], Many] = (0,),
    out: Path | None = None,
    runs: Annotated[Path | None, Parameter(show_default="runs/compare-OUT")] = None,
    render: Path | None = None,
    only: Annotated[bool, Parameter(negative="")] = False,
    model_option: inputs.ModelOptions = (),
    data_option: inputs.DataOptions = (),
    weights: str | None = None,
    shortcut: inputs.ShortcutFlag = "before",
    examples: int | None = None,
    batch: int = 256,
    int8: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    device: inputs.Device = None,
    as_json: inputs.Json = False,
) -> None:
    """Prune the same network by several methods under the same training, and draw accuracy against MACs.

    Every method starts from the same weights, sees the same data, and removes the same shares of the MACs, counted on the
    pruned network. Random and l1 are always included, unless you say --only, and so is the untouched network with the same
    training: it shows what the training alone does. Each network gives one row in OUT/rows.jsonl; tables (tables.md), curves
    (accuracy-BUDGET.png and .svg) and a page (comparison.html) are made from the rows alone. With a budget at several learning
    rates there is also a table of every method at its own best rate, by the validation set, and with several budgets one at
    equal minutes of search and training. The test set is read once for each row, at its end. After Ctrl-C or a crash, the same
    command continues; given twice at the same time, both processes share the work.

    Examples:

    `secateurs compare --model resnet20 --weights public --data cifar10 --methods fpgm ensemble portfolio+refit --seeds 0 1 2
    --out results/resnet20`

    `secateurs compare --model mynets:build --weights net.pt --data mydata:loaders --methods portfolio+repair sfp --targets 0.3
    0.5 --budgets none,short --out results/mine`

    `secateurs compare --model resnet20 --weights builtin --data cifar10 --methods obs+refit fpgm --targets 0.3 --budgets
    gentle@0.002,gentle@0.01 --out results/rates`

    `secateurs compare --render results/resnet20`

    Parameters
    ----------
    methods
        Criteria (l1, fpgm, taylor, ensemble, portfolio, …, or your own as package.module:function), each also with :uniform,
        +repair or +refit, and whole procedures: li, sfp, fpgm-sfp, thinet, ssl, l0, han, obd-weights, obs-weights, paper,
        paper+repair, or your own as package.module:function, marked by secateurs_lab.methods.procedure. Settings of these
        follow in brackets: 'l0[price=0.2]'. untouched removes nothing.
    targets
        Shares of the MACs to remove.
    budgets
        none; gentle (1 epoch of distillation after the cuts, the best weights kept); short (1 epoch of cross-entropy); 2core;
        paper, or full (10 epochs a cut, 80 at the end); or a TOML file with the tables between and after, and keep_best. Any
        of them at another learning rate: gentle@0.01.
    seeds
        Each repeats everything.
    out
        Folder for the rows, tables, curves and page.
    runs
        Working folder of the methods, with their networks: BUDGET/METHOD-TARGET-seedN/pruned.safetensors.
    render
        Only make tables, curves and page again from the rows in this folder.
    only
        Leave out random, l1 and untouched unless they are named.
    weights
        A state dict, "public", or "builtin".
    examples
        Use at most this number of examples of each set: to try a command, not for results.
    batch
        Examples at once outside training.
    int8
        Quantise every network for ONNX Runtime too, and measure the int8 file on the test set; rows that exist are completed.
    """
    if render is not None:
        print_comparison(render, rendered(render), as_json=as_json)
        return
    if model is None or data is None or out is None:
        raise InvalidInput("wanted --model, --data and --out; or --render and a folder with rows.")
    inputs.check_device(device)
    origin = inputs.named_origin(model, data, model_option, data_option, weights, device)
    if weights is None and ":" not in model:
        warn(f"no --weights: {model} is compared untrained, with its initial weights.")
    comparison = comparison_of(
        origin, out, runs or inputs.RUNS / f"compare-{out.name}", shortcut=shortcut, examples=examples, batch=batch, int8=int8
    )
    asked = ComparisonRequest(split(methods), split(budgets), shares(targets), seeds, () if only else ALWAYS)
    with display(quiet=as_json) as shown:
        shown.line(f"Comparing methods on {model} and {comparison.data.name}: rows in {out}, networks in {comparison.runs}")
        failures = work_through(comparison, asked, shown)
    if comparison.rows.exists():
        print_comparison(out, rendered(out), as_json=as_json)
    refuse(failures)


# ---- what both `compare` and `reproduce table3` do -------------------------------------------------------------------


@dataclass(frozen=True)
class ComparisonRequest:
    """Which rows are wanted."""

    methods: tuple[str, ...]
    budgets: tuple[str, ...]
    targets: tuple[float, ...]
    seeds: tuple[int, ...]
    beside: tuple[str, ...]  # methods that are added


def comparison_of(
    origin: inputs.Origin,
    out: Path,
    runs: Path,
    *,
    shortcut: Shortcut = "before",
    examples: int | None = None,
    batch: int = 256,
    int8: bool = False,
) -> Comparison:
    """The comparison on the network, weights and data of `origin`; rows name them without a path."""
    from secateurs_lab.compare.run import Comparison, fewer

    found = fewer(inputs.load_data(origin), examples)
    names = {
        "model": origin.model,
        "model_options": dict(origin.model_options),
        "weights": _weights_name(origin),
        "data": _data_name(origin, examples),
    }
    return Comparison(inputs.build_model(origin), found, out, runs, names, shortcut, batch, origin.device, int8)


def work_through(comparison: Comparison, asked: ComparisonRequest, shown: Display) -> list[str]:
    """Make all missing rows; returns those that failed, with the reason. Ctrl-C says how to resume."""
    from secateurs_lab.compare.run import entries
    from secateurs_lab.methods import method

    named = tuple(dict.fromkeys((*asked.methods, *asked.beside)))
    known = {name: method(name) for name in named}  # a wrong name is an error before anything runs
    budgets = comparison.budgets(asked.budgets)
    wanted = entries(named, budgets, asked.targets, asked.seeds)
    comparison.check(budgets)
    for note in comparison.data.notes:
        shown.line(f"Note: {note}.")
    done = comparison.done()
    left = [entry for entry in wanted if entry.key not in done]
    shown.line(f"{len(wanted)} rows wanted: {len(wanted) - len(left)} exist, {len(left)} are missing.")
    watcher = RowWatcher(shown, left, list(done.values()))
    try:
        return [failure for entry in left if (failure := _try(comparison, entry, known[entry.method], watcher))]
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt("Interrupted. Finished rows are kept. Resume by giving the same command again.") from stop


def rendered(out: Path) -> list[Path]:
    """Make tables, curves and page from the rows; returns their files."""
    from secateurs_lab.compare.figures import render

    return render(out)


def print_comparison(out: Path, files: Sequence[Path], *, as_json: bool) -> None:
    """Print the tables of accuracies, or everything as one JSON document."""
    from secateurs_lab.compare.rows import budgets_of, comparison_rows, row_fields
    from secateurs_lab.compare.run import ROWS
    from secateurs_lab.compare.tables import across_budgets, sheets_of

    rows = comparison_rows(out / ROWS)
    if as_json:
        print_json({"out": str(out), "rows": [row_fields(row) for row in rows], "files": [str(file) for file in files]})
        return
    for budget in budgets_of(rows):
        for accuracy in sheets_of(rows, budget)[: 2 if any(row.int8 for row in rows if row.budget.name == budget) else 1]:
            say(accuracy.title)
            print_table(accuracy.columns, accuracy.lines)
    for sheet in across_budgets(rows):
        say(sheet.title)
        print_table(sheet.columns, sheet.lines)
    say(f"Written: {', '.join(str(file) for file in files)}")


def refuse(failures: Sequence[str]) -> None:
    """Raise RunError if rows failed."""
    if failures:
        raise RunError(f"{len(failures)} row{'' if len(failures) == 1 else 's'} could not be made: " + " | ".join(failures))


def split(words: Iterable[str]) -> tuple[str, ...]:
    """Words given separately or joined by commas."""
    return tuple(dict.fromkeys(part.strip() for word in words for part in word.split(",") if part.strip()))


def shares(words: Iterable[str]) -> tuple[float, ...]:
    """Numbers given separately or joined by commas."""
    try:
        return tuple(float(word) for word in split(words))
    except ValueError as error:
        raise InvalidInput(f"--targets: {error}. Wanted shares of the MACs, such as 0.3 0.5.") from error


def _try(comparison: Comparison, entry: Entry, method: Method, watcher: RowWatcher) -> str:
    """Make one row; the error of one method does not stop the others."""
    watch = watcher.start(entry)
    try:
        row = comparison.make(entry, method, watch=watch)
    except SecateursError as error:
        watcher.end(entry, None, str(error))
        return f"{words(entry)}: {error}"
    watcher.end(entry, row)
    return ""


def _weights_name(origin: inputs.Origin) -> str:
    if origin.weights is None:
        return f"freshly initialised (seed {origin.seed})" if ":" not in origin.model else "as built"
    return Path(origin.weights).name


def _data_name(origin: inputs.Origin, examples: int | None) -> str:
    kind, _, path = origin.data.partition(":")
    name = f"folder:{Path(path).name}" if kind == "folder" else origin.data
    chosen = [f"{key} {value}" for key, value in origin.data_options.items()]
    chosen += [] if examples is None else [f"at most {examples:,} examples of each set"]
    return f"{name} ({', '.join(chosen)})" if chosen else name
