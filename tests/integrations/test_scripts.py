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

from secateurs import trace
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
def test_yolo_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/integrations/ultralytics.md says."""
    define_operators()
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    pytest.importorskip("ultralytics", reason="ultralytics is not installed: make test-integrations")
    from ultralytics.nn.tasks import DetectionModel

    class OneInput(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = DetectionModel("yolov8n.yaml", verbose=False).eval()

        def forward(self, images: torch.Tensor) -> object:
            return self.model(images)

    images, network = torch.randn(2, 3, 64, 64), OneInput().eval()
    with pytest.raises(Untraceable, match=r"DetectionModel.forward takes \*args"):
        trace(network.model, images)
    with pytest.raises(Untraceable, match="Proxy object cannot be iterated"):
        trace(network, images)
