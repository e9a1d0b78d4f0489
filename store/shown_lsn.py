"""Know how far readers have been shown a run, to refuse an older copy of its directory.

note_shown(layout, token=token, lsn=40)   # before the storage gets a manifest with lsn 40
lsn = shown_lsn(layout)                   # a catalog that is behind it is an older copy
"""

from __future__ import annotations

from contextlib import suppress

from store import primary_directory
from store.catalog.schema_check import LARGEST_COUNTER
from store.layout import RunLayout
from store.run_names import MANIFEST, SHOWN
from store.storage import read_or_none
from store.untrusted import json_values
from store.untrusted.file_access import MAX_MANIFEST_BYTES, MAX_TEXT_BYTES, read_bytes, remove

LSN_DIGITS = 19  # at most; more are not converted


def note_shown(layout: RunLayout, *, token: str, lsn: int) -> None:
    """Write into the storage that the directory with this token shows `lsn`. Raises StoreError.

    A late manifest of another directory cannot replace that, and nothing makes it smaller.
    """
    if lsn >= _noted(layout, token):
        layout.storage.write(f"{SHOWN}/{token}", str(lsn).encode())


def drop_outdated_manifest(layout: RunLayout) -> None:
    """Remove the owner's copy of the manifest if the storage has another one. Raises StoreError.

    Then the next export writes a whole one. Otherwise the manifest of an owner that was cut off
    from the storage would stay until this catalog has something new.
    """
    if layout.info.storage_uri is not None:
        here = manifest_here(layout)
        if here is not None and here != manifest_there(layout):
            remove(layout.manifest, root=layout.root)


def shown_lsn(layout: RunLayout, *, by_others: bool = False) -> int:
    """Return the lsn that readers were shown, 0 without a manifest.

    A storage is asked too: the directory may be an older copy, with its manifest. What a directory
    has shown where the run was before does not count, unless `by_others`: its owner was cut off
    from the storage, and could still write there after the run was brought here. Raises
    UnavailableError.
    """
    shown = [manifest_here(layout)]
    noted = 0
    if layout.info.storage_uri is not None:
        shown.append(manifest_there(layout))
        token = primary_directory.token_of(layout.root)
        noted = 0 if token is None else _noted(layout, token)
    counted = [_lsn_of(data, layout, by_others=by_others) for data in shown if data is not None]
    return max([*counted, noted])


def manifest_here(layout: RunLayout) -> bytes | None:
    """Return the owner's copy of the manifest, None if it cannot be read."""
    with suppress(OSError):
        return read_bytes(layout.manifest, root=layout.root, at_most=MAX_MANIFEST_BYTES)
    return None


def manifest_there(layout: RunLayout) -> bytes | None:
    """Return the manifest in the storage, None if it has none. Raises UnavailableError."""
    return read_or_none(layout.storage, MANIFEST, at_most=MAX_MANIFEST_BYTES)


def _noted(layout: RunLayout, token: str) -> int:
    """Return the lsn of `note_shown`, 0 without one. Raises UnavailableError."""
    data = read_or_none(layout.storage, f"{SHOWN}/{token}", at_most=MAX_TEXT_BYTES) or b""
    is_lsn = data.isdigit() and len(data) <= LSN_DIGITS
    return int(data) if is_lsn and int(data) < LARGEST_COUNTER else 0


def _lsn_of(manifest: bytes, layout: RunLayout, *, by_others: bool) -> int:
    try:
        content = json_values.parse_object(manifest)
        # The manifest of another run says nothing about this run.
        is_ours = content.get("run_id", layout.info.run_id) == layout.info.run_id
        # One of an earlier version does not say which directory wrote it.
        there = str(content.get("primary", ""))
        is_late = not by_others and primary_directory.is_past(layout.root, there)
        return json_values.integer(content, "lsn") if is_ours and not is_late else 0
    except ValueError:  # export and fsck report the damage
        return 0
