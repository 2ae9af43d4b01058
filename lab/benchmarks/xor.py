"""Table 1 in batches of experiments against the plain way, one network after the other: `python -m benchmarks.xor`.

The plain way is what one would write first: nn.Sequential, torch.optim, a loop over experiments, over batches and over
masks. It runs a few experiments and is extrapolated to as many as the batched way runs. Both use one thread; CPU time
is compared.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.conditions import conditions
from secateurs._util.files import write_text
from secateurs.scoring.importance import fit_importance, scores
from secateurs.scoring.masks import sample_masks
from secateurs_lab.reproduce.xor import SCHEDULES, SUCCESS, ExperimentRow, table
from secateurs_lab.reproduce.xor_nets import Setting, one_thread

RESULTS = Path(__file__).parent / "results" / "xor.json"
WANTED = 50  # times the batched way's CPU time


def draw_task(setting: Setting) -> tuple[Tensor, Tensor]:
    angle = 2 * math.pi * torch.rand(())
    a = torch.stack([angle.cos(), angle.sin()])
    b = torch.stack([-angle.sin(), angle.cos()])
    x = torch.randn(setting.points, 2)
    return x, ((x @ a) * (x @ b) > 0).float()


def new_net(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, 1))


def train(net: nn.Sequential, x: Tensor, y: Tensor, setting: Setting) -> nn.Sequential:
    optimiser = torch.optim.SGD(net.parameters(), lr=setting.learning_rate)
    loss = nn.BCEWithLogitsLoss()
    for _ in range(setting.epochs):
        for batch in torch.randperm(len(x)).split(setting.batch):
            optimiser.zero_grad()
            loss(net(x[batch]).squeeze(-1), y[batch]).backward()
            optimiser.step()
    return net


def kept_neurons(net: nn.Sequential, kept: Tensor) -> nn.Sequential:
    ids = kept.nonzero().squeeze(-1)
    smaller = new_net(len(ids))
    with torch.no_grad():
        smaller[0].weight.copy_(net[0].weight[ids])
        smaller[2].weight.copy_(net[2].weight[:, ids])
        smaller[2].bias.copy_(net[2].bias)
    return smaller


@torch.no_grad()
def choose(net: nn.Sequential, x: Tensor, y: Tensor, keep: int, setting: Setting, generator: torch.Generator) -> Tensor:
    hidden = net[0].weight.shape[0]
    masks = sample_masks(hidden, setting.masks, off=setting.off, generator=generator)
    loss = nn.BCEWithLogitsLoss()
    losses = torch.stack([loss(net[2](net[1](net[0](x)) * mask).squeeze(-1), y) for mask in masks])
    largest = fit_importance(masks, scores(losses)).coef.topk(keep).indices
    return torch.zeros(hidden, dtype=torch.bool).scatter_(0, largest, True)


def solved(net: nn.Sequential, x: Tensor, y: Tensor) -> bool:
    with torch.no_grad():
        return float(((net(x).squeeze(-1) > 0) == (y > 0.5)).float().mean()) >= SUCCESS


def plain_experiment(setting: Setting, generator: torch.Generator) -> list[bool]:
    """The five rows of Table 1 for one experiment."""
    x, y = draw_task(setting)
    results = [solved(train(new_net(3), x, y, setting), x, y)]
    whole = train(new_net(10), x, y, setting)
    results.append(solved(whole, x, y))
    by_chance = torch.zeros(10, dtype=torch.bool).scatter_(0, torch.randperm(10)[:3], True)
    results.append(solved(train(kept_neurons(whole, by_chance), x, y, setting), x, y))
    for sizes in SCHEDULES.values():
        net = whole
        for size in sizes:
            net = train(kept_neurons(net, choose(net, x, y, size, setting, generator)), x, y, setting)
        results.append(solved(net, x, y))
    return results


def measure(experiments: int, plain: int) -> dict[str, Any]:
    setting = Setting(experiments=experiments, seed=17)
    torch.manual_seed(17)
    generator = torch.Generator().manual_seed(17)
    with one_thread():
        start = time.process_time()
        successes = [plain_experiment(setting, generator) for _ in range(plain)]
        plain_seconds = (time.process_time() - start) / plain * experiments
        start, clock = time.process_time(), time.perf_counter()
        rows: tuple[ExperimentRow, ...] = table(setting)
        batched_seconds, elapsed = time.process_time() - start, time.perf_counter() - clock
        measured_on = asdict(conditions())
    return {
        "experiments": experiments,
        "plain experiments measured": plain,
        "plain CPU seconds, extrapolated": round(plain_seconds, 1),
        "batched CPU seconds": round(batched_seconds, 1),
        "batched seconds elapsed": round(elapsed, 1),
        "ratio": round(plain_seconds / batched_seconds, 1),
        "plain successes by row": [sum(row) for row in zip(*successes, strict=True)],
        "batched percent by row": [row.training.percent for row in rows],
        "conditions": measured_on,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--experiments", type=int, default=1000)
    parser.add_argument("--plain", type=int, default=10, help="experiments of the plain way to measure")
    given = parser.parse_args()
    text = json.dumps(result := measure(given.experiments, given.plain), indent=1)
    print(text)
    write_text(RESULTS, text + "\n")
    if result["ratio"] < WANTED:
        sys.exit(f"batched training is {result['ratio']} times faster, wanted {WANTED}")


if __name__ == "__main__":
    main()
