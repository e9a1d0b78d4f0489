"""Import a dataset into a run, for SQL: its groups are never trained on.

    import_selection(Path("runs/b"), "datasets/won")

To train on a dataset's groups, name it as a source: see offline_import.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from store.catalog.catalog import Catalog
from store.catalog.records import IMPORTED, Group
from store.exchange.dataset_files import open_dataset, part_tables
from store.layout import RunLayout
from store.maintenance import segment_rows
from store.reading.manifest import export
from store.records import UID_TYPE
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
    owner; DigestError or FormatError, before anything is imported, if no run wrote the dataset.
    """
    layout = RunLayout.open(run)
    storage, dataset = open_dataset(str(source))
    for name, table in part_tables(storage, dataset):
        segment_rows.check_importable(table, name=name)
    with Catalog.open(layout) as catalog:
        reports = [
            import_rows(
                catalog,
                layout,
                table=table,
                run_id=dataset.run_id,
                size_of=dataset.size_of,
                worker="import",
                name=name,
            )
            for name, table in part_tables(storage, dataset)
        ]
        export(catalog, layout)
    return ImportReport(
        n_trajectories=sum(report.n_trajectories for report in reports),
        n_steps=sum(report.n_steps for report in reports),
        n_known=sum(report.n_known for report in reports),
    )


def import_rows(
    catalog: Catalog,
    layout: RunLayout,
    *,
    table: pa.Table,
    run_id: str,
    size_of: Callable[[bytes], int],
    worker: str,
    name: str,
) -> ImportReport:
    """Import the trajectories of `table` that the run does not have.

    `run_id` is that of the run that played them, `size_of` returns the size of a group in it, and
    `worker` names the directory of their segment. Raises FormatError, in which `name` is theirs.
    """
    segment_rows.check_importable(table, name=name)
    played = segment_rows.trajectories(table)
    known = catalog.known_trajectories([one.meta.traj_uid for one in played])
    new = [one for one in played if one.meta.traj_uid not in known]
    metas = tuple(one.meta for one in new)
    if new:
        uids = pa.array([meta.traj_uid for meta in metas], UID_TYPE)
        kept = table.filter(pc.is_in(table["traj_uid"], value_set=uids))
        own = run_id == layout.info.run_id
        task_ids = {one.meta.group_uid: one.task_id for one in new}
        kept = _with_splits(kept, catalog.splits_of(task_ids))
        groups = [
            Group.imported(group_uid=group_uid, task_id=task_id, size=size_of(group_uid))
            for group_uid, task_id in task_ids.items()
        ]
        segment = write_rows(layout, kept, trajectories=metas, worker=worker, epoch=catalog.epoch)
        catalog.import_groups(segment=segment, groups=groups, source=f"run {run_id}", own=own)
    return ImportReport(
        n_trajectories=len(new),
        n_steps=sum(meta.n_steps for meta in metas),
        n_known=len(known),
    )


def _with_splits(table: pa.Table, splits: Mapping[bytes, str]) -> pa.Table:
    """Return the rows with the splits of their groups in the run, which may differ in a dataset."""
    index = table.schema.get_field_index("split")
    values = [splits.get(group_uid, IMPORTED) for group_uid in table["group_uid"].to_pylist()]
    return table.set_column(index, table.schema.field(index), pa.array(values, pa.string()))
