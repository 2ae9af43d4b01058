"""Puts the weights of a finished `secateurs train` into the package, as those that `--weights builtin` names.

    python tools/ship_weights.py runs/base

The network is measured on its search set and, once, on its test set: both accuracies go into the header of the file, beside
recipe, seed, data and versions. The same training gives the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from secateurs._util.files import write_bytes
from secateurs._util.tensors import dump
from secateurs.cli import train as training_folder
from secateurs.cli.inputs import Origin, fresh_model, load_data
from secateurs.cli.trust import Repeated, repeated_origin
from secateurs.data import Data
from secateurs.errors import RunError, SecateursError
from secateurs.metrics import evaluate
from secateurs.models import Pedigree, load_weights_, names
from secateurs.models.weights import BUILTIN

LARGEST = 1_100_000  # bytes: everybody who installs the package downloads them


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of a finished training")
    parser.add_argument("--to", type=Path, default=BUILTIN, help="where the file goes (default: %(default)s)")
    asked = parser.parse_args(arguments)
    try:
        path, pedigree = ship(asked.folder, asked.to)
    except SecateursError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {path.stat().st_size:,} bytes, {pedigree.epochs} epochs on {pedigree.trained_on[-1]}")
    print(f"accuracy {pedigree.search_accuracy:.2%} on the search set, {pedigree.test_accuracy:.2%} on the test set")
    return 0


def ship(folder: Path, to: Path) -> tuple[Path, Pedigree]:
    """Write the weights of the training in `folder` to `to`/MODEL.safetensors, with all that is known of them."""
    origin = repeated_origin(training_folder.read(folder)["origin"], folder, Repeated())
    if origin.model not in names():
        raise RunError(f"{folder}: trained {origin.model}: wanted a network that comes with the package, as its weights would")
    if not training_folder.weights_file(folder).exists():
        raise RunError(f"{folder}: the training is not finished. Resume with: secateurs resume {folder}")
    data = data_of(folder, origin)
    model = fresh_model(origin)
    load_weights_(model, training_folder.weights_file(folder))
    search, test = (evaluate(model, examples) for examples in (data.search, data.test))
    known = training_folder.pedigree(folder, data)
    pedigree = replace(known, search_accuracy=search.accuracy, test_accuracy=test.accuracy)
    content = dump(model.state_dict(), pedigree.header())
    if len(content) > LARGEST:
        raise RunError(f"{folder}: the weights are {len(content):,} bytes: wanted at most {LARGEST:,} in the package")
    path = to / f"{origin.model}.safetensors"
    write_bytes(path, content)
    return path, pedigree


def data_of(folder: Path, origin: Origin) -> Data:
    """The data of the training, the very same."""
    data = load_data(origin)
    if data.digest() != training_folder.read(folder)["data"]["sha256"]:
        raise RunError(f"{folder}: the data or their split have changed since the training, so nothing can be said of them")
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
