"""The scripts in examples/integrations run with the real packages, and say what their pages say they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_script import define_operators

from nets import assert_compact_is_masked, assert_same, random_keep, random_tensor, randomise_, run
from secateurs import compact, cost, cut_, find_sites, trace
from secateurs.errors import Untraceable

ROOT = Path(__file__).parents[2]
SCRIPTS = {  # packages that each needs
    "lightning_digits.py": ("lightning",),
    "transformers_resnet.py": ("transformers", "accelerate"),
    "timm_digits.py": ("timm", "onnxruntime"),
}


def test_every_script_is_run_and_has_a_page() -> None:
    assert {path.name for path in (ROOT / "examples" / "integrations").glob("*.py")} == SCRIPTS.keys()
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "integrations").glob("*.md"))
    assert all(f"examples/integrations/{name}" in pages for name in SCRIPTS)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_removes_filters(script: str, tmp_path: Path) -> None:
    define_operators()
    for package in SCRIPTS[script]:
        pytest.importorskip(package, reason=f"{package} is not installed: make test-integrations")
    runner = Path(__file__).with_name("run_script.py")
    command = [sys.executable, str(runner), str(ROOT / "examples" / "integrations" / script), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr[-2000:]
    removed = [float(share) for share in re.findall(r"([\d.]+) % of the MACs", ran.stdout)]
    assert removed
    assert min(removed) > 5, ran.stdout
    if script.startswith("timm"):
        import onnxruntime

        session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
        images = torch.randn(3, 3, 32, 32).numpy()
        assert session.run(None, {session.get_inputs()[0].name: images})[0].shape == (3, 10)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "test_vit"])
def test_timm_keeps_its_class(name: str) -> None:
    define_operators()
    timm = pytest.importorskip("timm", reason="timm is not installed: make test-integrations")
    model = randomise_(timm.create_model(name, num_classes=10))
    images = random_tensor(2, 3, *model.default_cfg["input_size"][1:])
    graph = trace(model, images)
    smaller = compact(graph, random_keep(list(find_sites(graph, "coupled")), 0, 0.4), verify=False)
    cut_(model, smaller)
    assert_same(run(model, images), run(smaller.module, images), atol=1e-9)
    assert model.forward_features(images).shape[0] == 2
    again = cut_(timm.create_model(name, num_classes=10).double(), smaller.plan, images)
    again.load_state_dict(model.state_dict())
    assert_same(run(again.eval(), images), run(model, images))
    again.reset_classifier(7)  # makes a layer of a width that the model stores
    assert run(again.double(), images).shape == (2, 7)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["yolov8n.yaml", "yolo11n.yaml", "yolo11n-seg.yaml", "yolo11n-pose.yaml"])
def test_yolo(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/integrations/ultralytics.md says."""
    define_operators()
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    pytest.importorskip("ultralytics", reason="ultralytics is not installed: make test-integrations")
    from ultralytics.nn import tasks

    kind = {"seg": tasks.SegmentationModel, "pose": tasks.PoseModel}.get(name[8:].partition(".")[0], tasks.DetectionModel)
    model = randomise_(kind(name, verbose=False))
    images = random_tensor(2, 3, 64, 64)
    with pytest.raises(Untraceable, match=r"in train mode.*another path"):
        trace(model.train(), images)
    graph = trace(model.eval(), images)
    assert set(graph.module.state_dict()) == set(model.state_dict())
    other = random_tensor(1, 3, 96, 64, seed=1)
    assert_same(run(graph.module, other), run(model, other))
    sites = find_sites(graph)
    assert sum(u.macs for u in sites.unprunable) < 0.1 * cost(graph).macs
    assert_compact_is_masked(graph, random_keep(list(sites), 0, 0.3), (other,))
