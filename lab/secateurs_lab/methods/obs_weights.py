"""Optimal Brain Surgeon (Hassibi, Stork, 1993) on single weights: the full inverse Hessian, deletions with the best update.

Deleting weight q costs w_q² / (2 [H⁻¹]_qq) and moves all others by -w_q / [H⁻¹]_qq H⁻¹ e_q; nothing is trained in between. The
structured form, for filters, is `repair.obs`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from secateurs._util.modules import eval_mode
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput
from secateurs.metrics import logits_of
from secateurs_lab.criteria.obd import curvature_roots
from secateurs_lab.methods.base import MethodRun, MethodState, Pruned, Spent, Task, Watch, opened, recipe_for
from secateurs_lab.methods.training import finished, training_stages
from secateurs_lab.methods.weights import by_deviation, few_examples, finish_weights, train_held, weights_of, without_dead

_MOST = 6000  # weights that the full inverse Hessian is made for: 0.3 GB
_ALPHA = 1e-4  # the start of the inverse is I / alpha; less lets weights move far along directions that no example sees


def inverse_hessian(slopes: Tensor, *, alpha: float = _ALPHA) -> Tensor:
    """Inverse of alpha I + slopesᵀ slopes / P from P rows of slopes (…, P, n), by the rank-one recursion; float64 (…, n, n).

    The rows are taken in blocks, which is the same recursion with fewer and larger updates.
    """
    slopes = slopes.double()
    count, size = slopes.shape[-2:]
    inverse = torch.eye(size, dtype=torch.float64).expand(*slopes.shape[:-2], size, size) / alpha
    for block in torch.split(slopes, max(1, size), -2):
        reach = block @ inverse  # (…, b, n)
        inner = count * torch.eye(block.shape[-2], dtype=torch.float64) + reach @ block.mT
        inverse = inverse - reach.mT @ torch.linalg.solve(inner, reach)
    return inverse


@dataclass(frozen=True, eq=False)
class Deleted:
    """What one deletion chose and left."""

    index: Tensor  # (…,)
    increase: Tensor  # (…,) of the loss, to second order
    weights: Tensor  # (…, n)
    inverse: Tensor  # (…, n, n): row and column of a deleted weight are zero


def delete_weight(weights: Tensor, inverse: Tensor, alive: Tensor) -> Deleted:
    """Set the weight to zero that costs least, w_q² / (2 [H⁻¹]_qq), and move all others by -w_q / [H⁻¹]_qq H⁻¹ e_q.

    `alive` (…, n) are the weights that are not deleted yet. The inverse that is left is that of the Hessian without row q.
    """
    diagonal = inverse.diagonal(dim1=-2, dim2=-1)
    costs = (weights.square() / (2 * diagonal.clamp_min(1e-300))).masked_fill(~alive, torch.inf)
    index = costs.argmin(-1, keepdim=True)
    column = inverse.gather(-1, index[..., None, :].expand(*inverse.shape[:-1], 1)).squeeze(-1)
    pivot = diagonal.gather(-1, index)
    moved = (weights - weights.gather(-1, index) / pivot * column).scatter(-1, index, 0.0) * alive
    left = inverse - column[..., :, None] * column[..., None, :] / pivot[..., None]
    gone = torch.zeros_like(alive).scatter(-1, index, True)
    left = left.masked_fill(gone[..., :, None] | gone[..., None, :], 0.0)
    return Deleted(index.squeeze(-1), costs.gather(-1, index).squeeze(-1), moved, left)


def output_slopes(module: nn.Module, examples: Examples, names: list[str], *, batch: int = 64) -> Tensor:
    """Rows b_kᵀ ∂logits/∂w for every example and class, (N·K, n): their products add up to the Gauss-Newton Hessian."""
    own = dict(module.named_parameters())
    fixed = {name: tensor.detach() for name, tensor in (*own.items(), *module.named_buffers()) if name not in names}

    def logits(weights: dict[str, Tensor], *one: Tensor) -> Tensor:
        out: Tensor = logits_of(functional_call(module, {**fixed, **weights}, tuple(x[None] for x in one)))[0]
        return out

    rows, weights = [], {name: own[name].detach() for name in names}
    with eval_mode(module):
        for each in examples.batches(batch):
            jacobian = vmap(jacrev(logits), in_dims=(None, *(0 for _ in each.args)))(weights, *each.args)
            flat = torch.cat([jacobian[name].flatten(2) for name in names], 2)  # (N, K, n)
            with torch.no_grad():
                roots = torch.stack(list(curvature_roots(logits_of(module(*each.args)))), 1)  # (N, K, K)
            rows.append((roots @ flat).flatten(0, 1).double())
    return torch.cat(rows)


def surgeon(task: Task, *, name: str = "obs-weights", share: float | None = None, watch: Watch | None = None) -> Pruned:
    """OBS: delete weights one by one by the full inverse Hessian, all others updated each time, then spend the budget.

    The Hessian is that of the trained network, in its Gauss-Newton form; nothing is trained between deletions.
    """
    with opened(task, f"{name} {share}", recipe_for(task, "l1"), watch) as run:
        state = run.load() or run.save(_operated(run, share))
        while state.spent.stages < len(training_stages(task, len(run.sites))):
            state = train_held(run, state)
        return finished(run, run.save(finish_weights(run, state, by_deviation)))


def _operated(run: MethodRun, share: float | None) -> MethodState:
    """The network after as many deletions as asked for, or as reach the target."""
    graph, began = run.copied(), time.monotonic()
    weights = weights_of(graph)
    sizes, few = [w.numel() for w in weights.values()], few_examples(run)
    if sum(sizes) > _MOST:
        raise InvalidInput(
            f"obs-weights: the inverse Hessian of {sum(sizes):,} weights does not fit: wanted at most {_MOST:,}. "
            f"Use obs+repair, which removes whole filters by the inverse of every layer's own."
        )
    slopes = output_slopes(graph.module, few, [f"{name}.weight" for name in weights])
    inverse = inverse_hessian(slopes * math.sqrt(len(slopes) / len(few)))
    flat = torch.cat([w.detach().flatten().double() for w in weights.values()])
    alive, wanted = flat != 0, sum(sizes) - 1 if share is None else round(share * sum(sizes))
    for count in range(1, wanted + 1):
        found = delete_weight(flat, inverse, alive)
        flat, inverse = found.weights, found.inverse
        alive[found.index] = False
        if count % max(1, sum(sizes) // 64) == 0 or count == wanted:
            run.report("prune", count, wanted)
            _write(weights, torch.split(flat, sizes))
            if share is None and run.reached(without_dead(run, graph, verify=False)):
                break
    _write(weights, torch.split(flat, sizes))
    return MethodState(graph, Spent(passes=3 * len(few), search_seconds=time.monotonic() - began, note="to be counted"))


def _write(weights: Mapping[str, nn.Parameter], values: tuple[Tensor, ...]) -> None:
    for weight, value in zip(weights.values(), values, strict=True):
        weight.data.copy_(value.view_as(weight))
