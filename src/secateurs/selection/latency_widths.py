"""Numbers of filters worth keeping at a site on this device: the edges of the measured steps of latency.

Latency does not fall with every filter: kernels work in blocks, so that 57 filters can take as long as 64, or longer. For many
widths of a site, copies of the layers that lose filters or inputs are timed. A width is allowed if all wider ones are slower.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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


@dataclass(frozen=True)
class Widths:
    """Widths worth keeping at a site, and the latencies that they follow from."""

    widths: tuple[int, ...]  # allowed, descending, all below the full width; empty where no cut makes the site faster
    seconds: dict[int, float]  # for one batch, median over rounds, by measured width, descending; the first is the full one


@dataclass(frozen=True, eq=False)
class _NarrowedLayer:
    """A layer as a cut leaves it: `inputs` and `outputs` are layouts with equal numbers of channels in each of `groups`."""

    node: fx.Node
    flow: Layer
    inputs: Tensor
    outputs: Tensor
    groups: int

    @property
    def size(self) -> tuple[int, int, int]:
        """Inputs, filters and groups, which determine its latency."""
        return int(self.inputs.sum()), int(self.outputs.sum()), self.groups


def fast_widths(
    graph: Graph,
    site: Site,
    *,
    batch: int = 64,
    device: str | torch.device | None = None,
    repeats: int = 7,
    grid: int | None = None,
    shortest: float = 1e-2,
) -> Widths:
    """Find the numbers of filters of `site` at the edges of the measured latency steps of `device` (None: the network's own).

    The layers that a cut of the site makes narrower are timed at the shapes that they have for `batch` examples, in
    inference mode and with torch's number of threads. Each of `repeats` rounds times every width once, in a random
    order. Sites of up to 32 filters are measured at every width, wider ones at the multiples of `grid` and their
    neighbours (None: the smallest 4·2^k that gives at most 16 multiples). Other ops (norms, activations, sums) are not
    timed. Work that takes less than `shortest` seconds at full width is repeated for as long in every round, at most 20
    times. On a busy machine fewer widths stand out from the noise, and more `repeats` help. The network is not modified.
    """
    if batch < 1:
        raise InvalidInput(f"batch: got {batch}, wanted 1 or more examples.")
    if repeats < 5:
        raise InvalidInput(f"repeats: got {repeats}, wanted at least 5 rounds: fewer do not show their own noise.")
    if grid is not None and grid < 1:
        raise InvalidInput(f"grid: got {grid}, wanted 1 or more (8: multiples of 8 and their neighbours), or None.")
    target = device_of(graph.module) if device is None else torch.device(device)
    if target.type == "meta":
        raise InvalidInput(
            "device: the meta device computes nothing and has no latency. Name the device that will run the network."
        )
    layers = _layers_by_width(graph, site, _candidates(site.channels, grid))
    seconds = _measure(_calls(graph, layers, batch, target), repeats, shortest)
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
    medians, steady = median(times), _without_drift(times.log())
    center, error = median(steady), _standard_errors(steady)
    found, last = [], 0
    for i in range(1, len(widths)):
        faster = center[last] - center[i] > margin * torch.hypot(error[i], error[last])
        if faster and medians[i] < medians[last]:
            found.append(widths[i])
            last = i
    return tuple(found)


def _without_drift(logs: Tensor) -> Tensor:
    """Logarithms of seconds (W, R) less what each round adds at most widths alike: a slow minute says nothing of a width."""
    return logs - median((logs - median(logs)[:, None]).T)


def _standard_errors(steady: Tensor) -> Tensor:
    """Standard error (W,) of the median of each row (W, R), by resampling rounds: half the width of the middle 68 %.

    A few rounds of one width can agree by chance, so no width counts as less noisy than half of the others.
    """
    rounds = steady.shape[1]
    drawn = torch.randint(rounds, (RESAMPLES, rounds), generator=torch.Generator().manual_seed(0))
    low, high = median(steady[:, drawn]).quantile(torch.tensor([0.16, 0.84], dtype=steady.dtype), dim=1)
    own = (high - low) / 2
    return torch.maximum(own, median(own))


def _candidates(channels: int, grid: int | None) -> list[int]:
    """Widths to measure, descending, the full one first."""
    if channels <= ALL_UP_TO:
        return list(range(channels, 0, -1))
    step = 4 if grid is None else grid
    while grid is None and channels / step > POINTS:
        step *= 2
    near = {point + by for point in range(step, channels + 1, step) for by in (-1, 0, 1)}
    return sorted({channels, *(width for width in near if 0 < width < channels)}, reverse=True)


def _layers_by_width(graph: Graph, site: Site, widths: Iterable[int]) -> dict[int, list[_NarrowedLayer]]:
    """For each width, the narrowed layers whose size depends on the width, in network order."""
    flows = find_flows(spread_sums(graph.module))
    nodes = {node.name: node for node, flow in flows.of.items() if flow.axis is not None}
    if any(p.node not in nodes or flows.width(nodes[p.node]) != p.width for p in site.points):
        raise UnknownSite(
            f"site {site.name!r} of {site.channels} channels is not in this graph. An earlier cut may have "
            f"narrowed it: look it up again with find_sites(graph)."
        )
    layers = {}
    for width in widths:
        masks = node_masks([(site, _spread(width, site.channels))])
        layers[width] = _narrowed_layers(flows, {nodes[name]: mask for name, (_, mask) in masks.items()})
    sizes = {node: {found[node].size for found in layers.values()} for node in layers[site.channels]}
    return {width: [found[node] for node in sizes if len(sizes[node]) > 1] for width, found in layers.items()}


def _spread(width: int, channels: int) -> Tensor:
    """A mask (C,) that keeps `width` evenly spread channels, so that grouped layers keep as many per group as possible."""
    keep = none_of(channels)
    keep[torch.arange(width) * channels // width] = True
    return keep


def _narrowed_layers(flows: Flows, masks: Mapping[fx.Node, Tensor]) -> dict[fx.Node, _NarrowedLayer]:
    """All layers of the network as compaction leaves them when the outputs of these nodes are masked."""
    live = analyse(flows, masks).live
    found = {}
    for node, flow in flows.of.items():
        if isinstance(flow, Layer):
            source = flows.inputs[node][0]
            inputs = all_of(flow.inputs) if flow.reads_all else live(source, flow.inputs)
            outputs, groups = live(node, flow.filters), flow.groups
            if groups > 1 and bool(outputs.any()):
                inputs, outputs, groups = balanced(flow, inputs, outputs)
            found[node] = _NarrowedLayer(node, flow, inputs, outputs, groups)
    return found


def _calls(graph: Graph, layers: Mapping[int, Sequence[_NarrowedLayer]], batch: int, device: torch.device) -> dict[int, Call]:
    """For each width, a call that runs its layers; a layer without inputs or filters is folded away."""
    factor = batch / len(graph.example[0])
    originals: dict[fx.Node, nn.Module] = {}
    work: dict[int, list[tuple[nn.Module, tuple[int, ...]]]] = {width: [] for width in layers}
    for width, found in layers.items():
        for layer in found:
            if bool(layer.inputs.any()) and bool(layer.outputs.any()):
                if layer.node not in originals:
                    module = graph.module.get_submodule(str(layer.node.target))
                    originals[layer.node] = copy.deepcopy(module).to("meta")
                narrow = copy.deepcopy(originals[layer.node])
                list(narrow_layer_(narrow, layer.flow, layer.inputs, layer.outputs, layer.groups))
                work[width].append((narrow, _input_shape(layer, factor)))
    pool = _TensorPool([part for parts in work.values() for part in parts], device)
    return {width: _run_all([pool.fill(*part) for part in parts], device) for width, parts in work.items()}


def _input_shape(layer: _NarrowedLayer, factor: float) -> tuple[int, ...]:
    """Shape of the layer's input for `factor` times the examples of the graph's own batch."""
    dims = shape_of(layer.node.all_input_nodes[0]).dims
    assert dims is not None
    axis = layer.flow.in_axis
    shape = list(dims) if axis == 0 else [math.ceil(dims[0] * factor), *dims[1:]]
    if not layer.flow.reads_all:
        shape[axis] = int(layer.inputs.sum())
    return tuple(shape)


class _TensorPool:
    """Random numbers for all weights and inputs: views of one block per dtype, so that many widths take the memory of one."""

    def __init__(self, parts: Iterable[tuple[nn.Module, tuple[int, ...]]], device: torch.device) -> None:
        largest: dict[torch.dtype, int] = {}
        for layer, shape in parts:
            for parameter in layer.parameters():
                needed = max(parameter.numel(), math.prod(shape))
                largest[parameter.dtype] = max(largest.get(parameter.dtype, 0), needed)
        generator = torch.Generator(device).manual_seed(0)
        self.blocks = {
            dtype: torch.rand(count, device=device, generator=generator).to(dtype) for dtype, count in largest.items()
        }

    def fill(self, layer: nn.Module, shape: tuple[int, ...]) -> Call:
        """Give the layer weights; return a call that runs it on an input of that shape."""
        for name, parameter in list(layer.named_parameters()):
            view = self._view(parameter.dtype, parameter.shape)
            layer.register_parameter(name, nn.Parameter(view, requires_grad=False))
        given = self._view(next(layer.parameters()).dtype, shape)
        return lambda: layer(given)

    def _view(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        return self.blocks[dtype][: math.prod(shape)].view(*shape)


def _run_all(calls: Sequence[Call], device: torch.device) -> Call:
    def run() -> None:
        for call in calls:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


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
