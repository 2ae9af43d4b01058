"""Users' loaders: sets larger than memory, any iterable, disjoint sets, resumed runs, and mistakes with data."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from two_inputs import QUICK, RECIPE, TwoInputs, as_dict, loaders, trained

import secateurs as sc
from secateurs.data import drawn as drawn_module
from secateurs.data.drawn import open_loaders
from secateurs.data.storage import Storage
from secateurs.data.stream import sample, stream_of
from secateurs.errors import DataError, RunError, SecateursError

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
    for seed in range(150):
        for size in (1 << 20, 40):  # in memory, and on disk
            found = sample(DataLoader(Numbers(), 7), 10, name="train", seed=seed, storage=Storage(size)).inputs.flatten().long()
            assert len(set(found.tolist())) == 10
        counts[found] += 1
    # 150 draws with probability 1/4: mean 37.5, standard deviation 5.3
    assert counts.min() > 11
    assert counts.max() < 64


# ---- any iterable, disjoint sets -----------------------------------------------------------------------------------------


class Flat(nn.Module):
    """Four numbers to three classes, by eight filters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


def table(count: int, start: int = 0) -> TensorDataset:
    """Rows that differ from those of another start."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(start))
    return TensorDataset(x, x[:, :3].argmax(1))


class Factory:
    """An object that starts a new generator whenever it is read, as pipelines of shards do."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.passes = dataset, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        yield from DataLoader(self.dataset, 16)


def test_a_factory_of_generators_is_a_loader() -> None:
    train = Factory(table(100))
    result = sc.prune(Flat(), train, Factory(table(60, 1)), test=Factory(table(40, 2)), **QUICK)
    assert result.test.count == 40
    assert train.passes > 1


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """A dataset with random transforms."""

    def __init__(self, inner: TensorDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        x, y = self.inner[row]
        return x + random.uniform(0, 1e-3), y


def notes(train: Any, val: Any, test: Any = None) -> tuple[str, ...]:
    return open_loaders(Flat(), train, val, test).data.notes


def test_sets_that_share_examples_are_refused_or_pointed_out() -> None:
    everything = table(100)
    first, last = Subset(everything, range(60)), Subset(everything, range(50, 100))
    with pytest.raises(DataError, match="10 examples of one dataset are both in the train set and in the validation set"):
        notes(DataLoader(first, 8), DataLoader(last, 8))
    noisy = Noisy(everything)
    with pytest.raises(DataError, match="10 examples of one dataset are both in the train set and in the validation set"):
        notes(DataLoader(Subset(noisy, range(60)), 8), DataLoader(Subset(noisy, range(50, 100)), 8))
    with pytest.raises(DataError, match=r"all 50 inputs drawn from the test set are in the validation set too"):
        notes(table(30, 1), list(DataLoader(last, 8)), list(DataLoader(last, 50)))
    with pytest.raises(DataError, match=r"10 examples .* both in the validation set and in the test set"):
        notes(table(30, 1), DataLoader(first, 8), DataLoader(last, 8, shuffle=True))
    (shared,) = notes(list(DataLoader(first, 8)), list(DataLoader(last, 8)))
    assert shared == "10 of 50 validation inputs are also in the train set"
    assert notes(table(30, 1), table(30, 2), table(30, 3)) == ()
    assert notes(DataLoader(Subset(noisy, range(50)), 8), DataLoader(Subset(noisy, range(50, 100)), 8)) == ()
    (unsure,) = notes(DataLoader(Noisy(table(30, 1)), 8), table(30, 2))
    assert unsure.startswith(
        "that the train and validation sets share no examples cannot be checked: the train loader gives other"
    )


RESUMED = """
import random, sys
import torch
from torch.utils.data import DataLoader
sys.path[:0] = sys.argv[2:]
random.seed(7); torch.manual_seed(7)
import secateurs as sc
from test_loaders import Flat, Noisy, table
print(sc.resume(sys.argv[1], Flat(), DataLoader(Noisy(table(100)), 16, shuffle=True)).finish().plan.to_json())
"""


def test_a_run_with_random_transforms_is_resumed_in_another_process(tmp_path: Path) -> None:
    train, val = DataLoader(Noisy(table(100)), 16, shuffle=True), DataLoader(Noisy(table(60, 1)), 16)
    recipe = sc.Recipe.fast(
        max_drop=0.5, confidence=0, criterion="l1", round_to=1, finetune=sc.TrainSettings(epochs=1, lr=0.01)
    )
    options: dict[str, Any] = {"recipe": recipe, "folder": tmp_path / "run"}
    pruner = sc.Pruner(Flat(), train, val, **options)
    pruner.close()
    here = Path(__file__).parent
    program = [sys.executable, "-c", RESUMED, str(tmp_path / "run"), str(here), str(here.parent)]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    options["folder"] = tmp_path / "whole"
    assert done.stdout.strip() == sc.prune(Flat(), train, val, progress=False, **options).plan.to_json().strip()


# ---- mistakes ------------------------------------------------------------------------------------------------------------


def val_with(change: Any) -> Any:
    x, y = table(60, 1).tensors
    return [change(x, y)]


MISTAKES: dict[str, tuple[Any, str]] = {
    "float labels": (
        lambda x, y: (x, y.float()),
        r"validation set: its targets are torch.float32 .* wants class numbers.*loss=…",
    ),
    "one-hot": (
        lambda x, y: (x, torch.eye(3)[y]),
        r"validation set: .* accuracy wants .* look one-hot: give targets.argmax\(1\)",
    ),
    "whole one-hot": (lambda x, y: (x, torch.eye(3)[y].long()), r"shape \(60, 3\) for outputs of shape .* look one-hot"),
    "labels from 1": (lambda x, y: (x, y + 1), r"has the label 3, .* wanted labels from 0 to 2.*the first class is 0"),
    "NaN inputs": (lambda x, y: (x.where(y[:, None] > 0, torch.nan), y), r"the validation set .* holds NaN or infinite values"),
    "strings": (lambda x, y: (x, ["cat"] * 60), r"targets of the validation loader are a list of 60 \(str"),
    "fewer labels": (lambda x, y: (x, y[:5]), r"targets of shape \(5,\) for 60 inputs"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_with_labels_and_inputs_are_named(name: str) -> None:
    change, message = MISTAKES[name]
    with pytest.raises(SecateursError, match=message):
        sc.prune(Flat(), table(100), val_with(change), **QUICK)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_labels_of_any_whole_type_are_taken(dtype: torch.dtype) -> None:
    train = [(x, y.to(dtype)) for x, y in DataLoader(table(100), 16)]
    result = sc.prune(Flat(), train, val_with(lambda x, y: (x, y.to(dtype))), **QUICK)
    x, y = table(60, 1).tensors
    assert result.accuracy_before == pytest.approx(float((Flat()(x).argmax(1) == y).double().mean()))


def test_images_of_different_sizes_are_named() -> None:
    mixed = [(torch.zeros(4 + row // 30), 0) for row in range(40)]
    with pytest.raises(
        DataError, match=r"the train loader cannot make a batch of examples of different shapes .*Resize or pad"
    ):
        sc.prune(Flat(), DataLoader(mixed, 40), table(60, 1), **QUICK)  # type: ignore[arg-type]
    batches = [(torch.zeros(8, 4), torch.zeros(8).long()), (torch.zeros(8, 5), torch.zeros(8).long())]
    with pytest.raises(DataError, match=r"the train loader gives examples of different shapes \(\(4,\), then \(5,\)\)"):
        sc.prune(Flat(), batches, table(60, 1), **QUICK)


def test_a_loader_that_ends_after_one_pass_is_named() -> None:
    class Once:
        def __init__(self) -> None:
            self.batches = iter(list(DataLoader(table(100), 50)))

        def __iter__(self) -> Iterator[Any]:
            return self.batches

    with pytest.raises(DataError, match=r"the train loader gave no batch.*it can be read only once"):
        sc.prune(Flat(), Once(), table(60, 1), **QUICK)


def test_very_few_examples_are_enough_for_a_run_without_a_promise() -> None:
    result = sc.prune(Flat(), table(3), table(2, 1), max_drop=0.01, criterion="l1", progress=False)
    assert result.bound is None
    assert any("nothing is promised" in note for note in result.notes)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_shares_of_a_loader_are_its_batches_in_turn(known: bool, drop_last: bool) -> None:
    """Three workers: share k has the batches k, k + 3, …; of a sampler that is known it reads nothing else."""
    read: list[int] = []

    class Noted(Dataset[tuple[Tensor, int]]):
        def __len__(self) -> int:
            return 23

        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            read.append(row)
            return torch.tensor([float(row)]), row

    loader = DataLoader(Noted(), batch_size=4, drop_last=drop_last)
    stream = stream_of(loader if known else list(loader), "val")
    wholes = [batch.targets.tolist() for batch in stream.batches()]
    read.clear()
    shares = [[[row for part in parts for row in part.targets.tolist()] for parts in stream.share(k, 3, 3)] for k in range(3)]
    assert shares == [wholes[k::3] for k in range(3)]
    assert len(read) == (sum(map(len, wholes)) if known else 0)


def test_parts_of_training_batches_make_up_the_batches() -> None:
    """The order is drawn once for all workers; a batch of fewer rows than workers goes to all of them."""
    loader = DataLoader(TensorDataset(torch.arange(21.0)[:, None], torch.arange(21)), batch_size=10, shuffle=True)
    stream = stream_of(loader, "train")
    found = [stream.parts(rank, 3, torch.Generator().manual_seed(0)) for rank in range(3)]
    sizes = [wholes for _, wholes in filter(None, found)]
    assert sizes == [[10, 10, 1]] * 3
    rows = [[batch.targets.tolist() for batch in part.batches()] for part, _ in filter(None, found)]
    assert [len(part) for part in rows] == [3, 3, 3]
    assert [len(each[0]) for each in rows] == [4, 3, 3]
    assert rows[0][2] == rows[1][2] == rows[2][2]
    whole = [row for place in range(2) for each in rows for row in each[place]] + rows[0][2]
    assert sorted(whole) == list(range(21))
    assert whole[:10] != list(range(10))
    assert stream_of([(torch.zeros(2, 1), torch.zeros(2))], "train").parts(0, 2, torch.Generator()) is None


@pytest.mark.parametrize("shuffled", [False, True])
def test_parts_without_single_examples_have_one_of_the_batch_before(shuffled: bool) -> None:
    loader = DataLoader(TensorDataset(torch.arange(21.0)[:, None], torch.arange(21)), batch_size=10, shuffle=shuffled)
    stream = stream_of(loader, "train")
    found = [stream.parts(rank, 2, torch.Generator().manual_seed(0), singles=False) for rank in range(2)]
    assert [wholes for _, wholes in filter(None, found)] == [[10, 10, 2]] * 2
    rows = [[batch.targets.tolist() for batch in part.batches()] for part, _ in filter(None, found)]
    assert [[len(part) for part in each] for each in rows] == [[5, 5, 1]] * 2
    assert rows[0][2][0] == rows[1][1][-1], "the last example of the batch before"
    assert {row for each in rows for part in each for row in part} == set(range(21))
