"""A run that somebody else made: what its settings name is not followed before the user says so."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

import configs
import driver
import store.untrusted.trust
from analysis import evaluation_stats
from cli.__main__ import main
from configs import ConfigError
from driver import config_file, resume
from store import (
    FormatError,
    RunLayout,
    RunTexts,
    StoreError,
    is_trusted,
    sign_next,
    signed_texts,
    trust,
    trusted_texts,
)
from store.catalog.ownership import check_consent
from store.untrusted import settings_text
from store.untrusted import trust as trust_module
from store.untrusted.settings_text import parse_settings_text
from store.untrusted.signatures import state_directory
from store.untrusted.trust import FOLLOWED
from tests.support.neighbours import Neighbour, give_to_the_user

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PAYLOAD = """
from pathlib import Path
Path({mark!r}).touch()
from envs.key_room import KeyRoomEnv as Env
"""


# 435 bytes: each merge key brings in the pairs of the mapping before it, many times.
MERGED = "a: &a {x: 1}\n" + "".join(
    f"{n}: &{n} {{<<: [{','.join([f'*{p}'] * 21)}]}}\n" for p, n in pairwise("abcdef")
)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A run that this user made and started."""
    config = configs.from_yaml(
        f"{{run_dir: {tmp_path / 'run'}, env: {{name: 'payload_of_a_run:Env'}}}}"
    )
    RunLayout.create(tmp_path / "run", config_yaml=configs.as_yaml(config))
    resume.remember(config)
    return tmp_path / "run"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there as soon as the class that the run names was imported, in whatever
    process.
    """
    mark = tmp_path / "imported"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "payload_of_a_run.py").write_text(PAYLOAD.format(mark=str(mark)))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    # not in this process: this is what the test is about
    monkeypatch.setitem(sys.modules, "payload_of_a_run", None)
    monkeypatch.delitem(sys.modules, "payload_of_a_run")
    return mark


@pytest.fixture
def strangers(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same run, for another user: with a key of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another home"))
    return mine


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--resume", "{run}", "--dry-run"],
        ["train", "--resume", "{run}"],
        ["train", "--fork", "{run}@1", "run_dir={run}-fork"],
        ["train", "{config}", "run_dir={run}", "--dry-run"],
        ["train", "{config}", "run_dir={run}"],
        ["evaluate", "{run}"],
        ["evaluate", "{run}", "run_dir={run}-new"],
        ["evaluate", "{run}@1", "run_dir={run}-new", "--dry-run"],
        ["train", "{run}/config.yaml", "run_dir={run}-new"],
        ["train", "{run}/config.yaml", "run_dir={run}-new", "--dry-run"],
        ["train", "{run}/config.yaml", "--resume", "file://{run}-uri", "run_dir={run}-new"],
        ["evaluate", "{run}/config.yaml", "model.path=x", "run_dir={run}-new", "--dry-run"],
    ],
)
def test_nothing_that_a_strangers_run_names_is_imported(
    strangers: Path,
    mark: Path,
    tmp_path: Path,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver.Interrupt, "listen", lambda interrupt: None)
    config = tmp_path / "given.yaml"
    config.write_text("env: {name: 'payload_of_a_run:Env'}\n")
    assert main([word.format(run=strangers, config=config) for word in arguments]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"error: {strangers} was not made by you on this machine")
        and error.count("\n") == 1
    )
    assert "imports the environment 'payload_of_a_run:Env'" in error
    assert error.endswith("Add --trust, once, if you know who made it\n")
    assert not mark.exists()


def test_a_run_of_this_user_behind_a_link_of_another_one_is_not_trusted(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the link led to it while the signature was looked at, and then to their run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    trust(mine)
    give_to_the_user(state_directory() / "key")
    (tmp_path / "theirs").symlink_to(tmp_path)
    neighbour = Neighbour(monkeypatch)
    behind = tmp_path / "theirs" / "run"
    assert is_trusted(behind), "a link of root's, or of this user's"
    neighbour.gets(tmp_path / "theirs")
    assert is_trusted(mine) and not is_trusted(behind) and not signed_texts(behind)
    for look in (trusted_texts, trust):
        with pytest.raises(StoreError, match=r"theirs is a link of another user.*behind it"):
            look(behind)


def test_the_settings_that_are_followed_are_those_whose_signature_was_looked_at(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: another run was in its place between the look and the reading."""
    recorded = resume.load(mine, [])

    def exchanged(run: Path) -> object:
        texts = trusted_texts(run)
        for name in ("config.yaml", "run.json"):
            (run / name).chmod(0o644)
            (run / name).write_text("{env: {name: 'another:Env'}}")
        return texts

    monkeypatch.setattr(resume, "trusted_texts", exchanged)
    assert resume.load(mine, []) == recorded


def test_what_was_trusted_once_is_not_asked_about_again(
    strangers: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver.Interrupt, "listen", lambda interrupt: None)
    assert main(["train", "--resume", str(strangers), "--dry-run", "--trust"]) == 0, (
        capsys.readouterr().err
    )
    assert mark.exists(), "the attack itself works"
    assert signed_texts(strangers)
    assert main(["train", "--resume", str(strangers), "--dry-run"]) == 0


@pytest.mark.parametrize("way", ["built on", "linked", "linked on", "linked folder"])
def test_a_config_that_leads_to_a_strangers_is_a_strangers(
    strangers: Path, mark: Path, tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "given.yaml"
    if way in ("linked on", "linked folder"):  # the stranger leads the link out of the run again
        (strangers / "config.yaml").rename(tmp_path / "elsewhere.yaml")
        (strangers / "config.yaml").symlink_to("../elsewhere.yaml")
    if way == "linked folder":
        (tmp_path / "folder").symlink_to(strangers)
        given = tmp_path / "folder" / "config.yaml"
    elif way.startswith("linked"):
        given.symlink_to(strangers / "config.yaml")
    else:
        given.write_text("base: run/config.yaml\n")
    assert main(["train", str(given), f"run_dir={tmp_path / 'new'}", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert f"{strangers} was not made by you" in error
    assert "payload_of_a_run:Env" in error
    assert not mark.exists()


@pytest.mark.parametrize(
    ("run_json", "folder"),
    [("as it was", "extra/deep"), ("a link", "."), ("lost", "."), ("lost", "extra/deep")],
)
def test_a_config_anywhere_in_a_strangers_run_is_a_strangers(
    strangers: Path,
    mark: Path,
    tmp_path: Path,
    run_json: str,
    folder: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attack: a secret was sent, as only `RUN/config.yaml` beside a `run.json` counted."""
    signatures = (strangers / "signed.json").read_bytes()
    (strangers / folder).mkdir(parents=True, exist_ok=True)
    given = strangers / folder / "other.yaml"
    shutil.copy(strangers / "config.yaml", given)
    if run_json != "as it was":
        kept = tmp_path / "kept.json"
        (strangers / "run.json").rename(kept)
        if run_json == "a link":
            (strangers / "run.json").symlink_to(kept)
    command = ["train", str(given), f"run_dir={tmp_path / 'new'}", "--dry-run"]
    assert main(command) == 2
    assert str(strangers) in capsys.readouterr().err
    assert main([*command, "--trust"]) == 2, "what is no run, or is not named, is not signed"
    assert (strangers / "signed.json").read_bytes() == signatures
    assert not mark.exists()


def test_no_neighbour_makes_a_run_of_a_directory_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a run.json in /tmp made all configs below it a stranger's."""
    shared = tmp_path / "shared"
    config = shared / "mine" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("env: {name: sokoban}\n")
    (shared / "manifest.json").write_text("{}")  # not beside the config: no run was handed over
    config_file.load_config(str(config), [], trusts=False)
    (shared / "run.json").write_text("{}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    neighbour = Neighbour(monkeypatch)
    neighbour.gets(shared / "run.json")
    config_file.load_config(str(config), [], trusts=False)
    # Not if the file, or a folder on the way to it, may have come with the run.
    beside = shared / "config.yaml"
    shutil.copy(config, beside)
    link = config.with_name("link.yaml")
    link.symlink_to(beside)
    for given in (beside, link):
        with pytest.raises(StoreError, match="shared was not made by you"):
            config_file.load_config(str(given), [], trusts=False)
    neighbour.gets(config.parent)
    with pytest.raises(StoreError, match=r"lies in .*shared, a run .* copy config.yaml elsewhere"):
        config_file.load_config(str(config), [], trusts=False)


def test_a_path_that_leads_out_of_a_run_again_is_not_in_it(strangers: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("env: {name: sokoban}\n")
    config_file.load_config(str(strangers / "weights/../../mine.yaml"), [], trusts=False)


def test_a_run_without_its_run_json_says_how_to_bring_it_back(strangers: Path) -> None:
    (strangers / "run.json").unlink()
    with pytest.raises(StoreError, match=r"gigpo rebuild .*run\), or copy config.yaml elsewhere"):
        config_file.load_config(str(strangers / "config.yaml"), [], trusts=True)


def test_a_strangers_config_is_followed_once_it_is_trusted(
    strangers: Path, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(strangers / "config.yaml"), f"run_dir={tmp_path / 'new'}", "--dry-run"]
    assert main([*words, "--trust"]) == 0, capsys.readouterr().err
    assert mark.exists(), "the attack itself works"
    assert main(words) == 0


def test_a_secret_is_not_sent_to_whom_a_strangers_config_names(
    strangers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (strangers / "config.yaml").write_text(
        "endpoint: {url: 'http://127.0.0.1:9/v1', model: m, api_key_env: AWS_SECRET_ACCESS_KEY}\n"
    )
    assert main(["evaluate", str(strangers / "config.yaml"), f"run_dir={tmp_path / 'new'}"]) == 2
    error = capsys.readouterr().err
    assert "sends the secret in the variable 'AWS_SECRET_ACCESS_KEY'" in error
    with pytest.raises(StoreError, match="--trust"):
        trusted_texts(strangers)


def test_ones_own_run_goes_on_wherever_it_lies(mine: Path, tmp_path: Path) -> None:
    trusted_texts(mine)
    shutil.copytree(mine, tmp_path / "copy")
    trusted_texts(tmp_path / "copy")
    (tmp_path / "link").symlink_to(mine)
    trusted_texts(tmp_path / "link")
    mine.rename(tmp_path / "moved")
    trusted_texts(tmp_path / "moved")
    (tmp_path / "runs").symlink_to(tmp_path)
    trusted_texts(tmp_path / "runs" / "moved")


@pytest.mark.parametrize("name", ["config.yaml", "run.json"])
def test_settings_that_somebody_changed_are_a_strangers(mine: Path, name: str) -> None:
    path = mine / name
    text = path.read_text().replace("payload_of_a_run", "payload_of_another")
    path.unlink()
    path.write_text(text)
    with pytest.raises(StoreError, match=r"payload_of_another.*--trust"):
        trusted_texts(mine)


def test_settings_that_were_read_before_the_signature_was_looked_at_are_a_strangers(
    mine: Path,
) -> None:
    """The attack: the stranger's run.json was read, and then this user's put in its place."""
    path = mine / "run.json"
    signed = path.read_bytes()
    path.unlink()
    theirs = json.loads(signed) | {"storage_uri": "s3://bucket/run?endpoint_override=127.0.0.1:9"}
    path.write_text(json.dumps(theirs))
    layout = RunLayout.open(mine)
    path.write_bytes(signed)
    assert is_trusted(mine) and signed_texts(mine)
    assert not layout.is_trusted() and not layout.is_made_by_this_user()
    with pytest.raises(StoreError, match="was exchanged"):
        layout.check_trusted()
    with pytest.raises(StoreError, match="would ask there with your credentials"):
        check_consent(layout)
    RunLayout.open(mine).check_trusted()


def test_a_config_that_changed_in_a_run_of_ones_own_is_named(mine: Path) -> None:
    """Not everybody who edits config.yaml is a stranger."""
    file = mine / "config.yaml"
    file.write_text(file.read_text() + "# edited\n")
    with pytest.raises(StoreError, match=r"config.yaml has changed since .* Add --trust, once"):
        trusted_texts(mine)
    path = mine / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "config_yaml": ""}))
    with pytest.raises(StoreError, match="was not made by you on this machine"):
        trusted_texts(mine)


@pytest.mark.parametrize("is_behind_a_link", [False, True])
def test_the_config_file_that_is_loaded_is_the_one_whose_signature_was_looked_at(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_behind_a_link: bool
) -> None:
    """The attack: another config.yaml lay there once the signature had been looked at."""
    file, given = mine / "config.yaml", tmp_path / "given.yaml"
    given.symlink_to(file)
    look = trusted_texts

    def exchanged_after(run: Path) -> RunTexts:
        texts = look(run)
        changed = file.read_text().replace("payload_of_a_run", "payload_of_another")
        file.unlink()
        file.write_text(changed)
        return texts

    monkeypatch.setattr(config_file, "trusted_texts", exchanged_after)
    loaded = config_file.load_config(str(given if is_behind_a_link else file), [], trusts=False)
    assert "payload_of_a_run" in configs.as_yaml(loaded.config)
    assert "payload_of_another" in file.read_text()
    monkeypatch.setattr(
        config_file, "trusted_texts", lambda run: RunTexts(run_json=b"", config=None)
    )  # moved away
    with pytest.raises(StoreError, match="was exchanged while it was opened"):
        config_file.load_config(str(given if is_behind_a_link else file), [], trusts=False)


def test_the_settings_of_a_start_are_signed_without_a_run_json_that_was_put_there(
    mine: Path,
) -> None:
    """The attack: another run.json lay there when the settings of the next start were signed."""
    path = mine / "run.json"
    path.unlink()
    path.write_text(json.dumps({"storage_uri": "s3://theirs/run"}))
    assert sign_next(mine, config=(mine / "config.yaml").read_bytes())
    assert signed_texts(mine) is None


def test_the_table_of_an_evaluation_imports_no_environment_of_a_stranger(
    strangers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_stats, "_round_of", lambda run: [])
    with pytest.raises(StoreError, match="--trust"):
        evaluation_stats.show_evaluation(strangers, Console())


def test_a_run_on_read_only_media_is_trusted_for_one_command(
    strangers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(run: Path) -> bool:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(store.untrusted.trust, "sign_run", refused)
    monkeypatch.setattr(store.untrusted.trust, "_trusted_now", set())
    trust(strangers)
    trusted_texts(strangers)
    assert not signed_texts(strangers)


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_run_in_which_nothing_can_be_written_is_trusted_for_one_command(
    strangers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    RunLayout.create(tmp_path / "own", config_yaml="")  # makes the key

    def refused(directory: int, name: str, **options: object) -> object:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr("store.atomic_write.written_aside", refused)
    monkeypatch.setattr(store.untrusted.trust, "_trusted_now", set())
    if reason == errno.ENOSPC:
        with pytest.raises(StoreError, match="free space"):
            trust(strangers)
    else:
        trust(strangers)
        trusted_texts(strangers)
    assert not signed_texts(strangers)


# Settings that are texts, or have texts in them, and name nothing outside of the run that would be
# followed.
RUN_DIR = "run_dir"  # the directory that the user gives counts
WORDS = {  # one of a few words each, checked by configs, or by gigpo before a start
    *("stragglers", "model.dtype", "learner.schedule", "learner.transfer", "actors.cpu_cores"),
    "model.lora_serving",
    *("prompt.style", "prompt.parser", "prompt.invalid"),
    "prompt.tool_parser",  # a name in vLLM's list of parsers
    *(
        f"algorithm.{name}"
        for name in (
            "estimator",
            "normalise",
            "weighting",
            "group_filter",
            "anchor",
            "anchor_versions",
        )
    ),
    *(f"loss.{name}" for name in ("policy", "corrections", "proximal", "aggregation", "kl")),
    "loss.numbers",  # names of parts and of their numbers
    "actors.engine",  # words without a dot, colon or slash, so no module, file or server
}
# of prompts, and of requests to endpoint.url, which is shown
CONTENT = {"prompt.stop", "endpoint.model", "endpoint.body"}
# SQL: executed in a process that can read the sources and nothing else
QUERIES = {"offline.order", "offline.train_on", "tasks.order"}


def settings_with_texts(section: DataclassInstance, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from settings_with_texts(value, f"{prefix}{field.name}.")
        elif "str" in str(field.type) or "Any" in str(field.type):
            yield f"{prefix}{field.name}"


def test_every_setting_that_names_something_outside_is_shown() -> None:
    """A new setting with a text in it has to be put in FOLLOWED, or above with the reason why
    not.
    """
    harmless = {RUN_DIR, *WORDS, *CONTENT, *QUERIES}
    followed = {key.partition(".*.")[0] for key in FOLLOWED}  # any of `environments`
    assert set(settings_with_texts(configs.Config())) == harmless | followed
    assert not harmless & set(FOLLOWED)


def test_the_settings_are_parsed_once_and_a_large_file_is_not(
    strangers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: 63 MB of JSON, which was parsed for each setting and took gigabytes."""
    parsed: list[int] = []

    def parse(text: object) -> dict[str, object]:
        parsed.append(len(str(text)))
        return parse_settings_text(text)

    monkeypatch.setattr(trust_module, "parse_settings_text", parse)
    with pytest.raises(StoreError, match="--trust"):
        trusted_texts(strangers)
    assert len(parsed) == 2  # config.yaml, and its text in run.json
    path = strangers / "run.json"
    content = path.read_text()
    path.unlink()
    path.write_text(content[: content.rindex("}")] + ', "more": [' + "[]," * (2 << 20) + "[]]}")
    with pytest.raises(StoreError, match="--trust"):
        trusted_texts(strangers)
    assert len(parsed) == 3
    with pytest.raises(StoreError, match="more than 4,194,304: no run wrote it"):
        RunLayout.open(strangers)


def test_what_the_environments_of_a_run_name_is_shown(strangers: Path) -> None:
    (strangers / "config.yaml").write_text(
        "environments: {a: {env: {name: 'theirs:Env'}}, b: {prompt: {template: /etc/passwd}}}\n"
    )
    with pytest.raises(StoreError, match="imports the environment 'theirs:Env'") as refused:
        trusted_texts(strangers)
    assert "reads the template '/etc/passwd'" in str(refused.value)


def test_the_variable_with_a_secret_is_shown(strangers: Path) -> None:
    (strangers / "config.yaml").write_text(
        "endpoint: {url: 'http://x/v1', api_key_env: AWS_SECRET_ACCESS_KEY}\n"
    )
    with pytest.raises(
        StoreError, match="sends the secret in the variable 'AWS_SECRET_ACCESS_KEY'"
    ):
        trusted_texts(strangers)


@pytest.mark.parametrize(
    "text",
    ["a: " + "[" * 10_000, "a: " + "[" * 10_000 + "]" * 10_000, "{a: " * 10_000, "- " * 10_000],
)
def test_deep_settings_are_refused_without_being_read_to_their_end(
    strangers: Path, text: str
) -> None:
    """PyYAML took more than a minute for the brackets, because each looks at all before it."""
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        parse_settings_text(text)
    with pytest.raises(ConfigError, match="nested more than 64 deep"):
        configs.load_saved(text, name="config.yaml")
    (strangers / "config.yaml").write_text(text)
    with pytest.raises(StoreError, match="--trust"):
        trusted_texts(strangers)


def test_as_deep_settings_as_are_allowed_are_read() -> None:
    text = "a: " + "[" * 63 + "]" * 63
    assert list(parse_settings_text(text)) == ["a"]
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        parse_settings_text(text.replace("[]", "[[]]"))
    assert list(parse_settings_text("a: [" + "[], " * 1_000 + "]")) == ["a"]


def test_what_is_no_run_is_not_trusted(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is not a run directory"):
        trust(tmp_path / "nowhere")


# Each alias stands for four of the one before: 4^12 items in all.
ALIASES = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 4)}]\n"
    for before, name in pairwise("abcdefghijklm")
)


@pytest.mark.parametrize(
    "text",
    [
        "env: {name: 'a\\e]52;c;aGk=\\a:Env'}",
        ALIASES + "env: {name: x, options: *m}",
        "env: " + "{env: " * 2000,
        MERGED,
        "env: {name: 'x', <<: {options: hidden}}",
        "env: {options: 1" + ":1" * 100_000 + "}",
        "env: {name: [" + "x, " * 12_000 + "]}",
        "env: {name: !!timestamp x}",
        "]",
        "env: !!python/object/apply:os.system ['touch imported']",
        "5",
    ],
)  # fmt: skip
def test_settings_that_are_hostile_are_shown_in_one_short_line(
    strangers: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The parser is slow to come to more.
    monkeypatch.setattr(settings_text, "MAX_SETTINGS_EVENTS", 10_000)
    (strangers / "config.yaml").write_text(text)
    with pytest.raises(StoreError, match="--trust") as refused:
        trusted_texts(strangers)
    shown = str(refused.value)
    assert "payload_of_a_run:Env" in shown, "run.json is read whatever config.yaml holds"
    assert len(shown) < 3000 and shown.isascii() and shown.isprintable()


def test_the_text_of_a_run_is_shown_whatever_run_json_says(strangers: Path) -> None:
    path = strangers / "run.json"
    content = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps({**content, "config_yaml": 7}))
    with pytest.raises(StoreError, match="payload_of_a_run"):
        trusted_texts(strangers)
