"""Second moments of the inputs and targets of a site's consumers, summed batch by batch: memory stays bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from secateurs._util.modules import Device, accumulation_dtype, eval_mode, on_device
from secateurs.data.dataset import Examples
from secateurs.distributed import active
from secateurs.errors import InvalidInput
from secateurs.graph.add_fusion import spread_sums
from secateurs.graph.consumers import Consumers, LayerConsumer, SumConsumer, find_consumers
from secateurs.graph.flow import ELSEWHERE
from secateurs.graph.flow.liveness import mentioned
from secateurs.graph.layers import mask_channels
from secateurs.graph.masking import Masks, masked, network_up_to
from secateurs.graph.node_info import dims_of, shape_of
from secateurs.graph.sites import Site, resolve
from secateurs.graph.trace import Graph
from secateurs.repair.reconstruction import LayerFit, Reconstruction, SumFit
from secateurs.repair.solve import Moments, feature_source, gram, gram_features, groups_of, matrix_of, patches, target_rows
from secateurs.repair.targets import converted, find_node

ROWS = 2**16  # places of a consumer's output that are used, at most
EACH_FEATURE = 128  # of them for each feature that it reads: more change its weights by less than other images would
GRAM_BYTES = 2**31  # that the Gram matrices of one layer may take
CHUNK_BYTES = 2**25  # of features in float64 that are computed at once
SHARED_BYTES = 2**28  # of a batch's terms that a worker may send to the others
HELD = 3  # every third example is held back to choose a ridge


class LayerTally:
    """Moments of a layer's features, and of its targets if they are given, over all examples and over those held back.

    With more places in `examples` examples than `rows`, or than `EACH_FEATURE` for each feature, the same number is drawn from
    each example, from a seed: the batch size changes nothing.
    """

    def __init__(self, layer: Any, *, examples: int, rows: int | None, seed: int) -> None:
        self.layer = layer
        enough = None if rows is None else min(rows, EACH_FEATURE * gram_features(layer))
        self.each = None if enough is None else math.ceil(enough / max(examples, 1))
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = 0  # examples whose places are drawn
        self.sums: list[list[Tensor]] = [[], []]  # over all examples, over those held back
        self.chunk = max(1, CHUNK_BYTES // (8 * groups_of(layer) * gram_features(layer)))

    def terms(self, x: Tensor, y: Tensor | None, first: int) -> Iterator[Term]:
        """Yield the terms of a batch whose first example has number `first`: of the layer's input, and its target output.

        Batches come in order, but need not be all of them.
        """
        patched = patches(self.layer, x)
        images, places = self._choose(len(patched.view), math.prod(patched.places), first)
        is_held = (images + first) % HELD == HELD - 1
        for held in (False, True):
            chosen = (is_held == held).nonzero().flatten()
            for part in torch.split(chosen, self.chunk):
                image, place = images[part].to(x.device), places[part].to(x.device)
                features = patched.rows(image, place)
                found = [gram(features)]
                if y is not None:
                    targets = target_rows(self.layer, y, image, place)
                    found += [features.mT @ targets, (targets**2).sum(1)]
                yield held, found

    def _choose(self, count: int, places: int, first: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of the images and of their places that are used."""
        each = places if self.each is None else min(places, self.each)
        if each == places:
            return torch.arange(count).repeat_interleave(places), torch.arange(places).repeat(count)
        for _ in range(first - self.seen):  # of batches that another worker has
            torch.randperm(places, generator=self.generator)
        self.seen = first + count
        drawn = [torch.randperm(places, generator=self.generator)[:each] for _ in range(count)]
        return torch.arange(count).repeat_interleave(each), torch.cat(drawn)

    def add(self, held: bool, found: Sequence[Tensor]) -> None:
        """Add a term."""
        for kind in (0, 1) if held else (0,):
            if self.sums[kind]:
                for total, new in zip(self.sums[kind], found, strict=True):
                    total += new
            else:
                self.sums[kind] = [f.clone() for f in found]

    def moments(self, start: Tensor) -> Iterator[Moments | None]:
        """Yield the moments of all examples, then of those held back (None without any), on the CPU.

        Without targets, the target is the output of the weights `start` (G, p, O) for all features.
        """
        for found in self.sums:
            if not found:
                yield None
            elif len(found) == 1:
                gram = found[0].cpu().double()
                cross = gram @ start
                yield Moments(gram, cross, (start * cross).sum(1))
            else:
                gram, cross, energy = (f.cpu().double() for f in found)
                yield Moments(gram, cross, energy)


Term = tuple[bool, list[Tensor]]
"""Whether it is of examples held back, and what is added."""


class SumTally:
    """First and second moments, by channel, of the difference of a sum from its target and of the site's contribution to it."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.count = 0

    def terms(self, there: Tensor, without: Tensor, target: Tensor | None, axis: int) -> Iterator[Term]:
        """Yield the term of a batch of the sum, of the sum without the site, and of its target (None: itself).

        Channels lie along `axis`.
        """
        dtype = accumulation_dtype(there.device)
        there, without = (t.transpose(0, axis).flatten(1).to(dtype) for t in (there, without))
        part, nothing = there - without, there.new_zeros(len(there))
        if target is None:
            found = torch.stack([nothing, part.sum(1), nothing, (part**2).sum(1), nothing, there.sum(1), (there**2).sum(1)])
        else:
            target = target.transpose(0, axis).flatten(1).to(dtype)
            lacking = target - there
            terms = [lacking, part, lacking**2, part**2, lacking * part, target, target**2]
            found = torch.stack([t.sum(1) for t in terms])
        yield False, [found, torch.tensor(there.shape[1])]

    def add(self, held: bool, found: Sequence[Tensor]) -> None:
        """Add a term."""
        sums, count = found
        self.sums = sums if self.sums is None else self.sums + sums
        self.count += int(count)


Tally = LayerTally | SumTally
Take = Callable[[Tally, Iterator[Term]], None]


def worth_sharing(layers: Iterable[Any], batch: int, examples: int, rows: int | None, device: torch.device) -> bool:
    """Whether workers save time by sharing the Gram matrices of these layers, whose terms all of them must be sent.

    On a GPU a matrix is computed in less time than it is sent; very large ones do not fit into memory together.
    """
    if device.type != "cpu" or rows is None:
        return False
    places, sent = batch * math.ceil(rows / max(examples, 1)), 0
    for layer in layers:
        features = groups_of(layer) * gram_features(layer)
        sent += (places * 8 * features // CHUNK_BYTES + 2) * 8 * features * gram_features(layer)
    return sent <= SHARED_BYTES


def tally_batches(
    what: str,
    count: int,
    tallies: Sequence[Tally],
    run: Callable[[int, Take], None],
    *,
    share: bool,
    own: Sequence[int] | None = None,
) -> None:
    """Call `run(number, take)` for each of `count` batches; the terms that it gives to `take` are added in their order.

    The workers of a run `share` the batches, or each of them does all; with `own`, these are this worker's.
    """
    workers = active()

    def add(tally: Tally, terms: Iterator[Term]) -> None:
        for term in terms:
            tally.add(*term)

    if workers.size == 1 or not share:
        for number in range(count):
            run(number, add)
        return
    places = {id(tally): place for place, tally in enumerate(tallies)}

    def one(number: int) -> list[Tensor]:
        sent: list[Tensor] = []

        def note(tally: Tally, terms: Iterator[Term]) -> None:
            for held, found in terms:
                sent.extend([torch.tensor([places[id(tally)], held, len(found)]), *found])

        run(number, note)
        return sent

    for sent in workers.map(what, count, one, own):
        rest = iter(sent)
        for head in rest:
            place, held, parts = head.tolist()
            tallies[place].add(bool(held), [next(rest) for _ in range(parts)])


def observe(
    graph: Graph,
    site: Site | str,
    examples: Examples,
    *,
    original: Graph | None = None,
    masks: Masks | None = None,
    batch: int = 256,
    device: Device = None,
    rows: int | None = ROWS,
    gram_bytes: int = GRAM_BYTES,
    seed: int = 0,
) -> Reconstruction:
    """Sum up, in float64, second moments of the inputs of the site's consumers in `graph`, and of their outputs in `original`.

    Without `original` the targets are the consumers' present outputs. `masks` are cuts at other sites that are decided but not
    made yet. At most `rows` places of a consumer's output are used (None: all), equally many of each example. A layer whose
    Gram matrices would take more than `gram_bytes` is skipped, with the reason. No network is changed.
    """
    (found,) = observe_sites(
        graph,
        [site],
        examples,
        original=original,
        masks=masks,
        batch=batch,
        device=device,
        rows=rows,
        gram_bytes=gram_bytes,
        seed=seed,
    ).values()
    return found


def observe_sites(
    graph: Graph,
    sites: Iterable[Site | str],
    examples: Examples,
    *,
    original: Graph | None = None,
    masks: Masks | None = None,
    batch: int = 256,
    device: Device = None,
    rows: int | None = ROWS,
    gram_bytes: int = GRAM_BYTES,
    seed: int = 0,
) -> dict[str, Reconstruction]:
    """Observe several sites as `observe` does one, all in one pass over the examples; gives the reconstructions by site."""
    places = [s if isinstance(s, Site) and _is_current(graph, s) else next(iter(resolve(graph, [s]).values())) for s in sites]
    if len(examples) == 0:
        raise InvalidInput(f"repair of site {places[0].name!r}: got no examples, wanted at least one.")
    consumers = {place.name: find_consumers(graph, place) for place in places}
    layers, skipped = _tallied_layers(graph, consumers, gram_bytes)
    sums = [(name, total) for name, each in consumers.items() for total in each.sums]
    module = spread_sums(masked(graph, masks) if masks else graph.module)
    adds = [find_node(module, total.node) for _, total in sums]
    inputs = [find_node(module, node).all_input_nodes[0] for node in layers]
    ends = list(dict.fromkeys([*inputs, *(term for add in adds for term in mentioned(add))]))
    targets, converts = None, {}
    if original is not None:
        whole = spread_sums(original.module)
        both: dict[str, LayerConsumer | SumConsumer] = {**layers, **{total.node: total for _, total in sums}}
        targets = network_up_to(whole, [find_node(whole, node, whose="original") for node in both])
        converts = {node: converted(graph, original, consumer) for node, consumer in both.items()}
    tallies = {
        node: LayerTally(module.get_submodule(c.module), examples=len(examples), rows=rows, seed=seed)
        for node, c in layers.items()
    }
    sum_tallies = [SumTally() for _ in sums]

    def add_layer(take: Take, first: int, node: str, read: Tensor, wanted: Tensor | None) -> None:
        take(tallies[node], tallies[node].terms(read, wanted, first))

    def add_sums(take: Take, node: str, terms: Sequence[Any], wanted: Tensor | None) -> None:
        for (_, total), add, sum_tally in zip(sums, adds, sum_tallies, strict=True):
            if total.node == node:
                take(sum_tally, sum_tally.terms(_sum_of(add, terms), _sum_of(add, terms, total), wanted, total.axis))

    def add_batch(take: Take, first: int, outputs: tuple[Any, ...], original_outputs: tuple[Any, ...]) -> None:
        values = dict(zip(ends, outputs, strict=True))
        wanted = {node: convert(value) for (node, convert), value in zip(converts.items(), original_outputs, strict=True)}
        for source, node in zip(inputs, layers, strict=True):
            add_layer(take, first, node, values[source], wanted[node])
        for add in dict.fromkeys(adds):
            add_sums(take, add.name, [values[term] for term in mentioned(add)], wanted[add.name])

    ours = module if targets is None else network_up_to(module, ends)
    other = ours if targets is None else targets
    with on_device(ours, device) as where, on_device(other, where), eval_mode(ours, other):

        def run(number: int, take: Take) -> None:
            first = number * batch
            part = examples.batch(slice(first, first + batch), device=where)
            if targets is not None:
                add_batch(take, first, ours(*part.args), targets(*part.args))
                return
            on_layer, on_sum = partial(add_layer, take, first), partial(add_sums, take)
            _Observer(ours, layers, {add.name for add in adds}, on_layer, on_sum).run(*part.args)

        share = worth_sharing([tally.layer for tally in tallies.values()], batch, len(examples), rows, where)
        tally_batches("observed layers", -(-len(examples) // batch), [*tallies.values(), *sum_tallies], run, share=share)
    moments = {node: list(tally.moments(matrix_of(tally.layer))) for node, tally in tallies.items()}
    return {
        place.name: Reconstruction(
            place,
            tuple(layer_fit(graph, c, *moments[c.node]) for c in consumers[place.name].layers if c.node in layers),
            tuple(_sum_fit(graph, c, t) for (name, c), t in zip(sums, sum_tallies, strict=True) if name == place.name),
            skipped[place.name],
        )
        for place in places
    }


def _tallied_layers(
    graph: Graph, consumers: Mapping[str, Consumers], gram_bytes: int
) -> tuple[dict[str, LayerConsumer], dict[str, dict[str, str]]]:
    """The layers to tally, by node: one that reads several sites is tallied once. And by site what is left out, and why."""
    layers: dict[str, LayerConsumer] = {}
    skipped: dict[str, dict[str, str]] = {name: dict(each.others) for name, each in consumers.items()}
    for name, each in consumers.items():
        for consumer in each.layers:
            layer: Any = graph.module.get_submodule(consumer.module)
            if gram_size(layer) <= gram_bytes:
                layers[consumer.node] = consumer
            else:
                skipped[name][consumer.node] = (
                    f"layer {consumer.module!r} reads {gram_features(layer) - 1} features, whose Gram matrices would take "
                    f"{gram_size(layer) / 2**30:.3g} GiB: more than gram_bytes={gram_bytes}"
                )
    return layers, skipped


class _Observer(fx.Interpreter):
    """Runs a network and hands over what its consumers read, each when it is reached: nothing is kept for longer."""

    def __init__(
        self,
        module: fx.GraphModule,
        layers: Collection[str],
        sums: Collection[str],
        on_layer: Callable[[str, Tensor, None], None],
        on_sum: Callable[[str, Sequence[Any], None], None],
    ) -> None:
        super().__init__(module)
        self.layers, self.sums, self.on_layer, self.on_sum = layers, sums, on_layer, on_sum

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        if n.name in self.layers:
            self.on_layer(n.name, self.env[n.all_input_nodes[0]], None)
        if n.name in self.sums:
            self.on_sum(n.name, [self.env[term] for term in mentioned(n)], None)
        return super().run_node(n)


def _is_current(graph: Graph, site: Site) -> bool:
    """Whether the site's node still exists, with the same number of channels."""
    for node in graph.module.graph.nodes:
        if node.name == site.node:
            return (shape_of(node).dims or ())[site.axis : site.axis + 1] == (site.points[0].width,)
    return False


def gram_size(layer: Any) -> int:
    """Return the bytes of a layer's Gram matrices: of all examples and of those held back, in float64."""
    return 2 * 8 * groups_of(layer) * gram_features(layer) ** 2


def _sum_of(node: fx.Node, values: Sequence[Any], consumer: SumConsumer | None = None) -> Tensor:
    """Compute the sum at `node` from the values of its `mentioned` nodes; with `consumer`, without the site's contribution."""
    terms = iter(consumer.sources if consumer is not None else ())
    given = []
    for value in values:
        source = next(terms, None) if isinstance(value, Tensor) else None
        if source is not None and consumer is not None:
            from_right = len(dims_of(node)) - consumer.axis  # a term of lower rank is broadcast
            value = mask_channels(value, source == ELSEWHERE, value.dim() - from_right)
        given.append(value)
    remaining = iter(given)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: next(remaining))
    if isinstance(node.target, str):
        result = getattr(args[0], node.target)(*args[1:], **kwargs)
    else:
        assert callable(node.target)
        result = node.target(*args, **kwargs)
    assert isinstance(result, Tensor)
    return result


def layer_fit(graph: Graph, consumer: LayerConsumer, total: Moments | None, held: Moments | None) -> LayerFit:
    """Return the fit of a layer from its moments over all examples and those held back, with its weights as they are."""
    layer: Any = graph.module.get_submodule(consumer.module)
    start = matrix_of(layer)
    assert total is not None
    bias, mean = (None if layer.bias is None else f"{consumer.module}.bias"), None
    if bias is None and consumer.norm is not None:
        norm: Any = graph.module.get_submodule(consumer.norm)
        bias, mean = f"{consumer.norm}.running_mean", norm.running_mean.detach().cpu().double()
    return LayerFit(consumer.module, layer, start, feature_source(layer, consumer.source), total, held, bias, mean)


def _sum_fit(graph: Graph, consumer: SumConsumer, tally: SumTally) -> SumFit:
    assert tally.sums is not None
    sums = tally.sums.cpu().double()
    name, like, value = None, sums[0], torch.zeros_like(sums[0])
    if consumer.offset is not None:
        offset: Any = graph.module.get_submodule(consumer.offset)
        name, like = f"{consumer.offset}.value", offset.value.detach()
        value = like.cpu().double().where(consumer.covered, 0)
    return SumFit(consumer.node, consumer.source, tally.count, sums, name, value, consumer.covered, like)
