"""Int8 files: against a simulation in NumPy, against the float network, their certificate, and bad input."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nets import random_keep, randomise_, with_few_blocks
from secateurs import Pruner, Recipe, compact, find_sites, trace
from secateurs.config import GENTLE
from secateurs.data import Data, Examples
from secateurs.data import load as load_data
from secateurs.errors import ArtefactError, InvalidInput, NonFinite, RecipeError, Uncertified, UnsupportedOp
from secateurs.export import int8
from secateurs.export.deliver import prepared
from secateurs.export.float_model import FloatModel
from secateurs.export.int8 import Quantiser, entropy_range, percentile_range
from secateurs.export.programs import feed, onnx_bytes, start_session
from secateurs.export.qdq import quantised_model, step_and_zero
from secateurs.models import example_input
from secateurs.pruning.measure import PerExample
from secateurs.report.result import Result


class Tiny(nn.Module):
    """Two convolutions with a sum between them, a mean, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.b, self.out = nn.Conv2d(5, 5, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.a(x)))
        y = torch.relu(y + self.b(y))
        found: Tensor = self.out(y.mean((2, 3)))
        return found


def tiny(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return trace(randomise_(Tiny()).float(), torch.randn(2, 2, 6, 6))


def examples(count: int = 32, shape: tuple[int, ...] = (2, 6, 6), seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples(torch.randn(count, *shape, generator=generator), torch.randint(3, (count,), generator=generator))


def ran(model: bytes, x: Tensor) -> Any:
    session = start_session(model)
    return session.run(None, feed(session, (x,)))[0]


# ---- the file -------------------------------------------------------------------------------------------------------------


def test_a_file_computes_what_a_simulation_in_numpy_computes() -> None:
    """Every step by hand: codes of activations, codes of weights by filter, whole sums, rounded to the next codes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1))
    x = torch.randn(4, 2, 5, 5)
    model = FloatModel(onnx_bytes(prepared(trace(net, x))))
    inner = next(node.output[0] for node in model.model.graph.node if node.op_type == "Relu")
    ranges = {"input": (-2.0, 1.5), inner: (0.0, 1.25), model.outputs[0]: (-1.0, 1.0)}
    ranges[model.inputs[0]] = ranges.pop("input")
    given = ran(quantised_model(model, ranges), x)

    def codes(values: Any, low: float, high: float) -> tuple[Any, float, int]:
        step = np.float32((high - low) / 255)
        zero = round(-low / step)
        return np.clip(np.rint(values / step) + zero, 0, 255), float(step), zero

    value, step, zero = codes(x.numpy(), *ranges[model.inputs[0]])
    for layer, (low, high) in ((net[0], ranges[inner]), (net[2], ranges[model.outputs[0]])):
        weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
        if len(weight) == 3:  # filters of zeros up to 16 change nothing: they are not simulated
            pass
        steps = np.abs(weight).max(axis=(1, 2, 3)) / 127
        whole = np.clip(np.rint(weight / steps[:, None, None, None]), -127, 127)
        sums = torch.conv2d(torch.tensor(value - zero).double(), torch.tensor(whole).double(), padding=layer.padding).numpy()
        sums += np.rint(bias / (step * steps))[None, :, None, None]
        real = sums * (step * steps)[None, :, None, None]
        value, step, zero = codes(real, low, high)
    assert np.abs(given - (value - zero) * step).max() <= 1.01 * step  # one code: the runtime rounds a product of float32
    assert (np.abs(given - (value - zero) * step) < 1e-6).mean() > 0.97


def test_scale_and_zero_point_by_hand() -> None:
    assert step_and_zero(0.0, 2.55) == (pytest.approx(0.01), 0)
    assert step_and_zero(-1.0, 1.55) == (pytest.approx(0.01), 100)
    assert step_and_zero(0.5, 2.55) == step_and_zero(0.0, 2.55), "a range contains 0"
    assert step_and_zero(0.0, 0.0) == (1.0, 0), "a constant tensor"
    with pytest.raises(NonFinite):
        step_and_zero(0.0, float("nan"))


@pytest.mark.parametrize(("name", "shortcut"), [("resnet8", "before"), ("resnet8", "after"), ("mobilenet-small", "before")])
def test_alignments_are_folded_and_the_network_stays_the_same(name: str, shortcut: Any) -> None:
    """No gather is left between int8 kernels, and the rewritten float model gives the same outputs."""
    graph = trace(randomise_(with_few_blocks(name)).float(), example_input(name))
    small = compact(graph, random_keep(find_sites(graph, shortcut), seed=0), verify=False)
    file, x = onnx_bytes(prepared(small)), torch.randn(3, *example_input(name).shape[1:])
    model = FloatModel(file)
    wanted = ran(file, x)
    np.testing.assert_allclose(ran(model.bytes(), x), wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    assert b"Gather" in file
    assert not any(node.op_type in ("Gather", "BatchNormalization") for node in model.model.graph.node)


def test_hard_swish_and_hard_sigmoid_run_in_int8() -> None:
    """MobileNet's functions: as good as any int8 layer, and no float op is left between the layers."""
    import onnx

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.Hardswish(), nn.Conv2d(16, 16, 1), nn.Hardsigmoid(), nn.Flatten())
    with torch.no_grad():
        net[0].weight *= 8  # far beyond where both bend
        net[2].weight *= 8
    data = examples(64)
    wanted = net(data.inputs).detach()
    made = Quantiser(trace(net, data.inputs[:2]), data, data, classes=False, methods=("minmax",))
    file = made.file("minmax")
    found = torch.from_numpy(ran(file, data.inputs))
    assert float((found - wanted).abs().mean()) < 0.01
    assert float((found - wanted).abs().max()) < 0.2
    ops = {node.op_type for node in onnx.load_from_string(file).graph.node}
    assert ops <= {"QuantizeLinear", "DequantizeLinear", "Conv", "Add", "Mul", "Pad", "Reshape"}


def test_equalised_channels_change_nothing_in_float_and_save_int8() -> None:
    """A channel of tiny values that large weights read: its weights would take the whole range of every filter."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1), nn.Flatten(), nn.Linear(4 * 36, 3))
    with torch.no_grad():
        net[0].weight[0] *= 1e-3
        net[0].bias[0] = 1e-3
        net[2].weight[:, 0] *= 1e3
    graph, data = trace(net, torch.randn(2, 2, 6, 6)), examples(64)
    wanted = net(data.inputs).detach()
    made = Quantiser(graph, data, data, methods=("minmax",), classes=False)
    np.testing.assert_allclose(ran(made.model.bytes(), data.inputs), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    plain = FloatModel(onnx_bytes(prepared(graph)))
    made_plain = Quantiser.__new__(Quantiser)
    made_plain.__dict__ |= {**made.__dict__, "model": plain}
    made_plain.ranges = made_plain._calibrated()
    error = [
        float((torch.from_numpy(ran(each.file("minmax"), data.inputs)) - wanted).square().mean()) for each in (made, made_plain)
    ]
    assert error[0] < error[1] / 20
    assert error[0] < 1e-3 * float(wanted.square().mean())


def test_ranges_by_hand() -> None:
    counts = np.zeros(2048)
    counts[:1024] = 1000.0
    counts[2047] = 10.0  # one value far out: 10 of 1,024,010
    low, high = percentile_range(counts, (0.0, 20.48))
    assert low == 0.0
    assert high == pytest.approx(10.24, abs=0.02)
    assert percentile_range(counts, (0.0, 0.0)) == (0.0, 0.0)
    bell = 1e6 * np.exp(-(np.linspace(0, 20.48, 2048) ** 2) / 2)
    bell[2047] = 1.0  # one value at 20 standard deviations
    low, high = entropy_range(bell, (0.0, 20.48))
    assert 3.5 < high < 12


def test_a_network_without_vnni_has_seven_bit_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(int8, "cpu_flags", lambda: frozenset({"avx2"}))
    assert int8.weight_bits() == 7
    monkeypatch.setattr(int8, "cpu_flags", lambda: frozenset({"avx2", "avx512_vnni"}))
    assert int8.weight_bits() == 8
    monkeypatch.setattr(int8.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(int8, "cpu_flags", lambda: frozenset())
    assert int8.weight_bits() == 8
    import onnx

    model = FloatModel(onnx_bytes(prepared(tiny())))
    ranges = dict.fromkeys(model.ranged, (-1.0, 1.0))
    for bits, most in ((8, 127), (7, 63)):
        made = onnx.load_from_string(quantised_model(model, ranges, bits=bits))
        codes = [onnx.numpy_helper.to_array(each) for each in made.graph.initializer if each.name.endswith("w~8")]
        assert max(int(np.abs(each.astype(int)).max()) for each in codes) == most


def test_an_int8_file_names_its_input_output_and_batch() -> None:
    quantiser = Quantiser(tiny(), examples(), examples(seed=1), methods=("minmax",))
    session = start_session(quantiser.file("minmax"))
    assert [(each.name, each.shape) for each in session.get_inputs()] == [("x", ["batch", 2, 6, 6])]
    assert [(each.name, each.shape) for each in session.get_outputs()] == [("output", ["batch", 3])]


def test_layers_in_float_leave_the_divergence() -> None:
    """All layers in float32 give the float network; the harm of a layer is what it alone takes away."""
    data = examples(64)
    made = Quantiser(tiny(), data, data)
    assert made.divergence(made.method) > 1e-6
    assert made.divergence(made.method, made.model.layers) < 1e-7
    harm, layer = made.by_harm[0]
    assert harm == pytest.approx(made.divergence(made.method) - made.divergence(made.method, [layer]))
    assert made.quantised(()).how.bops == 64 * made.model.macs
    kept = made.quantised([layer]).how
    assert kept.float_layers == (layer.name,)
    assert kept.bops > 64 * made.model.macs


# ---- bad input ------------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused() -> None:
    data = examples(8)
    with pytest.raises(InvalidInput, match="no examples to calibrate with"):
        Quantiser(tiny(), data.take(torch.arange(0)), data)
    with pytest.raises(InvalidInput, match="no held-out examples"):
        Quantiser(tiny(), data, data.take(torch.arange(0)))

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((2, 3)) * 2

    with pytest.raises(UnsupportedOp, match="no convolution or linear layer"):
        Quantiser(trace(Nothing(), torch.randn(2, 2, 6, 6)), data, data)
    broken = tiny()
    broken.module.a.weight.data[0, 0, 0, 0] = float("inf")
    with pytest.raises(NonFinite, match="NaN or infinite outputs on the held-out examples"):
        Quantiser(broken, data, data)
    spoilt = examples(8, seed=1)
    spoilt.inputs[3, 1, 2, 2] = float("nan")
    with pytest.raises(NonFinite, match="behind the input are NaN or infinite on the calibration examples"):
        Quantiser(tiny(), spoilt, data)
    double = trace(Tiny().double(), torch.randn(2, 2, 6, 6, dtype=torch.float64))
    with pytest.raises(InvalidInput, match="float64, wanted float32"):
        Quantiser(double, data, data)


def test_activations_that_overflow_inside_are_refused_by_name() -> None:
    """Outputs are finite, and a tensor on the way to them is not."""

    class Overflows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.out = nn.Conv2d(2, 16, 3, padding=1), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(torch.sigmoid(-self.a(x)).mean((2, 3)))
            return found

    torch.manual_seed(0)
    net, data = Overflows(), examples(8)
    data.inputs.abs_()
    net.a.weight.data[0] = 1e38
    with pytest.raises(NonFinite, match="behind a are NaN or infinite"):
        Quantiser(trace(net, torch.zeros(2, 2, 6, 6)), data, data)


class Shift(nn.Module):
    """What a folded branch leaves of its sum: a constant for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.randn(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.constant + x)


def test_padded_images_and_constants_of_channels_leave_the_network_the_same() -> None:
    """The fast kernels read channels in fours, and sums with constants have none; a first layer in float32 reads the image."""
    torch.manual_seed(0)
    first = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), Shift(16))
    net = nn.Sequential(*first, nn.Conv2d(16, 16, 1), nn.Flatten(), nn.Linear(576, 3)).eval()
    data = examples(32, shape=(3, 6, 6))
    made = Quantiser(trace(net, data.inputs[:2]), data, data, classes=False, methods=("minmax",))
    wanted = net(data.inputs).detach()
    np.testing.assert_allclose(ran(made.model.bytes(), data.inputs), wanted, rtol=0, atol=1e-5)
    assert made.model.weights[made.model.layers[0].name + ".weight"].shape == (16, 4, 3, 3)
    assert len(made.model.layers) == 3, "what adds a constant is no layer of the network"
    assert not any(node.op_type == "Add" for node in made.model.model.graph.node)
    for floats in ((), made.model.layers[:1], made.model.layers):
        found = torch.from_numpy(ran(made.file("minmax", floats), data.inputs))
        assert float((found - wanted).square().mean()) < 1e-3 * float(wanted.square().mean())
    assert float((found - wanted).abs().max()) < 1e-5, "all in float32"


def test_constant_channels_are_kept() -> None:
    """A filter of zeros gives its bias, exactly to an int8 step; an input that is always 0 divides nothing by 0."""
    graph, data = tiny(), examples(64)
    graph.module.a.weight.data[1] = 0.0
    graph.module.b.weight.data[2] = 0.0
    graph.module.norm.weight.data[3] = 0.0
    zeros = Examples(torch.zeros(16, 2, 6, 6), torch.zeros(16, dtype=torch.long))
    wanted = graph.module.eval()(data.inputs).detach()
    made = Quantiser(graph, data, data, classes=False)
    found = torch.from_numpy(ran(made.file(made.method), data.inputs))
    assert float((found - wanted).square().mean()) < 1e-3 * float(wanted.square().mean())
    assert np.isfinite(ran(Quantiser(graph, zeros, zeros, methods=("minmax",)).file("minmax"), zeros.inputs)).all()


# ---- the certificate of a run ---------------------------------------------------------------------------------------------


def load_digits() -> Data:
    return load_data("digits", search=400, test=300, seed=0)


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
    )


@pytest.fixture(scope="module")
def digits() -> Data:
    return load_digits()


@pytest.fixture(scope="module")
def trained(digits: Data) -> nn.Module:
    """A small network, trained for seconds."""
    from secateurs.training import TrainSettings, train_

    model = small_network()
    train_(model, digits.train, TrainSettings(epochs=3, lr=0.1, batch=32))
    return model


@pytest.fixture(scope="module")
def finished(trained: nn.Module, digits: Data, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The network pruned to a target, so that certification has refused nothing."""
    recipe = Recipe.best(max_drop=0.05, target_macs=0.2, round_to=1)
    return Pruner(trained, digits, recipe=recipe, folder=tmp_path_factory.mktemp("runs") / "run").finish()


def test_a_certified_file_gives_its_accuracy_in_a_fresh_process(finished: Result, tmp_path: Path) -> None:
    path = finished.export(tmp_path / "small.onnx", int8=True)
    assert finished.folder is not None
    noted = json.loads((finished.folder / "exports.json").read_text())
    (figures,) = [one["int8"] for one in noted["exports"] if one["kind"] == "int8"]
    assert figures["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert figures["bound"] <= figures["max_drop"] == 0.05
    assert figures["answers"] == [True]
    assert noted["answers"] == [True]
    certifying = finished.context.metric.examples("certify")
    assert certifying is not None
    assert figures["images"] == len(certifying)
    batch = certifying.batch(slice(None))
    np.save(tmp_path / "x.npy", batch.args[0].numpy())
    np.save(tmp_path / "y.npy", batch.targets.numpy())  # type: ignore[union-attr]
    script = (
        "import sys, numpy as np, onnxruntime\n"
        "s = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
        "x, y = (np.load(sys.argv[2] + '/' + n + '.npy') for n in 'xy')\n"
        "print(int((s.run(None, {s.get_inputs()[0].name: x})[0].argmax(1) == y).sum()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path), str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) == round(figures["accuracy"] * len(certifying))
    total = figures["drop_pruning"] + figures["drop_quantising"]
    before = finished.context.metric.values(finished.context.original, "certify")
    assert total == pytest.approx(float(before.mean()) - figures["accuracy"])
    from secateurs.report import write_report

    text = write_report(finished.folder).read_text()
    assert "the drop of the int8 file is at most" in text


def test_calibration_sees_training_examples_only(
    finished: Result, digits: Data, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Examples] = {}
    real = int8.Quantiser.__init__

    def noted(self: Any, graph: Any, calibration: Examples, held_out: Examples, **options: Any) -> None:
        seen.update(calibration=calibration, held_out=held_out)
        real(self, graph, calibration, held_out, **options)

    monkeypatch.setattr(int8.Quantiser, "__init__", noted)
    finished.export(tmp_path / "again.onnx", int8=True)
    ids = {name: set(each.ids.tolist()) for name, each in seen.items() if each.ids is not None}
    metric = finished.context.metric
    assert isinstance(metric, PerExample)
    forbidden = {*metric.examples("certify").ids.tolist(), *digits.test.ids.tolist()}  # type: ignore[union-attr]
    assert len(ids["calibration"]) == 256
    assert ids["calibration"] <= set(digits.train.ids.tolist())  # type: ignore[union-attr]
    assert ids["held_out"] <= set(metric.examples("look").ids.tolist())  # type: ignore[union-attr]
    assert not (ids["calibration"] | ids["held_out"]) & forbidden


def test_what_cannot_be_promised_is_refused(finished: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file that is always wrong: layers go back to float32, then the export refuses with figures, and writes nothing."""
    old = tmp_path / "small.onnx"
    old.write_bytes(b"old")
    monkeypatch.setattr(
        PerExample, "of_file", lambda self, module, side: torch.zeros(len(self.examples(side)), dtype=torch.float64)
    )
    with pytest.raises(
        Uncertified, match=r"cannot be promised. Pruning alone costs .* all in int8 a drop of .* 1 layers in float32"
    ):
        finished.export(old, int8=True)
    assert old.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["small.onnx"]


def test_after_a_refusal_nothing_is_certified(finished: Result, tmp_path: Path) -> None:
    spent = replace(finished, folder=None, int8_answers=[False])
    with pytest.raises(Uncertified, match="deploy='int8'"):
        spent.export(tmp_path / "small.onnx", int8=True)
    assert not list(tmp_path.iterdir())
    spent.export(tmp_path / "small.onnx", int8=True, uncertified=True)
    assert (tmp_path / "small.onnx").stat().st_size > 1000


def test_places_that_cannot_be_written_are_refused(finished: Result, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"ends in \.onnx"):
        finished.export(tmp_path / "small", int8=True)
    if find_spec("torchao") is None:
        with pytest.raises(InvalidInput, match="needs torchao, not installed here"):
            finished.export(tmp_path / "small.pt2", int8=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match="cannot be written"):
        finished.export(tmp_path / "file" / "small.onnx", int8=True)
    with pytest.raises(InvalidInput, match="pad_to=8 with int8"):
        finished.export(tmp_path / "small.onnx", int8=True, pad_to=8)


@pytest.mark.slow
def test_killed_while_exporting_the_old_file_is_whole(finished: Result, tmp_path: Path) -> None:
    """Whenever the process dies: the file is the old one or the new one, and an export after it succeeds."""
    (tmp_path / "small.onnx").write_bytes(b"old")
    here = Path(__file__).parent
    script = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]; import test_int8; test_int8.export_killed()"
    command = [sys.executable, "-c", script, str(finished.folder), str(tmp_path / "small.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    left = done.stdout.split()
    assert len(left) >= 8
    assert set(left) == {"old", "new"}
    assert left == sorted(left, reverse=True), "once the new file is there it stays"


def export_killed() -> None:
    """In a process of its own: export in children that die at the next event on files, and print what each one left."""
    from secateurs import resume
    from secateurs.report import int8 as certificate

    folder, path = map(Path, sys.argv[1:])
    result: Any = resume(folder, small_network(), load_digits()).finish()
    made = certificate.quantiser_for(result.context, result.graph)
    ready = certificate.prepared(result.graph, result.context.compared_examples.batch(slice(0, 64)).args)
    certificate.quantiser_for = lambda *given, **options: made  # type: ignore[assignment]  # seconds, which touch no file
    certificate.prepared = lambda *given, **options: ready
    whole = path.with_name("whole.onnx")
    result.export(whole, int8=True)
    for moment in itertools.count(1):
        pid = os.fork()
        if not pid:
            events = itertools.count(1)

            def die(event: str, given: tuple[Any, ...], last: int = moment, events: Any = events) -> None:
                if str(path.parent) in repr(given) and next(events) == last:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(die)
            result.export(path, int8=True)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        found = path.read_bytes()
        print("old" if found == b"old" else "new" if found == whole.read_bytes() else "broken")
        if status == 0:
            return
        assert os.WTERMSIG(status) == signal.SIGKILL


# ---- a run for int8 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_for_int8_certifies_the_file_that_it_exports(
    trained: nn.Module, digits: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    """Stopped while it certifies and resumed, as after a kill: what was asked is not asked again, and the file is promised."""
    from secateurs import resume
    from secateurs.export.engines import Int8Engine
    from secateurs.pruning import choice

    def weights_of(module: nn.Module) -> int:
        return sum(weight.numel() for weight in module.parameters())

    # times are told by weights, so that the run does the same on a busy machine
    monkeypatch.setattr(Int8Engine, "network", lambda self, graph: lambda: lambda: 1e-6 * weights_of(graph.module))
    monkeypatch.setattr(Int8Engine, "layer", lambda self, layer, shape, times: lambda: 1e-6 * times * weights_of(layer))
    for growth in ("FINE", "COARSE"):
        monkeypatch.setattr(choice, growth, 1.6)  # few questions: each makes a file

    class Stopped(BaseException):
        pass

    def stop(event: Any) -> None:
        if len(certifying(tmp_path / "run")) > 1:
            raise Stopped

    def certifying(folder: Path) -> list[dict[str, Any]]:
        journal = folder / "journal.jsonl"
        lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        return [line for line in lines if line["unit"] == "trial" and line["judge"] == "certifying"]

    retrain = replace(GENTLE, lr=0.01) if trains else None
    recipe = Recipe.best(max_drop=0.08, deploy="int8", retrain=retrain)
    with pytest.raises(Stopped):
        Pruner(trained, digits, recipe=recipe, folder=tmp_path / "run", callback=stop).finish()
    before = certifying(tmp_path / "run")
    result: Any = resume(tmp_path / "run", small_network(), digits).finish()
    after = certifying(tmp_path / "run")
    assert after[: len(before)] == before
    assert result.bound is not None
    assert result.bound <= 0.08
    assert result.macs.after < result.macs.before
    path = result.export(tmp_path / "small.onnx", int8=True)
    noted = json.loads((tmp_path / "run" / "exports.json").read_text())
    (figures,) = [one["int8"] for one in noted["exports"]]
    assert figures["bound"] == pytest.approx(result.bound, abs=1e-12)
    assert figures["answers"] == [], "the run has asked about this file: nothing is asked again"
    # by hand: the file on the images that certify, against the network that was given
    metric = result.context.metric
    assert isinstance(metric, PerExample)
    batch = metric.examples("certify").batch(slice(None))
    right = ran(path.read_bytes(), batch.args[0]).argmax(1) == batch.targets.numpy()
    with torch.no_grad():
        first = (trained.eval()(batch.args[0]).argmax(1) == batch.targets).numpy()
    assert figures["accuracy"] == pytest.approx(right.mean())
    assert figures["drop_pruning"] + figures["drop_quantising"] == pytest.approx(first.mean() - right.mean())


def test_deploy_needs_onnx_runtime() -> None:
    with pytest.raises(RecipeError, match="deploy = 'int8'"):
        Recipe.fast(deploy="int8")
    with pytest.raises(RecipeError, match="deploy = 'int8'"):
        Recipe.best(deploy="int8", engine="torch")
    assert Recipe.best(deploy="int8").weighs_time


def test_the_int8_engine_times_int8_networks_and_layers() -> None:
    from secateurs.export.engines import Int8Engine, OnnxEngine, engine_for

    engine = engine_for(Recipe.best(deploy="int8", latency_threads=1))
    assert isinstance(engine, Int8Engine)
    assert engine.name != OnnxEngine.name, "times of both must not share a file"
    assert engine.network(tiny())()() > 0
    assert engine.layer(nn.Conv2d(8, 8, 3), (1, 8, 6, 6), 1)() > 0
    assert engine.layer(nn.Linear(8, 8), (1, 8), 1)() > 0
