"""Draw curves with bands, and points with intervals, as SVG. Nothing here needs a plot library."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.studies.intervals import Interval, bootstrap

# Colour-blind readers can tell them apart (Okabe and Ito).
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
PANEL_WIDTH, PANEL_HEIGHT = 300, 220
LEFT, TOP, RIGHT, BOTTOM = 50, 60, 20, 70
LINE = 18  # height of a line of text
POINT_LEFT, POINT_WIDTH = 260, 420


def curves_svg(
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], *, title: str, y_label: str
) -> str:
    """Return one plot a panel, side by side: each arm's mean over its runs, with its interval.

    `panels` is panel -> arm -> runs -> value after each step, from 0 to 1.
    """
    width = LEFT + len(panels) * (PANEL_WIDTH + RIGHT)
    names = list(dict.fromkeys(name for arms in panels.values() for name in arms))
    colour_of = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    parts = []
    for at, (panel, arms) in enumerate(panels.items()):
        x = LEFT + at * (PANEL_WIDTH + RIGHT)
        n_steps = max(len(run) for runs in arms.values() for run in runs)
        parts.append(_text(x + PANEL_WIDTH / 2, TOP - 8, panel, anchor="middle"))
        for quarter in range(5):
            y = TOP + PANEL_HEIGHT * (1 - quarter / 4)
            parts.append(_path([(x, y), (x + PANEL_WIDTH - RIGHT, y)], stroke="#ddd"))
            if at == 0:
                parts.append(_text(LEFT - 6, y + 4, f"{quarter / 4:g}", anchor="end"))
        for name, runs in arms.items():
            parts += _curve(runs, x=x, n_steps=n_steps, colour=colour_of[name], name=name)
        below = TOP + PANEL_HEIGHT + LINE
        parts.append(_text(x, below, "1"))
        parts.append(_text(x + PANEL_WIDTH - RIGHT, below, str(n_steps), anchor="end"))
    legend_y = TOP + PANEL_HEIGHT + 2.5 * LINE
    for at, name in enumerate(names):
        left = LEFT + at * (width - LEFT) / len(names)
        line = [(left, legend_y), (left + 16, legend_y)]
        parts.append(_path(line, stroke=colour_of[name], width=3))
        parts.append(_text(left + 20, legend_y + 4, name))
    parts.append(_text(10, 18, title, size=14))
    parts.append(_text(10, 36, y_label))
    return _svg(parts, width=width, height=TOP + PANEL_HEIGHT + BOTTOM, title=title)


def _curve(
    runs: Sequence[Sequence[float]], *, x: float, n_steps: int, colour: str, name: str
) -> list[str]:
    length = min(map(len, runs))
    found = [bootstrap([run[step] for run in runs]) for step in range(length)]
    at_x = [x + (PANEL_WIDTH - RIGHT) * step / max(1, n_steps - 1) for step in range(length)]

    def points(values: Sequence[float]) -> list[tuple[float, float]]:
        return [(a, TOP + PANEL_HEIGHT * (1 - b)) for a, b in zip(at_x, values, strict=True)]

    band = points([one.high for one in found]) + points([one.low for one in found])[::-1]
    return [
        _path(band, stroke="none", fill=colour, opacity=0.15),
        f"<g><title>{html.escape(name)}</title>",
        _path(points([one.mean for one in found]), stroke=colour, width=2),
        "</g>",
    ]


def points_svg(points: Sequence[tuple[str, Interval]], *, title: str, x_label: str) -> str:
    """Return a line for each arm: its mean and its interval, on one scale that has 0."""
    low = min(0.0, *(one.low for _, one in points))
    high = max(0.0, *(one.high for _, one in points))
    scale = POINT_WIDTH / ((high - low) or 1.0)
    bottom = TOP + len(points) * LINE + 10
    parts = [_text(10, 18, title, size=14), _text(10, 36, x_label)]
    for value in np.linspace(low, high or 1.0, 5):
        x = POINT_LEFT + (value - low) * scale
        parts.append(_path([(x, TOP - 10), (x, bottom)], stroke="#ddd"))
        parts.append(_text(x, bottom + LINE, f"{value:.3g}", anchor="middle"))
    for at, (name, one) in enumerate(points):
        y = TOP + at * LINE + LINE / 2
        left, middle, right = (
            POINT_LEFT + (value - low) * scale for value in (one.low, one.mean, one.high)
        )
        parts.append(_text(POINT_LEFT - 12, y + 4, name, anchor="end"))
        parts.append(_path([(left, y), (right, y)], stroke=COLOURS[1], width=2))
        parts.append(f'<circle cx="{middle:.1f}" cy="{y:g}" r="4" fill="{COLOURS[1]}"/>')
    width = POINT_LEFT + POINT_WIDTH + 40
    return _svg(parts, width=width, height=bottom + 2 * LINE, title=title)


def _svg(parts: Sequence[str], *, width: float, height: float, title: str) -> str:
    name = html.escape(title)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="sans-serif" role="img" aria-label="{name}">'
    )
    white = f'<rect width="{width:g}" height="{height:g}" rx="10" fill="#fff"/>'
    return "\n".join([head, f"<title>{name}</title>", white, *parts, "</svg>\n"])


def _path(
    points: Sequence[tuple[float, float]],
    *,
    stroke: str,
    width: float = 1,
    fill: str = "none",
    opacity: float = 1,
) -> str:
    at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    shape = "polyline" if fill == "none" else "polygon"
    return (
        f'<{shape} points="{at}" fill="{fill}" stroke="{stroke}" stroke-width="{width:g}" '
        f'opacity="{opacity:g}"/>'
    )


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )
