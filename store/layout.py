"""Name every path of a run directory, and make or open the directory."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from printable import shell_word
from store import primary_directory
from store.atomic_write import READ_ONLY, make_directory, write_atomically, write_once
from store.clock import now_us
from store.errors import FormatError, StoreError, UnavailableError, UnsafePathError
from store.hashing import CANONICALISER_VERSION
from store.run_json import FORMAT, RunInfo, parse_run_json
from store.run_names import (
    BRING_MARKER,
    CONFIG_FILE,
    FORK_MARKER,
    MANIFEST,
    RUN_JSON,
    SIGNED,
)
from store.storage import LocalStorage, Storage, open_storage
from store.storage_claim import claim, keep_run_json
from store.untrusted import file_access as beneath
from store.untrusted.no_links import check_no_links
from store.untrusted.own_directory import opened_by_own_links
from store.untrusted.signatures import (
    RunTexts,
    sign_next,
    signed_texts,
    state_directory,
)
from store.untrusted.trust import trusted_texts, trusted_texts_or_none

_URI = re.compile(r"([a-z0-9]+):/+(.*)")
USUAL_PLACE = Path("runs")  # where the given configs and the documents put runs
EXCHANGED = "was exchanged while it was opened; open it again"
_WORKER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def read_run_file(run: Path, name: str) -> str:
    """Return the text of a small file at the top of a run's directory.

    Raises FileNotFoundError, or StoreError for a link, a file that is too large, and one that is no
    text.
    """
    path = run.absolute() / name
    try:
        data = beneath.read_bytes(path, root=run.absolute(), at_most=beneath.MAX_TEXT_BYTES)
    except (UnsafePathError, FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; make it readable") from error
    return decoded(data, path=path)


def decoded(data: bytes, *, path: Path) -> str:
    """Return the text of a file that was read from `path`. Raises StoreError if it is no text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StoreError(
            f"{path} is no text ({error.reason}); restore it from a backup, or remove it"
        ) from error


def _uri_of(path: str) -> str | None:
    """Return the URI that a path was made of, None for a path that is none.

    A Path has lost slashes: `file:/x` is file:///x, `s3:/x` is s3://x.
    """
    found = _URI.fullmatch(path)
    if not found:
        return None
    return f"{found[1]}://{'/' * (found[1] == 'file')}{found[2]}"


def _nearby(given: str) -> str:
    """Return a question with a run in runs/ that a path may have meant; "" if there is none."""
    likely = USUAL_PLACE / given
    # The name may have any form.
    with suppress(OSError, ValueError):
        if not Path(given).is_absolute() and (likely / RUN_JSON).is_file():
            return f", did you mean {str(likely)!r}?"
    return ""


class _Below:
    """Give a path below the root of the layout whose attribute it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: RunLayout, _: object) -> Path:
        return layout.root / self._name


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLayout:
    """The paths of one run. `create` makes a new run, `open` finds an existing one.

    layout = RunLayout.create(Path("runs/a"), config_yaml=text)
    layout = RunLayout.open(Path("runs/a"))
    """

    root: Path  # absolute
    info: RunInfo
    # the run's own directory, if `root` is this user's copy of a remote storage
    copy_of: Path | None = None

    @classmethod
    def create(
        cls,
        root: Path,
        *,
        config_yaml: str,
        storage_uri: str | None = None,
        forked_from: str | None = None,
        ancestors: tuple[str, ...] = (),
    ) -> RunLayout:
        """Make the directories and write run.json. Raises StoreError if a run is already there."""
        root = root.absolute()
        info = RunInfo(
            run_id=uuid.uuid4().hex,
            format=FORMAT,
            canonicaliser_version=CANONICALISER_VERSION,
            config_yaml=config_yaml,
            created_us=now_us(),
            storage_uri=storage_uri or None,
            forked_from=forked_from,
            ancestors=ancestors,
        )
        layout = cls(root=root, info=info)
        content = json.dumps(dataclasses.asdict(info), indent=1).encode()
        if len(content) > beneath.MAX_TEXT_BYTES:
            raise StoreError(
                f"the settings of {root} take {len(content):,} bytes in {RUN_JSON}, more than "
                f"{beneath.MAX_TEXT_BYTES:,}; shorten the texts in them"
            )
        try:
            made = (layout.segments, layout.exports, layout.weights, layout.checkpoints)
            for directory in (root, *made, layout.logs):
                make_directory(directory, beneath=root)
            if info.storage_uri is not None and beneath.status(layout.run_json, root=root) is None:
                claim(root, info, content)
            # Signed first: a run that is killed here is this user's, and can be continued.
            sign_next(root, run_json=content)
            write_once(layout.run_json, content, mode=READ_ONLY, beneath=root)
            make_directory(layout.run_json_backup.parent, beneath=root)
            write_atomically(layout.run_json_backup, content, mode=READ_ONLY, beneath=root)
            # Again: another start may have replaced the signatures.
            is_signed = sign_next(root, run_json=content)
            if storage_uri and is_signed:
                layout.storage.write(SIGNED, (root / SIGNED).read_bytes(), is_private=True)
        except FileExistsError as error:
            raise StoreError(
                f"{root} already holds a run; continue it, or choose another run directory"
            ) from error
        except UnsafePathError:
            raise
        except OSError as error:
            raise StoreError(f"cannot make the run directory {root}: {error.strerror}") from error
        # Nobody writes to a storage for a run that is not known to be the user's.
        if storage_uri and not is_signed:
            raise StoreError(
                f"{state_directory()} cannot be written, so the run cannot be signed as yours; set "
                "XDG_STATE_HOME"
            )
        return layout

    @classmethod
    def exists(cls, root: Path) -> bool:
        """Return whether a run was created at `root`."""
        root = root.absolute()
        return beneath.is_file(root / RUN_JSON, root=root)

    @classmethod
    def open(cls, root: Path | str) -> RunLayout:
        """Return the run at `root`. Raises FormatError if none of our format is there.

        Raises UnsafePathError for a path through another user's link to a run that is not theirs:
        what is read of it and written elsewhere, or shown, they may be able to read.
        """
        given, root = str(root), Path(root).absolute()
        path = root / RUN_JSON
        try:
            if beneath.status(root / FORK_MARKER, root=root) is not None:
                raise FormatError(
                    f"{root} is a fork that was cut short; remove it, and give the command again"
                )
            if beneath.status(root / BRING_MARKER, root=root) is not None:
                raise FormatError(
                    f"{root} is a run that was only brought here in part; give the command that "
                    f"brought it again: gigpo train --resume URI run_dir={shell_word(str(root))}"
                )
            with opened_by_own_links(root, may_lead_home=True) as (directory, _):
                data = beneath.read_bytes_in(
                    directory, RUN_JSON, path=path, at_most=beneath.MAX_TEXT_BYTES
                )
            info = parse_run_json(data, name=str(path))
        except UnsafePathError:
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            if uri := _uri_of(given):
                raise FormatError(
                    f"{uri} is a URI; bring the run here: gigpo fetch {shell_word(uri)} DIR"
                ) from error
            has_catalog = beneath.is_file(root / "catalog.sqlite", root=root)
            lost = f"; if it was lost: gigpo rebuild {root}" if has_catalog else ""
            raise FormatError(
                f"{root} is not a run directory (no run.json in it); check the path"
                f"{_nearby(given)}{lost}"
            ) from error
        except OSError as error:
            raise FormatError(
                f"{path} cannot be read ({error.strerror}); make it readable, then retry"
            ) from error
        return cls(root=root, info=info)

    @contextmanager
    def opened(self, path: Path | None = None) -> Iterator[int]:
        """Give the descriptor of the run's directory, or of `path`, which has its run.json too.

        Whoever owns the path can exchange it at any moment, also with a link to the root directory.
        So look into the very directory that was opened. Raises StoreError if it is not this run.
        """
        path = self.root if path is None else path
        with opened_by_own_links(path, may_lead_home=True) as (directory, _):
            try:
                data = beneath.read_bytes_in(
                    directory, RUN_JSON, path=path / RUN_JSON, at_most=beneath.MAX_TEXT_BYTES
                )
                is_it = parse_run_json(data, name=str(path)).run_id == self.info.run_id
            except (FileNotFoundError, NotADirectoryError, UnsafePathError, FormatError) as error:
                raise StoreError(f"{path} {EXCHANGED}") from error
            if not is_it:
                raise StoreError(f"{path} {EXCHANGED}")
            yield directory

    def newest_settings(self) -> str:
        """Return the text of config.yaml, or of the first start's settings where there is none.

        Raises StoreError, also if another run has this one's path now.
        """
        with self.opened(self.run_directory) as directory:
            path = self.run_directory / CONFIG_FILE
            try:
                data = beneath.read_bytes_in(
                    directory, CONFIG_FILE, path=path, at_most=beneath.MAX_TEXT_BYTES
                )
            except FileNotFoundError:
                return self.info.config_yaml
        return decoded(data, path=path)

    def is_made_by_this_user(self) -> bool:
        """Return whether this user signed the very settings in `info`.

        Others may lie there by now. Raises StoreError if others can read this user's key.
        """
        texts = signed_texts(self.root)
        return texts is not None and self._has_read(texts)

    def is_trusted(self) -> bool:
        """Return whether this user made or trusts the run with the settings in `info`.

        Raises StoreError if others can read this user's key.
        """
        texts = trusted_texts_or_none(self.root)
        return texts is not None and self._has_read(texts)

    def check_trusted(self) -> None:
        """Raise StoreError unless `is_trusted`. Call it before settings in `info` are followed."""
        if not self._has_read(trusted_texts(self.root)):
            raise StoreError(f"{self.root} {EXCHANGED}")

    def _has_read(self, texts: RunTexts) -> bool:
        return parse_run_json(texts.run_json, name=str(self.run_json)) == self.info

    def check_is_still(self, run_id: str) -> None:
        """Raise StoreError if this run, found at a path again, has not the id `run_id`."""
        if self.info.run_id != run_id:
            raise StoreError(f"{self.root} {EXCHANGED}")

    @contextmanager
    def opened_directory(self, path: Path) -> Iterator[int]:
        """Give the descriptor of a directory in the run's. No link leads there. Raises as `opened`.

        So everything that is read below it is the run's, whatever is put in its place meanwhile.
        """
        with self.opened() as run:
            directory = beneath.open_directory_below(run, path, root=self.root)
        try:
            yield directory
        finally:
            os.close(directory)

    @classmethod
    def join(cls, root: Path, *, storage_uri: str, run_id: str) -> RunLayout:
        """Return the run at `root` for a worker or the learner. Raises as `open`, or StoreError.

        On a node that does not see the owner's directory one is made at the same path, for logs,
        weights and checkpoints. It is not the run's primary directory, so nobody can own the run
        there. It stays when the run is over, so another run may be there by now: `run_id` is that
        of the run that is joined.
        """
        root = root.absolute()
        here = cls.open(root) if not storage_uri or cls.exists(root) else None
        if here is not None:
            here._check_joined(run_id, where=str(root), remedy="move it away on that machine")
        if not storage_uri:
            assert here is not None
            return here
        # Asked in each case: the volume of a file:// storage may not be mounted on this node.
        storage = open_storage(storage_uri)
        where = storage.locate(RUN_JSON)
        if not storage.exists(RUN_JSON):
            raise UnavailableError(
                f"{where}, as {socket.gethostname()} sees it, is not there; mount the volume on "
                "that machine, or check store.uri"
            )
        data: bytes = storage.read(RUN_JSON, at_most=beneath.MAX_TEXT_BYTES).to_pybytes()
        layout = cls(root=root, info=parse_run_json(data, name=where))
        layout._check_joined(run_id, where=where, remedy="check store.uri")
        if here is not None:
            return here
        for directory in (root, layout.weights, layout.checkpoints, layout.logs):
            make_directory(directory, beneath=root)
        write_atomically(layout.run_json, data, mode=READ_ONLY, beneath=root)
        return layout

    def _check_joined(self, run_id: str, *, where: str, remedy: str) -> None:
        if self.info.run_id != run_id:
            raise StoreError(
                f"{where}, as {socket.gethostname()} sees it, is of run {self.info.run_id}, and "
                f"run {run_id} is at work; {remedy}"
            )

    def check_no_links(self) -> None:
        """Raise UnsafePathError for a link beneath the directories of the run.

        A writer would follow it out of the run. Only weights/v000000 may be a link: an evaluation
        of a model elsewhere makes it, and nothing is written there.
        """
        check_no_links(self.root, but=self.weights_dir(0))

    @property
    def storage(self) -> Storage:
        """Return the storage of the immutable files."""
        uri = self.info.storage_uri
        return LocalStorage(self.root) if uri is None else open_storage(uri)

    def check_primary(self) -> None:
        """Raise FencedError if the run was brought to another directory, where it goes on.

        Otherwise restore its primary.json and run.json in the storage, if another run that was made
        at the same time replaced them.
        """
        if self.info.storage_uri is None:
            return
        in_force = primary_directory.check(self.root, self.info.storage_uri)
        primary_directory.repair(self.root, self.info.storage_uri, in_force)
        keep_run_json(self.root, self.info)

    @property
    def is_being_brought(self) -> bool:
        """Return whether this directory is filled from a storage, and goes if that fails.

        Until it is whole, nothing is shown to readers, and nothing is removed from the storage.
        """
        return beneath.status(self.root / BRING_MARKER, root=self.root) is not None

    @property
    def run_directory(self) -> Path:
        """Return the directory that the user knows, also for the copy that `mirror` made."""
        return self.copy_of or self.root

    @property
    def catalog(self) -> Path:
        return self.run_directory / "catalog.sqlite"

    @property
    def manifest(self) -> Path:
        """Return manifest.json. With a remote storage this is the owner's copy of it."""
        return self.root / (MANIFEST if self.info.storage_uri is None else "published.json")

    run_json = _Below(RUN_JSON)
    catalog_lock = _Below("catalog.lock")
    mirror_lock = _Below("mirror.lock")  # of who copies files from a remote storage to here
    open_sql = _Below("open.sql")
    segments = _Below("segments")
    exports = _Below("export")
    weights = _Below("weights")
    checkpoints = _Below("checkpoints")
    readers = _Below("readers")
    quarantine = _Below("quarantine")
    backup = _Below("backup/catalog.sqlite")  # relative to the root also in another storage
    run_json_backup = _Below("backup/run.json")
    logs = _Below("logs")

    def segment(self, *, worker: str, segment_id: str) -> Path:
        """Return the path of a segment, in the directory of its worker."""
        if not _WORKER_NAME.fullmatch(worker):
            raise StoreError(
                f"worker name {worker!r} cannot be a directory name; use letters, digits, '_', "
                "'-', '.'"
            )
        return self.segments / worker / f"{segment_id}.parquet"

    def weights_dir(self, version: int) -> Path:
        """Return weights/v000123."""
        return self.weights / f"v{version:06d}"

    def checkpoint_dir(self, learner_step: int) -> Path:
        """Return checkpoints/step000123."""
        return self.checkpoints / f"step{learner_step:06d}"

    def relative(self, path: Path) -> str:
        """Return `path` relative to the root, as catalog and manifest store it."""
        return path.absolute().relative_to(self.root).as_posix()
