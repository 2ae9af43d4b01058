"""Random crops, flips and mixtures of training examples, drawn on the CPU so that every device sees the same ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from secateurs.config import Augment
from secateurs.data.dataset import Examples, Inputs, input_parts, map_inputs
from secateurs.data.stream import Stream
from secateurs.errors import InvalidInput


def suitable_augmentation(examples: Examples | Stream) -> tuple[Augment, int]:
    """What "auto" stands for, and the padding: crops and flips of colour images by an eighth; a flipped digit is another.

    A loader does its own.
    """
    if isinstance(examples, Stream):
        return "none", 0
    shape = examples.stored.args[0].shape[1:]
    if len(shape) == 3 and shape[0] == 3 and min(shape[1:]) >= 8:
        return "crop-flip", min(shape[1:]) // 8
    return "none", 0


def augment(images: Inputs, kind: Augment, *, pad: int, generator: torch.Generator) -> Inputs:
    """Augment images (N, C, H, W) as `kind` says, each independently; "none" returns them unchanged."""
    if kind == "none":
        return images
    check_augmentable(images, kind)
    assert isinstance(images, Tensor)
    cropped = random_crop(images, pad=pad, generator=generator)
    return random_flip(cropped, generator=generator) if kind == "crop-flip" else cropped


def check_augmentable(images: Inputs, kind: Augment) -> None:
    """InvalidInput where crops are asked for of inputs that are no images."""
    if kind in ("crop", "crop-flip") and (not isinstance(images, Tensor) or images.ndim != 4):
        shapes = ", ".join(str(tuple(part.shape)) for part in input_parts(images))
        raise InvalidInput(f"augment = {kind!r} for inputs of shape {shapes}: wanted images (N, C, H, W), or 'none'")


def random_crop(images: Tensor, *, pad: int, generator: torch.Generator) -> Tensor:
    """Crop each image, padded by `pad` zeros, to its original size; all (2·pad + 1)² windows are equally likely."""
    if pad == 0:
        return images
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


def check_mixable(inputs: Inputs, share: float) -> None:
    """InvalidInput where mixtures are asked for of inputs that have none, as numbers of words."""
    for part in input_parts(inputs) if share else ():
        if not part.is_floating_point():
            raise InvalidInput(f"mixup = {share:g} for inputs of type {part.dtype}: wanted floating-point numbers, or 0")


def mix(inputs: Inputs, share: float, *, generator: torch.Generator) -> Inputs:
    """Replace a part of each example, drawn between 0 and `share`, by as much of another one; 0 returns them unchanged.

    All inputs of an example have the same partner and part. A teacher that knows its training examples by heart answers
    mixtures with doubts, which tell more of it (Beyer 2022).
    """
    if share == 0:
        return inputs
    check_mixable(inputs, share)
    count = len(input_parts(inputs)[0])
    partners, parts = torch.randperm(count, generator=generator), share * torch.rand(count, generator=generator)

    def mixed(each: Tensor) -> Tensor:
        weights = parts.to(each).view(-1, *[1] * (each.ndim - 1))
        return torch.lerp(each, each[partners.to(each.device)], weights)

    return map_inputs(mixed, inputs)
