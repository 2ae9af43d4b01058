"""MNIST in its original form, four IDX files in the cache folder, downloaded once from the mirrors of torchvision."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np
import torch

from secateurs._util.download import Progress, fetch, home
from secateurs._util.files import write_bytes
from secateurs.data.dataset import Examples, Scaling
from secateurs.data.splits import Data, split
from secateurs.errors import DataError, DownloadError

# yann.lecun.com, where the set was published, no longer serves it; these are the mirrors of torchvision and of the CVDF
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
# the MD5 of the archive, then of the file in it
MD5 = {
    "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
}
SCALING = Scaling(full=255.0, mean=(0.1307,), std=(0.3081,))  # mean and deviation of all training pixels
VALIDATION = 5_000


def load_mnist(*, seed: int = 0, download: bool = True, progress: Progress | None = None) -> Data:
    """Load MNIST as (N, 1, 28, 28) images: 55,000 / 5,000 / 10,000, the validation set split off the training images."""
    folder = get_mnist(progress=progress) if download else mnist_folder()
    train, test = read_mnist(folder)
    kept, search = split(train, (len(train) - min(VALIDATION, len(train) // 12), min(VALIDATION, len(train) // 12)), seed=seed)
    return Data("mnist", kept, search, test, classes=tuple("0123456789"), origin={"seed": seed})


def mnist_folder() -> Path:
    """Folder of the four files."""
    return home() / "data" / "mnist"


def get_mnist(*, progress: Progress | None = None) -> Path:
    """Return the folder of MNIST, downloading and unpacking what is missing; a mirror that fails is followed by the next."""
    folder = mnist_folder()
    for name in _missing(folder):
        archive = folder / f"{name}.gz"
        for mirror in MIRRORS:
            try:
                fetch(f"{mirror}{name}.gz", archive, md5=MD5[name][0], progress=progress)
                break
            except DownloadError:
                if mirror == MIRRORS[-1]:
                    raise
        try:
            content = gzip.decompress(archive.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot unpack {archive}: {error}. Delete the archive and try again.") from error
        _check(folder / name, content)
        write_bytes(folder / name, content)
        archive.unlink(missing_ok=True)
    return folder


def read_mnist(folder: Path) -> tuple[Examples, Examples]:
    """Read the 60,000 training and the 10,000 test images, numbered 0 to 69,999, and check every file against its MD5."""
    missing = _missing(folder)
    if missing:
        raise DataError(f"MNIST is not complete in {folder}: no {missing[0]}. Get it with: secateurs data get mnist")
    contents = {name: (folder / name).read_bytes() for name in MD5}
    for name, content in contents.items():
        _check(folder / name, content)
    train, labels, test, test_labels = (_from_idx(content) for content in contents.values())
    first = torch.arange(len(train))
    return (
        Examples(train[:, None], labels.long(), SCALING, first),
        Examples(test[:, None], test_labels.long(), SCALING, torch.arange(len(test)) + len(train)),
    )


def _from_idx(content: bytes) -> torch.Tensor:
    """The array of an IDX file of bytes: two zeros, the type, the number of axes, their lengths, the values."""
    axes = content[3]
    shape = np.frombuffer(content, ">i4", axes, 4).tolist()
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape).copy())


def _missing(folder: Path) -> list[str]:
    return [name for name in MD5 if not (folder / name).is_file()]


def _check(path: Path, content: bytes) -> None:
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 != MD5[path.name][1]:
        raise DataError(
            f"{path} is damaged: MD5 {md5}, wanted {MD5[path.name][1]}. "
            f"Delete {path.parent} and get it again with: secateurs data get mnist"
        )
