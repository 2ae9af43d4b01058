"""The table of rules, and how an op looks to one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from secateurs.graph.flow.kinds import Flow
from secateurs.graph.trace import RULED, Shape, ruled_class, shape_of


@dataclass(frozen=True)
class Op:
    """One node as its rule sees it: the module it calls, if any, its tensor inputs with their shapes and channel axes.

    `size` says for which input shapes are told: 0 for the example, 1 and more for inputs of other sizes. A rule is asked
    about each of them and must give the same answer.
    """

    node: fx.Node
    module: nn.Module | None
    inputs: tuple[fx.Node, ...]
    axes: tuple[int | None, ...]
    size: int = 0

    def shape_of(self, node: fx.Node) -> Shape:
        """What any node of the network gives."""
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
        """An argument by position (0 is the tensor the op is called on) or name; nodes that give numbers as their value."""
        node = self.node
        value = node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
        return resolved(value, self.size)

    @property
    def label(self) -> str:
        """What the op is called in messages."""
        return describe(self.node, self.module)


def resolved(value: Any, size: int = 0) -> Any:
    """Arguments with the numbers that nodes gave in place of those nodes; tensor nodes stay."""
    if isinstance(value, fx.Node):
        shape = shape_of(value, size)
        return value if shape.is_tensor else shape.value
    if isinstance(value, tuple | list):
        return tuple(resolved(v, size) for v in value)
    return value


def call_on(node: fx.Node, module: nn.Module | None, value: Tensor, size: int = 0) -> Any:
    """What the op gives for `value` in place of its tensor input, its other arguments as they are for inputs of `size`."""
    if module is not None:
        return module(value)

    def given(argument: fx.Node) -> Any:
        shape = shape_of(argument, size)
        return value if shape.is_tensor else shape.value

    args, kwargs = fx.map_arg((node.args, node.kwargs), given)
    if isinstance(node.target, str):
        return getattr(value, node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def describe(node: fx.Node, module: nn.Module | None) -> str:
    """E.g. "GroupNorm at node 'layer1.0.norm'"."""
    if module is not None:
        return f"{type(module).__name__} at node {str(node.target)!r}"
    word = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{word} at node {node.meta.get('name', node.name)!r}"


Rule = Callable[[Op], Flow]
Key = type[nn.Module] | Callable[..., Any] | str
"""What a rule is for: a module class, a function, or a string: the name of a tensor method, or 'package.module:function'
for a function of a package that need not be installed."""

RULES: dict[Key, Rule] = {}


def rule(*keys: Key) -> Callable[[Rule], Rule]:
    """Decorator: the function below says how channels flow through these module classes, functions or tensor methods.

    It gets the `Op` and returns a flow of `secateurs.graph.flow`. Tracing leaves module classes with a rule whole.

        @rule(MyActivation)
        def my_activation(op: Op) -> Flow:
            return channelwise(op, keeps_zero=True)
    """

    def register(function: Rule) -> Rule:
        for key in keys:
            RULES[key] = function
            if isinstance(key, type):
                RULED.add(key)
        return function

    return register


def rule_for(node: fx.Node, module: nn.Module | None) -> Rule | None:
    """The rule of what `node` calls, or None.

    A module's class must be in the table, or be a subclass that changes nothing about the forward pass.
    """
    if module is not None:
        kind = ruled_class(type(module))
        return None if kind is None else RULES[kind]
    if node.op == "call_method":
        return RULES.get(str(node.target))
    found = RULES.get(node.target)
    if found is None and callable(node.target):
        found = RULES.get(f"{getattr(node.target, '__module__', '')}:{getattr(node.target, '__name__', '')}")
    return found
