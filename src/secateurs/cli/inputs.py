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

RUNS = Path("runs")
PUBLIC = "public"


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
        """The same with everything decided: absolute paths, and the split that goes with public weights."""
        options = dict(self.data_options)
        if self.weights == PUBLIC and self.data == "cifar10":
            options.setdefault("split", PUBLIC)
        weights = self.weights if self.weights in (None, PUBLIC) else str(Path(str(self.weights)).absolute())
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
    if origin.weights is None or origin.weights == PUBLIC or not is_pruned_file(Path(origin.weights)):
        return build_model(origin)
    from secateurs.artefact import load

    return load(fresh_model(origin), origin.weights)


def is_pruned_file(path: Path) -> bool:
    """Whether a run has left this file: weights with a plan in their header."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return "secateurs_format" in (file.metadata() or {})
    except SafetensorError:
        return False  # whoever reads it next says what is wrong with it


def load_data(origin: Origin) -> Data:
    """The data set; warns where its search set has been trained on, and says what a reader of results has to know."""
    from secateurs.data import load

    if origin.weights == PUBLIC and origin.data == "cifar10" and origin.data_options.get("split") != PUBLIC:
        warn(
            f"the public weights were trained on all 50,000 training images, and split {origin.data_options.get('split')!r} "
            f"searches on 5,000 of those: accuracies on them promise too much. Leave the split out, or take split=public."
        )
    return load(origin.data, **origin.data_options)


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
    if origin.weights != PUBLIC:
        return Path(str(origin.weights))
    from secateurs.models import public_weights

    return public_weights(origin.model)
