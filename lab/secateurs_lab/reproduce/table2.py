"""`secateurs reproduce table2`: ResNet-20 pruned in the paper's four variants, its table beside ours, its findings checked."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter
from torch import nn

from secateurs._util.files import write_text
from secateurs._util.journal import PROVENANCE
from secateurs._util.tensors import digest
from secateurs._util.terminal import clock, percent, print_json, print_table, say
from secateurs.api import Pruner, resume
from secateurs.cli.inputs import BUILTIN, PUBLIC, Json, Origin, build_model, check_device, chosen_recipe, load_data
from secateurs.cli.progress import Display, RunWatcher, Status, display
from secateurs.cli.results import follow, holding
from secateurs.config import Recipe, recipe_fields
from secateurs.data.splits import Data
from secateurs.errors import RunError
from secateurs.graph.cost import cost
from secateurs.graph.cost import table as layer_costs
from secateurs.graph.sites import find_sites
from secateurs.pruning.figures import Change, RunResult
from secateurs.pruning.folder import read_provenance, recipe_digest
from secateurs.report import write_report
from secateurs_lab.compare.command import Many
from secateurs_lab.compare.rows import Count, append_row, read_rows
from secateurs_lab.reproduce.table2_tables import (
    Accuracies,
    PaperCosts,
    Request,
    SetAccuracy,
    TableLayer,
    VariantRow,
    findings,
    page,
    sheets,
    tables,
)

SUBJECT = Origin("resnet20", "cifar10")
_PLACES = Path(__file__).parents[1:3]  # installed, or a checkout
RECIPE_2CORE = next(str(file) for place in _PLACES if (file := place / "recipes" / "table2-2core.toml").exists())
BUDGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "2core": (RECIPE_2CORE, {}),
    # "layers can be pruned multiple times if stopping condition is not reached"
    "paper": ("paper-resnet", {"rounds": 10}),
}
Variant = Literal["BF", "BB", "AF", "AB", "BF+"]
ROWS, TABLES, PAGE = "rows.jsonl", "tables.md", "comparison.html"


def table2(
    *,
    variants: Annotated[tuple[Variant, ...], Many] = ("BF", "BB", "AF", "AB"),
    budget: Literal["2core", "paper"] = "2core",
    weights: str = BUILTIN,
    criterion: str = "ensemble",
    repair: Annotated[bool, Parameter(negative="")] = False,
    target: float = 0.3,
    max_drop: Annotated[float | None, Parameter(show_default="0.02; budget paper: 0.005")] = None,
    seed: int = 0,
    device: str | None = None,
    out: Path = Path("lab/results/table2"),
    runs: Path = Path("runs/table2"),
    render: Annotated[bool, Parameter(negative="")] = False,
    as_json: Json = False,
) -> None:
    """Table 2: prune ResNet-20 on CIFAR-10 by Algorithm 1, with masks before or after the shortcut, forward or backward.

    Each variant is a separate run that ends when the target is reached. Give the command again after Ctrl-C or a crash: it
    resumes, and finished variants are not run again. A row for each variant is appended to rows.jsonl in the output folder, and
    tables.md is made of those rows alone: the paper's figures beside ours, and the paper's three findings, checked.

    Examples:

    `secateurs reproduce table2`

    `secateurs reproduce table2 --variants BF+`

    Parameters
    ----------
    variants
        Mask before (B) or after (A) the shortcut, forward (F) or backward (B); BF+ is BF with the portfolio and repair.
    budget
        2core: fast ensembles, 15 training steps after a cut, 2 epochs at the end (lab/recipes/table2-2core.toml). paper: 10
        epochs after a cut and 80 at the end, every mask on all training images (recipe paper-resnet), meant for a GPU.
    weights
        "builtin", "public", or a file.
    criterion
        How to rank the filters: ensemble (the paper), or another that `secateurs prune --criterion` takes.
    repair
        Repair the consumers of a cut site by least squares.
    target
        Share of the parameters to remove.
    max_drop
        α: accuracy on the validation set that every cut may lose, a fraction.
    seed
        Seed of everything random.
    device
        Where to compute: cpu, cuda, mps.
    out
        Folder for rows.jsonl and tables.md.
    runs
        Folder for the runs.
    render
        Run nothing: make the tables again from the existing rows.
    """
    if not render:
        named = weights if weights in (BUILTIN, PUBLIC) else Path(weights).name
        asked = Request(named, budget, target, criterion, repair, max_drop, seed)
        check_device(device)
        _run(asked, variants, replace(SUBJECT, weights=weights, device=device, seed=seed).settled(), out, runs, quiet=as_json)
    rows: list[VariantRow] = read_rows(out / ROWS, VariantRow)
    if not rows:
        raise RunError(f"{out / ROWS}: no rows to make tables of. Leave out --render, or name the folder with --out.")
    write_text(out / TABLES, page(rows))
    if as_json:
        documents = [
            {
                "asked": asdict(request),
                "variants": list(found),
                "findings": [{**asdict(finding), "verdict": finding.verdict} for finding in findings(found)],
            }
            for request, found in tables(rows).items()
        ]
        print_json({"rows": msgspec.to_builtins(rows), "tables": documents})
        return
    for request, found in tables(rows).items():
        say(request.title)
        for sheet in sheets(found):
            say(f"\n{sheet.title}")
            print_table(sheet.columns, sheet.lines)
        for number, finding in enumerate(findings(found), 1):
            say(finding.markdown(number).replace("**", ""))
    say(f"Written: {out / ROWS}, {out / TABLES}")


def _run(asked: Request, variants: tuple[str, ...], origin: Origin, out: Path, runs: Path, *, quiet: bool) -> None:
    """Run the variants without a row, and append their rows."""
    file, changes = BUDGETS[asked.budget]
    recipes = {name: chosen_recipe(file, {**changes, **asked.changes(name)}) for name in variants}
    data = load_data(origin)
    jobs = [VariantJob(name, asked, recipe, build_model(origin), data) for name, recipe in recipes.items()]
    done = [(row.variant, row.asked, row.identity) for row in read_rows(out / ROWS, VariantRow)]
    left = [job for job in jobs if (job.variant, job.asked, job.identity) not in done]
    with display(quiet=quiet) as shown:
        for note in data.notes:
            shown.line(f"Note: {note}.")
        for place, job in enumerate(left):
            began = time.monotonic()
            row = job.run(TitledDisplay(shown, f"{job.variant} ({place + 1} of {len(left)})"), origin, runs)
            append_row(out / ROWS, msgspec.to_builtins(row))
            remaining = (len(left) - place - 1) * (time.monotonic() - began)
            shown.line(
                f"{job.variant}: {percent(row.parameters.removed)} of the parameters and {percent(row.macs.removed)} of the "
                f"MACs removed, test accuracy {percent(row.test.before.accuracy, 2)} → {percent(row.test.after.accuracy, 2)}"
                + (f"; about {clock(remaining)} left" if remaining else "")
            )
    finished = [job.folder(runs) for job in jobs if (job.folder(runs) / PROVENANCE).exists()]
    if len(finished) > 1:  # the rows may be copied from elsewhere, without their runs
        write_report(finished, out / PAGE)


@dataclass(frozen=True)
class TitledDisplay:
    """A display that puts a title before every line."""

    shown: Display
    title: str

    def update(self, status: Status) -> None:
        """Replace the status."""
        self.shown.update(replace(status, headline=f"{self.title}, {status.headline}"))

    def line(self, text: str) -> None:
        """Print a line."""
        self.shown.line(f"{self.title}, {text}")


@dataclass(frozen=True, eq=False)
class VariantJob:
    """One variant to run."""

    variant: str
    asked: Request
    recipe: Recipe
    model: nn.Module  # trained
    data: Data

    @cached_property
    def identity(self) -> dict[str, str]:
        """Digests of all that decides the result."""
        weights = digest(self.model.state_dict())
        return {"recipe": recipe_digest(self.recipe), "weights": weights, "data": self.data.digest()}

    def folder(self, runs: Path) -> Path:
        """Return the folder of the run: another recipe, network or split has another folder."""
        mark = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:8]
        return runs / f"{self.variant.replace('+', '-plus')}-{self.asked.budget}-seed{self.asked.seed}-{mark}"

    def run(self, shown: Display, origin: Origin, runs: Path) -> VariantRow:
        """Prune in the job's folder, or resume there, and return the row."""
        folder = self.folder(runs)
        resumed = (folder / PROVENANCE).exists()
        # the watcher needs the finished steps, which are known only once the run is open
        watchers: list[RunWatcher] = []
        options: dict[str, Any] = {"device": origin.device, "callback": lambda event: watchers[0].watch(event)}
        if resumed:
            run = resume(folder, self.model, self.data, recipe=self.recipe, distributed=False, **options)
        else:
            run = Pruner(
                self.model, self.data, recipe=self.recipe, folder=folder, origin=origin.record(), distributed=False, **options
            )
        watchers.append(RunWatcher(shown, self.recipe, run.steps))
        shown.line(f"resuming {folder}: {len(run.steps)} steps are done" if resumed else f"pruning in {folder}")
        began, before = time.monotonic(), sum(step.seconds for step in run.steps)
        try:
            with holding(run, folder):
                result = follow(run, watchers[0], report_every=0)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt("Interrupted; all finished steps are kept. Resume with the same command.") from stop
        return self._row(run, result, round(before + time.monotonic() - began, 1), resumed)

    def _row(self, run: Pruner, result: RunResult, seconds: float, resumed: bool) -> VariantRow:
        assert run.journal.path is not None
        known = read_provenance(run.journal.path)
        before, after = (cost(graph, convention="paper") for graph in (run.original, result.graph))
        removed = result.graph.plan.removed()
        shares = {lost.name: lost.parameters for lost in layer_costs(before, after)}
        layers = []
        for site in find_sites(run.original, run.context.shortcut):
            (name,) = site.layers
            layer = before.layer(name)
            lost = len(removed.get(site.name, ()))
            layers.append(TableLayer(name, site.channels, lost, layer.parameters, layer.macs, shares[name]))
        return VariantRow(
            variant=self.variant,
            asked=self.asked,
            identity=self.identity,
            model=known["model"]["class"],
            data={name: known["data"][name] for name in ("name", "origin", "sha256")},
            recipe=recipe_fields(self.recipe),
            seed=self.recipe.seed,
            versions=known["versions"],
            machine=known["machine"],
            layers=tuple(layers),
            counted=PaperCosts(Count(before.parameters, after.parameters), Count(before.macs, after.macs)),
            parameters=Count(result.cost_before.parameters, result.cost_after.parameters),
            macs=Count(result.cost_before.macs, result.cost_after.macs),
            search=_accuracies(result.search, len(self.data.search)),
            test=_accuracies(result.test, result.test.count),
            stopped=result.stopped,
            rounds=1 + max((step.round for step in result.steps), default=0),
            cuts=sum(bool(step.removed) for step in result.steps),
            seconds=seconds,
            resumed=resumed,
        )


def _accuracies(found: Change, count: int) -> Accuracies:
    before, after = (SetAccuracy(accuracy, round(accuracy * count)) for accuracy in (found.before, found.after))
    return Accuracies(count, before, after)
