"""Which numbers of filters are worth keeping at a site on this device: the edges of the measured steps of latency.

Time does not fall with every filter: kernels work in blocks, so that 57 filters can take as long as 64, or longer. For many
widths of a site the layers that lose filters or inputs are timed as throw-away layers; allowed is what is faster than all that
is wider.
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
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph, shape_of

MARGIN = 4.0  # standard errors: of 100 simulated sites with 48 equal widths and 7 rounds, 1 to 4 then had an edge (3.0: 6 to 9)
ALL_UP_TO = 32  # filters: narrower sites are measured at every width
POINTS = 16  # of the grid of a wider site, each with its two neighbours
SHORTEST = 1e-2  # seconds: work that is shorter at full width is repeated for as long in every round …
MOST_CALLS = 20  # … but no more often than this; the quickest counts
RESAMPLES = 500  # bootstrap samples: 80 lie outside either end of the interval

Call = Callable[[], object]


@dataclass(frozen=True)
class Widths:
    """What was measured at a site, and the numbers of kept filters that it speaks for."""

    widths: tuple[int, ...]  # allowed, descending, all below the full width; empty where no cut makes the site faster
    seconds: dict[int, float]  # for one batch, median over rounds, by measured width, descending; the first is the full one


@dataclass(frozen=True, eq=False)
class _Piece:
    """A layer as a cut leaves it: `inputs` and `outputs` are layouts with as many channels in each of `groups`."""

    node: fx.Node
    flow: Layer
    inputs: Tensor
    outputs: Tensor
    groups: int

    @property
    def size(self) -> tuple[int, int, int]:
        """Inputs, filters and groups: what its time depends on."""
        return int(self.inputs.sum()), int(self.outputs.sum()), self.groups


def fast_widths(
    graph: Graph,
    site: Site,
    *,
    batch: int = 64,
    device: str | torch.device | None = None,
    repeats: int = 7,
    grid: int | None = None,
) -> Widths:
    """The numbers of filters of `site` at the edges of the measured latency steps of `device` (None: the network's own).

    Timed are the layers that a cut of the site makes narrower, at the shapes that they have for `batch` examples, in
    inference mode and with the threads that torch is set to. Each of `repeats` rounds visits every width once, in an order
    of its own. Sites of up to 32 filters are measured at every width, wider ones at the multiples of `grid` and their
    neighbours (None: the smallest 4·2^k that gives at most 16 multiples). Other ops (norms, activations, sums) are not
    timed. On a busy machine fewer widths stand out from the noise, and more `repeats` help. The network is not touched.
    """
    _check(batch, repeats, grid)
    pieces = _pieces_by_width(graph, site, _candidates(site.channels, grid))
    calls = _calls(graph, pieces, batch, _place(graph, device))
    seconds = _measured(calls, repeats)
    return Widths(edges(seconds), {width: _median(times) for width, times in seconds.items()})


def edges(seconds: Mapping[int, Sequence[float]], margin: float = MARGIN) -> tuple[int, ...]:
    """The widths that are faster than the widest and than every wider edge, descending: their medians strictly fall.

    `seconds` holds for every width its times in the same rounds. Faster means by more than `margin` standard errors of the
    difference of two medians, as the rounds show them. Where nothing is faster than the widest, as on a flat staircase,
    there is no edge: filters removed there would cost accuracy and save no time.
    """
    widths = sorted(seconds, reverse=True)
    times = torch.tensor([tuple(seconds[width]) for width in widths], dtype=torch.float64)
    medians, steady = median(times), _without_drift(times.log())
    place, error = median(steady), _standard_errors(steady)
    found, last = [], 0
    for i in range(1, len(widths)):
        faster = place[last] - place[i] > margin * torch.hypot(error[i], error[last])
        if faster and medians[i] < medians[last]:
            found.append(widths[i])
            last = i
    return tuple(found)


def _without_drift(logs: Tensor) -> Tensor:
    """Logarithms of seconds (W, R) less what each round adds at most widths alike: a slow minute says nothing of a width."""
    return logs - median((logs - median(logs)[:, None]).T)


def _standard_errors(steady: Tensor) -> Tensor:
    """Standard error (W,) of the median of each row (W, R), by resampling rounds: half the width of the middle 68 %.

    Few rounds of one width can agree by chance: none counts as less noisy than half of the others.
    """
    rounds = steady.shape[1]
    drawn = torch.randint(rounds, (RESAMPLES, rounds), generator=torch.Generator().manual_seed(0))
    low, high = median(steady[:, drawn]).quantile(torch.tensor([0.16, 0.84], dtype=steady.dtype), dim=1)
    own = (high - low) / 2
    return torch.maximum(own, median(own))


def _check(batch: int, repeats: int, grid: int | None) -> None:
    if batch < 1:
        raise InvalidInput(f"batch: got {batch}, wanted 1 or more examples.")
    if repeats < 5:
        raise InvalidInput(f"repeats: got {repeats}, wanted at least 5 rounds: fewer do not show their own noise.")
    if grid is not None and grid < 1:
        raise InvalidInput(f"grid: got {grid}, wanted 1 or more (8: multiples of 8 and their neighbours), or None.")


def _candidates(channels: int, grid: int | None) -> list[int]:
    """The widths to measure, descending, the full one first."""
    if channels <= ALL_UP_TO:
        return list(range(channels, 0, -1))
    step = 4 if grid is None else grid
    while grid is None and channels / step > POINTS:
        step *= 2
    near = {point + by for point in range(step, channels + 1, step) for by in (-1, 0, 1)}
    return sorted({channels, *(width for width in near if 0 < width < channels)}, reverse=True)


def _place(graph: Graph, device: str | torch.device | None) -> torch.device:
    place = device_of(graph.module) if device is None else torch.device(device)
    if place.type == "meta":
        raise InvalidInput(
            "the meta device computes nothing, so it has no latency: name the device that the network will run on."
        )
    return place


def _pieces_by_width(graph: Graph, site: Site, widths: Iterable[int]) -> dict[int, list[_Piece]]:
    """For each width the layers whose size depends on it, in network order, as they then are."""
    flows = find_flows(spread_sums(graph.module))
    place = next((node for node in flows.of if node.name == site.node), None)
    if place is None or flows.of[place].axis is None or flows.width(place) != site.channels:
        raise UnknownSite(
            f"site {site.name!r} of {site.channels} channels is not in this graph as it is now. An earlier cut may have "
            f"narrowed it: look it up again with find_sites(graph)."
        )
    pieces = {width: _pieces(flows, place, _spread(width, site.channels)) for width in widths}
    sizes = {node: {found[node].size for found in pieces.values()} for node in pieces[site.channels]}
    return {width: [found[node] for node in sizes if len(sizes[node]) > 1] for width, found in pieces.items()}


def _spread(width: int, channels: int) -> Tensor:
    """A mask (C,) that keeps `width` channels, evenly spread: then grouped layers keep as many a group as they can."""
    keep = none_of(channels)
    keep[torch.arange(width) * channels // width] = True
    return keep


def _pieces(flows: Flows, place: fx.Node, keep: Tensor) -> dict[fx.Node, _Piece]:
    """All layers of the network as compaction leaves them when the channels behind `place` are masked by `keep`."""
    live = analyse(flows, {place: keep}).live
    pieces = {}
    for node, flow in flows.of.items():
        if isinstance(flow, Layer):
            source = flows.inputs[node][0]
            inputs = all_of(flow.inputs) if flow.reads_all else live(source, flow.inputs)
            outputs, groups = live(node, flow.filters), flow.groups
            if groups > 1 and bool(outputs.any()):
                inputs, outputs, groups = balanced(flow, inputs, outputs)
            pieces[node] = _Piece(node, flow, inputs, outputs, groups)
    return pieces


def _calls(graph: Graph, pieces: Mapping[int, list[_Piece]], batch: int, place: torch.device) -> dict[int, Call]:
    """For each width one run of its layers on inputs of their shapes; a layer without inputs or filters is folded away."""
    layers = {
        piece.node: copy.deepcopy(graph.module.get_submodule(str(piece.node.target))).to("meta")
        for piece in next(iter(pieces.values()))
    }
    work: dict[int, list[tuple[nn.Module, tuple[int, ...]]]] = {
        width: [
            (_narrowed(layers[piece.node], piece), _input_shape(piece, batch / len(graph.example[0])))
            for piece in found
            if bool(piece.inputs.any()) and bool(piece.outputs.any())
        ]
        for width, found in pieces.items()
    }
    supply = _Supply([part for parts in work.values() for part in parts], place)
    return {width: _caller([supply.fill(*part) for part in parts], place) for width, parts in work.items()}


def _narrowed(layer: nn.Module, piece: _Piece) -> nn.Module:
    narrow = copy.deepcopy(layer)
    for _ in narrow_layer_(narrow, piece.flow, piece.inputs, piece.outputs, piece.groups):
        pass  # which weights survive is of no interest here
    return narrow


def _input_shape(piece: _Piece, times: float) -> tuple[int, ...]:
    """The shape of the layer's input when there are `times` as many examples as in the graph's own."""
    dims = shape_of(piece.node.all_input_nodes[0]).dims
    assert dims is not None
    axis = piece.flow.in_axis
    shape = list(dims) if axis == 0 else [math.ceil(dims[0] * times), *dims[1:]]
    if not piece.flow.reads_all:
        shape[axis] = int(piece.inputs.sum())
    return tuple(shape)


class _Supply:
    """Numbers for all weights and inputs: views of one block for each dtype, so that many widths take the memory of one."""

    def __init__(self, parts: Iterable[tuple[nn.Module, tuple[int, ...]]], place: torch.device) -> None:
        largest: dict[torch.dtype, int] = {}
        for layer, shape in parts:
            for parameter in layer.parameters():
                needed = max(parameter.numel(), math.prod(shape))
                largest[parameter.dtype] = max(largest.get(parameter.dtype, 0), needed)
        generator = torch.Generator(place).manual_seed(0)
        self.blocks = {
            dtype: torch.rand(count, device=place, generator=generator).to(dtype) for dtype, count in largest.items()
        }

    def fill(self, layer: nn.Module, shape: tuple[int, ...]) -> Call:
        """Give the layer weights; returns its run on an input of that shape."""
        for name, parameter in list(layer.named_parameters()):
            view = self._view(parameter.dtype, parameter.shape)
            layer.register_parameter(name, nn.Parameter(view, requires_grad=False))
        given = self._view(next(layer.parameters()).dtype, shape)
        return lambda: layer(given)

    def _view(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        return self.blocks[dtype][: math.prod(shape)].view(*shape)


def _caller(runs: Sequence[Call], place: torch.device) -> Call:
    """One after the other, to their end: a GPU is waited for."""

    def run_all() -> None:
        for run in runs:
            run()
        if place.type == "cuda":
            torch.cuda.synchronize(place)

    return run_all


def _measured(calls: Mapping[int, Call], repeats: int) -> dict[int, list[float]]:
    """Seconds of each call in every round, in which each is made once, in random order; a first round warms up."""
    widths, generator = list(calls), torch.Generator().manual_seed(0)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    with torch.inference_mode(), undisturbed():
        for width in widths:
            calls[width]()
        times = min(MOST_CALLS, math.ceil(SHORTEST / _quickest(calls[max(widths)], 1)))
        for _ in range(repeats):
            for i in torch.randperm(len(widths), generator=generator).tolist():
                seconds[widths[i]].append(_quickest(calls[widths[i]], times))
    return seconds


def _quickest(call: Call, times: int) -> float:
    """Seconds of the quickest of `times` calls in a row: what interrupts a call only ever adds."""
    stamps = [perf_counter()]
    for _ in range(times):
        call()
        stamps.append(perf_counter())
    return min(after - before for before, after in pairwise(stamps))


def _median(times: Sequence[float]) -> float:
    return float(median(torch.tensor(times, dtype=torch.float64)))
