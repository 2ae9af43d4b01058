"""Export pruned networks as ONNX, as torch.export's .pt2 and as source, all of which run without secateurs.

Each export is written to a temporary place, run as its users will run it, compared with the network, and only then moved.
"""

from secateurs.export.deliver import Agreement, Alignment, Exported, ExportOptions, Prepared, Speed, prepared
from secateurs.export.deployment import Deployed, deploy
from secateurs.export.programs import to_onnx, to_pt2
from secateurs.export.source import to_source

__all__ = [
    "Agreement",
    "Alignment",
    "Deployed",
    "ExportOptions",
    "Exported",
    "Prepared",
    "Speed",
    "deploy",
    "prepared",
    "to_onnx",
    "to_pt2",
    "to_source",
]
