"""`secateurs compare`: any methods on any network and data, under one budget of training, as rows, tables and curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from secateurs.cli.inputs import RUNS, Json, Options, Origin, build_model, check_device, load_data, options
from secateurs.cli.progress import Display, RowWatcher, display, words
from secateurs.cli.terminal import print_json, print_table, say, warn
from secateurs.errors import InvalidInput, RunError, SecateursError

if TYPE_CHECKING:
    from secateurs.methods import Method
    from secateurs.methods.compare.run import Comparison, Entry

Many = Parameter(consume_multiple=True, negative="")
BESIDE = ("random", "l1")  # what no comparison goes without


def compare(
    *,
    model: str | None = None,
    data: str | None = None,
    methods: Annotated[tuple[str, ...], Many] = (),
    targets: Annotated[tuple[str, ...], Many] = ("0.1", "0.2", "0.3", "0.4", "0.5"),
    budgets: Annotated[tuple[str, ...], Many] = ("none",),
    seeds: Annotated[tuple[int, ...], Many] = (0,),
    out: Path | None = None,
    runs: Annotated[Path | None, Parameter(show_default="runs/compare-OUT")] = None,
    render: Path | None = None,
    only: Annotated[bool, Parameter(negative="")] = False,
    model_option: Options = (),
    data_option: Options = (),
    weights: str | None = None,
    shortcut: Literal["before", "after"] = "before",
    examples: int | None = None,
    batch: int = 256,
    device: str | None = None,
    as_json: Json = False,
) -> None:
    """Let several methods make the same network smaller under the same training, and draw accuracy against MACs.

    Every method starts from the same weights, sees the same data, and removes the same shares of the MACs, counted on the
    smaller network itself. Random and l1 are always beside, unless you say --only. Each network gives one row in
    OUT/rows.jsonl; tables (tables.md), curves (accuracy-BUDGET.png and .svg) and a page (comparison.html) are made of the rows
    alone. The test set is read once a row, at its end. Give the same command again after Ctrl-C or a crash, and it goes on;
    give it twice at once, and both share the work.

    Examples:

    `secateurs compare --model resnet20 --weights public --data cifar10 --methods fpgm ensemble portfolio+refit --seeds 0 1 2
    --out results/resnet20`

    `secateurs compare --model mynets:build --weights net.pt --data mydata:loaders --methods portfolio+repair sfp --targets 0.3
    0.5 --budgets none,short --out results/mine`

    `secateurs compare --render results/resnet20`

    Parameters
    ----------
    model
        A built-in network such as resnet20, or your own as package.module:function that returns an nn.Module.
    data
        digits, cifar10, xor, folder:PATH, or package.module:function that returns DataLoaders.
    methods
        Criteria (l1, fpgm, taylor, ensemble, portfolio, …), each also with :uniform, +repair or +refit, and whole procedures:
        li, sfp, fpgm-sfp, paper, paper+repair.
    targets
        Shares of the MACs that have to go.
    budgets
        none; short (1 epoch after the cuts); 2core; paper, or full (10 epochs a cut, 80 at the end); or a TOML file with the
        tables between and after.
    seeds
        Each runs everything anew.
    out
        Folder for the rows, and what is made of them.
    runs
        Folder where methods work, and where their networks are kept: BUDGET/METHOD-TARGET-seedN/pruned.safetensors.
    render
        Make tables, curves and page anew from the rows in this folder, and nothing else.
    only
        Leave out random and l1 unless they are named.
    model_option
        name=value for the network's constructor; may be given several times.
    data_option
        name=value for the data set; may be given several times.
    weights
        A state dict, "public", or "builtin".
    shortcut
        Where the last filters of a residual block are masked: before or after the add.
    examples
        Use at most so many examples of each set: to try a command out, not to report from.
    batch
        Examples at once outside training.
    device
        Where to compute: cpu, cuda, cuda:1, mps. Without it, where the model is.
    as_json
        Print one JSON document on stdout, and no progress.
    """
    if render is not None:
        tell(render, rendered(render), as_json=as_json)
        return
    if model is None or data is None or out is None:
        raise InvalidInput("wanted --model, --data and --out; or --render and a folder with rows.")
    check_device(device)
    given = (options(model_option, "--model-option"), options(data_option, "--data-option"))
    origin = Origin(model, data, *given, weights, device).settled()
    if weights is None and ":" not in model:
        warn(f"no --weights: {model} is compared as it is initialised, untrained.")
    comparison = comparison_of(
        origin, out, runs or RUNS / f"compare-{out.name}", shortcut=shortcut, examples=examples, batch=batch
    )
    asked = ComparisonRequest(split(methods), split(budgets), shares(targets), seeds, () if only else BESIDE)
    with display(quiet=as_json) as shown:
        shown.line(f"Comparing methods on {model} and {comparison.data.name}: rows in {out}, networks in {comparison.runs}")
        failures = work_through(comparison, asked, shown)
    if comparison.rows.exists():
        tell(out, rendered(out), as_json=as_json)
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
    origin: Origin,
    out: Path,
    runs: Path,
    *,
    shortcut: Literal["before", "after"] = "before",
    examples: int | None = None,
    batch: int = 256,
) -> Comparison:
    """The comparison of the network, weights and data that were named; rows call them without a path."""
    from secateurs.methods.compare.run import Comparison, fewer

    found = fewer(load_data(origin), examples)
    names = {
        "model": origin.model,
        "model_options": dict(origin.model_options),
        "weights": _weights_name(origin),
        "data": _data_name(origin, examples),
    }
    return Comparison(build_model(origin), found, out, runs, names, shortcut, batch, origin.device)


def work_through(comparison: Comparison, asked: ComparisonRequest, shown: Display) -> list[str]:
    """Make all rows that are missing; gives what could not be made, with the reason. Ctrl-C says how to go on."""
    from secateurs.methods import method
    from secateurs.methods.compare.run import entries

    named = tuple(dict.fromkeys((*asked.methods, *asked.beside)))
    known = {name: method(name) for name in named}  # a wrong name is an error before anything runs
    budgets = comparison.budgets(asked.budgets)
    wanted = entries(named, budgets, asked.targets, asked.seeds)
    comparison.check(budgets)
    for note in comparison.data.notes:
        shown.line(f"Note: {note}.")
    done = comparison.done()
    left = [entry for entry in wanted if entry.key not in done]
    shown.line(f"{len(wanted)} rows wanted: {len(wanted) - len(left)} are there, {len(left)} to be made.")
    watcher = RowWatcher(shown, left, list(done.values()))
    try:
        return [failure for entry in left if (failure := _try(comparison, entry, known[entry.method], watcher))]
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            "Interrupted. All rows that were made are kept. Go on by giving the same command again."
        ) from stop


def rendered(out: Path) -> list[Path]:
    """Tables, curves and page, made of the rows; gives the files."""
    from secateurs.methods.compare.figures import render

    return render(out)


def tell(out: Path, files: Sequence[Path], *, as_json: bool) -> None:
    """The tables of accuracies on stdout, or everything as one JSON document."""
    from secateurs.methods.compare.rows import budgets_of, comparison_rows, row_fields
    from secateurs.methods.compare.run import ROWS
    from secateurs.methods.compare.tables import sheets_of

    rows = comparison_rows(out / ROWS)
    if as_json:
        print_json({"out": str(out), "rows": [row_fields(row) for row in rows], "files": [str(file) for file in files]})
        return
    for budget in budgets_of(rows):
        accuracy = sheets_of(rows, budget)[0]
        say(accuracy.title)
        print_table(accuracy.columns, accuracy.lines)
    say(f"Written: {', '.join(str(file) for file in files)}")


def refuse(failures: Sequence[str]) -> None:
    """End with an error if rows could not be made."""
    if failures:
        raise RunError(f"{len(failures)} row{'' if len(failures) == 1 else 's'} could not be made: " + " | ".join(failures))


def split(words: Iterable[str]) -> tuple[str, ...]:
    """Words that were given apart, or joined by commas."""
    return tuple(dict.fromkeys(part.strip() for word in words for part in word.split(",") if part.strip()))


def shares(words: Iterable[str]) -> tuple[float, ...]:
    """Numbers that were given apart, or joined by commas."""
    try:
        return tuple(float(word) for word in split(words))
    except ValueError as error:
        raise InvalidInput(f"--targets: {error}. Wanted shares of the MACs, such as 0.3 0.5.") from error


def _try(comparison: Comparison, entry: Entry, method: Method, watcher: RowWatcher) -> str:
    """Make one row; what is wrong with one method does not stop the others."""
    watch = watcher.start(entry)
    try:
        row = comparison.make(entry, method, watch=watch)
    except SecateursError as error:
        watcher.end(entry, None, str(error))
        return f"{words(entry)}: {error}"
    watcher.end(entry, row)
    return ""


def _weights_name(origin: Origin) -> str:
    if origin.weights is None:
        return f"freshly initialised (seed {origin.seed})" if ":" not in origin.model else "as built"
    return Path(origin.weights).name


def _data_name(origin: Origin, examples: int | None) -> str:
    kind, _, path = origin.data.partition(":")
    name = f"folder:{Path(path).name}" if kind == "folder" else origin.data
    chosen = [f"{key} {value}" for key, value in origin.data_options.items()]
    chosen += [] if examples is None else [f"at most {examples:,} examples of each set"]
    return f"{name} ({', '.join(chosen)})" if chosen else name
