"""`secateurs reproduce table2`: ResNet-20 pruned in the paper's four variants, its table beside ours, its findings checked."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from secateurs._util.files import write_text
from secateurs.cli.inputs import BUILTIN, PUBLIC, Json, Origin, build_model, check_device, chosen_recipe, load_data
from secateurs.cli.progress import Display, RunWatcher, Status, display
from secateurs.cli.results import follow, holding
from secateurs.cli.terminal import clock, percent, print_json, print_table, say
from secateurs.errors import RunError
from secateurs.methods.compare.rows import append_row, read_rows
from secateurs.pruning.journal import PROVENANCE
from secateurs.report import write_report
from secateurs.reproduce.table2.findings import findings
from secateurs.reproduce.table2.run import Job, Request, Row, row_of, take_up
from secateurs.reproduce.table2.tables import Table, page, sheets, tables, told

SUBJECT = Origin("resnet20", "cifar10")
BUDGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "2core": ("table2-2core", {}),
    # "layers can be pruned multiple times if stopping condition is not reached"
    "paper": ("paper-resnet", {"rounds": 10}),
}
ROWS, TABLES, PAGE = "rows.jsonl", "tables.md", "comparison.html"

_AGAIN = "Interrupted. All that was done is kept. Give the same command again to go on."


def table2(
    *,
    variants: Annotated[tuple[Literal["BF", "BB", "AF", "AB", "BF+"], ...], Parameter(consume_multiple=True, negative="")] = (
        "BF",
        "BB",
        "AF",
        "AB",
    ),
    budget: Literal["2core", "paper"] = "2core",
    weights: str = BUILTIN,
    criterion: str = "ensemble",
    repair: Annotated[bool, Parameter(negative="")] = False,
    target: float = 0.3,
    max_drop: Annotated[float | None, Parameter(show_default="0.02; budget paper: 0.005")] = None,
    seed: int = 0,
    device: str | None = None,
    out: Path = Path("results/table2"),
    runs: Path = Path("runs/table2"),
    render: Annotated[bool, Parameter(negative="")] = False,
    as_json: Json = False,
) -> None:
    """Table 2: prune ResNet-20 on CIFAR-10 by Algorithm 1, with masks before or after the shortcut, forward or backward.

    Each variant is a run of its own, until the target is reached. Give the command again after Ctrl-C or a crash: it goes on,
    and what is finished is not run again. A row for each variant is appended to rows.jsonl in the output folder, and tables.md
    is made of those rows alone: the paper's figures beside ours, and the paper's three findings, checked.

    Examples:

    `secateurs reproduce table2`

    `secateurs reproduce table2 --variants BF+`

    Parameters
    ----------
    variants
        Mask before (B) or after (A) the shortcut, forward (F) or backward (B); BF+ is BF with the portfolio and repair.
    budget
        2core: fast ensembles, 15 training steps after a cut, 2 epochs at the end (recipe table2-2core). paper: 10 epochs after
        a cut and 80 at the end, every mask on all training images (recipe paper-resnet), meant for a GPU.
    weights
        "builtin", "public", or a file.
    criterion
        Who ranks the filters: ensemble (the paper), or another that `secateurs prune --criterion` takes.
    repair
        Repair the readers of what is cut by least squares.
    target
        Share of the parameters that has to go.
    max_drop
        α: accuracy on the search set that every cut may lose, a fraction.
    seed
        Everything random follows from it.
    device
        Where to compute: cpu, cuda, mps.
    out
        Folder for rows.jsonl and tables.md.
    runs
        Folder for the runs.
    render
        Run nothing: make the tables anew from the rows at hand.
    as_json
        Print rows and findings as one JSON document, and no progress.
    """
    if not render:
        named = weights if weights in (BUILTIN, PUBLIC) else Path(weights).name
        asked = Request(named, budget, target, criterion, repair, max_drop, seed)
        check_device(device)
        _run(asked, variants, replace(SUBJECT, weights=weights, device=device, seed=seed).settled(), out, runs, quiet=as_json)
    rows = read_rows(out / ROWS, Row)
    if not rows:
        raise RunError(f"{out / ROWS}: no rows to make tables of. Leave out --render, or name the folder with --out.")
    write_text(out / TABLES, page(rows))
    if as_json:
        print_json({"rows": rows, "tables": [_document(table) for table in tables(rows)]})
        return
    for table in tables(rows):
        _print(table)
    say(f"Written: {out / ROWS}, {out / TABLES}")


def _run(asked: Request, variants: tuple[str, ...], origin: Origin, out: Path, runs: Path, *, quiet: bool) -> None:
    """Run the variants that have no row yet, and append their rows."""
    file, changes = BUDGETS[asked.budget]
    recipes = {name: chosen_recipe(file, {**changes, **asked.changes(name)}) for name in variants}
    data = load_data(origin)
    jobs = [Job(name, asked, recipe, build_model(origin), data) for name, recipe in recipes.items()]
    left = [job for job in jobs if not job.done(read_rows(out / ROWS, Row))]
    with display(quiet=quiet) as shown:
        for note in data.notes:
            shown.line(f"Note: {note}.")
        for place, job in enumerate(left):
            began = time.monotonic()
            row = _run_one(job, Titled(shown, f"{job.variant} ({place + 1} of {len(left)})"), origin, runs)
            append_row(out / ROWS, row)
            to_come = (len(left) - place - 1) * (time.monotonic() - began)
            shown.line(f"{job.variant}: {_line(row)}" + (f"; about {clock(to_come)} left" if to_come else ""))
    finished = [job.folder(runs) for job in jobs if (job.folder(runs) / PROVENANCE).exists()]
    if len(finished) > 1:  # rows may have come without their runs
        write_report(finished, out / PAGE)


def _run_one(job: Job, shown: Display, origin: Origin, runs: Path) -> dict[str, Any]:
    folder = job.folder(runs)
    # the watcher needs the steps that lie behind, which the run only knows once it is taken up
    watchers: list[RunWatcher] = []
    run, resumed = take_up(
        job, folder, device=origin.device, watch=lambda event: watchers[0].watch(event), origin=origin.record()
    )
    watchers.append(RunWatcher(shown, job.recipe, run.steps))
    shown.line(f"going on with {folder}: {len(run.steps)} steps are done" if resumed else f"pruning in {folder}")
    try:
        with holding(run, folder):
            began, before = time.monotonic(), sum(step.seconds for step in run.steps)
            outcome = follow(run, watchers[0], report_every=0)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(_AGAIN) from stop
    return row_of(job, run, outcome, seconds=before + time.monotonic() - began, resumed=resumed)


@dataclass(frozen=True)
class Titled:
    """A display on which everything is said of one variant."""

    shown: Display
    title: str

    def update(self, status: Status) -> None:
        """Show this instead of what was shown before."""
        self.shown.update(replace(status, headline=f"{self.title}, {status.headline}"))

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self.shown.line(f"{self.title}, {text}")


def _line(row: dict[str, Any]) -> str:
    gone = [percent(1 - row[what]["after"] / row[what]["before"]) for what in ("parameters", "macs")]
    before, after = (percent(row["test"][when]["accuracy"], 2) for when in ("before", "after"))
    return f"{gone[0]} of the parameters and {gone[1]} of the MACs removed, test accuracy {before} → {after}"


def _print(table: Table) -> None:
    say(table.title)
    for sheet in sheets(table):
        say("")
        say(sheet.title)
        print_table(sheet.columns, sheet.lines)
    for number, finding in enumerate(findings(table.columns), 1):
        say(told(finding, number).replace("**", ""))


def _document(table: Table) -> dict[str, Any]:
    return {
        "asked": dict(table.asked),
        "variants": list(table.rows),
        "findings": [
            {
                "claim": finding.claim,
                "rule": finding.rule,
                "verdict": finding.verdict,
                "paper": [vars(part) for part in finding.paper],
                "ours": [vars(part) for part in finding.ours],
                "missing": list(finding.missing),
            }
            for finding in findings(table.columns)
        ],
    }
