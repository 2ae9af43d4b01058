"""Damaged files: saved networks, weights, plans, recipes and records, mutated and read again.

A file must load to the network that it was made of, or, where it was signed again, to what it says; or be refused by an error
of secateurs that names the file in at most 600 characters. Any other exception, more than 5 seconds or a full memory is a
failure.
"""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from secateurs import Plan, compact, load, replay, save, trace
from secateurs._util.tensors import digest, dump
from secateurs.cli import train as training_folder
from secateurs.config import Recipe, TrainSettings, read_recipe, write_recipe
from secateurs.errors import SecateursError
from secateurs.models import Pedigree, TrainingSet, read_pedigree
from secateurs.models.weights import load_weights_
from secateurs.pruning.folder import read_provenance
from secateurs_lab.compare.rows import read_rows

from .mutations import damaged, edited
from .tally import Tally, Verdict, scratch, tally

SECONDS, CHARACTERS = 5.0, 600


def run(count: int, seed: int, workers: int = 2) -> Tally:
    """Try `count` mutated files."""
    return tally("files", case, count, seed, workers=workers)


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


@dataclass(frozen=True)
class Samples:
    """The files as they were written."""

    pruned: bytes
    tensors: dict[str, Tensor]
    header: dict[str, str]  # of the pruned network, without the digest
    weights: bytes
    texts: dict[str, bytes]  # by name of the file


@cache
def samples() -> Samples:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph = trace(network(), torch.zeros(2, 4))
        small = compact(graph, {"0": torch.tensor([True, False, True, True, False, True])})
        pruned = save(small, folder / "pruned.safetensors").read_bytes()
        small.plan.save(folder / "plan.json")
        write_recipe(
            folder / "recipe.toml",
            Recipe.fast(finetune=TrainSettings(epochs=2, schedule="step", milestones=(1,)), sites=("a*", "b")),
        )
        texts = {path: (folder / path).read_bytes() for path in ("plan.json", "recipe.toml")}
    described = json.loads(pruned[8 : 8 + struct.unpack("<Q", pruned[:8])[0]])
    header = {key: value for key, value in described["__metadata__"].items() if key != "digest"}
    sets = {"train": {"count": 9, "sha256": "b"}, "search": {"count": 3, "sha256": "c"}}
    data = {"name": "digits", "sha256": "a", "origin": {"seed": 0}, "classes": ["0", "1"], "sets": sets}
    more = {"versions": {"torch": "2"}, "machine": {"threads": 1}, "started": "2026-01-01T00:00:00", "origin": {"model": "mlp"}}
    provenance = {
        **{"format": 2, "model": {"class": "m", "weights_sha256": "d", "leaves": []}, "data": data, "seed": 0, "store": None},
        **{"measures": {"loss": "cross_entropy"}, "fingerprints": {"loss": "e"}, "recipe_sha256": "f"},
    }
    training = {"origin": {"model": "mlp"}, "settings": {"epochs": 2, "milestones": [1]}, "data": data, "trained_on": []}
    row = {"method": "l1", "budget": {"name": "none"}, "target": 0.5, "macs": {"before": 9, "after": 3}}
    texts |= {name: json.dumps({**known, **more}).encode() for name, known in _named(provenance, training)}
    texts["rows.jsonl"] = json.dumps(row).encode() + b"\n"
    pedigree = Pedigree(
        *("mlp", {"hidden": [3]}, {"epochs": 1}, 0, 1, (TrainingSet("digits", {"seed": 0}, 9, "b"),)),
        *({"train": 9}, "a", None, {"torch": "2"}),
    )
    weights = dump(network().state_dict(), pedigree.header())
    return Samples(pruned, dict(small.module.state_dict()), header, weights, texts)


def _named(provenance: dict[str, Any], training: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("provenance.json", provenance), ("training.json", training)]


@cache
def untouched() -> Any:
    return trace(network(), torch.zeros(2, 4))


def case(number: int) -> Verdict:
    """Write one mutated file and read it."""
    rng = Random(number)
    make = rng.choices(list(MAKERS), weights=list(MAKERS.values()))[0]
    made = make(rng)
    path = scratch() / made.name
    path.write_bytes(made.data)
    began = time.process_time()  # other processes do not count
    try:
        outcome = made.read(path)
    except SecateursError as error:
        outcome = f"refused ({type(error).__name__})"
        failure = _wrong_message(str(error), made.name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome, failure = "another exception", f"{type(error).__name__}: {str(error)[:200]}"
    else:
        failure = "" if outcome else "loaded to another network"
    finally:
        path.unlink(missing_ok=True)
    seconds = time.process_time() - began
    if not failure and seconds > SECONDS:
        failure = f"took {seconds:.1f} s"
    return Verdict(f"{make.__name__}: {outcome}", failure)


def _wrong_message(message: str, name: str) -> str:
    if len(message) > CHARACTERS:
        return f"a message of {len(message)} characters: {message[:200]}"
    return "" if name in message else f"the message does not name the file: {message[:200]}"


@dataclass(frozen=True)
class Made:
    """A mutated file, and how it is read: the outcome in words, empty where it is another network than it should be."""

    name: str
    data: bytes
    read: Callable[[Path], str]


# ---- saved networks --------------------------------------------------------------------------------------------------


def bytes_of_network(rng: Random) -> Made:
    data = damaged(samples().pruned, rng)
    return Made("pruned.safetensors", data, lambda path: _loads_to(path, samples().tensors))


def header_unsigned(rng: Random) -> Made:
    data = samples().pruned
    (length,) = struct.unpack("<Q", data[:8])
    text = edited(json.loads(data[8 : 8 + length]), rng).encode()
    return Made(
        "pruned.safetensors",
        struct.pack("<Q", len(text)) + text + data[8 + length :],
        lambda path: _loads_to(path, samples().tensors),
    )


def header_signed(rng: Random) -> Made:
    """One field of the header replaced, or what its JSON says, and a new digest."""
    header = dict(samples().header)
    name = rng.choice(list(header))
    inside: Any = header[name]
    with contextlib.suppress(ValueError):
        inside = json.loads(header[name])
    if isinstance(inside, dict | list) and inside and rng.random() < 0.9:
        header[name] = edited(inside, rng)
    elif rng.random() < 0.3:
        del header[name]
    else:
        header[name] = edited([0], rng)
    return _signed(samples().tensors, header)


def tensors_signed(rng: Random) -> Made:
    """Tensors with NaN or infinities, swapped, left out, of another shape or kind, and a new digest."""
    tensors = {name: tensor.clone() for name, tensor in samples().tensors.items()}
    name, other = rng.choice(list(tensors)), rng.choice(list(tensors))
    kind = rng.choice(("nan", "inf", "swap", "drop", "rename", "cast", "reshape", "empty", "values"))
    if kind in ("nan", "inf"):
        tensors[name].view(-1)[rng.randrange(tensors[name].numel())] = rng.choice((float(kind), -float(kind)))
        return _signed(tensors, samples().header, wanted=None)
    if kind == "swap":
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif kind == "drop":
        del tensors[name]
    elif kind == "rename":
        tensors[rng.choice(("", "x" * 5000, "0.weight.x", "ä", "__metadata__"))] = tensors.pop(name)
    elif kind == "cast":
        tensors[name] = tensors[name].to(rng.choice((torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)))
    elif kind == "reshape":
        tensors[name] = rng.choice((tensors[name][None], tensors[name].reshape(-1), tensors[name][:1]))
    elif kind == "empty":
        tensors[name] = torch.zeros(rng.choice(((0,), (0, 4), (4, 0))))
    else:
        tensors[name] = tensors[name] + 1
    return _signed(tensors, samples().header)


def _signed(tensors: dict[str, Tensor], header: dict[str, str], *, wanted: Any = ...) -> Made:
    """A file whose digest fits; with `wanted=None` it must be refused all the same."""
    data = _packed(tensors, {**header, "digest": _digest(tensors, header)})
    expected = tensors if wanted is ... else {}
    return Made("pruned.safetensors", data, lambda path: _loads_to(path, expected))


def _digest(tensors: dict[str, Tensor], header: dict[str, str]) -> str:
    with contextlib.suppress(UnicodeEncodeError):
        return digest(tensors, header)
    return "0" * 64


def _packed(tensors: dict[str, Tensor], header: dict[str, str]) -> bytes:
    """A safetensors file written by hand, so that names may be such as a writer refuses."""
    kinds = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
    described: dict[str, Any] = {}
    body = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind, offsets = kinds.get(tensor.dtype, "BOOL"), [len(body), len(body) + len(raw)]
        described[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        body += raw
    text = json.dumps({"__metadata__": header, **described}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def _loads_to(path: Path, wanted: dict[str, Tensor]) -> str:
    found = load(network(), path).module.state_dict()
    same = found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in found
    )
    return "loaded" if same else ""


# ---- weights and texts -----------------------------------------------------------------------------------------------


def bytes_of_weights(rng: Random) -> Made:
    return Made("weights.safetensors", damaged(samples().weights, rng), _weights_load)


def header_of_weights(rng: Random) -> Made:
    data = samples().weights
    (length,) = struct.unpack("<Q", data[:8])
    described = json.loads(data[8 : 8 + length])
    header = described["__metadata__"]
    name = rng.choice([key for key in header if key != "digest"])
    try:
        header[name] = edited(json.loads(header[name]), rng)
    except (ValueError, TypeError, AttributeError, IndexError):
        header[name] = edited([0], rng)
    if rng.random() < 0.8:
        header["digest"] = _digest(dict(network().state_dict()), {k: v for k, v in header.items() if k != "digest"})
    text = json.dumps(described).encode()
    return Made("weights.safetensors", struct.pack("<Q", len(text)) + text + data[8 + length :], _weights_load)


def _weights_load(path: Path) -> str:
    model, wanted = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), network().state_dict()
    read_pedigree(path)
    load_weights_(model, path)
    # without its mark a file is one of others, which is not signed: then every bit may be what it was meant to be
    return "loaded" if all(torch.equal(t, wanted[n]) for n, t in model.state_dict().items()) or not _marked(path) else ""


def _marked(path: Path) -> bool:
    return read_pedigree(path) is not None


def bytes_of_text(rng: Random) -> Made:
    name = rng.choice(list(samples().texts))
    return Made(name, damaged(samples().texts[name], rng), READERS[name])


def fields_of_text(rng: Random) -> Made:
    name = rng.choice([name for name in samples().texts if name != "recipe.toml"])
    text = edited(json.loads(samples().texts[name]), rng)
    return Made(name, text.encode() + b"\n", READERS[name])


def fields_of_recipe(rng: Random) -> Made:
    lines = samples().texts["recipe.toml"].decode().splitlines()
    place = rng.randrange(len(lines))
    values = ["1", "-1", "0", "1e400", "nan", "inf", "true", '"x"', "[]", "[1]", "{}", "1979-05-27", "9" * 40, "9" * 9000]
    values += ['"' + "y" * 50_000 + '"', "[" * 5000 + "]" * 5000, "[" * 40 + "]" * 40, '["a", 1]', "''", '"ä𝕏"']
    value = rng.choice(values)
    key = lines[place].partition("=")[0].strip()
    lines[place] = rng.choice((f"{key} = {value}", f"{key}x = {value}", f"{lines[place]}\n{lines[place]}", f"[{key}]", ""))
    return Made("recipe.toml", "\n".join(lines).encode(), READERS["recipe.toml"])


def _read_plan(path: Path) -> str:
    plan = Plan.load(path)
    try:
        replay(untouched(), plan)
    except SecateursError:
        return "read, does not fit"  # replay does not know which file the plan comes from
    return "read"


def _read_recipe(path: Path) -> str:
    read_recipe(path)
    return "read"


def _read_provenance(path: Path) -> str:
    read_provenance(path.parent)
    return "read"


def _read_training(path: Path) -> str:
    training_folder.read(path.parent)
    return "read"


def _read_rows(path: Path) -> str:
    read_rows(path)
    return "read"


READERS: dict[str, Callable[[Path], str]] = {
    "plan.json": _read_plan,
    "recipe.toml": _read_recipe,
    "provenance.json": _read_provenance,
    "training.json": _read_training,
    "rows.jsonl": _read_rows,
}
MAKERS: dict[Callable[[Random], Made], int] = {
    bytes_of_network: 5,
    header_unsigned: 4,
    header_signed: 5,
    tensors_signed: 3,
    bytes_of_weights: 2,
    header_of_weights: 2,
    bytes_of_text: 3,
    fields_of_text: 3,
    fields_of_recipe: 2,
}

if __name__ == "__main__":
    print(run(int(sys.argv[1]), int(sys.argv[2])))
