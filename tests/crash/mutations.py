"""List edits that each take a safeguard from the store, and the check that must turn red."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import store
from tests.crash.guards import SECOND_ROWS

ROOT = Path(store.__file__).parent.parent
SOURCES = ("store", "learner/files/atomic_directory.py")  # where there are safeguards
SCHEMA = "store/catalog/schema.sql"
Edit = Callable[[str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    name: str
    file: str
    edit: Edit
    check: str  # as crash/scenarios.py names it


def swap(*edits: tuple[str, str]) -> Edit:
    """Return an edit that replaces texts; each must be there once."""

    def edit(source: str) -> str:
        for old, new in edits:
            assert source.count(old) == 1, (
                f"{old!r} is there {source.count(old)} times; the mutation has to follow the code"
            )
            source = source.replace(old, new)
        return source

    return edit


def without_key(table: str) -> Edit:
    """Return an edit that removes the primary key of a table."""

    def edit(source: str) -> str:
        block = re.search(
            rf"CREATE TABLE IF NOT EXISTS {table} \(.*?\n\) STRICT[^;]*;", source, re.DOTALL
        )
        assert block is not None, table
        plain = re.sub(
            r",\s*PRIMARY KEY \([^)]*\)| PRIMARY KEY( AUTOINCREMENT)?", "", block[0]
        ).replace(", WITHOUT ROWID", "")
        assert plain != block[0], table
        return source.replace(block[0], plain)

    return edit


def not_unique(index: str) -> Edit:
    return swap(
        (f"CREATE UNIQUE INDEX IF NOT EXISTS {index} ", f"CREATE INDEX IF NOT EXISTS {index} ")
    )


FILE_SYNC = "            os.fsync(file.fileno())\n"
NAME_SYNC = "        _sync(synced)\n"
DIRECTORY_SYNC = "            _sync(opened)\n"
FULL = 'SYNCED = "PRAGMA synchronous = FULL"'

DURABILITY = [
    Mutation(
        name="file fsync",
        file="store/atomic_write.py",
        edit=swap((FILE_SYNC, "")),
        check="power workload",
    ),
    Mutation(
        name="name fsync",
        file="store/atomic_write.py",
        edit=swap((NAME_SYNC, "")),
        check="power workload",
    ),
    Mutation(
        name="directory fsync",
        file="store/atomic_write.py",
        edit=swap((DIRECTORY_SYNC, "")),
        check="power workload",
    ),
    Mutation(
        name="directory of one that was killed",
        file="store/atomic_write.py",
        edit=swap(("    if directory in _SAFE_DIRECTORIES and is_there:", "    if is_there:")),
        check="power killed",
    ),
    Mutation(
        name="any directory fsync",
        file="store/atomic_write.py",
        edit=swap(("    os.fsync(directory)\n", "    pass\n")),
        check="power workload",
    ),
    Mutation(
        name="catalog never synced",
        file="store/catalog/connection.py",
        edit=swap((FULL, FULL.replace("FULL", "OFF"))),
        check="power workload",
    ),
    Mutation(
        name="catalog synced late",
        file="store/catalog/connection.py",
        edit=swap((FULL, FULL.replace("FULL", "NORMAL"))),
        check="power workload",
    ),
    Mutation(
        name="catalog not synced before it is shown",
        file="store/catalog/database.py",
        edit=swap(("                os.fsync(log.fileno())\n", "                pass\n")),
        check="power workload",
    ),
    Mutation(
        name="written in place",
        file="store/atomic_write.py",
        edit=swap(
            (
                "    _write_aside(path, data, mode=mode, beneath=beneath, show=_replace)\n",
                "    path.write_bytes(data)\n",
            )
        ),
        check="power workload",
    ),
    Mutation(
        name="manifest in place",
        file="store/reading/manifest.py",
        edit=swap(
            (
                "    write_atomically(layout.manifest, data, mode=READ_WRITE, "
                "beneath=layout.root)\n",
                "    layout.manifest.write_bytes(data)\n",
            )
        ),
        check="kill manifest",
    ),
]
OTHER_DURABILITY = [
    Mutation(
        name="quarantine fsync",
        file="store/maintenance/repair.py",
        edit=swap(("            sync_directory(target.parent, beneath=layout.root)\n", "")),
        check="power mend",
    ),
    *(
        Mutation(
            name=f"published {name}",
            file="learner/files/atomic_directory.py",
            edit=swap(edit),
            check="power publish",
        )
        for name, edit in {
            "bytes": (
                "        _fsync(path)\n",
                "        if path.is_dir():\n            _fsync(path)\n",
            ),
            "names": (
                "        _fsync(path)\n",
                "        if path.is_file():\n            _fsync(path)\n",
            ),
            "name": ("    _fsync(dest.parent)\n", ""),
            "anything": ("        os.fsync(descriptor)\n", "        pass\n"),
            "version": (
                "        _sync_files(dest)\n        _sync_name(dest)\n",
                "        pass\n",
            ),
            "version: bytes": ("        _sync_files(dest)\n", ""),
            "version: name": (
                "        _sync_files(dest)\n        _sync_name(dest)\n",
                "        _sync_files(dest)\n",
            ),
        }.items()
    ),
]
FORKS = [
    Mutation(
        name=f"forked {name}",
        file="store/exchange/fork.py",
        edit=swap((f"{before}{line}\n", f"{before}pass\n")),
        check=check,
    )
    for name, before, line, check in (
        (
            "names",
            "        ",
            "sync_directory(Path(directory), beneath=unfinished)",
            "power fork",
        ),
        (
            "mark that is gone",
            "unlink()\n    ",
            "sync_directory(unfinished, beneath=unfinished)",
            "power fork",
        ),
        ("name", "    ", "sync_directory(root.parent, beneath=root.parent)", "power fork"),
        ("bytes", "        ", "os.fsync(copy.fileno())", "power copy"),
    )
]
ATOMICITY = [
    Mutation(
        name="transactions",
        file="store/catalog/database.py",
        edit=swap(
            ('                self._connection.execute("BEGIN IMMEDIATE")\n', ""),
            ('                    self._connection.execute("COMMIT")\n', ""),
        ),
        check="kill commit",
    ),
    Mutation(
        name="replaced in two transactions",
        file="store/catalog/segment_states.py",
        edit=swap(
            (
                '    retire(tx, old, why="compacted")\n',
                '    tx.run("COMMIT")\n    tx.run("BEGIN")\n    retire(tx, old, why="compacted")\n',
            )
        ),
        check="kill compaction",
    ),
    Mutation(
        name="removed before it is said",
        file="store/maintenance/sweep.py",
        edit=swap(
            ("    catalog.mark_removed(retired)\n", ""),
            (
                "    return tuple(retired.values())\n",
                "    catalog.mark_removed(retired)\n    return tuple(retired.values())\n",
            ),
        ),
        check="kill sweep",
    ),
    Mutation(
        name="removed while the manifest shows it",
        file="store/maintenance/sweep.py",
        edit=swap(("manifest.lsn if pinned is None else min(pinned, manifest.lsn)", "None")),
        check="kill sweep",
    ),
]
CHECKS = [
    Mutation(
        name="known trajectories",
        file="store/catalog/groups.py",
        edit=swap(("if segment_of[one.traj_uid] is None]", "if one]")),
        check="kill commit",
    ),
    Mutation(
        name="epoch of a commit",
        file="store/catalog/groups.py",
        edit=swap(("    if epoch != tx.epoch:\n", "    if False:\n")),
        check="stale_epochs_are_fenced",
    ),
    Mutation(
        name="epoch of an owner",
        file="store/catalog/database.py",
        edit=swap(('if meta["epoch"] != self.epoch:', "if False:")),
        check="stale_epochs_are_fenced",
    ),
    Mutation(
        name="new epoch",
        file="store/catalog/database.py",
        edit=swap(('"UPDATE meta SET epoch = epoch + 1"', '"UPDATE meta SET epoch = epoch"')),
        check="stale_epochs_are_fenced",
    ),
    Mutation(
        name="lock",
        file="store/catalog/ownership.py",
        edit=swap(
            ("        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "        pass\n")
        ),
        check="one_owner",
    ),
    Mutation(
        name="digest of a read",
        file="store/segments.py",
        edit=swap(("    if digest != meta.digest:\n", "    if False:\n")),
        check="changed_bytes_are_noticed",
    ),
    Mutation(
        name="digest of fsck",
        file="store/maintenance/fsck_segments.py",
        edit=swap(
            (
                "    if (digest, n_bytes) != (committed.meta.digest, committed.meta.n_bytes):\n",
                "    if False:\n",
            )
        ),
        check="fsck_notices_changed_bytes",
    ),
    Mutation(
        name="hashes of states",
        file="store/maintenance/segment_rows.py",
        edit=swap(("if digest != (None if text is None else state_hash(text)):", "if False:")),
        check="fsck_notices_wrong_state_hashes",
    ),
    *(
        Mutation(
            name=f"digest of {name}",
            file=f"store/{file}",
            edit=swap((condition, never)),
            check=check,
        )
        for name, file, condition, never, check in (
            (
                "an export",
                "exchange/dataset_export.py",
                "file_digest(data) != Path(path).stem:",
                "False:",
                "export_notices_changed_bytes",
            ),
            (
                "a fetch",
                "reading/mirror.py",
                "file_digest(data) != PurePosixPath(path).stem:",
                "False:",
                "fetch_notices_changed_bytes",
            ),
            (
                "an import",
                "exchange/dataset_files.py",
                "file_digest(data) != part.digest:",
                "False:",
                "import_notices_changed_bytes",
            ),
            (
                "a rebuild",
                "maintenance/rebuild.py",
                "digest != PurePosixPath(path).stem:",
                "False:",
                "rebuild_notices_changed_bytes",
            ),
            (
                "a rescue",
                "maintenance/repair.py",
                "file_digest(data) == PurePosixPath(path).stem",
                "True",
                "repair_rescues_no_changed_bytes",
            ),
        )
    ),
    Mutation(
        name="name that is taken",
        file="store/atomic_write.py",
        edit=swap(
            (
                "    os.link(aside, final, src_dir_fd",
                "    return _replace(aside, final, directory)\n    os.link(aside, final, "
                "src_dir_fd",
            )
        ),
        check="names_are_taken_once",
    ),
    Mutation(
        name="version that is not after the latest",
        file="store/catalog/run_records.py",
        edit=swap(("version <= latest.version:", "version == latest.version:")),
        check="names_are_taken_once",
    ),
]
KEYS = [
    Mutation(
        name=key,
        file=SCHEMA,
        edit=not_unique(key)
        if key in ("trajectory_by_member", "batch_by_step", "batch_group_once")
        else swap(("path TEXT NOT NULL UNIQUE", "path TEXT NOT NULL"))
        if key == "segment.path"
        else without_key(table),
        check=f"no_second_row {key}",
    )
    for key, (table, _) in SECOND_ROWS.items()
]
MUTATIONS = [*DURABILITY, *OTHER_DURABILITY, *FORKS, *ATOMICITY, *CHECKS, *KEYS]


SAFEGUARD = re.compile(
    r"fsync\(|sync_directory\(|digest != |digest\(data\) [!=]= |UNIQUE|PRIMARY KEY|synchronous = "
)
# Lines that look like a safeguard and need no mutation, each with the reason.
NO_SAFEGUARD = {
    "def sync_directory(directory: Path, *, beneath: Path) -> None:": "its fsync is mutated",
    "def _fsync(path: Path) -> None:": "its fsync is mutated",
    'UNSYNCED = "PRAGMA synchronous = NORMAL"': "leases and heartbeats may be lost",
    "id INTEGER PRIMARY KEY CHECK (id = 1),": "one row, inserted with its own id",
    "name TEXT PRIMARY KEY,": "rows of `changed` and `component` replace themselves",
    "seq INTEGER PRIMARY KEY AUTOINCREMENT,": "only numbers the rows",
    "event_id INTEGER PRIMARY KEY AUTOINCREMENT,": "only numbers the rows",
    "batch_id INTEGER PRIMARY KEY AUTOINCREMENT,": "only numbers the rows",
    "unfinished_id INTEGER PRIMARY KEY AUTOINCREMENT,": "only numbers the rows",
    "CREATE UNIQUE INDEX batch_group_once ON batch_group (group_uid) WHERE live = 1;": "compared",
    "PRIMARY KEY (split, state)": "`counts` is temporary and counted anew by every owner",
    "PRIMARY KEY (batch_id, traj_uid)": "a batch is settled once, with its `critic_value`s",
    "PRIMARY KEY (traj_uid, lsn)": "`lost_trajectory` is history, for people",
}


COMMENT = re.compile(r"(^|\s+)(#|--).*")


def unguarded() -> list[str]:
    """Return the safeguards in the sources that no mutation takes away."""
    missed = []
    for path in _source_files():
        source = path.read_text()
        name = f"{path.relative_to(ROOT)}"
        kept = [
            set(mutation.edit(source).splitlines())
            for mutation in MUTATIONS
            if mutation.file == name
        ]
        for line in source.splitlines():
            code = COMMENT.sub("", line).strip()
            is_safeguard = SAFEGUARD.search(code) and code not in NO_SAFEGUARD
            if is_safeguard and all(line in lines for lines in kept):
                missed.append(f"{name}: {code}")
    return missed


def _source_files() -> list[Path]:
    found = [path for name in SOURCES for path in [ROOT / name, *sorted((ROOT / name).rglob("*"))]]
    return [path for path in found if path.suffix in (".py", ".sql")]
