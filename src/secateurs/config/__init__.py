"""What a user asks for: the recipe of a run, how filters are ranked, how networks are trained. Imports no torch.

Each field is declared once: its type, default, meaning and range. Its checks and its flag on the command line come from that.
"""

from __future__ import annotations

from secateurs.config.declared import declarations, setting
from secateurs.config.files import (
    read_fields,
    read_recipe,
    read_settings,
    recipe_fields,
    recipe_from,
    settings_from,
    write_recipe,
)
from secateurs.config.recipe import (
    CRITERIA,
    PORTFOLIO,
    REFITTED,
    TRAININGS,
    Deploy,
    EngineName,
    Method,
    Pool,
    Recipe,
    Repair,
    Shortcut,
    Signal,
)
from secateurs.config.scoring import (
    FAST,
    MOST_PAIRS,
    NETWORK_WIDE,
    PAPER,
    Design,
    EnsembleSettings,
    Estimator,
    Model,
    Scoring,
    Transform,
)
from secateurs.config.training import (
    GENTLE,
    NAMED_SETTINGS,
    PAPER_FINETUNE,
    PAPER_RESNET,
    PAPER_RETRAIN,
    Augment,
    Distance,
    Optimiser,
    Precision,
    TrainSettings,
)

__all__ = [
    "CRITERIA",
    "FAST",
    "GENTLE",
    "MOST_PAIRS",
    "NAMED_SETTINGS",
    "NETWORK_WIDE",
    "PAPER",
    "PAPER_FINETUNE",
    "PAPER_RESNET",
    "PAPER_RETRAIN",
    "PORTFOLIO",
    "REFITTED",
    "TRAININGS",
    "Augment",
    "Deploy",
    "Design",
    "Distance",
    "EngineName",
    "EnsembleSettings",
    "Estimator",
    "Method",
    "Model",
    "Optimiser",
    "Pool",
    "Precision",
    "Recipe",
    "Repair",
    "Scoring",
    "Shortcut",
    "Signal",
    "TrainSettings",
    "Transform",
    "declarations",
    "read_fields",
    "read_recipe",
    "read_settings",
    "recipe_fields",
    "recipe_from",
    "setting",
    "settings_from",
    "write_recipe",
]
