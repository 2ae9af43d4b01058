"""What a run works with at any site: the examples and losses that rank filters, repairs, and networks with cuts made.

It remembers nothing of the journey: the same network and site give the same answer, whenever they are asked about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from secateurs.compaction import compact
from secateurs.contract import Verdict
from secateurs.cutting import Jury, Start, certify, predicted, start_of, summon
from secateurs.data.examples import Examples, class_labels
from secateurs.data.seeding import derive
from secateurs.data.splits import Data, subset
from secateurs.divergence import divergence, with_answers
from secateurs.evaluate import Device, Evaluation, Measure, cross_entropy, evaluate, values
from secateurs.graph import Graph
from secateurs.masking import copied
from secateurs.measuring import Bench
from secateurs.ranking import Ranker, Ranking, rank
from secateurs.recipe import Recipe
from secateurs.repair import Reconstruction, Repair, apply_, observe, prepare, refit_
from secateurs.scoring import OnScored
from secateurs.sites import Site, find_site, find_sites
from secateurs.store import Store
from secateurs.tensorfile import digest

_HELD_OUT = 1024  # examples tell orders and curves apart well enough; a jury may have many more


@dataclass(frozen=True)
class Tools:
    """What all measurements of a run are made with."""

    loss_fn: Measure
    metric: Measure
    device: Device
    store: Store
    cache_bytes: int | None  # of activations kept while masks are scored; None: a quarter of the free memory


@dataclass(frozen=True, eq=False)
class Place:
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
class Made:
    """A network with a cut made, and the repair that went with it."""

    graph: Graph
    repair: Repair | None


@dataclass(frozen=True, eq=False)
class Workshop:
    """The untouched network with its data, recipe and tools."""

    original: Graph
    data: Data
    recipe: Recipe
    tools: Tools

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
    def jury(self) -> Jury:
        """The validation images, divided into those that are searched with and those that certify."""
        seed = derive(self.recipe.seed, "certify")
        return summon(self.search, self.recipe.contract(), self.tools.metric, seed=seed)

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

    def place(self, graph: Graph, site: Site) -> Place:
        """The site with what a repair of it needs, if repairs are made."""
        if self.recipe.repair == "none":
            return Place(graph, site, None)
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
            return Place(graph, site, None)
        return Place(prepared, find_site(prepared, site.name), found)

    def bench(self, place: Place, measure: Measure) -> Bench:
        """The network at a place, repaired under each mask if repairs are made, to be measured."""
        tools, repair = self.tools, place.reconstruction
        bench = Bench(place.graph, place.site, measure, tools.store, self.recipe.batch, tools.device, tools.cache_bytes)
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

    def rank(self, place: Place, *, step: int, on_scored: OnScored) -> Ranking:
        """The order in which the site's filters would go, as the recipe's criterion has it."""
        bench = self.bench(place, self.tools.loss_fn)
        return rank(
            self.recipe.criterion, bench, self.ranker, reconstruction=place.reconstruction, step=step, on_scored=on_scored
        )

    def made(self, place: Place, keep: Tensor, *, proved: bool = True) -> Made:
        """The network without the filters, its readers repaired; if wanted, proved to compute what the masked one does."""
        graph, repair = place.graph, None
        if place.reconstruction is not None:
            repair = place.reconstruction.solve(keep)
            graph = copied(graph)
            apply_(graph, repair)
        masks: dict[str | Site, Tensor] = {place.site.name: keep}
        return Made(compact(graph, masks, verify=proved), repair)

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

    def start(self, graph: Graph) -> Start | None:
        """What a network gets on each of the jury's images, to count drops from; None where only means count."""
        if self.jury.by_means:
            return None
        return start_of(graph.module, self.jury, batch=self.recipe.batch, device=self.tools.device)

    def steered(self, graph: Graph, start: Start) -> Verdict:
        """What the search images predict that certification will say of a network; they may be asked as often as one likes."""
        after = values(graph.module, self.jury.steering, self.jury.metric, batch=self.recipe.batch, device=self.tools.device)
        return predicted(self.jury, start, after)

    def certified(self, graph: Graph, start: Start, answers: list[bool]) -> Verdict:
        """What the certifying images say of a network; the caller adds the answer to those before."""
        return certify(graph.module, self.jury, start, answers, batch=self.recipe.batch, device=self.tools.device)
