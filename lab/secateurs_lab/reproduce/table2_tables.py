"""Table 2 in the paper's layout, made of rows alone: the paper's figures beside ours, accuracies, and its three findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from secateurs._util.format import NOTHING
from secateurs_lab.compare.rows import Count
from secateurs_lab.sheets import Sheet

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "BF": {"shortcut": "before", "direction": "forward"},
    "BB": {"shortcut": "before", "direction": "backward"},
    "AF": {"shortcut": "after", "direction": "forward"},
    "AB": {"shortcut": "after", "direction": "backward"},
    # ours: not in the paper, with its own criterion whatever the others use
    "BF+": {"shortcut": "before", "direction": "forward", "criterion": "portfolio", "repair": "least-squares"},
}
"""Fields of the recipe that make a variant: mask before or after the shortcut, forward or backward."""

Whole = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


# ---- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableLayer:
    """A convolution, and what it lost. The paper counts weights and their multiply-accumulates, nothing else."""

    name: str
    filters: Positive
    removed: Whole  # filters
    weights: Positive  # before
    macs: Whole  # before, for one image
    share: float  # of the weights, and so of the MACs, removed: a fraction


@dataclass(frozen=True)
class Column:
    """One variant: its convolutions in network order, and the removed shares of the whole network."""

    layers: tuple[TableLayer, ...]
    parameters: float  # fraction of `weights`
    macs: float
    weights: int  # of the whole network before: convolutions and the last linear layer
    printed: int | None = None  # filters removed in total as the paper prints it

    @property
    def removed(self) -> int:
        """Filters removed from all layers."""
        return sum(layer.removed for layer in self.layers)


@dataclass(frozen=True)
class Request:
    """What the columns of one table have in common."""

    weights: str  # "builtin", "public", or the name of a file
    budget: str
    target: float  # share of the parameters to remove
    criterion: str
    repair: bool
    max_drop: float | None  # None: that of the budget's recipe
    seed: int

    def changes(self, variant: str) -> dict[str, Any]:
        """Return the fields of the budget's recipe that this variant changes."""
        fields: dict[str, Any] = {"target_parameters": self.target, "criterion": self.criterion, "seed": self.seed}
        if self.repair:
            fields["repair"] = "least-squares"
        if self.max_drop is not None:
            fields["max_drop"] = self.max_drop
        return {**fields, **VARIANTS[variant]}

    @property
    def title(self) -> str:
        """The request in words."""
        repair = ", repaired" if self.repair else ""
        drop = "" if self.max_drop is None else f", α = {self.max_drop:g}"
        return (
            f"{self.weights} weights, budget {self.budget}, {self.criterion}{repair}, "
            f"{self.target:.0%} of the parameters{drop}, seed {self.seed}"
        )


@dataclass(frozen=True)
class PaperCosts:
    """Costs as the paper counts them."""

    parameters: Count
    macs: Count


@dataclass(frozen=True)
class SetAccuracy:
    """Accuracy of one network on one set."""

    accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)]
    correct: Whole


@dataclass(frozen=True)
class Accuracies:
    """Accuracy before and after on a set of `count` examples."""

    count: Positive
    before: SetAccuracy
    after: SetAccuracy


class VariantRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of rows.jsonl: one variant, pruned."""

    table: Literal["table2"] = "table2"
    variant: str
    asked: Request
    identity: dict[str, str]
    model: str
    data: dict[str, Any]
    recipe: dict[str, Any]
    seed: int
    versions: dict[str, str]
    machine: dict[str, Any]
    layers: tuple[TableLayer, ...]
    counted: PaperCosts = msgspec.field(name="counted as in the paper")
    parameters: Count
    macs: Count
    search: Accuracies
    test: Accuracies
    stopped: str
    rounds: Whole
    cuts: Whole
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    resumed: bool

    @property
    def column(self) -> Column:
        """This row's column of the table."""
        parameters, macs = self.counted.parameters, self.counted.macs
        return Column(self.layers, parameters.removed, macs.removed, parameters.before)


def tables(rows: Iterable[VariantRow]) -> dict[Request, dict[str, VariantRow]]:
    """Group rows by request, then by variant in the paper's order; of several rows of one variant the latest counts."""
    latest: dict[Request, dict[str, VariantRow]] = {}
    for row in rows:
        latest.setdefault(row.asked, {})[row.variant] = row
    return {asked: {name: found[name] for name in VARIANTS if name in found} for asked, found in latest.items()}


# ---- the paper -------------------------------------------------------------------------------------------------------

_LAYERS = ("conv1", *(f"layer{stage}.{block}.conv{place}" for stage in (1, 2, 3) for block in (0, 1, 2) for place in (1, 2)))
_FILTERS = (16,) * 7 + (32,) * 6 + (64,) * 6
_WEIGHTS = (432, *(2_304,) * 6, 4_608, *(9_216,) * 5, 18_432, *(36_864,) * 5)
_MACS = (442_368, *(2_359_296,) * 6, 1_179_648, *(2_359_296,) * 5, 1_179_648, *(2_359_296,) * 5)
_LINEAR = 640


def _printed(removed: tuple[int, ...], percent: str, parameters: float, macs: float, total: int) -> Column:
    shares = (float(text) / 100 for text in percent.split())
    layers = tuple(map(TableLayer, _LAYERS, _FILTERS, removed, _WEIGHTS, _MACS, shares))
    return Column(layers, parameters / 100, macs / 100, sum(_WEIGHTS) + _LINEAR, total)


PAPER = {
    "BF": _printed(
        (1, 6, 4, 7, 6, 0, 0, 5, 1, 14, 20, 0, 2, 0, 4, 34, 30, 0, 24),
        "6.25 41.41 53.12 43.75 64.84 0.00 0.00 15.62 18.26 43.75 78.91 0.00 6.25 0.00 6.25 53.12 75.10 0.00 37.50",
        *(30.70, 30.91, 187),  # but the column adds up to 158
    ),
    "BB": _printed(
        (0, 1, 0, 1, 0, 0, 0, 0, 0, 7, 9, 1, 6, 16, 6, 16, 23, 21, 23),
        "0.00 6.25 6.25 6.25 6.25 0.00 0.00 0.00 0.00 21.88 43.85 3.12 21.29 25.00 32.03 25.00 51.95 32.81 56.96",
        *(32.33, 18.99, 130),
    ),
    "AF": _printed(
        (2, 6, 3, 6, 1, 1, 0, 6, 4, 6, 0, 20, 0, 9, 7, 26, 5, 0, 21),
        "12.50 45.31 49.22 49.22 41.41 12.11 6.25 18.75 28.91 28.91 18.75 62.50 62.50 14.06 23.46 47.12 45.26 7.81 32.81",
        *(31.55, 33.76, 123),
    ),
    "AB": _printed(
        (0, 9, 0, 8, 0, 0, 0, 2, 0, 13, 0, 0, 0, 19, 0, 18, 1, 16, 27),
        "0.00 56.25 56.25 50.00 50.00 0.00 0.00 6.25 6.25 40.62 40.62 0.00 0.00 29.69 29.69 28.12 29.25 26.17 56.64",
        *(30.41, 28.38, 113),
    ),
}
"""The paper's four columns: filters removed, per cent of each layer's parameters and FLOPs, and the printed totals."""


# ---- the paper's findings --------------------------------------------------------------------------------------------

_Decide = Callable[[Mapping[str, Column]], tuple[str, bool]]
Verdict = Literal["holds", "holds in part", "does not hold", "cannot be judged"]

ENOUGH = 0.25  # share of the parameters: a network that lost less is not comparable to the paper's, which lost 30 %
NEARLY = 0.10  # "nearly untouched": at most this share of the filters


@dataclass(frozen=True)
class FindingPart:
    """One case of a finding: a variant, or two that are compared."""

    name: str
    text: str
    holds: bool


@dataclass(frozen=True)
class Finding:
    """A sentence of the paper, the rule that decides whether it holds, and the evidence."""

    claim: str
    rule: str
    paper: tuple[FindingPart, ...]
    ours: tuple[FindingPart, ...]
    missing: tuple[str, ...]  # why parts of it cannot be decided

    @property
    def verdict(self) -> Verdict:
        """The verdict over the parts that can be decided."""
        if not self.ours:
            return "cannot be judged"
        held = [part.holds for part in self.ours]
        return "holds" if all(held) else "holds in part" if any(held) else "does not hold"

    def markdown(self, number: int) -> str:
        """Return the finding in words and numbers."""
        lines = [f"**{number}. {self.claim}** Here it **{self.verdict}**.", "", f"Judged by: {self.rule}", ""]
        lines += [f"- the paper, {part.name}: {part.text}" for part in self.paper]
        lines += [f"- ours, {part.name}: {part.text}: {'yes' if part.holds else 'no'}" for part in self.ours]
        lines += [f"- cannot be judged for {why}" for why in self.missing]
        return "\n".join(lines) + "\n"


def findings(rows: Mapping[str, VariantRow]) -> list[Finding]:
    """Check the three findings on rows by variant; only the paper's four variants count."""
    columns = {name: row.column for name, row in rows.items()}
    found = []
    for claim, rule, cases, decide in _CLAIMS:
        paper, ours, missing = [], [], []
        for case in cases:
            variants = case.split(" and ")
            paper.append(FindingPart(case, *decide({name: PAPER[name] for name in variants})))
            if reasons := [reason for name in variants if (reason := _why_not(name, columns.get(name)))]:
                missing.append(f"{case}: {'; '.join(reasons)}")
            else:
                ours.append(FindingPart(case, *decide({name: columns[name] for name in variants})))
        found.append(Finding(claim, rule, tuple(paper), tuple(ours), tuple(missing)))
    return found


def _why_not(name: str, column: Column | None) -> str:
    """Say why a variant cannot be judged; empty if it can."""
    if column is None:
        return f"{name} was not run"
    return f"{name} lost {column.parameters:.1%} of the parameters, too little to compare" if column.parameters < ENOUGH else ""


def _first_and_last_blocks(columns: Mapping[str, Column]) -> tuple[str, bool]:
    (column,) = columns.values()
    stage = (len(column.layers) - 1) // 3  # the first convolution belongs to none
    ends = column.layers[1 : 1 + stage], column.layers[-stage:]
    first, last = (
        f"{_removed(end)[1]}, {sum(layer.share * layer.weights for layer in end) / column.weights:.2%} of all parameters,"
        for end in ends
    )
    lost = [sum(layer.removed for layer in end) for end in ends]
    return f"{first} from the first blocks, {last} from the last", lost[1] > lost[0]


def _forward_and_backward(columns: Mapping[str, Column]) -> tuple[str, bool]:
    forward, backward = (column.macs / column.parameters for column in columns.values())
    text = "; ".join(
        f"{name} {column.macs:.2%} of the FLOPs with {column.parameters:.2%} of the parameters ({rate:.2f} for 1)"
        for (name, column), rate in zip(columns.items(), (forward, backward), strict=True)
    )
    return text, forward > backward


def _second_convolutions(columns: Mapping[str, Column]) -> tuple[str, bool]:
    (column,) = columns.values()
    first, of_first = _removed(column.layers[1::2])
    second, of_second = _removed(column.layers[2:-1:2])
    _, of_last = _removed(column.layers[-1:])
    text = f"{of_second} of the second convolutions, {of_first} of the first ones; {of_last} of the last layer"
    return text, second <= NEARLY and second < first / 2


def _removed(layers: Sequence[TableLayer]) -> tuple[float, str]:
    """Return the share of the filters that was removed, as a number and in words."""
    removed, filters = sum(layer.removed for layer in layers), sum(layer.filters for layer in layers)
    return removed / filters, f"{removed} of {filters} filters ({removed / filters:.1%})"


_CLAIMS: tuple[tuple[str, str, Sequence[str], _Decide], ...] = (
    (
        "The last layers lose most of the filters.",
        "More filters go from the last three residual blocks than from the first three.",
        tuple(PAPER),
        _first_and_last_blocks,
    ),
    (
        "Forward pruning removes more FLOPs at equal parameters.",
        "FLOPs removed for each per cent of the parameters removed: more forward than backward.",
        ("BF and BB", "AF and AB"),
        _forward_and_backward,
    ),
    (
        "With the mask after the shortcut, the second convolutions are left nearly untouched.",
        f"Of the filters of the second convolutions, the last one left out, at most {NEARLY:.0%} go, and less than half "
        f"the share of the first convolutions.",
        ("AF", "AB"),
        _second_convolutions,
    ),
)


# ---- tables ----------------------------------------------------------------------------------------------------------


def sheets(rows: Mapping[str, VariantRow]) -> list[Sheet]:
    """Return the tables of filters removed, of shares removed, and of what is left, from rows by variant."""
    return [
        _by_layer(rows, "Filters removed", lambda layer: str(layer.removed), _filters),
        _by_layer(
            rows,
            "Per cent of the parameters, and so of the FLOPs, removed; in total: parameters / FLOPs",
            lambda layer: f"{100 * layer.share:.2f}",
            lambda column: f"{100 * column.parameters:.2f} / {100 * column.macs:.2f}",
        ),
        Sheet(
            "What is left, every parameter counted (BatchNorm, biases); accuracies before → after",
            ("variant", "parameters removed", "MACs removed", "search accuracy", "test accuracy", "right", "rounds", "time"),
            tuple((name, *_left(row)) for name, row in rows.items()),
        ),
    ]


def _by_layer(
    rows: Mapping[str, VariantRow], title: str, cell: Callable[[TableLayer], str], total: Callable[[Column], str]
) -> Sheet:
    """Return a line for each layer and one for all; columns are the paper's four, and others that were run."""
    first = next(iter(rows.values()))  # all have the same layers
    layers = first.layers

    def cells(column: Column) -> list[str]:
        return [*map(cell, column.layers[: len(layers)]), total(column)]

    columns = {
        "layer": [*map(str, range(len(layers))), "total"],
        "filters": [*(str(layer.filters) for layer in layers), str(sum(layer.filters for layer in layers))],
        "FLOPs": [f"{macs / 1e6:.2f}M" for macs in (*(layer.macs for layer in layers), first.counted.macs.before)],
    }
    for name in VARIANTS:
        if name in rows:
            columns[name] = cells(rows[name].column)
        elif name in PAPER:
            columns[name] = [NOTHING] * (len(layers) + 1)
        if name in PAPER:
            columns[f"{name} paper"] = cells(PAPER[name])
    return Sheet(title, tuple(columns), tuple(zip(*columns.values(), strict=True)))


def _filters(column: Column) -> str:
    return f"{column.removed}" + ("" if column.printed in (None, column.removed) else f" (printed: {column.printed})")


def _left(row: VariantRow) -> tuple[str, ...]:
    test = row.test
    return (
        f"{row.parameters.removed:.2%}",
        f"{row.macs.removed:.2%}",
        *(f"{100 * found.before.accuracy:.2f} → {100 * found.after.accuracy:.2f}" for found in (row.search, test)),
        f"{test.before.correct:,} → {test.after.correct:,} of {test.count:,}",
        str(row.rounds),
        f"{row.seconds / 60:.0f} min" + (" (resumed)" if row.resumed else ""),
    )


def page(rows: Sequence[VariantRow]) -> str:
    """Return all tables and findings as Markdown."""
    parts = ["# Table 2: ResNet-20 on CIFAR-10, four ways to prune it\n"]
    for asked, found in tables(rows).items():
        versions = {f"torch {row.versions['torch']}, secateurs {row.versions['secateurs']}" for row in found.values()}
        parts += [f"## {asked.title}\n", *(sheet.markdown() for sheet in sheets(found))]
        parts += [f"- {name}: {_settings(row.recipe)}." for name, row in found.items()]
        parts += [f"- {name} stopped because {row.stopped}." for name, row in found.items()]
        parts += [f"- {'; '.join(sorted(versions))}.", "", "### The paper's findings\n"]
        parts += [finding.markdown(number) for number, finding in enumerate(findings(found), 1)]
    return "\n".join(parts)


def _settings(recipe: Mapping[str, Any]) -> str:
    """Describe the part of a recipe that a reader of the table needs."""
    training = []
    for name, when in (("finetune", "after a cut"), ("retrain", "at the end")):
        if part := recipe.get(name):
            length = f"{part['steps']} steps" if "steps" in part else f"{part['epochs']} epochs"
            training.append(f"{length} of {part['batch']} at {part['lr']:g} {when}")
    return (
        f"{recipe['criterion']} ({recipe['estimator']}), repair {recipe['repair']}, α = {recipe['max_drop']:g} at every "
        f"{recipe['budget']}, at most {recipe['rounds']} rounds; {'; '.join(training) or 'no training'}"
    )
