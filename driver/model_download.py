"""Download a model that is named by its Hugging Face repository,
`model.path=Qwen/Qwen2.5-1.5B-Instruct`.

    config = hub.with_model(config, console)      # model.path is now a directory

A directory that exists is taken before a repository of the same name. The files lie in the cache of
huggingface_hub, in a directory whose name ends with the commit,
`models--Qwen--Qwen2.5-1.5B-Instruct/snapshots/COMMIT`. The run records this path, so a resumed run
uses the same commit. If the cache has lost it, the recorded path says what to download again.

The process that talks to the Hub is this file run as a script, because a download in a thread would
survive Ctrl-C. A stopped download goes on where it was.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from store import objects, parse_object

# What the learner and vLLM read. Repositories also hold the weights in other formats, and in
# folders.
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
OTHERS = ["*/*", "consolidated*"]
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# pages of the Hub itself, and usual directories
NO_OWNERS = ("datasets", "models", "runs", "spaces")
SNAPSHOT = re.compile(
    r".*models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})/?"
)
GO = "go"
PARTIAL = ".partial"
MOST_BYTES = 50e9  # of a file by plain HTTP
LFS_DIGEST = re.compile("[0-9a-f]{64}")  # an ETag that is the SHA-256 of the content
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")  # weights that an index names
NEEDED = ("config.json", "tokenizer_config.json", "*.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    name: str  # OWNER/NAME
    commit: str | None  # None: the newest

    def __str__(self) -> str:
        return f"{self.name} at commit {self.commit[:8]}" if self.commit else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer of the Hub about a repository, or the reason why there is none."""

    commit: str | None = None
    n_files: int = 0  # to be downloaded
    n_bytes: int = 0  # of these files, less what an earlier download left
    fault: str = ""  # in one line; "" if the Hub answered
    # the Hub answered that there is no such repository, or that it wants a token
    is_refused: bool = False


def named(path: str) -> Repository | None:
    """Return the repository that `path` means. None for a path that exists, and for one that is no
    repository's name.

    >>> named("Qwen/Qwen2.5-1.5B-Instruct")
    Repository(name='Qwen/Qwen2.5-1.5B-Instruct', commit=None)
    """
    if not path or Path(path).exists():
        return None
    if found := SNAPSHOT.fullmatch(path):
        return Repository(name=f"{found['owner']}/{found['name']}", commit=found["commit"])
    if not NAME.fullmatch(path) or path.partition("/")[0] in NO_OWNERS:
        return None
    return Repository(name=path, commit=None)


def pinned(repository: Repository, recorded: str) -> Repository:
    """Return the repository at the commit that a run recorded as its model.path, if it is the same
    repository.
    """
    found = SNAPSHOT.fullmatch(recorded)
    if (
        repository.commit is None
        and found
        and f"{found['owner']}/{found['name']}" == repository.name
    ):
        return replace(repository, commit=found["commit"])
    return repository


def cache() -> Path:
    """Return the directory in which huggingface_hub keeps what it has downloaded."""
    from huggingface_hub import constants

    return Path(os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE).expanduser().resolve()


def directory(repository: Repository) -> Path:
    """Return the place of a commit in the cache, whether it is there or not."""
    assert repository.commit is not None, "a place belongs to a commit"
    return (
        cache() / f"models--{repository.name.replace('/', '--')}" / "snapshots" / repository.commit
    )


def find(repository: Repository) -> Path | None:
    """Return the directory of a model whose files are all in the cache. Never ask the Hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(**_asked(repository), local_files_only=True)
    # also an incomplete one; a name that the Hub cannot have
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return Path(path) if lacks(Path(path)) is None else None


def lacks(model: Path) -> str | None:
    """Return what a model's directory lacks, None if it is whole."""
    index = model / "model.safetensors.index.json"
    try:
        named = (
            objects(parse_object(index.read_bytes()), "weight_map").values()
            if index.is_file()
            else ()
        )
        shards = {name for name in named if isinstance(name, str) and SHARD.fullmatch(name)}
        if strange := [name for name in named if name not in shards]:
            raise ValueError(
                f"weight_map names {strange[0]!r:.80}, not a .safetensors file beside it"
            )
    except (OSError, ValueError, TypeError) as error:  # TypeError: a list or a number for a name
        return f"a readable {index.name} ({' '.join(str(error).split())[:200]})"
    for pattern in NEEDED:
        if not any(path.is_file() for path in model.glob(pattern)):
            return pattern
    # The names are a stranger's: they are looked up, and never searched for as patterns.
    return next((name for name in sorted(shards) if not (model / name).is_file()), None)


@contextmanager
def asked_once(repository: Repository) -> Iterator[tuple[Answer, Callable[[], Answer]]]:
    """Ask the Hub how much there is to download. Give the answer, and a function that downloads it.

    The bar of huggingface_hub shows the progress in a terminal. Leaving the context ends the
    process that talks to the Hub.
    """
    command = [sys.executable, __file__, json.dumps(_asked(repository))]
    # A session of its own: Ctrl-C is for this process, which then ends that one.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        said, stdin = process.stdout, process.stdin

        def download() -> Answer:
            with suppress(BrokenPipeError):  # it has ended, and the next line says so
                stdin.write(f"{GO}\n")
                stdin.flush()
            return _answer(said.readline())

        try:
            yield _answer(said.readline()), download
        finally:
            process.kill()


def look(repository: Repository) -> Answer:
    """Ask the Hub how much there is to download."""
    with asked_once(repository) as (answer, _):
        return answer


def _answer(line: str) -> Answer:
    return (
        Answer(**json.loads(line))
        if line.strip()
        else Answer(fault="the process that asks it has ended")
    )


def unreachable(repository: Repository, answer: Answer) -> str:
    """Return in one line why a model cannot be had, and how to get it."""
    place = f"models/{repository.name.partition('/')[2]}"
    commit = f" --revision {repository.commit}" if repository.commit else ""
    if answer.is_refused:
        return (
            f"model.path={repository.name!r} is no directory here, and the Hugging Face Hub "
            f"refuses it: {answer.fault}; check "
            "the name, give a directory, or log in with `hf auth login`"
        )
    return (
        f"model.path={repository.name!r} is not downloaded and the Hugging Face Hub cannot be "
        f"reached ({answer.fault}); where "
        f"there is a network, run `hf download {repository.name}{commit} --local-dir {place}`, "
        "bring the directory here, "
        f"and give model.path={place}"
    )


def _asked(repository: Repository) -> dict[str, Any]:
    return {
        "repo_id": repository.name,
        "revision": repository.commit,
        "cache_dir": str(cache()),
        "allow_patterns": FILES,
        "ignore_patterns": OTHERS,
    }


def _main(asked: dict[str, Any]) -> None:
    """Print an Answer as one line of JSON. When the parent says GO, download the files and print
    another.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    try:
        files = snapshot_download(**asked, dry_run=True)
        missing = [file for file in files if file.will_download]
        commit = files[0].commit_hash if files else asked["revision"]
        n_bytes = sum(file.file_size or 0 for file in missing) - _partial_bytes(asked)
        _print(Answer(commit=commit, n_files=len(missing), n_bytes=max(0, n_bytes)))
        if sys.stdin.readline().strip() != GO:
            return
        if sys.stderr.isatty():
            enable_progress_bars()
        for file in missing:
            if file.filename.endswith(".safetensors") and (file.file_size or 0) <= MOST_BYTES:
                _fetch(file.filename, {**asked, "revision": commit})
        snapshot_download(**asked)
        _print(Answer(commit=commit))
    except Exception as error:  # noqa: BLE001  # the border to the network: everything is passed on as the fault
        _print(_failed(error.__cause__ or error))


def _failed(error: BaseException) -> Answer:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    refusals = (GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError)
    words = " ".join(str(error).split())[:300]
    return Answer(fault=f"{type(error).__name__}: {words}", is_refused=isinstance(error, refusals))


def _print(answer: Answer) -> None:
    print(json.dumps(asdict(answer)), flush=True)


def _blobs(asked: dict[str, Any]) -> Path:
    """Return where huggingface_hub keeps the contents of a repository's files, by their ETag."""
    return Path(asked["cache_dir"]) / f"models--{asked['repo_id'].replace('/', '--')}" / "blobs"


def _partial_bytes(asked: dict[str, Any]) -> int:
    return sum(path.stat().st_size for path in _blobs(asked).glob(f"*{PARTIAL}"))


def _fetch(name: str, asked: dict[str, Any]) -> None:
    """Download one file into the cache, from where an earlier process stopped.

    huggingface_hub itself begins a file anew in every process. It finds this one, and only links
    it.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(asked["repo_id"], name, revision=asked["revision"])
    known = get_hf_file_metadata(url)
    if known.etag is None or known.size is None:
        return
    whole = _blobs(asked) / known.etag
    whole.parent.mkdir(parents=True, exist_ok=True)
    partial = whole.with_name(known.etag + PARTIAL)
    with partial.open("ab") as file:
        # another run may be downloading it; then it is whole when that one is done
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
    _main(json.loads(sys.argv[1]))
