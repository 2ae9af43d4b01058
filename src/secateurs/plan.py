"""A plan: what was cut, in original channel ids, as JSON; replayable on the untouched checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from secateurs.errors import PlanError
from secateurs.files import write_text

VERSION = 1
ADDITIONS = ("biases", "offsets")


@dataclass(frozen=True)
class PlannedCut:
    """Filters removed at one site: ids count the site's original channels, of which there were `channels`.

    What the site's readers were given beforehand, to make up for the loss: `biases` names the layers that got a bias, `offsets`
    the sums behind which an `Offset` was put. Their values are weights like any other, and not part of the plan.
    """

    site: str
    removed: tuple[int, ...]
    channels: int
    biases: tuple[str, ...] = ()
    offsets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Ordered steps of cuts made to a network of class `model`; the cuts of one step were made at once."""

    steps: tuple[tuple[PlannedCut, ...], ...] = ()
    model: str = ""

    def then(self, cuts: Iterable[PlannedCut]) -> Plan:
        """This plan with one more step."""
        return replace(self, steps=(*self.steps, tuple(cuts)))

    def removed(self) -> dict[str, tuple[int, ...]]:
        """All ids removed at each site, ascending, over all steps."""
        gone: dict[str, set[int]] = {}
        for step in self.steps:
            for cut in step:
                gone.setdefault(cut.site, set()).update(cut.removed)
        return {site: tuple(sorted(found)) for site, found in gone.items()}

    def to_json(self) -> str:
        """The plan as JSON text."""
        steps = [[_fields(cut) for cut in step] for step in self.steps]
        return json.dumps({"secateurs_plan": VERSION, "model": self.model, "steps": steps}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_text(Path(path), self.to_json() + "\n")

    @staticmethod
    def from_json(text: str, *, where: str = "plan") -> Plan:
        """Read a plan back; `where` is named in errors."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{where}: not JSON ({error}). Was the file cut short?") from error
        if not isinstance(found, dict) or "secateurs_plan" not in found:
            raise PlanError(f"{where}: no 'secateurs_plan' field, so this is not a plan.")
        if found["secateurs_plan"] != VERSION:
            raise PlanError(
                f"{where}: plan of version {found['secateurs_plan']!r}, this secateurs reads version {VERSION}. "
                f"Use the release that wrote it, or make the plan again."
            )
        return Plan(tuple(tuple(_cut(c, where) for c in step) for step in _steps(found, where)), str(found.get("model", "")))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a JSON file."""
        try:
            text = Path(path).read_bytes().decode()
        except OSError as error:
            raise PlanError(f"{path}: cannot be read ({error.strerror}).") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"{path}: not a text file, so not a plan.") from error
        return Plan.from_json(text, where=str(path))


def _fields(cut: PlannedCut) -> dict[str, Any]:
    """A cut for JSON; what it adds is mentioned only where it adds anything."""
    return {name: value for name, value in asdict(cut).items() if value or name not in ADDITIONS}


def _steps(found: dict[str, Any], where: str) -> list[list[Any]]:
    steps = found.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, list) for step in steps):
        raise PlanError(f"{where}: 'steps' must be a list of lists of cuts.")
    return steps


def _cut(found: Any, where: str) -> PlannedCut:
    fields = found if isinstance(found, dict) else {}
    site, removed, channels = fields.get("site"), fields.get("removed"), fields.get("channels")
    whole = isinstance(removed, list) and all(type(i) is int for i in removed)
    if not isinstance(site, str) or not isinstance(removed, list) or not whole or type(channels) is not int:
        raise PlanError(f"{where}: a cut needs 'site' (text), 'removed' (a list of ids) and 'channels', got {found!r}.")
    cut = PlannedCut(site, tuple(removed), channels, *(_names(fields, name, where) for name in ADDITIONS))
    wrong = [i for i in cut.removed if not 0 <= i < cut.channels]
    if wrong or len(set(cut.removed)) != len(cut.removed):
        raise PlanError(
            f"{where}: site {cut.site!r}: removed ids {wrong or cut.removed} must be distinct, 0 to {cut.channels - 1}."
        )
    return cut


def _names(fields: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    found = fields.get(name, [])
    if not isinstance(found, list) or not all(isinstance(n, str) for n in found):
        raise PlanError(f"{where}: site {fields['site']!r}: {name!r} must be a list of names, got {found!r}.")
    return tuple(found)
