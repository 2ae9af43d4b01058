"""The user's own training: called after the cuts, checked for what it leaves, and repeated after a crash."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_loaders import ONE_CUT, QUICK, RECIPE, build, digits, loader, loaders, my_training, right, trained
from torch import nn

import secateurs as sc
from nets import assert_same_bits, weights_of
from secateurs._util.journal import Journal
from secateurs.cli import execute
from secateurs.errors import InvalidInput, TrainingError
from secateurs.pruning.results import ChosenAllocation
from secateurs.selection.contract import paired_bound
from secateurs.training import KeptWeights
from torture.runs import differing_file

UNREPAIRED = replace(RECIPE, repair="none", max_drop=0.1, confidence=0.0)  # training has much to make up for


def test_their_training_runs_after_the_cuts_and_its_weights_stay() -> None:
    calls: list[int] = []

    def finetune(model: nn.Module, step: int) -> None:
        calls.append(step)
        my_training(model)

    result = sc.prune(trained(), *loaders(), finetune=finetune, recipe=UNREPAIRED, progress=False)
    assert len(calls) == 1  # all cuts are made together
    assert calls[0] == len(result.steps)
    assert result.steps[-1].accuracy == pytest.approx(right(result.model, digits()[1]))
    untrained = sc.prune(trained(), *loaders(), recipe=UNREPAIRED, progress=False)
    assert untrained.plan == result.plan
    pairs = list(zip(untrained.model.parameters(), result.model.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in pairs)


def test_their_training_gets_the_step_where_it_takes_one() -> None:
    found: list[Any] = []

    def by_name(model: nn.Module, *, step: int) -> None:
        found.append(step)

    def by_default(model: nn.Module, rate: float = 0.1, step: int = -1) -> None:
        found.append((rate, step))

    def without(model: nn.Module, rate: float = 0.1) -> None:
        found.append(rate)

    for finetune in (by_name, by_default, without):
        sc.prune(trained(), *loaders(), finetune=finetune, **ONE_CUT)
    assert found == [1, (0.1, 1), 0.1]


def test_training_that_costs_more_than_allowed_is_rolled_back() -> None:
    def ruin(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()

    result = sc.prune(trained(), *loaders(), finetune=ruin, recipe=replace(RECIPE, confidence=0.0), progress=False)
    assert result.macs.removed > 0
    assert "Note: training was undone: the weights before it are kept: metric" in str(result)
    assert result.search.before - result.search.after <= 0.05 + 1e-9


def test_a_training_that_changes_nothing_is_not_asked_about() -> None:
    """A question after a refusal has less confidence left, and would refuse the network that it accepted before."""
    run = sc.Pruner(trained(), *loaders(), finetune=lambda model: None, recipe=RECIPE)
    result = run.finish()
    (allocation,) = run.journal.of(ChosenAllocation)
    assert allocation.answers[-1] is False
    assert [step.answers for step in result.steps] == [()] * len(result.steps)
    assert result.bound == allocation.bound
    assert not any("undone" in note for note in result.notes)


def test_a_refusal_of_certification_says_what_the_confidence_that_is_left_gives() -> None:
    seen: list[dict[str, Any]] = []

    def finetune(model: nn.Module) -> None:
        my_training(model)
        seen.append(copy.deepcopy(model.state_dict()))

    run = sc.Pruner(trained(), *loaders(), finetune=finetune, recipe=RECIPE)
    result = run.finish()
    (allocation,) = run.journal.of(ChosenAllocation)
    images = run.context.metric.examples("certify")
    assert images is not None
    after = copy.deepcopy(result.model)
    after.load_state_dict(seen[0])
    with torch.no_grad():
        before, now = ((net.eval()(images.inputs).argmax(1) == images.targets).double() for net in (trained(), after))
    # a fifth of 5 % for what follows a refusal, over all places g at which the first could have come (docs/contract.md)
    g = len(allocation.answers)
    assert allocation.answers == (True,) * (g - 1) + (False,)
    bound = 100 * paired_bound(before, now, 1 - 0.05 * 0.8 * 0.2 / (g * (g + 1))).upper
    assert bound > 5
    left = f"the confidence that is left gives a bound of {bound:.2f} points on its drop, where 5.00 points are allowed"
    assert f"not certified: after 1 refusal before it, {left}" in str(result)
    assert result.bound == allocation.bound


# a quarter of the filters is cut, so that a training may lose much and still be within the drop
NARROWED = sc.Recipe.fast(max_drop=0.5, confidence=0.0, criterion="l1", sites=("0",), largest_share=0.25)


def worsen(model: Any) -> None:
    with torch.no_grad():
        model.get_submodule("8").bias[0] += 2.0


@pytest.mark.parametrize("budget", ["run", "site"])
def test_a_training_that_makes_the_network_worse_within_the_drop_is_undone(budget: Any, tmp_path: Path) -> None:
    recipe = replace(NARROWED, budget=budget)
    untrained = sc.prune(trained(), *loaders(), recipe=recipe, progress=False)
    before = right(untrained.model, digits()[1])
    ruined = copy.deepcopy(untrained.model)
    worsen(ruined)
    after = right(ruined, digits()[1])
    assert before - 0.3 < after < before
    run = sc.Pruner(trained(), *loaders(), finetune=worsen, recipe=recipe, folder=tmp_path / "run")
    result = run.finish()
    assert_same_bits(weights_of(result.model), weights_of(untrained.model))
    (kept,) = run.journal.of(KeptWeights)
    assert (kept.kept, kept.by, kept.phase, kept.step) == ("start", "metric", "finetune", 1)
    assert {each.name: each.metric for each in kept.tried} == pytest.approx({"start": before, "end": after})
    assert f"Note: training was undone: the weights before it are kept: metric {before:.4g}" in str(result)
    assert "Fine-tuning in step 1: the weights before it are kept" in (tmp_path / "run" / "report.html").read_text()
    let = sc.Pruner(trained(), *loaders(), finetune=worsen, recipe=replace(recipe, keep_best=False))
    assert let.finish().validation.after == pytest.approx(after)
    assert let.journal.of(KeptWeights) == []


def test_of_equal_metrics_the_smaller_loss_is_kept() -> None:
    def sharpen(model: Any, by: float) -> None:
        with torch.no_grad():
            for tensor in (model.get_submodule("8").weight, model.get_submodule("8").bias):
                tensor.mul_(by)

    found = []
    for by in (1.01, 100.0):  # the same answers; a hundred times as sure of the wrong ones
        run = sc.Pruner(trained(), *loaders(), finetune=partial(sharpen, by=by), recipe=NARROWED)
        result = run.finish()
        (kept,) = run.journal.of(KeptWeights)
        assert kept.tried[0].metric == kept.tried[1].metric
        found.append((kept.kept, "Note: training was undone" in str(result)))
        assert "(loss " in kept.summary()
    assert found == [("end", False), ("start", True)]


def test_a_training_that_helps_is_kept_and_recorded(tmp_path: Path) -> None:
    run = sc.Pruner(trained(), *loaders(), finetune=my_training, recipe=NARROWED, folder=tmp_path / "run")
    result = run.finish()
    (kept,) = run.journal.of(KeptWeights)
    assert kept.kept == "end"
    assert kept.tried[1].metric == pytest.approx(right(result.model, digits()[1]))
    assert "Fine-tuning in step 1: end is kept: metric" in (tmp_path / "run" / "report.html").read_text()


def test_images_that_certify_do_not_choose_the_weights() -> None:
    run = sc.Pruner(trained(), *loaders(), finetune=my_training, recipe=replace(RECIPE, repair="none", max_drop=0.12))
    result = run.finish()
    (kept,) = run.journal.of(KeptWeights)
    held_out, certifying = run.context.held_out_examples, run.context.metric.examples("certify")
    assert certifying is not None
    assert not {bytes(one.numpy()) for one in held_out.inputs} & {bytes(one.numpy()) for one in certifying.inputs}
    assert (kept.kept, kept.tried[1].metric) == ("end", pytest.approx(right(result.model, held_out)))


@pytest.mark.parametrize("finetune", [worsen, my_training])
def test_stopped_after_the_record_of_what_was_kept_the_run_ends_the_same(finetune: Any, tmp_path: Path) -> None:
    whole = sc.prune(trained(), *loaders(), finetune=finetune, recipe=NARROWED, folder=tmp_path / "whole", progress=False)
    append = Journal.append

    def stop(journal: Journal, record: Any) -> None:
        append(journal, record)
        if isinstance(record, KeptWeights):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            sc.prune(trained(), *loaders(), finetune=finetune, recipe=NARROWED, folder=tmp_path / "run", progress=False)
    again = sc.resume(tmp_path / "run", build(), finetune=finetune).finish()
    assert_same_bits(weights_of(again.model), weights_of(whole.model))
    assert differing_file(tmp_path / "whole", tmp_path / "run") is None


def test_an_error_in_their_training_is_theirs_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    def out_of_memory(model: nn.Module) -> None:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        sc.prune(trained(), *loaders(), finetune=out_of_memory, folder=tmp_path / "run", **QUICK)
    whole = sc.prune(trained(), *loaders(), finetune=my_training, **QUICK)
    assert sc.resume(tmp_path / "run", build(), finetune=my_training).finish().plan == whole.plan


class Trainer:
    """A loop as Lightning has it: it owns the optimiser and the device, logs, and returns what it logged."""

    def __init__(self, epochs: int) -> None:
        self.epochs, self.logged = epochs, list[float]()

    def fit(self, model: nn.Module) -> dict[str, float]:
        model.to("cpu").train()
        handle = model.register_forward_hook(lambda module, given, out: self.logged.append(float(out.detach().abs().mean())))
        for _ in range(self.epochs):
            my_training(model)
        handle.remove()
        model.eval()
        return {"output": self.logged[-1]}


def test_a_loop_like_lightnings_trains_and_may_return_anything() -> None:
    trainer = Trainer(epochs=2)
    result = sc.prune(trained(), *loaders(), finetune=trainer.fit, **ONE_CUT)
    assert len(trainer.logged) == 2 * len(loaders()[0])
    assert right(result.model, digits()[1]) == pytest.approx(result.validation.after)


# ---- what it must not leave behind ---------------------------------------------------------------------------------------


def nan_weights(model: Any) -> None:
    model.get_submodule("0").weight.data.fill_(torch.nan)


def nan_statistics(model: Any) -> None:
    model.get_submodule("1").running_var.fill_(torch.nan)


def other_shape(model: Any) -> None:
    model.get_submodule("8").weight = nn.Parameter(torch.zeros(3, 3))


def other_layer(model: Any) -> None:
    model.set_submodule("2", nn.LeakyReLU())


def weight_norm(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.get_submodule("8"))


def other_settings(model: Any) -> None:
    model.get_submodule("1").eps = 0.5


def lost(model: Any) -> None:
    model.to("meta")


def another(model: Any) -> nn.Module:
    return build()


def other_graph(model: Any) -> None:
    (end,) = (node for node in model.graph.nodes if node.op == "output")
    with model.graph.inserting_before(end):
        end.args = (model.graph.call_function(torch.neg, end.args),)
    model.recompile()


def statistics_as_parameter(model: Any) -> None:
    model.get_submodule("1").running_mean = nn.Parameter(model.get_submodule("1").running_mean)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nan_weights, "finetune left NaN or infinite values in '0.weight': lower its learning rate"),
        (nan_statistics, "finetune left NaN or infinite values in '1.running_var'"),
        (other_shape, "finetune changed the parameters 8.weight.* wanted the same names and shapes. Train the network"),
        (other_layer, "finetune changed the layers 2 of the network: wanted the same"),
        (weight_norm, "finetune changed the layers 8"),
        (other_settings, r"finetune changed the settings of '1': got BatchNorm2d\(.*eps=0.5.*wanted .*eps=1e-05"),
        (lost, "finetune left '0.weight' on the meta device, which holds no values.* Move the network with"),
        (another, r"finetune returned another network \(a Sequential\): wanted the given one trained in place"),
        (other_graph, "finetune changed the graph of the network, so that it computes something else: wanted the same calls"),
        (statistics_as_parameter, "finetune changed the parameters 1.running_mean of the network"),
    ],
)
def test_training_that_spoils_the_network_is_an_error_and_the_run_can_be_resumed(
    spoil: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=message):
        sc.prune(trained(), *loaders(), finetune=spoil, folder=tmp_path / "run", **ONE_CUT)
    result = sc.resume(tmp_path / "run", build(), finetune=my_training).finish()
    assert right(result.model, digits()[1]) > 0.9


def replaces_parameters(model: Any) -> None:
    my_training(model)
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(parameter.detach().clone()))


def changes_type(model: Any) -> None:
    my_training(model)
    model.to(torch.float64)


def freezes(model: Any) -> None:
    my_training(model)
    model.requires_grad_(False)


def stays_in_train_mode(model: Any) -> None:
    my_training(model)
    model.train()


def changes_what_counts_in_training_alone(model: Any) -> None:
    my_training(model)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None


def leaves_hooks(model: Any) -> None:
    my_training(model)
    for part in model.modules():
        part.register_forward_hook(lambda module, given, out: out * 0)


def wraps_forward(model: Any) -> None:
    """As accelerate does it for mixed precision."""
    my_training(model)
    model._original_forward = model.forward
    model.forward = types.MethodType(torch.autocast("cpu", dtype=torch.bfloat16)(type(model).forward), model)
    model.get_submodule("0").forward = lambda inputs: torch.zeros(())


def compiles(model: Any) -> None:
    my_training(model)
    model.compile(backend=lambda graph, example: lambda *given: [torch.zeros(())])


def leaves_hooks_on_parameters(model: Any) -> None:
    my_training(model)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * torch.nan)
        parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.data.fill_(torch.nan))


def leaves_inference_tensors(model: Any) -> None:
    my_training(model)
    with torch.inference_mode():
        model.get_submodule("8").weight = nn.Parameter(model.get_submodule("8").weight * 1.0)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data * 1


def lets_tensors_share_memory(model: Any) -> None:
    my_training(model)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            memory = torch.cat([part.weight.detach(), part.bias.detach()])
            part.weight.data, part.bias.data = memory.split(len(memory) // 2)


def replaces_modules(model: Any) -> None:
    my_training(model)
    linear = model.get_submodule("8")
    other = nn.Linear(linear.in_features, linear.out_features).train()
    other.load_state_dict(linear.state_dict())
    other.register_forward_hook(lambda module, given, out: out * 0)
    model.set_submodule("8", other)


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return sc.prune(trained(), *loaders(), finetune=my_training, **ONE_CUT).model


HARMLESS = [
    replaces_parameters,
    changes_type,
    freezes,
    stays_in_train_mode,
    leaves_hooks,
    changes_what_counts_in_training_alone,
    wraps_forward,
    compiles,
    leaves_hooks_on_parameters,
    leaves_inference_tensors,
    lets_tensors_share_memory,
    replaces_modules,
]


@pytest.mark.parametrize("loop", HARMLESS)
def test_what_is_harmless_is_put_right(loop: Any, plain: nn.Module) -> None:
    """The same network as after the plain training, ready to be trained further."""
    model = sc.prune(trained(), *loaders(), finetune=loop, **ONE_CUT).model
    for (name, wanted), (_, got) in zip(plain.state_dict().items(), model.state_dict().items(), strict=True):
        torch.testing.assert_close(got, wanted, msg=name)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert str(model) == str(plain)
    assert [part.training for part in model.modules()] == [part.training for part in plain.modules()]
    assert right(model, digits()[1]) > 0.9
    assert len({tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}) == len(model.state_dict())
    nn.functional.cross_entropy(model(digits()[1].inputs[:8]), digits()[1].targets[:8]).backward()
    assert all(bool(p.isfinite().all() and p.grad is not None and p.grad.isfinite().all()) for p in model.parameters())


def expanded_bias(model: Any) -> None:
    bias = model.get_submodule("8").bias
    bias.data = torch.full((1,), 3.0).expand(len(bias))
    model.get_submodule("8").weight.data.neg_()


def weights_in_the_memory_of_statistics(model: Any) -> None:
    norm = model.get_submodule("4")
    norm.weight.data = norm.running_var
    model.get_submodule("8").weight.data.neg_()


def replaced_forward(model: Any) -> None:
    model.get_submodule("0").forward = lambda inputs: inputs.new_zeros(len(inputs), 12, 8, 8)
    model.get_submodule("8").weight.data.neg_()


@pytest.mark.parametrize("ruin", [expanded_bias, weights_in_the_memory_of_statistics, replaced_forward])
def test_a_training_that_is_undone_leaves_nothing_behind(ruin: Any, tmp_path: Path) -> None:
    recipe = replace(RECIPE, confidence=0.0)
    result = sc.prune(trained(), *loaders(), finetune=ruin, recipe=recipe, progress=False)
    untrained = sc.prune(trained(), *loaders(), recipe=recipe, progress=False)
    for (name, wanted), (_, got) in zip(untrained.model.state_dict().items(), result.model.state_dict().items(), strict=True):
        torch.testing.assert_close(got, wanted, msg=name)
    assert right(result.model, digits()[1]) == pytest.approx(right(untrained.model, digits()[1]))
    result.save(tmp_path / "small.safetensors")
    again = sc.load(build(), tmp_path / "small.safetensors").module
    assert right(again, digits()[1]) == pytest.approx(result.validation.after)


def generator(model: nn.Module, step: int = 0) -> Any:
    my_training(model)
    yield step


async def coroutine(model: nn.Module) -> None:
    my_training(model)


class Deferred:
    async def __call__(self, model: nn.Module) -> None:
        my_training(model)

    def fit(self, model: nn.Module) -> Any:
        yield my_training(model)


@pytest.mark.parametrize(
    ("finetune", "kind"),
    [
        (generator, "a generator function"),
        (partial(generator, step=1), "a generator function"),
        (Deferred().fit, "a generator function"),
        (coroutine, "an async function"),
        (Deferred(), "an async function"),
        (partial(Deferred()), "an async function"),
    ],
)
def test_a_function_that_trains_only_later_is_refused_at_once(finetune: Any, kind: str) -> None:
    with pytest.raises(InvalidInput, match=f"finetune is {kind}: to call it trains nothing. Give a plain function"):
        sc.Pruner(trained(), *loaders(), finetune=finetune, recipe=RECIPE)


# ---- killed --------------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal
import secateurs as sc
from digit_loaders import ONE_CUT, loaders, my_training, trained

def finetune(model):
    my_training(model)  # the network has changed in memory when the process dies
    os.kill(os.getpid(), signal.SIGKILL)

sc.prune(trained(), *loaders(), finetune=finetune, folder="run", **ONE_CUT)
"""


def test_killed_inside_their_training_the_run_is_resumed_before_it(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(sc.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    calls: list[str] = []

    def finetune(model: nn.Module) -> None:
        calls.append("again")
        my_training(model)

    killed = sc.resume(tmp_path / "run", build(), finetune=finetune).finish()
    whole = sc.prune(trained(), *loaders(), finetune=my_training, folder=tmp_path / "whole", **ONE_CUT)
    assert calls == ["again"]
    assert killed.plan == whole.plan
    assert differing_file(tmp_path / "whole", tmp_path / "run") is None


SHORT = sc.TrainSettings(epochs=1, lr=0.002)


def test_a_training_that_takes_the_place_of_the_recipes_is_noted() -> None:
    recipe = replace(ONE_CUT["recipe"], finetune=SHORT)
    result = sc.prune(trained(), *loaders(), finetune=lambda model: None, recipe=recipe, progress=False)
    assert "your finetune takes the place of that of the recipe" in result.notes


@pytest.mark.parametrize("keep_best", [True, False])
def test_what_a_training_does_otherwise_than_asked_for_is_noted(keep_best: bool) -> None:
    recipe = replace(ONE_CUT["recipe"], keep_best=keep_best, retrain=replace(SHORT, batch=8))
    result = sc.prune(trained(), *loaders(), recipe=recipe, progress=False)
    assert any("own batches and augmentation are used, not batch = 8" in note for note in result.notes)


def test_the_seed_of_a_training_counts() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        recipe = replace(ONE_CUT["recipe"], keep_best=False, retrain=replace(SHORT, seed=seed))
        return weights_of(sc.prune(trained(), *loaders(), recipe=recipe, progress=False).model)

    first = weights(1)
    assert_same_bits(weights(1), first)
    assert any(not torch.equal(tensor, first[name]) for name, tensor in weights(2).items())


@pytest.mark.parametrize("options", [{"retrain": SHORT}, {"finetune": my_training}])
def test_inside_inference_mode_networks_are_trained_as_outside(options: dict[str, Any]) -> None:
    outside = sc.prune(trained(), *loaders(), **options, **ONE_CUT)
    with torch.inference_mode():
        inside = sc.prune(trained(), *loaders(), **options, **ONE_CUT)
        with pytest.raises(InvalidInput, match=r"inside torch\.inference_mode\(\), whose tensors cannot be trained"):
            sc.Pruner(trained(), *loaders(), **options, recipe=ONE_CUT["recipe"])
    assert_same_bits(weights_of(inside.model), weights_of(outside.model))


def test_a_finished_run_with_training_is_shown_without_its_loader(tmp_path: Path) -> None:
    result = sc.prune(trained(), *loaders(), retrain=SHORT, folder=tmp_path / "run", **ONE_CUT)
    again = sc.resume(tmp_path / "run", build()).finish()
    assert_same_bits(weights_of(again.model), weights_of(result.model))


def test_reading_a_test_loader_leaves_the_users_random_state_alone() -> None:
    model, before = trained(), torch.get_rng_state()
    sc.prune(model, *loaders(), test=loader(digits()[2]), **ONE_CUT)
    assert torch.equal(torch.get_rng_state(), before)


def test_several_labels_are_distilled_as_they_are_and_judged_by_the_users_metric() -> None:
    """Labels that are independent of one another: a softmax over them would be of something else."""
    train, validation, _ = digits()

    def with_bits(examples: sc.Examples) -> Any:
        bits = torch.stack([(examples.targets >> place) & 1 for place in range(4)], 1).float()
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(examples.inputs, bits), batch_size=64)

    def loss(outputs: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs, bits, reduction="none").mean(1)

    def metric(outputs: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        return ((outputs > 0) == (bits > 0)).float().mean(1)

    model = nn.Sequential(*build()[:-1], nn.Linear(64, 4))
    optimiser, batches = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), with_bits(train)
    for _ in range(3):
        for images, bits in batches:
            optimiser.zero_grad()
            loss(model(images), bits).mean().backward()
            optimiser.step()
    recipe = sc.Recipe.fast(max_drop=0.3, criterion="l1", target_macs=0.4, confidence=0.0, allocation="global")
    result = sc.prune(
        *(model, batches, with_bits(validation)), loss=loss, metric=metric, recipe=recipe, retrain="gentle", progress=False
    )
    (kept,) = [record for record in result.records if isinstance(record, KeptWeights)]
    found = {each.name: each.metric for each in kept.tried}
    assert kept.by == "metric"
    assert found[kept.kept] == max(found.values()) > found["start"]


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(model: nn.Module) -> None:
        raise KeyboardInterrupt

    def twice(model: nn.Module) -> float:
        return right(model, digits()[1])

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt) as caught:
        sc.prune(trained(), *loaders(), finetune=stopped, evaluate=twice, folder=folder, **ONE_CUT)
    call = f"secateurs.resume({str(folder)!r}, model, evaluate=evaluate, finetune=finetune).finish()"
    assert str(caught.value) == f"Interrupted. Finished work is kept. Resume with: {call}"
    assert execute(["show", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"It was started from Python. Resume with: {call}" in said
    assert "--model" not in said
    given = {"secateurs": sc, "model": build(), "finetune": my_training, "evaluate": twice}
    assert eval(call, given).steps  # as it was said, word for word
    with pytest.raises(KeyboardInterrupt, match=r"^$"):  # without a folder nothing can go on
        sc.prune(trained(), *loaders(), finetune=stopped, **ONE_CUT)
