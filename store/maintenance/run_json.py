"""Put back a run.json that is lost or damaged, from the copy made when the run was created.

if is_lost(root):
    lines = rebuild_run_json(root)
"""

from __future__ import annotations

from pathlib import Path

from store.atomic_write import READ_ONLY, write_atomically
from store.errors import FormatError, OtherFormatError, StoreError
from store.layout import RunInfo, RunLayout, parse_run_json
from store.maintenance.repair import quarantine
from store.untrusted.file_access import MAX_TEXT_BYTES, is_directory, is_file, read_bytes, status

BACKUP = "backup/run.json"


def is_lost(root: Path) -> bool:
    """Return whether a run is at `root` whose run.json is missing, damaged or another run's.

    Raises OtherFormatError if newer code wrote it.
    """
    root = root.absolute()
    try:
        info = _read(root, "run.json")
    except FileNotFoundError:
        files = ("catalog.sqlite", "manifest.json", BACKUP)
        is_run = is_directory(root / "segments", root=root)
        return is_run or any(is_file(root / name, root=root) for name in files)
    except OtherFormatError:
        raise
    except FormatError:
        return True
    except (OSError, StoreError):  # RunLayout.open says what is wrong with it
        return False
    try:
        return _read(root, BACKUP).run_id != info.run_id
    except (OSError, StoreError):  # without a copy it stands alone
        return False


def rebuild_run_json(root: Path) -> list[str]:
    """Put the copy back. Return lines for people. Raises StoreError if no copy can be read."""
    root = root.absolute()
    try:
        info = _read(root, BACKUP)
        data = read_bytes(root / BACKUP, root=root, at_most=MAX_TEXT_BYTES)
    except (OSError, FormatError) as error:
        raise StoreError(
            f"run.json of {root} is lost or damaged, and {BACKUP} cannot be read ({error}); "
            "put a backup of run.json back"
        ) from error
    layout = RunLayout(root=root, info=info)
    if status(layout.run_json, root=root) is not None:
        quarantine(layout, layout.run_json.name)
    write_atomically(layout.run_json, data, mode=READ_ONLY, beneath=root)
    return [f"run.json of run {info.run_id}, from {BACKUP}"]


def _read(root: Path, name: str) -> RunInfo:
    """Raise FileNotFoundError, OSError, UnsafePathError or FormatError."""
    data = read_bytes(root / name, root=root, at_most=MAX_TEXT_BYTES)
    return parse_run_json(data, name=str(root / name))
