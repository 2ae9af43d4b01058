"""What all parts of a run share: the original network, the data, the recipe, the journal; and what is asked of them.

The context is frozen, and says the same of the same network and site whenever it is asked. It keeps what took long to compute:
subsets of the data, the survey, prepared networks, tables of times, weights of trained trials.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from secateurs._util.journal import Journal
from secateurs._util.modules import BatchLimit, Device, eval_mode
from secateurs._util.tensors import digest
from secateurs.compaction import compact
from secateurs.config import REFITTED, Recipe, Shortcut
from secateurs.criteria.ranking import Ranker, Ranking, rank
from secateurs.data.dataset import Examples, class_labels, derive
from secateurs.data.splits import Data, subset
from secateurs.data.stream import Stream
from secateurs.errors import EmptyLayer
from secateurs.graph.channels import none_of
from secateurs.graph.cost import Cost, cost
from secateurs.graph.masking import copied
from secateurs.graph.sites import Site, Sites, find_site, find_sites
from secateurs.graph.structure import activations, is_bypassed
from secateurs.graph.trace import Graph
from secateurs.metrics import (
    Evaluation,
    Measure,
    cross_entropy,
    display_name,
    divergence,
    drawn_labels,
    evaluate,
    logits_of,
    loss,
    values,
    with_answers,
)
from secateurs.pruning.forecast import Forecast
from secateurs.pruning.judge import Judge, check_contract, check_metric, contract_of, judge_for
from secateurs.pruning.measure import Batches, Metric, PerExample, WholeSet, divided
from secateurs.pruning.price import Price, price_for
from secateurs.pruning.results import Progress, TriedNetwork, WidthMultiple
from secateurs.pruning.time_price import SERVED
from secateurs.pruning.whole_metric import WholeMetric
from secateurs.repair import Reconstruction, Repair, Survey, apply_, observe, prepare, refit_, survey
from secateurs.scoring import OnScored
from secateurs.scoring.cache import MeasurementCache
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.selection.allocation import Branch
from secateurs.selection.contract import Contract
from secateurs.speed.engines import Engine
from secateurs.speed.tables import preferred_multiple
from secateurs.speed.widths import multiple_at
from secateurs.training import carry_momentum

T = TypeVar("T")

_PREPARED = 3  # networks with room for repairs that are kept
_CALIBRATED = 256  # examples for int8 ranges, and to compare int8 files on
LEFT_FOR_INT8 = 0.2  # of the allowed drop, with `deploy = "int8"`
_FEW = 512  # examples for a figure between cuts
_COMPARED_ON = 256  # training examples that networks are refitted on which are compared with each other, and thrown away


@dataclass(frozen=True)
class Runtime:
    """What all measurements of a run are made with."""

    loss_fn: Measure
    metric: Measure
    device: Device
    cache: MeasurementCache
    cache_bytes: int | None  # of activations kept while masks are scored; None: a quarter of the free memory
    evaluate: WholeMetric | None = None  # of the user: the metric of the whole validation set
    finetune: Callable[..., Any] | None = None  # of the user: trains the network after cuts
    train: Stream | None = None  # what the recipe's own training reads; None: the training examples in memory
    test: Stream | None = None  # read at the end; None: the test examples in memory, if there are any
    limit: BatchLimit = field(default_factory=BatchLimit)  # of the recipe's batch, where memory runs out
    quantise: Callable[[Graph, Examples, Examples, bool], nn.Module] | None = None  # for `deploy = "int8"`: the file, to be run
    engine: Engine | None = None  # that cuts are weighed and the result is timed in; None: MACs count, eager mode is timed
    served: int | None = None  # examples at once in the user's validation loader

    @property
    def metric_name(self) -> str:
        """What accuracies are measured by: the name of the user's function, "accuracy" for ours."""
        return display_name(self.metric) if self.evaluate is None else self.evaluate.name


@dataclass(eq=False)
class ProgressReporter:
    """Calls `callback` with the current round, site and phase, and what its forecast says is left."""

    callback: Callable[[Progress], None] | None = None
    round: int = 0
    number: int = 0  # of the site in this round, from 1
    sites: int = 0
    forecast: Forecast | None = None
    tried: TriedNetwork | None = None  # the latest of those that are tried while all cuts are weighed together

    def report(self, phase: str, done: int, total: int, site: Site | None = None) -> None:
        """Report that `done` of `total` units of a phase are done."""
        if self.forecast is not None:
            self.forecast.report(phase, done, total)
        if self.callback is not None:
            left, name = None if self.forecast is None else self.forecast.left, "" if site is None else site.name
            self.callback(Progress(phase, done, total, name, self.number, self.sites, self.round, left, self.tried))


class Stopwatch:
    """Counts the seconds of a run's work, one unit after the other, without gaps between them."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Do not count the time that passed since the last unit: it was the caller's own."""
        self._began = time.monotonic()

    def lap(self) -> float:
        """The seconds since the last unit ended; the next one begins now."""
        began, self._began = self._began, time.monotonic()
        return self._began - began


@dataclass(frozen=True, eq=False)
class PreparedSite:
    """A site of a network with what its repair needs: `graph` has room for it, and computes the same."""

    graph: Graph
    site: Site
    reconstruction: Reconstruction | None


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Examples that the network was not trained on, and the loss that goes with them."""

    examples: Examples
    loss_fn: Measure


@dataclass(frozen=True, eq=False)
class NetworkState:
    """A network with its accuracy and loss on the validation set; NaN until they are measured."""

    graph: Graph
    accuracy: float = float("nan")
    loss: float = float("nan")
    momentum: dict[str, Tensor] = field(default_factory=dict)  # of the optimiser, by parameter name
    repair: Repair | None = None  # of the latest cut


@dataclass(frozen=True, eq=False)
class PruningContext:
    """The original network with its data, recipe, runtime, journal and progress callback."""

    original: Graph
    data: Data
    recipe: Recipe
    runtime: Runtime
    journal: Journal = field(default_factory=lambda: Journal(None, {}))
    progress: ProgressReporter = field(default_factory=ProgressReporter)
    clock: Stopwatch = field(default_factory=Stopwatch)
    position: Shortcut | None = None  # of those that `shortcut = "auto"` compares
    trained_trials: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # weights by place, for runs without a folder

    # ---- examples ----------------------------------------------------------------------------------------------------

    @cached_property
    def dtype(self) -> torch.dtype:
        """The floating-point type that the network computes in."""
        return next((p.dtype for p in self.original.module.parameters() if p.is_floating_point()), torch.float32)

    @cached_property
    def validation(self) -> Examples:
        """The validation set (the paper's D_val), in the network's type."""
        return self.data.search.ready(self.dtype)

    @cached_property
    def train(self) -> Examples:
        """The training set (the paper's D_train), in the network's type.

        Byte images of a float32 network stay bytes, which are scaled batch by batch; for another type they are copied.
        """
        stored = self.data.train
        return stored if stored.scaling is not None and self.dtype == torch.float32 else stored.ready(self.dtype)

    @property
    def contract(self) -> Contract:
        """The accuracy contract of this run."""
        return contract_of(self.recipe, trains=self.runtime.finetune is not None)

    @cached_property
    def metric(self) -> Metric:
        """What networks are worth on the validation set, whose images are divided where some of them certify."""
        contract, whole, runtime = self.contract, self.runtime.evaluate, self.runtime
        seed = derive(self.recipe.seed, "certify")
        count = len(self.validation) if whole is None or whole.count is None else whole.count
        check_contract(count, class_labels(self.validation.targets), contract, seed=seed)
        check_metric(contract, whole)
        sides, batches = divided(count, contract, seed=seed), Batches(self.recipe.batch, runtime.device, runtime.limit)
        if whole is None:
            return PerExample(runtime.metric, runtime.loss_fn, self.validation, sides, batches)
        return WholeSet.of(whole, runtime.loss_fn, self.validation, self.data.train, sides, batches)

    def judge(self) -> Judge:
        """What decides how much may be lost; it remembers what the images that certify have answered."""
        return judge_for(
            self.metric,
            self.contract,
            original=self.original,
            journal=self.journal,
            max_drop=self.drop_of_cuts,
            of_run=self.recipe.budget == "run",
            ask=None if self.runtime.quantise is None else self._values_in_int8,
        )

    @cached_property
    def held_out_examples(self) -> Examples:
        """A subset of the search images: what is chosen on it may be certified by the others."""
        search = self.metric.free
        return subset(search, min(self.recipe.curve_examples, len(search)), seed=derive(self.recipe.seed, "held out"))

    @cached_property
    def held_out(self) -> HeldOut:
        """The held-out examples, on which orders are compared and curves are measured, and the loss for them.

        With cross-entropy the loss is the divergence from the original network's outputs: an overconfident network has a
        smaller cross-entropy after many a cut that costs accuracy. A loss of the user's own is taken as it is.
        """
        if self.runtime.loss_fn is cross_entropy:
            return HeldOut(self._answered(self.held_out_examples), divergence)
        return HeldOut(self.held_out_examples, self.runtime.loss_fn)

    @cached_property
    def held_out_few(self) -> HeldOut:
        """Half of them: for the curvature of the loss, and for the points that predicted curves are brought to."""
        held = self.held_out
        count = min(max(self.recipe.curve_examples // 2, 1), len(held.examples))
        few = subset(held.examples, count, seed=derive(self.recipe.seed, "few"), stratified=False)
        return HeldOut(few, held.loss_fn)

    @cached_property
    def loss_of_few(self) -> float:
        """The mean loss of the original network on them."""
        few, module, device = self.held_out_few, self.original.module, self.runtime.device
        return self._batched(lambda batch: loss(module, few.examples, loss_fn=few.loss_fn, batch=batch, device=device))

    @cached_property
    def survey(self) -> Survey | None:
        """All sites of the original network, observed together; None where nothing is repaired, or one site after the other.

        A divergence from the network's own outputs has no slope there; its curvature is that of the loss of labels drawn from
        these outputs.
        """
        if self.recipe.repair == "none" or self.recipe.allocation != "global":
            return None
        self.progress.report("survey", 0, 1)
        names = [site.name for site in self.sites(self.original) if site.channels > 1]
        few, seed = self.held_out_few, derive(self.recipe.seed, "repair")
        examples = few.examples
        if few.loss_fn is divergence:
            examples = replace(examples, targets=drawn_labels(examples.targets, seed))
        graph = self.prepared(names)
        return self._batched(
            lambda batch: survey(
                graph,
                names,
                self.repair_examples,
                examples,
                few.loss_fn,
                batch=batch,
                device=self.runtime.device,
                seed=seed,
            )
        )

    def prepared(self, names: Iterable[str]) -> Graph:
        """The original network, with all that repairs of these sites set; not to be changed, as it is kept."""
        key = tuple(names)
        if key not in self._prepared:
            for oldest in list(self._prepared)[: 1 - _PREPARED]:
                del self._prepared[oldest]
            self._prepared[key] = prepare(self.original, key)
        return self._prepared[key]

    @cached_property
    def _prepared(self) -> dict[tuple[str, ...], Graph]:
        return {}

    @cached_property
    def ranker(self) -> Ranker:
        """What ranks filters: on the training examples, by the loss."""
        return Ranker(
            self.data.train,
            self.runtime.loss_fn,
            self.recipe.ensemble_settings(),
            held_out=self.held_out.examples,
            held_out_loss=self.held_out.loss_fn,
            portfolio=self.recipe.portfolio,
            seed=self.recipe.seed,
            sites=self.sites,
        )

    def _answered(self, examples: Examples) -> Examples:
        """The same examples with the original network's outputs as targets."""
        device = self.runtime.device
        return self._batched(lambda batch: with_answers(examples, self.original.module, batch=batch, device=device))

    def _batched(self, work: Callable[[int], T]) -> T:
        """Work in batches of the recipe's size, or as many examples as fit into memory."""
        return self.runtime.limit.run(self.recipe.batch, work)

    @cached_property
    def repair_examples(self) -> Examples:
        """The training examples that repairs are solved on."""
        count = min(self.recipe.repair_examples, len(self.data.train))
        return subset(self.data.train, count, seed=derive(self.recipe.seed, "repair")).ready(self.dtype)

    @cached_property
    def few_repair_examples(self) -> Examples:
        """Some of them: for networks that are compared with each other, and thrown away."""
        few = min(_COMPARED_ON, len(self.repair_examples))
        return subset(self.repair_examples, few, seed=derive(self.recipe.seed, "compare"), stratified=False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time that passes: it is the caller's own."""
        with nullcontext() if self.progress.forecast is None else self.progress.forecast.paused():
            yield
        self.clock.restart()

    # ---- sites -------------------------------------------------------------------------------------------------------

    @property
    def shortcut(self) -> Shortcut:
        """Where masks lie."""
        if self.recipe.shortcut != "auto":
            return self.recipe.shortcut
        assert self.position is not None
        return self.position

    @cached_property
    def positions(self) -> tuple[Shortcut, ...]:
        """The shortcut positions that are compared, or the one that is taken: of those with the same sites, the first."""
        found: dict[tuple[Site, ...], Shortcut] = {}
        for shortcut in self.recipe.shortcuts:
            sites = tuple(find_sites(self.original, shortcut, head_widths=self.recipe.head_widths))
            found.setdefault(sites, shortcut)
        return tuple(found.values())

    @property
    def of_position(self) -> dict[str, str]:
        """What records of this position have besides: nothing, unless several are compared."""
        return {"shortcut": self.shortcut} if self.recipe.shortcut == "auto" else {}

    def at_node(self, site: Site) -> dict[str, str]:
        """What records of a site have besides: where it lies, if several positions are compared. Some share it."""
        return {"node": site.node} if self.recipe.shortcut == "auto" else {}

    def sites(self, graph: Graph) -> Sites:
        """All sites of `graph`, in network order."""
        return find_sites(graph, self.shortcut, head_widths=self.recipe.head_widths)

    def site(self, graph: Graph, name: str) -> Site | None:
        """The site as it is in `graph`: an earlier cut may have narrowed it; None where nothing is left to remove."""
        found = next((site for site in self.sites(graph) if site.name == name), None)
        return found if found is not None and found.channels > 1 else None

    @cached_property
    def folding_sites(self) -> dict[str, tuple[str, ...]]:
        """The sites that may lose all filters, each with the sites that are gone then: a branch of a sum is folded away.

        Of the sites of one branch, the first that can be emptied; of the branches of one sum, as many as leave a term.
        """
        found: dict[str, tuple[str, ...]] = {}
        if not self.recipe.branches or self.recipe.allocation != "global" or self.shortcut == "coupled":
            return found  # coupled: the model's own code computes every branch
        sites = self.sites(self.original)
        nodes = {node.name: node for node in self.original.module.graph.nodes}
        known: set[str] = set()
        folded: dict[str | Site, Tensor] = {}  # all of them together: any choice of them can then be made
        for site in sites:
            if site.inside or site.name in known or not is_bypassed(self.original.module.graph, nodes[site.node]):
                continue
            masks: dict[str | Site, Tensor] = {site.name: none_of(site.channels)}
            try:
                left = {other.name for other in self.sites(compact(self.original, masks, verify=False))}
                if folded:
                    compact(self.original, {**folded, **masks}, verify=False)
            except EmptyLayer:
                continue
            folded |= masks
            found[site.name] = tuple(other.name for other in sites if other.name not in left and other is not site)
            known |= {site.name, *found[site.name]}
        return found

    def branches(self, sites: Collection[str]) -> tuple[Branch, ...]:
        """The branches that may be folded away, by those of `sites` that can do it."""
        found = self.folding_sites
        return tuple(Branch(name, self._channels[name], found[name]) for name in found if name in sites)

    def prepare(self, graph: Graph, site: Site) -> PreparedSite:
        """The site with what a repair of it needs, if the recipe repairs."""
        if self.recipe.repair == "none":
            return PreparedSite(graph, site, None)
        known = None if graph is not self.original or self.survey is None else self.survey.reconstructions.get(site.name)
        if self.survey is not None and known is not None and (known.layers or known.sums):
            return PreparedSite(self.survey.graph, known.site, known)
        prepared = prepare(graph, [site])
        found = self._batched(
            lambda batch: observe(
                prepared,
                site.name,
                self.repair_examples,
                # once fine-tuned, the network no longer aims at the original's outputs
                original=self.original if self.recipe.finetune is None else None,
                batch=batch,
                device=self.runtime.device,
                seed=derive(self.recipe.seed, "repair"),
            )
        )
        if not found.layers and not found.sums:  # all consumers of the site are too large, or of a kind that is left alone
            return PreparedSite(graph, site, None)
        return PreparedSite(prepared, find_site(prepared, site.name), found)

    def evaluator(self, prepared: PreparedSite, measure: Measure) -> SiteEvaluator:
        """Measures masks of the site by `measure`, the network repaired under each mask if the recipe repairs."""
        runtime, repair = self.runtime, prepared.reconstruction
        found = SiteEvaluator(
            prepared.graph,
            prepared.site,
            measure,
            runtime.cache,
            self.recipe.batch,
            runtime.device,
            runtime.cache_bytes,
            limit=runtime.limit,
        )
        if repair is None:
            return found
        weights = lambda keep: repair.solve(keep).weights  # noqa: E731
        return replace(found, weights=weights, unfolded=repair.consumers, variant=self._repair_name)

    @cached_property
    def _repair_name(self) -> str:
        """All that a repair depends on besides the network and the site."""
        seed = derive(self.recipe.seed, "repair")
        target = "itself" if self.recipe.finetune else digest(dict(self.original.module.state_dict()))
        return f"repaired {self.repair_examples.digest()} {target} {seed}"

    def rank(self, prepared: PreparedSite, *, step: int, on_scored: OnScored) -> Ranking:
        """Rank the site's filters by the recipe's criterion, least important first."""
        surveyed = self.survey if self.survey is not None and prepared.graph is self.survey.graph else None
        return rank(
            self.recipe.criterion,
            replace(self.evaluator(prepared, self.runtime.loss_fn), precision=self.recipe.scoring_precision),
            self.ranker,
            reconstruction=prepared.reconstruction,
            curvature=None if surveyed is None else surveyed.curvature,
            step=step,
            on_scored=on_scored,
        )

    def compacted(self, prepared: PreparedSite, keep: Tensor, *, verify: bool = True) -> tuple[Graph, Repair | None]:
        """Remove the filters that `keep` (C,) drops, with the consumers repaired; verified against the masked network."""
        graph, repair = prepared.graph, None
        if prepared.reconstruction is not None:
            repair = prepared.reconstruction.solve(keep)
            graph = copied(graph)
            apply_(graph, repair)
        masks: dict[str | Site, Tensor] = {prepared.site.name: keep}
        return compact(graph, masks, verify=verify), repair

    def refit(self, graph: Graph, layers: Collection[str] | None = None, examples: Examples | None = None) -> Graph:
        """The network with every layer, or those named, solved against the original, if the recipe wants it; else `graph`."""
        if self.recipe.repair not in REFITTED:
            return graph
        seed, device = derive(self.recipe.seed, "refit"), self.runtime.device
        seen = self.repair_examples if examples is None else examples

        def refit(batch: int) -> Graph:
            fresh = copied(graph)
            refit_(fresh, self.original, seen, layers=layers, batch=batch, device=device, seed=seed)
            return fresh

        return self._batched(refit)

    # ---- widths ------------------------------------------------------------------------------------------------------

    @cached_property
    def _channels(self) -> dict[str, int]:
        """Filters of every site of the original network."""
        return {site.name: site.channels for site in self.sites(self.original)}

    def round_to(self, site: str) -> int:
        """What the number of filters kept at a site is a multiple of; 1 for one that the original has not."""
        asked = self.recipe.round_to
        if asked != "auto":
            return asked

        def measure() -> WidthMultiple:
            self.progress.report("widths", 0, 1)
            return WidthMultiple(preferred_multiple(self.price.engine, self.original), self.price.engine.name)

        return multiple_at(self._channels.get(site, 0), self.journal.once_timed(WidthMultiple, measure).multiple)

    @property
    def by_time(self) -> bool:
        """Whether the cuts of all sites are weighed by the time that they save."""
        return self.runtime.engine is not None and self.recipe.allocation == "global"

    @property
    def planned_batches(self) -> tuple[int, ...]:
        """The batch sizes at which time counts, the one that is served first; that may be halved where it takes too long."""
        engine, asked = self.runtime.engine, self.recipe.latency_batch
        if asked is not None or engine is None or not engine.runs_layers:
            return (asked or (1 if engine is None else engine.batch),)
        return tuple(dict.fromkeys((self.runtime.limit.within(self.runtime.served or SERVED), 1)))

    @cached_property
    def price(self) -> Price:
        """What cuts save, in what the run spends."""
        return price_for(self)

    # ---- whole networks ----------------------------------------------------------------------------------------------

    @cached_property
    def cost_before(self) -> Cost:
        """Parameters and MACs of the original network."""
        return cost(self.original)

    def shares_removed(self, graph: Graph) -> tuple[float, float]:
        """The shares of the original's parameters and MACs that `graph` does without."""
        now, before = cost(graph), self.cost_before
        return 1 - now.parameters / before.parameters, 1 - now.macs / max(before.macs, 1)

    def memory_left(self, graph: Graph) -> float:
        """The share of the original's activations, at their peak, that those of `graph` take."""
        return activations(graph).peak / max(activations(self.original).peak, 1)

    def evaluate(self, graph: Graph, examples: Examples | Stream) -> Evaluation:
        """Loss and accuracy of a network."""
        loss_fn, metric, device = self.runtime.loss_fn, self.runtime.metric, self.runtime.device
        return self._batched(
            lambda batch: evaluate(graph.module, examples, loss_fn=loss_fn, metric=metric, batch=batch, device=device)
        )

    def answers(self, graph: Graph) -> tuple[Tensor, int]:
        """The class (N,) that a network of classes names for each validation example, and the number of classes it knows."""
        with eval_mode(graph.module), torch.no_grad():
            classes = logits_of(graph.module(*graph.example)).shape[1]
        device, named = self.runtime.device, lambda outputs, _: logits_of(outputs).argmax(1)
        found = self._batched(lambda batch: values(graph.module, self.validation, named, batch=batch, device=device))
        return found.long(), classes

    def loss(self, graph: Graph, held_out: HeldOut) -> float:
        """The mean loss of a network on held-out examples."""
        device = self.runtime.device
        return self._batched(
            lambda batch: loss(graph.module, held_out.examples, loss_fn=held_out.loss_fn, batch=batch, device=device)
        )

    def measured(self, state: NetworkState) -> NetworkState:
        """The same network with its accuracy and loss on the validation set."""
        accuracy, loss = self.metric.measured(state.graph)
        return replace(state, accuracy=accuracy, loss=loss)

    def measured_to_choose(self, state: NetworkState) -> NetworkState:
        """The same network with its accuracy and loss on images that may choose weights: those that certify may not.

        Without any that certify, they are those of the whole validation set, which are not measured again.
        """
        if self.metric.sides is None:
            return state
        accuracy, loss = self.metric.to_choose(state.graph, self.held_out_examples.ready(self.dtype))
        return replace(state, accuracy=accuracy, loss=loss)

    @cached_property
    def _glimpsed(self) -> Examples:
        """Enough of the validation set for a figure between cuts that are judged together."""
        few = min(_FEW, len(self.validation))
        return subset(self.validation, few, seed=derive(self.recipe.seed, "glimpse"))

    @cached_property
    def _glimpse_of_original(self) -> Evaluation:
        return self.evaluate(self.original, self._glimpsed)

    def estimated(self, state: NetworkState, original: NetworkState) -> NetworkState:
        """The same network with its accuracy and loss as some validation examples tell: by differences from the original's.

        With few examples, or a metric of the user's own, all are measured.
        """
        if self.runtime.evaluate is not None or len(self._glimpsed) == len(self.validation):
            return self.measured(state)
        found, before = self.evaluate(state.graph, self._glimpsed), self._glimpse_of_original
        accuracy, lost = original.accuracy + found.accuracy - before.accuracy, original.loss + found.loss - before.loss
        return replace(state, accuracy=accuracy, loss=lost)

    def with_cut(self, state: NetworkState, prepared: PreparedSite, keep: Tensor) -> NetworkState:
        """The smaller network, repaired if the recipe repairs, and measured; keeps the momentum of the weights it keeps.

        `keep` is a mask (C,) over the channels of the prepared site.
        """
        graph, repair = self.compacted(prepared, keep)
        momentum = carry_momentum(state.momentum, graph.kept, dict(graph.module.named_parameters()))
        return self.measured(replace(state, graph=graph, momentum=momentum, repair=repair))

    def refitted(self, state: NetworkState) -> NetworkState:
        """The network refitted and measured, if the recipe wants that; else `state` itself."""
        graph = self.refit(state.graph)
        return state if graph is state.graph else self.measured(replace(state, graph=graph))

    def by_class(self, found: Evaluation, examples: Examples) -> tuple[float, ...]:
        """The accuracy on each class; empty where targets are no classes, or the metric gives only means."""
        labels = class_labels(examples.targets)
        if labels is None or found.values is None:
            return ()
        return tuple(float(found.values[labels.cpu() == k].mean()) for k in range(len(self.data.classes)))

    @property
    def drop_of_cuts(self) -> float:
        """The drop that the search may spend on cuts: with `deploy = "int8"` a part is left for quantising."""
        return self.recipe.max_drop * (1 - LEFT_FOR_INT8 if self.recipe.deploy == "int8" else 1.0)

    @cached_property
    def calibration_examples(self) -> Examples:
        """The training examples that ranges of int8 activations come from."""
        count = min(_CALIBRATED, len(self.data.train))
        return subset(self.data.train, count, seed=derive(self.recipe.seed, "int8")).ready()

    @cached_property
    def compared_examples(self) -> Examples:
        """The held-out examples that int8 files are compared with the float network on."""
        held = self.held_out_examples
        return subset(held, min(_CALIBRATED, len(held)), seed=derive(self.recipe.seed, "int8")).ready()

    def _values_in_int8(self, graph: Graph) -> Tensor:
        """The metric of the file that is made of a network, on the images that certify."""
        assert self.runtime.quantise is not None
        classes = self.runtime.loss_fn is cross_entropy
        module = self.runtime.quantise(graph, self.calibration_examples, self.compared_examples, classes)
        return self.metric.of_file(module, "certify")
