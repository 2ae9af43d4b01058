"""Losses and metrics of a network over a set of examples, and fingerprints that identify them.

Batching, mode and device never change a result.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateurs._util.code_identity import identity
from secateurs._util.modules import Device, accumulation_dtype, eval_mode, on_device
from secateurs.data.dataset import Batch, Examples
from secateurs.data.splits import Data
from secateurs.data.storage import Rows, Storage
from secateurs.data.stream import Stream
from secateurs.distributed import active, pack, unpack
from secateurs.errors import DataError, InvalidInput

_IGNORED = -100  # the label that torch's cross-entropy leaves out
_OUTPUT_BYTES = 1 << 30  # of a network's outputs that are kept in memory
_PIECE = 1024  # examples whose targets are looked at together: a set on disk may not fit into memory

Measure = Callable[[Any, Any], Tensor]
"""Takes a network's outputs and targets for n examples; gives one number for each, or their mean as a scalar."""


@dataclass(frozen=True)
class Evaluation:
    """Means over a set of examples."""

    loss: float
    accuracy: float  # mean of the metric: by default the share of right answers, a fraction
    count: int
    values: Tensor | None = field(default=None, compare=False, repr=False)
    """The metric of every example, float64 (N,) on the CPU; None where it gives only means."""


def cross_entropy(outputs: Any, targets: Any, *, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of every example; class logits (n, K, …) against class numbers (n, …) or class probabilities (n, K, …)."""
    logits = _expect_tensors("cross-entropy", "loss", outputs, targets)
    wanted = targets if targets.is_floating_point() else targets.long()  # torch takes no other whole numbers
    return functional.cross_entropy(logits, wanted, reduction="none", label_smoothing=label_smoothing)


def log_odds(outputs: Any, targets: Any) -> Tensor:
    """Log odds of the right class of every example; class logits (n, K, …) against class numbers (n, …), or probabilities
    (n, K, …), of which the largest counts. Where a label is to be left out, 0.

    Unlike the loss, which ends near 0, they go on rising as an answer becomes more certain.
    """
    logits = _expect_tensors("log odds", "loss", outputs, targets)
    labels = targets.argmax(1) if targets.is_floating_point() else targets.long()
    chosen = labels.clamp_min(0).unsqueeze(1)
    others = logits.scatter(1, chosen, torch.finfo(logits.dtype).min).logsumexp(1)
    found: Tensor = (logits.gather(1, chosen).squeeze(1) - others) * (labels != _IGNORED)
    return found


def correct(outputs: Any, targets: Any) -> Tensor:
    """Whether the largest of the class logits (n, K, …) is that of the target (n, …), for every example."""
    right: Tensor = _expect_tensors("accuracy", "metric", outputs, targets).argmax(1) == targets
    return right


def logits_of(outputs: Any) -> Any:
    """The logits of a network that gives them with other things, as `outputs.logits` or `outputs["logits"]`; else `outputs`."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def output_loss(outputs: Any, targets: Any) -> Tensor:
    """The loss that a network gives itself, as `outputs.loss` or `outputs["loss"]`: the mean of the batch, as a rule."""
    found: Tensor = outputs["loss"] if isinstance(outputs, Mapping) else outputs.loss
    return found


def evaluate(
    module: nn.Module,
    examples: Examples | Stream,
    *,
    loss_fn: Measure = cross_entropy,
    metric: Measure = correct,
    batch: int = 256,
    device: Device = None,
) -> Evaluation:
    """Mean loss and mean metric in one pass; the module's mode and device are restored afterwards."""
    (mean_loss, mean_metric), count, single = _means(module, examples, (loss_fn, metric), batch=batch, device=device, each=True)
    whole = sum(map(len, single)) == count
    return Evaluation(mean_loss, mean_metric, count, torch.cat(single) if whole else None)


def loss(
    module: nn.Module, examples: Examples, *, loss_fn: Measure = cross_entropy, batch: int = 256, device: Device = None
) -> float:
    """Mean loss of the module in eval mode; may be NaN or infinite."""
    return _means(module, examples, (loss_fn,), batch=batch, device=device)[0][0]


def accuracy(
    module: nn.Module, examples: Examples, *, metric: Measure = correct, batch: int = 256, device: Device = None
) -> float:
    """Mean of the metric (higher is better) of the module in eval mode; by default the share of right answers."""
    return _means(module, examples, (metric,), batch=batch, device=device)[0][0]


def values(module: nn.Module, examples: Examples, measure: Measure, *, batch: int = 256, device: Device = None) -> Tensor:
    """The measure of every example, float64 (N,) on the CPU; it must give one value for each."""
    with on_device(module, device) as place, eval_mode(module):

        def measured(each: Batch) -> list[Tensor]:
            return [per_example(measure(module(*each.args), each.targets), each.size).cpu().double()]

        found = [single for (single,) in by_batch("values", examples, batch, place, measured)]
    return torch.cat(found)


def outputs(module: nn.Module, examples: Examples, *, batch: int = 256, device: Device = None) -> Tensor:
    """Outputs of the module in eval mode for every example, (N, …) on the CPU; it must give one tensor."""
    return _collected(module, examples, lambda given: given, batch=batch, device=device)


def _collected(
    module: nn.Module, examples: Examples, convert: Callable[[Tensor], Tensor], *, batch: int, device: Device
) -> Tensor:
    """The converted outputs for every example, (N, …): on disk where they are many, as of dense predictions."""
    rows = Rows(Storage(_OUTPUT_BYTES, None if examples.storage is None else examples.storage.folder), "outputs")
    with on_device(module, device) as place, eval_mode(module):
        for each in examples.batches(batch, device=place):
            given = logits_of(module(*each.args))
            if not isinstance(given, Tensor):
                raise InvalidInput(f"the network gave a {type(given).__name__}, wanted one tensor of outputs.")
            rows.write([convert(given)])
    return rows.tensors()[0]


def per_example(values: Tensor, count: int) -> Tensor:
    """One value for each of `count` examples, the mean over further dimensions, float64 if the device has it.

    A mean alone is refused.
    """
    if _tensor(values).ndim == 0 or len(values) != count:
        raise InvalidInput(
            f"a loss or metric gave a tensor of shape {tuple(values.shape)} for {count} examples: wanted one value for each "
            f"example, not their mean. A loss of torch does that with reduction='none'. A mean is enough for a metric with "
            f"confidence = 0 and no worst_class, and for a loss with estimator = 'losses', adaptive = false and "
            f"scoring_examples = 'all' or a number."
        )
    return values.to(accumulation_dtype(values.device)).reshape(count, -1).mean(1)


def total(values: Tensor, count: int) -> Tensor:
    """Sum over the examples in float64, from a value for each (averaged over further dimensions) or from their mean."""
    exact = _tensor(values).detach().cpu().double()
    if exact.ndim == 0:
        return exact * count
    if len(exact) != count:
        raise InvalidInput(
            f"a loss or metric gave a tensor of shape {tuple(values.shape)} for {count} examples: "
            f"wanted one value for each example, or their mean as a scalar"
        )
    return exact.reshape(count, -1).mean(1).sum()


def _tensor(found: object) -> Tensor:
    if not isinstance(found, Tensor):
        raise InvalidInput(
            f"a loss or metric gave a {type(found).__name__} ({str(found)[:40]}): wanted a tensor with one value for each "
            f"example, or their mean as a scalar tensor. Leave out float() or .item()."
        )
    return found


def check_targets(data: Data, outputs: object, measures: Mapping[str, Measure]) -> None:
    """Refuse targets that our cross-entropy or accuracy cannot compare with `outputs` (n, K, …), for all three sets.

    `measures` are the run's loss and metric by argument name; a user's own are not checked.
    """
    ours = {argument: measure for argument, measure in measures.items() if measure is cross_entropy or measure is correct}
    for argument, measure in ours.items():
        what = display_name(measure)
        for name, examples in data.named_sets().items():
            targets = examples.targets
            logits = _expect_tensors(what, argument, outputs, targets)
            assert isinstance(targets, Tensor)
            if logits.ndim < 2:
                raise InvalidInput(
                    f"the network gives {_described(logits)}, and {what} wants class logits (N, K, …). For another task give "
                    f"{argument}=… of your own."
                )
            if targets.is_floating_point() and measure is cross_entropy and targets.shape[1:] == logits.shape[1:]:
                continue
            if targets.is_floating_point() or targets.shape[1:] != logits.shape[2:]:
                one_hot = " These look one-hot: give targets.argmax(1)." if targets.shape[1:] == logits.shape[1:] else ""
                raise InvalidInput(
                    f"the {name} set: its targets are {_described(targets)} for outputs of shape {tuple(logits.shape)}, and "
                    f"{what} wants class numbers (whole, one for each example).{one_hot} For regression give {argument}=… of "
                    f"your own."
                )
            for start, piece in zip(range(0, len(targets), _PIECE), torch.split(targets, _PIECE), strict=True):
                known = (piece >= 0) & (piece < logits.shape[1])
                if targets.ndim > 1:
                    known |= piece == _IGNORED
                if bool(known.all()):
                    continue
                place = int((~known.reshape(len(known), -1).all(1)).nonzero()[0])
                found = int(piece[place].flatten()[~known[place].flatten()][0])
                raise DataError(
                    f"the {name} set: example {start + place} has the label {found}, and the network has {logits.shape[1]} "
                    f"outputs: wanted labels from 0 to {logits.shape[1] - 1}. Correct the labels (the first class is 0), or "
                    f"give the network more outputs."
                )


def _means(
    module: nn.Module,
    examples: Examples | Stream,
    measures: Sequence[Measure],
    *,
    batch: int,
    device: Device,
    each: bool = False,
) -> tuple[list[float], int, list[Tensor]]:
    """The mean of every measure, and the number of examples; with `each`, the last measure of every one, if it gives that."""
    sums, count, single = torch.zeros(len(measures), dtype=torch.float64), 0, list[Tensor]()
    with on_device(module, device) as place, eval_mode(module):

        def measured(part: Batch) -> list[Tensor]:
            given = module(*part.args)
            found = [_tensor(measure(given, part.targets)) for measure in measures]
            every = [per_example(last.detach().cpu(), len(last)) for last in found[-1:] if each and last.ndim]
            return [torch.stack([total(value, part.size) for value in found]), torch.tensor(part.size), *every]

        for new, size, *every in by_batch("means", examples, batch, place, measured):
            sums, count = sums + new, count + int(size)
            single += every
    if count == 0:
        raise InvalidInput("evaluation over no examples: wanted at least one")
    return (sums / count).tolist(), count, single


def by_batch(
    what: str, examples: Examples | Stream, batch: int, device: torch.device, measure: Callable[[Batch], Sequence[Tensor]]
) -> Iterator[Sequence[Tensor]]:
    """Yield what is measured of each batch, in order; the workers of a run share the batches."""
    workers = active()
    if workers.size == 1:
        yield from map(measure, examples.batches(batch, device=device))
    elif isinstance(examples, Stream):  # a loader has no random access, so each worker reads its share

        def share(number: int) -> list[Tensor]:
            own = examples.share(number, workers.size, batch, device=device)
            return [pack([pack(measure(part)) for part in parts]) for parts in own]

        found = workers.map(f"{what} of the {examples.name} loader", workers.size, share)
        for batches in zip_longest(*found):
            for packed in batches:
                yield from () if packed is None else map(unpack, unpack(packed))
    else:
        count = -(-len(examples) // batch)

        def one(ticket: int) -> Sequence[Tensor]:
            return measure(examples.batch(slice(ticket * batch, (ticket + 1) * batch), device=device))

        yield from workers.map(f"{what} of {len(examples)} examples", count, one)


def _expect_tensors(what: str, argument: str, outputs: Any, targets: Any) -> Tensor:
    """The logits; an error where logits or targets are no tensor."""
    logits = logits_of(outputs)
    for name, value in (("outputs", logits), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise InvalidInput(f"{what} needs a tensor of {name}, got a {type(value).__name__}: give {argument}=… of your own")
    found: Tensor = logits
    return found


def with_answers(examples: Examples, module: nn.Module, *, batch: int = 256, device: Device = None) -> Examples:
    """Replace the targets by the module's class probabilities (N, K, …)."""

    def probabilities(logits: Tensor) -> Tensor:
        if logits.ndim < 2 or not logits.is_floating_point():
            raise InvalidInput(
                f"the divergence from the original network's answers compares class logits (N, K, …); this network gives "
                f"{_described(logits)}. Give a loss of your own: loss=…."
            )
        return functional.softmax(logits, 1)

    return replace(examples, targets=_collected(module, examples, probabilities, batch=batch, device=device))


def divergence(outputs: Any, targets: Any) -> Tensor:
    """Kullback-Leibler divergence of the class logits `outputs` (n, K, …) from the probabilities `targets`, for every example.

    Never negative, and zero where both agree; the mean over dimensions behind the class axis.
    """
    each = functional.kl_div(functional.log_softmax(logits_of(outputs), 1), targets, reduction="none").sum(1)
    return each.reshape(len(each), -1).mean(1)


def drawn_labels(probabilities: Any, seed: int) -> Tensor:
    """Draw a class from each of the probabilities (N, K, …), and return it as probabilities: all on that class."""
    by_place = probabilities.movedim(1, -1)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(by_place.reshape(-1, by_place.shape[-1]).cpu().double(), 1, generator=generator)
    labels = functional.one_hot(drawn.squeeze(1), by_place.shape[-1]).view(by_place.shape).movedim(-1, 1)
    return labels.to(probabilities)


def _described(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


_VERSION = "2"  # of recorded fingerprints: helpers count


def display_name(measure: Callable[..., Any]) -> str:
    """Name of a measure: "accuracy" for ours, the function's or its type's name for a user's own."""
    function = inspect.unwrap(measure)
    return "accuracy" if function is correct else getattr(function, "__name__", type(function).__name__)


def fingerprint(measure: Measure, *, helpers: bool = True) -> str:
    """Identify a measure for cached values: two lambdas, or two settings of a class, differ.

    So do two that use other helpers: functions and plain constants of the same module. Without `helpers` these do not count,
    as in earlier releases.
    """
    return identity(measure, whole=True, seen=set() if helpers else None)


def fingerprints(measures: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Identify measures by role for a run that is resumed later, and the Python version that this is valid for.

    Helpers count as in `fingerprint`. State that a measure accumulates while it is used, and the module that it comes from, do
    not count.
    """
    return {**_prints(measures, helpers=True), "python": _python(), "version": _VERSION}


def follows_helpers(kept: Mapping[str, str]) -> bool:
    """Whether recorded fingerprints are of a release that looks at helpers."""
    return kept.get("version") == _VERSION


def changed(measures: Mapping[str, Callable[..., Any]], names: Mapping[str, str], kept: Mapping[str, str]) -> list[str]:
    """The roles whose measure differs from the recorded fingerprint; compared by name for another Python version.

    What an earlier release recorded is compared as that release did, and roles that it did not know are not compared.
    """
    if kept.get("python") == _python():
        now = _prints(measures, helpers=follows_helpers(kept))
        return [role for role in measures if kept.get(role, now[role]) != now[role]]
    return [role for role, measure in measures.items() if kept and names.get(role) not in (None, display_name(measure))]


def _prints(measures: Mapping[str, Callable[..., Any]], *, helpers: bool) -> dict[str, str]:
    texts = {role: identity(measure, whole=False, seen=set() if helpers else None) for role, measure in measures.items()}
    return {role: hashlib.sha256(text.encode()).hexdigest() for role, text in texts.items()}


def _python() -> str:
    return f"{platform.python_implementation()} {platform.python_version()}"
