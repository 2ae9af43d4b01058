"""Where secateurs keeps what it downloads."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Folder for weights and data: `$SECATEURS_HOME`, or `~/.cache/secateurs` when that is unset or empty."""
    moved = os.environ.get("SECATEURS_HOME")
    return Path(moved).expanduser() if moved else Path.home() / ".cache" / "secateurs"
