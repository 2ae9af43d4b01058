"""Step 7 of 9: turn a Graph and masks by site into a narrower Graph that equals the masked network up to rounding.

`compact` rewrites the graph so that only live channels exist, `replay` repeats the cuts of a plan, `verify` checks equality.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from secateurs._util.modules import device_of, with_real_tensors
from secateurs.compaction.additions import with_additions
from secateurs.compaction.nodes import rewrite_
from secateurs.compaction.state import Rewriting
from secateurs.errors import InvalidInput, InvalidMask, NotEqual, PlanError, Unproved
from secateurs.graph.add_fusion import fuse_sums_, spread_ids, spread_sums
from secateurs.graph.channels import compose, compose_kept, ids
from secateurs.graph.flow import analyse, find_flows
from secateurs.graph.layers import Align, Constant
from secateurs.graph.masking import Masks, copied, copy_module, masked
from secateurs.graph.node_info import called_module, info, pass_on_
from secateurs.graph.other_sizes import attempt, other_batches, other_sizes, repeated, smaller_images
from secateurs.graph.plan import Plan, PlannedCut
from secateurs.graph.sites import Site, check_masks, find_sites, node_masks, remember_sites_, resolve
from secateurs.graph.trace import Graph, as_example, dtype_of, like_network, record_shapes_, tensors_in
from secateurs.graph.weight_norm import weight_norm_of

LARGE = 2**17  # values of an example

__all__ = ["Align", "Constant", "Verification", "compact", "replay", "verify"]


@with_real_tensors
def compact(graph: Graph, masks: Masks | Plan, *, verify: bool = True) -> Graph:
    """Remove the channels that `masks` drop: the result has ordinary, narrower modules and equals the masked network.

    `masks` is {site or its name: bool tensor, True = kept}, or a `Plan` (see `replay`). A cut that empties a layer folds its
    branch into a constant if it is added to or multiplied with something that depends on the input; otherwise it raises
    `EmptyLayer`. Masks that drop nothing change nothing. Unless `verify` is False, the result is compared with the masked
    network on a small probe (see the function `verify`). The given graph is not changed.
    """
    if isinstance(masks, Plan):
        return replay(graph, masks, verify=verify)
    checked = check_masks(graph, masks)
    if all(bool(mask.all()) for _, mask in checked.values()):
        return replace(graph, module=copy_module(graph), kept={})
    smaller = _cut(graph, checked)
    if verify and device_of(graph.module).type != "meta":
        found = _proof(graph, masks, smaller, quick=True)
        if not found.conclusive:
            warnings.warn(str(found), stacklevel=2)
    return smaller


def _cut(
    graph: Graph, checked: Mapping[str, tuple[Site, Tensor]], *, share: bool = False, like: fx.GraphModule | None = None
) -> Graph:
    """Return the narrower graph, not yet compared; see `_rewritten`. Features within heads go after heads and channels.

    The analysis knows one channel axis of a tensor, and these are two: a plan has two steps then.
    """
    within, others = (
        {name: cut for name, cut in checked.items() if cut[0].inside is inside and not bool(cut[1].all())}
        for inside in (True, False)
    )
    if not within or not others:
        return _rewritten(graph, within or others, share=share, like=like)
    first = _rewritten(graph, others, share=share)
    current = {site.name: site for site in find_sites(first, "widths")}
    there = {node.name for node in first.module.graph.nodes}
    left: dict[str, tuple[Site, Tensor]] = {}
    for name, (site, keep) in within.items():
        if name in current:
            kept = torch.tensor(site.original)[keep]
            left[name] = (current[name], torch.isin(torch.tensor(current[name].original), kept))
        elif site.node in there:  # else its attention is folded away
            raise InvalidMask(f"site {name!r}: not there once the other sites of these masks are cut. Cut it first, alone.")
    if not left:
        return first
    then = _rewritten(first, left, share=True, like=like)
    both = {name: compose_kept(first.kept.get(name, ()), then.kept.get(name, ())) for name in {**first.kept, **then.kept}}
    return replace(then, kept=both)


def _rewritten(
    graph: Graph, checked: Mapping[str, tuple[Site, Tensor]], *, share: bool = False, like: fx.GraphModule | None = None
) -> Graph:
    """Return the narrower graph, not yet compared with the masked network; with `share`, whole tensors are the graph's own.

    `like` is the same cut of the same network with other weights: it tells the shapes at all nodes.
    """
    module = spread_sums(copy_module(graph, share=share))
    known = spread_ids(module, graph.ids)
    nodes = {node.name: node for node in module.graph.nodes}
    if not graph.plan.steps:
        remember_sites_(graph, module)
    inside = any(site.inside for site, _ in checked.values())
    flows = find_flows(module, inside=inside)
    axes = {node: flow.axis for node, flow in find_flows(module).of.items()} if inside else {}
    cut = [(site, mask) for site, mask in checked.values() if not bool(mask.all())]
    keep = {nodes[name]: mask for name, (_, mask) in node_masks(cut).items()}
    widths = {node: flows.width(node) for node in flows.of if flows.of[node].axis is not None}
    names = {nodes[site.node]: name for name, (site, _) in checked.items()}
    state = Rewriting(module, flows, analyse(flows, keep), names, keep, {} if inside else known)
    rewrite_(state)
    remaining = dict(known)
    narrower = {node: (node, state.physical.get(node, layout)) for node, layout in state.layout.items()}
    for new, (node, layout) in {**state.inserted, **narrower}.items():  # in this order: the second changes what the first reads
        if node not in widths:
            continue
        if inside and axes[node] != state.axis_of(node):
            earlier, whole = info(node).get("features", (tuple(range(widths[node])), widths[node]))
            info(new)["features"] = (tuple(earlier[i] for i in ids(layout).tolist()), whole)
            continue
        info(new)["original_channels"] = info(node).get("original_channels", widths[node])
        info(new)["channel_axis"] = state.axis_of(node)
        pass_on_(node, new, "classes")
        remaining[new.name] = compose(known.get(node.name), ids(layout))
    if like is None or not _copy_shapes_(like, module):
        record_shapes_(module, graph.example)
    fuse_sums_(module)
    there = {node.name for node in module.graph.nodes}  # a later cut may give the name of an erased node to another
    cuts = [
        PlannedCut(site.name, tuple(site.original[i] for i in ids(~mask).tolist()), site.original_channels)
        for site, mask in cut
    ]
    left = {name: found for name, found in remaining.items() if name in there}
    return Graph(module, graph.example, graph.plan.then(cuts), graph.leaves, left, state.kept)


def _copy_shapes_(source: fx.GraphModule, target: fx.GraphModule) -> bool:
    """Record the shapes at the nodes of `source` at those of `target`, its form before sums are fused; False if some lack."""
    shapes = {node.name: info(node)["shape"] for node in source.graph.nodes}
    for node in reversed(target.graph.nodes):  # an alignment that was fused with a sum has the shape of the sum
        found = shapes.get(node.name) or next((info(user)["shape"] for user in node.users), None)
        if found is None or (node.name not in shapes and not isinstance(called_module(target, node), Align)):
            return False
        info(node)["shape"] = found
        info(node).pop("other_shapes", None)
    return True


@with_real_tensors
def replay(graph: Graph, plan: Plan, *, verify: bool = True) -> Graph:
    """Make the cuts of `plan`, step by step, on a graph of the untouched network, or of one with some of the cuts made.

    Each step is compared with the masked network unless `verify` is False.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"plan: got {type(plan).__name__}, wanted a Plan. Use graph.plan, or Plan.load(path).")
    for step in plan.steps:
        for cut in step:
            if cut.biases or cut.offsets:
                graph = with_additions(graph, resolve(graph, [cut.site]), [cut])
        sites = resolve(graph, [cut.site for cut in step])
        masks: dict[str | Site, Tensor] = {}
        for cut in step:
            site = sites[cut.site]
            if site.original_channels != cut.channels:
                raise PlanError(
                    f"the plan cuts site {cut.site!r} of {cut.channels} channels, but this network has "
                    f"{site.original_channels} there. Use the network that the plan was made for."
                )
            removed = torch.tensor(cut.removed, dtype=torch.long)
            masks[cut.site] = ~torch.isin(torch.tensor(site.original, dtype=torch.long), removed)
        if any(cut.removed for cut in step):
            graph = compact(graph, masks, verify=verify)
    return graph


@dataclass(frozen=True)
class Verification:
    """Largest difference between the outputs of the compacted and the masked network, and the largest output (`scale`).

    `perturbed_difference` and `perturbed_scale` are the same for the network with all weights changed a little at random, also
    on inputs of other sizes: weights that happen to be zero hide errors. If no output is finite and nonzero, with either
    weights, the comparison proves nothing and `conclusive` is False.
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
            return "nothing is proved: all outputs of the masked network on random inputs are 0, NaN or infinite."
        return (
            f"compacted = masked: difference {self.difference:.2g} of {self.scale:.2g} on {self.examples} examples, "
            f"with perturbed weights {self.perturbed_difference:.2g} of {self.perturbed_scale:.2g}."
        )


@with_real_tensors
def verify(
    graph: Graph,
    masks: Masks,
    compacted: Graph | None = None,
    *,
    inputs: Tensor | tuple[Tensor, ...] | None = None,
    seed: int = 0,
    tolerance: float = 1e-10,
) -> Verification:
    """Check in float64, in eval mode, that the compacted network equals the masked one; raises `NotEqual` otherwise.

    Without `compacted`, the graph is compacted here. Without `inputs`, four random batches like the graph's example are used.
    The check is repeated with perturbed weights and other sizes of input. The largest difference may be `tolerance` times the
    largest output. Raises `Unproved` if there is nothing to compare.
    """
    if device_of(graph.module).type == "meta":
        raise Unproved(
            "a network on the meta device has no values to compare. Load its weights on a device: model.to_empty(device='cpu')."
        )
    smaller = compact(graph, masks, verify=False) if compacted is None else compacted
    given = None if inputs is None else _checked_inputs(graph, inputs)
    found = _proof(graph, masks, smaller, given=given, seed=seed, tolerance=tolerance)
    if not found.conclusive:
        raise Unproved(f"{found} Check the weights, or pass `inputs` for which the outputs are finite and nonzero.")
    if found.scale == 0 and compacted is not None and not _same_state(compact(graph, masks, verify=False), compacted):
        raise Unproved(
            "all outputs are zero, and the given network is not the one that compact makes: nothing is proved about it. "
            "Pass `inputs` for which the outputs are nonzero."
        )
    return found


def _checked_inputs(graph: Graph, inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the inputs as a tuple if they are not empty, finite, and accepted by the network."""
    given = as_example(inputs)
    for tensor in given:
        if not tensor.numel() or (tensor.is_floating_point() and not bool(tensor.isfinite().all())):
            raise InvalidInput("inputs: got an empty tensor, NaN or infinite values, wanted at least one finite example.")
    if attempt(graph.module, like_network(graph.module, given)) is None:
        shapes = ", ".join(str(tuple(t.shape)) for t in given)
        raise InvalidInput(f"inputs: the network does not run on shape {shapes}. Pass a batch like the graph's example.")
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
    """Compare the networks as they are, then the same cut of the network with perturbed weights, also at other sizes.

    All of it in float64, or in the network's own precision where that fails. A quick proof uses two examples, or one large
    one, instead of four batches like the example, and one other batch size; the perturbed weights are compared on smaller
    images, where the network takes them. The masked network runs once on each input.
    """
    arguments = (graph, masks, smaller, quick, given, seed)
    try:
        return _proof_in(torch.float64, *arguments, tolerance)
    except (RuntimeError, TypeError):  # the network casts to a fixed dtype, or the device has no float64
        return _proof_in(dtype_of(graph.module), *arguments, max(tolerance, 1e-4))


def _proof_in(
    dtype: torch.dtype,
    graph: Graph,
    masks: Masks,
    smaller: Graph,
    quick: bool,
    given: tuple[Tensor, ...] | None,
    seed: int,
    tolerance: float,
) -> Verification:
    """Do what `_proof` says in one precision: one copy of the network, whose weights are perturbed for the second part."""
    generator = torch.Generator().manual_seed(seed)
    own = copied(graph, dtype)
    own.module.eval()
    compacted = copy_module(smaller, dtype).eval()
    reference = masked(own, masks, share=True).eval()
    example = tuple(e.to(dtype) if e.is_floating_point() else e for e in like_network(graph.module, graph.example))
    small = smaller_images(reference, example) if quick else example
    some = 1 if example[0].numel() > LARGE else 2
    few = other_batches(reference, _random_like(repeated(example, some), generator), some) if quick else []
    probes = [given] if given is not None else [_random_like(example, generator) for _ in range(0 if few else 4)]
    rounded = tolerance
    if any(isinstance(layer, Constant) or weight_norm_of(layer) is not None for layer in smaller.module.modules()):
        # what a branch was folded into, and the norms of a weight that lost inputs, are rounded once
        rounded = max(tolerance, 100 * torch.finfo(dtype_of(smaller.module)).eps)
    wanted = few or [(probe, _outputs(reference, probe, dtype)) for probe in probes]
    difference, scale = _compared(wanted, compacted, dtype, rounded)
    perturb_(own.module, generator)
    changed = _cut(own, check_masks(own, masks), share=True, like=smaller.module).module.eval()
    like_example = _random_like(small, generator)
    if quick:  # a single image where there are no smaller ones: the network is a large one
        others = other_batches(reference, like_example, 1 if small is example and example[0].numel() > LARGE else 3)
    else:
        expected = wanted[0][1] if given is None else _outputs(reference, like_example, dtype)
        others = other_sizes(reference, like_example, expected)
        others += other_batches(reference, like_example, 1)
    perturbed = _compared(others or [(like_example, _outputs(reference, like_example, dtype))], changed, dtype, tolerance)
    return Verification(difference, scale, sum(len(inputs[0]) for inputs, _ in wanted), *perturbed)


def _outputs(network: fx.GraphModule, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Any:
    """Return the outputs of a network for inputs in its precision."""
    with torch.no_grad():
        return network(*(t.to(dtype) if t.is_floating_point() else t for t in inputs))


def _compared(
    wanted: list[tuple[tuple[Tensor, ...], Any]], got: fx.GraphModule, dtype: torch.dtype, tolerance: float
) -> tuple[float, float]:
    """Return the largest difference of a network's outputs to those `wanted` and the largest of these; checks the tolerance."""
    worst = scale = 0.0
    for inputs, outputs in wanted:
        try:
            found = _outputs(got, inputs, dtype)
        except ValueError as error:
            if "Expected more than 1 value" not in str(error):
                raise
            continue  # torch's GroupNorm takes no statistics of a single value, which may be what is left, in eval mode either
        difference, largest = _difference(tensors_in(outputs), tensors_in(found))
        worst, scale = max(worst, difference), max(scale, largest)
    if not worst <= tolerance * scale:
        raise NotEqual(
            f"the compacted network differs from the masked one by {worst:.3g} where outputs reach {scale:.3g} "
            f"(tolerance {tolerance:.1g}). This is a bug in secateurs: please report the network."
        )
    return worst, scale


def _difference(wanted: list[Tensor], got: list[Tensor]) -> tuple[float, float]:
    """Return the largest difference between the outputs of two networks, and the largest output of the first.

    Values that are NaN or infinite in the first must be so in the second, and are not compared further.
    """
    worst = scale = 0.0
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
        elif bool(finite.any()):
            worst = max(worst, float((a[finite].double() - b[finite].double()).abs().max()))
        if bool(finite.any()):
            scale = max(scale, float(a[finite].double().abs().max()))
    return worst, scale


def _random_like(example: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return random values for float inputs; integer inputs (indices) are kept, since they must stay in range."""
    return tuple(
        torch.randn(e.shape, generator=generator).to(e.device, e.dtype) if e.is_floating_point() else e for e in example
    )


def perturb_(module: nn.Module, generator: torch.Generator) -> None:
    """Add noise, a tenth of a tensor's size, to all weights and BatchNorm statistics: none stays 0 or 1."""
    statistics = {
        tensor: name
        for part in module.modules()
        for name, tensor in part.named_buffers(recurse=False)
        if name in ("running_mean", "running_var")
    }
    with torch.no_grad():
        for tensor in [*module.parameters(), *statistics]:
            if not tensor.is_floating_point():
                continue
            wide = torch.promote_types(tensor.dtype, torch.float32)  # a sum of halves would overflow
            size = float(torch.linalg.vector_norm(tensor, 1, dtype=wide)) / max(tensor.numel(), 1)
            noise = torch.rand(tensor.shape, generator=generator).sub_(0.5).to(tensor.device)
            if statistics.get(tensor) == "running_var":
                tensor.mul_((noise / 3).exp())
            else:
                tensor.add_(noise, alpha=(size or 1.0) / 3)
