"""Ultralytics YOLO: train a model that `secateurs.cut_` has cut, in ultralytics' own trainer.

That trainer builds its model from a yaml file, which cannot describe the widths of a cut one. This module does not import
ultralytics.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from secateurs.errors import InvalidInput


def trainer_for(yolo: Any) -> type[Any]:
    """Return the trainer class of the task of a `YOLO` that trains `yolo.model` as it is: `yolo.train(trainer=…)`."""
    if not isinstance(getattr(yolo, "model", None), nn.Module) or not hasattr(yolo, "_smart_load"):
        raise InvalidInput(f"yolo: got {type(yolo).__name__}, wanted an ultralytics.YOLO with a model.")
    model: nn.Module = yolo.model
    base = yolo._smart_load("trainer")

    def get_model(self: Any, cfg: Any = None, weights: Any = None, verbose: bool = True) -> nn.Module:
        """Return the model that was cut, instead of a new one."""
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model

    return type(base.__name__, (base,), {"get_model": get_model})
