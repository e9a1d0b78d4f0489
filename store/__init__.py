"""The trajectory store: queue, dataset, lineage and resume point of a run. Knows no machine learning.

`records.py` (Step, Trajectory, the Arrow schema) and `hashing.py` say what is stored, `layout.py` where, `segments.py` how
(immutable Parquet). `catalog/` is the truth about what counts, `reading/` shows it to outside readers as SQL, `upkeep/`
keeps it small and whole (compaction, retention, fsck, rebuild), `cli/` is `python -m store`, `exchange.py` and `stored.py`
take trajectories from run to run, `errors.py` says what can go wrong. `broadcast.py` is how weights are sent past the store.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from store import broadcast
    from store.catalog.catalog import Catalog
    from store.catalog.database import check_unowned
    from store.catalog.imports import ImportedGroup
    from store.catalog.records import (
        Batch,
        CheckpointRecord,
        CommitResult,
        Counts,
        GroupRecord,
        LiveSegment,
        RollBack,
        Unfinished,
        VersionRecord,
    )
    from store.clock import now_us
    from store.durable import READ_WRITE, write_atomically
    from store.errors import DigestError, FencedError, FormatError, LockedError, StoreError, UnavailableError
    from store.exchange import live_files
    from store.forked import fork
    from store.hashing import files_digest, state_hash, uid, whole_text
    from store.heartbeat import Heartbeat
    from store.json_values import objects, parse_object, text, whole
    from store.layout import FORMAT_VERSION, RunLayout, read_run_file
    from store.logs import capture_output
    from store.made_by import made_by_this_user, sign_run
    from store.reading.manifest import export
    from store.reading.query import write_open_sql
    from store.reading.reader import Reader, SqlTimeout
    from store.reading.reader import open_run as open
    from store.reading.trained import (
        Metric,
        MetricChanges,
        TrainedStep,
        metrics_since,
        published_version,
        restart_points,
        trained_step,
    )
    from store.records import SEGMENT_SCHEMA, Step, StepImage, Trajectory, from_table, to_table, uid_text
    from store.segments import SegmentMeta, TrajectoryMeta, read_segment, read_segments, write_segment
    from store.stored import find_sources, take_sources
    from store.stored_source import StoredSource, TakenSource, parse_source
    from store.transfer import local_directory, publish_directory
    from store.trusted import check_trusted, is_trusted, trust
    from store.upkeep.compact import COMPACTION_POLICY, CompactionPolicy
    from store.upkeep.maintainer import Maintainer, MaintainerSettings
else:
    # Loaded when asked for (PEP 562): `python -m store --help` and mistyped options need neither Arrow nor DuckDB.
    _MODULE_OF = {
        "COMPACTION_POLICY": "upkeep.compact",
        "FORMAT_VERSION": "layout",
        "SEGMENT_SCHEMA": "records",
        "Batch": "catalog.records",
        "Catalog": "catalog.catalog",
        "CheckpointRecord": "catalog.records",
        "CommitResult": "catalog.records",
        "CompactionPolicy": "upkeep.compact",
        "Counts": "catalog.records",
        "DigestError": "errors",
        "FencedError": "errors",
        "FormatError": "errors",
        "GroupRecord": "catalog.records",
        "Heartbeat": "heartbeat",
        "ImportedGroup": "catalog.imports",
        "LiveSegment": "catalog.records",
        "LockedError": "errors",
        "Maintainer": "upkeep.maintainer",
        "MaintainerSettings": "upkeep.maintainer",
        "Metric": "reading.trained",
        "MetricChanges": "reading.trained",
        "READ_WRITE": "durable",
        "Reader": "reading.reader",
        "RollBack": "catalog.records",
        "RunLayout": "layout",
        "SegmentMeta": "segments",
        "SqlTimeout": "reading.reader",
        "Step": "records",
        "StepImage": "records",
        "StoreError": "errors",
        "StoredSource": "stored_source",
        "TakenSource": "stored_source",
        "TrainedStep": "reading.trained",
        "Trajectory": "records",
        "TrajectoryMeta": "segments",
        "UnavailableError": "errors",
        "Unfinished": "catalog.records",
        "VersionRecord": "catalog.records",
        "capture_output": "logs",
        "check_trusted": "trusted",
        "check_unowned": "catalog.database",
        "export": "reading.manifest",
        "files_digest": "hashing",
        "find_sources": "stored",
        "fork": "forked",
        "from_table": "records",
        "is_trusted": "trusted",
        "live_files": "exchange",
        "made_by_this_user": "made_by",
        "local_directory": "transfer",
        "metrics_since": "reading.trained",
        "now_us": "clock",
        "objects": "json_values",
        "open": "reading.reader",
        "parse_object": "json_values",
        "parse_source": "stored_source",
        "publish_directory": "transfer",
        "published_version": "reading.trained",
        "read_run_file": "layout",
        "read_segment": "segments",
        "read_segments": "segments",
        "restart_points": "reading.trained",
        "sign_run": "made_by",
        "state_hash": "hashing",
        "take_sources": "stored",
        "text": "json_values",
        "to_table": "records",
        "trained_step": "reading.trained",
        "trust": "trusted",
        "uid": "hashing",
        "uid_text": "records",
        "whole": "json_values",
        "whole_text": "hashing",
        "write_atomically": "durable",
        "write_open_sql": "reading.query",
        "write_segment": "segments",
    }

    def __getattr__(name):
        if name == "broadcast":
            return import_module("store.broadcast")
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), "open_run" if name == "open" else name)
        globals()[name] = value
        return value


__all__ = [
    "COMPACTION_POLICY",
    "FORMAT_VERSION",
    "READ_WRITE",
    "SEGMENT_SCHEMA",
    "Batch",
    "Catalog",
    "CheckpointRecord",
    "CommitResult",
    "CompactionPolicy",
    "Counts",
    "DigestError",
    "FencedError",
    "FormatError",
    "GroupRecord",
    "Heartbeat",
    "ImportedGroup",
    "LiveSegment",
    "LockedError",
    "Maintainer",
    "MaintainerSettings",
    "Metric",
    "MetricChanges",
    "Reader",
    "RollBack",
    "RunLayout",
    "SegmentMeta",
    "SqlTimeout",
    "Step",
    "StepImage",
    "StoreError",
    "StoredSource",
    "TakenSource",
    "TrainedStep",
    "Trajectory",
    "TrajectoryMeta",
    "UnavailableError",
    "Unfinished",
    "VersionRecord",
    "broadcast",
    "capture_output",
    "check_trusted",
    "check_unowned",
    "export",
    "files_digest",
    "find_sources",
    "fork",
    "from_table",
    "is_trusted",
    "live_files",
    "local_directory",
    "made_by_this_user",
    "metrics_since",
    "now_us",
    "objects",
    "open",
    "parse_object",
    "parse_source",
    "publish_directory",
    "published_version",
    "read_run_file",
    "read_segment",
    "read_segments",
    "restart_points",
    "sign_run",
    "state_hash",
    "take_sources",
    "text",
    "to_table",
    "trained_step",
    "trust",
    "uid",
    "uid_text",
    "whole",
    "whole_text",
    "write_atomically",
    "write_open_sql",
    "write_segment",
]
