"""What fsck found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is not as it should be. Errors are broken promises; warnings are leftovers
    that harm nobody.
    """

    severity: Literal["error", "warning"]
    what: str  # a stable code, e.g. segment_damaged
    # a path relative to the run's root, or what in the catalog it is about, e.g. "group 6f1c…"
    subject: str
    detail: str
    remedy: str


def error(what: str, subject: str, detail: str, *, remedy: str) -> Finding:
    """A broken promise."""
    return Finding(severity="error", what=what, subject=subject, detail=detail, remedy=remedy)


def warning(what: str, subject: str, detail: str, *, remedy: str) -> Finding:
    """A leftover."""
    return Finding(severity="warning", what=what, subject=subject, detail=detail, remedy=remedy)
