"""Draw the picture of the README from a run: python docs/figures/learning_curve.py RUN

Needs matplotlib, which nothing else here does: pip install matplotlib. RUN may be training.
Left: success over learner steps, on training tasks as it was played and on held-out tasks. Right:
how many policy versions old the rows of each learner step were.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # our packages are run from a checkout
import store

SUCCESS = """SELECT name, learner_step, value FROM metrics
WHERE name IN ('train/success', 'heldout/success') ORDER BY learner_step"""
STALENESS = """SELECT learner_step, staleness, sum(n_steps)::BIGINT AS rows
FROM lineage JOIN groups USING (group_uid) WHERE batch_state = 'trained'
GROUP BY ALL ORDER BY ALL"""
LABELS = {"train/success": "training games", "heldout/success": "held-out games"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("quickstart.svg"))
    options = parser.parse_args()
    with store.open_run(options.run) as reader:
        success, staleness = reader.sql(SUCCESS).to_pylist(), reader.sql(STALENESS).to_pylist()
    # Text stays text and ids are not random: the same run gives the same bytes.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "figure", "font.size": 9}
    figure = Figure(figsize=(9, 3), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    for name, marker in (("train/success", ""), ("heldout/success", "o")):
        points = [(row["learner_step"], row["value"]) for row in success if row["name"] == name]
        left.plot(*zip(*points, strict=True), marker=marker, label=LABELS[name])
    left.set(xlabel="learner step", ylim=(0, 1), title="success")
    left.legend(loc="lower right")
    bottom: dict[int, float] = {}
    for age in sorted({row["staleness"] for row in staleness}):
        rows = {row["learner_step"]: row["rows"] for row in staleness if row["staleness"] == age}
        below = [bottom.get(step, 0) for step in rows]
        right.bar(list(rows), list(rows.values()), bottom=below, width=1.0, label=f"{age} versions")
        bottom |= {step: bottom.get(step, 0) + count for step, count in rows.items()}
    right.set(xlabel="learner step", title="rows by staleness")
    right.legend(loc="upper right", fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.output, metadata={"Date": None})
    print(f"{options.output}: {len(success)} points")


if __name__ == "__main__":
    main()
