"""Where weights come from: how they were trained, and on which examples, kept as plain text in the header of their file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from secateurs.data import Data, load
from secateurs.data.examples import Examples
from secateurs.data.splits import shared_inputs
from secateurs.decode import Malformed, brief, checked, decode_json
from secateurs.errors import ArtefactError, SecateursError
from secateurs.tensorfile import Damaged
from secateurs.tensorfile import read_header as read_tensor_header

MARK, VERSION = "secateurs_weights", "1"
_WORDS = ("model", "data_sha256")  # fields that are text, and no JSON in a header


@dataclass(frozen=True)
class TrainingSet:
    """Examples that weights were trained on: the train set of a data set that can be loaded again."""

    data: str  # as `secateurs.data.load` takes it
    options: Mapping[str, Any]  # that make the split again
    count: int
    sha256: str | None = None  # of the examples (`Examples.digest`); None: not known

    def __str__(self) -> str:
        how = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.count:,} examples of {self.data}" + (f" ({how})" if how else "")


@dataclass(frozen=True)
class Pedigree:
    """How a file of weights was made. Accuracies are fractions, None where they were not measured."""

    model: str
    model_options: Mapping[str, Any]
    recipe: Mapping[str, Any]  # the settings of the training
    seed: int
    epochs: int
    trained_on: tuple[TrainingSet, ...]  # the last one by this training, those before it by the weights that it began with
    sets: Mapping[str, int]  # how many examples the train, search and test set have
    data_sha256: str  # of all three
    scaling: Mapping[str, Any] | None  # full, mean, std of `Scaling`; None: inputs go in as they are stored
    versions: Mapping[str, str]
    search_accuracy: float | None = None
    test_accuracy: float | None = None

    def header(self) -> dict[str, str]:
        """The header of a safetensors file: words as they are, everything else as JSON."""
        plain = {name: value for name, value in asdict(self).items() if value is not None}
        words = {name: value if isinstance(value, str) else json.dumps(value, sort_keys=True) for name, value in plain.items()}
        return {MARK: VERSION, **words}


def read_pedigree(path: Path) -> Pedigree | None:
    """The pedigree in the header of a file; None where there is no such file, or it has no pedigree."""
    header = read_header(path)
    if MARK not in header:
        return None
    try:
        known = {field.name: header[field.name] for field in fields(Pedigree) if field.name in header}
        values: dict[str, Any] = {name: text if name in _WORDS else decode_json(text) for name, text in known.items()}
        return checked({"scaling": None, **values}, Pedigree)
    except Malformed as error:
        raise ArtefactError(
            f"{path}: its header does not say how the weights were trained as this release writes it ({brief(error)}). "
            f"Train or download them again."
        ) from error


def read_header(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty for a file that is absent, damaged or of another kind."""
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    try:
        return read_tensor_header(path)[0]
    except (Damaged, OSError):
        return {}  # reading its tensors says what is wrong with it


def scaling_fields(examples: Examples) -> dict[str, Any] | None:
    """The scaling of the examples as JSON takes it."""
    return None if examples.scaling is None else json.loads(json.dumps(asdict(examples.scaling)))


@dataclass(frozen=True)
class Overlap:
    """How many examples of a search set were trained on; None: that cannot be found out, and `why` not."""

    trained: TrainingSet
    shared: int | None
    why: str = ""


def overlaps(name: str, data: Data, trained_on: Iterable[TrainingSet]) -> list[Overlap]:
    """What the search set of `data`, loaded by `name`, shares with each of the training sets, where it does.

    Training sets of another source are left out, and so is the train set of `data` itself: it is disjoint from the search set.
    Any other is loaded again and compared input by input, byte for byte.
    """
    others = [trained for trained in trained_on if trained.data == name and not _is_train_set(trained, data)]
    found = [_overlap(trained, data) for trained in others]
    return [overlap for overlap in found if overlap.shared != 0]


def _is_train_set(trained: TrainingSet, data: Data) -> bool:
    if trained.sha256 is not None:
        return trained.sha256 == data.train.digest()
    return all(data.origin.get(option) == value for option, value in trained.options.items())


def _overlap(trained: TrainingSet, data: Data) -> Overlap:
    try:
        again = load(trained.data, **trained.options).train
    except SecateursError as error:
        return Overlap(trained, None, str(error))
    if trained.sha256 is not None and again.digest() != trained.sha256:
        return Overlap(trained, None, "the data have changed since")
    return Overlap(replace(trained, count=len(again)), shared_inputs(data.search, again))
