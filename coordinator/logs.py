"""Send the output of a process to its log file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from store import make_directory, open_file


def capture_output(path: Path) -> None:
    """Append the output of this process and its children to `path`, which is RUN/logs/NAME."""
    run = path.parent.parent
    make_directory(path.parent, beneath=run)
    sys.stdout.flush()
    sys.stderr.flush()
    log = open_file(path, root=run, flags=os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
