"""What surgery can and cannot do to networks of others: the classification models of torchvision, and some of timm.

Run it as `make limits`, or as `tools/limits NAME...` for some models only (timm's are named timm/NAME). Every model gets
random weights, constants and BatchNorm statistics, is traced, searched for sites, and loses 30 % of the channels of all
sites at once, with both shortcut positions; the compacted network must give what the masked one gives. Writes
benchmarks/results/limits.jsonl and the tables in docs/limits.md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from secateurs import Unprunable, compact, cost, find_sites, masked, trace
from secateurs._util.files import write_text
from secateurs.errors import SecateursError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "limits.jsonl"
PAGE = ROOT / "docs" / "limits.md"
BEGIN, END = "<!-- begin: made by `make limits` -->", "<!-- end: made by `make limits` -->"

OFF = 0.3  # the share of every site's channels that is removed
EQUAL = {torch.float64: 1e-10, torch.float32: 1e-4}  # largest difference allowed, relative to the largest output
TIMEOUT = 1800  # seconds for one model
HUGE = 4e8  # parameters above which four copies in float64 need more memory than a small machine has

FAMILIES = (  # in the order of their papers, timm last; a model belongs to the longest one that its name starts with
    *("alexnet", "vgg", "googlenet", "inception", "resnet", "squeezenet", "densenet", "resnext", "wide_resnet"),
    *("shufflenet", "mobilenet_v2", "mnasnet", "mobilenet_v3", "efficientnet_b", "regnet", "vit", "swin_"),
    *("efficientnet_v2", "convnext", "swin_v2", "maxvit", "timm/"),
)
TIMM = {  # timm's name of a model: pixels of its square input. A new line here is all that another model needs
    "poolformerv2_s12": 64,
    "convformer_s18": 64,
    "caformer_s18": 64,
    "hgnetv2_b0": 64,
    "swinv2_cr_tiny_224": 224,
    "resnetv2_18": 64,
    "ghostnet_100": 64,
    "mixnet_s": 64,
    "convmixer_768_32": 64,
}


@dataclass(frozen=True)
class Surgery:
    """What became of one model with one shortcut position."""

    sites: int
    layers: int  # convolution and linear layers that can lose filters
    prunable_macs: int
    macs_left: float  # share of the MACs left by the cut
    parameters_left: float
    difference: float  # between compacted and masked, relative to the largest output
    effect: float  # between masked and uncut, relative to the largest output: 0 would make the comparison empty


@dataclass(frozen=True)
class Refusal:
    """The layers of one model that can lose no filters, for one kind of reason."""

    kind: str  # the reason without the names and numbers of a place
    layers: int
    macs: int  # locked
    example: str  # the first layer


@dataclass(frozen=True)
class Row:
    """One model: what was found in it, or where it failed."""

    model: str  # timm/NAME for those of timm
    family: str
    parameters: int = 0
    size: int = 0  # pixels of the square input
    dtype: str = ""
    layers: int = 0  # convolution and linear layers, the output layer not counted
    macs: int = 0
    before: Surgery | None = None
    after: Surgery | None = None
    refusals: tuple[Refusal, ...] = ()
    failure: str = ""
    seconds: float = 0.0


OPS = torch.library.Library("torchvision", "DEF")  # the ops live as long as this object


@cache
def torchvision_models() -> Any:
    """torchvision.models without torchvision's compiled part, which loads beside a CUDA torch only.

    Two of its ops must exist for the import, though no classification model calls them.
    """
    for name in ("nms", "qnms"):
        OPS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision import models

    return models


def build(name: str) -> tuple[nn.Module, int]:
    """The model with its library's own initialisation, and the smallest input size of ours that it takes."""
    models = torchvision_models()
    if name.startswith("timm/"):
        import timm  # after torchvision's ops: it imports torchvision

        name = name.removeprefix("timm/")
        return timm.create_model(name, pretrained=False), TIMM[name]
    options: dict[str, Any] = {}
    size = 64
    if name in ("inception_v3", "googlenet"):
        options["init_weights"] = False  # their own takes minutes
        size = 96
    if name == "maxvit_t":
        size = 224  # its windows fit no smaller image
    if name.startswith("vit"):
        size = options["image_size"] = 56 if name == "vit_h_14" else 64
    return models.get_model(name, weights=None, **options), size


@torch.no_grad()
def randomise_(model: nn.Module, generator: torch.Generator) -> None:
    """Leave no constant tensor, and no 0 and no 1 in any tensor: fresh norms, biases, scales and scalars hide mistakes.

    Variances and scales become 0.5 to 1.5, so that activations stay finite; biases and means -0.2 to 0.2.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
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


def random_cut(sites: Iterable[Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Keep a random 70 % of the channels of each site, at least one."""
    cut = {}
    for site in sites:
        keep = torch.ones(site.channels, dtype=torch.bool)
        keep[torch.randperm(site.channels, generator=generator)[: int(OFF * site.channels)]] = False
        cut[site.name] = keep
    return cut


def survey(name: str) -> Row:
    """Trace one model and cut it; what it raises becomes the row's failure."""
    start = time.perf_counter()
    family = max((f for f in FAMILIES if name.startswith(f)), key=len)
    try:
        row = operate(name, family)
    except SecateursError as error:
        row = Row(name, family, failure=f"{type(error).__name__}: {error}")
    except Exception:
        row = Row(name, family, failure="crash: " + traceback.format_exc(limit=-2))
    return Row(**{**vars(row), "seconds": round(time.perf_counter() - start, 1)})


def operate(name: str, family: str) -> Row:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model, size = build(name)
    parameters = sum(p.numel() for p in model.parameters())
    dtype = torch.float32 if parameters > HUGE else torch.float64
    model = model.eval().to(dtype)
    randomise_(model, generator)
    x = torch.randn(2, 3, size, size, generator=generator, dtype=dtype)
    graph = trace(model, x)
    del model
    whole = cost(graph)
    weighted = [layer for layer in cost(graph, convention="paper").layers if layer.macs]
    done, refused = {}, []
    for shortcut in ("before", "after"):
        sites = find_sites(graph, shortcut=shortcut)
        refused += sites.unprunable
        done[shortcut] = surgery(graph, sites, whole, x, random_cut(sites, generator))
    return Row(
        name,
        family,
        parameters,
        size,
        str(dtype).removeprefix("torch."),
        len(weighted) - 1,
        whole.macs,
        done["before"],
        done["after"],
        grouped(refused, graph.module),
    )


def surgery(graph: Any, sites: Any, whole: Any, x: Tensor, cut: dict[str, Tensor]) -> Surgery:
    """Cut, compact, and compare with the masked and the uncut network."""
    layers = {layer for site in sites for layer in site.layers}
    narrow = compact(graph, cut)
    with torch.inference_mode():
        uncut, reference, result = graph.module(x), masked(graph, cut)(x), narrow.module(x)
    scale = reference.abs().max()
    left = cost(narrow)
    return Surgery(
        sites=len(sites),
        layers=len(layers),
        prunable_macs=sum(whole.layer(layer).macs for layer in layers),
        macs_left=left.macs / whole.macs,
        parameters_left=left.parameters / whole.parameters,
        difference=float((result - reference).abs().max() / scale),
        effect=float((uncut - reference).abs().max() / scale),
    )


def verdict(row: Row) -> str:
    """One word for the table, worst first."""
    if row.failure:
        return "crash" if row.failure.startswith("crash") else row.failure.split(":")[0]
    assert row.before is not None
    assert row.after is not None
    limit = EQUAL[getattr(torch, row.dtype)]
    for done in (row.before, row.after):
        if not done.difference <= limit:  # a NaN is wrong too
            return "wrong"
        if done.sites and not done.effect > 1e3 * limit:
            return "no effect"
    return "equal" if row.before.sites else "no sites"


def run_apart(name: str) -> Row:
    """Survey one model in a process of its own, so that even a crash of the interpreter is only a row."""
    command = [sys.executable, __file__, "--one", name]
    family = max((f for f in FAMILIES if name.startswith(f)), key=len)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return Row(name, family, failure=f"crash: not done after {TIMEOUT} s")
    if done.returncode:
        return Row(name, family, failure=f"crash: exit status {done.returncode}: {done.stderr[-500:]}")
    return from_json(json.loads(done.stdout.splitlines()[-1]))


def in_order(rows: Iterable[Row]) -> list[Row]:
    """By family, then by size."""
    return sorted(rows, key=lambda row: (FAMILIES.index(row.family), row.parameters, row.model))


def read_rows() -> list[Row]:
    """The rows of earlier runs."""
    return [from_json(json.loads(line)) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def write_rows(rows: list[Row]) -> None:
    """One row of JSON a line."""
    write_text(RESULTS, "".join(json.dumps(asdict(row)) + "\n" for row in rows))


def from_json(record: dict[str, Any]) -> Row:
    """A row as it was written."""
    for shortcut in ("before", "after"):
        if record[shortcut] is not None:
            record[shortcut] = Surgery(**record[shortcut])
    record["refusals"] = tuple(Refusal(**r) for r in record["refusals"])
    return Row(**record)


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def model_table(rows: list[Row]) -> str:
    """One line a model."""
    lines = [
        "| model | weights | sites | layers prunable | MACs prunable | MACs left after the cut, before / after | "
        "largest difference | outcome |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        outcome = verdict(row)
        if row.before is None or row.after is None:
            lines.append(f"| {row.model.removeprefix('timm/')} | | | | | | | {outcome}: {short(row.failure)} |")
            continue
        both = f"{percent(row.before.macs_left, 1)} / {percent(row.after.macs_left, 1)}"
        lines.append(
            f"| {row.model.removeprefix('timm/')} | {row.parameters / 1e6:.1f} M | {row.before.sites} / {row.after.sites} | "
            f"{max(row.before.layers, row.after.layers)} of {row.layers} | "
            f"{percent(max(row.before.prunable_macs, row.after.prunable_macs), row.macs)} | {both} | "
            f"{max(row.before.difference, row.after.difference):.0e}{' (float32)' * (row.dtype == 'float32')} | "
            f"{outcome} |"
        )
    return "\n".join(lines)


def short(failure: str) -> str:
    return re.sub(r"\s+", " ", failure).replace("|", "\\|")[-300:]


def refusal_table(rows: list[Row]) -> str:
    """One line a kind of reason, those that lock most MACs first."""
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


def render(rows: list[Row]) -> str:
    """The generated part of the page."""
    timm = [row for row in rows if row.family == "timm/"]
    torchvision = [row for row in rows if row.family != "timm/"]
    families = {row.family for row in torchvision}
    return (
        f"### torchvision\n\n{len(torchvision)} models of {len(families)} families "
        f"(torch {torch.__version__}, torchvision 0.28.0, CPU): {counted(torchvision)}.\n\n{model_table(torchvision)}\n\n"
        f"### timm\n\n{len(timm)} models (torch {torch.__version__}, timm 1.0.30, CPU): {counted(timm)}.\n\n"
        f"{model_table(timm)}\n\n"
        f"### Every refusal, by reason\n\n{refusal_table(rows)}\n"
    )


def counted(rows: list[Row]) -> str:
    """How many rows have which outcome, the most frequent first."""
    outcomes = [verdict(row) for row in rows]
    return ", ".join(f"{outcomes.count(o)} {o}" for o in sorted(set(outcomes), key=outcomes.count, reverse=True))


def update_page(text: str) -> None:
    """Put `text` between the markers of docs/limits.md."""
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    write_text(PAGE, f"{head}{BEGIN}\n\n{text}\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="torchvision's names of models, timm/NAME for timm's; all without it")
    parser.add_argument("--one", metavar="NAME", help="survey one model here and write its row as JSON to the output")
    parser.add_argument("--render", action="store_true", help="only rewrite the page from the saved rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(asdict(survey(options.one))))
        return 0
    rows = read_rows()
    known = [*torchvision_models().list_models(module=torchvision_models()), *(f"timm/{name}" for name in TIMM)]
    for name in [] if options.render else options.names or known:
        row = run_apart(name)
        print(f"{name}: {verdict(row)} in {row.seconds:.0f} s {short(row.failure)}", file=sys.stderr)
        rows = in_order([row, *(other for other in rows if other.model != name)])
        write_rows(rows)  # after each model: an interrupted run goes on with the names that are missing
    update_page(render(rows))
    return int(any(verdict(row) not in ("equal", "no sites") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
