"""A network split at a site, prepared to be measured under many masks, exactly and fast."""

from secateurs.scoring.engine.masked import MaskedNetwork, Slopes, split_for
from secateurs.scoring.engine.strategies import MaskingStrategy

__all__ = ["MaskedNetwork", "MaskingStrategy", "Slopes", "split_for"]
