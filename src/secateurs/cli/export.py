"""`secateurs export`: a pruned network as ONNX in float32 or int8, as .pt2, as plain source, each checked and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from secateurs._util.terminal import print_json, print_table, say, warn
from secateurs.cli import inputs, trust
from secateurs.errors import ArtefactError, InvalidInput, RunError

if TYPE_CHECKING:
    from secateurs.export import Exported

_EXAMPLES = 64
_COLUMNS = ("export", "unpruned", "pruned", "largest difference", "batch", "runs in", "unpruned", "pruned", "speed")
_Choice = Annotated[bool, Parameter(negative="", show_default=False)]


def export(
    run: Path,
    *,
    onnx: _Choice = False,
    pt2: _Choice = False,
    source: _Choice = False,
    int8: _Choice = False,
    uncertified: _Choice = False,
    out: Annotated[Path | None, Parameter(show_default="the folder of the run or file")] = None,
    model: inputs.OptionalModelName = None,
    data: inputs.OptionalDataName = None,
    model_option: inputs.ModelOptions = (),
    data_option: inputs.DataOptions = (),
    pad_to: int = 1,
    tolerance: float = 1e-4,
    repeats: int = 30,
    as_json: inputs.Json = False,
) -> None:
    """Write a pruned network as files that run without secateurs.

    Every file is run in its own runtime and compared with the network before it is put in place. For comparison the unpruned
    network is exported too, then deleted: sizes and speeds are measured for both, at batches of 1 and 64, and added to the
    report of the run.

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
    int8
        Write model.int8.onnx: quantised for ONNX Runtime, calibrated on training images of the run, and certified on the
        images that certified its cuts.
    uncertified
        Write the int8 file also where nothing can be promised of it, if its drop is allowed by point estimate.
    out
        The folder to write to.
    model
        For a file, or a run started from Python: the network that was pruned, as in `secateurs prune`.
    data
        For a file: the data set whose test examples outputs are compared on. Default: random inputs.
    pad_to
        Pad the widths of layers to multiples of this with filters of zero weights, where the engine runs multiples faster:
        the outputs are the same.
    tolerance
        The largest difference allowed, as a share of the largest output.
    repeats
        Runs that speeds are measured on.
    """
    chosen = {"onnx": onnx, "pt2": pt2, "source": source}
    if not any(chosen.values()) and not int8:
        raise InvalidInput("wanted one or more of --onnx, --pt2, --source and --int8.")
    if int8 and not run.is_dir():
        raise InvalidInput(f"{run}: --int8 wants the folder of a run: the file is certified on the images of the run.")
    file = run / "pruned.safetensors" if run.is_dir() else run
    origin = _origin(run, file, model, data, model_option, data_option)

    from secateurs.compaction.serialization import load
    from secateurs.export import prepared, to_onnx, to_pt2, to_source
    from secateurs.graph.trace import trace

    if not inputs.is_pruned_file(file):
        raise ArtefactError(f"{file}: is not a network that secateurs has pruned and saved (a run's pruned.safetensors).")
    network = load(inputs.fresh_model(origin), file)
    start = file.parent / "checkpoints" / "start.safetensors"  # the original weights, if the run is there
    original = inputs.build_model(replace(origin, weights=str(start) if start.is_file() else None)).eval()
    examples = None
    if origin.data:
        data_set = inputs.load_data(origin)
        examples = (data_set.test or data_set.search).batch(slice(0, _EXAMPLES)).inputs
    pruned, unpruned = prepared(network, examples, pad_to), prepared(trace(original, network.example), examples)
    targets: dict[str, tuple[Callable[..., Exported], str]] = {
        "onnx": (to_onnx, "model.onnx"),
        "pt2": (to_pt2, "model.pt2"),
        "source": (to_source, ""),
    }
    found = [
        write(pruned, (out or file.parent) / name, original=unpruned, tolerance=tolerance, repeats=repeats)
        for kind, (write, name) in targets.items()
        if chosen[kind]
    ]
    if int8:
        found.append(_int8(run, origin, (out or run) / "model.int8.onnx", uncertified=uncertified))
    exports = [asdict(one) for one in found]
    if run.is_dir():
        _add_to_report(run, exports)
    if as_json:
        print_json({"network": str(file), "exports": exports})
    else:
        _print(run, found)


def _int8(run: Path, origin: inputs.Origin, path: Path, *, uncertified: bool) -> Exported:
    """The int8 file of a finished run, beside the unpruned network and both in float32."""
    from secateurs.api import resume
    from secateurs.data.drawn import has_drawn
    from secateurs.report.int8 import export_int8

    train, val, test = inputs.load_sources(origin) if origin.data else (None, None, None)
    if has_drawn(run) and val is None and train is not None:  # it keeps what it drew
        train, val, test = train.train, train.search, train.test
    resumed = resume(run, inputs.fresh_model(origin), train, val, test=test)
    try:
        return export_int8(resumed.finish(), path, uncertified=uncertified, compared=True)
    finally:
        resumed.close()


def _origin(
    run: Path, file: Path, model: str | None, data: str | None, model_option: tuple[str, ...], data_option: tuple[str, ...]
) -> inputs.Origin:
    """How to build the network and its data."""
    from secateurs.pruning.folder import read_provenance

    if run.is_dir():
        if not file.is_file():
            read_provenance(run)  # raises if this is not a run
            raise RunError(f"{run}: has no pruned.safetensors, so the run is not finished. {trust.resume_with(run)}")
        return trust.run_origin(run, trust.Repeated(model, data, model_option, data_option))
    if not run.exists():
        raise RunError(f"{run}: does not exist. Wanted the folder of a run, or a pruned.safetensors.")
    if model is None:
        raise InvalidInput(f"{run}: a file does not say how to build its network: give --model (and --model-option).")
    return inputs.named_origin(model, data or "", model_option, data_option)


def _add_to_report(run: Path, exports: list[dict[str, Any]]) -> None:
    """Add the measurements to the report of the run; a folder that is not writable gives a warning."""
    from secateurs.report import write_report
    from secateurs.report.exports import note_exports

    try:
        note_exports(run, exports)
        write_report(run)
    except (OSError, RunError) as error:
        warn(f"the report of {run} does not show these exports: {error}")


def _print(run: Path, found: list[Exported]) -> None:
    """Print agreement, sizes and speeds, and where pruning does not pay."""
    from secateurs.report.exports import STAGE_COLUMNS, export_rows, export_warnings, int8_sentences, stage_rows

    for one in found:
        say(f"{one.path}: {one.agreement.summary()}.")
    print_table(_COLUMNS, export_rows(found), left=(0, 5, 8))
    for figures in (one.int8 for one in found if one.int8 is not None):
        print_table(STAGE_COLUMNS, stage_rows(figures), left=(0,))
        for sentence in int8_sentences(figures):
            say(sentence)
    say(f"In PyTorch, {found[0].alignment.summary()}.")
    for sentence in export_warnings(found):
        say(sentence)
    if (run / "report.html").is_file():
        say(f"Report: {run / 'report.html'}")
