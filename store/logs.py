"""Where a component's prints go."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def capture_output(path: Path) -> None:
    """From now on this process and its children append everything they print to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
