"""Random crops and mirror images of whole batches, as tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from secateurs.errors import InvalidInput
from secateurs.training.settings import Augment


def augment(images: Tensor, kind: Augment, *, pad: int, generator: torch.Generator) -> Tensor:
    """The images (N, C, H, W) as `kind` says, each changed on its own; "none" gives them as they are."""
    if kind == "none":
        return images
    if images.ndim != 4:
        raise InvalidInput(
            f"augment = {kind!r} for inputs of shape {tuple(images.shape)}: wanted images (N, C, H, W), or 'none'"
        )
    cropped = random_crop(images, pad=pad, generator=generator)
    return random_flip(cropped, generator=generator) if kind == "crop-flip" else cropped


def random_crop(images: Tensor, *, pad: int, generator: torch.Generator) -> Tensor:
    """A window of the original size out of each image padded by `pad` zeros; all (2·pad + 1)² are equally likely."""
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
    """Each image as it is or mirrored left to right, with equal chances."""
    mirrored = torch.randint(2, (len(images),), generator=generator).bool().to(images.device)
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)
