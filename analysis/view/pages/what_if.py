"""Compare the advantages of stored steps under another setting with the run's own: What if."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
from bokeh.models import BasicTicker, ColumnDataSource, HoverTool
from bokeh.models.annotations import Span
from markupsafe import Markup

from analysis.view.charts import COLOURS, GRID, columns_of, finish, new_figure, rows_at
from analysis.view.group_query import batches_steps, group_steps
from analysis.view.html import html
from analysis.view.page import BadAddressError, Page, PageRequest
from analysis.view.panel import Chart, Panel, show_rows, why
from analysis.view.run_settings import viewed_config
from analysis.view.sql_text import Tables, Value, fill
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
POINTS = 2_000  # of the scatter chart
LISTED = 200  # rows of a table
CHARACTERS = 200  # of a text in a table

# Differences that rounding can make are no signs.
BOTH = """
SELECT now.traj_uid, now.step_index, now.group_uid, now.advantage AS own,
       other.advantage AS changed,
       sign(round(now.advantage, 9)) AS own_sign,
       sign(round(other.advantage, 9)) AS changed_sign
FROM advantages() AS now JOIN advantages({changes}) AS other USING (traj_uid, step_index)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The steps that are weighed again, and with which setting."""

    group: uuid.UUID | None
    n_steps: int  # newest learner steps whose groups are weighed, where `group` is None
    given: Mapping[str, str]  # the changes, as the address has them
    own: AdvantageSettings | None  # the run's setting, None if it cannot be read here


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the comparison of the run's own setting with the one in the address."""
    question = question_of(asked)
    try:
        check_setting(question.own, question.given)
    except ValueError as error:
        return [_setting(asked, question, error=why(error))]
    compared = _compared(asked, question)
    return [_setting(asked, question), *_steps(asked, question, compared)]


def question_of(asked: PageRequest) -> Question:
    """Return what the address asks. Raises BadAddressError."""
    n_steps = asked.integer("steps")
    if n_steps is None:
        n_steps = RECENT_STEPS
    if not 1 <= n_steps <= MOST_STEPS:
        raise BadAddressError(f"steps is a number of learner steps, from 1 to {MOST_STEPS}")
    given = DEFAULT
    if any(name in asked.parameters for name in NAMES):
        given = {name: text for name in NAMES if (text := asked.text(name)) is not None}
    return Question(group=asked.uid("group"), n_steps=n_steps, given=given, own=own_settings(asked))


def _setting(asked: PageRequest, question: Question, *, error: str = "") -> Panel:
    problem = Markup('<p class="error">{}</p>').format(error) if error else ""
    return Panel(
        title="Setting",
        explains="Change the setting by hand. Empty means as in the run. Nothing is written; "
        "stored steps are weighed again.",
        above=_form(asked, question) + problem,
        width="full",
    )


def _compared(asked: PageRequest, question: Question) -> Tables:
    """Return the steps, and the table that weighs each of them with both settings."""
    group, n_steps = question.group, question.n_steps
    steps = batches_steps(asked, n_steps) if group is None else group_steps(asked, group)
    values = {name: _value(name, text) for name, text in question.given.items()}
    changes = ", ".join(f"{name} := ${name}" for name in values)
    return [steps, ("both_settings", fill(BOTH.format(changes=changes), **values))]


def _steps(asked: PageRequest, question: Question, compared: Tables) -> list[Panel]:
    is_recent = question.group is None
    panel = partial(Panel, tables=compared, later=is_recent, alone=is_recent)
    found = [
        panel(
            title="What would change",
            explains="A step flips if the changed setting would make its action less likely where "
            "the run made it more likely, or the other way round.",
            query=SUMMARY,
            show=partial(show_summary, question.given),
            empty="There are no steps to compare.",
        ),
        panel(
            title="Old and new advantages",
            explains="A dot is a step. On the line nothing changes; orange dots flip.",
            query=fill(SCATTER, characters=60, points=POINTS),
            show=show_scatter,
        ),
        panel(
            title="Steps that flip",
            explains="The largest changes first. A state leads to all that was tried there, an "
            "action to the transcript.",
            query=fill(FLIPS, characters=CHARACTERS, rows=LISTED),
            show=partial(show_flips, asked),
            empty="No step flips: every action is pushed the same way as in the run.",
            width="full",
        ),
    ]
    if is_recent:
        groups = panel(
            title="Groups",
            explains="Where the setting matters: the groups with most flips first.",
            query=fill(GROUPS, rows=LISTED),
            show=partial(show_groups, asked, question.given),
            width="full",
        )
        found.append(groups)
    return found


def own_settings(asked: PageRequest) -> AdvantageSettings | None:
    """Return the setting that the run trains with, None if its config cannot be read here."""
    try:
        config = viewed_config(asked.layout_of(asked.run_number), has_left=asked.has_left)
        return AdvantageSettings.of(config.algorithm)
    except (ConfigError, StoreError, OSError, ValueError):
        return None


def check_setting(own: AdvantageSettings | None, given: Mapping[str, str]) -> None:
    """Raise ValueError with what is wrong with the setting.

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
        source = ColumnDataSource(rows_at(data, kept, data))
        marks = drawn.scatter(x="own", y="changed", source=source, size=6, color=colour, alpha=0.6)
        tips = [("action", "@action"), ("now", "@own{0.00}"), ("changed", "@changed{0.00}")]
        drawn.add_tools(HoverTool(renderers=[marks], tooltips=tips))
    reach = max((abs(value) for value in data["own"]), default=1.0)
    drawn.line([-reach, reach], [-reach, reach], color=GRID, line_dash="dashed")
    for dimension in ("width", "height"):
        drawn.add_layout(Span(location=0, dimension=dimension, line_color=GRID, line_alpha=0.5))
    n_flips = sum(bool(value) for value in data["flips"])
    return finish(drawn, f"old against new advantages of {len(data['own'])} steps, {n_flips} flip")


def show_flips(asked: PageRequest, table: pa.Table) -> Markup:
    """Show the steps whose sign changes."""
    links = {
        "state": asked.row_link("/anchor", {"group": "group_uid", "state": "state_hash"}),
        "action": asked.row_link("/trajectory", {"traj": "traj_uid", "step": "step"}),
        "task": asked.row_link("/task", {"task": "task"}),
    }
    hidden = ("traj_uid", "group_uid", "state_hash")
    return show_rows(table, links=links, hints=HINTS, hidden=hidden)


def show_groups(asked: PageRequest, given: Mapping[str, str], table: pa.Table) -> Markup:
    """Show the flips of each group. Each leads to the same question about it alone."""
    setting = {name: given.get(name, "") for name in NAMES}
    links = {
        "group_uid": asked.row_link("/whatif", {"group": "group_uid"}, **setting),
        "task": asked.row_link("/task", {"task": "task"}),
    }
    return show_rows(table, links=links, hints=HINTS)


def _value(name: str, text: str) -> Value:
    """Return a value for the macro; a text that is no number as it is."""
    if name in CHOICES:
        return text
    try:
        return float(text)
    except ValueError:
        return text


def _form(asked: PageRequest, question: Question) -> Markup:
    group, given, own = question.group, dict(question.given), question.own
    scope: dict[str, Value] = {"group": group} if group else {"steps": question.n_steps}
    blank = dict.fromkeys(NAMES, "")
    presets = []
    for said, change in PRESETS:
        presets.append((said, asked.link("/whatif", **scope, **(blank | change)), change == given))
    return html(
        "what_if_form.html",
        asked=asked,
        group=group,
        n_steps=question.n_steps,
        most_steps=MOST_STEPS,
        given=blank | given,
        own=blank if own is None else asdict(own),
        choices=CHOICES,
        presets=presets,
        group_link=asked.link("/group", group=group) if group else None,
        graph_link=asked.link("/graph", group=group) if group else None,
        recent_link=asked.link("/whatif", **(blank | given)) if group else None,
    )


PAGE = Page(
    path="/whatif",
    title="What if",
    question="Which steps would be pushed the other way under another setting?",
    panels=panels,
    follows=False,
    example='SELECT group_uid AS "group" FROM groups WHERE n_steps > 0 ORDER BY opened_at LIMIT 1',
)
