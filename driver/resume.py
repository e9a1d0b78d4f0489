"""Load the settings of a run that goes on, and remember those of each start.

    gigpo train --resume RUN [key=value ...]
    gigpo train --resume s3://bucket/run [run_dir=DIR] [key=value ...]

    RUN/config.yaml     the settings of the newest start; run.json keeps those of the first
    RUN/outside.json    digests of the files that the run uses outside its directory

No file of a run names its directory, so a run may be moved or copied. A model or a template file
outside is looked for at its old path; for another path give `model.path=...`. It must be the same.

A run with store.uri goes on from there alone, if its own disk is lost: its settings are there too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path, PurePosixPath

import configs
import store
from configs import Config, ConfigError
from store import (
    CONFIG_FILE,
    OUTSIDE_FILE,
    READ_WRITE,
    RUN_JSON,
    SIGNED,
    RunLayout,
    check_file_links,
    decoded,
    open_file_by_own_links,
    parse_object,
    parse_run_json,
    read_run_file,
    sign_next,
    signed_texts,
    trusted_texts,
    write_atomically,
)

OUTSIDE = (
    "model.path",
    "critic.path",
    "prompt.template",
)  # settings that may name a path outside the run
RUNS = Path("runs")  # where a run is brought to
DIGEST_BYTES = 16  # of BLAKE2b: 128 bits, as of state hashes
END_BYTES = 2**20  # of each model file; models of the same shape have different numbers there


def load(run: Path, overrides: Sequence[str]) -> Config:
    """Return the settings of the run's newest start, with `overrides` on top.

    Raises ConfigError, FormatError if there is no run, StoreError for a stranger's run that is not
    trusted.
    """
    with store.limited_memory([run]):  # an error quotes the settings of a stranger's run
        RunLayout.open(run)
        texts = trusted_texts(run)
    root, _ = configs.split_run_dir(overrides)
    if root is not None:
        raise ConfigError(
            f"--resume {run} goes on in that directory; leave run_dir= out, and move the directory "
            "if you like"
        )
    config_path = run / CONFIG_FILE
    # Its files are not read again: somebody else may have put another run in its place since.
    if texts.config is not None:
        text, name = decoded(texts.config, path=config_path), str(config_path)
    else:  # the first start was killed before it wrote the file
        run_json = run / RUN_JSON
        text = parse_run_json(texts.run_json, name=str(run_json)).config_yaml
        name = f"the config in {run_json}"
    return replace(configs.load_saved(text, overrides, name=name), run_dir=str(run))


def bring(
    uri: str, overrides: Sequence[str], *, trusts: bool, say: Callable[[str], None]
) -> tuple[Path, tuple[str, ...]]:
    """Bring the run whose store.uri is `uri` to this machine, unless it is here already.

    Return its directory, which is run_dir or runs/NAME, and the other overrides. Raises StoreError.
    """
    root, others = directory_of(uri, overrides)
    store.open_storage(uri)  # refuses a scheme before anything is said
    if not store.is_brought(uri, root):
        say(f"bringing {uri} to {root}")
        report = store.bring_run(uri, root, trusts=trusts, is_secret=_is_secret)
        for line in (*report.recovered, *(f"lost: {line}" for line in report.lost)):
            say(line)
    return root, others


def _is_secret(config_yaml: str) -> bool:
    """Return whether nobody else may read a run with these settings, which may be untrusted."""
    try:
        return configs.holds_secrets(configs.from_yaml(config_yaml))
    except ConfigError:
        return True  # nobody knows


def directory_of(uri: str, overrides: Sequence[str]) -> tuple[Path, tuple[str, ...]]:
    """Return where the run at `uri` goes on, run_dir or runs/NAME, and the other overrides.

    Raises StoreError for a text that is no URI.
    """
    parts = store.split_uri(uri)
    assert parts is not None, "it is no path"
    root, others = configs.split_run_dir(overrides)
    if root is not None:
        return Path(root), others
    return RUNS / (PurePosixPath(parts.path).name or parts.netloc), others


def remember(config: Config) -> None:
    """Write the settings of this start for the next `load`, with absolute paths.

    Raises StoreError: a full disk.
    """
    run, paths = Path(config.run_dir), outside(config)
    if not (run / OUTSIDE_FILE).is_file():
        digests = json.dumps({key: _digest(path) for key, path in paths.items()}, indent=1)
        write_atomically(run / OUTSIDE_FILE, digests.encode(), mode=READ_WRITE, beneath=run)
    absolute = {key: str(path.absolute()) for key, path in paths.items()}
    model = replace(config.model, path=absolute.get("model.path", config.model.path))
    critic = replace(config.critic, path=absolute.get("critic.path", config.critic.path))
    template = absolute.get("prompt.template", config.prompt.template)
    prompt = replace(config.prompt, template=template)
    text = configs.as_yaml(replace(config, model=model, critic=critic, prompt=prompt))
    layout = RunLayout.open(run)
    if layout.is_made_by_this_user() and (signed := signed_texts(run)) is not None:
        # Signed before it is written: killed in between, the run still has a signed config.yaml.
        # With run.json: of many signatures the newest are kept.
        sign_next(run, run_json=signed.run_json, config=text.encode())
    write_atomically(run / CONFIG_FILE, text.encode(), mode=READ_WRITE, beneath=run)
    if layout.info.storage_uri is not None:  # for `bring`; signatures first, as above
        if layout.is_made_by_this_user():  # only who signed a run can read its signatures
            layout.storage.write(SIGNED, (run / SIGNED).read_bytes(), is_private=True)
        for name in (OUTSIDE_FILE, CONFIG_FILE):
            if (run / name).is_file():
                layout.storage.write(name, (run / name).read_bytes())


def differences(config: Config, recorded: Config) -> list[str]:
    """Return `key: old -> new` for every setting that makes it another run than `recorded`.

    A path outside the run may change if the files are the same.
    """
    changed = configs.forbidden_changes(recorded, config)
    path = Path(config.run_dir) / OUTSIDE_FILE
    try:
        digests = parse_object(read_run_file(path.parent, OUTSIDE_FILE))
    except (FileNotFoundError, NotADirectoryError):
        digests = {}
    except ValueError as error:
        raise ConfigError(
            f"{path} is not readable ({error}); remove it, and give the paths the run was made with"
        ) from None
    moved = {
        key
        for key, place in outside(config).items()
        if key in digests and digests[key] == _digest(place)
    }
    return [line for line in changed if line.partition(":")[0] not in moved]


def outside(config: Config) -> Mapping[str, Path]:
    """Return the settings of OUTSIDE that name an existing file or directory."""
    given = (config.model.path, config.critic.path, config.prompt.template)
    paths = dict(zip(OUTSIDE, given, strict=True))
    return {key: Path(path) for key, path in paths.items() if path and Path(path).exists()}


def _digest(path: Path) -> str:
    """Return 128 bits of a file's content; of a directory, of its files' names, sizes and ends.

    A model may be too large to be read whole. Raises UnsafePathError for a link of another user to
    a file that is not theirs: they can read the digest, and so tell whether they guessed a file.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    if path.is_file():
        with open(open_file_by_own_links(path), "rb") as opened:
            content = opened.read()
        digest.update(f"\0{len(content)}\0".encode() + content)
        return digest.hexdigest()
    check_file_links(path)
    for file in sorted(each for each in path.iterdir() if each.is_file()):
        with open(open_file_by_own_links(file), "rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            digest.update(f"{file.name}\0{size}\0".encode())
            for start in sorted({0, max(0, size - END_BYTES)}):
                opened.seek(start)
                digest.update(opened.read(END_BYTES))
    return digest.hexdigest()
