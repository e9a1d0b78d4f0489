"""Merge many small segment files into a few large ones, in the background, unseen by readers.

The merge is size-tiered, like an LSM tree: `fan_in` settled files of one level, oldest first,
become one file of the next level. A row is rewritten log64(n) times, until its file is full: more
than half of the file limit. The limit is 64 MiB, or 1/200 of the live bytes where that is more
(beyond 12.8 GB; there a row is rewritten once more whenever the run has doubled). Up to 100 GB,
fewer than 400 files are full, any two others fit into one, and 500 files suffice. A larger run has
one more file per 512 MiB.

If there are more files nevertheless, because many groups wait for the learner, files that are not
settled are merged too. That is safe, also for claimed and open groups: a trajectory is committed
whole and never written again, and a reader of the old path has the snapshot window to open it. It
is not done sooner because the learner would read a whole merged file for a few groups of it.

Memory: one merged file and its rows, about seven times its bytes. Decoded images take a hundred
times their bytes, so no merge takes more rows than MAX_ROW_BYTES, and a file of half as many is
left as it is.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from store.catalog.catalog import Catalog
from store.catalog.records import LiveSegment
from store.errors import FormatError, StoreError, UnavailableError
from store.layout import RunLayout
from store.segments import SegmentMeta, read_segment, write_rows

COMPONENT = "compaction"
WORKER = "compact"  # the directory of merged files
MAX_FULL_FILES = 400  # a full file holds more than half of the limit, so there are fewer
# Decoded rows of a merged file. Arrow reads no column of structs beyond 2 GiB at once.
MAX_ROW_BYTES = 1 << 30
# Bounds the memory of a merge. Beyond 100 GB a run has more files instead.
MAX_FILE_BYTES = 512 * 1024**2
MAX_SLICES = 4096  # of a table, which take 16 KB each; our own files need a few for each group


@dataclass(frozen=True, kw_only=True, slots=True)
class CompactionPolicy:
    fan_in: int  # files merged at once, as soon as a level has so many
    max_live_files: int  # beyond it, files that are not settled are merged too
    min_file_bytes: int  # the file limit of a small run


COMPACTION_POLICY = CompactionPolicy(fan_in=64, max_live_files=500, min_file_bytes=64 * 1024**2)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompactionResult:
    """The result of one merge. Damaged files and files too large to be merged are left out."""

    sources: tuple[str, ...]  # segment ids that were replaced
    merged: SegmentMeta | None  # None: nothing was replaced
    left_out: tuple[str, ...]  # segment ids to be skipped from now on


def merges(
    catalog: Catalog, layout: RunLayout, *, policy: CompactionPolicy, skip: Collection[str]
) -> Iterator[CompactionResult]:
    """Merge the files that are due, one merged file at a time.

    `skip` are segment ids that were left out before. The catalog is asked for the live files once,
    because asking before each of hundreds of merges costs more than the merges. Files that are
    committed meanwhile are for the next call.

    An interruption leaves an orphan at most: the catalog changes in one transaction, after the new
    file is durable. Raises StoreError if it cannot write, UnavailableError if a source cannot be
    reached now. A damaged source becomes an event.
    """
    live = catalog.live_segments()
    skip = {*skip}
    is_own = layout.is_trusted()
    while sources := choose(live, policy=policy, skip=skip):
        result = _merge(catalog, layout, sources=sources, is_own=is_own)
        skip.update(result.left_out)
        if result.merged is not None:
            newest = dataclasses.replace(
                live[-1],
                segment_id=result.merged.segment_id,
                level=max(source.level for source in sources) + 1,
                n_bytes=result.merged.n_bytes,
                n_steps=result.merged.n_steps,
                settled=True,
            )
            gone = {*result.sources}
            live = (*(file for file in live if file.segment_id not in gone), newest)
        yield result


def _merge(
    catalog: Catalog, layout: RunLayout, *, sources: Sequence[LiveSegment], is_own: bool
) -> CompactionResult:
    """Merge the sources that can be read together."""
    metas = catalog.segment_metas([source.segment_id for source in sources])
    tables, left_out = _read(catalog, layout, metas=metas, is_own=is_own)
    if left_out:  # the next choice tells whether the others are still due
        return CompactionResult(sources=(), merged=None, left_out=left_out)
    metas = metas[: len(tables)]
    merged = write_rows(
        layout,
        in_group_order(tables),
        trajectories=tuple(trajectory for meta in metas for trajectory in meta.trajectories),
        worker=WORKER,
        epoch=catalog.epoch,
    )
    ids = tuple(meta.segment_id for meta in metas)
    catalog.replace_segments(old=ids, new=merged, level=max(source.level for source in sources) + 1)
    catalog.log(
        component=COMPONENT,
        what="merged",
        detail=f"{len(ids)} files into {merged.path}, {merged.n_bytes} bytes",
    )
    return CompactionResult(sources=ids, merged=merged, left_out=())


def choose(
    live: Sequence[LiveSegment], *, policy: CompactionPolicy, skip: Collection[str]
) -> tuple[LiveSegment, ...]:
    """Return the files to merge now, at least two or none. `live` has the oldest file first.

    With fan_in=2, of three settled files of level 0 and one of level 1: the two oldest of level 0.
    """
    limit = file_limit(live, policy=policy)
    mergeable = [file for file in live if 2 * file.n_bytes <= limit and file.segment_id not in skip]
    settled = _by_level(file for file in mergeable if file.settled)
    for level in sorted(settled):
        if len(settled[level]) >= policy.fan_in:
            return _fitting(settled[level], limit=limit, fan_in=policy.fan_in)
    if len(live) <= policy.max_live_files or len(mergeable) < 2:
        return ()
    # Take the fullest level: merging a few files at a time would rewrite rows again and again.
    most = max(_by_level(mergeable).values(), key=len)
    return _fitting(most if len(most) > 1 else mergeable, limit=limit, fan_in=policy.fan_in)


def file_limit(live: Sequence[LiveSegment], *, policy: CompactionPolicy) -> int:
    """Return the limit of a merged file, in bytes of its sources."""
    return min(
        max(policy.min_file_bytes, 2 * sum(file.n_bytes for file in live) // MAX_FULL_FILES),
        MAX_FILE_BYTES,
    )


def in_group_order(tables: Sequence[pa.Table]) -> pa.Table:
    """Return all rows, group by group as first met, by member and step within a group.

    Rows that already follow each other stay one slice: the result shares the tables' memory. Rows
    that a stranger wrote in any order are copied. Raises FormatError for more of them than
    MAX_ROW_BYTES.
    """
    table = pa.concat_tables(tables)
    # numbered as they are first met
    groups = table["group_uid"].combine_chunks().dictionary_encode().indices
    keys = pa.table({"group": groups, "member": table["member"], "step": table["step_index"]})
    order = pc.sort_indices(
        keys, sort_keys=[(name, "ascending") for name in keys.column_names]
    ).to_numpy()
    starts = np.flatnonzero(np.diff(order, prepend=-2) != 1)
    if len(starts) > MAX_SLICES:
        if table.nbytes > MAX_ROW_BYTES:
            raise FormatError(
                f"{len(table):,} rows are in no order of groups, members and steps, and too many "
                "bytes to be sorted; no run writes them so. Export them again"
            )
        return table.take(order)
    lengths = np.diff(starts, append=len(order))
    places = zip(order[starts].tolist(), lengths.tolist(), strict=True)
    slices = [table.slice(first, n) for first, n in places]
    return pa.concat_tables([table.slice(0, 0), *slices])


def _read(
    catalog: Catalog, layout: RunLayout, *, metas: Sequence[SegmentMeta], is_own: bool
) -> tuple[list[pa.Table], tuple[str, ...]]:
    """Return the verified rows that count of the first files that fit into MAX_ROW_BYTES.

    The second value has the ids of files to leave out.
    """
    tables: list[pa.Table] = []
    damaged: list[str] = []
    room = MAX_ROW_BYTES
    for meta in metas:
        try:
            table = read_segment(layout, meta, is_own=is_own)
            expected = sum(trajectory.n_steps for trajectory in meta.trajectories)
            if table.num_rows != expected:
                raise StoreError(
                    f"segment {meta.path} has {table.num_rows} rows that count, "
                    f"committed were {expected}"
                )
            room -= table.nbytes
            if room < 0 and tables:
                if len(tables) == 1:  # no two fit: the larger one is left out
                    larger = meta if table.nbytes > tables[0].nbytes else metas[0]
                    damaged.append(larger.segment_id)
                return tables, tuple(damaged)
            tables.append(table)
        except UnavailableError:
            if damaged:  # the caller has to know these; the unavailable file is tried again
                break
            raise
        except StoreError as error:
            catalog.log(component=COMPONENT, what="damaged", detail=f"left out: {error}")
            damaged.append(meta.segment_id)
    return tables, tuple(damaged)


def _by_level(files: Iterable[LiveSegment]) -> dict[int, list[LiveSegment]]:
    levels: dict[int, list[LiveSegment]] = defaultdict(list)
    for file in files:
        levels[file.level].append(file)
    return levels


def _fitting(files: Sequence[LiveSegment], *, limit: int, fan_in: int) -> tuple[LiveSegment, ...]:
    """Return the oldest that together stay within the limit: at least two, each at most half."""
    chosen: list[LiveSegment] = []
    n_bytes = 0
    for file in files[:fan_in]:
        n_bytes += file.n_bytes
        if n_bytes > limit:
            break
        chosen.append(file)
    return tuple(chosen)
