"""The data sets of the lab: XOR against its definition, MNIST as it is documented, from small files in its form."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from secateurs.data import load
from secateurs.errors import DataError, DownloadError
from secateurs_lab.data import mnist
from secateurs_lab.data.xor import sample_xor


def test_xor_follows_its_definition() -> None:
    drawn = sample_xor(2000, torch.Generator().manual_seed(0), dtype=torch.float64)
    pair = torch.stack([drawn.a, drawn.b])
    torch.testing.assert_close(pair @ pair.T, torch.eye(2, dtype=torch.float64), rtol=0, atol=1e-12)
    x = drawn.points.numpy()
    assert np.array_equal(drawn.signs.numpy(), np.sign((x @ drawn.a.numpy()) * (x @ drawn.b.numpy())))
    # standard normal: mean 0 within 4 standard errors, covariance the identity
    assert np.abs(x.mean(0)).max() < 4 / 2000**0.5
    assert np.abs(np.cov(x.T) - np.eye(2)).max() < 0.15


def test_xor_axes_rotate_with_the_seed_in_both_orientations() -> None:
    draws = [sample_xor(1, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert len({round(float(draw.a[0]), 6) for draw in draws}) == 20
    assert {round(float(draw.a[0] * draw.b[1] - draw.a[1] * draw.b[0])) for draw in draws} == {-1, 1}


def test_xor_as_data_has_balanced_classes() -> None:
    xor = load("xor", train=400, search=100, test=300, seed=2)
    assert [len(part) for part in xor.splits().values()] == [400, 100, 300]
    assert 0.4 < float(xor.train.targets.float().mean()) < 0.6


@pytest.fixture
def tiny_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """24 training and 6 test images, compressed, with their checksums in place of the real ones."""
    monkeypatch.setenv("SECATEURS_HOME", str(tmp_path / "home"))
    archives = {}
    for name in mnist.MD5:
        count, axes = 24 if name.startswith("train") else 6, 3 if "images" in name else 1
        values = np.arange(count * 784, dtype=np.int64) % 251 if axes == 3 else np.arange(count) % 10
        header = bytes([0, 0, 8, axes]) + np.array([count, 28, 28][:axes], dtype=">i4").tobytes()
        content = header + values.astype(np.uint8).tobytes()
        archives[name] = gzip.compress(content, mtime=0)
        sums = tuple(hashlib.md5(each).hexdigest() for each in (archives[name], content))
        monkeypatch.setitem(mnist.MD5, name, sums)
    return archives


def serve_mnist(monkeypatch: pytest.MonkeyPatch, archives: dict[str, bytes], broken: str = "") -> list[str]:
    asked: list[str] = []

    def fetch(url: str, path: Path, *, md5: str, progress: object = None) -> Path:
        asked.append(url)
        if broken and url.startswith(broken):
            raise DownloadError(f"{url} answered 404")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(archives[url.rpartition("/")[2].removesuffix(".gz")])
        assert hashlib.md5(path.read_bytes()).hexdigest() == md5
        return path

    monkeypatch.setattr(mnist, "fetch", fetch)
    return asked


def test_mnist_is_downloaded_once_and_read_as_documented(
    tiny_mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = serve_mnist(monkeypatch, tiny_mnist)
    loaded = load("mnist", seed=1)
    load("mnist")
    assert asked == [f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz" for name in mnist.MD5]
    assert {path.name for path in (tmp_path / "home/data/mnist").iterdir()} == set(mnist.MD5), "no archive is left"
    assert [len(part) for part in loaded.splits().values()] == [22, 2, 6]
    test = loaded.test_set
    assert test.batch(slice(0, 1)).inputs.shape == (1, 1, 28, 28)
    pixel = (7 / 255 - 0.1307) / 0.3081  # the eighth pixel of the first test image holds 7
    assert float(test.batch(slice(0, 1)).inputs[0, 0, 0, 7]) == pytest.approx(pixel, rel=1e-5)
    assert torch.as_tensor(test.targets).tolist() == [0, 1, 2, 3, 4, 5]


def test_mnist_comes_from_the_next_mirror_if_the_first_fails(
    tiny_mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = serve_mnist(monkeypatch, tiny_mnist, broken="https://ossci")
    assert len(load("mnist").test_set) == 6
    assert len(asked) == 8
    serve_mnist(monkeypatch, tiny_mnist, broken="https://")
    (mnist.mnist_folder() / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DownloadError, match="cvdf-datasets"):
        load("mnist")
    with pytest.raises(DataError, match=r"no t10k-labels-idx1-ubyte\. Get it with: secateurs data get mnist"):
        load("mnist", download=False)


def test_a_damaged_file_of_mnist_is_refused(tiny_mnist: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    serve_mnist(monkeypatch, tiny_mnist)
    load("mnist")
    file = mnist.mnist_folder() / "train-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="train-labels-idx1-ubyte is damaged: MD5"):
        load("mnist")


@pytest.mark.realdata
def test_the_real_mnist_has_60000_and_10000_images() -> None:
    real = load("mnist", download=False)
    assert [len(part) for part in real.splits().values()] == [55_000, 5_000, 10_000]
    labels = torch.as_tensor(real.test_set.targets)
    assert labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
