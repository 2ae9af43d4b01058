"""The `Result` of a run: the smaller network and all that is known about it, to be printed, saved, exported and reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from secateurs._util.journal import records_of
from secateurs.compaction.in_place import cut_
from secateurs.compaction.serialization import save
from secateurs.config import Recipe
from secateurs.errors import InvalidInput
from secateurs.graph.plan import Plan
from secateurs.pruning.context import PruningContext
from secateurs.pruning.estimate import to_weigh_time
from secateurs.pruning.figures import Change, ResultFigures, RunResult, promised_bound
from secateurs.pruning.results import ChosenAllocation, Step
from secateurs.report.charts import Plots, plots
from secateurs.report.page import write_report

_FASTER = "Not fast enough? target_latency=0.5, a larger max_drop, retrain='gentle', another engine (engine='onnxruntime')."


@dataclass(frozen=True, kw_only=True, eq=False)
class Result(RunResult):
    """The smaller network, and all that is known about it. `print(result)` says what matters in a few lines."""

    max_drop: float = field(metadata={"journal": False})
    confidence: float = field(metadata={"journal": False})  # of the bound; 0: nothing is promised
    notes: tuple[str, ...] = field(metadata={"journal": False})
    folder: Path | None = field(metadata={"journal": False})
    records: tuple[Any, ...] = field(metadata={"journal": False}, repr=False)  # of the journal
    recipe: Recipe = field(metadata={"journal": False}, repr=False)
    context: PruningContext = field(metadata={"journal": False}, repr=False)  # of the run: an int8 file is certified in it
    int8_answers: list[bool] = field(default_factory=list, metadata={"journal": False}, repr=False)  # without a folder

    @property
    def model(self) -> nn.Module:
        """The smaller network: an ordinary module, to be called, trained, saved."""
        return self.graph.module

    @property
    def plan(self) -> Plan:
        """The filters that were removed, in the original network's numbers."""
        return self.graph.plan

    @property
    def validation(self) -> Change:
        """The metric on the validation set, before and after; `test` has that on the test set (NaN without one)."""
        return self.search

    @property
    def accuracy_before(self) -> float:
        """The metric of the original network, on the test set if one was given, else on the validation set."""
        return self.test.before if self.test.count else self.search.before

    @property
    def accuracy_after(self) -> float:
        """The metric of the smaller network, on the same set."""
        return self.test.after if self.test.count else self.search.after

    @property
    def bound(self) -> float | None:
        """Upper bound on the drop, at `confidence`; None: nothing is promised."""
        return promised_bound(self.recipe.budget, self.records)

    def cut_(self, model: nn.Module) -> nn.Module:
        """Cut `model`, of the class that was pruned, in place to this network: widths and weights; see `secateurs.cut_`."""
        return cut_(model, self.graph)

    def save(self, path: str | Path) -> Path:
        """Save the network as safetensors, to be loaded by `secateurs.load`."""
        return save(self.graph, path)

    def deploy(self, *, batch: int = 1) -> nn.Module:
        """The network as it is to be served: plain torch in eval mode, BatchNorms folded into the layers before them, channels
        last in memory if that is measured to be faster for batches of `batch` examples. It cannot be trained further.
        """
        from secateurs.export import deploy  # seconds to import, which most runs do not need

        return deploy(self.graph, batch=batch).module

    def export(self, path: str | Path, *, pad_to: int = 1, int8: bool = False, uncertified: bool = False) -> Path:
        """Write the network for use without secateurs: NAME.onnx, NAME.pt2, or a folder of plain source.

        With `pad_to`, widths are padded to multiples of it by filters of zero weights, where an engine runs those faster.
        With `int8` the file is quantised (.onnx for ONNX Runtime; .pt2 for torch.compile, by torchao), calibrated on training
        examples of the run, and certified on the images that certified its cuts: `Uncertified` where the allowed drop cannot be
        promised. `uncertified` writes it all the same, if the drop is within what is allowed by point estimate.
        """
        from secateurs.export import to_onnx, to_pt2, to_source  # seconds to import, which most runs do not need

        path = Path(path)
        write = {".onnx": to_onnx, ".pt2": to_pt2, "": to_source}.get(path.suffix)
        if write is None:
            raise InvalidInput(f"export: got {path.name!r}, wanted a name that ends in .onnx or .pt2, or a folder for source.")
        if int8:
            from secateurs.report.int8 import export_int8

            if pad_to != 1:
                raise InvalidInput(
                    f"export: pad_to={pad_to} with int8: prune with deploy='int8', which takes widths that suit it."
                )
            export_int8(self, path, uncertified=uncertified)
        else:
            write(self.graph, path, pad_to=pad_to)
        return path

    def report(self) -> Path | None:
        """Write the report into the run folder; None for a run without one."""
        return None if self.folder is None else write_report(self.folder)

    @property
    def plot(self) -> Plots:
        """The figures of the run, for notebooks."""
        return plots(self.records if self.folder is None else self.folder, recipe=self.recipe)

    def __repr__(self) -> str:
        return str(self)  # notebooks show it; the fields hold thousands of numbers

    def __str__(self) -> str:
        kept = f" It is kept in {self.folder}." if self.folder is not None else ""
        lines = [
            *closing(self, self.recipe, self.records),
            f'Next: result.model, result.save("small.safetensors"), result.export("small.onnx").{kept}',
        ]
        return "\n".join([*lines, *(f"Note: {note}." for note in self.notes)])


def closing(figures: ResultFigures, recipe: Recipe, records: Sequence[Any]) -> list[str]:
    """What came out of a run, in sentences: time first, then sizes and accuracy, what is promised, and what would be faster.

    A network that is slower than the original one, which only a target of another kind can have asked for, is said to be.
    """
    sizes, steps = f"{figures.summary()}.", records_of(records, Step)
    for chosen in records_of(records, ChosenAllocation):
        if chosen.note:
            return [f"{chosen.note[:1].upper()}{chosen.note[1:]}.", sizes]
    promised = promise(recipe, steps, promised_bound(recipe.budget, records), figures.metric)
    if figures.latency is None:
        return [sizes, promised]
    if figures.latency.predicted is not None:
        return [f"{figures.headline()}.", sizes, promised, _FASTER]
    slower = any(one.high < 1 for one in (figures.latency, *figures.speeds))
    by_size = f"the cuts were not chosen by time{', which made the network slower' * slower}; {to_weigh_time(recipe)}"
    return [f"{figures.headline()}; {by_size}.", sizes, promised]


def promise(recipe: Recipe, steps: Sequence[Step], bound: float | None, metric: str) -> str:
    """What is promised of a run's network, in a sentence."""

    def amount(drop: float) -> str:
        return f"{100 * drop:.2f} points" if metric == "accuracy" else f"{drop:.4g}"

    allowed, sure = amount(recipe.max_drop), f"{100 * recipe.confidence:g} % confidence"
    if bound is not None:
        return f"At {sure} the drop is at most {amount(bound)}."
    if not any(step.removed for step in steps):
        which = f" that can be promised at {sure}" if recipe.confidence else ""
        return f"No filter can be removed within a drop of {allowed}{which}: allow more, or give more validation examples."
    if recipe.confidence:
        return f"At {sure} no site costs more than {allowed}; nothing is promised about all of them together."
    return f"Nothing is promised: the drop of {allowed} was allowed by point estimates."
