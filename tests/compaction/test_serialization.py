"""Saved networks: one safetensors file, loaded back bit for bit; every kind of damage has its own clear error."""

from __future__ import annotations

import ast
import json
import operator
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

import secateurs
from nets import assert_same, assert_same_bits, random_keep, random_tensor, randomise_, run, weights_of
from secateurs import Graph, compact, find_sites, load, save, trace
from secateurs.errors import ArtefactError, PlanError, SecateursError
from secateurs.models import build, example_input


class Block(nn.Module):
    """Small enough that every byte of its file can be changed once."""

    def __init__(self, width: int = 6, normed: bool = True) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, width, 1)
        self.b = nn.Conv2d(width, 4, 1)
        self.c = nn.Conv2d(4, width, 1)
        if normed:
            self.n = nn.BatchNorm2d(width)
        self.d = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        y = self.c(torch.relu(self.b(x)))
        y = self.n(y) if hasattr(self, "n") else y
        return self.d(torch.relu(x + y).mean((2, 3)))


class Other(Block):
    """Another class with the same layers."""


def small(seed: int = 0) -> Graph:
    graph = trace(randomise_(Block(), seed), random_tensor(2, 3, 4, 4))
    return compact(graph, {"b": torch.arange(4) > 1, "c": torch.arange(6) % 3 > 0, "a": torch.arange(6) > 0})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(small(), tmp_path / "net.safetensors")


def test_a_loaded_network_is_the_saved_one_bit_for_bit(saved: Path) -> None:
    graph, x = small(), random_tensor(5, 3, 4, 4, seed=1)
    model = randomise_(Block(), seed=9)
    before = weights_of(model)
    fresh = load(model, saved)
    assert fresh.plan == graph.plan
    assert torch.equal(run(fresh.module, x), run(graph.module, x))
    assert_same_bits(before, model.state_dict())
    assert_same_bits(fresh.module.state_dict(), graph.module.state_dict())
    # and can be cut and saved again
    again = compact(fresh, random_keep(find_sites(fresh), seed=2, share=0.3))
    save(again, saved)
    assert torch.equal(run(load(Block().eval(), saved, example_input=x.float()).module, x), run(again.module, x))


def test_the_file_is_plain_safetensors_with_the_plan_inside(saved: Path) -> None:
    tensors = safetensors.torch.load_file(saved)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        name: tuple(t.shape) for name, t in small().module.state_dict().items()
    }
    with safe_open(saved, "pt") as file:
        plan = json.loads(file.metadata()["plan"])
    assert plan["model"] == f"{Block.__module__}.Block"
    assert {"site": "b", "removed": [0, 1], "channels": 4} in plan["steps"][0]


def test_the_users_metadata_is_saved_with_the_network(tmp_path: Path) -> None:
    save(small(), tmp_path / "net", metadata={"accuracy": "0.91", "note": "ünïcode \n"})
    with safe_open(tmp_path / "net", "pt") as file:
        assert file.metadata()["accuracy"] == "0.91"
        assert file.metadata()["note"] == "ünïcode \n"
    load(Block(), tmp_path / "net")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_precision_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    graph = trace(randomise_(Block()).to(dtype), random_tensor(2, 3, 4, 4).to(dtype))
    smaller = compact(graph, {"b": torch.arange(4) > 1})
    fresh = load(Block().eval(), save(smaller, tmp_path / "net"))
    assert {t.dtype for t in fresh.module.state_dict().values() if t.is_floating_point()} == {dtype}
    assert torch.equal(run(fresh.module, *graph.example), run(smaller.module, *graph.example))


@pytest.mark.parametrize("name", ["resnet8", "resnet8-b", "mobilenet-small", "densenet-small", "unet-small", "fcn10"])
def test_built_in_networks_come_back(tmp_path: Path, name: str) -> None:
    graph = trace(randomise_(build(name)), example_input(name).double())
    smaller = compact(graph, random_keep(find_sites(graph, "after"), seed=0, share=0.3))
    fresh = load(build(name).eval(), save(smaller, tmp_path / "net"))
    assert torch.equal(run(fresh.module, *graph.example), run(smaller.module, *graph.example))


def test_an_emptied_branch_comes_back_with_its_constant(tmp_path: Path) -> None:
    graph = trace(randomise_(Block()), random_tensor(2, 3, 4, 4))
    smaller = compact(graph, {"b": torch.zeros(4, dtype=torch.bool)})
    fresh = load(randomise_(Block(), seed=5), save(smaller, tmp_path / "net"))
    assert torch.equal(run(fresh.module, *graph.example), run(smaller.module, *graph.example))


def test_what_was_traced_with_leaves_is_loaded_with_leaves(tmp_path: Path) -> None:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.own, self.b, self.c = nn.Linear(3, 6), Choice(), nn.Linear(6, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.relu(self.b(self.own(torch.relu(self.a(x))))))

    class Choice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    graph = trace(randomise_(Dynamic()), random_tensor(2, 3), leaves=["own"])
    smaller = compact(graph, {"b": torch.arange(5) > 1})
    fresh = load(Dynamic(), save(smaller, tmp_path / "net"))
    assert torch.equal(run(fresh.module, *graph.example), run(smaller.module, *graph.example))


# ---- damage -----------------------------------------------------------------------------------------------------------


def test_every_truncation_is_named(saved: Path) -> None:
    data = saved.read_bytes()
    for length in [*range(0, 40), *range(40, len(data), 97), len(data) - 1]:
        saved.write_bytes(data[:length])
        with pytest.raises(ArtefactError, match=f"{saved.name}: not a whole safetensors file.*cut short"):
            load(Block(), saved)


@pytest.mark.parametrize(
    ("start", "said"),
    [(b"PK\x03\x04", "it is of torch.save"), (b"<!DOCTYPE html>", "as other files do"), (b"\x80\x02}", "it is of torch.save")],
)
def test_a_file_of_another_kind_is_said_to_be_one(start: bytes, said: str, saved: Path) -> None:
    saved.write_bytes(start + bytes(range(1, 100)))
    with pytest.raises(
        ArtefactError, match=f"not a whole safetensors file .begins with .*{said}.*torch.save is loaded with"
    ) as got:
        load(Block(), saved)
    assert "header of" not in str(got.value)


def same_json(a: bytes, b: bytes) -> bool:
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


def test_every_changed_byte_is_noticed(saved: Path) -> None:
    """Every byte of the header, and some of the weights: each gives an error, never another network."""
    data = bytearray(saved.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    body = range(8 + length, len(data), 13)
    model = randomise_(Block())
    reference = run(load(model, saved).module, random_tensor(2, 3, 4, 4))
    for place in [*range(8 + length), *body]:
        changed = bytearray(data)
        changed[place] ^= 1 if place % 2 else 4
        saved.write_bytes(changed)
        if place < 8 + length and same_json(changed[8 : 8 + length], data[8 : 8 + length]) and changed[:8] == data[:8]:
            assert_same(run(load(model, saved).module, random_tensor(2, 3, 4, 4)), reference)  # a space that means nothing
        else:
            with pytest.raises((ArtefactError, PlanError), match=saved.name):
                load(model, saved)


def rewrite(path: Path, change: Callable[[dict[str, str], dict[str, Tensor]], None]) -> None:
    """Change header or tensors with a new digest, as an older or a wrong writer would."""
    from secateurs._util.tensors import digest

    with safe_open(path, "pt") as file:
        header = dict(file.metadata())
    tensors = safetensors.torch.load_file(path)
    del header["digest"]
    change(header, tensors)
    header["digest"] = digest(tensors, header)
    path.write_bytes(safetensors.torch.save(tensors, header))


def test_a_changed_plan_is_noticed(saved: Path) -> None:
    """The same number of other filters: all shapes fit, so only the digest is wrong."""
    data = saved.read_bytes()
    text = data.decode("latin-1")
    with safe_open(saved, "pt") as file:
        plan = json.loads(file.metadata()["plan"])
    assert [cut["removed"] for cut in plan["steps"][0]] == [[0, 1], [0, 3], [0]]
    place = text.index("3", text.index('\\"c\\"'))
    saved.write_bytes(data[:place] + b"4" + data[place + 1 :])
    with pytest.raises(ArtefactError, match="do not match their digest: the file was changed or damaged"):
        load(Block(), saved)


def set_plan(**changes: object) -> Callable[[dict[str, str], dict[str, Tensor]], None]:
    def change(header: dict[str, str], tensors: dict[str, Tensor]) -> None:
        header["plan"] = json.dumps(json.loads(header["plan"]) | changes)

    return change


def drop(name: str) -> Callable[[dict[str, str], dict[str, Tensor]], None]:
    return lambda header, tensors: operator.delitem(tensors, name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, str], dict[str, Tensor]], None]:
    return lambda header, tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_plan(secateurs_plan=7), "plan of version 7, this secateurs reads version 1"),
        (set_plan(model="package.Unknown"), "holds a package.Unknown, but the model given is a .*Block"),
        (set_plan(steps=[[{"site": "z", "removed": [0], "channels": 6}]]), "its plan does not fit .*no site 'z'"),
        (set_plan(steps=[[{"site": "a", "removed": [0], "channels": 8}]]), "plan does not fit .*of 8 channels.*has 6"),
        (set_plan(steps="none"), "'steps' must be a list"),
        (drop("d.bias"), r"missing in the file \['d.bias'\]"),
        (put("extra.weight", torch.ones(3)), r"unknown to the model \['extra.weight'\]"),
        (put("d.bias", torch.ones(7)), r"'d.bias' has shape \(7,\), the pruned model wants \(2,\)"),
        (lambda header, tensors: header.update(secateurs_format="99"), "got format '99', wanted '1'"),
        (lambda header, tensors: operator.delitem(header, "secateurs_format"), "not saved by secateurs"),
        (lambda header, tensors: operator.delitem(header, "plan"), "has no plan in its header"),
        (lambda header, tensors: operator.delitem(header, "example"), "example's shapes are missing or damaged"),
        (lambda header, tensors: header.update(example="[[1, 2]]"), "example's shapes are missing or damaged"),
        (lambda header, tensors: header.update(example='[[[2, 3], "float99"]]'), "example's shapes are missing or damaged"),
        (lambda header, tensors: header.update(example='[[[2, 3], "nn"]]'), "example's shapes are missing or damaged"),
        (lambda header, tensors: header.update(example='[[["2", 3], "float32"]]'), "example's shapes are missing or damaged"),
        (lambda header, tensors: header.update(example='[[[-2, 3], "float32"]]'), "example's shapes are missing or damaged"),
        (
            lambda header, tensors: header.update(example="[" * 100_000 + "]" * 100_000),
            "example's shapes.*nested deeper than 32",
        ),
        (lambda header, tensors: header.update(example='[[[60000, 60000, 2], "float32"]]'), "would have 7,200,000,000 values"),
        (lambda header, tensors: header.update(leaves="[1]"), "the names of its leaves are damaged"),
        (lambda header, tensors: header.update(leaves="null"), "the names of its leaves are damaged"),
        (lambda header, tensors: header.update(plan="[" * 100_000), "nested deeper than 32"),
        (lambda header, tensors: tensors["d.bias"].fill_(float("nan")), "'d.bias' holds NaN or infinite values"),
        (lambda header, tensors: tensors["d.weight"][0].fill_(-float("inf")), "'d.weight' holds NaN or infinite values"),
        (put("d.bias", torch.ones(2, dtype=torch.int64)), r"'d.bias' holds torch.int64, the pruned model wants torch.float"),
    ],
)
def test_files_of_wrong_writers_are_named(saved: Path, change: Callable[..., None], message: str) -> None:
    rewrite(saved, change)
    with pytest.raises((ArtefactError, PlanError), match=message) as caught:
        load(Block(), saved)
    assert saved.name in str(caught.value)
    assert len(str(caught.value)) <= 600


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Other, r"holds a .*\.Block, but the model given is a .*\.Other. Build the class that was pruned"),
        (lambda: nn.Linear(2, 2), "holds a .*Block, but the model given is a torch.nn.modules.linear.Linear"),
        (lambda: Block(width=8), "plan does not fit .*of 6 channels, but this network has 8.*Build the model with the options"),
        (lambda: Block(normed=False), r"layers differ.*unknown to the model \['n\.bias'"),
    ],
)
def test_the_wrong_network_is_named(saved: Path, model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ArtefactError, match=message):
        load(model(), saved)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 7, b"\xff" * 64, b"PK\x03\x04" + bytes(60), struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2) + b"{}"]
    + [struct.pack("<Q", len(h)) + h for h in (b'{"__metadata__":"x"}', b'{"__metadata__":{"a":1}}', b'"text"', b"null")]
    + [struct.pack("<Q", len(h)) + h for h in (b"[" * 100_000, b'{"a":' * 100_000, b'{"__metadata__":{},"__metadata__":{}}')],
)
def test_other_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "net").write_bytes(content)
    with pytest.raises(ArtefactError, match=f"{tmp_path}/net: (not a whole safetensors file|got format None)"):
        load(Block(), tmp_path / "net")


def test_plain_weights_and_absent_files_are_named(tmp_path: Path) -> None:
    safetensors.torch.save_file(Block().state_dict(), tmp_path / "plain")
    with pytest.raises(ArtefactError, match=r"got format None.*not saved by secateurs.*load_state_dict"):
        load(Block(), tmp_path / "plain")
    with pytest.raises(ArtefactError, match="absent: cannot be read"):
        load(Block(), tmp_path / "absent")
    with pytest.raises(ArtefactError, match="cannot be read"):
        load(Block(), tmp_path)


def test_places_that_cannot_be_written_are_named_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    for path in (tmp_path / "file" / "net", tmp_path / "folder"):
        with pytest.raises(ArtefactError, match=f"{path}: cannot be written.*Nothing was changed"):
            save(small(), path)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder", "inside"]


def test_a_failed_save_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ArtefactError, match="No space left on device"):
        save(small(seed=1), saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_only_the_file_remains(saved: Path) -> None:
    save(small(seed=1), saved)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_metadata_must_be_text(tmp_path: Path) -> None:
    with pytest.raises(SecateursError, match="metadata"):
        save(small(), tmp_path / "net", metadata={"epochs": 3})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


def test_nothing_is_unpickled_anywhere() -> None:
    """No module imports pickle, and every torch.load says weights_only=True."""
    for path in Path(secateurs.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "dill", "joblib", "shelve", "marshal"} & {name.split(".")[0] for name in imported}, path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.jit.load"):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("weights_only") == "True", path


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
            return Path.touch, (tmp_path / "sprung",)

    (tmp_path / "net").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ArtefactError, match="not a whole safetensors file"):
        load(Block(), tmp_path / "net")
    assert not (tmp_path / "sprung").exists()
