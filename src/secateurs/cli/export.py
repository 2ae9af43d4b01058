"""`secateurs export`: a pruned network as ONNX, as .pt2, as plain source, each checked and compared with the unpruned one."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from secateurs.cli.inputs import Json, Options, Origin, build_model, fresh_model, is_pruned_file, load_data, options, origin_of
from secateurs.cli.terminal import print_json, print_table, say, warn
from secateurs.errors import ArtefactError, InvalidInput, RunError

if TYPE_CHECKING:
    from torch import Tensor

    from secateurs.export import Exported
    from secateurs.graph.trace import Graph

_EXAMPLES = 64
_Choice = Annotated[bool, Parameter(negative="", show_default=False)]


def export(
    run: Path,
    *,
    onnx: _Choice = False,
    pt2: _Choice = False,
    source: _Choice = False,
    out: Path | None = None,
    model: str | None = None,
    data: str | None = None,
    model_option: Options = (),
    data_option: Options = (),
    tolerance: float = 1e-4,
    repeats: int = 30,
    as_json: Json = False,
) -> None:
    """Write a pruned network for others: files that run without secateurs.

    Every file is run as others will run it, and compared with the network, before it is put in place. The unpruned network is
    exported too, and thrown away: sizes and speeds are of both, in turns, for batches of 1 and 64. The run's report tells them.

    Examples:

    `secateurs export runs/resnet20-cifar10-1 --onnx --pt2 --source`

    `secateurs export pruned.safetensors --model resnet20 --data cifar10 --onnx --out deploy`

    Parameters
    ----------
    run
        The folder of a finished run, or a pruned.safetensors, which then needs --model.
    onnx
        Write model.onnx, checked with ONNX Runtime.
    pt2
        Write model.pt2 (torch.export), checked in a fresh process.
    source
        Write model.py and model.safetensors: an ordinary nn.Module, checked in a fresh process.
    out
        The folder to write to; the run's own, or that of the file, unless given.
    model
        For a file, or a run started from Python: the network that was pruned, as in `secateurs prune`.
    data
        For a file: where the inputs come from that outputs are compared on; random ones unless given.
    model_option
        name=value for the network's constructor; may be given several times.
    data_option
        name=value for the data set; may be given several times.
    tolerance
        The largest difference allowed, as a share of the largest output.
    repeats
        Runs that speeds are measured on.
    as_json
        Print one JSON document on stdout.
    """
    chosen = {"onnx": onnx, "pt2": pt2, "source": source}
    if not any(chosen.values()):
        raise InvalidInput("wanted one or more of --onnx, --pt2 and --source.")
    file, origin = _origin(run, model, data, options(model_option, "--model-option"), options(data_option, "--data-option"))
    network, original = _networks(file, origin)
    inputs = _inputs(origin)
    folder = out or file.parent

    from secateurs.export import prepared, to_onnx, to_pt2, to_source
    from secateurs.graph.trace import trace

    ready = prepared(network, inputs)
    unpruned = prepared(trace(original, network.example), inputs)
    targets = {"onnx": (to_onnx, "model.onnx"), "pt2": (to_pt2, "model.pt2"), "source": (to_source, "")}
    found = [
        write(ready, folder / name, original=unpruned, tolerance=tolerance, repeats=repeats)
        for kind, (write, name) in targets.items()
        if chosen[kind]
    ]
    told = [asdict(one) for one in found]
    if run.is_dir():
        _note(run, told)
    if as_json:
        print_json({"network": str(file), "exports": told})
    else:
        _print(found)
        _advise(run, told)


def _origin(
    run: Path, model: str | None, data: str | None, model_options: dict[str, Any], data_options: dict[str, Any]
) -> tuple[Path, Origin]:
    """The file of the pruned network, and how to build the network and its data."""
    file = run / "pruned.safetensors" if run.is_dir() else run
    if run.is_dir() and not file.is_file():
        from secateurs.pruning.folder import read_provenance

        read_provenance(run)  # says so if this is no run at all
        raise RunError(f"{run}: has no pruned.safetensors, so the run is not finished. Go on with it: secateurs resume {run}")
    if model is not None:
        return file, Origin(model, data or "", model_options, data_options)
    if not run.is_dir():
        if not run.exists():
            raise RunError(f"{run}: does not exist. Wanted the folder of a run, or a pruned.safetensors.")
        raise InvalidInput(f"{run}: a file does not say how to build its network: give --model (and --model-option).")
    from secateurs.pruning.folder import read_provenance

    if data is not None or model_options or data_options:
        raise InvalidInput(f"{run} names its model and data itself: leave out --data, --model-option and --data-option.")
    origin = read_provenance(run).get("origin") or {}
    if "model" not in origin:
        raise RunError(
            f"{run}: was started from Python, so it does not say how to build its network. Give the class or function that "
            f"does: --model package.module:name (and --model-option; --data for real inputs to compare outputs on)."
        )
    return file, origin_of(origin, run)


def _networks(file: Path, origin: Origin) -> tuple[Graph, Any]:
    """The pruned network, and the one it was made from: with the weights it came with, where the run has kept them."""
    from secateurs.compaction.serialization import load

    if not is_pruned_file(file):
        raise ArtefactError(f"{file}: is not a network that secateurs has pruned and saved (a run's pruned.safetensors).")
    graph = load(fresh_model(origin), file)
    start = file.parent / "checkpoints" / "start.safetensors"
    original = build_model(replace(origin, weights=str(start) if start.is_file() else None))
    return graph, original.eval()


def _inputs(origin: Origin) -> Tensor | None:
    """The first test examples, or None where no data is named."""
    return load_data(origin).test.batch(slice(0, _EXAMPLES)).inputs if origin.data else None


def _print(found: list[Exported]) -> None:
    for one in found:
        say(f"{one.path}: {one.agreement.summary()}.")
    print_table(
        ("export", "unpruned", "pruned", "smaller", "batch", "runs in", "unpruned", "pruned", "speed"),
        [row for one in found for row in _rows(one)],
        left=(0, 5, 8),
    )
    say(f"In PyTorch, {found[0].alignment.summary()}.")


def _note(run: Path, told: list[dict[str, Any]]) -> None:
    """Let the run's report tell what was measured; a folder that nobody may write to stays as it is."""
    from secateurs.report import write_report
    from secateurs.report.exports import note_exports

    try:
        note_exports(run, told)
        write_report(run)
    except (OSError, RunError) as error:
        warn(f"the report of {run} does not tell of these exports: {error}")


def _advise(run: Path, told: list[dict[str, Any]]) -> None:
    """Say in words where pruning does not pay, as the report does, and where to read it."""
    from secateurs.report.exports import export_warnings, record_of

    for sentence in export_warnings([record_of(one) for one in told]):
        say(sentence)
    if (run / "report.html").is_file():
        say(f"The report: {run / 'report.html'}")


def _rows(one: Exported) -> list[tuple[str, ...]]:
    assert one.original_bytes is not None
    size = (f"{one.original_bytes:,} B", f"{one.bytes:,} B", f"{one.original_bytes / one.bytes:.2f}x")
    return [
        (
            *((one.kind, *size) if first else ("",) * 4),
            str(speed.batch),
            speed.runtime,
            f"{1e3 * speed.original:.3g} ms",
            f"{1e3 * speed.pruned:.3g} ms",
            speed.speedup.summary(),
        )
        for first, speed in ((n == 0, s) for n, s in enumerate(one.speeds))
    ]
