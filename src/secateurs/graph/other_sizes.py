"""Inputs of other sizes that a network accepts, and a network that refuses them."""

from __future__ import annotations

import copy
import math
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs.graph.capture.calls import tensors_in
from secateurs.graph.node_info import Shape, info


def other_sizes(
    model: nn.Module, example: tuple[Tensor, ...], expected: Any, *, batches: bool = True
) -> list[tuple[tuple[Tensor, ...], Any]]:
    """Return inputs of another batch size (unless `batches` is False), and of another batch and image size.

    Only those that `model` accepts, each with the model's outputs.

    How a network treats its channels must not depend on sizes, and one example cannot tell a batch of 2 from 2 groups.
    `expected` is the output for the example. The list is empty for a network of a fixed size: one that fails, or whose outputs
    no longer have one entry for each input (view(-1, 512) makes more rows of a larger image).
    """

    def has_batch_axis(outputs: Any, inputs: tuple[Tensor, ...]) -> list[bool]:
        return [t.shape[:1] == inputs[0].shape[:1] for t in tensors_in(outputs)]

    count = 1 + math.prod(example[0].shape[:1])
    found = other_batches(model, example, count) if batches else []
    images = [e for e in example if e.dim() > 2 and e.is_floating_point()]
    large = all(n % 2 == 0 and n >= 64 for e in images for n in e.shape[2:])
    for factor in ((0.5, 2) if large else (2, 0.5)) if images else ():  # half an image is a quarter of the work
        resized = tuple(_resized(e, factor) for e in (found[0][0] if found else repeated(example, count)))
        outputs = attempt(model, resized)
        if outputs is not None and has_batch_axis(outputs, resized) == has_batch_axis(expected, example):
            return [*found, (resized, outputs)]
    return found


def smaller_images(model: nn.Module, example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the example with images of a quarter of the height and width, or half; unchanged if `model` takes neither.

    Images of less than 32 pixels a side are not made.
    """
    sides = [n for e in example if e.dim() > 2 and e.is_floating_point() for n in e.shape[2:] if n > 1]
    for factor in (4, 2):
        if sides and all(n % factor == 0 and n // factor >= 32 for n in sides):
            resized = tuple(_resized(e, 1 / factor) for e in example)
            if any(
                bool(t.isfinite().any())
                for t in tensors_in(attempt(model, tuple(e[:1] if e.dim() else e for e in resized)))
                if t.numel()
            ):
                return resized
    return example


def other_batches(model: nn.Module, example: tuple[Tensor, ...], count: int) -> list[tuple[tuple[Tensor, ...], Any]]:
    """Return the example repeated to a batch of `count`, with the model's outputs; empty if the model does not accept it."""
    if not example[0].dim() or not len(example[0]):
        return []
    inputs = repeated(example, count)
    outputs = attempt(model, inputs)
    return [] if outputs is None else [(inputs, outputs)]


def repeated(example: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    """Return the example with `count` entries along the batch axis."""
    batch = example[0].shape[0] if example[0].dim() else 0
    if batch == 0:
        return example
    index = torch.arange(count, device=example[0].device) % batch
    return tuple(e.index_select(0, index) if e.dim() and e.shape[0] == batch else e for e in example)


def _resized(tensor: Tensor, factor: float) -> Tensor:
    """Return the tensor with all axes behind the channels `factor` times as long."""
    if tensor.dim() < 3 or not tensor.is_floating_point():
        return tensor
    for axis in range(2, tensor.dim()):
        length = max(int(tensor.shape[axis] * factor), 1)  # one frame of a video stays one
        index = torch.arange(length, device=tensor.device) % tensor.shape[axis]
        tensor = tensor.index_select(axis, index)
    return tensor


def attempt(model: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """Return the model's outputs for `inputs`; None if it raises."""
    try:
        with torch.no_grad():  # a GraphModule that fails prints to the user's terminal; an interpreter does not
            run = fx.Interpreter(model).run if isinstance(model, fx.GraphModule) else model
            return run(*copy.deepcopy(inputs))
    except Exception:  # a network of a fixed size may raise anything
        return None


def refuse_other_images_(module: fx.GraphModule, example: tuple[Tensor, ...]) -> None:
    """Let the network assert that images have the size of the example, for which it was captured."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(inputs, example, strict=True):
        for axis, size in enumerate(tensor.shape[2:], 2):
            with module.graph.inserting_after(inputs[-1]):
                length = module.graph.call_method("size", (node, axis))
            with module.graph.inserting_after(length):
                same = module.graph.call_function(operator.eq, (length, size))
            with module.graph.inserting_after(same):
                message = f"{node.target} must have length {size} along axis {axis}, for which the network was traced"
                check = module.graph.call_function(torch._assert, (same, message))
            for added, value in ((length, size), (same, True), (check, None)):
                info(added).update({"shape": Shape(None, value), "unused": True, "filters_a_channel": 0, "name": added.name})
                if "other_shapes" in info(node):
                    info(added)["other_shapes"] = (Shape(None, value),) * len(info(node)["other_shapes"])
    module.recompile()
