"""What a run works with at any site: the examples and losses that rank filters, repairs, and networks with cuts made.

It remembers nothing of the journey: the same network and site give the same answer, whenever they are asked about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from secateurs._util.modules import Device
from secateurs._util.tensors import digest
from secateurs.compaction import compact
from secateurs.config import Recipe
from secateurs.criteria.ranking import Ranker, Ranking, rank
from secateurs.data.dataset import Examples, class_labels, derive
from secateurs.data.splits import Data, subset
from secateurs.graph.cost import Cost, cost
from secateurs.graph.masking import copied
from secateurs.graph.sites import Site, find_site, find_sites
from secateurs.graph.trace import Graph
from secateurs.metrics import Evaluation, Measure, cross_entropy, divergence, evaluate, values, with_answers
from secateurs.pruning.budget import (
    AcceptanceSets,
    BaselineValues,
    baseline_values,
    certify,
    contract_of,
    predicted,
    split_acceptance_sets,
)
from secateurs.pruning.folder import Record
from secateurs.pruning.results import Progress
from secateurs.repair import Reconstruction, Repair, apply_, observe, prepare, refit_
from secateurs.scoring import OnScored
from secateurs.scoring.cache import MeasurementCache
from secateurs.scoring.evaluator import SiteEvaluator
from secateurs.selection.contract import Verdict
from secateurs.training import carry_momentum

_HELD_OUT = 1024  # examples tell orders and curves apart well enough; a jury may have many more


@dataclass(frozen=True)
class Runtime:
    """What all measurements of a run are made with."""

    loss_fn: Measure
    metric: Measure
    device: Device
    store: MeasurementCache
    cache_bytes: int | None  # of activations kept while masks are scored; None: a quarter of the free memory


@dataclass(frozen=True, eq=False)
class PreparedSite:
    """A site of a network, and what repairs of it need: `graph` has room for them, and computes the same."""

    graph: Graph
    site: Site
    reconstruction: Reconstruction | None


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Examples that the network was not trained on, and the loss that goes with them."""

    examples: Examples
    loss_fn: Measure


@dataclass(frozen=True, eq=False)
class CompactedNetwork:
    """A network with a cut made, and the repair that went with it."""

    graph: Graph
    repair: Repair | None


@dataclass(frozen=True, eq=False)
class PruningContext:
    """The untouched network with its data, recipe and tools."""

    original: Graph
    data: Data
    recipe: Recipe
    tools: Runtime

    # ---- examples ----------------------------------------------------------------------------------------------------

    @cached_property
    def dtype(self) -> torch.dtype:
        """The kind of numbers that the network computes with."""
        return next((p.dtype for p in self.original.module.parameters() if p.is_floating_point()), torch.float32)

    @cached_property
    def search(self) -> Examples:
        """The search set, as the network takes it."""
        return self.data.search.ready(self.dtype)

    @cached_property
    def jury(self) -> AcceptanceSets:
        """The validation images, divided into those that are searched with and those that certify."""
        seed = derive(self.recipe.seed, "certify")
        return split_acceptance_sets(self.search, contract_of(self.recipe), self.tools.metric, seed=seed)

    @cached_property
    def held_out(self) -> HeldOut:
        """Steering images, or enough of them, on which orders are compared and curves are measured, and by which loss.

        With the usual loss it is the divergence from the untouched network's answers: a network that is too sure of itself
        has a smaller cross-entropy after many a cut that costs accuracy. A loss of the user's own is taken as it is.
        """
        steering = self.jury.steering
        few = subset(steering, min(_HELD_OUT, len(steering)), seed=derive(self.recipe.seed, "held out"))
        if self.tools.loss_fn is cross_entropy:
            return HeldOut(self._answered(few), divergence)
        return HeldOut(few, self.tools.loss_fn)

    @cached_property
    def ranker(self) -> Ranker:
        """The examples that filters are ranked on, and the loss that goes with them."""
        recipe, loss_fn = self.recipe, self.tools.loss_fn
        pool = self.data.train if recipe.scoring == "train" else self.jury.steering
        if recipe.signal == "divergence":
            pool, loss_fn = self._answered(pool), divergence
        return Ranker(
            pool,
            loss_fn,
            recipe.asked_of_ensembles(),
            held_out=self.held_out.examples,
            held_out_loss=self.held_out.loss_fn,
            portfolio=recipe.portfolio,
            repaired_masks=recipe.repaired_masks,
            seed=recipe.seed,
        )

    def _answered(self, examples: Examples) -> Examples:
        """The same examples with the untouched network's answers in place of labels."""
        return with_answers(examples, self.original.module, batch=self.recipe.batch, device=self.tools.device)

    @cached_property
    def repair_examples(self) -> Examples:
        """The training examples that repairs are solved on."""
        count = min(self.recipe.repair_examples, len(self.data.train))
        return subset(self.data.train, count, seed=derive(self.recipe.seed, "repair")).ready(self.dtype)

    # ---- sites -------------------------------------------------------------------------------------------------------

    def site(self, graph: Graph, name: str) -> Site | None:
        """The site as it is in `graph`: an earlier cut may have narrowed it, or folded its branch away."""
        found = next((site for site in find_sites(graph, self.recipe.shortcut) if site.name == name), None)
        return found if found is not None and found.channels > 1 else None

    def place(self, graph: Graph, site: Site) -> PreparedSite:
        """The site with what a repair of it needs, if repairs are made."""
        if self.recipe.repair == "none":
            return PreparedSite(graph, site, None)
        prepared = prepare(graph, [site])
        found = observe(
            prepared,
            site.name,
            self.repair_examples,
            # once trained, the network no longer tries to give what the untouched one gives
            original=self.original if self.recipe.finetune is None else None,
            batch=self.recipe.batch,
            device=self.tools.device,
            seed=derive(self.recipe.seed, "repair"),
        )
        if not found.layers and not found.sums:  # all that reads the site was too large, or of a kind that is left alone
            return PreparedSite(graph, site, None)
        return PreparedSite(prepared, find_site(prepared, site.name), found)

    def bench(self, place: PreparedSite, measure: Measure) -> SiteEvaluator:
        """The network at a place, repaired under each mask if repairs are made, to be measured."""
        tools, repair = self.tools, place.reconstruction
        bench = SiteEvaluator(place.graph, place.site, measure, tools.store, self.recipe.batch, tools.device, tools.cache_bytes)
        if repair is None:
            return bench
        return replace(
            bench, weights=lambda keep: repair.solve(keep).weights, unfolded=repair.readers, variant=self._repair_name
        )

    @cached_property
    def _repair_name(self) -> str:
        """All that a repair depends on besides the network and the site."""
        seed = derive(self.recipe.seed, "repair")
        target = "itself" if self.recipe.finetune else digest(dict(self.original.module.state_dict()))
        return f"repaired {self.repair_examples.digest()} {target} {seed}"

    def rank(self, place: PreparedSite, *, step: int, on_scored: OnScored) -> Ranking:
        """The order in which the site's filters would go, as the recipe's criterion has it."""
        bench = self.bench(place, self.tools.loss_fn)
        return rank(
            self.recipe.criterion, bench, self.ranker, reconstruction=place.reconstruction, step=step, on_scored=on_scored
        )

    def made(self, place: PreparedSite, keep: Tensor, *, proved: bool = True) -> CompactedNetwork:
        """The network without the filters, its readers repaired; if wanted, proved to compute what the masked one does."""
        graph, repair = place.graph, None
        if place.reconstruction is not None:
            repair = place.reconstruction.solve(keep)
            graph = copied(graph)
            apply_(graph, repair)
        masks: dict[str | Site, Tensor] = {place.site.name: keep}
        return CompactedNetwork(compact(graph, masks, verify=proved), repair)

    def refitted(self, graph: Graph) -> Graph:
        """The network with every layer solved anew against the untouched one, if the recipe wants that; else as it is."""
        if self.recipe.repair != "every-layer":
            return graph
        fresh = copied(graph)
        seed, device = derive(self.recipe.seed, "refit"), self.tools.device
        refit_(fresh, self.original, self.repair_examples, batch=self.recipe.batch, device=device, seed=seed)
        return fresh

    # ---- whole networks ----------------------------------------------------------------------------------------------

    def evaluate(self, graph: Graph, examples: Examples) -> Evaluation:
        """Loss and accuracy of a network."""
        tools, batch = self.tools, self.recipe.batch
        return evaluate(graph.module, examples, loss_fn=tools.loss_fn, metric=tools.metric, batch=batch, device=tools.device)

    def by_class(self, found: Evaluation, examples: Examples) -> list[float]:
        """The accuracy found on each class; empty where targets are no classes, or the metric gives only means."""
        labels = class_labels(examples.targets)
        if labels is None or found.values is None:
            return []
        return [float(found.values[labels.cpu() == k].mean()) for k in range(len(self.data.classes))]

    def start(self, graph: Graph) -> BaselineValues | None:
        """What a network gets on each of the jury's images, to count drops from; None where only means count."""
        if self.jury.by_means:
            return None
        return baseline_values(graph.module, self.jury, batch=self.recipe.batch, device=self.tools.device)

    def steered(self, graph: Graph, start: BaselineValues) -> Verdict:
        """What the search images predict that certification will say of a network; they may be asked as often as one likes."""
        after = values(graph.module, self.jury.steering, self.jury.metric, batch=self.recipe.batch, device=self.tools.device)
        return predicted(self.jury, start, after)

    def certified(self, graph: Graph, start: BaselineValues, answers: list[bool]) -> Verdict:
        """What the certifying images say of a network; the caller adds the answer to those before."""
        return certify(graph.module, self.jury, start, answers, batch=self.recipe.batch, device=self.tools.device)


@dataclass(frozen=True, eq=False)
class NetworkState:
    """A network and how well it does on the search set; NaN until that is measured."""

    graph: Graph
    accuracy: float = float("nan")
    loss: float = float("nan")
    momentum: dict[str, Tensor] = field(default_factory=dict)  # of the optimiser, by parameter name
    repair: Repair | None = None  # that the latest cut was made with


def measured(workshop: PruningContext, standing: NetworkState) -> NetworkState:
    """The same network, its accuracy and loss on the search set measured."""
    found = workshop.evaluate(standing.graph, workshop.search)
    return replace(standing, accuracy=found.accuracy, loss=found.loss)


def with_cut(workshop: PruningContext, standing: NetworkState, place: PreparedSite, keep: Tensor) -> NetworkState:
    """The smaller network, repaired if repairs are made, and measured; the momentum of the weights that are left comes along.

    `keep` is a mask (C,) over the channels of the place's site.
    """
    made = workshop.made(place, keep)
    parameters = dict(made.graph.module.named_parameters())
    momentum = carry_momentum(standing.momentum, made.graph.kept, parameters)
    return measured(workshop, replace(standing, graph=made.graph, momentum=momentum, repair=made.repair))


def refitted(workshop: PruningContext, standing: NetworkState) -> NetworkState:
    """Every layer solved anew and the network measured, if the recipe wants that; else the network as it stands."""
    graph = workshop.refitted(standing.graph)
    return standing if graph is standing.graph else measured(workshop, replace(standing, graph=graph))


@dataclass(frozen=True, eq=False)
class Baseline:
    """What a network was found to do, for drops to count from."""

    accuracy: float  # on the search set
    start: BaselineValues | None  # on each of the jury's images; None where only means count


@dataclass(eq=False)
class AccuracyBudget:
    """Judges the networks of a run, and remembers what belongs to the step at hand."""

    workshop: PruningContext
    record: Record
    jury: AcceptanceSets = field(init=False)
    answers: list[bool] = field(init=False, default_factory=list)  # of the certifying images, in the step at hand
    _at_this_site: Baseline | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.jury = self.workshop.jury  # too few images for the contract are an error at once

    @cached_property
    def untouched(self) -> Baseline:
        """The network as it came."""
        accuracy = self.record.units("start")[0]["accuracy"]
        return Baseline(accuracy, self.workshop.start(self.workshop.original))

    def counts_from(self, standing: NetworkState) -> Baseline:
        """What drops at the next site count from: the untouched network, or the one at hand where each site has a budget."""
        if self.workshop.recipe.budget == "run":
            return self.untouched
        self._at_this_site = Baseline(standing.accuracy, self.workshop.start(standing.graph))
        return self._at_this_site

    def earlier_answers(self) -> list[bool]:
        """What the certifying images have answered before this step."""
        entries = [*self.record.units("division"), *self.record.units("step")]
        return [answer for entry in entries for answer in entry.get("answers", ())]

    @property
    def closed(self) -> bool:
        """Whether nothing can be certified any more: the first "no" was final."""
        return self.jury.certifying is not None and self.jury.contract.chance(self.earlier_answers()) == 0

    def allows(self, accuracy: float, *, baseline: float) -> bool:
        """Whether an accuracy is within the drop from `baseline`."""
        return round(baseline - accuracy, 12) <= self.workshop.recipe.max_drop

    def still_within(self, standing: NetworkState) -> bool:
        """Whether the network keeps the budget of the site at hand; where there are certifying images, they are asked."""
        counted = self.untouched if self.workshop.recipe.budget == "run" else self._at_this_site
        assert counted is not None
        if counted.start is None or self.jury.certifying is None:
            return self.allows(standing.accuracy, baseline=counted.accuracy)
        if not self.workshop.steered(standing.graph, counted.start).by_estimate:
            return False  # the search images say so, which costs nothing: certification need not be asked
        verdict = self.workshop.certified(standing.graph, counted.start, [*self.earlier_answers(), *self.answers])
        self.answers.append(verdict.accepted)
        return verdict.accepted


Watch = Callable[[Progress], None]


@dataclass(eq=False)
class ProgressReporter:
    """The round and the site at hand, and who wants to know."""

    watch: Watch | None
    round: int = 0
    number: int = 0  # of the site in this round, from 1
    sites: int = 0

    def tell(self, phase: str, done: int, total: int, site: Site | None = None) -> None:
        """Say that `done` of `total` units of a phase are done."""
        if self.watch is not None:
            name = "" if site is None else site.name
            self.watch(Progress(phase, done, total, name, self.number, self.sites, self.round))


@dataclass(frozen=True, eq=False)
class RunContext:
    """What all parts of a run share."""

    workshop: PruningContext
    record: Record
    judge: AccuracyBudget
    whereabouts: ProgressReporter

    @property
    def step(self) -> int:
        """The number of the step at hand, from 1."""
        return len(self.record.units("step")) + 1

    @cached_property
    def cost_before(self) -> Cost:
        """What the untouched network costs."""
        return cost(self.workshop.original)

    def shares_removed(self, graph: Graph) -> tuple[float, float]:
        """The shares of the parameters and of the MACs that `graph` no longer has."""
        now, before = cost(graph), self.cost_before
        return 1 - now.parameters / before.parameters, 1 - now.macs / max(before.macs, 1)
