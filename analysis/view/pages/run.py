"""Show the run at a glance: is it learning, what limits its speed, is anything wrong?"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

import pyarrow as pa
from markupsafe import Markup

from analysis.evaluation_stats import Z_95, interval
from analysis.run_status import duration
from analysis.speed_limit import speed_limit
from analysis.view.charts import bars, lines, steps
from analysis.view.heldout_rounds import heldout_tasks
from analysis.view.html import html
from analysis.view.page import Page, PageRequest
from analysis.view.pages.anchor import wrong_states
from analysis.view.panel import Chart, Panel, show_rows
from analysis.view.sql_text import fill

RECENT_STEPS = 5  # learner steps that "now" means
SHOWN_STEPS = 60  # of the chart of times
SHOWN_EVENTS = 30  # rows of the table
SHOWN_STATES = 8  # rows of the table
SILENT_S = 120.0  # a worker that is silent for so long has lost its leases

FIGURES = """
WITH consumed AS (
    SELECT max(learner_step) AS learner_step, count(*) FILTER (outcome <> 'filtered') AS trained,
           min(claimed_at) AS first_at, max(trained_at) AS last_at
    FROM lineage WHERE batch_state = 'trained' AND live),
recent AS (
    SELECT avg(value) AS success FROM (
        SELECT value FROM metrics WHERE name IN ('train/success', 'offline/success')
        ORDER BY learner_step DESC LIMIT $steps)),
heldout AS (
    SELECT value AS success, policy_version AS version FROM metrics
    WHERE name = 'heldout/success' ORDER BY learner_step DESC, policy_version DESC LIMIT 1),
played AS (
    SELECT sum(n_members) AS episodes, sum(n_steps) AS steps FROM groups)
SELECT consumed.*, played.*, recent.success AS train_success,
       (SELECT success FROM heldout) AS heldout_success,
       (SELECT version FROM heldout) AS heldout_version,
       (SELECT max(version) FROM versions) AS version,
       (SELECT max(entered_at) FROM ledger) AS changed_at,
       epoch(last_at - first_at) AS trained_s
FROM consumed, recent, played
"""
# A batch's success is the mean over its groups. Its interval goes by how much groups differ, since
# episodes of one task are alike; a batch of few groups has a wide one.
SUCCESS = """
WITH batches AS (
    SELECT learner_step, avg(n_won / n_members) AS success, sum(n_members) AS episodes,
           coalesce(stddev_samp(n_won / n_members) / sqrt(count(*)), 0) AS error
    FROM lineage JOIN groups USING (group_uid)
    WHERE batch_state = 'trained' AND live AND lineage.source IS NULL AND n_members > 0
    GROUP BY learner_step),
heldout AS (
    SELECT learner_step, policy_version, value AS heldout FROM metrics
    WHERE name = 'heldout/success'
    QUALIFY row_number() OVER (PARTITION BY learner_step ORDER BY policy_version DESC) = 1),
tasks AS (
    SELECT evaluated_version, task_id, sum(n_won)::BIGINT AS won, sum(n_members)::BIGINT AS played
    FROM groups WHERE split = 'heldout' AND state = 'complete' AND n_members > 0 GROUP BY ALL),
rounds AS (
    SELECT evaluated_version AS policy_version,
           list({'task_id': task_id, 'won': won, 'played': played} ORDER BY task_id)
               AS heldout_tasks
    FROM tasks GROUP BY evaluated_version)
SELECT learner_step, success, greatest(0, success - $z * error) AS low,
       least(1, success + $z * error) AS high, episodes, heldout, heldout_tasks
FROM batches FULL JOIN (FROM heldout LEFT JOIN rounds USING (policy_version)) USING (learner_step)
ORDER BY learner_step
"""
BY_ENVIRONMENT = """
WITH named AS (
    SELECT split_part(name, '/', 3) AS environment, name LIKE 'train/%' AS is_training, *,
           row_number() OVER (
               PARTITION BY name ORDER BY learner_step DESC, policy_version DESC) AS age
    FROM metrics WHERE name LIKE '%/success/%')
SELECT environment, avg(value) FILTER (is_training AND age <= $steps) AS training_tasks,
       any_value(value) FILTER (NOT is_training AND age = 1) AS held_out_tasks
FROM named GROUP BY environment ORDER BY environment
"""
LIMITS = """
WITH recent AS (
    SELECT name, value, learner_step FROM metrics
    WHERE learner_step >
        (SELECT max(learner_step) FROM metrics WHERE name = 'time/step_s') - $steps)
SELECT avg(value) FILTER (name = 'learner/idle_fraction') AS waits_for_groups,
       sum(value) FILTER (name = 'time/batch_wait_s') AS batch_wait_s,
       sum(value) FILTER (name = 'time/publish_s') AS publish_s,
       sum(value) FILTER (name = 'time/checkpoint_s') AS checkpoint_s,
       sum(value) FILTER (name = 'time/step_s') AS step_s,
       count(*) FILTER (name = 'time/step_s') AS n_steps,
       avg(value) FILTER (name = 'tokens/generated_per_s') AS generated_per_s,
       avg(value) FILTER (name = 'tokens/trained_per_s') AS trained_per_s,
       (SELECT sum(env_us) / sum(env_us + gen_us) FROM steps
        WHERE version_min >= $version AND split <> 'imported') AS environment_share
FROM recent
"""
TIMES = """
WITH wide AS (
    SELECT learner_step, any_value(value) FILTER (name = 'time/step_s') AS step_s,
           any_value(value) FILTER (name = 'learner/idle_fraction') AS idle,
           any_value(value) FILTER (name = 'time/batch_wait_s') AS batch_wait_s,
           any_value(value) FILTER (name = 'time/publish_s') AS publish_s,
           any_value(value) FILTER (name = 'time/checkpoint_s') AS checkpoint_s
    FROM metrics
    WHERE learner_step > (SELECT max(learner_step) FROM metrics WHERE name = 'time/step_s') - $steps
    GROUP BY learner_step)
SELECT learner_step, idle * step_s AS groups_s, batch_wait_s, publish_s, checkpoint_s,
       greatest(0, step_s * (1 - idle) - batch_wait_s - publish_s - checkpoint_s) AS trains_s
FROM wide WHERE step_s IS NOT NULL ORDER BY learner_step
"""
STALENESS = """
SELECT learner_step, max(staleness) AS oldest, avg(staleness) AS mean, count(*) AS groups
FROM lineage WHERE batch_state = 'trained' AND live AND staleness IS NOT NULL
GROUP BY learner_step ORDER BY learner_step
"""
ALARMS = """
SELECT replace(name, 'alarm/', '') AS alarm,
       arg_max(value, learner_step) = 1 AS is_on,
       count(*) FILTER (value = 1) AS steps_on,
       max(learner_step) FILTER (value = 1) AS last_on
FROM metrics WHERE name LIKE 'alarm/%' GROUP BY name ORDER BY is_on DESC, alarm LIMIT 100
"""
ALARM_MEANS = {
    "ess": "few of the sampled tokens still count: the policy has moved far from what played",
    "entropy": "the policy became almost certain, so it explores little",
    "mismatch_kl": "actors and learner compute different probabilities for the same tokens",
    "length": "responses became much longer or shorter than at the start",
}
# Failures, and groups that were given up. The funnel counts groups that became too old.
HAPPENED = """
    SELECT logged_at, component, what, detail FROM events
    WHERE what NOT IN ('weights loaded', 'merged', 'stale', 'group given up')
    UNION ALL
    SELECT entered_at, 'catalog', 'group ' || state, reason FROM ledger
    WHERE state = 'abandoned' OR reason LIKE '%rolled back%'"""
INCIDENTS = f"""
SELECT logged_at, component, what, detail FROM ({HAPPENED})
ORDER BY logged_at DESC LIMIT $rows
"""
# A process that left for good is still in the view.
COMPONENTS = """
SELECT name AS process, coalesce(waiting_on, 'working') AS waits_for, last_beat_at
FROM components WHERE waiting_on IS DISTINCT FROM 'gone' ORDER BY name
"""
OVERLAP = """
SELECT learner_step, fraction FROM generation_overlap WHERE learner_step > $step ORDER BY 1
"""
NEWEST = """
SELECT coalesce(max(version), 0) AS version, coalesce(max(learner_step), 0) AS learner_step
FROM versions
"""


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the panels of a run."""
    (newest,) = asked.rows(NEWEST)
    now = datetime.now(UTC).replace(tzinfo=None) if asked.is_live else None
    return [
        figures(),
        success(),
        *by_environment(asked),
        limits(
            f"over the last {RECENT_STEPS} learner steps",
            n_steps=RECENT_STEPS,
            version=newest["version"] - RECENT_STEPS,
        ),
        times(n_steps=SHOWN_STEPS),
        staleness(),
        wrong_states(asked, rows=SHOWN_STATES),
        alarms(),
        Panel(
            title="Processes",
            explains="What each process waited for when it was last heard of, and how long ago "
            "that was.",
            query=COMPONENTS,
            show=partial(show_processes, asked.run, now=now),
            empty="No process has reported yet.",
            keeps=False,  # time goes on
        ),
        Panel(
            title="Incidents",
            explains="What went wrong or was given up, newest first, with the cause.",
            query=fill(INCIDENTS, rows=SHOWN_EVENTS),
            show=show_incidents,
            empty="Nothing went wrong.",
            width="full",
        ),
        Panel(
            title="Generation beside training",
            explains="Share of each learner step's training in which actors went on generating, "
            f"for the last {SHOWN_STEPS} steps. 100 % means that training stopped nobody.",
            query=fill(OVERLAP, step=newest["learner_step"] - SHOWN_STEPS),
            show=partial(
                lines,
                x="learner_step",
                y=["fraction"],
                names={"learner_step": "learner step", "fraction": "generating"},
                is_fraction=True,
            ),
            later=True,
            width="full",
        ),
    ]


def figures() -> Panel:
    """Return the panel of the key figures."""
    return Panel(
        title="The run now",
        explains="How far the training is, and how often the agent succeeds.",
        query=fill(FIGURES, steps=RECENT_STEPS),
        show=show_figures,
        width="full",
    )


def success() -> Panel:
    """Return the panel of the success over learner steps."""
    return Panel(
        title="Success",
        explains="Share of episodes that reach their goal, batch by batch. The band is a 95 % "
        "interval over the batch's groups, a whisker one over the held-out tasks (Wilson), which "
        "are never trained on.",
        query=fill(SUCCESS, z=Z_95),
        show=show_success,
        empty="No batch has been trained on yet.",
    )


def by_environment(asked: PageRequest) -> list[Panel]:
    """Return the panel of the success by environment, if the run has several."""
    query = fill(BY_ENVIRONMENT, steps=RECENT_STEPS)
    if not asked.rows(query):
        return []
    return [
        Panel(
            title="Environments",
            explains="Share of episodes that reach their goal, by environment: on training tasks "
            f"over the newest {RECENT_STEPS} batches, on held-out tasks in the newest evaluation.",
            query=query,
            show=partial(show_rows, links={}),
        )
    ]


def show_success(table: pa.Table) -> Chart:
    """Draw the success of the batches, and of each evaluation with its interval."""
    lows: list[float | None] = []
    highs: list[float | None] = []
    for tasks in table["heldout_tasks"].to_pylist():
        low, high = interval(heldout_tasks(tasks)) if tasks else (None, None)
        lows.append(low)
        highs.append(high)
    drawn = table.drop_columns("heldout_tasks")
    for name, values in (("heldout_low", lows), ("heldout_high", highs)):
        drawn = drawn.append_column(name, pa.array(values, pa.float64()))
    return lines(
        drawn,
        x="learner_step",
        y=["success"],
        points=["heldout"],
        low="low",
        high="high",
        whiskers={"heldout": ("heldout_low", "heldout_high")},
        names={
            "learner_step": "learner step",
            "success": "training tasks",
            "heldout": "held-out tasks",
        },
        is_fraction=True,
        height=260,
    )


def limits(when: str, *, n_steps: int, version: int) -> Panel:
    """Return the panel of who waits for whom, in the last `n_steps` learner steps.

    Episodes count from the policy version `version` on.
    """
    return Panel(
        title="What limits the speed",
        explains=f"Who waits for whom, {when}. Actors play episodes; the learner trains on them.",
        query=fill(LIMITS, steps=n_steps, version=version),
        show=show_limits,
        later=True,
    )


def times(*, n_steps: int) -> Panel:
    """Return the panel of the times of the last learner steps."""
    return Panel(
        title="Time of a learner step",
        explains="From one published version of the weights to the next, in seconds.",
        query=fill(TIMES, steps=n_steps),
        show=partial(
            bars,
            x="learner_step",
            y=["trains_s", "groups_s", "batch_wait_s", "publish_s", "checkpoint_s"],
            names={
                "learner_step": "learner step",
                "trains_s": "trains",
                "groups_s": "waits for groups",
                "batch_wait_s": "prepares the batch",
                "publish_s": "publishes weights",
                "checkpoint_s": "saves a checkpoint",
            },
        ),
        empty="No learner step is done yet.",
        later=True,
    )


def staleness() -> Panel:
    """Return the panel of the staleness over learner steps."""
    return Panel(
        title="Staleness",
        explains="How many versions older the weights that played were than those that were "
        "trained. 0 is on policy.",
        query=STALENESS,
        show=partial(
            steps,
            x="learner_step",
            y=["oldest", "mean"],
            names={"learner_step": "learner step", "oldest": "oldest group", "mean": "mean"},
        ),
        empty="No batch of this run's own groups has been trained on yet.",
        later=True,
    )


def alarms() -> Panel:
    """Return the panel of the alarms."""
    return Panel(
        title="Alarms",
        explains="Checks of every learner step. An alarm that is on stays until its figure is "
        "back in its bounds.",
        query=ALARMS,
        show=show_alarms,
        empty="The run has no alarms yet.",
    )


def show_figures(table: pa.Table) -> Markup:
    """Show the key figures."""
    (row,) = table.to_pylist()
    trained = "–" if row["trained_s"] is None else duration(row["trained_s"])
    return html("run_figures.html", row=row, trained=trained)


def show_limits(table: pa.Table) -> Markup:
    """Say in one sentence who waits for whom, and show how the learner spends its time."""
    (row,) = table.to_pylist()
    if not row["n_steps"]:
        return Markup('<p class="empty">No learner step is done yet.</p>')
    step_s = row["step_s"] or 1.0
    waits = row["waits_for_groups"] or 0.0
    parts = {
        "waits for groups": waits,
        "prepares the batch": (row["batch_wait_s"] or 0.0) / step_s,
        "publishes weights": (row["publish_s"] or 0.0) / step_s,
        "saves checkpoints": (row["checkpoint_s"] or 0.0) / step_s,
    }
    trains = max(0.0, 1.0 - sum(parts.values()))
    return html(
        "run_limits.html",
        row=row,
        sentence=f"Limited by the {speed_limit(learner_waits=waits, workers_wait=None)}.",
        parts=[("trains", trains), *parts.items()],
    )


def show_alarms(table: pa.Table) -> Markup:
    """Show which alarms are on, and when each last was."""
    return html("run_alarms.html", rows=table.to_pylist(), means=ALARM_MEANS)


def show_processes(run: str, table: pa.Table, *, now: datetime | None) -> Markup:
    """Show the processes, after a sentence if the run was silent for so long that it may be over.

    `now`: in UTC without a zone, as times are stored; None for a fixed moment, which counts from
    the newest sign of life then.
    """
    rows = table.to_pylist()
    heard = [datetime.fromisoformat(row["last_beat_at"]) for row in rows]
    end = max(heard) if now is None else now
    silent_s = [max(0.0, (end - at).total_seconds()) for at in heard]
    shown = pa.table(
        {
            "process": [row["process"] for row in rows],
            "waits_for": [row["waits_for"] for row in rows],
            "last_heard_of": [f"{duration(silent)} ago" for silent in silent_s],
        }
    )
    silent = duration(min(silent_s)) if min(silent_s) > SILENT_S else ""
    return html("run_processes.html", silent=silent, run=run, table=show_rows(shown, links={}))


def show_incidents(table: pa.Table) -> Markup:
    """Show the last incident in a sentence, and the others as a table."""
    first = table.slice(0, 1).to_pylist()[0]
    return html("run_incidents.html", first=first, table=show_rows(table, links={}))


PAGE = Page(
    path="/run",
    title="Run",
    question="Is it learning, what limits its speed, and is anything wrong?",
    panels=panels,
)
