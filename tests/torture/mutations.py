"""Ways to damage bytes and JSON documents, all drawn from one generator."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

DEEP = 100_000

JUNK: tuple[str, ...] = (
    *(
        "null",
        "true",
        "false",
        "0",
        "-1",
        "1",
        "7",
        "3.5",
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        "1e-320",
        "9" * 30,
        "9" * 5000,
    ),
    *('""', '"text"', '"7"', '"\\u0000"', '"ä𝕏"', '"\\ud800"', '"' + "x" * 100_000 + '"', '"../../etc/passwd"', '"[[["'),
    *(
        "[]",
        "[[]]",
        "{}",
        '{"a": 1}',
        "[null]",
        '["a"]',
        "[1, 2, 3]",
        "[-1]",
        "[1.5]",
        "[true]",
        "[[1]]",
        "[2147483648, 65536]",
    ),
    *("[99999999999, 9]", '[[[2, 4], "float32"], 3]', '[["a"]]', '[{"site": "0"}]'),
    *("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * 40 + "]" * 40),
)
_MARK = "@here@"


def damaged(data: bytes, rng: Random) -> bytes:
    """The bytes with a few flipped, cut off, put in, left out, repeated or overwritten."""
    if not data:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    place, length = rng.randrange(len(data)), rng.choice((1, 1, 2, 8, 64, 1000))
    kind = rng.choice(("flip", "flip", "flip", "cut", "insert", "drop", "repeat", "zero", "swap"))
    if kind == "flip":
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if kind == "cut":
        return data[:place]
    if kind == "insert":
        return data[:place] + bytes(rng.randrange(256) for _ in range(length)) + data[place:]
    if kind == "drop":
        return data[:place] + data[place + length :]
    if kind == "repeat":
        return data[: place + length] + data[place:]
    if kind == "zero":
        return data[:place] + bytes(length) + data[place + length :]
    other = rng.randrange(len(data))
    changed = bytearray(data)
    changed[place], changed[other] = changed[other], changed[place]
    return bytes(changed)


def edited(value: Any, rng: Random) -> str:
    """JSON text of a document in which one field has junk of another type, occurs twice, is missing or has another name."""
    value = copy.deepcopy(value)
    owner, key = rng.choice(_places(value))
    kind = rng.choice(("replace", "replace", "replace", "delete", "rename", "twice"))
    if kind == "delete":
        del owner[key]
    elif kind == "rename" and isinstance(owner, dict):
        owner[rng.choice(("", "x" * 2000, "ä", "unit", str(key) + " "))] = owner.pop(key)
    elif kind == "twice" and isinstance(owner, dict):
        text = json.dumps(owner[key])
        owner[key] = _MARK
        return json.dumps(value).replace(json.dumps(_MARK), f"{text}, {json.dumps(key)}: {rng.choice((text, *JUNK))}", 1)
    else:
        owner[key] = _MARK
    return json.dumps(value).replace(json.dumps(_MARK), rng.choice(JUNK), 1)


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(inner, dict | list):
            found += _places(inner)
    return found
