"""secateurs makes trained PyTorch networks smaller by removing whole filters and neurons."""

from secateurs.artefact import load, save
from secateurs.compaction import Verification, compact, replay, verify
from secateurs.cost import Cost, cost
from secateurs.errors import SecateursError
from secateurs.flow import rule
from secateurs.graph import Graph, trace
from secateurs.masking import masked
from secateurs.plan import Plan
from secateurs.sites import Site, Unprunable, find_site, find_sites
from secateurs.timing import Latency, latency

__all__ = [
    "Cost",
    "Graph",
    "Latency",
    "Plan",
    "SecateursError",
    "Site",
    "Unprunable",
    "Verification",
    "compact",
    "cost",
    "find_site",
    "find_sites",
    "latency",
    "load",
    "masked",
    "replay",
    "rule",
    "save",
    "trace",
    "verify",
]
