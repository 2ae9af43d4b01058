"""The paper's three findings about Table 2, checked on any set of columns: what the paper has, what we have, does it hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from secateurs.reproduce.table2.paper import PAPER, Column, TableLayer

Verdict = Literal["holds", "holds in part", "does not hold", "cannot be judged"]

ENOUGH = 0.25  # share of the parameters: a network that lost less is not yet like the paper's, which lost 30 %
NEARLY = 0.10  # "nearly untouched": at most this share of the filters


@dataclass(frozen=True)
class FindingPart:
    """One case of a finding: a variant, or two that are compared."""

    name: str
    text: str
    holds: bool


@dataclass(frozen=True)
class Finding:
    """A sentence of the paper, the rule that it is judged by, and what speaks for or against it."""

    claim: str
    rule: str
    paper: tuple[FindingPart, ...]
    ours: tuple[FindingPart, ...]
    missing: tuple[str, ...]  # why parts of it cannot be judged

    @property
    def verdict(self) -> Verdict:
        """Over the parts that can be judged."""
        if not self.ours:
            return "cannot be judged"
        held = [part.holds for part in self.ours]
        return "holds" if all(held) else "holds in part" if any(held) else "does not hold"


def findings(columns: Mapping[str, Column]) -> tuple[Finding, ...]:
    """The three findings, on columns by variant; columns that are not the paper's four do not count."""
    single = ("BF", "BB", "AF", "AB")
    return (
        _finding(
            "The last layers lose most of the filters.",
            "More filters go from the last three residual blocks than from the first three.",
            [(name,) for name in single],
            _ends,
            columns,
        ),
        _finding(
            "Forward pruning removes more FLOPs at equal parameters.",
            "FLOPs removed for each per cent of the parameters removed: more forward than backward.",
            [("BF", "BB"), ("AF", "AB")],
            _directions,
            columns,
        ),
        _finding(
            "With the mask after the shortcut, the second convolutions are left nearly untouched.",
            f"Of the filters of the second convolutions, the last one left out, at most {NEARLY:.0%} go, and less than half "
            f"the share of the first convolutions.",
            [("AF",), ("AB",)],
            _seconds,
            columns,
        ),
    )


def _finding(
    claim: str,
    rule: str,
    cases: Sequence[tuple[str, ...]],
    judge: Callable[[tuple[str, ...], Sequence[Column]], FindingPart],
    columns: Mapping[str, Column],
) -> Finding:
    paper = tuple(judge(case, [PAPER[name] for name in case]) for case in cases)
    reasons = {case: "; ".join(_why_not(case, columns)) for case in cases}
    ours = tuple(judge(case, [columns[name] for name in case]) for case in cases if not reasons[case])
    missing = tuple(f"{' and '.join(case)}: {why}" for case, why in reasons.items() if why)
    return Finding(claim, rule, paper, ours, missing)


def _why_not(case: Iterable[str], columns: Mapping[str, Column]) -> list[str]:
    """Why the variants cannot be judged; empty: they can."""
    reasons = []
    for name in case:
        if name not in columns:
            reasons.append(f"{name} was not run")
        elif columns[name].parameters < ENOUGH:
            reasons.append(f"{name} lost {columns[name].parameters:.1%} of the parameters, too little to compare")
    return reasons


def _ends(case: tuple[str, ...], columns: Sequence[Column]) -> FindingPart:
    (column,) = columns
    stage = (len(column.layers) - 1) // 3  # the first convolution belongs to none
    first, last = column.layers[1 : 1 + stage], column.layers[-stage:]
    text = f"{_lost(first, column.weights)} from the first blocks, {_lost(last, column.weights)} from the last"
    return FindingPart(case[0], text, _removed(last) > _removed(first))


def _directions(case: tuple[str, ...], columns: Sequence[Column]) -> FindingPart:
    forward, backward = columns
    text = "; ".join(
        f"{name} {column.macs:.2%} of the FLOPs with {column.parameters:.2%} of the parameters ({_rate(column):.2f} for 1)"
        for name, column in zip(case, columns, strict=True)
    )
    return FindingPart(" and ".join(case), text, _rate(forward) > _rate(backward))


def _seconds(case: tuple[str, ...], columns: Sequence[Column]) -> FindingPart:
    (column,) = columns
    firsts, seconds, last = column.layers[1::2], column.layers[2:-1:2], column.layers[-1:]
    text = f"{_of(seconds)} of the second convolutions, {_of(firsts)} of the first ones; {_of(last)} of the last layer"
    return FindingPart(case[0], text, _share(seconds) <= NEARLY and _share(seconds) < _share(firsts) / 2)


def _rate(column: Column) -> float:
    return column.macs / column.parameters


def _removed(layers: Iterable[TableLayer]) -> int:
    return sum(layer.removed for layer in layers)


def _share(layers: Sequence[TableLayer]) -> float:
    return _removed(layers) / sum(layer.filters for layer in layers)


def _of(layers: Sequence[TableLayer]) -> str:
    return f"{_removed(layers)} of {sum(layer.filters for layer in layers)} filters ({_share(layers):.1%})"


def _lost(layers: Sequence[TableLayer], weights: int) -> str:
    parameters = sum(layer.share * layer.weights for layer in layers) / weights
    return f"{_of(layers)}, {parameters:.2%} of all parameters,"
