"""Talk to the Hugging Face Hub in a process of its own: `python -m driver.hub_process REQUEST`.

It prints an `Answer` as one line of JSON. When its parent writes GO, it downloads the files and
prints another. A process, because a download in a thread would survive Ctrl-C.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from printable import REASON_CHARACTERS, one_line

GO = "go"
PARTIAL = ".partial"
MAX_HTTP_BYTES = 50e9  # larger files are left to huggingface_hub's own transfer
PLAIN_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,127}")
LFS_DIGEST = re.compile("[0-9a-f]{64}")  # an ETag that is the SHA-256 of the content


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The Hub's answer about a repository, or the reason why there is none."""

    commit: str | None = None
    n_files: int = 0  # to be downloaded
    n_bytes: int = 0  # of these files, less what an earlier download left
    fault: str = ""  # in one line; "" if the Hub answered
    is_refused: bool = False  # there is no such repository, or the Hub wants a token


def main(request: dict[str, Any]) -> None:
    """Answer for the arguments of `snapshot_download`, and download them when told to."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    _refuse_other_names()
    try:
        files = snapshot_download(**request, dry_run=True)
        missing = [file for file in files if file.will_download]
        commit = files[0].commit_hash if files else request["revision"]
        n_bytes = sum(file.file_size or 0 for file in missing) - _partial_bytes(request)
        _print(Answer(commit=commit, n_files=len(missing), n_bytes=max(0, n_bytes)))
        if sys.stdin.readline().strip() != GO:
            return
        if sys.stderr.isatty():
            enable_progress_bars()
        for file in missing:
            is_weights = file.filename.endswith(".safetensors")
            if is_weights and (file.file_size or 0) <= MAX_HTTP_BYTES:
                fetch(file.filename, {**request, "revision": commit})
        snapshot_download(**request)
        _print(Answer(commit=commit))
    except Exception as error:  # noqa: BLE001  # the border to the network: passed on as the fault
        _print(_fault(error.__cause__ or error))


def _refuse_other_names() -> None:
    """Have huggingface_hub refuse an answer whose ETag or commit could lead out of its cache.

    Both become names of files there, and a mirror of the Hub may say anything.
    """
    from huggingface_hub import file_download

    ask = file_download.get_hf_file_metadata

    def ask_and_check(*given: Any, **settings: Any) -> file_download.HfFileMetadata:
        known = ask(*given, **settings)
        for name in (known.etag, known.commit_hash):
            if name is not None and not PLAIN_NAME.fullmatch(name):
                raise ValueError(
                    f"the server names a content or a commit {name!r:.80}, which is no plain name; "
                    "use another server (HF_ENDPOINT)"
                )
        return known

    file_download.get_hf_file_metadata = ask_and_check


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


def _blobs(request: dict[str, Any]) -> Path:
    """Return the cache directory of a repository's file contents, which are named by ETag."""
    return Path(request["cache_dir"]) / f"models--{request['repo_id'].replace('/', '--')}" / "blobs"


def _partial_bytes(request: dict[str, Any]) -> int:
    return sum(path.stat().st_size for path in _blobs(request).glob(f"*{PARTIAL}"))


def fetch(name: str, request: dict[str, Any]) -> None:
    """Download one file into the cache, from where an earlier process stopped.

    huggingface_hub begins a file anew in every process. It finds this one, and only links it.
    """
    from huggingface_hub import file_download, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(request["repo_id"], name, revision=request["revision"])
    known = file_download.get_hf_file_metadata(url)
    if known.etag is None or known.size is None:
        return
    whole = _blobs(request) / known.etag
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
            url, file, resume_size=file.tell(), headers=build_hf_headers(), expected_size=known.size
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
    main(json.loads(sys.argv[1]))
