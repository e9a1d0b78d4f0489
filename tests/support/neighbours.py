"""Do what another user of the machine may do between two looks of a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from store import check_own_directory


def look_while_away(place: Path) -> Callable[[Path], None]:
    """Return a `check_own_directory` during which `place` has another name."""
    aside = place.with_name(f"{place.name} aside")

    def look(path: Path) -> None:
        place.rename(aside)
        try:
            check_own_directory(path)
        finally:
            aside.rename(place)

    return look
