"""The sources of offline training, `source=RUN[@where]`: their checks, groups and base policy."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

import configs
from configs import Config, ConfigError
from printable import REASON_CHARACTERS, one_line
from store import RunLayout, check_trusted, find_sources, is_trusted, parse_source, take_sources

TOKENIZER_FILE = "tokenizer_config.json"
OWN_BASE = Path("base", "policy")  # of a run that began without model.path


def check_sources(config: Config, console: Console) -> None:
    """Check that the sources exist, select groups and fit the model, before a run is made.

    Raises ConfigError, StoreError.
    """
    from learner import check_train_on  # here: it loads torch

    check_train_on(config.offline.train_on)
    for text in config.source:
        theirs = _config_of(text)
        if theirs is not None and (url := _setting(theirs, "endpoint.url")):
            raise ConfigError(
                f"source={text} was played by {_setting(theirs, 'endpoint.model')} at {url}, whose "
                "tokens and log-probabilities nobody has, so nothing can be trained from it; leave "
                "it out"
            )
    find_sources([parse_source(text) for text in config.source], order=config.offline.order)
    model_path = Path(config.model.path or _first_base(config))
    for text in config.source:
        base, theirs = _base_of(text), _config_of(text)
        why = _why_not_compared(text, base=base, model_path=model_path)
        if base is None or why:
            console.print(f"tokens of {text} were not compared: {why}")
        else:
            check_same_tokenizer(base, model_path, source=text)
        scripted = theirs is not None and _setting(theirs, "actors.scripted")
        if scripted and config.loss.policy != "behaviour_cloning":
            raise ConfigError(
                f"source={text} was played by a script, which has no log-probabilities to learn "
                f"from with loss.policy={config.loss.policy}; use loss.policy=behaviour_cloning"
            )


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
    places = [Path(parse_source(text).place) for text in config.source]
    return [place for place in places if RunLayout.exists(place)]


def copy_base_policy(config: Config, directory: Path) -> Path:
    """Copy the base policy of the first source that has one to `directory`.

    Raises ConfigError if no source has one; StoreError if only a stranger's run has one.
    """
    if directory.is_dir():
        return directory
    from learner import copy_weights  # here: it loads torch

    base = _first_base(config)
    own = [run / OWN_BASE for run in source_runs(config)]
    copy_weights(base, directory, follow_links=base not in own)
    return directory


def import_sources(config: Config, console: Console) -> None:
    """Import the groups of the sources into the run, once. Raises StoreError."""
    with console.status("importing offline groups"):
        taken = take_sources(
            Path(config.run_dir),
            [parse_source(text) for text in config.source],
            order=config.offline.order,
        )
    for source in taken:
        console.print(str(source))


def check_same_tokenizer(base: Path, model_path: Path, *, source: str) -> None:
    """Raise ConfigError unless both models' vocabularies are equal: stored tokens are ids."""
    from transformers import AutoTokenizer

    def vocabulary(path: Path) -> dict[str, int]:
        tokenizer = configs.load_safely(
            "tokenizer",
            path,
            load=lambda: AutoTokenizer.from_pretrained(path, **configs.SAFE_LOADING),
        )
        return dict(tokenizer.get_vocab())

    theirs, ours = vocabulary(base), vocabulary(model_path)
    if theirs != ours:
        n = len(theirs.items() ^ ours.items())
        raise ConfigError(
            f"source={source} was played with the tokenizer of {base}, and that of {model_path} "
            f"differs in {n} entries, so its token ids would mean something else; use a model with "
            "the same tokenizer, or leave model.path out"
        )


def _first_base(config: Config) -> Path:
    found = [path for text in config.source if (path := _base_of(text)) is not None]
    if not found:
        for text in config.source:
            if _is_untrusted(text):
                check_trusted(Path(parse_source(text).place))
        raise ConfigError(
            f"source={config.source[0]} has no base policy (any more); give one: model.path=DIR"
        )
    return found[0]


def _base_of(text: str) -> Path | None:
    """Return the base policy of a source.

    Returns None if it is no run, has none, or is a stranger's run.
    """
    theirs = _config_of(text)
    if theirs is None:
        return None
    run = Path(parse_source(text).place)
    # its files are read by transformers, which would follow a link out of the run
    RunLayout.open(run).check_no_links()
    if _is_untrusted(text):
        return None
    path = Path(str(_setting(theirs, "model.path") or run / OWN_BASE))
    return path if (path / "config.json").is_file() else None


def _is_untrusted(text: str) -> bool:
    """Return whether the source is a stranger's run, whose model is not loaded without --trust."""
    return _config_of(text) is not None and not is_trusted(Path(parse_source(text).place))


def _config_of(text: str) -> DictConfig | None:
    """Return the stored config of a source, None for a dataset."""
    place = Path(parse_source(text).place)
    if not RunLayout.exists(place):
        return None
    return configs.parse_saved(
        RunLayout.open(place).info.config_yaml, name=f"the config of {place}"
    )


def _setting(config: DictConfig, key: str) -> object:
    """Return a setting of a source, None if there is none. Raises ConfigError for a broken one."""
    try:
        return OmegaConf.select(config, key, default=None)
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"the settings of a source have no {key} where it belongs: "
            f"{one_line(error)[:REASON_CHARACTERS]}"
        ) from None
