"""Cost of a network: parameters, multiply-accumulates and bytes by layer, counted on the physical network."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from secateurs._util.modules import eval_mode
from secateurs.errors import InvalidInput, suggest

Convention = Literal["all", "paper"]
WEIGHTED = (nn.modules.conv._ConvNd, nn.Linear)  # the layers that the paper counts
ROOT = "(network)"  # name of the network itself, for what lies outside every submodule
TOTAL = "total"


class Traced(Protocol):
    """A traced network: a module that runs, and an input that it accepts."""

    @property
    def module(self) -> nn.Module: ...  # noqa: D102

    @property
    def example(self) -> tuple[Tensor, ...]: ...  # noqa: D102


Network = nn.Module | Traced
Example = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class LayerCost:
    """Cost of one module without its submodules."""

    name: str  # module path; `ROOT` for the network itself
    kind: str  # class name
    parameters: int
    macs: int  # multiply-accumulates for one example, all calls of the layer together
    bytes: int


@dataclass(frozen=True)
class Cost:
    """Counts by layer and in total, by one convention (see `cost`)."""

    layers: tuple[LayerCost, ...]  # in the order of `named_modules`
    convention: Convention

    @property
    def parameters(self) -> int:
        """Sum over the layers."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Sum over the layers, for one example."""
        return sum(layer.macs for layer in self.layers)

    @property
    def bytes(self) -> int:
        """Sum over the layers."""
        return sum(layer.bytes for layer in self.layers)

    def layer(self, name: str) -> LayerCost:
        """Return the cost of the layer with that module path."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise InvalidInput(f"no layer {name!r} has a cost here.{suggest(name, (layer.name for layer in self.layers))}")


@dataclass(frozen=True)
class Removed:
    """Share of a layer's cost that was removed, as fractions: 0.25 is a quarter; negative where the layer grew."""

    name: str
    parameters: float
    macs: float
    bytes: float


def cost(network: Network, example_input: Example | None = None, *, convention: Convention = "all") -> Cost:
    """Count the parameters, multiply-accumulates (MACs) and bytes of `network` by layer, for one example.

    Convention "all": every parameter, biases and BatchNorm included; the MACs of every convolution, linear layer and
    matrix product, as torch.utils.flop_counter counts them (1 MAC = 2 FLOPs; taps on padding count; biases, norms,
    activations and pools do not); the bytes of parameters and buffers as a state dict holds them. Convention "paper":
    only the weights of convolution and linear modules, in all three columns.

    A shared parameter counts once, in the first module that has it; a layer called twice costs its MACs twice. A traced
    network has its own example. The first dimension of the example is the batch: only its first entry is run, in eval mode
    and without gradients. The network's modes are restored. On the meta device nothing is computed.
    """
    if convention not in get_args(Convention):
        raise InvalidInput(f"convention is {convention!r}, wanted one of {', '.join(map(repr, get_args(Convention)))}.")
    module, example = runnable(network, example_input)
    macs = count_macs(module, example)
    seen: set[Tensor] = set()
    layers = []
    for path, part in module.named_modules():
        if convention == "all" or isinstance(part, WEIGHTED):
            owned = own_tensors(part, convention) - seen
            seen |= owned
            parameters = sum(tensor.numel() for tensor in owned if isinstance(tensor, nn.Parameter))
            size = sum(tensor.numel() * tensor.element_size() for tensor in owned)
            layers.append(LayerCost(path or ROOT, type(part).__name__, parameters, macs[path], size))
    return Cost(tuple(layer for layer in layers if layer.parameters or layer.macs or layer.bytes), convention)


def own_tensors(part: nn.Module, convention: Convention) -> set[Tensor]:
    """Return the tensors of `part`, without its submodules, that count by this convention."""
    parameters = dict(part.named_parameters(recurse=False))
    if convention == "paper":
        return {weight for name, weight in parameters.items() if name == "weight"}
    buffers = {b for name, b in part.named_buffers(recurse=False) if name not in part._non_persistent_buffers_set}
    return {*parameters.values(), *buffers}


def table(before: Cost, after: Cost) -> tuple[Removed, ...]:
    """Return the share of each layer of `before` that was removed in `after`, and last the total (named `TOTAL`).

    Layers are matched by name; a missing one lost everything. Layers that only `after` has count in the total alone.
    """
    if before.convention != after.convention:
        raise InvalidInput(
            f"costs counted by the conventions {before.convention!r} and {after.convention!r} cannot be compared. "
            "Count both by the same convention."
        )
    remaining = {layer.name: layer for layer in after.layers}
    nothing = LayerCost("", "", 0, 0, 0)
    rows = [shares(layer.name, layer, remaining.get(layer.name, nothing)) for layer in before.layers]
    return (*rows, shares(TOTAL, before, after))


def shares(name: str, before: LayerCost | Cost, after: LayerCost | Cost) -> Removed:
    """Return the fractions of `before` that are not in `after`; 0 where there was nothing to remove."""

    def share(had: int, has: int) -> float:
        return 1.0 - has / had if had else 0.0

    return Removed(
        name,
        parameters=share(before.parameters, after.parameters),
        macs=share(before.macs, after.macs),
        bytes=share(before.bytes, after.bytes),
    )


def count_macs(module: nn.Module, example: tuple[Tensor, ...]) -> Counter[str]:
    """Count MACs for one example, by the path of the innermost module that computes them ("" for the root).

    Runs the first example of the batch alone; if the network has a fixed batch size, the count of a batch is divided by it.
    """
    batch = len(example[0])
    alone = tuple(x[:1] if x.dim() and len(x) == batch else x for x in example)
    try:
        flops = count_flops(module, alone)
        runs = 1
    except InvalidInput:
        flops = count_flops(module, example)
        runs = batch
    for path, count in flops.items():
        if count % (2 * runs):
            raise InvalidInput(
                f"{path or ROOT} computes {count} FLOPs for a batch of {batch}, not a whole number of MACs for each "
                "example, and the network does not run on a single one. Make it accept any batch size."
            )
    return Counter({path: count // (2 * runs) for path, count in flops.items()})


def count_flops(module: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, int]:
    """Count the FLOPs of one call, by the path of the innermost module that computes them."""
    counter = _Counter(display=False, custom_mapping={torch.ops.aten.mkldnn_rnn_layer: lstm_flops})
    counter.mod_tracker = Innermost(module)  # type: ignore[assignment]
    with eval_mode(module), torch.no_grad(), countable_attention(), counter:
        try:
            module(*inputs)
        except Exception as error:
            shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
            raise InvalidInput(
                f"{type(module).__name__} does not run on the example input of shape {shapes}: {error}"
            ) from error
    return {path: sum(counts.values()) for path, counts in counter.get_flop_counts().items()}


class _Counter(FlopCounterMode):
    """torch's counter, without what newer versions of torch put around it: that loads its compiler, for over a second."""

    def __enter__(self) -> Any:
        found = super().__enter__()  # type: ignore[no-untyped-call]
        mode: Any = self.mode
        plain = inspect.unwrap(type(mode).__torch_dispatch__)
        if plain is not type(mode).__torch_dispatch__:
            body = {"__torch_dispatch__": plain, "_should_skip_dynamo": classmethod(lambda _: False)}
            mode.__class__ = type("PlainCounterMode", (type(mode),), body)
        return found


def lstm_flops(inputs: Sequence[int], ih: Sequence[int], hh: Sequence[int], *rest: Any, **options: Any) -> int:
    """Return the FLOPs of one LSTM layer in one direction, fused on the CPU: both weights at each step of each example.

    The flop counter does not know this op; other recurrent layers run as matrix products.
    """
    return 2 * prod(inputs[:-1]) * (prod(ih) + prod(hh))


class Innermost:
    """Tracks for the flop counter which module is running.

    Replaces the counter's own tracker, which counts an op for all modules around it, and fails without gradients if a parameter
    is an input of a module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.running = [""]  # paths of the running modules
        self.hooks = ExitStack()

    @property
    def parents(self) -> set[str]:
        """Innermost running module; the counter reads it at every op."""
        return {self.running[-1]}

    def __enter__(self) -> Innermost:
        for path, part in self.module.named_modules():
            self.hooks.callback(part.register_forward_pre_hook(partial(self._enter, path), prepend=True).remove)
            self.hooks.callback(part.register_forward_hook(self._leave, always_call=True).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.close()

    def _enter(self, path: str, part: nn.Module, args: Any) -> None:
        self.running.append(path)

    def _leave(self, part: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()


@contextmanager
def countable_attention() -> Iterator[None]:
    """Compute attention by matrix products inside the block: the flop counter does not know the fused kernels."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def runnable(network: Network, example_input: Example | None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the module of `network` and its input tensors on the module's device."""
    if isinstance(network, nn.Module):
        module, example = network, example_input
    else:
        module, example = network.module, network.example if example_input is None else example_input
    if example is None:
        raise InvalidInput(
            f"{type(module).__name__} came without an example input: give a tensor, or a tuple of tensors, whose first "
            "dimension is the batch."
        )
    tensors = (example,) if isinstance(example, Tensor) else tuple(example)
    if not tensors or not all(isinstance(x, Tensor) for x in tensors) or not tensors[0].dim() or not len(tensors[0]):
        got = ", ".join(str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__ for x in tensors)
        raise InvalidInput(f"the example input is ({got}), wanted a tensor, or a tuple of tensors, the first with a batch.")
    owned = next((t.device for t in (*module.parameters(), *module.buffers())), tensors[0].device)
    return module, tuple(x.to(owned) for x in tensors)
