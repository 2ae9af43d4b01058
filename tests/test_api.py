"""The one call as users make it: their loaders, batches, training loop, metric and criterion, and their mistakes."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import secateurs as sc
from secateurs import config, criteria
from secateurs.data import Data, Examples, load_digits
from secateurs.errors import DataError, InvalidInput, RunError, TrainingError
from secateurs.training import train_

RECIPE = sc.Recipe.best(max_drop=0.05, criterion="l1", repair="least-squares", repair_examples=128)
QUICK: dict[str, Any] = {"recipe": RECIPE, "progress": False}


@cache
def digits() -> tuple[Examples, Examples, Examples]:
    data = load_digits(search=400, test=400)
    return data.train.ready(), data.search.ready(), data.test_set.ready()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()),
        *(nn.Conv2d(12, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)),
    )


@cache
def weights() -> dict[str, Tensor]:
    model = build()
    train_(model, digits()[0], sc.TrainSettings(epochs=6, lr=0.1, batch=64))
    return model.state_dict()


def trained() -> nn.Module:
    model = build()
    model.load_state_dict(weights())
    return model


def loader(examples: Examples, *, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(examples.inputs, examples.targets), batch_size=64, shuffle=shuffle)


def right(model: nn.Module, examples: Examples) -> float:
    """Accuracy by hand."""
    with torch.no_grad():
        return float((model.eval()(examples.inputs).argmax(1) == examples.targets).double().mean())


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return loader(digits()[0], shuffle=True), loader(digits()[1])


# ---- what comes back -----------------------------------------------------------------------------------------------------


def test_one_call_gives_a_smaller_network_and_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    test = digits()[2]
    result = sc.prune(model, *loaders(), test=loader(test), max_drop=0.05)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert result.accuracy_before == pytest.approx(right(model, test))
    assert result.accuracy_after == pytest.approx(right(result.model, test))
    assert result.macs.after < result.macs.before
    assert sum(p.numel() for p in result.model.parameters()) == result.parameters.after
    assert result.bound is not None
    assert result.bound <= 0.05
    lines = str(result).splitlines()
    assert "at batch 64 in eager mode" in lines[0]  # the time comes first
    assert f"{100 * result.macs.removed:.1f} % of the MACs" in lines[1]
    assert f"{100 * result.accuracy_after:.2f} % on 400 held-out test examples" in lines[2]
    assert "At 95 % confidence the drop is at most" in lines[3]
    assert capsys.readouterr().err.count("filters; accuracy") == len(result.steps)  # progress without a terminal: a line a step
    again = sc.load(build(), result.save(tmp_path / "small.safetensors")).module
    assert right(again, test) == pytest.approx(result.accuracy_after)
    assert result.export(tmp_path / "small.pt2").exists()
    with pytest.raises(InvalidInput, match=r"'small.txt', wanted a name that ends in .onnx or .pt2"):
        result.export(tmp_path / "small.txt")


def test_no_line_is_shown_without_progress(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Any] = []
    sc.prune(trained(), *loaders(), callback=events.append, **QUICK)
    assert capsys.readouterr() == ("", "")
    assert {event.phase for event in events} >= {"curve", "divide"}


def test_without_a_test_set_the_validation_figures_are_named_as_such() -> None:
    result = sc.prune(trained(), *loaders(), **QUICK)
    assert result.accuracy_before == pytest.approx(right(trained(), digits()[1]))
    assert "on the validation set, which chose the cuts" in str(result)


def test_a_target_of_macs_is_met() -> None:
    result = sc.prune(trained(), *loaders(), macs=0.3, max_drop=0.9, progress=False)
    assert result.macs.removed >= 0.3


def test_too_few_validation_examples_promise_nothing_and_say_so() -> None:
    few = loader(digits()[1].take(torch.arange(40)))
    result = sc.prune(trained(), loaders()[0], few, max_drop=0.01, progress=False)
    assert result.bound is None
    assert "Nothing is promised" in str(result)
    assert any("cannot be certified at 95 % with 40 validation images" in note for note in result.notes)


def test_a_time_budget_takes_a_cheaper_recipe_and_says_so() -> None:
    pruner = sc.Pruner(trained(), *loaders(), max_drop=0.05)
    needed = pruner.estimate().seconds
    began = time.monotonic()
    pruner.finish()
    assert time.monotonic() - began < 5 * needed  # rather too long than too short, but for what other processes do meanwhile
    short = sc.Pruner(trained(), *loaders(), max_drop=0.05, time_budget=needed / 10)
    assert short.recipe.criterion == "fpgm"
    assert any("may take longer than the time budget" in note for note in short.notes)
    assert sc.Pruner(trained(), *loaders(), max_drop=0.05, time_budget=100 * needed).recipe.criterion == "portfolio"


def test_a_pruner_is_watched_step_by_step() -> None:
    pruner = sc.Pruner(trained(), *loaders(), recipe=RECIPE)
    sites = [step.site for step in pruner]
    assert sites == [step.site for step in pruner.finish().steps]


def test_modules_are_taken_where_graphs_are() -> None:
    example = digits()[0].inputs[:2]
    names = [site.name for site in sc.find_sites(trained(), example)]
    assert names == [site.name for site in sc.find_sites(sc.trace(trained(), example))]
    with pytest.raises(InvalidInput, match="Sequential without an example"):
        sc.find_sites(trained())


# ---- loaders -------------------------------------------------------------------------------------------------------------


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
    assert sc.prune(trained(), train, val, **QUICK).macs.removed > 0


def test_the_same_loaders_and_seed_give_the_same_network_though_they_shuffle() -> None:
    one, other = (sc.prune(trained(), *loaders(), **QUICK) for _ in range(2))
    assert one.plan == other.plan
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


def test_memory_does_not_depend_on_the_size_of_the_training_set() -> None:
    """200,000 images of 3 x 224 x 224 that exist only when they are asked for: at most the sample is alive at once."""
    alive: WeakSet[Tensor] = WeakSet()
    most = 0

    class Huge(Dataset[tuple[Tensor, int]]):
        def __len__(self) -> int:
            return 200_000

        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            nonlocal most
            image = torch.full((3, 224, 224), row / 200_000)
            alive.add(image)
            most = max(most, len(alive))
            return image, row % 2

    from secateurs.data.stream import BatchForm, sample

    found = sample(DataLoader(Huge(), 4), 16_384, name="train", seed=0, max_bytes=32 << 20, form=BatchForm())
    gc.collect()
    assert found.inputs.shape == (55, 3, 224, 224)  # 32 MiB hold 55 images of 602,112 bytes and their labels
    assert most <= 60
    rows = (found.inputs[:, 0, 0, 0] * 200_000).round().long()
    assert torch.equal(rows % 2, found.targets)
    assert len(set(rows.tolist())) == 55
    assert int(rows.max()) > 100_000  # drawn from everywhere


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
    recipe = sc.Recipe(
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


# ---- their training, metric and criterion --------------------------------------------------------------------------------


def my_training(model: nn.Module) -> None:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for inputs, targets in loader(digits()[0]):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimiser.step()


def test_their_training_runs_after_the_cuts_and_its_weights_stay() -> None:
    calls: list[int] = []

    def finetune(model: nn.Module, step: int) -> None:
        calls.append(step)
        my_training(model)

    alone = sc.prune(trained(), *loaders(), **QUICK)
    result = sc.prune(trained(), *loaders(), finetune=finetune, **QUICK)
    assert len(calls) == 1  # all cuts are made together
    assert calls[0] == len(result.steps)
    assert result.steps[-1].accuracy == pytest.approx(right(result.model, digits()[1]))
    assert not all(torch.equal(a, b) for a, b in zip(alone.model.parameters(), result.model.parameters(), strict=False))


def test_training_that_costs_more_than_allowed_is_rolled_back() -> None:
    def ruin(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

    result = sc.prune(trained(), *loaders(), finetune=ruin, recipe=replace(RECIPE, confidence=0.0), progress=False)
    assert result.macs.removed > 0
    assert result.search.before - result.search.after <= 0.05 + 1e-9


def last(model: nn.Module) -> Any:
    return model.get_submodule("8")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: model.get_submodule("0").weight.data.fill_(torch.nan), "left NaN or infinite values in '0.weight'"),
        (
            lambda model: setattr(model.get_submodule("8"), "weight", nn.Parameter(torch.zeros(3, 3))),
            "changed the parameters 8.weight",
        ),
    ],
)
def test_training_that_spoils_the_network_is_an_error_and_the_run_can_be_resumed(
    spoil: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=message):
        sc.prune(trained(), *loaders(), finetune=spoil, folder=tmp_path / "run", **QUICK)
    result = sc.resume(tmp_path / "run", build(), finetune=my_training).finish()
    assert right(result.model, digits()[1]) > 0.9


def test_an_error_in_their_training_is_theirs_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    def out_of_memory(model: nn.Module) -> None:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        sc.prune(trained(), *loaders(), finetune=out_of_memory, folder=tmp_path / "run", **QUICK)
    whole = sc.prune(trained(), *loaders(), finetune=my_training, **QUICK)
    assert sc.resume(tmp_path / "run", build(), finetune=my_training).finish().plan == whole.plan


def macro_recall(model: nn.Module) -> float:
    """Of the whole set: no mean of examples."""
    with torch.no_grad():
        inputs, targets = digits()[1].inputs, digits()[1].targets
        answers = model(inputs).argmax(1)
    return float(torch.stack([(answers[targets == k] == k).float().mean() for k in range(10)]).mean())


def test_their_metric_of_the_whole_set_decides() -> None:
    result = sc.prune(trained(), *loaders(), evaluate=macro_recall, **QUICK)
    assert result.search.before == pytest.approx(macro_recall(trained().eval()))
    assert result.search.after == pytest.approx(macro_recall(result.model.eval()))
    assert result.search.before - result.search.after <= 0.05 + 1e-9
    assert result.metric == "macro_recall"
    assert "Nothing is promised" in str(result)
    sequential = sc.Recipe(confidence=0, criterion="l1", max_drop=0.05)
    other = sc.prune(trained(), *loaders(), evaluate=macro_recall, recipe=sequential, progress=False)
    assert other.search.before - other.search.after <= 0.05 + 1e-9


def test_a_metric_of_the_whole_set_may_have_any_unit_and_is_needed_again_to_resume(tmp_path: Path) -> None:
    def ten_times(model: nn.Module) -> float:
        return 10 * macro_recall(model)

    with pytest.raises(InvalidInput, match="evaluate measures a set of its own"):
        sc.prune(trained(), *loaders(), evaluate=ten_times, test=loaders()[1], **QUICK)
    pruner = sc.Pruner(trained(), *loaders(), evaluate=ten_times, recipe=replace(RECIPE, max_drop=0.5), folder=tmp_path / "run")
    next(iter(pruner))
    pruner.close()
    with pytest.raises(RunError, match=r"another metric \(ten_times, now accuracy\)"):
        sc.resume(tmp_path / "run", build())
    result = sc.resume(tmp_path / "run", build(), evaluate=ten_times).finish()
    assert result.search.before > 9
    assert "ten_times" in (tmp_path / "run" / "report.html").read_text()


def test_a_metric_that_is_no_number_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"evaluate\(model\) returned a dict, wanted one number"):
        sc.prune(trained(), *loaders(), evaluate=lambda model: {"map": 0.3}, **QUICK)


@pytest.fixture
def own_criteria() -> Iterator[None]:
    """Criteria that a test registers are gone after it."""
    tables: list[Any] = [criteria._REGISTRY, criteria._USERS]
    known, names = [dict(table) for table in tables], list(config.CRITERIA)
    yield
    for table, before in zip(tables, known, strict=True):
        table.clear()
        table.update(before)
    config.CRITERIA[:] = names


@pytest.mark.usefixtures("own_criteria")
def test_their_criterion_ranks() -> None:
    def last_first(graph: sc.Graph, site: sc.Site, data: Examples) -> Tensor:
        assert len(data) > 0
        return -torch.arange(site.channels)

    recipe = sc.Recipe(confidence=0, max_drop=0.9, largest_share=0.5, sites=("0",))
    result = sc.prune(trained(), *loaders(), recipe=recipe, criterion=last_first, progress=False)
    assert result.steps[0].criterion == "last_first"
    assert result.steps[0].removed == (11, 10, 9, 8, 7, 6)

    def wrong(graph: sc.Graph, site: sc.Site, data: Examples) -> Tensor:
        return torch.zeros(3)

    with pytest.raises(InvalidInput, match=r"criterion 'wrong' gave \(3,\) for site '0': wanted a tensor \(12,\)"):
        sc.prune(trained(), *loaders(), recipe=recipe, criterion=wrong, progress=False)


@pytest.mark.parametrize("by", ["pattern", "module", "type"])
def test_ignored_layers_keep_their_filters(by: str) -> None:
    model = trained()
    ignore: Any = {"pattern": "0", "module": model[0], "type": nn.Conv2d}[by]  # type: ignore[index]
    if by == "type":
        with pytest.raises(InvalidInput, match="no site is left"):
            sc.prune(model, *loaders(), ignore=[ignore], **QUICK)
        return
    result = sc.prune(model, *loaders(), ignore=[ignore], **QUICK)
    assert result.model.get_submodule("0").weight.shape[0] == 12
    assert result.model.get_submodule("3").weight.shape[0] < 16


# ---- mistakes ------------------------------------------------------------------------------------------------------------


def test_wrappers_of_torch_are_taken_off() -> None:
    assert sc.prune(nn.DataParallel(trained()), *loaders(), **QUICK).macs.removed > 0


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


def test_other_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"max_drop=1: wanted a fraction below 1: 0.01 is one point"):
        sc.prune(trained(), *loaders(), max_drop=1)
    with pytest.raises(InvalidInput, match=r"model: got OrderedDict, wanted an nn\.Module"):
        sc.prune(trained().state_dict(), *loaders())  # type: ignore[arg-type]
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(RunError, match=r"holds other files \(thesis.tex\). Choose an empty or a new folder"):
        sc.prune(trained(), *loaders(), folder=tmp_path, **QUICK)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(InvalidInput, match=r"forward.* did not call the model"):
        sc.prune(trained(), *loaders(), forward=lambda model, batch: batch[0], **QUICK)
    data = Data("mine", *digits())
    with pytest.raises(InvalidInput, match="give no val, test or forward"):
        sc.prune(trained(), data, loaders()[1])


def test_an_untrained_network_is_pointed_out() -> None:
    result = sc.prune(build(), *loaders(), **QUICK)
    assert any("it seems untrained" in note for note in result.notes)
