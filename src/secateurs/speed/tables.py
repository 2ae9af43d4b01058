"""How long a network takes at other widths: layers are timed in an engine at the sizes that cuts leave, and added up.

Times are kept in a file for each machine and engine, so that a layer of a known shape is not timed again, and in the run's
journal, so that a resumed run decides as it would have.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TypedDict

import torch
from torch import fx, nn

from secateurs._util.decode import Malformed, checked, decode_json, read_text_file
from secateurs._util.download import home
from secateurs._util.files import write_text
from secateurs.compaction import compact
from secateurs.compaction.narrowing import narrow_layer_
from secateurs.errors import InvalidInput
from secateurs.graph.sites import Site
from secateurs.graph.trace import Graph, shape_of
from secateurs.speed.aligned import ALIGNMENT, OFFSET, aligned_sums
from secateurs.speed.engines import Engine, at_batch, machine
from secateurs.speed.sizes import GONE, AlignedSum, Between, NarrowedLayer, Size, Sizing, Widths, spread
from secateurs.speed.timing import compare, in_rounds
from secateurs.speed.widths import PROBED, candidates, edges, preferred

Rounds = tuple[float, ...]
"""Seconds of the same work, one for each round."""

Once = Callable[[str, Sequence[Size], Callable[[], Mapping[Size, Rounds]]], Mapping[Size, Rounds]]
"""Computes the times of some sizes by their key, or gives those that a journal has; without sizes, those of all."""

SECONDS = 300.0  # that a table may take, unless the recipe says otherwise
_REPEATED = 1e-3  # seconds: shorter layers are repeated inside the timed graph
_MOST_REPEATS = 10
_SHORTEST = 3e-3  # seconds of a layer in a round: many sizes are timed, and compared with one another
_PROBED_BATCH = 4  # examples at most, where the multiple of widths is measured
FEWEST_ALIGNED = 4  # channels of a sum: fewer are not worth a table
_MOST_WEIGHTS = 1 << 27  # numbers, of all widths of a layer that are timed in turns


# ---- the file ------------------------------------------------------------------------------------------------------------


class Stored(TypedDict):
    """What a file of times holds."""

    machine: dict[str, str]
    multiples: dict[str, int]
    layers: dict[str, list[tuple[Size, list[float]]]]


class TableFile:
    """Times of one machine and engine, at `path` (None: `latency/` under `$SECATEURS_HOME`, named by the machine)."""

    def __init__(self, engine: Engine, path: Path | None = None) -> None:
        self.machine = machine(engine)
        named = hashlib.sha256(json.dumps(self.machine, sort_keys=True).encode()).hexdigest()[:12]
        self.path = home() / "latency" / f"{engine.name}-{named}.json" if path is None else path
        self.kept = engine.runs_layers  # the times of a user's function are not ours to keep
        self.stored = self._read() if self.kept else Stored(machine=self.machine, multiples={}, layers={})

    def _read(self) -> Stored:
        empty = Stored(machine=self.machine, multiples={}, layers={})
        try:
            found: Stored = decode_json(read_text_file(self.path))
            checked(found, Stored)
        except OSError:
            return empty
        except Malformed as error:
            raise InvalidInput(f"{self.path}: damaged ({error}). Delete it: the times are measured again.") from error
        others = [name for name in self.machine if found["machine"].get(name) != self.machine[name]]
        if others:
            was = ", ".join(f"{name} {found['machine'].get(name)!r} (here {self.machine[name]!r})" for name in others)
            raise InvalidInput(f"{self.path}: measured on another machine: {was}. Delete it: the times are measured again.")
        return found

    def multiple(self, kind: str, measure: Callable[[], int]) -> int:
        """The preferred multiple of a kind of layer, measured once."""
        if kind not in self.stored["multiples"]:
            self.stored["multiples"][kind] = measure()
            self._write()
        return self.stored["multiples"][kind]

    def layer(self, key: str) -> dict[Size, Rounds]:
        """The times of a layer, by size."""
        return {(i, o, g): tuple(seconds) for (i, o, g), seconds in self.stored["layers"].get(key, [])}

    def keep(self, key: str, times: Mapping[Size, Rounds]) -> None:
        """Keep times of a layer."""
        known = self.layer(key) | dict(times)
        self.stored["layers"][key] = [(size, list(seconds)) for size, seconds in known.items()]
        self._write()

    def _write(self) -> None:
        if self.kept:
            with suppress(OSError):  # a cache: without it times are measured again
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_text(self.path, json.dumps(self.stored) + "\n")


def preferred_multiple(engine: Engine, graph: Graph, file: TableFile | None = None) -> int:
    """The multiple of filters that the engine runs well: 8 or 16, or 1 where that is harmless; measured once per machine.

    A 3×3 convolution on 28×28 pixels is timed at seven widths, which takes seconds; a linear layer for networks without
    convolutions. 8 where the engine only runs whole networks.
    """
    if not engine.runs_layers:
        return 8
    engine = at_batch(engine, min(engine.batch, _PROBED_BATCH))
    convolutional = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in graph.module.modules())

    def timer(width: int) -> Callable[[], float]:
        with torch.random.fork_rng(devices=[]):  # fresh layers draw their weights
            layer = nn.Conv2d(width, width, 3, padding=1) if convolutional else nn.Linear(width, width)
        shape = (engine.batch, width, 28, 28) if convolutional else (engine.batch, width)
        return engine.layer(layer.eval().requires_grad_(False), shape, 1 if convolutional else _MOST_REPEATS)

    def measure() -> int:
        found = in_rounds({width: timer(width) for width in PROBED}, threads=engine.threads)
        return preferred({width: median(seconds) for width, seconds in found.items()})

    kind = f"{'convolution' if convolutional else 'linear'}, batch {engine.batch}"
    return (TableFile(engine) if file is None else file).multiple(kind, measure)


# ---- the layers of a network ---------------------------------------------------------------------------------------------


Sizes = Mapping[Size, tuple[fx.Node, NarrowedLayer]]
"""The sizes of one kind of layer, each with a layer of it; the full size comes first."""


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """Measured rounds of one layer by its size."""

    full: Size
    rounds: Mapping[Size, Rounds]

    @cached_property
    def medians(self) -> dict[Size, float]:
        """Seconds by measured size."""
        return {size: median(seconds) for size, seconds in self.rounds.items()}

    @cached_property
    def _predicted(self) -> dict[Size, float]:
        return {GONE: 0.0}

    def seconds(self, size: Size) -> float:
        """Seconds at any size: measured, or the product of what fewer inputs and what fewer filters make of the full layer.

        A width that was not measured counts as the next larger one.
        """
        if size in self.medians:
            return self.medians[size]
        if size not in self._predicted:
            self._predicted[size] = self._product(size)
        return self._predicted[size]

    def _product(self, size: Size) -> float:
        inputs, outputs, groups = self.full
        if groups == 1:
            fewer_in, fewer_out = self._covering((size[0], outputs)), self._covering((inputs, size[1]))
            return fewer_in * fewer_out / self.medians[self.full]
        return self._covering(size[:2])

    def _covering(self, size: tuple[int, int]) -> float:
        """Seconds of the smallest measured size with as many inputs and filters."""
        found = [(s[0] * s[1], seconds) for s, seconds in self.medians.items() if s[0] >= size[0] and s[1] >= size[1]]
        return min(found)[1]


class LatencyModel:
    """Predicts the time of a network under cuts from the times of single layers, and of sums that align channels."""

    def __init__(self, sizing: Sizing, batch: int) -> None:
        self.sizing, self.batch, self.sites = sizing, batch, sizing.sites
        self.keys = {node: self._key(node, layer) for node, layer in sizing.full.items()}
        self.times: dict[str, LayerTimes] = {}
        self.aligning: dict[str, LayerTimes] = {}  # by the shape of a sum: seconds by its width
        self._aligning_seconds: dict[tuple[fx.Node, AlignedSum], float] = {}  # a knapsack asks thousands of times

    def wanted(self, widths: Mapping[str, Iterable[int]]) -> dict[str, dict[Size, tuple[fx.Node, NarrowedLayer]]]:
        """For each kind of layer the sizes to measure, when each site alone keeps each of its widths; the full one first."""
        found: dict[str, dict[Size, tuple[fx.Node, NarrowedLayer]]] = {}
        for node, sizes in self.sizing.wanted(widths).items():
            for size, layer in sizes.items():
                if any(size):
                    found.setdefault(self.keys[node], {}).setdefault(size, (node, layer))
        return {key: sizes for key, sizes in found.items() if len(sizes) > 1}

    def measure(
        self,
        engine: Engine,
        sizes: Mapping[str, Sizes],
        file: TableFile,
        *,
        seconds: float = SECONDS,
        once: Once = lambda key, sizes, compute: compute(),
        on_layer: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        """Measure every kind of layer at its sizes, in at most about `seconds`; `once` journals what was found."""
        deadline = monotonic() + seconds
        for done, (key, wanted) in enumerate(sizes.items()):
            on_layer(done, len(sizes))
            share = max(deadline - monotonic(), 0.0) / (len(sizes) - done)
            thinned = _thinned(wanted)
            found = once(key, list(thinned), partial(self._found, engine, key, thinned, file, share))
            earlier = self.times[key].rounds if key in self.times else {}
            self.times[key] = LayerTimes(next(iter(wanted)), {**earlier, **found})

    def _found(self, engine: Engine, key: str, wanted: Sizes, file: TableFile, at_most: float) -> dict[Size, Rounds]:
        """The times of one kind of layer, from the file or measured now."""
        known, full = file.layer(key), next(iter(wanted))
        if not known.keys() >= wanted.keys():
            found = self._time(engine, wanted, at_most)
            # sizes are compared with each other: times of a busier hour are brought to those of the full layer before
            scale = median(known[full]) / median(found[full]) if full in known else 1.0
            known = {size: tuple(scale * seconds for seconds in rounds) for size, rounds in found.items()}
            file.keep(key, known)
        return {size: known[size] for size in wanted}

    def _time(self, engine: Engine, wanted: Sizes, at_most: float) -> dict[Size, Rounds]:
        """Time one kind of layer at all its sizes, in rounds."""
        loaded = {size: self._loaded(*found) for size, found in wanted.items()}
        first = engine.layer(*loaded[max(loaded)], 1)
        with torch.inference_mode():
            first()
            times = min(_MOST_REPEATS, max(math.ceil(_REPEATED / max(first(), 1e-9)), 1))
        timers = {size: engine.layer(*each, times) for size, each in loaded.items()}
        found = in_rounds(timers, threads=engine.threads, shortest=_SHORTEST, at_most=at_most, clock=engine.clock)
        return {size: tuple(seconds / times for seconds in rounds) for size, rounds in found.items()}

    def _loaded(self, node: fx.Node, layer: NarrowedLayer) -> tuple[nn.Module, tuple[int, ...]]:
        """The narrowed layer with random weights, and the shape of its input."""
        narrow = copy.deepcopy(self.sizing.module(node))
        assert narrow is not None
        narrow = narrow.to("meta")
        list(narrow_layer_(narrow, layer.flow, layer.inputs, layer.outputs, layer.groups))
        narrow = narrow.to_empty(device="cpu").eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for parameter in narrow.parameters():
            parameter.uniform_(0.0, 0.1, generator=generator)
        return narrow, self._shape(node, layer)

    def _shape(self, node: fx.Node, layer: NarrowedLayer) -> tuple[int, ...]:
        """Shape of the layer's input for a batch of the engine."""
        dims, axis = shape_of(node.all_input_nodes[0]).dims, layer.flow.in_axis
        assert dims is not None
        shape = list(dims) if axis == 0 else list(self._batched(dims))
        if not layer.flow.reads_all:
            shape[axis] = int(layer.inputs.sum())
        return tuple(shape)

    def _batched(self, dims: Sequence[int]) -> tuple[int, ...]:
        """A shape of the graph's example, for a batch of the engine."""
        per_example = self.batch / len(self.sizing.graph.example[0])
        return (max(math.ceil(dims[0] * per_example), 1), *dims[1:])

    def _key(self, node: fx.Node, layer: NarrowedLayer) -> str:
        """All that the time of a layer depends on: its class, settings, number type and input."""
        module = self.sizing.module(node)
        assert module is not None
        dtype = str(next(module.parameters()).dtype)
        shape = "×".join(map(str, self._shape(node, layer)))
        return f"{module} {dtype.removeprefix('torch.')} on {shape}"

    # ---- sums ------------------------------------------------------------------------------------------------------------

    def measure_alignments(
        self,
        engine: Engine,
        widths: Mapping[str, Iterable[int]],
        file: TableFile,
        *,
        once: Once = lambda key, sizes, compute: compute(),
    ) -> None:
        """Measure what aligning a term, and an offset, cost at every shape of those sums whose terms the cuts make differ."""
        for node in dict.fromkeys(n for name, each in widths.items() for w in each for n in self.sizing.change(name, w).sums):
            dims, axis = self.sizing.sum_shape(node)
            if axis is None or axis not in (1, len(dims) - 1) or dims[axis] < FEWEST_ALIGNED:
                continue
            key = self._sum_key(node)
            if key not in self.aligning:
                found = once(key, (), partial(self._aligned, engine, key, self._batched(dims), axis, file))
                self.aligning[key] = LayerTimes(max(found), found)
                self._aligning_seconds.clear()

    def _sum_key(self, node: fx.Node) -> str:
        dims, axis = self.sizing.sum_shape(node)
        return f"alignment and offset at a sum of {'×'.join(map(str, self._batched(dims)))}, axis {axis}"

    def _aligned(self, engine: Engine, key: str, shape: tuple[int, ...], axis: int, file: TableFile) -> dict[Size, Rounds]:
        """The seconds that aligning one term adds, and an offset, at two widths, from the file or measured now."""
        known = file.layer(key)
        if not known:
            for width in (shape[axis], max(shape[axis] // 4, 2)):
                example = torch.zeros(*shape[:axis], width, *shape[axis + 1 :])
                found = compare(
                    [engine.network(graph) for graph in aligned_sums(example, axis)],
                    threads=engine.threads,
                    rounds=(12, 24),
                    clock=engine.clock,
                ).seconds
                for kind in (ALIGNMENT, OFFSET):
                    known[width, kind, 1] = tuple((found[kind] - found[0]).tolist())
            file.keep(key, known)
        return known

    def _seconds_aligning(self, node: fx.Node, one: AlignedSum) -> float:
        """Of every term that is aligned, and of the offset that a repair puts behind the sum."""
        if (node, one) not in self._aligning_seconds:
            self._aligning_seconds[node, one] = self._found_aligning(node, one)
        return self._aligning_seconds[node, one]

    def _found_aligning(self, node: fx.Node, one: AlignedSum) -> float:
        times = self.aligning.get(self._sum_key(node))
        if times is None or not one.width:
            return 0.0
        found = 0.0
        for kind, count in ((ALIGNMENT, one.terms), (OFFSET, 1)):
            (narrow, less), (wide, more) = sorted((s[0], max(t, 0.0)) for s, t in times.medians.items() if s[1] == kind)
            slope = max(more - less, 0.0) / max(wide - narrow, 1)
            found += count * max(more - slope * (wide - one.width), 0.0)
        return found

    # ---- predictions -----------------------------------------------------------------------------------------------------

    @cached_property
    def layer_seconds(self) -> dict[fx.Node, float]:
        """Seconds of every timed layer in the whole network; a layer that no cut changes has no time."""
        return {
            node: self.times[key].seconds(self.sizing.full[node].size) for node, key in self.keys.items() if key in self.times
        }

    def seconds(self, widths: Widths) -> float:
        """Predicted seconds of all layers that any measured cut changes, under the cuts, and of aligning channels."""
        known = self.layer_seconds
        changed = {node: size for node, size in self.sizing.sizes(widths).items() if node in known}
        layers = math.fsum(known.values()) - math.fsum(known[node] for node in changed)
        layers += math.fsum(self.times[self.keys[node]].seconds(size) for node, size in changed.items())
        return layers + math.fsum(self._seconds_aligning(node, one) for node, one in self.sizing.alignments(widths).items())

    def left_between(self, widths: Widths) -> Between:
        """The shares that the cuts leave of the ops between the layers."""
        return self.sizing.left_between(widths)

    def by_layer(self, widths: Widths) -> dict[str, float]:
        """The seconds of layers, by the path of their modules."""
        sizes, found = self.sizing.sizes(widths), dict[str, float]()
        for node, seconds in self.layer_seconds.items():
            now = self.times[self.keys[node]].seconds(sizes[node]) if node in sizes else seconds
            found[str(node.target)] = found.get(str(node.target), 0.0) + now
        return found

    def unmeasured(self, widths: Widths) -> dict[str, dict[Size, tuple[fx.Node, NarrowedLayer]]]:
        """The sizes of all layers under the cuts that were not measured yet, with the full size first."""
        found: dict[str, dict[Size, tuple[fx.Node, NarrowedLayer]]] = {}
        for node, size in self.sizing.sizes(widths).items():
            key = self.keys[node]
            if key in self.times and any(size) and size not in self.times[key].rounds:
                full = self.sizing.full[node]
                found.setdefault(key, {full.size: (node, full)})[size] = (node, self.sizing.layer(node, size))
        return found

    def site_rounds(self, name: str, widths: Iterable[int]) -> dict[int, list[float]]:
        """Seconds by width and round of the layers that a cut of the site alone changes."""
        layers = {width: self.sizing.change(name, width).layers for width in widths}
        changed = list(dict.fromkeys(node for each in layers.values() for node in each if self.keys[node] in self.times))
        found: dict[int, list[float]] = {}
        for width, each in layers.items():
            rows = [self._rounds(node, each.get(node, self.sizing.full[node]).size) for node in changed]
            found[width] = [math.fsum(row) for row in zip(*rows, strict=False)]
        return {width: rounds for width, rounds in found.items() if rounds}

    def _rounds(self, node: fx.Node, size: Size) -> Sequence[float]:
        times = self.times[self.keys[node]]
        if size in times.rounds:
            return times.rounds[size]
        return [times.seconds(size)] * len(times.rounds[times.full])


class NetworkModel:
    """Predicts the time of a network under cuts from that of whole networks with one site cut: all that some engines can
    time. The savings of sites are added up; what aligning channels costs is part of what is measured."""

    def __init__(self, graph: Graph, sites: Sequence[Site]) -> None:
        self.graph, self.sites = graph, {site.name: site for site in sites}
        self.rounds: dict[str, Mapping[int, Rounds]] = {}

    def measure(self, engine: Engine, name: str, widths: Sequence[int], at_most: float) -> dict[Size, Rounds]:
        """Measure the network with the site at each of the widths, in rounds; the full width is the first."""
        channels = self.sites[name].channels
        networks = {
            width: self.graph if width == channels else compact(self.graph, {name: spread(width, channels)}, verify=False)
            for width in widths
        }
        timers = {width: engine.network(network)() for width, network in networks.items()}
        found = in_rounds(timers, rounds=3, shortest=0.0, at_most=at_most, clock=engine.clock)
        return {(width, width, 1): tuple(rounds) for width, rounds in found.items()}

    def keep(self, name: str, rounds: Mapping[Size, Rounds]) -> None:
        """Take what was measured for a site."""
        self.rounds[name] = {size[0]: seconds for size, seconds in rounds.items()}

    def seconds(self, widths: Widths) -> float:
        """Predicted seconds of the network under the cuts."""
        found = median(median(each[max(each)]) for each in self.rounds.values())
        for name, kept in widths.items():
            rounds = self.rounds[name]
            width = min(each for each in rounds if each >= kept)
            found += median(rounds[width]) - median(rounds[max(rounds)])
        return found

    def left_between(self, widths: Widths) -> Between:
        """All: nothing is known of parts of the network."""
        return Between(1.0, 1.0)

    def site_rounds(self, name: str, widths: Iterable[int]) -> dict[int, list[float]]:
        """Seconds of the network by width and round."""
        return {width: list(self.rounds[name][width]) for width in widths if width in self.rounds[name]}


def fast_widths(model: LatencyModel | NetworkModel, site: Site, multiple: int) -> tuple[tuple[int, ...], dict[int, float]]:
    """The widths of a site at the edges of its steps, and the seconds that they follow from, by width, descending."""
    rounds = model.site_rounds(site.name, candidates(model.sites[site.name].channels, multiple))
    medians = {width: median(seconds) for width, seconds in rounds.items()}
    return (edges(rounds) if len(rounds) > 1 else ()), dict(sorted(medians.items(), reverse=True))


def _thinned(wanted: Sizes) -> Sizes:
    """The sizes, or every other one, or fewer, where their weights together take too much memory; the first stays."""
    sizes, step = list(wanted), 1
    while len(sizes) > 2 and sum(i * o // g for i, o, g in sizes) > _MOST_WEIGHTS:
        step *= 2
        sizes = list(wanted)[::step]
    return {size: wanted[size] for size in sizes}
