"""Numbers of filters worth keeping at a site on this device: the edges of the measured steps of latency.

Latency does not fall with every filter: kernels work in blocks, so that 57 filters can take as long as 64, or longer. For many
widths of a site, copies of the layers that lose filters or inputs are timed. A width is allowed if all wider ones are slower.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from time import perf_counter

import torch
from torch import Tensor, fx, nn

from secateurs._util.modules import device_of
from secateurs.compaction.nodes import balanced, narrow_layer_
from secateurs.errors import InvalidInput, UnknownSite
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.channels import all_of, none_of
from secateurs.graph.flow import Flows, Layer, analyse, find_flows
from secateurs.graph.latency import median, undisturbed
from secateurs.graph.sites import Site, node_masks
from secateurs.graph.trace import Graph, shape_of

MARGIN = 4.0  # standard errors: of 100 simulated sites with 48 equal widths and 7 rounds, 1 to 4 then had an edge (3.0: 6 to 9)
ALL_UP_TO = 32  # filters: narrower sites are measured at every width
POINTS = 16  # of the grid of a wider site, each with its two neighbours
MOST_CALLS = 20  # of short work in a round; the fastest counts
RESAMPLES = 500  # bootstrap samples: 80 lie outside either end of the interval

Call = Callable[[], object]
Part = tuple[nn.Module, tuple[int, ...]]
"""A layer, and the shape of its input."""


@dataclass(frozen=True)
class Widths:
    """Widths worth keeping at a site, and the latencies that they follow from."""

    widths: tuple[int, ...]  # allowed, descending, all below the full width; empty where no cut makes the site faster
    seconds: dict[int, float]  # for one batch, median over rounds, by measured width, descending; the first is the full one


def fast_widths(
    graph: Graph,
    site: Site,
    *,
    batch: int = 64,
    device: str | torch.device | None = None,
    repeats: int = 7,
    shortest: float = 1e-2,
) -> Widths:
    """Find the numbers of filters of `site` at the edges of the measured latency steps of `device` (None: the network's own).

    The layers that a cut of the site makes narrower are timed at the shapes that they have for `batch` examples, in
    inference mode and with torch's number of threads. Each of `repeats` rounds times every width once, in a random
    order. Sites of up to 32 filters are measured at every width, wider ones at the multiples of the smallest 4·2^k that
    gives at most 16 multiples, and their neighbours. Other ops (norms, activations, sums) are not timed. Work that takes
    less than `shortest` seconds at full width is repeated for as long in every round, at most 20 times. On a busy machine
    fewer widths stand out from the noise, and more `repeats` help. The network is not modified.
    """
    if batch < 1:
        raise InvalidInput(f"batch: got {batch}, wanted 1 or more examples.")
    if repeats < 5:
        raise InvalidInput(f"repeats: got {repeats}, wanted at least 5 rounds: fewer do not show their own noise.")
    target = device_of(graph.module) if device is None else torch.device(device)
    if target.type == "meta":
        raise InvalidInput(
            "device: the meta device computes nothing and has no latency. Name the device that will run the network."
        )
    parts = _narrowed_layers(graph, site, _candidates(site.channels), batch)
    seconds = _measure(_calls(parts, target), repeats, shortest)
    medians = {width: float(median(torch.tensor(times, dtype=torch.float64))) for width, times in seconds.items()}
    return Widths(edges(seconds), medians)


def edges(seconds: Mapping[int, Sequence[float]], margin: float = MARGIN) -> tuple[int, ...]:
    """Find the widths that are faster than the widest and than every wider edge, descending: their medians strictly fall.

    `seconds` holds for every width its times in the same rounds. Faster means by more than `margin` standard errors of the
    difference of two medians. Where nothing is faster than the widest there is no edge: filters removed there would cost
    accuracy and save no time.
    """
    widths = sorted(seconds, reverse=True)
    times = torch.tensor([tuple(seconds[width]) for width in widths], dtype=torch.float64)
    medians, logs = median(times), times.log()
    # less what each round adds at most widths alike: a slow minute says nothing of a width
    steady = logs - median((logs - median(logs)[:, None]).T)
    center, error = median(steady), _standard_errors(steady)
    found, last = [], 0
    for i in range(1, len(widths)):
        faster = center[last] - center[i] > margin * torch.hypot(error[i], error[last])
        if faster and medians[i] < medians[last]:
            found.append(widths[i])
            last = i
    return tuple(found)


def _standard_errors(steady: Tensor) -> Tensor:
    """Standard error (W,) of the median of each row (W, R), by resampling rounds: half the width of the middle 68 %.

    A few rounds of one width can agree by chance, so no width counts as less noisy than half of the others.
    """
    rounds = steady.shape[1]
    drawn = torch.randint(rounds, (RESAMPLES, rounds), generator=torch.Generator().manual_seed(0))
    low, high = median(steady[:, drawn]).quantile(torch.tensor([0.16, 0.84], dtype=steady.dtype), dim=1)
    own = (high - low) / 2
    return torch.maximum(own, median(own))


def _candidates(channels: int) -> list[int]:
    """Widths to measure, descending, the full one first."""
    if channels <= ALL_UP_TO:
        return list(range(channels, 0, -1))
    step = 4
    while channels / step > POINTS:
        step *= 2
    near = {point + by for point in range(step, channels + 1, step) for by in (-1, 0, 1)}
    return sorted({channels, *(width for width in near if 0 < width < channels)}, reverse=True)


def _narrowed_layers(graph: Graph, site: Site, widths: Iterable[int], batch: int) -> dict[int, list[Part]]:
    """For each width, the layers whose size depends on it as compaction leaves them, without values, in network order.

    Shapes are those of `batch` examples. A layer without inputs or filters is left out: compaction folds it away.
    """
    flows, factor = find_flows(spread_sums(graph.module)), batch / len(graph.example[0])
    nodes = {node.name: node for node, flow in flows.of.items() if flow.axis is not None}
    if any(p.node not in nodes or flows.width(nodes[p.node]) != p.width for p in site.points):
        raise UnknownSite(
            f"site {site.name!r} of {site.channels} channels is not in this graph. An earlier cut may have "
            f"narrowed it: look it up again with find_sites(graph)."
        )
    live = {}
    for width in widths:
        masks = node_masks([(site, _spread(width, site.channels))])
        live[width] = analyse(flows, {nodes[name]: mask for name, (_, mask) in masks.items()}).live
    parts: dict[int, list[Part]] = {width: [] for width in live}
    for node, flow in flows.of.items():
        if not isinstance(flow, Layer):
            continue
        layouts = {width: _layouts(flows, node, flow, found) for width, found in live.items()}
        if len({(int(inputs.sum()), int(outputs.sum()), groups) for inputs, outputs, groups in layouts.values()}) == 1:
            continue
        original = copy.deepcopy(graph.module.get_submodule(str(node.target))).to("meta")
        for width, (inputs, outputs, groups) in layouts.items():
            if bool(inputs.any()) and bool(outputs.any()):
                narrow = copy.deepcopy(original)
                list(narrow_layer_(narrow, flow, inputs, outputs, groups))
                parts[width].append((narrow, _input_shape(node, flow, int(inputs.sum()), factor)))
    return parts


def _spread(width: int, channels: int) -> Tensor:
    """A mask (C,) that keeps `width` evenly spread channels, so that grouped layers keep as many per group as possible."""
    keep = none_of(channels)
    keep[torch.arange(width) * channels // width] = True
    return keep


def _layouts(flows: Flows, node: fx.Node, flow: Layer, live: Callable[[fx.Node, int], Tensor]) -> tuple[Tensor, Tensor, int]:
    """The inputs and filters that a layer keeps, and its groups, all with equal numbers of both."""
    inputs = all_of(flow.inputs) if flow.reads_all else live(flows.inputs[node][0], flow.inputs)
    outputs = live(node, flow.filters)
    return balanced(flow, inputs, outputs) if flow.groups > 1 and bool(outputs.any()) else (inputs, outputs, flow.groups)


def _input_shape(node: fx.Node, flow: Layer, inputs: int, factor: float) -> tuple[int, ...]:
    """Shape of the layer's input for `factor` times the examples of the graph's own batch."""
    dims = shape_of(node.all_input_nodes[0]).dims
    assert dims is not None
    shape = list(dims) if flow.in_axis == 0 else [math.ceil(dims[0] * factor), *dims[1:]]
    if not flow.reads_all:
        shape[flow.in_axis] = inputs
    return tuple(shape)


def _calls(parts: Mapping[int, Sequence[Part]], device: torch.device) -> dict[int, Call]:
    """For each width, a call that runs its layers on random numbers.

    Weights and inputs are views of one block per dtype, so that many widths take the memory of one.
    """
    largest: dict[torch.dtype, int] = {}
    for layer, shape in chain.from_iterable(parts.values()):
        for each in layer.parameters():
            largest[each.dtype] = max(largest.get(each.dtype, 0), each.numel(), math.prod(shape))
    generator = torch.Generator(device).manual_seed(0)
    blocks = {dtype: torch.rand(count, device=device, generator=generator).to(dtype) for dtype, count in largest.items()}

    def view(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        return blocks[dtype][: math.prod(shape)].view(*shape)

    def filled(layer: nn.Module, shape: Sequence[int]) -> Call:
        for name, each in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(view(each.dtype, each.shape), requires_grad=False))
        return partial(layer, view(next(layer.parameters()).dtype, shape))

    def run(calls: Sequence[Call]) -> None:
        for call in calls:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return {width: partial(run, [filled(*part) for part in found]) for width, found in parts.items()}


def _measure(calls: Mapping[int, Call], repeats: int, shortest: float) -> dict[int, list[float]]:
    """Seconds of each call in every round, in which each is made once, in random order; a first round warms up."""
    widths, generator = list(calls), torch.Generator().manual_seed(0)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    with torch.inference_mode(), undisturbed():
        for width in widths:
            calls[width]()
        times = min(MOST_CALLS, math.ceil(shortest / _fastest(calls[max(widths)], 1)))
        for _ in range(repeats):
            for i in torch.randperm(len(widths), generator=generator).tolist():
                seconds[widths[i]].append(_fastest(calls[widths[i]], times))
    return seconds


def _fastest(call: Call, times: int) -> float:
    """Seconds of the fastest of `times` calls in a row: interruptions only ever add time."""
    stamps = [perf_counter()]
    for _ in range(times):
        call()
        stamps.append(perf_counter())
    return min(after - before for before, after in pairwise(stamps))
