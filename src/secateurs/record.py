"""The folder of a run: recipe, provenance, a journal of every unit of work, checkpoints. Nothing in it is ever half written.

The journal is a file of JSON lines, each synced before the next unit of work begins. A line that was cut short by a crash is
dropped when the folder is opened again: its unit of work is done once more, with the same outcome.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from secateurs.errors import RunError
from secateurs.files import LOCK, write_bytes, write_text
from secateurs.recipe import Recipe, read_recipe, recipe_fields, write_recipe
from secateurs.tensorfile import Damaged, dump, parse

JOURNAL, PROVENANCE, RECIPE = "journal.jsonl", "provenance.json", "recipe.toml"


class Record:
    """Keeps nothing: what a run in memory writes to. `RunFolder` keeps everything."""

    path: Path | None = None
    entries: list[dict[str, Any]]

    def __init__(self) -> None:
        self.entries = []

    def append(self, unit: str, **fields: Any) -> None:
        """Note a finished unit of work; on return it is safe."""
        self.entries.append({"unit": unit, **fields})

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
        """Keep tensors and plain values under `name`."""

    def load_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was kept under `name`, or None."""
        return None

    def delete(self, name: str) -> None:
        """Forget `name`."""

    def close(self) -> None:
        """Nothing more will be noted."""

    def units(self, unit: str, **fields: Any) -> list[dict[str, Any]]:
        """The entries of one kind whose fields have the given values, in order."""
        return [e for e in self.entries if e["unit"] == unit and all(e.get(k) == v for k, v in fields.items())]


class RunFolder(Record):
    """The folder `path`, held by this process alone until it is closed."""

    path: Path

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._lock = _lock(path)
        try:
            self._journal = self._open_journal()
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Let others use the folder."""
        self._journal.close()
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def append(self, unit: str, **fields: Any) -> None:
        """Append a line to the journal and sync it."""
        entry = {"unit": unit, **fields}
        with disk_errors(self.path):
            self._journal.write(json.dumps(entry, allow_nan=True).encode() + b"\n")
            self._journal.flush()
            os.fsync(self._journal.fileno())
        self.entries.append(entry)

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None) -> None:
        """Write `name`.safetensors with `meta` in its header."""
        with disk_errors(self.path):
            write_bytes(self.path / f"{name}.safetensors", dump(tensors, {"meta": json.dumps(meta or {})}))

    def load_tensors(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read `name`.safetensors; None if there is none; a damaged file is an error."""
        path = self.path / f"{name}.safetensors"
        if not path.exists():
            return None
        try:
            tensors, header = parse(path.read_bytes())
            return tensors, json.loads(header["meta"])
        except (Damaged, KeyError, ValueError) as error:
            raise RunError(f"{path}: damaged ({error}). Restore it from a copy, or start the run anew.") from error

    def delete(self, name: str) -> None:
        """Remove `name`.safetensors, if it is there."""
        (self.path / f"{name}.safetensors").unlink(missing_ok=True)

    def _open_journal(self) -> IO[bytes]:
        path = self.path / JOURNAL
        with disk_errors(self.path):
            file = path.open("a+b")
        file.seek(0)
        data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                self.entries.append(json.loads(line))
            except ValueError as error:
                file.close()
                raise RunError(
                    f"{path}, line {number}: damaged ({error}). Restore the file from a copy, or start anew."
                ) from error
        if len(whole) < len(data):  # the last line was being written when the process died
            file.truncate(len(whole))
        file.seek(0, os.SEEK_END)
        return file


def create_folder(path: Path, recipe: Recipe, provenance: Mapping[str, Any]) -> RunFolder:
    """Start a new run in `path`, which must not hold one."""
    if (path / PROVENANCE).exists():
        raise RunError(f"{path}: holds a run already. Go on with it (secateurs resume {path}), or choose another name.")
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    try:
        with disk_errors(path):
            write_recipe(path / RECIPE, recipe)
            write_text(path / PROVENANCE, json.dumps({**provenance, "recipe_sha256": recipe_digest(recipe)}, indent=1) + "\n")
    except BaseException:
        folder.close()
        raise
    return folder


def open_folder(path: Path) -> tuple[RunFolder, Recipe, dict[str, Any]]:
    """Take up a run that was started in `path`: its folder, recipe and provenance."""
    provenance = read_provenance(path)
    recipe = read_recipe(path / RECIPE)
    if recipe_digest(recipe) != provenance.get("recipe_sha256"):
        raise RunError(
            f"{path / RECIPE}: was changed since the run started, so its earlier steps would not fit the later ones. Undo the "
            f"change, or start a new run with the changed recipe."
        )
    return RunFolder(path), recipe, provenance


def read_provenance(path: Path) -> dict[str, Any]:
    """What was recorded when the run was started."""
    try:
        found = json.loads((path / PROVENANCE).read_text())
    except OSError as error:
        raise RunError(f"{path}: not the folder of a run: no {PROVENANCE} ({error.strerror}).") from error
    except ValueError as error:
        raise RunError(f"{path / PROVENANCE}: damaged ({error}).") from error
    assert isinstance(found, dict)
    return found


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The entries of a run that may be going on elsewhere: reads without holding the folder."""
    try:
        data = (path / JOURNAL).read_bytes()
    except OSError as error:
        raise RunError(f"{path}: not the folder of a run: no {JOURNAL} ({error.strerror}).") from error
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def recipe_digest(recipe: Recipe) -> str:
    """SHA-256 of all fields of the recipe."""
    return hashlib.sha256(json.dumps(recipe_fields(recipe), sort_keys=True).encode()).hexdigest()


def environment() -> dict[str, Any]:
    """Versions and machine, as provenance keeps them."""
    names = ("secateurs", "torch", "numpy", "safetensors")
    return {
        "versions": {name: _version(name) for name in names} | {"python": platform.python_version()},
        "machine": {"processor": platform.machine(), "system": platform.system(), "threads": torch.get_num_threads()},
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Errors of the disk become a `RunError` that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"the disk is full ({error.strerror}). Free some space, then go on with: secateurs resume {path}"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = f"cannot be written ({error.strerror}). Choose a folder that you may write to."
        else:
            what = f"{error.strerror or error}."
        raise RunError(f"{path}: {what}") from error


def _lock(path: Path) -> IO[bytes]:
    with disk_errors(path):
        file = (path / LOCK).open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise RunError(f"{path}: another process is working on this run. Wait for it, or stop it first.") from error
    return file


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
