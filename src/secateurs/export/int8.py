"""Int8 networks for ONNX Runtime, made without training: calibrated, compared with the float network, and measured.

Ranges of activations come from training examples that pass the float network once; three ways of reading them (the extremes,
the entropy, a percentile) are compared by the outputs of the files that they give, on held-out examples. Layers whose int8
form moves the outputs most stay in float32, as long as they are few.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from secateurs._util.modules import eval_mode
from secateurs.data.dataset import Examples
from secateurs.errors import InvalidInput, NonFinite, UnsupportedOp
from secateurs.export.deliver import CalibrationMethod, Inputs, Quantisation, prepared
from secateurs.export.float_model import FloatModel, Int8Layer, pairs
from secateurs.export.programs import check_packages, feed, onnx_bytes, start_session
from secateurs.export.qdq import Range, equalise_, quantised_model
from secateurs.graph.trace import Graph
from secateurs.metrics import divergence
from secateurs.speed.engines import cpu_flags

METHODS: tuple[CalibrationMethod, ...] = ("minmax", "entropy", "percentile")
CALIBRATED = 256  # training examples
COMPARED = 256  # held-out examples
FLOAT_SHARE = 0.05  # of the MACs that layers which hurt may keep in float32
TOLERATED = 0.01  # divergence up to which every layer is int8
HURTS = 0.2  # of a larger one: what a layer must cause to stay in float32
_BINS = 2048
_PERCENTILE = 0.9999
_MEMORY = 1 << 28  # bytes of activations at once


@dataclass(frozen=True, eq=False)
class Quantised:
    """An int8 file and how it was made."""

    model: bytes
    how: Quantisation
    run: Callable[[bytes], nn.Module] = field(repr=False)  # loads the file where it is to run

    def module(self) -> nn.Module:
        """The file in its runtime, to be measured like any network."""
        return self.run(self.model)


class RuntimeModule(nn.Module):
    """An ONNX file that is called like the network that it was made from; it computes on the CPU, in ONNX Runtime."""

    def __init__(self, model: bytes, spec: Any = None) -> None:
        super().__init__()
        self.session, self.spec = start_session(model), spec

    def forward(self, *inputs: Tensor) -> Any:
        """Run the file; the outputs have the structure of the network's."""
        place = inputs[0].device
        arrays = self.session.run(None, feed(self.session, tuple(t.detach().cpu() for t in inputs)))
        found = [torch.from_numpy(array).to(place) for array in arrays]
        return found[0] if self.spec is None else pytree.tree_unflatten(found, self.spec)


def weight_bits() -> int:
    """Bits of int8 weights on this CPU: x86 without VNNI adds two products of 8 bits in 16, which overflows."""
    flags = cpu_flags()
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return 7 if x86 and not any("vnni" in flag for flag in flags) else 8


class Quantiser:
    """A float network with all that its int8 files are made from. Making one exports, equalises and calibrates.

    `calibration` are training examples, `held_out` others on which files are compared with the network; both are streamed
    in batches. With `classes` the outputs are class logits, compared by their divergence; else by their squared difference,
    as a share.
    """

    def __init__(
        self,
        graph: Graph,
        calibration: Examples,
        held_out: Examples,
        *,
        classes: bool = True,
        bits: int | None = None,
        methods: Sequence[CalibrationMethod] = METHODS,
    ) -> None:
        check_packages()
        if not len(calibration):
            raise InvalidInput("int8: no examples to calibrate with. Give training examples: 256 to 512 are enough.")
        if not len(held_out):
            raise InvalidInput("int8: no held-out examples to compare calibrations on. Give validation examples.")
        dtypes = {p.dtype for p in graph.module.parameters() if p.is_floating_point()}
        if dtypes - {torch.float32}:
            raise InvalidInput(f"int8: the network computes in {dtypes.pop()}, wanted float32: convert it with .float().")
        self.bits, self.classes, self.calibration = bits or weight_bits(), classes, calibration
        self._held_out, self._methods = held_out, tuple(methods)
        with eval_mode(graph.module), torch.no_grad():
            self._spec = pytree.tree_flatten(graph.module(*graph.example))[1]
        self.model = FloatModel(onnx_bytes(prepared(graph)))
        if not self.model.layers:
            raise UnsupportedOp(
                f"int8: {graph.plan.model or 'the network'} has no convolution or linear layer with constant weights, so there "
                f"is nothing to quantise. Export it in float32."
            )
        self._wanted = list(self._outputs(self.model.bytes()))
        if not all(bool(t.isfinite().all()) for t in self._wanted):
            raise NonFinite(
                "int8: the float network gives NaN or infinite outputs on the held-out examples. Check its weights."
            )
        equalise_(self.model, self._channel_maxima())
        self.ranges = self._calibrated()

    # ---- calibration -------------------------------------------------------------------------------------------------

    def _channel_maxima(self) -> dict[str, Any]:
        """The largest magnitude (C,) of each channel of the tensors between two layers."""
        found: dict[str, Any] = {}
        for seen in self._activations([tensor for _, tensor, _ in pairs(self.model)]):
            for name, values in seen.items():
                most = np.abs(values).max(axis=(0, *range(2, values.ndim)))
                found[name] = most if name not in found else np.maximum(found[name], most)
        return found

    def _calibrated(self) -> dict[CalibrationMethod, dict[str, Range]]:
        """Ranges of all activations, by each method."""
        extremes: dict[str, Range] = {}
        for seen in self._activations(self.model.ranged):
            for name, values in seen.items():
                low, high = float(values.min()), float(values.max())
                if not (np.isfinite(low) and np.isfinite(high)):
                    layer = self._writer_of(name)
                    raise NonFinite(
                        f"int8: activations behind {layer} are NaN or infinite on the calibration examples ({low} to {high}). "
                        f"Check the weights there, and the examples."
                    )
                known = extremes.get(name, (0.0, 0.0))
                extremes[name] = min(low, known[0]), max(high, known[1])
        found: dict[CalibrationMethod, dict[str, Range]] = {"minmax": extremes}
        if self._methods == ("minmax",):
            return found
        counts = {name: torch.zeros(_BINS, dtype=torch.float64) for name in extremes}
        for seen in self._activations(self.model.ranged):
            for name, values in seen.items():
                low, high = extremes[name]
                if high > low:
                    counts[name] += torch.histc(torch.from_numpy(values).flatten(), _BINS, low, high).double()
        by: dict[CalibrationMethod, Callable[[Any, Range], Range]] = {"entropy": entropy_range, "percentile": percentile_range}
        for method in self._methods:
            if method != "minmax":
                found[method] = {name: by[method](counts[name].numpy(), extremes[name]) for name in extremes}
        return {method: found[method] for method in self._methods}

    def _activations(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The tensors of these names for all calibration examples, batch by batch."""
        if not names:
            return
        session = _with_outputs(self.model.model, names)
        outputs = [each.name for each in session.get_outputs() if each.name in set(names)]
        each = sum(4 * int(np.prod([max(n, 1) for n in self.model.shapes[name]])) for name in names)
        for batch in self.calibration.batches(min(max(_MEMORY // max(each, 1), 1), 64)):
            given = feed(session, _float32(batch.args))
            found = dict(zip(outputs, session.run(outputs, given), strict=True))
            yield {name: found[name] if name in found else given[name] for name in names}

    def _writer_of(self, tensor: str) -> str:
        nodes = [node for node in self.model.model.graph.node if tensor in node.output]
        named = {layer.node: layer.name for layer in self.model.layers}
        return "the input" if not nodes else named.get(nodes[0].name, f"a {nodes[0].op_type}")

    # ---- files -------------------------------------------------------------------------------------------------------

    @cached_property
    def _divergences(self) -> dict[tuple[CalibrationMethod, tuple[str, ...]], float]:
        return {}

    def file(self, method: CalibrationMethod, floats: Sequence[Int8Layer] = ()) -> bytes:
        """The int8 file with these layers in float32."""
        return quantised_model(self.model, self.ranges[method], floats=[layer.node for layer in floats], bits=self.bits)

    def divergence(self, method: CalibrationMethod, floats: Sequence[Int8Layer] = ()) -> float:
        """How far the file's outputs are from the float network's, on the held-out examples."""
        key = (method, tuple(layer.node for layer in floats))
        if key not in self._divergences:
            found = zip(self._outputs(self.file(method, floats)), self._wanted, strict=True)
            self._divergences[key] = float(torch.cat([output_distance(a, b, self.classes) for a, b in found]).mean())
        return self._divergences[key]

    @cached_property
    def method(self) -> CalibrationMethod:
        """The calibration whose file is nearest to the float network."""
        return min(self.ranges, key=self.divergence)

    @cached_property
    def by_harm(self) -> tuple[tuple[float, Int8Layer], ...]:
        """Each layer with what the divergence falls by if it alone stays in float32; the most first."""
        start = self.divergence(self.method)
        harms = [(start - self.divergence(self.method, [layer]), layer) for layer in self.model.layers]
        return tuple(sorted(harms, key=lambda pair: -pair[0]))

    @cached_property
    def hurting(self) -> tuple[Int8Layer, ...]:
        """The layers that stay in float32: each causes a good part of the divergence, all together cost few MACs."""
        kept: list[Int8Layer] = []
        if self.divergence(self.method) <= TOLERATED:
            return ()
        total = sum(layer.macs for layer in self.model.layers)
        for harm, layer in self.by_harm:
            within = sum(each.macs for each in (*kept, layer)) <= FLOAT_SHARE * total
            if harm >= HURTS * self.divergence(self.method) and within:
                kept.append(layer)
        return tuple(kept)

    def quantised(self, floats: Sequence[Int8Layer] | None = None) -> Quantised:
        """The file of the best method with these layers in float32; None: with those that hurt."""
        floats = self.hurting if floats is None else floats
        total, kept = sum(layer.macs for layer in self.model.layers), sum(layer.macs for layer in floats)
        how = Quantisation(
            method=self.method,
            compared=tuple((method, self.divergence(method)) for method in self.ranges),
            divergence=self.divergence(self.method, floats),
            calibrated=len(self.calibration),
            held_out=len(self._held_out),
            weight_bits=self.bits,
            layers=len(self.model.layers),
            float_layers=tuple(layer.name for layer in floats),
            float_macs=kept / max(total, 1),
            bops=(total - kept) * 8.0 * self.bits + kept * 32.0 * 32.0,
            float_bops=self.model.macs * 32.0 * 32.0,
        )
        return Quantised(self.file(self.method, floats), how, partial(RuntimeModule, spec=self._spec))

    def _outputs(self, model: bytes) -> Iterator[Tensor]:
        session = start_session(model)
        for batch in self._held_out.batches(64):
            yield torch.from_numpy(session.run(None, feed(session, _float32(batch.args)))[0])


def output_distance(found: Tensor, wanted: Tensor, classes: bool) -> Tensor:
    """The distance of each example's output from the float network's: the divergence of class logits, or a squared share."""
    if classes and wanted.ndim > 1:
        return divergence(found, wanted.softmax(1))
    off, scale = (found - wanted).flatten(1), wanted.flatten(1)
    return off.square().sum(1) / scale.square().sum(1).mean().clamp_min(1e-30)


def int8_module(graph: Graph, calibration: Examples, held_out: Examples, classes: bool) -> nn.Module:
    """The network's int8 file in ONNX Runtime: what a run with `deploy = "int8"` certifies."""
    return Quantiser(graph, calibration, held_out, classes=classes).quantised().module()


def in_int8(model: bytes, inputs: Inputs) -> bytes:
    """An ONNX model in int8, with ranges of these inputs alone: as fast as a calibrated one, and not as accurate."""
    source = FloatModel(model)
    session = _with_outputs(source.model, source.ranged)
    given = feed(session, _float32(inputs))
    names = [each.name for each in session.get_outputs()]
    seen = {**dict(zip(names, session.run(names, given), strict=True)), **given}
    found = {name: (float(seen[name].min(initial=0.0)), float(seen[name].max(initial=0.0))) for name in source.ranged}
    return quantised_model(source, found, bits=weight_bits())


def _with_outputs(model: Any, names: Sequence[str]) -> Any:
    """A session of the model that gives tensors inside it, too."""
    import onnx

    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    known = {each.name for each in (*copied.graph.output, *copied.graph.input)}
    for name in names:
        if name not in known:
            copied.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return start_session(copied.SerializeToString())


def _float32(inputs: Inputs) -> Inputs:
    return tuple(t.detach().cpu().float() if t.is_floating_point() else t.detach().cpu() for t in inputs)


def percentile_range(counts: Any, extremes: Range) -> Range:
    """The range that leaves one value in 10,000 out, at both ends together."""
    low, high = extremes
    total = counts.sum()
    if high <= low or not total:
        return extremes
    edges, below = np.linspace(low, high, len(counts) + 1), np.cumsum(counts) / total
    tail = (1 - _PERCENTILE) / 2 if low < 0 < high else 1 - _PERCENTILE
    first = int(np.searchsorted(below, tail)) if low < 0 else 0
    last = int(np.searchsorted(below, 1 - tail)) if high > 0 else len(counts) - 1
    return min(float(edges[first]), 0.0), max(float(edges[min(last + 1, len(counts))]), 0.0)


def entropy_range(counts: Any, extremes: Range, levels: int = 256) -> Range:
    """The range, shrunk at both ends alike, whose rounded values have the distribution nearest to the original one.

    Distributions are compared by their Kullback-Leibler divergence; what lies outside the range counts at its ends.
    """
    low, high = extremes
    if high <= low or not counts.sum():
        return extremes
    edges = np.linspace(low, high, len(counts) + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    best, chosen = np.inf, extremes
    for share in np.linspace(0.2, 1.0, 81):
        inside = (middles >= share * low) & (middles <= share * high)
        wanted = counts * inside
        places = np.flatnonzero(inside)
        if len(places) < levels:
            continue
        wanted[places[0]] += counts[: places[0]].sum()
        wanted[places[-1]] += counts[places[-1] + 1 :].sum()
        within = counts * inside  # what the rounded values are made of: nothing from outside
        level = ((middles - share * low) / (share * (high - low)) * (levels - 1)).round().clip(0, levels - 1).astype(int)
        filled = within > 0
        sums = np.bincount(level[filled], within[filled], levels)
        sizes = np.bincount(level[filled], minlength=levels)
        spread = np.where(filled, (sums / np.maximum(sizes, 1))[level], 0.0)
        p, q = wanted / wanted.sum(), spread / max(spread.sum(), 1e-30)
        seen = p > 0
        found = float((p[seen] * np.log(p[seen] / np.maximum(q[seen], 1e-12))).sum())
        if found < best:
            best, chosen = found, (share * low, share * high)
    return chosen
