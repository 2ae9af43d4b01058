"""`secateurs sites` and `secateurs eval`: where a network can be pruned, and how well it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from secateurs._util.format import plural
from secateurs._util.terminal import percent, print_json, print_table, say
from secateurs.cli import inputs, trust
from secateurs.config import EngineName
from secateurs.errors import InvalidInput, RunError

if TYPE_CHECKING:
    from torch import Tensor

    from secateurs.data import Data
    from secateurs.graph.sites import Sites
    from secateurs.graph.trace import Example, Graph
    from secateurs.speed.site_times import NetworkTimes

_SHAPE = Parameter(negative="", consume_multiple=True, show_default="that of a built-in model")


@Parameter(name="*")
@dataclass(frozen=True)
class LatencyFlags:
    """How `secateurs sites --latency` times layers."""

    engine: EngineName = "torch"
    """With --latency: what runs the network."""
    batch: int = 1
    """With --latency: examples at once."""
    threads: Annotated[int | None, Parameter(show_default="torch's")] = None
    """With --latency: threads of the engine."""


_LATENCY = LatencyFlags()


def sites(
    *,
    model: inputs.ModelName,
    model_option: inputs.ModelOptions = (),
    input_shape: Annotated[tuple[int, ...] | None, _SHAPE] = None,
    data: str | None = None,
    data_option: inputs.DataOptions = (),
    shortcut: inputs.ShortcutFlag = "before",
    latency: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    timing: LatencyFlags = _LATENCY,
    as_json: inputs.Json = False,
) -> None:
    """List the sites of a network: where filters can be removed, from which layers, and the cost of those for one example.

    Layers that cannot be pruned are listed with the reason and their MACs, and the reason that locks the most with what would
    unlock it. Of attention, features within heads are listed besides whole heads.

    Examples:

    `secateurs sites --model resnet20`

    `secateurs sites --model mynets:build --input-shape 3 64 64`

    `secateurs sites --model resnet56 --latency --engine onnxruntime --threads 1`

    Parameters
    ----------
    input_shape
        Shape of one example, such as 3 32 32.
    data
        Or take an example from this data set.
    latency
        Time the layers of every site at other widths: what a filter costs, and which widths are faster than all larger ones.
    """
    from secateurs.graph.cost import cost
    from secateurs.graph.obstacles import find_obstacles
    from secateurs.graph.sites import find_sites
    from secateurs.graph.trace import trace

    origin = inputs.named_origin(model, data or "", model_option, data_option)
    graph = trace(inputs.fresh_model(origin), _example(origin, input_shape))
    found, costs = find_sites(graph, shortcut, head_widths=True), cost(graph)
    obstacles = find_obstacles(found)
    macs = {site.name: sum(layer.macs for layer in costs.layers if layer.name in site.layers) for site in found}
    times = _site_times(graph, found, timing) if latency else None
    if as_json:
        listed: list[dict[str, Any]] = [
            {"name": s.name, "channels": s.channels, "unit": s.unit, "layers": list(s.layers), "macs": macs[s.name]}
            for s in found
        ]
        for entry, timed in zip(listed, times.sites if times else (), strict=False):
            entry |= {"seconds": timed.seconds, "seconds_a_filter": timed.a_filter, "widths": list(timed.widths)}
        refused = [{"name": u.name, "reason": u.reason, "macs": u.macs} for u in found.unprunable]
        totals = {"model": model, "parameters": costs.parameters, "macs": costs.macs}
        locks = [{"reason": o.reason, "layers": list(o.layers), "macs": o.macs, "remedy": o.remedy} for o in obstacles]
        print_json({**totals, "sites": listed, "unprunable": refused, "obstacles": locks})
        return
    say(f"{model}: {costs.parameters:,} parameters, {costs.macs:,} MACs for one example, {len(found)} sites")

    def share(part: int) -> tuple[str, str]:
        return f"{part:,}", percent(part / max(costs.macs, 1))

    units = {s.name: "" if s.unit == "filters" else f" {s.unit}" for s in found}
    rows = [(s.name, ", ".join(s.layers), f"{s.channels}{units[s.name]}", *share(macs[s.name])) for s in found]
    print_table(("site", "layers that lose filters", "channels", "MACs", "of all"), rows, left=(0, 1))
    if any(s.inside for s in found):
        say("Features are within heads, the same in every head: `secateurs prune --head-widths` removes them too.")
    if times is not None:
        took = f"{1e3 * times.network:.3g} ms"
        say(f"In {timing.engine} at batch {timing.batch} the network takes {took}. A cut changes these layers:")
        shown = [
            (
                t.site,
                f"{1e3 * t.seconds:.3g} ms",
                f"{1e6 * t.a_filter:.3g} µs",
                ", ".join(map(str, t.widths)) or "none: a cut saves no time",
            )
            for t in times.sites
        ]
        print_table(("site", "time", "a filter", "widths that are faster"), shown, left=(0, 3))
    if found.unprunable:
        say("Not prunable: these layers keep all their filters (their inputs may still become fewer):")
        print_table(
            ("layer", "reason", "MACs", "of all"), [(u.name, u.reason, *share(u.macs)) for u in found.unprunable], left=(0, 1)
        )
    if obstacles:
        say(f"What locks the most, {share(obstacles[0].macs)[1]} of all MACs: {obstacles[0]}")


def _site_times(graph: Graph, sites: Sites, timing: LatencyFlags) -> NetworkTimes:
    from secateurs.cli.progress import Status, display
    from secateurs.config import Recipe
    from secateurs.export.engines import engine_for
    from secateurs.speed.site_times import site_times

    recipe = Recipe(engine=timing.engine, latency_batch=timing.batch, latency_threads=timing.threads)
    with display() as screen:
        return site_times(
            graph,
            [site for site in sites if site.channels > 1],
            engine_for(recipe),
            on_layer=lambda done, of: screen.update(Status("Timing layers", "kind", done, of)),
        )


def _example(origin: inputs.Origin, shape: tuple[int, ...] | None) -> Example:
    import torch

    from secateurs.models import example_input, names

    if shape is not None:
        return torch.randn((2, *shape), generator=torch.Generator().manual_seed(0))
    if origin.data:
        return inputs.load_data(origin).train.batch(slice(0, 2)).inputs
    if origin.model in names():
        return example_input(origin.model)
    raise InvalidInput(f"the input shape of {origin.model} is not known: give --input-shape, or --data for an example.")


def evaluate(
    run: Path | None = None,
    /,
    *,
    model: inputs.OptionalModelName = None,
    data: inputs.OptionalDataName = None,
    model_option: inputs.ModelOptions = (),
    data_option: inputs.DataOptions = (),
    weights: str | None = None,
    split: Literal["train", "val", "test"] = "test",
    batch: int = 256,
    device: inputs.Device = None,
    as_json: inputs.Json = False,
) -> None:
    """Measure loss and accuracy of a network on one set, and count its parameters and MACs.

    With a run folder: the original and the pruned network, compared example by example: how many correct answers were lost and
    won, and the drop with its standard error. Otherwise the network that --model, --weights and --data name; the weights may be
    the pruned.safetensors of a run.

    Examples:

    `secateurs eval runs/resnet20-cifar10-1`

    `secateurs eval --model resnet20 --weights public --data cifar10`

    Parameters
    ----------
    run
        A run that is finished or stopped; one that was started from Python needs --model and --data.
    weights
        A state dict, the pruned.safetensors of a run, "public" or "builtin".
    split
        The set to measure on.
    batch
        Examples at once.
    """
    inputs.check_device(device)
    if run is not None:
        if weights is not None:
            raise InvalidInput(f"{run} has the weights of its networks: leave out --weights.")
        origin = trust.run_origin(run, trust.Repeated(model, data, model_option, data_option))
        networks = _networks_of(run, origin)
    elif model is None or data is None:
        raise InvalidInput("wanted a run folder, or --model and --data.")
    else:
        origin = inputs.named_origin(model, data, model_option, data_option, weights, device)
        networks = {weights or "as built": origin}
    inputs.check_device(device or origin.device)
    examples = inputs.load_data(origin)
    found = {name: _measure(one, examples, split, batch=batch, device=device or one.device) for name, one in networks.items()}
    rows = {name: row for name, (row, _) in found.items()}
    drop = _drop(*(correct for _, correct in found.values())) if len(found) == 2 else None
    if as_json:
        print_json({"model": origin.model, "data": examples.name, "split": split, "networks": rows, "drop": drop})
        return
    shown = [
        (name, percent(row["accuracy"], 2), f"{row['loss']:.4f}", *(f"{row[key]:,}" for key in ("count", "parameters", "macs")))
        for name, row in rows.items()
    ]
    print_table(("network", f"accuracy on {split}", "loss", "examples", "parameters", "MACs"), shown)
    if drop is not None:
        error = "" if drop["standard error"] is None else f", standard error {100 * drop['standard error']:.2f}"
        counts = f"{plural(drop['lost'], 'answer')} lost and {drop['won']:,} won of {drop['count']:,}"
        say(f"{counts}: a drop of {100 * drop['mean']:.2f} points{error}.")


def _networks_of(run: Path, origin: inputs.Origin) -> dict[str, inputs.Origin]:
    """The origin with each of the networks in the folder of the run as its weights."""
    if not origin.data:
        raise InvalidInput(f"{run}: was started from Python, so it does not say how to load its data: give --data.")
    files = {"before": run / "checkpoints/start.safetensors", "pruned": run / "pruned.safetensors"}
    found = {name: replace(origin, weights=str(path)) for name, path in files.items() if path.exists()}
    if not found:
        raise RunError(f"{run}: holds no network yet. Resume the run with: secateurs resume {run}")
    return found


def _measure(
    origin: inputs.Origin, data: Data, split: str, *, batch: int, device: str | None
) -> tuple[Mapping[str, Any], Tensor]:
    """The figures of a network, and whether it is correct on each of the examples, (N,)."""
    from secateurs.graph.cost import cost
    from secateurs.graph.trace import Graph
    from secateurs.metrics import evaluate as measure

    network = inputs.build_network(origin)
    module = network.module if isinstance(network, Graph) else network
    inputs.check_fit(module, data, origin)
    examples = {"train": data.train, "val": data.search, "test": data.test}[split]
    if examples is None:
        raise InvalidInput(f"{data.name} has no test set: measure another one with --split val.")
    found = measure(module, examples, batch=batch, device=device)
    assert found.values is not None  # the metric is ours
    counted = cost(module, data.train.batch(slice(0, 2)).inputs)
    row = {"accuracy": found.accuracy, "loss": found.loss, "count": found.count}
    return {**row, "parameters": counted.parameters, "macs": counted.macs}, found.values


def _drop(before: Tensor, after: Tensor) -> dict[str, Any]:
    """The drop between two networks on the same examples."""
    from secateurs.selection.contract import paired_bound

    found = paired_bound(before, after, None)
    error = float((before - after).std()) / found.images**0.5 if found.images > 1 else None  # one example has no spread
    return {"mean": found.estimate, "standard error": error, "lost": found.lost, "won": found.won, "count": found.images}
