"""Find the model of a run: a directory, or a Hugging Face repository that is downloaded.

    config = with_model(config, console)      # model.path is a directory from here on

An existing directory goes before a repository of the same name. The files lie in the cache of
huggingface_hub, in a directory whose name ends with the commit,
`models--Qwen--Qwen2.5-1.5B-Instruct/snapshots/COMMIT`. The run records this path, so a resumed run
uses the same commit. If the cache has lost it, the recorded path says what to download again.
`hub_process.py` downloads; a stopped download continues at its last byte.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

import configs
from configs import Config, ConfigError
from driver.hub_process import GO, Answer, Request
from driver.preflight import DiskNeed, disk_faults
from driver.progress import said_with_spinner
from printable import REASON_CHARACTERS, one_line
from store import RunLayout

ROOT = Path(__file__).resolve().parents[1]
# The files that the learner and vLLM read. Repositories also have the weights in other formats.
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
IGNORED = ["*/*", "consolidated*"]
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Pages of the Hub itself, and usual directories, are no owners of repositories.
NO_OWNERS = ("datasets", "models", "runs", "spaces")
SNAPSHOT = re.compile(
    r".*models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})/?"
)
NEEDED = ("config.json", "tokenizer_config.json", "*.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """A model repository of the Hub."""

    name: str  # OWNER/NAME
    commit: str | None  # None: the newest

    def __str__(self) -> str:
        return f"{self.name} at commit {self.commit[:8]}" if self.commit else self.name


def with_model(config: Config, console: Console) -> Config:
    """Return the config with its model's directory; download a repository first.

    Raises ConfigError, also if an engine's GPUs cannot divide the model's attention heads.
    """
    repository = _repository(config)
    if repository is None:
        return config
    found = find(repository)
    if found is None:
        _check_partial(config, repository)
        found = _download(repository, console)
    return _with_path(config, found)


def try_model(config: Config) -> tuple[Config, list[str], list[DiskNeed]]:
    """Look at the model for a dry run.

    Returns the config with its model's directory, lines about a model that is missing here, and the
    disk space of its download. Raises ConfigError for a directory that is no model, and for a
    repository that the Hub does not give.
    """
    path = config.model.path
    repository = _repository(config)
    if repository is None:
        if path and not Path(path).exists():
            missing = [f"model.path={path}: there is no such directory here", *_unchecked(config)]
            return config, missing, []
        configs.check_model_path(config)
        return config, [], []
    found = find(repository)
    if found is not None:
        config = _with_path(config, found)
        configs.check_model_path(config)
        return config, [], []
    _check_partial(config, repository)
    if repository.commit is not None:  # the run recorded it, so it is no other model
        config = _with_path(config, directory(repository))
    answer = look(repository)
    if answer.is_refused:
        raise ConfigError(_unreachable(repository, answer))
    if answer.fault:
        return config, [_unreachable(repository, answer), *_unchecked(config)], []
    size = f"{answer.n_files} files, {answer.n_bytes / configs.GIB:.1f} GiB"
    missing = [
        f"model.path={repository.name} is not downloaded; a start downloads it ({size}, to "
        f"{cache()})",
        *_unchecked(config),
    ]
    return config, missing, [_download_need(answer.n_bytes)]


def _unchecked(config: Config) -> list[str]:
    """Return a line if the model's config.json, which is not here, may refuse the settings."""
    path, settings = config.model.path, " and with ".join(configs.refused_for_vision(config))
    if not settings:
        return []
    if configs.is_vision_model(path):
        return [
            f"model.path={path} is a vision model by its name, so it is refused with {settings} "
            "once it is here"
        ]
    if configs.known_shape(config) is not None:  # a name that we know
        return []
    return [
        f"whether model.path={path} reads images is checked once it is here; a vision model is "
        f"refused with {settings}"
    ]


def _check_partial(config: Config, repository: Repository) -> None:
    """Check a model by its config.json, if the cache has that and not yet the weights.

    Never asks the Hub. Raises ConfigError for a model that cannot be trained with these settings.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):  # the Hub refuses such a name, with its reason
        file = try_to_load_from_cache(
            repository.name, "config.json", cache_dir=cache(), revision=repository.commit
        )
        if isinstance(file, str):
            configs.check_model_path(_with_path(config, Path(file).parent))


def _with_path(config: Config, path: Path) -> Config:
    """Return the config with the model's directory. Raises ConfigError if no engine can split it.

    Of a repository `check_engine_arguments` knew the name only. Without this check an engine would
    fail minutes later, after Ray has started.
    """
    config = replace(config, model=replace(config.model, path=str(path)))
    configs.check_heads(config)
    return config


def _repository(config: Config) -> Repository | None:
    """Return the repository that model.path names, at the commit that the run began with."""
    repository, root = named(config.model.path), Path(config.run_dir)
    if repository is None or not RunLayout.exists(root):
        return repository
    layout = RunLayout.open(root)
    layout.check_trusted()
    recorded = configs.from_yaml(layout.info.config_yaml)
    return pinned(repository, recorded.model.path)


def _download(repository: Repository, console: Console) -> Path:
    with asked_once(repository) as (answer, download):
        if answer.fault:
            raise ConfigError(_unreachable(repository, answer))
        if faults := disk_faults([_download_need(answer.n_bytes)]):
            raise ConfigError(f"model.path={repository.name}: {faults[0]}")
        repository = replace(repository, commit=answer.commit)
        size = f"{answer.n_files} files, {answer.n_bytes / configs.GIB:.1f} GiB"
        doing = f"downloading {repository}, {size}, to {cache()}"
        console.print(f"{doing}; if it is stopped, the same command goes on")
        # In a terminal, huggingface_hub shows a progress bar.
        with nullcontext() if console.is_terminal else said_with_spinner(doing, console):
            answer = download()
    if answer.fault:
        raise ConfigError(_unreachable(repository, answer))
    found = find(repository)
    if found is None:
        raise ConfigError(
            f"model.path={repository.name!r} lacks {lacks(directory(repository))} on the Hugging "
            "Face Hub; give another model"
        )
    return found


def _download_need(n_bytes: int) -> DiskNeed:
    return DiskNeed(
        name="the download of the model",
        place=str(cache()),
        directory=cache(),
        n_bytes=n_bytes,
        remedy="set HF_HUB_CACHE to a directory on a larger disk",
    )


def named(path: str) -> Repository | None:
    """Return the repository that `path` means; None for an existing path or no repository's name.

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
    """Return the repository at the commit of a recorded model.path, if that is the same one."""
    found = SNAPSHOT.fullmatch(recorded)
    if repository.commit or not found or f"{found['owner']}/{found['name']}" != repository.name:
        return repository
    return replace(repository, commit=found["commit"])


def cache() -> Path:
    """Return the directory in which huggingface_hub keeps its downloads."""
    from huggingface_hub import constants

    return Path(os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE).expanduser().resolve()


def directory(repository: Repository) -> Path:
    """Return the directory of a commit in the cache; it need not exist."""
    assert repository.commit is not None, "a directory belongs to a commit"
    folder = f"models--{repository.name.replace('/', '--')}"
    return cache() / folder / "snapshots" / repository.commit


def find(repository: Repository) -> Path | None:
    """Return the directory of a model whose files are all in the cache. Never asks the Hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(**asdict(_request(repository)), local_files_only=True))
    # an incomplete one; a name that the Hub cannot have
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    # The commit is what the cache says of the newest one. A mirror may have made it a path.
    commit = directory(replace(repository, commit=path.name))
    return path if path == commit and lacks(path) is None else None


def lacks(model: Path) -> str | None:
    """Return a file that a model's directory lacks, None if it is whole."""
    index = model / "model.safetensors.index.json"
    try:
        names: set[str] = set()
        if index.is_file():
            names = configs.files_of_index(index)
    except (OSError, ValueError) as error:
        return f"a readable {index.name} ({one_line(error)[:REASON_CHARACTERS]})"
    for pattern in NEEDED:
        if not any(path.is_file() for path in model.glob(pattern)):
            return pattern
    # The index may be a stranger's: its names are looked up, and never used as patterns.
    return next((name for name in sorted(names) if not (model / name).is_file()), None)


@contextmanager
def asked_once(repository: Repository) -> Iterator[tuple[Answer, Callable[[], Answer]]]:
    """Ask the Hub for the size of a download. Yields the answer, and a function that downloads.

    Leaving the context ends the process that talks to the Hub.
    """
    command = [
        sys.executable,
        "-P",  # not of the current directory
        "-m",
        "driver.hub_process",
        json.dumps(asdict(_request(repository))),
    ]
    # The user's directory stays the current one: HF_HOME may be relative.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which then ends that one
    ) as process:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        stdout, stdin = process.stdout, process.stdin

        def download() -> Answer:
            with suppress(BrokenPipeError):  # it has ended, and `_answer` says so
                stdin.write(f"{GO}\n")
                stdin.flush()
            return _answer(stdout.readline())

        try:
            yield _answer(stdout.readline()), download
        finally:
            process.kill()


def look(repository: Repository) -> Answer:
    """Ask the Hub for the size of a download."""
    with asked_once(repository) as (answer, _):
        return answer


def _answer(line: str) -> Answer:
    if not line.strip():
        return Answer(fault="the process that asks it has ended")
    return Answer(**json.loads(line))


def _unreachable(repository: Repository, answer: Answer) -> str:
    """Return in one line why a model cannot be had, and how to get it."""
    if answer.is_refused:
        return (
            f"model.path={repository.name!r} is no directory here, and the Hugging Face Hub "
            f"refuses it: {answer.fault}; check the name, give a directory, or log in with "
            "`hf auth login`"
        )
    place = f"models/{repository.name.partition('/')[2]}"
    commit = f" --revision {repository.commit}" if repository.commit else ""
    return (
        f"model.path={repository.name!r} is not downloaded and the Hugging Face Hub cannot be "
        f"reached ({answer.fault}); where there is a network, run `hf download {repository.name}"
        f"{commit} --local-dir {place}`, bring the directory here, and give model.path={place}"
    )


def _request(repository: Repository) -> Request:
    return Request(
        repo_id=repository.name,
        revision=repository.commit,
        cache_dir=str(cache()),
        allow_patterns=FILES,
        ignore_patterns=IGNORED,
    )
