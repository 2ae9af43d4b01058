"""The last sections: how to load and export the network, and where it came from, to the digest."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from secateurs.report.charts.figure import Child, Html, el
from secateurs.report.exports import exports_table
from secateurs.report.records import RunRecord
from secateurs.report.widgets import code, facts, section

_MEASURED = (
    "What has been exported, each beside the unpruned network's export, run in turns; intervals are 95\N{NO-BREAK SPACE}%."
)


def how_to_use(run: RunRecord) -> Html | None:
    """Lines that load the smaller network in Python and export it; None while there is none."""
    if run.folder is None or run.end is None:
        return None
    named = isinstance(_fields(run.provenance.get("origin")).get("model"), str)
    how = "" if named else f" --model {_importable(run)}"
    export = f"secateurs export {shlex.quote(str(run.folder))}{how} --onnx --pt2 --source"
    lead = "The smaller network is one file with weights and plan. Exports need no secateurs to run."
    shown = exports_table(run.exports)
    measured = None if shown is None else el("p", _MEASURED, class_="after")
    return section("use", "Load and export", lead, code("\n".join(_loading(run))), code(export), measured, shown)


def origin(run: RunRecord) -> Html:
    """Recipe, versions, seeds and digests."""
    provenance = run.provenance
    model, data = _fields(provenance.get("model")), _fields(provenance.get("data"))
    sets = {name: _fields(found) for name, found in _fields(data.get("sets")).items()}
    known: list[tuple[str, Child]] = [
        ("Network", model.get("class")),
        ("Options", _listed(_fields(provenance.get("origin")).get("model_options"))),
        ("Weights, SHA-256", _digest(model.get("weights_sha256"))),
        ("Data", run.data),
        *((f"{name.capitalize()} set", f"{found.get('count', 0):,} examples") for name, found in sets.items()),
        ("Data, SHA-256", _digest(data.get("sha256"))),
        ("Loss", run.loss_name),
        ("Metric", run.metric.name),
        ("Seed", _text(provenance.get("seed"))),
        ("Recipe, SHA-256", _digest(provenance.get("recipe_sha256"))),
        ("Versions", _listed(provenance.get("versions"))),
        ("Machine", _listed(provenance.get("machine"))),
        ("Started", _text(provenance.get("started"))),
        ("Folder", None if run.folder is None else str(run.folder)),
    ]
    lead = "The same recipe, weights, data and versions give the same network."
    recipe = None
    if run.recipe_text:
        recipe = el("details", el("summary", "The whole recipe"), code(run.recipe_text), class_="more")
    return section("origin", "Recipe and origin", lead, facts(known, "keys"), recipe)


def _loading(run: RunRecord) -> list[str]:
    """Python that builds the original class and loads the smaller network onto it."""
    given = _fields(run.provenance.get("origin"))
    name, options = given.get("model"), _fields(given.get("model_options"))
    lines = ["import secateurs"]
    if isinstance(name, str) and ":" not in name:
        arguments = "".join(f", {key}={value!r}" for key, value in options.items())
        lines += ["from secateurs.models import resolve", "", f"model = resolve({name!r}{arguments})"]
    elif isinstance(name, str):
        module, _, function = name.partition(":")
        arguments = ", ".join(f"{key}={value!r}" for key, value in options.items())
        lines += [f"from {module} import {function}", "", f"model = {function}({arguments})"]
    else:
        lines += ["", f"model = {run.model}(...)  # built as it was before pruning; its weights do not matter"]
    return [*lines, f"small = secateurs.load(model, {str(run.folder) + '/pruned.safetensors'!r}).module"]


def _importable(run: RunRecord) -> str:
    """Where the command line would find the class of a run that was started from Python."""
    module, _, name = str(_fields(run.provenance.get("model")).get("class", "package.module.build")).rpartition(".")
    return shlex.quote(f"{'package.module' if module in ('', '__main__') else module}:{name}")


def _fields(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> str | None:
    return ", ".join(f"{name} {one}" for name, one in _fields(value).items()) or None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _digest(value: Any) -> Html | None:
    return None if value is None else el("code", str(value))
