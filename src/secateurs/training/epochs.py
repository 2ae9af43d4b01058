"""Epochs of a training: its optimiser, batches, steps and averaged weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from itertools import islice
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateurs.config import Precision, TrainSettings
from secateurs.data.dataset import Batch, Examples, generator_for, map_inputs, seeded
from secateurs.data.stream import Stream, seeded_everywhere
from secateurs.distributed import active
from secateurs.errors import DataError, Diverged, TrainingError
from secateurs.graph.features import FeaturePairs
from secateurs.metrics import Measure, total
from secateurs.training.augment import augment, mix, suitable_augmentation
from secateurs.training.checks import for_memory_alone, of_singles, single_value_explained, train_mode
from secateurs.training.objective import Objective
from secateurs.training.parallel import average_statistics_, own_part, summed, synchronised, wrapped
from secateurs.training.precision import usable_precision
from secateurs.training.schedule import learning_rate, steps_in_epoch, total_steps
from secateurs.training.state import (
    EpochRecord,
    TrainState,
    check_fits,
    copy_into_,
    named_tensors,
    packed,
    restore_,
    settings_record,
    undone_on_error,
)

_ADAMW = ("step", "exp_avg", "exp_avg_sq")  # the state of a parameter


class Loop:
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
            chosen = examples.stored.mapped(lambda part, rows=rows: part[rows])  # type: ignore[misc]  # mypy infers no default
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
