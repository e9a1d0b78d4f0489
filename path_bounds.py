"""Bound the files of a model's directory, which somebody else may have made, and the ways to them.

    MAX_FILES             # of a model, on all paths together
    leads_far(path)       # through more than MAX_NAMES names, those in links counted

`configs/` checks a model before it is loaded and `store/` before it is copied, and neither may
import the other. This module imports nothing of the project.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

MAX_FILES: Final = 5_000  # a model has some hundred; links can show one file on many paths
MAX_NAMES: Final = 256  # a model of the Hub's cache takes some 15; each takes 20 microseconds


def leads_far(path: Path) -> bool:
    """Return whether a path leads through more than MAX_NAMES names, with those in links.

    Linux follows up to 40 links of 2,000 names each: 12 ms, whenever such a file is looked at.
    """
    place, names = Path("/"), list(reversed(path.absolute().parts))
    for _ in range(MAX_NAMES):
        if not names:
            return False
        name = names.pop()
        if name == "..":
            place = place.parent
            continue
        try:
            names += reversed(Path(os.readlink(place / name)).parts)
        except OSError:  # no link
            place /= name
    return bool(names)
