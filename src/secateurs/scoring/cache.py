"""A persistent cache of measurements: tensors by context (weights, site, data, measure) and key (a mask).

One SQLite file in the run folder. A value survives a crash once `put` has returned, two runs may share a file, and a run that
is resumed, or repeated with another max_drop, finds its measurements here. Every value has a checksum over its context, key
and bytes: a changed value is an error, because it would decide which filters are removed.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateurs._util.decode import Malformed, brief, decode_json
from secateurs.errors import InvalidInput, RunError

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "uint8": torch.uint8, "bool": torch.bool}
_TABLE = """
create table if not exists measured (
    context text not null, key blob not null, dtype text not null, shape text not null, value blob not null, sum blob not null,
    primary key (context, key)
) without rowid
"""
_FULL, _IO, _LOCKED = (sqlite3.SQLITE_FULL,), (sqlite3.SQLITE_IOERR,), (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_CLOSED = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)


class MeasurementCache:
    """Tensors by context and key, in the file `path`, or in memory when that is None."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        with self._errors():
            # threads may share it: each call is one transaction, and SQLite serialises them
            self._base = sqlite3.connect(":memory:" if path is None else path, timeout=60, check_same_thread=False)
            self._base.execute("pragma synchronous = full")
            with self._base:
                self._base.execute(_TABLE)

    def get(self, context: str, keys: Sequence[bytes]) -> list[Tensor | None]:
        """The value of every key in this context, None where there is none."""
        with self._errors():
            return [self._one(context, key) for key in keys]

    def put(self, context: str, keys: Sequence[bytes], values: Sequence[Tensor]) -> None:
        """Store one value for each key: after a crash all of them or none. Values that exist already are not replaced."""
        packed = [(context, key, *_packed(value)) for key, value in zip(keys, values, strict=True)]
        rows = [(*row, _sum(*row)) for row in packed]
        with self._errors(), self._base:
            self._base.executemany("insert or ignore into measured values (?, ?, ?, ?, ?, ?)", rows)

    def get_fields(self, context: str, key: bytes) -> dict[str, Any] | None:
        """The plain values that `put_fields` stored, None where there are none."""
        (stored,) = self.get(context, [key])
        if stored is None:
            return None
        try:
            return decode_json(stored.numpy().tobytes(), dict[str, Any])
        except Malformed as error:
            raise self._damaged(error) from error

    def put_fields(self, context: str, key: bytes, fields: Mapping[str, Any]) -> None:
        """Store plain values by name, as JSON takes them; existing ones are not replaced."""
        text = json.dumps(fields, sort_keys=True).encode()
        self.put(context, [key], [torch.frombuffer(bytearray(text), dtype=torch.uint8)])

    def __len__(self) -> int:
        """Number of stored values."""
        with self._errors():
            (count,) = self._base.execute("select count(*) from measured").fetchone()
        return int(count)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def _one(self, context: str, key: bytes) -> Tensor | None:
        query = "select dtype, shape, value, sum from measured where context = ? and key = ?"
        row = self._base.execute(query, (context, key)).fetchone()
        if row is None:
            return None
        try:
            *packed, claimed = row
            if _sum(context, key, *packed) != claimed:
                raise Malformed("a value does not match its checksum")
            return _unpacked(*packed)
        except (ValueError, TypeError) as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> RunError:
        return RunError(
            f"{self.path}: the store of measured masks is damaged ({brief(error)}). Delete it, or restore it from a copy: its "
            f"values are then measured again, and may differ in the last digits."
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of SQLite into a `RunError` that says what to do; only a damaged file should be deleted."""
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise RunError(f"{self.path}: the store of measured masks is closed ({brief(error)}).") from error
        except (sqlite3.Error, UnicodeDecodeError) as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without the detail of an extended code
            if code in _FULL:
                what = "the disk is full. Free some space, then resume the run: nothing that was measured is lost."
            elif code in _IO:
                what = f"cannot be read or written ({brief(error)}). Check the disk, then resume the run."
            elif code in _LOCKED:
                what = f"another process holds it ({brief(error)}). Wait for it, then resume the run."
            elif code in _CLOSED:
                what = f"cannot be opened for writing ({brief(error)}). Choose a writable folder."
            else:
                raise self._damaged(error) from error
            raise RunError(f"{self.path}: the store of measured masks: {what}") from error


def is_store(path: Path) -> bool:
    """Whether the file is a store of measurements; it is only read."""
    try:
        base = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return base.execute("select 1 from sqlite_master where type = 'table' and name = 'measured'").fetchone() is not None
        finally:
            base.close()
    except sqlite3.Error:
        return False


def context_of(*parts: str) -> str:
    """One name for everything that a value depends on besides its key."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def mask_key(mask: Tensor) -> bytes:
    """The bits of a mask (C,), eight a byte."""
    return np.packbits(mask.cpu().numpy()).tobytes()


def _packed(value: Tensor) -> tuple[str, str, bytes]:
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidInput(f"a value to store: got {value.dtype}, wanted one of {', '.join(_DTYPES)}.")
    return name, ",".join(map(str, value.shape)), value.detach().cpu().contiguous().numpy().tobytes()


def _sum(context: str, key: bytes, dtype: str, shape: str, value: bytes) -> bytes:
    """Checksum of a row."""
    sha = hashlib.blake2b(digest_size=16)
    for part in (context.encode(), key, dtype.encode(), shape.encode(), value):
        sha.update(len(part).to_bytes(8, "little") + part)
    return sha.digest()


def _unpacked(dtype: str, shape: str, value: bytes) -> Tensor:
    if dtype not in _DTYPES:
        raise Malformed(f"a value of kind {brief(repr(dtype), 40)}")
    sizes = [int(size) for size in shape.split(",") if size]
    return torch.from_numpy(np.frombuffer(value, dtype=dtype).copy()).reshape(sizes)
