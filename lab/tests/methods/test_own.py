"""Whole procedures of the user: compared like our own, resumed by their folder, and refused where they break the rules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from comparisons import call, places
from nets import assert_same_bits, weights_of
from pages import ROOT, blocks
from secateurs import compact, cost, criteria, load, metrics, trace
from secateurs.config import TrainSettings
from secateurs.data import Data, load_digits, subset
from secateurs.errors import InvalidInput, RunError, TrainingError
from secateurs.graph.masking import copied
from secateurs.graph.trace import Graph
from secateurs.models import build
from secateurs.pruning.results import Progress
from secateurs_lab.compare import command
from secateurs_lab.compare.command import compare
from secateurs_lab.compare.rows import Row, comparison_rows
from secateurs_lab.compare.run import ROWS, _file_name
from secateurs_lab.methods import (
    Budget,
    MethodRun,
    MethodState,
    Pruned,
    Spent,
    Task,
    Trained,
    base,
    cut_then_train,
    method,
    procedure,
)
from secateurs_lab.methods.base import opened, recipe_for
from secateurs_lab.methods.own import checked
from secateurs_lab.methods.training import finished, train_rest

PAGE = ROOT / "lab" / "notes" / "comparisons.md"
NET = ["--model", "mlp", "--model-option", "hidden=[8, 6]", "--data", "digits", "--examples", "120"]
BRIEF = "[after]\nepochs = 2\nbatch = 50\nlr = 0.1\n"
BUDGET = Budget("brief", after=TrainSettings(epochs=2, batch=50, lr=0.1))


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the procedure of the page as mine.py, beside a criterion, and nothing registered after the test."""
    (code,) = (block.text for block in blocks(PAGE) if block.language == "python" and "@procedure" in block.text)
    (tmp_path / "mine.py").write_text(f"{code}\n\ndef even(graph, site, data):\n    return torch.zeros(site.channels)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "rendered", lambda out: [])
    tables: list[Any] = [criteria._OWN, criteria._FUNCTIONS]
    known = [dict(table) for table in tables]
    yield
    for name in ("mine", "spoilers", "helped_module"):
        sys.modules.pop(name, None)
    for table, before in zip(tables, known, strict=True):
        table.clear()
        table.update(before)


def few() -> Data:
    digits = load_digits()
    parts = {name: subset(part, 120, seed=0) for name, part in digits.splits().items()}
    return replace(digits, **parts)


def network() -> Graph:
    torch.manual_seed(0)
    return trace(build("mlp", hidden=(8, 6)).eval(), torch.randn(2, 1, 8, 8))


def task(**changes: Any) -> Task:
    return replace(Task(network(), few(), 0.3, BUDGET), **changes)


def rows_of(folder: Path) -> list[Row]:
    return comparison_rows(folder / "out" / ROWS)


def test_the_procedure_of_the_page_is_compared_like_ours(tmp_path: Path) -> None:
    (tmp_path / "brief.toml").write_text(BRIEF)
    methods = ["mine:widest_first", "mine:widest_first[power=2]", "l1:uniform"]
    asked = ["--methods", *methods, "--only", "--targets", "0.4", "--budgets", "none,brief.toml"]
    call(compare, *NET, *asked, *places(tmp_path))
    rows = rows_of(tmp_path)
    assert [row.key for row in rows] == [(name, budget, 0.4, 0) for budget in ("none", "brief") for name in methods]
    for row in rows:
        first, second, _ = (after for _, after in row.filters.values())
        assert row.macs.after == 64 * first + first * second + second * 10
        assert row.macs.removed >= 0.4
        assert row.images_trained == (240 if row.budget_name == "brief" else 0)
    own = rows[0]
    # at most 372 of 620 MACs may stay: 8, 6 filters become 7, 6; then 6, 6; 5, 6; 5, 5 (395 MACs); 4, 5 (326 MACs)
    assert [after for _, after in own.filters.values()] == [4, 5, 10]
    assert own.note == "5 filters"
    file = next((tmp_path / "runs" / "none").glob("mine-widest_first-*/pruned.safetensors"))
    assert cost(load(build("mlp", hidden=(8, 6)), file)).macs == own.macs.after == 326
    before = (tmp_path / "out" / ROWS).read_bytes()
    call(compare, *NET, *asked, *places(tmp_path))  # nothing is made again
    assert (tmp_path / "out" / ROWS).read_bytes() == before


def test_a_killed_procedure_goes_on_in_its_folder(tmp_path: Path) -> None:
    asked, cuts = task(folder=tmp_path / "work"), list[str]()

    def kill(event: Progress) -> None:
        if (event.phase, event.done) == ("retrain", 4):  # in the second epoch
            raise KeyboardInterrupt

    def counted(asked: Task, *, watch: Any = None, count: int = 3) -> Pruned:
        def cut(run: MethodRun) -> MethodState:
            cuts.append("cut")
            return MethodState(compact(asked.graph, {"layers.1": torch.arange(8) >= count}))

        return cut_then_train(asked, cut, watch=watch)

    with pytest.raises(KeyboardInterrupt):
        counted(asked, watch=kill)
    with pytest.raises(RunError, match="was started with another procedure"):
        counted(asked, count=4)
    again = counted(asked)
    assert cuts == ["cut"]
    whole = counted(replace(asked, folder=None))
    assert_same_bits(weights_of(again.graph.module), weights_of(whole.graph.module))
    assert again.trained == Trained(240, pytest.approx(whole.trained.rate_sum))
    assert again.search_seconds > 0


HELPED = """
from functools import partial
import torch
from secateurs import compact
from secateurs_lab.methods import MethodState, cut_then_train, procedure

COUNT, STEPS, calls = 3, (1, 2), 0


def count(depth):
    return COUNT if depth == 0 else count_of_the_next(depth - 1)


def count_of_the_next(depth):  # a cycle
    return count(depth)


@torch.no_grad()
def keep(task):
    global calls
    calls += 1
    return {"layers.1": torch.arange(8) >= count(2)}


@procedure
def helped(task, *, watch=None):
    before = 0

    def cut(run):
        return MethodState(compact(task.graph, keep(task)))

    return cut_then_train(task, cut, watch=watch)


def score(graph, site, data):
    return scores(site) * STEPS[0]


def scaled(scale, site):
    return torch.arange(site.channels).float() * scale


scores = partial(scaled, 1.0)


class Loss:
    def __call__(self, outputs, targets):
        return loss(outputs, targets)


def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none") * 1.0


def unrelated():
    return 1
"""


def module_of(code: str, name: str = "helped_module") -> Any:
    """The code as a new module, as another process has it."""
    sys.modules[name] = made = type(sys)(name)
    exec(code, vars(made))
    return made


def asked_of(code: str, name: str, folder: Path | None) -> Pruned:
    """What the method called `name` makes of the digits with that code as `helped_module`."""
    made = module_of(code)
    for table in (criteria._OWN, criteria._FUNCTIONS):
        table.pop(f"helped_module:{name.partition(':')[2].partition(':')[0]}", None)
    return method(name)(task(folder=folder, loss_fn=made.Loss(), budget=Budget("none")))


@pytest.mark.parametrize("name", ["helped_module:helped", "helped_module:score:uniform"])
@pytest.mark.parametrize(
    ("old", "new", "of"),
    [
        ("COUNT, STEPS, calls = 3, (1, 2), 0", "COUNT, STEPS, calls = 4, (1, 2), 0", "helped"),
        ("count(2)}", "count(2) + 1}", "helped"),
        ("return count(depth)", "return count(depth) + 1", "helped"),
        ("before = 0", "before = 1", "helped"),
        ("(1, 2), 0", "(2, 2), 0", "score"),
        ("torch.arange(site.channels).float()", "-torch.arange(site.channels).float()", "score"),
        ("partial(scaled, 1.0)", "partial(scaled, -1.0)", "score"),
        ("* 1.0", "* 2.0", "both"),
        ("calls = 3, (1, 2), 0", "calls = 3, (1, 2), 7", "none"),
        ("return 1", "return 2", "none"),
    ],
)
def test_a_folder_remembers_the_helpers_of_the_code(old: str, new: str, of: str, name: str, tmp_path: Path) -> None:
    assert old in HELPED
    asked_of(HELPED, name, tmp_path / "work")
    asked_of(HELPED, name, tmp_path / "work")  # another process with the same code goes on
    if of in ("both", name.split(":")[1]):
        with pytest.raises(RunError, match="was started with another"):
            asked_of(HELPED.replace(old, new), name, tmp_path / "work")
    else:
        asked_of(HELPED.replace(old, new), name, tmp_path / "work")


@pytest.mark.parametrize("name", ["helped_module:helped", "helped_module:score:uniform"])
def test_a_folder_of_an_earlier_release_goes_on_unless_its_own_code_changed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:  # the record as it was written before helpers counted
        earlier.setattr(base, "fingerprint", partial(metrics.fingerprint, helpers=False))

        def without_helpers(measures: Any) -> dict[str, str]:
            known = {role: measure for role, measure in measures.items() if role != "code of the procedure"}
            return {**metrics._prints(known, helpers=False), "python": metrics._python()}

        earlier.setattr(base, "fingerprints", without_helpers)
        asked_of(HELPED, name, tmp_path / "work")
    asked_of(HELPED, name, tmp_path / "work")
    asked_of(HELPED.replace("COUNT, STEPS, calls = 3", "COUNT, STEPS, calls = 4"), name, tmp_path / "work")
    own = HELPED.replace("keep(task))", "{**keep(task)})").replace("* STEPS[0]", "* STEPS[1]")
    with pytest.raises(RunError, match="was started with another"):
        asked_of(own, name, tmp_path / "work")


def small(asked: Task) -> Graph:
    return compact(asked.graph, {"layers.1": torch.arange(8) >= 3})


def untrained(asked: Task, *, watch: Any = None) -> Pruned:
    return Pruned(small(asked), Trained(0, 0.0), 0, 0.0, 0.0)


def whole(asked: Task, *, watch: Any = None) -> Pruned:
    return cut_then_train(asked, lambda run: MethodState(copied(asked.graph)), watch=watch)


def broken(asked: Task, *, watch: Any = None) -> Pruned:
    raise ZeroDivisionError("by nothing")


def nothing(asked: Task, *, watch: Any = None) -> Any:
    return None


def careless(asked: Task, *, watch: Any = None) -> Pruned:
    nn.init.zeros_(next(asked.graph.module.parameters()))
    return untrained(asked)


def leaving(asked: Task, *, watch: Any = None) -> Pruned:
    sys.exit(3)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (untrained, TrainingError, "budget 'brief': 0 images were trained on .* wanted 240 "),
        (whole, InvalidInput, r"target_macs = 0\.3: the procedure removed 0\.000 of the MACs"),
        (broken, InvalidInput, "method 'rival:broken' failed: ZeroDivisionError: by nothing"),
        (nothing, InvalidInput, r"method 'rival:nothing' gave NoneType: wanted a secateurs_lab\.methods\.Pruned"),
        (careless, InvalidInput, "method 'rival:careless' changed the network of its task"),
        (leaving, InvalidInput, "method 'rival:leaving' failed: SystemExit: 3"),
    ],
)
def test_a_procedure_that_breaks_the_rules_is_refused(
    function: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = type(sys)("rival")
    setattr(rival, function.__name__, procedure(function))
    monkeypatch.setitem(sys.modules, "rival", rival)
    with pytest.raises(error, match=message):
        method(f"rival:{function.__name__}")(task())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("graph", nn.Linear(2, 2), "graph = Linear: wanted a Graph, as secateurs.compact gives it"),
        ("trained", None, "trained = NoneType: wanted a secateurs_lab.methods.Trained"),
        ("trained", Trained(torch.tensor(240), 1.0), r"images = tensor\(240\): wanted a whole number, 0 or more"),
        ("trained", Trained(240, float("inf")), "rate_sum = inf: wanted a finite number, 0 or more"),
        ("passes", torch.tensor(3), r"passes = tensor\(3\): wanted a whole number"),
        ("passes", True, "passes = True: wanted a whole number"),
        ("search_seconds", None, "search_seconds = None: wanted a finite number"),
        ("training_seconds", float("nan"), "training_seconds = nan: wanted a finite number"),
        ("note", {"a": torch.ones(2)}, r"note = \{'a': tensor.*: wanted a text"),
    ],
)
def test_a_malformed_outcome_is_refused_by_field(field: str, value: Any, message: str) -> None:
    def malformed(asked: Task, *, watch: Any = None) -> Pruned:
        return replace(untrained(asked), **{field: value})

    with pytest.raises(InvalidInput, match=f"^method 'mine:malformed' gave {message}"):
        checked("mine:malformed", malformed)(task())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda run: None, r"cut gave NoneType: wanted a secateurs_lab\.methods\.MethodState"),
        (lambda run: small(run.task), r"cut gave Graph: wanted a secateurs_lab\.methods\.MethodState"),
        (lambda run: MethodState(small(run.task).module), "cut gave graph = .*GraphModule.*: wanted a Graph"),
        (lambda run: MethodState(small(run.task), None), r"cut gave spent = NoneType: wanted a secateurs_lab\.methods\.Spent"),
        (lambda run: MethodState(small(run.task), Spent(note=None)), "cut gave note = None: wanted a text"),
    ],
)
def test_a_malformed_cut_is_refused_and_leaves_its_folder_usable(made: Any, message: str, tmp_path: Path) -> None:
    def own(asked: Task, *, watch: Any = None) -> Pruned:
        return cut_then_train(asked, made, watch=watch)

    with pytest.raises(InvalidInput, match=f"^method 'mine:own': {message}"):
        checked("mine:own", own)(task(folder=tmp_path / "work"))
    assert not list((tmp_path / "work").glob("checkpoints/*"))


def test_after_a_malformed_outcome_the_other_methods_run(tmp_path: Path) -> None:
    code = Path("mine.py").read_text().replace("return cut_then_train(", "return replace(cut_then_train(")
    Path("mine.py").write_text(f"from dataclasses import replace\n{code.replace('watch=watch)', 'watch=watch), note=1)')}")
    asked = ["--methods", "mine:widest_first", "l1:uniform", "--only", "--targets", "0.4"]
    with pytest.raises(RunError, match=r"1 row could not be made: .*'mine:widest_first' gave note = 1: wanted a text"):
        call(compare, *NET, *asked, *places(tmp_path))
    assert [row.method for row in rows_of(tmp_path)] == ["l1:uniform"]


def test_a_missed_target_is_refused_however_it_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    rate_sum = cut_then_train(task(), lambda run: MethodState(small(run.task))).trained.rate_sum

    def missing(asked: Task, *, watch: Any = None) -> Pruned:
        return Pruned(copied(asked.graph), Trained(240, rate_sum), 0, 0.0, 0.0)

    rival: Any = type(sys)("rival")
    rival.missing = procedure(missing)
    monkeypatch.setitem(sys.modules, "rival", rival)
    with pytest.raises(InvalidInput, match=r"target_macs = 0\.3: only 0\.000 of the MACs are removed at the end"):
        method("rival:missing")(task())


def test_names_of_procedures(tmp_path: Path) -> None:
    assert callable(method("mine:even:uniform+repair"))  # not marked: a criterion
    for name in ("mine:widest_first+repair", "mine:widest_first:uniform", "mine:widest_first[power=2"):
        with pytest.raises(InvalidInput, match="mine:widest_first is a whole procedure: wanted nothing behind it"):
            method(name)
    with pytest.raises(InvalidInput, match=r"'pwoer=2' is no setting of it\. Did you mean 'power'"):
        method("mine:widest_first[pwoer=2]")
    with pytest.raises(InvalidInput, match=r"procedure .*two takes \(task: .*: wanted \(task, \*, watch=None\)"):

        @procedure
        def two(task: Task, other: Any) -> Pruned:
            raise NotImplementedError


# ---- settings in brackets --------------------------------------------------------------------------------------------


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the procedure rival:takes was called with, filled when it is."""
    found: dict[str, Any] = {}

    def takes(
        task: Any,
        *,
        watch: Any = None,
        flag: Any = False,
        n: Any = 3,
        x: Any = 0.5,
        s: Any = "abc",
        name: Any = "own",
        none: Any = None,
        pair: Any = (1, 2),
        power: float = 1,
        width: int | None = None,
        **more: Any,
    ) -> Pruned:
        found.update(flag=flag, n=n, x=x, s=s, name=name, none=none, power=power, width=width, **more)
        raise InvalidInput("called")

    for key in ("flag", "n", "x", "s", "name", "none", "pair"):
        del takes.__annotations__[key]
    rival: Any = type(sys)("rival")
    rival.takes = procedure(takes)
    monkeypatch.setitem(sys.modules, "rival", rival)
    return found


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        *(("flag=False", "flag", False), ("flag=TRUE", "flag", True), ("flag=1", "flag", True), ("flag=0", "flag", False)),
        *(("n=-3", "n", -3), ("x=-0.5", "x", -0.5), ("x=1e3", "x", 1000.0), ("x=12", "x", 12.0)),
        *(("s=12", "s", "12"), ("s=a=b", "s", "a=b"), ("name=other", "name", "other"), ("s=False", "s", "False")),
        *(("none=5", "none", 5), ("none=5.5", "none", 5.5), ("none=false", "none", False), ("none=few", "none", "few")),
        *(("power=1.5", "power", 1.5), ("width=7", "width", 7), ("more=2", "more", 2)),
    ],
)
def test_settings_have_the_type_of_their_argument(text: str, key: str, value: Any, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="called"):
        method(f"rival:takes[{text}]")(task())
    assert given[key] == value
    assert type(given[key]) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n=2.0", "setting n = '2.0': wanted a whole number"),
        ("n=", "setting n = '': wanted a whole number"),
        ("n=²", "setting n = '²': wanted a whole number"),
        ("x=e-1", "setting x = 'e-1': wanted a number"),
        ("flag=yes", "setting flag = 'yes': wanted true or false"),
        ("pair=1", r"setting pair is a tuple \(default \(1, 2\)\), which brackets cannot give"),
        ("n=1;n=2", "got n twice, wanted every setting once"),
        ("n=1]", r"got 'n=1\]', wanted \[name=value;…\] with one pair of brackets"),
        ("n=1][x=2", "got .* with one pair of brackets"),
        ("[n=1", "got .* with one pair of brackets"),
        ("=1", "got '=1', wanted"),
        ("n", "got 'n', wanted"),
        ("", "got '', wanted"),
        ("n=1;", "got '', wanted"),
        ("watch=1", "'watch=1' is no setting of it"),
        ("task=1", "'task=1' is no setting of it"),
    ],
)
def test_malformed_settings_are_refused_by_name(text: str, message: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"^method 'rival:takes.*': {message}"):
        method(f"rival:takes[{text}]")


def test_built_in_procedures_keep_what_makes_them() -> None:
    found: Any = [method(name) for name in ("l0[price=0.2]", "ssl[filters=0.01;depth=0.007]", "han[share=0.9]", "l0[by=macs]")]
    assert [part.keywords for part in found[:2]] == [{"price": 0.2}, {"filters": 0.01, "depth": 0.007}]
    assert (found[2].keywords["share"], found[3].keywords) == (0.9, {"by": "macs"})
    for name in ("han[name=obd]", "li[criterion=l2]", "thinet[order=x]"):
        with pytest.raises(InvalidInput, match="is no setting of it"):
            method(name)


SIDES = """
import torch
from secateurs import compact
from secateurs_lab.methods import MethodState, cut_then_train, procedure


@procedure
def sides(task, *, watch=None, side="first/half"):
    options = {"side": side}

    def cut(run):
        first = options["side"] == "first/half"
        masks = {site.name: (torch.arange(site.channels) * 2 < site.channels) == first for site in run.sites}
        return MethodState(compact(task.graph, masks))

    return cut_then_train(task, cut, watch=watch)
"""


def test_no_two_settings_share_a_folder(tmp_path: Path) -> None:
    Path("mine.py").write_text(SIDES)
    long = f"mine:sides[side={'x' * 300}]"
    methods = [
        "mine:sides[side=first/half]",
        "mine:sides[side=first-half]",
        "mine:sides[side=first:half]",
        long,
        f"{long[:-1]}y]",
    ]
    call(compare, *NET, "--methods", *methods, "--only", "--targets", "0.4", *places(tmp_path))
    first, *others = rows_of(tmp_path)
    assert [row.method for row in (first, *others)] == methods
    assert len({row.network_sha256 for row in others}) == 1  # all of them keep the second half
    assert first.network_sha256 != others[0].network_sha256
    folders = {folder.name for folder in (tmp_path / "runs" / "none").iterdir()}
    assert len(folders) == 5
    assert "mine-sides[side=first-half]-0.4-seed0" in folders
    assert max(map(len, folders)) <= 255


def test_a_folder_of_another_method_is_refused(tmp_path: Path) -> None:
    Path("mine.py").write_text(SIDES)
    method("mine:sides[side=a/b]")(task(folder=tmp_path / "work"))
    with pytest.raises(
        RunError, match=r"another code of the procedure and method \(mine:sides\[side=a/b\], now mine:sides\[side=a-b\]\)"
    ):
        method("mine:sides[side=a-b]")(task(folder=tmp_path / "work"))


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("l1:uniform", "l1-uniform"),
        ("fpgm:uniform+refit", "fpgm-uniform+refit"),
        ("obs+refit", "obs+refit"),
        ("ssl[filters=0.01;depth=0.007]", "ssl[filters=0.01;depth=0.007]"),
        ("benchmarks.torch_pruning:group_l1", "benchmarks.torch_pruning-group_l1"),
    ],
)
def test_plain_names_keep_their_folders(name: str, folder: str) -> None:
    assert _file_name(name) == folder


# ---- what one method does to the others ------------------------------------------------------------------------------

SPOILERS = """
import torch
from torch import nn
from secateurs import compact
from secateurs_lab.methods import MethodState, cut_then_train, procedure


def halves(task, run):
    return MethodState(compact(task.graph, {site.name: torch.arange(site.channels) * 2 >= site.channels for site in run.sites}))


def procedure_that(change):
    @procedure
    def spoiler(task, *, watch=None):
        def cut(run):
            change(task)
            return halves(task, run)

        return cut_then_train(task, cut, watch=watch)

    return spoiler


def negate(module):
    for parameter in module.parameters():
        parameter.data.mul_(-3)


def replace_relu(module):
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.ReLU):
            module.set_submodule(name, nn.Tanh())


weights = procedure_that(lambda task: negate(task.graph.module))
modules = procedure_that(lambda task: replace_relu(task.graph.module))
example = procedure_that(lambda task: task.graph.example[0].fill_(float("nan")))
data = procedure_that(lambda task: task.data.train.inputs.mul_(0))


def by_weights(graph, site, data):
    negate(graph.module)
    return torch.arange(site.channels).float()


def by_modules(graph, site, data):
    replace_relu(graph.module)
    return torch.arange(site.channels).float()


def by_data(graph, site, data):
    data.inputs.mul_(0)
    return torch.arange(site.channels).float()
"""
TIMES = ("search_seconds", "training_seconds")


def compared(folder: Path, *methods: str) -> list[dict[str, Any]]:
    """The rows of a comparison without training and with a distillation, without times; failures end the command."""
    Path("spoilers.py").write_text(SPOILERS)
    Path("short.toml").write_text("[after]\nepochs = 1\nbatch = 50\nlr = 0.1\ndistill = 1.0\n")
    asked = ["--methods", *methods, "--only", "--targets", "0.4", "--budgets", "none,short.toml"]
    call(compare, *NET, *asked, *places(folder))
    return without_times(folder)


def without_times(folder: Path) -> list[dict[str, Any]]:
    rows = [asdict(row) for row in rows_of(folder)]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


@pytest.fixture
def alone(tmp_path: Path) -> list[dict[str, Any]]:
    """The rows of l1:uniform in a comparison of its own."""
    rows = compared(tmp_path / "alone", "l1:uniform")
    assert len(rows) == 2
    return rows


@pytest.mark.parametrize(
    ("spoiler", "message"),
    [
        ("weights", "method 'spoilers:weights' changed the network of its task"),
        ("modules", "method 'spoilers:modules' changed the network of its task"),
        ("by_weights", "criterion 'by_weights' changed the network's weights or buffers at site"),
        ("by_modules", "criterion 'by_modules' changed the network's weights or buffers at site .*, or its modules"),
    ],
)
def test_what_a_method_does_to_its_network_does_not_reach_the_others(
    spoiler: str, message: str, tmp_path: Path, alone: list[dict[str, Any]]
) -> None:
    for _ in range(2):  # what a refused method left in its folder is not taken for its work
        with pytest.raises(RunError, match=message):
            compared(tmp_path, f"spoilers:{spoiler}", "l1:uniform")
    assert without_times(tmp_path) == alone


@pytest.mark.parametrize("spoiler", ["example", "by_data"])
def test_examples_that_a_method_may_change_are_its_own(spoiler: str, tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    rows = compared(tmp_path, f"spoilers:{spoiler}", "l1:uniform")
    assert [row for row in rows if row["method"] == "l1:uniform"] == alone


def test_after_a_change_of_the_data_no_row_is_made(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    changed = (
        r"4 rows could not .*'spoilers:data' changed the data .* \| l1:uniform.*: the data are not those that the comparison"
    )
    with pytest.raises(RunError, match=changed):
        compared(tmp_path, "spoilers:data", "l1:uniform")
    assert rows_of(tmp_path) == []
    assert compared(tmp_path, "l1:uniform") == alone


def test_a_procedure_that_trains_between_cuts_keeps_the_answers_of_the_teacher_to_itself(tmp_path: Path) -> None:
    def between(asked: Task, *, watch: Any = None) -> Pruned:
        with opened(asked, "between", recipe_for(asked, "l1"), watch) as run:
            nn.init.zeros_(next(asked.graph.module.parameters()))
            return finished(run, train_rest(run, MethodState(small(asked))))

    budget = Budget("brief", after=TrainSettings(epochs=1, batch=50, lr=0.1, distill=1.0))
    asked = task(budget=budget, answers=tmp_path / "teacher.sqlite")
    before = method("l1")(replace(asked, answers=None))
    with pytest.raises(InvalidInput, match="'mine:between' changed the network"):
        checked("mine:between", between, function=between)(asked)
    after = method("l1")(asked)
    assert_same_bits(weights_of(after.graph.module), weights_of(before.graph.module))
