"""`secateurs reproduce`: the paper's tables, run again."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from secateurs._util.files import write_text
from secateurs._util.tables import Sheet, markdown
from secateurs.reproduce.table2.cli import table2
from secateurs.reproduce.table3.cli import table3
from secateurs.reproduce.xor.experiment import ExperimentRow, SweptPoint, pooled, sweep, table
from secateurs.reproduce.xor.nets import Optimiser, Setting
from secateurs.reproduce.xor.tables import methods_sheet, paper_sheet, plain, sweep_sheet

app = App(name="reproduce", help="Run the paper's experiments again and print its tables beside ours.")
app.command(table2)
app.command(table3)


@app.command
def xor(
    *,
    seeds: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative="")] = (1,),
    experiments: int = 1000,
    all_methods: Annotated[bool, Parameter(name="--all", negative="")] = False,
    sensitivity: Annotated[bool, Parameter(negative="")] = False,
    out: Path = Path("runs/xor"),
    optimiser: Optimiser = "sgd",
    learning_rate: float = 0.1,
    epochs: int = 130,
    points: int = 1000,
    off: float = 0.3,
    masks: int = 300,
    hidden_bias: bool = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Table 1: prune networks of 10 hidden neurons to 3 on the XOR task, and count how often they still solve it.

    About 40 seconds of one core for 1,000 experiments; `--all` adds some four minutes, `--sensitivity` three.
    Writes rows.json, tables.md and the figures (PNG and SVG) to the output folder.

    Parameters
    ----------
    seeds
        One or more seeds; each runs all experiments, and the rows are added up.
    experiments
        Experiments a row, for each seed.
    all_methods
        Also methods that are not in the paper: other scores, pairwise terms, norms, leave-one-out, refit.
    sensitivity
        Also sweep P and M for one-shot ensembles, on the first seed, and draw the curve.
    out
        Folder for rows.json, tables.md and the figures.
    optimiser
        Trains and retrains all networks; it decides more than anything else here.
    learning_rate
        Of the optimiser.
    epochs
        Of training, and of every retraining.
    points
        Training points of an experiment; as many fresh ones test it.
    off
        P: share of the neurons switched off in a mask.
    masks
        M: masks in an ensemble.
    hidden_bias
        Give the hidden neurons a bias, which the paper's construction does not have.
    as_json
        Print rows.json instead of tables.
    """
    console = Console(quiet=as_json)
    started = time.perf_counter()
    setting = Setting(
        experiments=experiments,
        points=points,
        optimiser=optimiser,
        learning_rate=learning_rate,
        epochs=epochs,
        off=off,
        masks=masks,
        hidden_bias=hidden_bias,
    )
    tables = [_run_seed(console, replace(setting, seed=seed), all_methods) for seed in seeds]
    swept = _run_sweep(console, replace(setting, seed=seeds[0])) if sensitivity else ()
    seconds = time.perf_counter() - started

    sheets = _sheets(tables, seeds, swept, all_methods)
    content = {**_conditions(setting, seeds, seconds), **_records(tables, seeds, swept)}
    files = _write(out, content, sheets, replace(setting, seed=seeds[0]), swept)
    for sheet in sheets:
        console.print(_rich(sheet))
    console.print(f"{seconds:.0f} s. Written: {', '.join(str(file) for file in files)}")
    if as_json:
        Console(soft_wrap=True).print_json(data=content)


def _run_seed(console: Console, setting: Setting, all_methods: bool) -> tuple[ExperimentRow, ...]:
    started = time.perf_counter()

    def report(row: ExperimentRow) -> None:
        name = " ".join(word for word in row.key if word)
        console.print(
            f"seed {setting.seed}: {name}: {row.training.percent:.1f} % ({time.perf_counter() - started:.0f} s)",
            style="dim",
            highlight=False,
        )

    return table(setting, beyond=all_methods, report=report)


def _run_sweep(console: Console, setting: Setting) -> tuple[SweptPoint, ...]:
    def report(point: SweptPoint) -> None:
        text = f"P = {point.off:.1f}, M = {point.masks}: {point.training.percent:.1f} %"
        console.print(text, style="dim", highlight=False)

    return sweep(setting, report=report)


def _sheets(
    tables: Sequence[Sequence[ExperimentRow]], seeds: Sequence[int], swept: Sequence[SweptPoint], all_methods: bool
) -> list[Sheet]:
    rows = pooled(tables)
    sheets = [paper_sheet(rows, tables, seeds)]
    if all_methods:
        sheets.append(methods_sheet(rows))
    if swept:
        sheets.append(sweep_sheet(swept))
    return sheets


def _conditions(setting: Setting, seeds: Sequence[int], seconds: float) -> dict[str, Any]:
    settings = {name: value for name, value in asdict(setting).items() if name not in ("seed", "first")}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"setting": settings, "seeds": list(seeds), "seconds": round(seconds, 1), "versions": versions}


def _records(tables: Sequence[Sequence[ExperimentRow]], seeds: Sequence[int], swept: Sequence[SweptPoint]) -> dict[str, Any]:
    return {
        "rows": [plain(row) for row in pooled(tables)],
        "rows_by_seed": {str(seed): [plain(row) for row in rows] for seed, rows in zip(seeds, tables, strict=True)},
        "sensitivity": [plain(point) for point in swept],
    }


def _write(
    out: Path, content: dict[str, Any], sheets: Sequence[Sheet], setting: Setting, swept: Sequence[SweptPoint]
) -> list[Path]:
    from secateurs.reproduce.xor.figures import draw_all

    write_text(out / "rows.json", json.dumps(content, indent=1))
    write_text(out / "tables.md", "\n".join(markdown(sheet) for sheet in sheets))
    return [out / "rows.json", out / "tables.md", *draw_all(out, setting, swept)]


def _rich(sheet: Sheet) -> Table:
    shown = Table(title=sheet.title, title_justify="left")
    for place, column in enumerate(sheet.columns):
        shown.add_column(column, justify="left" if place == 0 else "right")
    for line in sheet.lines:
        shown.add_row(*line)
    return shown
