"""Talk to the Hugging Face Hub in a process of its own: `python -m driver.hub_process REQUEST`.

It prints an `Answer` as one line of JSON. When its parent writes GO, it downloads the files and
prints another. A process, because a download in a thread would survive Ctrl-C, and because its
writing is restricted: a mirror of the Hub (HF_ENDPOINT) may say anything, and huggingface_hub makes
names of files of much of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from printable import REASON_CHARACTERS, one_line, protect_terminal
from store import StoreError, limit_memory, restrict_writing

GO = "go"
PARTIAL = ".partial"
SHOWN_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,1000}")  # a progress bar shows it
MAX_HTTP_BYTES = 50e9  # larger files are left to huggingface_hub's own transfer
COMMIT = re.compile("[0-9a-f]{40}")
PLAIN_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,127}")
REMEDY = "use another server (HF_ENDPOINT)"
LEAST_FILE_BYTES = 1 << 24  # that may be written, if all files of a repository are smaller
MAX_FILES, MAX_BYTES = 100_000, 1 << 50  # of a repository, and of one file
LFS_DIGEST = re.compile("[0-9a-f]{64}")  # an ETag that is the SHA-256 of the content


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The wanted files of a repository: arguments of huggingface_hub's `snapshot_download`."""

    repo_id: str  # OWNER/NAME
    revision: str | None  # a commit; None: the newest
    cache_dir: str
    allow_patterns: list[str]
    ignore_patterns: list[str]

    @property
    def directory(self) -> Path:
        """Return the cache directory of the repository."""
        return Path(self.cache_dir) / f"models--{self.repo_id.replace('/', '--')}"

    @property
    def blobs(self) -> Path:
        """Return the cache directory of the repository's file contents, named by ETag."""
        return self.directory / "blobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The Hub's answer about a repository, or the reason why there is none."""

    commit: str | None = None
    n_files: int = 0  # to be downloaded
    n_bytes: int = 0  # of these files, less what an earlier download left
    fault: str = ""  # in one line; "" if the Hub answered
    is_refused: bool = False  # there is no such repository, or the Hub wants a token


def main(request: Request) -> None:
    """Say what is wanted and not here, and download it when told to."""
    protect_terminal()  # huggingface_hub logs what the server says
    limit_memory()  # and takes an answer of any size
    try:
        _write_below_only(Path(request.cache_dir), repository=request.directory)
    except (OSError, StoreError) as error:
        _print(Answer(fault=one_line(error)[:REASON_CHARACTERS]))
        return
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    _refuse_other_answers()
    try:
        files = snapshot_download(**asdict(request), dry_run=True)
        missing = [file for file in files if file.will_download]
        commit = files[0].commit_hash if files else request.revision
        n_bytes = sum(file.file_size or 0 for file in missing) - _partial_bytes(request)
        _print(Answer(commit=commit, n_files=len(missing), n_bytes=max(0, n_bytes)))
        if sys.stdin.readline().strip() != GO:
            return
        # An answer may have no end, whatever size was said.
        largest = max([LEAST_FILE_BYTES, *(file.file_size or 0 for file in missing)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        if sys.stderr.isatty():
            enable_progress_bars()
        for file in missing:
            is_weights = file.filename.endswith(".safetensors")
            if is_weights and (file.file_size or 0) <= MAX_HTTP_BYTES:
                fetch(file.filename, replace(request, revision=commit))
        snapshot_download(**asdict(request))
        _print(Answer(commit=commit))
    except Exception as error:  # noqa: BLE001  # the border to the network: passed on as the fault
        _print(_fault(error.__cause__ or error))


def _write_below_only(cache: Path, *, repository: Path) -> None:
    """Have the kernel refuse to write outside of the Hub's cache. Raises OSError, StoreError.

    Where the kernel has no Landlock, only the names are checked.
    """
    from huggingface_hub import constants

    xet = Path(constants.HF_XET_CACHE).expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # not every transfer needs it
        xet.mkdir(parents=True, exist_ok=True)
    # The user may have led the repository's directory to another disk.
    others = [place for place in (xet, repository) if place.is_dir()]
    restrict_writing([cache, *others, Path(os.devnull)])


def _refuse_other_answers() -> None:
    """Have huggingface_hub refuse what could lead out of its cache, or has no end.

    It makes names of files there of the commits, digests and ETags that the server says.
    """
    from huggingface_hub import HfApi, file_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import ModelInfo, RepoFile

    ask_head, ask_info, list_tree = (
        file_download.get_hf_file_metadata,
        HfApi.repo_info,
        HfApi.list_repo_tree,
    )

    def metadata(*given: Any, **settings: Any) -> file_download.HfFileMetadata:
        try:
            known = ask_head(*given, **settings)
        except HfHubHTTPError as error:
            _check_names(PLAIN_NAME, error.response.headers.get("X-Repo-Commit"))
            raise
        _check_names(PLAIN_NAME, known.etag, known.commit_hash)
        _check_size(known.size)
        return known

    def repo_info(*given: Any, **settings: Any) -> ModelInfo:
        info: ModelInfo = ask_info(*given, **settings)
        _check_names(COMMIT, info.sha)
        return info

    def tree(*given: Any, **settings: Any) -> Iterator[Any]:
        for n_files, entry in enumerate(list_tree(*given, **settings)):
            if n_files == MAX_FILES:
                raise ValueError(f"the server lists more than {MAX_FILES:,} files; {REMEDY}")
            if isinstance(entry, RepoFile):
                digest = None if entry.lfs is None else entry.lfs.sha256
                _check_names(PLAIN_NAME, entry.blob_id, digest, entry.xet_hash)
                _check_names(SHOWN_NAME, entry.path)
                _check_size(entry.size)
            yield entry

    file_download.get_hf_file_metadata = metadata
    HfApi.repo_info = repo_info
    HfApi.list_repo_tree = tree


def _check_names(pattern: re.Pattern[str], *names: str | None) -> None:
    for name in names:
        if name is not None and not (isinstance(name, str) and pattern.fullmatch(name)):
            raise ValueError(
                f"the server names a file, a content or a commit {name!r:.80}, which is no plain "
                f"name; {REMEDY}"
            ) from None


def _check_size(n_bytes: object) -> None:
    if n_bytes is not None and not (isinstance(n_bytes, int) and 0 <= n_bytes <= MAX_BYTES):
        raise ValueError(f"the server says that a file has {n_bytes!r:.40} bytes; {REMEDY}")


def _fault(error: BaseException) -> Answer:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    refusals = (GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError)
    words = one_line(error)[:REASON_CHARACTERS]
    return Answer(fault=f"{type(error).__name__}: {words}", is_refused=isinstance(error, refusals))


def _print(answer: Answer) -> None:
    print(json.dumps(asdict(answer)), flush=True)


def _partial_bytes(request: Request) -> int:
    return sum(path.stat().st_size for path in request.blobs.glob(f"*{PARTIAL}"))


def fetch(name: str, request: Request) -> None:
    """Download one file into the cache, from where an earlier process stopped.

    huggingface_hub begins a file anew in every process. It finds this one, and only links it.
    """
    from huggingface_hub import file_download, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(request.repo_id, name, revision=request.revision)
    known = file_download.get_hf_file_metadata(url)
    if known.etag is None or known.size is None:
        return
    whole = request.blobs / known.etag
    whole.parent.mkdir(parents=True, exist_ok=True)
    partial = whole.with_name(known.etag + PARTIAL)
    with partial.open("ab") as file:
        # Another run may be downloading the file; then it is whole when the lock is free.
        fcntl.flock(file, fcntl.LOCK_EX)
        if whole.exists():
            partial.unlink(missing_ok=True)
            return
        file.seek(0, os.SEEK_END)  # the other run has written since this file was opened
        if file.tell() > known.size:
            file.truncate(0)
            file.seek(0)
        http_get(
            url,
            file,
            resume_size=file.tell(),
            headers=build_hf_headers(),
            expected_size=known.size,
            displayed_filename=name,  # else that of the server's answer
        )
        file.flush()
        os.fsync(file.fileno())
        if LFS_DIGEST.fullmatch(known.etag) and _sha256(partial) != known.etag:
            partial.unlink()
            raise OSError(f"{name} was damaged on the way; the same command downloads it again")
        partial.rename(whole)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main(Request(**json.loads(sys.argv[1])))
