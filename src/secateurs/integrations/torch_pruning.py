"""Importances for Torch-Pruning: `tp.pruner.BasePruner(model, x, importance=FilterImportance(...))`.

Torch-Pruning removes groups of coupled filters and asks for one score for each channel of a group. The coefficients of an
ensemble and the scores of any criterion will do: in both, higher means more important.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateurs.errors import InvalidInput, InvalidMask
from secateurs.graph.sites import Site, resolve
from secateurs.graph.trace import Graph
from secateurs.scoring.importance import Importance


class FilterImportance:
    """The importance of a group of Torch-Pruning: the mean score over the sites whose layers the group prunes.

    `model` is the network that Torch-Pruning prunes, and `graph` its unpruned trace. `scores` maps the name of a site to an
    `Importance` or a tensor (C,), one score for each channel. A group without such a site gets None, and Torch-Pruning does
    not prune it. With `global_pruning=True`, scores of different groups are compared without normalisation.
    """

    def __init__(self, model: nn.Module, graph: Graph, scores: Mapping[str, Importance | Tensor]) -> None:
        if graph.plan.steps:
            raise InvalidInput(
                "graph: is already pruned, but Torch-Pruning counts the channels of the unpruned network. Trace that one."
            )
        sites = resolve(graph, scores)
        self.scores: dict[nn.Module, Tensor] = {}
        for name, found in scores.items():
            score = _checked(sites[name], found.coef if isinstance(found, Importance) else found)
            for layer in sites[name].layers:
                self.scores[_layer(model, layer)] = score

    def __call__(self, group: Any, **_: Any) -> Tensor | None:
        """Return the scores (channels of the group,), or None if none of its sites has scores."""
        sums: Tensor | None = None
        counts = torch.zeros(0)
        for entry in group:
            layer, removes = entry.dep.layer, getattr(entry.dep.pruning_fn, "__name__", "")
            if layer not in self.scores or removes != "prune_out_channels" or any(i is None for i in entry.root_idxs):
                continue
            score, roots = self._of(layer), torch.as_tensor(entry.root_idxs)
            if sums is None:
                channels = 1 + max(max(i for i in e.root_idxs if i is not None) for e in group if len(e.root_idxs))
                sums, counts = torch.zeros(channels), torch.zeros(channels)
            sums.index_add_(0, roots, score[torch.as_tensor(entry.idxs)])
            counts.index_add_(0, roots, torch.ones(len(roots)))
        return None if sums is None else sums / counts.clamp(min=1)

    def _of(self, layer: nn.Module) -> Tensor:
        score, width = self.scores[layer], _filters(layer)
        if width != len(score):
            raise InvalidInput(
                f"a layer has {width} filters, but had {len(score)} when it was scored: it has been pruned since. Trace and "
                f"score the network again, and create a new FilterImportance for the next step."
            )
        return score


def _checked(site: Site, score: Tensor) -> Tensor:
    if score.shape != (site.channels,):
        raise InvalidMask(
            f"scores of site {site.name!r}: got shape {tuple(score.shape)}, wanted ({site.channels},), one for each channel."
        )
    if bool(score.isnan().any()):
        raise InvalidInput(f"scores of site {site.name!r}: contain NaN, which cannot be ranked.")
    return score.detach().float().cpu()


def _layer(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise InvalidInput(
            f"model: has no layer {name!r}, but the graph has. Torch-Pruning knows no functional layers: leave out the scores "
            f"of such sites. If it is not one, the graph was traced from another network."
        ) from error


def _filters(layer: nn.Module) -> int:
    found = getattr(layer, "out_channels", getattr(layer, "out_features", None))
    return found if isinstance(found, int) else len(layer.get_parameter("weight"))
