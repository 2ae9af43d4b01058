"""What the contract's bound costs, and whether it holds: `python -m benchmarks.contract [slack|enumerate]`.

`slack` is arithmetic, `enumerate` adds up the probabilities of all outcomes. Whole runs are simulated by
`python -m tests.torture.contracts`.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch
from torch import Tensor

from secateurs.selection.contract import Contract, paired_bound

# ---- slack -----------------------------------------------------------------------------------------------------------


def pairs(images: int, lost: int, won: int) -> tuple[Tensor, Tensor]:
    """Values before and after with so many images lost and won, half of the others right."""
    before = torch.zeros(images)
    before[: lost + (images - lost - won) // 2] = 1
    after = before.clone()
    after[:lost], after[images - won :] = 0, 1
    return before, after


def print_slack() -> None:
    print("| certification images | images that changed | drop seen | slack: first no is final | others | after a no |")
    print("| --- | --- | --- | --- | --- | --- |")
    contract = Contract(0.01)
    for images in (500, 1_000, 2_500, 5_000, 10_000):
        for changed, drop in ((0.0, 0.0), (0.01, 0.0), (0.02, 0.005), (0.04, 0.005)):
            lost, won = round(images * (changed + drop) / 2), round(images * (changed - drop) / 2)
            values = pairs(images, lost, won)
            slacks = [
                paired_bound(*values, 0.95).slack,
                contract.judge(*values, answers=[True] * 9).bound.slack,
                contract.judge(*values, answers=[True] * 9 + [False]).bound.slack,
            ]
            print(f"| {images:,} | {changed:.0%} | {drop * 100:.1f} | " + " | ".join(f"{s * 100:.2f}" for s in slacks) + " |")


# ---- enumeration -----------------------------------------------------------------------------------------------------


def uppers(images: int, most: int, chance: float) -> np.ndarray:
    """The bound for every (lost, won) up to `most`."""
    from secateurs.selection import contract

    table = np.full((most + 1, most + 1), np.inf)
    for lost in range(most + 1):
        for won in range(min(most, images - lost) + 1):
            table[lost, won] = (lost - won) / images + contract._pairs_slack(lost, won, images, chance)
    return table


def miss(images: int, chance: float, most: int, rates: np.ndarray) -> tuple[float, tuple[float, float]]:
    """The largest chance, over pairs of true rates with a drop of 0 or more, that the drop is above the bound; and where."""
    bounds, count = uppers(images, most, chance), np.arange(most + 1)
    lost, won = count[:, None], count[None, :]
    rest = np.maximum(images - lost - won, 0)
    log_factorial = np.array([math.lgamma(k + 1) for k in range(images + 1)])
    ways = log_factorial[images] - log_factorial[lost] - log_factorial[won] - log_factorial[rest]
    ways[lost + won > images] = -np.inf
    worst = (0.0, (0.0, 0.0))
    for p in rates[rates > 0]:
        for q in rates[(rates <= p) & (p + rates < 1)]:
            logs = ways + lost * math.log(p) + (won * math.log(q) if q else np.where(won > 0, -np.inf, 0.0))
            found = float(np.exp(logs + rest * math.log1p(-p - q))[bounds < p - q - 1e-12].sum())
            worst = max(worst, (found, (float(p), float(q))))
    return worst


def print_enumeration() -> None:
    print("| images | chance allowed | largest chance found / allowed | at rates lost, won |")
    print("| --- | --- | --- | --- |")
    for images, most, largest in (
        (10, 10, 0.98),
        (60, 60, 0.98),
        (100, 100, 0.98),
        (130, 130, 0.95),
        (250, 200, 0.5),
        (1_000, 110, 0.05),
        (4_000, 110, 0.013),
    ):
        rates = np.concatenate([[0.0], np.geomspace(largest / 300, largest, 28)])
        rates = np.unique(np.concatenate([rates, np.array([2.3, 3.0, 3.01, 3.22, 4.6]) / images]))  # no image lost: e^-3 is 5 %
        for chance in (0.2, 0.1, 0.05, 0.04, 0.01, 0.005, 1e-3, 1e-5, 1e-7):
            found, (p, q) = miss(images, chance, most, rates)
            print(f"| {images:,} | {chance:g} | {found / chance:.2f} | {p:.4f}, {q:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["slack", "enumerate"], default="slack")
    if parser.parse_args().what == "slack":
        print_slack()
    else:
        print_enumeration()


if __name__ == "__main__":
    main()
