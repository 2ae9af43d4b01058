"""CIFAR-10 in its binary form in the cache folder, downloaded once from its official address."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from secateurs._util.download import Progress, fetch, home
from secateurs._util.files import write_bytes
from secateurs.data.dataset import IMAGENET, Examples
from secateurs.data.splits import Data, split
from secateurs.errors import DataError, InvalidInput, suggest

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
FOLDER = "cifar-10-batches-bin"
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SCALING = IMAGENET  # the public CIFAR-10 ResNets were trained with it
SPLITS = ("paper", "public")

_PIXELS = 3 * 32 * 32


def load_cifar10(
    split: Literal["paper", "public"] = "paper",
    *,
    seed: int = 0,
    download: bool = True,
    progress: Progress | None = None,
) -> Data:
    """Load CIFAR-10 as (N, 3, 32, 32) images: 45,000 / 5,000 / 10,000 ("paper"), or 50,000 / 5,000 / 5,000 ("public").

    "public" is for weights that were trained on all 50,000 training images: half of the test images are the validation
    set, the other half the test set.
    """
    if split not in SPLITS:
        raise InvalidInput(f"cifar10 has no split {split!r}.{suggest(split, SPLITS)}")
    if download:
        get_cifar10(progress=progress)
    return arrange(*read_cifar10(cifar10_folder()), split, seed=seed)


def cifar10_folder() -> Path:
    """Folder of the binary files."""
    return home() / "data" / FOLDER


def get_cifar10(*, progress: Progress | None = None) -> Path:
    """Return the folder of CIFAR-10, downloading and unpacking it first if necessary."""
    folder = cifar10_folder()
    if _missing(folder):
        archive = fetch(URL, folder.parent / "cifar-10-binary.tar.gz", md5=ARCHIVE_MD5, progress=progress)
        unpack(archive, folder)
        archive.unlink(missing_ok=True)
    return folder


def read_cifar10(folder: Path) -> tuple[Examples, Examples]:
    """Read the 50,000 training and the 10,000 test images, numbered 0 to 59,999, and check every file against its MD5."""
    missing = _missing(folder)
    if missing:
        raise DataError(f"CIFAR-10 is not complete in {folder}: no {missing[0]}. Get it with: secateurs data get cifar10")
    contents = [(folder / name).read_bytes() for name in MD5]
    for name, content in zip(MD5, contents, strict=True):
        _check(folder / name, content)
    rows = torch.from_numpy(np.concatenate([np.frombuffer(each, np.uint8) for each in contents]).reshape(-1, 1 + _PIXELS))
    examples = Examples(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long(), SCALING, torch.arange(len(rows)))
    train = len(rows) - len(contents[-1]) // (1 + _PIXELS)  # the last file holds the test images
    return examples.take(torch.arange(train)), examples.take(torch.arange(train, len(rows)))


def arrange(train: Examples, test: Examples, kind: Literal["paper", "public"], *, seed: int) -> Data:
    """Divide the official training and test images into the three sets of the split `kind`.

    The validation set has half as many images as there are test images: 5,000.
    """
    origin, half = {"split": kind, "seed": seed}, len(test) // 2
    if kind == "paper":
        kept, search = split(train, (len(train) - half, half), seed=seed)
        return Data("cifar10", kept, search, test, classes=CLASSES, origin=origin)
    search, held_out = split(test, (half, len(test) - half), seed=seed)
    note = "validation and test sets are the two halves of the official test images, because the weights have seen all others"
    return Data("cifar10", train, search, held_out, classes=CLASSES, origin=origin, notes=(note,))


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the six files of the archive into `folder`, once all of them are checked; other members are ignored."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                # members are read only under the six known names, and written under those: no path in the archive is trusted
                name = member.name.removeprefix("./").removeprefix(f"{FOLDER}/")
                source = tar.extractfile(member) if name in MD5 and member.isfile() else None
                if source is not None:
                    contents[name] = source.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"cannot unpack {archive}: {error}. Delete the archive and try again.") from error
    missing = [name for name in MD5 if name not in contents]
    if missing:
        raise DataError(f"{archive} does not hold {', '.join(missing)}: it is not the binary version of CIFAR-10. Delete it.")
    for name, content in contents.items():
        _check(archive / name, content)
    try:
        for name, content in contents.items():
            write_bytes(folder / name, content)
    except OSError as error:
        raise DataError(f"cannot write CIFAR-10 to {folder}: {error}. Free some space, or make the folder writable.") from error


def _missing(folder: Path) -> list[str]:
    return [name for name in MD5 if not (folder / name).is_file()]


def _check(path: Path, content: bytes) -> None:
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 != MD5[path.name]:
        raise DataError(
            f"{path} is damaged: MD5 {md5}, wanted {MD5[path.name]}. "
            f"Delete {path.parent} and get it again with: secateurs data get cifar10"
        )
