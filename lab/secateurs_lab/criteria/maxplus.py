"""Max-plus selection (Zhang et al., 2019): filters in front of a max-plus layer compete, and those that never win can go.

A max-plus layer gives out_k = max_j (x_j + w_jk). A filter that is the largest for no image of any class changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secateurs._util.modules import eval_mode, on_device
from secateurs.criteria import CriterionContext, criterion
from secateurs.data.dataset import class_labels
from secateurs.errors import InvalidInput
from secateurs.graph.consumers import find_consumers
from secateurs.graph.masking import network_up_to
from secateurs_lab.models.lenet import MaxPlus


def wins(sums: Tensor, labels: Tensor, classes: int) -> Tensor:
    """How often each input wins the output of the right class, among the images that are classified right: (classes, inputs).

    `sums` (N, classes, inputs) are x_j + w_jk.
    """
    right = sums.amax(-1).argmax(1) == labels
    winner = sums[torch.arange(len(labels)), labels].argmax(1)[right]
    found = torch.zeros(classes, sums.shape[-1], dtype=torch.float64)
    return found.index_put((labels[right], winner), torch.ones(len(winner), dtype=torch.float64), accumulate=True)


@criterion("maxplus")
def maxplus_wins(context: CriterionContext) -> Tensor:
    """The largest share, over the classes, of a class's rightly classified images that the filter wins."""
    name, layer = _layer(context)
    labels = class_labels(context.examples.targets)
    if labels is None or len(labels) == 0:
        raise InvalidInput("criterion 'maxplus': wanted examples with class labels, to count wins on.")
    module = context.graph.module
    node = next(node for node in module.graph.nodes if node.name == name)
    before, total = network_up_to(module, node.all_input_nodes), torch.zeros(layer.out_channels, layer.in_channels).double()
    with on_device(before, context.evaluator.device) as place, eval_mode(before):
        for batch in context.examples.batches(context.evaluator.batch, device=place):
            (x,) = before(*batch.args)
            total += wins(layer.sums(x).detach().cpu(), torch.as_tensor(batch.targets).cpu(), layer.out_channels)
    return (total / total.sum(1, keepdim=True).clamp_min(1)).amax(0)


@criterion("maxplus-threshold")
def maxplus_threshold(context: CriterionContext) -> Tensor:
    """The largest weight of the filter over the classes, as a share of the class's largest (meant for positive maxima)."""
    weight = _layer(context)[1].weight.detach().cpu().double()
    return (weight / weight.amax(1, keepdim=True).clamp_min(1e-12)).amax(0)


def _layer(context: CriterionContext) -> tuple[str, MaxPlus]:
    """The node and module of the max-plus layer that reads the site, channel by channel."""
    for name in find_consumers(context.graph, context.site).others:
        node = next((node for node in context.graph.module.graph.nodes if node.name == name), None)
        part = context.graph.module.get_submodule(str(node.target)) if node is not None and node.op == "call_module" else None
        if isinstance(part, MaxPlus) and part.in_channels == context.site.channels:
            return name, part
    raise InvalidInput(
        f"criterion 'maxplus' at site {context.site.name!r}: no max-plus layer reads its filters. Rank this site by 'l1', or "
        f"choose sites with --sites."
    )
