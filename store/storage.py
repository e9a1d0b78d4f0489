"""Read and write the immutable files of a run: segments, exports, weights and checkpoints.

LocalStorage   the run directory, or another one: file:///mnt/shared/run
RemoteStorage  an object store: s3://bucket/run?region=eu-central-1, also gs:// and abfs://
"""

from __future__ import annotations

import functools
import os
import re
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from printable import REASON_CHARACTERS, one_line
from store.atomic_write import (
    PRIVATE,
    READ_ONLY,
    TEMPORARY_SUFFIX,
    make_directory,
    write_atomically,
)
from store.errors import StoreError, UnavailableError, UnsafePathError
from store.hashing import file_digest
from store.untrusted import file_access as beneath
from store.untrusted.own_directory import check_own_directory, opened_by_own_links

# Their PUT shows an object whole or not at all.
OBJECT_STORES = ("s3", "gs", "gcs", "abfs", "abfss")
# What a URI may say of each. None of Google's and Azure's names a server, or leaves TLS out: their
# clients send the token of the user's login, which is good for all that the login may do. Of S3's
# client a server gets a signature for itself.
OPTIONS = {
    "s3": ("region", "scheme", "endpoint_override", "allow_bucket_creation", "tls_ca_file_path"),
    "gs": ("project_id", "retry_limit_seconds"),
    "abfs": ("credential_kind",),
}
CREDENTIAL = re.compile(r"access_key|account_key|secret|token|password|sas")
BUCKET = re.compile(r"[\w.-]+", re.ASCII)
AZURE_BUCKET = re.compile(r"[a-z0-9-]+(\.(blob|dfs)\.core\.windows\.net)?", re.ASCII)
CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # Arrow reads a text only up to a NUL
# For one small file with all retries. Callers wait twice as long for the coordinator.
DEADLINE_S = 30.0
# The limit for a file of unknown size. Compaction merges up to 512 MiB, and one group of episodes
# with images is no larger.
MAX_FILE_BYTES = 8 << 30
SLOWEST_BYTES_PER_S = 4_000_000  # extends the deadline of a large file
PIECE_BYTES = 64 << 20  # of a file for each request; a compacted one of a small run is one piece
MARK_BYTES = 16  # at the end of each piece until it is read
RETRY_AFTER_S = 0.5
# Arrow follows no redirect where this is the region. It signs requests for the usual one then.
WITHOUT_REDIRECTS, USUAL_REGION = "aws-global", "us-east-1"
# Words of Arrow's errors that do not go away when the call is repeated.
FINAL = re.compile(
    r"ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY|SIGNATURE|UNRECOGNIZED_CLIENT"
    r"|HTTP status (30[1-8]|40[0134])"
)
# Arrow's words for an answer that has no room: in the buffer of the file's size, or in memory.
TOO_LONG = "Failed to flush response stream"
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    path: str  # relative to the run's root
    n_bytes: int
    modified_us: int  # UTC epoch


class Storage(Protocol):
    """Files of a run, by paths relative to its root, with '/'.

    Errors are StoreErrors that name the file and the remedy. After an UnavailableError the file may
    be whole. Only a plain StoreError of `read` means that it is gone.
    """

    def write(self, path: str, data: pa.Buffer | bytes, *, is_private: bool = False) -> None:
        """Write a file, durable on return and not visible before. A repeated write is harmless.

        `is_private`: no other user of this machine may read it. Objects have the permissions of
        their store.
        """

    def read(self, path: str, *, at_most: int = MAX_FILE_BYTES) -> pa.Buffer:
        """Return the whole file. Raises StoreError for one of more than `at_most` bytes."""

    def digest(self, path: str) -> str:
        """Return the digest of a file that may be larger than memory. Raises as `read`."""

    def exists(self, path: str) -> bool:
        """Return whether the file is there."""

    def remove(self, path: str) -> None:
        """Remove the file if it is there."""

    def files(self, directory: str) -> Iterator[StoredFile]:
        """Give all finished files beneath a directory, none if it does not exist."""

    def locate(self, path: str) -> str:
        """Return the file's name for people: a path or a URI."""


def split_uri(where: str) -> urllib.parse.SplitResult | None:
    """Return the parts of a storage's URI, None for a path. Raises StoreError for neither."""
    try:
        os.fsencode(where)  # JSON may hold half of a character
        return urllib.parse.urlsplit(where) if "://" in where else None
    except ValueError as error:
        raise StoreError(
            f"storage {where!r:.200} is no URI ({one_line(error)[:REASON_CHARACTERS]}); give one "
            "like s3://bucket/run"
        ) from error


@functools.cache
def open_storage(where: str) -> Storage:
    """Return the storage of a URI or path, one client for the whole process. Do not contact it yet.

    Raises StoreError for a scheme whose writes are not atomic, a URI with credentials, without a
    bucket or with an option that is none of OPTIONS, and a text that is no URI.
    """
    parts = split_uri(where)
    if parts is None:
        return LocalStorage(Path(where).absolute())
    names = [name.lower() for name, _ in _options(parts)]
    if parts.username or parts.password or any(map(CREDENTIAL.search, names)):
        raise StoreError(
            f"a {parts.scheme} URI with credentials would be stored in the run; set them in the "
            "environment"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise StoreError(
                f"storage {where} would be on a machine {parts.netloc}; of this machine it is "
                f"file:///{parts.netloc}{parts.path}"
            )
        return LocalStorage(Path(urllib.parse.unquote(parts.path)).absolute())
    if parts.scheme not in OBJECT_STORES:
        raise StoreError(
            f"storage {where}: {parts.scheme} is not one of file, {', '.join(OBJECT_STORES)}; use "
            "one of them"
        )
    if not parts.netloc:
        raise StoreError(f"storage {where} names no bucket; give {parts.scheme}://BUCKET/NAME")
    _check_remote(parts)
    return RemoteStorage(where)


def _options(parts: urllib.parse.SplitResult) -> list[tuple[str, str]]:
    return urllib.parse.parse_qsl(parts.query, keep_blank_values=True)


def _check_remote(parts: urllib.parse.SplitResult) -> None:
    """Raise StoreError for a URI that Arrow could understand otherwise, or that is sent a token."""
    kind = {"gcs": "gs", "abfss": "abfs"}.get(parts.scheme, parts.scheme)
    options = _options(parts)
    for text in (urllib.parse.unquote(parts.path), *(text for pair in options for text in pair)):
        if CONTROL.search(text):
            raise StoreError(
                f"storage {parts.geturl()!r:.200} has control characters in it; remove them"
            )
    names = [name for name, _ in options]
    unknown = [name for name in names if name not in OPTIONS[kind]]
    if unknown or len(names) > len(set(names)):
        named = one_line((unknown or names)[0])[:REASON_CHARACTERS]
        raise StoreError(
            f"the options of a {kind}:// URI are {', '.join(OPTIONS[kind])}, each once: leave "
            f"{named!r} out. Only s3:// may name a server; any other would be sent the token of "
            "your login"
        )
    if not (AZURE_BUCKET if kind == "abfs" else BUCKET).fullmatch(parts.netloc):
        named = one_line(parts.netloc)[:REASON_CHARACTERS]
        raise StoreError(f"storage {named!r} is no {kind}:// bucket; give {kind}://BUCKET/NAME")


def read_or_none(storage: Storage, path: str, *, at_most: int) -> bytes | None:
    """Return the content of a file, None if it is not there. Raises UnavailableError."""
    try:
        data: bytes = storage.read(path, at_most=at_most).to_pybytes()
    except UnavailableError:
        raise
    except StoreError:
        return None
    return data


def make_place(storage: Storage) -> None:
    """Make the directory of a `file://` storage. Raises StoreError if it is another user's."""
    if isinstance(storage, LocalStorage):
        check_own_directory(storage.root, is_made=False)
        make_directory(storage.root, beneath=storage.root)
        check_own_directory(storage.root)


def check_own_storage(storage: Storage) -> None:
    """Raise StoreError for the directory of a storage that another user could exchange.

    It was this user's when the run was made, and may have been lost since: what lies in /tmp goes
    with a restart, and its name can be taken.
    """
    if isinstance(storage, LocalStorage):
        # It may be another user's, as of a team's run, but not in a directory for all.
        instead = "move that away, and put your own back from a backup"
        check_own_directory(storage.root, may_be_anothers=True, instead=instead)


class LocalStorage:
    """Files in the run directory or another one. No path leads out of it, also by no link."""

    def __init__(self, root: Path) -> None:
        if "\0" in str(root):  # JSON and %00 may hold one
            raise StoreError(
                f"storage {str(root)!r:.200} has a null byte in it, so it is no directory; give "
                "another one"
            )
        self.root = root

    def write(self, path: str, data: pa.Buffer | bytes, *, is_private: bool = False) -> None:
        # `make_place` makes it, once. Beneath the mount point of a volume nobody would find a file.
        if not self.root.is_dir():
            raise UnavailableError(f"{self.root} is not there; mount the volume, or check the path")
        target = self.root / path
        make_directory(target.parent, beneath=self.root)
        mode = PRIVATE if is_private else READ_ONLY
        write_atomically(target, memoryview(data), mode=mode, beneath=self.root)

    def read(self, path: str, *, at_most: int = MAX_FILE_BYTES) -> pa.Buffer:
        with self._opened_parent(path) as (directory, name):
            data = beneath.read_bytes_in(directory, name, path=self.root / path, at_most=at_most)
            return pa.py_buffer(data)

    def digest(self, path: str) -> str:
        with self._opened_parent(path) as (directory, name):
            return beneath.digest_in(directory, name, path=self.root / path, at_most=MAX_FILE_BYTES)

    @contextmanager
    def _opened_parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Give the descriptor of the directory that holds a file, and the name in it.

        No link of another user leads there but to a directory of theirs: of a dataset that they
        name, rows of a private one would get into a run that they may read.
        """
        try:
            with (
                opened_by_own_links(self.root, may_lead_home=True) as (root, _),
                beneath.opened_parent_below(root, self.root / path, root=self.root) as opened,
            ):
                yield opened
        except UnsafePathError:
            raise
        # It is gone, or no file of ours.
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise StoreError(
                f"{self.root / path} cannot be read: {error.strerror}; restore it from a backup"
            ) from error
        except OSError as error:
            raise _unreadable(error, self.root / path) from error
        except MemoryError as error:
            raise UnavailableError(
                f"{self.root / path} does not fit into the free memory; free some, then retry"
            ) from error

    def exists(self, path: str) -> bool:
        return beneath.is_file(self.root / path, root=self.root)

    def locate(self, path: str) -> str:
        return str(self.root / path)

    def remove(self, path: str) -> None:
        try:
            beneath.remove(self.root / path, root=self.root)
        except UnsafePathError:
            raise
        except OSError as error:
            raise StoreError(
                f"cannot remove {self.root / path}: {error.strerror}; fix the permissions"
            ) from error

    def files(self, directory: str) -> Iterator[StoredFile]:
        try:
            for path, status in beneath.walk(self.root / directory, root=self.root):
                if stat.S_ISREG(status.st_mode) and not path.name.endswith(TEMPORARY_SUFFIX):
                    yield StoredFile(
                        path=path.relative_to(self.root).as_posix(),
                        n_bytes=status.st_size,
                        modified_us=status.st_mtime_ns // 1_000,
                    )
        except UnsafePathError:
            raise
        except OSError as error:  # a directory that cannot be listed is not left out
            raise _unreadable(error, error.filename or self.root / directory) from error


class RemoteStorage:
    """Objects below a URI. Each call ends within DEADLINE_S and the time for its bytes.

    The first call makes the client. A request that was given up may still change its object. So
    the next one that changes the same object waits for its end.
    """

    def __init__(self, uri: str) -> None:
        parts = urllib.parse.urlsplit(uri)
        self._name = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        options = dict(_options(parts))
        if parts.scheme == "s3":
            options |= _s3_options(options)
        # Written anew, so that Arrow reads the names and values that were checked.
        query = urllib.parse.urlencode(options, quote_via=urllib.parse.quote)
        self._uri = f"{self._name}?{query}" if query else self._name
        self._given_up: dict[str, threading.Thread] = {}  # requests that change an object, by path

    def write(self, path: str, data: pa.Buffer | bytes, *, is_private: bool = False) -> None:
        def put(remote: pafs.FileSystem, at: str) -> None:
            with remote.open_output_stream(at, compression=None) as stream:
                stream.write(data)

        self._ask("write", path, put, n_bytes=len(data), changes=True)

    def read(self, path: str, *, at_most: int = MAX_FILE_BYTES) -> pa.Buffer:
        def fill(remote: pafs.FileSystem, at: str, *, first: int, room: memoryview) -> int:
            file.seek(first)
            return file.readinto(room)

        began_s = time.monotonic()
        # This asks for the size. It is not closed here, because a thread may still be reading.
        file = self._ask("read", path, lambda remote, at: remote.open_input_file(at))
        n_bytes = file.size()
        if n_bytes > at_most:
            name = self.locate(path)
            raise StoreError(
                f"{name} has {n_bytes:,} bytes, more than {at_most:,}: no run wrote it; restore it "
                "from a backup"
            )
        whole = pa.allocate_buffer(n_bytes)
        room, mark = memoryview(whole).cast("B"), os.urandom(MARK_BYTES)
        for first in range(0, n_bytes, PIECE_BYTES):
            # A server that drips is waited for until the deadline of a piece, not of what it says.
            piece = room[first : first + PIECE_BYTES]
            # Arrow takes an answer that is too short for a whole one: the rest is what was there.
            piece[-MARK_BYTES:] = mark[-len(piece) :]
            get = functools.partial(fill, first=first, room=piece)
            end = first + len(piece)
            n_read = self._ask("read", path, get, n_bytes=end, began_s=began_s)
            is_short = len(piece) >= MARK_BYTES and piece[-MARK_BYTES:] == mark
            if is_short or n_read < len(piece):
                raise UnavailableError(
                    f"cannot read {self.locate(path)}: the answer is shorter than it says; check "
                    "the URI, and who answers there"
                )
        return whole

    def digest(self, path: str) -> str:
        return file_digest(self.read(path))

    def exists(self, path: str) -> bool:
        info = self._ask("look for", path, lambda remote, at: remote.get_file_info(at))
        return bool(info.type == pafs.FileType.File)

    def remove(self, path: str) -> None:
        def delete(remote: pafs.FileSystem, at: str) -> None:
            with suppress(FileNotFoundError):
                remote.delete_file(at)

        self._ask("remove", path, delete, changes=True)

    def files(self, directory: str) -> Iterator[StoredFile]:
        def list_all(remote: pafs.FileSystem, at: str) -> list[pafs.FileInfo]:
            selector = pafs.FileSelector(at.rstrip("/"), recursive=True, allow_not_found=True)
            return remote.get_file_info(selector)

        found = self._ask("list", directory, list_all)
        for info in sorted(found, key=lambda info: info.path):
            if info.type == pafs.FileType.File:
                path = info.path.removeprefix(f"{self._client[1]}/")
                yield StoredFile(path=path, n_bytes=info.size, modified_us=info.mtime_ns // 1_000)

    def locate(self, path: str) -> str:
        return f"{self._name}/{path}"

    @functools.cached_property
    def _client(self) -> tuple[pafs.FileSystem, str]:
        return pafs.FileSystem.from_uri(self._uri)  # may ask the network for the bucket's region

    def _ask(
        self,
        doing: str,
        path: str,
        call: Callable[[pafs.FileSystem, str], Answer],
        *,
        n_bytes: int = 0,
        began_s: float | None = None,
        changes: bool = False,
    ) -> Answer:
        """Return the answer of `call` to the client and the object. Retry until the deadline.

        Each try has a thread of its own, because Arrow waits 100 s for a silent server.
        """
        limit_s = DEADLINE_S + n_bytes / SLOWEST_BYTES_PER_S
        deadline_s = (time.monotonic() if began_s is None else began_s) + limit_s
        reason = "no answer"
        if changes and (before := self._given_up.get(path)) is not None:
            before.join(deadline_s - time.monotonic())
        while (left_s := deadline_s - time.monotonic()) > 0:
            answer: Future[Answer] = Future()
            request = threading.Thread(target=self._settle, args=(answer, call, path), daemon=True)
            if changes:
                self._given_up[path] = request  # until it is answered
            request.start()
            try:
                found = answer.result(timeout=left_s)
                if changes:
                    self._given_up.pop(path, None)
                return found
            except TimeoutError:
                break
            except (OSError, ValueError, pa.ArrowException) as error:
                reason = one_line(error)
                if (final := self._final_error(error, f"{doing} {self.locate(path)}")) is not None:
                    raise final from error
                time.sleep(min(RETRY_AFTER_S, left_s))
        raise UnavailableError(
            f"cannot {doing} {self.locate(path)} within {limit_s:.0f} s: {reason}; nothing "
            "committed is lost, start again when the storage is back"
        )

    @staticmethod
    def _final_error(error: Exception, doing: str) -> StoreError | None:
        """Return the error to raise for an answer that no retry can change, None for any other."""
        reason = one_line(error)
        if isinstance(error, FileNotFoundError):
            return StoreError(f"cannot {doing}: it is not there; restore it from a backup")
        if TOO_LONG in reason:
            return UnavailableError(
                f"cannot {doing}: the answer is longer than it says, or than memory; check the "
                "URI, and who answers there"
            )
        if FINAL.search(reason) or isinstance(error, ValueError):
            return UnavailableError(
                f"cannot {doing}: {reason}; check the URI, and the credentials in the environment"
            )
        return None

    def _settle(
        self, answer: Future[Answer], call: Callable[[pafs.FileSystem, str], Answer], path: str
    ) -> None:
        try:
            remote, base = self._client
            answer.set_result(call(remote, f"{base}/{path}"))
        except (OSError, ValueError, pa.ArrowException) as error:
            answer.set_exception(error)


def _s3_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return more options for Arrow. A server of one's own leads its client nowhere else.

    Arrow would follow it to any address that this machine reaches, with AWS_SESSION_TOKEN. It has
    no option against that but the region, so a server that needs another region can still do it.
    """
    # One PUT for a file of up to 5 MB, instead of three requests of a multipart upload.
    more = {"allow_delayed_open": "true"}
    if "endpoint_override" in given and given.get("region", "") in ("", USUAL_REGION):
        more["region"] = WITHOUT_REDIRECTS
    return more


def _unreadable(error: OSError, path: Path | str) -> UnavailableError:
    return UnavailableError(
        f"{path} cannot be read now: {error.strerror}; make it readable, then retry"
    )
