"""Lightning: train and measure with a Trainer while a network is pruned, or prune it during a training.

The network is an attribute of the LightningModule, `net` unless `network` names another. Needs `pip install lightning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import secateurs
from secateurs._util.modules import device_of
from secateurs.errors import InvalidInput

TrainerFactory = Callable[[], Any]
"""Makes a new Trainer: one that has reached its last epoch trains no further."""


def finetune_with(
    trainer: TrainerFactory, module: Any, data: Any = None, *, network: str = "net"
) -> Callable[[nn.Module], None]:
    """Make a `finetune` for `secateurs.prune`: a new Trainer fits `module` with the pruned network in place of its own.

    `data` is a loader or a LightningDataModule; without it the module's own loaders are used.
    """

    def finetune(model: nn.Module) -> None:
        with _replaced(module, network, model):
            trainer().fit(module, data)

    return finetune


def evaluate_with(
    trainer: TrainerFactory, module: Any, data: Any = None, *, monitor: str, mode: str = "max", network: str = "net"
) -> Callable[[nn.Module], float]:
    """Make an `evaluate` for `secateurs.prune`: the value that `module` logs as `monitor` in its validation step.

    `mode` is "max" where higher is better, "min" where lower is: the value is negated then. `data` is a loader or a
    LightningDataModule; without it the module's own loaders are used.
    """
    if mode not in ("max", "min"):
        raise InvalidInput(f'mode: got {mode!r}, wanted "max" or "min".')

    def evaluate(model: nn.Module) -> float:
        with _replaced(module, network, model):
            logged = {name: value for found in trainer().validate(module, data, verbose=False) for name, value in found.items()}
        if monitor not in logged:
            raise InvalidInput(f"monitor: got {monitor!r}, wanted a value logged in validation: {', '.join(logged) or 'none'}.")
        return float(logged[monitor]) if mode == "max" else -float(logged[monitor])

    return evaluate


class PruneAtEpoch(Callback):  # type: ignore[misc]
    """Prune the network before epoch `epoch` (the first is 0), and continue the training with the smaller one.

    All other arguments are those of `secateurs.prune`. `result` is its result, None until then. The optimisers are configured
    again for the new weights; they keep their learning rates and schedules, and lose the momentum of the old weights.
    """

    def __init__(self, epoch: int, train: Any, val: Any, *, network: str = "net", **options: Any) -> None:
        self.epoch, self.train, self.val, self.network, self.options = epoch, train, val, network, options
        self.result: secateurs.Result | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse trainings that wrap the network's weights, before any time is spent."""
        if not isinstance(trainer.strategy, SingleDeviceStrategy):
            raise InvalidInput(
                f"PruneAtEpoch: got the strategy {type(trainer.strategy).__name__}, wanted training on one device. Train to "
                f"the end, prune with secateurs.prune, and fine-tune with finetune_with."
            )
        _network(pl_module, self.network)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace the network by a pruned one at the chosen epoch."""
        if trainer.current_epoch != self.epoch:
            return
        old = _network(pl_module, self.network)
        options = {"device": pl_module.device, **self.options}
        self.result = secateurs.prune(old, self.train, self.val, **options)
        setattr(pl_module, self.network, self.result.model.to(pl_module.device))
        _reconfigure_optimisers(trainer)


def _reconfigure_optimisers(trainer: Any) -> None:
    """Configure optimisers for the module's present weights; learning rates and schedules continue where they were."""
    strategy = trainer.strategy
    before, schedules = list(strategy.optimizers), [config.scheduler for config in strategy.lr_scheduler_configs]
    strategy.setup_optimizers(trainer)
    for old, new in zip(before, strategy.optimizers, strict=True):
        if len(old.param_groups) != len(new.param_groups):
            raise InvalidInput(
                f"configure_optimizers: got {len(new.param_groups)} parameter groups for the pruned network, wanted the "
                f"{len(old.param_groups)} of the original one. A layer with a group of its own was removed: list it in ignore."
            )
        for known, group in zip(old.param_groups, new.param_groups, strict=True):
            group.update({name: value for name, value in known.items() if name not in ("params", "param_names")})
        remaining = {id(weight) for group in new.param_groups for weight in group["params"]}
        new.state.update({weight: state for weight, state in old.state.items() if id(weight) in remaining})
    for old, config in zip(schedules, strategy.lr_scheduler_configs, strict=True):
        config.scheduler.load_state_dict(old.state_dict())


@contextmanager
def _replaced(module: Any, name: str, network: nn.Module) -> Iterator[None]:
    """Put another network in the place of the module's own within the block; it stays on the device where it was."""
    own, place = _network(module, name), device_of(network)
    setattr(module, name, network)
    try:
        yield
    finally:
        setattr(module, name, own)
        network.to(place)


def _network(module: Any, name: str) -> nn.Module:
    found = getattr(module, name, None)
    if not isinstance(found, nn.Module):
        parts = ", ".join(part for part, _ in module.named_children())
        raise InvalidInput(
            f"network: {type(module).__name__}.{name} is a {type(found).__name__}, wanted the attribute that holds the "
            f"network: {parts or 'none of them is a module'}."
        )
    return found
