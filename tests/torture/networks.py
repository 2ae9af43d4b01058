"""Networks written as Python source from a seed, so that a network that fails is a file that runs."""

from __future__ import annotations

from .blocks import HEADS, IMAGE_BLOCKS, VECTOR_BLOCKS, activation, ensure_layer
from .writing import Program, Writer


def generate(seed: int) -> Program:
    """The network of that seed: mostly a layer first, some random blocks, mostly a head, one output or several."""
    writer = Writer(seed)
    blocks = IMAGE_BLOCKS if writer.images else VECTOR_BLOCKS
    if writer.chance(0.9):
        ensure_layer(writer)
        if writer.chance(0.5):
            writer.attempt(activation)
    count = len(writer.steps) + writer.pick((1, 2, 3, 4, 5, 6, 8, 10))
    for _ in range(count * 4):
        if len(writer.steps) >= count:
            break
        writer.attempt(writer.pick(blocks))
    if not writer.made():
        ensure_layer(writer)
    if writer.chance(0.75):
        writer.attempt(writer.pick(HEADS))
    last, other = writer.made()[-1], writer.pick(writer.made())
    result = last
    if writer.chance(0.15):
        result = writer.pick((f"{last}, {other}", f"{{'a': {last}, 'b': {other}}}", f"[{other}, {last}]", f"({last},)"))
    program = Program(tuple(writer.parts), tuple(writer.steps), result, tuple(writer.inputs), seed)
    return program.without_unused()
