"""Table 2: ResNet-20 pruned by Algorithm 1 in four variants; what is asked, and what a row of results holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from torch import nn

from secateurs._util.modules import Device
from secateurs._util.tensors import digest
from secateurs.api import Pruner, prune, resume
from secateurs.config import Recipe, recipe_fields
from secateurs.data.splits import Data
from secateurs.graph.cost import cost, table
from secateurs.graph.sites import find_sites
from secateurs.metrics import Evaluation
from secateurs.pruning.folder import read_provenance, recipe_digest
from secateurs.pruning.journal import PROVENANCE
from secateurs.pruning.results import Progress, Result
from secateurs.reproduce.table2.paper import Column, TableLayer

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "BF": {"shortcut": "before", "direction": "forward"},
    "BB": {"shortcut": "before", "direction": "backward"},
    "AF": {"shortcut": "after", "direction": "forward"},
    "AB": {"shortcut": "after", "direction": "backward"},
    # ours: not in the paper, whatever criterion the others are asked to use
    "BF+": {"shortcut": "before", "direction": "forward", "criterion": "portfolio", "repair": "least-squares"},
}
"""Fields of the recipe that make a variant: mask before or after the shortcut, forward or backward."""


Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Some = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class CostChange(TypedDict):
    """A cost before and after."""

    before: Some
    after: Count


class CountedCosts(TypedDict):
    """Costs as the paper counts them."""

    parameters: CostChange
    macs: CostChange


class SetAccuracy(TypedDict):
    """Accuracy of one network on one set."""

    accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)]
    correct: Count


class Accuracies(TypedDict):
    """Accuracy before and after on a set of `count` examples."""

    count: Some
    before: SetAccuracy
    after: SetAccuracy


class LayerFields(TypedDict):
    """The fields of a `Layer`."""

    name: str
    filters: Some
    removed: Count
    weights: Some
    macs: Count
    share: float


Row = TypedDict(
    "Row",
    {
        "table": Literal["table2"],
        "variant": str,
        "asked": dict[str, Any],
        "identity": dict[str, str],
        "model": str,
        "data": dict[str, Any],
        "recipe": dict[str, Any],
        "seed": int,
        "versions": dict[str, str],
        "machine": dict[str, Any],
        "layers": list[LayerFields],
        "counted as in the paper": CountedCosts,
        "parameters": CostChange,
        "macs": CostChange,
        "search": Accuracies,
        "test": Accuracies,
        "stopped": str,
        "rounds": Count,
        "cuts": Count,
        "seconds": Annotated[float, msgspec.Meta(ge=0, le=1e12)],
        "resumed": bool,
    },
)
"""A line of rows.jsonl."""


@dataclass(frozen=True)
class Request:
    """What the columns of one table have in common."""

    weights: str  # "builtin", "public", or the name of a file
    budget: str
    target: float  # share of the parameters that has to go
    criterion: str
    repair: bool
    max_drop: float | None  # None: as the budget's recipe says
    seed: int

    def changes(self, variant: str) -> dict[str, Any]:
        """The fields of the budget's recipe that are another for this variant."""
        fields: dict[str, Any] = {"target_parameters": self.target, "criterion": self.criterion, "seed": self.seed}
        if self.repair:
            fields["repair"] = "least-squares"
        if self.max_drop is not None:
            fields["max_drop"] = self.max_drop
        return {**fields, **VARIANTS[variant]}


@dataclass(frozen=True, eq=False)
class Job:
    """One variant to be run."""

    variant: str
    asked: Request
    recipe: Recipe
    model: nn.Module  # trained
    data: Data

    @cached_property
    def identity(self) -> dict[str, str]:
        """What decides the outcome: two jobs with the same identity are one."""
        weights = {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}
        return {"recipe": recipe_digest(self.recipe), "weights": digest(weights), "data": self.data.digest()}

    def folder(self, runs: Path) -> Path:
        """Where the run is kept: another recipe, network or split has another folder."""
        mark = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:8]
        return runs / f"{self.variant.replace('+', '-plus')}-{self.asked.budget}-seed{self.asked.seed}-{mark}"

    def done(self, rows: Iterable[Mapping[str, Any]]) -> bool:
        """Whether there is a row of this very job."""
        wanted = (self.variant, asdict(self.asked), self.identity)
        return any((row["variant"], row["asked"], row["identity"]) == wanted for row in rows)


def take_up(
    job: Job, folder: Path, *, device: Device, watch: Callable[[Progress], None], origin: Mapping[str, Any]
) -> tuple[Pruner, bool]:
    """The run of the job in `folder`, new or gone on with, and whether it was there before."""
    if (folder / PROVENANCE).exists():
        return resume(folder, job.model, job.data, job.recipe, device=device, watch=watch), True
    return prune(job.model, job.data, job.recipe, folder=folder, device=device, watch=watch, origin=origin), False


def row_of(job: Job, run: Pruner, outcome: Result, *, seconds: float, resumed: bool) -> dict[str, Any]:
    """All that tables and findings are made of, as JSON takes it; `seconds` are those of all steps and of the end."""
    assert run.record.path is not None
    known = read_provenance(run.record.path)
    whole, smaller = (cost(graph, convention="paper") for graph in (run.original, outcome.graph))
    return {
        "table": "table2",
        "variant": job.variant,
        "asked": asdict(job.asked),
        "identity": job.identity,
        "model": known["model"]["class"],
        "data": {name: known["data"][name] for name in ("name", "origin", "sha256")},
        "recipe": recipe_fields(job.recipe),
        "seed": job.recipe.seed,
        "versions": known["versions"],
        "machine": known["machine"],
        "layers": _layers(job.recipe, run, outcome),
        "counted as in the paper": {
            "parameters": {"before": whole.parameters, "after": smaller.parameters},
            "macs": {"before": whole.macs, "after": smaller.macs},
        },
        "parameters": {"before": outcome.cost_before.parameters, "after": outcome.cost_after.parameters},
        "macs": {"before": outcome.cost_before.macs, "after": outcome.cost_after.macs},
        "search": _accuracies(outcome.search_before, outcome.search_after),
        "test": _accuracies(outcome.test_before, outcome.test_after),
        "stopped": outcome.stopped,
        "rounds": 1 + max((step.round for step in outcome.steps), default=0),
        "cuts": sum(bool(step.removed) for step in outcome.steps),
        "seconds": round(seconds, 1),
        "resumed": resumed,
    }


def _layers(recipe: Recipe, run: Pruner, outcome: Result) -> list[dict[str, Any]]:
    """Every site's convolution: its filters, how many went, and what it costs before and after."""
    gone = outcome.graph.plan.removed()
    before = cost(run.original, convention="paper")
    share = {lost.name: lost.parameters for lost in table(before, cost(outcome.graph, convention="paper"))}
    layers = []
    for site in find_sites(run.original, recipe.shortcut):
        (name,) = site.layers
        owned = before.layer(name)
        removed = len(gone.get(site.name, ()))
        layers.append(asdict(TableLayer(name, site.channels, removed, owned.parameters, owned.macs, share[name])))
    return layers


def _accuracies(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    def plain(found: Evaluation) -> dict[str, Any]:
        return {"accuracy": found.accuracy, "correct": round(found.accuracy * found.count)}

    return {"count": after.count, "before": plain(before), "after": plain(after)}


def column_of(row: Mapping[str, Any]) -> Column:
    """A row's column of the table."""
    counts = row["counted as in the paper"]
    gone = {name: 1 - counts[name]["after"] / counts[name]["before"] for name in ("parameters", "macs")}
    layers = tuple(TableLayer(**layer) for layer in row["layers"])
    return Column(layers, gone["parameters"], gone["macs"], counts["parameters"]["before"])
