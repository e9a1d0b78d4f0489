"""Compute the advantages of a stored run under other settings, without training.

    own = run_setting(run)
    named = {"a": changed_setting(own, ["estimator=rloo"]), "b": own}
    with store.open_run(run) as reader:
        rows = audit_rows(reader, named, where="split = 'train'")
        show_audit(reader, rows, named=named, console=console)

`setting_comparison.py` shows how two settings differ. The run may be training meanwhile.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

import configs
import store
from analysis.setting_comparison import show_setting_comparison
from configs import Config, ConfigError
from gigpo import (
    WHITENED,
    WITH_CRITIC,
    WITH_STEP_TERM,
    AdvantageSettings,
    anchor_size_histogram,
    check_group_filter,
    compute_advantages,
    describe_readers,
    filtered_groups,
    has_effect,
    step_variance_share,
)
from store import RunLayout, StoreError

QUERY_TIMEOUT_S = 3600.0  # of one read; a large run takes minutes
# A read takes whole groups, or whole batches where something is whitened. So many steps of the
# columns below take about 1 GB.
STEPS_PER_READ = 4_000_000
COLUMNS = "group_uid, traj_uid, step_index, reward, is_action_valid, state_hash, version_min, won"
# Settings that need a column which no stored run has: (name, value) -> column.
NEEDS_OWN_COLUMN = {
    ("anchor", "anchor_key"): "anchor_key",
    ("anchor_versions", "weighted"): "weight",
}
ANCHOR_COLUMNS = {
    "similar": "anchor_text",
    "similar_greedy": "anchor_text",
    "state_and_actions": "admissible_actions",
}
# Every step with its batch. Groups that were in no batch count as one batch a split.
READ = """FROM (
    SELECT s.*, l.batch_id, l.learner_step, coalesce(l.batch_id::VARCHAR, split) AS batch{value}
    FROM (SELECT {columns}, split, coalesce(({where}
    ), false) AS is_selected FROM steps) AS s
    LEFT JOIN (
        SELECT group_uid, batch_id, learner_step FROM lineage
        WHERE batch_state = 'trained' AND live {uses}
    ) AS l USING (group_uid){values}
)"""
# Only steps of trained batches have a critic's value.
VALUES = """
    JOIN critic_values AS v
        ON v.batch_id = l.batch_id AND v.traj_uid = s.traj_uid AND v.step_index = s.step_index"""
LAST_USE = "QUALIFY row_number() OVER (PARTITION BY group_uid ORDER BY learner_step DESC) = 1"
# Whole groups or batches in which a step is selected; `unit` is their key.
WHOLE = "{rows} WHERE {unit} IN (SELECT {unit} {rows} WHERE is_selected)"
PART = """SELECT * {whole} AND hash({unit}) % {parts} = {part}
ORDER BY batch_id, batch, group_uid, traj_uid, step_index"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The settings that decide which steps are trained on, and with which advantage."""

    advantages: AdvantageSettings
    group_filter: str

    @classmethod
    def of(cls, config: Config) -> Setting:
        """Return the part of a config that an audit looks at."""
        return cls(
            advantages=AdvantageSettings.of(config.algorithm),
            group_filter=configs.used_group_filter(config),
        )

    def fields(self) -> dict[str, Any]:
        """Return all settings by name."""
        return {**dataclasses.asdict(self.advantages), "group_filter": self.group_filter}


def run_setting(run: Path) -> Setting:
    """Return the settings that a run was made with.

    Raises StoreError, ConfigError. The run may be a stranger's, with any value in its config.
    """
    config = configs.from_yaml(RunLayout.open(run).info.config_yaml)
    try:
        setting = Setting.of(config)
        check_group_filter(setting.group_filter)
    except ValueError as error:
        raise ConfigError(f"the config of {run}: algorithm.{error}") from error
    return setting


def changed_setting(setting: Setting, assignments: Sequence[str]) -> Setting:
    """Apply `name=value` assignments.

    Raises ConfigError for an assignment that is unknown, given twice, not read, or of another type,
    and for a setting that needs a column which no stored run has.
    """
    values: dict[str, Any] = {}
    known = setting.fields()
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in known:
            raise ConfigError(
                f"{assignment!r} is no setting; write name=value, names are {', '.join(known)}"
            )
        if name in values:
            raise ConfigError(f"{assignment!r}: {name} is given twice; give it once")
        try:
            values[name] = type(known[name])(text)
        except ValueError as error:
            raise ConfigError(f"{name}={text!r} is not a {type(known[name]).__name__}") from error
    group_filter = values.pop("group_filter", setting.group_filter)
    try:
        check_group_filter(group_filter)
        advantages = dataclasses.replace(setting.advantages, **values)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for name, value in values.items():
        if not has_effect(name, advantages):
            now, ways = describe_readers(name, advantages)
            raise ConfigError(
                f"{name}={value} does nothing with {now}; leave it out, or use {ways}"
            )
    _check_columns(advantages)
    return Setting(advantages=advantages, group_filter=group_filter)


def _check_columns(settings: AdvantageSettings) -> None:
    for (name, value), column in NEEDS_OWN_COLUMN.items():
        if getattr(settings, name) == value:
            raise ConfigError(
                f"{name}={value} reads a column {column}, and a stored run has none; in Python, "
                f"read `steps` with store.open_run, append a column {column} and call "
                "gigpo.compute_advantages"
            )


def audit_rows(reader: store.Reader, named: dict[str, Setting], *, where: str) -> pa.Table:
    """Return one row for each step that the SQL condition `where` selects.

    Columns: uids, step_index, learner_step (null: in no trained batch), and for each setting the
    columns of `compute_advantages` and passes_filter (bool, of the step's group), with the name of
    the setting as suffix: advantage_a, advantage_b.

    Advantages are computed from whole groups, or from whole batches where an estimator whitens over
    a batch. A group that was in several batches then has one row a step for each of them.

    Raises StoreError for steps that no setting can be computed of, such as a NaN reward.
    """
    whitens = any(setting.advantages.estimator in WHITENED for setting in named.values())
    unit = "batch" if whitens else "group_uid"
    columns = ", ".join([COLUMNS, *sorted(_more_columns(named.values()))])
    has_values = any(setting.advantages.estimator in WITH_CRITIC for setting in named.values())
    read = READ.format(
        columns=columns,
        where=where,
        uses="" if whitens else LAST_USE,
        value=", v.value" if has_values else "",
        values=VALUES if has_values else "",
    )
    whole = WHOLE.format(rows=read, unit=unit)
    n_steps = reader.sql(f"SELECT count(*) AS n {whole}", timeout_s=QUERY_TIMEOUT_S)["n"][0].as_py()
    if not n_steps:
        valued = " with a critic's value" if has_values else ""
        raise StoreError(
            f"no step of the run{valued} is one where {where}; ask for others with --where"
        )
    parts = -(-n_steps // STEPS_PER_READ)
    tables = []
    for part in range(parts):
        query = PART.format(whole=whole, unit=unit, parts=parts, part=part)
        steps = reader.sql(query, timeout_s=QUERY_TIMEOUT_S)
        table = steps.select(["group_uid", "traj_uid", "step_index", "learner_step"])
        for suffix, setting in named.items():
            compute = _compute_by_batch if whitens else _compute
            try:
                computed = compute(steps, setting)
            except ValueError as error:
                raise StoreError(
                    f"the steps of {reader.layout.root} have no advantages: {error}; "
                    "gigpo fsck looks for damage"
                ) from error
            for name in computed.column_names[3:]:
                table = table.append_column(f"{name}_{suffix}", computed[name])
        tables.append(table.filter(steps["is_selected"]))
    return pa.concat_tables(tables)


def _more_columns(settings: Iterable[Setting]) -> set[str]:
    """Return the columns besides COLUMNS that one of the settings reads."""
    columns = set()
    for setting in settings:
        column = ANCHOR_COLUMNS.get(setting.advantages.anchor)
        if column is not None:
            columns.add(column)
        if setting.advantages.estimator == "graphgpo":
            columns |= {"final_state_hash", *([f"final_{column}"] if column else [])}
    return columns


def is_one_of(column: pa.ChunkedArray, values: Iterable[object]) -> pa.ChunkedArray:
    """Return for each row whether its value is one of `values`."""
    return pc.is_in(column, pa.array(list(values), column.type))


def _compute(steps: pa.Table, setting: Setting) -> pa.Table:
    """Return the advantages of the steps, with passes_filter."""
    computed = compute_advantages(steps, setting.advantages)
    silent = filtered_groups(computed, group_filter=setting.group_filter)
    return computed.append_column(
        "passes_filter", pc.invert(is_one_of(computed["group_uid"], silent))
    )


def _compute_by_batch(steps: pa.Table, setting: Setting) -> pa.Table:
    """Compute advantages separately for each batch. The rows are ordered by `batch`."""
    batch = steps["batch"].combine_chunks().dictionary_encode().indices.to_numpy()
    bounds = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(steps)]
    batches = [steps.slice(start, end - start) for start, end in itertools.pairwise(bounds)]
    return pa.concat_tables([_compute(rows, setting) for rows in batches])


def show_audit(
    reader: store.Reader, rows: pa.Table, *, named: dict[str, Setting], console: Console
) -> None:
    """Show statistics of each setting, and how settings "a" and "b" differ if there are two."""
    console.print(f"{len(rows)} steps at lsn {reader.lsn}")
    headings = describe_settings(named)
    if "b" in named:
        headings = [f"{name}\n{text}" for name, text in zip(named, headings, strict=True)]
    table = Table("", *headings)
    columns = [_statistics(_columns_of(rows, suffix), setting) for suffix, setting in named.items()]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console.print(table)
    if "b" in named:
        show_setting_comparison(reader, rows, console=console)


def _columns_of(rows: pa.Table, suffix: str) -> pa.Table:
    """Return the columns of one setting, without its suffix."""
    kept = (f"_{suffix}", "_uid", "step_index")
    names = [name for name in rows.column_names if name.endswith(kept)]
    return rows.select(names).rename_columns([name.removesuffix(f"_{suffix}") for name in names])


def _statistics(computed: pa.Table, setting: Setting) -> dict[str, str]:
    """Return statistics by name. An estimator without a step term has "-" for those of anchors."""
    advantage = computed["advantage"].to_numpy()
    silent = computed.filter(pc.invert(computed["passes_filter"]))["group_uid"].unique()
    n_groups = len(computed["group_uid"].unique())
    by_size = share = "-"
    if setting.advantages.estimator in WITH_STEP_TERM:
        by_size = shares_by_size(anchor_size_histogram(computed))
        share = f"{step_variance_share(computed):.1%}"
    return {
        "mean, deviation of A": f"{advantage.mean():.4f}, {advantage.std():.4f}",
        "groups left out": f"{len(silent)} of {n_groups} ({setting.group_filter})",
        "steps by the size of their anchor group": by_size,
        "step term's share of the variance": share,
    }


def shares_by_size(steps_by_size: dict[int, int]) -> str:
    """Return the share of steps in anchor groups of 1, 2 to 3, 4 to 7, ... steps, a line each."""
    largest, n_steps = max(steps_by_size), sum(steps_by_size.values())
    lines = []
    for power in range(largest.bit_length()):
        first, last = 2**power, min(2 ** (power + 1) - 1, largest)
        share = sum(n for size, n in steps_by_size.items() if first <= size <= last) / n_steps
        sizes = str(first) if first == last else f"{first} to {last}"
        lines.append(f"{sizes}: {share:.1%}")
    return "\n".join(lines)


def describe_settings(named: dict[str, Setting]) -> list[str]:
    """Return a text for each setting: the names and values in which it differs from the others.

    A single setting, or equal ones, are described by the most important names.
    """
    fields = []
    for setting in named.values():
        known = setting.fields().items()
        fields.append({k: v for k, v in known if has_effect(k, setting.advantages)})
    names = dict.fromkeys(itertools.chain.from_iterable(fields))
    differing = {name for name in names if _differs(name, fields)}
    shown = differing or ("estimator", "gamma", "omega", "normalise", "group_filter")
    descriptions = []
    for each in fields:
        lines = [f"{name}={value}" for name, value in each.items() if name in shown]
        descriptions.append("\n".join(lines))
    return descriptions


def _differs(name: str, fields: Sequence[Mapping[str, object]]) -> bool:
    """Return whether two settings have other values for a name, or one has none."""
    return len({each.get(name) for each in fields}) > 1
