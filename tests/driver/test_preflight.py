"""Test the checks and messages before a run starts, and the progress of an evaluation."""

from __future__ import annotations

import io
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import configs
from cli.__main__ import main
from configs import Config, ConfigError, EnvConfig
from coordinator import Status
from driver import preflight
from driver.environment_check import try_tasks
from driver.preflight import show_missing
from driver.progress import Progress, said_with_spinner
from driver.screen import shown_in
from envs.textworld.games import ensure_compiled
from store import Counts, RunLayout, StoreError, primary_directory
from tests.support.neighbours import Neighbour

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
KEY_ROOM = str(CONFIGS[0].with_name("key_room.yaml"))
GAMES = {"seed": 0, "train_games": 3, "heldout_games": 2, "rooms": 2, "things": 1}
SLOW_WORLD = """
from envs.key_room import KeyRoomEnv
class Slow(KeyRoomEnv):
    @classmethod
    def tasks(cls, split, options):
        if options:
            raise FileNotFoundError("no games here")
        return super().tasks(split, {})
"""


def tried(name: str, options: dict[str, object]) -> str:
    out = io.StringIO()
    console = Console(file=out, width=500)
    show_missing(
        try_tasks(replace(Config(), env=EnvConfig(name=name, options=options)), console), console
    )
    return out.getvalue()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.name=key_rom"], "env.name: unknown environment 'key_rom': did you mean 'key_room'?"),
        (["env.name=nowhere:Env"], "no module 'nowhere'"),
        (["env.options.size=3"], "key_room options missing or unknown: size; it takes []"),
        (
            ["env.name=sokoban", "env.options={rows: 5}"],
            "sokoban options missing or unknown: boxes, columns",
        ),
        (
            ["env.name=textworld", "env.options={games: 5}"],
            "textworld options missing or unknown: cache_dir, games",
        ),
    ],
)
def test_a_dry_run_refuses_an_environment_that_no_run_could_play(
    overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", KEY_ROOM, "--dry-run", *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("frozenlake", "env.options.train_seeds=[5,2]", "train_seeds=[5, 2] must be [first, end]"),
        ("frozenlake", "env.options.heldout_seeds=[0,9000]", "have seeds in common"),
        ("sokoban_cpu", "env.options.boxes=90", "sokoban option boxes=90 must be at most 7 in 5x5"),
        ("quickstart", "env.options.rooms=99", "textworld option rooms=99 must be at most"),
        ("alfworld_cpu", "env.options.task_types=[fly]", "alfworld option task_types=['fly']"),
        ("search_cpu", "env.options.topk=0", "topk=0 must be a whole number, at least 1"),
        (
            "webshop_qwen2.5_1.5b",
            "env.options.seed=-1",
            "webshop option seed=-1 must be a whole number",
        ),
    ],
)
def test_a_dry_run_refuses_an_option_that_is_impossible_wherever_the_data_is(
    name: str, override: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(CONFIGS[0].with_name(f"{name}.yaml")), "--dry-run", override]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


def test_a_dry_run_looks_at_a_model_that_is_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tried_with(*overrides: str) -> str:
        code = main(
            [
                "train",
                KEY_ROOM,
                "--dry-run",
                f"model.path={tmp_path}/Tiny-1B",
                "learner.zero_stage=3",
                *overrides,
            ]
        )
        error = capsys.readouterr().err
        assert (code == 2) == bool(error)
        return error

    assert tried_with() == "", "it may be where the run will be"
    (tmp_path / "Tiny-1B").mkdir()
    assert "is not a Hugging Face model directory" in tried_with()
    (tmp_path / "Tiny-1B" / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    assert "learner.zero_stage=3 with the vision model" in tried_with()
    assert tried_with("learner.zero_stage=2") == ""


@pytest.mark.parametrize(
    ("model_type", "style", "words"),
    [
        (None, "window", "the environment shows images, which the model does not see"),
        ("qwen2", "window", "the environment shows images, which the model does not see"),
        ("qwen2_5_vl", "chat", "use 'window' with images"),
    ],
)
def test_images_that_no_prompt_has_a_place_for_are_refused_before_there_is_a_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model_type: str | None,
    style: str,
    words: str,
) -> None:
    rooms = [
        "env.options.observation=image",
        "env.options.train_rooms=2",
        "env.options.heldout_rooms=2",
    ]
    model = [] if model_type is None else [f"model.path={tmp_path}"]
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    sokoban = str(CONFIGS[0].with_name("sokoban_cpu.yaml"))
    asked = [
        *rooms,
        *model,
        f"prompt.style={style}",
        "prompt.history_length=-1",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert main(["train", sokoban, *asked]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: env.name=sokoban: ") and words in line
    assert not (tmp_path / "run").exists()


def test_a_dry_run_counts_tasks_but_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", KEY_ROOM, "--dry-run"]) == 0
    assert "key_room: 40 training tasks, 20 held out" in capsys.readouterr().out
    cache = tmp_path / "games"
    assert "its tasks are made when a run starts" in tried(
        "textworld", {**GAMES, "cache_dir": str(cache)}
    )
    assert not cache.exists()


def test_what_may_be_elsewhere_is_said_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "games_world.py").write_text(SLOW_WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "missing here:\n  tasks: " in tried("games_world:Slow", {"data": "there"})
    assert "FileNotFoundError: no games here" in tried("games_world:Slow", {"data": "there"})
    assert "40 training tasks" in tried("games_world:Slow", {})


@pytest.mark.parametrize(
    "path",
    [path for path in CONFIGS if path.name != "sokoban_qwen2.5_vl_3b.yaml"],
    ids=lambda path: path.stem,
)
def test_every_config_has_an_environment_with_its_options(path: Path) -> None:
    """Wherever its data is: that of the paper's is not here. One config's tasks take seconds to
    draw.
    """
    env = configs.load(path).env
    assert tried(env.name, env.options)


def test_who_waits_long_is_told_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driver.progress.FIRST_LINE_S", 0.01)
    monkeypatch.setattr("driver.progress.LINE_EVERY_S", 0.01)
    out = io.StringIO()
    with said_with_spinner(
        "listing the tasks of [a] world", Console(file=out, width=200, markup=False)
    ):
        while out.getvalue().count("so far") < 2:  # again, as long as it lasts
            time.sleep(0.005)
    assert out.getvalue().startswith("listing the tasks of [a] world: 0 s so far\n")


def test_what_is_quick_is_not_talked_about() -> None:
    out = io.StringIO()
    with said_with_spinner("listing", Console(file=out)):
        pass
    assert out.getvalue() == ""


def test_making_games_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = SimpleNamespace(communicate=lambda timeout: ("", ""), returncode=0)
    monkeypatch.setattr("envs.textworld.games._start_compiler", lambda games: done)
    games = [SimpleNamespace(fingerprint=name) for name in "abc"]
    (tmp_path / "b.z8").touch()
    ensure_compiled(games, cache_dir=tmp_path)  # type: ignore[arg-type]
    assert capsys.readouterr().out == f"making 2 TextWorld games of 3, in {tmp_path}\n"
    for name in "ac":
        (tmp_path / f"{name}.z8").touch()
    ensure_compiled(games, cache_dir=tmp_path)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_an_evaluation_shows_its_own_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driver.progress.LINE_EVERY_S", 0.0)
    config = replace(
        Config(run_dir=str(tmp_path)),
        endpoint=configs.EndpointConfig(url="http://h/v1", model="m-7b"),
    )
    out = io.StringIO()
    with Progress(
        config, title="training", screen=shown_in(Console(file=out, width=400))
    ) as progress:
        progress.show(status(heldout_open=0))
        for left in (20, 15):
            progress.show_evaluation(status(heldout_open=left))
    training, first, last = out.getvalue().splitlines()
    assert "step 60/" in training and "learner step" in training
    assert training.startswith("training  step ")
    assert first.startswith(
        "evaluating  held-out episodes 0/20 played  elapsed 0 s  left ?  model m-7b"
    )
    assert last.startswith("evaluating  held-out episodes 5/20 played")
    assert "step" not in first + last


def test_the_time_left_is_that_of_this_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = [100.0]
    monkeypatch.setattr("driver.progress.time.monotonic", lambda: clock_s[0])
    monkeypatch.setattr("driver.progress.LINE_EVERY_S", 0.0)
    config = replace(Config(run_dir=str(tmp_path)), learner=replace(Config().learner, steps=80))
    out = io.StringIO()
    with Progress(
        config, title="training", screen=shown_in(Console(file=out, width=400))
    ) as progress:
        for step in (60, 60, 62, 58, 80):  # 58: the learner died, and went on from a checkpoint
            progress.show(status(heldout_open=0, learner_step=step))
            clock_s[0] += 5.0
    left = [re.search(r"left (.*?)  ", line) for line in out.getvalue().splitlines()]
    assert [found and found[1] for found in left] == ["?", "?", "90 s", "?", "0 s"]


def status(*, heldout_open: int, learner_step: int = 60) -> Status:
    return Status(
        counts=Counts(
            open=0,
            leased=0,
            complete=0,
            claimed=0,
            trained=0,
            stale=0,
            filtered=0,
            trajectories=7,
            steps=9,
        ),
        version=3,
        learner_step=learner_step,
        metrics={"heldout/success": 0.5},
        components={},
        heldout_open=heldout_open,
        notices={},
    )


def test_a_directory_of_other_things_does_not_become_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "young").mkdir()
    # of a run that was killed before it was one
    for name in (".hidden", "driver.json", "segments", "lost+found"):
        (tmp_path / "young" / name).touch()
    preflight.check_run_dir(replace(Config(), run_dir="young"))
    preflight.check_run_dir(replace(Config(), run_dir="not/yet"))
    for given, words in {
        "": "it is empty",
        ".": r"other things in it \(notes.txt, young\)",
        "notes.txt": "notes.txt is no directory",
        "notes.txt/run": "notes.txt is no directory",
    }.items():
        with pytest.raises(
            ConfigError, match=rf"run_dir='{re.escape(given)}'.*{words}.*e.g. run_dir=runs/mine"
        ):
            preflight.check_run_dir(replace(Config(), run_dir=given))
        assert (
            main(["train", KEY_ROOM, f"run_dir={given}"])
            == main(["train", KEY_ROOM, f"run_dir={given}", "--dry-run"])
            == 2
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "young"]


@pytest.mark.parametrize("link", ["logs", "logs/coordinator.log", "segments/a/b", "checkpoints"])
def test_a_directory_with_links_does_not_become_a_run(
    link: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another user may have made it in a folder for everybody's runs, before this user's first."""
    own = tmp_path / "own"
    own.mkdir()
    files = [own / name for name in ("environment.log", "coordinator.log")]
    for file in files:
        file.write_text("mine")
    made = tmp_path / "run" / link
    made.parent.mkdir(parents=True)
    made.symlink_to(files[1] if made.suffix else own)
    assert main(["train", KEY_ROOM, f"run_dir={tmp_path / 'run'}", "learner.steps=1"]) == 2
    assert f"run/{link} is a symbolic link" in capsys.readouterr().err
    assert [file.read_text() for file in files] == ["mine", "mine"], "unread and unchanged"
    assert len(list(own.iterdir())) == len(files)


def test_an_empty_directory_of_another_user_does_not_become_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could put links into it while the run writes there."""
    run = tmp_path / "run"
    run.mkdir()
    neighbour = Neighbour(monkeypatch)
    neighbour.gets(run)
    assert main(["train", KEY_ROOM, f"run_dir={run}", "--dry-run"]) == 2
    assert "belongs to another user (uid 65534)" in capsys.readouterr().err
    neighbour.gives_back(run)
    assert main(["train", KEY_ROOM, f"run_dir={run}", "--dry-run"]) == 0, "a mounted directory"


@pytest.mark.parametrize(
    ("whose", "words"),
    [
        ("neighbour", r"shared belongs to another user \(uid 65534\)"),
        ("nobody", "primary.json is not there; mount the volume"),
        ("elsewhere", "was brought to .*elsewhere on .* and goes on there"),
    ],
)
def test_no_start_writes_into_a_storage_that_may_be_anothers(
    whose: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a link in place of a storage in /tmp led the settings over another run's.

    And a run that was brought elsewhere was given the settings of its old directory.
    """
    for_all, precious = tmp_path / "for all", tmp_path / "precious"
    for_all.mkdir()
    for_all.chmod(0o1777)
    place = for_all / "shared" / "run"
    asked = [f"run_dir={tmp_path / 'run'}", f"store.uri={place.as_uri()}"]
    config = configs.load(KEY_ROOM, asked)
    layout = preflight.make_or_open_run(config)
    if whose == "elsewhere":
        (tmp_path / "elsewhere").mkdir()
        primary_directory.take(tmp_path / "elsewhere", layout.storage)
    else:
        place.parent.rename(tmp_path / "aside")
        place.parent.mkdir()
    if whose == "nobody":
        place.mkdir()
    if whose == "neighbour":
        precious.mkdir()
        place.symlink_to(precious)
        Neighbour(monkeypatch).gets(place.parent)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match=words):
        preflight.make_or_open_run(config)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_a_dry_run_looks_at_the_run_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configs.load(KEY_ROOM, [f"run_dir={tmp_path / 'run'}"])
    preflight.make_or_open_run(config)
    assert main(["train", KEY_ROOM, f"run_dir={config.run_dir}", "--dry-run"]) == 0
    assert main(["train", KEY_ROOM, f"run_dir={config.run_dir}", "seed=1", "--dry-run"]) == 2
    assert "was made by another config (seed: 0 -> 1)" in capsys.readouterr().err


def test_names_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would make an emoji of `:coffee:` and a colour of `[red]`."""
    name = str(tmp_path / ":coffee:[red]")  # without a space, at which YAML breaks lines
    assert main(["train", KEY_ROOM, "--dry-run", f"run_dir='{name}'"]) == 0
    assert name in capsys.readouterr().out
    out = io.StringIO()
    with said_with_spinner(
        "starting :coffee:[red]Env once", Console(file=out, width=200, force_terminal=True)
    ):
        pass
    assert "starting :coffee:[red]Env once" in out.getvalue()


def test_a_dry_run_says_which_gpus_are_missing_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = ["actors.gpus_per_worker=0.5", "learner.gpus_per_rank=0.5"]
    command = [KEY_ROOM, "--dry-run", *shared]
    monkeypatch.setattr(preflight, "gpus_of_this_machine", lambda: 0)
    assert main(["train", *command]) == 0
    assert (
        "missing here:\n  GPUs: the config asks for 1, this machine has 0"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(preflight, "gpus_of_this_machine", lambda: 1)
    assert main(["train", *command]) == 0
    assert "GPUs:" not in capsys.readouterr().out
    monkeypatch.undo()
    assert preflight.missing_gpus(Config()) == [] and preflight.gpus_of_this_machine() == 0, (
        "tests see no GPU"
    )


def test_settings_that_cannot_be_read_again_make_no_run(tmp_path: Path) -> None:
    """The attack: the run was made, and no command went on with it."""
    config = configs.load(KEY_ROOM, [f"run_dir={tmp_path / 'run'}"])
    prompt = replace(config.prompt, template="\ufeff" * 300_000)
    with pytest.raises(ConfigError, match="it has more than 1,048,576 characters"):
        preflight.make_or_open_run(replace(config, prompt=prompt))
    with pytest.raises(StoreError, match="bytes in run.json, more than 4,194,304; shorten"):
        RunLayout.create(tmp_path / "run", config_yaml="\u4e00" * 800_000)
    assert not (tmp_path / "run").exists()
