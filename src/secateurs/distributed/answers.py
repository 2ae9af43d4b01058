"""Answers of tickets: as bytes, and in the run folder while a measurement goes on, so that a restart computes none again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

WORTH_KEEPING = 0.5  # seconds that a ticket took: writing a file takes some milliseconds
_BYTES_A_SECOND = 2 << 20  # that an answer may have for each second that it took: 1 % of what a slow disk writes
_UNFINISHED = ".tmp"


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one of bytes (uint8) on the CPU."""
    plain = [t.detach().cpu().contiguous() for t in tensors]
    text = json.dumps([[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in plain]).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *(t.reshape(-1).view(torch.uint8) for t in plain)])


def unpack(packed: Tensor) -> list[Tensor]:
    """The tensors that `pack` was given."""
    length = int.from_bytes(packed[:8].numpy().tobytes(), "little")
    found, place = [], 8 + length
    for name, shape in json.loads(packed[8:place].numpy().tobytes()):
        dtype = getattr(torch, name)
        size = dtype.itemsize
        for dim in shape:
            size *= dim
        # a copy: a view of another type must begin where that type may lie
        found.append(packed[place : place + size].clone().view(dtype).reshape(shape))
        place += size
    return found


@dataclass
class KeptAnswers:
    """Answers in a folder that all workers see, one file each, by name; without a folder, nothing is kept.

    A file is whole or absent: one that does not match its SHA-256 counts as absent. What cannot be written is not kept.
    """

    folder: Path | None = None
    known: set[str] = field(default_factory=set)  # files that an earlier attempt left; the same on all workers

    def listed(self) -> list[str]:
        """The files that are there, without those that a killed worker did not finish, which are removed."""
        if self.folder is None or not self.folder.is_dir():
            return []
        for path in self.folder.glob(f"*{_UNFINISHED}"):
            path.unlink(missing_ok=True)
        return sorted(path.name for path in self.folder.iterdir())

    def __contains__(self, name: str) -> bool:
        """Whether an earlier attempt left this answer."""
        return bool(self.known) and _file(name) in self.known

    def forget(self, names: Iterable[str]) -> None:
        """Take it that an earlier attempt left no such answers: they were read, or are damaged."""
        self.known -= {_file(name) for name in names}

    def load(self, name: str) -> list[Tensor] | None:
        """An answer that an earlier attempt left; None if its file is gone or damaged."""
        assert self.folder is not None
        try:
            found = (self.folder / _file(name)).read_bytes()
        except OSError:
            return None
        if hashlib.sha256(found[32:]).digest() != found[:32]:
            return None
        return unpack(torch.frombuffer(bytearray(found[32:]), dtype=torch.uint8))

    def save(self, name: str, answer: Sequence[Tensor], seconds: float) -> None:
        """Keep an answer that took so many seconds, if that is worth it."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in answer)
        if self.folder is None or seconds < WORTH_KEEPING or size > _BYTES_A_SECOND * max(seconds, 1.0):
            return
        packed = pack(answer).numpy().tobytes()
        path = self.folder / _file(name)
        own = path.with_suffix(f".{os.getpid()}{_UNFINISHED}")
        with suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            own.write_bytes(hashlib.sha256(packed).digest() + packed)
            own.replace(path)

    def remove(self, names: Iterable[str]) -> None:
        """Remove answers, and the folder with the last of them."""
        if self.folder is not None and self.folder.is_dir():
            for name in names:
                (self.folder / _file(name)).unlink(missing_ok=True)
            with suppress(OSError):  # others are left, or are being written
                self.folder.rmdir()


def _file(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
