"""What surgery can and cannot do to networks of others: torchvision, timm, ultralytics, transformers, segmentation, MONAI.

Run it as `make limits`, or as `tools/limits NAME...` for some networks only (LIBRARY/NETWORK, see limits_networks.py). Every
network gets random weights, constants and BatchNorm statistics, is traced, searched for sites, and loses 30 % of the channels
of all sites at once, and then again of what is left, with each of three shortcut positions, and with the widths of attention
heads where there are any; the compacted network must give what the masked one gives, in eval mode, in train mode, and in eval
mode after train mode has updated the statistics of both.
Rows are kept in lab/results/limits/rows.jsonl: an interrupted run goes on with the networks that are missing (with --again,
with those whose row another commit has made), the most important first, for at most --minutes. Rows of networks that are no
longer on the list go. A network that takes longer than --timeout is a row too, "too slow". Writes the tables of
lab/results/limits/README.md and the summary in docs/limits.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import operator
import re
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from limits_networks import build, by_importance, define_operators, names
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from secateurs import Graph, Unprunable, compact, cost, find_sites, masked, trace
from secateurs._util.files import write_text
from secateurs.errors import EmptyLayer, InvalidMask, SecateursError
from secateurs.graph.node_info import dims_of, shape_of
from secateurs.graph.trace import tensors_in

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "lab" / "results" / "limits" / "rows.jsonl"
TABLES, PAGE = ROWS.parent / "README.md", ROOT / "docs" / "limits.md"
BEGIN, END = "<!-- begin: made by `make limits` -->", "<!-- end: made by `make limits` -->"

OFF = 0.3  # the share of every site's channels that is removed
INSIDE = "float64, float32 inside"  # weights in float64, but the network's own code casts to float32, as decoders do in norms
EQUAL = {"float64": 1e-10, INSIDE: 1e-5, "float32": 1e-4}  # largest difference allowed, relative to the largest output
HUGE = 4e8  # parameters above which four copies in float64 need more memory than a small machine has
SEARCHES: dict[str, Callable[[Graph], Any]] = {  # in every network; the last one only where it finds more than the one before
    "before": partial(find_sites, shortcut="before"),
    "after": partial(find_sites, shortcut="after"),
    "stream": partial(find_sites, shortcut="stream"),
    "widths": partial(find_sites, shortcut="stream", head_widths=True),
}
LIBRARIES = ("torchvision", "timm", "ultralytics", "transformers", "segmentation_models_pytorch", "monai")


@dataclass(frozen=True)
class Surgery:
    """What became of one network with one shortcut position."""

    sites: int
    layers: int  # convolution and linear layers that can lose filters
    prunable_macs: int  # of those layers, and of products of attention that get smaller with the cut
    macs_left: float  # share of the MACs left by the first cut
    difference: float  # between compacted and masked, relative to the largest output
    again: float  # the same for a second cut of what is left
    training: (
        float | None
    )  # the same in train mode and after it; None for a network that is random in train mode, or fails there
    effect: float  # between masked and uncut, relative to the largest output: 0 would make the comparison empty

    @property
    def largest(self) -> float:
        """The largest difference that was measured."""
        return max(self.difference, self.again, self.training or 0.0)


@dataclass(frozen=True)
class Refusal:
    """The layers of one network that can lose no filters, for one kind of reason."""

    kind: str  # the reason without the names and numbers of a place
    layers: int
    macs: int  # locked
    example: str  # the first layer


@dataclass(frozen=True)
class Row:
    """One network: what was found in it, or where it failed."""

    model: str  # LIBRARY/NETWORK
    commit: str  # of secateurs
    parameters: int = 0
    example: str = ""  # the shapes of the input
    dtype: str = ""
    engine: str = ""  # that captured it
    tracing: float = 0.0  # seconds
    layers: int = 0  # convolution and linear layers, the output layer not counted
    macs: int = 0
    before: Surgery | None = None
    after: Surgery | None = None
    refusals: tuple[Refusal, ...] = ()
    failure: str = ""
    seconds: float = 0.0
    stream: Surgery | None = None  # None in rows that are older than this position, too
    output_macs: int = 0  # of the layers whose filters are the network's outputs
    widths: Surgery | None = None  # as a stream, and of every attention head some of its width; None where no head has any

    @property
    def done(self) -> tuple[Surgery, ...]:
        """What became of it, in the order of SEARCHES."""
        return tuple(found for found in (self.before, self.after, self.stream, self.widths) if found is not None)


@torch.no_grad()
def randomise_(model: nn.Module, generator: torch.Generator) -> None:
    """Leave no constant tensor, and no 0 and no 1 in any tensor: fresh norms, biases, scales and scalars hide mistakes.

    Variances and scales become 0.5 to 1.5, so that activations stay finite; biases and means -0.2 to 0.2. Buffers other than
    statistics hold what a network computes with (indices, masks, windows) and stay. Dropout is off: it would be random.
    """
    statistics = [(n, b) for n, b in model.named_buffers() if n.endswith(("running_mean", "running_var"))]
    for name, tensor in (*model.named_parameters(), *statistics):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        word = name.rsplit(".", 1)[-1]
        noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
        constant = bool(tensor.min() == tensor.max())
        if word.endswith("bias") or word == "running_mean":
            tensor.copy_(0.4 * noise - 0.2)
        elif tensor.dim() <= 1 or word == "layer_scale" or (constant and bool(tensor.any())):
            tensor.copy_(0.5 + noise)
        elif tensor.abs().max() < 1e-3:  # a layer that starts at zero, or nearly, would hide everything before it
            tensor.copy_(0.2 * noise - 0.1)
        else:
            tensor.copy_(torch.where((tensor == 0) | (tensor == 1), 0.2 * noise - 0.1, tensor))
    for part in model.modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(part, name, 0.0)


def random_cut(graph: Graph, sites: Iterable[Any], generator: torch.Generator) -> tuple[Graph, dict[str, Tensor]]:
    """Keep a random 70 % of the channels of each site, at least one; return the compacted network and the masks.

    A cut that leaves a layer without a channel (all that one slice reads, for example) is drawn again, four times.
    """
    for tries in range(5):
        cut = {}
        for site in sites:
            keep = torch.ones(site.channels, dtype=torch.bool)
            keep[torch.randperm(site.channels, generator=generator)[: max(int(OFF * site.channels), site.channels > 1)]] = False
            cut[site.name] = keep
        try:
            return compact(graph, cut, verify=False), cut
        except EmptyLayer:
            if tries == 4:
                raise
    raise AssertionError


def survey(name: str) -> Row:
    """Trace one network and cut it; what it raises becomes the row's failure."""
    start = time.perf_counter()
    commit = _git("rev-parse", "--short", "HEAD")
    try:
        row = operate(name, commit, seed=0)
        if verdict(row) == "no effect":  # a ReLU at the output can hide everything
            row = operate(name, commit, seed=1)
    except SecateursError as error:
        row = Row(name, commit, failure=re.sub(r"/\S*/site-packages/", "", f"{type(error).__name__}: {error}"))
    except Exception:
        row = Row(name, commit, failure="crash: " + traceback.format_exc(limit=-3))
    return Row(**{**vars(row), "seconds": round(time.perf_counter() - start, 1)})


def operate(name: str, commit: str, seed: int) -> Row:
    """Build one network with random weights, trace it, and cut it with each shortcut position."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, example = build(name)
    parameters = sum(p.numel() for p in model.parameters())
    dtype = torch.float32 if parameters > HUGE else torch.float64
    model = model.eval().to(dtype)
    randomise_(model, generator)
    if isinstance(example, Tensor):
        example = example.to(dtype)
    else:
        example = {key: v.to(dtype) if v.is_floating_point() else v for key, v in example.items()}
    start = time.perf_counter()
    graph, engine = captured(model, example)
    tracing = round(time.perf_counter() - start, 2)
    del model
    whole = cost(graph)
    weighted = [layer for layer in cost(graph, convention="paper").layers if layer.macs]
    done, refused = {}, []
    for name_of_search, search in SEARCHES.items():
        sites = search(graph)
        refused += sites.unprunable if name_of_search in ("before", "after") else []
        if name_of_search != "widths" or len(sites) > done["stream"].sites:
            try:
                done[name_of_search] = surgery(graph, sites, whole, generator, search)
            except InvalidMask:  # compact says that a width is not there any more once the others are cut: widths alone, then
                alone = partial(find_sites, shortcut="widths")
                done[name_of_search] = surgery(graph, alone(graph), whole, generator, alone)
    return Row(
        name,
        commit,
        parameters,
        ", ".join("×".join(map(str, e.shape)) for e in graph.example),
        INSIDE if dtype == torch.float64 and casts_to_float32(graph) else str(dtype).removeprefix("torch."),
        engine,
        tracing,
        len(weighted) - 1,
        whole.macs,
        done["before"],
        done["after"],
        grouped(refused, graph.module),
        stream=done["stream"],
        widths=done.get("widths"),
        output_macs=sum({u.name: u.macs for u in refused if u.reason.startswith("it is the network's output")}.values()),
    )


class _Casts(TorchDispatchMode):
    """Notices a cast from float64 to float32: what follows it differs by float32's rounding between equal networks."""

    seen: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op of torch."""
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.seen |= args[0].dtype == torch.float64 and made.dtype == torch.float32
        return made


def casts_to_float32(graph: Graph) -> bool:
    """Whether a network of float64 computes something in float32."""
    with _Casts() as casts:
        outputs(graph.module, graph.example)
    return casts.seen


def captured(model: nn.Module, example: Any) -> tuple[Graph, str]:
    """Trace with engine="auto", and say which engine it took."""
    tracing: Any = importlib.import_module("secateurs.graph.trace")
    capture, tried = tracing._captured, []

    def watched(*args: Any, **options: Any) -> Any:
        found = capture(*args, **options)
        tried.append(args[4])
        return found

    tracing._captured = watched
    try:
        return trace(model, example), tried[-1]
    finally:
        tracing._captured = capture


def surgery(graph: Graph, sites: Any, whole: Any, generator: torch.Generator, search: Callable[[Graph], Any]) -> Surgery:
    """Cut, compact, and compare with the masked and the uncut network; then cut and compare again."""
    layers = {layer for site in sites for layer in site.layers}
    narrow, cut = random_cut(graph, sites, generator)
    reference = masked(graph, cut)
    got, wanted = outputs(narrow.module, graph.example), outputs(reference, graph.example)
    training = in_train_mode(narrow.module, reference, graph.example)
    if training is not None and training > 1e-12:  # over two values, BatchNorm divides by their difference: take eight
        eight = tuple(torch.cat([e, e.flip(-1), 0.7 * e, 1.3 * e.flip(-1)]) for e in graph.example if e.is_floating_point())
        training = in_train_mode(narrow.module, reference, eight) if len(eight) == len(graph.example) else training
    twice, second = random_cut(narrow, search(narrow), generator)
    return Surgery(
        sites=len(sites),
        layers=len(layers),
        prunable_macs=sum(whole.layer(layer).macs for layer in layers) + smaller_products(graph, narrow),
        macs_left=cost(narrow).macs / whole.macs,
        difference=difference(got, wanted),
        again=difference(outputs(twice.module, graph.example), outputs(masked(narrow, second), graph.example)),
        training=training,
        effect=difference(outputs(graph.module, graph.example), wanted),
    )


PRODUCTS = (torch.matmul, operator.matmul, torch.bmm, "matmul", "bmm", F.scaled_dot_product_attention)


def smaller_products(graph: Graph, narrow: Graph) -> int:
    """MACs, for one example, of the products of two tensors (those of attention) that do less work in the narrower network."""
    before, after = products(graph), products(narrow)
    return sum(macs for name, macs in before.items() if after.get(name, 0) < macs)


def products(graph: Graph) -> dict[str, int]:
    """The MACs of each product of two tensors, for one example, by node."""
    found = {}
    for node in graph.module.graph.nodes:
        part = graph.module.get_submodule(str(node.target)) if node.op == "call_module" else None
        target = getattr(part, "function", None) if part is not None else node.target
        operands = [n for n in node.all_input_nodes if shape_of(n).is_tensor]
        if target in PRODUCTS and len(operands) > 1:
            made, first = dims_of(node), dims_of(operands[0])
            if target is F.scaled_dot_product_attention:  # of queries and keys, and of their weights and values
                found[node.name] = (
                    math.prod(made[:-1]) * dims_of(operands[1])[-2] * (first[-1] + made[-1]) // len(graph.example[0])
                )
            else:
                found[node.name] = math.prod(made) * first[-1] // len(graph.example[0])
    return found


def outputs(network: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """All floating-point outputs."""
    with torch.no_grad():
        return [t for t in tensors_in(network(*(e.clone() for e in inputs))) if t.is_floating_point()]


def difference(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, relative to the largest output; infinite if shapes, or places that are not finite, differ."""
    if [t.shape for t in got] != [t.shape for t in wanted]:
        return float("inf")
    worst = scale = 0.0
    for one, other in zip(got, wanted, strict=True):
        finite = other.isfinite()
        if not torch.equal(finite, one.isfinite()):
            return float("inf")
        if bool(finite.any()):
            worst = max(worst, float((one - other)[finite].abs().max()))
            scale = max(scale, float(other[finite].abs().max()))
    return worst / scale if scale else float(worst > 0)


def in_train_mode(narrow: nn.Module, reference: nn.Module, inputs: tuple[Tensor, ...]) -> float | None:
    """The largest difference in train mode, and in eval mode with the statistics that it has left."""
    found = []
    for network in (reference, reference, narrow):
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        torch.manual_seed(len(found))
        try:
            trained = outputs(network.train(), inputs)
        except (RuntimeError, ValueError):  # a single value for each channel, of which BatchNorm takes no statistics
            return None
        finally:
            network.eval()
        found.append((trained, outputs(network, inputs)))
        network.load_state_dict(before)
    first, again, smaller = found
    if difference(first[0], again[0]) > 0:
        return None
    return max(difference(smaller[0], first[0]), difference(smaller[1], first[1]))


def differences(row: Row) -> list[float]:
    """All that were measured."""
    return [d for s in row.done for d in (s.difference, s.again, s.training) if d is not None]


def verdict(row: Row) -> str:
    """One word for the table, worst first."""
    if row.before is None or row.after is None:
        return next((outcome for outcome in ("crash", "too slow") if row.failure.startswith(outcome)), "refused")
    if not all(d <= EQUAL[row.dtype] for d in differences(row)):  # a NaN is wrong too
        return "wrong"
    if any(done.sites and not done.effect > 1e3 * max(EQUAL["float64"], done.largest) for done in row.done):
        return "no effect"  # or too small a one beside the difference to say that they are equal
    return "equal" if any(done.sites for done in row.done) else "no sites"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def survey_apart(name: str, timeout: float) -> Row:
    """Survey one network in a process of its own, so that even a crash of the interpreter is only a row."""
    context = multiprocessing.get_context("fork")  # the libraries are imported once
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(json.dumps(asdict(survey(name)))))
    process.start()
    sender.close()
    commit = _git("rev-parse", "--short", "HEAD")
    try:
        if not receiver.poll(timeout):
            return Row(name, commit, failure=f"too slow: not done after {timeout:.0f} s", seconds=timeout)
        return from_json(json.loads(receiver.recv()))
    except EOFError:
        process.join()
        return Row(name, commit, failure=f"crash: exit status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def read_rows() -> dict[str, Row]:
    """The rows of earlier runs, by network; a network that is no longer on the list has none."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    listed = set(names())
    return {row.model: row for row in map(from_json, map(json.loads, lines)) if row.model in listed}


def write_rows(rows: dict[str, Row]) -> None:
    """One row of JSON a line, in the order of the page."""
    order = {name: place for place, name in enumerate(names())}
    ordered = sorted(rows.values(), key=lambda row: order[row.model])
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    write_text(ROWS, "".join(json.dumps(asdict(row)) + "\n" for row in ordered))


def from_json(record: dict[str, Any]) -> Row:
    """A row as it was written."""
    for shortcut in SEARCHES:
        if record.get(shortcut) is not None:
            record[shortcut] = Surgery(**record[shortcut])
    record["refusals"] = tuple(Refusal(**r) for r in record["refusals"])
    return Row(**record)


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def prunable(row: Row) -> float:
    """The share of the MACs that can be pruned, with the best shortcut position."""
    return max(done.prunable_macs for done in row.done) / row.macs


def model_table(rows: list[Row]) -> str:
    """One line a network."""
    lines = [
        "| network | weights | input | engine | trace | sites | layers prunable | MACs prunable | as a stream | "
        "MACs left | largest difference | in train mode | outcome |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        short_name = row.model.partition("/")[2]
        if row.before is None or row.after is None:
            lines.append(f"| {short_name} | | | | | | | | | | | | {outcome(row)} |")
            continue
        trained = [s.training for s in row.done if s.training is not None]
        precision = row.dtype.rpartition(", ")[2]
        eval_mode = max(d for s in row.done for d in (s.difference, s.again))
        either = max(row.before.prunable_macs, row.after.prunable_macs)
        lines.append(
            f"| {short_name} | {row.parameters / 1e6:.1f} M | {row.example} | {row.engine} | {row.tracing:.1f} s | "
            f"{' / '.join(str(s.sites) for s in row.done)} | {max(s.layers for s in row.done)} of {row.layers} | "
            f"{percent(either, row.macs)} | {percent(row.stream.prunable_macs, row.macs) if row.stream else ''} | "
            f"{' / '.join(percent(s.macs_left, 1) for s in row.done)} | "
            f"{eval_mode:.0e}{f' ({precision})' * (precision != 'float64')} | {f'{max(trained):.0e}' if trained else '–'} | "
            f"{verdict(row)} |"
        )
    return "\n".join(lines)


def outcome(row: Row) -> str:
    """The verdict, with the reason if the network was not cut."""
    failure = re.sub(r"\s+", " ", row.failure).replace("|", "\\|")[:300]
    return f"{verdict(row)}: {failure.removeprefix(verdict(row) + ': ')}" if failure else verdict(row)


def refusal_table(rows: list[Row]) -> str:
    """One line for each kind of reason, those that lock most MACs first."""
    found: dict[str, list[tuple[Row, Refusal]]] = defaultdict(list)
    for row in rows:
        for refusal in row.refusals:
            found[refusal.kind].append((row, refusal))
    locked = {kind: median(r.macs / row.macs for row, r in places) for kind, places in found.items()}
    lines = [
        "| reason | layers | models | MACs locked, median of these models | for example |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for kind in sorted(found, key=lambda kind: -locked[kind]):
        row, first = found[kind][0]
        layers = sum(refusal.layers for _, refusal in found[kind])
        lines.append(
            f"| {kind} | {layers} | {len(found[kind])} | {percent(locked[kind], 1)} | `{first.example}` of {row.model} |"
        )
    return "\n".join(lines)


def grouped(unprunable: Iterable[Unprunable], network: nn.Module) -> tuple[Refusal, ...]:
    """Refusals by kind of reason, each layer counted once though both shortcut positions refuse it."""
    layers: dict[str, dict[str, int]] = defaultdict(dict)
    for refused in unprunable:
        layers[kind_of(refused.reason, network)][refused.name] = refused.macs
    return tuple(Refusal(kind, len(macs), sum(macs.values()), next(iter(macs))) for kind, macs in layers.items())


def kind_of(reason: str, network: nn.Module) -> str:
    """The reason without the names and numbers of one place: modules are named by their class."""
    classes = {path: type(module).__name__ for path, module in network.named_modules() if path}
    words = [classes.get(word, word) if "." in word else word for word in reason.split(" ")]
    return re.sub(r"\b\d+\b", "n", re.sub(r" at node '[^']*'|'[^']*'", "", " ".join(words)))


def summary(rows: list[Row]) -> str:
    """The generated part of the user's page: one line a library."""
    lines = [
        "| library | networks | outcomes | MACs that can be pruned | above 90 % in |",
        "| --- | ---: | --- | ---: | ---: |",
        *(summary_line(library, [row for row in rows if row.model.startswith(f"{library}/")]) for library in LIBRARIES),
        summary_line("all", rows),
    ]
    return "\n".join(filter(None, lines)) + "\n"


def summary_line(name: str, rows: list[Row]) -> str:
    """How many networks there are, what became of them, and how much of them can be pruned; nothing without rows."""
    shares = [prunable(row) for row in rows if row.before is not None]
    if not shares:
        return ""
    many = f"{sum(share > 0.9 for share in shares)} of {len(shares)}"
    return f"| {name} | {len(rows)} | {counted(rows)} | {percent(median(shares), 1)} | {many} |"


def render(rows: list[Row]) -> str:
    """The generated part of the page of tables."""
    commits = ", ".join(f"`{commit}` ({count})" for commit, count in Counter(row.commit for row in rows).most_common())
    taken = [row for row in rows if row.before is not None]
    shares = sorted(prunable(row) for row in taken)
    without = sorted(prunable(row) * row.macs / max(row.macs - row.output_macs, 1) for row in taken)
    engines = ", ".join(f"{engine} {count}" for engine, count in Counter(row.engine for row in taken).most_common())
    parts = [
        f"{len(rows)} networks, torch {torch.__version__} on a CPU, secateurs at commit {commits}. Captured: {len(taken)} "
        f"({engines}). Outcomes: {counted(rows)}. Share of the MACs that can be pruned, with the best position: median "
        f"{percent(median(shares), 1)}, above 90 % in {sum(s > 0.9 for s in shares)} of {len(taken)} networks; of the MACs "
        f"before the output layer: median {percent(median(without), 1)}, above 90 % in {sum(s > 0.9 for s in without)}."
    ]
    for library in LIBRARIES:
        found = [row for row in rows if row.model.startswith(f"{library}/")]
        if found:
            parts.append(
                f"### {library} {version(library)}\n\n{len(found)} networks: {counted(found)}.\n\n{model_table(found)}"
            )
    parts.append(f"### Every refusal of a layer, by reason\n\n{refusal_table(taken)}")
    return "\n\n".join(parts) + "\n"


def counted(rows: list[Row]) -> str:
    """How many rows have which outcome, the most frequent first."""
    return ", ".join(f"{count} {outcome}" for outcome, count in Counter(map(verdict, rows)).most_common())


def update_page(path: Path, text: str) -> None:
    """Put `text` between the markers of a page."""
    head, rest = path.read_text().split(BEGIN)
    tail = rest.split(END)[1]
    write_text(path, f"{head}{BEGIN}\n\n{text}\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="networks, LIBRARY/NETWORK; without it, all that have no row yet")
    parser.add_argument("--again", action="store_true", help="make the rows that another commit has made, too")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no network after this time (default: no limit)"
    )
    parser.add_argument("--render", action="store_true", help="only rewrite the pages from the saved rows")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one network (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    define_operators()
    for library in LIBRARIES:
        importlib.import_module(library)  # once for all networks
    rows, end, commit = read_rows(), time.monotonic() + 60 * options.minutes, _git("rev-parse", "--short", "HEAD")
    if unknown := set(options.names) - set(names()):
        parser.error(f"not on the list of tools/limits_networks.py: {', '.join(sorted(unknown))}")
    missing = [name for name in by_importance() if name not in rows or (options.again and rows[name].commit != commit)]
    for name in [] if options.render else options.names or missing:
        if time.monotonic() > end:
            print(f"{options.minutes:g} minutes are over; the same command goes on with {name}.", file=sys.stderr)
            break
        row = survey_apart(name, options.timeout)
        print(f"{name}: {outcome(row)} in {row.seconds:.0f} s", file=sys.stderr)
        rows[name] = row
        write_rows(rows)
    rows = read_rows()
    update_page(TABLES, render(list(rows.values())))
    update_page(PAGE, summary(list(rows.values())))
    return int(any(verdict(row) not in ("equal", "no sites", "refused", "too slow") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
