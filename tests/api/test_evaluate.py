"""The user's own metric of the whole validation set: one number, or a value for each example."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_loaders import ONE_CUT, QUICK, RECIPE, build, digits, loader, loaders, trained
from torch import Tensor, nn

import secateurs as sc
from secateurs._util.tensors import digest
from secateurs.errors import InvalidInput, NonFinite, RunError
from secateurs.training import KeptWeights


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
    sequential = sc.Recipe.fast(confidence=0, criterion="l1", max_drop=0.05)
    other = sc.prune(trained(), *loaders(), evaluate=macro_recall, recipe=sequential, progress=False)
    assert other.search.before - other.search.after <= 0.05 + 1e-9


def test_their_metric_has_its_own_name_while_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    sc.prune(trained(), *loaders(), evaluate=macro_recall, **{**ONE_CUT, "progress": True})
    shown = capsys.readouterr().err
    assert "; macro_recall 0.9" in shown
    assert "WholeMetric" not in shown


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


# ---- a value for each example --------------------------------------------------------------------------------------------


def each_right(model: nn.Module) -> Tensor:
    """Whether each validation example is answered correctly."""
    with torch.no_grad():
        return model(digits()[1].inputs).argmax(1) == digits()[1].targets


@pytest.mark.parametrize("recipe", [RECIPE, sc.Recipe.fast(criterion="l1", max_drop=0.05)], ids=["global", "sequential"])
def test_values_of_examples_are_certified_as_those_of_the_metric_are(recipe: sc.Recipe) -> None:
    own = sc.prune(trained(), *loaders(), evaluate=each_right, recipe=recipe, progress=False)
    ours = sc.prune(trained(), *loaders(), recipe=recipe, progress=False)
    assert own.plan == ours.plan
    assert own.bound == ours.bound
    assert own.bound is not None
    assert own.validation == ours.validation
    assert own.metric == "each_right"
    assert f"At 95 % confidence the drop is at most {own.bound:.4g}." in str(own)


def test_values_of_another_set_than_the_validation_loader_are_certified_too() -> None:
    def on_the_test_set(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return -nn.functional.cross_entropy(model(digits()[2].inputs), digits()[2].targets, reduction="none").clamp(max=1.0)

    few, recipe = loader(digits()[1].take(torch.arange(40))), replace(RECIPE, max_drop=0.2)
    result = sc.prune(trained(), loaders()[0], few, evaluate=on_the_test_set, recipe=recipe, progress=False)
    assert result.validation.before == pytest.approx(float(on_the_test_set(trained().eval()).mean()), abs=1e-6)
    assert result.bound is not None
    assert result.validation.before - result.validation.after < result.bound <= 0.2


def test_each_network_is_measured_once() -> None:
    seen: list[str] = []

    def counted(model: nn.Module) -> float:
        seen.append(digest(dict(model.state_dict())))
        return macro_recall(model)

    sc.prune(trained(), *loaders(), evaluate=counted, **QUICK)
    assert len(seen) == len(set(seen))


def test_the_built_in_training_is_judged_by_their_metric_too() -> None:
    recipe = replace(RECIPE, confidence=0.0, finetune=sc.TrainSettings(epochs=1, lr=0.01, batch=64))
    result = sc.prune(trained(), *loaders(), evaluate=macro_recall, recipe=recipe, progress=False)
    assert result.steps[-1].accuracy == pytest.approx(macro_recall(result.model.eval()))


@pytest.mark.parametrize("confidence", [0.0, 0.95])
def test_a_training_with_labels_is_judged_by_their_metric(confidence: float) -> None:
    """Their metric asks for the opposite of what is trained: the loss falls with every step, and so does the metric."""

    def wrong(model: nn.Module) -> Tensor:
        return 1.0 - each_right(model).double()

    # the whole set, and values of which some certify
    evaluate = (lambda model: float(wrong(model).mean())) if confidence == 0 else wrong
    start = build()  # untrained: nine in ten answers are wrong
    recipe = replace(RECIPE, max_drop=0.5, confidence=confidence, retrain=sc.TrainSettings(epochs=2, lr=0.05, batch=64))
    run = sc.Pruner(start, *loaders(), evaluate=evaluate, recipe=recipe)
    result = run.finish()
    (kept,) = run.journal.of(KeptWeights)
    tried = {each.name: each for each in kept.tried}
    assert kept.by == "metric"
    assert (tried["end"].loss or 0) < (tried["start"].loss or 0)
    assert (tried["end"].metric or 0) < (tried["start"].metric or 0) - 0.1
    assert (tried[kept.kept].metric or 0) >= (tried["start"].metric or 0)
    sides = run.context.metric.sides
    values = wrong(result.model.eval())
    assert tried[kept.kept].metric == pytest.approx(float((values if sides is None else values[sides.search]).mean()))


# ---- what it must not do -------------------------------------------------------------------------------------------------


def shuffled(model: nn.Module) -> Tensor:
    return each_right(model)[torch.randperm(400)]


def in_train_mode(model: nn.Module) -> float:
    model.train()
    return macro_recall(model)


def on_meta(model: nn.Module) -> float:
    found = macro_recall(model)
    model.to("meta")
    return found


def in_half_precision(model: nn.Module) -> float:
    found = macro_recall(model)
    model.half()
    return found


@pytest.mark.parametrize(
    ("evaluate", "error", "message"),
    [
        (
            lambda model: {"map": 0.3},
            InvalidInput,
            "returned a dict, wanted one number for the whole validation set, or a",
        ),
        (lambda model: "0.93", InvalidInput, "returned a str, wanted one number"),
        (lambda model: None, InvalidInput, "returned a NoneType, wanted one number"),
        (lambda model: torch.zeros(3, 2), InvalidInput, r"returned a tensor of shape \(3, 2\), wanted one number"),
        (lambda model: torch.zeros(0), InvalidInput, r"returned a tensor of shape \(0,\), wanted one number"),
        (lambda model: float("nan"), NonFinite, "gave nan for the original network: wanted finite values"),
        (lambda model: torch.tensor([1.0, torch.inf]), NonFinite, "gave 1 NaN or infinite values of 2 for the original"),
        (shuffled, InvalidInput, "other values when it was called again for the same network.* does not shuffle"),
        (in_train_mode, InvalidInput, "changed the network's weights or buffers.* stay in eval mode"),
        (in_half_precision, InvalidInput, "changed the network's weights or buffers.* Measure a copy"),
        (on_meta, InvalidInput, "changed the network's weights or buffers.* Measure a copy"),
        (lambda model: 0.9, InvalidInput, "gave 0.9 for the network, for a copy with all weights at zero .* does not see what"),
        (lambda model: macro_recall(trained().eval()), InvalidInput, "Measure the network that it is given, not another one"),
        (lambda model: each_right(trained().eval()), InvalidInput, "gave the same 400 values for the network"),
    ],
)
def test_what_is_no_metric_is_an_error_before_anything_is_written(
    evaluate: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        sc.prune(trained(), *loaders(), evaluate=evaluate, folder=tmp_path / "run", **ONE_CUT)
    assert not (tmp_path / "run").exists()


def test_a_metric_that_fails_on_a_broken_network_is_a_metric() -> None:
    """The weights at zero give one answer to all images, with no class to divide by."""
    calls: list[bool] = []

    def strict(model: nn.Module) -> float:
        with torch.no_grad():
            several = len(set(model(digits()[1].inputs).argmax(1).tolist())) > 1
        calls.append(several)
        if not several:
            raise ZeroDivisionError("no answers but one")
        return macro_recall(model)

    sc.Pruner(trained(), *loaders(), evaluate=strict, recipe=RECIPE).close()
    assert calls == [True, False]  # one more evaluation than without the check


def test_the_estimate_counts_the_time_of_their_evaluate() -> None:
    def slow(model: nn.Module) -> float:
        time.sleep(0.2)
        return macro_recall(model)

    options: dict[str, Any] = {"max_drop": 0.05, "criterion": "l1"}
    quick = sc.Pruner(trained(), *loaders(), evaluate=macro_recall, **options).estimate().seconds
    assert sc.Pruner(trained(), *loaders(), evaluate=slow, **options).estimate().seconds > quick + 1


def disk_full(model: nn.Module) -> Tensor:
    raise OSError("No space left on device")


@pytest.mark.parametrize(
    ("otherwise", "error", "message"),
    [
        (lambda model: each_right(model)[:399], InvalidInput, "returned 399 values, wanted 400 values as for the original"),
        (lambda model: 0.9, InvalidInput, "returned one number, wanted 400 values as for the original network"),
        (disk_full, OSError, "No space left on device"),
    ],
)
def test_an_error_in_the_middle_leaves_a_run_that_is_resumed(
    otherwise: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    broken = [True]

    def own(model: nn.Module) -> Any:
        return otherwise(model) if broken[0] and len(model.get_parameter("0.weight")) < 12 else each_right(model)

    with pytest.raises(error, match=message):
        sc.prune(trained(), *loaders(), evaluate=own, folder=tmp_path / "run", **ONE_CUT)
    broken[0] = False
    result = sc.resume(tmp_path / "run", build(), evaluate=own).finish()
    assert result.macs.removed > 0
    assert result.plan == sc.prune(trained(), *loaders(), **ONE_CUT).plan


@pytest.mark.parametrize("value", [float("nan"), torch.full((400,), torch.nan)], ids=["number", "values"])
def test_a_smaller_network_without_a_value_is_refused(value: Any, tmp_path: Path) -> None:
    whole = isinstance(value, float)
    original = macro_recall if whole else each_right

    def own(model: nn.Module) -> Any:
        return original(model) if len(model.get_parameter("0.weight")) == 12 else value

    result = sc.prune(trained(), *loaders(), evaluate=own, folder=tmp_path / "run", **ONE_CUT)
    assert result.plan.removed() == {}
    assert "No filter can be removed within a drop of 0.05" in str(result)
    assert sc.resume(tmp_path / "run", build(), evaluate=own).finish().plan == result.plan  # NaN in the journal is read back


def test_a_bound_for_every_class_needs_classes() -> None:
    recipe = replace(RECIPE, worst_class=0.5)
    with pytest.raises(InvalidInput, match=r"worst_class=0\.5 needs the class of every value, which evaluate does not give"):
        sc.prune(trained(), *loaders(), evaluate=each_right, recipe=recipe, progress=False)
