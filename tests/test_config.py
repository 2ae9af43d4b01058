"""Recipes: read as written, and wrong fields named with their value and what is allowed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from cyclopts import Group
from hypothesis import given, settings
from hypothesis import strategies as st

from secateurs import Recipe, TrainSettings, read_recipe
from secateurs.cli.inputs import field_flags
from secateurs.config import (
    GENTLE,
    PAPER_RETRAIN,
    PORTFOLIO,
    declarations,
    read_settings,
    recipe_fields,
    recipe_from,
    setting,
    write_recipe,
)
from secateurs.errors import InvalidInput, RecipeError
from secateurs.pruning.arguments import recipe_for


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


@given(
    max_drop=st.floats(0, 1),
    rounds=st.integers(1, 9),
    direction=st.sampled_from(["forward", "backward"]),
    target=st.none() | st.floats(0, 1),
    epochs=st.none() | st.integers(0, 99),
    sites=st.lists(st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1), max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    max_drop: float,
    rounds: int,
    direction: str,
    target: float | None,
    epochs: int | None,
    sites: list[str],
) -> None:
    training = None if epochs is None else TrainSettings(epochs=epochs, schedule="step", milestones=(3, 5))
    recipe = Recipe.fast(
        max_drop=max_drop,
        rounds=rounds,
        direction=direction,
        target_macs=target,
        finetune=training,
        sites=tuple(sites),
    )
    path = tmp_path_factory.mktemp("recipes") / "recipe.toml"
    write_recipe(path, recipe)
    assert read_recipe(path) == recipe


def test_the_defaults_are_what_prune_does_and_the_named_ways_are_theirs() -> None:
    """The values are those that the published rows were made with, by the names that the ways had then."""
    best = {"max_drop": 0.01, "allocation": "global", "criterion": "obs", "repair": "every-layer", "confidence": 0.95}
    fast = {"max_drop": 0.005, "allocation": "sequential", "criterion": "ensemble", "repair": "none", "confidence": 0.95}
    assert {name: getattr(Recipe(), name) for name in best} == best
    assert {name: getattr(recipe_for(None, None), name) for name in best} == best
    assert {name: getattr(Recipe.fast(), name) for name in fast} == fast
    assert {name: getattr(Recipe.paper(), name) for name in fast} == {**fast, "confidence": 0.0}
    assert (Recipe.fast().estimator, Recipe.fast(allocation="global").estimator, Recipe.fast().off) == (
        "gradient",
        "gradient",
        0.3,
    )
    assert (Recipe.paper().estimator, Recipe.paper().off) == ("losses", 0.3)


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ({"criterion": "ensemble"}, {"estimator": "network", "off": 0.9}),  # one scoring ranks all sites
        ({"criterion": "ensemble", "off": 0.3}, {"estimator": "gradient", "off": 0.3}),
        ({"criterion": "ensemble", "masks": 40}, {"estimator": "gradient", "off": 0.3}),
        ({"criterion": "ensemble", "estimator": "network"}, {"off": 0.9}),
        ({"portfolio": PORTFOLIO}, {"criterion": "portfolio", "estimator": "network"}),
        ({"repair": "none"}, {"criterion": "portfolio", "portfolio": PORTFOLIO}),  # obs ranks by what a repair can do
        ({"repair": "none", "portfolio": ("l1",)}, {"criterion": "portfolio", "estimator": "gradient"}),
        ({"max_drop": 0.2}, {"criterion": "obs"}),
    ],
)
def test_fields_that_depend_on_others_are_filled_in(given: dict[str, Any], filled: dict[str, Any]) -> None:
    recipe = Recipe(**given)
    assert {name: getattr(recipe, name) for name in given | filled} == given | filled
    assert replace(recipe) == recipe == recipe_from(recipe_fields(recipe))


def test_tables_and_overrides(tmp_path: Path) -> None:
    path = written(tmp_path, "max_drop = 0.02\n[finetune]\nepochs = 3\nlr = 0.05\n")
    recipe = read_recipe(path)
    assert recipe == Recipe(max_drop=0.02, finetune=TrainSettings(epochs=3, lr=0.05))
    changed = read_recipe(path, **{"max_drop": 0.5, "finetune.epochs": 7, "retrain.epochs": 2})
    assert changed == replace(recipe, max_drop=0.5, finetune=TrainSettings(epochs=7, lr=0.05), retrain=TrainSettings(epochs=2))


def test_a_training_by_name_may_be_changed_field_by_field(tmp_path: Path) -> None:
    path = written(tmp_path, 'retrain = "gentle"\n')
    assert read_recipe(path).retrain == GENTLE
    assert read_recipe(path, **{"retrain.epochs": 4}).retrain == replace(GENTLE, epochs=4)
    assert recipe_from({}, **{"retrain.lr": 0.1, "retrain": "paper-retrain"}).retrain == replace(PAPER_RETRAIN, lr=0.1)
    with pytest.raises(RecipeError, match=r"finetune = 'gentel': wanted .*Did you mean 'gentle'"):
        recipe_from({}, **{"finetune.lr": 0.1, "finetune": "gentel"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_dorp = 0.1", r"unknown field 'max_dorp'. Did you mean 'max_drop'"),
        ("[finetune]\nepoch = 1", r"unknown field 'finetune.epoch'. Did you mean 'epochs'"),
        ("max_drop = 'much'", r"max_drop = 'much': got str, wanted a number\."),
        ("max_drop = 2.0", r"max_drop = 2.0: wanted 0 to 1"),
        ("rounds = 0", r"rounds = 0: wanted 1 to 1,000"),
        ("direction = 'sideways'", r"direction = 'sideways': wanted one of forward, backward"),
        ("design = 'exakt'", r"design = 'exakt': wanted one of exact, bernoulli, balanced. Did you mean 'exact'"),
        ("[retrain]\nschedule = 'cosin'", r"retrain.schedule = 'cosin': wanted one of .*Did you mean 'cosine'"),
        ("[finetune]\nlr = -1.0", r"finetune.lr = -1.0: wanted a number above 0"),
        ("finetune = 3", r"finetune = 3: got int, wanted TrainSettings or None"),
        ("max_drop = ", r"not TOML"),
        ("sites = " + "[" * 50_000, r"nested deeper than 32"),
        ("seed = " + "9" * 9000, r"not TOML"),
        ("direction = '" + "x" * 50_000 + "'", r"direction = 'xxx.*: wanted one of forward, backward"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(RecipeError, match=message) as raised:
        read_recipe(path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) <= 600


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        read_recipe(tmp_path / "none.toml")


def test_settings_of_a_training_alone(tmp_path: Path) -> None:
    path = written(tmp_path, "epochs = 30\nschedule = 'one-cycle'\n")
    assert read_settings(path, lr=0.2) == TrainSettings(epochs=30, schedule="one-cycle", lr=0.2)
    with pytest.raises(RecipeError, match="unknown field 'epoch'"):
        read_settings(written(tmp_path, "epoch = 3"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_drop": "0.1"}, "max_drop = '0.1': got str, wanted a number"),
        ({"max_drop": None}, "max_drop = None: got NoneType, wanted a number"),
        ({"rounds": 1.5}, "rounds = 1.5: got float, wanted a whole number"),
        ({"batch": True}, "batch = True: got bool, wanted a whole number"),
        ({"adaptive": "no"}, "adaptive = 'no': got str, wanted True or False"),
        ({"sites": "layer3.*"}, "sites = 'layer3.*': got str, wanted a tuple of texts"),
        ({"finetune": {"epochs": 1}}, "finetune = {'epochs': 1}: got dict, wanted TrainSettings or None"),
        ({"scoring_examples": "many"}, "scoring_examples = 'many': got str, wanted a whole number, 'all' or None"),
    ],
)
def test_fields_of_a_wrong_type_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        Recipe(**fields)


def test_a_setting_of_a_wrong_type_is_named() -> None:
    wrong: Any = "0.1"
    with pytest.raises(InvalidInput, match=r"lr = '0.1': got str, wanted a number"):
        TrainSettings(lr=wrong)


def test_whole_numbers_and_lists_become_the_types_of_their_fields() -> None:
    given: Any = {"max_drop": 0, "confidence": 0, "sites": ["conv1"], "finetune": TrainSettings(lr=1, weight_decay=0)}
    recipe = Recipe(**given)
    assert recipe == Recipe(max_drop=0.0, confidence=0.0, sites=("conv1",), finetune=TrainSettings(lr=1.0, weight_decay=0.0))
    assert [type(recipe.max_drop), type(recipe.sites), type(TrainSettings(lr=1).lr)] == [float, tuple, float]


def test_one_declaration_gives_a_field_its_check_its_place_in_files_and_its_flag(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Longer(Recipe):
        patience: int = setting(3, "Sites without a cut before the run stops.", "pruning", low=1, high=5)

    assert Longer().patience == 3
    with pytest.raises(RecipeError, match=r"patience = 6: wanted 1 to 5\."):
        Longer(patience=6)
    write_recipe(tmp_path / "longer.toml", Longer(patience=4))
    assert "patience = 4\n" in (tmp_path / "longer.toml").read_text()
    flag = field_flags(Longer, dict.fromkeys(("pruning", "scoring", "training"), Group("Recipe")), "a=1")["patience"]
    assert get_args(flag)[0] is int
    assert (flag.__metadata__[0].help, flag.__metadata__[0].show_default) == ("Sites without a cut before the run stops.", "3")


def test_a_number_that_no_float_can_hold_is_an_error() -> None:
    with pytest.raises(RecipeError, match="out of range"):
        Recipe(max_drop=10**400)


NUMBERS = [
    (kind, name)
    for kind in (Recipe, TrainSettings)
    for name, (hint, _, _) in declarations(kind).items()
    if {int, float} & {hint, *get_args(hint)}
]


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=lambda part: getattr(part, "__name__", part))
@given(beyond=st.integers(min_value=10**39) | st.integers(max_value=-(10**39)) | st.floats(min_value=1e39) | st.just(10**5000))
@settings(max_examples=8, deadline=None)
def test_no_number_of_a_recipe_is_beyond_all_measure(kind: type, name: str, beyond: float) -> None:
    """Every field that holds a number says between which ends; the error names the field and both."""
    hint, _, declared = declarations(kind)[name]
    given = (beyond,) if get_args(hint)[1:] == (...,) else beyond
    assert {declared.low, declared.above} != {None}
    assert {declared.high, declared.below} != {None}
    with pytest.raises(RecipeError, match=rf"^{name} = .*(wanted|out of range)"):
        kind(**{name: given})


def test_the_numbers_of_the_hostile_recipe() -> None:
    """Numbers that were read without complaint."""
    for name, value in (("masks", 10**12), ("batch", 1 << 62), ("seed", 1 << 70), ("epochs", 10**9)):
        kind: Any = TrainSettings if name == "epochs" else Recipe
        with pytest.raises(RecipeError, match=rf"{name} = {value}: wanted -?[\d,]+ to [\d,]+\."):
            kind(**{name: value})
