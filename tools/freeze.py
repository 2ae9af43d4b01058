"""Freezes what runs give, bit for bit: digests of plans, weights and figures for recipes of every kind on two small networks.

    python tools/freeze.py write DIGESTS.json     before a change that must change nothing
    python tools/freeze.py check DIGESTS.json     after it: the same digests, or what differs

Bits depend on the machine, so the file belongs beside the repository, not in it. One thread; a second process for the runs on
two workers. Where time is weighed, it is told by a fixed table (tests/engines.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "lab")]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import secateurs as sc  # noqa: E402
from engines import MacEngine, with_known_times  # noqa: E402
from secateurs import Recipe, TrainSettings, api  # noqa: E402
from secateurs.pruning import context, speeds  # noqa: E402
from torture.runs import ResidualNet, few_digits, perceptron  # noqa: E402

SHORT = TrainSettings(epochs=1, batch=64, lr=0.02)
END = TrainSettings(epochs=2, batch=64, lr=0.02, schedule="step", milestones=(1,))
FEW = {"masks_per_filter": 6, "scoring_examples": 128}


def residual() -> nn.Module:
    torch.manual_seed(0)
    return ResidualNet(8)


def trained(model: nn.Module, loader: DataLoader[Any], epochs: int = 6) -> nn.Module:
    torch.manual_seed(0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for inputs, targets in loader:
            optimiser.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimiser.step()
    return model.eval()


def loaders() -> tuple[DataLoader[Any], DataLoader[Any], DataLoader[Any]]:
    data = few_digits(512, 256)
    sets = [TensorDataset(*part.batch(slice(None))) for part in (data.train, data.search, data.test_set)]
    train, val, test = (DataLoader(each, 64) for each in sets)
    return train, val, test


def right(model: nn.Module) -> Tensor:
    """A value for each validation image."""
    _, val, _ = loaders()
    return torch.cat([(model(inputs).argmax(1) == targets).double() for inputs, targets in val])


def share(model: nn.Module) -> float:
    """One number."""
    return float(right(model).mean())


def own_training(model: nn.Module) -> None:
    train, _, _ = loaders()
    trained(model.train(), train, epochs=1)


Case = tuple[Callable[[], nn.Module], dict[str, Any]]
CASES: dict[str, Case] = {
    "paper, forward": (perceptron, {"recipe": Recipe.paper(max_drop=0.05, search="bisect", **FEW)}),
    "paper, backward, after, two rounds, trained": (
        residual,
        {"recipe": Recipe.paper(max_drop=0.05, direction="backward", shortcut="after", rounds=2, finetune=SHORT, **FEW)},
    ),
    "2core": (
        residual,
        {
            "recipe": Recipe.fast(
                max_drop=0.05, confidence=0, repair="least-squares", repair_examples=128, finetune=SHORT, retrain=END
            )
        },
    ),
    "fast, certified": (perceptron, {"recipe": Recipe.fast(max_drop=0.1, confidence=0.9)}),
    "default, by time": (residual, {"max_drop": 0.1, "engine": "torch"}),
    "default, by time, perceptron": (perceptron, {"max_drop": 0.1, "engine": "torch"}),
    "by MACs": (residual, {"max_drop": 0.1, "engine": "none"}),
    "all positions, target in time": (residual, {"max_drop": 0.3, "target_latency": 0.6, "engine": "torch"}),
    "target in MACs": (residual, {"max_drop": 0.5, "macs": 0.4}),
    "target in parameters, portfolio": (
        perceptron,
        {"max_drop": 0.5, "parameters": 0.4, "recipe": Recipe(criterion="portfolio", repair="least-squares")},
    ),
    "trained trials": (residual, {"max_drop": 0.1, "recipe": Recipe(train_trials=True, retrain=END, engine="none")}),
    "trained trials of the user's": (
        residual,
        {"max_drop": 0.1, "recipe": Recipe(train_trials=True), "finetune": own_training},
    ),
    "retrained": (perceptron, {"max_drop": 0.1, "retrain": END, "engine": "none"}),
    "whole network": (residual, {"max_drop": 0.1, "recipe": Recipe(repair="whole-network", engine="none")}),
    "evaluate, a value for each example": (residual, {"max_drop": 0.1, "evaluate": right}),
    "evaluate, one number": (perceptron, {"max_drop": 0.05, "evaluate": share, "engine": "none"}),
    "evaluate, site by site": (perceptron, {"max_drop": 0.1, "evaluate": right, "recipe": Recipe.fast()}),
    "worst class": (perceptron, {"max_drop": 0.3, "recipe": Recipe(confidence=0.7, worst_class=0.9, engine="none")}),
    "int8": (residual, {"max_drop": 0.2, "deploy": "int8"}),
    "global ensembles": (residual, {"max_drop": 0.1, "recipe": Recipe(criterion="ensemble", engine="none")}),
}
ON_TWO = ("default, by time", "fast, certified", "paper, forward")


def run(kind: str, folder: Path) -> dict[str, str]:
    """One run in a folder, and what it gave."""
    make, options = CASES[kind]
    train, val, test = loaders()
    options = {**options, **({} if "evaluate" in options else {"test": test})}
    result = sc.prune(trained(make(), train), train, val, folder=folder, progress=False, **options)
    weights = hashlib.sha256()
    for name, tensor in sorted(result.model.state_dict().items()):
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    figures = [result.search, result.test, result.bound, result.macs, result.parameters]
    plan = hashlib.sha256((folder / "plan.json").read_bytes())
    return {"plan": plan.hexdigest(), "weights": weights.hexdigest(), "figures": " ".join(map(repr, figures))}


def with_fixed_times() -> None:
    """Tell time by tables, here and in the int8 engine, and round widths to a known multiple."""
    speeds.FINAL_ROUNDS = (3, 3)
    context.preferred_multiple = lambda *given: 2  # type: ignore[attr-defined]
    known = with_known_times(api.engine_for)
    api.engine_for = lambda recipe, measure=None, device=None: (  # type: ignore[attr-defined]
        known(recipe, measure, device) if recipe.engine == "none" else MacEngine(64)
    )


def freeze() -> dict[str, dict[str, str]]:
    """All runs, those on two workers last."""
    torch.set_num_threads(1)
    with_fixed_times()
    found = {}
    with tempfile.TemporaryDirectory() as root:
        for number, kind in enumerate(CASES):
            found[kind] = run(kind, Path(root) / str(number))
            print(f"{kind}: {found[kind]['figures']}", file=sys.stderr, flush=True)
        out = Path(root) / "two.json"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, "two", str(out)]
        subprocess.run([sys.executable, *command], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found |= json.loads(out.read_text())
    return found


def on_two_workers(path: Path) -> None:
    """The runs of a rank; the first one writes what they gave."""
    torch.set_num_threads(1)
    with_fixed_times()
    found = {f"{kind}, two workers": run(kind, path.parent / f"two-{n}") for n, kind in enumerate(ON_TWO)}
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps(found))


def main(action: str, path: Path) -> None:
    if action == "two":
        return on_two_workers(path)
    found = freeze()
    if action == "write":
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} runs frozen in {path}")
        return None
    known = json.loads(path.read_text())
    wrong = [f"{run}: {part}" for run in known for part in known[run] if found.get(run, {}).get(part) != known[run][part]]
    print("\n".join(wrong) or f"all {len(known)} runs as they were")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "check", "two"):
        raise SystemExit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
