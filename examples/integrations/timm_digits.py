"""Prune a network of timm by its name, with the input size and normalisation of its data configuration; export it to ONNX.

Run it as `python examples/integrations/timm_digits.py [FOLDER]`; it downloads nothing and takes half a minute on one core.
"""

import sys
import tempfile
from pathlib import Path

import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import secateurs as sc
from secateurs.data import load

SIZE = 32  # pixels: the digits have 8, the configuration of the network asks for 160

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
torch.manual_seed(0)
model = timm.create_model("test_resnet", pretrained=False, num_classes=10)  # pretrained=True starts from downloaded weights
config = resolve_model_data_config(model, args={"input_size": (3, SIZE, SIZE)})
mean, std = (torch.tensor(config[name]).view(1, 3, 1, 1) for name in ("mean", "std"))


def as_images(digits: Tensor) -> Tensor:
    """Digits (N, 1, 8, 8) of 0 to 16 as normalised RGB images of the configured size."""
    resized = functional.interpolate(digits.float() / 16, size=config["input_size"][1:], mode="bilinear")
    return (resized.expand(-1, 3, -1, -1) - mean) / std


digits = load("digits")
train, val, test = (
    DataLoader(TensorDataset(as_images(part.inputs), part.targets), batch_size=64, shuffle=part is digits.train)
    for part in (digits.train, digits.search, digits.test)
)
optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=4 * len(train))
for _ in range(4):
    for inputs, labels in train:
        optimiser.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
        schedule.step()

# 300 validation images certify little, and the default recipe takes longer: one criterion and point estimates are quick
recipe = sc.Recipe.fast(max_drop=0.05, criterion="l1", confidence=0)
result = sc.prune(model, train, val, test=test, recipe=recipe, progress=False)
print(result)
path = result.export(folder / "small.onnx")
print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
