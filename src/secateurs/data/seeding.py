"""Random numbers that belong to a purpose: derived from one seed, never drawn from the user's global state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A seed of its own for `purpose`, so that two uses of one seed never share random numbers."""
    digest = hashlib.sha256(repr((int(seed), *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator_for(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator that starts at the same place for the same seed and purpose, on every machine."""
    generator = torch.Generator()
    generator.manual_seed(derive(seed, *purpose))
    return generator


@contextmanager
def seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Seed torch's global random state inside the block, and give the user's back afterwards, even after an error."""
    value = derive(seed, *purpose)
    state = torch.get_rng_state()
    # torch.manual_seed would queue a seed for devices that are not in use yet, and so reach past the end of the block
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        torch.default_generator.manual_seed(value)
        if device_states:
            torch.cuda.manual_seed_all(value)
        yield
    finally:
        torch.set_rng_state(state)
        if device_states:
            torch.cuda.set_rng_state_all(device_states)
