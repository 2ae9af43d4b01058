"""Networks to prune by name: the ResNets of the paper, and those that other installed packages add; their weights."""

from secateurs.models.registry import NamedNetwork, build, example_input, names, resolve
from secateurs.models.resnet import ResNet, resnet, resnet20, resnet32, resnet56
from secateurs.models.weights import (
    PUBLIC_MEAN,
    PUBLIC_STD,
    Pedigree,
    TrainingSet,
    builtin_weights,
    load_builtin,
    load_public,
    load_weights_,
    public_weights,
    read_pedigree,
)

__all__ = [
    "PUBLIC_MEAN",
    "PUBLIC_STD",
    "NamedNetwork",
    "Pedigree",
    "ResNet",
    "TrainingSet",
    "build",
    "builtin_weights",
    "example_input",
    "load_builtin",
    "load_public",
    "load_weights_",
    "names",
    "public_weights",
    "read_pedigree",
    "resnet",
    "resnet20",
    "resnet32",
    "resnet56",
    "resolve",
]
