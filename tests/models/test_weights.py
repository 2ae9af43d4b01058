"""Weights that record where they come from (the package, a training, a public site), and data they were trained on."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from nets import random_keep, seeded
from secateurs import compact, find_sites, masked, trace, verify
from secateurs._util.download import home
from secateurs.cli import execute, inputs
from secateurs.cli.inputs import Origin
from secateurs.config import Shortcut, TrainSettings, read_settings
from secateurs.data import Data, Examples, cifar10
from secateurs.data import load as load_data
from secateurs.errors import ArtefactError, InvalidInput
from secateurs.metrics import evaluate
from secateurs.models import PUBLIC_MEAN, PUBLIC_STD, build, load_builtin, load_public, load_weights_, read_pedigree, weights

ROOT = Path(__file__).parents[2]
SHIPPED = Path(weights.__file__).parent / "builtin" / "resnet20.safetensors"
NET = ["--model", "mlp", "--data", "digits"]
shipped = pytest.mark.skipif(not SHIPPED.exists(), reason="no trained weights in this copy of the package")


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training on digits."""
    folder = tmp_path_factory.mktemp("trained") / "net"
    assert execute(["train", *NET, "--epochs", "3", "--lr", "0.2", "--seed", "5", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory, trained: Path) -> Path:
    """A folder as the package has it, with the weights of that training."""
    folder = tmp_path_factory.mktemp("package")
    assert tool("ship_weights").main([str(trained), "--to", str(folder)]) == 0
    return folder


@pytest.fixture
def in_package(monkeypatch: pytest.MonkeyPatch, package: Path) -> Path:
    monkeypatch.setattr(weights, "BUILTIN", package)
    return package


def header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def test_a_training_leaves_weights_that_say_how_they_were_made(trained: Path) -> None:
    found, data = header(trained / "weights.safetensors"), load_data("digits")
    assert (found["model"], found["seed"], found["epochs"]) == ("mlp", "5", "3")
    assert json.loads(found["recipe"])["lr"] == 0.2
    (trained_on,) = json.loads(found["trained_on"])
    assert trained_on["data"] == "digits"
    assert trained_on["options"] == {"seed": 0, "search": 300, "test": 300}
    assert (trained_on["count"], trained_on["sha256"]) == (1197, data.train.digest())
    assert json.loads(found["scaling"]) == {"full": 16.0, "mean": [0.305], "std": [0.376]}
    assert json.loads(found["versions"])["torch"] == torch.__version__
    assert "test_accuracy" not in found  # a training does not read the test set
    model = build("mlp")
    load_weights_(model, trained / "weights.safetensors")
    assert json.loads(found["search_accuracy"]) == evaluate(model, data.search).accuracy


def test_shipped_weights_carry_both_accuracies_and_are_the_same_bytes_every_time(
    trained: Path, package: Path, tmp_path: Path
) -> None:
    path = package / "mlp.safetensors"
    model = build("mlp")
    load_weights_(model, path)
    data = load_data("digits")
    found = read_pedigree(path)
    assert found is not None
    assert found.search_accuracy == evaluate(model, data.search).accuracy
    assert found.test_accuracy == evaluate(model, data.test).accuracy
    assert (found.sets["train"], found.sets["search"], found.sets["test"]) == (1197, 300, 300)
    assert tool("ship_weights").main([str(trained), "--to", str(tmp_path)]) == 0
    assert (tmp_path / "mlp.safetensors").read_bytes() == path.read_bytes()


def test_an_unfinished_training_is_not_shipped(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "training.json").write_bytes((trained / "training.json").read_bytes())
    assert tool("ship_weights").main([str(folder), "--to", str(tmp_path)]) == 1
    assert f"not finished. Resume with: secateurs resume {folder}" in capsys.readouterr().err


def test_builtin_weights_are_a_name_on_the_command_line_and_a_call_in_python(
    capsys: pytest.CaptureFixture[str], in_package: Path
) -> None:
    found = read_pedigree(in_package / "mlp.safetensors")
    assert found is not None
    assert execute(["eval", *NET, "--weights", "builtin", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""  # nothing to warn of
    assert json.loads(said.out)["networks"]["builtin"]["accuracy"] == found.test_accuracy
    model, same = load_builtin("mlp"), build("mlp")
    load_weights_(same, in_package / "mlp.safetensors")
    inputs = load_data("digits").test.ready().inputs[:20]
    assert not model.training
    torch.testing.assert_close(model(inputs), same.eval()(inputs), rtol=0, atol=0)


def test_builtin_weights_bring_the_split_they_were_trained_with(in_package: Path) -> None:
    def options(**given: Any) -> dict[str, Any]:
        return dict(Origin("mlp", "digits", data_options=given, weights="builtin").settled().data_options)

    assert options() == {"seed": 0, "search": 300, "test": 300}
    assert options(seed=7) == {"seed": 7, "search": 300, "test": 300}
    assert Origin("mlp", "xor", weights="builtin").settled().data_options == {}


def test_networks_without_builtin_weights_are_named(in_package: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no weights for 'resnet56' in the package. Known: 'mlp'. Give a file"):
        load_builtin("resnet56")


@pytest.mark.parametrize("place", [-1, 200])  # a weight, a letter of the header
def test_damaged_weights_are_refused(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    content = bytearray((package / "mlp.safetensors").read_bytes())
    content[place] ^= 1
    (tmp_path / "mlp.safetensors").write_bytes(content)
    monkeypatch.setattr(weights, "BUILTIN", tmp_path)
    with pytest.raises(ArtefactError, match=r"mlp\.safetensors"):
        load_builtin("mlp")


# ---- searching on what was trained on ----------------------------------------------------------------------------------


def shared_rows(one: Examples, other: Examples) -> int:
    known = {row.tobytes() for row in other.inputs.numpy()}
    return sum(row.tobytes() in known for row in one.inputs.numpy())


def test_a_validation_set_that_was_trained_on_is_counted_and_warned_of(
    capsys: pytest.CaptureFixture[str], trained: Path
) -> None:
    file = str(trained / "weights.safetensors")
    inputs.load_data(Origin("mlp", "digits", weights=file).settled())
    inputs.load_data(Origin("mlp", "digits", data_options={"seed": 1}).settled())
    assert capsys.readouterr().err == ""
    other = inputs.load_data(Origin("mlp", "digits", data_options={"seed": 1}, weights=file).settled())
    shared = shared_rows(other.search, load_data("digits").train)
    assert 150 < shared < 250  # two thirds of 300, about
    said = capsys.readouterr().err
    assert "Warning: the weights were trained on 1,197 examples of digits (search=300, seed=0, test=300)" in said
    assert f"{shared} of the 300 examples of the validation set" in said
    assert "--data-option search=300 --data-option seed=0 --data-option test=300" in said


def test_weights_trained_further_have_seen_both_sets(capsys: pytest.CaptureFixture[str], trained: Path, tmp_path: Path) -> None:
    more = [*NET, "--data-option", "seed=1", "--weights", str(trained / "weights.safetensors")]
    assert execute(["train", *more, "--epochs", "1", "--out", str(tmp_path / "more")]) == 0
    found = read_pedigree(tmp_path / "more/weights.safetensors")
    assert found is not None
    assert [examples.options["seed"] for examples in found.trained_on] == [0, 1]
    capsys.readouterr()
    inputs.load_data(Origin("mlp", "digits", data_options={"seed": 1}, weights=str(tmp_path / "more/weights.safetensors")))
    assert "(search=300, seed=0, test=300)" in capsys.readouterr().err  # the first training has seen them


def test_a_set_that_was_trained_on_twice_is_named_once(trained: Path, tmp_path: Path) -> None:
    more = [*NET, "--weights", str(trained / "weights.safetensors"), "--epochs", "1", "--out", str(tmp_path / "more")]
    assert execute(["train", *more]) == 0
    found = read_pedigree(tmp_path / "more/weights.safetensors")
    assert found is not None
    assert [examples.options["seed"] for examples in found.trained_on] == [0]


def small_cifar(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Data]:
    """CIFAR-10 with 500 training and 100 test images, of which 50 are for searching."""
    pixels = torch.randint(256, (600, 3, 32, 32), generator=seeded(0), dtype=torch.uint8)
    every = Examples(pixels, torch.arange(600) % 10, cifar10.SCALING, torch.arange(600))

    def load(name: str, **options: Any) -> Data:
        assert name == "cifar10"
        parts = every.take(torch.arange(500)), every.take(torch.arange(500, 600))
        return cifar10.arrange(*parts, options.get("split", "paper"), seed=options.get("seed", 0))

    monkeypatch.setattr("secateurs.data.load", load)
    monkeypatch.setattr("secateurs.models.weights.load", load)
    return load


def test_public_weights_have_seen_all_training_images(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cifar(monkeypatch)
    settled = Origin("resnet20", "cifar10", weights="public").settled()
    assert settled.data_options == {"split": "public"}
    assert len(inputs.load_data(settled).train) == 500
    inputs.load_data(Origin("resnet20", "cifar10", data_options={"seed": 3}, weights="public").settled())
    assert capsys.readouterr().err == ""
    inputs.load_data(Origin("resnet20", "cifar10", data_options={"split": "paper"}, weights="public").settled())
    said = capsys.readouterr().err
    assert "Warning: the public weights were trained on 500 examples of cifar10 (split=public)" in said
    assert "50 of the 50 examples of the validation set" in said
    assert "--data-option split=public" in said


def test_data_that_changed_since_the_training_are_warned_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trained: Path
) -> None:
    other = load_data("digits", seed=9)
    monkeypatch.setattr("secateurs.models.weights.load", lambda name, **options: other)
    file = str(trained / "weights.safetensors")
    inputs.load_data(Origin("mlp", "digits", data_options={"seed": 1}, weights=file))
    assert "is not known: the data have changed since" in capsys.readouterr().err


# ---- the shipped file --------------------------------------------------------------------------------------------------


@shipped
def test_the_package_brings_a_trained_resnet20() -> None:
    found = read_pedigree(SHIPPED)
    assert found is not None
    assert SHIPPED.stat().st_size <= 1_100_000
    assert found.sets == {"train": 45_000, "search": 5_000, "test": 10_000}
    assert found.scaling is not None
    assert (found.scaling["mean"], found.scaling["std"]) == ([*weights.PUBLIC_MEAN], [*weights.PUBLIC_STD])
    settings = read_settings(ROOT / "recipes" / "train-2core-again.toml")
    # settings that came later have their defaults
    assert {**asdict(TrainSettings()), **found.recipe, "milestones": ()} == asdict(settings)
    assert Origin("resnet20", "cifar10", weights="builtin").settled().data_options == {"split": "paper", "seed": 0}
    assert sum(weight.numel() for weight in load_builtin("resnet20").parameters()) == 269_722


@shipped
def test_the_shipped_resnet20_is_as_good_as_it_should_be() -> None:
    found = read_pedigree(SHIPPED)
    assert found is not None
    assert found.test_accuracy is not None
    assert found.test_accuracy >= 0.91


@shipped
@pytest.mark.realdata
def test_the_shipped_resnet20_has_its_accuracy() -> None:
    found = read_pedigree(SHIPPED)
    assert found is not None
    (trained_on,) = found.trained_on
    data = load_data(trained_on.data, **trained_on.options)
    assert data.digest() == found.data_sha256
    assert evaluate(load_builtin("resnet20"), data.test).accuracy == found.test_accuracy


# ---- the public ResNet-20 on real test images ----------------------------------------------------------------------------


IMAGES = 2_000


@pytest.fixture(scope="module")
def images() -> Tensor:
    """The first test images, normalised as the weights want them."""
    records = np.fromfile(home() / "data" / "cifar-10-batches-bin" / "test_batch.bin", dtype=np.uint8).reshape(-1, 3073)
    pixels = torch.from_numpy(records[:IMAGES, 1:].reshape(-1, 3, 32, 32)).float() / 255
    return (pixels - torch.tensor(PUBLIC_MEAN).view(3, 1, 1)) / torch.tensor(PUBLIC_STD).view(3, 1, 1)


def logits(module: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([module(batch) for batch in images.split(250)])


@pytest.mark.realdata
@pytest.mark.parametrize("shortcut", ["before", "after"])
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_masked_and_compacted_predict_the_same_class_for_every_image(images: Tensor, shortcut: Shortcut, share: float) -> None:
    graph = trace(load_public(20), images[:2])
    keep = random_keep(find_sites(graph, shortcut), seed=int(10 * share), share=share)
    assert len(keep) == 19
    smaller, reference = compact(graph, keep), masked(graph, keep)
    ours, theirs = logits(smaller.module, images), logits(reference, images)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # float32
    best = theirs.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3  # rounding may turn a tie
    assert clear.float().mean() > 0.99
    assert torch.equal(ours.argmax(1)[clear], theirs.argmax(1)[clear])
    assert verify(graph, keep, smaller, inputs=images[:50]).difference < 1e-10


@pytest.mark.realdata
@pytest.mark.parametrize("shortcut", ["before", "after"])
def test_a_cut_at_each_site_alone_equals_the_masked_network(images: Tensor, shortcut: Shortcut) -> None:
    """One random cut at every site, one after the other, in float64: equal image by image, and still a good network."""
    few = images[:10].double()
    graph = trace(load_public(20).double(), few[:2])
    whole = logits(graph.module, few).argmax(1)
    for seed, site in enumerate(find_sites(graph, shortcut)):
        keep = random_keep([site], seed, share=0.25)
        wanted = logits(masked(graph, keep), few)
        torch.testing.assert_close(logits(compact(graph, keep).module, few), wanted, rtol=0, atol=1e-11)
        assert (wanted.argmax(1) == whole).float().mean() > 0.2  # far from chance: the masks lie where they should
