"""What a command line names (a model, weights, data, a device, a folder) turned into the things themselves."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateurs.cli.terminal import warn
from secateurs.errors import InvalidInput, RunError

if TYPE_CHECKING:
    from torch import nn

    from secateurs.data import Data
    from secateurs.graph import Graph
    from secateurs.models import TrainingSet

RUNS = Path("runs")
PUBLIC, BUILTIN = "public", "builtin"  # weights that are named, not given as a file


@dataclass(frozen=True)
class Origin:
    """The names that a run was started with: enough to build its model and its data once more."""

    model: str
    data: str
    model_options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    device: str | None = None
    seed: int = 0  # of the first weights, where none are given
    folder: str = ""  # where the command was given: own modules are looked for there too

    def settled(self) -> Origin:
        """The same with everything decided: absolute paths, and the split that goes with weights that are named."""
        options = dict(self.data_options)
        if self.weights in (PUBLIC, BUILTIN):
            trained = training_sets(self)[-1]
            options = {**trained.options, **options} if self.data == trained.data else options
        weights = self.weights if self.weights in (None, PUBLIC, BUILTIN) else str(Path(str(self.weights)).absolute())
        data = self.data
        if data.startswith("folder:"):
            data = f"folder:{Path(data.removeprefix('folder:')).absolute()}"
        return replace(self, data=data, data_options=options, weights=weights, folder=str(Path.cwd()))

    def record(self) -> dict[str, Any]:
        """Plain values, for the provenance."""
        return asdict(self)


def origin_of(record: Mapping[str, Any], where: Path) -> Origin:
    """The origin that a provenance keeps; modules of the folder it was started from become importable."""
    if not {"model", "data"} <= set(record) <= {known.name for known in fields(Origin)}:
        raise RunError(
            f"{where}: was not started from the command line, so it does not say how to build its model and its data. "
            f"Go on from Python: secateurs.resume({str(where)!r}, model, data)."
        )
    origin = Origin(**record)
    if origin.folder and origin.folder not in sys.path:
        sys.path.append(origin.folder)
    return origin


def build_model(origin: Origin) -> nn.Module:
    """The network, with its weights where some are given, else freshly initialised from the seed."""
    model = fresh_model(origin)
    if origin.weights is not None:
        from secateurs.models import load_weights_

        load_weights_(model, _weights_file(origin))
    return model


def fresh_model(origin: Origin) -> nn.Module:
    """The network without the weights that the origin names."""
    from secateurs.data.seeding import seeded
    from secateurs.models import resolve

    with seeded(origin.seed, "model"):
        return resolve(origin.model, **origin.model_options)


def build_network(origin: Origin) -> nn.Module | Graph:
    """The network of a file of weights, or of a file that a run has left (a pruned network with its plan)."""
    if origin.weights in (None, PUBLIC, BUILTIN) or not is_pruned_file(Path(str(origin.weights))):
        return build_model(origin)
    from secateurs.artefact import load

    return load(fresh_model(origin), str(origin.weights))


def is_pruned_file(path: Path) -> bool:
    """Whether a run has left this file: weights with a plan in their header."""
    from secateurs.models.pedigree import read_header

    return "secateurs_format" in read_header(path)


def training_sets(origin: Origin) -> tuple[TrainingSet, ...]:
    """All examples that the origin's weights are known to have been trained on."""
    from secateurs.models.pedigree import read_pedigree
    from secateurs.models.weights import PUBLIC_TRAINED_ON

    if origin.weights == PUBLIC:
        return (PUBLIC_TRAINED_ON,)
    pedigree = None if origin.weights is None else read_pedigree(_weights_file(origin))
    return () if pedigree is None else pedigree.trained_on


def load_data(origin: Origin) -> Data:
    """The data set; warns where its search set has been trained on."""
    from secateurs.data import load

    data = load(origin.data, **origin.data_options)
    _warn_of_overlap(origin, data)
    return data


def _warn_of_overlap(origin: Origin, data: Data) -> None:
    from secateurs.models.pedigree import overlaps

    whose = f"the {origin.weights} weights" if origin.weights in (PUBLIC, BUILTIN) else "the weights"
    for overlap in overlaps(origin.data, data, training_sets(origin)):
        trained = overlap.trained
        flags = " ".join(f"--data-option {name}={value}" for name, value in trained.options.items())
        if overlap.shared is None:
            warn(
                f"{whose} were trained on {trained}. Whether examples that decide here were among them cannot be found out: "
                f"{overlap.why}."
            )
        else:
            warn(
                f"{whose} were trained on {trained}, and {overlap.shared:,} of the {len(data.search):,} examples that decide "
                f"here are among them: accuracies on those promise too much. Take the split that they were trained with: "
                f"{flags or 'no --data-option'}."
            )


def check_device(device: str | None) -> None:
    """Refuse a device that this machine or this torch does not have, before anything runs."""
    if device is None:
        return
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise InvalidInput(f"--device {device}: torch cannot use it here ({first}). Try cpu.") from error


def run_folder(out: Path | None, name: str | None, *parts: str) -> Path:
    """The folder to write to: `out`, or runs/`name`, or the first free runs/PARTS-N."""
    if out is not None:
        return out
    if name is not None:
        return RUNS / name
    stem = "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.") for part in parts)
    number = 1
    while (RUNS / f"{stem}-{number}").exists():
        number += 1
    return RUNS / f"{stem}-{number}"


def _weights_file(origin: Origin) -> Path:
    from secateurs.models import builtin_weights, public_weights

    if origin.weights in (PUBLIC, BUILTIN):
        return (public_weights if origin.weights == PUBLIC else builtin_weights)(origin.model)
    return Path(str(origin.weights))
