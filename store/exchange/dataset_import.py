"""Import a dataset into a run, for SQL: its groups are never trained on.

    import_selection(Path("runs/b"), "datasets/won")

To train on a dataset's groups, name it as a source: see offline_import.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from store.catalog.catalog import Catalog
from store.catalog.groups import is_member
from store.catalog.imported_groups import ImportedSegment
from store.catalog.records import IMPORTED, Group
from store.errors import FormatError
from store.exchange.dataset_files import open_dataset, part_tables
from store.layout import RunLayout
from store.maintenance import segment_rows
from store.reading.manifest import export
from store.records import UID_TYPE, uid_text
from store.segments import write_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    n_trajectories: int  # that the run did not have
    n_steps: int
    n_known: int  # trajectories that the run had; they stay as they are


def import_selection(run: Path, source: Path | str) -> ImportReport:
    """Import a dataset into a run without an owner, for SQL: its groups are never trained on.

    Trajectories that the run has stay as they are, so a second import changes nothing. In the run
    that the dataset came from, lost trajectories come back. Raises LockedError if the run has an
    owner; DigestError or StoreError, before anything is imported, if a file of the dataset is
    refused.
    """
    layout = RunLayout.open(run)
    storage, dataset = open_dataset(str(source))
    with Catalog.open(layout) as catalog:
        rows = NewRows(
            catalog, layout, run_id=dataset.run_id, size_of=dataset.size_of, worker="import"
        )
        # all of them first: a refused dataset leaves no file in the run
        for name, table in part_tables(storage, dataset):
            rows.check(table, name=name)
        for name, table in part_tables(storage, dataset):
            rows.write(table, name=name)
        catalog.import_segments(rows.segments)
        export(catalog, layout)
    metas = [meta for one in rows.segments for meta in one.segment.trajectories]
    return ImportReport(
        n_trajectories=len(metas),
        n_steps=sum(meta.n_steps for meta in metas),
        n_known=len(rows.known),
    )


def check_part(
    table: pa.Table, *, size_of: Callable[[bytes], int], name: str
) -> tuple[segment_rows.Played, ...]:
    """Return the trajectories of rows that some run played. Raises FormatError for others.

    `size_of` returns the size of a group in that run, and `name` is that of the rows.
    """
    segment_rows.check_importable(table, name=name)
    played = segment_rows.trajectories(table)
    task_ids: dict[bytes, str] = {}
    for one in played:
        check_one_task(one, task_ids, name=name)
    for meta in (one.meta for one in played):
        try:
            size = size_of(meta.group_uid)
        except FormatError as error:
            raise FormatError(f"{name}: {error}") from error
        # A member's uid follows from its group and its number, so no two members are the same.
        if not is_member(meta, size=size):
            raise FormatError(
                f"{name}: trajectory {uid_text(meta.traj_uid)} is not member {meta.member} of "
                f"group {uid_text(meta.group_uid)}, which has {size}; {segment_rows.LOOK_AT_IT}"
            )
    return played


def check_one_task(one: segment_rows.Played, task_ids: dict[bytes, str], *, name: str) -> None:
    """Raise FormatError if another member of its group has another task. Note that of this one."""
    if task_ids.setdefault(one.meta.group_uid, one.task_id) != one.task_id:
        raise FormatError(
            f"{name}: group {uid_text(one.meta.group_uid)} has more than one task; "
            f"{segment_rows.LOOK_AT_IT}"
        )


class NewRows:
    """Write rows of another run to segments, which count once the catalog imports all of them.

        rows = NewRows(catalog, layout, run_id=…, size_of=…, worker="import")
        for name, table in …: rows.write(table, name=name)
        catalog.import_segments(rows.segments)

    Until then the files are orphans, which no reader sees and the sweep removes in time. Only a
    rebuild counts them, so rows are checked before they are written.
    """

    def __init__(
        self,
        catalog: Catalog,
        layout: RunLayout,
        *,
        run_id: str,
        size_of: Callable[[bytes], int],
        worker: str,
    ) -> None:
        """`run_id` is that of the run that played them, and `worker` the name of a directory."""
        self.segments: list[ImportedSegment] = []
        self.known: set[bytes] = set()  # trajectories that the run had; they stay as they are
        self._catalog, self._layout, self._worker = catalog, layout, worker
        self._run_id, self._size_of = run_id, size_of
        self._written: set[bytes] = set()
        self._task_ids: dict[bytes, str] = {}  # of each group, in any file

    def check(self, table: pa.Table, *, name: str) -> None:
        """Raise StoreError for rows that the run does not take in. FormatError has their name."""
        self._new(table, name=name)

    def write(self, table: pa.Table, *, name: str) -> None:
        """Check the rows, and write those of the trajectories that neither the run nor we have."""
        new = self._new(table, name=name)
        if not new:
            return
        metas = tuple(one.meta for one in new)
        uids = pa.array([meta.traj_uid for meta in metas], UID_TYPE)
        kept = table.filter(pc.is_in(table["traj_uid"], value_set=uids))
        groups = self._groups(new)
        splits = self._catalog.splits_of([group.group_uid for group in groups])
        segment = write_rows(
            self._layout,
            _with_splits(kept, splits),
            trajectories=metas,
            worker=self._worker,
            epoch=self._catalog.epoch,
        )
        self._written.update(meta.traj_uid for meta in metas)
        self.segments.append(
            ImportedSegment(
                segment=segment, groups=groups, source=f"run {self._run_id}", own=self._own
            )
        )

    @property
    def _own(self) -> bool:
        """Return whether this very run played the rows."""
        return self._run_id == self._layout.info.run_id

    def _new(self, table: pa.Table, *, name: str) -> list[segment_rows.Played]:
        """Return the trajectories that are new, all of them checked."""
        played = check_part(table, size_of=self._size_of, name=name)
        for one in played:
            check_one_task(one, self._task_ids, name=name)
        known = self._catalog.known_trajectories([one.meta.traj_uid for one in played])
        self.known |= known
        new = [one for one in played if one.meta.traj_uid not in known | self._written]
        self._catalog.check_members(
            [one.meta for one in new], groups=self._groups(new), own=self._own
        )
        return new

    def _groups(self, played: Sequence[segment_rows.Played]) -> tuple[Group, ...]:
        """Return the groups of these trajectories."""
        task_ids = {one.meta.group_uid: one.task_id for one in played}
        return tuple(
            Group.imported(group_uid=group_uid, task_id=task_id, size=self._size_of(group_uid))
            for group_uid, task_id in task_ids.items()
        )


def _with_splits(table: pa.Table, splits: Mapping[bytes, str]) -> pa.Table:
    """Return the rows with the splits of their groups in the run, which may differ in a dataset."""
    index = table.schema.get_field_index("split")
    values = [splits.get(group_uid, IMPORTED) for group_uid in table["group_uid"].to_pylist()]
    return table.set_column(index, table.schema.field(index), pa.array(values, pa.string()))
