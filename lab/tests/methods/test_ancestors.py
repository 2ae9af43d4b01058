"""The paper's ancestors: their maths against brute force, finite differences and Monte Carlo; their networks against laws."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from test_methods import BUDGET, TARGET, Killed, ResidualNet, data, graph, killer, share_removed, task
from torch import Tensor, nn

from nets import assert_same_bits, random_tensor, randomise_, seeded
from secateurs import compact, find_sites, load, masked, save, trace
from secateurs.config import TrainSettings
from secateurs.criteria import score_filters
from secateurs.data import Examples
from secateurs.errors import InvalidInput
from secateurs.graph.masking import copied
from secateurs.graph.trace import Graph
from secateurs.models import build
from secateurs.repair import observe, prepare
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.training import train_
from secateurs_lab.criteria.maxplus import wins
from secateurs_lab.criteria.obd import curvature_roots, weight_curvatures
from secateurs_lab.criteria.thinet import error, pursuit_order, removal_order, scales, share_moments
from secateurs_lab.methods import METHODS, Budget, Pruned, Task, method, training
from secateurs_lab.methods.base import opened, recipe_for
from secateurs_lab.methods.l0 import chance_open, fold, gated, sample, typical
from secateurs_lab.methods.obs_weights import delete_weight, inverse_hessian, output_slopes
from secateurs_lab.methods.ssl import group_lasso
from secateurs_lab.methods.weights import dead_filters, deviations, weights_of, without_dead, zero_lowest_
from secateurs_lab.models.lenet import MaxPlus, MaxPlusNet
from secateurs_lab.reproduce.xor_nets import Nets, Points
from secateurs_lab.reproduce.xor_weights import flat, shaped, slopes

SYSTEMS = ("thinet", "thinet-pursuit", "ssl", "l0", "han[share=0.6]", "obd-weights[share=0.6]")


def asked(name: str, **changes: Any) -> Task:
    """The task of `test_methods`; a share of the weights meets no target of MACs."""
    return task(budget=BUDGET, **changes) if "share" not in name else task(budget=BUDGET, target_macs=1e-12, **changes)


def small() -> tuple[Graph, Examples]:
    """A ReLU network of a convolution and two linear layers, in float64, and labelled examples."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3))
    found = trace(randomise_(net), random_tensor(2, 1, 5, 5))
    return found, Examples(random_tensor(12, 1, 5, 5, seed=3), torch.arange(12) % 3)


def mean_loss(module: nn.Module, examples: Examples) -> float:
    with torch.no_grad():
        inputs: Any = examples.inputs
        return float(nn.functional.cross_entropy(module(inputs), torch.as_tensor(examples.targets)))


def second_difference(loss: Any, step: float = 1e-3) -> float:
    return float((loss(step) - 2 * loss(0.0) + loss(-step)) / step**2)


# ---- Optimal Brain Damage ------------------------------------------------------------------------------------------------


def test_roots_add_up_to_the_curvature_of_cross_entropy() -> None:
    logits = random_tensor(3, 4)
    p = logits.softmax(1)
    found = sum(root[:, :, None] * root[:, None, :] for root in curvature_roots(logits))
    torch.testing.assert_close(found, torch.diag_embed(p) - p[:, :, None] * p[:, None, :])


def test_curvatures_of_linear_weights_are_second_differences() -> None:
    net, examples = small()
    found = weight_curvatures(net.module, examples, batch=5)
    for name, (row, column) in itertools.product(("3", "5"), ((0, 1), (2, 3))):
        changed = copied(net)
        weight = weights_of(changed)[name]
        start = float(weight.detach()[row, column])

        def loss(step: float, weight: Tensor = weight, start: float = start, module: nn.Module = changed.module) -> float:
            weight.data[row, column] = start + step  # noqa: B023
            return mean_loss(module, examples)

        assert float(found[name][row, column]) == pytest.approx(second_difference(loss), rel=1e-3, abs=1e-7)


def test_saliencies_of_gates_are_half_the_second_difference() -> None:
    net, examples = small()
    for site in find_sites(net):
        found = score_filters("obd", SiteEvaluator(net, site), examples).coef
        for channel in (0, 2):
            changed = copied(net)
            layer: Any = changed.module.get_submodule(site.layers[0])
            weight, bias = layer.weight[channel].detach().clone(), float(layer.bias.detach()[channel])

            def loss(step: float, layer: Any = layer, weight: Tensor = weight, bias: float = bias, c: int = channel) -> float:
                layer.weight.data[c], layer.bias.data[c] = (1 + step) * weight, (1 + step) * bias
                return mean_loss(changed.module, examples)  # noqa: B023

            assert float(found[channel]) == pytest.approx(second_difference(loss) / 2, rel=1e-3, abs=1e-7)


# ---- Optimal Brain Surgeon -----------------------------------------------------------------------------------------------


def test_the_recursion_gives_the_inverse() -> None:
    rows = random_tensor(2, 30, 7)
    hessian = 0.1 * torch.eye(7).double() + rows.mT @ rows / 30
    torch.testing.assert_close(inverse_hessian(rows, alpha=0.1), torch.linalg.inv(hessian))
    one_by_one = torch.eye(7).double() / 0.1
    for row in rows[0]:  # as it was published
        one_by_one -= torch.outer(one_by_one @ row, row @ one_by_one) / (30 + row @ one_by_one @ row)
    torch.testing.assert_close(inverse_hessian(rows, alpha=0.1)[0], one_by_one)


def test_each_deletion_is_the_best_of_all_and_moves_the_others_to_their_minimum() -> None:
    """Brute force: for every weight, the minimum of the quadratic with it, and what was deleted before, at zero."""
    rows, start = random_tensor(40, 6), random_tensor(6, seed=5)
    hessian = 1e-3 * torch.eye(6).double() + rows.T @ rows / 40
    inverse, weights, alive = inverse_hessian(rows, alpha=1e-3), start, torch.ones(6, dtype=torch.bool)
    lost = 0.0
    for _ in range(4):
        best = (torch.inf, start)
        for q in alive.nonzero().flatten().tolist():
            free = alive.clone()
            free[q] = False
            moved = torch.zeros(6).double()
            moved[free] = torch.linalg.solve(hessian[free][:, free], (hessian @ start)[free])
            best = min(best, (float((moved - start) @ hessian @ (moved - start)) / 2, moved), key=lambda pair: pair[0])
        found = delete_weight(weights, inverse, alive)
        weights, inverse, lost = found.weights, found.inverse, lost + float(found.increase)
        alive[found.index] = False
        torch.testing.assert_close(weights, best[1])
        assert lost == pytest.approx(best[0], rel=1e-9)


def test_slopes_of_a_network_make_its_gauss_newton_hessian() -> None:
    """Its diagonal is what Optimal Brain Damage has, exact for linear layers."""
    net, examples = small()
    names = ["3.weight", "5.weight"]
    rows = output_slopes(net.module, examples, names)
    assert len(rows) == 12 * 3
    found = weight_curvatures(net.module, examples)
    wanted = torch.cat([found["3"].flatten(), found["5"].flatten()])
    torch.testing.assert_close(rows.square().sum(0) / 12, wanted)


def test_slopes_of_the_xor_networks_are_those_of_autograd() -> None:
    nets = Nets(random_tensor(2, 4, 2).float(), random_tensor(2, 4, seed=1).float(), random_tensor(2, seed=2).float())
    points = Points(random_tensor(2, 5, 2, seed=3).float(), torch.zeros(2, 5))
    rows = slopes(nets, points)

    def logits(weights: Tensor) -> Tensor:
        return shaped(weights, nets).logits(points.x)

    jacobian: Any = torch.autograd.functional.jacobian(logits, flat(nets).float())
    for e in range(2):
        p = nets.logits(points.x)[e].sigmoid()
        wanted = jacobian[e, :, e] * (p * (1 - p)).sqrt()[:, None]
        torch.testing.assert_close(rows[e].float(), wanted, rtol=1e-4, atol=1e-5)


# ---- single weights ------------------------------------------------------------------------------------------------------


def test_the_lowest_weights_become_zero() -> None:
    net, _ = small()
    scores = {name: deviations(weight.detach()) for name, weight in weights_of(net).items()}
    thin = copied(net)
    zero_lowest_(thin, scores, 100)
    assert sum(int((weight == 0).sum()) for weight in weights_of(thin).values()) == 100
    kept = torch.cat([scores[name][weight != 0] for name, weight in weights_of(thin).items()])
    gone = torch.cat([scores[name][weight == 0] for name, weight in weights_of(thin).items()])
    assert gone.max() <= kept.min()
    values = torch.tensor([3.0, -3.0, 0.0, 1.0, -1.0])
    assert deviations(values).tolist() == pytest.approx((values.abs() / 5**0.5).tolist(), rel=1e-6)  # √((9 + 9 + 1 + 1) / 4)


def test_filters_without_inputs_or_readers_are_dead_and_their_removal_changes_nothing() -> None:
    net, examples = small()
    first, second, last = weights_of(net).values()
    with torch.no_grad():
        first[1] = 0  # reads nothing
        second.view(5, 4, 9)[:, 2] = 0  # nobody reads filter 2
        last[:, 4] = 0
    conv, hidden = find_sites(net)
    assert dead_filters(net, conv).tolist() == [False, True, True, False]
    assert dead_filters(net, hidden).tolist() == [False] * 4 + [True]
    job = task()
    with opened(job, "han", recipe_for(job, "l1"), None) as run:
        smaller = without_dead(run, net)
    assert [len(weight) for weight in weights_of(smaller).values()] == [2, 4, 3]
    with torch.no_grad():
        net.module.get_submodule("0").bias[1] = 0  # type: ignore[index,operator]  # a dead filter's constant goes with it
        inputs: Any = examples.inputs
        torch.testing.assert_close(smaller.module(inputs), net.module(inputs), rtol=0, atol=1e-12)


# ---- ThiNet --------------------------------------------------------------------------------------------------------------


def thinet_moments() -> tuple[Tensor, Tensor]:
    """Moments of the first site of `small`, and the shares that they are of, (rows, C), computed channel by channel."""
    net, examples = small()
    site = find_sites(net)[0]
    inputs: Any = examples.inputs
    with torch.no_grad():
        maps = net.module.get_submodule("0")(inputs).relu().flatten(2)  # (N, 4, 9)
        weight = weights_of(net)["3"].detach().view(5, 4, 9)
        shares = torch.einsum("ncp,fcp->nfc", maps, weight).flatten(0, 1)
    return share_moments(observe(net, site, examples)), shares


def test_moments_of_shares_by_hand() -> None:
    moments, shares = thinet_moments()
    torch.testing.assert_close(moments, shares.T @ shares)


def test_the_greedy_removal_takes_the_best_each_time() -> None:
    moments, shares = thinet_moments()
    order, removed = removal_order(moments).tolist(), list[int]()
    for chosen in order:
        errors = {j: float(shares[:, [*removed, j]].sum(1).square().sum()) for j in range(4) if j not in removed}
        assert chosen == min(errors, key=lambda j: errors[j])
        removed.append(chosen)


def test_scales_never_lose_to_none_pursuit_with_them_is_near_the_best_and_a_full_repair_beats_both() -> None:
    net, examples = small()
    moments, shares = thinet_moments()
    whole = shares.sum(1)
    reconstruction = observe(prepare(net, ["0"]), "0", examples)
    before = {"removal": torch.inf, "pursuit": torch.inf}
    for count in range(1, 4):  # kept
        best = min(
            float(
                (whole - shares[:, list(kept)] @ torch.linalg.lstsq(shares[:, list(kept)], whole[:, None]).solution[:, 0])
                .square()
                .sum()
            )
            for kept in itertools.combinations(range(4), count)
        ) / float(whole.square().sum())
        for name, order in (("removal", removal_order(moments)), ("pursuit", pursuit_order(moments))):
            keep = torch.ones(4, dtype=torch.bool)
            keep[order[: 4 - count]] = False
            plain, scaled = error(moments, keep.double()), error(moments, scales(moments, keep))
            assert best - 1e-9 <= scaled <= plain + 1e-9
            assert scaled <= before[name] + 1e-9, "more channels, less error"
            before[name] = scaled
            outputs = observed_error(reconstruction, keep, shares, whole)
            assert outputs <= scaled + 1e-9, "all weights free do at least as well as one scale a channel"


def observed_error(reconstruction: Any, keep: Tensor, shares: Tensor, whole: Tensor) -> float:
    """The error that a full repair leaves, as a share of the same energy."""
    fit = reconstruction.layers[0]
    spread = float(fit.total.spread.sum())
    return float(reconstruction.solve(keep, ridge=1e-10).errors["3"].after) * spread / float(whole.square().sum())


def test_one_channel_that_carries_all_is_kept_last() -> None:
    moments = torch.diag(torch.tensor([1.0, 9.0, 4.0])).double()
    assert removal_order(moments).tolist() == pursuit_order(moments).tolist() == [0, 2, 1]
    assert scales(moments, torch.tensor([False, True, True])).tolist() == pytest.approx([0, 1, 1], abs=1e-6)


# ---- L0 ------------------------------------------------------------------------------------------------------------------


def test_gates_are_open_as_often_as_the_closed_form_says() -> None:
    log_alpha = torch.tensor([-2.0, 0.0, 1.5])
    drawn = sample(log_alpha, torch.rand(200_000, 3, generator=seeded(0)).clamp(1e-6, 1 - 1e-6))
    assert drawn.min() == 0
    assert drawn.max() == 1
    torch.testing.assert_close((drawn > 0).double().mean(0), chance_open(log_alpha).double(), rtol=0, atol=4e-3)
    assert typical(torch.tensor([-20.0, 0.0, 20.0])).tolist() == pytest.approx([0, 0.5, 1])
    # by hand: sigmoid(0 - 2/3 log(0.1 / 1.1)) = 1 / (1 + 11^(-2/3))
    assert float(chance_open(torch.zeros(()))) == pytest.approx(1 / (1 + 11 ** (-2 / 3)), rel=1e-6)


def test_a_network_with_its_gates_multiplied_in_gives_what_the_gated_one_does() -> None:
    job = task()
    with opened(job, "l0", recipe_for(job, "l1"), None) as run:
        wide, gates = gated(graph(), run.sites, droprate=0.5)
        with torch.no_grad():
            for place, theta in enumerate(gates.values()):
                theta.copy_(2 * torch.randn(len(theta), generator=seeded(place)))
                theta[0], theta[1] = -9.0, 9.0
        values = {name: typical(theta.detach()) for name, theta in gates.items()}
        folded = fold(run, wide, values)
    masks: Any = {name: z > 0 for name, z in values.items()}
    inputs = data().search.batch(slice(0, 20)).inputs
    with torch.no_grad():
        for small_or_masked in (compact(folded, masks).module.eval(), masked(folded, masks).eval()):
            torch.testing.assert_close(small_or_masked(inputs), wide.module.eval()(inputs), rtol=1e-4, atol=1e-4)


# ---- SSL -----------------------------------------------------------------------------------------------------------------


def test_group_lasso_has_the_published_slope() -> None:
    weight = random_tensor(3, 2, 2, 2).requires_grad_()
    strengths = {"filters": 0.3, "channels": 0.2, "shapes": 0.1, "depth": 0.05}
    (found,) = torch.autograd.grad(group_lasso(weight, strengths), weight)
    w = weight.detach()
    by_hand = 0.3 * w / w.flatten(1).norm(dim=1).view(3, 1, 1, 1) + 0.2 * w / w.transpose(0, 1).flatten(1).norm(dim=1).view(
        1, 2, 1, 1
    )
    by_hand = by_hand + 0.1 * w / w.norm(dim=0) + 0.05 * w / w.norm()
    torch.testing.assert_close(found, by_hand)
    step = 1e-6 * random_tensor(3, 2, 2, 2, seed=7)
    difference = (group_lasso(w + step, strengths) - group_lasso(w - step, strengths)) / 2
    assert float(difference) == pytest.approx(float((found * step).sum()), rel=1e-6)
    zero = torch.zeros(2, 2, requires_grad=True)
    assert not torch.autograd.grad(group_lasso(zero, strengths), zero)[0].any()


def test_a_branch_of_zeros_vanishes() -> None:
    """Depth: a residual block whose last convolution became zero is gone, its first convolution with it."""
    net = copied(graph())
    with torch.no_grad():
        weights_of(net)["conv2"].zero_()
    job = task()
    with opened(job, "ssl", recipe_for(job, "l2"), None) as run:
        smaller = without_dead(run, net)
    assert "conv2" in weights_of(net)
    assert not {"conv1", "conv2"} & set(weights_of(smaller))


# ---- penalties -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distill", [0.0, 0.5, 1.0])
def test_a_penalty_is_added_as_a_whole_whatever_is_distilled(distill: float) -> None:
    """By hand: on inputs of zero the loss has no slope, and a step moves every weight by rate times strength."""
    net = nn.Linear(3, 2, bias=False)
    nn.init.ones_(net.weight)
    teacher, examples = copy.deepcopy(net), Examples(torch.zeros(4, 3), torch.arange(4) % 2)
    once = TrainSettings(steps=1, batch=4, lr=0.1, momentum=0, weight_decay=0, schedule="constant", distill=distill)
    history = train_(net, examples, once, teacher=teacher, penalty=lambda: 0.5 * net.weight.abs().sum())
    torch.testing.assert_close(net.weight.detach(), torch.full((2, 3), 1 - 0.1 * 0.5))
    assert history.epochs[0].loss == pytest.approx((1 - distill) * math.log(2) + 0.5 * 6)


def test_a_group_lasso_makes_filters_small_where_only_answers_are_distilled() -> None:
    """By hand: 15 steps take 0.05 · 2 off a filter's norm each, 1.5 in all, and swing by 0.1 around zero then."""
    after = TrainSettings(epochs=3, batch=24, lr=0.05, momentum=0, schedule="constant", distill=1.0)
    found = method("ssl[filters=2;channels=0]")(task(budget=Budget("answers", after=after)))
    norms = torch.cat(
        [weights_of(found.graph)[site.layers[0]].detach().flatten(1).norm(dim=1) for site in find_sites(found.graph)]
    )
    assert norms.max() < 0.15


def test_gates_close_where_only_answers_are_distilled() -> None:
    after = TrainSettings(epochs=3, batch=24, lr=0.05, distill=1.0)
    free, dear = (
        int(method(f"l0[price={price}]")(task(budget=Budget("answers", after=after))).note.split(": ")[1].split()[0])
        for price in (0, 50)
    )
    assert free < dear


@pytest.mark.parametrize("name", ["ssl", "l0"])
@pytest.mark.parametrize("between", [None, BUDGET.between])
def test_the_best_weights_are_kept_only_of_a_training_behind_the_cut(name: str, between: TrainSettings | None) -> None:
    after = TrainSettings(epochs=2, batch=24, lr=0.01, distill=1.0)
    with pytest.MonkeyPatch.context() as patch:
        widths = list[int]()  # of the networks that weights are chosen for
        guard = training._keep_best_

        def seen(run: Any, state: Any, *rest: Any) -> Any:
            widths.append(sum(map(len, weights_of(state.graph).values())))
            return guard(run, state, *rest)

        patch.setattr(training, "_keep_best_", seen)
        method(name)(task(budget=Budget("guarded", between, after, keep_best=True)))
    whole = sum(map(len, weights_of(graph()).values()))
    assert widths == [] if between is None else widths[0] < whole


# ---- max-plus ------------------------------------------------------------------------------------------------------------


def test_wins_by_hand() -> None:
    layer = MaxPlus(3, 2)
    layer.weight.data = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    x = torch.tensor([[5.0, 1.0, 1.0], [1.0, 3.0, 1.0], [1.0, 1.0, 1.0], [0.0, -9.0, -9.0]])
    # x_j + w_jk: out_0 = 5, 4, 2; out_1 = 5, 3, 3; a zero takes no part
    assert layer(x).tolist() == [[5.0, 5.0], [4.0, 3.0], [2.0, 3.0], [-8.0, -7.0]]
    found = wins(layer.sums(x[:3]), torch.tensor([0, 0, 1]), 2)
    assert found.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_filters_that_never_win_change_no_answer_when_they_are_removed() -> None:
    net = trace(randomise_(MaxPlusNet(filters=12)), random_tensor(2, 1, 28, 28))
    inputs = random_tensor(40, 1, 28, 28, seed=2)
    with torch.no_grad():
        sums = net.module.get_submodule("top").sums(net.module.get_submodule("filters")(inputs.flatten(1)))  # type: ignore[operator]
        keep = torch.zeros(12, dtype=torch.bool)
        keep[sums.argmax(-1).unique()] = True  # type: ignore[no-untyped-call]
        keep[:2] |= ~keep.any()
        smaller = compact(net, {"filters": keep})
        torch.testing.assert_close(smaller.module(inputs), net.module(inputs), rtol=0, atol=1e-12)
        some = torch.arange(12) % 2 == 0
        torch.testing.assert_close(
            compact(net, {"filters": some}).module(inputs), masked(net, {"filters": some})(inputs), rtol=0, atol=1e-12
        )


def test_max_plus_criteria_want_a_max_plus_layer() -> None:
    net, examples = small()
    with pytest.raises(InvalidInput, match="no max-plus layer reads its filters"):
        score_filters("maxplus", SiteEvaluator(net, find_sites(net)[0]), examples)
    twelve = trace(build("maxplus", filters=12).eval(), torch.randn(2, 1, 28, 28))
    images = Examples(torch.randn(30, 1, 28, 28, generator=seeded(1)), torch.arange(30) % 10)
    for name in ("maxplus", "maxplus-threshold"):
        found = score_filters(name, SiteEvaluator(twelve, find_sites(twelve)[0]), images).coef
        assert found.shape == (12,)
        assert found.max() <= 1 + 1e-9


# ---- every system as a method --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SYSTEMS)
def made(request: pytest.FixtureRequest) -> tuple[str, Pruned]:
    return request.param, method(request.param)(asked(request.param))


def test_each_reaches_the_target_and_spends_the_budget(made: tuple[str, Pruned]) -> None:
    name, pruned = made
    assert METHODS[name.partition("[")[0]]
    assert share_removed(pruned.graph) >= (0 if "share" in name else TARGET)
    assert pruned.trained.images == 5 * 24 + 2 * 121
    assert pruned.note


def test_each_network_reloads_from_its_file(made: tuple[str, Pruned], tmp_path: Any) -> None:
    smaller = made[1].graph
    again = load(ResidualNet(8), save(smaller, tmp_path / "pruned.safetensors"))
    assert_same_bits(smaller.module.state_dict(), again.module.state_dict())


def test_each_resumes_to_the_same_result_after_a_kill(made: tuple[str, Pruned], tmp_path: Any) -> None:
    name, whole = made
    job = asked(name, folder=tmp_path)
    for kill in (("finetune", 3), ("retrain", 8)):
        with pytest.raises(Killed):
            method(name)(job, watch=killer(*kill))
    again = method(name)(job)
    assert again.graph.plan == whole.graph.plan
    assert (again.trained, again.note) == (whole.trained, whole.note)
    assert_same_bits(whole.graph.module.state_dict(), again.graph.module.state_dict())


def test_weights_that_went_stay_zero_and_are_counted(made: tuple[str, Pruned]) -> None:
    name, pruned = made
    if "share" not in name:
        return
    left = sum(int((weight != 0).sum()) for weight in weights_of(pruned.graph).values())
    before = sum(weight.numel() for weight in weights_of(graph()).values())
    assert left <= before - round(0.6 * before)
    assert f"weights left: {left:,} of {before:,}" in pruned.note
    assert "dense hardware computes all of those" in pruned.note


@pytest.mark.slow
def test_weights_go_until_the_filters_that_die_reach_the_target() -> None:
    pruned = method("han")(task())
    assert share_removed(pruned.graph) >= TARGET
    assert pruned.trained.images == 0


def test_the_surgeon_refuses_what_does_not_fit_and_deletes_a_share_of_a_small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pruned = method("obs-weights[share=0.1]")(task(target_macs=1e-12))
    left = sum(int((weight != 0).sum()) for weight in weights_of(pruned.graph).values())
    before = sum(weight.numel() for weight in weights_of(graph()).values())
    assert left == before - round(0.1 * before)
    monkeypatch.setattr("secateurs_lab.methods.obs_weights._MOST", 100)
    with pytest.raises(
        InvalidInput, match=r"inverse Hessian of 978 weights does not fit: wanted at most 100\. Use obs\+repair"
    ):
        method("obs-weights")(task())


def test_settings_follow_a_name_in_brackets() -> None:
    with pytest.raises(InvalidInput, match=r"'prize=1' is no setting of it\. Did you mean 'price'"):
        method("l0[prize=1]")
    with pytest.raises(InvalidInput, match=r"'task=1' is no setting"):
        method("ssl[task=1]")
