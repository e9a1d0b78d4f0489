"""Check the sources of offline training, import their groups, and copy their base policy.

A source is a run or a data set, `source=RUN[@where]`, also a URI of one, or a file of chats,
`source=chats.jsonl`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

import actors
import configs
from actors import chat_trajectories, is_chat_file, load_tokenizer, read_chats
from configs import Config, ConfigError, is_served
from printable import REASON_CHARACTERS, one_line
from store import (
    BASE_POLICY,
    OfflineRows,
    OfflineSource,
    RunLayout,
    digest_of_open,
    find_sources,
    group_uids,
    has_directory,
    limited_memory,
    local_directory,
    open_file_by_own_links,
    parse_source,
    run_at,
    take_sources,
    to_table,
)

TOKENIZER_FILE = "tokenizer_config.json"
CHATS_OF_TABLE = 256  # whose rows are made into one table
CHARACTERS_OF_DIGEST = 16  # in the name of a file's contents


def check_sources(config: Config, console: Console, *, forked: RunLayout | None = None) -> None:
    """Check that the sources exist, select groups and fit the model, before a run is made.

    `forked` is the run that it is a fork of, whose groups and base policy it has. Raises
    ConfigError, StoreError.
    """
    from learner import check_train_on  # here: it loads torch

    check_train_on(config.offline.train_on)
    with limited_memory(_places(config)):
        _check_each(config, console, forked=forked)


def _check_each(config: Config, console: Console, *, forked: RunLayout | None) -> None:
    """Read what the sources say about themselves, and compare it with the config."""
    _check_logprobs(config)
    base: Path | None = None
    known: frozenset[bytes] = frozenset()
    if forked is not None:
        base, known = _base_of_run(forked), group_uids(forked)
    if only_chats(config) and not config.model.path and base is None:
        with chat_texts(config) as texts:
            for _ in texts:  # the model whose template they are written with is not made
                pass
        return
    sources = _sources(config, console, model_path=lambda: _model_path(config, base))
    find_sources(sources, order=config.offline.order, known=known)
    _compare_tokens(config, console, model_path=_model_path(config, base))


def _check_logprobs(config: Config) -> None:
    """Raise ConfigError for a source without the log-probabilities that the loss reads."""
    for text in config.source:
        if _is_chats(text) and config.loss.policy != "behaviour_cloning":
            raise ConfigError(
                f"source={text} has chats that nobody sampled, so they have no log-probabilities "
                f"to learn from with loss.policy={config.loss.policy}; use "
                "loss.policy=behaviour_cloning"
            )
        layout = _run_of(text)
        if layout is None:
            continue
        theirs = _config_of(layout)
        if url := _setting(theirs, "endpoint.url"):
            raise ConfigError(
                f"source={text} was played by {_setting(theirs, 'endpoint.model')} at {url}, whose "
                "tokens and log-probabilities nobody has, so nothing can be trained from it; leave "
                "it out"
            )
        if _setting(theirs, "actors.scripted") and config.loss.policy != "behaviour_cloning":
            raise ConfigError(
                f"source={text} was played by a script, which has no log-probabilities to learn "
                f"from with loss.policy={config.loss.policy}; use loss.policy=behaviour_cloning"
            )


def _compare_tokens(config: Config, console: Console, *, model_path: Path) -> None:
    """Compare the tokenizer of each run among the sources with the model's."""
    for text in config.source:
        if _is_chats(text):
            continue
        base = _base_of(text)
        why = _why_not_compared(text, base=base, model_path=model_path)
        if base is None or why:
            console.print(f"tokens of {text} were not compared: {why}")
        else:
            check_same_tokenizer(base, model_path, source=text)


def _location(text: str) -> Path:
    """Return the directory of a source that is a run, also of a URI. See `run_at`."""
    return run_at(parse_source(text).location)


def _is_chats(text: str) -> bool:
    return is_chat_file(Path(parse_source(text).location))


def _sources(
    config: Config, console: Console, *, model_path: Callable[[], Path]
) -> list[OfflineSource]:
    sources = []
    for text in config.source:
        source = replace(parse_source(text), max_tokens=configs.max_model_tokens(config))
        if _is_chats(text):
            rows = partial(
                _chat_rows, Path(source.location), config, console, model_path=model_path
            )
            source = replace(source, rows=rows)
        sources.append(source)
    return sources


def _chat_rows(
    path: Path, config: Config, console: Console, *, model_path: Callable[[], Path]
) -> OfflineRows:
    """Return the chats of a file as rows of the store, and say which did not fit."""
    with open(open_file_by_own_links(path), "rb") as file:
        file_id = f"{path.name} {digest_of_open(file)[:CHARACTERS_OF_DIGEST]}"
    found = chat_trajectories(
        read_chats(path),
        load_tokenizer(str(model_path()), with_torch=True),
        file_id=file_id,
        thinking=config.prompt.thinking,
        max_tokens=configs.max_model_tokens(config),
    )
    if found.n_cut or found.n_left_out:
        console.print(
            f"{path}: {found.n_cut} chats are cut and {found.n_left_out} left out, because they "
            f"are longer than {configs.max_model_tokens(config)} tokens, prompt.max_prompt_tokens "
            "+ actors.max_response_tokens"
        )
    all_of_them = found.trajectories
    starts = range(0, len(all_of_them), CHATS_OF_TABLE)
    tables = [to_table(all_of_them[start : start + CHATS_OF_TABLE]) for start in starts]
    return OfflineRows(run_id=file_id, tables=tables)


def _why_not_compared(text: str, *, base: Path | None, model_path: Path) -> str:
    """Return why a source's tokens cannot be compared with the model's, "" if they can."""
    if base is not None:
        paths = [path for path in (base, model_path) if not (path / TOKENIZER_FILE).is_file()]
        return f"no {TOKENIZER_FILE} in {' and '.join(map(str, paths))}" if paths else ""
    if _is_untrusted(text):
        return "you did not make it, so its model is not loaded without --trust"
    return "it has no base policy"


def source_runs(config: Config) -> list[Path]:
    """Return the sources that are runs, for which --trust counts too."""
    locations = [_location(text) for text in config.source]
    return [location for location in locations if RunLayout.exists(location)]


def _places(config: Config) -> list[Path]:
    """Return where the sources are that are runs or datasets.

    Files of chats are among them: the owner of one could put a run there before it is read.
    """
    return [_location(text) for text in config.source]


def copy_base_policy(config: Config, directory: Path) -> Path:
    """Copy the base policy of the first source that has one to `directory`.

    Raises ConfigError if no source has one; StoreError if only a stranger's run has one.
    """
    if directory.is_dir():
        return directory
    from learner import copy_weights  # here: it loads torch

    base = _first_base(config)
    own = [run.absolute() / BASE_POLICY for run in source_runs(config)]
    copy_weights(base, directory, follow_links=base.absolute() not in own)
    return directory


def import_sources(config: Config, model_path: Path, console: Console) -> None:
    """Import the groups of the sources into the run, once. Raises StoreError, ConfigError.

    Chats are written with the chat template of the model in `model_path`.
    """
    with console.status("importing offline groups"):
        n_tokens = configs.vocabulary_size(model_path)
        found = _sources(config, console, model_path=lambda: model_path)
        sources = [replace(source, n_tokens=n_tokens) for source in found]
        with limited_memory(_places(config)):
            taken = take_sources(Path(config.run_dir), sources, order=config.offline.order)
    for source in taken:
        console.print(str(source))


def check_vocabularies(config: Config) -> None:
    """Raise ConfigError unless teacher and critic have the vocabulary of the model.

    They read its tokens. The vocabulary of a teacher behind a server is not known. Raise
    TeacherError if the server cannot be used.
    """
    if is_served(config.loss.teacher):
        from learner import ServedTeacher  # here: it loads torch

        ServedTeacher(config.loss.teacher).logprobs([np.zeros(2, np.int64)])
    model = config.model.path
    for key, path in (("loss.teacher", config.loss.teacher), ("critic.path", config.critic.path)):
        if not (path and model) or is_served(path):
            continue
        if n := n_different_tokens(Path(path), Path(model)):
            raise ConfigError(
                f"{key}={path} has a tokenizer that differs from that of model.path={model} in {n} "
                "entries, so the policy's tokens would mean something else to it; take a model of "
                "the same family"
            )


def n_different_tokens(one: Path, other: Path) -> int:
    """Count the entries in which the vocabularies of two models differ."""

    def vocabulary(path: Path) -> dict[str, int]:
        return dict(load_tokenizer(str(path), with_torch=True).get_vocab())

    return len(vocabulary(one).items() ^ vocabulary(other).items())


def only_chats(config: Config) -> bool:
    """Return whether no source can have a base policy: all are files of chats."""
    return all(map(_is_chats, config.source))


@contextmanager
def chat_texts(config: Config) -> Iterator[Iterator[str]]:
    """Give the texts of all chats, to train a tokenizer on. Raises ConfigError.

    In the block this process has the limit of memory for a stranger's file.
    """
    files = [Path(parse_source(text).location) for text in filter(_is_chats, config.source)]
    with limited_memory(_places(config)):
        yield chain.from_iterable(map(actors.chat_texts, files))


def check_same_tokenizer(base: Path, model_path: Path, *, source: str) -> None:
    """Raise ConfigError unless both models' vocabularies are equal: stored tokens are ids."""
    if n := n_different_tokens(base, model_path):
        raise ConfigError(
            f"source={source} was played with the tokenizer of {base}, and that of {model_path} "
            f"differs in {n} entries, so its token ids would mean something else; use a model with "
            "the same tokenizer, or leave model.path out"
        )


def _model_path(config: Config, base: Path | None) -> Path:
    return Path(config.model.path or base or _first_base(config))


def _first_base(config: Config) -> Path:
    found = [path for text in config.source if (path := _base_of(text)) is not None]
    if not found:
        for text in config.source:
            if layout := _run_of(text):
                layout.check_trusted()
        raise ConfigError(
            f"source={config.source[0]} has no base policy (any more); give one: model.path=DIR"
        )
    return found[0]


def _base_of(text: str) -> Path | None:
    """Return the base policy of a source.

    Returns None if it is no run, has none, or is a stranger's run.
    """
    layout = _run_of(text)
    return None if layout is None else _base_of_run(layout)


def _base_of_run(layout: RunLayout) -> Path | None:
    """Return the base policy of a run, None if it has none, or is a stranger's."""
    # its files are read by transformers, which would follow a link out of the run
    layout.check_no_links()
    if not layout.is_trusted():
        return None
    named = _setting(_config_of(layout), "model.path")
    if named or not has_directory(layout, BASE_POLICY):
        path = Path(str(named or layout.root / BASE_POLICY))
    else:
        path = local_directory(layout, BASE_POLICY)
    return path if (path / "config.json").is_file() else None


def _is_untrusted(text: str) -> bool:
    """Return whether the source is a stranger's run, whose model is not loaded without --trust."""
    layout = _run_of(text)
    return layout is not None and not layout.is_trusted()


def _run_of(text: str) -> RunLayout | None:
    """Return the run that is a source, None for a dataset."""
    location = _location(text)
    return RunLayout.open(location) if RunLayout.exists(location) else None


def _config_of(layout: RunLayout) -> DictConfig:
    """Return the stored config of a source. Raises ConfigError."""
    return configs.parse_saved(layout.info.config_yaml, name=f"the config of {layout.root}")


def _setting(config: DictConfig, key: str) -> object:
    """Return a setting of a source, None if there is none. Raises ConfigError for a broken one."""
    try:
        return OmegaConf.select(config, key, default=None)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the settings of a source have no {key} where it belongs: "
            f"{one_line(error)[:REASON_CHARACTERS]}"
        ) from None
