"""How long tracing, the search for sites, compacting and verifying take for networks of usual size.

`.venv-integrations/bin/python -m benchmarks.large [resnet50 vit_b_16 yolo11n]`: networks of torchvision and ultralytics with
random weights, images of 224 by 224 (YOLO: 640 by 640), a random half of the channels of every site. Adds rows to
lab/benchmarks/results/large.json; the seconds of the processor say more than those of the clock where other processes run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.conditions import conditions
from benchmarks.render import RESULTS, ROOT
from secateurs import compact, find_sites, trace, verify
from secateurs._util.files import write_text
from secateurs.graph.sites import Sites

T = TypeVar("T")


def build(name: str) -> tuple[nn.Module, Tensor]:
    """The network in eval mode, and one image."""
    torch.manual_seed(0)
    if name.startswith("yolo"):
        os.environ.setdefault("YOLO_OFFLINE", "true")
        from ultralytics.nn.tasks import DetectionModel

        return DetectionModel(f"{name}.yaml", verbose=False).eval(), torch.randn(1, 3, 640, 640)
    from torchvision import models

    return models.get_model(name, weights=None).eval(), torch.randn(1, 3, 224, 224)


def random_half(sites: Sites) -> dict[str, Tensor]:
    """Masks that keep a random half of the channels of every site."""
    generator, keep = torch.Generator().manual_seed(0), {}
    for site in sites:
        keep[site.name] = torch.zeros(site.channels, dtype=torch.bool)
        keep[site.name][torch.randperm(site.channels, generator=generator)[: max(site.channels // 2, 1)]] = True
    return keep


def measure(name: str) -> dict[str, Any]:
    """Seconds of the processor and of the clock for each step."""
    model, image = build(name)
    with torch.no_grad():
        model(image)
    row: dict[str, Any] = {"network": name}

    def timed(step: str, run: Callable[[], T]) -> T:
        processor, clock = time.process_time(), time.perf_counter()
        result = run()
        row[step] = {"processor": round(time.process_time() - processor, 2), "clock": round(time.perf_counter() - clock, 2)}
        print(name, step, row[step], flush=True)
        return result

    graph = timed("trace", lambda: trace(model, image))
    keep = random_half(timed("sites", lambda: find_sites(graph)))
    smaller = timed("compact", lambda: compact(graph, keep))
    timed("verify", lambda: verify(graph, keep, smaller))
    return row


def main() -> None:
    """Measure the networks that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("networks", nargs="*", default=["resnet50", "vit_b_16", "yolo11n"])
    path = RESULTS.with_name("large.json")
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    sys.path.append(str(ROOT / "tools"))
    importlib.import_module("limits_networks").define_operators()  # where torchvision's compiled part does not load
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    for name in parser.parse_args().networks:
        rows.append(
            {
                **measure(name),
                "commit": asked.stdout.strip(),
                "threads": torch.get_num_threads(),
                "conditions": conditions().sentence(),
            }
        )
        write_text(path, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
