"""Laws over generated networks: whatever is cut, the compacted network is the masked one, and so is every copy of it.

A case is a generated network with up to three random cuts in a row at each shortcut position, and at a position, or two at
once, that is another one for every cut. It ends as "equal", or as a refusal that was checked to be due (`EmptyLayer` where
something really became constant, `Untraceable`). All else is a failure: it is made as small as it gets and written out as a
file that runs by itself.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import multiprocessing
import pickle
import random
import re
import signal
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .networks import generate
from .tally import Tally
from .writing import HEADER, Program, randomise_

LAWS = ("train", "gradients", "save", "replay", "verify", "nothing", "pickle", "deepcopy", "at once", "sizes")
"""Laws besides compact = masked on the example: of these a case gets some."""
POSITIONS = ("before", "after", "stream", "coupled")
SECONDS = 60  # that a case may take
SHRINK_SECONDS = 20  # that making a failure smaller may take
SHRUNK = 4  # failures of each kind that are made smaller, in each worker

Choose = Callable[[Any, int], dict[str, Tensor] | None]
Shortcut = str | tuple[tuple[str, ...], ...]
"""A position for all cuts, or the positions of each cut."""


# ---- the laws: these functions are copied into the files of failures -----------------------------------------------------


class Broken(AssertionError):
    """A law does not hold."""


def same(got: Any, wanted: Any, exact: bool = False) -> None:
    """The same tensors: bit for bit, or up to 1e-9 of the largest value."""
    ours, theirs = tree_leaves(got), tree_leaves(wanted)
    if len(ours) != len(theirs):
        raise Broken(f"{len(ours)} outputs instead of {len(theirs)}")
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(b, Tensor):
            if a != b:
                raise Broken(f"gives {a!r} instead of {b!r}")
            continue
        if a.shape != b.shape:
            raise Broken(f"shape {tuple(a.shape)} instead of {tuple(b.shape)}")
        if not b.is_floating_point() or exact:
            if not torch.equal(a.nan_to_num() if a.is_floating_point() else a, b.nan_to_num() if b.is_floating_point() else b):
                raise Broken("values differ where they should be the same bit for bit")
        elif b.numel():
            scale = float(b.detach()[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0
            off = (a - b).detach().abs()
            off[(a == b) | (a.isnan() & b.isnan())] = 0.0
            if not float(off.nan_to_num(nan=torch.inf).max()) <= 1e-9 * scale + 1e-12:
                raise Broken(f"WRONG values: off by {float(off.max()):.3g} where outputs reach {scale:.3g}")


def output(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    with torch.no_grad():
        return module(*copy.deepcopy(inputs))


def output_of_what_is_left(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
    """The output, None where torch's GroupNorm takes no statistics of the one value that may be left, in eval mode either."""
    try:
        return output(module, inputs)
    except ValueError as error:
        if "Expected more than 1 value" not in str(error):
            raise
        return None


def runs(module: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    try:
        return all(bool(t.isfinite().all()) for t in tree_leaves(output(module, inputs)) if isinstance(t, Tensor))
    except Exception:
        return False


def same_axes(module: nn.Module, batch: tuple[Tensor, ...], first: tuple[Tensor, ...]) -> bool:
    """Whether outputs have an entry for each example, if they have one for each in `first`: else a reshape mixed examples."""
    pairs = zip(*(tree_leaves(output(module, inputs)) for inputs in (first, batch)), strict=True)
    return all(a.dim() == b.dim() and (a.shape[:1] != (len(first[0]),) or len(b) == len(batch[0])) for a, b in pairs)


def same_state(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    if list(ours) != list(theirs):
        raise Broken(f"tensors {sorted(ours.keys() ^ theirs.keys())} are on one side only")
    for name in ours:
        if ours[name].shape != theirs[name].shape:
            raise Broken(f"{name}: shape {tuple(ours[name].shape)} instead of {tuple(theirs[name].shape)}")
    same(list(ours.values()), list(theirs.values()), exact=True)


def kept_part(wide: Tensor, kept: Any) -> Tensor:
    from secateurs.graph.channels import take

    return take(wide, kept)


def check_training(smaller: Any, reference: nn.Module, whole: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Batch statistics give the same too; folded branches have none any more, and dropout is left out."""
    modules = copy.deepcopy(smaller.module), copy.deepcopy(reference), copy.deepcopy(whole)
    if any(type(part).__name__ == "Constant" for part in modules[0].modules()):
        return
    for module in modules:
        module.train()
        for part in module.modules():
            if "Dropout" in type(part).__name__ or isinstance(part, nn.RReLU):
                part.eval()
    if runs(modules[2], inputs):
        same(output(modules[0], inputs), output(modules[1], inputs))
        wide = dict(modules[1].named_buffers())
        for name, buffer in modules[0].named_buffers():
            if name in wide and name.rpartition(".")[2] in ("running_mean", "running_var"):
                same(buffer, kept_part(wide[name], smaller.kept.get(name, ())))


NORM_AND_DIRECTION = ("_g", "_v", "original0", "original1")  # of weight norm: a cut keeps w, and scales g to make up for v


def check_gradients(smaller: Any, reference: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Gradients of kept weights are those of the masked network.

    Not with torch's own eps of RMSNorm, 2e-16: behind a norm that is left with one channel, and gives 0 then, its slope is 7e7,
    and the gradient that torch's LayerNorm passes on there is not 0 but rounding.
    """
    modules = copy.deepcopy(smaller.module), copy.deepcopy(reference)
    for module in modules:
        for part in module.modules():
            if getattr(part, "eps", 0.0) is None:
                part.eps = 1e-5
        outputs = [o for o in tree_leaves(module(*copy.deepcopy(inputs))) if isinstance(o, Tensor) and o.requires_grad]
        if not outputs:
            return
        weights = torch.Generator().manual_seed(5)
        sum((o * torch.randn(o.shape, generator=weights, dtype=o.dtype)).sum() for o in outputs).backward()
    wide = {name: p.grad for name, p in modules[1].named_parameters()}
    for name, parameter in modules[0].named_parameters():
        if name in wide and not name.endswith(NORM_AND_DIRECTION):
            grad = wide[name]
            wanted = None if grad is None else kept_part(grad, smaller.kept.get(name, ()))
            ours = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            theirs = torch.zeros_like(ours) if wanted is None else wanted
            scale = max([1.0, *[float(g.abs().max()) for g in wide.values() if g is not None and g.numel()]])
            same(ours / scale + 1, theirs / scale + 1)


def something_is_constant(module: Any, batches: list[tuple[Tensor, ...]]) -> bool:
    """Whether anything in the network that hangs on its input is the same for two different inputs, where it is read at all.

    Heads of attention, for example, share a tensor: what is left of the keys of those that are left may be constant. Their
    scores are, within torch's function, where neither queries nor keys are read: what one has of a head, the other lacks.
    """
    depends: set[Any] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder" or any(source in depends for source in node.all_input_nodes):
            depends.add(node)
    seen: list[dict[str, list[Tensor]]] = []
    read: dict[str, list[Tensor]] = {}
    for batch in batches:
        kept: dict[str, list[Tensor]] = {}
        found: dict[str, list[Tensor]] = {}

        class Watch(torch.fx.Interpreter):
            def run_node(self, n: Any, kept: Any = kept, found: Any = found) -> Any:
                value = super().run_node(n)
                kept[n.name] = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
                for t in kept[n.name]:
                    if t.requires_grad and not t.is_leaf:
                        t.retain_grad()
                found[n.name] = [t.detach().clone() for t in kept[n.name]]
                return value

        result = Watch(module).run(*copy.deepcopy(batch))
        seen.append(found)
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
        weights = torch.Generator().manual_seed(5)
        with contextlib.suppress(
            RuntimeError, AttributeError
        ):  # nothing to follow, or an op in place has overwritten what the gradients need
            sum((t * torch.randn(t.shape, generator=weights, dtype=t.dtype)).sum() for t in outputs).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            grads = {name: [None if t.grad is None else t.grad != 0 for t in there] for name, there in kept.items()}
        for name, masks in grads.items():
            old = read.get(name, masks)
            read[name] = [m if o is None else o if m is None else m | o for m, o in zip(masks, old, strict=True)]
    for node in depends:
        if node.target is torch.nn.functional.scaled_dot_product_attention:
            both = [mask for source in node.args[:2] for mask in read[source.name]]
            if all(mask is not None and not mask.any() for mask in both):
                return True
        for one, other, needed in zip(seen[0][node.name], seen[1][node.name], read[node.name], strict=True):
            if torch.equal(one, other) or (needed is not None and needed.any() and torch.equal(one[needed], other[needed])):
                return True
    return False


def sites_at(graph: Any, shortcut: Any, number: int = 0) -> list[Any]:
    """The sites for a cut: at one position, or at those that this cut has."""
    from secateurs import find_sites

    positions = [shortcut] if isinstance(shortcut, str) else shortcut[number]  # of two sites of a name the first counts
    found: dict[str, Any] = {}
    for position in positions:
        sites = find_sites(graph, position, head_widths=True)
        if len({site.name for site in sites}) < len(sites):
            raise Broken("two sites of one name")
        found = {**{site.name: site for site in sites}, **found}
    return list(found.values())


def moved(graph: Any, site: Any, whole: Any) -> bool:
    """Whether a site's mask lies where that of its name in the uncut network does not: no masks of that give the same then.

    At a norm over channels: once a sum is folded away, the norm behind it takes statistics of the kept channels, while the site
    before the sum handed it zeros. Or later: once the first sum of a stream is folded away, what is left of it there may be the
    network's input, of which no channel can go, while the uncut stream loses its channels from that sum on.
    """
    from secateurs.graph.flow import Norm, find_flows

    norms = {node.name for node, flow in find_flows(graph.module).of.items() if isinstance(flow, Norm)}
    places = {point.node for point in site.points}
    uncut = [each for each in sites_at(whole, (("before", "after", "stream", "coupled", "widths"),)) if each.name == site.name]
    return any(
        not norms & places <= {point.node for point in each.points} or each.points[0].node not in places for each in uncut
    )


def captured(
    build: Callable[..., nn.Module], example: Callable[..., tuple[Tensor, ...]], laws: tuple[str, ...], at: list[str]
) -> tuple[nn.Module, dict[str, Tensor], Any, list[tuple[Tensor, ...]]]:
    """The network, its tensors, its graph, which gives the same, and the batches that it is compared on, the example first."""
    from secateurs import trace

    model, first = build(), example()
    batches = [first]
    if "sizes" in laws:
        others = [example(batch=n, seed=1) for n in (1, 3, 5)] + [example(wider=2, seed=2), example(batch=1, wider=1, seed=3)]
        batches += [batch for batch in others if runs(model, batch) and same_axes(model, batch, first)]
    before = copy.deepcopy(model.state_dict())
    at[:] = ["trace"]
    whole = trace(model, first)
    for batch in batches:
        same(output(whole.module, batch), output(model, batch))
    return model, before, whole, batches


def examine(
    build: Callable[..., nn.Module],
    example: Callable[..., tuple[Tensor, ...]],
    choose: Choose,
    shortcut: Any,
    laws: tuple[str, ...],
    at: list[str],
    known: dict[str, Any] | None = None,
) -> set[str]:
    """Cut as `choose` says and check the laws; returns what happened. `at` notes the current law, for errors.

    `known` hands what is captured on to the next position.
    """
    from secateurs import Plan, SecateursError, compact, load, masked, replay, save, verify
    from secateurs.errors import EmptyLayer, InvalidMask, Unproved, Untraceable

    known = {} if known is None else known
    try:
        if "captured" not in known:
            known["captured"] = captured(build, example, laws, at)
    except Untraceable:
        return {"untraceable"}
    model, before, whole, batches = known["captured"]
    first = batches[0]
    at[:] = ["sites"]
    graph = whole
    happened, elsewhere = {"no sites"}, False
    for number in range(3):
        ordinal = ("first", "second", "third")[number]
        at[:] = [f"{ordinal} sites"]
        sites = sites_at(graph, shortcut, number)
        for site in sites:
            if len(site.original) != site.channels or not set(site.original) <= set(range(site.original_channels)):
                raise Broken(f"site {site.name} has {site.channels} channels, ids {site.original}")
        masks = choose(sites, number) if len(sites) else None
        if masks is None:
            break
        elsewhere |= "at once" in laws and any(moved(graph, site, whole) for site in sites if site.name in masks)
        at[:] = [f"{ordinal} masked"]
        reference = masked(graph, masks)
        at[:] = [f"{ordinal} compact"]
        try:
            smaller = compact(graph, masks, verify="verify" in laws)
        except InvalidMask as error:  # the cut of a head may be all that a width was for
            if "Cut it first, alone" not in str(error):
                raise
            happened.add("widths refused beside other sites")
            break
        except EmptyLayer:
            at[:] = [f"{ordinal} refusal"]
            if not something_is_constant(reference, [example(batch=2, seed=4), example(batch=2, seed=5)]):
                raise Broken("EmptyLayer although nothing became constant") from None
            happened.add("emptied layer refused")
            break
        happened = (happened - {"no sites"}) | {"equal"}
        for batch in batches:
            at[:] = [f"{ordinal} equality" + ("" if batch is first else f" at {tuple(batch[0].shape)}")]
            got = output_of_what_is_left(smaller.module, batch)
            if got is not None:
                same(got, output(reference, batch))
        if output_of_what_is_left(smaller.module, first) is None:
            graph = smaller
            continue
        if "verify" in laws:
            at[:] = [f"{ordinal} verify"]
            wanted = [t for t in tree_leaves(output(reference, first)) if isinstance(t, Tensor)]
            if any(bool((t.isfinite() & (t != 0)).any()) for t in wanted):  # nothing but zeros proves nothing
                try:
                    verify(graph, masks, smaller)
                except Unproved:
                    happened.add("nothing to prove")
        if "train" in laws:
            at[:] = [f"{ordinal} train"]
            check_training(smaller, reference, graph.module, first)
        if "gradients" in laws:
            at[:] = [f"{ordinal} gradients"]
            several = first if len(first[0]) > 1 else example(batch=2, seed=6)  # torch's BatchNorm errs for a single image
            if runs(model, several):
                check_gradients(smaller, reference, several)
        if "nothing" in laws:
            at[:] = [f"{ordinal} nothing"]
            left = sites_at(smaller, shortcut, number)
            again = compact(smaller, {site.name: torch.ones(site.channels, dtype=torch.bool) for site in left})
            same_state(again.module, smaller.module)
            same(output(again.module, first), output(smaller.module, first), exact=True)
        graph = smaller
    at[:] = ["user's model"]
    same(list(model.state_dict().values()), list(before.values()), exact=True)
    if graph is whole or output_of_what_is_left(graph.module, first) is None:
        return happened
    if "at once" in laws:
        at[:] = ["at once"]
        removed = graph.plan.removed()
        there = {site.name: site for site in sites_at(whole, (("before", "after", "stream", "coupled", "widths"),))}
        known = all(name in there for name in removed)  # a cut may make sites
        for name in removed if known else ():
            if not set(removed[name]) <= set(there[name].original):
                raise Broken(f"{name}: ids {removed[name]} are removed of {there[name].original}")
        if known and not elsewhere:
            together = {name: ~torch.isin(torch.tensor(there[name].original), torch.tensor(removed[name])) for name in removed}
            same(output(graph.module, first), output(masked(whole, together), first))
    if "replay" in laws:
        at[:] = ["replay"]
        again = replay(whole, Plan.from_json(graph.plan.to_json()), verify=False)
        if again.plan != graph.plan:
            raise Broken("the replayed plan is another")
        same_state(again.module, graph.module)
        same(output(again.module, first), output(graph.module, first), exact=True)
    if "save" in laws:
        at[:] = ["save"]
        with tempfile.TemporaryDirectory() as folder:
            path = save(graph, Path(folder) / "net.safetensors")
            at[:] = ["load"]
            again = load(build(seed=12345), path)
        same_state(again.module, graph.module)
        same(output(again.module, first), output(graph.module, first), exact=True)
    if "pickle" in laws:
        at[:] = ["pickle"]
        same(output(pickle.loads(pickle.dumps(graph.module)), first), output(graph.module, first), exact=True)
    if "deepcopy" in laws:
        at[:] = ["deepcopy"]
        again = copy.deepcopy(graph)
        same(output(again.module, first), output(graph.module, first), exact=True)
        left = sites_at(again, shortcut)
        if left != sites_at(graph, shortcut):
            raise Broken("a copied graph has other sites")
        if len(left):
            keep = {left[0].name: torch.arange(left[0].channels) != left[0].channels // 2}
            try:
                smaller = compact(graph, keep, verify=False)
            except SecateursError:
                return happened
            got = output_of_what_is_left(smaller.module, first)
            if got is not None:
                same(output(compact(again, keep, verify=False).module, first), got, exact=True)
    return happened


# ---- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """A case that broke a law, with the cuts that were made."""

    program: Program
    shortcut: Shortcut
    cuts: tuple[dict[str, list[int]], ...]
    laws: tuple[str, ...]
    at: str
    message: str

    @property
    def kind(self) -> str:
        """What broke, without the details: to count by, and to recognise while shrinking."""
        word = self.message.split(":")[0] if ":" in self.message else self.message
        law = re.sub(r" at \(.*", " at another size", self.at)
        return f"{law}: {re.sub(r'[0-9]+', 'n', word)[:60]}"


def choice_of(draw: random.Random, cuts: list[dict[str, list[int]]]) -> Choose:
    """Random cuts, noted in `cuts`: one site or several, a little or nearly all, now and then everything."""
    count = draw.choice((1, 1, 2, 2, 3))

    def choose(sites: Any, number: int) -> dict[str, Tensor] | None:
        if number >= count:
            return None
        chosen = draw.sample(list(sites), draw.choice((1, 1, 2, len(sites), len(sites))) if len(sites) > 1 else 1)
        masks = {}
        for site in chosen:
            share = draw.choice((0.15, 0.3, 0.5, 0.5, 0.8, 1.0, 0.0 if draw.random() < 0.3 else 0.4))
            keep = torch.tensor([draw.random() >= share for _ in range(site.channels)], dtype=torch.bool)
            if not keep.any() and draw.random() > 0.12:
                keep[draw.randrange(site.channels)] = True
            masks[site.name] = keep
        cuts.append({name: keep.int().tolist() for name, keep in masks.items()})
        return masks

    return choose


def fails(
    program: Program, seed: int, laws: tuple[str, ...], shortcut: Shortcut, known: dict[str, Any] | None = None
) -> Failure | set[str]:
    """What happened at one shortcut position, or the failure."""
    cuts: list[dict[str, list[int]]] = []
    at: list[str] = []
    try:
        return examine(program.build, program.example, choice_of(random.Random(seed), cuts), shortcut, laws, at, known)
    except Exception as error:
        name = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
        message = f"{name}{str(error).splitlines()[0] if str(error) else ''}"
        return Failure(program, shortcut, tuple(cuts), laws, at[0] if at else "build", message)


def shrink(failure: Failure, seed: int, seconds: float | None = None) -> Failure:
    """A smaller network with a failure of the same kind: statements are dropped as long as it still fails."""
    until = time.monotonic() + (SHRINK_SECONDS if seconds is None else seconds)
    best = failure
    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for candidate in _smaller(best.program):
            if time.monotonic() > until:
                break
            found = _fails_alike(candidate, best, seed)
            if found is not None:
                best, progress = found, True
                break
    return best


def _fails_alike(program: Program, failure: Failure, seed: int) -> Failure | None:
    try:
        output(program.build(), program.example())
    except Exception:
        return None
    law = re.sub("first|second|third", "", failure.kind)
    for attempt in range(6):
        found = fails(program, seed + attempt, failure.laws, failure.shortcut)
        if isinstance(found, Failure) and re.sub("first|second|third", "", found.kind) == law:
            return found
    return None


def _smaller(program: Program) -> Iterable[Program]:
    """Programs with one statement less, the boldest first."""
    names = [step.split(" = ")[0] for step in program.steps]
    named = [n for n in names if re.fullmatch(r"v\d+", n)]
    for i, name in enumerate(names):  # return earlier
        if name in named and (name != program.result or i + 1 < len(names)):
            steps = program.steps[: i + 1]
            yield replace(program, steps=steps, result=name).without_unused()
    for i, step in enumerate(program.steps):
        rest = program.steps[:i] + program.steps[i + 1 :]
        later = "\n".join((*program.steps[i + 1 :], program.result))
        if names[i] not in named or not re.search(rf"\b{names[i]}\b", later):
            yield replace(program, steps=rest).without_unused()
            continue
        for source in sorted(set(re.findall(r"\b[vx]\d+\b", step.split(" = ", 1)[1]))):
            steps = tuple(re.sub(rf"\b{names[i]}\b", source, s) if j >= i else s for j, s in enumerate(rest))
            yield replace(program, steps=steps, result=re.sub(rf"\b{names[i]}\b", source, program.result)).without_unused()
    if program.result not in named:
        for name in named:
            yield replace(program, result=name).without_unused()


def as_file(failure: Failure) -> str:
    """The failure as a program that needs nothing but torch and secateurs."""
    laws = [
        Broken,
        same,
        output,
        output_of_what_is_left,
        runs,
        same_axes,
        same_state,
        kept_part,
        check_training,
        check_gradients,
        something_is_constant,
        sites_at,
        moved,
        captured,
        examine,
    ]
    functions = "\n\n".join(inspect.getsource(f) for f in [*laws, randomise_])
    program = failure.program
    imports = "import contextlib, copy, pickle, tempfile, warnings, zlib\nfrom pathlib import Path\nfrom torch import Tensor\n"
    imports += "from torch.utils._pytree import tree_leaves\nfrom typing import Any\nfrom collections.abc import Callable\n"
    sizes = ", ".join(map(str, program.inputs))
    return (
        f'"""{failure.at}: {failure.message}\n\nseed {program.seed}, inputs {sizes}, shortcut {failure.shortcut}.\n"""\n'
        f"from __future__ import annotations\n{HEADER}{imports}warnings.simplefilter('ignore')\n"
        f"NORM_AND_DIRECTION = {NORM_AND_DIRECTION!r}\nINPUTS = {program.inputs!r}\n"
        f"SEED, SHORTCUT, LAWS = {program.seed}, {failure.shortcut!r}, {failure.laws!r}\n"
        f"CUTS = {list(failure.cuts)!r}\n\n\n{program.source()}\n\n"
        f"def example(batch=None, wider=0, seed=0):\n"
        f"    return tuple(torch.randn((batch or n[0], *n[1:2], *(k + wider for k in n[2:])), dtype=torch.float64, generator="
        f"torch.Generator().manual_seed(SEED + 7 * i + 101 * seed)) for i, n in enumerate(INPUTS))\n\n\n"
        f"def build(seed=SEED):\n    return randomise_(Net(), seed)\n\n\n"
        f"def choose(sites, number):\n    if number >= len(CUTS):\n        return None\n"
        f"    return {{name: torch.tensor(keep).bool() for name, keep in CUTS[number].items()}}\n\n\n"
        f"# ---- the laws ----\n\nChoose = Any\n\n\n{functions}\n\n"
        f"if __name__ == '__main__':\n    at = []\n    try:\n"
        f"        print(examine(build, example, choose, SHORTCUT, LAWS, at))\n"
        f"    except Exception as error:\n        print('FAILS at', at, '-', type(error).__name__, error)\n        raise\n"
    )


_shrunk: Counter[str] = Counter()


def case(seed: int, folder: str | None = None) -> tuple[str, str]:
    """How the case of that seed ended: its outcome, and the failure's line or nothing."""
    warnings.simplefilter("ignore")

    def too_long(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    draw = random.Random(seed)
    laws = tuple(law for law in LAWS if draw.random() < (0.35 if law != "sizes" else 0.8))
    guarded = threading.current_thread() is threading.main_thread()  # elsewhere no signal can be caught
    old = signal.signal(signal.SIGALRM, too_long) if guarded else None
    if guarded:
        signal.alarm(SECONDS)
    try:
        program = generate(seed)
        for text, law in (("F.dropout", "train"), ("parametrizations", "pickle")):  # torch pickles none of those
            laws = tuple(kept for kept in laws if kept != law or text not in program.source())
        happened: set[str] = set()
        known: dict[str, Any] = {}
        attends = any(word in program.source() for word in ("softmax", "scaled_dot_product", "MultiheadAttention"))
        mixed = tuple(tuple(sorted(draw.sample(POSITIONS, draw.choice((1, 1, 2))), key=POSITIONS.index)) for _ in range(3))
        for shortcut in ("before", "after", "stream", mixed, "widths")[: 5 if attends else 4]:
            found = fails(program, seed, laws, shortcut, known)
            if isinstance(found, Failure) or found == {"untraceable"}:
                happened |= found if isinstance(found, set) else set()
                break
            happened |= found
    finally:
        if guarded:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, old)
    if isinstance(found, Failure):
        kind = found.kind
        _shrunk[kind] += 1
        if folder is not None:
            if _shrunk[kind] <= SHRUNK:
                found = shrink(found, seed)
            path = Path(folder) / f"graph_{seed}_{re.sub('[^a-z]+', '_', kind.lower()).strip('_')[:40]}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(as_file(found))
        return f"FAILED {kind}", f"seed {seed}: {found.at}: {found.message}"
    if happened & {"equal", "emptied layer refused"}:
        happened -= {"no sites"}
    return ", ".join(sorted(happened)), ""


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def run_cases(seeds: Iterable[int], workers: int, folder: str | None) -> Iterable[tuple[str, str]]:
    """Outcomes of the cases, in order."""
    seeds = list(seeds)
    if workers < 2:
        yield from (case(seed, folder) for seed in seeds)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), initializer=_start) as pool:
        yield from pool.map(case, seeds, [folder] * len(seeds), chunksize=10)


def run(
    count: int,
    seed: int,
    workers: int = 2,
    *,
    failures: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Tally:
    """Examine `count` generated networks from `seed` on; failures are written to the folder `failures`."""
    began, outcomes, lines = time.monotonic(), Counter[str](), []
    folder = None if failures is None else str(failures)
    said = began
    for done, (outcome, line) in enumerate(run_cases(range(seed, seed + count), workers, folder), 1):
        outcomes[outcome] += 1
        if line:
            lines.append(line)
        if time.monotonic() > said + 30:
            said = time.monotonic()
            progress(f"graphs: {done} of {count}, {len(lines)} failures, {said - began:.0f} s")
    return Tally("graphs", count, dict(outcomes.most_common()), tuple(lines), time.monotonic() - began)
