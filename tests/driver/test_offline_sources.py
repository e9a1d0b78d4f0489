"""Test what a run takes from its sources: groups, chats, and a base policy with the same tokens."""

from __future__ import annotations

import io
import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import configs
from cli.__main__ import main
from configs import Config, ConfigError, TinyModelConfig
from driver import offline_sources as sources
from driver import preflight
from learner import make_tiny_model, train_tokenizer
from printable import UserError
from store import (
    Group,
    RunLayout,
    StoreError,
    VersionRecord,
    open_run,
    to_table,
    trust,
    uid_text,
    write_open_sql,
)
from store.exchange.dataset_export import export_selection
from tests.support.chat_server import chat_server
from tests.support.engine_samples import make_base
from tests.support.fast_directory import fast_directory
from tests.support.forged_dataset import write_dataset
from tests.support.learner_loop import make_config, open_coordinator, play
from tests.support.store_samples import make_trajectory
from tests.support.teacher_server import echoed, teacher_server


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


def make_source(root: Path, config: Config | None = None) -> Path:
    """One group, and a base policy where a run without model.path has it."""
    coordinator = open_coordinator(config or make_config(root, max_staleness=1))
    coordinator.publish(VersionRecord(version=0, path="weights/v0", digest="d", learner_step=0))
    lease = coordinator.lease("w")
    assert lease is not None
    play(coordinator, lease)
    coordinator.close()
    (root / "base").mkdir()
    make_base(root / "base" / "policy")
    return root


def from_source(tmp_path: Path, *texts: str) -> Config:
    return replace(make_config(tmp_path / "new", max_staleness=1), source=list(texts))


def test_the_base_policy_is_copied_and_the_groups_are_taken(tmp_path: Path) -> None:
    played = make_source(tmp_path / "played")
    config = from_source(tmp_path, f"{played}@won")
    sources.check_sources(config, Console(quiet=True))
    assert not (tmp_path / "new").exists(), "what is mistyped leaves no run behind"
    layout = RunLayout.create(tmp_path / "new", config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=[], max_staleness=1)
    copied = sources.copy_base_policy(config, tmp_path / "new" / "base" / "policy")
    files = {path.name: path.read_bytes() for path in (played / "base" / "policy").iterdir()}
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == files
    out = io.StringIO()
    sources.import_sources(config, copied, Console(file=out, width=400))
    assert f"1 groups of {played} where won" in out.getvalue()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "is neither a run"),
        ("@won", "is neither a run"),
        ("played@won >", "won >"),
        ("played@won AND NOT won", "no whole training group"),
    ],
)
def test_a_dry_run_refuses_what_no_run_could_train_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, words: str
) -> None:
    make_source(tmp_path / "played")
    key_room = str(Path(configs.__file__).with_name("key_room.yaml"))
    asked = ["--dry-run", "offline.share=1", f"run_dir={tmp_path / 'new'}"]
    assert main(["train", key_room, *asked, f"source={tmp_path / source}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line
    assert main(["train", key_room, *asked, f"source={tmp_path / 'played'}@won"]) == 0
    assert not (tmp_path / "new").exists()


def test_a_dataset_with_a_prompt_longer_than_the_context_makes_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attack: one learner step of 300,000 tokens did not end. Chats are cut, other rows not."""
    group = Group.imported(group_uid=bytes(16), task_id="t", size=1)
    played = replace(make_trajectory(group, 0, n_steps=1), split="train")
    long = replace(played, steps=(replace(played.steps[0], prompt_ids=(5,) * 300_000),))
    place = write_dataset(tmp_path / "long", to_table([long]), run_id="e" * 32, size=1)
    command = [
        "train",
        str(Path(configs.__file__).with_name("key_room.yaml")),
        "--dry-run",
        "offline.share=1",
        f"run_dir={tmp_path / 'new'}",
        f"source={place}",
        f"model.path={make_base(tmp_path / 'base')}",
        "prompt.max_prompt_tokens=64",
        "actors.max_response_tokens=16",
    ]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: source {place} (run {'e' * 32}): step 0 of trajectory "
        f"{uid_text(played.traj_uid)} has 300,002 tokens, prompt and response together, more than "
        "the 80 of prompt.max_prompt_tokens + actors.max_response_tokens; raise them in a new "
        "run_dir, or leave its group out"
    )
    assert not (tmp_path / "new").exists()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    played = make_source(tmp_path / "played")
    other = tmp_path / "other"
    tiny = TinyModelConfig(vocabulary_size=280, hidden_size=64, layers=2)
    make_tiny_model(
        other,
        tokenizer=train_tokenizer(["open the chest"] * 9, vocabulary_size=280),
        config=tiny,
        seed=0,
    )
    config = from_source(tmp_path, str(played))
    with pytest.raises(ConfigError, match=r"differs in \d+ entries"):
        sources.check_sources(
            replace(config, model=replace(config.model, path=str(other))), Console(quiet=True)
        )
    same = played / "base" / "policy"
    sources.check_sources(
        replace(config, model=replace(config.model, path=str(same))), Console(quiet=True)
    )


def test_what_a_script_played_is_only_cloned(tmp_path: Path) -> None:
    usual = make_config(tmp_path / "played", max_staleness=9)
    scripted = replace(usual, actors=replace(usual.actors, scripted=True))
    config = from_source(tmp_path, str(make_source(tmp_path / "played", scripted)))
    with pytest.raises(ConfigError, match="played by a script"):
        sources.check_sources(config, Console(quiet=True))
    sources.check_sources(
        replace(config, loss=replace(config.loss, policy="behaviour_cloning")), Console(quiet=True)
    )


def test_a_source_without_a_base_policy_needs_one_given(tmp_path: Path) -> None:
    played = make_source(tmp_path / "played")
    (played / "base" / "policy" / "config.json").unlink()
    with pytest.raises(ConfigError, match="model.path=DIR"):
        sources.check_sources(from_source(tmp_path, str(played)), Console(quiet=True))


def strangers(played: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Turn `played` into another user's run, whose settings name `base` as its model."""
    path = played / "run.json"
    content = json.loads(path.read_text())
    config = configs.from_yaml(content["config_yaml"])
    text = configs.as_yaml(replace(config, model=replace(config.model, path=str(base))))
    path.unlink()
    path.write_text(json.dumps({**content, "config_yaml": text}))
    monkeypatch.setenv("XDG_STATE_HOME", str(played.parent / "another home"))
    return played


def test_a_strangers_source_chooses_no_directory_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = make_source(tmp_path / "played")
    secret = (played / "base" / "policy").rename(tmp_path / "secret")
    (secret / "token").write_text("of this user")
    strangers(played, secret, monkeypatch)
    config = from_source(tmp_path, str(played))
    policy = tmp_path / "new" / "base" / "policy"
    for attack in (
        lambda: sources.check_sources(config, Console(quiet=True)),
        lambda: sources.copy_base_policy(config, policy),
    ):
        with pytest.raises(StoreError, match=rf"{played} was not made by you.*--trust"):
            attack()
    assert not policy.exists()
    key_room = str(Path(configs.__file__).with_name("key_room.yaml"))
    command = [
        key_room,
        "--dry-run",
        "offline.share=1",
        f"run_dir={tmp_path / 'new'}",
        f"source={played}",
    ]
    assert main(["train", *command]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["train", *command, "--trust"]) == 0, capsys.readouterr().err
    assert main(["train", *command]) == 0  # it was said once
    assert (sources.copy_base_policy(config, policy) / "token").is_file()


def test_a_strangers_source_is_trained_from_with_a_model_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is read of it is read within its limit of memory."""
    played = make_source(tmp_path / "played")
    model = (played / "base" / "policy").rename(tmp_path / "model")
    strangers(played, model, monkeypatch)
    config = from_source(tmp_path, str(played))
    out = io.StringIO()
    mine = replace(config, model=replace(config.model, path=str(model)))
    before, limits = resource.getrlimit(resource.RLIMIT_DATA), []

    def limited(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_so(*given: Any, **named: Any) -> Any:
            limits.append(resource.getrlimit(resource.RLIMIT_DATA))
            return read(*given, **named)

        return read_so

    monkeypatch.setattr(sources, "_run_of", limited(sources._run_of))
    sources.check_sources(mine, Console(file=out, width=999))
    assert f"tokens of {played} were not compared: you did not make it" in out.getvalue()
    monkeypatch.setattr(RunLayout, "check_trusted", limited(RunLayout.check_trusted))
    with pytest.raises(StoreError, match="was not made by you"):
        preflight.check_run_dir(replace(config, run_dir=str(played)))
    assert len(limits) >= 3 and before not in limits
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_base_policy_in_a_strangers_run_needs_trust_and_has_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = make_source(tmp_path / "played")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another home"))
    (tmp_path / "secret").write_text("of this user")
    config, policy = from_source(tmp_path, str(played)), tmp_path / "new" / "base" / "policy"
    for use in (
        lambda: sources.check_sources(config, Console(quiet=True)),
        lambda: sources.copy_base_policy(config, policy),
    ):
        with pytest.raises(StoreError, match=rf"{played} was not made by you.*--trust"):
            use()
    trust(played)
    sources.check_sources(config, Console(quiet=True))

    def linked_since(layout: RunLayout) -> None:
        (layout.root / "base" / "policy" / "planted").symlink_to(tmp_path / "secret")

    monkeypatch.setattr(RunLayout, "check_no_links", linked_since)
    with pytest.raises(StoreError, match="planted is a symbolic link"):
        sources.copy_base_policy(config, policy)
    assert not policy.exists()


def test_ones_own_model_may_be_made_of_links(tmp_path: Path) -> None:
    """A snapshot in the cache of the Hugging Face Hub is."""
    played = make_source(
        tmp_path / "played",
        replace(
            make_config(tmp_path / "played", max_staleness=1),
            model=configs.ModelConfig(path=str(tmp_path / "model")),
        ),
    )
    blobs = (played / "base" / "policy").rename(tmp_path / "blobs")
    (tmp_path / "model").mkdir()
    for blob in blobs.iterdir():
        (tmp_path / "model" / blob.name).symlink_to(blob)
    copied = sources.copy_base_policy(
        from_source(tmp_path, str(played)), tmp_path / "new" / "base" / "policy"
    )
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == {
        path.name: path.read_bytes() for path in blobs.iterdir()
    }
    assert not any(path.is_symlink() for path in copied.iterdir())


def test_tokens_that_are_not_compared_are_said(tmp_path: Path) -> None:
    played = make_source(tmp_path / "played")
    (played / "base" / "policy" / "tokenizer_config.json").unlink()
    export_selection(played, tmp_path / "dataset", where=None, as_of=None)
    out = io.StringIO()
    sources.check_sources(
        from_source(tmp_path, str(played), str(tmp_path / "dataset")), Console(file=out, width=999)
    )
    first, second = out.getvalue().splitlines()
    assert first.startswith(
        f"tokens of {played} were not compared: no tokenizer_config.json in {played}/base/policy"
    )
    assert second == f"tokens of {tmp_path / 'dataset'} were not compared: it has no base policy"


def chats_of(path: Path, *, n: int) -> Path:
    """Write n chats of two replies."""
    messages = [
        {"role": "user", "content": "open the chest"},
        {"role": "assistant", "content": "how"},
        {"role": "user", "content": "with the key"},
        {"role": "assistant", "content": "done"},
    ]
    path.write_text("".join(json.dumps({"id": i, "messages": messages}) + "\n" for i in range(n)))
    return path


def cloning(config: Config) -> Config:
    return replace(config, loss=replace(config.loss, policy="behaviour_cloning"))


def test_chats_of_a_file_become_groups_that_sql_sees(tmp_path: Path) -> None:
    path = chats_of(tmp_path / "chats@home.jsonl", n=300)
    base = make_base(tmp_path / "base")
    config = cloning(from_source(tmp_path, str(path)))
    config = replace(config, model=replace(config.model, path=str(base)))
    sources.check_sources(config, Console(quiet=True))
    layout = RunLayout.create(tmp_path / "new", config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=[], max_staleness=1)
    out = io.StringIO()
    sources.import_sources(config, base, Console(file=out, width=400))
    assert f"300 groups of {path} (run chats@home.jsonl " in out.getvalue()
    with open_run(layout.root) as reader:
        query = "SELECT task_id, action_text FROM steps WHERE task_id = '299' ORDER BY step_index"
        assert [row["action_text"] for row in reader.sql(query).to_pylist()] == ["how", "done"]
        query = "SELECT count(*) AS n, count(DISTINCT group_uid) AS groups FROM steps"
        assert reader.sql(query).to_pylist() == [{"n": 600, "groups": 300}]
    path.unlink()  # what was taken is never asked again
    sources.import_sources(config, base, Console(file=out, width=400))
    assert out.getvalue().count("\n") == 1


def test_chats_are_cloned_only_and_have_no_sql(tmp_path: Path) -> None:
    path = chats_of(tmp_path / "chats.jsonl", n=1)
    with pytest.raises(ConfigError, match="use loss.policy=behaviour_cloning"):
        sources.check_sources(from_source(tmp_path, str(path)), Console(quiet=True))
    config = cloning(from_source(tmp_path, f"{path}@won"))
    config = replace(config, model=replace(config.model, path=str(make_base(tmp_path / "base"))))
    with pytest.raises(StoreError, match="a file of chats has no SQL"):
        sources.check_sources(config, Console(quiet=True))


def test_chats_that_are_too_long_are_counted(tmp_path: Path) -> None:
    config = cloning(from_source(tmp_path, str(chats_of(tmp_path / "chats.jsonl", n=2))))
    config = replace(
        config,
        model=replace(config.model, path=str(make_base(tmp_path / "base"))),
        prompt=replace(config.prompt, max_prompt_tokens=1),
        actors=replace(config.actors, max_response_tokens=1),
    )
    out = io.StringIO()
    with pytest.raises(StoreError, match="no whole training group"):
        sources.check_sources(config, Console(file=out, width=400))
    assert "0 chats are cut and 2 left out, because they are longer than 2 tokens" in out.getvalue()


def test_wrong_chats_are_found_before_a_tiny_model_is_made_of_them(tmp_path: Path) -> None:
    path = chats_of(tmp_path / "chats.jsonl", n=2)
    config = cloning(from_source(tmp_path, str(path)))
    sources.check_sources(config, Console(quiet=True))
    with sources.chat_texts(config) as texts:
        assert "with the key" in list(texts)
    path.write_text(path.read_text() + "{}")
    with pytest.raises(ConfigError, match="chat 3: messages is missing"):
        sources.check_sources(config, Console(quiet=True))


def test_teacher_and_critic_have_the_vocabulary_of_the_model(tmp_path: Path) -> None:
    model, teacher = make_base(tmp_path / "model"), make_base(tmp_path / "teacher", seed=1)
    key_room = str(Path(configs.__file__).with_name("key_room.yaml"))
    asked = [f"model.path={model}", "loss.policy=distillation"]
    sources.check_vocabularies(configs.load(key_room, [*asked, f"loss.teacher={teacher}"]))
    make_tiny_model(
        tmp_path / "other",
        tokenizer=train_tokenizer(["open the chest"] * 9, vocabulary_size=280),
        config=TinyModelConfig(vocabulary_size=280, hidden_size=64, layers=2),
        seed=0,
    )
    with teacher_server(teacher) as server:
        served = configs.load(key_room, [*asked, f"loss.teacher={server.url}"])
        sources.check_vocabularies(served)
        assert [len(body["prompt"]) for body in server.asked] == [2]
    with (
        chat_server(lambda body: echoed(None), models=["other"]) as server,
        pytest.raises(UserError, match=f"loss.teacher={server.url} does not echo tokens"),
    ):
        sources.check_vocabularies(configs.load(key_room, [*asked, f"loss.teacher={server.url}"]))
    with pytest.raises(ConfigError, match=r"differs from that of model.path=\S+ in \d+ entries"):
        sources.check_vocabularies(
            configs.load(key_room, [*asked, f"loss.teacher={tmp_path}/other"])
        )
    critic = [f"model.path={model}", "algorithm.estimator=turn_ppo"]
    sources.check_vocabularies(configs.load(key_room, [*critic, f"critic.path={teacher}"]))
    with pytest.raises(ConfigError, match=r"critic.path=\S+ has a tokenizer that differs"):
        sources.check_vocabularies(
            configs.load(key_room, [*critic, f"critic.path={tmp_path}/other"])
        )
    for settings, says in (
        (asked, "has no teacher; give the directory of one, or the URL of its server"),
        (
            [*asked, "loss.teacher=http://x/v1", "actors.temperature=0.7"],
            "log-probabilities at temperature 1, and not at actors.temperature=0.7; use 1",
        ),
        ([*asked, "loss.teacher=http://me@x/v1"], "loss.teacher has a name or password in it"),
        ([*asked, "loss.teacher=nowhere"], "is not a Hugging Face model directory"),
        ([*asked[1:], f"loss.teacher={teacher}"], "needs a model with the same tokenizer"),
        ([*asked[:1], f"loss.teacher={teacher}"], "add loss.policy=distillation"),
    ):
        with pytest.raises(ConfigError, match=says):
            configs.load(key_room, settings)
