"""Users' loaders: batches of any form, networks of several inputs, sets larger than memory, and mistakes with data."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import secateurs as sc
from secateurs.data import Examples, load_digits
from secateurs.data import drawn as drawn_module
from secateurs.data.forms import form_of
from secateurs.data.storage import Storage
from secateurs.data.stream import sample
from secateurs.errors import DataError, InvalidInput, RunError
from secateurs.graph.masking import masked
from secateurs.training import train_

RECIPE = sc.Recipe.best(max_drop=0.05, criterion="l1", repair="none", confidence=0.0)
QUICK: dict[str, Any] = {"recipe": RECIPE, "progress": False}


class TwoInputs(nn.Module):
    """An image and a mask of its pixels, which is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU())
        self.mask = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        self.both = nn.Sequential(nn.Conv2d(14, 12, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.last = nn.Linear(48, 10)

    def forward(self, image: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        found: Tensor = self.last(self.both(torch.cat([self.image(image * mask), self.mask(mask)], 1)) * scale)
        return found


@cache
def sets() -> tuple[Examples, Examples, Examples]:
    """Digits with masks that hide a column, as (image, mask) and label."""
    data = load_digits(search=400, test=200)

    def two(examples: Examples) -> Examples:
        images = examples.ready().inputs
        mask = torch.ones_like(images)
        mask[torch.arange(len(mask)), :, :, torch.arange(len(mask)) % 8] = 0
        return Examples((images, mask), examples.targets)

    return two(data.train), two(data.search), two(data.test_set)


@cache
def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = TwoInputs()
    train_(model, sets()[0], sc.TrainSettings(epochs=6, lr=0.1, batch=64))
    return model.state_dict()


def trained() -> TwoInputs:
    model = TwoInputs()
    model.load_state_dict(weights())
    return model


def right(model: nn.Module, examples: Examples) -> float:
    """Accuracy by hand."""
    with torch.no_grad():
        return float((model.eval()(*examples.inputs).argmax(1) == examples.targets).double().mean())


class Rows(Dataset[Any]):
    """Examples of the two-input problem, in a form of the user's own."""

    def __init__(self, examples: Examples, form: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        self.examples, self.form = examples, form

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> Any:
        images, masks = self.examples.inputs
        assert isinstance(self.examples.targets, Tensor)
        return self.form(images[row], masks[row], self.examples.targets[row])


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


def loaders(form: Callable[[Tensor, Tensor, Tensor], Any], **options: Any) -> list[DataLoader[Any]]:
    return [DataLoader(Rows(part, form), 64, **options) for part in sets()]


def as_dict(image: Tensor, mask: Tensor, label: Tensor) -> dict[str, Tensor]:
    return {"label": label, "mask": mask, "image": image}


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
    recipe = replace(RECIPE, sites=("image.0", "both.0"), max_drop=0.1)
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
        sc.Recipe(max_drop=0.1, confidence=0), sites=("both.0",), finetune=sc.TrainSettings(epochs=1, lr=0.001)
    )
    assert sc.prune(trained(), train, val, recipe=one_by_one, progress=False).macs.removed > 0


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
    result = sc.prune(model, batches["train"], batches["search"], test=batches["test"], max_drop=0.1, progress=False)

    def accuracy(network: nn.Module) -> float:
        x, y = data.test_set.batch(slice(None))
        with torch.no_grad():
            found = network.eval()(x)
        return float(((found["logits"] if wrap is dict else found.logits).argmax(1) == y).double().mean())

    assert result.accuracy_before == pytest.approx(accuracy(model))
    assert result.accuracy_after == pytest.approx(accuracy(result.model))
    assert result.macs.removed > 0
    assert result.bound is not None  # a value for each example: the drop is certified


# ---- sets larger than memory ---------------------------------------------------------------------------------------------


def test_a_set_beyond_the_limit_lies_on_disk_and_is_the_same_set(tmp_path: Path) -> None:
    values = TensorDataset(torch.randn(500, 3, 8, 8), torch.arange(500))
    kept = {
        size: sample(DataLoader(values, 32), None, name="validation", seed=0, storage=Storage(size, tmp_path))
        for size in (1 << 30, 100_000)
    }
    memory, disk = kept.values()
    assert (memory.storage, disk.storage) == (None, Storage(100_000, tmp_path))
    assert not list(tmp_path.iterdir()), "the file has no name, so that a killed process leaves nothing"
    assert torch.equal(memory.inputs, values.tensors[0])
    assert memory.digest() == disk.digest()
    rows = torch.randperm(500)
    assert disk.take(rows).digest() == memory.take(rows).digest()
    assert disk.take(rows).storage is not None
    assert disk.take(rows[:20]).storage is None  # 16 kB
    assert disk.take(rows < 250).digest() == memory.take(rows < 250).digest()
    assert disk.ready(torch.float64).digest() == memory.ready(torch.float64).digest()
    for one, other in zip(disk.batches(64), memory.batches(64), strict=True):
        assert torch.equal(one.inputs, other.inputs)


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("secateurs.data.storage.TemporaryFile", full)
    batches = [(torch.zeros(4, 100), torch.zeros(4).long())]
    with pytest.raises(
        DataError, match=r"the validation set does not fit into .* cannot be kept in .*No space left.*larger disk"
    ):
        sample(batches, None, name="validation", seed=0, storage=Storage(100, tmp_path))


def test_a_run_with_sets_on_disk_is_the_run_in_memory_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, val, _ = loaders(as_dict)
    recipe = replace(RECIPE, confidence=0.9, max_drop=0.1)
    whole = sc.prune(trained(), train, val, recipe=recipe, progress=False)
    monkeypatch.setattr(drawn_module, "TRAIN_BYTES", 50_000)
    monkeypatch.setattr(drawn_module, "VALIDATION_BYTES", 50_000)
    pruner = sc.Pruner(trained(), train, val, recipe=recipe, folder=tmp_path / "run")
    assert any("400 validation examples that are used take" in note and "lie on disk" in note for note in pruner.notes)
    assert pruner.data.search.storage is not None
    next(iter(pruner))
    pruner.close()
    files = sorted(path.name for path in (tmp_path / "run" / "data").iterdir())
    assert files == ["search.safetensors", "train.safetensors"]
    result = sc.resume(tmp_path / "run", TwoInputs()).finish()
    assert result.plan == whole.plan
    assert result.bound == whole.bound
    damaged = tmp_path / "run" / "data" / "search.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(RunError, match=r"search.safetensors: cannot be read \(the contents do not match their digest"):
        sc.resume(tmp_path / "run", TwoInputs())


def test_a_killed_write_leaves_no_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(columns: Any, path: Path, header: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(drawn_module.safetensors.torch, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        sc.prune(trained(), *loaders(as_dict)[:2], folder=tmp_path / "run", **QUICK)
    assert not list((tmp_path / "run" / "data").iterdir())


class Thumbnail(nn.Module):
    """Looks at every 56th pixel of an image of 224 x 224."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.net(images[:, :, ::56, ::56])
        return found


def test_memory_does_not_depend_on_the_size_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run with 200,000 training and 200,000 test images of 3 x 224 x 224, which would take 241 GB.

    Training reads 200 batches of 1,000, each a view of one image. At no time more than a few batches are alive, and what the
    run keeps for itself is its bounded sample.
    """
    alive: WeakSet[Tensor] = WeakSet()
    most = read = 0

    class Views:
        def __init__(self, start: float) -> None:
            self.start = start

        def __len__(self) -> int:
            return 200

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            nonlocal most, read
            for number in range(len(self)):
                batch = torch.full((1, 3, 224, 224), self.start + number / 200).expand(1000, 3, 224, 224)
                alive.add(batch)
                most, read = max(most, len(alive)), read + len(batch)
                yield batch, torch.arange(1000) % 2

    few = 64
    monkeypatch.setattr(drawn_module, "TRAIN_EXAMPLES", few)
    monkeypatch.setattr(drawn_module, "TRAIN_BYTES", 16 * 602_120)
    noise = torch.Generator().manual_seed(0)
    val = [(torch.randn(16, 3, 224, 224, generator=noise), torch.arange(16) % 2)]
    recipe = replace(RECIPE, max_drop=0.9, retrain=sc.TrainSettings(epochs=1, lr=0.01))
    pruner = sc.Pruner(Thumbnail(), Views(0.0), val, test=Views(2.0), recipe=recipe)
    sampled = pruner.data.train
    assert sampled.inputs.shape == (few, 3, 224, 224)
    assert sampled.storage is not None  # 38 MB: more than the limit of 9.6 MB
    result = pruner.finish()
    assert result.test.count == 200_000
    assert read >= 600_000  # an epoch of training, and the test set for both networks
    gc.collect()
    assert most <= 4


def test_a_large_dataset_is_read_only_at_the_rows_that_are_drawn() -> None:
    alive: WeakSet[Tensor] = WeakSet()
    most, rows = 0, list[int]()

    class Huge(Dataset[tuple[Tensor, int]]):
        def __len__(self) -> int:
            return 200_000

        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            nonlocal most
            rows.append(row)
            image = torch.full((3, 224, 224), row / 200_000)
            alive.add(image)
            most = max(most, len(alive))
            return image, row % 2

    found = sample(DataLoader(Huge(), 4), 48, name="train", seed=0, storage=Storage(8 << 20))
    assert found.inputs.shape == (48, 3, 224, 224)
    assert found.storage is not None
    assert len(rows) == len(set(rows)) == 48
    assert most <= 9  # two batches, and the example that is made
    drawn = (found.inputs[:, 0, 0, 0] * 200_000).round().long()
    assert torch.equal(drawn % 2, found.targets)
    assert int(drawn.max()) > 100_000  # drawn from everywhere


def test_every_example_of_a_stream_is_equally_likely_to_be_drawn() -> None:
    class Numbers(IterableDataset[tuple[Tensor, int]]):
        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            return ((torch.tensor([float(n)]), 0) for n in range(40))

    counts = torch.zeros(40)
    for seed in range(400):
        for size in (1 << 20, 40):  # in memory, and on disk
            found = sample(DataLoader(Numbers(), 7), 10, name="train", seed=seed, storage=Storage(size)).inputs.flatten().long()
            assert len(set(found.tolist())) == 10
        counts[found] += 1
    # 400 draws with probability 1/4: mean 100, standard deviation 8.7
    assert counts.min() > 65
    assert counts.max() < 135
