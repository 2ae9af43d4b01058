"""Train, validation (`search`) and test sets: disjoint, seeded, stratified by class, and recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch import Tensor

from secateurs.data.dataset import Examples, class_labels, generator_for, target_parts
from secateurs.errors import DataError, InvalidInput

_PIECE = 256  # examples that are looked at together


@dataclass(frozen=True, eq=False)
class Data:
    """Three disjoint sets: `train` fits weights, `search` (the validation set) chooses cuts, `test` only reports."""

    name: str
    train: Examples
    search: Examples
    test: Examples | None  # None: a stream that is read at the end, or nothing
    classes: tuple[str, ...] = ()  # names; empty: the targets are not classes
    origin: Mapping[str, str | int | float | None] = field(default_factory=dict)  # arguments that reproduce this split
    notes: tuple[str, ...] = ()  # caveats for readers of results

    def __post_init__(self) -> None:
        for name, examples in self.named_sets().items():
            if len(examples) == 0:
                raise DataError(f"the {name} set of {self.name!r} is empty: every set needs at least one example.")
        for (name, one), (other_name, other) in combinations(self.named_sets().items(), 2):
            common = 0 if one.ids is None or other.ids is None else int(torch.isin(one.ids, other.ids).sum())
            if common:
                raise DataError(
                    f"{common} examples of {self.name!r} are both in {name} ({len(one)}) and in {other_name} "
                    f"({len(other)}): sets must be disjoint, or the measured accuracy is meaningless."
                )

    def splits(self) -> dict[str, Examples]:
        """The sets in memory by name, as files record them."""
        found = {"train": self.train, "search": self.search, "test": self.test}
        return {name: examples for name, examples in found.items() if examples is not None}

    def named_sets(self) -> dict[str, Examples]:
        """The sets in memory by the names that messages give them: train, validation, test."""
        return {"validation" if name == "search" else name: examples for name, examples in self.splits().items()}

    @property
    def test_set(self) -> Examples:
        """The test set; an error where there is none in memory."""
        if self.test is None:
            raise DataError(f"{self.name!r} has no test set in memory: give one.")
        return self.test

    def digest(self) -> str:
        """SHA-256 of the contents of all sets in memory, in order."""
        return _digest_of({name: examples.digest() for name, examples in self.splits().items()})

    def record(self) -> dict[str, object]:
        """Provenance of this data, as JSON values: enough to detect any change of contents or split."""
        contents = {name: examples.digest() for name, examples in self.splits().items()}
        sets = {
            name: {"count": len(examples), "sha256": contents[name], "ids_sha256": examples.ids_digest()}
            for name, examples in self.splits().items()
        }
        return {
            "name": self.name,
            "origin": dict(self.origin),
            "classes": list(self.classes),
            "notes": list(self.notes),
            "sets": sets,
            "sha256": _digest_of(contents),
        }


def split(examples: Examples, sizes: Sequence[int], *, seed: int) -> tuple[Examples, ...]:
    """Split into disjoint sets of the given sizes, in source order, stratified by class up to rounding.

    The sizes must add up to the number of examples. Targets that are not class labels are split at random.
    """
    if min(sizes, default=0) < 0 or sum(sizes) != len(examples):
        raise InvalidInput(f"split of {len(examples)} examples into {list(sizes)}: the sizes must add up to their number.")
    numbered = examples if examples.ids is not None else replace(examples, ids=torch.arange(len(examples)))
    order = _order(examples, generator_for(seed, "split"))
    return tuple(numbered.take(rows.sort().values) for rows in torch.split(order, list(sizes)))


def split_shares(count: int, *shares: float) -> tuple[int, ...]:
    """Sizes of sets with the given shares of `count` examples, at least one each; the rest comes first."""
    sizes = tuple(max(1, round(share * count)) for share in shares)
    rest = count - sum(sizes)
    if rest < 1 or min(shares) <= 0:
        raise DataError(f"shares {shares} of {count} examples leave none for training: use more examples or smaller shares.")
    return (rest, *sizes)


def subset(examples: Examples, count: int, *, seed: int, stratified: bool = True) -> Examples:
    """Draw a subset of `count` examples, in source order, stratified by class up to rounding.

    With the same seed a smaller subset is contained in a larger one.
    """
    if not 1 <= count <= len(examples):
        raise InvalidInput(f"subset of {count} examples: wanted 1 to {len(examples)}.")
    order = _order(examples, generator_for(seed, "subset"), stratified)
    return examples.take(order[:count].sort().values)


def shared_inputs(one: Examples, other: Examples) -> int:
    """Count the inputs of `one` that are also in `other`, byte for byte."""
    known = set(_row_digests(other))
    return sum(row in known for row in _row_digests(one))


def refuse_copies(given: Mapping[str, Examples]) -> None:
    """Raise if all inputs of one of the given sets are also in another, byte for byte."""
    for (name, one), (other_name, other) in combinations(given.items(), 2):
        small, large = ((name, one), (other_name, other)) if len(one) < len(other) else ((other_name, other), (name, one))
        if shared_inputs(small[1], large[1]) == len(small[1]):
            raise DataError(
                f"all {len(small[1])} inputs of the {small[0]} set are in the {large[0]} set too: give disjoint sets, "
                f"or build secateurs.data.Data yourself if this is intended."
            )


def refuse_nonfinite(data: Data) -> None:
    """Raise if an input or a target is NaN or infinite, with the set and index of the first one."""
    for name, examples in data.named_sets().items():
        parts = [("input", part) for part in examples.stored.args]
        for what, values in (*parts, *(("target", part) for part in target_parts(examples.targets))):
            if not values.is_floating_point():
                continue
            # piece by piece: a set on disk may not fit into memory
            bad = torch.cat([~piece.isfinite().all(1) for piece in torch.split(values.reshape(len(values), -1), _PIECE)])
            if bool(bad.any()):
                raise DataError(
                    f"the {name} set of {data.name!r}: {what} {int(bad.nonzero()[0])} holds NaN or infinite values "
                    f"({int(bad.sum())} of {len(values)} {what}s do). Remove these examples, or fill in the values."
                )


def overlap_notes(data: Data) -> tuple[str, ...]:
    """Describe inputs that are in two sets, byte for byte."""
    pairs = [((name, one), (other, known)) for (other, known), (name, one) in combinations(data.named_sets().items(), 2)]
    found = [(name, len(one), other, shared_inputs(one, known)) for (name, one), (other, known) in pairs]
    return tuple(f"{shared} of {count} {name} inputs are also in {other}" for name, count, other, shared in found if shared)


def stratified_order(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Random order of the rows in which every prefix holds the same share of each class, up to rounding."""
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = labels[shuffled].argsort(stable=True)
    counts = labels.unique(return_counts=True)[1]  # type: ignore[no-untyped-call]
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    # the r-th of the n examples of any class belongs at (r + 1/2) / n of the order
    position = torch.empty(len(labels), dtype=torch.float64)
    position[by_class] = (torch.arange(len(labels)) - starts + 0.5).double() / counts.repeat_interleave(counts)
    return shuffled[position.argsort(stable=True)]


def _order(examples: Examples, generator: torch.Generator, stratified: bool = True) -> Tensor:
    labels = class_labels(examples.targets) if stratified else None
    if labels is None:
        return torch.randperm(len(examples), generator=generator)
    return stratified_order(labels.cpu(), generator)


def _digest_of(parts: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{name} {digest};" for name, digest in parts.items()).encode()).hexdigest()


def _row_digests(examples: Examples) -> list[bytes]:
    parts = [part.detach().cpu().reshape(len(part), -1).contiguous().view(torch.uint8).numpy() for part in examples.stored.args]
    return [hashlib.blake2b(b"".join(row.data for row in rows), digest_size=16).digest() for rows in zip(*parts, strict=True)]
