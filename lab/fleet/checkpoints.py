"""Checkpoints that are made once and kept."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def kept(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made whole by `make` if it is not there yet; several processes may ask at once."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        make(made)
        os.replace(made, folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder
