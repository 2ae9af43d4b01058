"""Data sets: contents against definitions and public facts; splits as laws; damage as clear errors."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler, TensorDataset

from secateurs.data import Data, Examples, Scaling, cifar10, from_loaders, load, load_folder, split, subset
from secateurs.data.dataset import derive, generator_for, seeded
from secateurs.data.loaders import materialise
from secateurs.data.splits import stratified_order
from secateurs.errors import DataError, InvalidInput


def numbered(count: int, classes: int = 3, seed: int = 0) -> Examples:
    """Examples whose input is their own number."""
    labels = torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))
    return Examples(torch.arange(count).float()[:, None], labels)


def numbers(examples: Examples) -> list[int]:
    return [int(value) for value in examples.inputs[:, 0]]


# the record


def test_scaling_is_the_usual_normalisation() -> None:
    stored = torch.tensor([[[[0]], [[255]]]], dtype=torch.uint8)
    examples = Examples(stored, torch.tensor([0]), Scaling(255.0, (0.5, 0.25), (0.5, 0.125)))
    expected = torch.tensor([[[[-1.0]], [[6.0]]]])  # (0 - 0.5) / 0.5 and (1 - 0.25) / 0.125
    torch.testing.assert_close(examples.batch(slice(0, 1)).inputs, expected)
    torch.testing.assert_close(examples.ready(torch.float64).inputs, expected.double())
    assert stored.flatten().tolist() == [0, 255], "the stored pixels must not change"


def test_batches_are_all_examples_in_order() -> None:
    parts = list(numbered(10).batches(4))
    assert [len(part.inputs) for part in parts] == [4, 4, 2]
    assert torch.cat([part.inputs for part in parts]).flatten().tolist() == list(range(10))


def test_targets_may_be_several_tensors() -> None:
    examples = Examples(torch.zeros(3, 1), {"b": torch.arange(3), "a": torch.ones(3, 2)})
    taken = examples.take(torch.tensor([2, 0])).targets
    assert isinstance(taken, dict)
    assert taken["b"].tolist() == [2, 0]
    pair = Examples(torch.zeros(3, 1), (torch.arange(3), torch.ones(3, 2))).batch(slice(1, 3)).targets
    assert isinstance(pair, tuple)
    assert pair[0].tolist() == [1, 2]


def test_lengths_must_agree() -> None:
    with pytest.raises(InvalidInput, match=r"targets of shape \(2,\) for 3 inputs"):
        Examples(torch.zeros(3, 1), torch.zeros(2))
    with pytest.raises(InvalidInput, match="2 means"):
        Examples(torch.zeros(3, 3, 2, 2), torch.zeros(3), Scaling(1.0, (0.0, 0.0), (1.0, 1.0)))


def test_digest_sees_every_change() -> None:
    base = Examples(torch.arange(6, dtype=torch.uint8).reshape(2, 3), torch.tensor([0, 1]))
    others = [
        Examples(base.inputs.flip(0), base.targets),
        Examples(base.inputs, torch.tensor([1, 0])),
        Examples(base.inputs.reshape(2, 3, 1), base.targets),
        Examples(base.inputs.float(), base.targets),
        Examples(base.inputs, base.targets, Scaling(1.0, (0.0,), (1.0,))),
        Examples(base.inputs, (torch.tensor([0, 1]), torch.tensor([0, 1]))),
    ]
    assert len({examples.digest() for examples in [base, *others]}) == len(others) + 1
    assert base.digest() == Examples(base.inputs.clone(), torch.tensor([0, 1])).digest()


# splits


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 5), st.data())
def test_prefixes_of_a_stratified_order_hold_classes_in_their_shares(counts: list[int], seed: int, draw: st.DataObject) -> None:
    labels = torch.repeat_interleave(torch.arange(len(counts)) * 7, torch.tensor(counts))
    total = len(labels)
    order = stratified_order(labels, generator_for(seed))
    assert sorted(order.tolist()) == list(range(total))
    size = draw.draw(st.integers(0, total))
    for label, count in enumerate(counts):
        found = int((labels[order[:size]] == label * 7).sum())
        # each class is rounded at one common threshold, which the classes' roundings move by half an example each
        assert abs(found - size * count / total) <= 0.5 + count / total * len(counts) / 2 + 1e-9


@settings(deadline=None, max_examples=30)
@given(st.integers(10, 200), st.integers(0, 10), st.floats(0.05, 0.9))
def test_splits_are_disjoint_complete_and_reproducible(count: int, seed: int, share: float) -> None:
    first = max(1, min(count - 1, round(share * count)))
    examples = numbered(count)
    one, other = split(examples, (first, count - first), seed=seed)
    assert len(one) == first
    assert sorted(numbers(one) + numbers(other)) == list(range(count))
    assert one.ids is not None
    assert numbers(one) == one.ids.tolist(), "ids are row numbers of the source"
    again = split(examples, (first, count - first), seed=seed)[0]
    assert numbers(again) == numbers(one)


def test_another_seed_splits_otherwise() -> None:
    one, other = (split(numbered(100), (50, 50), seed=seed)[0] for seed in (0, 1))
    assert numbers(one) != numbers(other)


def test_subsets_of_one_seed_are_nested() -> None:
    examples = numbered(90)
    small, large = subset(examples, 20, seed=3), subset(examples, 50, seed=3)
    assert set(numbers(small)) < set(numbers(large))
    assert numbers(small) == sorted(numbers(small))
    with pytest.raises(InvalidInput, match="wanted 1 to 90"):
        subset(examples, 91, seed=0)


def test_a_subset_need_not_be_stratified() -> None:
    examples = Examples(torch.arange(100).float()[:, None], torch.arange(100) % 2)
    shares = [int(subset(examples, 50, seed=seed, stratified=False).targets.sum()) for seed in range(20)]
    assert set(shares) != {25}
    assert all(subset(examples, 50, seed=seed).targets.sum() == 25 for seed in range(20))


def test_regression_targets_are_split_at_random() -> None:
    examples = Examples(torch.arange(40).float()[:, None], torch.linspace(0, 1, 40))
    one, other = split(examples, (30, 10), seed=0)
    assert sorted(numbers(one) + numbers(other)) == list(range(40))


def test_overlapping_sets_are_an_error() -> None:
    one, other = split(numbered(20), (10, 10), seed=0)
    with pytest.raises(DataError, match=r"10 examples of 'mine' are both in train .* and in test"):
        Data("mine", one, other, one)
    with pytest.raises(DataError, match="the validation set of 'mine' is empty"):
        Data("mine", one, numbered(0), other)


def test_the_record_of_data_is_json_and_differs_between_splits() -> None:
    records = [load("digits", seed=seed).record() for seed in (0, 0, 1)]
    assert json.loads(json.dumps(records[0])) == records[1]
    assert records[0]["sha256"] == load("digits").digest()
    assert records[0]["sha256"] != records[2]["sha256"]


# random numbers


def test_seeded_restores_the_users_random_state_even_after_an_error() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with pytest.raises(ZeroDivisionError), seeded(1, "here"):
        torch.rand(10).div_(1 // 0)
    assert torch.equal(torch.rand(3), expected)


def test_every_purpose_has_random_numbers_of_its_own() -> None:
    assert len({derive(0), derive(1), derive(0, "a"), derive(0, "b"), derive(0, "a", 1), derive(0, "a", 2)}) == 6
    with seeded(4, "x"):
        one = torch.rand(2)
    assert torch.equal(one, torch.rand(2, generator=generator_for(4, "x")))


# digits


def test_digits_are_the_public_set() -> None:
    digits = load("digits")
    parts = digits.splits().values()
    assert [len(part) for part in parts] == [1197, 300, 300]
    images = torch.cat([part.inputs for part in parts])
    labels = torch.cat([part.targets for part in parts])
    # class counts of the UCI documentation (optdigits.names, testing set)
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.uint8
    assert int(images.max()) == 16
    scaled = torch.cat([part.ready().inputs for part in parts])
    assert abs(float(scaled.mean())) < 0.01
    assert abs(float(scaled.std()) - 1) < 0.01


def test_the_first_digit_is_the_zero_of_the_documentation() -> None:
    digits = load("digits")
    everything = torch.cat([part.inputs for part in digits.splits().values()])
    ids = torch.cat([part.ids for part in digits.splits().values()])
    first = everything[ids == 0][0, 0]
    # the 8x8 array printed in scikit-learn's and UCI's introductions
    assert first[0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert first[7].tolist() == [0, 0, 6, 13, 10, 0, 0, 0]


def test_digits_keep_classes_in_their_shares() -> None:
    labels = load("digits", seed=4).test.targets
    assert isinstance(labels, torch.Tensor)
    assert all(abs(int(count) - 30) <= 2 for count in labels.bincount())
    with pytest.raises(InvalidInput, match="fewer than 1797"):
        load("digits", search=1000, test=800)


# CIFAR-10


@pytest.fixture
def tiny_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Six files of ten images each in the place of the real ones, in a cache folder of their own."""
    monkeypatch.setenv("SECATEURS_HOME", str(tmp_path / "home"))
    generator = np.random.default_rng(0)
    files = {}
    for name in cifar10.MD5:
        rows = generator.integers(0, 256, (10, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(10)
        files[name] = rows.tobytes()
    for name, content in files.items():
        monkeypatch.setitem(cifar10.MD5, name, hashlib.md5(content).hexdigest())
    return files


def make_archive(path: Path, files: dict[str, bytes], extra: list[tarfile.TarInfo] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in extra or []:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
        for name, content in files.items():
            member = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def serve(monkeypatch: pytest.MonkeyPatch, archive: Path) -> list[str]:
    """Let downloads return `archive`; returns the list of requested addresses."""
    asked: list[str] = []

    def fetch(url: str, path: Path, **options: object) -> Path:
        asked.append(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(archive.read_bytes())
        return path

    monkeypatch.setattr(cifar10, "fetch", fetch)
    return asked


def test_cifar_is_downloaded_once_and_read_as_documented(
    tiny_cifar: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = serve(monkeypatch, make_archive(tmp_path / "a.tar.gz", tiny_cifar))
    loaded = load("cifar10", split="paper", seed=1)
    load("cifar10")
    assert asked == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]
    assert [path.name for path in (tmp_path / "home/data").iterdir()] == ["cifar-10-batches-bin"], "nothing else is left"
    assert [len(part) for part in loaded.splits().values()] == [45, 5, 10]
    # row 3 of the third file: one label byte, then 1,024 red, green and blue bytes, row by row
    row = np.frombuffer(tiny_cifar["data_batch_3.bin"], np.uint8).reshape(10, 3073)[3]
    everything = {int(number): index for index, number in enumerate(loaded.train.ids)}
    where = everything.get(23)
    examples = loaded.train if where is not None else loaded.search
    place = where if where is not None else int((loaded.search.ids == 23).nonzero())
    assert np.array_equal(examples.inputs[place].numpy(), row[1:].reshape(3, 32, 32))
    assert int(examples.targets[place]) == row[0] == 3


def test_cifar_public_split_halves_the_test_images(
    tiny_cifar: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, make_archive(tmp_path / "a.tar.gz", tiny_cifar))
    public = load("cifar10", split="public")
    assert public.train.ids is not None
    assert public.search.ids is not None
    assert public.test.ids is not None
    assert public.train.ids.tolist() == list(range(50))
    assert sorted(public.search.ids.tolist() + public.test.ids.tolist()) == list(range(50, 60))
    assert "halves of the official test images" in public.notes[0]
    with pytest.raises(InvalidInput, match=r"no split 'papper'. Did you mean 'paper'"):
        load("cifar10", split="papper")


def test_cifar_trusts_no_path_in_an_archive(tiny_cifar: dict[str, bytes], tmp_path: Path) -> None:
    outside, link = tarfile.TarInfo("../../escaped.bin"), tarfile.TarInfo(f"{cifar10.FOLDER}/data_batch_1.bin")
    outside.size = 5
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    absolute = tarfile.TarInfo(str(tmp_path / "absolute.bin"))
    absolute.size = 5
    archive = make_archive(tmp_path / "a.tar.gz", tiny_cifar, [outside, link, absolute])
    folder = tmp_path / "deep/er/cifar"
    cifar10.unpack(archive, folder)
    assert {path.name for path in folder.iterdir()} == set(cifar10.MD5)
    assert not (folder / "data_batch_1.bin").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar.gz", "deep"}
    assert [path.name for path in folder.parent.iterdir()] == ["cifar"]


def test_a_damaged_archive_leaves_nothing(tiny_cifar: dict[str, bytes], tmp_path: Path) -> None:
    whole = make_archive(tmp_path / "a.tar.gz", tiny_cifar).read_bytes()
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cannot unpack .*cut\.tar\.gz"):
        cifar10.unpack(cut, tmp_path / "data/cifar")
    incomplete = make_archive(tmp_path / "b.tar.gz", dict(list(tiny_cifar.items())[:-1]))
    with pytest.raises(DataError, match=r"does not hold test_batch\.bin"):
        cifar10.unpack(incomplete, tmp_path / "data/cifar")
    changed = make_archive(tmp_path / "c.tar.gz", {**tiny_cifar, "data_batch_2.bin": b"other"})
    with pytest.raises(DataError, match=r"data_batch_2\.bin is damaged"):
        cifar10.unpack(changed, tmp_path / "data/cifar")
    assert not (tmp_path / "data").exists()


def test_half_a_folder_is_replaced_and_a_damaged_file_is_named(
    tiny_cifar: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, make_archive(tmp_path / "a.tar.gz", tiny_cifar))
    folder = cifar10.cifar10_folder()
    folder.mkdir(parents=True)
    (folder / "data_batch_1.bin").write_bytes(b"half")
    with pytest.raises(DataError, match=r"no data_batch_2\.bin. Get it with: secateurs data get cifar10"):
        load("cifar10", download=False)
    load("cifar10")
    (folder / "data_batch_4.bin").write_bytes(tiny_cifar["data_batch_4.bin"][:-1])
    with pytest.raises(DataError, match=r"data_batch_4\.bin is damaged: MD5"):
        load("cifar10")


@pytest.mark.realdata
def test_real_cifar() -> None:
    paper, public = load("cifar10", download=False), load("cifar10", split="public", download=False)
    assert [len(part) for part in paper.splits().values()] == [45_000, 5_000, 10_000]
    assert [len(part) for part in public.splits().values()] == [50_000, 5_000, 5_000]
    for part, each in ((paper.train, 4500), (paper.search, 500), (paper.test, 1000), (public.test, 500)):
        assert part.targets.bincount().tolist() == [each] * 10
    # means of all training pixels as published everywhere for CIFAR-10: 0.4914, 0.4822, 0.4465
    means = public.train.inputs.double().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]).double(), rtol=0, atol=1e-4)


# image folders


def write_images(root: Path, counts: dict[str, int], size: tuple[int, int] = (6, 4), start: int = 0) -> None:
    for label, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            shade = (start + 40 * label + number) % 256
            Image.new("RGB", size, (shade, 0, 255)).save(root / name / f"{number:03}.png")


def test_a_folder_of_classes(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 20, "ape": 10})
    (tmp_path / "cat/notes.txt").write_text("no image")
    loaded = load(f"folder:{tmp_path}", seed=3)
    assert loaded.classes == ("ape", "cat")
    assert [len(part) for part in loaded.splits().values()] == [24, 3, 3]
    assert loaded.train.inputs.shape == (24, 3, 4, 6)
    # an ape's red is 40 and more, a cat's less; green 0, blue 255 in every pixel
    red, green, blue = loaded.train.inputs.unbind(1)
    assert torch.equal(red[:, 0, 0] >= 40, loaded.train.targets == 0)
    assert int(green.max()) == 0
    assert int(blue.min()) == 255
    scaled = loaded.train.batch(slice(0, 1)).inputs
    torch.testing.assert_close(scaled[0, 2, 0, 0], torch.tensor((1 - 0.406) / 0.225))


def test_folders_for_train_val_and_test(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"a": 6, "b": 6})
    write_images(tmp_path / "val", {"a": 2, "b": 3}, start=100)
    write_images(tmp_path / "test", {"a": 2, "b": 2}, start=180)
    assert [len(part) for part in load_folder(tmp_path).splits().values()] == [12, 5, 4]


def test_sets_without_a_folder_are_cut_off(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"a": 20, "b": 20})
    write_images(tmp_path / "test", {"a": 2, "b": 2}, start=100)
    assert [len(part) for part in load_folder(tmp_path, search_share=0.25).splits().values()] == [30, 10, 4]
    (tmp_path / "test").rename(tmp_path / "val")
    assert [len(part) for part in load_folder(tmp_path).splits().values()] == [40, 2, 2]


def test_equal_images_in_two_sets_are_reported(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"a": 5})
    write_images(tmp_path / "val", {"a": 2}, start=100)
    write_images(tmp_path / "test", {"a": 2}, start=4)  # shades 4 and 5; 4 is in train
    assert load_folder(tmp_path).notes == ("1 of 2 test inputs are also in train",)
    write_images(tmp_path / "test", {"a": 2}, start=0)
    with pytest.raises(DataError, match="all 2 inputs of the test set are in the train set too"):
        load_folder(tmp_path)


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    write_images(tmp_path, {"a": 4})
    Image.new("RGB", (9, 9)).save(tmp_path / "a/large.png")
    with pytest.raises(DataError, match=r"large\.png is 9×9 pixels, .* is 6×4: give size="):
        load_folder(tmp_path)
    assert load_folder(tmp_path, size=5, channels=1).train.inputs.shape == (3, 1, 5, 5)


def test_size_takes_the_middle_square(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    striped = np.zeros((4, 8, 3), np.uint8)
    striped[:, 2:6] = 200
    for number in range(3):
        Image.fromarray(striped + np.uint8(number)).save(tmp_path / f"a/{number}.png")
    assert load_folder(tmp_path, size=4).train.inputs.min() >= 200


def test_clear_errors_for_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no folder"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no class folders"):
        load_folder(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="no images in"):
        load_folder(tmp_path)
    (tmp_path / "a/broken.png").write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"cannot read the image .*broken\.png"):
        load_folder(tmp_path)
    (tmp_path / "a/broken.png").unlink()
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "a/deep.png")
    with pytest.raises(DataError, match=r"deep\.png has more than 8 bits"):
        load_folder(tmp_path)
    with pytest.raises(InvalidInput, match="channels=2"):
        load_folder(tmp_path, channels=2)


def test_a_class_that_training_lacks_is_an_error(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"a": 3})
    write_images(tmp_path / "test", {"a": 1, "z": 1})
    with pytest.raises(DataError, match="has the class 'z', which the training images do not"):
        load_folder(tmp_path)


def test_a_missing_pillow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path, {"a": 3})
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install secateurs\[images\]"):
        load_folder(tmp_path)


# what a user has


def table(count: int, start: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(start, start + count).float()[:, None], torch.arange(count) % 2)


def test_loaders_are_read_in_order_whatever_their_shuffling() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    train, test = DataLoader(table(40), 8, shuffle=True, drop_last=True), DataLoader(table(10, 100), 4)
    loaded = from_loaders(train, test=test)
    assert torch.equal(torch.get_rng_state(), state), "the user's random state is untouched"
    assert [len(part) for part in loaded.splits().values()] == [36, 4, 10]
    assert sorted(numbers(loaded.train) + numbers(loaded.search)) == list(range(40))
    assert numbers(loaded.test) == list(range(100, 110))
    assert loaded.digest() == from_loaders(train, test=test).digest()


def test_three_loaders_are_taken_as_they_are() -> None:
    loaded = from_loaders(table(8), table(4, 20), table(5, 50), classes=("even", "odd"))
    assert [numbers(part) for part in loaded.splits().values()] == [
        list(range(8)),
        list(range(20, 24)),
        list(range(50, 55)),
    ]


def test_subsets_of_one_dataset_are_compared_by_rows() -> None:
    everything = table(20)
    first, second = Subset(everything, range(12)), Subset(everything, range(12, 20))
    assert len(from_loaders(first, test=second).test) == 8
    inner = Subset(Subset(everything, range(10, 20)), [0, 1])  # rows 10 and 11 of the whole
    with pytest.raises(DataError, match="2 examples of 'loaders' are both in train"):
        from_loaders(first, second, DataLoader(inner))
    with pytest.raises(DataError, match=r"both in validation .* and in test"):
        from_loaders(table(4, 90), DataLoader(everything, 4, shuffle=True), everything)


def test_random_subset_samplers_are_subsets() -> None:
    everything = table(20)
    train = DataLoader(everything, 4, sampler=SubsetRandomSampler(range(10)))
    test = DataLoader(everything, 4, sampler=SubsetRandomSampler(range(10, 20)))
    loaded = from_loaders(train, test=test)
    assert numbers(loaded.test) == list(range(10, 20))
    alone = from_loaders(train, test)
    assert numbers(alone.search) == list(range(10, 20))
    assert alone.test is None


def test_equal_contents_without_rows_are_noticed() -> None:
    x, y = torch.arange(10).float()[:, None], torch.zeros(10).long()
    with pytest.raises(DataError, match=r"all 10 inputs of the (validation|test) set are in the (validation|test) set too"):
        from_loaders((x + 20, y), (x.clone(), y), (x, y))
    halves = from_loaders((torch.zeros(20, 1), y.repeat(2)), test=(x + 1, y))
    assert halves.notes == ("2 of 2 validation inputs are also in train",), "what we cut off ourselves is no copy"
    loaded = from_loaders((x + 20, y), (x, y), (x + 25, y))
    assert loaded.notes == ("5 of 10 test inputs are also in train",)


def test_random_transforms_are_frozen_by_the_seed() -> None:
    class Noisy(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
            return torch.rand(2) + row, row % 2

    one, again, other = (from_loaders(Noisy(), test=table(4, 90), val_share=0.2, seed=seed) for seed in (0, 0, 1))
    assert one.digest() == again.digest()
    assert one.digest() != other.digest()


def test_iterables_and_structured_targets() -> None:
    class Stream(IterableDataset[tuple[torch.Tensor, dict[str, float]]]):
        def __iter__(self):
            for number in range(6):
                yield torch.tensor([float(number)]), {"y": 2.0 * number, "x": -1.0 * number}

    examples = materialise(DataLoader(Stream(), 4))
    assert isinstance(examples.targets, dict)
    assert examples.targets["y"].tolist() == [0, 2, 4, 6, 8, 10]
    assert examples.targets["x"].tolist() == [0, -1, -2, -3, -4, -5]


def test_batches_of_another_form_are_described() -> None:
    dicts = DataLoader([{"image": torch.zeros(1), "label": 0}], 1)
    with pytest.raises(DataError, match="a batch of the train loader is a dict with 'image', 'label'"):
        from_loaders(dicts, table(3))
    words = DataLoader([(torch.zeros(1), "cat")], 1)
    with pytest.raises(DataError, match=r"targets of the test loader are a tuple of 1 \(str\)"):
        from_loaders(table(10), test=words)


# by name


def test_unknown_names_and_options_are_errors_with_suggestions() -> None:
    with pytest.raises(InvalidInput, match=r"no data set 'digit'. Did you mean 'digits'"):
        load("digit")
    with pytest.raises(InvalidInput, match=r"'digits' has no option 'sead'. Did you mean 'seed'"):
        load("digits", sead=1)
    with pytest.raises(InvalidInput, match=r"data set 'no.such.module:function': no module 'no' in"):
        load("no.such.module:function")


def test_a_users_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_test.py").write_text(
        "import torch\n"
        "def pair(shift=0):\n"
        "    x = torch.arange(20.)[:, None] + shift\n"
        "    return (x[:15], torch.arange(15) % 2), (x[15:], torch.arange(5) % 2)\n"
        "def three():\n"
        "    x = torch.arange(20.)[:, None]\n"
        "    return [(x[a:b], torch.zeros(b - a)) for a, b in ((0, 10), (10, 14), (14, 20))]\n"
        "def nothing():\n"
        "    return 3\n"
        "def absent(path='here'):\n"
        "    raise FileNotFoundError(path)\n"
        "def leaves():\n"
        "    raise SystemExit(2)\n"
    )
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    shifted = load("mine_for_test:pair", shift=100)
    assert numbers(shifted.search) == [115, 116, 117, 118, 119]
    assert shifted.test is None
    assert [len(part) for part in load("mine_for_test:three").splits().values()] == [10, 4, 6]
    assert sys.path == path
    with pytest.raises(InvalidInput, match="mine_for_test:nothing returned a int"):
        load("mine_for_test:nothing")
    with pytest.raises(
        DataError, match=r"'mine_for_test:absent' failed with options {'path': 'there'}: FileNotFoundError: there"
    ):
        load("mine_for_test:absent", path="there")
    with pytest.raises(DataError, match="SystemExit: 2"):
        load("mine_for_test:leaves")
    with pytest.raises(InvalidInput, match=r"has no 'pear'. Did you mean 'pair'"):
        load("mine_for_test:pear")


def test_streamed_image_folders_have_the_preprocessing_of_imagenet(tmp_path: Path) -> None:
    """By hand: of black and white halves of 20×10 pixels, with a shorter edge of 10 as it is, the centre has both."""
    from secateurs.data.folder import PREPROCESSING, ImageFolder, central_part, folder_loaders

    halves = np.zeros((10, 20, 3), np.uint8)
    halves[:, 10:] = 255
    image = Image.fromarray(halves)
    assert np.asarray(central_part(image, 10, 4))[:, :, 0].tolist() == [[0, 0, 255, 255]] * 4
    assert central_part(image, 40, 32).size == (32, 32)
    assert PREPROCESSING["imagenet"] == (256, 224)
    for part, name in (("train", "a"), ("train", "b"), ("val", "a"), ("val", "b")):
        (tmp_path / part / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (300, 280), (255, 0, 0) if name == "a" else (0, 0, 255)).save(
                tmp_path / part / name / f"{number}.png"
            )
    train, val = folder_loaders(tmp_path, batch=4, processes=0)
    (inputs, labels), *_ = val
    assert inputs.shape == (4, 3, 224, 224)
    assert labels.tolist() == [0, 0, 0, 1]
    torch.testing.assert_close(inputs[0, :, 5, 5], torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]))
    assert sorted(label for _, labels in train for label in labels.tolist()) == [0, 0, 0, 1, 1, 1]
    with pytest.raises(InvalidInput, match=r"preprocessing='imagenett': unknown\. Did you mean 'imagenet'"):
        ImageFolder(tmp_path / "train", preprocessing="imagenett")


def test_images_decoded_by_other_processes_are_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(6):
            colours = np.random.default_rng(number).integers(0, 255, (6, 5, 3), np.uint8)
            Image.fromarray(colours + (name == "b")).save(tmp_path / name / f"{number}.png")
    one, two = (load_folder(tmp_path, processes=processes) for processes in (0, 2))
    assert one.digest() == two.digest()
