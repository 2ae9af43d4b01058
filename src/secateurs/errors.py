"""Errors of secateurs: each message says where, what it got, what it wanted, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SecateursError(Exception):
    """Base class of all errors that secateurs raises on purpose."""


class InvalidInput(SecateursError, ValueError):
    """An argument has the wrong type, shape, range or device."""


class InvalidMask(InvalidInput):
    """A mask is not a bool tensor with one value for each channel of its site."""


class UnknownSite(InvalidInput):
    """No site of that name in this graph, or one that cannot be pruned."""


class Untraceable(SecateursError):
    """torch.fx cannot follow the model's forward, or follows it to a different result."""


class NonFinite(SecateursError):
    """A weight, a loss or an output is NaN or infinite."""


class UnsupportedOp(SecateursError):
    """An op has no rule, or is used in a way that its rule does not cover."""


class EmptyLayer(SecateursError):
    """A cut would leave a layer without filters or inputs, where no branch can be folded away."""


class NotEqual(SecateursError):
    """The compacted network does not compute what the masked one does."""


class Uncertified(SecateursError):
    """An int8 file cannot be promised to be within the allowed drop."""


class NotInPlace(SecateursError):
    """The model's own forward does not run with the widths of a plan, or gives something else."""


class Unproved(SecateursError):
    """Compacted and masked network could not be compared: every output is zero, or none is finite."""


class PlanError(SecateursError):
    """A plan is damaged, of another version, or does not fit the network."""


class ArtefactError(SecateursError):
    """A saved file is damaged, or belongs to another network."""


class DataError(SecateursError):
    """Data is missing, damaged, or splits overlap."""


class DownloadError(DataError):
    """A file could not be downloaded, or its checksum differs."""


class RecipeError(InvalidInput):
    """A field of a recipe is unknown or out of its range."""


class RunError(SecateursError):
    """A run folder is locked, damaged, unwritable, or was started with other settings."""


class OutOfMemory(SecateursError):
    """A device has not enough memory for a single example."""


class TrainingError(SecateursError):
    """Training diverged, or cannot continue from its checkpoint."""


class Diverged(TrainingError):
    """A training has no finite loss or weights any more."""


def suggest(name: str, known: Iterable[str], *, listed: bool = False) -> str:
    """Text to append to an error: ' Did you mean …?' with the nearest known names, or else some of them all.

    `listed`: the error names them all anyway.
    """
    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f" Did you mean {', '.join(map(repr, near))}?"
    if not names or listed:
        return ""
    shown = ", ".join(map(repr, names[:8]))
    return f" Known: {shown}{', …' if len(names) > 8 else ''}."
