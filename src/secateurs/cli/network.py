"""`secateurs sites`: where a network can be pruned, and where not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from secateurs.cli.inputs import Json, Options, Origin, build_network, check_device, fresh_model, load_data, options, origin_of
from secateurs.cli.terminal import percent, print_json, print_table, say
from secateurs.errors import InvalidInput, RunError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from secateurs.data import Data
    from secateurs.graph.cost import Cost
    from secateurs.graph.sites import Sites
    from secateurs.graph.trace import Graph


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
    from secateurs.graph.cost import cost
    from secateurs.graph.sites import find_sites
    from secateurs.graph.trace import trace

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


def evaluate(
    run: Path | None = None,
    /,
    *,
    model: str | None = None,
    data: str | None = None,
    model_option: Options = (),
    data_option: Options = (),
    weights: str | None = None,
    split: Literal["train", "search", "test"] = "test",
    batch: int = 256,
    device: str | None = None,
    as_json: Json = False,
) -> None:
    """Measure loss and accuracy of a network on a set that is named, and count its parameters and MACs.

    With a run folder: the network as it came to the run, and as the run left it, example by example: how many answers were
    lost and won, and the drop with its standard error. Else the network that --model, --weights and --data name; the weights
    may be the pruned.safetensors of a run.

    Examples:

    `secateurs eval runs/resnet20-cifar10-1`

    `secateurs eval --model resnet20 --weights public --data cifar10`

    Parameters
    ----------
    run
        A finished run, or one that has stopped.
    model
        A built-in network such as resnet20, or your own as package.module:function.
    data
        digits, cifar10, xor, folder:PATH, or package.module:function that returns DataLoaders.
    model_option
        name=value for the network's constructor; may be given several times.
    data_option
        name=value for the data set; may be given several times.
    weights
        A state dict, the pruned.safetensors of a run, "public" or "builtin".
    split
        The set to measure on.
    batch
        Examples at once.
    device
        Where to compute.
    as_json
        Print one JSON document on stdout.
    """
    check_device(device)
    if run is not None:
        if model is not None or weights is not None:
            raise InvalidInput(f"{run} names its model and weights itself: leave out --model and --weights.")
        origin, files = _of_run(run)
    elif model is None or data is None:
        raise InvalidInput("wanted a run folder, or --model and --data.")
    else:
        given = (options(model_option, "--model-option"), options(data_option, "--data-option"))
        origin = Origin(model, data, *given, weights, device).settled()
        files = {weights or "as built": origin}
    examples = load_data(origin)
    found = {
        name: _measure(build_network(file), examples, split, batch=batch, device=device or file.device)
        for name, file in files.items()
    }
    rows = {name: row for name, (row, _) in found.items()}
    drop = _drop(*(right for _, right in found.values())) if len(found) == 2 else None
    if as_json:
        print_json({"model": origin.model, "data": examples.name, "split": split, "networks": rows, "drop": drop})
        return
    print_table(("network", f"accuracy on {split}", "loss", "examples", "parameters", "MACs"), map(_row, rows.items()))
    if drop is not None:
        error = drop["standard error"]
        say(
            f"{drop['lost']:,} answers lost and {drop['won']:,} won of {drop['count']:,}: a drop of "
            f"{100 * drop['mean']:.2f} points" + (f", standard error {100 * error:.2f}." if error is not None else ".")
        )


def _of_run(run: Path) -> tuple[Origin, dict[str, Origin]]:
    """The origin of a run, and the same with each of the files that the run has left as its weights."""
    from dataclasses import replace

    from secateurs.pruning.folder import read_provenance

    origin = origin_of(read_provenance(run).get("origin", {}), run)
    files = {name: run / path for name, path in (("before", "checkpoints/start.safetensors"), ("pruned", "pruned.safetensors"))}
    found = {name: replace(origin, weights=str(path)) for name, path in files.items() if path.exists()}
    if not found:
        raise RunError(f"{run}: no network in it yet.")
    return origin, found


def _measure(
    network: nn.Module | Graph, data: Data, split: str, *, batch: int, device: str | None
) -> tuple[dict[str, Any], Tensor]:
    """What there is to say of a network, and whether it is right on each of the examples, (N,)."""
    from secateurs.graph.cost import cost
    from secateurs.graph.trace import Graph
    from secateurs.metrics import evaluate as measure

    module = network.module if isinstance(network, Graph) else network
    found = measure(module, data.splits()[split], batch=batch, device=device)
    assert found.values is not None  # the metric is ours
    counted = cost(module, data.train.batch(slice(0, 2)).inputs)
    row = {
        "accuracy": found.accuracy,
        "loss": found.loss,
        "count": found.count,
        "parameters": counted.parameters,
        "macs": counted.macs,
    }
    return row, found.values


def _drop(before: Tensor, after: Tensor) -> dict[str, Any]:
    """What the same examples say of two networks."""
    from secateurs.selection.contract import paired_bound

    found = paired_bound(before, after, None)
    error = float((before - after).std()) / found.images**0.5 if found.images > 1 else None  # one example tells nothing of it
    return {"mean": found.estimate, "standard error": error, "lost": found.lost, "won": found.won, "count": found.images}


def _row(item: tuple[str, Mapping[str, Any]]) -> tuple[str, ...]:
    name, found = item
    return (
        name,
        percent(found["accuracy"], 2),
        f"{found['loss']:.4f}",
        f"{found['count']:,}",
        f"{found['parameters']:,}",
        f"{found['macs']:,}",
    )
