"""What was measured once and need not be measured again: values by context (weights, site, data, measure) and key (a mask).

One SQLite file in the run folder: a value that `put` has returned from survives a crash, two runs may share a file, and a run
that is resumed, or made again with another allowed drop, finds here what it would measure.
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

from secateurs.errors import InvalidInput, RunError

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "uint8": torch.uint8, "bool": torch.bool}
_TABLE = """
create table if not exists measured (
    context text not null, key blob not null, dtype text not null, shape text not null, value blob not null,
    primary key (context, key)
) without rowid
"""


class Store:
    """Tensors by context and key, in the file `path`, or in memory when that is None."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        with self._errors():
            # work may be spread over threads; each call is one transaction, and SQLite itself is built to be shared
            self._base = sqlite3.connect(":memory:" if path is None else path, timeout=60, check_same_thread=False)
            self._base.execute("pragma synchronous = full")
            with self._base:
                self._base.execute(_TABLE)

    def get(self, context: str, keys: Sequence[bytes]) -> list[Tensor | None]:
        """The value of every key in this context, None where there is none."""
        with self._errors():
            return [self._one(context, key) for key in keys]

    def put(self, context: str, keys: Sequence[bytes], values: Sequence[Tensor]) -> None:
        """Keep one value for each key; on return all of them are safe, after a crash all or none. What is known stays."""
        rows = [(context, key, *_packed(value)) for key, value in zip(keys, values, strict=True)]
        with self._errors(), self._base:
            self._base.executemany("insert or ignore into measured values (?, ?, ?, ?, ?)", rows)

    def get_fields(self, context: str, key: bytes) -> dict[str, Any] | None:
        """The plain values that `put_fields` kept, None where there are none."""
        (kept,) = self.get(context, [key])
        if kept is None:
            return None
        fields: dict[str, Any] = json.loads(kept.numpy().tobytes())
        return fields

    def put_fields(self, context: str, key: bytes, fields: Mapping[str, Any]) -> None:
        """Keep plain values by name, as JSON takes them; what is known stays."""
        text = json.dumps(fields, sort_keys=True).encode()
        self.put(context, [key], [torch.frombuffer(bytearray(text), dtype=torch.uint8)])

    def __len__(self) -> int:
        """How many values it holds."""
        with self._errors():
            (count,) = self._base.execute("select count(*) from measured").fetchone()
        return int(count)

    def close(self) -> None:
        """Let go of the file."""
        self._base.close()

    def _one(self, context: str, key: bytes) -> Tensor | None:
        query = "select dtype, shape, value from measured where context = ? and key = ?"
        row = self._base.execute(query, (context, key)).fetchone()
        return None if row is None else _unpacked(*row)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise RunError(
                f"{self.path}: the store of measured masks cannot be used ({error}). Delete it: only time is lost, what it "
                f"held is measured again."
            ) from error


def context_of(*parts: str) -> str:
    """One name for all that a measured value depends on besides its key."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def mask_key(mask: Tensor) -> bytes:
    """The bits of a mask (C,), eight a byte."""
    return np.packbits(mask.cpu().numpy()).tobytes()


def _packed(value: Tensor) -> tuple[str, str, bytes]:
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InvalidInput(f"a value to keep: got {value.dtype}, wanted one of {', '.join(_DTYPES)}.")
    return name, ",".join(map(str, value.shape)), value.detach().cpu().contiguous().numpy().tobytes()


def _unpacked(dtype: str, shape: str, value: bytes) -> Tensor:
    sizes = [int(size) for size in shape.split(",") if size]
    return torch.from_numpy(np.frombuffer(value, dtype=dtype).copy()).reshape(sizes)
