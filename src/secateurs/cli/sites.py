"""`secateurs sites`: where a network can be pruned, and where not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from secateurs.cli.flags import Json, Options, options
from secateurs.cli.inputs import Origin, fresh_model, load_data
from secateurs.cli.terminal import percent, print_json, print_table, say
from secateurs.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

    from secateurs.costs import Cost
    from secateurs.sites import Sites

_SHAPE = Parameter(negative="", consume_multiple=True, show_default="that of a built-in model")


def sites(
    *,
    model: str,
    model_option: Options = (),
    input_shape: Annotated[tuple[int, ...] | None, _SHAPE] = None,
    data: str | None = None,
    data_option: Options = (),
    shortcut: Literal["before", "after"] = "before",
    as_json: Json = False,
) -> None:
    """List a network's sites: where filters can go, which layers lose them, and what those cost for one example.

    What cannot be pruned is listed with the reason, and the MACs that stay because of it.

    Examples:

    `secateurs sites --model resnet20`

    `secateurs sites --model mynets:build --input-shape 3 64 64`

    Parameters
    ----------
    model
        A built-in network such as resnet20, or your own as package.module:function.
    model_option
        name=value for the network's constructor; may be given several times.
    input_shape
        Shape of one example, such as 3 32 32.
    data
        Or take an example from this data set.
    data_option
        name=value for the data set; may be given several times.
    shortcut
        Where the last filters of a residual block are masked: before or after the add.
    as_json
        Print one JSON document on stdout.
    """
    from secateurs.costs import cost
    from secateurs.graph import trace
    from secateurs.sites import find_sites

    origin = Origin(model, data or "", options(model_option, "--model-option"), options(data_option, "--data-option")).settled()
    graph = trace(fresh_model(origin), _example(origin, input_shape))
    found, costs = find_sites(graph, shortcut), cost(graph)
    if as_json:
        print_json(_document(model, found, costs))
    else:
        _print(model, found, costs)


def _example(origin: Origin, shape: tuple[int, ...] | None) -> Tensor:
    import torch

    from secateurs.models import example_input, names

    if shape is not None:
        return torch.randn((2, *shape), generator=torch.Generator().manual_seed(0))
    if origin.data:
        return load_data(origin).train.batch(slice(0, 2)).inputs
    if origin.model in names():
        return example_input(origin.model)
    raise InvalidInput(f"the shape that {origin.model} takes is not known: give --input-shape, or --data for an example.")


def _macs(costs: Cost, layers: tuple[str, ...]) -> int:
    return sum(layer.macs for layer in costs.layers if layer.name in layers)


def _document(model: str, found: Sites, costs: Cost) -> dict[str, object]:
    return {
        "model": model,
        "parameters": costs.parameters,
        "macs": costs.macs,
        "sites": [
            {"name": s.name, "channels": s.channels, "layers": list(s.layers), "macs": _macs(costs, s.layers)} for s in found
        ],
        "unprunable": [{"name": u.name, "reason": u.reason, "macs": u.macs} for u in found.unprunable],
    }


def _print(model: str, found: Sites, costs: Cost) -> None:
    whole = max(costs.macs, 1)
    say(f"{model}: {costs.parameters:,} parameters, {costs.macs:,} MACs for one example, {len(found)} sites")
    rows = [
        (site.name, ", ".join(site.layers), str(site.channels), f"{macs:,}", percent(macs / whole))
        for site in found
        for macs in [_macs(costs, site.layers)]
    ]
    print_table(("site", "layers that lose filters", "channels", "MACs", "of all"), rows, left=(0, 1))
    if found.unprunable:
        say("No site, so these keep all their filters (they still lose the inputs that others no longer give):")
        refused = [(u.name, u.reason, f"{u.macs:,}", percent(u.macs / whole)) for u in found.unprunable]
        print_table(("layer", "reason", "MACs", "of all"), refused, left=(0, 1))
