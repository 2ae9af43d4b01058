"""A network is trained and measured by the real Trainer of transformers, and its models are captured as the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from run_script import define_operators
from safetensors.torch import load_file
from torch import nn

from nets import assert_compact_is_masked, random_keep, random_tensor, randomise_
from secateurs import Recipe, compact, cut_, find_sites, prune, resume, save, trace
from secateurs import load as load_network
from secateurs.data import load
from secateurs.errors import InvalidInput
from secateurs.integrations.transformers import Logits, WithLoss, evaluate_with, finetune_with

define_operators()
hf = pytest.importorskip("transformers", reason="transformers is not installed: make test-integrations")
pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate: make test-integrations")

pytestmark = pytest.mark.filterwarnings("default")  # transformers and accelerate warn of what they will change


def resnet() -> Any:
    torch.manual_seed(0)
    small = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return hf.ResNetForImageClassification(hf.ResNetConfig(num_channels=1, num_labels=10, **small))


def trainer_in(folder: Path) -> Any:
    inputs, labels = load("digits").search.batch(slice(None))
    rows = [{"pixel_values": image, "labels": label} for image, label in zip(inputs, labels, strict=True)]

    def trainer(model: nn.Module) -> Any:
        quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
        arguments = hf.TrainingArguments(str(folder), num_train_epochs=1, per_device_train_batch_size=64, **quiet)
        metrics = {
            "compute_metrics": lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}
        }
        return hf.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, **metrics)

    return trainer


def test_a_network_gives_a_trainer_the_loss_of_the_model() -> None:
    model, x = resnet().eval(), random_tensor(3, 1, 8, 8).float()
    with torch.no_grad():
        wanted = model(pixel_values=x, labels=torch.tensor([1, 2, 3]))
        found = WithLoss(model)(x, torch.tensor([1, 2, 3]))
    assert torch.equal(found["logits"], wanted.logits)
    torch.testing.assert_close(found["loss"], wanted.loss)


def test_a_model_and_its_loaders_are_taken_as_they_are(tmp_path: Path) -> None:
    model, digits = resnet(), load("digits")
    batches = {name: [{"pixel_values": x, "labels": y} for x, y in part.batches(64)] for name, part in digits.splits().items()}
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in batches["train"] * 3:
        optimiser.zero_grad()
        model(**batch).loss.backward()
        optimiser.step()
    recipe = Recipe.best(max_drop=0.1, criterion="l1", repair="none", confidence=0.0)
    options: Any = {"test": batches["test"], "leaves": ("resnet.embedder",), "recipe": recipe, "folder": tmp_path / "run"}
    result = prune(model, batches["train"], batches["search"], progress=False, **options)

    def right(network: nn.Module) -> float:
        x, y = digits.test_set.batch(slice(None))
        with torch.no_grad():
            return float((network.eval()(pixel_values=x)["logits"].argmax(1) == y).double().mean())

    assert result.accuracy_before == pytest.approx(right(model))
    assert result.accuracy_after == pytest.approx(right(result.model))
    assert result.macs.removed > 0
    assert resume(tmp_path / "run", resnet()).finish().plan == result.plan


def test_finetune_trains_the_given_network_in_place(tmp_path: Path) -> None:
    network = resnet()
    before = {name: weight.clone() for name, weight in network.named_parameters()}
    finetune_with(trainer_in(tmp_path))(network)
    after = dict(network.named_parameters())
    assert before.keys() == after.keys()
    assert not torch.equal(before["classifier.1.weight"], after["classifier.1.weight"])


def test_evaluate_gives_the_metric_of_the_trainer(tmp_path: Path) -> None:
    network = resnet().eval()
    inputs, labels = load("digits").search.batch(slice(None))
    with torch.no_grad():
        logits = network(inputs).logits
    right = float((logits.argmax(1) == labels).double().mean())
    trainer = trainer_in(tmp_path)
    assert evaluate_with(trainer, monitor="eval_accuracy")(network) == pytest.approx(right, abs=1e-6)
    mean = float(nn.functional.cross_entropy(logits, labels))
    assert evaluate_with(trainer, monitor="eval_loss", mode="min")(network) == pytest.approx(-mean, rel=1e-4)
    with pytest.raises(InvalidInput, match=r"got 'f1', wanted a metric of the Trainer: .*eval_accuracy"):
        evaluate_with(trainer, monitor="f1")(network)


def test_a_cut_network_is_saved_and_loaded(tmp_path: Path) -> None:
    x = random_tensor(2, 1, 8, 8).float()
    graph = trace(resnet().eval(), x, leaves=["resnet.embedder"])
    site = next(iter(find_sites(graph)))
    small = compact(graph, {site.name: torch.arange(site.channels) >= 3})
    save(small, tmp_path / "small.safetensors")
    loaded = load_network(resnet().eval(), tmp_path / "small.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(x)["logits"], small.module(x)["logits"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["ResNet", "ConvNext"])
def test_a_model_that_was_cut_keeps_its_class(kind: str, tmp_path: Path) -> None:
    """Trained by the Trainer with labels, saved by save_pretrained; loaded by another cut and load_state_dict."""
    options = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_channels": 1, "num_labels": 10}
    more = {"ResNet": {"embedding_size": 8, "layer_type": "basic"}, "ConvNext": {"num_stages": 2, "patch_size": 2}}[kind]
    config, build = getattr(hf, f"{kind}Config")(**options, **more), getattr(hf, f"{kind}ForImageClassification")
    torch.manual_seed(0)
    model, example = build(config), {"pixel_values": random_tensor(2, 1, 8, 8).float()}
    graph = trace(model.eval(), example)
    plan = compact(graph, random_keep(list(find_sites(graph, "coupled")), 0, 0.4)).plan
    before = sum(p.numel() for p in model.parameters())
    cut_(model, plan, example)
    assert sum(p.numel() for p in model.parameters()) < before
    trainer_in(tmp_path)(model).train()
    wanted = model.eval()(**example, labels=torch.tensor([1, 2]))
    assert wanted.loss.isfinite()

    model.save_pretrained(tmp_path / "saved")
    with pytest.raises((RuntimeError, ValueError)):
        build.from_pretrained(tmp_path / "saved")
    again = cut_(build(config), plan, example)
    again.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    torch.testing.assert_close(again.eval()(**example).logits, wanted.logits)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ResNet", {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}),
        ("RegNet", {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "groups_width": 8}),
        ("ConvNext", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}),
        ("MobileNetV2", {"image_size": 32, "depth_multiplier": 0.35}),
        ("ViT", {"image_size": 32, "patch_size": 8, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_page_says_about_architectures(kind: str, options: Any) -> None:
    config = getattr(hf, f"{kind}Config")(num_channels=1, num_labels=10, **options)
    model = randomise_(getattr(hf, f"{kind}ForImageClassification")(config))
    x = random_tensor(2, 1, 32, 32)
    assert list(find_sites(trace(Logits(model), x)))
    graph = trace(model, {"pixel_values": x})
    assert type(graph.module(pixel_values=x)) is type(model(x))
    assert set(graph.module.state_dict()) == set(model.state_dict())
    assert_compact_is_masked(graph, random_keep(list(find_sites(graph)), 0, 0.3), (random_tensor(3, 1, 32, 32, seed=1),))
