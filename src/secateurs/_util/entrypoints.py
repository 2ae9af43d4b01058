"""Finding code that users name as `package.module:function`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """Look for modules in the current folder first; a script installed by pip does not, and people keep theirs there."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may be younger than Python's listing of the folder
    try:
        yield
    finally:
        sys.path.remove(folder)
