"""A network split at a site, prepared to be measured under many masks, exactly and fast."""

from secateurs.engine.forms import Form
from secateurs.engine.network import MaskedNetwork, split_for
from secateurs.engine.slopes import Slopes

__all__ = ["Form", "MaskedNetwork", "Slopes", "split_for"]
