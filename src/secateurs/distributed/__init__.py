"""Several processes that work on one run, as torchrun starts them."""

from secateurs.distributed.workers import (
    ALONE,
    TIMEOUT,
    Workers,
    active,
    drawn,
    join,
    leave,
    local_size,
    pack,
    rank,
    restarts,
    unpack,
)

__all__ = [
    "ALONE",
    "TIMEOUT",
    "Workers",
    "active",
    "drawn",
    "join",
    "leave",
    "local_size",
    "pack",
    "rank",
    "restarts",
    "unpack",
]
