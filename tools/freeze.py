"""Freezes what runs give, bit for bit: digests of plans, weights and journals for recipes of every kind on two small networks.

    python tools/freeze.py write DIGESTS.json     before a change that must change nothing
    python tools/freeze.py check DIGESTS.json     after it: the same digests, or what differs

Everything goes through the command line, which a rearrangement of the code keeps. Bits depend on the machine, so the file
belongs beside the repository, not in it. One thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import safe_open

# what differs from run to run, or follows from the rest
TIMES = {"seconds", "training_seconds", "phases", "latency", "started", "digest", "check"}

NETWORKS: dict[str, list[str]] = {
    "mlp": ["--model", "mlp", "--model-option", "hidden=[12,10]", "--data", "digits"],
    "resnet8": [
        "--model",
        "resnet8",
        "--model-option",
        "in_channels=1",
        "--model-option",
        "widths=[6,8,10]",
        "--data",
        "digits",
    ],
}

TRAINED = """
[finetune]
epochs = 1
batch = 64
lr = 0.02

[retrain]
epochs = 2
batch = 64
lr = 0.02
schedule = "step"
milestones = [1]
"""
SITE_BY_SITE = 'allocation = "sequential"\ncriterion = "ensemble"\nrepair = "none"\n'
PAPER = SITE_BY_SITE + (
    'estimator = "losses"\nadaptive = false\nmasks_per_filter = 6\nscoring_examples = 128\nbudget = "site"\nconfidence = 0\n'
)

RECIPES: dict[str, str] = {
    "paper forward": 'max_drop = 0.03\nsearch = "bisect"\n' + PAPER,
    "paper backward, after": 'max_drop = 0.03\ndirection = "backward"\nshortcut = "after"\n' + PAPER,
    "fast": SITE_BY_SITE + "max_drop = 0.05\nconfidence = 0.9\n",
    "best": 'max_drop = 0.1\nconfidence = 0.9\ncriterion = "portfolio"\nrepair = "every-layer"\nallocation = "global"\n'
    "repair_examples = 128\n",
    "two rounds, trained": "max_drop = 0.05\nrounds = 2\n" + PAPER + TRAINED,
    "global with a target": 'max_drop = 0.5\nconfidence = 0\nallocation = "global"\ncriterion = "l1"\ntarget_macs = 0.4\n'
    'repair = "least-squares"\nrepair_examples = 128\n',
    "leave-one-out": 'max_drop = 0.05\nconfidence = 0\nallocation = "sequential"\ncriterion = "leave-one-out"\n'
    'repair = "none"\nshortcut = "after"\n',
    "obs": 'max_drop = 0.05\nconfidence = 0\nallocation = "sequential"\ncriterion = "obs"\nrepair = "least-squares"\n'
    "repair_examples = 128\n",
    "pairs": SITE_BY_SITE
    + 'max_drop = 0.05\nconfidence = 0\nestimator = "losses"\nadaptive = false\nmodel = "pairs"\nmasks = 80\n'
    "scoring_examples = 128\n",
}


def secateurs(*arguments: str) -> None:
    """One command, in a process of its own with one thread."""
    code = "from secateurs.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"secateurs {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")


def digests(folder: Path) -> dict[str, str]:
    """Of the plan, of the weights without their file's header, and of the journal without times."""
    weights = hashlib.sha256()
    with safe_open(folder / "pruned.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    lines = [plain(json.loads(line)) for line in (folder / "journal.jsonl").read_text().splitlines()]
    journal = hashlib.sha256("\n".join(json.dumps(line, sort_keys=True) for line in lines).encode())
    plan = hashlib.sha256((folder / "plan.json").read_bytes())
    return {"plan": plan.hexdigest(), "weights": weights.hexdigest(), "journal": journal.hexdigest()}


def plain(value: Any) -> Any:
    """A journal's entry without what differs from run to run."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items() if key not in TIMES}
    return [plain(entry) for entry in value] if isinstance(value, list) else value


def freeze(root: Path) -> dict[str, dict[str, str]]:
    """All runs, two at a time."""
    for name, network in NETWORKS.items():
        secateurs("train", *network, "--epochs", "6", "--lr", "0.1", "--batch", "64", "--out", str(root / f"trained-{name}"))

    def run(name: str, kind: str) -> tuple[str, dict[str, str]]:
        recipe, folder = root / f"{name}-{kind}.toml", root / f"{name}-{kind}"
        recipe.write_text(RECIPES[kind])
        weights = str(next((root / f"trained-{name}").glob("*.safetensors")))
        secateurs("prune", *NETWORKS[name], "--weights", weights, "--recipe", str(recipe), "--out", str(folder))
        return f"{name}: {kind}", digests(folder)

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(lambda pair: run(*pair), [(name, kind) for name in NETWORKS for kind in RECIPES]))


def main(action: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = freeze(Path(folder))
    if action == "write":
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} runs frozen in {path}")
        return
    known = json.loads(path.read_text())
    wrong = [f"{run}: {part}" for run in known for part in known[run] if found.get(run, {}).get(part) != known[run][part]]
    print("\n".join(wrong) or f"all {len(known)} runs as they were")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "check"):
        raise SystemExit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
