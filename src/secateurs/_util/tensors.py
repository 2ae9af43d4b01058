"""Safetensors files with a text header and a digest: the same contents always give the same bytes."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from secateurs._util.decode import Malformed, brief, checked, decode_json

_MAX_HEADER = 32 << 20  # bytes; the format allows 100 MB


class _Tensor(TypedDict):
    """Header entry of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Damaged(ValueError):
    """The bytes are not a complete safetensors file, or were changed since they were written."""


def dump(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> bytes:
    """Serialise tensors with `header` as metadata, and a digest over both."""
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    header = {**header, "digest": digest(plain, header)}
    data = safetensors.torch.save(plain, dict(header))
    # safetensors writes metadata in any order: sorting makes the file reproducible
    (length,) = struct.unpack("<Q", data[:8])
    described = json.loads(data[8 : 8 + length])
    described["__metadata__"] = dict(sorted(header.items()))
    text = json.dumps(dict(sorted(described.items())), separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def parse(data: bytes, *, signed: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parse tensors and header of a file; `Damaged` if it is incomplete or does not match its digest.

    A file that was not written by `dump` has no "digest" in its header: the caller checks that. With `signed=False` an entry of
    that name is not checked, since other programs may use it for something else.
    """
    header, _ = _described(data)
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise Damaged(f"not a whole safetensors file ({brief(error)})") from error
    claimed = header.get("digest") if signed else None
    if claimed is not None and claimed != digest(tensors, {k: v for k, v in header.items() if k != "digest"}):
        raise Damaged("the contents do not match their digest: the file was changed or damaged")
    return tensors, header


def read_header(path: Path) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Read the metadata of a safetensors file and the shape of every tensor; `Damaged` or OSError if it cannot be read."""
    with path.open("rb") as file:
        start = file.read(8)
        (length,) = struct.unpack("<Q", start) if len(start) == 8 else (0,)
        return _described(start + file.read(min(length, _MAX_HEADER)))


def _described(data: bytes) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    try:
        if len(data) < 8:
            raise Malformed(f"{len(data)} bytes")
        (length,) = struct.unpack("<Q", data[:8])
        if length > _MAX_HEADER:  # the bytes are no length
            zipped = data.startswith((b"PK\x03\x04", b"\x80\x02"))
            raise Malformed(f"begins with {data[:8]!r}{': it is of torch.save' if zipped else ', as other files do'}")
        if length > len(data) - 8:
            raise Malformed(f"a header of {length:,} bytes in a file of {len(data):,}")
        found: dict[str, Any] = decode_json(data[8 : 8 + length], dict[str, Any], max_bytes=_MAX_HEADER)
        header: dict[str, str] = checked(found.pop("__metadata__", {}), dict[str, str])
        tensors: dict[str, _Tensor] = checked(found, dict[str, _Tensor])
        return header, {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
    except Malformed as error:
        raise Damaged(f"not a whole safetensors file ({brief(error)})") from error


def first_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor that holds NaN or an infinity; None if all are finite."""
    floating = ((name, t) for name, t in tensors.items() if t.is_floating_point() or t.is_complex())
    return next((name for name, tensor in floating if not bool(torch.isfinite(tensor).all())), None)


def digest(tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of tensors, and of the header."""
    sha = hashlib.sha256(json.dumps(dict(header or {}), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
