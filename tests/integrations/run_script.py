"""Run a script in an environment whose torchvision may be built for another torch: `python run_script.py SCRIPT`.

torchvision's wheel for CUDA does not import beside a torch for the CPU: two operators are missing, which no classification
network calls. Lightning and timm import torchvision where it is installed.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec

import torch

LIBRARIES: list[torch.library.Library] = []  # operators live as long as their library


def define_operators() -> None:
    """Define the operators that torchvision's import needs, if its compiled part does not load."""
    if find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision

        torchvision.ops.nms = torchvision.ops.boxes.nms = nms  # which the validators of ultralytics call


def nms(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Non-maximum suppression as torchvision.ops.nms: indices of the boxes that no better one overlaps, best first."""
    left, kept = scores.argsort(descending=True), []
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        sides = (torch.minimum(boxes[left, 2:], boxes[best, 2:]) - torch.maximum(boxes[left, :2], boxes[best, :2])).clamp(min=0)
        shared = sides.prod(1)
        left = left[shared / (area[left] + area[best] - shared) <= iou_threshold]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.long)


if __name__ == "__main__":
    define_operators()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
