"""Several processes that work on one run, as torchrun starts them."""

from secateurs.distributed.answers import KeptAnswers, pack, unpack
from secateurs.distributed.workers import (
    ALONE,
    TIMEOUT,
    Workers,
    active,
    drawn,
    join,
    leave,
    local_size,
    rank,
    restarts,
)

__all__ = [
    "ALONE",
    "TIMEOUT",
    "KeptAnswers",
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
