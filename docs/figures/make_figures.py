"""The figure of docs/algorithms.md from any run: python docs/figures/make_figures.py RUN [--output
FILE.svg]

Needs matplotlib, which nothing else here does: pip install matplotlib. RUN may be training. Both
panels are over the groups that were trained on, under the published settings but for what a panel
varies.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # our packages are run from a checkout
import store
from gigpo import (
    ESTIMATORS,
    PUBLISHED_SETTINGS,
    WITH_CRITIC,
    compute_advantages,
    step_variance_share,
)

STEPS = """SELECT group_uid, traj_uid, step_index, reward, is_action_valid, state_hash, won
FROM steps JOIN groups USING (group_uid) WHERE groups.state = 'trained'
ORDER BY group_uid, traj_uid, step_index"""
QUERY_TIMEOUT_S = 600.0
NAMES = [name for name in ESTIMATORS if name not in WITH_CRITIC]
GAMMAS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
NORMALISATIONS = ("mean", "mean_std")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("estimators.svg"))
    options = parser.parse_args()
    with store.open_run(options.run) as reader:
        steps = reader.sql(STEPS, timeout_s=QUERY_TIMEOUT_S)
    if not len(steps):
        raise SystemExit(f"error: {options.run} has not trained on a group yet; try again later")
    # Text stays text and ids are not random, so the file is small and the same steps give the same
    # bytes.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "figure", "font.size": 9}
    figure = Figure(figsize=(10, 4.4), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    draw_correlations(left, steps)
    draw_shares(right, steps)
    figure.savefig(
        options.output, metadata={"Date": None} if options.output.suffix == ".svg" else None
    )
    print(f"{len(steps)} steps in {options.output}")


def draw_correlations(axes: Axes, steps: pa.Table) -> None:
    """Draw the correlation of every estimator's advantages with every other's."""
    advantages = [
        compute_advantages(steps, replace(PUBLISHED_SETTINGS, estimator=name))["advantage"]
        for name in NAMES
    ]
    correlations = np.corrcoef([column.to_numpy() for column in advantages])
    print(np.array2string(correlations, precision=3, suppress_small=True))
    upper = np.triu(np.ones_like(correlations, bool), k=1)  # the other half says the same
    axes.pcolormesh(
        np.ma.array(correlations, mask=upper), vmin=0.0, vmax=1.0, cmap="Blues", edgecolor="white"
    )
    for row, column in np.argwhere(~upper):
        value = correlations[row, column]
        colour = "white" if value > 0.6 else "black"
        axes.text(column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", color=colour)
    ticks = np.arange(len(NAMES)) + 0.5
    axes.set_xticks(ticks, NAMES, rotation=35, ha="right")
    axes.set_yticks(ticks, NAMES)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"correlation of the advantages, {len(steps):,} steps")


def draw_shares(axes: Axes, steps: pa.Table) -> None:
    """Draw the share of gigpo's signal that is step-level, by discount."""
    for name, marker in zip(NORMALISATIONS, "os", strict=True):
        each = [replace(PUBLISHED_SETTINGS, normalise=name, gamma=gamma) for gamma in GAMMAS]
        shares = [step_variance_share(compute_advantages(steps, settings)) for settings in each]
        print(name, dict(zip(GAMMAS, np.round(shares, 3).tolist(), strict=True)))
        axes.plot(GAMMAS, shares, marker=marker, label=f"normalise={name}")
    axes.set_xlabel("gamma")
    axes.set_ylim(0.0, None)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title("gigpo: the step term's share of the variance")


if __name__ == "__main__":
    main()
