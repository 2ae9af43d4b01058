"""CIFAR-10 in its binary form under the cache folder; downloaded once from its official address, whole or absent."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path
from typing import IO, Literal

import numpy as np
import torch
from torch import Tensor

from secateurs._util.download import Progress, fetch, home
from secateurs._util.files import sync_folder
from secateurs.data.dataset import Examples, Scaling
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
# the normalisation that the public CIFAR-10 ResNets were trained with
SCALING = Scaling(full=255.0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
SPLITS = ("paper", "public")

_TRAIN, _TEST, _PIXELS = 50_000, 10_000, 3 * 32 * 32
_SEARCH = 5_000  # both splits search on 5,000 images


def load_cifar10(
    split: Literal["paper", "public"] = "paper",
    *,
    seed: int = 0,
    download: bool = True,
    progress: Progress | None = None,
) -> Data:
    """CIFAR-10 as (N, 3, 32, 32) images: 45,000 / 5,000 / 10,000 ("paper"), or 50,000 / 5,000 / 5,000 ("public").

    "public" is for weights that were trained on all 50,000 training images: those tell nothing about accuracy any more,
    so half of the test images search and the other half test.
    """
    if split not in SPLITS:
        raise InvalidInput(f"cifar10 has no split {split!r}.{suggest(split, SPLITS)}")
    if download:
        get_cifar10(progress=progress)
    return arrange(*read_cifar10(cifar10_folder()), split, seed=seed)


def cifar10_folder() -> Path:
    """Where the binary files are kept."""
    return home() / "data" / FOLDER


def get_cifar10(*, progress: Progress | None = None) -> Path:
    """Download and unpack CIFAR-10 unless it is there, and return its folder."""
    folder = cifar10_folder()
    if _missing(folder):
        archive = fetch(URL, folder.parent / "cifar-10-binary.tar.gz", md5=ARCHIVE_MD5, progress=progress)
        unpack(archive, folder)
        archive.unlink(missing_ok=True)
    return folder


def read_cifar10(folder: Path) -> tuple[Examples, Examples]:
    """The 50,000 training and the 10,000 test images, numbered 0 to 59,999; every file is checked against its MD5."""
    missing = _missing(folder)
    if missing:
        raise DataError(f"CIFAR-10 is not complete in {folder}: no {missing[0]}. Get it with: secateurs data get cifar10")
    rows = torch.cat([_read_file(folder / name) for name in MD5])
    examples = Examples(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long(), SCALING, torch.arange(len(rows)))
    return examples.take(torch.arange(_TRAIN)), examples.take(torch.arange(_TRAIN, _TRAIN + _TEST))


def arrange(train: Examples, test: Examples, kind: Literal["paper", "public"], *, seed: int) -> Data:
    """The official training and test images as the three sets of the split `kind`."""
    origin = {"split": kind, "seed": seed}
    if kind == "paper":
        kept, search = split(train, (len(train) - _SEARCH, _SEARCH), seed=seed)
        return Data("cifar10", kept, search, test, classes=CLASSES, origin=origin)
    search, held_out = split(test, (_SEARCH, len(test) - _SEARCH), seed=seed)
    note = "search and test are the two halves of the official test images, because the weights have seen all others"
    return Data("cifar10", train, search, held_out, classes=CLASSES, origin=origin, notes=(note,))


def unpack(archive: Path, folder: Path) -> None:
    """Put the six files of the archive into `folder`, checked, all of them or none; other members are ignored."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        fresh = Path(name, "fresh")
        fresh.mkdir()
        try:
            _extract(archive, fresh)
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise DataError(
                f"cannot unpack {archive} into {folder.parent}: {error}. Delete the archive and try again."
            ) from error
        sync_folder(fresh)
        _put(fresh, folder, aside=Path(name, "old"))


def _extract(archive: Path, folder: Path) -> None:
    # members are read only under the six known names, and written under those: no path in the archive is trusted
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix("./").removeprefix(f"{FOLDER}/")
            source = tar.extractfile(member) if name in MD5 and member.isfile() else None
            if source is not None:
                with source:
                    _write_checked(source, folder / name)
    missing = _missing(folder)
    if missing:
        raise DataError(f"{archive} does not hold {', '.join(missing)}: it is not the binary version of CIFAR-10. Delete it.")


def _write_checked(source: IO[bytes], path: Path) -> None:
    with path.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        _check(path, hashlib.file_digest(file, "md5").hexdigest())


def _put(fresh: Path, folder: Path, *, aside: Path) -> None:
    if folder.exists() and _missing(folder):
        os.rename(folder, aside)  # somebody's half: it goes when the temporary folder goes
    try:
        os.rename(fresh, folder)
    except OSError as error:
        if _missing(folder):  # else another process was faster, and its files are the same
            raise DataError(f"cannot put CIFAR-10 at {folder}: {error}. Make the folder writable.") from error
    sync_folder(folder.parent)


def _missing(folder: Path) -> list[str]:
    return [name for name in MD5 if not (folder / name).is_file()]


def _read_file(path: Path) -> Tensor:
    data = path.read_bytes()
    _check(path, hashlib.md5(data, usedforsecurity=False).hexdigest())
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8).reshape(-1, 1 + _PIXELS))


def _check(path: Path, md5: str) -> None:
    if md5 != MD5[path.name]:
        raise DataError(
            f"{path} is damaged: MD5 {md5}, wanted {MD5[path.name]}. "
            f"Delete the folder {path.parent} and get it again with: secateurs data get cifar10"
        )
