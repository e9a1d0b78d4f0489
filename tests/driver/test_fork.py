"""gigpo train --fork: a new run from a checkpoint of another, with other settings."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import configs
import store
from configs import ConfigError
from driver import fork, offline_sources, resume, train_run
from driver.screen import Screen
from store import Catalog, RunLayout, StoreError, export, write_open_sql
from store.exchange.dataset_export import export_selection
from tests.runs.test_run import rows
from tests.support.fault_runs import ROOT, untrained_model
from tests.support.killed_runs import (
    REAL,
    closing,
    killed_and_undisturbed,
    staleness_violations,
    trained_twice,
)
from tests.support.store_samples import open_train_group, play


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "given.yaml").write_text("seed: 5\n")
    config = configs.load(tmp_path / "given.yaml", [f"run_dir={tmp_path / 'a'}"])
    RunLayout.create(tmp_path / "a", config_yaml=configs.as_yaml(config))
    resume.remember(config)
    return tmp_path / "a"


def test_a_fork_has_the_other_runs_settings_but_for_those_given(
    source: Path, tmp_path: Path
) -> None:
    config = fork.load(
        f"{source}@4",
        [f"run_dir={tmp_path / 'b'}", "algorithm.omega=0.5", "learner.learning_rate=0.5"],
    )
    assert (config.seed, config.run_dir, config.algorithm.omega) == (5, str(tmp_path / "b"), 0.5)


@pytest.mark.parametrize("options", [{}, {"api_key": "hunter2"}])
def test_a_fork_whose_settings_hold_a_secret_is_private(
    source: Path, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []

    def refused(*_: object, private: bool, **__: object) -> None:
        made.append(private)
        raise StoreError("far enough")

    monkeypatch.setattr(store, "fork", refused)
    monkeypatch.setattr(fork, "source_of", lambda _: (RunLayout.open(source), 4))
    config = fork.load(f"{source}@4", [f"run_dir={tmp_path / 'b'}"])
    config = replace(config, env=replace(config.env, options=options))
    with pytest.raises(StoreError, match="far enough"):
        fork.make(f"{source}@4", config)
    assert made == [bool(options)]


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("{a}@4", [], "give its directory: run_dir="),
        ("{a}", ["run_dir={b}"], "give a run and one of its learner steps"),
        ("{a}@0", ["run_dir={b}"], "give a run and one of its learner steps"),
        ("{a}@4", ["run_dir={b}", "env.name=key_room"], "env.name: 'textworld' -> 'key_room'"),
        ("{a}@4", ["run_dir={b}", "model.lora_rank=8"], "model.lora_rank: 0 -> 8"),
        ("{a}@4", ["run_dir={a}"], "is no fork, not of"),
    ],
)
def test_a_mistake_is_one_line(
    source: Path, tmp_path: Path, text: str, overrides: list[str], words: str
) -> None:
    names = {"a": source, "b": tmp_path / "b"}
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        fork.load(text.format(**names), [override.format(**names) for override in overrides])
    assert not (tmp_path / "b").exists()


def test_a_fork_keeps_the_offline_groups_of_its_run(tmp_path: Path) -> None:
    """Others would not be imported: the fork has groups already."""
    (tmp_path / "given.yaml").write_text("source: [there.jsonl]\n")
    config = configs.load(tmp_path / "given.yaml", [f"run_dir={tmp_path / 'a'}"])
    RunLayout.create(tmp_path / "a", config_yaml=configs.as_yaml(config))
    resume.remember(config)
    with pytest.raises(ConfigError, match=r"offline groups \(source: .*'other.jsonl'"):
        fork.load(f"{tmp_path / 'a'}@4", [f"run_dir={tmp_path / 'b'}", "source=other.jsonl"])
    assert fork.load(f"{tmp_path / 'a'}@4", [f"run_dir={tmp_path / 'b'}"]).source


def test_the_new_sources_of_a_fork_are_checked_before_it_is_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: chats that nobody sampled were trained on as if the policy had said them."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    fork_of = f"{source}@4"
    config = fork.load(fork_of, [f"run_dir={tmp_path / 'b'}", f"source={chats}"])
    config = replace(config, model=replace(config.model, path=str(tmp_path)))
    monkeypatch.setattr(train_run, "with_model", lambda config, _: config)
    with pytest.raises(ConfigError, match="has chats that nobody sampled, so they have no log-pro"):
        train_run.train(config, Screen.quiet(), fork_of=fork_of)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("is_dataset", [False, True])
def test_a_fork_takes_no_groups_of_its_own_run_from_a_source(
    source: Path, is_dataset: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the fork was made, refused to import them, and could never go on."""
    layout = RunLayout.open(source)
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        play(layout, catalog, open_train_group(catalog, None))
        export(catalog, layout)
    given = str(source)
    if is_dataset:
        given = str(tmp_path / "dataset")
        export_selection(source, Path(given), where=None, as_of=None)
    fork_of = f"{source}@4"
    config = fork.load(fork_of, [f"run_dir={tmp_path / 'b'}", f"source={given}"])
    config = replace(config, model=replace(config.model, path=str(tmp_path)))
    monkeypatch.setattr(train_run, "with_model", lambda config, _: config)
    monkeypatch.setattr(offline_sources, "_check_logprobs", lambda _: None)
    with pytest.raises(StoreError, match="is in the sources and in the run that is forked"):
        train_run.train(config, Screen.quiet(), fork_of=fork_of)
    assert not (tmp_path / "b").exists()


def test_a_fork_of_a_run_in_a_storage_needs_a_place_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    uri, own = ((tmp_path / name).as_uri() for name in ("theirs", "own"))
    (tmp_path / "given.yaml").write_text("seed: 5\n")
    run = tmp_path / "a"
    config = configs.load(tmp_path / "given.yaml", [f"run_dir={run}", f"store.uri={uri}"])
    RunLayout.create(run, config_yaml=configs.as_yaml(config), storage_uri=uri)
    resume.remember(config)
    for source in (str(run), uri):
        with pytest.raises(
            ConfigError, match=r"give the fork a place of its own, store.uri=\.\.\."
        ):
            fork.load(f"{source}@4", [f"run_dir={tmp_path / 'b'}"])
        for given in ("", own):
            found = fork.load(f"{source}@4", [f"run_dir={tmp_path / 'b'}", f"store.uri={given}"])
            assert (found.store.uri, found.seed) == (given, 5)


@pytest.mark.parametrize("uri", ["file:///nowhere/a", "file:///nowhere/a@b"])
def test_a_fork_of_a_uri_without_a_run_names_the_uri_as_it_was_given(
    tmp_path: Path, uri: str
) -> None:
    with pytest.raises(ConfigError) as told:
        fork.load(f"{uri}@20", [f"run_dir={tmp_path / 'b'}"])
    assert str(told.value) == (f"--fork {uri}@20: no run is at {uri}; give the store.uri of a run")


@pytest.mark.faults
def test_a_fork_of_a_run_is_trained_from_its_step_on(tmp_path: Path) -> None:
    """Real engine and learner; of a step whose published weights are gone."""
    settings = (
        *REAL,
        "learner.keep_versions=3",
        "learner.checkpoint_every=2",
        "learner.keep_every=2",
    )
    source, _ = killed_and_undisturbed(
        tmp_path, untrained_model(tmp_path / "untrained"), settings, seed=0
    )
    with closing(source):
        source.start("learner.steps=8")
        assert source.running is not None and source.running.process.wait(timeout=900.0) == 0, (
            source.running.said()
        )
    assert not (source.run / "weights" / "v000002").exists()
    forked = tmp_path / "fork"
    command = [
        sys.executable,
        "-m",
        "cli",
        "train",
        "--fork",
        f"{source.run}@2",
        f"run_dir={forked}",
    ]
    changed = ["learner.steps=5", "learner.learning_rate=1e-3", "algorithm.omega=0.5"]
    environ = source.environ()
    for _ in range(2):  # the second time it is finished, and says so
        done = subprocess.run(
            [*command, *changed], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "held-out tasks" in done.stdout
    steps = (
        "SELECT DISTINCT learner_step FROM lineage JOIN steps USING (group_uid) WHERE live "
        "ORDER BY 1"
    )
    assert rows(forked, steps) == [(step,) for step in range(1, 6)]
    assert trained_twice(forked) == staleness_violations(forked) == 0
    shared = "SELECT group_uid FROM lineage WHERE live AND learner_step <= 2 ORDER BY 1"
    assert rows(forked, shared) == rows(source.run, shared)
    version = "SELECT digest FROM versions WHERE version = 2"
    assert rows(forked, version) == rows(source.run, version)
