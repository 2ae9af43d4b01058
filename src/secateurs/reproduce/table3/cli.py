"""`secateurs reproduce table3`: the paper's Table 3, ours beside its rivals under one budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from secateurs.cli.compare import ComparisonRequest, Many, comparison_of, refuse, rendered, shares, split, work_through
from secateurs.cli.inputs import BUILTIN, PUBLIC, RUNS, Json, Origin, check_device
from secateurs.cli.progress import Display, display
from secateurs.cli.terminal import print_json, print_table, say, warn
from secateurs.errors import InvalidInput

if TYPE_CHECKING:
    from secateurs.methods.compare.rows import Row

FRESH = "fresh"
_DEPTHS = (20, 32, 56, 110)


@dataclass(frozen=True)
class Base:
    """One depth of the table: its network and weights, and where its rows go."""

    depth: int
    weights: str | None
    out: Path
    runs: Path
    examples: int | None
    device: str | None

    def work_through(self, asked: ComparisonRequest, shown: Display) -> list[str]:
        """Make all rows of this depth that are missing; gives what could not be made."""
        name = f"resnet{self.depth}"
        chosen = self.weights or (BUILTIN if self.depth == 20 else PUBLIC)
        if chosen == FRESH:
            warn(f"{name} is untrained: its rows show that everything runs, and nothing else.")
        origin = Origin(name, "cifar10", weights=None if chosen == FRESH else chosen, device=self.device).settled()
        comparison = comparison_of(origin, self.out / name, self.runs / name, examples=self.examples)
        shown.line(f"Table 3, ResNet-{self.depth}, weights {chosen}: rows in {comparison.rows}, networks in {comparison.runs}")
        return work_through(comparison, asked, shown)


def table3(
    *,
    depth: Annotated[tuple[int, ...], Many] = (20,),
    budget: Literal["none", "short", "2core", "paper"] = "2core",
    methods: Annotated[
        tuple[str, ...],
        Parameter(
            consume_multiple=True,
            negative="",
            show_default="paper portfolio+refit li sfp fpgm:uniform fpgm-sfp random:uniform",
        ),
    ] = (),
    only: Annotated[bool, Parameter(negative="")] = False,
    seeds: Annotated[tuple[int, ...], Many] = (0,),
    targets: Annotated[tuple[str, ...], Many] = ("0.30", "0.45"),
    weights: Annotated[str | None, Parameter(show_default="builtin for depth 20, else public")] = None,
    out: Path = Path("results/table3"),
    runs: Path = RUNS / "table3",
    examples: int | None = None,
    render: Annotated[bool, Parameter(negative="")] = False,
    device: str | None = None,
    as_json: Json = False,
) -> None:
    """Table 3: ResNets on CIFAR-10 made smaller by the paper's method and by its rivals, under one budget of training.

    Accuracy before and after, FLOPs and parameters removed, with the published figures above ours. Rows go to
    OUT/resnetN/rows.jsonl; tables, curves and pages are made of them alone: OUT/table3.md, and in each folder tables.md,
    accuracy-BUDGET.png and .svg, comparison.html. Give the same command again after Ctrl-C or a crash, and it goes on. Rows of
    other budgets, seeds and shares are kept beside.

    Parameters
    ----------
    depth
        One or more of 20, 32, 56 and 110.
    budget
        none; short (1 epoch at the end); 2core (1.7 epochs between the cuts and 2 at the end); paper (10 a cut, 80 at the end).
    methods
        Who is compared: see `secateurs compare --help`.
    only
        Leave out random:uniform and li unless they are named.
    seeds
        Each runs everything anew.
    targets
        Shares of the FLOPs that have to go.
    weights
        builtin, public, a file with a state dict, or fresh: untrained, to see that it runs.
    out
        Folder for the rows, and what is made of them.
    runs
        Folder where methods work, and where their networks are kept.
    examples
        Use at most so many images of each set: to try the command out, not to report from.
    render
        Make tables, curves and pages anew from the rows, and nothing else.
    device
        Where to compute.
    as_json
        Print one JSON document on stdout, and no progress.
    """
    from secateurs.reproduce.table3.tables import BESIDE, METHODS

    for one in depth:
        if one not in _DEPTHS:
            raise InvalidInput(f"--depth {one}: wanted {', '.join(map(str, _DEPTHS))}.")
    check_device(device)
    named = split(methods) or METHODS
    asked = ComparisonRequest(named, (budget,), shares(targets), seeds, () if only else BESIDE)
    bases = [] if render else [Base(one, weights, out, runs, examples, device) for one in depth]
    with display(quiet=as_json) as shown:
        failures = [failure for base in bases for failure in base.work_through(asked, shown)]
    tell(out, as_json=as_json)
    refuse(failures)


def tell(out: Path, *, as_json: bool) -> None:
    """Write the table and all that is made of the rows, and print it."""
    from secateurs._util.files import write_text
    from secateurs.methods.compare.rows import budgets_of, row_fields
    from secateurs.reproduce.table3.tables import findings, table3_sheet, table3_text

    by_depth = _rows(out)
    write_text(out / "table3.md", table3_text(by_depth))
    files = [out / "table3.md", *(file for depth in by_depth for file in rendered(out / f"resnet{depth}"))]
    if as_json:
        rows = {str(depth): [row_fields(row) for row in rows] for depth, rows in by_depth.items()}
        print_json({"out": str(out), "rows": rows, "files": [str(file) for file in files]})
        return
    for budget in dict.fromkeys(name for rows in by_depth.values() for name in budgets_of(rows)):
        sheet = table3_sheet(by_depth, budget)
        say(sheet.title)
        print_table(sheet.columns, sheet.lines, left=(0, 1))
        for sentence in findings(by_depth, budget):
            say(sentence)
    say(f"Written: {', '.join(str(file) for file in files)}")


def _rows(out: Path) -> dict[int, list[Row]]:
    """The rows of all depths that have some."""
    from secateurs.methods.compare.rows import comparison_rows
    from secateurs.methods.compare.run import ROWS

    found = {depth: comparison_rows(out / f"resnet{depth}" / ROWS) for depth in _DEPTHS}
    return {depth: rows for depth, rows in found.items() if rows}
