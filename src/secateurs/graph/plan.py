"""A plan: what was cut, in original channel ids, as JSON; replayable on the untouched checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from secateurs._util.decode import Malformed, brief, checked, decode_json, read_text_file
from secateurs._util.files import write_text
from secateurs.errors import PlanError

VERSION = 1
ADDITIONS = ("biases", "offsets")


@dataclass(frozen=True)
class PlannedCut:
    """Filters removed at one site, as ids among its `channels` original channels.

    `biases` names the layers that got a bias before the cut, `offsets` the sums that got an `Offset`, so that a repair can make
    up for the removed filters. Their values are weights and not part of the plan.
    """

    site: str
    removed: tuple[int, ...]
    channels: int
    biases: tuple[str, ...] = ()
    offsets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Ordered steps of cuts made to a network of class `model`; the cuts of one step were made together."""

    steps: tuple[tuple[PlannedCut, ...], ...] = ()
    model: str = ""

    def then(self, cuts: Iterable[PlannedCut]) -> Plan:
        """Return this plan with one more step."""
        return replace(self, steps=(*self.steps, tuple(cuts)))

    def removed(self) -> dict[str, tuple[int, ...]]:
        """Return all ids removed at each site, ascending, over all steps."""
        removed: dict[str, set[int]] = {}
        for step in self.steps:
            for cut in step:
                removed.setdefault(cut.site, set()).update(cut.removed)
        return {site: tuple(sorted(found)) for site, found in removed.items()}

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        # additions are written only where there are any
        steps = [[{k: v for k, v in asdict(c).items() if v or k not in ADDITIONS} for c in step] for step in self.steps]
        return json.dumps({"secateurs_plan": VERSION, "model": self.model, "steps": steps}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. The file is complete or absent."""
        write_text(Path(path), self.to_json() + "\n")

    @staticmethod
    def from_json(text: str, *, where: str = "plan") -> Plan:
        """Read a plan from JSON text; `where` is named in errors."""
        try:
            found: Any = decode_json(text)
        except Malformed as error:
            raise PlanError(f"{where}: {error}. Was the file cut short?") from error
        if not isinstance(found, dict) or "secateurs_plan" not in found:
            raise PlanError(f"{where}: no 'secateurs_plan' field, so this is not a plan. Use a file written by Plan.save.")
        if found["secateurs_plan"] != VERSION or isinstance(found["secateurs_plan"], bool):
            raise PlanError(
                f"{where}: plan of version {brief(repr(found['secateurs_plan']), 40)}, this secateurs reads version {VERSION}. "
                f"Use the release that wrote it, or make the plan again."
            )
        try:
            steps: list[list[Any]] = checked(found.get("steps"), list[list[Any]])
        except Malformed as error:
            raise PlanError(f"{where}: 'steps' must be a list of lists of cuts ({error}).") from error
        if not isinstance(found.get("model", ""), str):
            raise PlanError(f"{where}: 'model' must be the name of a class, got {brief(repr(found['model']))}.")
        return Plan(tuple(tuple(_cut(c, where) for c in step) for step in steps), found.get("model", ""))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a JSON file."""
        try:
            text = read_text_file(Path(path)).decode()
        except OSError as error:
            raise PlanError(f"{path}: cannot be read ({error.strerror}).") from error
        except (UnicodeDecodeError, Malformed) as error:
            raise PlanError(f"{path}: not a text file, so not a plan ({brief(error)}).") from error
        return Plan.from_json(text, where=str(path))


def _cut(found: Any, where: str) -> PlannedCut:
    try:
        cut: PlannedCut = checked(found, PlannedCut)
    except Malformed as error:
        raise PlanError(
            f"{where}: a cut needs 'site' (text), 'removed' (a list of ids) and 'channels', and may have lists of names in "
            f"'biases' and 'offsets': {error}; got {brief(repr(found))}."
        ) from error
    wrong = [i for i in cut.removed if not 0 <= i < cut.channels]
    if wrong or len(set(cut.removed)) != len(cut.removed):
        raise PlanError(
            f"{where}: site {brief(repr(cut.site))}: removed ids {brief(wrong or cut.removed)} must be distinct, 0 to "
            f"{cut.channels - 1}."
        )
    return cut
