"""Decoding of files: JSON or TOML of limited size and depth, checked against a type.

All text from files goes through `decode_json` or `decode_toml`, so that a damaged or hostile file raises `Malformed` with one
short line, never a RecursionError or KeyError, and never exhausts memory. Callers turn it into an error that names the file.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

MAX_BYTES = 32 << 20  # of JSON text; a plan of the largest network has 2 MB
MAX_TOML_BYTES = 64 << 10
MAX_PARTS = 1_000_000  # lists and objects, of which an empty one takes 30 times its two characters
MAX_DEPTH = 32  # of nested lists and objects; our own files have at most 6


class Malformed(ValueError):
    """Text that is not JSON or TOML, is too large or too deep, or has a field of the wrong type."""


class TooLarge(Malformed):
    """Text that is longer than we read, or nested deeper."""


def decode_json(text: bytes | str, kind: type[T] | Any = Any, *, max_bytes: int = MAX_BYTES) -> T:
    """Decode JSON `text` to the type `kind`: any that msgspec knows (dataclasses, TypedDicts, Literals).

    NaN and infinities are read, as Python's json writes them. Duplicate keys are refused: readers would differ.
    """
    return cast(T, _decode(text, "JSON", lambda plain: json.loads(plain, object_pairs_hook=_unique), kind, max_bytes))


def decode_toml(text: bytes | str, kind: type[T] | Any = dict[str, Any]) -> T:
    """Decode TOML `text` to the type `kind`."""
    return cast(T, _decode(text, "TOML", tomllib.loads, kind, MAX_TOML_BYTES))


def checked(value: Any, kind: type[T] | Any, dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """Convert plain values to the type `kind`; `Malformed` names the first field that does not fit."""
    try:
        return cast(T, msgspec.convert(value, kind, dec_hook=dec_hook))
    except (ValueError, TypeError, OverflowError) as error:  # of msgspec, or of a dataclass's own checks
        raise Malformed(brief(error)) from error


def read_text_file(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a text file; `Malformed` if it is larger than `max_bytes`, OSError if it cannot be read."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TooLarge(f"larger than {max_bytes:,} bytes")
    return data


def brief(what: object, limit: int = 160) -> str:
    """Shorten text for an error message: one line of at most `limit` characters, without its middle."""
    text = " ".join(str(what).encode("utf-8", "replace").decode().split())
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


def _decode(text: bytes | str, language: str, parse: Callable[[str], Any], kind: Any, max_bytes: int) -> Any:
    if len(text) > max_bytes:
        raise TooLarge(f"larger than {max_bytes:,} bytes")
    begun = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if begun > MAX_PARTS:
        raise TooLarge(f"more than {MAX_PARTS:,} lists and tables")
    try:
        value = parse(text.decode() if isinstance(text, bytes) else text)
    except RecursionError as error:
        raise TooLarge(f"not {language} that is read here: nested deeper than {MAX_DEPTH}") from error
    except Malformed:
        raise
    except ValueError as error:  # of the parser, of decoding UTF-8, of numbers with thousands of digits
        raise Malformed(f"not {language} ({brief(error)})") from error
    _check_depth_and_text(value)
    return value if kind is Any else checked(value, kind)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise Malformed(f"the key {brief(repr(twice), 60)} occurs twice")
    return found


def _check_depth_and_text(value: Any) -> None:
    """Refuse values nested too deeply, and text with lone surrogates, which cannot be encoded."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise TooLarge(f"nested deeper than {MAX_DEPTH}")
        below: list[Any] = []
        for inner in level:
            if isinstance(inner, dict):
                below += inner.keys()
                below += inner.values()
            elif isinstance(inner, list):
                below += inner
            elif isinstance(inner, str) and not inner.isascii():
                try:
                    inner.encode()
                except UnicodeEncodeError as error:
                    raise Malformed(f"text that is not Unicode ({brief(ascii(inner), 60)})") from error
        level = below
