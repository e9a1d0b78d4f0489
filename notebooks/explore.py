"""Three plots of a run: success, staleness, and what the policy learns in its states.

    pip install -e ".[notebook]"
    marimo edit notebooks/explore.py -- --run runs/key_room    in the browser
    python notebooks/explore.py --run runs/key_room            as a script: a line for each plot
    python notebooks/explore.py --run RUN --save FOLDER        the plots as SVG files, too

The run may be training. It is only read, with queries as in docs/sql.md.
"""

import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="A run of async-gigpo")

with app.setup:
    import html
    import sys
    from pathlib import Path

    import marimo as mo

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # our packages, from a checkout
    import store
    from printable import printable

    BLUE, ORANGE, GREEN = "#1b6ac9", "#d9822b", "#1b7f3b"
    WIDTH = 680

    SUCCESS = """SELECT version_min AS version, avg(won::INT) AS success, count(*) AS episodes
    FROM trajectories WHERE split = 'train' GROUP BY 1 ORDER BY 1"""

    STALENESS = """SELECT staleness, count(*) AS groups FROM lineage
    WHERE batch_state = 'trained' AND live AND staleness IS NOT NULL GROUP BY 1 ORDER BY 1"""

    # the pairs whose mean is the least likely to be chance come first
    ADVANTAGES = """SELECT s.anchor_text[:48] AS state, s.action_text[:24] AS action,
        count(*) AS steps, avg(a.step_advantage) AS mean
    FROM advantages() a JOIN steps s USING (traj_uid, step_index)
    WHERE s.split = 'train' AND a.anchor_size > 1 AND s.is_action_valid
    GROUP BY 1, 2 HAVING steps >= 10 ORDER BY abs(mean) * sqrt(steps) DESC, 1, 2 LIMIT 8"""


@app.function
def picture(title: str, height: int, parts: list[str]) -> str:
    """Return an SVG with a light background of its own, for light and dark pages."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff"/>'
        f"{label(12, 22, title)}{''.join(parts)}</svg>"
    )


@app.function
def label(x: float, y: float, words: object, *, anchor: str = "start") -> str:
    """Return words as a part of a picture. Those of a run may hold anything, so none is markup."""
    shown = html.escape(printable(words))
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#111">{shown}</text>'


@app.function
def plot_success(rows: list[dict]) -> str:
    newest = max((row["version"] for row in rows), default=0) or 1
    points = [
        f"{50 + 600 * row['version'] / newest:.1f},{210 - 160 * row['success']:.1f}" for row in rows
    ]
    axis = [label(42, 214 - 160 * share, share, anchor="end") for share in (0.0, 0.5, 1.0)]
    line = f'<polyline points="{" ".join(points)}" fill="none" stroke="{BLUE}" stroke-width="2"/>'
    ends = [label(50, 232, "version 0"), label(650, 232, f"version {newest}", anchor="end")]
    return picture(
        "Success on training tasks, by the oldest version of an episode", 245, [line, *axis, *ends]
    )


@app.function
def plot_staleness(rows: list[dict]) -> str:
    most = max((row["groups"] for row in rows), default=1)
    parts = []
    for place, row in enumerate(rows):
        y, length = 40 + 30 * place, 460 * row["groups"] / most
        parts += [
            label(110, y + 15, f"{row['staleness']} versions", anchor="end"),
            f'<rect x="120" y="{y}" width="{length:.1f}" height="20" fill="{ORANGE}"/>',
            label(126 + length, y + 15, row["groups"]),
        ]
    return picture("How old groups were when they were trained on", 50 + 30 * len(rows), parts)


@app.function
def plot_advantages(rows: list[dict]) -> str:
    largest = max((abs(row["mean"]) for row in rows), default=0.0) or 1.0
    parts = []
    for place, row in enumerate(rows):
        y, length = 40 + 24 * place, 90 * abs(row["mean"]) / largest
        left, colour = (520, GREEN) if row["mean"] > 0 else (520 - length, ORANGE)
        parts += [
            label(12, y + 13, f"{row['state']} → {row['action']}"),
            f'<rect x="{left:.1f}" y="{y}" width="{length:.1f}" height="16" fill="{colour}"/>',
            label(670, y + 13, f"{row['mean']:+.2f}", anchor="end"),
        ]
    return picture(
        "Step advantage of an action in a state: the mean of its steps", 50 + 24 * len(rows), parts
    )


@app.cell
def _():
    run = mo.ui.text(
        value=str(mo.cli_args().get("run") or "runs/key_room"), label="run", full_width=True
    )
    run  # noqa: B018  marimo shows the last expression of a cell
    return (run,)


@app.cell
def _(run):
    # One reader, so that all plots show the same moment of a run that trains.
    with store.open_run(run.value) as reader:
        success, staleness, advantages = (
            reader.sql(query).to_pylist() for query in (SUCCESS, STALENESS, ADVANTAGES)
        )
    print(f"success: {len(success)} versions, {sum(row['episodes'] for row in success)} episodes")
    print(f"staleness: {sum(row['groups'] for row in staleness)} groups that were trained on")
    print(f"step advantages: {len(advantages)} pairs of a state and an action")
    return advantages, staleness, success


@app.cell
def _(success):
    mo.Html(plot_success(success))
    return


@app.cell
def _(staleness):
    mo.Html(plot_staleness(staleness))
    return


@app.cell
def _(advantages):
    mo.Html(plot_advantages(advantages))
    return


@app.cell
def _(advantages, staleness, success):
    if folder := mo.cli_args().get("save"):
        plots = {
            "success": plot_success(success),
            "staleness": plot_staleness(staleness),
            "advantages": plot_advantages(advantages),
        }
        # Others may write in the folder too: a link of theirs must not lead to a file elsewhere.
        with store.opened_by_own_links(Path(str(folder))) as (directory, _):
            for name, plot in plots.items():
                with store.written_aside(directory, f"{name}.svg", mode=0o666) as file:
                    file.write(f"{plot}\n".encode())
    return


if __name__ == "__main__":
    app.run()
