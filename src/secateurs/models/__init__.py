"""Networks to prune: those of the paper, and a small one of every topology that makes surgery hard."""

from secateurs.models.registry import build, example_input, names, resolve
from secateurs.models.resnet import ResNet, resnet
from secateurs.models.weights import PUBLIC_MEAN, PUBLIC_STD, load_public, load_weights_, public_weights

__all__ = [
    "PUBLIC_MEAN",
    "PUBLIC_STD",
    "ResNet",
    "build",
    "example_input",
    "load_public",
    "load_weights_",
    "names",
    "public_weights",
    "resnet",
    "resolve",
]
