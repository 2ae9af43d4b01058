"""Table 2 in the paper's layout, made of rows alone: the paper's figures beside ours, accuracies, and the findings in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateurs._util.tables import Sheet, markdown
from secateurs.reproduce.table2.findings import Finding, findings
from secateurs.reproduce.table2.paper import PAPER, PRINTED_SUMS, Column, TableLayer
from secateurs.reproduce.table2.run import VARIANTS, column_of

Row = Mapping[str, Any]
_NONE = "–"


@dataclass(frozen=True)
class Table:
    """The rows that belong together, by variant, in the paper's order; of several of one variant the latest."""

    asked: Mapping[str, Any]
    rows: Mapping[str, Row]

    @property
    def columns(self) -> dict[str, Column]:
        """What each variant removed."""
        return {name: column_of(row) for name, row in self.rows.items()}

    @property
    def title(self) -> str:
        """What they have in common, in words."""
        asked = self.asked
        repair = ", repaired" if asked["repair"] else ""
        drop = "" if asked["max_drop"] is None else f", α = {asked['max_drop']:g}"
        return (
            f"{asked['weights']} weights, budget {asked['budget']}, {asked['criterion']}{repair}, "
            f"{asked['target']:.0%} of the parameters{drop}, seed {asked['seed']}"
        )


def tables(rows: Sequence[Row]) -> list[Table]:
    """The rows put together by what was asked, in the order in which the first of each came."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(repr(sorted(row["asked"].items())), []).append(row)
    found = []
    for group in grouped.values():
        latest = {row["variant"]: row for row in group}
        found.append(Table(group[0]["asked"], {name: latest[name] for name in VARIANTS if name in latest}))
    return found


def sheets(table: Table) -> list[Sheet]:
    """Filters removed, shares removed, and what came of it."""
    return [_filters(table), _shares(table), _outcomes(table)]


def page(rows: Sequence[Row]) -> str:
    """All tables and findings as Markdown."""
    return "\n".join(
        ["# Table 2: ResNet-20 on CIFAR-10, four ways to prune it\n", *(_section(table) for table in tables(rows))]
    )


def _section(table: Table) -> str:
    parts = [f"## {table.title}\n", *(markdown(sheet) for sheet in sheets(table)), *_notes(table), "### The paper's findings\n"]
    return "\n".join([*parts, *(told(finding, number) for number, finding in enumerate(findings(table.columns), 1))])


def told(finding: Finding, number: int) -> str:
    """A finding in words and numbers, as Markdown."""
    lines = [f"**{number}. {finding.claim}** Here it **{finding.verdict}**.", "", f"Judged by: {finding.rule}", ""]
    lines += [f"- the paper, {part.name}: {part.text}" for part in finding.paper]
    lines += [f"- ours, {part.name}: {part.text}: {'yes' if part.holds else 'no'}" for part in finding.ours]
    lines += [f"- cannot be judged for {why}" for why in finding.missing]
    return "\n".join(lines) + "\n"


def _filters(table: Table) -> Sheet:
    lines = [(*_about(place, layer), *_cells(table, _filters_of(place))) for place, layer in enumerate(_layers(table))]
    sums = list(_cells(table, lambda column: str(column.removed)))
    heads = _heads(table)
    for name, printed in PRINTED_SUMS.items():
        if printed != PAPER[name].removed:
            sums[heads.index(f"{name} paper") - len(_ABOUT)] += f" (printed: {printed})"
    return Sheet("Filters removed", heads, (*lines, (*_total(table), *sums)))


def _shares(table: Table) -> Sheet:
    lines = [(*_about(place, layer), *_cells(table, _share_of(place))) for place, layer in enumerate(_layers(table))]
    sums = _cells(table, lambda column: f"{100 * column.parameters:.2f} / {100 * column.macs:.2f}")
    title = "Per cent of the parameters, and so of the FLOPs, removed; in total: parameters / FLOPs"
    return Sheet(title, _heads(table), (*lines, (*_total(table), *sums)))


_ABOUT = ("layer", "filters", "FLOPs")


def _heads(table: Table) -> tuple[str, ...]:
    pairs = ((name, f"{name} paper") if name in PAPER else (name,) for name in _layout(table))
    return (*_ABOUT, *(head for pair in pairs for head in pair))


def _layout(table: Table) -> list[str]:
    """The columns to show: the paper's four, and others that were run."""
    return [name for name in VARIANTS if name in PAPER or name in table.rows]


def _cells(table: Table, show: Callable[[Column], str]) -> Iterator[str]:
    """One figure of every column: ours, and the paper's beside it."""
    ours = table.columns
    for name in _layout(table):
        yield show(ours[name]) if name in ours else _NONE
        if name in PAPER:
            yield show(PAPER[name])


def _filters_of(place: int) -> Callable[[Column], str]:
    return lambda column: str(column.layers[place].removed)


def _share_of(place: int) -> Callable[[Column], str]:
    return lambda column: f"{100 * column.layers[place].share:.2f}"


def _layers(table: Table) -> tuple[TableLayer, ...]:
    """The layers of any column: all have the same."""
    return next(iter(table.columns.values())).layers


def _about(place: int, layer: TableLayer) -> tuple[str, str, str]:
    return str(place), str(layer.filters), _millions(layer.macs)


def _total(table: Table) -> tuple[str, str, str]:
    first = next(iter(table.rows.values()))
    filters = sum(layer["filters"] for layer in first["layers"])
    return "total", str(filters), _millions(first["counted as in the paper"]["macs"]["before"])


def _outcomes(table: Table) -> Sheet:
    heads = ("variant", "parameters removed", "MACs removed", "search accuracy", "test accuracy", "right", "rounds", "time")
    lines = tuple((name, *_outcome(row)) for name, row in table.rows.items())
    return Sheet("What is left, every parameter counted (BatchNorm, biases); accuracies before → after", heads, lines)


def _outcome(row: Row) -> Iterator[str]:
    for what in ("parameters", "macs"):
        yield f"{1 - row[what]['after'] / row[what]['before']:.2%}"
    for name in ("search", "test"):
        before, after = (100 * row[name][when]["accuracy"] for when in ("before", "after"))
        yield f"{before:.2f} → {after:.2f}"
    test = row["test"]
    yield f"{test['before']['correct']:,} → {test['after']['correct']:,} of {test['count']:,}"
    yield str(row["rounds"])
    yield f"{row['seconds'] / 60:.0f} min" + (" (resumed)" if row["resumed"] else "")


def _notes(table: Table) -> list[str]:
    """What a reader of the numbers has to know."""
    lines = [f"- {name} stopped because {row['stopped']}." for name, row in table.rows.items()]
    recipes = [f"- {name}: {_asked(row['recipe'])}." for name, row in table.rows.items()]
    versions = {f"torch {row['versions']['torch']}, secateurs {row['versions']['secateurs']}" for row in table.rows.values()}
    return [*recipes, *lines, f"- {'; '.join(sorted(versions))}.", ""]


def _asked(recipe: Mapping[str, Any]) -> str:
    """The part of a recipe that a reader of the table wants to know."""
    training = "; ".join(f"{_training(recipe[part])} {when}" for part, when in _TRAINING if part in recipe)
    return (
        f"{recipe['criterion']} ({recipe['estimator']}), repair {recipe['repair']}, α = {recipe['max_drop']:g} at every "
        f"{recipe['budget']}, at most {recipe['rounds']} rounds; {training or 'no training'}"
    )


_TRAINING = (("finetune", "after a cut"), ("retrain", "at the end"))


def _training(settings: Mapping[str, Any]) -> str:
    length = f"{settings['steps']} steps" if "steps" in settings else f"{settings['epochs']} epochs"
    return f"{length} of {settings['batch']} at {settings['lr']:g}"


def _millions(macs: int) -> str:
    return f"{macs / 1e6:.2f}M"
