"""The user's own training: how it is called, and what it may change in a network.

A training may leave other values in parameters and buffers. What else it changed is put back where that is harmless (hooks,
gradients, wrapped methods, devices, momentum of BatchNorm), and refused where a saved network would compute something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from secateurs._util.modules import device_of, keeping_modes, structure
from secateurs._util.tensors import digest, first_non_finite
from secateurs.distributed import ALONE, active, join, rank
from secateurs.errors import Diverged, InvalidInput, TrainingError
from secateurs.training.state import named_tensors

Training = Callable[[nn.Module, int], Any]
"""Trains a network in place after the step of that number."""


def with_step(train: Callable[..., Any] | None) -> Training | None:
    """The user's training as a function of the network and the number of the step, which it need not take.

    It runs on all workers of torchrun, and may take its `rank` and their number, `world_size`, by name.

    Refused at once, and not after hours of scoring, where it takes neither (model) nor (model, step), or where a call of it
    only makes a generator or a coroutine.
    """
    if train is None:
        return None
    if not callable(train):
        raise InvalidInput(f"finetune: got {type(train).__name__} ({train!r:.40}), wanted a function.")
    if kind := _deferred(train):
        raise InvalidInput(
            f"finetune is {kind}: to call it trains nothing. Give a plain function that does the training before it returns."
        )
    signature = inspect.signature(train)

    def takes(*args: int, **options: int) -> bool:
        try:
            signature.bind(*args, **options)
        except TypeError:
            return False
        return True

    known = {"step": 0, "rank": 0, "world_size": 1}
    by_name = {name: known[name] for name in known if name in signature.parameters}
    if by_name and takes(0, **by_name):

        def named(module: nn.Module, step: int) -> Any:
            now = {"step": step, "rank": rank(), "world_size": join().size}
            return train(module, **{name: now[name] for name in by_name})

        return named
    if takes(0):
        return lambda module, step: train(module)
    if takes(0, 0):
        return train
    raise InvalidInput(f"finetune takes {signature}: wanted (model), or (model, step); rank and world_size may be taken, too.")


def _deferred(train: Callable[..., Any]) -> str:
    """What kind of function it is, if a call of it does not run its body; else nothing."""
    while isinstance(train, partial):
        train = train.func
    for each in (train, type(train).__call__):
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            return "a generator function"
        if inspect.iscoroutinefunction(each):
            return "an async function"
    return ""


def train_by_user_(module: nn.Module, train: Training, step: int) -> None:
    """Call the user's training of a network in place, put right what is harmless, and refuse what is not: see `_Before`."""
    before, workers = _Before(module), active()
    with keeping_modes(module), torch.enable_grad(), ALONE.active():
        returned = train(module, step)
    if isinstance(returned, nn.Module) and returned is not module:
        raise TrainingError(
            f"finetune returned another network (a {type(returned).__name__}): wanted the given one trained in place. Copy the "
            f"weights back: model.load_state_dict(trained.state_dict())."
        )
    before.restore_or_refuse_()
    if workers.size > 1:
        what = (
            f"after finetune (step {step}), which must leave the same weights on all workers, as DistributedDataParallel does"
        )
        workers.check_same(what, {"network": digest(named_tensors(module))})


class _Before:
    """A network before the user's training: its modules and tensors, and their settings, flags and hooks."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.place = module, device_of(module)
        parts, tensors = list(module.modules()), named_tensors(module)
        self.layers = {name: type(part) for name, part in module.named_modules()}
        self.settings = {name: part.extra_repr() for name, part in module.named_modules()}
        self.structure = structure(module)
        self.in_training = [(part, name, getattr(part, name)) for part in parts for name in _trains_by(part)]
        self.children = [(part, dict(part._modules)) for part in parts]
        self.own = [(part, _own_methods(part)) for part in parts]
        self.hooks = [(hooks, dict(hooks)) for part in parts for hooks in _hooks_of(part)]
        self.like = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}  # type and layout
        self.flags = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        self.finite = {name for name, tensor in tensors.items() if first_non_finite({name: tensor}) is None}
        names = {id(tensor): name for name, tensor in tensors.items()}
        held = [(part, name, t) for part in parts for each in (part._parameters, part._buffers) for name, t in each.items()]
        self.places = [(part, name, names[id(tensor)]) for part, name, tensor in held if tensor is not None]

    def restore_or_refuse_(self) -> None:
        """Restore all but the values of parameters and buffers, each of which gets memory of its own.

        TrainingError for other layers, settings, calls, shapes, or values that are lost.
        """
        module, now = self.module, named_tensors(self.module)
        self._refuse_others({name: type(part) for name, part in module.named_modules()}, self.layers, "layers")
        for part, name, value in self.in_training:
            setattr(part, name, value)
        for name, part in module.named_modules():
            if part.extra_repr() != self.settings[name]:
                raise TrainingError(
                    f"finetune changed the settings of {name!r}: got {type(part).__name__}({part.extra_repr()}), wanted "
                    f"({self.settings[name]}), since a saved network holds weights alone. Change the model before pruning it."
                )
        if structure(module) != self.structure:
            raise TrainingError(
                "finetune changed the graph of the network, so that it computes something else: wanted the same calls, since "
                "a saved network holds weights alone. Change the model before pruning it."
            )
        shapes = {name: (name in self.flags, tuple(tensor.shape)) for name, tensor in self.like.items()}
        trained = {name for name, _ in module.named_parameters()}
        self._refuse_others({name: (name in trained, tuple(t.shape)) for name, t in now.items()}, shapes, "parameters")
        if lost := [name for name, tensor in now.items() if tensor.is_meta]:
            raise TrainingError(
                f"finetune left {lost[0]!r} on the meta device, which holds no values: wanted the trained weights. Move the "
                f"network with .to(device), not .to_empty or .to('meta')."
            )
        self._restore_(now)
        wrong = first_non_finite({name: t for name, t in named_tensors(module).items() if name in self.finite})
        if wrong is not None:
            raise Diverged(f"finetune left NaN or infinite values in {wrong!r}: lower its learning rate.")

    def _restore_(self, values: Mapping[str, Tensor]) -> None:
        """Put the modules back, with their methods and hooks, and these values into new tensors.

        What is left of a training in a tensor (a hook, a gradient, memory that it shares, inference mode) is gone with it.
        """
        for part, children in self.children:
            part._modules.clear()
            part._modules.update(children)
        for part, methods in self.own:
            for name in _own_methods(part).keys() - methods.keys():
                del part.__dict__[name]
            part.__dict__.update(methods)
        for hooks, known in self.hooks:
            hooks.clear()
            hooks.update(known)
        fresh = {name: torch.empty_like(like, device=self.place) for name, like in self.like.items()}
        for name, tensor in fresh.items():
            tensor.copy_(values[name].detach())
        fresh |= {name: nn.Parameter(fresh[name], requires_grad=flag) for name, flag in self.flags.items()}
        for part, name, full_name in self.places:
            if full_name in self.flags:
                setattr(part, name, fresh[full_name])  # a recurrent layer keeps a list of its weights, too
            else:
                part._buffers[name] = fresh[full_name]
        self.module.to(self.place)

    def _refuse_others(self, now: Mapping[str, object], before: Mapping[str, object], what: str) -> None:
        changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if changed:
            raise TrainingError(
                f"finetune changed the {what} {', '.join(changed[:3])} of the network: wanted the same names and shapes. Train "
                f"the network that is given in place."
            )


def _own_methods(part: nn.Module) -> dict[str, Any]:
    """The attributes of one module in place of its class's methods: a `forward` that was wrapped, or what `compile` leaves."""
    kind = type(part)
    return {n: value for n, value in vars(part).items() if n == "_compiled_call_impl" or callable(getattr(kind, n, None))}


def _trains_by(part: nn.Module) -> tuple[str, ...]:
    """The settings of a module that change nothing in eval mode."""
    if isinstance(part, _BatchNorm):
        return ("momentum",)
    return ("p", "inplace") if isinstance(part, _DropoutNd) else ()


def _hooks_of(part: nn.Module) -> list[dict[int, Any]]:
    """The dictionaries in which torch keeps a module's hooks."""
    return [hooks for name, hooks in vars(part).items() if name.endswith("_hooks") and isinstance(hooks, dict)]
