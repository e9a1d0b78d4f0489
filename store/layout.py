"""Every path of a run directory, and run.json, which is written once and says what the run is."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from store import beneath
from store.clock import now_us
from store.durable import READ_ONLY, make_directory, write_once
from store.errors import FormatError, StoreError, UnsafePathError
from store.hashing import CANONICALISER_VERSION
from store.made_by import sign_run, state_directory
from store.storage import LocalStorage, Storage, open_storage

FORMAT_VERSION = 4  # of the run directory and of every file in it; raised when an older reader would misread it
_URI = re.compile(r"([a-z0-9]+):/+(.*)")
_WORKER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """The content of run.json."""

    run_id: str  # 32 hex digits, part of every group and trajectory uid
    format_version: int
    canonicaliser_version: int
    config_yaml: str  # the resolved configuration, as text
    created_us: int
    storage_uri: str | None = None  # where segments, exports and weights are, if not in the run directory; see storage.py
    forked_from: str | None = None  # run id and learner step, as RUN@STEP; see forked.py
    ancestors: tuple[str, ...] = ()  # run ids of the runs it was forked from, oldest first: some of its files are theirs

    def __post_init__(self) -> None:
        object.__setattr__(self, "ancestors", tuple(self.ancestors))  # JSON has lists

    def wrote(self, run_id: str) -> bool:
        """Whether files of that run may be in this one."""
        return run_id in (self.run_id, *self.ancestors)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLayout:
    """Where everything of one run is. Made by `create` (a new run) or `open` (an existing one).

    layout = RunLayout.create(Path("runs/a"), config_yaml=text)
    layout = RunLayout.open(Path("runs/a"))
    """

    root: Path  # absolute
    info: RunInfo

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
        """Make the directories and write run.json; StoreError if a run is already there."""
        root = root.absolute()
        info = RunInfo(
            run_id=uuid.uuid4().hex,
            format_version=FORMAT_VERSION,
            canonicaliser_version=CANONICALISER_VERSION,
            config_yaml=config_yaml,
            created_us=now_us(),
            storage_uri=storage_uri or None,
            forked_from=forked_from,
            ancestors=ancestors,
        )
        layout = cls(root=root, info=info)
        try:
            for directory in (root, layout.segments, layout.exports, layout.weights, layout.checkpoints, layout.logs):
                make_directory(directory, beneath=root)
            content = json.dumps(dataclasses.asdict(info), indent=1).encode()
            if info.storage_uri is not None and not layout.run_json.exists():
                layout._take_storage(content)
            write_once(layout.run_json, content, mode=READ_ONLY, beneath=root)
            is_signed = sign_run(root, config=None)
        except FileExistsError as error:
            raise StoreError(f"{root} already holds a run; continue it, or choose another run directory") from error
        except UnsafePathError:
            raise
        except OSError as error:
            raise StoreError(f"cannot make the run directory {root}: {error.strerror}") from error
        if storage_uri and not is_signed:  # nobody could write to that storage for a run that is not known to be ours
            raise StoreError(f"{state_directory()} cannot be written, and says which runs are yours; set XDG_STATE_HOME")
        return layout

    @classmethod
    def exists(cls, root: Path) -> bool:
        """Whether a run was created at `root`."""
        root = root.absolute()
        return beneath.is_file(root / "run.json", root=root)

    @classmethod
    def open(cls, root: Path | str) -> RunLayout:
        """The run at `root`; FormatError if there is none or this code is too old for it."""
        given, root = str(root), Path(root).absolute()
        path = root / "run.json"
        try:
            content = json.loads(beneath.read_text(path, root=root))
            version = int(content["format_version"])
        except UnsafePathError:
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            if uri := _URI.fullmatch(given):  # a Path has lost a slash
                uri_text = f"{uri[1]}://{uri[2]}"
                raise FormatError(f"{uri_text} is a URI; bring the run here: python -m store fetch {uri_text} DIR") from error
            raise FormatError(f"{root} is not a run directory (no run.json in it); check the path") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path} cannot be read ({error}); restore it from a backup") from error
        if version > FORMAT_VERSION:
            raise FormatError(f"{root} has format version {version}, this code reads up to {FORMAT_VERSION}; update the code")
        known = {field.name for field in dataclasses.fields(RunInfo)}
        try:
            info = RunInfo(**{name: value for name, value in content.items() if name in known})
        except TypeError as error:
            raise FormatError(f"{path} lacks a field ({error}); restore it from a backup") from error
        return cls(root=root, info=info)

    def _take_storage(self, run_json: bytes) -> None:
        if any(file.path != "run.json" for file in self.storage.files("")):  # alone: a start that did not get further
            raise StoreError(f"{self.storage.locate('')} has files of another run; give each run a store.uri of its own")
        self.storage.write("run.json", run_json)

    @property
    def storage(self) -> Storage:
        """Where the immutable files are."""
        return LocalStorage(self.root) if self.info.storage_uri is None else open_storage(self.info.storage_uri)

    @property
    def local(self) -> RunLayout:
        """The run as its directory here shows it: all of it, or what `mirror` brought of a run whose storage is elsewhere."""
        return dataclasses.replace(self, info=dataclasses.replace(self.info, storage_uri=None))

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def catalog(self) -> Path:
        return self.root / "catalog.sqlite"

    @property
    def catalog_lock(self) -> Path:
        return self.root / "catalog.lock"

    @property
    def mirror_lock(self) -> Path:
        """Held by the reader that brings files of a storage elsewhere here."""
        return self.root / "mirror.lock"

    @property
    def manifest(self) -> Path:
        """With a storage elsewhere: what was published there. `local.manifest` then names only what was brought here."""
        return self.root / ("manifest.json" if self.info.storage_uri is None else "published.json")

    @property
    def open_sql(self) -> Path:
        return self.root / "open.sql"

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def exports(self) -> Path:
        return self.root / "export"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def readers(self) -> Path:
        return self.root / "readers"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def segment(self, *, worker: str, segment_id: str) -> Path:
        """The file of one segment, in a directory of its own worker."""
        if not _WORKER_NAME.fullmatch(worker):
            raise StoreError(f"worker name {worker!r} cannot be a directory name; use letters, digits, '_', '-', '.'")
        return self.segments / worker / f"{segment_id}.parquet"

    def weights_dir(self, version: int) -> Path:
        """weights/v000123"""
        return self.weights / f"v{version:06d}"

    def checkpoint_dir(self, learner_step: int) -> Path:
        """checkpoints/step000123"""
        return self.checkpoints / f"step{learner_step:06d}"

    def relative(self, path: Path) -> str:
        """`path` as stored in catalog and manifest: relative to the root, so that a run can be moved."""
        return path.absolute().relative_to(self.root).as_posix()
