"""Prune a YOLO, keep its class, train and validate it with ultralytics, save it and load it again.

Run it as `python examples/integrations/ultralytics_digits.py [FOLDER [YAML]]`. It downloads nothing: the images are handwritten
digits, pasted onto larger images. With yolo11n.yaml it takes about three minutes on one core.
"""

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from ultralytics import YOLO

import secateurs as sc
from secateurs.data import load
from secateurs.integrations.ultralytics import trainer_for

SIZE = 64  # pixels

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()).resolve()
config = sys.argv[2] if len(sys.argv) > 2 else "yolo11n.yaml"
digits = load("digits")
draw = np.random.default_rng(0)


def write_images(part: str, count: int) -> None:
    """Write images with two digits each and their labels in YOLO's format: boxes, outlines or corners, by task."""
    pictures, labels = {"train": digits.train, "val": digits.search}[part].batch(slice(0, 2 * count))
    for kind in ("images", "labels"):
        (folder / kind / part).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        canvas, lines = draw.integers(0, 40, (SIZE, SIZE), dtype=np.uint8), []
        for half in (0, 1):  # one digit in each half of the image
            picture, label = pictures[2 * number + half], int(labels[2 * number + half])
            side = int(draw.integers(20, 31))
            x, y = 32 * half + int(draw.integers(0, 32 - side)), int(draw.integers(0, SIZE - side))
            large = functional.interpolate(picture[None].float() * 15, size=(side, side), mode="bilinear")[0, 0]
            canvas[y : y + side, x : x + side] = large.byte().numpy()
            box = [v / SIZE for v in (x + side / 2, y + side / 2, side, side)]
            corners = [(x, y), (x + side, y), (x + side, y + side), (x, y + side)]
            if "seg" in config:
                values = [v / SIZE for corner in corners for v in corner]
            elif "pose" in config:
                values = [*box, *(v for a, b in corners for v in (a / SIZE, b / SIZE, 2))]
            else:
                values = box
            lines.append(" ".join(map(str, [label, *values])))
        Image.fromarray(canvas).convert("RGB").save(folder / "images" / part / f"{number}.png")
        (folder / "labels" / part / f"{number}.txt").write_text("\n".join(lines))


write_images("train", 96)
write_images("val", 32)
names = "".join(f"  {i}: digit{i}\n" for i in range(10))
points = "kpt_shape: [4, 3]\nflip_idx: [1, 0, 3, 2]\n" if "pose" in config else ""
data = folder / "digits.yaml"
data.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{names}{points}")
options = {"data": str(data), "imgsz": SIZE, "batch": 16, "workers": 0, "device": "cpu", "project": str(folder), "plots": False}
options |= {"amp": False, "verbose": False, "exist_ok": True, "val": True, "seed": 0}

yolo = YOLO(config)
yolo.train(name="dense", epochs=4, mosaic=0.0, **options)  # stands for the weights that you have
dense = yolo.val(**options).results_dict

# what the uncut network predicts is what the smaller one should keep
model = yolo.model.float().eval()
images = torch.stack([torch.from_numpy(np.asarray(Image.open(p))) for p in sorted((folder / "images/train").iterdir())])
images = images.permute(0, 3, 1, 2).float() / 255
with torch.no_grad():
    wanted = model(images)[0]
wanted = wanted[0] if isinstance(wanted, tuple) else wanted


def distance(outputs: Any, target: Tensor) -> Tensor:
    """Of each image, the squared distance of the predictions from the uncut network's, as a share of their variance."""
    found = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    return (found - target).square().flatten(1).mean(1) / (wanted - wanted.mean(0)).square().mean()


def evaluate(network: nn.Module) -> float:
    """Minus the mean distance over all images: higher is better."""
    with torch.no_grad():
        return -float(distance(network(images), wanted).mean())


batches = [(images[i : i + 16], wanted[i : i + 16]) for i in range(0, len(images), 16)]
recipe = sc.Recipe(criterion="l1", repair="none", confidence=0, max_drop=0.5, target_macs=0.3, shortcut="coupled")
torch.manual_seed(0)
result = sc.prune(model, batches[:2], batches[2:], loss=distance, evaluate=evaluate, recipe=recipe, progress=False)
print(result)

before = sum(p.numel() for p in model.parameters())
result.cut_(model)  # the DetectionModel itself: narrower layers, same class
yolo.model = model
yolo.train(trainer=trainer_for(yolo), name="cut", epochs=4, mosaic=0.0, **options)
cut = yolo.val(**options).results_dict
print(f"parameters: {before} before, {sum(p.numel() for p in yolo.model.parameters())} after")
for key in dense:
    print(f"{key}: {dense[key]:.3f} before, {cut[key]:.3f} after")

again = YOLO(folder / "cut" / "weights" / "best.pt")  # ultralytics' own file: it holds the whole model
with torch.no_grad():
    same = torch.equal(again.model.float().eval()(images)[0][0], copy.deepcopy(yolo.model).float().eval()(images)[0][0])
print("loaded again:", "the same predictions" if same else "OTHER predictions")
