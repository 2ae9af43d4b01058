"""Whether a network keeps the budget: what its drop counts from, and what the certifying images have answered so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from secateurs.cutting import Jury, Start
from secateurs.journey.standing import Standing
from secateurs.record import Record
from secateurs.workshop import Workshop


@dataclass(frozen=True, eq=False)
class Counted:
    """What a network was found to do, for drops to count from."""

    accuracy: float  # on the search set
    start: Start | None  # on each of the jury's images; None where only means count


@dataclass(eq=False)
class Judge:
    """Judges the networks of a run, and remembers what belongs to the step at hand."""

    workshop: Workshop
    record: Record
    jury: Jury = field(init=False)
    answers: list[bool] = field(init=False, default_factory=list)  # of the certifying images, in the step at hand
    _at_this_site: Counted | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.jury = self.workshop.jury  # too few images for the contract are an error at once

    @cached_property
    def untouched(self) -> Counted:
        """The network as it came."""
        accuracy = self.record.units("start")[0]["accuracy"]
        return Counted(accuracy, self.workshop.start(self.workshop.original))

    def counts_from(self, standing: Standing) -> Counted:
        """What drops at the next site count from: the untouched network, or the one at hand where each site has a budget."""
        if self.workshop.recipe.budget == "run":
            return self.untouched
        self._at_this_site = Counted(standing.accuracy, self.workshop.start(standing.graph))
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

    def still_within(self, standing: Standing) -> bool:
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
