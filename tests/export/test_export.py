"""Exports: each must give the outputs of the masked network without secateurs; otherwise nothing is written."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import (
    Net,
    TwoInputs,
    assert_same,
    assert_same_bits,
    random_keep,
    random_tensor,
    randomise_,
    run,
    run_exported,
    traced,
    weights_of,
)
from secateurs import Graph, compact, find_sites, load, masked, save, trace
from secateurs.config import Shortcut
from secateurs.errors import ArtefactError, InvalidInput, NotEqual, UnsupportedOp
from secateurs.export import deliver, prepared, programs, source, to_onnx, to_pt2, to_source
from secateurs.export.deliver import run_fresh
from secateurs.export.plain import alignments, plain_module
from secateurs.graph.layers import Align, Offset
from secateurs.graph.trace import record_shapes_, tensors_in
from secateurs.models import build, example_input, names

FOUR = {"resnet20": {"widths": (4, 4, 8)}, "vgg16": {"width": 2}, "mobilenet-small": {"width": 4}, "mlp": {}}
SMALL = [name for name in names() if not re.match(r"resnet(14|20|32|44|56|110)|fcn3", name)]


def options(name: str) -> dict[str, Any]:
    return FOUR.get(name, {"width": 2} if name == "vgg16" else {})


@cache
def whole(name: str) -> Graph:
    """A built-in network in float64 with random weights and statistics."""
    return trace(randomise_(build(name, **options(name))), example_input(name).double())


@cache
def cut(name: str, shortcut: Any = "before") -> tuple[Graph, nn.Module]:
    """The network without about half of its channels, and the whole one with those channels at zero."""
    masks = random_keep(find_sites(whole(name), shortcut), seed=0)
    return compact(whole(name), masks), masked(whole(name), masks)


def check_all_ways(name: str, folder: Path) -> None:
    """Through save, load and all exports; the expected outputs are those of the masked network, in float64."""
    small, reference = cut(name)
    save(small, folder / "pruned.safetensors")
    graph = load(build(name, **options(name)).double(), folder / "pruned.safetensors")
    graph.module.float()
    x = random_tensor(5, *graph.example[0].shape[1:], seed=3)
    wanted = run(reference, x)
    ready = prepared(graph, x)
    found = [to_onnx(ready, folder / "m.onnx"), to_pt2(ready, folder / "m.pt2"), to_source(ready, folder / "source")]
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / "m.onnx", providers=["CPUExecutionProvider"])
    given = session.run(None, {session.get_inputs()[0].name: x.float().numpy()})[0]
    outputs = [torch.from_numpy(given), run_exported("pt2", folder / "m.pt2", [(x.float(),)])[0][0]]
    outputs.append(run_exported("source", folder / "source", [(x.float(),)])[0][0])
    for exported, output in zip(found, outputs, strict=True):
        assert_same(output.double(), wanted, atol=2e-5)
        assert exported.agreement.difference <= 1e-5 * exported.agreement.scale
        assert (exported.agreement.examples, exported.agreement.given) == (5, True)
    assert found[0].bytes == (folder / "m.onnx").stat().st_size
    for file in (folder / "m.onnx", folder / "m.pt2", folder / "source" / "model.py"):
        assert b"secateurs" not in file.read_bytes()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("name", ["mlp"])
def test_a_network_agrees_in_every_form(name: str, tmp_path: Path) -> None:
    check_all_ways(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_a_network_agrees_in_every_form_in_a_process_without_secateurs(name: str, tmp_path: Path) -> None:
    check_all_ways(name, tmp_path)


@pytest.mark.usefixtures("in_this_process")
def test_pt2_and_source_agree(tmp_path: Path) -> None:
    small, reference = cut("resnet8")
    ready = prepared(small)
    to_pt2(ready, tmp_path / "m.pt2", tolerance=1e-12)
    to_source(ready, tmp_path / "source", tolerance=1e-12)
    assert_same(run_exported("pt2", tmp_path / "m.pt2", [small.example])[0], run(reference, *small.example))


def test_source_runs_where_secateurs_cannot_be_imported(tmp_path: Path) -> None:
    small, _ = cut("resnet8")
    exported = to_source(small, tmp_path, tolerance=1e-12)
    assert exported.path == tmp_path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.py", "model.safetensors"]
    assert exported.bytes == sum(p.stat().st_size for p in tmp_path.iterdir())


def test_source_of_a_pruned_plain_sequential_runs_and_keeps_its_names(tmp_path: Path) -> None:
    """Its layers have the names 0, 1, 2, which are no identifiers but are part of the names of its weights."""
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 3))
    inputs = random_tensor(5, 4)
    pruned = compact(traced(network, inputs), {"0": torch.arange(8) > 2, "2.0": torch.arange(8) != 5})
    to_source(pruned, tmp_path / "plain")
    again = runpy.run_path(str(tmp_path / "plain" / "model.py"))["load"]()
    torch.testing.assert_close(again(inputs), pruned.module(inputs))
    assert {name: tuple(t.shape) for name, t in again.state_dict().items()} == {
        "0.weight": (5, 4), "0.bias": (5,), "2.0.weight": (7, 5), "2.0.bias": (7,), "3.weight": (3, 7), "3.bias": (3,),
    }  # fmt: skip


def test_source_of_numbered_parameters_and_infinite_constants(tmp_path: Path) -> None:
    net = Net(
        lambda self, x: self.a(x) * self.scales[1] + self.scales[0].clamp(-torch.inf, 2.0),
        a=nn.Linear(3, 4),
        scales=nn.ParameterList([torch.arange(4.0), torch.full((4,), 3.0)]),
    )
    graph = traced(net, random_tensor(2, 3))
    source.write_source(prepared(graph), tmp_path)
    network = runpy.run_path(str(tmp_path / "model.py"))["load"]()
    assert_same(run(network, *graph.example), run(net, *graph.example))
    assert {name for name, _ in network.named_parameters()} == {name for name, _ in net.named_parameters()}


def test_source_that_needs_secateurs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import secateurs\n")
    with pytest.raises(ArtefactError, match=r"does not run in a process of its own, without secateurs \(ModuleNotFoundError"):
        run_fresh("source", tmp_path, [(torch.zeros(1),)])


# ---- plain networks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shortcut"), [*((name, "before") for name in SMALL), ("resnet8", "after"), ("mobilenet-small", "after")]
)
def test_plain_source_of_every_built_in_network_gives_the_same(name: str, shortcut: Shortcut, tmp_path: Path) -> None:
    small, reference = cut(name, shortcut)
    ready = prepared(small)
    assert not [m for m in ready.module.modules() if type(m).__module__.startswith("secateurs")]
    source.write_source(ready, tmp_path)
    network = runpy.run_path(str(tmp_path / "model.py"))["load"]()
    assert_same(run(network, *small.example), run(reference, *small.example))
    assert {n for n, _ in network.named_parameters()} == {n for n, _ in small.module.named_parameters()}


def test_source_passes_ruff(tmp_path: Path) -> None:
    for name in SMALL:
        (tmp_path / f"{name}.py").write_text(source.source_of(prepared(cut(name)[0])))
    ruff = [sys.executable, "-m", "ruff"]
    for command in (
        ["check", "--isolated"],
        ["format", "--check", "--isolated"],
        ["format", "--check", "--line-length", "128"],
    ):
        done = subprocess.run([*ruff, *command, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_channels_that_lie_together_are_sliced_and_those_in_place_left_alone() -> None:
    graph = whole("resnet8-b")
    site = next(s for s in find_sites(graph) if s.name == "layer1.0.conv2")
    together = torch.arange(site.channels) < 4
    module = plain_module(compact(graph, {site.name: together}))
    assert [node.target for node in alignments(module)] == [F.pad]
    assert not alignments(plain_module(compact(graph, {site.name: torch.ones_like(together)})))


def test_masks_constants_and_modes_become_ordinary_ops(tmp_path: Path) -> None:
    net = Net(
        lambda self, x: F.rrelu(self.stem(x), training=self.training) * self.scale + self.out(F.relu(self.inner(x))),
        stem=nn.Conv2d(3, 4, 3, padding=1),
        inner=nn.Conv2d(3, 5, 3, padding=1),
        out=nn.Conv2d(5, 4, 1),
        scale=nn.Parameter(torch.ones(4, 1, 1)),
    )
    graph = traced(net, random_tensor(2, 3, 6, 6))
    emptied = compact(graph, {"inner": torch.zeros(5, dtype=torch.bool)})
    hidden = graph.with_module(masked(graph, {"inner": torch.arange(5) < 3}))
    record_shapes_(hidden.module, graph.example)
    for one in (emptied, hidden):
        ready = prepared(one)
        assert not [m for m in ready.module.modules() if type(m).__module__.startswith("secateurs")]
        source.write_source(ready, tmp_path)
        assert "training=self.training" in (tmp_path / "model.py").read_text()
        assert_same(run(runpy.run_path(str(tmp_path / "model.py"))["load"](), *graph.example), run(one.module, *graph.example))


@pytest.mark.parametrize("kept", [2, 0])
def test_constants_with_zeros_are_aligned_once(kept: int, tmp_path: Path) -> None:
    """A folded branch without some of its channels, or without any: in a maximum its zeros count."""
    net = Net(
        lambda self, x: self.last(torch.maximum(self.stem(x), self.out(F.relu(self.inner(x))))),
        **{"stem": nn.Conv2d(3, 4, 3), "inner": nn.Conv2d(3, 5, 3), "out": nn.Conv2d(5, 4, 1), "last": nn.Conv2d(4, 2, 1)},
    )
    graph = traced(net, random_tensor(2, 3, 6, 6))
    masks = {"inner": torch.zeros(5, dtype=torch.bool), "out": torch.arange(4) < kept}
    small = compact(graph, masks)
    assert any(isinstance(part, Align) for part in small.module.modules())
    ready = prepared(small)
    assert not alignments(ready.module)
    source.write_source(ready, tmp_path)
    network = runpy.run_path(str(tmp_path / "model.py"))["load"]()
    assert_same(run(network, *graph.example), run(masked(graph, masks), *graph.example))


@pytest.mark.parametrize("covered", [torch.ones(4) > 0, torch.arange(4) != 1])
def test_an_offset_behind_a_sum_becomes_a_parameter(covered: Tensor, tmp_path: Path) -> None:
    """The terms of the sum have different channels."""
    net = Net(
        lambda self, x: self.last(self.offset(self.one(x) + self.other(x))),
        one=nn.Conv2d(3, 4, 3),
        other=nn.Conv2d(3, 4, 3),
        offset=Offset(covered, 1, torch.float64),
        last=nn.Conv2d(4, 2, 1),
    )
    graph = traced(net, random_tensor(2, 3, 6, 6))
    masks = {"one": torch.tensor([True, False, True, True]), "other": torch.tensor([True, True, False, True])}
    small = compact(graph, masks)
    source.write_source(prepared(small), tmp_path)
    network = runpy.run_path(str(tmp_path / "model.py"))["load"]()
    assert_same(run(network, *graph.example), run(masked(graph, masks), *graph.example))


# ---- refusals -----------------------------------------------------------------------------------------------------------


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_source_names_the_layer_that_cannot_be_written(tmp_path: Path) -> None:
    graph = traced(nn.Sequential(nn.Linear(3, 4), Own(), nn.Linear(4, 2)), random_tensor(2, 3), leaves=[Own])
    with pytest.raises(UnsupportedOp, match="Own at node '1' cannot be written out as source"):
        to_source(graph, tmp_path / "source")
    assert not list(tmp_path.glob("source/*"))
    encoder = nn.Sequential(nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 1, 4))
    with pytest.raises(UnsupportedOp, match=r"TransformerEncoderLayer at node '1' .* does not keep its setting 'd_model'"):
        to_source(traced(encoder, random_tensor(2, 3), leaves=[nn.TransformerEncoderLayer]), tmp_path / "source")


@pytest.mark.usefixtures("in_this_process")
def test_a_difference_above_the_tolerance_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(kind: str, path: Path, batches: Any) -> list[list[Tensor]]:
        return [[t + 1e-3 for t in tensors] for tensors in run_exported(kind, path, batches)]

    small, _ = cut("mlp")
    (tmp_path / "model.py").write_text("mine")
    monkeypatch.setattr(deliver, "run_fresh", wrong)
    with pytest.raises(NotEqual, match=r"source export differs from the network by 0\.001"):
        to_source(small, tmp_path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("model.py", "mine")]


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match=r"cannot be written .* Choose a folder"):
        to_source(cut("mlp")[0], tmp_path / "file" / "inside")
    with pytest.raises(InvalidInput, match="is a folder, wanted a file"):
        to_pt2(cut("mlp")[0], tmp_path)


def test_onnx_without_its_packages_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=re.escape("pip install 'secateurs[onnx]'")):
        to_onnx(cut("mlp")[0], tmp_path / "m.onnx")


def test_the_table_of_translated_ops_is_read_once() -> None:
    registry = pytest.importorskip("torch.onnx._internal.exporter._registration").ONNXRegistry
    own = registry.__dict__["from_torchlib"]
    network = prepared(trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(2, 3)))
    programs._translations.cache_clear()
    first, second = programs.onnx_bytes(network), programs.onnx_bytes(network)
    assert programs._translations.cache_info().misses == 1
    assert programs._translations.cache_info().hits == 1
    assert first == second
    assert registry.__dict__["from_torchlib"] is own


@pytest.mark.usefixtures("in_this_process")
def test_several_inputs_are_batches_of_the_same_examples(tmp_path: Path) -> None:
    net = TwoInputs(lambda self, x, y: {"sum": self.a(x) + self.b(y), "first": self.a(x)}, a=nn.Linear(3, 4), b=nn.Linear(5, 4))
    graph = traced(net, random_tensor(1, 3), random_tensor(1, 5, seed=1))
    for exported in (to_source(graph, tmp_path), to_pt2(graph, tmp_path / "m.pt2")):
        assert exported.agreement.examples == 2
        assert not exported.agreement.given
    with pytest.raises(InvalidInput, match="must count the same examples"):
        prepared(graph, (random_tensor(2, 3), random_tensor(4, 5)))
    with pytest.raises(InvalidInput, match=r"wanted \[\(None, 3\), \(None, 5\)\]"):
        prepared(graph, random_tensor(2, 3))


class Named(nn.Module):
    """Two inputs, and outputs as `give` puts them together."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.give, self.logits, self.boxes = give, nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, images: Tensor, scale: Tensor) -> Any:
        found = torch.relu(images.flatten(1) * scale)
        return self.give(self.logits(found), self.boxes(found))


NAMED: dict[str, tuple[Any, list[str]]] = {
    "one tensor": (lambda one, other: one, ["output"]),
    "a tuple": (lambda one, other: (one, other), ["output_0", "output_1"]),
    "a dict": (lambda one, other: {"boxes": other, "classes": one}, ["boxes", "classes"]),
    "the name of a tensor inside": (lambda one, other: {"logits": other, "relu": one}, ["logits", "relu"]),
    "the name of an input": (lambda one, other: {"images": one, "scale": other}, ["output_images", "output_scale"]),
    "lists in a dict": (lambda one, other: {"levels": [one, other], "best": one + 1}, ["levels_0", "levels_1", "best"]),
}


@pytest.mark.parametrize("form", NAMED)
def test_inputs_outputs_and_the_batch_have_names_that_say_what_they_are(form: str, tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    give, outputs = NAMED[form]
    network, example = Named(give).eval(), (random_tensor(2, 2, 3).float(), random_tensor(2, 1).float())
    to_onnx(trace(network, example), tmp_path / "m.onnx")
    written = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(written, full_check=True)
    axes = {each.name: [d.dim_param or d.dim_value for d in each.type.tensor_type.shape.dim] for each in written.graph.input}
    assert axes == {"images": ["batch", 2, 3], "scale": ["batch", 1]}
    assert [each.name for each in written.graph.output] == outputs
    assert all(each.type.tensor_type.shape.dim[0].dim_param == "batch" for each in written.graph.output)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    images, scale = random_tensor(7, 2, 3, seed=1).float(), random_tensor(7, 1, seed=2).float()
    found = dict(zip(outputs, session.run(outputs, {"images": images.numpy(), "scale": scale.numpy()}), strict=True))
    for name, wanted in zip(outputs, tensors_in(run(network, images, scale)), strict=True):
        torch.testing.assert_close(torch.from_numpy(found[name]), wanted, atol=1e-5, rtol=1e-5)


def test_a_network_that_fixes_its_batch_is_refused() -> None:
    graph = traced(Net(lambda self, x: self.a(x.reshape(2, 3)), a=nn.Linear(3, 4)), random_tensor(2, 3))
    broken = prepared(traced(nn.Linear(3, 4), random_tensor(2, 3)))
    with pytest.raises(UnsupportedOp, match="cannot follow Net for a batch of any size"):
        _ = type(broken)("Net", plain_module(graph), (graph.example,), broken.wanted, False).program


# ---- measurements -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_this_process")
def test_the_unpruned_network_is_compared_and_not_changed(tmp_path: Path) -> None:
    small, _ = cut("mlp")
    model = randomise_(build("mlp")).train()
    before = weights_of(model)
    exported = to_source(small, tmp_path, original=model, repeats=5)
    assert [speed.batch for speed in exported.speeds] == [1, 64]
    assert exported.original_bytes is not None
    whole_weights = sum(t.numel() * t.element_size() for t in before.values())
    assert exported.original_bytes > whole_weights > exported.bytes
    assert model.training
    assert_same_bits(before, model.state_dict())
    assert exported.alignment.summary() == "no channels to align"


def test_the_share_of_aligning_is_measured() -> None:
    found = prepared(cut("resnet8")[0]).alignment
    assert 0 < found.share < 1
    # one block a stage: the term that comes from the block and the one from the shortcut are aligned, in three sums
    assert found.gathers + found.slices <= 6
    assert re.match(
        r"aligning channels \(\d gathers, \d slices or pads\) takes \d+\.\d % of the time at batch 64", found.summary()
    )


def test_the_same_network_gives_the_same_source_bytes(tmp_path: Path) -> None:
    written = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        source.write_source(prepared(cut("resnet8")[0]), tmp_path / name)
        written.append([(tmp_path / name / file).read_bytes() for file in ("model.py", "model.safetensors")])
    assert written[0] == written[1]
