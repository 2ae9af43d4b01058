"""Tensors and a header of text as the bytes of one safetensors file: the same contents give the same bytes, always."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor


class Damaged(ValueError):
    """The bytes are not a whole safetensors file, or were changed since they were written."""


def dump(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> bytes:
    """The bytes of a file with `header` as its metadata, and a digest over all of it."""
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    header = {**header, "digest": digest(plain, header)}
    data = safetensors.torch.save(plain, dict(header))
    # safetensors writes metadata in any order: written again in one order, the file is reproducible
    (length,) = struct.unpack("<Q", data[:8])
    described = json.loads(data[8 : 8 + length])
    described["__metadata__"] = dict(sorted(header.items()))
    text = json.dumps(dict(sorted(described.items())), separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def parse(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file; `Damaged` if it is not whole, or not what its digest was made of.

    A file of others has no "digest" in its header: whoever wants one made by `dump` must look for it.
    """
    try:
        (length,) = struct.unpack("<Q", data[:8])
        described = json.loads(data[8 : 8 + length])
        found = described.get("__metadata__", {}) if isinstance(described, dict) else None
        tensors = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, struct.error) as error:
        raise Damaged(f"not a whole safetensors file ({error})") from error
    if not isinstance(found, dict):
        raise Damaged("its header holds no metadata")
    header = {str(key): str(value) for key, value in found.items()}
    claimed = header.get("digest")
    if claimed is not None and claimed != digest(tensors, {k: v for k, v in header.items() if k != "digest"}):
        raise Damaged("the contents do not match their digest: the file was changed or damaged")
    return tensors, header


def digest(tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> str:
    """SHA-256 over names, kinds, shapes and bytes, and over the entries of a header."""
    sha = hashlib.sha256(json.dumps(dict(header or {}), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
