"""ResNet-20 with projected shortcuts (option B), made of the built-in one: `python -m benchmarks.option_b` (minutes of a core).

Torch-Pruning is wrong on padded shortcuts and right on projected ones, so it is compared on these. Every projection starts as
the padding that it replaces: its 1×1 kernel picks the padded channels, its BatchNorm undoes its own statistics, and channels
that were zeros have random kernels under a scale of 0. So the network starts as the built-in one, to rounding. Two epochs of
distillation from that one then make projections of them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from secateurs._util.files import write_bytes
from secateurs._util.tensors import dump
from secateurs.cli.inputs import BUILTIN, Origin, load_data
from secateurs.config import TrainSettings
from secateurs.data import Examples
from secateurs.data.dataset import seeded
from secateurs.errors import NotEqual
from secateurs.metrics import evaluate
from secateurs.models import Pedigree, ResNet, build, builtin_weights, load_builtin, read_pedigree
from secateurs.models.resnet import PaddedShortcut
from secateurs.models.weights import scaling_fields
from secateurs.pruning.folder import environment
from secateurs.training import EpochRecord, train_

FILE = Path("lab/results/torch-pruning/resnet20-b.safetensors")
SETTINGS = TrainSettings(
    epochs=2,
    lr=0.02,
    schedule="linear",
    warmup_share=0.1,
    distill=1.0,
    temperature=2.0,
    average=0.99,
    augment="crop-flip",
    precision="bfloat16",
    channels_last=True,
)
OBSERVED = 1024  # training images that the statistics of a projection come from
_CLOSE = 1e-4  # of the largest logit


def with_projections(padded: ResNet, images: Examples) -> ResNet:
    """The same network with a projection, 1×1 kernel and BatchNorm, in place of each padded shortcut."""
    with seeded(0, "projections"):
        made = build("resnet20", shortcut="B").eval()
    assert isinstance(made, ResNet)
    made.load_state_dict(padded.state_dict(), strict=False)
    x, _ = images.batch(slice(0, OBSERVED))
    for name, shortcut in padded.named_modules():
        if isinstance(shortcut, PaddedShortcut):
            _set_projection_(made, name, shortcut, x)
    with torch.no_grad():
        wanted, found = padded(x), made(x)
    worst = float((found - wanted).abs().max() / wanted.abs().max())
    if worst > _CLOSE:
        raise NotEqual(f"with projections the outputs differ by {worst:.1e} of the largest, wanted at most {_CLOSE:g}.")
    return made


@torch.no_grad()
def _set_projection_(network: ResNet, name: str, padded: PaddedShortcut, x: Tensor) -> None:
    """Let the projection called `name` compute what `padded` does; those before it must already do so."""
    conv, norm = (network.get_submodule(f"{name}.{place}") for place in (0, 1))
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    picked = slice(padded.before, padded.before + conv.in_channels)
    conv.weight[picked] = torch.eye(conv.in_channels)[:, :, None, None]
    seen: list[Tensor] = []
    handle = conv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        network(x)
    finally:
        handle.remove()
    variance, mean = torch.var_mean(seen[0], (0, 2, 3))
    norm.running_mean, norm.running_var = mean, variance
    norm.weight.zero_()
    norm.bias.zero_()
    norm.weight[picked] = (variance[picked] + norm.eps).sqrt()  # also right by the statistics of a batch, which resemble these
    norm.bias[picked] = mean[picked]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE, help="file of the weights (default: %(default)s)")
    given = parser.parse_args()
    data = load_data(Origin("resnet20", "cifar10", weights=BUILTIN).settled())
    teacher, known = load_builtin("resnet20"), read_pedigree(builtin_weights("resnet20"))
    assert isinstance(teacher, ResNet)
    assert known is not None
    network = with_projections(teacher, data.train)

    def say(record: EpochRecord) -> None:
        print(f"epoch {record.epoch + 1}: {record.search_accuracy:.2%} of the validation set", flush=True)

    train_(network, data.train, SETTINGS, search=data.search, teacher=teacher, on_epoch=say)
    search, test = (evaluate(network, examples).accuracy for examples in (data.search, data.test_set))
    pedigree = Pedigree(
        model="resnet20",
        model_options={"shortcut": "B"},
        recipe=asdict(SETTINGS),
        seed=SETTINGS.seed,
        epochs=SETTINGS.epochs,
        trained_on=known.trained_on,  # the same examples again
        sets={name: len(examples) for name, examples in data.splits().items()},
        data_sha256=data.digest(),
        scaling=scaling_fields(data.train),
        versions=environment()["versions"],
        search_accuracy=search,
        test_accuracy=test,
    )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(given.out, dump(network.state_dict(), pedigree.header()))
    print(f"{given.out}: {search:.2%} of the validation set, {test:.2%} of the test set")
    return 0


if __name__ == "__main__":
    sys.exit(main())
