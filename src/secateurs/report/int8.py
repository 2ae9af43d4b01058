"""The int8 file of a run: quantised, certified on the images that certified the run's cuts, written, and noted.

The promise is that of the run, for the file that is deployed: its drop, from pruning and from quantising together, is at most
`max_drop`. The certification images are asked about a file only once the search images predict a yes; layers go back to
float32 until they do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from secateurs.errors import InvalidInput, Uncertified
from secateurs.export.deliver import (
    INT8_RUNTIME,
    TIMED_BATCHES,
    Agreement,
    Exported,
    Inputs,
    Int8Figures,
    Prepared,
    Speed,
    Stage,
    prepared,
    resized,
    staged,
)
from secateurs.export.int8 import Quantised, Quantiser, RuntimeModule
from secateurs.export.programs import check_packages, feed, onnx_bytes
from secateurs.export.torchao import ProgramQuantiser
from secateurs.graph.trace import Graph, tensors_in
from secateurs.metrics import cross_entropy, evaluate
from secateurs.pruning.context import PruningContext
from secateurs.pruning.judge import Baseline, Certified
from secateurs.pruning.measure import Side
from secateurs.report.exports import note_answers, note_exports, read_answers
from secateurs.selection.contract import Verdict
from secateurs.speed.engines import on_one_thread
from secateurs.speed.timing import COMPARED_ROUNDS, Compared, Timer, compare, timed

if TYPE_CHECKING:
    from secateurs.report.result import Result

_MOST_FLOAT = 0.5  # of the layers: with more in float32 an int8 file gains nothing


def export_int8(result: Result, path: Path, *, uncertified: bool = False, compared: bool = False) -> Exported:
    """Write the int8 file of a finished run to `path` (.onnx), and note its certificate in the run's folder.

    With `compared` the unpruned network and both networks in float32 are measured beside it.
    """
    if path.suffix not in (".onnx", ".pt2"):
        raise InvalidInput(f"int8: got {path.name!r}, wanted a name that ends in .onnx (ONNX Runtime) or .pt2 (torch.compile).")
    if path.suffix == ".onnx":
        check_packages()
    context, graph = result.context, result.graph
    with staged(path, folder=False) as draft:
        draft.touch()  # a place that cannot be written to is refused before the work
        quantiser = quantiser_for(context, graph, program=path.suffix == ".pt2")
        earlier = [*context.judge().earlier_answers(), *_asked(result)]
        certifier = _Certifier(context, graph, earlier, result.bound, uncertified)
        try:
            file, verdict = certifier.certified(quantiser)
        finally:  # a refusal counts, too: the images must not be asked until they say yes
            _note_asked(result, certifier.asked)
        draft.write_bytes(file.model)
        examples = context.compared_examples.batch(slice(0, 64)).args
        ready = prepared(graph, examples)
        figures = Int8Figures(
            how=file.how,
            sha256=hashlib.sha256(file.model).hexdigest(),
            accuracy=verdict.accuracy,
            drop_pruning=certifier.drop_pruning,
            drop_quantising=verdict.bound.estimate - certifier.drop_pruning,
            max_drop=context.recipe.max_drop,
            bound=verdict.upper if certifier.promises else None,
            confidence=context.recipe.confidence if certifier.promises else 0.0,
            images=verdict.bound.images,
            answers=tuple(certifier.asked),
            counted_in=result.metric,
        )
        exported = Exported(
            kind="int8" if path.suffix == ".onnx" else "pt2-int8",
            path=path,
            bytes=len(file.model),
            agreement=_agreement(file, ready),
            alignment=ready.alignment,
            int8=figures,
        )
        if compared and path.suffix == ".onnx":
            exported = _compared(exported, result, file, ready)
    if result.folder is not None:
        note_exports(result.folder, [asdict(exported)])
    return exported


def quantiser_for(context: PruningContext, graph: Graph, *, program: bool = False) -> Quantiser | ProgramQuantiser:
    """What makes int8 files of a network of the run; it sees training examples and some that searched, no others."""
    classes = context.runtime.loss_fn is cross_entropy
    kind = ProgramQuantiser if program else Quantiser
    return kind(graph, context.calibration_examples, context.compared_examples, classes=classes)


def _asked(result: Result) -> list[bool]:
    """Answers about int8 files of this run that were asked for before."""
    return result.int8_answers if result.folder is None else read_answers(result.folder)


def _note_asked(result: Result, answers: Sequence[bool]) -> None:
    if result.folder is None:
        result.int8_answers.extend(answers)
    elif answers:
        note_answers(result.folder, answers)


class _Certifier:
    """Asks the contract of a run about int8 files; `asked` has the answers of the certification images."""

    def __init__(
        self, context: PruningContext, graph: Graph, answers: Sequence[bool], bound: float | None, uncertified: bool
    ) -> None:
        self.context, self.judge, self.answers = context, context.judge(), list(answers)
        self.judge.max_drop = context.recipe.max_drop  # nothing is left for quantising: this is the quantised file
        self.bound = bound if context.recipe.deploy == "int8" else None  # of the file that the run certified
        self.asked: list[bool] = []
        self.promises = self.judge.certifies and not uncertified
        # with a budget for each site nothing is promised of all of them together: the drop counts from the pruned network
        start, metric = graph if context.recipe.budget == "site" else context.original, context.metric
        self.start = self.judge.measured_from(start, math.nan)
        by_mean = not self.start.values
        if by_mean:
            self.start = Baseline(math.nan, {"look": metric.every(start.module)})
        side: Side = "certify" if self.judge.certifies else "look"
        before = self.start.values[side]
        pruned = metric.every(graph.module) if by_mean else metric.values(graph, side)
        self.drop_pruning = float((before - pruned).mean())

    def certified(self, quantiser: Quantiser | ProgramQuantiser) -> tuple[Quantised, Verdict]:
        """The first file, with ever more layers in float32, that is within the contract."""
        same = self._certified_in_the_run(quantiser)
        if same is not None:
            return same
        if self.promises and self.judge.contract.chance(self.answers) == 0:
            raise Uncertified(
                f"int8: {self._why_spent(isinstance(quantiser, ProgramQuantiser))} Or export with uncertified=True "
                f"(--uncertified), which promises nothing."
            )
        tried = []
        for file in self._files(quantiser):
            module = file.module()
            verdict = self._predicted(module)
            if (verdict.accepted if self.promises else verdict.by_estimate) and self.promises:
                verdict = self._ask(module)
            kept = len(file.how.float_layers)
            words = f"with {kept} layers in float32" if kept else "all in int8"
            tried.append(
                f"{words} a drop of {100 * verdict.bound.estimate:.2f} and a bound of {100 * verdict.upper:.2f} points"
            )
            if verdict.accepted if self.promises else verdict.by_estimate:
                return file, verdict
            if self.promises and self.judge.contract.chance([*self.answers, *self.asked]) == 0:
                break
        allowed = f"{100 * self.context.recipe.max_drop:g} points"
        raise Uncertified(
            f"int8: the drop of {allowed} cannot be promised. Pruning alone costs {100 * self.drop_pruning:.2f} points; "
            f"{'; '.join(tried)}. Nothing was written. Prune less, with deploy='int8', or allow more."
        )

    def _why_spent(self, program: bool) -> str:
        """Why the certification images cannot certify this file, and what to do."""
        refused = "the certification images of this run have refused a cut, after which they cannot certify anything else."
        if self.context.recipe.deploy != "int8":
            return f"{refused} Prune with deploy='int8', which certifies the int8 file itself."
        if self.bound is None:
            return (
                "the certification images of this run refused the first int8 file that it asked about, and cannot certify "
                "another. Start a run with a larger max_drop, or with more validation images."
            )
        if program:
            return f"this run certified the file for ONNX Runtime; of others, {refused} Export to .onnx."
        return f"the file that this run certified is another one where packages or the CPU are others; of this one, {refused}"

    def _certified_in_the_run(self, quantiser: Quantiser | ProgramQuantiser) -> tuple[Quantised, Verdict] | None:
        """The file that the run itself certified (`deploy = "int8"`), if it can be made again: its bound is the same."""
        if self.bound is None or not self.promises or isinstance(quantiser, ProgramQuantiser):
            return None
        file = quantiser.quantised()
        after = self.context.metric.of_file(file.module(), "certify")
        for asked in range(len(self.answers) + 1):  # whichever question of the run it was
            verdict = self._promised(after, self.answers[:asked])
            if verdict.accepted and abs(verdict.upper - self.bound) < 1e-12:
                return file, verdict
        return None

    def _files(self, quantiser: Quantiser | ProgramQuantiser) -> Iterator[Quantised]:
        floats = list(quantiser.hurting)
        yield quantiser.quantised(floats)
        others = [layer for _, layer in quantiser.by_harm if layer not in floats]
        step = 1
        while others and len(floats) + step <= _MOST_FLOAT * len(quantiser.by_harm):
            floats, others, step = [*floats, *others[:step]], others[step:], 2 * step
            yield quantiser.quantised(floats)

    def _predicted(self, module: nn.Module) -> Verdict:
        metric = self.context.metric
        after = metric.of_file(module, "look") if self.judge.certifies else metric.every(module)
        return self.judge.predict(self.start, after, answers=[*self.answers, *self.asked])

    def _promised(self, after: Tensor, answers: Sequence[bool]) -> Verdict:
        assert isinstance(self.judge, Certified)
        return self.judge.promise(self.start, answers).certify(after)

    def _ask(self, module: nn.Module) -> Verdict:
        after = self.context.metric.of_file(module, "certify")
        verdict = self._promised(after, [*self.answers, *self.asked])
        self.asked.append(verdict.accepted)
        return verdict


def _agreement(file: Quantised, ready: Prepared) -> Agreement:
    """How far the file's outputs are from those of the float network; nothing is refused by it."""
    found = tensors_in(file.module()(*ready.inputs))
    pairs = list(zip(found, ready.wanted[0], strict=True))
    worst = max(float((a - b).abs().max()) for a, b in pairs if b.numel())
    return Agreement(worst, max(float(b.abs().max()) for _, b in pairs if b.numel()), len(ready.inputs[0]), True)


# ---- beside the float networks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Network:
    """One of the stages, as a file."""

    name: str
    model: bytes
    bits: int
    bops: float
    accuracy: float | None


def _compared(exported: Exported, result: Result, file: Quantised, ready: Prepared) -> Exported:
    """The export beside the unpruned network and both in float32: bytes, accuracy, BOPs, and times taken in turns."""
    context = result.context
    dense = quantiser_for(context, context.original)
    dense8, small = dense.quantised(), onnx_bytes(ready)
    test = context.data.test
    examples = context.validation if test is None else test.ready()

    def accuracy(module: nn.Module) -> float:
        whole = context.runtime.evaluate
        if whole is not None:
            return float(whole.of_module(module).mean())
        return evaluate(module, examples, metric=context.runtime.metric, batch=context.recipe.batch).accuracy

    known = result.search if test is None or context.runtime.evaluate is not None else result.test
    floats = onnx_bytes(prepared(context.original, ready.inputs))
    networks = [
        _Network("unpruned, int8", dense8.model, dense8.how.weight_bits, dense8.how.bops, accuracy(dense8.module())),
        _Network("unpruned, float32", floats, 32, dense8.how.float_bops, known.before),
        _Network("pruned, float32", small, 32, file.how.float_bops, known.after),
        _Network("pruned, int8", file.model, file.how.weight_bits, file.how.bops, accuracy(file.module())),
    ]
    times = stage_times([each.model for each in networks], ready.inputs)
    stages = tuple(
        Stage(
            *(each.name, len(each.model), each.bits, each.bops, each.accuracy),
            seconds=tuple((batch, found.medians[i]) for batch, found in times.items()),
        )
        for i, each in enumerate(networks)
    )
    # what pruning gains where int8 is decided: beside the unpruned network in int8, which anybody can have without us
    speeds = tuple(
        Speed(batch, found.medians[0], found.medians[-1], found.speedups[-1], INT8_RUNTIME, torch.get_num_threads())
        for batch, found in times.items()
    )
    figures = replace(exported.int8, stages=stages, tested=0 if test is None or context.runtime.evaluate else len(test))  # type: ignore[type-var]  # it is there
    return replace(exported, original_bytes=len(dense8.model), speeds=speeds, int8=figures)


def stage_times(files: Sequence[bytes], inputs: Inputs, *, rounds: tuple[int, int] = COMPARED_ROUNDS) -> dict[int, Compared]:
    """All files run in turns, by batch, each compared with the first."""

    def loads(model: bytes, given: Inputs) -> Timer:
        module = RuntimeModule(model)
        return timed(partial(module.session.run, None, feed(module.session, given)), alone=on_one_thread(None))

    return {
        batch: compare([partial(loads, model, resized(inputs, batch)) for model in files], rounds=rounds)
        for batch in TIMED_BATCHES
    }
