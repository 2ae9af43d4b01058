"""What is read is bounded: a small hostile file takes neither minutes nor gigabytes, and the error says which limit was met."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from secateurs._util.decode import MAX_DEPTH, MAX_PARTS, Malformed, decode_json, decode_toml
from secateurs.cli import execute
from secateurs.errors import ArtefactError
from secateurs.models import build, load_weights_

_MEASURED = """
import sys
from secateurs.cli import execute
code = execute(sys.argv[1:])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(code, int(peak) // 1024)
"""


def code_and_megabytes(*command: str) -> tuple[int, int, str]:
    """The exit code of a command in a process of its own, its largest memory, and what it says."""
    done = subprocess.run([sys.executable, "-c", _MEASURED, *command], capture_output=True, text=True, check=True, timeout=300)
    code, megabytes = map(int, done.stdout.split()[-2:])
    return code, megabytes, done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limits") / "run"
    recipe = ["--recipe", "fast", "--max-drop", "0.5", "--confidence", "0", "--criterion", "l1", "--round-to", "1"]
    assert execute(["prune", "--model", "mlp", "--data", "digits", *recipe, "--out", str(folder)]) == 0
    return folder


def bomb(path: Path, part: str) -> Path:
    """Weights of a network whose `part` unpacks to 256 MB."""
    torch.save(build("mlp", hidden=[8]).state_dict(), path.with_suffix(".whole"))
    with zipfile.ZipFile(path.with_suffix(".whole")) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in whole.namelist():
            file.writestr(name, bytes(256 << 20) if name.endswith(part) else whole.read(name))
    assert path.stat().st_size < 1 << 20
    return path


@pytest.mark.parametrize("part", ["data/0", "data.pkl", "version", "byteorder"])
def test_a_zip_bomb_is_refused_before_it_is_unpacked(part: str, tmp_path: Path) -> None:
    file, started = bomb(tmp_path / "net.pt", part), time.process_time()
    with pytest.raises(
        ArtefactError, match=r"would unpack from [\d,]+ to (268|536),\d{3},\d{3} bytes, and the network has 2,440"
    ):
        load_weights_(build("mlp", hidden=[8]), file)
    assert time.process_time() - started < 1


def test_weights_that_were_compressed_by_hand_are_read(tmp_path: Path) -> None:
    net = build("mlp", hidden=[64])
    for parameter in net.parameters():
        parameter.data.zero_()  # compresses as well as a bomb
    torch.save(net.state_dict(), tmp_path / "whole.pt")
    with (
        zipfile.ZipFile(tmp_path / "whole.pt") as whole,
        zipfile.ZipFile(tmp_path / "net.pt", "w", zipfile.ZIP_DEFLATED) as file,
    ):
        for name in whole.namelist():
            file.writestr(name, whole.read(name))
    assert (tmp_path / "net.pt").stat().st_size < (tmp_path / "whole.pt").stat().st_size / 4
    again = build("mlp", hidden=[64])
    load_weights_(again, tmp_path / "net.pt")
    assert not any(parameter.any() for parameter in again.parameters())


def test_a_file_larger_than_memory_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "net.safetensors"
    with file.open("wb") as holes:
        holes.truncate(1 << 43)
    with pytest.raises(ArtefactError, match=r"8,796,093,022,208 bytes do not fit into memory; the network has 2,440"):
        load_weights_(build("mlp", hidden=[8]), file)


@pytest.mark.parametrize("command", ["show", "resume"])
@pytest.mark.parametrize("ending", [b"", b'", "digest": "' + b"0" * 64 + b'"}\n'])
def test_a_long_line_of_a_journal_is_not_read_into_memory(ending: bytes, command: str, finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    with (folder / "journal.jsonl").open("ab") as file:
        file.write(b'{"unit": "step", "site": "' + b"a" * (300 << 20) + ending)
    code, megabytes, said = code_and_megabytes(*command.split(), str(folder))
    assert (code, "damaged (longer than 16,777,216 bytes)" in said) == (1, True)
    assert megabytes < 450, "half of what importing torch and one line take"


def test_a_repeated_key_is_found_in_the_time_of_one_look() -> None:
    text = "{" + ",".join(f'"{number}": 1' for number in range(300_000)) + ', "299999": 2}'
    started = time.process_time()
    with pytest.raises(Malformed, match="the key '299999' occurs twice"):
        decode_json(text)
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("decode", "text", "said"),
    [
        (decode_json, "[" * 3000, f"nested deeper than {MAX_DEPTH}"),
        (decode_json, "[" + "[]," * MAX_PARTS + "1]", f"more than {MAX_PARTS:,} lists and tables"),
        (decode_json, json.dumps("a" * (32 << 20)), "larger than 33,554,432 bytes"),
        (decode_toml, "a = " + "[" * 3000 + "]" * 3000, f"nested deeper than {MAX_DEPTH}"),
        (decode_toml, "a = '" + "a" * (64 << 10) + "'", "larger than 65,536 bytes"),
    ],
)
def test_text_has_a_largest_size_depth_and_number_of_parts(decode: Callable[[str], object], text: str, said: str) -> None:
    with pytest.raises(Malformed, match=said):
        decode(text)
