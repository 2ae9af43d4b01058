"""How channels pass through an op: the kinds of flow that rules return.

A flow answers three questions about vectors over channels. Forward, `zeros`: which channels of the output are zero
for every input. Backward, `needs`: which channels of each input are needed, given those needed of the output. Forward again,
`sources`: the one channel of a site with which each channel becomes zero (or would, if the op kept zeros), `ELSEWHERE` if none.
An input whose channel axis is unknown has no vector (None): all of it is present, none of it known to be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx

from secateurs.graph.channels import all_of, none_of

Vector = Tensor | None
ResizeArgs = Callable[[fx.Node, int], None]
ZeroIf = Literal["all", "any", "first", "third", "rest"]
ELSEWHERE = -1


def elsewhere(width: int) -> Tensor:
    """Return the sources of `width` channels that come from no channel of the site."""
    return torch.full((width,), ELSEWHERE)


@dataclass(frozen=True)
class Source:
    """A tensor without tensor inputs: a placeholder, a constant of the model."""

    axis: int | None = None
    width: int = 0

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """Nothing is known to be zero."""
        return none_of(self.width)

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """From nowhere."""
        return elsewhere(self.width)

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """Reads nothing."""
        return []


@dataclass(frozen=True)
class Lookup:
    """Rows of a table, taken by number: channel i of the output is column i of the table, as of an embedding."""

    axis: int
    width: int

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """Nothing is known to be zero."""
        return none_of(self.width)

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """From the table."""
        return elsewhere(self.width)

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """Every number."""
        return [None]


@dataclass(frozen=True)
class Channelwise:
    """Channel i of the output depends on channel i of the input alone.

    `keeps_zero`: f(0) = 0. `pointwise`: acts on every value alone, so that a constant stays one. `activation`: a
    nonlinearity that follows a layer. `params`: parameters and buffers whose first dimension counts channels;
    `count`: the module's attribute that holds the number of channels. `resize` corrects sizes among the op's arguments.
    `revived`: the channels (width,) that do not keep zero, if only some do not.
    """

    axis: int | None
    in_axis: int | None
    width: int
    keeps_zero: bool
    pointwise: bool = False
    activation: bool = False
    params: tuple[str, ...] = ()
    count: str | None = None
    resize: ResizeArgs | None = None
    revived: Tensor | None = None

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """Zero channels stay zero, or are revived."""
        if ins[0] is not None and self.revived is not None:
            return ins[0] & ~self.revived
        return ins[0] if self.keeps_zero and ins[0] is not None else none_of(self.width)

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """Channel by channel."""
        return elsewhere(self.width) if ins[0] is None else ins[0]

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """Each needed channel needs the same channel of the input."""
        return [out]


@dataclass(frozen=True)
class Layer:
    """Filters: each output channel reads all input channels of its group."""

    axis: int
    in_axis: int
    inputs: int
    filters: int
    groups: int
    bias: bool
    transposed: bool = False
    reads_all: bool = False  # its input's channels lie along another axis than the one it reads
    linear: bool = True  # else no repair can solve for its weights

    @property
    def depthwise(self) -> bool:
        """One input channel a group."""
        return self.groups > 1 and self.groups == self.inputs

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """A filter without bias whose inputs are all zero gives zero."""
        zero = ins[0]
        if self.bias or zero is None or self.reads_all:
            return none_of(self.filters)
        return zero.view(self.groups, -1).all(1).repeat_interleave(self.filters // self.groups)

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """A filter of one channel passes it on; one of several channels mixes them."""
        if ins[0] is None or self.reads_all or self.inputs != self.groups:
            return elsewhere(self.filters)
        return ins[0].repeat_interleave(self.filters // self.inputs)

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """A group with a needed filter needs all its inputs."""
        if self.reads_all:
            return [None]
        wanted = (out & ~zero).view(self.groups, -1).any(1)
        return [wanted.repeat_interleave(self.inputs // self.groups)]


@dataclass(frozen=True)
class Join:
    """Several inputs meet channel by channel, with broadcasting: add, multiply, concatenation along another axis.

    `zero_if`: the output is zero where "all" inputs are, where "any" is, where the "first" or the "third" is, or where all the
    "rest" behind the first are. `revives`: it becomes something else there, as a quotient of zeros does, so that a site's mask
    is applied again. `in_axes`: the channel axis of each input; None for one without channels of its own (it is broadcast).
    """

    axis: int
    in_axes: tuple[int | None, ...]
    width: int
    zero_if: ZeroIf
    widths: tuple[int, ...]
    broadcasts: bool = True
    revives: bool = False

    def _own(self, ins: Sequence[Vector]) -> list[Vector]:
        """Return the vectors of the inputs whose channels are those of the output, None for the others."""
        return [None if axis is None else vector for axis, vector in zip(self.in_axes, ins, strict=True)]

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """Combined as `zero_if` says."""
        if self.revives:
            return none_of(self.width)
        vectors = [none_of(self.width) if v is None else v.expand(self.width) for v in self._own(ins)]
        if self.zero_if in ("first", "third"):
            return vectors[0 if self.zero_if == "first" else 2]
        stacked = torch.stack(vectors[self.zero_if == "rest" :])
        return stacked.any(0) if self.zero_if == "any" else stacked.all(0)

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """One factor from the site zeroes a product; a sum becomes zero with a channel that all its terms come from."""
        stacked = torch.stack([elsewhere(self.width) if v is None else v.expand(self.width) for v in self._own(ins)])
        if self.zero_if in ("first", "third"):
            return stacked[0 if self.zero_if == "first" else 2]
        stacked = stacked[self.zero_if == "rest" :]
        last = stacked.amax(0)
        return last if self.zero_if == "any" else torch.where((stacked == last).all(0), last, ELSEWHERE)

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """Needed of each input as of the output, without the channels that are zero in the output."""
        wanted = out & ~zero if self.zero_if == "any" else out
        return [wanted if width == self.width else wanted.any().expand(width) for width in self.widths]


@dataclass(frozen=True)
class Concat:
    """Inputs that follow one another along the channel axis."""

    axis: int
    widths: tuple[int, ...]

    @property
    def width(self) -> int:
        """Channels of the result."""
        return sum(self.widths)

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """The inputs' zeros, in order."""
        return torch.cat([none_of(w) if v is None else v for v, w in zip(ins, self.widths, strict=True)])

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """The inputs' sources, in order."""
        return torch.cat([elsewhere(w) if v is None else v for v, w in zip(ins, self.widths, strict=True)])

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """Each input is needed where its part of the output is."""
        return list(torch.split(out, list(self.widths)))


@dataclass(frozen=True)
class Moved:
    """Output channel j is input channel `index[j]`, or zero where that is -1: slices, chunks, pads of channels, flatten.

    `how` says how a narrower tensor is handled: "gather" replaces the op by a gather, "before" gathers ahead of the op (whose
    arguments `resize` then corrects), "same" keeps the op, which spreads each channel over a block of equal size.
    `added`: an earlier cut inserted it, so what it leaves out is dead, not just unused.
    """

    axis: int
    in_axis: int
    inputs: int
    index: Tensor
    how: Literal["gather", "before", "same"]
    resize: ResizeArgs | None = None
    added: bool = False

    @property
    def width(self) -> int:
        """Channels of the result."""
        return len(self.index)

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """Zero where the source is, or where there is none."""
        source = none_of(self.inputs) if ins[0] is None else ins[0]
        return torch.cat([source, all_of(1)])[self.index]

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """As the channels move."""
        source = elsewhere(self.inputs) if ins[0] is None else ins[0]
        return torch.cat([source, elsewhere(1)])[self.index]

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """An input channel is needed where any of its copies is."""
        wanted = none_of(self.inputs + 1)
        wanted[self.index[out]] = True
        return [wanted[:-1]]


@dataclass(frozen=True)
class Blocks:
    """Output channel j is made of the input features `members[j]`, each feature of one channel: a view from features to images.

    `together`: the features of a channel are removed together, so that sites lie behind the op: pixel shuffle, GLU, the
    heads of attention.
    """

    axis: int
    in_axis: int
    members: Tensor  # (width, features of a channel)
    resize: ResizeArgs | None = None
    together: bool = False

    @property
    def width(self) -> int:
        """Channels of the result."""
        return len(self.members)

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """Zero where all its features are."""
        return none_of(self.width) if ins[0] is None else ins[0][self.members].all(1)

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """A channel that all the features come from."""
        if ins[0] is None:
            return elsewhere(self.width)
        found = ins[0][self.members]
        return torch.where((found == found[:, :1]).all(1), found[:, 0], ELSEWHERE)

    def features(self, channels: Tensor) -> Tensor:
        """Return the features that make up `channels`, bool vectors both."""
        wanted = none_of(self.members.numel())
        wanted[self.members[channels].flatten()] = True
        return wanted

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """All features of a needed channel."""
        return [self.features(out)]


@dataclass(frozen=True)
class Reduced:
    """All channels become one number at each place, in which a zero channel does not count: their sum, mean, norm, maximum.

    `axis` is None where the axis of the channels is gone. `resize` corrects what a narrower op would compute: the mean of all
    channels is the sum of those that are left, divided by the number of all.
    """

    axis: int | None
    in_axis: int
    inputs: int
    resize: ResizeArgs | None = None

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """Zero where all channels are."""
        return none_of(1) if ins[0] is None else ins[0].all().view(1)

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """Of no single channel."""
        return elsewhere(1)

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """Every channel."""
        return [(out & ~zero).expand(self.inputs)]


@dataclass(frozen=True)
class Contracted:
    """Channels of the first two inputs are multiplied one by one and added up: queries and keys of attention.

    A channel that is zero in one of them does not count, and is not needed of the other. `axis` is None where no channels are
    left; in scaled_dot_product_attention, the `width` channels of the third input, the values, pass on.
    """

    axis: int | None
    in_axes: tuple[int | None, ...]
    inputs: int
    width: int = 0
    resize: ResizeArgs | None = None

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """Zero where the values are."""
        return none_of(self.width) if self.axis is None or ins[2] is None else ins[2]

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """Those of the values."""
        return elsewhere(self.width) if self.axis is None or ins[2] is None else ins[2]

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """Of the first two inputs, what is zero in neither; of the values, what is needed of the output."""
        both = all_of(self.inputs)
        for known in ins[:2]:
            both = both if known is None else both & ~known
        return [both, both, *([] if self.axis is None else [out])]


@dataclass(frozen=True)
class Recurrent:
    """An output of an LSTM, GRU or RNN: `copies` of its hidden units, one for each direction; the recurrence reads all units.

    So no unit is unneeded before a mask drops it, and a mask acts within the recurrence (`graph/recurrent.py`).
    """

    axis: int
    in_axis: int
    inputs: int
    units: int
    copies: int

    @property
    def width(self) -> int:
        """Channels of the output."""
        return self.units * self.copies

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """Nothing is known to be zero."""
        return none_of(self.width)

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """Units mix all features."""
        return elsewhere(self.width)

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """Every feature."""
        return [all_of(self.inputs)]


@dataclass(frozen=True)
class Norm:
    """Statistics over channels, those of each of `groups` apart: LayerNorm, RMSNorm, GroupNorm.

    A mask behind it means statistics over the kept channels, and zero for the others; without a mask it needs all its channels,
    for the reason that is shown to the user. `along`: the dimension of its parameters that counts channels.
    """

    axis: int
    width: int
    groups: int
    along: int
    reason: str

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """The mean is taken off zeros too."""
        return none_of(self.width)

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """Channel by channel."""
        return elsewhere(self.width) if ins[0] is None else ins[0]

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """All of them, if any channel of the output is needed."""
        return [out.any().expand(self.width)]

    def groups_stay_equal(self, source: Tensor) -> bool:
        """Whether the groups stay equally large whichever channels of a site go, given the site's channel of each (width,)."""
        rows = source.view(self.groups, -1)
        return bool((rows == rows[:, :1]).all() or (rows == rows[:1]).all())


@dataclass(frozen=True)
class Opaque:
    """Unknown flow: the op gets its inputs at full width. `reason` is shown to the user."""

    reason: str
    axis: None = None

    def zeros(self, ins: Sequence[Vector]) -> Tensor:
        """Nothing is known to be zero."""
        return none_of(0)

    def sources(self, ins: Sequence[Vector]) -> Tensor:
        """From nowhere."""
        return elsewhere(0)

    def needs(self, out: Tensor, ins: Sequence[Vector], zero: Tensor) -> list[Vector]:
        """Everything."""
        return [None] * len(ins)


Flow = Source | Lookup | Channelwise | Layer | Join | Concat | Moved | Blocks | Reduced | Contracted | Recurrent | Norm | Opaque
