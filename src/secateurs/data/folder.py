"""Image folders: `ROOT/CLASS/*.png`, or `ROOT/train/CLASS/*.png` beside `test` and optionally `val`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from secateurs.data.dataset import IMAGENET, Examples, Scaling
from secateurs.data.splits import Data, overlap_notes, refuse_copies, split, split_shares
from secateurs.errors import DataError, InvalidInput, suggest

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
PREPROCESSING = {"imagenet": (256, 224)}  # pixels of the shorter edge, then of the square in the centre
_DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "F")  # Pillow clips these to 8 bits silently


def load_folder(
    root: str | Path,
    *,
    size: int | None = None,
    channels: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    search_share: float = 0.1,
    test_share: float = 0.1,
    seed: int = 0,
    processes: int = 0,
) -> Data:
    """Load the images under `root` as (N, channels, H, W), one class per folder, in the order of the class names.

    With `size` every image is resized to cover a square of that side and cropped to its centre; without, all images
    must have one size. Sets without a folder are split off by seed: the validation set from `train`; validation and test set
    from a single `ROOT/CLASS` tree; both from `val` if there is no `test`. `mean` and `std` default to ImageNet's
    (3 channels) or 0.5 (1). `processes` decode the images; 0: this one does. Larger than memory: `folder_loaders`.
    """
    if size is not None and size < 1:
        raise InvalidInput(f"image size {size}: wanted at least 1 pixel.")
    scaling = _scaling(channels, mean, std)
    folders = _folders(Path(root).expanduser())
    classes = _class_names(folders["train"])
    sets: dict[str, Examples] = {}
    offset = 0
    for name, folder in folders.items():
        files, labels = _list_images(folder, classes)
        pixels = _read_all(files, size, channels, processes)
        sets[name] = Examples(pixels, labels, scaling, torch.arange(offset, offset + len(files)))
        offset += len(files)
    refuse_copies(sets)
    shares = {"search_share": search_share, "test_share": test_share}
    origin = {"root": str(root), "seed": seed, "size": size, "channels": channels, **shares}
    train, search, test = _three_sets(sets, search_share, test_share, seed)
    data = Data("folder", train, search, test, classes=classes, origin=origin)
    return replace(data, notes=overlap_notes(data))


def _three_sets(sets: dict[str, Examples], search_share: float, test_share: float, seed: int) -> tuple[Examples, ...]:
    train, val, test = sets["train"], sets.get("val"), sets.get("test")
    if val is not None and test is not None:
        return train, val, test
    if val is not None:
        half = len(val) // 2
        return train, *split(val, (half, len(val) - half), seed=seed)
    if test is not None:
        return *split(train, split_shares(len(train), search_share), seed=seed), test
    return split(train, split_shares(len(train), search_share, test_share), seed=seed)


def _scaling(channels: int, mean: Sequence[float] | None, std: Sequence[float] | None) -> Scaling:
    if channels not in (1, 3):
        raise InvalidInput(f"image folder with channels={channels}: wanted 3 (colour) or 1 (grey).")
    default = IMAGENET if channels == 3 else Scaling(255.0, (0.5,), (0.5,))
    chosen = Scaling(255.0, tuple(mean) if mean else default.mean, tuple(std) if std else default.std)
    if {len(chosen.mean), len(chosen.std)} != {channels} or min(chosen.std) <= 0:
        raise InvalidInput(f"mean={mean}, std={std}: wanted {channels} numbers each, and standard deviations above 0.")
    return chosen


def _folders(root: Path) -> dict[str, Path]:
    if not root.is_dir():
        raise DataError(f"no folder {root}: wanted ROOT/CLASS/*.png or ROOT/train/CLASS/*.png.")
    if not (root / "train").is_dir():
        return {"train": root}
    found = {name: root / name for name in ("train", "val", "test") if (root / name).is_dir()}
    if not (root / "val").is_dir() and (root / "valid").is_dir():
        found["val"] = root / "valid"
    return found


def _class_names(folder: Path) -> tuple[str, ...]:
    names = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if not names:
        raise DataError(f"no class folders in {folder}: wanted one folder per class, with its images inside.")
    return names


def _list_images(folder: Path, classes: tuple[str, ...]) -> tuple[list[Path], Tensor]:
    unknown = sorted(set(_class_names(folder)) - set(classes))
    if unknown:
        raise DataError(f"{folder} has the class {unknown[0]!r}, which the training images do not: {', '.join(classes)}.")
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(path for path in folder.glob(f"{name}/*") if path.suffix.lower() in SUFFIXES)
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(f"no images in {folder}: looked for {', '.join(SUFFIXES)} in {', '.join(classes)}.")
    return files, torch.tensor(labels)


def _read_all(files: list[Path], size: int | None, channels: int, processes: int) -> Tensor:
    first = _read_image(files[0], size, channels)
    # one allocation: a folder may fill much of the memory
    pixels = np.empty((len(files), *first.shape), np.uint8)
    read = _Pixels(files, size, channels)
    decoded = (
        DataLoader(read, None, num_workers=processes, collate_fn=np.asarray)
        if processes
        else map(read.__getitem__, range(len(files)))
    )
    for row, (path, image) in enumerate(zip(files, decoded, strict=True)):
        if image.shape != first.shape:
            raise DataError(
                f"{path} is {image.shape[1]}×{image.shape[0]} pixels, {files[0]} is {first.shape[1]}×{first.shape[0]}: "
                f"give size=… to resize all images."
            )
        pixels[row] = image
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


class _Pixels(Dataset[Any]):
    """The pixels of files, to be read by other processes."""

    def __init__(self, files: list[Path], size: int | None, channels: int) -> None:
        self.files, self.size, self.channels = files, size, channels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return _read_image(self.files[row], self.size, self.channels)


def _read_image(path: Path, size: int | None, channels: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    image = _open_image(path, channels)
    if size is not None:
        from PIL import ImageOps
        from PIL.Image import Resampling

        image = ImageOps.fit(image, (size, size), method=Resampling.BILINEAR)
    return _pixels_of(image, channels)


def _pixels_of(image: Any, channels: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    pixels = np.asarray(image, np.uint8)
    return pixels.reshape(*pixels.shape[:2], channels)


def _open_image(path: Path, channels: int) -> Any:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError("image folders need Pillow: pip install secateurs[images]") from error
    try:
        with Image.open(path) as opened:
            if opened.mode in _DEEP_MODES:
                raise DataError(f"{path} has more than 8 bits a pixel (mode {opened.mode}): convert it to 8 bits first.")
            return ImageOps.exif_transpose(opened).convert("RGB" if channels == 3 else "L")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read the image {path}: {error}. Repair or remove it.") from error


# ---- streamed ------------------------------------------------------------------------------------------------------------


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images of `ROOT/CLASS/*`, decoded when they are read, preprocessed as `PREPROCESSING` says by name.

    Augmented: a random part of the image, of 8 to 100 % of its area, mirrored or not; else the centre.
    """

    def __init__(self, root: str | Path, *, preprocessing: str = "imagenet", augmented: bool = False) -> None:
        if preprocessing not in PREPROCESSING:
            raise InvalidInput(f"preprocessing={preprocessing!r}: unknown.{suggest(preprocessing, PREPROCESSING)}")
        self.shorter, self.side = PREPROCESSING[preprocessing]
        self.augmented, folder = augmented, Path(root).expanduser()
        if not folder.is_dir():
            raise DataError(f"no folder {folder}: wanted ROOT/CLASS/*.jpg.")
        self.classes = _class_names(folder)
        self.files, self.labels = _list_images(folder, self.classes)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        image = _open_image(self.files[row], 3)
        part = random_part(image, self.side) if self.augmented else central_part(image, self.shorter, self.side)
        pixels = torch.from_numpy(_pixels_of(part, 3).copy()).permute(2, 0, 1)
        return IMAGENET(pixels[None])[0], int(self.labels[row])


def central_part(image: Any, shorter: int, side: int) -> Any:
    """The square in the centre, of `side` pixels, of the image resized so that its shorter edge has `shorter`."""
    from PIL.Image import Resampling

    width, height = image.size
    scale = shorter / min(width, height)
    size = tuple(shorter if edge == min(width, height) else int(edge * scale) for edge in (width, height))
    resized = image.resize(size, Resampling.BILINEAR)
    left, top = (round((edge - side) / 2) for edge in size)
    return resized.crop((left, top, left + side, top + side))


def random_part(image: Any, side: int) -> Any:
    """A random part of the image, 8 to 100 % of its area and no narrower than 3:4, as a square of `side`, mirrored or not.

    It is drawn from torch's random state, which loaders seed in each of their processes.
    """
    from PIL.Image import Resampling, Transpose

    width, height = image.size
    share, ratio = torch.empty(1).uniform_(0.08, 1), torch.empty(1).uniform_(math.log(3 / 4), math.log(4 / 3)).exp()
    area = float(share) * width * height
    wide, high = min(width, max(1, round(math.sqrt(area * ratio)))), min(height, max(1, round(math.sqrt(area / ratio))))
    left, top = (int(torch.randint(edge - part + 1, (1,))) for edge, part in ((width, wide), (height, high)))
    found = image.resize((side, side), Resampling.BILINEAR, box=(left, top, left + wide, top + high))
    return found.transpose(Transpose.FLIP_LEFT_RIGHT) if torch.rand(1) < 0.5 else found


def folder_loaders(
    root: str | Path, *, preprocessing: str = "imagenet", batch: int = 256, processes: int = 8
) -> tuple[DataLoader[Any], ...]:
    """Loaders of `ROOT/train` (shuffled, augmented), `ROOT/val` and, if it is there, `ROOT/test`: nothing is held in memory.

    `processes` of each loader decode the images.
    """
    folder = Path(root).expanduser()
    names = [name for name in ("train", "val", "test") if name != "test" or (folder / name).is_dir()]
    return tuple(
        DataLoader(
            ImageFolder(folder / name, preprocessing=preprocessing, augmented=name == "train"),
            batch_size=batch,
            shuffle=name == "train",
            num_workers=processes,
        )
        for name in names
    )
