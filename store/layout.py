"""Every path of a run directory, and run.json, which is written once and says what the run is."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

from store import json_values
from store.clock import now_us
from store.durable import READ_ONLY, make_directory, write_once
from store.errors import FormatError, StoreError
from store.hashing import CANONICALISER_VERSION
from store.storage import LocalStorage, Storage, open_storage

FORMAT_VERSION = 4  # of the run directory and of every file in it; raised when an older reader would misread it
_URI = re.compile(r"([a-z0-9]+):/+(.*)")
RUN_ID = re.compile(r"[0-9a-f]{32}")
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


def parse_run_json(data: bytes, *, name: str) -> RunInfo:
    """Return what a run.json says. Raises FormatError naming the file, for a damaged one and for one of newer code."""
    try:
        content = json_values.parse_object(data)
        version = json_values.whole(content, "format_version")
        if version > FORMAT_VERSION:
            raise FormatError(f"{name} has format version {version}, this code reads up to {FORMAT_VERSION}; update the code")
        info = RunInfo(
            run_id=json_values.text(content, "run_id"),
            format_version=version,
            canonicaliser_version=json_values.whole(content, "canonicaliser_version"),
            config_yaml=json_values.text(content, "config_yaml"),
            created_us=json_values.whole(content, "created_us"),
            storage_uri=json_values.optional_text(content, "storage_uri"),
            forked_from=json_values.optional_text(content, "forked_from"),
            ancestors=json_values.texts(content, "ancestors"),
        )
        for run_id in (info.run_id, *info.ancestors):
            if not RUN_ID.fullmatch(run_id):
                raise ValueError(f"{run_id!r:.80} is not a run id of 32 hex digits")
    except ValueError as error:
        raise FormatError(
            f"{name} is damaged ({error}); restore it from a backup, or: python -m store rebuild {Path(name).parent}"
        ) from error
    return info


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
                make_directory(directory)
            content = json.dumps(dataclasses.asdict(info), indent=1).encode()
            if info.storage_uri is not None and not layout.run_json.exists():
                layout._take_storage(content)
            write_once(layout.run_json, content, mode=READ_ONLY)
        except FileExistsError as error:
            raise StoreError(f"{root} already holds a run; continue it, or choose another run directory") from error
        except OSError as error:
            raise StoreError(f"cannot make the run directory {root}: {error.strerror}") from error
        return layout

    @classmethod
    def exists(cls, root: Path) -> bool:
        """Whether a run was created at `root`."""
        return (root / "run.json").is_file()

    @classmethod
    def open(cls, root: Path | str) -> RunLayout:
        """The run at `root`; FormatError if there is none or this code is too old for it."""
        given, root = str(root), Path(root).absolute()
        path = root / "run.json"
        try:
            info = parse_run_json(path.read_bytes(), name=str(path))
        except (FileNotFoundError, NotADirectoryError) as error:
            if uri := _URI.fullmatch(given):  # a Path has lost a slash
                uri_text = f"{uri[1]}://{uri[2]}"
                raise FormatError(f"{uri_text} is a URI; bring the run here: python -m store fetch {uri_text} DIR") from error
            lost = f"; if it was lost: python -m store rebuild {root}" if (root / "catalog.sqlite").is_file() else ""
            raise FormatError(f"{root} is not a run directory (no run.json in it); check the path{lost}") from error
        except OSError as error:
            raise FormatError(f"{path} cannot be read ({error.strerror}); make it readable, then retry") from error
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
