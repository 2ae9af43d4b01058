"""Batches of any form, networks of several inputs, and models that give their own loss and logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from two_inputs import QUICK, RECIPE, TwoInputs, as_dict, loaders, right, sets, trained

import secateurs as sc
from secateurs.data import Examples, load_digits
from secateurs.data.forms import form_of
from secateurs.errors import DataError, InvalidInput, RunError
from secateurs.graph.masking import masked
from secateurs.training import train_


class Triple(NamedTuple):
    image: Tensor
    mask: Tensor
    label: Tensor


@dataclass(frozen=True)
class Sample:
    pixels: dict[str, Tensor]
    truth: Tensor
    name: str = "a string"


def collate(rows: list[Sample]) -> Sample:
    images, masks = (torch.stack([row.pixels[key] for row in rows]) for key in ("image", "mask"))
    return Sample({"image": images, "mask": masks}, torch.stack([row.truth for row in rows]))


# ---- several inputs, batches of any form ---------------------------------------------------------------------------------


def test_a_network_of_two_inputs_is_pruned_resumed_and_equal_to_the_masked_one(tmp_path: Path) -> None:
    train, val, test = loaders(as_dict)
    model = trained().double()

    def options() -> dict[str, Any]:
        return {"forward": lambda model, batch: model(batch["image"], mask=batch["mask"]), "test": test}

    class Double(Dataset[Any]):
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __len__(self) -> int:
            return len(self.inner)

        def __getitem__(self, row: int) -> Any:
            found = self.inner[row]
            return {**found, "image": found["image"].double(), "mask": found["mask"].double()}

    test = DataLoader(Double(test.dataset), 64)
    pruner = sc.Pruner(model, train, val, recipe=RECIPE, folder=tmp_path / "run", **options())
    next(iter(pruner))
    pruner.close()
    result = sc.resume(tmp_path / "run", TwoInputs().double(), train, **options()).finish()
    assert result.accuracy_before == pytest.approx(right(trained(), sets()[2]))
    assert result.macs.removed > 0.1
    assert result.latency is not None
    graph = sc.trace(model, tuple(part[:2].double() for part in sets()[0].inputs))
    sites = {site.name: site for site in sc.find_sites(graph)}
    keep = {name: torch.ones(sites[name].channels, dtype=torch.bool) for name in result.plan.removed()}
    for name, removed in result.plan.removed().items():
        keep[name][list(removed)] = False
    inputs = [part.double() for part in sets()[2].inputs]
    with torch.no_grad():
        wanted = masked(graph, keep).eval()(*inputs)
        torch.testing.assert_close(result.model.eval()(*inputs), wanted, rtol=0, atol=1e-12)
    plain = sc.prune(trained(), *sets()[:2], **QUICK)  # examples in memory
    assert plain.plan.removed() == result.plan.removed()


FORMS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "pair of a tuple": (lambda image, mask, label: ((image, mask), label), {}, {}),
    "pair of a dict": (lambda image, mask, label: ({"mask": mask, "image": image}, label), {}, {}),
    "dict by the names of the arguments": (as_dict, {}, {}),
    "named tuple": (Triple, {}, {}),
    "triple": (lambda *parts: parts, {}, {"forward": lambda model, batch: model(*batch[:2])}),
    "dataclass with a dict": (
        lambda image, mask, label: Sample({"image": image, "mask": mask}, label),
        {"collate_fn": collate},
        {"forward": lambda model, batch: model(**batch.pixels)},
    ),
    "own loss of a dataclass": (
        lambda image, mask, label: Sample({"image": image, "mask": mask}, label),
        {"collate_fn": collate},
        {
            "forward": lambda model, batch: {"scores": model(batch.pixels["image"], batch.pixels["mask"])},
            "loss": lambda outputs, batch: functional.cross_entropy(outputs["scores"], batch.truth, reduction="none"),
            "metric": lambda outputs, batch: outputs["scores"].argmax(1) == batch.truth,
        },
    ),
    "own loss of a dict": (
        as_dict,
        {},
        {"loss": lambda outputs, batch: functional.cross_entropy(outputs, batch["label"], reduction="none")},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_batches_of_any_form_give_the_same_network(name: str) -> None:
    form, loading, calling = FORMS[name]
    train, val, test = loaders(form, **loading)
    recipe = replace(RECIPE, sites=("both.0",), max_drop=0.1)
    result = sc.prune(trained(), train, val, test=test, recipe=recipe, progress=False, **calling)
    assert result.accuracy_before == pytest.approx(right(trained(), sets()[2]))
    assert result.accuracy_after == pytest.approx(right(result.model, sets()[2]))
    assert result.macs.removed > 0


def test_every_part_of_a_run_takes_two_inputs(tmp_path: Path) -> None:
    """Ensembles, slopes, repair, refitting, the contract, the recipe's own training, in their defaults."""
    train, val, test = loaders(as_dict)
    recipe = sc.Recipe.best(max_drop=0.1, repair_examples=128, retrain=sc.TrainSettings(epochs=1, lr=0.001, batch=64))
    result = sc.prune(trained(), train, val, test=test, recipe=recipe, folder=tmp_path / "run", progress=False)
    assert result.macs.removed > 0
    assert result.bound is not None
    assert result.accuracy_after == pytest.approx(right(result.model, sets()[2]))
    one_by_one = replace(
        sc.Recipe.fast(max_drop=0.1, confidence=0), sites=("both.0",), finetune=sc.TrainSettings(epochs=1, lr=0.001)
    )
    assert sc.prune(trained(), train, val, recipe=one_by_one, progress=False).macs.removed > 0


def test_a_run_whose_measures_take_whole_batches_needs_a_loader_to_be_resumed(tmp_path: Path) -> None:
    train, val, _ = loaders(as_dict)

    def right_by_batch(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs.argmax(1) == batch["label"]

    pruner = sc.Pruner(trained(), train, val, recipe=RECIPE, metric=right_by_batch, folder=tmp_path / "run")
    pruner.close()
    with pytest.raises(RunError, match=r"depends on the form of batches.* Give the training loader, too"):
        sc.resume(tmp_path / "run", TwoInputs(), metric=right_by_batch)
    with pytest.raises(RunError, match=r"metric \(right_by_batch, now accuracy\)"):
        sc.resume(tmp_path / "run", TwoInputs(), train)
    assert sc.resume(tmp_path / "run", TwoInputs(), train, metric=right_by_batch).finish().metric == "right_by_batch"


def test_what_a_batch_cannot_tell_is_asked_for() -> None:
    class Optional(nn.Module):
        def forward(self, image: Tensor, mask: Tensor | None = None, depth: Tensor | None = None) -> Tensor:
            return image

    image, label = torch.zeros(2, 1, 8, 8), torch.zeros(2).long()
    with pytest.raises(InvalidInput, match=r"Optional.forward\(image, mask, depth\) is given 'image', 'depth' by name: .* gap"):
        form_of({"image": image, "depth": image.clone(), "labels": label}, Optional(), None)
    with pytest.raises(
        DataError, match=r"arguments of Optional.forward \(image, mask, depth\) and 'labels'. For other.*forward="
    ):
        form_of({"a": image, "b": image.clone(), "labels": label}, Optional(), None)
    with pytest.raises(InvalidInput, match=r"forward passes a bool to the model as argument 'train', which is no tensor"):
        form_of({"image": image, "labels": label}, Optional(), lambda model, batch: model(batch["image"], train=True))
    with pytest.raises(InvalidInput, match="called the model 2 times"):
        form_of({"image": image, "labels": label}, Optional(), lambda model, batch: [model(batch["image"]) for _ in "ab"])
    form = form_of({"image": image, "labels": label}, Optional(), None)
    with pytest.raises(DataError, match=r"a batch of the val loader is a dict with 'picture'.*wanted the form of the first"):
        form.split({"picture": image}, "val")
    with pytest.raises(DataError, match=r"at 'weight' a tensor of shape \(\): wanted a tensor with a row for each of the 2"):
        replace(form, whole=True).split({"image": image, "labels": label, "weight": torch.tensor(1.0)}, "val")


def test_a_measure_is_given_the_batch_in_its_own_form() -> None:
    batch = Sample({"image": torch.zeros(2, 1, 8, 8), "mask": torch.ones(2, 1, 8, 8)}, torch.tensor([3, 4]))
    form = form_of(batch, trained(), lambda model, batch: model(**batch.pixels), own=True)
    seen: list[Any] = []

    def loss(outputs: Any, given: Any) -> Tensor:
        seen.append(given)
        return torch.zeros(2)

    form.measure(loss, lambda outputs, targets: torch.zeros(2))(torch.zeros(2, 10), form.split(batch, "train").targets)
    assert isinstance(seen[0], Sample)
    assert seen[0].truth.tolist() == [3, 4]
    assert seen[0].pixels["image"].shape == (2, 0)  # the inputs are not kept for measures
    assert seen[0].name is None  # no tensor


# ---- outputs that hold a loss and logits ---------------------------------------------------------------------------------


class HubModel(nn.Module):
    """Behaves like an image classifier of a model hub: named arguments, a loss if it is given labels, and logits."""

    def __init__(self, wrap: Callable[..., Any] = dict) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)),
        )
        self.wrap = wrap

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, return_dict: bool | None = None) -> Any:
        logits = self.net(pixel_values)
        return self.wrap(loss=None if labels is None else functional.cross_entropy(logits, labels), logits=logits)


@dataclass
class Answer:
    loss: Tensor | None
    logits: Tensor


@pytest.mark.parametrize("wrap", [dict, Answer])
def test_a_model_with_its_loss_and_logits_is_pruned_by_default(wrap: Callable[..., Any]) -> None:
    data = load_digits(search=400, test=200)
    batches = {
        name: [{"pixel_values": x, "labels": y, "index": torch.arange(len(y))} for x, y in part.batches(64)]
        for name, part in data.splits().items()
    }
    model = HubModel(wrap)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(5):
        for batch in batches["train"]:
            optimiser.zero_grad()
            found = model(batch["pixel_values"], batch["labels"])
            (found["loss"] if wrap is dict else found.loss).backward()
            optimiser.step()
    recipe = replace(RECIPE, confidence=0.95, max_drop=0.1)
    result = sc.prune(model, batches["train"], batches["search"], test=batches["test"], recipe=recipe, progress=False)

    def accuracy(network: nn.Module) -> float:
        x, y = data.test_set.batch(slice(None))
        with torch.no_grad():
            found = network.eval()(x)
        return float(((found["logits"] if wrap is dict else found.logits).argmax(1) == y).double().mean())

    assert result.accuracy_before == pytest.approx(accuracy(model))
    assert result.accuracy_after == pytest.approx(accuracy(result.model))
    assert result.macs.removed > 0
    assert result.bound is not None  # a value for each example: the drop is certified


def test_a_loss_inside_the_outputs_counts_where_labels_are_no_classes() -> None:
    """Regression: labels are numbers, so the network is called with them and its own loss is taken."""

    class Regressor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            found = self.net(pixel_values)[:, 0]
            return {"logits": found} if labels is None else {"loss": functional.mse_loss(found, labels), "logits": found}

    digits = load_digits()
    batches = [[{"labels": y.float(), "pixel_values": x} for x, y in part.batches(64)] for part in digits.splits().values()]
    model = Regressor()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in batches[0] * 3:
        optimiser.zero_grad()
        model(**batch)["loss"].backward()
        optimiser.step()

    def minus_error(network: nn.Module) -> float:
        with torch.no_grad():
            x, y = digits.search.batch(slice(None))
            return -float(functional.mse_loss(network(x, y.float())["logits"], y.float()))

    before = minus_error(model)
    result = sc.prune(model, *batches[:2], evaluate=minus_error, recipe=replace(RECIPE, max_drop=0.5), progress=False)
    assert result.accuracy_before == pytest.approx(before)
    assert result.macs.removed > 0
    assert result.accuracy_after >= before - 0.5
    with pytest.raises(InvalidInput, match=r"the network gives .* accuracy wants class logits .* give metric="):
        sc.prune(model, *batches[:2], recipe=RECIPE, progress=False)


def test_two_heads_with_a_dict_of_targets_keep_the_promise() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU())
            self.digit, self.odd = nn.Linear(24, 10), nn.Linear(24, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            found = self.body(x)
            return {"digit": self.digit(found), "odd": self.odd(found)}

    def loss(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        both = [functional.cross_entropy(outputs[name], targets[name], reduction="none") for name in ("digit", "odd")]
        return both[0] + both[1]

    def both_right(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        return (outputs["digit"].argmax(1) == targets["digit"]) & (outputs["odd"].argmax(1) == targets["odd"])

    def named(part: Examples) -> Examples:
        assert isinstance(part.targets, Tensor)
        return Examples(part.ready().inputs, {"digit": part.targets, "odd": part.targets % 2})

    train, val, test = (named(part) for part in load_digits(search=500, test=500).splits().values())
    model = TwoHeads()
    train_(model, train, sc.TrainSettings(epochs=6, lr=0.05, batch=64), loss_fn=loss)
    recipe = replace(RECIPE, confidence=0.95, max_drop=0.08)
    result = sc.prune(model, train, val, test=test, loss=loss, metric=both_right, recipe=recipe, progress=False)
    assert result.macs.removed > 0
    assert result.bound is not None
    assert result.accuracy_before - result.accuracy_after <= result.bound <= 0.08
