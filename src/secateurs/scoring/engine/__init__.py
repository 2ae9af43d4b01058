"""A network split at a site, prepared to be measured under many masks, exactly and fast."""

from secateurs.scoring.engine.forward import MaskingStrategy
from secateurs.scoring.engine.masked import MaskedNetwork, check_masks, split_for

__all__ = ["MaskedNetwork", "MaskingStrategy", "check_masks", "split_for"]
