"""What keeps layers from being pruned: the reasons of all refused layers, by kind, with the MACs they lock and a remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from secateurs.graph.sites import Sites

OUTPUT = "it is the network's output"

REMEDIES = (  # the first whose pattern is found in a reason; {op} is the op that the reason begins with
    (r"^no rule for", "Add a rule for {op} with @secateurs.rule, or write it with ops that have one."),
    (r"it is the shortcut", "shortcut='after' masks behind the add, and the shortcut's layers lose filters too."),
    (
        r"statistics over several channels",
        "It normalises over the channels; shortcut='stream' takes its statistics over those that are left.",
    ),
    (
        r"computes its weights",
        "Call torch.nn.utils.parametrize.remove_parametrizations (or remove_spectral_norm) on the layer before tracing.",
    ),
    (r"proj_size", "Leave proj_size out and put a linear layer behind, whose filters can go."),
    (r"starts from a state", "Leave the first state out, or pass torch.zeros: then hidden units can go."),
    (r"softmax|sums over an axis", "Sum over another axis than the channels'; a masked channel would count."),
    (r"weights are computed while", "Write the computed weights into an ordinary layer before tracing."),
    (r"has forward hooks", "Remove the hooks before tracing, and add them to the pruned network."),
    (r"shares its weights", "Give each of these layers weights of its own."),
    (r"another batch or image size", "Name axes in {op} by -1 or by the size of its input, not by numbers of one example."),
    (r"takes its sizes from elsewhere", "Write the sizes of {op} one by one: x.view(x.size(0), channels, -1)."),
    (r"one (filter|head) only", "There is nothing to choose from."),
    (r"indexed by something else", "Take parts by slices, chunk or split instead of an index tensor."),
)


@dataclass(frozen=True)
class Obstacle:
    """One kind of reason, the layers that it keeps from losing filters, their MACs for one example, and what would help."""

    reason: str
    layers: tuple[str, ...]
    macs: int
    remedy: str

    def __str__(self) -> str:
        count = "1 layer" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        return f"{self.reason} ({count}, {self.macs:,} MACs). {self.remedy}".rstrip()


def find_obstacles(sites: Sites) -> tuple[Obstacle, ...]:
    """Return the obstacles of the layers without a site, those that lock the most MACs first; the output layer is none."""
    found: dict[str, list[tuple[str, int]]] = {}
    for refused in sites.unprunable:
        if refused.macs and not refused.reason.startswith(OUTPUT):
            kind = re.sub(r" at node '[^']*'", "", re.sub(r" \(it is called \d+ times\)", "", refused.reason))
            found.setdefault(kind, []).append((refused.name, refused.macs))
    obstacles = [
        Obstacle(kind, tuple(name for name, _ in layers), sum(macs for _, macs in layers), _remedy(kind))
        for kind, layers in found.items()
    ]
    return tuple(sorted(obstacles, key=lambda obstacle: -obstacle.macs))


def _remedy(reason: str) -> str:
    op = reason.removeprefix("no rule for ").split(" ")[0]
    return next((remedy.format(op=op) for pattern, remedy in REMEDIES if re.search(pattern, reason)), "")
