"""The importances of a step: as they were saved, or fitted again to the masks and losses that an older folder holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor

from secateurs.errors import SecateursError
from secateurs.importance import Importance, PairImportance, fit_importance, fit_pairs, scores
from secateurs.report.records import Ranking

InMemory: TypeAlias = "Importance | PairImportance"
_SHOWN = 120  # masks in the picture of predicted against realised scores


class RankingMeta(TypedDict):
    """Plain values beside the tensors of a ranking."""

    site: str
    original: list[int]  # the site's channels in the numbers of the untouched network
    criterion: str
    note: str


def ranking_from(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], recipe: Mapping[str, Any]) -> Ranking:
    """The importances that a run kept of a ranking; ValueError if they cannot be used.

    Some criteria, such as obs, give an order and no importances: then there are none.
    """
    fitted = _fitted(tensors, recipe)
    if "coef" in tensors:
        coef, stderr = tensors["coef"], tensors.get("stderr")
    elif fitted is None and "order" in tensors:
        return Ranking((), (), ())
    elif fitted is None:
        raise ValueError("neither importances nor masks with losses in it")
    else:
        coef, stderr = _coefficients(fitted)
    ids = meta.get("original") or range(len(coef))
    if len(ids) != len(coef):
        raise ValueError(f"{len(coef)} importances for {len(ids)} filters")
    agreement = () if fitted is None else _agreement(tensors, fitted, recipe)
    found = _ranking(tuple(map(int, ids)), coef, stderr, agreement)
    # Masks that all keep the same number of filters cannot tell what a number of filters costs, only which: slopes can.
    slopes = meta.get("criterion") == "ensemble" and recipe.get("estimator", "losses") == "gradient"
    return replace(found, of_loss=slopes)


def ranking_of(importance: InMemory) -> Ranking:
    """The importances of a step in memory; filters are numbered as the site had them then."""
    coef, stderr = _coefficients(importance)
    return _ranking(tuple(range(len(coef))), coef, stderr, ())


def _ranking(ids: tuple[int, ...], coef: Tensor, stderr: Tensor | None, agreement: tuple[tuple[float, float], ...]) -> Ranking:
    return Ranking(ids, tuple(coef.double().tolist()), () if stderr is None else tuple(stderr.double().tolist()), agreement)


def _coefficients(importance: InMemory) -> tuple[Tensor, Tensor | None]:
    if isinstance(importance, PairImportance):
        return importance.linear, None
    return importance.coef, importance.stderr


def _fitted(tensors: Mapping[str, Tensor], recipe: Mapping[str, Any]) -> InMemory | None:
    """The model of the run, on its masks; None where they were not kept, or say nothing of their filters.

    An estimate from slopes has a mask for each example: how their losses differ is a matter of the examples.
    """
    if "masks" not in tensors or "losses" not in tensors or recipe.get("estimator", "losses") != "losses":
        return None
    ridge = float(recipe.get("ridge", 0.0))
    try:
        scored = scores(tensors["losses"], recipe.get("transform", "linear"))
        if recipe.get("model") == "pairs":
            return fit_pairs(tensors["masks"], scored, ridge=ridge or 1e-4)
        return fit_importance(tensors["masks"], scored, ridge=ridge)
    except SecateursError:  # too few masks, or no finite loss: nothing can be fitted
        return None


def _agreement(tensors: Mapping[str, Tensor], fitted: InMemory, recipe: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    """Predicted and realised score of each mask, thinned out evenly where there are many."""
    masks, realised = tensors["masks"], scores(tensors["losses"], recipe.get("transform", "linear"))
    predicted = _predicted(fitted, masks)
    chosen = torch.linspace(0, len(masks) - 1, min(_SHOWN, len(masks))).round().long()
    return tuple(zip(predicted[chosen].tolist(), realised[chosen].tolist(), strict=True))


def _predicted(fitted: InMemory, masks: Tensor) -> Tensor:
    if isinstance(fitted, PairImportance):
        return fitted.predict(masks)
    return fitted.intercept + masks.double() @ fitted.coef
