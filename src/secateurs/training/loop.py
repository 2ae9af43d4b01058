"""The training loop: SGD on augmented batches, with distillation if wanted; deterministic, resumable after every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import islice
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from secateurs._util.modules import Device, eval_mode, keeping_modes, on_device
from secateurs.config import Augment, TrainSettings
from secateurs.data.dataset import Batch, Examples, Inputs, generator_for, input_parts, map_inputs, seeded
from secateurs.data.stream import Stream, seeded_everywhere
from secateurs.errors import InvalidInput, TrainingError
from secateurs.metrics import Measure, correct, cross_entropy, evaluate, logits_of, loss, total
from secateurs.training.schedule import learning_rate, steps_in_epoch, total_steps
from secateurs.training.state import (
    EpochRecord,
    History,
    TrainState,
    check_fits,
    named_tensors,
    packed,
    restore_,
    settings_record,
    undone_on_error,
)


def augment(images: Inputs, kind: Augment, *, pad: int, generator: torch.Generator) -> Inputs:
    """Augment images (N, C, H, W) as `kind` says, each independently; "none" returns them unchanged."""
    if kind == "none":
        return images
    if not isinstance(images, Tensor) or images.ndim != 4:
        shapes = ", ".join(str(tuple(part.shape)) for part in input_parts(images))
        raise InvalidInput(f"augment = {kind!r} for inputs of shape {shapes}: wanted images (N, C, H, W), or 'none'")
    cropped = random_crop(images, pad=pad, generator=generator)
    return random_flip(cropped, generator=generator) if kind == "crop-flip" else cropped


def random_crop(images: Tensor, *, pad: int, generator: torch.Generator) -> Tensor:
    """Crop each image, padded by `pad` zeros, to its original size; all (2·pad + 1)² windows are equally likely."""
    if pad == 0:
        return images
    # drawn on the CPU, so that every device sees the same crops
    corner = torch.randint(2 * pad + 1, (2, len(images)), generator=generator).to(images.device)
    return crop_at(images, pad, corner[0], corner[1])


def crop_at(images: Tensor, pad: int, top: Tensor, left: Tensor) -> Tensor:
    """The window of the original size at (top, left) of each image with `pad` zeros around it."""
    height, width = images.shape[2:]
    padded = functional.pad(images, (pad, pad, pad, pad))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (N, C, top, left, H, W), a view
    return windows[torch.arange(len(images), device=images.device), :, top, left]


def random_flip(images: Tensor, *, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability 1/2."""
    mirrored = torch.randint(2, (len(images),), generator=generator).bool().to(images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


Objective = Callable[[tuple[Tensor, ...], Any, Any], Tensor]
"""Takes the network's arguments, the network's outputs and targets; gives the scalar to minimise."""


def objective_for(settings: TrainSettings, *, loss_fn: Measure | None, teacher: nn.Module | None) -> Objective:
    """The mean loss that `settings` ask for; the teacher runs only where they distil from it."""
    if loss_fn is not None and settings.label_smoothing:
        raise InvalidInput(f"label_smoothing = {settings.label_smoothing} with a loss of your own: it is for cross-entropy")
    plain = loss_fn or partial(cross_entropy, label_smoothing=settings.label_smoothing)
    if settings.distill == 0:
        return lambda inputs, outputs, targets: plain(outputs, targets).mean()
    if teacher is None:
        raise InvalidInput(f"distill = {settings.distill} needs a teacher: give teacher=…, or set distill = 0")
    share, temperature = settings.distill, settings.temperature

    def with_teacher(inputs: tuple[Tensor, ...], outputs: Any, targets: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher(*inputs)
        return (1 - share) * plain(outputs, targets).mean() + share * distance(outputs, wanted, temperature)

    return with_teacher


def distance(outputs: Any, wanted: Any, temperature: float) -> Tensor:
    """Mean divergence of the student's softened class probabilities from the teacher's, times temperature² (Hinton).

    The square keeps the gradients as large as those of the plain loss, whatever the temperature.
    """
    outputs, wanted = logits_of(outputs), logits_of(wanted)
    if not isinstance(outputs, Tensor) or not isinstance(wanted, Tensor) or outputs.shape != wanted.shape:
        raise InvalidInput("distillation needs one tensor of class logits, of the same shape, from network and teacher")
    student = functional.log_softmax(outputs / temperature, 1)
    teacher = functional.log_softmax(wanted / temperature, 1)
    return temperature**2 * functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def recalibrate_(
    module: nn.Module,
    examples: Examples,
    batches: int | None = None,
    *,
    batch: int = 256,
    device: Device = None,
    seed: int = 0,
) -> None:
    """Replace every BatchNorm's mean and variance by their plain average over `batches` batches (None: all examples).

    Examples come in a seeded order; a last batch that is not full is left out, unless it is the only one. Weights,
    modes, momenta and dropout are untouched; after an error the old statistics are back.
    """
    if batch < 2 or (batches is not None and batches < 1):
        raise InvalidInput(f"recalibration with batch={batch}, batches={batches}: wanted at least 2 examples and 1 batch")
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    if not norms:
        return
    full = max(1, len(examples) // batch)
    order = torch.randperm(len(examples), generator=generator_for(seed, "recalibrate"))
    chosen = order[: (full if batches is None else min(full, batches)) * batch]
    with on_device(module, device) as place, undone_on_error(module), _averaging(module, norms), torch.no_grad():
        for rows in torch.split(chosen, batch):
            module(*examples.batch(rows.to(examples.place), device=place).args)


@contextmanager
def _averaging(module: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Inside the block the norms average their inputs from scratch; all else is in eval mode."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    with keeping_modes(module):
        module.eval()
        for norm in norms:
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked = norm.num_batches_tracked.clone()
            norm.reset_running_stats()
            norm.momentum = None  # torch's way to say: cumulative average
            norm.train()
        try:
            yield
        finally:
            for norm, momentum, tracked in before:
                norm.momentum, norm.num_batches_tracked = momentum, tracked


def train_(
    module: nn.Module,
    examples: Examples | Stream,
    settings: TrainSettings,
    *,
    search: Examples | None = None,
    teacher: nn.Module | None = None,
    loss_fn: Measure | None = None,
    metric: Measure | None = None,
    device: Device = None,
    momentum: Mapping[str, Tensor] | None = None,
    resume: TrainState | None = None,
    save: Callable[[TrainState], None] | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> History:
    """Train the module in place; ends with the same weights however often it was stopped and resumed after an epoch.

    The loss is cross-entropy and the metric accuracy unless others are given (with a loss of your own and no metric,
    only losses are recorded). `search` (the validation set) is measured after every epoch and changes nothing. `teacher`
    runs only where `settings.distill` is above 0. `momentum` (by parameter name) starts the optimiser. After every epoch
    `save` gets the state that `resume` takes, then `on_epoch` its record; `on_step` gets the number of optimiser steps
    done and of those planned. The user's random state, the module's mode and device are as before afterwards; after an
    error the weights are those of the start of its epoch.
    """
    if teacher is module:
        raise InvalidInput("the teacher is the network that is trained: give a copy of it from before")
    if isinstance(examples, Stream) and examples.length is None:
        raise InvalidInput(
            f"training on the {examples.name} loader, which has no length: give a loader with one, or a finetune of your own."
        )
    if isinstance(examples, Examples) and len(examples) == 0:
        raise InvalidInput("training on no examples: wanted at least one")
    shown = metric if metric is not None or loss_fn is not None else correct
    objective = objective_for(settings, loss_fn=loss_fn, teacher=teacher)

    def measure() -> tuple[float | None, float | None]:
        chosen = cross_entropy if loss_fn is None else loss_fn
        if search is None or shown is None:
            return None if search is None else loss(module, search, loss_fn=chosen, batch=settings.batch), None
        found = evaluate(module, search, loss_fn=chosen, metric=shown, batch=settings.batch)
        return found.loss, found.accuracy

    with ExitStack() as stack:
        place = stack.enter_context(on_device(module, device))
        if teacher is not None:
            stack.enter_context(on_device(teacher, place))
            stack.enter_context(eval_mode(teacher))
        stack.enter_context(keeping_modes(module))
        stack.enter_context(torch.enable_grad())
        if settings.channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            stack.callback(lambda: module.to(memory_format=torch.contiguous_format))  # type: ignore[call-overload]
        loop = _Loop(module, examples, settings, objective, shown, place, on_step)
        records = loop.start(resume, momentum)
        while loop.step < loop.planned:
            record = loop.epoch(len(records), measure)
            records.append(record)
            if save is not None:
                save(loop.state(records))
            if on_epoch is not None:
                on_epoch(record)
        return History(tuple(records), loop.momentum())


class _Loop:
    """The moving parts of one training: optimiser, loss scaler, and the number of steps done."""

    def __init__(
        self,
        module: nn.Module,
        examples: Examples | Stream,
        settings: TrainSettings,
        objective: Objective,
        metric: Measure | None,
        place: torch.device,
        on_step: Callable[[int, int], None] | None,
    ) -> None:
        self.module, self.examples, self.settings, self.place = module, examples, settings, place
        self.objective, self.metric, self.on_step = objective, metric, on_step
        self.count = examples.length or 0 if isinstance(examples, Stream) else len(examples)
        self.per_epoch = self.count if isinstance(examples, Stream) else steps_in_epoch(self.count, settings.batch)
        self.planned = total_steps(settings, self.per_epoch)
        self.step, self.rate = 0, settings.lr
        self.trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        if not self.trained:
            raise InvalidInput("no parameter of this network requires a gradient: there is nothing to train")
        self.optimiser = torch.optim.SGD(
            self.trained.values(),
            lr=settings.lr,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            nesterov=settings.nesterov,
        )
        # not all need to be: an attention mask, for example, is a buffer with infinities
        self.finite = _finite(module)
        # float16 gradients underflow unless the loss is scaled up for the backward pass
        self.scaler = torch.amp.GradScaler(place.type, enabled=settings.precision == "float16")

    def start(self, resume: TrainState | None, momentum: Mapping[str, Tensor] | None) -> list[EpochRecord]:
        """Continue from the given state or momentum; returns the epochs already done."""
        records: list[EpochRecord] = []
        if resume is not None:
            check_fits(resume, self.settings, examples=self.count)
            restore_(self.module, resume)
            momentum, records = resume.momentum(), resume.records()
            if resume.meta["scaler"]:
                self.scaler.load_state_dict(resume.meta["scaler"])
            self.step = records[-1].steps if records else 0
        for name, buffer in (momentum or {}).items() if self.settings.momentum else ():
            weight = self.trained.get(name)
            if weight is None or weight.shape != buffer.shape:
                found = "no such parameter" if weight is None else f"a parameter of shape {tuple(weight.shape)}"
                raise TrainingError(f"momentum of shape {tuple(buffer.shape)} for {name!r}: the network has {found}")
            self.optimiser.state[weight]["momentum_buffer"] = buffer.to(weight).clone()
        return records

    def epoch(self, number: int, measure: Callable[[], tuple[float | None, float | None]]) -> EpochRecord:
        """Train for one pass over the examples; after an error the weights are those before it."""
        loss_sum, right, count = 0.0, 0.0, 0
        with undone_on_error(self.module), seeded(self.settings.seed, "epoch", number):
            self.module.train()
            self.rate = self.settings.lr
            for batch in self._batches(number):
                self.rate = learning_rate(self.settings, self.step, self.per_epoch)
                mean, outputs = self._train_on(batch, number)
                with torch.no_grad():
                    right += 0.0 if self.metric is None else float(total(self.metric(outputs, batch.targets), batch.size))
                loss_sum, count = loss_sum + mean * batch.size, count + batch.size
                self.step += 1
                if self.on_step is not None:
                    self.on_step(self.step, self.planned)
            for name in sorted(self.finite - _finite(self.module)):
                raise self._diverged(f"{name!r} is no longer finite", number)
            measured = measure()
        accuracy = None if self.metric is None else right / count
        return EpochRecord(number, self.step, self.rate, loss_sum / count, accuracy, *measured)

    def momentum(self) -> dict[str, Tensor]:
        """The optimiser's momentum by parameter name, on the CPU."""
        buffers = {name: self.optimiser.state[weight].get("momentum_buffer") for name, weight in self.trained.items()}
        return {name: buffer.detach().cpu() for name, buffer in buffers.items() if buffer is not None}

    def state(self, records: list[EpochRecord]) -> TrainState:
        """A copy of all that the next epoch depends on."""
        meta = {
            "epochs": [asdict(record) for record in records],
            "settings": settings_record(self.settings),
            "examples": self.count,
            "scaler": self.scaler.state_dict(),
        }
        return TrainState(packed(self.module, self.momentum()), meta)

    def _batches(self, number: int) -> Iterator[Batch]:
        """The examples of one epoch in its own order, augmented; a function of seed and epoch alone."""
        settings, examples = self.settings, self.examples
        steps = min(self.per_epoch, self.planned - number * self.per_epoch)
        if isinstance(examples, Stream):  # the user's loader augments and shuffles
            with seeded_everywhere(settings.seed, "stream", number):
                for inputs, targets in islice(examples.batches(device=self.place), steps):
                    yield Batch(map_inputs(self._laid_out, inputs), targets)
            return
        order = torch.randperm(len(examples), generator=generator_for(settings.seed, "order", number))
        crops = generator_for(settings.seed, "augment", number)
        for place in range(steps):
            start = place * settings.batch
            end = len(examples) if place == self.per_epoch - 1 else start + settings.batch
            rows = order[start:end].to(examples.place)
            chosen = examples.stored.mapped(lambda part, rows=rows: part[rows])  # type: ignore[misc]
            stored = augment(chosen.inputs, settings.augment, pad=settings.pad, generator=crops)
            moved = Batch(stored, chosen.targets).mapped(lambda part: part.to(self.place))
            yield Batch(map_inputs(self._laid_out, examples.scaled(moved.inputs)), moved.targets)

    def _laid_out(self, inputs: Tensor) -> Tensor:
        last = self.settings.channels_last and inputs.ndim == 4
        return inputs.contiguous(memory_format=torch.channels_last) if last else inputs

    def _train_on(self, batch: Batch, number: int) -> tuple[float, Any]:
        """Take one optimiser step; returns the mean loss and the outputs before it."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate
        self.optimiser.zero_grad(set_to_none=True)
        precision = self.settings.precision
        with nullcontext() if precision == "float32" else torch.autocast(self.place.type, dtype=getattr(torch, precision)):
            outputs = self.module(*batch.args)
            value = self.objective(batch.args, outputs, batch.targets)
        found = float(value.detach())
        if not isfinite(found):
            raise self._diverged(f"the loss is {found}", number)
        self.scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        if self.settings.clip_norm is not None:
            self.scaler.unscale_(self.optimiser)
            nn.utils.clip_grad_norm_(self.trained.values(), self.settings.clip_norm)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.optimiser.zero_grad(set_to_none=True)
        return found, outputs

    def _diverged(self, what: str, number: int) -> TrainingError:
        return TrainingError(
            f"training diverged in epoch {number}, step {self.step} of {self.planned}, at learning rate {self.rate:g}: "
            f"{what}. The weights are those of the start of epoch {number}. "
            f"Lower lr, set clip_norm = 1.0, add warmup epochs, or check that the inputs are finite and scaled."
        )


def _finite(module: nn.Module) -> set[str]:
    return {name for name, tensor in named_tensors(module).items() if bool(torch.isfinite(tensor).all())}
