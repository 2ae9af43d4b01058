"""Reports as files: the page of one run, and the page that compares several; templates in assets/ filled with their figures."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from secateurs._util import format as texts
from secateurs._util.files import write_text
from secateurs._util.format import NOTHING, MetricName, count
from secateurs.config import recipe_fields
from secateurs.errors import InvalidInput, RunError
from secateurs.report import charts, verdicts
from secateurs.report.exports import STAGE_COLUMNS, export_rows, int8_sentences, stage_rows
from secateurs.report.load import RunReport, read_run
from secateurs.report.svg import COLOURS, swatch

REPORT, COMPARISON = "report.html", "comparison.html"


def write_report(folders: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of a run, or the comparison of several, as one HTML file, and return its path.

    Without `out`, the report of one run goes into its folder, and a comparison to `comparison.html` in the current one. The
    file is written whole or not at all, and needs no network and no other files. Runs are only read, also while they run.
    """
    given = [folders] if isinstance(folders, str | Path) else list(folders)
    if not given:
        raise InvalidInput("folders: got none, wanted the folder of at least one run.")
    runs = [read_run(folder) for folder in given]
    text = _run_page(runs[0]) if len(runs) == 1 else _runs_page(runs)
    path = Path(out) if out is not None else Path(COMPARISON) if len(runs) > 1 else Path(given[0]) / REPORT
    try:
        write_text(path, text)
    except OSError as error:
        raise RunError(
            f"{path}: the report cannot be written ({error.strerror}). Choose another place with out (--out)."
        ) from error
    return path


def render(template: str, title: str, *, package: str = "secateurs.report", **values: Any) -> str:
    """Fill a template of a package's assets/, which may extend those here: one HTML file that needs nothing else."""
    return _environment(package).get_template(template).render(title=title, version=version("secateurs"), **values)


@cache
def _environment(package: str) -> Environment:
    """Templates escape every text, and a name that they misspell is an error."""
    loader = ChoiceLoader([PackageLoader("secateurs.report", "assets"), PackageLoader(package, "assets")])
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    written = ("change", "clock", "count", "large", "percent", "plain", "plural", "removed", "size")
    found.filters |= {name: getattr(texts, name) for name in written} | {"repr": repr, "quoted": shlex.quote}
    return found


def _run_page(run: RunReport) -> str:
    return render(
        "run.html",
        f"{run.model} on {run.data}, pruned",
        run=run,
        charts=charts,
        verdicts=verdicts,
        verdict=verdicts.verdict(run),
        interval=texts.interval,
        exports=export_rows(run.exports),
        int8=[
            {"sentences": int8_sentences(one.int8), "columns": STAGE_COLUMNS, "rows": stage_rows(one.int8)}
            for one in run.exports
            if one.int8 is not None
        ],
        recipe_text="" if run.recipe is None else tomli_w.dumps(recipe_fields(run.recipe)),
    )


def _runs_page(runs: Sequence[RunReport]) -> str:
    metrics = list(dict.fromkeys(run.metric for run in runs))
    finished = [(run, run.end.macs.removed, run.outcome.after) for run in runs if run.end and run.outcome]
    # runs of different metrics have no axis in common
    places = [[place for place, run in enumerate(runs) if run.metric == metric] for metric in metrics]
    layers = [{layer.name: layer for layer in run.layers} for run in runs]
    return render(
        "runs.html",
        f"{len(runs)} runs compared",
        runs=runs,
        metric=metrics[0] if len(metrics) == 1 else MetricName("metric"),
        most=max(finished, key=lambda one: one[1])[0] if finished else None,
        best=max(finished, key=lambda one: one[2])[0] if finished and len(metrics) == 1 else None,
        cautions=_cautions(runs),
        names=[swatch(place % COLOURS) + run.name for place, run in enumerate(runs)],
        verdict=verdicts.verdict,
        frontiers=[figure for some in places if (figure := charts.frontier([runs[place] for place in some], some))],
        widths=[
            [name, count(layer.filters), *(count(each[name].left) for each in layers)]
            for name, layer in layers[0].items()
            if all(name in each for each in layers)
        ],
        recipes=_recipe_differences(runs),
    )


def _cautions(runs: Sequence[RunReport]) -> list[str]:
    """Differences between the runs that make the comparison unfair, and what is wrong with each of them."""
    known = [(run.provenance.get("data", {}), run.provenance.get("model", {})) for run in runs]
    unfair = {
        "The runs saw different data or splits: compare their changes, not their accuracies.": [
            d.get("sha256") for d, _ in known
        ],
        "The runs started from different weights.": [model.get("weights_sha256") for _, model in known],
        "The runs were measured by different metrics.": [run.metric for run in runs],
    }
    found = [sentence for sentence, values in unfair.items() if len(set(values)) > 1]
    found += [f"{run.name} is not finished ({run.at}): its figures are of its last step." for run in runs if run.end is None]
    return found + [f"{run.name}: {note}" for run in runs for note in run.notes]


def _recipe_differences(runs: Sequence[RunReport]) -> list[list[str]]:
    """The fields that differ, with the value of each run; settings of training that all runs have one by one.

    A training that not all runs have is one field, or its settings would hide other differences.
    """
    recipes = [{} if run.recipe is None else recipe_fields(run.recipe) for run in runs]
    flat: list[dict[str, Any]] = [{} for _ in recipes]
    for recipe, shown in zip(recipes, flat, strict=True):
        for name, value in recipe.items():
            if not isinstance(value, Mapping):
                shown[name] = value
            elif all(isinstance(one.get(name), Mapping) for one in recipes):
                shown |= {f"{name}.{key}": one for key, one in value.items()}
            else:
                settings = [f"{key} {value[key]}" for key in ("epochs", "batch", "lr") if key in value]
                shown[name] = ", ".join(settings) or "as by default"
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [[name, *(str(one.get(name, NOTHING)) for one in flat)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]
