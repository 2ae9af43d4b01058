"""`secateurs reproduce`: the paper's tables, run again."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import App, Parameter

from secateurs._util.files import write_text
from secateurs._util.terminal import clock, print_json, print_table, say
from secateurs.cli.inputs import Json
from secateurs.cli.progress import display
from secateurs_lab.compare.command import Many
from secateurs_lab.compare.figures import can_draw
from secateurs_lab.reproduce.ancestors import ancestors
from secateurs_lab.reproduce.table2 import table2
from secateurs_lab.reproduce.table3 import table3
from secateurs_lab.reproduce.xor import (
    ExperimentRow,
    SweptPoint,
    methods_sheet,
    paper_sheet,
    plain,
    pooled,
    sweep,
    sweep_sheet,
    table,
    weights_sheet,
    weights_table,
)
from secateurs_lab.reproduce.xor_figures import draw_all
from secateurs_lab.reproduce.xor_nets import Setting

app = App(name="reproduce", help="Run the paper's experiments again and print its tables beside ours.")
app.command(table2)
app.command(table3)
app.command(ancestors)
SETTING = Setting()


@app.command
def xor(
    *,
    seeds: Annotated[tuple[int, ...], Many] = (1,),
    setting: Annotated[Setting, Parameter(name="*")] = SETTING,
    all_methods: Annotated[bool, Parameter(name="--all", negative="")] = False,
    sensitivity: Annotated[bool, Parameter(negative="")] = False,
    weights: Annotated[bool, Parameter(negative="")] = False,
    out: Path = Path("runs/xor"),
    as_json: Json = False,
) -> None:
    """Table 1: prune networks of 10 hidden neurons to 3 on the XOR task, and count how often they still solve it.

    About 40 seconds of one core for 1,000 experiments; `--all` adds some four minutes, `--sensitivity` three.
    Writes rows.json, tables.md and (with the extra `figures`) the figures as PNG and SVG to the output folder.

    Parameters
    ----------
    seeds
        One or more seeds; each runs all experiments, and the rows are added up.
    all_methods
        Also methods that are not in the paper: other scores, pairwise terms, norms, leave-one-out, refit.
    weights
        Instead, delete single weights of the same networks, by magnitude, OBD and OBS, until 10 of 31 are left.
    sensitivity
        Also sweep P and M for one-shot ensembles, on the first seed, and draw the curve.
    out
        Folder for rows.json, tables.md and the figures.
    """
    began = time.perf_counter()
    setting = replace(setting, seed=seeds[0])
    swept: tuple[SweptPoint, ...] = ()
    with display(quiet=as_json) as shown:

        def report(row: ExperimentRow | SweptPoint) -> None:
            name = " ".join(filter(None, row.key)) if isinstance(row, ExperimentRow) else f"P = {row.off:.1f}, M = {row.masks}"
            shown.line(f"{name}: {row.training.percent:.1f} % ({clock(time.perf_counter() - began)})")

        tables = []
        for seed in seeds:
            shown.line(f"Seed {seed}: {setting.experiments:,} experiments a row.")
            asked = replace(setting, seed=seed)
            made = weights_table(asked, report=report) if weights else table(asked, beyond=all_methods, report=report)
            tables.append(made)
        if sensitivity:
            swept = sweep(setting, report=report)
    seconds = time.perf_counter() - began

    rows = pooled(tables)
    sheets = [weights_sheet(rows)] if weights else [paper_sheet(rows, tables, seeds)]
    sheets += [methods_sheet(rows)] if all_methods and not weights else []
    sheets += [sweep_sheet(swept)] if swept else []
    content = {
        "setting": {name: value for name, value in asdict(setting).items() if name not in ("seed", "first")},
        "seeds": list(seeds),
        "seconds": round(seconds, 1),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": [plain(row) for row in rows],
        "rows_by_seed": {str(seed): [plain(row) for row in found] for seed, found in zip(seeds, tables, strict=True)},
        "sensitivity": [plain(point) for point in swept],
    }
    write_text(out / "rows.json", json.dumps(content, indent=1))
    write_text(out / "tables.md", "\n".join(sheet.markdown() for sheet in sheets))
    files = [out / "rows.json", out / "tables.md", *(draw_all(out, setting, swept) if can_draw(out) else [])]
    if as_json:
        print_json(content)
        return
    for sheet in sheets:
        say(sheet.title)
        print_table(sheet.columns, sheet.lines)
    say(f"{clock(seconds)}. Written: {', '.join(str(file) for file in files)}")
