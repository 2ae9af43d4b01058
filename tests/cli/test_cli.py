"""The console command: what it prints, what it leaves, how it ends; all on networks of a few neurons."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import secateurs
from secateurs import load
from secateurs.cli import execute, progress
from secateurs.cli import inputs as recipes
from secateurs.cli import train as train_command
from secateurs.cli.inputs import is_pruned_file, options, overrides, run_folder
from secateurs.config import (
    PAPER_FINETUNE,
    PAPER_RESNET,
    PAPER_RETRAIN,
    Recipe,
    TrainSettings,
    declarations,
    read_recipe,
    read_settings,
)
from secateurs.data import load as load_data
from secateurs.errors import InvalidInput
from secateurs.metrics import evaluate
from secateurs.models import build, load_weights_
from secateurs.pruning.results import Progress

NET = ["--model", "mlp", "--model-option", "hidden=[8, 6]", "--data", "digits"]
QUICK = [
    "--recipe",
    "paper",
    "--max-drop",
    "0.2",
    "--masks-per-filter",
    "4",
    "--scoring-examples",
    "64",
    "--finetune-epochs",
    "2",
]
TRAINING = ["--epochs", "4", "--lr", "0.2", "--batch", "64"]

Said = Callable[[], str]


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "net"
    assert execute(["train", *NET, *TRAINING, "--out", str(folder)]) == 0
    return folder / "weights.safetensors"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert execute(["prune", *NET, *QUICK, "--weights", str(weights), "--out", str(folder)]) == 0
    return folder


def document(capsys: pytest.CaptureFixture[str], *tokens: str) -> Any:
    """What a command prints with --json, on an stdout that holds nothing else."""
    capsys.readouterr()
    assert execute([*tokens, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def failing(capsys: pytest.CaptureFixture[str], *tokens: str, code: int = 1) -> str:
    """What a command says on stderr when it ends with `code`; stdout stays empty."""
    capsys.readouterr()
    assert execute(list(tokens)) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return " ".join(re.sub("[│╭╮╰╯─]", " ", said.err).split())


# ---- help, version, exit codes -----------------------------------------------------------------------------------------


def test_help_answers_without_importing_torch() -> None:
    code = (
        "import sys; from secateurs.cli import execute; "
        "codes = [execute([*c.split(), '--help']) for c in ('', 'prune', 'train', 'demo', 'eval', 'data get')]; "
        "assert codes == [0] * 6, codes; assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "prune", "resume", "show", "sites", "train", "eval", "data", "compare", "reproduce"):
        assert re.search(rf"│ {command} ", done.stdout), command
    for exit_code in ("0 done", "1 error", "2 wrong usage", "130"):
        assert exit_code in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--version"]) == 0
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.*)"', project, re.M)
    assert capsys.readouterr().out.strip() == secateurs.__version__ == version


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (["prnue"], "Did you mean"),
        (["prune", "--modl", "mlp", "--data", "digits"], "--model"),
        (["prune", *NET, "--max-drop", "much"], "--max-drop"),
        (["prune", *NET, "--budget", "rum"], "run"),
        (["prune", *NET, "--out", "a", "--name", "b"], "--name"),
        (["prune"], "--model"),
    ],
)
def test_wrong_usage_ends_with_2_and_names_the_flag(capsys: pytest.CaptureFixture[str], tokens: list[str], wanted: str) -> None:
    assert wanted in failing(capsys, *tokens, code=2)


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (["prune", "--model", "resnt20", "--data", "digits"], "'resnet20'"),
        (["prune", "--model", "mlp", "--model-option", "hiden=[4]", "--data", "digits"], "'hidden'"),
        (["prune", "--model", "mlp", "--model-option", "hidden", "--data", "digits"], "wanted name=value"),
        (["prune", "--model", "mlp", "--data", "digts"], "'digits'"),
        (["prune", "--model", "mlp", "--data", "digits", "--data-option", "sead=1"], "'seed'"),
        (["prune", *NET, "--recipe", "2cores"], "'2core'"),
        (["prune", *NET, "--recipe", "no.toml"], "no.toml: cannot be read"),
        (["prune", *NET, "--max-drop", "2"], "max_drop = 2.0: wanted 0 to 1"),
        (["prune", *NET, "--set", "max_dorp=0.1"], "'max_drop'"),
        (["prune", *NET, "--set", "finetune.augment=crp"], "finetune.augment = 'crp'"),
        (["prune", *NET, "--weights", "none.pt"], "none.pt"),
        (["prune", *NET, "--device", "cuda:77"], "--device cuda:77"),
        (["prune", *NET, "--sites", "layer3.*", "--max-drop", "0.2"], "'layers.1'"),
        (["train", *NET, "--set", "learning_rate=1"], "'learning_rate'"),
        (["eval"], "a run folder, or --model and --data"),
        (["eval", "runs/none"], "provenance.json"),
        (["show", "runs/none"], "provenance.json"),
        (["resume", "runs/none"], "provenance.json"),
        (["sites", "--model", "torch.nn:Identity"], "--input-shape"),
        (["data", "get", "cifar100"], "'cifar10'"),
        (["data", "get", "digits"], "nothing to get"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*CUDA.*")
def test_errors_end_with_1_and_say_what_to_do(capsys: pytest.CaptureFixture[str], tokens: list[str], wanted: str) -> None:
    assert wanted in failing(capsys, *tokens)


def test_an_unreachable_address_is_an_error_that_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setenv("SECATEURS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("secateurs._util.download.urlopen", offline)
    said = failing(capsys, "data", "get", "cifar10")
    assert "https://www.cs.toronto.edu" in said
    assert "no route to host" in said
    assert "by hand" in said


def test_a_download_shows_progress_and_prints_its_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(progress: Callable[[int, int | None], None]) -> Path:
        progress(85_000_000, 170_000_000)
        return Path("/there")

    monkeypatch.setattr("secateurs.data.get_cifar10", get)
    monkeypatch.setattr("secateurs.report.progress._LINE_SECONDS", 0.0)  # a line at every glance
    assert execute(["data", "get", "cifar10"]) == 0
    said = capsys.readouterr()
    assert said.out == "cifar10 is in /there\n"
    assert said.err == "Downloading cifar10: megabytes 85 of 170\n"
    assert document(capsys, "data", "get", "cifar10") == {"name": "cifar10", "folder": "/there"}


def test_a_closed_pipe_ends_the_command_without_a_message() -> None:
    code = "from secateurs.cli import main; main()"
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-c", code, "sites", "--model", "fcn3"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == ""


# ---- flags and recipes -------------------------------------------------------------------------------------------------


def shown_help(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, str]:
    """The text of every flag in the help of a command, on one line."""
    capsys.readouterr()
    assert execute([command, "--help"]) == 0
    rows = re.findall(r"^│(.*)│$", capsys.readouterr().out, re.M)
    text = " ".join(" ".join(rows).split())
    return {part.split()[0]: part for part in re.split(r" (?=--[a-z])", " " + text) if part.startswith("--")}


def test_flags_show_the_defaults_and_choices_of_their_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    printed = shown_help(capsys, "prune")
    for flag, wanted in {
        "--recipe": "the defaults below are those of best. [default: best]",
        "--max-drop": "0.005 is half a point. [default: 0.01]",
        "--budget": "[choices: site, run] [default: run]",
        "--repair": "[choices: none, least-squares, every-layer, whole-network] [default: every-layer]",
        "--criterion": "or portfolio where one is given or nothing is repaired. [default: obs]",
        "--rounds": "[default: 1]",
        "--finetune-lr": "held-out examples. [choices: auto] [default: 0.01, if any finetune flag is given]",
        "--retrain": "After all cuts: train, as named. One of gentle, paper-finetune, paper-retrain.",
        "--no-adaptive": "[default: true]",
        "--target-macs": "Stop when this share of the multiply-accumulates is removed.",
    }.items():
        assert wanted in printed[flag]
    assert "default" not in printed["--target-macs"]
    printed = shown_help(capsys, "train")
    assert "[choices: constant, step, cosine, linear, one-cycle] [default: cosine]" in printed["--schedule"]
    assert "[default: 128]" in printed["--batch"]


@pytest.mark.parametrize("kind", [Recipe, TrainSettings])
def test_every_field_says_what_it_is_for(kind: type) -> None:
    for name, (_, _, declared) in declarations(kind).items():
        assert re.fullmatch(r"[A-Z].*\.", declared.help), name


def test_flags_reach_their_fields() -> None:
    given = {"max_drop": 0.1, "sites": ("a", "b.*"), "finetune_lr": 0.5, "retrain_epochs": 3, "set": ("finetune.augment=crop",)}
    recipe = recipes.chosen_recipe(None, overrides(given))
    assert (recipe.max_drop, recipe.sites) == (0.1, ("a", "b.*"))
    assert recipe.finetune == TrainSettings(lr=0.5, augment="crop")
    assert recipe.retrain == TrainSettings(epochs=3)


def test_values_of_options_are_toml_or_text() -> None:
    given = ["a=1", "b=0.5", "c=true", "d=[8, 16]", "e=B", 'f="x=y"', "g=x=y", "h=", "i=2020-01-01", "j=1\nk=2"]
    wanted = {"a": 1, "b": 0.5, "c": True, "d": [8, 16], "e": "B", "f": "x=y", "g": "x=y", "h": "", "i": "2020-01-01"}
    assert options(given, "--x") == wanted | {"j": "1\nk=2"}
    with pytest.raises(InvalidInput, match="--x 'a': wanted name=value"):
        options(["a"], "--x")


def test_flags_override_a_recipe_file(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        "max_drop = 0.1\nrounds = 2\nallocation = 'sequential'\nrepair = 'none'\n[finetune]\nepochs = 7\nlr = 0.5\n"
    )
    recipe = recipes.chosen_recipe("own.toml", overrides({"max_drop": 0.2, "finetune_epochs": 1}))
    assert (recipe.max_drop, recipe.rounds) == (0.2, 2)
    assert recipe.finetune == TrainSettings(epochs=1, lr=0.5)


def test_shipped_recipes_are_valid_and_found_by_name() -> None:
    shipped = recipes.shipped_recipes()
    assert {"demo", "2core", "paper-resnet", "train-demo", "train-paper-resnet"} <= set(shipped)
    for name, path in shipped.items():
        read_settings(path) if name.startswith("train-") else read_recipe(path)
        assert recipes.find_recipe(name) == path


def test_best_fast_and_paper_are_named_recipes() -> None:
    assert read_recipe(recipes.find_recipe("best")) == Recipe() == Recipe.best()
    assert read_recipe(recipes.find_recipe("fast")) == Recipe.fast()
    assert read_recipe(recipes.find_recipe("paper")) == Recipe.paper()


def test_the_paper_recipes_ask_for_what_the_paper_did() -> None:
    recipe = read_recipe(recipes.find_recipe("paper-resnet"))
    # M = 10·C masks, P = 0.3, α of half a point, all training images, filters put back one at a time
    assert (recipe.masks_per_filter, recipe.off, recipe.max_drop, recipe.scoring_examples) == (10, 0.3, 0.005, "all")
    assert (recipe.estimator, recipe.adaptive, recipe.repair, recipe.confidence) == ("losses", False, "none", 0)
    assert (recipe.direction, recipe.shortcut, recipe.search) == ("forward", "before", "paper")
    assert recipe.finetune == PAPER_FINETUNE
    assert recipe.finetune.epochs == 10
    assert recipe.retrain == PAPER_RETRAIN
    assert (recipe.retrain.epochs, recipe.retrain.lr, recipe.retrain.milestones) == (80, 0.01, (20, 40, 60))
    assert read_settings(recipes.find_recipe("train-paper-resnet")) == PAPER_RESNET


# ---- train -------------------------------------------------------------------------------------------------------------


def test_train_saves_weights_with_the_accuracy_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, "train", *NET, *TRAINING)
    assert printed["folder"] == "runs/train-mlp-digits-1"
    assert [epoch["epoch"] for epoch in printed["epochs"]] == [0, 1, 2, 3]
    model = build("mlp", hidden=(8, 6))
    load_weights_(model, Path(printed["weights"]))
    assert evaluate(model, load_data("digits").search).accuracy == printed["epochs"][-1]["search_accuracy"]
    assert printed["epochs"][-1]["loss"] < printed["epochs"][0]["loss"]
    assert "holds a training" in failing(capsys, "train", *NET, "--out", printed["folder"])


def test_a_training_without_its_teacher_is_refused_before_there_is_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    said = failing(capsys, "train", *NET, *TRAINING, "--set", "distill=1.0", "--name", "mine")
    assert "distill = 1: here is no teacher. Set distill = 0" in said
    assert not Path("runs/mine").exists()


def test_an_interrupted_training_ends_with_the_same_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, weights: Path, tmp_path: Path
) -> None:
    class Impatient(train_command.TrainWatcher):
        def epoch(self, record: Any) -> None:
            super().epoch(record)
            if record.epoch == 1:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(train_command, "TrainWatcher", Impatient)
        said = failing(capsys, "train", *NET, *TRAINING, "--name", "mine", code=130)
    assert said.endswith("Resume with: secateurs resume runs/mine")
    assert execute(["show", "runs/mine"]) == 0
    assert "Stopped: 2 of 4 epochs are done." in capsys.readouterr().out
    assert execute(["resume", "runs/mine"]) == 0
    assert (tmp_path / "runs/mine/weights.safetensors").read_bytes() == weights.read_bytes()
    printed = document(capsys, "show", "runs/mine")
    assert printed["state"] == "finished"
    assert [epoch["epoch"] for epoch in printed["epochs"]] == [0, 1, 2, 3]


# ---- prune, resume, show -----------------------------------------------------------------------------------------------


def test_prune_prints_its_steps_and_saves_a_smaller_network(
    capsys: pytest.CaptureFixture[str], weights: Path, finished: Path
) -> None:
    capsys.readouterr()
    assert execute(["prune", *NET, *QUICK, "--weights", str(weights)]) == 0
    said = capsys.readouterr()
    assert "runs/mlp-digits-1/pruned.safetensors" in said.out
    assert re.search(r"layers\.1 +1 +8 → \d", said.out)
    assert re.search(r"[\d.]+ % of the parameters and [\d.]+ % of the MACs removed, accuracy", said.out)
    assert "site 1 of 2, layers.1: 8 →" in said.err
    assert "\x1b" not in said.err + said.out, "control codes where there is no terminal"
    network = load(build("mlp", hidden=(8, 6)), "runs/mlp-digits-1/pruned.safetensors")
    end = [json.loads(line) for line in Path("runs/mlp-digits-1/journal.jsonl").read_text().splitlines()][-1]
    assert sum(p.numel() for p in network.module.parameters()) == end["parameters"]["after"] < end["parameters"]["before"]
    # the same command in another folder: the same network, bit for bit
    assert Path("runs/mlp-digits-1/pruned.safetensors").read_bytes() == (finished / "pruned.safetensors").read_bytes()


def test_prune_as_json(capsys: pytest.CaptureFixture[str], weights: Path) -> None:
    printed = document(capsys, "prune", *NET, *QUICK, "--weights", str(weights), "--name", "j")
    assert printed["folder"] == "runs/j"
    assert printed["recipe"]["max_drop"] == 0.2
    assert [step["site"] for step in printed["steps"]] == ["layers.1", "layers.4"]
    assert all(step["kept"] == step["channels"] - len(step["removed"]) for step in printed["steps"])
    assert printed["outcome"]["test"]["count"] == 300
    again = document(capsys, "resume", "runs/j")
    assert {**again, "outcome": None} == {**printed, "outcome": None}
    assert "holds a run already" in failing(capsys, "prune", *NET, *QUICK, "--weights", str(weights), "--name", "j")


def test_damaged_folders_are_reported_without_a_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("run", "training"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "recipe.toml").write_text("max_drop = 0.1")
    (tmp_path / "run" / "provenance.json").write_text("{}")
    journal = tmp_path / "run" / "journal.jsonl"
    for line in ("garbage", "[" * 100_000, "3", '{"unit": "step"}', '{"unit": 7, "digest": "' + "0" * 64 + '"}'):
        journal.write_text(line + "\n")
        assert execute(["show", "run"]) == 1
        assert "journal.jsonl, line 1: " in capsys.readouterr().err
    for text in ("[]", "[" * 100_000, '{"origin": 3}', "\xff"):
        (tmp_path / "run" / "provenance.json").write_text(text, encoding="latin-1")
        (tmp_path / "training" / "training.json").write_text(text, encoding="latin-1")
        for command, folder, file in (
            ("show", "run", "provenance"),
            ("resume", "run", "provenance"),
            ("show", "training", "training"),
        ):
            assert execute([command, folder]) == 1
            printed = capsys.readouterr().err
            assert f"{file}.json: damaged" in printed
            assert len(printed) <= 600


def copied(finished: Path, folder: Path, *, without: str) -> Path:
    shutil.copytree(finished, folder)
    path = folder / without
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def test_deleting_a_finished_run_without_checkpoints_is_never_advised(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, finished: Path
) -> None:
    folder = copied(finished, tmp_path / "run", without="checkpoints")
    printed = failing_aloud(capsys, "resume", str(folder))
    assert "checkpoints/start.safetensors: is missing" in printed
    assert "its result is whole" in printed
    assert "elete" not in printed
    (folder / "pruned.safetensors").unlink()
    assert "is missing, though the run got further. Restore checkpoints/" in failing_aloud(capsys, "resume", str(folder))


@pytest.mark.parametrize("file", ["journal.jsonl", ".lock", "plan.json"])
def test_a_folder_in_place_of_a_file_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, finished: Path, file: str
) -> None:
    folder = copied(finished, tmp_path / "run", without=file)
    (folder / file).mkdir()
    assert f"{folder / file}: Is a directory" in failing_aloud(capsys, "resume", str(folder))


@pytest.mark.parametrize("command", ["show", "resume"])
def test_a_journal_of_garbage_without_an_end_of_line_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, finished: Path, command: str
) -> None:
    folder = copied(finished, tmp_path / "run", without="journal.jsonl")
    (folder / "journal.jsonl").write_text("[" * 100_000)
    printed = failing_aloud(capsys, command, str(folder))
    assert "journal.jsonl, line 1: damaged (neither a line nor the beginning of one" in printed
    assert (folder / "journal.jsonl").stat().st_size == 100_000


def failing_aloud(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    """What a command that fails after a few lines of progress says."""
    capsys.readouterr()
    assert execute(list(tokens)) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return " ".join(said.split())


@pytest.mark.parametrize("role", ["--model", "--data"])
def test_a_users_function_that_exits_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path, role: str) -> None:
    (tmp_path / "exiting.py").write_text("def leave():\n    raise SystemExit(5)\n")
    named = {"--model": "mlp", "--data": "digits", role: "exiting:leave"}
    printed = failing_aloud(capsys, "prune", *(token for pair in named.items() for token in pair))
    assert "exiting:leave" in printed
    assert "SystemExit" in printed


def test_a_field_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    printed = failing(capsys, "prune", *NET, "--max-drop", "0.1", "--set", "max_drop=abc")
    assert "--set max_drop=… and --max-drop are the same field" in printed
    printed = failing(capsys, "prune", *NET, "--finetune-epochs", "1", "--set", "finetune.epochs=2")
    assert "--set finetune.epochs=… and --finetune-epochs are the same field" in printed


@pytest.mark.parametrize("name", ["../../x", "a/../../x", "/x", "."])
def test_a_name_that_leaves_the_folder_of_runs_is_refused(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert "wanted the name of a folder under runs/" in failing(capsys, "prune", *NET, "--name", name)


def test_an_interrupted_run_shows_where_it_is_and_ends_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, weights: Path, finished: Path
) -> None:
    def impatient(self: progress.RunWatcher, event: Progress) -> None:
        if event.phase == "finetune" and event.done and self.latest is not None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(progress.RunWatcher, "watch", impatient)
        said = failing(capsys, "prune", *NET, *QUICK, "--weights", str(weights), "--name", "cut", code=130)
    assert said.endswith("Resume with: secateurs resume runs/cut")
    assert execute(["show", "runs/cut"]) == 0
    shown = capsys.readouterr().out
    assert "Stopped: fine-tuning after the cut of step 2, 1 epoch done; " in shown
    assert "Resume with: secateurs resume runs/cut" in shown
    assert document(capsys, "show", "runs/cut")["state"] == "stopped"
    assert execute(["resume", "runs/cut"]) == 0
    assert "Resuming runs/cut: 1 step done" in capsys.readouterr().err
    assert Path("runs/cut/pruned.safetensors").read_bytes() == (finished / "pruned.safetensors").read_bytes()


def test_ctrl_c_ends_a_process_cleanly(capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path) -> None:
    tokens = [
        "prune",
        *NET,
        "--weights",
        str(weights),
        "--recipe",
        "paper",
        "--masks",
        "200000",
        "--max-drop",
        "0.2",
        "--out",
        "long",
    ]
    # a shell that runs the tests in the background may let their processes ignore Ctrl-C
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from secateurs.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code, *tokens], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: '"round"' in journal(tmp_path / "long"))
        assert document(capsys, "show", "long")["state"] == "running"
        assert "another process" in failing(capsys, "resume", "long")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert err.strip().endswith("Resume with: secateurs resume long")
    printed = document(capsys, "show", "long")
    assert printed["state"] == "stopped"
    assert re.fullmatch(r"step 1, ranking filters; [\d,]+ values are measured", printed["at"])


def journal(folder: Path) -> str:
    path = folder / "journal.jsonl"
    return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_a_run_of_the_users_network_and_data_resumes_from_another_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ownnets.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build(width=6):\n"
        "    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))\n"
        "def loaders():\n"
        "    generator = torch.Generator().manual_seed(0)\n"
        "    x = torch.randn(90, 2, generator=generator)\n"
        "    y = (x.prod(1) > 0).long()\n"
        "    return (x[:60], y[:60]), (x[60:], y[60:])\n"
    )
    own = [
        "--model",
        "ownnets:build",
        "--model-option",
        "width=8",
        "--data",
        "ownnets:loaders",
        "--max-drop",
        "0.5",
        "--confidence",
        "0",
    ]
    printed = document(capsys, "prune", *own)
    assert printed["folder"] == "runs/ownnets-build-ownnets-loaders-1"
    assert printed["steps"][0]["channels"] == 8
    folder, named = str(tmp_path / printed["folder"]), own[:6]
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ownnets")
    assert "no module 'ownnets' in / or in the installed packages" in failing(capsys, "resume", folder, *named)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert document(capsys, "resume", folder, *named)["steps"] == printed["steps"]


def test_a_run_started_in_python_says_that_it_cannot_be_built_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from secateurs import Pruner

    data = load_data("digits")
    run = Pruner(build("mlp", hidden=(8, 6)), data, recipe=Recipe.fast(confidence=0), folder=tmp_path / "library")
    run.close()
    assert "secateurs.resume" in failing(capsys, "resume", str(tmp_path / "library"))
    assert execute(["show", str(tmp_path / "library")]) == 0
    assert "a model given in Python on digits" in capsys.readouterr().out


# ---- sites, eval -------------------------------------------------------------------------------------------------------


def test_sites_lists_prunable_and_unprunable_layers(capsys: pytest.CaptureFixture[str]) -> None:
    printed = document(capsys, "sites", "--model", "resnet20")
    # 19 convolutions; 40,551,040 MACs and 269,722 weights and BatchNorm parameters are the known figures of ResNet-20
    assert len(printed["sites"]) == 19
    assert printed["macs"] == 40_551_040
    assert printed["parameters"] == 269_722
    assert printed["sites"][0] == {
        "name": "conv1",
        "channels": 16,
        "unit": "filters",
        "layers": ["conv1"],
        "macs": 3 * 9 * 16 * 32 * 32,
    }
    assert [refused["name"] for refused in printed["unprunable"]] == ["linear"]
    assert printed["obstacles"] == []
    assert execute(["sites", "--model", "mlp", "--data", "digits"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"layers\.1 +layers\.1 +64 +4,096", said)
    assert re.search(r"output +it is the network's output +320", said)
    assert execute(["sites", "--model", "resnet8-b", "--input-shape", "3", "16", "16"]) == 0
    assert re.search(r"What locks the most, .*it is the shortcut.*\n?.*shortcut='after'", capsys.readouterr().out)


def test_sites_lists_heads_and_the_features_within_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Of torch's own attention: 3 heads of 4 features."""
    options = [f"--model-option={option}" for option in ("d_model=12", "nhead=3", "dim_feedforward=20", "batch_first=true")]
    given = ["--model", "torch.nn:TransformerEncoderLayer", *options, "--input-shape", "5", "12"]
    printed = document(capsys, "sites", *given)
    assert {site["name"]: (site["channels"], site["unit"]) for site in printed["sites"]} == {
        "self_attn.in_proj.query_key": (4, "features"),
        "self_attn.in_proj.value": (4, "features"),
        "self_attn.in_proj": (3, "heads"),
        "self_attn.out_proj": (12, "filters"),
        "linear1": (20, "filters"),
        "linear2": (12, "filters"),
    }
    assert execute(["sites", *given]) == 0
    said = capsys.readouterr().out
    assert re.search(r"in_proj\.value +self_attn\.in_proj +4 features", said)
    assert "--head-widths" in said


def test_sites_takes_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--input-shape", "1", "8", "8"]
    printed = document(capsys, "sites", "--model", "resnet8", "--model-option", "in_channels=1", *shape, "--shortcut", "after")
    assert printed["sites"][0]["macs"] == 9 * 16 * 8 * 8
    assert "layer1.0.add" in [site["name"] for site in printed["sites"]]


def test_eval_agrees_with_the_run_before_and_after(capsys: pytest.CaptureFixture[str], weights: Path, finished: Path) -> None:
    end = document(capsys, "show", str(finished))["outcome"]
    printed = document(capsys, "eval", str(finished))
    networks, drop = printed["networks"], printed["drop"]
    for name, when in (("before", "before"), ("pruned", "after")):
        assert networks[name]["accuracy"] == end["test"][when]
        assert networks[name]["parameters"] == end["parameters"][when]
        assert networks[name]["macs"] == end["macs"][when]
    n, lost, won = drop["count"], drop["lost"], drop["won"]
    assert drop["mean"] == (lost - won) / n == pytest.approx(end["test"]["before"] - end["test"]["after"], abs=1e-12)
    # n values of +1 (lost), -1 (won) or 0: their sum of squares is lost + won
    assert drop["standard error"] == pytest.approx(math.sqrt((lost + won - (lost - won) ** 2 / n) / (n - 1) / n))
    assert execute(["eval", str(finished)]) == 0
    assert f"{lost} answer{'' if lost == 1 else 's'} lost and {won} won of {n}: a drop of " in capsys.readouterr().out
    alone = document(capsys, "eval", *NET, "--weights", str(finished / "pruned.safetensors"), "--split", "val")
    (found,) = alone["networks"].values()
    assert found["accuracy"] == end["search"]["after"]
    (plain,) = document(capsys, "eval", *NET, "--weights", str(weights))["networks"].values()
    assert plain == networks["before"]
    assert is_pruned_file(finished / "pruned.safetensors")
    assert not is_pruned_file(weights)


def test_one_example_gives_a_drop_but_no_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "onetest.py").write_text(
        "import torch\n"
        "def sets():\n"
        "    x = torch.randn(61, 64, generator=torch.Generator().manual_seed(0))\n"
        "    y = torch.arange(61) % 10\n"
        "    return (x[:40], y[:40]), (x[40:60], y[40:60]), (x[60:], y[60:])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    loose = ["--max-drop", "0.9", "--confidence", "0", "--out", "one"]
    assert execute(["prune", *NET[:-1], "onetest:sets", *loose]) == 0
    drop = document(capsys, "eval", "one", "--data", "onetest:sets")["drop"]
    assert (drop["count"], drop["standard error"]) == (1, None)
    assert execute(["eval", "one", "--data", "onetest:sets"]) == 0
    assert re.search(r"won of 1: a drop of -?\d+\.\d\d points\.$", capsys.readouterr().out, re.M)


# ---- inputs ------------------------------------------------------------------------------------------------------------


def test_an_untrained_network_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    document(capsys, "prune", *NET, "--max-drop", "0", "--confidence", "0", "--masks", "16", "--scoring-examples", "16")
    assert execute(["prune", *NET, "--max-drop", "0", "--confidence", "0", "--masks", "16", "--scoring-examples", "16"]) == 0
    assert "Warning: no --weights" in capsys.readouterr().err


def test_folders_are_numbered_and_named_after_model_and_data(tmp_path: Path) -> None:
    assert run_folder(None, None, "my.nets:build", "folder:/a b") == Path("runs/my.nets-build-folder-a-b-1")
    (tmp_path / "runs/mlp-digits-1").mkdir(parents=True)
    assert run_folder(None, None, "mlp", "digits") == Path("runs/mlp-digits-2")
    assert run_folder(None, "x", "mlp", "digits") == Path("runs/x")
    assert run_folder(Path("y"), None, "mlp", "digits") == Path("y")
