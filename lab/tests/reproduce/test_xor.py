"""The XOR experiment: its task, its batched training against plain PyTorch, its methods, and Table 1 in small."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nets import seeded
from secateurs.errors import InvalidInput
from secateurs_lab.reproduce.cli import app
from secateurs_lab.reproduce.xor import (
    HIDDEN,
    SCHEDULES,
    ExperimentRow,
    Share,
    SweptPoint,
    explicit_solution,
    methods_sheet,
    paper_sheet,
    plain,
    pooled,
    prune,
    sweep,
    sweep_sheet,
    table,
    train_whole,
    weights_sheet,
    weights_table,
)
from secateurs_lab.reproduce.xor_figures import draw_all
from secateurs_lab.reproduce.xor_methods import OTHER_METHODS, by_chance, by_pairs, by_the_paper
from secateurs_lab.reproduce.xor_nets import (
    Nets,
    Optimiser,
    Points,
    Setting,
    accuracies,
    make_task,
    mask_losses,
    new_nets,
    stream,
    train,
)
from secateurs_lab.reproduce.xor_weights import WAYS, delete_weights, flat, shaped
from secateurs_lab.sheets import Sheet

SMALL = Setting(seed=11, experiments=5, points=200, epochs=3, masks=40)


def plain_network(nets: Nets, experiment: int) -> nn.Sequential:
    """One experiment's network in plain PyTorch, without hidden bias."""
    hidden = nets.w2.shape[-1]
    network = nn.Sequential(nn.Linear(2, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, 1)).to(nets.w1.dtype)
    with torch.no_grad():
        network[0].weight.copy_(nets.w1[experiment])
        network[2].weight.copy_(nets.w2[experiment][None])
        network[2].bias.copy_(nets.b2[experiment])
    return network


# ---- The task


def test_directions_are_orthonormal_and_turn_both_ways() -> None:
    task = make_task(replace(SMALL, experiments=200))
    torch.testing.assert_close((task.a * task.b).sum(-1), torch.zeros(200), rtol=0, atol=1e-6)
    torch.testing.assert_close(task.a.norm(dim=-1) * task.b.norm(dim=-1), torch.ones(200), rtol=0, atol=1e-6)
    left = task.a[:, 0] * task.b[:, 1] - task.a[:, 1] * task.b[:, 0] > 0
    assert 60 < int(left.sum()) < 140


def test_points_are_standard_gaussian_with_the_papers_labels() -> None:
    task = make_task(Setting(seed=3, experiments=100, points=1000))
    x, y = task.train.x, task.train.y
    assert x.mean().abs() < 0.01  # 200,000 numbers: one standard error is 0.002
    assert (x.var() - 1).abs() < 0.02
    assert (x.pow(4).mean() - 3).abs() < 0.1  # the Gaussian's kurtosis
    assert (x[..., 0] * x[..., 1]).mean().abs() < 0.02
    by_hand = [math.copysign(1, float(task.a[7] @ p) * float(task.b[7] @ p)) for p in x[7, :50]]
    assert (2 * y[7, :50] - 1).tolist() == by_hand
    assert (y.mean() - 0.5).abs() < 0.01
    assert not torch.equal(task.train.x, task.fresh.x)


def test_explicit_solution_is_right_on_fresh_points_away_from_the_border() -> None:
    task, bias = make_task(Setting(seed=4, experiments=50)), 0.01
    nets = explicit_solution(task, bias)
    assert nets.w2.shape == (50, 3)
    x = task.fresh.x
    distance = torch.minimum((x @ task.a[..., None]).abs(), (x @ task.b[..., None]).abs()).squeeze(-1)
    right = (nets.logits(x) > 0) == (task.fresh.y > 0.5)
    assert bool(right[distance > 1.01 * math.sqrt(2) * bias].all())
    assert float(right.double().mean()) > 0.98
    # The paper's claim about the representation: label +1 stays on the plane through the origin, label -1 is under it.
    height = (nets.hidden(x) @ nets.w2[..., None]).squeeze(-1)
    assert height[task.fresh.y > 0.5].abs().max() < 1e-5
    torch.testing.assert_close(height[task.fresh.y < 0.5], -distance[task.fresh.y < 0.5] / math.sqrt(2), rtol=0, atol=1e-5)


# ---- Batched training


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_batched_training_equals_plain_pytorch(optimiser: Optimiser) -> None:
    setting = replace(SMALL, optimiser=optimiser, learning_rate=0.05)
    task, start = make_task(setting), new_nets(setting, 4, "start")
    start = Nets(start.w1.double(), start.w2.double(), start.b2.double())
    points = Points(task.train.x.double(), task.train.y.double())
    trained = train(start, points, setting, "some")
    network = plain_network(start, 2)
    kind = torch.optim.SGD if optimiser == "sgd" else torch.optim.Adam
    descent = kind(network.parameters(), lr=0.05)
    generator = stream(setting, "some order")
    for _ in range(setting.epochs):
        for batch in torch.randperm(200, generator=generator).split(32):
            descent.zero_grad()
            nn.BCEWithLogitsLoss()(network(points.x[2, batch]).squeeze(-1), points.y[2, batch]).backward()
            descent.step()
    torch.testing.assert_close(trained.w1[2], network[0].weight.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(trained.w2[2], network[2].weight.detach()[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(trained.b2[2:3], network[2].bias.detach(), rtol=0, atol=1e-10)


def test_hidden_bias_is_one_more_input() -> None:
    setting = replace(SMALL, hidden_bias=True)
    task, nets = make_task(setting), new_nets(setting, 6, "start")
    assert nets.w1.shape == (5, 6, 3)
    plain_x = task.train.x[0, :, :2]
    by_hand = (plain_x @ nets.w1[0, :, :2].T + nets.w1[0, :, 2]).relu() @ nets.w2[0] + nets.b2[0]
    torch.testing.assert_close(nets.logits(task.train.x)[0], by_hand)
    assert not torch.equal(train(nets, task.train, setting, "x").w1[..., 2], nets.w1[..., 2])
    torch.testing.assert_close(make_task(SMALL).train.x, task.train.x[..., :2])


def test_initial_weights_are_pytorchs() -> None:
    nets = new_nets(Setting(experiments=3000), 10, "start")
    for ours, layer_bound in ((nets.w1, 1 / math.sqrt(2)), (nets.w2, 1 / math.sqrt(10)), (nets.b2, 1 / math.sqrt(10))):
        assert float(ours.abs().max()) == pytest.approx(layer_bound, rel=0.01)
        assert float(ours.var()) == pytest.approx(layer_bound**2 / 3, rel=0.06)  # uniform


def test_an_experiment_alone_equals_the_same_among_others() -> None:
    def pruned(setting: Setting) -> list[Nets]:
        task = make_task(setting)
        whole = train_whole(task, setting)
        return [prune(whole, task, setting, choose, SCHEDULES["iterative"]) for choose in (by_the_paper, by_chance)]

    together = Setting(seed=9, experiments=70, epochs=5, masks=60)
    others = pruned(together)
    for experiment in (0, 69):
        for among, single in zip(others, pruned(replace(together, first=experiment, experiments=1)), strict=True):
            for field in ("w1", "w2", "b2"):
                torch.testing.assert_close(getattr(among, field)[experiment], getattr(single, field)[0], rtol=0, atol=1e-6)


def test_mask_losses_are_those_of_networks_with_neurons_taken_out() -> None:
    task, nets = make_task(SMALL), new_nets(SMALL, 6, "start")
    masks = torch.tensor([[True] * 6, [True, False, True, True, False, False], [False] * 5 + [True]]).expand(5, 3, 6)
    losses = mask_losses(nets, task.train, masks)
    for place in range(3):
        smaller = plain_network(nets.take(masks[:, place]), 4)
        expected = nn.BCEWithLogitsLoss()(smaller(task.train.x[4]).squeeze(-1), task.train.y[4])
        torch.testing.assert_close(losses[4, place], expected.detach())


# ---- Methods


def planted() -> tuple[Nets, Points]:
    """The explicit solution hidden among 7 neurons that add little: its neurons are 4, 5 and 6."""
    task = make_task(replace(SMALL, experiments=20, points=400))
    solution = explicit_solution(task)
    noise = torch.rand(20, 7, 2, generator=seeded(0)) - 0.5
    w1 = torch.cat([0.2 * noise[:, :4], solution.w1 * 3, 0.2 * noise[:, 4:]], 1)
    w2 = torch.cat([0.05 * noise[:, :4, 0], solution.w2 * 3, 0.05 * noise[:, 4:, 0]], 1)
    return Nets(w1, w2, solution.b2), task.train


@pytest.mark.parametrize("name", ["ensembles", *OTHER_METHODS])
def test_methods_find_the_planted_neurons(name: str) -> None:
    nets, points = planted()
    choose = by_the_paper if name == "ensembles" else OTHER_METHODS[name]
    kept = choose(nets, points, 3, replace(SMALL, experiments=20, masks=100))
    assert kept.shape == (20, 10)
    assert bool((kept.sum(-1) == 3).all())
    found = kept[:, 4:7].double().mean()
    if name.startswith("ensembles") and "pairs" not in name:
        assert found > 0.6  # 0.3 by chance; single terms cannot see that the three are of use only together
    elif name != "geometric median":  # which keeps neurons far from the others, and one of the three lies between two
        assert found == 1


def test_a_random_order_keeps_all_neurons_equally_often() -> None:
    setting = Setting(experiments=4000)
    kept = by_chance(new_nets(setting, 10, "start"), make_task(replace(setting, points=1)).train, 3, setting)
    assert set(kept.sum(-1).tolist()) == {3}
    assert (kept.double().mean(0) - 0.3).abs().max() < 5 * math.sqrt(0.21 / 4000)


def test_methods_take_all_the_rivals_of_the_second_table() -> None:
    assert len(OTHER_METHODS) == 10


# ---- Table 1


def test_a_small_table_1_separates_a_working_method_from_a_broken_one() -> None:
    """100 experiments: bounds are the paper's figures less or plus 4 standard errors, which chance hardly ever exceeds."""
    rows = {row.key: row.training for row in table(Setting(seed=21, experiments=100))}
    one_shot, iterative = rows["FCN10", "ensembles", "one-shot"], rows["FCN10", "ensembles", "iterative"]
    random = rows["FCN10", "random", "one-shot"]
    assert rows["FCN10", "", ""].percent >= 95
    assert 20 <= rows["FCN3", "", ""].percent <= 62
    assert 20 <= random.percent <= 60
    assert one_shot.percent >= 67
    assert iterative.percent >= 74
    assert min(one_shot.percent, iterative.percent) >= random.percent + 25


def test_pairs_do_better_than_chance_could_explain() -> None:
    setting = Setting(seed=22, experiments=64, masks=100)
    task = make_task(setting)
    pruned = prune(train_whole(task, setting), task, setting, by_pairs, SCHEDULES["one-shot"])
    assert int((accuracies(pruned, task.train) >= 0.95).sum()) >= 58  # measured 98 %; plain ensembles would have 83 %


def test_intervals_are_wilsons() -> None:
    # Wilson's interval for 10 of 100 as textbooks have it, and the bounds at the ends of the scale.
    low, high = Share(10, 100).interval
    assert (low, high) == (pytest.approx(5.523, abs=0.001), pytest.approx(17.437, abs=0.001))
    assert Share(0, 100).interval[0] == pytest.approx(0, abs=1e-9)
    assert Share(100, 100).interval[1] == pytest.approx(100, abs=1e-9)
    assert Share(3, 10) + Share(1, 20) == Share(4, 30)


def test_pooled_rows_add_up_seeds() -> None:
    first, second = (ExperimentRow("FCN3", "", "", Share(n, 10), Share(n + 1, 10)) for n in (3, 5))
    (row,) = pooled([[first], [second]])
    assert (row.training, row.fresh, row.paper) == (Share(8, 20), Share(10, 20), 40.4)


def test_sweep_covers_the_grid_on_the_same_networks() -> None:
    seen: list[SweptPoint] = []
    points = sweep(SMALL, off=(0.1, 0.5), masks=(20, 30), report=seen.append)
    assert [(p.off, p.masks) for p in points] == [(0.1, 20), (0.5, 20), (0.1, 30), (0.5, 30)]
    assert tuple(seen) == points


@pytest.mark.parametrize("field", ["experiments", "points", "epochs", "batch", "masks", "learning_rate"])
def test_settings_out_of_range_are_explained(field: str) -> None:
    with pytest.raises(InvalidInput, match=f"{field}: got 0"):
        table(replace(SMALL, **{field: 0}))  # type: ignore[arg-type]


# ---- Tables, figures, command


def rows_of(percent: int) -> list[ExperimentRow]:
    share, low = Share(percent, 100), Share(percent - 10, 100)
    keys = [("FCN10", "ensembles", "one-shot"), ("FCN10", "ensembles", "iterative")]
    return [ExperimentRow(*key, share, low) for key in keys]


def test_sheets_put_the_papers_figure_beside_ours() -> None:
    rows = rows_of(83)
    sheet = paper_sheet(rows, [rows], [1])
    # Two shares of 0.826 among 1,000 and 0.83 among 100: the variances add up to 0.0394², and 1.96 times that is 7.7 points.
    assert sheet.lines[0][:6] == ("ensembles, one-shot", "82.6", "83.0", "74.5–89.1", "yes", "+0.4 ± 7.7")
    far = rows_of(50)
    assert paper_sheet(far, [far, far], [1, 2]).lines[1][4:] == ("no", "-38.0 ± 10.0", "50.0", "50.0", "40.0")
    assert methods_sheet(rows).lines[0][0] == "ensembles"
    text = sweep_sheet([SweptPoint(0.3, 100, Share(8, 10), Share(7, 10))]).markdown()
    assert "| P | M = 100 |\n| --- | --- |\n| 0.3 | 80.0 (49.0–94.3) |\n" in text
    assert "| mean \\|Taylor\\| |" in Sheet("t", ("method",), (("mean |Taylor|",),)).markdown()
    assert plain(rows[0])["training"] == {
        "successes": 83,
        "experiments": 100,
        "percent": 83.0,
        "interval": rows[0].training.interval,
    }


def test_figures_are_written_as_png_and_svg_and_repeat_exactly(tmp_path: Path) -> None:
    swept = [SweptPoint(off, count, Share(count, 100), Share(1, 2)) for off in (0.1, 0.5) for count in (30, 90)]
    first = draw_all(tmp_path / "one", SMALL, swept)
    second = draw_all(tmp_path / "two", SMALL, swept)
    assert [file.name for file in first] == [
        f"xor-{name}.{kind}" for name in ("data", "hidden", "sensitivity") for kind in ("png", "svg")
    ]
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()
        assert one.read_bytes().startswith(b"\x89PNG" if one.suffix == ".png" else b"<?xml")


def test_the_command_writes_rows_tables_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--experiments", "4", "--epochs", "2", "--points", "100", "--masks", "20", "--seeds", "3", "4", "--all"]
    app(["xor", *arguments, "--out", str(tmp_path)], result_action="return_value")
    printed = capsys.readouterr().out
    assert "paper" in printed
    assert "99.5" in printed
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["seeds"] == [3, 4]
    assert len(content["rows"]) == 5 + 2 * len(OTHER_METHODS)
    assert content["rows"][0]["training"]["experiments"] == 8
    assert "| least-squares refit |" in (tmp_path / "tables.md").read_text()
    assert (tmp_path / "xor-data.svg").exists()


def test_without_matplotlib_tables_are_written_and_one_line_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # makes importing it an ImportError
    monkeypatch.setattr("secateurs_lab.compare.figures.find_spec", lambda name: None)
    app(["xor", "--experiments", "3", "--epochs", "1", "--points", "64", "--out", str(tmp_path)], result_action="return_value")
    assert {file.name for file in tmp_path.iterdir()} == {"rows.json", "tables.md"}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: figures need matplotlib, which is not installed: pip install './lab[figures]'. "
        "Rows, tables and pages are written without it."
    ]
    with pytest.raises(InvalidInput, match=r"pip install '\./lab\[figures\]'"):
        draw_all(tmp_path, SMALL)


def test_the_command_prints_json_alone_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--experiments", "3", "--epochs", "1", "--points", "64", "--masks", "10", "--json", "--out", str(tmp_path)]
    app(["xor", *arguments], result_action="return_value")
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "rows.json").read_text())


def test_training_leaves_the_given_networks_alone() -> None:
    task, nets = make_task(SMALL), new_nets(SMALL, HIDDEN, "start")
    before: list[Tensor] = [t.clone() for t in (nets.w1, nets.w2, nets.b2)]
    train(nets, task.train, SMALL, "x")
    assert all(torch.equal(a, b) for a, b in zip(before, (nets.w1, nets.w2, nets.b2), strict=True))


def test_deleted_weights_stay_zero_and_the_rows_are_complete() -> None:
    setting = Setting(seed=3, experiments=3, epochs=2, points=40)
    task = make_task(setting)
    whole = train_whole(task, setting)
    for delete in WAYS.values():
        cut, alive = delete_weights(whole, task.train, 10, delete)
        assert alive.sum(1).tolist() == [10, 10, 10]
        again = train(cut, task.train, setting, "retrain weights", held=shaped(alive.double(), cut))
        for nets in (cut, again):
            assert not flat(nets)[~alive].any()
        assert (flat(again) != flat(cut))[alive].any()
    rows = weights_table(setting)
    assert [row.schedule for row in rows] == ["deleted", "retrained"] * len(WAYS)
    assert [line[0] for line in weights_sheet(rows).lines] == list(WAYS)


def test_ways_to_delete_by_hand() -> None:
    """Three weights, two alike in their slopes: the surgeon deletes one of them and doubles the other."""
    rows = torch.tensor([[[1.0, 1.0, 0.0], [0.0, 0.0, 2.0]]]).double()
    weights, alive = torch.tensor([[0.5, 0.4, -0.3]]).double(), torch.ones(1, 3, dtype=torch.bool)
    chosen = {name: delete(weights, rows, alive) for name, delete in WAYS.items()}
    assert int(chosen["magnitude"][0]) == 2  # 0.3
    assert int(chosen["OBD"][0]) == 1  # 0.5 · 0.4² is less than 2 · 0.3²
    assert int(chosen["OBS"][0]) == 1
    assert chosen["OBS"][1][0].tolist() == pytest.approx([0.9, 0.0, -0.3], abs=1e-3)
