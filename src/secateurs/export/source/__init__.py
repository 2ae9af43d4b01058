"""Plain source: model.py with an ordinary nn.Module and model.safetensors; torch and safetensors are all it takes to run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs._util.tensors import dump
from secateurs.export.deliver import TOLERANCE, Batches, calling, deliver, run_fresh
from secateurs.export.prepare import Exported, Kind, Prepared
from secateurs.export.source.forward import RESERVED, Forward, tables
from secateurs.export.source.text import Call, Container, assigned, constructor, table
from secateurs.graph.trace import Example, Graph

CODE, WEIGHTS = "model.py", "model.safetensors"

_PART = '''

class Part(nn.Module):
    """Layers and tensors under their names (a leading _ is not part of a name)."""

    def __init__(self, **parts: nn.Module | nn.Parameter | nn.Buffer) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name.removeprefix("_"), part)
'''

_LOAD = '''

def load(path: str | Path = WEIGHTS) -> {name}:
    """The network with its weights, in eval mode."""
    network = {name}()
    network.load_state_dict(load_file(path), assign=True)
    return network.eval()
'''


class _Source:
    kind: Kind = "source"
    runtime = "PyTorch"

    def write(self, network: Prepared, path: Path) -> None:
        (path / CODE).write_text(source_of(network))
        (path / WEIGHTS).write_bytes(dump(_weights(network.module), {}))

    def outputs(self, path: Path, batches: Batches) -> list[list[Tensor]]:
        return run_fresh(self.kind, path, batches)

    def runner(self, network: Prepared, path: Path) -> Callable[[tuple[Tensor, ...]], Callable[[], Any]]:
        return calling(partial(network.module))


def to_source(
    graph: Graph | Prepared,
    folder: str | Path,
    *,
    inputs: Example | None = None,
    original: Graph | nn.Module | Prepared | None = None,
    tolerance: float = TOLERANCE,
    repeats: int = 30,
) -> Exported:
    """Write the network to `folder` as model.py, an ordinary nn.Module with its widths written out, and model.safetensors.

    `load()` in model.py gives the network. It is run in a fresh process that cannot import secateurs and must give what the
    network gives for `inputs`, up to `tolerance` times the largest output; else `NotEqual`, and no files. A layer or function
    that is not torch's is `UnsupportedOp`. With `original`, the unpruned network, its size and speed are compared, `repeats`
    runs in turns.
    """
    return deliver(_Source(), graph, folder, inputs=inputs, original=original, tolerance=tolerance, repeats=repeats)


def source_of(network: Prepared) -> str:
    """The text of model.py."""
    module, name = network.module, _class_name(network.name)
    constants = tables(module)
    tree = _tree(module, constants)
    forward = Forward(module, tree)
    arguments = "".join(f", {argument}: Tensor" for argument in forward.arguments())
    body = forward.lines()
    shapes = ", ".join(f"(N, {', '.join(map(str, t.shape[1:]))})" for t in network.inputs)
    lines = [
        f'"""{name} after pruning: needs torch and safetensors only."""',
        "",
        *(["import math"] if any("math." in line for line in body) else []),
        "from pathlib import Path",
        "",
        "import torch",
        "import torch.nn.functional as F",
        "from safetensors.torch import load_file",
        "from torch import Tensor, nn",
        "",
        f'WEIGHTS = Path(__file__).with_name("{WEIGHTS}")',
        *_constants(module, constants),
        *(_PART.rstrip("\n").split("\n") if tree.uses_part else []),
        "",
        "",
        f"class {name}(nn.Module):",
        f'    """Takes {shapes}; filters that were removed are not there."""',
        "",
        "    def __init__(self) -> None:",
        "        super().__init__()",
        *(line for part, call in _attributes(tree) for line in assigned(part, call)),
        "",
        f"    def forward(self{arguments}){' -> Tensor' if _gives_tensor(module) else ''}:",
        '        """In straight lines, block by block."""',
        *body,
        *_LOAD.format(name=name).rstrip("\n").split("\n"),
    ]
    return "\n".join(_used(lines)) + "\n"


def _tree(module: fx.GraphModule, constants: dict[str, str]) -> Container:
    """All layers and tensors that the network uses, in the order of the network's own list of them."""
    called = {str(n.target) for n in module.graph.nodes if n.op == "call_module"}
    tree = Container()
    for name, layer in module.named_modules(remove_duplicate=False):
        if name in called:
            tree.put(name, constructor(layer, name))
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tree.put(str(node.target), _tensor(module, str(node.target), constants))
    tree.sort_()
    return tree


def _tensor(module: fx.GraphModule, path: str, constants: dict[str, str]) -> Call:
    found = _read(module, path)
    if path in constants:
        return Call("nn.Buffer", (("", f"torch.tensor({constants[path]})"), ("persistent=", "False")))
    kind = "Parameter" if isinstance(found, nn.Parameter) else "Buffer"
    shape = f"({found.shape[0]},)" if found.dim() == 1 else str(tuple(found.shape))
    return Call(f"nn.{kind}", (("", f"torch.empty({shape})"),))


def _attributes(tree: Container) -> list[tuple[str, Any]]:
    return [(name, part.built() if isinstance(part, Container) else part) for name, part in tree.parts.items()]


def _constants(module: fx.GraphModule, constants: dict[str, str]) -> list[str]:
    if not constants:
        return []
    rows = [row for path, name in constants.items() for row in table(name, _read(module, path).tolist())]
    return [
        "",
        "# Where each channel of a wider sum comes from: a channel of the narrower term, or, with the",
        "# highest number, the zero channel that is put behind them.",
        "# fmt: off",
        *rows,
        "# fmt: on",
    ]


def _weights(module: fx.GraphModule) -> dict[str, Tensor]:
    """The tensors of the layers that are called and those that are read by name, tables aside."""
    constants = tables(module)
    found: dict[str, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            state = module.get_submodule(str(node.target)).state_dict()
            found |= {f"{node.target}.{name}": tensor for name, tensor in state.items()}
        elif node.op == "get_attr" and str(node.target) not in constants:
            found[str(node.target)] = _read(module, str(node.target))
    return found


def _read(module: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    found = getattr(module.get_submodule(owner), name)
    assert isinstance(found, torch.Tensor)
    return found


def _gives_tensor(module: fx.GraphModule) -> bool:
    return isinstance(next(iter(reversed(module.graph.nodes))).args[0], fx.Node)


def _class_name(name: str) -> str:
    name = "".join(c for c in name if c.isalnum() or c == "_")
    return name if name.isidentifier() and name not in RESERVED else "Network"


def _used(lines: list[str]) -> list[str]:
    """The lines without imports that nothing uses."""
    text = "\n".join(lines)
    unused = {"import torch": "torch." not in text.replace("torch.nn.functional as F", "").replace("safetensors.torch", "")}
    unused["import torch.nn.functional as F"] = " F." not in text and "(F." not in text
    return [line for line in lines if not unused.get(line, False)]
