"""Pruned networks for others: ONNX, torch.export's .pt2, and plain source; none of them needs secateurs.

Each is written beside its place, run as others will run it, compared with the network, and only then put there.
"""

from secateurs.export.onnx import to_onnx
from secateurs.export.prepare import Agreement, Alignment, Exported, Prepared, Speed, prepared
from secateurs.export.pt2 import to_pt2
from secateurs.export.source import to_source

__all__ = ["Agreement", "Alignment", "Exported", "Prepared", "Speed", "prepared", "to_onnx", "to_pt2", "to_source"]
