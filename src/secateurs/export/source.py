"""Source: model.py with an ordinary nn.Module and model.safetensors; running it takes only torch and safetensors."""

from __future__ import annotations

import ast
import builtins
import inspect
import keyword
import math
import operator
import re
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.graph import magic_methods

from secateurs._util.tensors import dump
from secateurs.errors import UnsupportedOp
from secateurs.export.deliver import Exported, ExportOptions, Inputs, Prepared, deliver
from secateurs.graph.channels import call_word, module_path
from secateurs.graph.node_info import Shape, info
from secateurs.graph.trace import Graph, ruled_class

CODE, WEIGHTS = "model.py", "model.safetensors"
WIDTH = 88  # ruff's default; trailing commas keep a call that is split here split at greater line lengths too

# repr → source, for values whose repr is not an expression that the generated file can evaluate
SPELLINGS = {"inf": 'float("inf")', "nan": 'float("nan")', "device": "torch.device", "Ellipsis": "..."}
KNOWN = {"self", "torch", "F", "nn", "math", "slice", "float", "getattr"}
RESERVED = KNOWN | {"Part", "Path", "Tensor", "load", "load_file", *SPELLINGS, *keyword.kwlist, *dir(builtins)}

_PART = '''

class Part(nn.Module):
    """Layers and tensors under their names (a leading _ is not part of a name)."""

    def __init__(self, **parts: nn.Module | nn.Parameter | nn.Buffer) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name.removeprefix("_"), part)
'''

_MODEL = '''

class {name}(nn.Module):
    """Takes {shapes}; removed filters are absent."""

    def __init__(self) -> None:
        super().__init__(){layers}

    def forward(self{arguments}){returns}:
        """Run the layers in the order of the graph, block by block."""{body}


def load(path: str | Path = WEIGHTS) -> {name}:
    """Build the network with its weights, in eval mode."""
    network = {name}()
    network.load_state_dict(load_file(path), assign=True)
    return network.eval()
'''

Tree = dict[str, "Tree | str"]  # containers, down to the expressions that build layers and tensors


def to_source(graph: Graph | Prepared, folder: str | Path, **options: Unpack[ExportOptions]) -> Exported:
    """Write the network to `folder` as model.py, an ordinary nn.Module with its widths written out, and model.safetensors.

    `load()` in model.py builds the network. It is run in a new process that cannot import secateurs, checked and compared as
    the `ExportOptions` say. A layer or function that is not torch's raises `UnsupportedOp`.
    """

    def bind(network: Prepared, path: Path, inputs: Inputs) -> Callable[[], Any]:
        return partial(network.module, *inputs)

    return deliver("source", write_source, bind, graph, folder, **options)


def write_source(network: Prepared, folder: Path) -> None:
    """Write model.py and model.safetensors to `folder`."""
    weights: dict[str, Tensor] = {}
    for node in network.module.graph.nodes:
        if node.op == "call_module":
            state = network.module.get_submodule(str(node.target)).state_dict()
            weights |= {f"{node.target}.{name}": tensor for name, tensor in state.items()}
        elif node.op == "get_attr":
            weights[str(node.target)] = operator.attrgetter(str(node.target))(network.module)
    (folder / CODE).write_text(source_of(network))
    (folder / WEIGHTS).write_bytes(dump(weights, {}))


def source_of(network: Prepared) -> str:
    """Return the text of model.py."""
    name = "".join(c for c in network.name if c.isalnum() or c == "_")
    name = name if name.isidentifier() and name not in RESERVED else "Network"
    tree = _layers(network.module)
    layers = []
    for attribute, part in tree.items():
        if attribute.isidentifier():
            layers += _lines(f"self.{attribute} = ", _built(part))
        else:
            layers += _lines("", f'setattr(self, "{attribute}", {_built(part)})')
    forward = _Forward(network.module, tree)
    body = forward.lines()
    text = _MODEL.format(
        name=name,
        shapes=", ".join(f"(N, {', '.join(map(str, t.shape[1:]))})" for t in network.inputs),
        layers="\n".join(["", *layers]),
        arguments="".join(f", {forward.variables[n]}: Tensor" for n in forward.nodes if n.op == "placeholder"),
        returns=" -> Tensor" if isinstance(forward.nodes[-1].args[0], fx.Node) else "",
        body="\n".join(["", *body]),
    )
    if any("Part(" in line for line in layers):
        text = _PART + text
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    header = [
        f'"""{name} after pruning: needs only torch and safetensors."""',
        "",
        *(["import math"] if "math" in used else []),
        "from pathlib import Path",
        "",
        *(["import torch"] if "torch" in used else []),
        *(["import torch.nn.functional as F"] if "F" in used else []),
        "from safetensors.torch import load_file",
        "from torch import Tensor, nn",
        "",
        f'WEIGHTS = Path(__file__).with_name("{WEIGHTS}")',
        "",
    ]
    return "\n".join(header) + text


def _layers(module: fx.GraphModule) -> Tree:
    """The expressions that build all layers and tensors the network uses, in the order in which they are registered."""
    called = {str(n.target) for n in module.graph.nodes if n.op == "call_module"}
    found = {path: _constructor(m, path) for path, m in module.named_modules(remove_duplicate=False) if path in called}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensor = operator.attrgetter(str(node.target))(module)
            kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Buffer"
            dtype = "" if tensor.is_floating_point() else f", dtype={tensor.dtype}"
            found[str(node.target)] = f"nn.{kind}(torch.empty({tuple(tensor.shape)}{dtype}))"
    tree: Tree = {}
    for path, expression in found.items():
        *parents, name = path.split(".")
        here = tree
        for parent in parents:
            inner = here.setdefault(parent, {})
            assert isinstance(inner, dict)
            here = inner
        here[name] = expression
    return tree


def _constructor(layer: nn.Module, path: str) -> str:
    """The expression that builds a layer like `layer`, weights aside; `UnsupportedOp` if there is none."""
    what = type(layer).__name__
    kind = next((k for k in (type(layer), ruled_class(type(layer))) if k and getattr(nn, k.__name__, None) is k), None)
    if kind is None:
        raise _unwritable(what, path, "it is not a layer of torch.nn")
    given = inspect.signature(kind).parameters.values()
    parameters = [p for p in given if p.name not in ("device", "dtype") and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    settings = {p.name: _setting(layer, p) for p in parameters}
    if lost := [name for name, value in settings.items() if value is inspect.Parameter.empty]:
        raise _unwritable(what, path, f"it does not keep its setting {lost[0]!r}")
    try:
        with torch.device("meta"):
            again = kind(**settings)
    except Exception as error:
        raise _unwritable(what, path, f"it cannot be built from its settings ({error})") from error
    # a layer may keep a setting under another name: its copy must have the same tensors and print the same
    shapes = [{name: t.shape for name, t in m.state_dict().items()} for m in (again, layer)]
    if shapes[0] != shapes[1] or again.extra_repr() != layer.extra_repr():
        raise _unwritable(what, path, "a layer built from its settings is not the same")
    arguments = []
    for p in parameters:
        value = settings[p.name]
        implied = p.name == "stride" and p.default is None and value == settings.get("kernel_size")
        if p.default is p.empty:
            arguments.append(repr(value))
        elif not implied and not _is_same(value, p.default):
            arguments.append(f"{p.name}={value!r}")
    return _checked(f"nn.{kind.__name__}({', '.join(arguments)})", (), what, path)


def _setting(layer: nn.Module, parameter: inspect.Parameter) -> Any:
    """What `parameter` was when the layer was built: torch's layers keep their settings under the same names."""
    value = getattr(layer, parameter.name, parameter.default)
    if isinstance(parameter.default, bool) and (isinstance(value, Tensor) or value is None):
        return value is not None  # bias=True has become a tensor
    sizes = ("kernel_size", "stride", "padding", "dilation", "output_padding")
    if parameter.name in sizes and isinstance(value, tuple) and len(value) > 1 and len(set(value)) == 1:
        return value[0]
    return value


def _is_sequential(tree: Tree) -> bool:
    """Whether its parts are layers or containers with the names 0, 1, 2 …"""
    tensors = [part for part in tree.values() if isinstance(part, str) and part.startswith(("nn.Parameter(", "nn.Buffer("))]
    return not tensors and set(tree) == {str(n) for n in range(len(tree))}


def _built(part: Tree | str) -> str:
    """The expression that builds a layer, a tensor or a container."""
    if isinstance(part, str):
        return part
    if _is_sequential(part):
        return f"nn.Sequential({', '.join(_built(part[str(n)]) for n in range(len(part)))})"
    # a keyword argument must be an identifier; `Part` removes the underscore
    names = {name: name if name.isidentifier() and not name.startswith("_") else f"_{name}" for name in part}
    return f"Part({', '.join(f'{names[name]}={_built(inner)}' for name, inner in part.items())})"


def _access(tree: Tree, path: str) -> str:
    """The expression that reads what is stored at `path`."""
    text, here = "self", tree
    for name in path.split("."):
        if here is not tree and _is_sequential(here):
            text += f"[{name}]"
        else:
            text = f"{text}.{name}" if name.isidentifier() else f'getattr({text}, "{name}")'
        inner = here[name]
        here = inner if isinstance(inner, dict) else {}
    return text


class _Variable(str):
    """An expression whose repr is itself, so that the repr of a list of values is source."""

    __repr__ = str.__str__


class _Forward:
    """The body of forward: one line for each node. A tensor that is not needed again passes its name on."""

    def __init__(self, module: fx.GraphModule, tree: Tree) -> None:
        self.tree = tree
        self.nodes = list(module.graph.nodes)
        self.last_use = {source: node for node in self.nodes for source in node.all_input_nodes}
        self.variables: dict[fx.Node, _Variable] = {}
        self.names: dict[str, None] = {}  # in the order in which they were first used

    def lines(self) -> list[str]:
        """The statements, with a comment where another block of the network begins."""
        written: list[str] = []
        current = ""
        for node, following in zip(self.nodes, [*self.nodes[1:], None], strict=True):
            if node.op == "placeholder":
                self._new_name(node, str(node.target))
            elif node.op == "get_attr":
                self.variables[node] = _Variable(_access(self.tree, str(node.target)))
            elif node.op == "output":
                written += _lines("return ", self._spelled(repr(self._values(node.args[0])), node))
            else:
                block = _block(node)
                if block and block != current:
                    current = block
                    written += [*([""] if written else []), f"        # {block}"]
                expression = self._expression(node)
                if following is not None and following.op == "output" and following.args[0] is node:
                    return [*written, *_lines("return ", expression)]
                written += _lines(f"{self._name(node)} = " if node.users else "", expression)
        return written

    def _expression(self, node: fx.Node) -> str:
        mode = info(node).get("follows_mode_at")
        args = [_Variable("self.training") if place == mode else self._values(a) for place, a in enumerate(node.args)]
        kwargs = {k: _Variable("self.training") if k == mode else self._values(a) for k, a in node.kwargs.items()}
        if node.op == "call_module":
            head = _access(self.tree, str(node.target))
        elif node.op == "call_method":
            head = f"{args.pop(0)!r}.{node.target}"
        elif node.target is getattr and len(args) == 2:
            return self._spelled(f"{args[0]!r}.{args[1]}", node)
        elif getattr(operator, call_word(node), None) is node.target and call_word(node) in magic_methods:
            return self._spelled(magic_methods[call_word(node)].format(*(f"({a!r})" for a in args)), node)
        else:
            head = _functions().get(id(node.target), "")
            if not head:
                raise _unwritable(call_word(node), info(node).get("name", node.name), "it is not a function of torch")
            assert callable(node.target)
            kwargs = _without_defaults(node.target, head, kwargs)
        return self._spelled(f"{head}({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])})", node)

    def _values(self, argument: Any) -> Any:
        return fx.map_arg(argument, self.variables.__getitem__)

    def _spelled(self, text: str, node: fx.Node) -> str:
        return _checked(text, self.names, call_word(node), info(node).get("name", node.name))

    def _name(self, node: fx.Node) -> str:
        """The oldest name among the tensors that are read here for the last time; else a new one after the node's block."""
        ending = {self.variables[s] for s in node.all_input_nodes if self.last_use[s] is node and _is_tensor(s)}
        if _is_tensor(node) and (free := [name for name in self.names if name in ending]):
            self.variables[node] = _Variable(free[0])
            return free[0]
        word = "part" if node.target is operator.getitem else call_word(node)
        return self._new_name(node, _place(node) or word)

    def _new_name(self, node: fx.Node, wanted: str) -> str:
        wanted = re.sub(r"\W", "_", wanted).strip("_") or "x"
        wanted = f"x{wanted}" if wanted[0].isdigit() else wanted
        name, count = wanted, 1
        while name in self.names or name in RESERVED:
            count += 1
            name = f"{wanted}_{count}"
        self.variables[node] = _Variable(name)
        self.names[name] = None
        return name


@cache
def _functions() -> dict[int, str]:
    """Public functions of torch by identity, under the shortest name that the source can use."""
    found: dict[int, str] = {}
    for module, prefix in ((F, "F"), (torch, "torch"), (math, "math")):
        for name, function in vars(module).items():
            if callable(function) and not isinstance(function, type) and not name.startswith("_"):
                found.setdefault(id(function), f"{prefix}.{name}")
    return found


def _without_defaults(function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The named arguments that differ from the function's defaults."""
    function = getattr(F, f"_{name.rpartition('.')[2]}", function)  # F.max_pool2d itself has no signature
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in function
        return {k: v for k, v in kwargs.items() if (k, v) != ("inplace", False)}
    return {k: v for k, v in kwargs.items() if k not in parameters or not _is_same(v, parameters[k].default)}


def _is_same(value: Any, default: Any) -> bool:
    """Equal, and of the same type: 0 is not False."""
    return value is default or (type(value) in (int, float, str, tuple) and type(value) is type(default) and value == default)


def _is_tensor(node: fx.Node) -> bool:
    shape = info(node).get("shape")
    return not isinstance(shape, Shape) or shape.is_tensor


def _place(node: fx.Node) -> str:
    """Path of the module whose forward made the call."""
    return str(node.target).rpartition(".")[0] if node.op == "call_module" else module_path(node)


def _block(node: fx.Node) -> str:
    """The block of a node: its place up to the last number in it, or the first name."""
    parts = _place(node).split(".")
    numbers = [n for n, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1] if numbers else parts[:1])


class _Spelling(ast.NodeTransformer):
    """Turns the repr of values into source: slices of an index, and the names of `SPELLINGS`."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(SPELLINGS.get(node.id, node.id), mode="eval").body

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for place, item in enumerate(items):
            if isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id == "slice":
                items[place] = ast.Slice(*(None if ast.unparse(end) == "None" else end for end in item.args))
        if not isinstance(node.slice, ast.Tuple):
            node.slice = items[0]
        return node


def _checked(text: str, names: Collection[str], what: str, path: str) -> str:
    """The expression `text`, made of repr, as source; `UnsupportedOp` if it uses anything but torch and `names`."""
    refusal = _unwritable(what, path, f"`{text}` is not made of torch and plain values")
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        raise refusal from None
    if {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {*KNOWN, *SPELLINGS, *names}:
        raise refusal
    return _flat(_Spelling().visit(tree))


def _flat(tree: ast.AST) -> str:
    """An expression in one line, with double quotes."""
    return re.sub(r"""'([^'"\\]*)'""", r'"\1"', ast.unparse(tree))


def _lines(before: str, expression: str | ast.expr, indent: int = 8, after: str = "") -> list[str]:
    """The lines of `before expression after`; a call that is too long is split into one argument a line."""
    tree = ast.parse(expression, mode="eval").body if isinstance(expression, str) else expression
    margin = " " * indent
    line = f"{margin}{before}{_flat(tree)}{after}"
    if len(line) <= WIDTH or not isinstance(tree, ast.Call) or not (tree.args or tree.keywords):
        return [line]
    arguments = [*(("", a) for a in tree.args), *((f"{k.arg}=", k.value) for k in tree.keywords)]
    inside = [row for name, argument in arguments for row in _lines(name, argument, indent + 4, ",")]
    return [f"{margin}{before}{_flat(tree.func)}(", *inside, f"{margin}){after}"]


def _unwritable(what: str, path: str, why: str) -> UnsupportedOp:
    return UnsupportedOp(
        f"{what} at node {path!r} cannot be written out as source: {why}. Export to ONNX or .pt2 instead, or use layers and "
        f"functions of torch."
    )
