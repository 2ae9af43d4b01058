"""What a training cannot do, said before it begins or where it meets it: no examples, no gradients, single examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from secateurs._util.modules import keeping_modes
from secateurs.config import TrainSettings
from secateurs.data.dataset import Examples, seeded
from secateurs.data.stream import Stream
from secateurs.errors import InvalidInput
from secateurs.graph.features import FeaturePairs
from secateurs.training.augment import check_augmentable, check_mixable


def check_length(examples: Examples | Stream) -> None:
    """InvalidInput for nothing to train on, and for a loader without a length, from which no schedule can be made."""
    if isinstance(examples, Examples):
        if len(examples) == 0:
            raise InvalidInput("training on no examples: wanted at least one")
    elif examples.length is None:
        raise InvalidInput(
            f"training on the {examples.name} loader, which has no length: give a loader with one, or a finetune of your own."
        )
    elif examples.length == 0:
        raise InvalidInput(
            f"training on the {examples.name} loader, whose length is 0: wanted at least one batch. With drop_last=True the "
            f"batch may be larger than the set."
        )


def check_trainable(
    module: nn.Module, examples: Examples | Stream, settings: TrainSettings, *, sample: Examples | None = None
) -> None:
    """InvalidInput for a training that cannot begin, as far as that is known without it.

    A `sample`, on the device of the module and as it takes it, shows what a loader's type does not: inputs that cannot be
    mixed, and BatchNorm that cannot normalise the only example of a batch.
    """
    check_length(examples)
    if not any(weight.requires_grad for weight in module.parameters()):
        raise InvalidInput("no parameter of this network requires a gradient: there is nothing to train")
    if torch.is_inference_mode_enabled():
        raise InvalidInput("training inside torch.inference_mode(): nothing can be trained there, call it outside.")
    if not isinstance(examples, Stream):
        check_augmentable(examples.stored.inputs, settings.augment)
    shown = sample if sample is not None or isinstance(examples, Stream) else examples
    if shown is not None and shown.scaling is None:
        check_mixable(shown.inputs, settings.mixup)
    if sample is None or not of_singles(examples, settings):
        return
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}  # the module's own stay as they are
    with keeping_modes(module), seeded(settings.seed, "check"), torch.no_grad(), single_value_explained():
        train_mode(module, freeze=settings.freeze_batchnorm)
        torch.func.functional_call(module, buffers, sample.batch(slice(0, 1)).args)


def of_singles(examples: Examples | Stream, settings: TrainSettings) -> bool:
    """Whether all batches are of one example, as far as that is known."""
    if isinstance(examples, Stream):
        return getattr(examples.loader, "batch_size", None) == 1
    return 1 in (len(examples), settings.batch)


def train_mode(module: nn.Module, *, freeze: bool) -> list[_BatchNorm]:
    """Put the module into training mode, without norms that are frozen; returns BatchNorms that take a batch's statistics."""
    module.train()
    for part in module.modules():
        if freeze and isinstance(part, _NormBase) and part.track_running_stats:
            part.eval()
    return [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]


@contextmanager
def single_value_explained() -> Iterator[None]:
    """Inside the block, torch's error of a BatchNorm that has one value says what to do."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise InvalidInput(
            f"BatchNorm cannot normalise the only value of a channel: a batch of training has one example ({error}). Use "
            f"batch = 2 or more, a loader without batches of one (drop_last=True), or freeze_batchnorm = true."
        ) from error


def check_paired(module: nn.Module, pairs: FeaturePairs) -> None:
    """InvalidInput unless the network that is compared with the teacher is the one that is trained, and not the teacher."""
    ours, theirs = ({id(weight) for weight in each.parameters()} for each in (pairs.ours, pairs.theirs))
    if not ours <= {id(weight) for weight in module.parameters()}:
        raise InvalidInput(
            "features pair another network than the one that is trained: give partial(paired_features, graph, original) with "
            "graph.module the network that is trained"
        )
    if ours & theirs:
        raise InvalidInput("features pair the network with itself: give the network that it was cut from as original")


def for_memory_alone(settings: TrainSettings) -> str:
    """Settings, other than by default, that a loader leaves without effect: "batch = 8 and augment = 'crop'"; or nothing."""
    batch = "" if settings.batch == TrainSettings().batch else f"batch = {settings.batch}"
    kind = "" if settings.augment in ("none", "auto") else f"augment = {settings.augment!r}"
    return " and ".join(filter(None, (batch, kind)))
