"""Step 7 of 9: takes a Graph and masks by site, gives a narrower Graph that equals the masked network up to rounding.

`compact` rewrites the graph so that only live channels exist, `replay` does so by a plan, `verify` proves the equality.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from secateurs._util.modules import device_of
from secateurs.compaction.additions import with_additions
from secateurs.compaction.rewrite import rewrite_
from secateurs.compaction.state import Rewriting
from secateurs.errors import InvalidInput, NotEqual, PlanError, Unproved
from secateurs.graph.add_fusion import fuse_sums_, spread_sums
from secateurs.graph.channels import compose, ids
from secateurs.graph.flow import analyse, find_flows
from secateurs.graph.layers import Align, Constant
from secateurs.graph.masking import Masks, copied, copy_module, masked
from secateurs.graph.plan import Plan, PlannedCut
from secateurs.graph.sites import Site, check_masks, remember_names_, resolve
from secateurs.graph.trace import (
    Graph,
    as_example,
    attempt,
    like_network,
    other_batches,
    other_sizes,
    record_shapes_,
    tensors_in,
)

__all__ = ["Align", "Constant", "Verification", "compact", "replay", "verify"]


def compact(graph: Graph, masks: Masks | Plan, *, verify: bool = True) -> Graph:
    """The network without the channels that `masks` drop: ordinary narrower modules that compute what the masked network does.

    `masks` is {site or its name: bool tensor, True = kept}, or a `Plan` (see `replay`). A cut that empties a layer folds its
    branch into a constant where it is added or multiplied to something that still depends on the input; elsewhere it is
    `EmptyLayer`. Masks that drop nothing change nothing. The result is compared with the masked network on a small probe
    (see the function `verify`) unless `verify` is False. The given graph is not changed.
    """
    if isinstance(masks, Plan):
        return replay(graph, masks, verify=verify)
    checked = check_masks(graph, masks)
    if all(bool(mask.all()) for _, mask in checked.values()):
        return replace(graph, module=copy_module(graph), kept={})
    smaller = _rewritten(graph, checked)
    if verify and device_of(graph.module).type != "meta":
        found = _proof(graph, masks, smaller, quick=True)
        if not found.conclusive:
            warnings.warn(str(found), stacklevel=2)
    return smaller


def _rewritten(graph: Graph, checked: Mapping[str, tuple[Site, Tensor]]) -> Graph:
    """The narrower graph, not yet compared with anything."""
    module = spread_sums(copy_module(graph))
    nodes = {node.name: node for node in module.graph.nodes}
    if not graph.plan.steps:
        remember_names_(graph, module)
    flows = find_flows(module)
    keep = {nodes[site.node]: mask for site, mask in checked.values() if not bool(mask.all())}
    widths = {node: flows.width(node) for node in flows.of if flows.of[node].axis is not None}
    names = {nodes[site.node]: name for name, (site, _) in checked.items()}
    state = Rewriting(module, flows, analyse(flows, keep), names, keep)
    rewrite_(state)
    remaining = dict(graph.ids)
    replaced = [node for node in state.standing_for if node.meta.get("ends_site")]  # a site's gather, narrower or not
    for node in [n for n in dict.fromkeys([*state.layout, *replaced]) if n in widths]:
        layout = state.carried(node, widths[node])
        wide = node.meta.setdefault("original_channels", widths[node])
        remaining[node.name] = compose(graph.ids.get(node.name), ids(state.physical.get(node, layout)))
        stand_in = state.present(node)
        if stand_in not in flows.of and (node in state.physical or node.meta.get("ends_site")):
            remaining[stand_in.name] = compose(graph.ids.get(node.name), ids(layout))
            stand_in.meta["original_channels"] = wide
    record_shapes_(module, graph.example)
    fuse_sums_(module)
    there = {node.name for node in module.graph.nodes}
    remaining = {name: found for name, found in remaining.items() if name in there}  # a name can come again for another node
    cuts = [_planned(site, mask) for site, mask in checked.values() if not bool(mask.all())]
    return Graph(module, graph.example, graph.plan.then(cuts), graph.leaves, remaining, state.kept)


def _planned(site: Site, keep: Tensor) -> PlannedCut:
    removed = tuple(site.original[i] for i in ids(~keep).tolist())
    return PlannedCut(site.name, removed, site.original_channels)


def replay(graph: Graph, plan: Plan, *, verify: bool = True) -> Graph:
    """Make the cuts of `plan`, step by step, on a graph of the untouched network (or one that has had some of them).

    Each step is compared with the masked network unless `verify` is False.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"plan: got {type(plan).__name__}, wanted a Plan: graph.plan, or Plan.load(path).")
    for step in plan.steps:
        for cut in step:
            if cut.biases or cut.offsets:
                site = resolve(graph, [cut.site])[cut.site]
                graph = with_additions(graph, site, biases=cut.biases, offsets=cut.offsets)
        sites = resolve(graph, [cut.site for cut in step])
        masks: dict[str | Site, Tensor] = {}
        for cut in step:
            site = sites[cut.site]
            if site.original_channels != cut.channels:
                raise PlanError(
                    f"the plan cuts site {cut.site!r} of {cut.channels} channels, but this network has "
                    f"{site.original_channels} there. Use the network that the plan was made for."
                )
            gone = torch.tensor(cut.removed, dtype=torch.long)
            masks[cut.site] = ~torch.isin(torch.tensor(site.original, dtype=torch.long), gone)
        if any(cut.removed for cut in step):
            graph = compact(graph, masks, verify=verify)
    return graph


@dataclass(frozen=True)
class Verification:
    """How far the compacted network's outputs are from the masked one's: largest difference, and the outputs' own size.

    `perturbed_difference` and `perturbed_scale` are the same for the network with all its weights changed a little at random,
    which shows what weights that happen to be zero hide; on inputs of other sizes too. Where no output is finite and other
    than zero, with either weights, the comparison proves nothing: `conclusive` is False.
    """

    difference: float
    scale: float
    examples: int
    perturbed_difference: float
    perturbed_scale: float

    @property
    def conclusive(self) -> bool:
        """Whether there was anything to compare."""
        return self.scale > 0 or self.perturbed_scale > 0

    def __str__(self) -> str:
        if not self.conclusive:
            return "nothing is proved: the masked network gives nothing but 0, NaN or infinity on random inputs."
        return (
            f"compacted = masked: difference {self.difference:.2g} of {self.scale:.2g} on {self.examples} examples, "
            f"with changed weights {self.perturbed_difference:.2g} of {self.perturbed_scale:.2g}."
        )


def verify(
    graph: Graph,
    masks: Masks,
    compacted: Graph | None = None,
    *,
    inputs: Tensor | tuple[Tensor, ...] | None = None,
    seed: int = 0,
    tolerance: float = 1e-10,
) -> Verification:
    """Prove in float64, in eval mode, that the compacted network gives what the masked one gives; `NotEqual` otherwise.

    `compacted` is compacted here if it is not given. Without `inputs`, four random batches like the graph's example are used.
    The same is done once more with changed weights and with other sizes of input. The largest difference may be `tolerance`
    times the largest output. `Unproved` if there is nothing to compare.
    """
    if device_of(graph.module).type == "meta":
        raise Unproved(
            "a network on the meta device has no values to compare. Move it to a device: model.to_empty(device='cpu')."
        )
    smaller = compact(graph, masks, verify=False) if compacted is None else compacted
    given = None if inputs is None else _checked_inputs(graph, inputs)
    found = _proof(graph, masks, smaller, given=given, seed=seed, tolerance=tolerance)
    if not found.conclusive:
        raise Unproved(f"{found} Check its weights, or give `inputs` for which its outputs are something else.")
    if found.scale == 0 and compacted is not None and not _same_state(compact(graph, masks, verify=False), compacted):
        raise Unproved(
            "all outputs are zero, and the network given is not the one that compact makes: nothing is proved of it."
        )
    return found


def _checked_inputs(graph: Graph, inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs as a tuple, if the network takes them and there is something in them to compare."""
    given = as_example(inputs)
    for tensor in given:
        if not tensor.numel() or (tensor.is_floating_point() and not bool(tensor.isfinite().all())):
            raise InvalidInput("inputs: got an empty tensor, NaN or infinite values, wanted examples that can be compared.")
    if attempt(graph.module, like_network(graph.module, given)) is None:
        shapes = ", ".join(str(tuple(t.shape)) for t in given)
        raise InvalidInput(f"inputs: the network does not take shape {shapes}. Give a batch like the graph's example.")
    return given


def _same_state(one: Graph, other: Graph) -> bool:
    """Whether two graphs have the same tensors under the same names."""
    ours, theirs = one.module.state_dict(), other.module.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _proof(
    graph: Graph,
    masks: Masks,
    smaller: Graph,
    *,
    quick: bool = False,
    given: tuple[Tensor, ...] | None = None,
    seed: int = 0,
    tolerance: float = 1e-10,
) -> Verification:
    """Compare the networks as they are, then the same cut of the network with changed weights, also at other sizes.

    A quick proof takes a batch of two in the place of four like the example, and one other batch size.
    """
    generator = torch.Generator().manual_seed(seed)
    reference, example = masked(graph, masks).eval(), like_network(graph.module, graph.example)
    few = [inputs for inputs, _ in other_batches(reference, example, 2)] if quick else []
    probes = [given] if given is not None else [_random_like(each, generator) for each in few or [example] * 4]
    difference, scale = _compared(reference, smaller.module, probes, tolerance)
    changed = _perturbed(graph, generator)
    network, like_example = masked(changed, masks).eval(), _random_like(example, generator)
    if quick:
        others = other_batches(network, like_example, 3)
    else:
        with torch.no_grad():
            others = other_sizes(network, like_example, network(*like_example)) + other_batches(network, like_example, 1)
    twin = compact(changed, masks, verify=False).module
    perturbed = _compared(network, twin, [inputs for inputs, _ in others] or [like_example], tolerance)
    return Verification(difference, scale, sum(len(probe[0]) for probe in probes), *perturbed)


def _compared(
    wanted: fx.GraphModule, got: fx.GraphModule, probes: list[tuple[Tensor, ...]], tolerance: float
) -> tuple[float, float]:
    """The largest difference between the outputs of two networks, and the largest output; `NotEqual` beyond the tolerance."""
    networks = [copy.deepcopy(module).eval() for module in (wanted, got)]
    try:
        worst, scale = _differences([n.double() for n in networks], probes, torch.float64)
    except (RuntimeError, TypeError):  # a network that casts to a type of its own, or a device without float64
        dtype = next((t.dtype for t in wanted.parameters() if t.is_floating_point()), torch.float32)
        tolerance = max(tolerance, 1e-4)
        worst, scale = _differences([n.to(dtype) for n in networks], probes, dtype)
    if not worst <= tolerance * scale:
        raise NotEqual(
            f"the compacted network differs from the masked one by {worst:.3g} where outputs reach {scale:.3g} "
            f"(tolerance {tolerance:.1g}). Please report the network: this must not happen."
        )
    return worst, scale


def _differences(networks: list[fx.GraphModule], probes: list[tuple[Tensor, ...]], dtype: torch.dtype) -> tuple[float, float]:
    """The largest difference between the outputs of two networks, and the largest output of the first.

    What is NaN or infinite in the first must be so in the second, and is not compared otherwise.
    """
    worst = scale = 0.0
    for probe in probes:
        inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in probe)
        with torch.no_grad():
            wanted, got = (tensors_in(network(*inputs)) for network in networks)
        if len(wanted) != len(got):
            raise NotEqual(f"the compacted network gives {len(got)} tensors, the masked one {len(wanted)}.")
        for a, b in zip(wanted, got, strict=True):
            if a.shape != b.shape:
                raise NotEqual(f"the compacted network gives shape {tuple(b.shape)}, the masked one {tuple(a.shape)}.")
            if a.is_complex():
                a, b = torch.view_as_real(a), torch.view_as_real(b)
            finite = a.isfinite()
            if not torch.equal(finite, b.isfinite()):
                worst = math.inf
            if bool(finite.any()):
                a, b = a[finite].double(), b[finite].double()
                worst, scale = max(float((a - b).abs().max()), worst), max(float(a.abs().max()), scale)
    return worst, scale


def _random_like(example: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Random values for float inputs; integer inputs (indices) stay as they are, since they must stay in range."""
    return tuple(
        torch.randn(e.shape, generator=generator).to(e.device, e.dtype) if e.is_floating_point() else e for e in example
    )


def _perturbed(graph: Graph, generator: torch.Generator) -> Graph:
    """The graph with every weight and BatchNorm statistic a little off, by a tenth of its tensor's size: none stays 0 or 1."""
    changed = copied(graph)
    statistics = {
        tensor: name
        for part in changed.module.modules()
        for name, tensor in part.named_buffers(recurse=False)
        if name in ("running_mean", "running_var")
    }
    with torch.no_grad():
        for tensor in [*changed.module.parameters(), *statistics]:
            if not tensor.is_floating_point():
                continue
            size = float(tensor.abs().mean()) if tensor.numel() else 0.0
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype) / 10
            if statistics.get(tensor) == "running_var":
                tensor.mul_(noise.exp())
            else:
                tensor.add_(noise * (size or 1.0))
    return changed
