"""The folder of a run: recipe, provenance, a journal of every unit of work, checkpoints. Nothing in it is ever half written.

The journal is a chain of JSON lines (see `journal`), each synced before the next unit of work begins. A line that was cut short
by a crash is dropped when the folder is opened again: its unit of work is done once more, with the same outcome. Files of
tensors name the line that they were written after, and lines hold the digests of the files that they rely on: a file that is
missing, old or from another run is an error.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from secateurs._util.decode import Malformed, brief
from secateurs._util.files import LOCK, write_bytes, write_text
from secateurs._util.tensors import dump
from secateurs.config import Recipe, read_recipe, recipe_fields, write_recipe
from secateurs.errors import RunError, SecateursError
from secateurs.pruning.journal import (
    JOURNAL,
    PROVENANCE,
    Provenance,
    chained,
    changed_files,
    origin_digest,
    parse_provenance,
    read_entries,
    read_kept,
)

RECIPE = "recipe.toml"
FORMAT = 2  # of the folder: 2 has a chained journal


class Record:
    """Keeps nothing: what a run in memory writes to. `RunFolder` keeps everything."""

    path: Path | None = None
    entries: list[dict[str, Any]]

    def __init__(self) -> None:
        self.entries = []

    def append(self, unit: str, **fields: Any) -> None:
        """Note a finished unit of work; on return it is safe."""
        self.entries.append({"unit": unit, **fields})

    def save_tensors(
        self, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None, *, listed: bool = False
    ) -> None:
        """Keep tensors and plain values under `name`; `listed`: the next line of the journal holds the file's digest."""

    def load_tensors(self, name: str, kind: Any = dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was kept under `name`, or None; its plain values must be of the type `kind`."""
        return None

    def file_digests(self, *files: str) -> dict[str, str]:
        """SHA-256 of files of the folder, for the line of the journal that relies on them."""
        return {}

    def check_files(self, entry: Mapping[str, Any]) -> None:
        """Refuse to go on from files that are not those that the entry relies on."""

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
        self._digests: list[str] = []  # of the journal: its origin's, then one for each line
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
            if len(self._digests) < 2:  # provenance may have been written since the folder was opened
                self._digests = [origin_digest(self.path)]
            line, digest = chained(entry, self._digests[-1])
            size = self._journal.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[self._journal.write(line) :]
                os.fsync(self._journal.fileno())
            except OSError:
                with suppress(OSError):
                    self._journal.truncate(size)  # a line that is not safe must not be continued from
                raise
        self._digests.append(digest)
        self.entries.append(entry)

    def save_tensors(
        self, name: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None = None, *, listed: bool = False
    ) -> None:
        """Write `name`.safetensors with `meta` in its header, and the line that it follows unless the next one lists it."""
        header = {"meta": json.dumps(meta or {}), "name": name}
        if not listed:
            header["journal"] = self._digests[-1]
        with disk_errors(self.path):
            write_bytes(self.path / f"{name}.safetensors", dump(tensors, header))

    def load_tensors(self, name: str, kind: Any = dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read `name`.safetensors; None if there is none; a file that is damaged or of another run is an error."""
        path = self.path / f"{name}.safetensors"
        if not path.exists():
            return None
        try:
            return read_kept(path, name, self._digests, kind)
        except Malformed as error:
            raise RunError(f"{path}: {error}. {_advice(name)}") from error

    def file_digests(self, *files: str) -> dict[str, str]:
        """SHA-256 of files of the folder, by name."""
        with disk_errors(self.path):
            return {name: hashlib.sha256((self.path / name).read_bytes()).hexdigest() for name in files}

    def check_files(self, entry: Mapping[str, Any]) -> None:
        """Refuse to go on from files that are missing, or not those that the entry relies on."""
        for name, what in changed_files(self.path, entry):
            raise RunError(f"{self.path / brief(name)}: {what}. {_advice(name)}")

    def delete(self, name: str) -> None:
        """Remove `name`.safetensors, if it is there."""
        (self.path / f"{name}.safetensors").unlink(missing_ok=True)

    def _open_journal(self) -> IO[bytes]:
        with disk_errors(self.path):
            file = (self.path / JOURNAL).open("a+b", buffering=0)
        try:
            found = read_entries(self.path)
            if found.notes:
                raise RunError(found.notes[0])
            file.truncate(found.size)  # a last line that was being written when the process died
        except BaseException:
            file.close()
            raise
        self.entries, self._digests = list(found.entries), list(found.digests)
        return file


def _advice(name: str) -> str:
    if "training" in name:
        return "Delete it and resume: this training starts again from its first epoch, with the same result."
    return (
        f"Restore it from a copy. Or delete {JOURNAL} and all of checkpoints/ but start.safetensors, and resume: the run "
        f"begins again, and uses what was measured."
    )


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
            known = {"format": FORMAT, **provenance, "recipe_sha256": recipe_digest(recipe)}
            write_text(path / PROVENANCE, json.dumps(known, indent=1) + "\n")
    except BaseException:
        folder.close()
        raise
    return folder


def open_folder(path: Path) -> tuple[RunFolder, Recipe, dict[str, Any]]:
    """Take up a run that was started in `path`: its folder, recipe and provenance."""
    provenance = read_provenance(path)
    if provenance.get("format") != FORMAT:
        raise RunError(
            f"{path / PROVENANCE}: got folder format {provenance.get('format')!r}, wanted {FORMAT}: another release wrote it. "
            f"Start a new run."
        )
    missing = sorted(Provenance.__annotations__.keys() - provenance.keys())
    if missing:
        raise RunError(f"{path / PROVENANCE}: damaged (no {', '.join(missing)}). Restore it from a copy, or start a new run.")
    folder = RunFolder(path)
    try:
        recipe = read_recipe(path / RECIPE)
        if recipe_digest(recipe) != provenance.get("recipe_sha256"):
            raise RunError(
                f"{path / RECIPE}: was changed since the run started, so its earlier steps would not fit the later ones. Undo "
                f"the change, or start a new run with the changed recipe."
            )
    except BaseException:
        folder.close()
        raise
    return folder, recipe, provenance


def read_provenance(path: Path) -> dict[str, Any]:
    """What was recorded when the run was started."""
    try:
        return parse_provenance(path)
    except OSError as error:
        raise RunError(f"{path}: not the folder of a run: no {PROVENANCE} ({error.strerror}).") from error
    except Malformed as error:
        raise RunError(f"{path / PROVENANCE}: damaged ({error}). Restore it from a copy, or start a new run.") from error


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
    """Errors of the disk, our own errors about them included, become a `RunError` that says what to do."""
    try:
        yield
    except (OSError, SecateursError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"the disk is full ({cause.strerror}). Free some space, then go on with: secateurs resume {path}"
        elif cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = f"cannot be written ({cause.strerror}). Choose a folder that you may write to."
        else:
            path = Path(os.fsdecode(cause.filename2 or cause.filename or path))
            what = f"{cause.strerror or cause}."
        raise RunError(f"{path}: {what}") from cause


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
