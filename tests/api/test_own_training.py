"""The user's own training: called after the cuts, checked for what it leaves, and repeated after a crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_loaders import ONE_CUT, QUICK, RECIPE, build, digits, loaders, my_training, pruned, right, trained
from torch import nn

import secateurs as sc
from secateurs.errors import TrainingError
from torture.runs import differing_file


def test_their_training_runs_after_the_cuts_and_its_weights_stay() -> None:
    calls: list[int] = []

    def finetune(model: nn.Module, step: int) -> None:
        calls.append(step)
        my_training(model)

    result = sc.prune(trained(), *loaders(), finetune=finetune, **QUICK)
    assert len(calls) == 1  # all cuts are made together
    assert calls[0] == len(result.steps)
    assert result.steps[-1].accuracy == pytest.approx(right(result.model, digits()[1]))
    assert not all(torch.equal(a, b) for a, b in zip(pruned().model.parameters(), result.model.parameters(), strict=False))


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
