"""A run that goes on: after kill -9, elsewhere, without its newest checkpoint, with other
settings.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import configs
import driver
from cli.__main__ import main
from configs import Config, ConfigError
from coordinator import Coordinator
from driver import resume
from driver.preflight import make_or_open_run
from learner.restore import restored_lines
from store import FormatError, FoundAtStart, RollBack, RunLayout, StoreError, write_open_sql
from tests.coordinator.test_coordinator import make_config, play, publish
from tests.runs.test_run import rows
from tests.support.fault_runs import ROOT, processes_of, untrained_model
from tests.support.killed_runs import (
    SIMULATED,
    KilledRun,
    closing,
    dispatched,
    expected_tasks,
    killed_and_undisturbed,
    lengths_by_group,
    staleness_violations,
    trained_twice,
    write_world,
)
from tests.support.neighbours import Neighbour
from tests.support.program import gigpo
from tests.support.s3_server import s3_server
from tests.support.sizes import IN_FULL
from tests.support.store_damage import no_file_may_grow


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Make a run, and return its config. Its model and template lie outside its directory."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(3 * resume.END_BYTES))
    template = (ROOT / "actors" / "templates" / "compact.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(template)
    (tmp_path / "given.yaml").write_text("seed: 5\n")
    overrides = [
        f"run_dir={tmp_path / 'run'}",
        f"model.path={tmp_path / 'model'}",
        f"prompt.template={tmp_path / 'mine.yaml'}",
    ]
    config = configs.load(tmp_path / "given.yaml", overrides)
    RunLayout.create(tmp_path / "run", config_yaml=configs.as_yaml(config))
    resume.remember(config)
    return config


def test_no_digest_tells_what_is_in_a_file_that_a_neighbours_link_leads_to(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: whoever made the model's directory guessed a private file, by the run's digest."""
    model, private = tmp_path / "model", tmp_path / "private"
    private.write_text("482913")
    (model / "README").symlink_to(private)
    Neighbour(monkeypatch).gets(model / "README")
    Path(config.run_dir, resume.OUTSIDE_FILE).unlink()
    with pytest.raises(StoreError, match="README is a link of another user .uid 65534."):
        resume.remember(config)


def test_signatures_in_a_storage_are_kept_from_others_at_each_start(
    config: Config, tmp_path: Path
) -> None:
    """Close what an older version left open to everybody."""
    storage = tmp_path / "shared"
    stored = replace(
        config,
        run_dir=str(tmp_path / "stored"),
        store=replace(config.store, uri=storage.as_uri()),
    )
    RunLayout.create(
        Path(stored.run_dir),
        config_yaml=configs.as_yaml(stored),
        storage_uri=stored.store.uri,
    )
    (storage / "signed.json").chmod(0o444)
    resume.remember(stored)
    assert (storage / "signed.json").stat().st_mode & 0o777 == 0o600
    assert (storage / "config.yaml").stat().st_mode & 0o777 == 0o444
    # One of the same group goes on with the run: only its owner can read the signatures.
    signed = (storage / "signed.json").read_bytes()
    (Path(stored.run_dir) / "signed.json").write_text("unreadable")
    resume.remember(stored)
    assert (storage / "signed.json").read_bytes() == signed


def test_a_run_goes_on_with_the_settings_of_its_newest_start(config: Config) -> None:
    run = Path(config.run_dir)
    assert resume.load(run, []) == config
    assert resume.load(run, ["learner.steps=7"]).learner.steps == 7
    resume.remember(replace(config, learner=replace(config.learner, steps=500)))
    assert resume.load(run, []).learner.steps == 500
    # of an older gigpo train: run.json has those of the first start
    (run / resume.CONFIG_FILE).unlink()
    assert resume.load(run, []) == config


def test_a_full_disk_is_one_line_and_leaves_the_older_files(config: Config) -> None:
    run = Path(config.run_dir)
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with (
        no_file_may_grow(0),
        pytest.raises(StoreError, match=r"^cannot write .*: File too large; free space"),
    ):
        resume.remember(replace(config, seed=7))
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    (run / resume.OUTSIDE_FILE).unlink()
    with no_file_may_grow(0), pytest.raises(StoreError, match="outside.json: File too large"):
        resume.remember(config)
    assert not list(run.glob("*outside*"))


def test_the_settings_are_read_once(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever may write in the directory could put another file there after each look at it."""
    run, path = Path(config.run_dir), Path(config.run_dir) / resume.CONFIG_FILE
    read = resume.read_run_file

    def read_then_replaced(run: Path, name: str) -> str:
        text = read(run, name)
        (tmp_path / "other.yaml").write_text(text.replace("seed: 5", "seed: 6"))
        path.unlink()
        path.symlink_to(tmp_path / "other.yaml")
        return text

    monkeypatch.setattr(resume, "read_run_file", read_then_replaced)
    assert resume.load(run, []).seed == 5


@pytest.mark.parametrize("text", ['["model.path"]', '{"a":' * 100_000, "7", "7" * 5000, "{"])
def test_a_damaged_outside_json_is_one_line(config: Config, text: str) -> None:
    path = Path(config.run_dir) / resume.OUTSIDE_FILE
    path.unlink()
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"outside\.json is not readable .* remove it") as refused:
        resume.differences(config, config)
    assert "\n" not in str(refused.value)


def test_what_is_no_run_or_names_another_directory_is_one_line(
    tmp_path: Path, config: Config
) -> None:
    with pytest.raises(FormatError, match="is not a run directory"):
        resume.load(tmp_path / "nowhere", [])
    with pytest.raises(ConfigError, match="leave run_dir= out"):
        resume.load(Path(config.run_dir), ["run_dir=elsewhere"])
    with pytest.raises(
        ConfigError, match=r"unknown key 'learner.stepz', did you mean 'learner.steps'"
    ):
        resume.load(Path(config.run_dir), ["learner.stepz=3"])
    with pytest.raises(ConfigError, match="'quickstart.yaml' is not key=value"):
        resume.load(Path(config.run_dir), ["quickstart.yaml"])


def test_paths_are_remembered_as_absolute_ones(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resume.remember(
        replace(
            config,
            model=replace(config.model, path="model"),
            prompt=replace(config.prompt, template="mine.yaml"),
        )
    )
    monkeypatch.chdir(ROOT)
    found = resume.load(Path(config.run_dir), [])
    assert (found.model.path, found.prompt.template) == (
        str(tmp_path / "model"),
        str(tmp_path / "mine.yaml"),
    )


@pytest.mark.parametrize(
    ("name", "key"), [("model", "model.path"), ("mine.yaml", "prompt.template")]
)
def test_what_lies_outside_may_move_but_not_change(
    config: Config, tmp_path: Path, name: str, key: str
) -> None:
    moved = tmp_path / "elsewhere" / name
    moved.parent.mkdir()
    (tmp_path / name).rename(moved)
    again = resume.load(Path(config.run_dir), [f"{key}={moved}"])
    assert resume.differences(again, config) == []
    changed = moved / "model.safetensors" if moved.is_dir() else moved
    changed.write_bytes(changed.read_bytes()[:-1] + b"!")
    (line,) = resume.differences(again, config)
    assert line.startswith(f"{key}: ")
    other = resume.load(Path(config.run_dir), [f"{key}={moved}", "algorithm.omega=0.5"])
    assert len(resume.differences(other, config)) == 2


def test_a_run_is_brought_from_its_uri_with_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = (tmp_path / "storage" / "mine").as_uri()
    (tmp_path / "given.yaml").write_text("seed: 5\n")
    config = configs.load(tmp_path / "given.yaml", ["run_dir=first", f"store.uri={uri}"])
    layout = RunLayout.create(
        Path("first"), config_yaml=configs.as_yaml(config), storage_uri=config.store.uri
    )
    write_open_sql(layout, macros=[], max_staleness=3)
    resume.remember(replace(config, learner=replace(config.learner, steps=77)))
    shutil.rmtree("first")
    assert main(["train", "--resume", uri, "--dry-run"]) == 2
    assert "--dry-run brings no run here" in capsys.readouterr().err
    assert not Path("runs").exists()
    said: list[str] = []
    given = ["learner.steps=9"]
    assert resume.bring(uri, given, trusts=False, say=said.append) == (
        Path("runs/mine"),
        ("learner.steps=9",),
    )
    assert said[0] == f"bringing {uri} to runs/mine"
    found = resume.load(Path("runs/mine"), [])
    assert (found.seed, found.learner.steps, found.store.uri) == (5, 77, uri)
    said.clear()
    assert resume.bring(uri, given, trusts=False, say=said.append)[0] == Path("runs/mine")
    assert said == []  # it is here
    elsewhere = ["run_dir=another/place", *given]
    assert resume.bring(uri, elsewhere, trusts=False, say=said.append)[0] == Path("another/place")
    assert resume.load(Path("another/place"), []).seed == 5
    assert stat.S_IMODE(Path("another/place").stat().st_mode) == 0o755
    secret = replace(config.env, options={"api_key": "hunter2"})
    resume.remember(replace(config, env=secret, run_dir="another/place"))
    assert resume.bring(uri, ["run_dir=kept"], trusts=False, say=said.append)[0] == Path("kept")
    assert stat.S_IMODE(Path("kept").stat().st_mode) == 0o700, "its settings hold a secret now"


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("foo://bucket/run", "foo is not one of file, s3"),
        ("s3:///run", "names no bucket; give s3://BUCKET/NAME"),
        ("file://nowhere/run", "of this machine it is file:///nowhere/run"),
    ],
)
def test_a_uri_that_no_storage_has_is_refused_before_anything_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    uri: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver.Interrupt, "listen", lambda interrupt: None)
    key_room = str(ROOT / "configs/key_room.yaml")
    for command in (
        ["train", "--resume", uri],
        ["train", key_room, "--resume", uri],
        ["train", key_room, f"store.uri={uri}"],
        ["train", "--fork", f"{uri}@3", "run_dir=b"],
        ["fetch", uri, "copy"],
    ):
        assert main(command) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith(f"error: storage {uri}") and said in line
    assert list(tmp_path.iterdir()) == []


def test_one_command_begins_a_run_in_a_storage_or_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Give it again on an empty disk, as a cluster does that does not know how far the run is."""
    monkeypatch.chdir(tmp_path)
    started: list[Config] = []
    monkeypatch.setattr(driver, "train", lambda config, *_, **__: started.append(config))
    monkeypatch.setattr(driver.Interrupt, "listen", lambda interrupt: None)
    uri = (tmp_path / "storage" / "mine").as_uri()
    key_room = str(ROOT / "configs/key_room.yaml")
    given = ["train", key_room, "--resume", uri, "--trust", "seed=3"]
    assert main(given) == 0
    (config,) = started
    assert (config.run_dir, config.store.uri, config.seed) == ("runs/mine", uri, 3)
    assert not Path("runs").exists()  # nothing was brought

    # killed as soon as the storage was taken: it begins again
    storage = Path("storage/mine")
    storage.mkdir(parents=True)
    for name in ("run.json", "primary.json"):
        (storage / name).write_text("{}")
    assert main(given) == 0 and len(started) == 2
    shutil.rmtree(storage)

    layout = RunLayout.create(
        Path(config.run_dir), config_yaml=configs.as_yaml(config), storage_uri=uri
    )
    write_open_sql(layout, macros=[], max_staleness=config.max_staleness)
    resume.remember(config)
    capsys.readouterr()
    for brings in (False, True):  # the same disk, then an empty one
        if brings:
            shutil.rmtree("runs")
        assert main([*given, "learner.steps=9"]) == 0
        assert (f"bringing {uri} to runs/mine" in capsys.readouterr().out) == brings
        assert (started[-1].seed, started[-1].learner.steps) == (3, 9)
    # of a run in a directory the config is a word too many, as before
    assert main(["train", key_room, "--resume", "runs/mine"]) == 2
    assert "is not key=value" in capsys.readouterr().err
    assert len(started) == 4


def run_with_open_groups(run: Path) -> Config:
    """Make a run that was killed: groups 0, with one member, and 2 are open, group 1 is whole."""
    config = make_config(run, max_staleness=3)
    layout = RunLayout.create(run, config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=[], max_staleness=3)
    coordinator = Coordinator(config, learns=True)
    publish(coordinator, 0, 0)
    first, second, third = (coordinator.lease("w") for _ in range(3))
    assert first is not None and second is not None and third is not None
    play(coordinator, replace(first, group=replace(first.group, missing=(1,))))
    play(coordinator, second)
    coordinator.close()  # as killed: nobody gave anything back
    return config


def test_open_groups_are_played_first_and_only_what_they_lack(tmp_path: Path) -> None:
    config = run_with_open_groups(tmp_path / "run")
    again = Coordinator(config, learns=True)
    leases = [again.lease("w") for _ in range(3)]
    assert [lease.group.ordinal for lease in leases if lease] == [0, 2, 3]
    assert leases[0] is not None and 1 not in leases[0].group.missing
    assert len(leases[0].group.missing) == config.algorithm.group_size - 1
    again.close()


def test_what_workers_play_before_the_learner_has_started_is_not_counted_as_found(
    tmp_path: Path,
) -> None:
    config = run_with_open_groups(tmp_path / "run")
    again = Coordinator(config, learns=True)
    for _ in range(4):  # two that were unfinished, and two new ones
        lease = again.lease("w")
        assert lease is not None
        play(again, lease)
    point = again.resume(0)
    assert point.found == FoundAtStart(open=2, trajectories=1 + config.algorithm.group_size)
    assert (point.rolled_back.complete, point.rolled_back.learner_steps) == ({0: 5}, 0)
    again.close()


@pytest.mark.run
@pytest.mark.shortened
def test_killed_again_and_again_moved_and_robbed_of_a_checkpoint_nothing_is_lost(
    tmp_path: Path,
) -> None:
    """The scripted policy; all else is real. The undisturbed run is the same seed's tasks, one
    after the other.
    """
    killed, _ = killed_and_undisturbed(
        tmp_path, untrained_model(tmp_path / "untrained"), SIMULATED, seed=1
    )
    with closing(killed):
        killed.start()
        if IN_FULL:
            killed.kill("tree")  # --resume from another directory
        killed.wait_until_it_works()
        running = killed.running
        assert running is not None
        running.wait(
            lambda: len(killed.catalog("SELECT 1 FROM checkpoint WHERE live = 1")) >= 2,
            what="two checkpoints",
        )
        killed.close()
        before = killed.committed()
        assert killed.seen <= before
        moved = replace(killed, name="moved", begun_s=0.0)
        shutil.copytree(killed.run, moved.run)
        shutil.rmtree(killed.run)
        recorded = moved.catalog("SELECT path FROM checkpoint WHERE live = 1 ORDER BY learner_step")
        newest = moved.run / recorded[-1][0]  # a directory behind it is of one that was being saved
        shutil.rmtree(newest)
        moved.n_commands = 1  # the next is a --resume
        said = moved.finish(moved.settled_step() + 1)
    print(said)
    assert "as newer checkpoints cannot be loaded" in said and newest.name in said, said
    assert "thrown away: " in said and "trained again" in said
    assert "played first" in said
    assert before <= moved.committed()
    assert trained_twice(moved.run) == staleness_violations(moved.run) == 0
    tasks = dispatched(moved)
    assert tasks == expected_tasks(
        configs.from_yaml(RunLayout.open(moved.run).info.config_yaml), len(tasks)
    )
    assert lengths_by_group(moved)
    assert processes_of(moved.run) == []
    queries = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "resume.md").read_text(), re.DOTALL)
    assert queries and all(rows(moved.run, query) for query in queries)
    for command in (
        ["fsck", moved.run],
        ["sql", moved.run, "SELECT count(*) AS n FROM trajectories"],
    ):
        answer = gigpo(*command)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    assert not killed.run.exists()


@pytest.mark.run
@pytest.mark.slow
def test_a_run_whose_disk_is_lost_goes_on_from_its_object_store(tmp_path: Path) -> None:
    """All its processes are killed, and its directory is removed. The scripted policy; all else is
    real.
    """
    write_world(tmp_path)
    with s3_server(tmp_path / "server") as server:
        uri = server.uri("lost")
        settings = (*SIMULATED, f"store.uri={uri}", "learner.checkpoint_every=2")
        model = untrained_model(tmp_path / "untrained")
        run = KilledRun(
            home=tmp_path, name="lost", model=model, settings=settings, random=random.Random(0)
        )
        with closing(run):
            run.start()
            run.wait_until_it_works()
            assert run.running is not None
            run.running.wait(lambda: run.settled_step() >= 5, what="learner step 5")
        committed, settled_step = run.committed(), run.settled_step()
        shutil.rmtree(run.run)
        elsewhere = replace(run, name="elsewhere", begun_s=0.0)
        command = [sys.executable, "-m", "cli", "train", "--resume", uri]
        again = subprocess.run(
            [*command, f"run_dir={elsewhere.run}", f"learner.steps={settled_step + 3}"],
            cwd=ROOT,
            env=elsewhere.environ(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert again.returncode == 0, again.stdout + again.stderr
        print(again.stdout)
        assert "training goes on from the checkpoint of learner step" in again.stdout
        assert elsewhere.settled_step() == settled_step + 3
        assert len(committed) > 0 and committed <= elsewhere.committed()
        assert trained_twice(elsewhere.run) == staleness_violations(elsewhere.run) == 0
        tasks = dispatched(elsewhere)
        recorded = configs.from_yaml(RunLayout.open(elsewhere.run).info.config_yaml)
        assert tasks == expected_tasks(recorded, len(tasks))
        assert main(["fsck", str(elsewhere.run)]) == 0


def test_resume_of_a_run_that_another_config_made_is_refused(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert main(["train", "--resume", config.run_dir, "algorithm.omega=0.5"]) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "algorithm.omega: 1.0 -> 0.5" in capsys.readouterr().err


def test_what_was_restored_and_thrown_away_is_said_in_two_lines() -> None:
    rolled_back = RollBack(
        batches=3,
        groups=8,
        checkpoints=0,
        learner_steps=2,
        complete={4: 1, 5: 8, 9: 1, 10: 2},
    )
    found = FoundAtStart(open=4, trajectories=116)
    restored, lost = restored_lines(
        found, rolled_back, [], learner_step=5, version=10, max_staleness=1
    ).splitlines()
    assert restored == (
        "continues at learner step 5 as version 10; 8 groups consumed after the checkpoint are "
        "available again, "
        "4 unfinished groups are played first; 116 trajectories are kept, held-out ones included"
    )
    assert lost == (
        "thrown away: 2 learner steps, which are trained again; 9 complete groups too old now "
        "for version "
        "10 (max_staleness=1), which stay in the store as stale (fewer with a smaller "
        "learner.checkpoint_every)"
    )
    none = RollBack(batches=0, groups=0, checkpoints=0, learner_steps=0, complete={9: 3})
    one = FoundAtStart(open=1, trajectories=1)
    said = restored_lines(one, none, ["a was cut"], learner_step=5, version=10, max_staleness=1)
    assert "as version 10, as newer checkpoints cannot be loaded (a was cut); 0 groups" in said
    assert (
        ", 1 unfinished group is played first; 1 trajectory is kept, held-out ones included\nthrown away: nothing"
        in said
    )


def test_a_run_stays_its_makers_however_often_its_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a thousand starts later the signature of run.json was gone."""
    monkeypatch.setattr("store.untrusted.signatures.MAX_SIGNATURES", 4)
    config = make_config(tmp_path / "run", max_staleness=0)
    layout = make_or_open_run(config)
    for steps in range(1, 9):
        resume.remember(replace(config, learner=replace(config.learner, steps=steps)))
        assert layout.is_made_by_this_user()
