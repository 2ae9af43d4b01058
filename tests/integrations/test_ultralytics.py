"""YOLO as docs/integrations/ultralytics.md says: pruned, cut in place, trained and validated by ultralytics, saved, loaded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_script import define_operators

from nets import assert_same, random_tensor, run
from secateurs import compact, cost, cut_, find_sites, trace
from secateurs.criteria.filters import filter_weights, layers_behind, sum_over
from secateurs.data import load
from secateurs.errors import InvalidInput

define_operators()
pytestmark = pytest.mark.filterwarnings("default")

SIZE = 64


def write_digits(folder: Path, task: str) -> Path:
    """Images with one handwritten digit each, labelled in YOLO's format: box, outline or corners."""
    from PIL import Image

    pictures, labels = load("digits").search.batch(slice(0, 24))
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        part = "train" if number < 16 else "val"
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        x, y = 8 + number, 32 - number
        canvas = np.zeros((SIZE, SIZE), np.uint8)
        canvas[y : y + 32, x : x + 32] = (picture[0] * 15).byte().numpy().repeat(4, 0).repeat(4, 1)
        Image.fromarray(canvas).convert("RGB").save(folder / "images" / part / f"{number}.png")
        box = [(x + 16) / SIZE, (y + 16) / SIZE, 0.5, 0.5]
        corners = [
            (x / SIZE, y / SIZE),
            (x / SIZE + 0.5, y / SIZE),
            (x / SIZE + 0.5, y / SIZE + 0.5),
            (x / SIZE, y / SIZE + 0.5),
        ]
        values: list[float] = box
        if task == "segment":
            values = [v for corner in corners for v in corner]
        elif task == "pose":
            values = [*box, *(v for corner in corners for v in (*corner, 2))]
        (folder / "labels" / part / f"{number}.txt").write_text(" ".join(map(str, [int(label), *values])))
    names = "".join(f"  {i}: digit{i}\n" for i in range(10))
    points = "kpt_shape: [4, 3]\nflip_idx: [1, 0, 3, 2]\n" if task == "pose" else ""
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{names}{points}")
    return folder / "data.yaml"


@pytest.mark.parametrize("task", ["detect", "segment", "pose"])
@pytest.mark.parametrize("family", ["yolov8n", "yolo11n"])
def test_yolo_keeps_its_class(family: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    ultralytics = pytest.importorskip("ultralytics", reason="ultralytics is not installed: make test-integrations")
    from ultralytics.nn import tasks

    from secateurs.integrations.ultralytics import trainer_for

    torch.manual_seed(0)
    suffix = {"detect": "", "segment": "-seg", "pose": "-pose"}[task]
    kind = {"detect": "DetectionModel", "segment": "SegmentationModel", "pose": "PoseModel"}[task]
    more: dict[str, Any] = {"data_kpt_shape": (4, 3)} if task == "pose" else {}
    yolo = ultralytics.YOLO(f"{family}{suffix}.yaml")
    yolo.model = getattr(tasks, kind)(f"{family}{suffix}.yaml", nc=10, verbose=False, **more)

    images = random_tensor(2, 3, SIZE, SIZE).float()
    graph = trace(yolo.model.eval(), images)
    sites = find_sites(graph, "coupled")
    assert sum(u.macs for u in sites.unprunable) <= 0.1 * cost(graph).macs

    keep = {}
    for site in sites:
        norms = sum_over(layers_behind(graph, site), lambda layer: filter_weights(layer).abs().sum(1))
        keep[site.name] = norms >= norms.quantile(0.3)
    smaller = compact(graph, keep, verify=False)
    before = sum(p.numel() for p in yolo.model.parameters())
    cut_(yolo.model, smaller)
    after = sum(p.numel() for p in yolo.model.parameters())
    assert type(yolo.model).__name__ == kind
    assert after < 0.75 * before
    assert_same(run(yolo.model.eval(), images), run(smaller.module.eval(), images), atol=1e-3)

    data = write_digits(tmp_path, task)
    options: Any = {"data": str(data), "imgsz": SIZE, "batch": 8, "workers": 0, "device": "cpu", "plots": False, "amp": False}
    was = yolo.model.model[0].conv.weight.detach().clone()
    yolo.train(trainer=trainer_for(yolo), epochs=2, project=str(tmp_path), name="cut", **options)
    assert sum(p.numel() for p in yolo.model.parameters()) == after
    assert not torch.equal(yolo.model.model[0].conv.weight.float(), was)
    found = yolo.val(**options).results_dict
    assert np.isfinite(found["fitness"])

    yolo.save(tmp_path / "cut.pt")
    for file in (tmp_path / "cut.pt", tmp_path / "cut" / "weights" / "best.pt"):
        again = ultralytics.YOLO(file)
        assert sum(p.numel() for p in again.model.parameters()) == after
        assert_same(run(again.model.float().eval(), images), run(yolo.model.float().eval(), images), atol=1e-6)
    assert again.val(**options).results_dict["fitness"] == pytest.approx(found["fitness"], abs=1e-6)


@pytest.mark.parametrize("family", ["yolov8n", "yolo11n"])
def test_a_cut_yolo_is_exported_by_ultralytics(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exporter calls `forward_split` of the blocks, which reads the width `c`; evaluation does not."""
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    for name, value in {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false"}.items():  # nothing is downloaded or installed
        monkeypatch.setenv(name, value)
    ultralytics = pytest.importorskip("ultralytics", reason="ultralytics is not installed: make test-integrations")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: make test-integrations")
    from ultralytics.nn.modules.block import C2f

    torch.manual_seed(0)
    yolo = ultralytics.YOLO(f"{family}.yaml")
    network, images = yolo.model.float().eval(), random_tensor(1, 3, SIZE, SIZE).float()
    graph = trace(network, images)
    keep = {site.name: torch.arange(site.channels) % 3 > 0 for site in find_sites(graph, "coupled")}
    with warnings.catch_warnings():  # every number is proved
        warnings.simplefilter("error", UserWarning)
        cut_(network, compact(graph, keep, verify=False))
    blocks = [part for part in network.modules() if isinstance(part, C2f)]
    assert len(blocks) == 8
    assert all(2 * block.c == block.cv1.conv.out_channels for block in blocks)

    yolo.save(tmp_path / "cut.pt")
    file = ultralytics.YOLO(tmp_path / "cut.pt").export(format="onnx", imgsz=SIZE, simplify=False, device="cpu")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found, *_) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    assert_same(torch.from_numpy(found), run(network, images)[0], atol=1e-4)


def test_a_trainer_needs_a_yolo() -> None:
    from secateurs.integrations.ultralytics import trainer_for

    with pytest.raises(InvalidInput, match=r"got Linear, wanted an ultralytics.YOLO"):
        trainer_for(torch.nn.Linear(1, 1))
