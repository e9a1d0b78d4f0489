"""Compare the advantages of stored steps under another setting with the run's own: What if."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from bokeh.models import BasicTicker, ColumnDataSource, HoverTool
from bokeh.models.annotations import Span
from markupsafe import Markup

from analysis.run_status import config_of
from analysis.view.charts import COLOURS, GRID, columns_of, draw, new_figure
from analysis.view.group_query import OF_GROUP, group_versions, of_batches, of_group
from analysis.view.html import html
from analysis.view.page import BadAddressError, Page, PageRequest
from analysis.view.panel import Chart, Panel, show_rows
from analysis.view.sql_text import Value, fill
from analysis.view.text import plain
from configs import Config, ConfigError
from gigpo import ESTIMATORS, NORMALISATIONS, WHITENED, WITH_CRITIC, AdvantageSettings
from store import StoreError

NUMBERS = ("gamma", "omega")
# A page reads few steps, and a critic's advantages are whitened over a batch.
CHOICES = {
    "estimator": tuple(e for e in ESTIMATORS if e not in WITH_CRITIC),
    "normalise": NORMALISATIONS,
}
NAMES = (*NUMBERS, *CHOICES)
# Each is one change: what its link says, and the setting.
PRESETS = (
    ("without the step term (GRPO)", {"omega": "0"}),
    ("a strong step term", {"omega": "2"}),
    ("no discount", {"gamma": "1"}),
    ("a short sight", {"gamma": "0.5"}),
    ("without dividing by the deviation", {"normalise": "mean"}),
    ("leave one out", {"normalise": "leave_one_out"}),
    ("HGPO", {"estimator": "hgpo"}),
    ("GraphGPO", {"estimator": "graphgpo"}),
    ("G2PO", {"estimator": "g2po"}),
    ("GAGPO", {"estimator": "gagpo"}),
)
DEFAULT = PRESETS[0][1]
BY_TEXT = ("similar", "similar_greedy")  # anchors that the macro refuses
RECENT_STEPS, MOST_STEPS = 3, 20  # learner steps
POINTS = 2_000
LISTED = 200
CHARACTERS = 200

# Differences that rounding can make are no signs.
BOTH = """, both_settings AS (
    SELECT now.traj_uid, now.step_index, now.group_uid, now.advantage AS own,
           other.advantage AS changed,
           sign(round(now.advantage, 9)) AS own_sign,
           sign(round(other.advantage, 9)) AS changed_sign
    FROM advantages() AS now JOIN advantages({changes}) AS other USING (traj_uid, step_index))
"""
SUMMARY = """
SELECT count(*) AS steps, count(*) FILTER (own_sign * changed_sign < 0) AS flips,
       count(*) FILTER (own_sign <> 0 AND changed_sign = 0) AS silenced,
       count(*) FILTER (own_sign = 0 AND changed_sign <> 0) AS awakened,
       if(isnan(corr(own, changed)), NULL, corr(own, changed)) AS correlation,
       avg(abs(changed - own)) AS mean_change,
       count(DISTINCT group_uid) AS groups,
       count(DISTINCT group_uid) FILTER (own_sign * changed_sign < 0) AS groups_with_flips
FROM both_settings HAVING count(*) > 0
"""
SCATTER = """
SELECT own, changed, own_sign * changed_sign < 0 AS flips,
       left(s.action_text, $characters) AS action
FROM both_settings JOIN steps AS s USING (traj_uid, step_index)
ORDER BY hash(traj_uid, step_index) LIMIT $points
"""
FLIPS = """
SELECT left(s.anchor_text, $characters) AS state, left(s.action_text, $characters) AS action,
       own AS advantage, changed AS changed_advantage, s.won, s.member AS episode,
       s.step_index AS step, s.task_id AS task, b.traj_uid, b.group_uid, s.state_hash
FROM both_settings AS b JOIN steps AS s USING (traj_uid, step_index)
WHERE own_sign * changed_sign < 0
ORDER BY abs(changed - own) DESC, traj_uid, step_index LIMIT $rows
"""
GROUPS = """
SELECT group_uid, any_value(s.task_id) AS task, count(DISTINCT traj_uid) FILTER (s.won) AS won,
       count(DISTINCT traj_uid) AS episodes, count(*) AS steps,
       count(*) FILTER (own_sign * changed_sign < 0) AS flips, flips / count(*) AS share,
       if(isnan(corr(own, changed)), NULL, corr(own, changed)) AS correlation
FROM both_settings JOIN steps AS s USING (traj_uid, step_index, group_uid)
GROUP BY group_uid ORDER BY flips DESC, group_uid LIMIT $rows
"""
HINTS = {
    "advantage": "with the run's own setting: above zero the action becomes more likely",
    "changed_advantage": "with the changed setting",
    "share": "of its steps that would be pushed the other way",
    "correlation": "of old and new advantages: 1 means that only their size changes",
}


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the comparison of the run's own setting with the one in the address."""
    group, n_steps = asked.uid("group"), asked.whole("steps")
    if n_steps is None:
        n_steps = RECENT_STEPS
    if not 1 <= n_steps <= MOST_STEPS:
        raise BadAddressError(f"steps is a number of learner steps, from 1 to {MOST_STEPS}")
    is_first = not any(name in asked.parameters for name in NAMES)
    given = DEFAULT if is_first else {n: v for n in NAMES if (v := asked.text(n)) is not None}
    own = own_settings(asked)
    setting = Panel(
        title="Setting",
        explains="Change the setting by hand. Empty means as in the run. Nothing is written; "
        "stored steps are weighed again.",
        query=fill("SELECT $scope AS scope", scope=str(group or f"{n_steps} learner steps")),
        show=partial(check_setting, own, given),
        above=_form(asked, group, n_steps, given=given, own=own),
        width="whole",
    )
    try:
        check_setting(own, given)
    except ValueError:
        return [setting]  # it says what is wrong
    if group is None:
        source = of_batches(asked, n_steps)
    else:
        source = of_group(OF_GROUP, group=group, versions=group_versions(asked, group))
    values = {name: _value(name, text) for name, text in given.items()}
    changes = ", ".join(f"{name} := ${name}" for name in values)
    both = source + fill(BOTH.format(changes=changes), **values)
    is_recent = group is None

    def panel(title: str, explains: str, query: str, show: Any, **more: Any) -> Panel:
        return Panel(
            title=title,
            explains=explains,
            query=both + query,
            show=show,
            later=is_recent,
            alone=is_recent,
            **more,
        )

    found = [
        setting,
        panel(
            "What would change",
            "A step flips if the changed setting would make its action less likely where the run "
            "made it more likely, or the other way round.",
            SUMMARY,
            partial(show_summary, given),
            empty="There are no steps to compare.",
        ),
        panel(
            "Old and new advantages",
            "A dot is a step. On the line nothing changes; orange dots flip.",
            fill(SCATTER, characters=60, points=POINTS),
            show_scatter,
        ),
        panel(
            "Steps that flip",
            "The largest changes first. A state leads to all that was tried there, an action to "
            "the transcript.",
            fill(FLIPS, characters=CHARACTERS, rows=LISTED),
            partial(show_flips, asked),
            empty="No step flips: every action is pushed the same way as in the run.",
            width="whole",
        ),
    ]
    if is_recent:
        found.append(
            panel(
                "Groups",
                "Where the setting matters: the groups with most flips first.",
                fill(GROUPS, rows=LISTED),
                partial(show_groups, asked, given),
                width="whole",
            )
        )
    return found


def own_settings(asked: PageRequest) -> AdvantageSettings | None:
    """Return the setting that the run trains with, None if its config cannot be read here."""
    try:
        return AdvantageSettings.of(config_of(Path(asked.run)).algorithm)
    except (ConfigError, StoreError, OSError, ValueError):
        return None


def check_setting(
    own: AdvantageSettings | None, given: Mapping[str, str], table: pa.Table | None = None
) -> Markup:
    """Return nothing to show. Raises ValueError with what is wrong with the setting.

    Otherwise each panel would show DuckDB's error.
    """
    base = own or AdvantageSettings.of(Config().algorithm)
    if base.anchor in BY_TEXT:
        raise ValueError(
            f"this run compares states by their texts (anchor={base.anchor}), which SQL cannot; "
            "gigpo audit RUN omega=0 --against weighs its steps again"
        )
    if base.estimator in WITH_CRITIC or given.get("estimator") in WITH_CRITIC:
        raise ValueError(
            f"{base.estimator} to another estimator is compared by batches: "
            "gigpo audit RUN --against estimator=gigpo"
        )
    values: dict[str, Any] = {name: _value(name, text) for name, text in given.items()}
    for name in NUMBERS:
        if isinstance(values.get(name), str):
            raise ValueError(f"{name} is a number, not {plain(values[name])}")
    replace(base, **values)
    return Markup("")


def show_summary(given: Mapping[str, str], table: pa.Table) -> Markup:
    """Show the numbers of flips in one sentence and figures."""
    row = table.to_pylist()[0]
    setting = ", ".join(f"{name} {value}" for name, value in given.items())
    return html(
        "what_if_summary.html",
        row=row,
        setting=setting,
        is_whitened=given.get("estimator") in WHITENED,
    )


def show_scatter(table: pa.Table) -> Chart:
    """Draw each step's old advantage against the new one."""
    data = columns_of(table, x="own")
    drawn = new_figure(x="advantage with the run's setting", height=320)
    drawn.xaxis.ticker = BasicTicker()
    drawn.yaxis.axis_label = "with the changed setting"
    for flips, colour in ((False, COLOURS[0]), (True, COLOURS[1])):
        kept = [at for at, value in enumerate(data["flips"]) if value is flips]
        source = ColumnDataSource({name: [data[name][at] for at in kept] for name in data})
        marks = drawn.scatter(x="own", y="changed", source=source, size=6, color=colour, alpha=0.6)
        tips = [("action", "@action"), ("now", "@own{0.00}"), ("changed", "@changed{0.00}")]
        drawn.add_tools(HoverTool(renderers=[marks], tooltips=tips))
    reach = max((abs(value) for value in data["own"]), default=1.0)
    drawn.line([-reach, reach], [-reach, reach], color=GRID, line_dash="dashed")
    for dimension in ("width", "height"):
        drawn.add_layout(Span(location=0, dimension=dimension, line_color=GRID, line_alpha=0.5))
    n_flips = sum(bool(value) for value in data["flips"])
    return draw(drawn, f"old against new advantages of {len(data['own'])} steps, {n_flips} flip")


def show_flips(asked: PageRequest, table: pa.Table) -> Markup:
    """Show the steps whose sign changes."""

    def anchor(row: Mapping[str, Any]) -> str | None:
        state = row["state_hash"]
        return asked.link("/anchor", group=row["group_uid"], state=state) if state else None

    def trajectory(row: Mapping[str, Any]) -> str:
        return asked.link("/trajectory", traj=row["traj_uid"], step=row["step"])

    def task(row: Mapping[str, Any]) -> str:
        return asked.link("/task", task=row["task"])

    links = {"state": anchor, "action": trajectory, "task": task}
    hidden = ("traj_uid", "group_uid", "state_hash")
    return show_rows(table, links=links, hints=HINTS, hidden=hidden)


def show_groups(asked: PageRequest, given: Mapping[str, str], table: pa.Table) -> Markup:
    """Show the flips of each group. Each leads to the same question about it alone."""
    setting = {name: given.get(name, "") for name in NAMES}

    def group(row: Mapping[str, Any]) -> str:
        return asked.link("/whatif", group=row["group_uid"], **setting)

    def task(row: Mapping[str, Any]) -> str:
        return asked.link("/task", task=row["task"])

    return show_rows(table, links={"group_uid": group, "task": task}, hints=HINTS)


def _value(name: str, text: str) -> Value:
    """Return a value for the macro; a text that is no number as it is."""
    if name in CHOICES:
        return text
    try:
        return float(text)
    except ValueError:
        return text


def _form(
    asked: PageRequest,
    group: uuid.UUID | None,
    n_steps: int,
    *,
    given: Mapping[str, str],
    own: AdvantageSettings | None,
) -> Markup:
    scope: dict[str, Value] = {"group": group} if group else {"steps": n_steps}
    blank = dict.fromkeys(NAMES, "")
    return html(
        "what_if_form.html",
        asked=asked,
        group=group,
        n_steps=n_steps,
        most_steps=MOST_STEPS,
        given=blank | dict(given),
        own=dict.fromkeys(NAMES, "") if own is None else asdict(own),
        choices=CHOICES,
        presets=[
            (said, asked.link("/whatif", **scope, **(blank | change)), change == dict(given))
            for said, change in PRESETS
        ],
        group_link=asked.link("/group", group=group) if group else None,
        graph_link=asked.link("/graph", group=group) if group else None,
        recent_link=asked.link("/whatif", **(blank | dict(given))) if group else None,
    )


PAGE = Page(
    path="/whatif",
    title="What if",
    question="Which steps would be pushed the other way under another setting?",
    panels=panels,
    follows=False,
    example='SELECT group_uid AS "group" FROM groups WHERE n_steps > 0 ORDER BY opened_at LIMIT 1',
)
