"""Weight norm, w = g · v / ‖v‖, in both forms that torch has: what a cut makes of g and v, so that w keeps its values.

Filters that are removed take their entries of g and v with them. Inputs that are removed change the norm of v, and g makes up
for it: g' = g · ‖v'‖ / ‖v‖. Other computed weights (spectral norm, orthogonal weights) have no such form: the largest singular
value of what is left is another one, and no scale of the weights changes that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from secateurs.graph.channels import Kept, take


def has_hooks(module: nn.Module) -> bool:
    """Whether something besides a module's own forward runs when it is called: hooks, or parametrisations."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "parametrizations" in module._modules)


def weight_norm_of(module: nn.Module) -> tuple[str, str, int | None] | None:
    """Return the names of g and v, and the axis of g (None: one for all); None for a module without weight norm."""
    if not has_hooks(module):  # asked of every layer
        return None
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
    if len(hooks) == 1 and hooks[0].name == "weight":
        return "weight_g", "weight_v", None if hooks[0].dim == -1 else hooks[0].dim
    steps: Any = getattr(module, "parametrizations", {})
    if parametrize.is_parametrized(module) and list(steps) == ["weight"] and len(steps["weight"]) == 1:
        norm = steps["weight"][0]
        if isinstance(norm, _WeightNorm):
            names = ("parametrizations.weight.original0", "parametrizations.weight.original1")
            return (*names, None if norm.dim == -1 else norm.dim)
    return None


def computed_weights(module: nn.Module) -> str:
    """Return why a layer's weights must be left alone: they are computed otherwise than by weight norm, or hooks see them."""
    if not has_hooks(module):
        return ""
    norm = weight_norm_of(module)
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    if norm is not None and hooks == (norm[0] == "weight_g"):
        grouped = getattr(module, "groups", 1) > 1 and norm[2] != 0
        return "has weight norm along an axis within its groups" if grouped else ""
    if parametrize.is_parametrized(module):
        steps: Any = module.parametrizations
        kinds = ", ".join(sorted({type(step).__name__.lstrip("_") for each in steps.values() for step in each}))
        return f"computes its weights from all of them (torch.nn.utils.parametrize: {kinds})"
    if any(type(hook).__name__ == "SpectralNorm" for hook in module._forward_pre_hooks.values()):
        return "computes its weights from all of them (torch.nn.utils.spectral_norm)"
    return "has forward hooks, which may change what it computes" if hooks else ""


def narrow_weight_norm_(module: nn.Module, kept: Kept) -> Iterator[tuple[str, Kept]]:
    """Narrow g and v in place, so that the computed weight is `take(weight, kept)`; yields their names and what remains."""
    found = weight_norm_of(module)
    assert found is not None
    scale_name, direction_name, axis = found
    scale, direction = module.get_parameter(scale_name), module.get_parameter(direction_name)
    narrower = take(direction.detach(), kept)
    scales = tuple(index if dim == axis else None for dim, index in enumerate(kept))

    def norm(v: Tensor) -> Tensor:
        others = None if axis is None else [d for d in range(v.dim()) if d != axis]
        found: Tensor = torch.linalg.vector_norm(v, dim=others, keepdim=axis is not None)
        return found

    before = norm(direction.detach())
    before = before if axis is None else take(before, scales)
    left = scale.detach() if axis is None else take(scale.detach(), scales)
    left = left * torch.where(before > 0, norm(narrower) / before, 1).view(left.shape)
    for name, old, new in ((scale_name, scale, left), (direction_name, direction, narrower)):
        *path, last = name.split(".")
        parameter = nn.Parameter(new.contiguous().clone(), requires_grad=old.requires_grad)
        setattr(module.get_submodule(".".join(path)), last, parameter)
    if scale_name == "weight_g":
        module.__dict__["weight"] = take(module.__dict__["weight"].detach(), kept)
    yield scale_name, scales
    yield direction_name, kept
