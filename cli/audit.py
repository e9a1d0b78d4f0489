"""Advantages of a stored run under other settings, without training: python cli/audit.py RUN
[name=value ...]

    python cli/audit.py runs/a                                          # as the run itself computes them
    python cli/audit.py runs/a estimator=rloo                           # another estimator, its figures
    python cli/audit.py runs/a gamma=0.9 --against gamma=1.0            # two settings side by side, and what they train differently
    python cli/audit.py runs/a group_filter=returns --against --plot what.svg # another filter against the run's own
    python cli/audit.py runs/a omega=0 --against --where "split = 'train'" --output omega.parquet

Settings not named are the run's own. Names and values: gigpo/settings.py, and group_filter (which groups
are trained on at all): gigpo/group_filter.py. Both are thought to train on the batches that the run
had, on all of their steps: offline.train_on is not asked. The run may be training.

--where selects the steps that are reported. What a step is compared with does not depend on it:
advantages are computed from its whole group, and what is whitened over a batch (reinforce_pp,
reinforce_pp_baseline) from the whole batch that was trained on, as the run did; groups that no
batch has had are whitened together, each split by itself. A stored group that was used several
times is there once, at its last learner step; where something is whitened, once for each batch that
it was in.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.command_lines import audit_options

if __name__ == "__main__":  # --help and mistakes are answered here: the imports below take a second
    audit_options(sys.argv[1:], description=__doc__)

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

import configs
import store
from analysis import plot_settings, show_setting_comparison
from configs import Config, ConfigError
from gigpo import (
    GROUP_FILTERS,
    WHITENED,
    AdvantageSettings,
    anchor_size_histogram,
    compute_advantages,
    filtered_groups,
    step_variance_share,
)
from printable import fail, plain_console, printable, protect_terminal
from store import RunLayout, StoreError

QUERY_TIMEOUT_S = 3600.0
# about 1 GB of the columns below; reads are by group, or by batch if that is whitened
STEPS_PER_READ = 4_000_000
COLUMNS = "group_uid, traj_uid, step_index, reward, is_action_valid, state_hash, version_min, won"
# setting -> column it needs
OFFLINE_ONLY = {("anchor", "anchor_key"): "anchor_key", ("anchor_versions", "weighted"): "weight"}
ANCHOR_COLUMNS = {
    "similar": "anchor_text",
    "similar_greedy": "anchor_text",
    "state_and_actions": "admissible_actions",
}
READ = """FROM (
    SELECT s.*, batch_id, learner_step, coalesce(batch_id::VARCHAR, split) AS batch
    FROM (SELECT {columns}, split, coalesce(({where}
    ), false) AS is_selected FROM steps) AS s
    LEFT JOIN (SELECT group_uid, batch_id, learner_step FROM lineage WHERE batch_state = 'trained' AND live {uses}) AS l
    USING (group_uid)
)"""
LAST_USE = "QUALIFY row_number() OVER (PARTITION BY group_uid ORDER BY learner_step DESC) = 1"
# units with a selected step
WHOLE = "{rows} WHERE {unit} IN (SELECT {unit} {rows} WHERE is_selected)"
PART = "SELECT * {whole} AND hash({unit}) % {parts} = {part} ORDER BY batch_id, batch, group_uid, traj_uid, step_index"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What decides which steps are trained on, and by how much."""

    advantages: AdvantageSettings
    group_filter: str

    @classmethod
    def of(cls, config: Config) -> Setting:
        return cls(
            advantages=AdvantageSettings.of(config.algorithm),
            group_filter=config.algorithm.group_filter,
        )

    def fields(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.advantages), "group_filter": self.group_filter}


def main(arguments: list[str]) -> int:
    options = audit_options(arguments, description=__doc__)
    try:
        own = Setting.of(advantage_config(RunLayout.open(options.run).info.config_yaml))
        named = {"a": changed(own, options.settings)}
        if options.against is not None:
            named["b"] = changed(own, options.against)
        check_stored(named)
        check_new("--output", options.output)
        check_plot(options.plot, named)
        with store.open_run(options.run) as reader:
            rows = advantages(reader, named, where=options.where)
            show(reader, rows, named, console=plain_console(soft_wrap=False))
        if options.output is not None:
            write_new(
                "--output",
                options.output,
                lambda file: pq.write_table(rows, file, compression="zstd"),
            )
            print(printable(f"{len(rows)} rows in {options.output}"))
        if options.plot is not None:
            drawing = plot_settings(rows, descriptions(named))
            write_new(
                "--plot", options.plot, lambda file: file.write_text(drawing, encoding="utf-8")
            )
            print(printable(f"a plot in {options.plot}"))
    except (ConfigError, StoreError, ValueError, OSError) as error:
        fail(error)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def check_new(option: str, file: Path | None) -> None:
    """Refuses, before the work, a file that is there or could not be written."""
    if file is not None and file.exists():
        raise StoreError(f"{option} {file} exists; name another file")
    if file is not None and not file.parent.is_dir():
        raise StoreError(f"{option} {file}: there is no directory {file.parent}; make it first")


def check_plot(file: Path | None, named: dict[str, Setting]) -> None:
    check_new("--plot", file)
    if file is not None and file.suffix != ".svg":
        raise ValueError(
            f"--plot {file}: only SVG can be drawn; name it {file.with_suffix('.svg').name}"
        )
    if file is not None and "b" not in named:
        raise ValueError(
            f"--plot {file} is of two settings; add --against, alone for the run's own"
        )


def write_new(option: str, file: Path, write: Callable[[Path], object]) -> None:
    """Aside first: `file` is absent or whole, so whoever was interrupted can ask again."""
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        write(aside)
        with aside.open("rb") as written:
            os.fsync(written.fileno())  # else a power cut could leave the name without the bytes
        check_new(option, file)  # the audit may have taken an hour
        aside.rename(file)
    except OSError as error:
        raise StoreError(
            f"{option} {file} could not be written: {error}; free space, or name another file"
        ) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def advantage_config(config_yaml: str) -> Config:
    """A run's config as far as advantages go: what it says of anything else may be of another
    version of this code.
    """
    stored = OmegaConf.to_container(configs.parse_saved(config_yaml, name="the stored config"))
    section = stored.get("algorithm", {}) if isinstance(stored, dict) else {}
    if not isinstance(section, dict):
        raise ConfigError(
            f"the stored config has algorithm: {section!r}, which is no section; this run cannot "
            "be audited"
        )
    if (
        section.pop("penalty_is_signal", True) is False
        and section.get("group_filter", "advantages") == "advantages"
    ):
        section["group_filter"] = "rewards"  # what that knob of earlier runs meant
    return configs.from_yaml(yaml.safe_dump({"algorithm": section}))


def check_stored(named: dict[str, Setting]) -> None:
    """Refuses settings that read a column which no run has."""
    for setting in named.values():
        for (name, value), column in OFFLINE_ONLY.items():
            if getattr(setting.advantages, name) == value:
                raise ValueError(
                    f"{name}={value} reads a column {column}, and a stored run has none; in "
                    "Python, read `steps` with "
                    f"store.open, append a column {column} and call gigpo.compute_advantages"
                )


def changed(setting: Setting, assignments: Sequence[str]) -> Setting:
    """Apply name=value assignments. Raises ValueError for one that is unknown, given twice, not
    read, or of another type.
    """
    values: dict[str, Any] = {}
    known = setting.fields()
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name not in known:
            raise ValueError(
                f"{assignment!r} is no setting; write name=value, names are {', '.join(known)}"
            )
        if name in values:
            raise ValueError(f"{assignment!r}: {name} is given twice; give it once")
        try:
            values[name] = type(known[name])(text)
        except ValueError as error:
            raise ValueError(f"{name}={text!r} is not a {type(known[name]).__name__}") from error
    group_filter = values.pop("group_filter", setting.group_filter)
    if group_filter not in GROUP_FILTERS:
        raise ValueError(
            f"group_filter={group_filter!r} is unknown; it is one of {', '.join(GROUP_FILTERS)}"
        )
    result = Setting(
        advantages=dataclasses.replace(setting.advantages, **values), group_filter=group_filter
    )
    for name, value in values.items():
        if not configs.is_read(name, result.advantages):
            now, ways = configs.read_with(name, result.advantages)
            raise ValueError(f"{name}={value} does nothing with {now}; leave it out, or use {ways}")
    return result


def advantages(reader: store.Reader, named: dict[str, Setting], *, where: str) -> pa.Table:
    """One row per selected step, computed from whole groups (whitened: one for each batch that it
    was in, from whole batches): uids, step_index, learner_step (null: in no batch that was
    trained), and with the suffix _a (and _b) the columns of `compute_advantages` and passes_filter,
    bool, of the step's group.
    """
    whitens = any(setting.advantages.estimator in WHITENED for setting in named.values())
    unit = "batch" if whitens else "group_uid"
    anchors = {setting.advantages.anchor for setting in named.values()}
    more = "".join(f", {column}" for anchor, column in ANCHOR_COLUMNS.items() if anchor in anchors)
    read = READ.format(columns=COLUMNS + more, where=where, uses="" if whitens else LAST_USE)
    whole = WHOLE.format(rows=read, unit=unit)
    n_steps = reader.sql(f"SELECT count(*) AS n {whole}", timeout_s=QUERY_TIMEOUT_S)["n"][0].as_py()
    if not n_steps:
        raise StoreError(f"no step of the run is one where {where}; ask for others with --where")
    parts = -(-n_steps // STEPS_PER_READ)
    tables = []
    for part in range(parts):
        query = PART.format(whole=whole, unit=unit, parts=parts, part=part)
        steps = reader.sql(query, timeout_s=QUERY_TIMEOUT_S)
        table = steps.select(["group_uid", "traj_uid", "step_index", "learner_step"])
        for suffix, setting in named.items():
            computed = by_batch(steps, setting) if whitens else with_signal(steps, setting)
            for name in computed.column_names[3:]:
                table = table.append_column(f"{name}_{suffix}", computed[name])
        tables.append(table.filter(steps["is_selected"]))
    return pa.concat_tables(tables)


def is_one_of(column: pa.ChunkedArray, values: Iterable[object]) -> pa.ChunkedArray:
    return pc.is_in(column, pa.array(list(values), column.type))


def with_signal(steps: pa.Table, setting: Setting) -> pa.Table:
    """What `compute_advantages` says of the steps, and passes_filter."""
    computed = compute_advantages(steps, setting.advantages)
    silent = filtered_groups(computed, group_filter=setting.group_filter)
    return computed.append_column(
        "passes_filter", pc.invert(is_one_of(computed["group_uid"], silent))
    )


def by_batch(steps: pa.Table, setting: Setting) -> pa.Table:
    """That of each batch by itself. In: rows ordered by `batch`."""
    batch = steps["batch"].combine_chunks().dictionary_encode().indices.to_numpy()
    bounds = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(steps)]
    return pa.concat_tables(
        [
            with_signal(steps.slice(start, end - start), setting)
            for start, end in itertools.pairwise(bounds)
        ]
    )


def show(
    reader: store.Reader, rows: pa.Table, named: dict[str, Setting], *, console: Console
) -> None:
    """The figures of each setting, and how two of them differ."""
    console.print(f"{len(rows)} steps at lsn {reader.lsn}")
    names = [f"{name}\n" if "b" in named else "" for name in named]  # what later tables call them
    figures = Table(
        "", *(name + settings for name, settings in zip(names, descriptions(named), strict=True))
    )
    summaries = [summary(of(rows, suffix), setting) for suffix, setting in named.items()]
    for name in summaries[0]:
        figures.add_row(name, *(each[name] for each in summaries))
    console.print(figures)
    if "b" in named:
        show_setting_comparison(reader, rows, console=console)


def of(rows: pa.Table, suffix: str) -> pa.Table:
    """The columns of one setting under the names of `compute_advantages`."""
    kept = (f"_{suffix}", "_uid", "step_index")
    names = {
        name: name.removesuffix(f"_{suffix}") for name in rows.column_names if name.endswith(kept)
    }
    return rows.select(list(names)).rename_columns(list(names.values()))


def summary(computed: pa.Table, setting: Setting) -> dict[str, str]:
    """Return the figures by name. Those of the step term are "-" for an estimator that has none: it
    reads no anchor groups.
    """
    advantage = computed["advantage"].to_numpy()
    silent = computed.filter(pc.invert(computed["passes_filter"]))["group_uid"].unique()
    groups, has_step_term = (
        len(computed["group_uid"].unique()),
        setting.advantages.estimator in configs.WITH_STEP_TERM,
    )
    return {
        "mean, deviation of A": f"{advantage.mean():.4f}, {advantage.std():.4f}",
        "groups left out": f"{len(silent)} of {groups} ({setting.group_filter})",
        "steps by the size of their anchor group": by_doubling(anchor_size_histogram(computed))
        if has_step_term
        else "-",
        "step term's share of the variance": f"{step_variance_share(computed):.1%}"
        if has_step_term
        else "-",
    }


def by_doubling(sizes: dict[int, int]) -> str:
    """In: steps by size. Out: a line for each class of sizes, 1 (alone), 2 to 3, 4 to 7, ... up to
    the largest there is.
    """
    largest, n_steps = max(sizes), sum(sizes.values())
    lines = []
    for power in range(largest.bit_length()):
        first, last = 2**power, min(2 ** (power + 1) - 1, largest)
        share = sum(steps for size, steps in sizes.items() if first <= size <= last) / n_steps
        lines.append(f"{first if first == last else f'{first} to {last}'}: {share:.1%}")
    return "\n".join(lines)


def descriptions(named: dict[str, Setting]) -> list[str]:
    """Return what distinguishes each from the other, most of it if there is no other. Name only
    settings that it reads.
    """
    fields = [
        {
            name: value
            for name, value in setting.fields().items()
            if configs.is_read(name, setting.advantages)
        }
        for setting in named.values()
    ]
    names = dict.fromkeys(name for each in fields for name in each)
    differing = {name for name in names if len({each.get(name) for each in fields}) > 1}
    shown = differing or ("estimator", "gamma", "omega", "normalise", "group_filter")
    return [
        "\n".join(f"{name}={value}" for name, value in each.items() if name in shown)
        for each in fields
    ]


if __name__ == "__main__":
    protect_terminal()
    sys.exit(main(sys.argv[1:]))
