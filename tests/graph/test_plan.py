"""Plans: original channel ids, JSON and back, replayed on the untouched network; damage is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nets import Net, random_tensor, randomise_, run, seeded, traced, with_few_blocks, without
from secateurs import Graph, Plan, compact, find_sites, replay, trace, verify
from secateurs.config import Shortcut
from secateurs.errors import PlanError, SecateursError
from secateurs.graph.plan import PlannedCut
from secateurs.models import example_input


def chain(width: int = 6) -> Graph:
    net = Net(
        lambda net, x: net.c(torch.relu(net.b(torch.relu(net.a(x))))),
        a=nn.Conv2d(3, width, 3),
        b=nn.Conv2d(width, 5, 3),
        c=nn.Conv2d(5, 2, 1),
    )
    return traced(net, random_tensor(2, 3, 8, 8))


def test_ids_are_original_over_several_steps() -> None:
    graph = chain()
    first = compact(graph, {"a": without(6, 1, 4)})
    second = compact(first, {"a": without(4, 1), "b": without(5, 0)})  # 0 2 3 5 are left of a: position 1 is channel 2
    assert second.plan.steps == (
        (PlannedCut("a", (1, 4), 6),),
        (PlannedCut("a", (2,), 6), PlannedCut("b", (0,), 5)),
    )
    assert second.plan.removed() == {"a": (1, 2, 4), "b": (0,)}
    assert second.plan.model == "nets.Net"
    assert graph.plan.steps == ()


def test_a_plan_can_be_given_to_compact_and_replayed_in_part() -> None:
    graph = chain()
    half = compact(graph, {"a": without(6, 1, 4)})
    whole = compact(half, {"b": without(5, 2)})
    for again in (replay(graph, whole.plan), compact(graph, whole.plan), replay(half, Plan(whole.plan.steps[1:], "nets.Net"))):
        assert torch.equal(run(again.module, *graph.example), run(whole.module, *graph.example))


def test_cutting_nothing_leaves_no_step() -> None:
    graph = chain()
    for masks in ({}, {"a": without(6)}):
        same = compact(graph, masks)
        assert same.plan == graph.plan
        assert torch.equal(run(same.module, *graph.example), run(graph.module, *graph.example))


cuts = st.integers(1, 40).flatmap(
    lambda n: st.builds(
        lambda site, ids, n=n: PlannedCut(site, tuple(sorted(ids)), n),
        st.text(min_size=1, max_size=9),
        st.sets(st.integers(0, n - 1)),
    )
)


@settings(deadline=None, max_examples=30)
@given(st.builds(Plan, st.lists(st.lists(cuts, max_size=3).map(tuple), max_size=3).map(tuple), st.text(max_size=20)))
def test_json_and_back_is_the_same_plan(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_a_saved_plan_is_json_with_ids(tmp_path: Path) -> None:
    plan = compact(chain(), {"a": without(6, 1, 4)}).plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["secateurs_plan"] == 1
    assert found["steps"] == [[{"site": "a", "removed": [1, 4], "channels": 6}]]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def plan_json(**changes: Any) -> str:
    return json.dumps({"secateurs_plan": 1, "model": "m", "steps": []} | changes)


def one_cut(**changes: Any) -> str:
    return plan_json(steps=[[{"site": "a", "removed": [1], "channels": 6} | changes]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        (plan_json()[:-5], "not JSON.*cut short"),
        ("[]", "no 'secateurs_plan' field"),
        ('{"steps": []}', "no 'secateurs_plan' field"),
        (plan_json(secateurs_plan=2), "plan of version 2, this secateurs reads version 1"),
        (plan_json(secateurs_plan="1"), "plan of version '1'"),
        (plan_json(steps={}), "'steps' must be a list of lists"),
        (plan_json(steps=[{}]), "'steps' must be a list of lists"),
        (plan_json(steps=[["a"]]), "a cut needs 'site'.*'removed'.* and 'channels'"),
        (plan_json(steps=[[{"site": "a", "removed": [1]}]]), "a cut needs"),
        (one_cut(removed=[6]), r"removed ids \[6\] must be distinct, 0 to 5"),
        (one_cut(removed=[-1]), "must be distinct, 0 to 5"),
        (one_cut(removed=[1, 1]), "must be distinct"),
        (one_cut(removed="12"), "a cut needs"),
        (one_cut(removed=[1.7]), "a cut needs"),
        (one_cut(removed=None), "a cut needs"),
        (one_cut(site=3), "a cut needs"),
        (one_cut(channels="6"), "a cut needs"),
        (one_cut(biases=[1]), "a cut needs.*biases"),
        (plan_json(model=[]), "'model' must be the name of a class"),
        ("[" * 100_000, "not JSON that is read here: nested deeper than 32"),
        (plan_json(steps=[["x" * 100_000]]), "a cut needs"),
        ('{"secateurs_plan": 1, "secateurs_plan": 1, "steps": []}', "the key 'secateurs_plan' occurs twice"),
    ],
)
def test_damaged_plans_are_named(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"here: .*{message}") as caught:
        Plan.from_json(text, where="here")
    assert len(str(caught.value)) <= 600


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    for name in ("absent.json", "binary"):
        with pytest.raises(PlanError, match=f"{tmp_path}/{name}"):
            Plan.load(tmp_path / name)


def test_a_plan_for_another_width_is_refused() -> None:
    plan = compact(chain(), {"a": without(6, 1)}).plan
    with pytest.raises(PlanError, match="cuts site 'a' of 6 channels, but this network has 7 there"):
        replay(chain(width=7), plan)


def test_a_plan_for_other_layers_is_refused() -> None:
    plan = Plan(((PlannedCut("features.3", (0,), 6),),), "nets.Net")
    with pytest.raises(SecateursError, match=r"no site 'features.3'"):
        replay(chain(), plan)


# ---- many cuts one after the other ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "resnet8",
        pytest.param("mobilenet-small", marks=pytest.mark.slow),
        pytest.param("resnext-small", marks=pytest.mark.slow),
        "split-small",
    ],
)
@pytest.mark.parametrize("shortcut", ["before", "after", "stream"])
def test_site_by_site_in_two_rounds(name: str, shortcut: Shortcut) -> None:
    batch = example_input(name).double()[..., :16, :16]
    start = trace(randomise_(with_few_blocks(name), 0), batch)
    left = {site.name: set(range(site.channels)) for site in find_sites(start, shortcut)}
    names = list(left)
    generator = seeded(0)
    graph = start
    for step, site_name in enumerate([*names, *names]):
        sites = {site.name: site for site in find_sites(graph, shortcut)}
        site = sites[site_name]
        assert set(site.original) <= left[site_name]
        keep = torch.rand(site.channels, generator=generator) > 0.25
        keep[step % site.channels] = True
        smaller = compact(graph, {site: keep}, verify=False)
        verify(graph, {site: keep}, smaller)
        graph = smaller
        left[site_name] = {i for i, kept in zip(site.original, keep.tolist(), strict=True) if kept}
    assert {site.name for site in find_sites(graph, shortcut)} <= set(names)
    again = replay(start, graph.plan, verify=False)
    torch.testing.assert_close(again.module(batch), graph.module(batch), rtol=0, atol=1e-12)
