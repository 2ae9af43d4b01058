"""Mistakes of new users: every message says where, what it got, what it wanted and what to do; nothing is written by then.

Those with loaders and labels are in test_loaders.py.
"""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_loaders import ONE_CUT, RECIPE, build, digits, loader, loaders, right, trained
from torch import Tensor, nn

import secateurs as sc
from secateurs import api
from secateurs.config import GENTLE, criterion_names
from secateurs.data import Data, Examples
from secateurs.errors import SecateursError
from secateurs.pruning.estimate import estimate


def prune(**options: Any) -> sc.Result:
    return sc.prune(options.pop("model", None) or trained(), *loaders(), **{"progress": False, **options})


def broken_weights() -> nn.Module:
    model = trained()
    model.get_parameter("0.weight").data[0, 0, 0, 0] = torch.nan
    return model


def three_channels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


def one_output() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).float()


def named_layers() -> nn.Module:
    return nn.Sequential(OrderedDict(flat=nn.Flatten(), hidden=nn.Linear(64, 8), act=nn.ReLU(), classifier=nn.Linear(8, 10)))


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def flattened(examples: Examples) -> Examples:
    return replace(examples, inputs=examples.batch(slice(None)).args[0].flatten(1))


KL = replace(GENTLE, distance="kl")


class NoLength:
    def __iter__(self) -> Iterator[Any]:
        return iter(loaders()[0])


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a model without weights": (lambda path: prune(model=build().to("meta")), r"the model is on the meta device.*to_empty"),
    "points for a fraction": (lambda path: prune(max_drop=1), r"max_drop=1: wanted a fraction below 1: 0\.01 is one point"),
    "points in a recipe": (lambda path: sc.Recipe(max_drop=5), "max_drop = 5.0: wanted 0 to 1"),
    "a negative drop": (lambda path: prune(max_drop=-0.01), "max_drop = -0.01: wanted 0 to 1"),
    "a drop as text": (lambda path: sc.Recipe(max_drop="1%"), "max_drop = '1%': got str, wanted a number"),  # type: ignore[arg-type]
    "percent for a share": (lambda path: prune(macs=50), "target_macs = 50.0: wanted 0 to 1"),
    "a typo in a field": (
        lambda path: sc.Recipe(max_dropp=0.01),  # type: ignore[call-arg]
        "Recipe: unknown field 'max_dropp'. Did you mean 'max_drop'",
    ),
    "a typo in settings": (
        lambda path: sc.TrainSettings(epoch=3),  # type: ignore[call-arg]
        "TrainSettings: unknown field 'epoch'. Did you mean 'epochs'",
    ),
    "a field without its name": (
        lambda path: sc.Recipe(0.01),  # type: ignore[misc]
        r"Recipe\(0.01\): wanted fields by name, such as max_drop=0.01",
    ),
    "a typo in an option": (lambda path: prune(max_dorp=0.01), "prune: unknown option 'max_dorp'. Did you mean 'max_drop'"),
    "a field as an option": (
        lambda path: prune(rounds=2),
        r"prune: rounds is a field of the recipe. Give recipe=Recipe\(rounds=…\)",
    ),
    "an unknown criterion": (
        lambda path: prune(criterion="l3"),
        "criterion = 'l3': wanted one of ensemble, obs, .* Did you mean",
    ),
    "weights for a network": (
        lambda path: sc.prune(weights_only(), *loaders()),
        r"model: got OrderedDict, wanted a torch\.nn\.Module",
    ),
    "a class for a network": (lambda path: sc.prune(nn.Sequential, *loaders()), r"model: got type, wanted a torch\.nn\.Module"),  # type: ignore[arg-type]
    "a network for other inputs": (lambda path: prune(model=three_channels()), r"\(2, 1, 8, 8\)"),
    "a network with NaN": (lambda path: prune(model=broken_weights()), "(?i)nan"),
    "a drop as text in a call": (lambda path: prune(max_drop="0.01"), "max_drop = '0.01': got str, wanted a number"),
    "a name for a recipe": (lambda path: prune(recipe="best"), r"recipe: got 'best', wanted a Recipe: Recipe\(…\)"),
    "no time at all": (lambda path: prune(time_budget=-1), "time_budget: got -1, wanted a number of seconds above 0"),
    "a time as text": (lambda path: prune(time_budget="10"), "time_budget: got '10', wanted a number of seconds above 0"),
    "a number for a callback": (lambda path: prune(callback=5), r"callback: got int \(5\), wanted a function"),
    "a test set of another shape": (
        lambda path: prune(test=[(digits()[2].inputs.repeat(1, 3, 1, 1), digits()[2].targets)]),
        r"the test set: the network does not run on its inputs of shape \(2, 3, 8, 8\) .* training set: \(2, 1, 8, 8\)",
    ),
    "a test set with NaN": (
        lambda path: prune(test=[(digits()[2].inputs * torch.nan, digits()[2].targets)]),
        "the test set of 'loaders': input 0 holds NaN or infinite values",
    ),
    "a test set with labels from 1": (
        lambda path: prune(test=[(digits()[2].inputs, digits()[2].targets + 1)]),
        "the test set: example .* has the label 10, and the network has 10 outputs",
    ),
    "training without a network": (
        lambda path: prune(finetune=lambda: None),
        r"finetune takes \(\): wanted \(model\), or \(model, step\)",
    ),
    "a forward that looks into the model": (
        lambda path: prune(forward=lambda model, batch: model.eval()(batch[0])),
        "forward.* failed before it called the model: AttributeError: .* can be called, but not looked into",
    ),
    "a number for a function": (lambda path: prune(finetune=10), r"finetune: got int \(10\), wanted a function"),
    "a value for a function": (lambda path: prune(evaluate=0.9), r"evaluate: got float \(0.9\), wanted a function"),
    "a mean for a loss": (
        lambda path: prune(loss=nn.CrossEntropyLoss(), recipe=replace(RECIPE, criterion="ensemble", estimator="gradient")),
        r"gave a tensor of shape \(\) for \d+ examples: wanted one value for each.*reduction='none'",
    ),
    "a float for a metric": (
        lambda path: prune(metric=lambda outputs, targets: 0.9),
        r"gave a float \(0.9\): wanted a tensor with one value for each example.* Leave out float\(\) or .item\(\)",
    ),
    "a test set with evaluate": (
        lambda path: prune(evaluate=lambda model: 0.9, test=loaders()[1]),
        "evaluate measures a set of its own.* measure result.model on your test data",
    ),
    "a pattern of no layer": (lambda path: prune(ignore=["head.*"]), r"ignore: no layer of the network is 'head\.\*'"),
    "a typo in the name of a layer": (
        lambda path: prune(model=named_layers(), ignore="clasifier"),
        "ignore: no layer of the network is 'clasifier'. Did you mean 'classifier'",
    ),
    "a type of no layer": (
        lambda path: prune(ignore=nn.Conv1d),
        "ignore: no layer of the network is a Conv1d. Did you mean 'Conv2d'",
    ),
    "a layer of a copy": (
        lambda path: prune(ignore=trained().get_submodule("0")),
        "give a layer of the model itself, not of a copy",
    ),
    "two drops": (
        lambda path: prune(recipe=sc.Recipe(max_drop=0.02), max_drop=0.05),
        r"max_drop=0\.05, and the recipe has max_drop=0\.02: two values.* Leave max_drop out, or change the recipe",
    ),
    "two shares of the MACs": (
        lambda path: prune(recipe=sc.Recipe(target_macs=0.2), macs=0.5),
        r"macs=0\.5, and the recipe has target_macs=0\.2: two values for one thing",
    ),
    "two engines": (
        lambda path: prune(recipe=sc.Recipe(engine="torch"), engine="compile"),
        "engine='compile', and the recipe has engine='torch'",
    ),
    "two trainings": (
        lambda path: prune(recipe=sc.Recipe(retrain=sc.TrainSettings(epochs=2)), retrain="gentle"),
        r"retrain=TrainSettings\(.*, and the recipe has retrain=TrainSettings\(",
    ),
    "two criteria": (
        lambda path: prune(recipe=sc.Recipe(criterion="l2"), criterion="l1"),
        "criterion='l1', and the recipe has criterion='l2'",
    ),
    "bytes for a validation set": (
        lambda path: sc.prune(trained(), loaders()[0], [((digits()[1].inputs * 16).byte(), digits()[1].targets)]),
        r"the validation set: input 0 holds whole numbers \(torch.uint8\), and in the training set numbers with a point",
    ),
    "a pattern of no site": (
        lambda path: prune(recipe=sc.Recipe.fast(sites=("layer9",))),
        r"sites = \[layer9\]: no site has such a name. Known: '0', '3'",
    ),
    "a device that is not there": (lambda path: prune(device="gpu"), "device: got 'gpu', which cannot be used here"),
    "data and a loader": (
        lambda path: sc.prune(trained(), Data("mine", *digits()), loaders()[1]),
        "train is a Data.* give no val, test or forward",
    ),
    "a forward without the model": (
        lambda path: prune(forward=lambda model, batch: batch[0]),
        r"forward\(model, batch\) did not call the model: wanted exactly one call",
    ),
    "a training that no loss fits": (
        lambda path: prune(model=one_output(), retrain=KL, loss=squares, metric=squares, folder=path / "run"),
        "distance = 'kl' compares probabilities of classes.* Set distance = 'squared', or distill = 0",
    ),
    "a training by a loss without gradient": (
        lambda path: prune(loss=errors, retrain=sc.TrainSettings(epochs=1), folder=path / "run"),
        r"the loss \(errors\) has no gradient: it counts errors.* Give one that can be differentiated",
    ),
    "crops of what is no image": (
        lambda path: sc.prune(flat(), Data("flat", *map(flattened, digits())), retrain="paper-retrain", folder=path / "run"),
        r"augment = 'crop-flip' for inputs of shape \(\d+, 64\): wanted images",
    ),
    "trials without a training": (
        lambda path: prune(recipe=replace(RECIPE, train_trials=True), folder=path / "run"),
        "train_trials = true, and no training is given: set retrain",
    ),
    "smooth labels that nothing is trained on": (
        lambda path: replace(KL, label_smoothing=0.1),
        "label_smoothing = 0.1 with distill = 1, which trains on no labels: set distill below 1",
    ),
    "a training on a loader without length": (
        lambda path: sc.prune(trained(), NoLength(), loaders()[1], retrain="gentle", folder=path / "run"),
        "training on the train loader, which has no length: give a loader with one",
    ),
    "a file for a folder": (
        lambda path: prune(folder=path / "notes.txt" / "run"),
        "notes.txt.*: (Not a directory|File exists)",
    ),
    "a folder with other files": (
        lambda path: prune(folder=path),
        r"holds other files \(notes.txt\). Choose an empty or a new folder",
    ),
    "a folder that is no run": (lambda path: sc.resume(path, build()), r"not the folder of a run: no provenance\.json"),
    "an export of unknown kind": (
        lambda path: prune(**ONE_CUT).export(path / "small.tflite"),
        "'small.tflite', wanted a name that ends in .onnx or .pt2, or a folder for source",
    ),
}


def weights_only() -> Any:
    return trained().state_dict()


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_says_what_is_wrong_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    make, message = MISTAKES[name]
    with pytest.raises(SecateursError, match=message):
        make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_unknown_criterion_gets_one_list_of_all() -> None:
    with pytest.raises(SecateursError) as found:
        sc.Recipe.fast(criterion="magnitude")
    assert all(str(found.value).count(f"{name},") <= 1 for name in criterion_names())
    assert all(name in str(found.value) for name in criterion_names())


def test_a_folder_that_holds_a_run_is_resumed_and_not_overwritten(tmp_path: Path) -> None:
    prune(folder=tmp_path / "run", **ONE_CUT)
    with pytest.raises(SecateursError, match=r"holds a run already\. Resume it .*, or choose another folder"):
        prune(folder=tmp_path / "run", **ONE_CUT)
    with pytest.raises(SecateursError, match=r"(?s)start\.safetensors"):  # another network
        sc.resume(tmp_path / "run", nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))


@pytest.mark.parametrize("what", ["finetune", "test", "train"])
def test_what_a_run_was_started_with_is_asked_for_again(what: str, tmp_path: Path) -> None:
    trains = replace(ONE_CUT["recipe"], finetune=sc.TrainSettings(epochs=1, lr=0.01))
    given: dict[str, Any] = {"finetune": {"finetune": lambda model: None}, "test": {"test": loader(digits()[2])}, "train": {}}[
        what
    ]
    recipe = trains if what == "train" else ONE_CUT["recipe"]
    sc.Pruner(trained(), *loaders(), recipe=recipe, folder=tmp_path / "run", **given).close()
    with pytest.raises(SecateursError, match=rf"Give it again: (secateurs\.)?resume\(.*, model, .*{what}"):
        sc.resume(tmp_path / "run", build())


def test_a_network_in_train_mode_is_pruned_in_eval_mode_and_stays_in_train_mode() -> None:
    model = trained().train()
    result = prune(model=model, **ONE_CUT)
    assert all(part.training for part in model.modules())
    assert result.validation.before == pytest.approx(right(trained(), digits()[1]))


def test_an_untrained_network_is_pointed_out() -> None:
    result = prune(model=build(), **ONE_CUT)
    assert any("it seems untrained" in note for note in result.notes)


def test_what_a_recipe_does_not_say_is_said_by_the_call() -> None:
    """Equal values agree; what stands in a recipe without being set is no second value."""
    for recipe, drop in ((sc.Recipe(), 0.04), (sc.Recipe.fast(), 0.04), (sc.Recipe(max_drop=0.04), 0.04)):
        assert sc.Pruner(trained(), *loaders(), recipe=recipe, max_drop=drop, uncertified=True).recipe.max_drop == 0.04
    chosen = sc.Pruner(trained(), *loaders(), recipe=sc.Recipe(repair="none"), criterion="l1", uncertified=True)
    assert chosen.recipe.criterion == "l1"  # without it, a portfolio ranks where nothing is repaired


def test_ignored_layers_are_taken_from_the_sites_of_the_recipe() -> None:
    recipe = sc.Recipe.fast(sites=("3",))
    assert sc.Pruner(trained(), *loaders(), recipe=recipe, ignore="8", uncertified=True).recipe.sites == ("3",)
    with pytest.raises(SecateursError, match="ignore: no site is left to prune"):
        sc.Pruner(trained(), *loaders(), recipe=recipe, ignore="3")


def test_a_folder_that_cannot_be_made_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(
        SecateursError, match=r"/proc/runs: cannot be written \(No such file or directory\)\. Choose a folder that you may"
    ):
        prune(folder="/proc/runs", **ONE_CUT)


# ---- doubtful data, which is noted ---------------------------------------------------------------------------------------


def test_images_of_another_size_are_noted(tmp_path: Path) -> None:
    """The network takes both: it pools what is left."""
    train, val, test = digits()
    small = [[(each.inputs[:, :, 1:7, 1:7], each.targets)] for each in (val, test)]
    result = sc.prune(trained(), loader(train), small[0], test=small[1], folder=tmp_path / "run", **ONE_CUT)
    for name in ("validation", "test"):
        (note,) = [note for note in result.notes if note.startswith(f"the {name} inputs have the shape 1×6×6")]
        assert "the training inputs 1×8×8" in note
        assert note in str(result)
    assert "validation inputs have the shape 1×6×6" in (tmp_path / "run" / "report.html").read_text()
    assert not any("shape" in note for note in prune(**ONE_CUT).notes)


SWAPPED = torch.tensor([3, 0, 1, 5, 6, 4, 2, 9, 7, 8])  # no digit keeps its place


@pytest.mark.parametrize(
    ("renumber", "note"),
    [
        (lambda labels: (labels + 1) % 10, r"the labels seem shifted: with \(label − 1\) modulo 10 it would be right on"),
        (lambda labels: (labels + 8) % 10, r"the labels seem shifted: with \(label \+ 2\) modulo 10 it would be right on"),
        (lambda labels: SWAPPED[labels], r"another order than its outputs: with \d for 0, \d for 1, \d for 2, … it would be"),
    ],
)
def test_labels_of_another_numbering_are_pointed_out(renumber: Callable[[Tensor], Tensor], note: str) -> None:
    val = digits()[1]
    others = [(val.inputs, renumber(val.targets))]
    result = sc.prune(trained(), loaders()[0], others, **ONE_CUT)
    (found,) = [each for each in result.notes if "labels seem" in each]
    assert re.search(note, found), found
    percent = f"{100 * right(trained(), val):.1f} %"  # with the labels as they were
    assert percent in found or "another order" in found
    assert "untrained" not in found


def test_an_impossible_time_budget_is_said_to_be_one() -> None:
    pruner = sc.Pruner(trained(), *loaders(), time_budget=1e-3)
    assert any("even so it takes about" in note for note in pruner.notes)
    assert estimate(pruner.context).bytes > sum(p.numel() for p in trained().parameters()) * 4


def test_wrappers_of_torch_are_taken_off() -> None:
    assert prune(model=nn.DataParallel(trained()), **ONE_CUT).macs.removed > 0


def test_editors_know_every_option_of_prune() -> None:
    """Each parameter of Pruner is one of prune, or of its typed dict of others, with the same type; none is Any or missing."""
    listed = inspect.signature(sc.prune).parameters
    others, every = api.OtherOptions.__annotations__, inspect.signature(sc.Pruner).parameters
    assert len(listed) <= 20
    assert set(every) == (set(listed) - {"progress", "others"}) | set(others)
    for name, parameter in every.items():
        here = listed[name].annotation if name in listed else others[name]
        assert getattr(here, "__forward_arg__", here) == parameter.annotation, name
