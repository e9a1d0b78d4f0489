"""Colour advantages: orange below zero, blue above; colour-blind people can tell them apart."""

from __future__ import annotations

SHADES = 4  # on each side of zero


def shade_class(value: float | None, largest: float) -> str:
    """Return the class of a colour for a value between -largest and largest."""
    if value is None or not largest:
        return "adv-0"
    level = max(-SHADES, min(SHADES, round(value / largest * SHADES)))
    if level == 0:
        return "adv-0"
    side = "m" if level < 0 else "p"
    return f"adv-{side}{abs(level)}"
