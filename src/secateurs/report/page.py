"""The page of one run: a template in assets/ filled with the run's figures."""

from __future__ import annotations

import shlex
from functools import cache
from importlib.metadata import version
from typing import Any

import tomli_w
from jinja2 import Environment, PackageLoader, StrictUndefined

from secateurs._util.format import SPACE, Metric, change, clock, count, interval, large, percent, plain, plural, removed, size
from secateurs.config import recipe_fields
from secateurs.report import charts, verdicts
from secateurs.report.exports import export_rows
from secateurs.report.load import RunReport

_SETS = {"train": "Training", "search": "Validation", "test": "Test"}


def render(template: str, title: str, **values: Any) -> str:
    """Fill a template of assets/: one HTML file that needs nothing else."""
    return _environment().get_template(template).render(title=title, version=version("secateurs"), **values)


@cache
def _environment() -> Environment:
    """Templates escape every text, and a name that they misspell is an error."""
    loader = PackageLoader("secateurs.report", "assets")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {write.__name__: write for write in (change, clock, count, large, percent, plain, plural, removed)}
    return found


def run_page(run: RunReport) -> str:
    """The report of one run."""
    provenance = run.provenance
    started = f"started {provenance['started'][:16].replace('T', ' ')}" if "started" in provenance else "start unknown"
    return render(
        "run.html",
        f"{run.model} on {run.data}, pruned",
        run=run,
        charts=charts,
        verdicts=verdicts,
        started=started,
        spread=_spread,
        large=large,
        size=size,
        loading=_loading(run),
        export_command=None if run.folder is None or run.end is None else _export_command(run),
        exports=export_rows(run.exports),
        origin=_origin(run),
        recipe_text="" if run.recipe is None else tomli_w.dumps(recipe_fields(run.recipe)),
    )


def _spread(metric: Metric, value: float, examples: int) -> str:
    """The interval of a metric that is a share of examples."""
    if not metric.share or not examples:
        return ""
    low, high = interval(value, examples)
    return f"95{SPACE}%: {percent(low)[:-2]} to {percent(high)}, n = {examples:,}"


def _export_command(run: RunReport) -> str:
    """With the model where the run does not know how the command line finds it: it was started from Python."""
    how = ""
    if run.provenance.get("origin", {}).get("model") is None:
        module, _, name = (run.class_path or "package.module.build").rpartition(".")
        how = " --model " + shlex.quote(f"{'package.module' if module in ('', '__main__') else module}:{name}")
    return f"secateurs export {shlex.quote(str(run.folder))}{how} --onnx --pt2 --source"


def _loading(run: RunReport) -> str:
    """Python that builds the original class and loads the smaller network into it."""
    given = run.provenance.get("origin", {})
    name, options = given.get("model"), given.get("model_options")
    arguments = [f"{key}={value!r}" for key, value in options.items()] if isinstance(options, dict) else []
    lines = ["import secateurs"]
    if name is None:
        lines += ["", f"model = {run.model}(...)  # built as it was before pruning; its weights do not matter"]
    elif ":" not in str(name):
        lines += ["from secateurs.models import resolve", "", f"model = resolve({', '.join([repr(name), *arguments])})"]
    else:
        module, _, function = str(name).partition(":")
        lines += [f"from {module} import {function}", "", f"model = {function}({', '.join(arguments)})"]
    return "\n".join([*lines, f"small = secateurs.load(model, {str(run.folder) + '/pruned.safetensors'!r}).module"])


def _origin(run: RunReport) -> list[tuple[str, Any]]:
    """Where the network came from; a value of None is not shown."""
    provenance = run.provenance
    model, data, origin = (provenance.get(name, {}) for name in ("model", "data", "origin"))
    return [
        ("Network", model.get("class")),
        ("Options", _listed(origin.get("model_options"))),
        ("Weights, SHA-256", model.get("weights_sha256")),
        ("Data", run.data),
        *((f"{_SETS.get(name, name)} set", f"{found['count']:,} examples") for name, found in data.get("sets", {}).items()),
        ("Data, SHA-256", data.get("sha256")),
        ("Loss", provenance.get("measures", {}).get("loss", "cross_entropy")),
        ("Metric", run.metric.name),
        ("Seed", provenance.get("seed")),
        ("Recipe, SHA-256", provenance.get("recipe_sha256")),
        ("Versions", _listed(provenance.get("versions"))),
        ("Machine", _listed(provenance.get("machine"))),
        ("Started", provenance.get("started")),
        ("Folder", run.folder),
    ]


def _listed(fields: Any) -> str | None:
    return ", ".join(f"{name} {value}" for name, value in fields.items()) or None if isinstance(fields, dict) else None
