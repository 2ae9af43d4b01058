"""All sites observed at once: the same as one after the other; the curvature is that of single examples' gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets import seeded
from secateurs import find_sites, trace
from secateurs.data.dataset import Examples
from secateurs.graph.trace import Graph
from secateurs.metrics import cross_entropy, drawn_labels
from secateurs.models import build
from secateurs.repair import observe, prepare, refit_, solve_together
from secateurs.repair.observe import observe_sites
from secateurs.repair.survey import curvature_of, survey


class TwoReaders(nn.Module):
    """Two layers that one layer reads side by side, and a sum behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 5, 1), nn.Conv2d(9, 6, 3, padding=1)
        self.d, self.head = nn.Conv2d(6, 6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([torch.relu(self.a(x)), torch.relu(self.b(x))], 1)
        c = torch.relu(self.c(both))
        out: Tensor = self.head(torch.relu(c + self.d(c)).mean((2, 3)))
        return out


def two_readers() -> tuple[Graph, Examples]:
    torch.manual_seed(0)
    graph = trace(TwoReaders().double().eval(), torch.randn(2, 3, 5, 5, dtype=torch.float64))
    inputs = torch.randn(30, 3, 5, 5, generator=seeded(1), dtype=torch.float64)
    return graph, Examples(inputs, torch.arange(30) % 3)


def test_sites_observed_together_are_as_observed_alone() -> None:
    graph, data = two_readers()
    names = [site.name for site in find_sites(graph)]
    prepared = prepare(graph, names)
    together = observe_sites(prepared, names, data, batch=7, rows=200, seed=2)
    for name in names:
        alone = observe(prepared, name, data, original=graph, batch=30, rows=200, seed=2)
        assert [fit.name for fit in together[name].layers] == [fit.name for fit in alone.layers]
        for ours, theirs in zip(together[name].layers, alone.layers, strict=True):
            torch.testing.assert_close(ours.total.gram, theirs.total.gram, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(ours.total.cross, theirs.total.cross, rtol=1e-8, atol=1e-8)
        for one, other in zip(together[name].sums, alone.sums, strict=True):
            torch.testing.assert_close(one.sums, other.sums, rtol=1e-8, atol=1e-8)


def test_a_layer_that_reads_two_cut_sites_is_solved_for_both() -> None:
    graph, data = two_readers()
    prepared = prepare(graph, ["a", "b"])
    found = observe_sites(prepared, ["a", "b"], data, rows=None)
    masks = {"a": torch.tensor([True, False, True, True]), "b": torch.tensor([True, True, False, True, False])}
    weight = solve_together(found, masks)["c.weight"]
    module = graph.module
    with torch.no_grad():  # the textbook's way: regress the layer's output on the patches of what is left
        read = torch.cat([torch.relu(module.a(data.inputs)), torch.relu(module.b(data.inputs))], 1)
        kept = torch.cat([masks["a"], masks["b"]])
        rows = F.unfold(read[:, kept], 3, padding=1).transpose(1, 2).flatten(0, 1)
        rows = F.pad(rows, (0, 1), value=1.0)
        wanted = module.c(read).flatten(2).transpose(1, 2).flatten(0, 1)
        best = torch.linalg.lstsq(rows, wanted, driver="gelsd").solution[:-1].T.view(6, int(kept.sum()), 3, 3)
    torch.testing.assert_close(weight[:, kept], best, rtol=1e-4, atol=1e-4)


def test_curvature_is_the_mean_product_of_single_gradients() -> None:
    graph, data = two_readers()
    found = curvature_of(graph, ["a", "b"], data, cross_entropy, batch=8)
    expected = torch.zeros(6, 6, dtype=torch.float64)
    for image, label in zip(data.inputs, data.targets, strict=True):
        module = copy.deepcopy(graph.module)
        seen: list[Tensor] = []
        module.get_submodule("c").register_forward_hook(lambda _, __, out, seen=seen: (out.retain_grad(), seen.append(out))[1])
        F.cross_entropy(module(image[None]), label[None]).backward()
        slope = seen[0].grad
        assert slope is not None
        expected += torch.einsum("chw,dhw->cd", slope[0], slope[0])
    torch.testing.assert_close(found["c"][0], expected / len(data))


def test_a_loss_without_gradient_has_no_curvature() -> None:
    graph, data = two_readers()
    assert curvature_of(graph, ["a"], data, lambda outputs, targets: (outputs.argmax(1) == targets).double()) == {}


def test_the_predicted_loss_is_that_of_the_second_order_where_errors_do_not_mix() -> None:
    """With one place and the loss ½ (w · y)², labels drawn of either sign, the prediction is the loss itself."""
    torch.manual_seed(1)
    first, second = nn.Linear(4, 6), nn.Linear(6, 1)
    graph = trace(nn.Sequential(first, nn.ReLU(), second).double().eval(), torch.randn(2, 4, dtype=torch.float64))
    inputs = torch.randn(400, 4, generator=seeded(3), dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0]).double().repeat(200)
    found = survey(prepare(graph, ["0"]), ["0"], Examples(inputs, signs), Examples(inputs, signs), lambda y, t: y[:, 0] * t)
    elimination = found.reconstructions["0"].order(curvature=found.curvature)
    keep = torch.ones(6, dtype=torch.bool)
    for filters in (1, 3):
        keep[elimination.order[:filters]] = False
        with torch.no_grad():
            hidden, wanted = torch.relu(first.double()(inputs)), graph.module(inputs)
            rows = F.pad(hidden[:, keep], (0, 1), value=1.0)
            left = wanted - rows @ torch.linalg.lstsq(rows, wanted, driver="gelsd").solution
        measured = float(left.square().mean()) / 2
        assert float(elimination.increases[:filters].sum()) == pytest.approx(measured, rel=1e-3, abs=1e-9)


def test_drawn_labels_are_classes_of_their_probability() -> None:
    probabilities = torch.tensor([0.1, 0.9]).repeat(4000, 1)
    drawn = drawn_labels(probabilities, 0)
    assert torch.equal(drawn.sum(1), torch.ones(4000))
    assert float(drawn[:, 1].mean()) == pytest.approx(0.9, abs=0.03)
    assert drawn_labels(torch.rand(5, 3, 2, 2).softmax(1), 0).shape == (5, 3, 2, 2)


@pytest.mark.parametrize("kept_bytes", [0, 3 * 16 * 16 * 16 * 8 * 4])
def test_a_refit_does_not_depend_on_what_is_kept_in_between(kept_bytes: int) -> None:
    torch.manual_seed(0)
    graph = trace(build("resnet8").double().eval(), torch.randn(2, 3, 16, 16, dtype=torch.float64))
    data = Examples(torch.randn(12, 3, 16, 16, generator=seeded(5), dtype=torch.float64), torch.zeros(12, dtype=torch.long))
    cuts = []
    for most in (2**31, kept_bytes):
        cut = graph.with_module(copy.deepcopy(graph.module))
        with torch.no_grad():
            for name, weight in cut.module.named_parameters():
                if name.endswith("conv1.weight"):
                    weight.mul_(0.8)
        refit_(cut, graph, data, batch=5, kept_bytes=most)
        cuts.append(cut.module.state_dict())
    for name, tensor in cuts[0].items():
        torch.testing.assert_close(tensor, cuts[1][name], rtol=0, atol=1e-12)
