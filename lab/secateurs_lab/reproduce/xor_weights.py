"""Single weights deleted from the networks of Table 1: by magnitude, by Optimal Brain Damage, by Optimal Brain Surgeon.

A network of 10 hidden neurons has 31 weights, one of 3 has 10. Weights are deleted one at a time until 10 are left, curvatures
measured again after each, and the network is looked at twice: as the deletions leave it, and retrained with the others at zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from secateurs_lab.methods.obs_weights import delete_weight, inverse_hessian
from secateurs_lab.reproduce.xor_nets import Nets, Points

_BLOCK = 64  # experiments whose slopes are in memory at once


def flat(nets: Nets) -> Tensor:
    """All weights of every network, (E, n): of the hidden neurons, of the output, its bias."""
    return torch.cat([nets.w1.flatten(1), nets.w2, nets.b2[:, None]], 1).double()


def shaped(weights: Tensor, like: Nets) -> Nets:
    """The networks with these weights (E, n)."""
    hidden, inputs = like.w1.shape[1:]
    first, second, bias = torch.split(weights.to(like.w1), [hidden * inputs, hidden, 1], 1)
    return Nets(first.reshape(-1, hidden, inputs).contiguous(), second.contiguous(), bias[:, 0].contiguous())


def slopes(nets: Nets, points: Points) -> Tensor:
    """√(p (1 - p)) · ∂logit/∂w at every point, (E, N, n): their products add up to the Gauss-Newton Hessian."""
    x, hidden = points.x.double(), nets.hidden(points.x).double()
    p = nets.logits(points.x).double().sigmoid()
    reached = (hidden > 0) * nets.w2.double()[:, None]  # (E, N, H)
    parts = [(reached[..., None] * x[:, :, None]).flatten(2), hidden, torch.ones_like(hidden[..., :1])]
    return torch.cat(parts, -1) * (p * (1 - p)).sqrt()[..., None]


Delete = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes weights (E, n), slopes (E, N, n) and who is alive (E, n); gives the deleted index (E,) and the weights after it."""


def by_magnitude(weights: Tensor, rows: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest |w|."""
    return _lowest(weights, weights.abs(), alive)


def by_damage(weights: Tensor, rows: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest h w² / 2."""
    return _lowest(weights, rows.square().mean(1) * weights.square() / 2, alive)


def by_surgeon(weights: Tensor, rows: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest w² / (2 [H⁻¹]), all others moved to make up for it."""
    found = delete_weight(weights, inverse_hessian(rows * alive[:, None]), alive)
    return found.index, found.weights


def by_surgeon_choice(weights: Tensor, rows: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """The surgeon's choice alone: the others stay."""
    index, _ = by_surgeon(weights, rows, alive)
    return index, weights.scatter(-1, index[:, None], 0.0)


def _lowest(weights: Tensor, scores: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    index = scores.masked_fill(~alive, torch.inf).argmin(-1)
    return index, weights.scatter(-1, index[:, None], 0.0)


WAYS: dict[str, Delete] = {
    "magnitude": by_magnitude,
    "OBD": by_damage,
    "OBS, choice only": by_surgeon_choice,
    "OBS": by_surgeon,
}


def delete_weights(nets: Nets, points: Points, keep: int, delete: Delete) -> tuple[Nets, Tensor]:
    """Delete one weight at a time until `keep` are left; the networks, and which weights are alive (E, n)."""
    done, lives = [], []
    for ids in torch.split(torch.arange(len(nets.w1)), _BLOCK):
        part, own = Nets(nets.w1[ids], nets.w2[ids], nets.b2[ids]), Points(points.x[ids], points.y[ids])
        weights = flat(part)
        alive = torch.ones_like(weights, dtype=torch.bool)
        for _ in range(weights.shape[1] - keep):
            index, weights = delete(weights, slopes(shaped(weights, part), own), alive)
            alive = alive.scatter(-1, index[:, None], False)
        done.append(weights)
        lives.append(alive)
    return shaped(torch.cat(done), nets), torch.cat(lives)
