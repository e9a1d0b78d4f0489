"""Name the offline groups that a run trains on, `source=RUN[@where]`, and count them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WHOLE_HINT = "`gigpo export --groups` exports whole groups"


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineSource:
    """A place to take groups from, and a condition on their trajectories."""

    place: str  # a run directory, or a directory or URI that `export` wrote
    where: str | None  # None: all groups


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenSource:
    """Count of the groups that were found at a source."""

    source: OfflineSource
    run_id: str
    n_groups: int  # taken
    n_incomplete: int  # selected, but not all of their trajectories are there
    is_dataset: bool  # written by `export`, not a run

    def __str__(self) -> str:
        where = f" where {self.source.where}" if self.source.where else ""
        left_out = f"; {self.n_incomplete} incomplete ones left out" if self.n_incomplete else ""
        hint = f" ({WHOLE_HINT})" if self.n_incomplete and self.is_dataset else ""
        taken = f"{self.n_groups} groups of {self.source.place}{where} (run {self.run_id})"
        return f"{taken}{left_out}{hint}"


def parse_source(text: str) -> OfflineSource:
    """Split "RUN" or "RUN@where".

    A path may have an "@" in it: RUN is the longest beginning that is a directory. If none is, it
    ends at the first "@".
    """
    parts = text.split("@")
    n = next((n for n in range(len(parts), 0, -1) if Path("@".join(parts[:n])).is_dir()), 1)
    return OfflineSource(place="@".join(parts[:n]), where="@".join(parts[n:]) or None)
