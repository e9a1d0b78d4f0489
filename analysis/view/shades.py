"""Colour advantages: orange below zero, blue above; colour-blind people can tell them apart."""

from __future__ import annotations

SHADES = 4  # on each side of zero


def shade_class(value: float | None, largest: float) -> str:
    """Return the class of a colour for a value between -largest and largest."""
    level = 0 if value is None or not largest else round(value / largest * SHADES)
    level = max(-SHADES, min(SHADES, level))
    return f"adv-{'m' if level < 0 else 'p'}{abs(level)}" if level else "adv-0"
