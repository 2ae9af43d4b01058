"""The training loop: augmented batches, distillation, averaged weights; deterministic, resumable after every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from itertools import islice
from math import ceil, inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateurs._util.modules import Device, channels_last, eval_mode, keeping_gradients, keeping_modes, on_device
from secateurs.config import Optimiser, Precision, TrainSettings
from secateurs.data.dataset import Batch, Examples, generator_for, map_inputs, seeded
from secateurs.data.stream import Stream, seeded_everywhere
from secateurs.distributed import active
from secateurs.errors import DataError, Diverged, InvalidInput, TrainingError
from secateurs.graph.features import FeaturePairs
from secateurs.metrics import Measure, correct, cross_entropy, evaluate, loss, total
from secateurs.training.augment import augment, mix, suitable_augmentation
from secateurs.training.checks import (
    check_paired,
    check_trainable,
    for_memory_alone,
    of_singles,
    single_value_explained,
    train_mode,
)
from secateurs.training.objective import Objective, Penalty, held_out_means, judge_for, objective_for
from secateurs.training.parallel import average_statistics_, own_part, summed, synchronised, wrapped
from secateurs.training.precision import usable_precision
from secateurs.training.schedule import learning_rate, steps_in_epoch, total_steps
from secateurs.training.state import (
    EpochRecord,
    History,
    RateTrials,
    TrainState,
    check_fits,
    copy_into_,
    named_tensors,
    packed,
    restore_,
    settings_record,
    snapshot,
    undone_on_error,
)

Features = Callable[[], FeaturePairs | None]
"""Pairs the network that is trained with its teacher; called when both are where they are trained."""

AUTO_RATES: dict[Optimiser, tuple[float, ...]] = {"sgd": (5e-4, 2e-3, 1e-2), "adamw": (5e-5, 2e-4, 1e-3)}
"""What lr "auto" chooses from."""

_PILOT_STEPS, _PILOT_EXAMPLES = 50, 512
_ADAMW = ("step", "exp_avg", "exp_avg_sq")  # the state of a parameter


def train_(
    module: nn.Module,
    examples: Examples | Stream,
    settings: TrainSettings,
    *,
    search: Examples | None = None,
    held_out: Examples | None = None,
    teacher: nn.Module | None = None,
    features: Features | None = None,
    loss_fn: Measure | None = None,
    penalty: Penalty | None = None,
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
    only losses are recorded). `search` (the validation set) is measured after every epoch and changes nothing; `held_out`
    chooses the rate where that is "auto" (see `find_rate`). `teacher` runs only where `settings.distill` is above 0; `features`
    pairs the module with it where `settings.features` is, and may find nothing to pair. `penalty` is added to all of it.
    `momentum` (by parameter name) starts SGD. Averaged weights are what is measured, and what the training ends with; those of
    the last step are then in `History.last`. After every epoch `save` gets the state that `resume` takes, then `on_epoch`
    its record; `on_step` gets the number of optimiser steps done and of those planned. The user's random state, the module's
    mode, device and gradients are as before afterwards; after an error the weights are those of the start of its epoch.
    """
    if teacher is module:
        raise InvalidInput("the teacher is the network that is trained: give a copy of it from before")
    check_trainable(module, examples, settings)
    shown = metric if metric is not None or loss_fn is not None else correct
    if settings.lr == "auto" and resume is not None:
        settings = replace(settings, lr=resume.meta["settings"]["lr"])
    elif settings.lr == "auto":
        found = find_rate(
            *(module, examples, settings),
            held_out=held_out,
            teacher=teacher,
            features=features,
            loss_fn=loss_fn,
            penalty=penalty,
            device=device,
            momentum=momentum,
        )
        settings = replace(settings, lr=found.lr)
    if settings.features and features is None:
        raise InvalidInput(
            f"features = {settings.features:g} needs to know which feature maps are compared: give "
            f"features=partial(paired_features, graph, original), or set features = 0"
        )

    def measure() -> tuple[float | None, float | None]:
        chosen = cross_entropy if loss_fn is None else loss_fn
        if search is None or shown is None:
            return None if search is None else loss(module, search, loss_fn=chosen, batch=settings.batch), None
        found = evaluate(module, search, loss_fn=chosen, metric=shown, batch=settings.batch)
        return found.loss, found.accuracy

    with ExitStack() as stack:
        stack.enter_context(keeping_gradients(module))
        place = stack.enter_context(on_device(module, device))
        if teacher is not None:
            stack.enter_context(on_device(teacher, place))
            stack.enter_context(eval_mode(teacher))
        pairs = features() if settings.features and features is not None else None  # of tensors that are where they are trained
        if pairs is not None:
            stack.enter_context(on_device(pairs.theirs, place))  # the teacher may be a copy of it
            stack.enter_context(eval_mode(pairs.theirs))
            check_paired(module, pairs)
        stack.enter_context(keeping_modes(module))
        stack.enter_context(torch.enable_grad())
        if settings.channels_last:
            stack.enter_context(channels_last(module))
        objective = objective_for(settings, loss_fn=loss_fn, teacher=teacher, pairs=pairs, penalty=penalty)
        counted = None if settings.mixup else shown  # a mixture has no label
        loop = _Loop(module, examples, settings, objective, pairs, counted, place, on_step)
        records = loop.start(resume, momentum)
        while loop.step < loop.planned:
            record = loop.epoch(len(records), measure)
            records.append(record)
            if save is not None:
                save(loop.state(records))
            if on_epoch is not None:
                on_epoch(record)
        last = loop.take_average_()
        return History(tuple(records), loop.momentum(), last, loop.note)


def find_rate(
    module: nn.Module,
    examples: Examples | Stream,
    settings: TrainSettings,
    *,
    held_out: Examples | None = None,
    teacher: nn.Module | None = None,
    features: Features | None = None,
    loss_fn: Measure | None = None,
    penalty: Penalty | None = None,
    device: Device = None,
    momentum: Mapping[str, Tensor] | None = None,
) -> RateTrials:
    """Choose the learning rate: the one of `AUTO_RATES` that lowers the loss on `held_out` most in a training of 50 steps.

    Each trial runs through the whole schedule, from the same weights, which the module has again afterwards. Without
    `held_out`, a quarter of the examples, at most 512, are kept out of the trials.
    """
    if held_out is None:
        if isinstance(examples, Stream):
            raise InvalidInput("lr = 'auto' on a loader: give held_out=… to judge the rates by, or a number as lr")
        if len(examples) < 2:
            raise InvalidInput("lr = 'auto' needs at least 2 training examples: give a number as lr")
        order = torch.randperm(len(examples), generator=generator_for(settings.seed, "pilot"))
        aside = max(1, min(_PILOT_EXAMPLES, len(examples) // 4))
        held_out, examples = examples.take(order[:aside]), examples.take(order[aside:])
    count = examples.length or 1 if isinstance(examples, Stream) else steps_in_epoch(len(examples), settings.batch)
    steps = min(_PILOT_STEPS, total_steps(settings, count))
    short = replace(settings, steps=steps, epochs=max(1, ceil(steps / count)), warmup=0, average=0.0)
    judge, tried = judge_for(settings, loss_fn=loss_fn, teacher=teacher), list[tuple[float, float | None]]()
    before = snapshot(module)
    with undone_on_error(module):
        for rate in AUTO_RATES[settings.optimiser]:
            options: dict[str, Any] = {"teacher": teacher, "features": features, "loss_fn": loss_fn, "device": device}
            try:
                train_(
                    module, examples, replace(short, lr=rate), metric=_no_metric, penalty=penalty, momentum=momentum, **options
                )
                found, _ = held_out_means(module, held_out, judge, teacher=teacher, batch=settings.batch, device=device)
            except Diverged:
                found = inf
            tried.append((rate, found if isfinite(found) else None))
            copy_into_(module, before)
    best = min(tried, key=lambda trial: inf if trial[1] is None else trial[1])
    if best[1] is None:
        raise Diverged(
            f"lr = 'auto': training diverges at all of {', '.join(f'{rate:g}' for rate, _ in tried)}. Check that inputs and "
            f"weights are finite and scaled, or give a lower rate as lr."
        )
    return RateTrials(best[0], tuple(tried))


def _no_metric(outputs: Any, targets: Any) -> Tensor:
    """Trials need no metric, and the user's own may be slow."""
    return torch.zeros(())


class _Loop:
    """The moving parts of one training: optimiser, loss scaler, and the number of steps done."""

    def __init__(
        self,
        module: nn.Module,
        examples: Examples | Stream,
        settings: TrainSettings,
        objective: Objective,
        pairs: FeaturePairs | None,
        metric: Measure | None,
        place: torch.device,
        on_step: Callable[[int, int], None] | None,
    ) -> None:
        self.module, self.examples, self.settings, self.place = module, examples, settings, place
        self.workers = active()
        self.trained_module = wrapped(module if pairs is None else pairs.ours, self.workers, place)
        self.objective, self.paired, self.metric, self.on_step = objective, pairs is not None, metric, on_step
        self.count = examples.length or 0 if isinstance(examples, Stream) else len(examples)
        self.per_epoch = self.count if isinstance(examples, Stream) else steps_in_epoch(self.count, settings.batch)
        self.planned = total_steps(settings, self.per_epoch)
        self.step, self.rate, self.average = 0, settings.rate, dict[str, Tensor]()
        self.precision, self.note = usable_precision(settings.precision, place, module.parameters())
        if settings.features and pairs is None:
            self._add_note(
                "feature maps are compared in networks that give one tensor, behind sums or layers: here outputs alone are"
            )
        if isinstance(examples, Stream) and (ignored := for_memory_alone(settings)):
            self._add_note(f"the {examples.name} loader's own batches and augmentation are used, not {ignored}")
        if settings.mixup and of_singles(examples, settings):
            self._add_note(f"batches of one example have nothing to mix: mixup = {settings.mixup:g} has no effect")
        if settings.augment == "auto":
            kind, pad = suitable_augmentation(examples)
            self.settings = replace(settings, augment=kind, pad=pad)
        self.norms: list[_BatchNorm] = []  # that take the statistics of the batch, in this epoch
        self.trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self.optimiser: torch.optim.Optimizer
        if settings.optimiser == "adamw":
            self.optimiser = torch.optim.AdamW(self.trained.values(), lr=settings.rate, weight_decay=settings.weight_decay)
        else:
            self.optimiser = torch.optim.SGD(
                self.trained.values(),
                lr=settings.rate,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
                nesterov=settings.nesterov,
            )
        # not all need to be: an attention mask, for example, is a buffer with infinities
        self.finite = _finite(module)
        # float16 gradients underflow unless the loss is scaled up for the backward pass
        self.scaler = torch.amp.GradScaler(place.type, enabled=self.precision == "float16")

    def start(self, resume: TrainState | None, momentum: Mapping[str, Tensor] | None) -> list[EpochRecord]:
        """Continue from the given state or momentum; returns the epochs already done."""
        records: list[EpochRecord] = []
        if resume is not None:
            check_fits(resume, self.settings, examples=self.count)
            restore_(self.module, resume)
            self._keep_precision(resume.meta.get("precision", self.precision), len(resume.records()))
            momentum, records = resume.momentum(), resume.records()
            if resume.meta["scaler"]:
                self.scaler.load_state_dict(resume.meta["scaler"])
            self.step = records[-1].steps if records else 0
            self.average = {name: tensor.to(self.place) for name, tensor in resume.average().items()}
            for key, moments in resume.moments().items() if self.settings.optimiser != "sgd" else ():
                for name, moment in moments.items():
                    self.optimiser.state[self.trained[name]][key] = moment.to(self.place if moment.ndim else "cpu").clone()
        for name, buffer in (momentum or {}).items() if self.settings.optimiser == "sgd" and self.settings.momentum else ():
            weight = self.trained.get(name)
            if weight is None or weight.shape != buffer.shape:
                found = "no such parameter" if weight is None else f"a parameter of shape {tuple(weight.shape)}"
                raise TrainingError(f"momentum of shape {tuple(buffer.shape)} for {name!r}: the network has {found}")
            self.optimiser.state[weight]["momentum_buffer"] = buffer.to(weight).clone()
        return records

    def _add_note(self, note: str) -> None:
        if note not in self.note:
            self.note = "; ".join(filter(None, (self.note, note)))

    def _keep_precision(self, before: Precision, epochs: int) -> None:
        """Go on in the precision of the epochs before, where this processor can; the note says where it cannot."""
        if before == "float32":
            self.precision = before
        elif before != self.precision:
            self.note = f"{self.note}, after {epochs} epochs in {before} elsewhere"

    def epoch(self, number: int, measure: Callable[[], tuple[float | None, float | None]]) -> EpochRecord:
        """Train for one pass over the examples; after an error the weights are those before it."""
        loss_sum, right, count = 0.0, 0.0, 0
        with undone_on_error(self.module), seeded(self.settings.seed, "epoch", number), ExitStack() as stack:
            self.norms = train_mode(self.module, freeze=self.settings.freeze_batchnorm)
            self.rate = self.settings.rate
            stack.enter_context(synchronised(self.norms, self.workers))
            for batch, factor in self._batches(number):
                self.rate = learning_rate(self.settings, self.step, self.per_epoch)
                mean, outputs = self._train_on(batch, number, factor)
                average_statistics_(self.module, factor, self.workers)
                with torch.no_grad():
                    right += 0.0 if self.metric is None else float(total(self.metric(outputs, batch.targets), batch.size))
                loss_sum, count = loss_sum + mean * batch.size, count + batch.size
                self.step += 1
                self._update_average()
                if self.on_step is not None:
                    self.on_step(self.step, self.planned)
            for name in sorted(self.finite - _finite(self.module)):
                raise self._diverged(f"{name!r} is no longer finite", number)
            loss_sum, right, examples = summed((loss_sum, right, count), self.workers)
            last = self.take_average_()
            measured = measure()
            copy_into_(self.module, last)
        accuracy = None if self.metric is None else right / examples
        return EpochRecord(number, self.step, self.rate, loss_sum / examples, accuracy, *measured, note=self.note)

    def _update_average(self) -> None:
        """Move the average of weights and statistics towards those after this step, without bias to where it began.

        With decay d the t-th of them counts d^(T - t) / (1 + d + … + d^(T - 1)); what does not move stays the same to the bit.
        """
        decay = self.settings.average
        if decay == 0:
            return
        share = (1 - decay) / (1 - decay**self.step)
        for name, tensor in named_tensors(self.module).items():
            if name not in self.finite or not tensor.is_floating_point():
                continue
            if self.step == 1:
                self.average[name] = tensor.detach().clone()
            else:
                self.average[name] += share * (tensor.detach() - self.average[name])

    def take_average_(self) -> dict[str, Tensor]:
        """Give the module the averaged weights, if they are wanted; returns those that it had, or nothing."""
        own = named_tensors(self.module)
        last = {name: own[name].detach().clone() for name in self.average}
        copy_into_(self.module, self.average)
        return last

    def momentum(self) -> dict[str, Tensor]:
        """SGD's momentum by parameter name, on the CPU; empty for AdamW, which starts again after a cut."""
        return self._moments("momentum_buffer")

    def _moments(self, key: str) -> dict[str, Tensor]:
        found = {name: self.optimiser.state[weight].get(key) for name, weight in self.trained.items()}
        return {name: moment.detach().cpu() for name, moment in found.items() if moment is not None}

    def state(self, records: list[EpochRecord]) -> TrainState:
        """A copy of all that the next epoch depends on."""
        meta = {
            "epochs": [asdict(record) for record in records],
            "settings": settings_record(self.settings),
            "examples": self.count,
            "precision": self.precision,
            "scaler": self.scaler.state_dict(),
        }
        moments = {} if self.settings.optimiser == "sgd" else {key: self._moments(key) for key in _ADAMW}
        return TrainState(packed(self.module, self.momentum(), moments, self.average), meta)

    def _batches(self, number: int) -> Iterator[tuple[Batch, float]]:
        """The examples of one epoch in its own order, augmented; a function of seed and epoch alone.

        Of several workers each has its part of every batch, with its factor; batches of a loader are mixed within the parts.
        """
        settings, examples = self.settings, self.examples
        steps = min(self.per_epoch, self.planned - number * self.per_epoch)
        mixtures = generator_for(settings.seed, "mixup", number)
        if isinstance(examples, Stream):  # the user's loader augments and shuffles
            shuffle = generator_for(settings.seed, "order", number)
            with seeded_everywhere(settings.seed, "stream", number, loader=examples.loader):
                given, streamed = 0, self._streamed(examples, shuffle)
                for part, factor in islice(streamed, steps):
                    given += 1
                    inputs = mix(part.inputs, settings.mixup, generator=mixtures)
                    yield Batch(map_inputs(self._laid_out, inputs), part.targets), factor
                if given < steps:
                    raise DataError(
                        f"the {examples.name} loader gave {given} batches in epoch {number}, but its length is "
                        f"{self.per_epoch}, by which the learning rates go. Give a loader with as many batches as its len()."
                    )
                if steps == self.per_epoch and next(streamed, None) is not None:
                    self._add_note(f"the {examples.name} loader has more batches than its length: epochs end after {steps}")
            return
        order = torch.randperm(len(examples), generator=generator_for(settings.seed, "order", number))
        crops = generator_for(settings.seed, "augment", number)
        for place in range(steps):
            start = place * settings.batch
            end = len(examples) if place == self.per_epoch - 1 else start + settings.batch
            rows = order[start:end].to(examples.place)
            chosen = examples.stored.mapped(lambda part, rows=rows: part[rows])  # type: ignore[misc]
            stored = augment(chosen.inputs, settings.augment, pad=settings.pad, generator=crops)
            if settings.mixup:  # before the batch is shared out: the number of workers changes no mixture
                stored = mix(examples.scaled(stored), settings.mixup, generator=mixtures)
            part, factor = own_part(Batch(stored, chosen.targets), self.workers)
            moved = part.mapped(lambda part: part.to(self.place))
            inputs = moved.inputs if settings.mixup else examples.scaled(moved.inputs)
            yield Batch(map_inputs(self._laid_out, inputs), moved.targets), factor

    def _streamed(self, stream: Stream, order: torch.Generator) -> Iterator[tuple[Batch, float]]:
        """This worker's part of every batch of the user's loader; where its sampler is known, only that part is read."""
        rank, size = self.workers.rank, self.workers.size
        known = stream.parts(rank, size, order, singles=not self.norms) if size > 1 else None
        if known is None:
            wanted = stream.without_singles if self.norms else stream.batches
            for batch in wanted(device=self.place):
                yield own_part(batch, self.workers)
        else:
            parts, wholes = known
            for batch, whole in zip(parts.batches(device=self.place), wholes, strict=False):
                yield batch, 1.0 if whole < size else batch.size * size / whole

    def _laid_out(self, inputs: Tensor) -> Tensor:
        last = self.settings.channels_last and inputs.ndim == 4
        return inputs.contiguous(memory_format=torch.channels_last) if last else inputs

    def _train_on(self, batch: Batch, number: int, factor: float) -> tuple[float, Any]:
        """Take one optimiser step; returns the mean loss and the outputs before it. The loss counts `factor` times."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate
        self.optimiser.zero_grad(set_to_none=True)
        precision = self.precision
        with nullcontext() if precision == "float32" else torch.autocast(self.place.type, dtype=getattr(torch, precision)):
            with single_value_explained():
                outputs = self.trained_module(*batch.args)
            value = self.objective(batch.args, outputs, batch.targets)
        found = float(value.detach())
        if not isfinite(found):
            raise self._diverged(f"the loss is {found}", number)
        self.scaler.scale(value if factor == 1 else value * factor).backward()  # type: ignore[no-untyped-call]  # in torch
        if self.settings.clip_norm is not None:
            self.scaler.unscale_(self.optimiser)
            nn.utils.clip_grad_norm_(self.trained.values(), self.settings.clip_norm)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.optimiser.zero_grad(set_to_none=True)
        return found, outputs[-1] if self.paired else outputs

    def _diverged(self, what: str, number: int) -> Diverged:
        return Diverged(
            f"training diverged in epoch {number}, step {self.step} of {self.planned}, at learning rate {self.rate:g}: "
            f"{what}. The weights are those of the start of epoch {number}. "
            f"Lower lr, set clip_norm = 1.0, add warmup epochs, or check that the inputs are finite and scaled."
        )


def _finite(module: nn.Module) -> set[str]:
    return {name for name, tensor in named_tensors(module).items() if bool(torch.isfinite(tensor).all())}
