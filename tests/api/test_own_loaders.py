"""Loaders as users have them: streamed, without a length, augmented, of dicts; and their mistakes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_loaders import ONE_CUT, QUICK, RECIPE, build, digits, loader, loaders, pruned, right, trained
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import secateurs as sc
from secateurs.data import Examples
from secateurs.errors import DataError, InvalidInput


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Single examples, one after the other, without a length."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.examples.inputs, self.examples.targets, strict=True)


def test_an_iterable_dataset_without_length_is_taken() -> None:
    result = sc.prune(trained(), DataLoader(Stream(digits()[0]), 32), DataLoader(Stream(digits()[1]), 32), **QUICK)
    assert result.accuracy_before == pytest.approx(right(trained(), digits()[1]))


def test_lists_of_batches_are_taken() -> None:
    train, val = (list(loader(part)) for part in digits()[:2])
    assert sc.prune(trained(), train, val, **ONE_CUT).macs.removed > 0


def test_the_same_loaders_and_seed_give_the_same_network_though_they_shuffle() -> None:
    one, other = sc.prune(trained(), *loaders(), **QUICK), pruned()
    assert one.plan == other.plan
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


@pytest.mark.parametrize("owner", ["loader", "sampler"])
def test_a_loader_with_a_generator_of_its_own_is_resumed_to_the_same_network(owner: str, tmp_path: Path) -> None:
    def train() -> DataLoader[Any]:
        rows, own = TensorDataset(digits()[0].inputs, digits()[0].targets), torch.Generator().manual_seed(5)
        if owner == "loader":
            return DataLoader(rows, 64, shuffle=True, generator=own)
        return DataLoader(rows, 64, sampler=RandomSampler(rows, generator=own))

    recipe = replace(ONE_CUT["recipe"], confidence=0.0, retrain=sc.TrainSettings(epochs=3, batch=64, lr=0.01), keep_best=False)
    whole = sc.prune(trained(), train(), loaders()[1], recipe=recipe, progress=False)
    seen: list[str] = []

    def stop(event: Any) -> None:
        seen.append(event.phase)
        if seen.count("retrain") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sc.prune(trained(), train(), loaders()[1], recipe=recipe, folder=tmp_path / "run", callback=stop, progress=False)
    resumed = sc.resume(tmp_path / "run", build(), train()).finish()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Random transforms by Python's own random numbers; remembers what it gave."""

    def __init__(self, examples: Examples) -> None:
        self.examples, self.given = examples, list[float]()

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        scale = random.uniform(0.9, 1.1)
        self.given.append(scale)
        return self.examples.inputs[row] * scale, self.examples.targets[row]


def test_augmentation_stays_alive_in_training() -> None:
    data = Augmented(digits()[0])
    recipe = sc.Recipe.fast(
        max_drop=0.9, confidence=0, criterion="l1", sites=("0",), finetune=sc.TrainSettings(epochs=2, lr=0.01, batch=64)
    )
    sc.prune(trained(), DataLoader(data, 64), loaders()[1], recipe=recipe, progress=False)
    one, other = data.given[-2 * len(data) : -len(data)], data.given[-len(data) :]
    assert one != other  # the epochs saw different images


def test_a_run_with_random_transforms_is_resumed_from_what_it_drew(tmp_path: Path) -> None:
    train = DataLoader(Augmented(digits()[0]), 64)
    whole = sc.prune(trained(), train, loaders()[1], folder=tmp_path / "whole", **QUICK)
    pruner = sc.Pruner(trained(), train, loaders()[1], recipe=RECIPE, folder=tmp_path / "killed")
    next(iter(pruner))
    pruner.close()
    result = sc.resume(tmp_path / "killed", build()).finish()
    assert result.plan == whole.plan
    assert (tmp_path / "killed" / "pruned.safetensors").read_bytes() == (tmp_path / "whole" / "pruned.safetensors").read_bytes()


class Dicts(Dataset[dict[str, Any]]):
    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"pixels": self.examples.inputs[row], "label": self.examples.targets[row], "weight": torch.tensor(1.0)}


class Wrapped(nn.Module):
    """Gives a dict, as models of other libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = trained()

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(pixels)}


def test_batches_and_outputs_may_be_dicts() -> None:
    result = sc.prune(
        Wrapped(),
        *(DataLoader(Dicts(part), 64) for part in digits()[:2]),
        test=DataLoader(Dicts(digits()[2]), 64),
        forward=lambda model, batch: model(batch["pixels"])["logits"],
        loss=lambda outputs, batch: batch["weight"] * nn.functional.cross_entropy(outputs, batch["label"], reduction="none"),
        metric=lambda outputs, batch: outputs.argmax(1) == batch["label"],
        **QUICK,
    )
    assert result.accuracy_before == pytest.approx(right(trained(), digits()[2]))
    plain = sc.prune(trained(), *(loader(part) for part in digits()[:2]), **QUICK)
    assert result.macs.removed == pytest.approx(plain.macs.removed)


# ---- mistakes ------------------------------------------------------------------------------------------------------------


def generator() -> Iterator[tuple[Tensor, Tensor]]:
    yield from loader(digits()[0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda: (loaders()[0], None), DataError, "val: got None, wanted a validation loader"),
        (lambda: (generator(), loaders()[1]), DataError, "the train loader is a generator, which can be read only once"),
        (lambda: (3, loaders()[1]), DataError, "train: got int, wanted a loader"),
        (lambda: ([], loaders()[1]), DataError, "the train loader gave no batch"),
        (lambda: (DataLoader(Dicts(digits()[0]), 64), loaders()[1]), DataError, "a dict with 'pixels', 'label'.*give forward="),
        (lambda: (loaders()[0], loaders()[0]), DataError, "all 997 inputs of the validation set are in the train set too"),
        (lambda: (loaders()[0], [(torch.zeros(4, 1, 8, 8), torch.rand(4))]), InvalidInput, "targets are torch.float32"),
        (
            lambda: (loaders()[0], [(torch.zeros(4, 1, 8, 8), torch.tensor([1, 2, 3, 10]))]),
            DataError,
            "example 3 has the label 10",
        ),
        (lambda: (loaders()[0], [(torch.full((4, 1, 8, 8), torch.nan), torch.zeros(4).long())]), DataError, "holds NaN"),
    ],
)
def test_mistakes_with_loaders_are_named(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sc.prune(trained(), *arguments(), **QUICK)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_loaders_of_single_precision_serve_a_network_of_another_type(dtype: torch.dtype) -> None:
    model = trained().to(dtype)
    recipe = replace(ONE_CUT["recipe"], finetune=sc.TrainSettings(epochs=1, batch=64, lr=1e-4))
    result = sc.prune(model, *loaders(), test=loader(digits()[2]), recipe=recipe, progress=False)
    inputs, targets = digits()[2].inputs.to(dtype), digits()[2].targets
    with torch.no_grad():
        after = float((result.model.eval()(inputs).argmax(1) == targets).double().mean())
    assert result.accuracy_after == pytest.approx(after, abs=0.006 if dtype == torch.bfloat16 else 1e-9)
    assert next(result.model.parameters()).dtype == dtype


class Shard(Dataset[tuple[Tensor, Tensor]]):
    """Examples in a file that every worker opens for itself."""

    def __init__(self, examples: Examples) -> None:
        self.examples, self.open = examples, False

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        assert self.open
        return self.examples.inputs[row], self.examples.targets[row]  # type: ignore[index,return-value]


def open_shard(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.open = True  # type: ignore[union-attr]


def test_workers_begin_as_the_user_has_them_begin() -> None:
    train, val, _ = (DataLoader(Shard(part), batch_size=64, num_workers=1, worker_init_fn=open_shard) for part in digits())
    assert sc.prune(trained(), train, val, **ONE_CUT).macs.removed == sc.prune(trained(), *loaders(), **ONE_CUT).macs.removed
