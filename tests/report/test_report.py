"""Reports: the page says what the journal says, names of users are escaped, broken folders give a partial page or an error."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nets import random_keep, seeded
from secateurs._util.format import SPACE, MetricName, clock, interval, large
from secateurs._util.journal import read_lines
from secateurs._util.tensors import dump, parse
from secateurs.api import Pruner
from secateurs.cli import execute
from secateurs.compaction import compact
from secateurs.config import Recipe, TrainSettings
from secateurs.errors import InvalidInput, RunError, UnknownSite
from secateurs.graph.sites import find_sites
from secateurs.graph.structure import describe, nodes_from
from secateurs.graph.trace import trace
from secateurs.models import build
from secateurs.pruning.figures import KINDS, ResultFigures
from secateurs.pruning.results import ChosenAllocation, SiteCurve, SiteCut, SiteOrder, Start, Step
from secateurs.report import charts, plots, read_run, where_it_stands, write_report
from secateurs.report.charts import accuracy, agreement, best, importances
from secateurs.report.exports import note_exports
from secateurs.report.load import Measured, SiteImportances
from secateurs.report.svg import Figure, el, ticks
from secateurs.report.verdicts import run_warnings, step_warnings, verdict
from secateurs.speed.nodes import aligning_share
from secateurs.training import EpochRecord
from torture.journals import entries_of, write_entries
from torture.runs import few_digits

NASTY = '<script>alert("x")</script>&\'"'


def digits_pruner(folder: Path | None, **recipe: Any) -> Pruner:
    """A narrow ResNet to be pruned on a few digits by the paper's recipe, with other fields of it as given."""
    torch.manual_seed(0)
    model = build("resnet8", in_channels=1, widths=(4, 6, 8))
    fields: dict[str, Any] = {"max_drop": 0.05, "shortcut": "after", "masks_per_filter": 6, "scoring_examples": 32}
    asked = Recipe.paper(**{**fields, "finetune": TrainSettings(epochs=1, batch=48, lr=0.02), **recipe})
    origin = {"model": "resnet8", "model_options": {"in_channels": 1}}
    return Pruner(model, few_digits(96), recipe=asked, folder=folder, origin=origin)


def digits_run(folder: Path) -> Path:
    """The folder of a finished run."""
    digits_pruner(folder).finish()
    return folder


def rewrite(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    write_entries(folder, change(entries_of(folder)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


class Page(HTMLParser):
    """Checks that tags are balanced, and notes tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words += data.replace("\N{NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-")


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text())


def test_the_page_needs_nothing_else_and_says_what_the_journal_says(finished: Path, tmp_path: Path) -> None:
    path = write_report(finished, tmp_path / "deep" / "page.html")
    page = Page(path.read_text())
    assert path.stat().st_size < 300_000
    links = [
        value for _, given in page.tags for name, value in given.items() if name in ("src", "href", "xlink:href", "action")
    ]
    assert all(value is not None and value.startswith(("#", "data:,")) for value in links)
    assert not re.search(r"url\(|@import|https?://", path.read_text())
    end = next(entry for entry in entries_of(finished) if entry["unit"] == "end")
    assert f"{100 * end['test']['after']:.2f} %" in page.words
    assert f"{100 * (1 - end['macs']['after'] / end['macs']['before']):.1f} % of the MACs" in page.words
    assert "Allowed drop kept" in page.words
    speed = end["latency"]
    shown, times = "".join(page.words.splitlines()), [f"{1e3 * speed[name]:.3g} ms" for name in ("original", "pruned")]
    assert f"{speed['speedup']:.2f}×batch {speed['batch']}, PyTorch, eager: {' → '.join(times)}, " in shown
    assert f"({speed['low']:.2f} to {speed['high']:.2f})" in shown
    assert [other["batch"] for other in end["speeds"]] == [1]
    assert "batch 1, PyTorch, eager: " in shown
    for layer in end["layer_times"][:3]:
        assert f"{layer['name']}{1e3 * layer['before']:.3g} ms" in shown
    before, after = end["classes"]["before"], end["classes"]["after"]
    lost = min(range(10), key=lambda place: after[place] - before[place])
    points = 100 * (after[lost] - before[lost])
    assert points < 0
    shares = f"{100 * before[lost]:.2f} % → {100 * after[lost]:.2f} %"
    assert f"Class “{end['classes']['names'][lost]}” lost most: {shares} ({points:.2f} points)" in page.words
    for word in ("resnet8 on digits", "max_drop = 0.05", "secateurs export", end["stopped"]):
        assert word in page.words
    steps = [entry for entry in entries_of(finished) if entry["unit"] == "step"]
    figures = [given for tag, given in page.tags if tag == "svg" and given.get("role") == "img"]
    assert len(figures) == 4 + 3 * len(steps)
    bars = [given["data-tips"] for tag, given in page.tags if tag == "rect" and "data-tips" in given]
    assert [len(tips.split("|")) for tips in bars if tips and tips.startswith("filter")] == [s["channels"] for s in steps]
    assert [tips.count("removed") for tips in bars if tips and tips.startswith("filter")] == [len(s["removed"]) for s in steps]


def test_the_command_writes_into_the_run_folder_and_prints_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert execute(["report", str(folder / "nowhere")]) == 1
    assert "not the folder of a run" in capsys.readouterr().err


def test_every_figure_is_an_object_that_notebooks_show(finished: Path) -> None:
    shown = plots(finished)
    site = shown.run.steps[0].site
    for figure in (
        *(shown.importances(site), shown.accuracy(site), shown.agreement(site)),
        *(shown.widths(), shown.timeline(), shown.frontier(), shown.classes()),
    ):
        root = ElementTree.fromstring(figure.svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "nan" not in figure.body
        assert figure._repr_svg_() == figure._repr_html_() == figure.svg
    with pytest.raises(UnknownSite, match="Did you mean 'conv1'"):
        shown.importances("conv")


def test_a_run_in_memory_has_figures_too(finished: Path) -> None:
    in_memory = digits_pruner(None)
    in_memory.finish()
    shown, kept = in_memory.plot, plots(finished)
    assert shown.timeline().body == kept.timeline().body
    assert shown.importances("conv1").body == kept.importances("conv1").body  # the first site: no filter was removed before
    with pytest.raises(InvalidInput, match="weights at the start"):
        shown.widths()


def test_importances_and_predicted_scores_are_those_of_least_squares(finished: Path) -> None:
    found = read_run(finished).importances[1]
    tensors, _ = parse((finished / "ensembles" / "0001.safetensors").read_bytes())
    # outside the code: least squares by torch, on centred masks
    masks, losses = tensors["masks"].double(), tensors["losses"].double()
    z = masks - masks.mean(0)
    s = (losses.max() - losses) / (losses.max() - losses.min())
    expected = torch.linalg.lstsq(z, (s - s.mean())[:, None], driver="gelsd").solution[:, 0]
    torch.testing.assert_close(torch.tensor(found.coef, dtype=torch.float64), expected, rtol=0, atol=1e-8)
    predicted, measured = torch.tensor(found.agreement, dtype=torch.float64).T
    torch.testing.assert_close(measured, s, rtol=0, atol=1e-12)  # few masks: all of them are shown
    torch.testing.assert_close(predicted, z @ expected + s.mean(), rtol=0, atol=1e-8)


def test_slopes_predict_the_rise_of_the_loss(tmp_path: Path) -> None:
    digits_pruner(tmp_path / "run", sites=("conv1",), estimator="gradient", max_drop=0.5, finetune=None).finish()
    run = read_run(tmp_path / "run")
    tensors, _ = parse((tmp_path / "run" / "ensembles" / "0001.safetensors").read_bytes())
    removed = list(run.steps[0].removed)
    assert removed  # the first site: ids are positions
    predicted = run.loss_rise(run.steps[0])[0]
    assert predicted == pytest.approx(float(tensors["coef"][removed].sum()))
    assert "loss rise predicted" in page_of(tmp_path / "run").words


def test_names_of_users_are_shown_and_never_run(folder: Path) -> None:
    def named(entry: dict[str, Any]) -> dict[str, Any]:
        if entry["unit"] == "end":
            return {**entry, "classes": {**entry["classes"], "names": [NASTY] * 10}}
        return {**entry, "site": NASTY, "note": NASTY} if entry["unit"] == "step" else entry

    rewrite(folder, lambda entries: [named(entry) for entry in entries])
    provenance = json.loads((folder / "provenance.json").read_text())
    provenance["origin"]["model"] = provenance["data"]["name"] = NASTY
    provenance["measures"] = {"metric": f"dice{NASTY}", "loss": f"focal{NASTY}"}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    text = write_report(folder).read_text()
    page = Page(text)
    assert text.count("<script>") == 1
    assert f"{NASTY} on {NASTY}" in page.words
    assert f"Test dice{NASTY}" in page.words
    assert f"are removed. dice{NASTY} on the test set" in page.words  # not even a capital is added
    assert f"focal{NASTY}" in page.words
    assert "points" not in page.words  # a metric of the user's own is no share of examples
    comparison = Page(write_report([folder, folder], folder / "both.html").read_text())
    assert NASTY in comparison.words


def test_a_run_that_stopped_says_so(folder: Path) -> None:
    def until_second_step(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return entries[: next(n for n, e in enumerate(entries) if e["unit"] == "step" and e["number"] == 2)]

    rewrite(folder, until_second_step)
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"unit": "ep')  # cut short by a crash
    page = page_of(folder)
    assert "The run is not finished (fine-tuning after the cut of step 2, 1 epoch done)" in page.words
    assert f"secateurs resume {folder}" in page.words
    assert "So far" in page.words


def test_damaged_parts_are_left_out_and_named(folder: Path) -> None:
    (folder / "provenance.json").write_text("{")
    (folder / "recipe.toml").unlink()
    (folder / "ensembles" / "0001.safetensors").write_bytes(b"no")
    (folder / "checkpoints" / "start.safetensors").write_bytes(b"no")
    lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    (folder / "journal.jsonl").write_text("".join([*lines[:-1], "garbage\n", lines[-1]]))
    words = page_of(folder).words
    for part in ("provenance.json: damaged", "recipe.toml: cannot be read", "ensembles/0001.safetensors: damaged"):
        assert part in words
    assert "checkpoints/start.safetensors: cannot be read" in words
    assert f"journal.jsonl, line {len(lines)}: damaged" in words
    assert "Allowed drop not known" in words
    assert "a network on data" in words


@pytest.mark.parametrize(
    ("unit", "field", "value"),
    [
        ("start", "accuracy", "high"),
        ("step", "number", {}),
        ("step", "evaluated", 7),
        ("end", "test", None),
        ("end", "seconds", "x"),
    ],
)
def test_a_field_of_the_wrong_type_ends_what_is_shown_of_the_journal(folder: Path, unit: str, field: str, value: Any) -> None:
    rewrite(folder, lambda entries: [{**e, field: value} if e["unit"] == unit else e for e in entries])
    assert re.search(rf"line \d+: damaged \('{unit}': .*{field}", page_of(folder).words)


def test_a_smaller_network_of_another_run_is_named(folder: Path) -> None:
    (folder / "pruned.safetensors").write_bytes((folder / "checkpoints" / "start.safetensors").read_bytes())
    assert "pruned.safetensors: damaged, or not the file that the journal relies on" in page_of(folder).words


def test_an_empty_journal_gives_a_page_and_no_journal_an_error(folder: Path, tmp_path: Path) -> None:
    (folder / "journal.jsonl").write_text("")
    assert "nothing has been measured yet" in page_of(folder).words
    with pytest.raises(RunError, match=r"no journal\.jsonl"):
        write_report(tmp_path / "elsewhere")
    (folder / "training.json").write_text("{}")
    with pytest.raises(RunError, match="folder of a training"):
        write_report(folder)
    with pytest.raises(InvalidInput, match="at least one run"):
        write_report([])


@pytest.mark.parametrize(("drop", "kept"), [(0.05, True), (0.0500001, False), (-0.01, True)])
def test_the_verdict_compares_the_worst_cut_with_what_was_allowed(folder: Path, drop: float, kept: bool) -> None:
    def cost(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "baseline": 0.9, "accuracy_cut": 0.9 - drop} if entry["unit"] == "step" else entry

    rewrite(folder, lambda entries: [cost(entry) for entry in entries])
    assert verdict(read_run(folder)).kept is kept
    assert ("Allowed drop kept" if kept else "Allowed drop exceeded") in page_of(folder).words


@pytest.fixture(scope="module")
def allocated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose cuts were allocated to all sites together, ranked by a criterion that gives orders and no importances."""
    folder = tmp_path_factory.mktemp("allocated") / "run"
    torch.manual_seed(0)
    asked = Recipe.fast(
        max_drop=0.2,
        confidence=0.6,
        allocation="global",
        criterion="obs",
        repair="least-squares",
        repair_examples=32,
        sites=("layer3.*",),
    )
    model = build("resnet8", in_channels=1, widths=(4, 6, 8))
    Pruner(model, few_digits(200, 200), recipe=asked, folder=folder).finish()
    return folder


def test_the_verdict_on_an_allocation_counts_all_its_cuts_together(allocated: Path, tmp_path: Path) -> None:
    entry = next(entry for entry in entries_of(allocated) if entry["unit"] == "division")
    page = page_of(allocated)
    assert "damaged" not in page.words
    assert "How the cuts were allocated" in page.words
    assert f"made and measured as whole networks: {len(entry['tried'])}." in page.words
    bound = f"all cuts together cost at most {100 * entry['bound']:.2f} points on new images of the same kind"
    assert f"{bound} (certified on {entry['images']:,} images" in page.words
    start, last = (next(e for e in reversed(entries_of(allocated)) if e["unit"] == unit) for unit in ("start", "step"))
    drop = 100 * (start["accuracy"] - last["accuracy_cut"])
    assert (
        f"was {abs(drop):.2f} points {'higher' if drop < 0 else 'lower'} than the baseline; 20.00 points were allowed"
        in page.words
    )
    folder = Path(shutil.copytree(allocated, tmp_path / "run"))
    beyond = {"division": {"bound": 0.21}, "end": {"test": {"before": 0.9, "after": 0.6, "count": 200}}}
    rewrite(folder, lambda entries: [{**e, **beyond.get(e["unit"], {})} for e in entries])
    assert verdict(read_run(folder)).kept is False
    assert "The loss on the test set is larger than the allowed drop" in page_of(folder).words


def test_every_site_of_an_allocation_has_a_figure_and_no_axis_goes_beyond_the_whole_network(
    allocated: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(allocated, tmp_path / "run"))
    wide = {"frontier": [[0.0, 0.0], [0.5, 0.1], [0.9, 0.3], [1.6, 0.9]], "tried": [[1.6, 0.4, False], [0.5, 0.9, True]]}
    beyond = {"division": {**wide, "saved": 0.9}, "end": {"macs": {"before": 100, "after": 20}}}
    rewrite(folder, lambda entries: [{**e, **beyond.get(e["unit"], {})} for e in entries])
    page = page_of(folder)
    titles = [(given["aria-label"] or "").split(".")[0] for tag, given in page.tags if tag == "svg" and "aria-label" in given]
    steps = [entry for entry in entries_of(folder) if entry["unit"] == "step"]
    assert titles.count("Loss against filters removed") == len(steps) > 0
    assert "Predicted loss against time removed" in titles
    figure = charts.allocation(read_run(folder))
    assert figure is not None
    drawn = ElementTree.fromstring(f"<g>{figure.body}</g>")
    ticks = [(node.text or "").split(SPACE)[0] for node in drawn.iter("text") if "tick middle" in node.get("class", "")]
    assert 50 < max(map(float, ticks)) <= 100


def test_without_a_test_set_the_page_speaks_of_the_validation_set_in_the_users_metric(tmp_path: Path) -> None:
    def score(model: torch.nn.Module) -> float:
        return 3.5 + 0.01 * model.eval()(torch.ones(1, 1, 8, 8)).max().item()

    torch.manual_seed(0)
    model, data = build("resnet8", in_channels=1, widths=(4, 6, 8)), replace(few_digits(96), test=None)
    asked = Recipe.paper(max_drop=0.5, sites=("conv1",), masks_per_filter=4, scoring_examples=32, finetune=None)
    Pruner(model, data, recipe=asked, folder=tmp_path / "run", evaluate=score).finish()
    end = next(entry for entry in entries_of(tmp_path / "run") if entry["unit"] == "end")
    words = " ".join(page_of(tmp_path / "run").words.split())
    before, after = (f"{end['search'][when]:.4g}" for when in ("before", "after"))
    assert f"score on the validation set went from {before} to {after}." in words
    assert f"Validation score{before} → {after}" in words
    assert "no test set was given" in words
    assert "Promisenone" in words
    assert "points" not in words


def test_the_parts_of_the_time_are_those_of_the_run_and_add_up(folder: Path) -> None:
    end = next(entry for entry in entries_of(folder) if entry["unit"] == "end")
    assert sum(seconds for _, seconds in end["phases"]) == pytest.approx(end["seconds"], abs=1e-3)
    known = {"phases": [("rank", 4.0), ("measure", 2.5)], "seconds": 6.5}
    rewrite(folder, lambda entries: [{**e, **known} if e["unit"] == "end" else e for e in entries])
    assert "time 6.5 s: rank 4.0 s, measure 2.5 s" in page_of(folder).words


def test_bad_fits_are_named(finished: Path) -> None:
    run = read_run(finished)
    assert run.recipe is not None
    for r2, word in ((-0.1, "worse than their mean"), (0.1, "only 10"), (0.4, "fits badly")):
        assert word in " ".join(step_warnings(step(r2=r2), run))
    assert "score more masks" in " ".join(step_warnings(step(split_half=0.3), run))
    assert step_warnings(step(), run) == ()
    slopes = replace(run, recipe=replace(run.recipe, estimator="gradient"))  # r² of single examples' losses: always low
    assert step_warnings(step(r2=0.1), slopes) == ()
    assert "worse than their mean" in " ".join(step_warnings(step(r2=-0.1), slopes))
    assert run.end is not None
    low, high = interval(run.end.test.after, run.end.test.count)
    uncertain = 0 < abs(run.end.test.change) < (high - low) / 2
    assert ("smaller than the uncertainty" in " ".join(run_warnings(run))) == uncertain


def test_several_runs_are_compared(finished: Path, folder: Path) -> None:
    provenance = json.loads((folder / "provenance.json").read_text())
    provenance["data"]["sha256"] = "other"
    (folder / "provenance.json").write_text(json.dumps(provenance))
    (folder / "recipe.toml").write_text((folder / "recipe.toml").read_text().replace("max_drop = 0.05", "max_drop = 0.01"))
    page = Page(write_report([finished, folder], folder / "both.html").read_text())
    assert "2 runs compared" in page.words
    assert "different data or splits" in page.words
    assert "max_drop0.050.01" in page.words
    assert "finetune.epochs" not in page.words  # the same in both


def test_runs_of_different_metrics_share_no_axis_and_a_training_that_some_lack_is_one_line(
    finished: Path, folder: Path
) -> None:
    provenance = json.loads((folder / "provenance.json").read_text())
    provenance["measures"] = {"metric": "iou", "loss": "focal"}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    recipe = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(recipe[: recipe.index("[finetune]")])
    page = Page(write_report([finished, folder, finished], folder / "both.html").read_text())
    titles = [given["aria-label"] or "" for tag, given in page.tags if tag == "svg" and "aria-label" in given]
    assert [title.split(".")[0] for title in titles] == ["Accuracy against MACs", "iou against MACs"]
    assert "leads in both" not in page.words
    assert "finetuneepochs 1, batch 48, lr 0.02–epochs 1" in page.words


def test_the_loss_that_a_cut_adds_is_shown_as_predicted_and_as_measured(finished: Path) -> None:
    by_slopes = SiteImportances((4, 5, 6, 7), (0.5, 0.25, -1.0, 2.0), (), of_loss=True)
    assert by_slopes.predicted_rise((4, 6)) == 0.5 - 1.0
    assert replace(by_slopes, of_loss=False).predicted_rise((4,)) is None
    assert by_slopes.predicted_rise(()) is None
    run = read_run(finished)
    losses = {step.number: run.loss_rise(step)[1] for step in run.steps}
    steps = [entry for entry in entries_of(finished) if entry["unit"] == "step"]
    before = next(entry["loss"] for entry in entries_of(finished) if entry["unit"] == "start")
    for entry in steps:
        assert losses[entry["number"]] == (pytest.approx(entry["loss_cut"] - before) if entry["removed"] else None)
        before = entry["loss"]
    assert any(entry["removed"] for entry in steps)
    assert "loss rise measured" in page_of(finished).words


@pytest.mark.parametrize(("aligning", "said"), [(0.3, True), (0.2, False)])
def test_where_aligning_takes_more_than_pruning_saves_the_page_says_so(folder: Path, aligning: float, said: bool) -> None:
    """1.25 times faster saves a quarter of the pruned network's time."""
    speed = {"speedup": 1.25, "low": 1.2, "high": 1.3, "batch": 64, "aligning": aligning}
    rewrite(folder, lambda entries: [{**e, "latency": speed} if e["unit"] == "end" else e for e in entries])
    words = page_of(folder).words
    assert f"{100 * aligning:.1f} % of the time aligns channels" in words
    assert ("more than pruning saves" in words) == said


def export_fields(kind: str, pruned: float, *, share: float = 0.0) -> dict[str, Any]:
    """An export that takes `pruned` seconds where the unpruned one takes 1, as the command keeps it."""
    ratio = {"ratio": 1 / pruned, "low": 0.9 / pruned, "high": 1.1 / pruned}
    speed = {"original": 1.0, "pruned": pruned, "speedup": ratio, "runtime": "PyTorch" if kind == "source" else "ONNX Runtime"}
    return {
        "kind": kind,
        "path": Path("somewhere"),
        "bytes": 1000,
        "original_bytes": 2500,
        "agreement": {"difference": 3e-6, "scale": 12.0, "examples": 64, "given": True},
        "alignment": {"gathers": 1, "slices": 2, "share": share, "batch": 64},
        "speeds": [{"batch": batch, "threads": 1, **speed} for batch in (1, 64)],
    }


def test_the_page_shows_exports_and_where_they_gain_nothing(folder: Path) -> None:
    # the run's own speed varies with the machine, and may add a warning
    rewrite(folder, lambda entries: [{**e, "latency": None} if e["unit"] == "end" else e for e in entries])
    assert "Exports so far" not in page_of(folder).words
    note_exports(folder, [export_fields("onnx", 2.0)])
    note_exports(folder, [export_fields("source", 0.5, share=0.9)])
    words = page_of(folder).words
    assert "ONNX2.5 kB1 kB3e-06 of 1264ONNX Runtime1e+03 ms2e+03 ms2.00x slower (1.82 to 2.22)" in words
    assert "In ONNX Runtime the exported network is slower than the unpruned one: 2.00x slower" in words
    assert "prune with --engine onnxruntime, or export with --pad-to 8 or 16." in words
    assert "more than pruning saves" not in words  # 0.9 of 0.5 s, where 0.5 s are saved
    note_exports(folder, [export_fields("source", 0.5, share=1.0), export_fields("onnx", 0.5)])
    assert "more than pruning saves" not in page_of(folder).words
    note_exports(folder, [export_fields("source", 0.6, share=0.7)])  # 0.42 s, where 0.4 s are saved
    words = page_of(folder).words
    assert "Aligning channels takes 70.0 % of the pruned network's time in PyTorch, more than pruning saves" in words
    assert "the exported network is slower" not in words
    (folder / "exports.json").write_text('{"exports": [{"kind": "onnx"}]}')
    assert "exports.json: damaged" in page_of(folder).words


def test_the_share_of_aligning_is_measured() -> None:
    graph = trace(build("resnet8-b").eval(), torch.zeros(2, 3, 32, 32))
    assert aligning_share(graph, torch.zeros(2, 3, 32, 32)) == 0.0
    cut = compact(graph, random_keep(find_sites(graph), seed=0))
    for examples in (2, 64):  # few and many values a channel: a narrow term is widened, or added in place
        assert 0 < aligning_share(cut, torch.zeros(examples, 3, 32, 32)) < 1


def test_a_run_started_from_python_says_how_the_command_line_finds_its_class(folder: Path) -> None:
    provenance = json.loads((folder / "provenance.json").read_text())
    del provenance["origin"]
    (folder / "provenance.json").write_text(json.dumps(provenance))
    assert "--model secateurs.models.resnet:ResNet --onnx --pt2 --source" in page_of(folder).words


def test_ticks_of_a_narrow_axis_differ(folder: Path) -> None:
    rewrite(folder, lambda entries: [{**e, "macs_removed": e["number"] / 1000} if e["unit"] == "step" else e for e in entries])
    rewrite(folder, lambda entries: [e for e in entries if e["unit"] != "end"])
    drawn = ElementTree.fromstring(plots(folder).frontier().svg)
    ticks = [node.text for node in drawn.iter() if "tick middle" in node.get("class", "")]
    assert len(set(ticks)) == len(ticks) > 2


def test_resnet20_is_described_as_the_paper_counts_it() -> None:
    nodes = nodes_from(describe(trace(build("resnet20"), torch.zeros(1, 3, 32, 32))))
    layers = [node for node in nodes if node.is_layer]
    assert sum(node.filters for node in layers[:-1]) == 688  # Table 2
    assert sum(node.macs for node in layers) == 40_551_040
    joins = [node for node in nodes if node.kind == "join"]
    assert [len(node.sources) for node in joins] == [2] * 9
    assert nodes_from({"nodes": [{"odd": 1}]}) == ()


def test_55_sites_stay_under_a_megabyte(folder: Path) -> None:
    entries = entries_of(folder)
    widths = [16] * 19 + [32] * 18 + [64] * 18  # ResNet-56
    generator = seeded(0)
    made = []
    for number, width in enumerate(widths, 1):
        masks = torch.rand(10 * width, width, generator=generator) > 0.3
        tensors = {"masks": masks, "losses": torch.rand(10 * width, generator=generator)}
        header = {"meta": json.dumps({"site": "s", "original": list(range(width))})}
        (folder / f"ensembles/{number:04d}.safetensors").write_bytes(dump(tensors, header))
        like = next(e for e in entries if e["unit"] == "step")
        tried = [[m, 0.9 - m / 100] for m in range(0, width, max(width // 8, 1))]
        made += [{"unit": "epoch", "step": number, "phase": "finetune", "epoch": k, "search_accuracy": 0.9} for k in range(10)]
        fields = {"number": number, "site": f"layer.{number}", "channels": width, "removed": list(range(width // 2))}
        made.append({**like, **fields, "evaluated": tried})
    rewrite(folder, lambda entries: [*(e for e in entries if e["unit"] not in ("step", "cut", "epoch")), *made])
    assert write_report(folder).stat().st_size < 1_000_000


def step(*, r2: float = 0.9, split_half: float = 0.9, **fields: Any) -> Step:
    known: dict[str, Any] = {
        **{"number": 1, "round": 0, "site": "conv1", "channels": 4, "removed": (2,), "baseline": 0.9, "loss": 1.0},
        **{"accuracy_before": 0.9, "accuracy_cut": 0.89, "accuracy": 0.9, "parameters_removed": 0.1, "macs_removed": 0.1},
        **{"evaluated": ((1, 0.89),), "masks": 40, "seconds": 1.0, "criterion": "", "note": "", "examples": 1, "compared": ()},
        **{"bound": None, "images": 0, "by_estimate": None, "refused": (), "answers": (), "repaired": None},
        **{"loss_cut": None, "loss_before": 1.0},
    }
    return Step(**{**known, **fields}, r2_held_out=r2, split_half=split_half)


numbers = st.floats(-1e6, 1e6) | st.floats(-1e-9, 1e-9) | st.sampled_from([math.inf, math.nan])


@given(
    coef=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6),
    error=numbers,
    tried=st.lists(st.tuples(st.integers(1, 5), st.floats(0, 1)), min_size=1, max_size=5),
)
@settings(deadline=None, max_examples=60)
def test_any_numbers_draw_well_formed_figures(coef: list[float], error: float, tried: list[tuple[int, float]]) -> None:
    found = SiteImportances(tuple(range(len(coef))), tuple(coef), (error,) * len(coef), tuple((c, c) for c in coef))
    drawn = step(evaluated=tuple(tried))
    for figure in (importances(drawn, found), accuracy(drawn, MetricName(), 0.01), agreement(drawn, found)):
        assert figure is not None
        root = ElementTree.fromstring(figure.svg)
        for shape in root.iter():
            for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
                if name in shape.attrib:
                    assert math.isfinite(float(shape.attrib[name]))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
@settings(deadline=None, max_examples=40)
def test_nothing_beats_the_frontier_and_something_on_it_beats_the_rest(pairs: list[tuple[float, float]]) -> None:
    points = [Measured(m, a, str(k)) for k, (m, a) in enumerate(pairs)]
    front = best(points)
    assert front
    for p in points:
        better = [q for q in front if q.macs_removed >= p.macs_removed and q.accuracy >= p.accuracy]
        assert better
        if p in front:
            assert all((q.macs_removed, q.accuracy) == (p.macs_removed, p.accuracy) for q in better)


def test_numbers_are_written_as_people_read_them() -> None:
    low, high = interval(0.5, 100)  # Wilson 1927, worked in many textbooks: 0.404 to 0.596
    assert (round(low, 3), round(high, 3)) == (0.404, 0.596)
    assert interval(1.0, 10)[1] == 1.0
    written = [
        clock(32.43),
        clock(185),
        clock(7380),
        large(40_551_040),
        large(999),
        large(116_790),
        MetricName().change(-0.006),
    ]
    expected = ["32.4 s", "3 min 05 s", "2 h 03 min", "40.6 M", "999", "117 k", "\N{MINUS SIGN}0.60 points"]
    assert [words.replace(SPACE, " ") for words in written] == expected
    assert MetricName("dice", share=False).change(0.25) == "+0.25"
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert el("a", "<", href='"&') == '<a href="&#34;&amp;">&lt;</a>'


def test_a_figure_is_drawn_with_its_style_or_without() -> None:
    figure = Figure("Title", "Words", 10, 20, el("line", x1=0.123456))
    assert "<style>" in figure.svg
    assert "<style>" not in figure.__html__()
    assert 'x1="0.1"' in figure.__html__()


def test_what_a_run_is_working_on_follows_from_its_journal(finished: Path, allocated: Path) -> None:
    def after(folder: Path, kind: type, count: int = 1) -> str:
        """Where the run stood when `count` records of the kind were written."""
        records = read_lines(folder, KINDS).records
        place = [n for n, record in enumerate(records) if type(record) is kind][count - 1]
        return where_it_stands(records[: place + 1]).replace(SPACE, " ")

    assert after(finished, Start) == "before its first step"
    assert after(finished, SiteOrder) == "step 1, ranking filters"
    assert after(finished, SiteCut, 2) == "step 2, the cut is found"
    assert after(finished, EpochRecord, 2) == "fine-tuning after the cut of step 2, 1 epoch done"
    assert after(finished, Step, 2) == "step 3, ranking filters"
    assert after(finished, ResultFigures) == "finished"
    assert after(allocated, SiteCurve, 2) == "allocating the cuts, 2 sites measured"
    assert after(allocated, ChosenAllocation) == "the cuts are allocated, none is made yet"
