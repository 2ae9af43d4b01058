"""A network split at a site, prepared to be measured under many masks, exactly and fast."""

from __future__ import annotations

from secateurs.engine.network import MaskedNetwork, split_for

__all__ = ["MaskedNetwork", "split_for"]
