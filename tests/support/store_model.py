"""Keep in dictionaries the state that a store should have, for tests/store/test_machine.py."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import duckdb

from store import (
    Catalog,
    Counts,
    Group,
    RunLayout,
    Trajectory,
    TrajectoryMeta,
    VersionRecord,
    now_us,
    uid_text,
    write_open_sql,
)
from store.reading.open_sql import fixed

TRAIN_STATES = ("open", "complete", "claimed", "trained", "stale", "filtered")
# the learner may still ask for the rows; held-out ones it never does
WANTED = ("open", "claimed", "complete")
US_PER_S = 1_000_000
FAST_DISK = Path("/dev/shm")  # every transaction is synced, and nothing here is about the disk
CLOCKS = (
    "store.catalog.database",
    "store.maintenance.sweep",
    "store.reading.manifest",
)
FIRST_VERSION = 5  # so that there may be older trajectories


VIEWS_BEGIN = "CREATE SCHEMA"
SEEN_BY_SQL = {
    "steps": "SELECT traj_uid::VARCHAR, count(*) FROM steps GROUP BY ALL",
    "groups": "SELECT group_uid::VARCHAR, state FROM groups",
    "ledger": "SELECT group_uid::VARCHAR, last(state ORDER BY lsn, number) FROM "
    "(SELECT *, row_number() OVER () AS number FROM ledger) GROUP BY ALL",
    "lineage": "SELECT group_uid::VARCHAR, learner_step FROM lineage "
    "WHERE live AND batch_state = 'trained'",
    "too_old": "SELECT group_uid, staleness FROM staleness_violations",
}
# Newest state in the ledger, state, and how many live claims a group has.
STATES = """SELECT g.group_uid, g.state, s.state AS newest,
                   (SELECT count(*) FROM batch_group b
                    WHERE b.group_uid = g.group_uid AND live AND use = 1)
            FROM grp g JOIN group_state s ON s.seq = (
                SELECT max(seq) FROM group_state WHERE group_uid = g.group_uid)"""


@dataclass
class ModelGroup:
    record: Group
    state: str = "open"
    members: dict[int, Trajectory] = field(default_factory=dict)  # those that count
    expired: set[int] = field(default_factory=set)  # members whose rows retention took
    leased_by: str | None = None
    leased_until_us: int = 0

    @property
    def version_min(self) -> int:
        return min(trajectory.version_min for trajectory in self.members.values())

    @property
    def is_train(self) -> bool:
        return self.record.split == "train"


@dataclass
class Model:
    """The groups in the order of their opening, and what became of them."""

    groups: dict[bytes, ModelGroup] = field(default_factory=dict)
    claimed: dict[int, list[bytes]] = field(default_factory=dict)  # batch id -> groups
    # groups of claimed batches that are known to teach nothing
    set_aside: set[bytes] = field(default_factory=set)
    # groups whose wins are replayed, by claimed batch and by learner step
    replayed: dict[int, list[bytes]] = field(default_factory=dict)
    replays: dict[int, list[bytes]] = field(default_factory=dict)
    settled: dict[int, list[bytes]] = field(default_factory=dict)  # learner step -> groups
    # version -> the learner step that made it
    versions: dict[int, int] = field(default_factory=lambda: {FIRST_VERSION: 0})
    checkpoints: list[int] = field(default_factory=list)  # learner steps, oldest first
    kept: set[int] = field(default_factory=set)  # those that are still on disk

    @property
    def version(self) -> int:
        return max(self.versions)

    @property
    def step(self) -> int:
        return max(self.settled, default=0)

    def opened(self, record: Group) -> None:
        self.groups.setdefault(record.group_uid, ModelGroup(record=record))

    def next_free(self, now_us: int) -> ModelGroup | None:
        """The group to be leased next: the oldest, held-out ones first."""
        free = [
            g
            for g in self.groups.values()
            if g.state == "open" and (not g.leased_by or g.leased_until_us <= now_us)
        ]
        return min(free, key=lambda group: group.is_train, default=None)

    def lease(self, groups: Iterable[ModelGroup], *, worker: str, until_us: int) -> None:
        for group in groups:
            group.leased_by, group.leased_until_us = worker, until_us

    def held_by(self, worker: str) -> list[ModelGroup]:
        return [group for group in self.groups.values() if group.leased_by == worker]

    def give_up(self, group: ModelGroup, *, worker: str, state: str) -> None:
        """Give up an open group that the worker holds. A group with committed members becomes
        stale.
        """
        if group.state == "open" and group.leased_by == worker:
            group.state, group.leased_by = (
                "stale" if state == "open" and group.members else state,
                None,
            )

    def unknown(self, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
        return [t for t in trajectories if t.member not in self.groups[t.group_uid].members]

    def commit(self, trajectories: Iterable[Trajectory]) -> None:
        """The unknown ones count from now on; a group that has all its members is complete."""
        for trajectory in self.unknown(trajectories):
            group = self.groups[trajectory.group_uid]
            group.members[trajectory.member] = trajectory
            if group.state == "open" and len(group.members) == group.record.size:
                group.state, group.leased_by = "complete", None

    def expect_claim(
        self, n_groups: int, *, version: int, max_staleness: int
    ) -> list[bytes] | None:
        """Return the groups that a claim must return. Groups beyond the bound become stale
        first.
        """
        ready = self.ready(version=version, max_staleness=max_staleness)
        return ready[:n_groups] if len(ready) >= n_groups else None

    def ready(self, *, version: int, max_staleness: int) -> list[bytes]:
        """Return the groups that may be claimed, oldest first, after some became stale."""
        ready = []
        for group in self.groups.values():
            if group.is_train and group.state == "complete":
                if group.version_min < version - max_staleness:
                    group.state = "stale"
                else:
                    ready.append(group)
        ready.sort(key=lambda group: (group.version_min, group.record.ordinal))
        return [group.record.group_uid for group in ready]

    def claim(self, batch_id: int, group_uids: list[bytes]) -> None:
        self.claimed[batch_id] = group_uids
        self._set(group_uids, "claimed")

    def settle(self, batch_id: int, *, step: int, filtered: Collection[bytes]) -> None:
        """The batch is learner step `step`, which publishes the next version."""
        self.settled[step] = self.claimed.pop(batch_id)
        self.set_aside.difference_update(self.settled[step])
        self.replays[step] = self.replayed.pop(batch_id, [])
        self._set(self.settled[step], "trained")
        self._set(filtered, "filtered")
        self.versions[self.version + 1] = step

    def lose_leases(self) -> None:
        for group in self.groups.values():
            group.leased_by = None

    def roll_back(self, step: int) -> None:
        later = [done for done in self.settled if done > step]
        for group_uids in [*self.claimed.values(), *(self.settled[done] for done in later)]:
            self._set(group_uids, "complete")
        self.claimed.clear()
        self.set_aside.clear()
        self.replayed.clear()
        self.replays = {done: groups for done, groups in self.replays.items() if done <= step}
        for done in later:
            del self.settled[done]
        self.checkpoints = [kept for kept in self.checkpoints if kept <= step]
        for group in self.groups.values():
            if (
                group.state == "open"
                and not group.is_train
                and self.versions[group.record.evaluated_version or 0] > step
            ):
                group.state, group.leased_by = "abandoned", None

    def may_expire(self, trajectory: TrajectoryMeta, *, below_version: int) -> bool:
        """Whether retention may take these rows: old, not wanted, and not to be wanted again after
        a roll-back.
        """
        group = self.groups[trajectory.group_uid]
        wanted = group.state in WANTED and (group.is_train or group.state == "open")
        oldest = min(self.kept & set(self.checkpoints), default=0)
        uses = [*self.settled.items(), *self.replays.items()]
        again = any(trajectory.group_uid in groups for step, groups in uses if step > oldest)
        again |= any(trajectory.group_uid in groups for groups in self.replayed.values())
        return not wanted and not again and trajectory.version_max < below_version

    def readable(self) -> dict[bytes, Trajectory]:
        """Every trajectory whose rows a reader must find, by its uid."""
        return {
            trajectory.traj_uid: trajectory
            for group in self.groups.values()
            for member, trajectory in group.members.items()
            if member not in group.expired
        }

    def consumed(self) -> dict[bytes, int]:
        """ModelGroup -> the learner step that it counts for."""
        return {group_uid: step for step, groups in self.settled.items() for group_uid in groups}

    def counts(self, now_us: int) -> Counts:
        train = [group for group in self.groups.values() if group.is_train]
        states = [group.state for group in train]
        return Counts(
            **{state: states.count(state) for state in TRAIN_STATES},
            leased=sum(
                g.state == "open" and g.leased_by is not None and g.leased_until_us > now_us
                for g in train
            ),
            trajectories=sum(len(group.members) for group in train),
            steps=sum(
                trajectory.n_steps for group in train for trajectory in group.members.values()
            ),
        )

    def states(self) -> dict[bytes, tuple[str, str, int]]:
        """The rows of STATES."""
        live = {
            *self.consumed(),
            *(group_uid for batch in self.claimed.values() for group_uid in batch),
        }
        return {
            uid: (group.state, group.state, int(uid in live)) for uid, group in self.groups.items()
        }

    def seen_by_sql(self) -> dict[str, dict[str, object]]:
        """The answers to SEEN_BY_SQL."""
        states: dict[str, object] = {
            uid_text(group_uid): group.state for group_uid, group in self.groups.items()
        }
        return {
            "steps": {
                uid_text(trajectory.traj_uid): trajectory.n_steps
                for trajectory in self.readable().values()
            },
            "groups": states,
            "ledger": states,
            "lineage": {uid_text(group_uid): step for group_uid, step in self.consumed().items()},
            "too_old": {},
        }

    def _set(self, group_uids: Iterable[bytes], state: str) -> None:
        for group_uid in group_uids:
            self.groups[group_uid].state = state


# Without later uses: the age of replayed wins has a bound of its own.
TOO_OLD = """SELECT group_uid
             FROM batch JOIN batch_group USING (batch_id) JOIN grp g USING (group_uid)
             WHERE live AND use = 1 AND batch.state = 'trained'
                 AND version_in - g.version_min > :bound"""


def new_run(root: Path, *, max_staleness: int) -> RunLayout:
    """A run without any group, with the versions that the first trajectories are of."""
    layout = RunLayout.create(root, config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=max_staleness)
    with Catalog.open(layout) as catalog:
        for version in range(FIRST_VERSION - 2, FIRST_VERSION + 1):
            catalog.record_version(
                VersionRecord(
                    version=version, path=f"weights/v{version}", digest="d", learner_step=None
                )
            )
    return layout


class DisposableRun:
    """A copy of a run, its owner, and its clock. What a killed owner left open is closed at the
    end.
    """

    def __init__(self, template: Path) -> None:
        self.directory = Path(
            tempfile.mkdtemp(prefix="store-machine-", dir=FAST_DISK if FAST_DISK.is_dir() else None)
        )
        self.layout = RunLayout.open(shutil.copytree(template, self.directory / "run"))
        self.clock_us = now_us()
        self.clocks = [mock.patch(f"{module}.now_us", self.now_us) for module in CLOCKS]
        for clock in self.clocks:
            clock.start()
        self.killed: list[Catalog] = []
        self.start()

    def now_us(self) -> int:
        return self.clock_us

    def start(self) -> None:
        self.catalog, self.opened_us = Catalog.open(self.layout), self.clock_us

    def kill(self) -> None:
        """Nothing is closed; the kernel drops the lock."""
        os.close(self.catalog._database._lock_fd)
        self.killed.append(self.catalog)

    def remove(self) -> None:
        self.catalog.close()
        for catalog in self.killed:
            catalog._database._connection.close()
        for clock in self.clocks:
            clock.stop()
        shutil.rmtree(self.directory)


class Died(BaseException):
    """The process ended here."""


class DyingConnection:
    """Ends the process after some writes, at the latest when a transaction that wrote is to be
    committed.
    """

    def __init__(self, connection: sqlite3.Connection, *, n_writes: int) -> None:
        self.connection, self.left, self.wrote = connection, n_writes, False

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)

    def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
        writes = sql.lstrip().startswith(("INSERT", "UPDATE"))
        if (writes and self.left == 0) or (sql == "COMMIT" and self.wrote):
            raise Died
        if writes:
            self.left, self.wrote = self.left - 1, True
        return self.connection.execute(sql, *parameters)

    def executemany(self, sql: str, rows: Iterable[object]) -> None:
        for row in rows:
            self.execute(sql, row)


@contextmanager
def dies_within(catalog: Catalog, *, n_writes: int) -> Iterator[None]:
    """The catalog's process ends within the call in the body, if that writes anything."""
    connection = catalog._database._connection
    catalog._database._connection = DyingConnection(connection, n_writes=n_writes)  # type: ignore[assignment]
    with suppress(Died):
        yield
    catalog._database._connection = connection


def look_at(shell: duckdb.DuckDBPyConnection, layout: RunLayout, *, also_views: bool) -> None:
    """Execute the views as a shell does. Their text is the same for all runs."""
    text = fixed(layout.open_sql.read_text(), layout.root)
    shell.execute(text if also_views else text.partition(VIEWS_BEGIN)[0])
