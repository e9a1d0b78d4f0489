"""The `gigpo` program in a process of its own, as a person starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600.0  # only for what hangs


def gigpo(
    *arguments: str | Path, timeout_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Return its exit status and what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "cli", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
