"""The table of rules, an op as its rule sees it, and the flows that most rules return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from secateurs.graph.flow.kinds import Channelwise, Flow, Opaque
from secateurs.graph.node_info import Shape, info, shape_of
from secateurs.graph.trace import RULED, ruled_class


@dataclass(frozen=True)
class Op:
    """One node as its rule sees it: the module that it calls, if any, its tensor inputs with their shapes and channel axes.

    `size` selects the network input that shapes are for: 0 is the example, 1 and more are inputs of other sizes. A rule is
    called for each of them and must return the same flow. `inside`: the channels of attention are the features within heads
    instead of the heads.
    """

    node: fx.Node
    module: nn.Module | None
    inputs: tuple[fx.Node, ...]
    axes: tuple[int | None, ...]
    size: int = 0
    inside: bool = False

    def shape_of(self, node: fx.Node) -> Shape:
        """Return the output shape of any node of the network."""
        return shape_of(node, self.size)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensor inputs."""
        return tuple(dims for node in self.inputs if (dims := self.shape_of(node).dims) is not None)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        dims = self.shape_of(self.node).dims
        assert dims is not None
        return dims

    @property
    def axis(self) -> int | None:
        """Channel axis of the first input."""
        return self.axes[0] if self.axes else None

    @property
    def width(self) -> int:
        """Channels of the first input, 0 where its channel axis is unknown."""
        return 0 if self.axis is None else self.shapes[0][self.axis]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by position (0 is the tensor that the op is called on) or name, with numbers in place of nodes."""
        node = self.node

        def resolved(value: Any) -> Any:
            if isinstance(value, fx.Node):
                shape = self.shape_of(value)
                return value if shape.is_tensor else shape.value
            if isinstance(value, slice):
                return slice(*map(resolved, (value.start, value.stop, value.step)))
            return tuple(map(resolved, value)) if isinstance(value, tuple | list) else value

        return resolved(node.args[position] if len(node.args) > position else node.kwargs.get(name, default))

    @property
    def label(self) -> str:
        """Name of the op in messages."""
        return describe(self.node, self.module)


def call_on(node: fx.Node, module: nn.Module | None, value: Tensor, size: int = 0) -> Any:
    """Call the op on `value` instead of its tensor input; its other arguments are those for inputs of `size`."""

    def given(argument: fx.Node) -> Any:
        shape = shape_of(argument, size)
        return value if shape.is_tensor else shape.value

    args, kwargs = fx.map_arg((node.args, node.kwargs), given)
    if module is not None:
        return module(*args, **kwargs)
    if isinstance(node.target, str):
        return getattr(value, node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def describe(node: fx.Node, module: nn.Module | None) -> str:
    """Return the op's name and place, e.g. "GroupNorm at node 'layer1.0.norm'"."""
    if module is not None:
        return f"{type(module).__name__} at node {str(node.target)!r}"
    word = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{word} at node {info(node).get('name', node.name)!r}"


def channelwise(op: Op, *, keeps_zero: bool, pointwise: bool = False, activation: bool = False) -> Flow:
    """Return the flow of an op without weights that treats every channel alone, along whatever axis the channels lie."""
    return Channelwise(op.axis, op.axis, op.width, keeps_zero, pointwise, activation)


def opaque(op: Op, why: str) -> Opaque:
    """Return the flow of an op that needs all channels of its inputs; `why` completes the sentence "<op> ..."."""
    return Opaque(f"{op.label} {why}")


Rule = Callable[[Op], Flow]
Key = type[nn.Module] | Callable[..., Any] | str
"""The op that a rule is for: a module class, a function, the name of a tensor method, or 'package.module:name' for a
function or class of a package that need not be installed."""

RULES: dict[Key, Rule] = {}


def rule(*keys: Key) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule for these module classes, functions or tensor methods.

    A rule takes an `Op` and returns a flow of `secateurs.graph.flow`. Tracing does not enter module classes with a rule.

        @rule(MyActivation)
        def my_activation(op: Op) -> Flow:
            return channelwise(op, keeps_zero=True)
    """

    def register(function: Rule) -> Rule:
        for key in keys:
            RULES[key] = function
            if not isinstance(key, str) or ":" in key:
                RULED.add(key)
        return function

    return register


def rule_for(node: fx.Node, module: nn.Module | None) -> Rule | None:
    """Return the rule of the op that `node` calls, or None.

    A module's class must be in the table, or a subclass of one that does not override its forward pass.
    """
    if module is not None:
        kind = ruled_class(type(module))
        return RULES.get(f"{type(module).__module__}:{type(module).__name__}") if kind is None else RULES[kind]
    if node.op == "call_method":
        return RULES.get(str(node.target))
    found = RULES.get(node.target)
    if found is None and callable(node.target):
        found = RULES.get(f"{getattr(node.target, '__module__', '')}:{getattr(node.target, '__name__', '')}")
    return found
