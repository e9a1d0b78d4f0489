"""Score the rows of whole groups with their advantages, and select the rows to train on.

`batch_loader.py` makes the settings once, and then for each batch:

    settings = RowSettings.of(config, ask_critic=None)
    scored = scored_rows(rows, settings, times=LoadTimes())
    trained, unselected = rows_to_train(scored, train_on=settings.train_on)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs import Config, ConfigError, LearnerConfig, has_critic, used_group_filter
from gigpo import (
    TOKEN_LEVEL,
    AdvantageSettings,
    columns_read,
    compute_advantages,
    filtered_groups,
)
from learner.data.values import (
    AskCritic,
    critic_values,
    with_token_advantages,
    with_token_values,
)
from learner.step_times import LoadTimes, timed
from printable import UserError, one_line
from row_bounds import TEXT_COLUMNS
from store import IMPORTED, WIDE_SCHEMA, uid_text

ADVANTAGE_COLUMNS = {
    "step_return": pa.float64(),
    "episode_advantage": pa.float64(),
    "step_advantage": pa.float64(),
    "advantage": pa.float64(),
    "anchor_size": pa.int64(),
}
# The columns that tensors of the loss are made of. Those of a critic may be absent.
FLOAT32_COLUMNS = (
    *("advantage", "value", "value_target"),
    *("token_advantage", "token_value", "token_value_target"),
)
FLOAT32_MAX = float(np.finfo(np.float32).max)


class AdvantageError(UserError, ValueError):
    """A group has an advantage or a value that is not a finite float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings:
    """The settings that score rows and select those to train on."""

    advantages: AdvantageSettings
    # Groups whose episodes do not differ in it are left out; "none" keeps all groups.
    group_filter: str
    # SQL condition on offline rows. Others are left out; an empty condition keeps all.
    train_on: str
    learner: LearnerConfig  # the sizes of the critic's micro-batches
    ask_critic: AskCritic | None  # None without a critic

    @classmethod
    def of(cls, config: Config, *, ask_critic: AskCritic | None) -> RowSettings:
        """Read the settings from a checked config. Without a critic none is asked."""
        return cls(
            advantages=AdvantageSettings.of(config.algorithm),
            group_filter=used_group_filter(config),
            train_on=config.offline.train_on,
            learner=config.learner,
            ask_critic=ask_critic if has_critic(config) else None,
        )

    @property
    def columns(self) -> list[str]:
        """Return the columns of WIDE_SCHEMA to read.

        Texts are many bytes, and most settings ask for none of them.
        """
        asked = TEXT_COLUMNS if self.train_on else columns_read(self.advantages)
        return [name for name in WIDE_SCHEMA.names if name not in TEXT_COLUMNS or name in asked]

    @property
    def is_token_level(self) -> bool:
        return self.advantages.estimator in TOKEN_LEVEL


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRows:
    """All rows of a batch with their advantages, and the groups that teach nothing.

    The columns are `RowSettings.columns` plus ADVANTAGE_COLUMNS and, with a critic, value and
    value_target. An estimator of TOKEN_LEVEL adds lists, a number for each response token:
    token_value, token_advantage and token_value_target.
    """

    rows: pa.Table
    filtered: Mapping[bytes, str]  # group uid -> reason of the group filter


def scored_rows(rows: pa.Table, settings: RowSettings, *, times: LoadTimes) -> ScoredRows:
    """Compute values, where there is a critic, and advantages of the rows of whole groups."""
    columns = list(ADVANTAGE_COLUMNS)
    if settings.ask_critic is not None:
        columns.append("value_target")
        with timed(times, "values_s"):
            rows = _with_values(rows, settings)
    cpu_s = time.thread_time()
    with timed(times, "advantages_s"):
        advantages = compute_advantages(rows, settings.advantages)
    times.advantages_cpu_s += time.thread_time() - cpu_s
    with timed(times, "filter_s"):
        filtered = filtered_groups(advantages, group_filter=settings.group_filter)
    for name in columns:
        rows = rows.append_column(name, advantages[name])
    if settings.is_token_level:
        with timed(times, "advantages_s"):
            rows = with_token_advantages(rows, gae_lambda=settings.advantages.gae_lambda)
    return ScoredRows(rows=rows, filtered=filtered)


def rows_to_train(scored: ScoredRows, *, train_on: str) -> tuple[pa.Table, dict[bytes, str]]:
    """Return the rows to train on, and each group that `train_on` leaves without any, with why.

    Advantages are already computed, so left-out rows still count in the baselines.
    """
    rows = scored.rows
    uids = pa.array(list(scored.filtered), rows.schema.field("group_uid").type)
    rows = rows.filter(pc.invert(pc.is_in(rows["group_uid"], uids)))
    if not train_on:
        return rows, {}
    kept = rows.filter(meets_train_on(rows, train_on))
    before, after = (set(table["group_uid"].unique().to_pylist()) for table in (rows, kept))
    reason = f"no step of it is one of offline.train_on={train_on}"
    return kept, dict.fromkeys(before - after, reason)


def check_finite(rows: pa.Table) -> None:
    """Raise AdvantageError, which names the group, for a number that no loss can be computed from.

    Without this check the loss is not finite, and the update is skipped without its cause.
    """
    for name in FLOAT32_COLUMNS:
        if name not in rows.column_names:
            continue
        numbers, at = rows[name], np.arange(len(rows))
        if pa.types.is_list(numbers.type):
            at = np.repeat(at, pc.list_value_length(numbers).to_numpy())
            numbers = pc.list_flatten(numbers)
        found = numbers.to_numpy().astype(np.float64)
        is_wrong = ~(np.abs(found) <= FLOAT32_MAX)
        if is_wrong.any():
            first = int(np.argmax(is_wrong))
            group = uid_text(rows["group_uid"][int(at[first])].as_py())
            raise AdvantageError(
                f"group {group} has {name}={found[first]:g}, which is not a finite float32; its "
                "rewards or the critic's values are too large: look at them with gigpo sql RUN "
                f"\"SELECT reward FROM steps WHERE group_uid = '{group}'\""
            )


def check_train_on(condition: str) -> None:
    """Raise ConfigError unless the condition is valid SQL over the columns of a step."""
    advantages = [pa.field(name, kind) for name, kind in ADVANTAGE_COLUMNS.items()]
    if condition:
        meets_train_on(pa.schema([*WIDE_SCHEMA, *advantages]).empty_table(), condition)


def meets_train_on(rows: pa.Table, condition: str) -> pa.ChunkedArray:
    """Return a boolean per row: this run played it, or it is offline and meets the condition.

    Raises ConfigError if the condition is not SQL, or fails on a value, as `task_id::INT > 3` may.
    """
    own = pc.not_equal(rows["split"], IMPORTED)
    numbers = pa.array(np.arange(len(rows)))
    settings = {"enable_external_access": False, "lock_configuration": True}
    try:
        # Parsed once without our parentheses, so that the condition cannot close them.
        duckdb.extract_statements(f"SELECT 1 WHERE {condition}")
        with duckdb.connect(config=settings) as connection:
            connection.register("steps", rows.append_column("row_of_batch", numbers))
            query = f"SELECT row_of_batch FROM steps WHERE (\n{condition}\n)"
            chosen = connection.sql(query).to_arrow_table()["row_of_batch"]
    except duckdb.Error as error:
        raise ConfigError(
            f"offline.train_on={condition!r} cannot be asked of these steps ({one_line(error)}); "
            "write it as after WHERE, over a step's columns and its advantages. A run that has "
            "begun goes on with another one"
        ) from error
    return pc.or_(own, pc.is_in(numbers, value_set=chosen.combine_chunks()))


def _with_values(rows: pa.Table, settings: RowSettings) -> pa.Table:
    """Append the column `value`, by the critic.

    For an estimator of TOKEN_LEVEL also append `token_value`, a list with a value for each response
    token.
    """
    assert settings.ask_critic is not None, "a critic's estimator has a critic"
    values_R, values_N = critic_values(rows, settings.ask_critic, learner=settings.learner)
    rows = rows.append_column("value", pa.array(values_R))
    return with_token_values(rows, values_N) if settings.is_token_level else rows
