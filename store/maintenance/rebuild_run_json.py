"""Put run.json back from the copy that was made with the run.

if is_lost(root):
    lines = rebuild_run_json(root)
"""

from __future__ import annotations

from pathlib import Path

from store.atomic_write import READ_ONLY, write_atomically
from store.errors import FormatError, OtherFormatError, StoreError
from store.layout import RunLayout
from store.maintenance.repair import quarantine
from store.run_json import RunInfo, parse_run_json
from store.run_names import RUN_JSON, SIGNS_OF_A_RUN
from store.untrusted.file_access import MAX_TEXT_BYTES, is_directory, is_file, read_bytes, status
from store.untrusted.trust import check_own_run

RUN_JSON_COPY = "backup/run.json"


def is_lost(root: Path) -> bool:
    """Return whether a run is at `root` whose run.json is missing, damaged or another run's.

    Raises OtherFormatError if newer code wrote it.
    """
    root = root.absolute()
    try:
        info = _read_run_json(root, RUN_JSON)
    except FileNotFoundError:
        segments, *files = SIGNS_OF_A_RUN
        is_run = is_directory(root / segments, root=root)
        return is_run or any(is_file(root / name, root=root) for name in files)
    except OtherFormatError:
        raise
    except FormatError:
        return True
    except (OSError, StoreError):  # RunLayout.open says what is wrong with it
        return False
    try:
        return _read_run_json(root, RUN_JSON_COPY).run_id != info.run_id
    except (OSError, StoreError):  # without a copy it stands alone
        return False


def rebuild_run_json(root: Path) -> list[str]:
    """Put the copy back. Return lines for people. Raises StoreError if no copy can be read."""
    root = root.absolute()
    try:
        data = read_bytes(root / RUN_JSON_COPY, root=root, at_most=MAX_TEXT_BYTES)
        info = parse_run_json(data, name=str(root / RUN_JSON_COPY))
    except (OSError, FormatError) as error:
        raise StoreError(
            f"run.json of {root} is lost or damaged, and {RUN_JSON_COPY} cannot be read ({error}); "
            "put a backup of run.json back"
        ) from error
    layout = RunLayout(root=root, info=info)
    check_own_run(root)
    if status(layout.run_json, root=root) is not None:
        quarantine(layout, layout.run_json.name)
    write_atomically(layout.run_json, data, mode=READ_ONLY, beneath=root)
    return [f"run.json of run {info.run_id}, from {RUN_JSON_COPY}"]


def _read_run_json(root: Path, name: str) -> RunInfo:
    """Raise FileNotFoundError, OSError, UnsafePathError or FormatError."""
    data = read_bytes(root / name, root=root, at_most=MAX_TEXT_BYTES)
    return parse_run_json(data, name=str(root / name))
