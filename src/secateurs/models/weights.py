"""Weights and their provenance: public, built-in and own files, with how and on which examples they were trained."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateurs._util.decode import Malformed, brief, checked, decode_json
from secateurs._util.download import Progress, fetch, home
from secateurs._util.tensors import Damaged, first_non_finite, parse
from secateurs._util.tensors import read_header as read_tensor_header
from secateurs.data import SETS, Data, load
from secateurs.data.dataset import IMAGENET, Examples
from secateurs.data.splits import shared_inputs
from secateurs.errors import ArtefactError, InvalidInput, SecateursError, suggest
from secateurs.models.registry import build
from secateurs.models.resnet import ResNet, resnet

MARK, VERSION = "secateurs_weights", "1"
_TEXT_FIELDS = ("model", "data_sha256")  # stored in a header as text; all others as JSON

# torch.save does not compress: a zip file that unpacks to far more is none of its own, and a bomb if the network is small
_MOST_UNPACKED, _MOST_OF_NETWORK = 8, 4  # times the file, times the network; a checkpoint also holds what an optimiser keeps


@dataclass(frozen=True)
class TrainingSet:
    """Examples that weights were trained on: the train set of a data set that can be loaded again."""

    data: str  # as `secateurs.data.load` takes it
    options: Mapping[str, Any]  # that reproduce the split
    count: int
    sha256: str | None = None  # of the examples (`Examples.digest`); None: unknown

    def __str__(self) -> str:
        how = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.count:,} examples of {self.data}" + (f" ({how})" if how else "")


@dataclass(frozen=True)
class Pedigree:
    """Provenance of a file of weights. Accuracies are fractions, None where they were not measured."""

    model: str
    model_options: Mapping[str, Any]
    recipe: Mapping[str, Any]  # training settings
    seed: int
    epochs: int
    trained_on: tuple[TrainingSet, ...]  # the last one in this training, earlier ones in the training of its initial weights
    sets: Mapping[str, int]  # number of examples in the train, search and test set
    data_sha256: str  # of all three
    scaling: Mapping[str, Any] | None  # full, mean, std of `Scaling`; None: inputs are stored unscaled
    versions: Mapping[str, str]
    search_accuracy: float | None = None
    test_accuracy: float | None = None

    def header(self) -> dict[str, str]:
        """Header of a safetensors file: text as it is, everything else as JSON."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {MARK: VERSION} | {k: v if isinstance(v, str) else json.dumps(v, sort_keys=True) for k, v in known.items()}


def read_pedigree(path: Path) -> Pedigree | None:
    """Read the pedigree in the header of a file; None where there is no such file, or it has no pedigree."""
    header = read_header(path)
    if MARK not in header:
        return None
    try:
        known = {field.name: header[field.name] for field in fields(Pedigree) if field.name in header}
        values: dict[str, Any] = {name: text if name in _TEXT_FIELDS else decode_json(text) for name, text in known.items()}
        return checked({"scaling": None, **values}, Pedigree)
    except Malformed as error:
        raise ArtefactError(
            f"{path}: the provenance in its header cannot be read by this release ({brief(error)}). "
            f"Train or download the weights again."
        ) from error


def read_header(path: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file; empty for a file that is absent, damaged or of another kind."""
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    try:
        return read_tensor_header(path)[0]
    except (Damaged, OSError):
        return {}  # loading its tensors reports the damage


def scaling_fields(examples: Examples) -> dict[str, Any] | None:
    """Scaling of the examples as JSON values."""
    return None if examples.scaling is None else json.loads(json.dumps(asdict(examples.scaling)))


@dataclass(frozen=True)
class Overlap:
    """Number of validation examples that were trained on; None: it cannot be determined, and `why` says the reason."""

    trained: TrainingSet
    shared: int | None
    why: str = ""


def overlaps(name: str, data: Data, trained_on: Iterable[TrainingSet]) -> list[Overlap]:
    """Find what the validation set of `data`, loaded by `name`, shares with the training sets, where it shares examples.

    Training sets of another source are skipped, and so is the train set of `data` itself: it is disjoint from the validation
    set. Any other is loaded again and compared input by input, byte for byte.
    """
    found = [_overlap(trained, data) for trained in trained_on if trained.data == name and not _is_train_set(trained, data)]
    return [overlap for overlap in found if overlap.shared != 0]


def _is_train_set(trained: TrainingSet, data: Data) -> bool:
    if trained.sha256 is not None:
        return trained.sha256 == data.train.digest()
    return all(data.origin.get(option) == value for option, value in trained.options.items())


def _overlap(trained: TrainingSet, data: Data) -> Overlap:
    if trained.data not in SETS and not trained.data.startswith("folder:"):
        return Overlap(trained, None, "your function is not called with options that a file of weights names")
    try:
        again = load(trained.data, **trained.options).train
    except SecateursError as error:
        return Overlap(trained, None, str(error))
    if trained.sha256 is not None and again.digest() != trained.sha256:
        return Overlap(trained, None, "the data have changed since")
    return Overlap(replace(trained, count=len(again)), shared_inputs(data.search, again))


PUBLIC_MEAN, PUBLIC_STD = IMAGENET.mean, IMAGENET.std
"""Means and standard deviations of red, green and blue (of pixels in [0, 1]) that the public weights were trained with."""
PUBLIC_TRAINED_ON = TrainingSet("cifar10", {"split": "public"}, 50_000)
"""Training set of the public weights: all training images."""
BUILTIN = Path(__file__).parent / "builtin"
"""Folder of the weights shipped with the package, a file for each network."""

_ADDRESS = "https://github.com/akamaster/pytorch_resnet_cifar10/raw/master/pretrained_models/{file}"

# SHA-256 of each file; where only 8 digits are known they are those in the file's name
_PUBLIC: Mapping[str, tuple[str, str]] = {
    "resnet20": ("resnet20-12fca82f.th", "12fca82f0bebc4135bf1f32f6e3710e61d5108578464b84fd6d7f5c1b04036c8"),
    "resnet32": ("resnet32-d509ac18.th", "d509ac1820d7f25398913559d7e81a13229b1e7adc5648e3bfa5e22dc137f850"),
    "resnet44": ("resnet44-014dd654.th", "014dd654"),
    "resnet56": ("resnet56-4bfd9763.th", "4bfd97631478d6b638d2764fd2baff3edb1d7d82252d54439343b6596b9b5367"),
    "resnet110": ("resnet110-1d1ed7c2.th", "1d1ed7c2"),
}


def public_weights(name: str, *, progress: Progress | None = None) -> Path:
    """Return the path of the public CIFAR-10 weights of `name` ("resnet20", …, "resnet110"), downloading them if necessary.

    They are kept in `home()/weights`. The full SHA-256 is checked for depths 20, 32 and 56; for 44 and 110 its first 8
    digits, which are in the file's name, as torch.hub does.
    """
    if name not in _PUBLIC:
        raise InvalidInput(f"no public weights for {name!r}.{suggest(name, _PUBLIC)}")
    file, sha256 = _PUBLIC[name]
    return fetch(_ADDRESS.format(file=file), home() / "weights" / file, sha256=sha256, progress=progress)


def load_public(depth: int, *, progress: Progress | None = None) -> ResNet:
    """Load the CIFAR-10 ResNet of `depth` 20, 32, 44, 56 or 110 with its public weights, in eval mode.

    It takes pixels in [0, 1] normalised by `PUBLIC_MEAN` and `PUBLIC_STD`.
    """
    path = public_weights(f"resnet{depth}", progress=progress)
    model = resnet(depth)
    load_weights_(model, path)
    return model.eval()


def builtin_weights(name: str) -> Path:
    """Path of the weights of `name` ("resnet20") shipped with the package; `read_pedigree` gives their provenance."""
    known = sorted(path.stem for path in BUILTIN.glob("*.safetensors"))
    if name not in known:
        raise InvalidInput(f"no weights for {name!r} in the package.{suggest(name, known)} Give a file of weights instead.")
    return BUILTIN / f"{name}.safetensors"


def load_builtin(name: str) -> nn.Module:
    """Load the network `name` with the weights shipped with the package, in eval mode.

    To keep its training examples out of the validation and test sets, load its data by the last `trained_on` of its
    pedigree: `secateurs.data.load(trained.data, **trained.options)`.
    """
    path = builtin_weights(name)
    pedigree = read_pedigree(path)
    if pedigree is None:
        raise ArtefactError(f"{path}: its header has no provenance. Install the package again.")
    model = build(name, **pedigree.model_options)
    load_weights_(model, path)
    return model.eval()


def load_weights_(model: nn.Module, path: Path) -> None:
    """Load a state dict from a .safetensors, .th, .pt or .pth file into `model`, all of it or, on error, none of it.

    A file that holds {"state_dict": …} is unwrapped, and DataParallel's prefix "module." is removed. A file written by
    `secateurs train` is checked against the digest in its header. Every weight must be there and fit; only BatchNorm's
    `num_batches_tracked`, which old files lack, may be absent.
    """
    found = _read(path, sum(t.numel() * t.element_size() for t in model.state_dict().values()))
    if all(name.startswith("module.") for name in found):  # only if all have it: a network may own a submodule "module"
        found = {name.removeprefix("module."): value for name, value in found.items()}
    _check_fit(model.state_dict(), found, path)
    wrong = first_non_finite(found)
    if wrong is not None:
        raise ArtefactError(f"{path}: {wrong!r} holds NaN or infinite values. Give a file with finite weights.")
    # a fresh dict drops the file's version metadata, with which torch would require num_batches_tracked
    model.load_state_dict(dict(found), strict=True)


def _read(path: Path, wanted: int) -> Mapping[str, Tensor]:
    """The tensors of a file, for a network of `wanted` bytes."""
    if not path.is_file():
        raise ArtefactError(f"no weights at {path}: the file does not exist.")
    read = {".safetensors": _read_safetensors} | dict.fromkeys((".th", ".pt", ".pth"), _read_torch)
    if path.suffix not in read:
        raise ArtefactError(f"cannot read weights from {path}: wanted .safetensors, .th, .pt or .pth, got {path.suffix!r}.")
    try:
        return read[path.suffix](path, wanted)
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read ({error.strerror}).") from error
    except MemoryError as error:
        raise ArtefactError(
            f"{path}: its {path.stat().st_size:,} bytes do not fit into memory; the network has {wanted:,}."
        ) from error


def _read_safetensors(path: Path, wanted: int) -> Mapping[str, Tensor]:
    try:
        # only our own files are signed: a "digest" in other files means something else
        ours = MARK in read_header(path)
        tensors, header = parse(path.read_bytes(), signed=ours)
        if ours and "digest" not in header:
            raise Damaged("its digest is missing: the file was changed or damaged")
        return tensors
    except Damaged as error:
        raise ArtefactError(f"{path} is not a whole safetensors file: {error}. Copy or download it again.") from error


def _read_torch(path: Path, wanted: int) -> Mapping[str, Tensor]:
    try:
        _refuse_bomb(path, wanted)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError, ArtefactError):
        raise
    except Exception as error:  # torch raises a dozen classes, by format and kind of damage
        raise ArtefactError(
            f"cannot read {path}: it is damaged, or holds more than tensors, which is never unpickled "
            f"({brief(f'{type(error).__name__}: {error}'.splitlines()[0])}). "
            f"Save it again with torch.save(model.state_dict(), path)."
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ArtefactError(f"{path} holds no state dict: wanted tensors by name, or those under 'state_dict'.")
    return content


def _refuse_bomb(path: Path, wanted: int) -> None:
    """Raise ArtefactError for a zip file that would unpack to far more than itself and than a network of `wanted` bytes."""
    if not zipfile.is_zipfile(path):  # torch's old format, which is not compressed
        return
    with zipfile.ZipFile(path) as file:
        unpacked = sum(part.file_size for part in file.infolist())
    if unpacked > max(_MOST_UNPACKED * path.stat().st_size, _MOST_OF_NETWORK * wanted):
        raise ArtefactError(
            f"{path}: would unpack from {path.stat().st_size:,} to {unpacked:,} bytes, and the network has {wanted:,}: it was "
            f"not read. Save it again with torch.save(model.state_dict(), path), which does not compress."
        )


def _check_fit(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], path: Path) -> None:
    def size(tensor: Tensor) -> str:
        return "×".join(map(str, tensor.shape)) or "a scalar"

    wrong = {
        "missing": [name for name in wanted if name not in found and not name.endswith(".num_batches_tracked")],
        "unexpected": [name for name in found if name not in wanted],
        "of another shape": [
            f"{name} is {size(found[name])} in the file, {size(wanted[name])} in the network"
            for name in wanted
            if name in found and found[name].shape != wanted[name].shape
        ],
    }
    problems = [
        f"{what}: {brief(', '.join(items[:5]), 300)}" + (f", and {len(items) - 5} more" if len(items) > 5 else "")
        for what, items in wrong.items()
        if items
    ]
    if problems:
        raise ArtefactError(f"{path} does not fit the network; {'; '.join(problems)}. Check that the architecture is the same.")
