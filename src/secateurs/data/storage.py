"""Rows of tensors that need not fit into memory: past a number of bytes they lie in a memory-mapped file without a name."""

from __future__ import annotations

import io
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Any

import torch
from torch import Tensor

from secateurs.errors import DataError


@dataclass(frozen=True)
class Storage:
    """Where collected rows lie: in memory up to `memory` bytes, all of them in files in `folder` if they are more.

    The files have no name: the system removes them with their last reader, even if the process is killed. Without a `folder`
    they lie where the system keeps temporary files (TMPDIR moves it).
    """

    memory: int
    folder: Path | None = None


class Rows:
    """Tensors that grow row by row, a column each; `name` says in messages whose rows they are."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage, self.name = storage, name
        self.on_disk = False
        self._columns: list[_Column] = []

    def write(self, columns: Sequence[Tensor], place: int | None = None) -> None:
        """Append rows (n, …) to every column, or overwrite those from number `place` on."""
        self._columns = self._columns or [_Column(column) for column in columns]
        for known, column in zip(self._columns, columns, strict=True):
            if tuple(column.shape[1:]) != known.shape:
                raise DataError(
                    f"the {self.name} loader gives examples of different shapes ({known.shape}, then "
                    f"{tuple(column.shape[1:])}): wanted one shape, as for scoring a network. Resize or pad them in the loader."
                )
        size = sum(known.row_bytes * len(column) for known, column in zip(self._columns, columns, strict=True))
        if place is None and not self.on_disk and sum(map(_Column.size, self._columns)) + size > self.storage.memory:
            self.on_disk = True
        with self._room():
            for known, column in zip(self._columns, columns, strict=True):
                if self.on_disk:
                    known.move_to(self.storage.folder)
                known.write(column, place)

    def tensors(self) -> list[Tensor]:
        """The columns (N, …), in memory or memory-mapped; nothing may be written afterwards."""
        if not self._columns:
            raise DataError(f"the {self.name} loader gave no batch: wanted at least one.")
        with self._room():
            return [column.tensor() for column in self._columns]

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"the {self.name} set does not fit into {self.storage.memory / 2**30:.3g} GiB of memory and cannot be kept in "
                f"{self.storage.folder or gettempdir()} ({error.strerror}). Free space there, or give the run a folder on a "
                f"larger disk."
            ) from error


class _Column:
    """Rows of one shape and type, in a buffer or in a file."""

    def __init__(self, like: Tensor) -> None:
        self.shape, self.dtype = tuple(like.shape[1:]), like.dtype
        self.row_bytes = math.prod(self.shape) * like.element_size()
        self.file: Any = io.BytesIO()

    def size(self) -> int:
        return int(self.file.seek(0, io.SEEK_END))

    def move_to(self, folder: Path | None) -> None:
        if isinstance(self.file, io.BytesIO):
            held, self.file = self.file, TemporaryFile(dir=folder)  # noqa: SIM115  # closed once it is mapped
            self.file.write(held.getbuffer())

    def write(self, rows: Tensor, place: int | None) -> None:
        self.file.seek(0 if place is None else place * self.row_bytes, io.SEEK_END if place is None else io.SEEK_SET)
        self.file.write(rows.detach().cpu().to(self.dtype).contiguous().flatten().view(torch.uint8).numpy().data)

    def tensor(self) -> Tensor:
        size = self.size()
        if size == 0:  # rows without entries: nothing can be mapped
            return torch.empty(0, *self.shape, dtype=self.dtype)
        if isinstance(self.file, io.BytesIO):
            buffer: Any = self.file.getbuffer()
        else:
            self.file.flush()
            buffer = mmap.mmap(self.file.fileno(), 0, access=mmap.ACCESS_COPY)
            self.file.close()  # the map keeps what is in it
        return torch.frombuffer(buffer, dtype=self.dtype).view(-1, *self.shape)
