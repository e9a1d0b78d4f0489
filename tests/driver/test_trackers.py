"""Trackers show every learner step once, in one run of theirs, also after a resume."""

from __future__ import annotations

import json
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import configs
from configs import Config, ConfigError
from driver.trackers import tracker as tracker_module
from driver.trackers.follow import follow_metrics
from driver.trackers.services import TrackerSetup
from driver.trackers.tracker import TrackerProcess, check_trackers
from store import RunLayout
from tests.driver.test_tensorboard_writer import Run

NETWORK = ("WANDB_API_KEY", "WANDB_BASE_URL", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL",
           "MLFLOW_TRACKING_URI", "TRACKIO_DIR", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME")  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    for name in NETWORK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = Run(tmp_path / "run")
    yield made
    made.catalog.close()


def unexpected(text: str) -> None:
    if text.startswith("waiting for the trackers"):  # a slow machine
        return
    raise AssertionError(f"nothing is to be said here: {text}")


def config_of(run: Run, *trackers: str) -> Config:
    return replace(configs.Config(), run_dir=str(run.layout.root), trackers=list(trackers))


def start(run: Run, tracker: str, n_steps: int, *, loss: float = 1.0, heldout: int = 0) -> None:
    """Drive the run once: train some steps, and look after each."""
    with follow_metrics(config_of(run, tracker), run.layout, say=unexpected) as metrics:
        metrics.follow()
        for _ in range(n_steps):
            run.train(1, loss=loss)
            metrics.follow()
        if heldout:  # an evaluation of earlier weights ends
            run.record({"heldout/success": 0.5}, version=heldout, step=heldout)


def wanted(run: Run) -> dict[str, list[int]]:
    return {"loss/loss": [*range(1, 6)], "heldout/success": [2]}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a wandb file: LevelDB's log format, after a head of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # a block ends with zeros where no head has room
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def in_wandb(run: Run) -> dict[str, list[int]]:
    """Return the learner steps of each metric, in the offline files of one wandb run."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, list[int]] = {}
    files = sorted((run.layout.root / "trackers/wandb").glob("offline-run-*/run-*.wandb"))
    assert {path.name for path in files} == {f"run-{run.layout.info.run_id}.wandb"}
    steps: list[int] = []
    for path in files:
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                steps.append(items.pop("_step", record.history.step.num))
                learner_step = items.pop("learner_step")
                for name in items:
                    if not name.startswith("_"):
                        found.setdefault(name, []).append(learner_step)
    assert steps == sorted(set(steps)), "its own step only grows, also after a resume"
    return found


def in_trackio(run: Run) -> dict[str, list[int]]:
    (path,) = (run.layout.root / "trackers/trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ).fetchall()
    assert {row[0] for row in rows} == {run.layout.info.run_id}
    found: dict[str, list[int]] = {}
    for _, step, metrics in rows:
        for name in json.loads(metrics):
            found.setdefault(name, []).append(step)
    return found


def in_mlflow(run: Run) -> dict[str, list[int]]:
    with sqlite3.connect(run.layout.root / "trackers/mlflow.db") as database:
        rows = database.execute("SELECT key, step FROM metrics ORDER BY step").fetchall()
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (1,)
        (status,) = database.execute("SELECT status FROM runs").fetchone()
        parameters = dict(database.execute("SELECT key, value FROM params").fetchall())
    assert status == "FINISHED" and parameters["algorithm.group_size"] == "8"
    found: dict[str, list[int]] = {}
    for name, step in rows:
        found.setdefault(name, []).append(step)
    return found


READERS = {"wandb": in_wandb, "trackio": in_trackio, "mlflow": in_mlflow}


@pytest.mark.parametrize(
    "tracker", ["wandb", "trackio", pytest.param("mlflow", marks=pytest.mark.slow)]
)
def test_a_tracker_shows_each_step_once_in_one_run_also_after_a_resume(
    run: Run, tracker: str
) -> None:
    for package in tracker_module.PACKAGES[tracker]:
        pytest.importorskip(package)
    start(run, tracker, 3)
    start(run, tracker, 2, heldout=2)
    start(run, tracker, 0)
    found = READERS[tracker](run)
    assert {name: found[name] for name in ("loss/loss", "heldout/success")} == wanted(run)
    run.layout.check_no_links()


def test_steps_that_are_trained_again_are_not_shown_twice(run: Run) -> None:
    pytest.importorskip("trackio")
    start(run, "trackio", 3)
    run.roll_back(1)
    start(run, "trackio", 4, loss=7.0, heldout=2)
    assert in_trackio(run)["loss/loss"] == [1, 2, 3, 4, 5]


def fake_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let another program take the place of Python for the trackers."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{program}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(tracker_module.sys, "executable", str(path))
    monkeypatch.setattr(tracker_module, "_is_there", lambda package: True)


def test_a_tracker_takes_no_settings_from_the_current_directory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: wandb/settings in a stranger's run named the server that the key was sent to."""
    pytest.importorskip("wandb")
    theirs = tmp_path / "theirs"
    (theirs / "wandb").mkdir(parents=True)
    (theirs / "wandb" / "settings").write_text("[default]\nentity = theirs\nproject = theirs\n")
    monkeypatch.chdir(theirs)
    monkeypatch.setenv("WANDB_DEBUG", "true")
    start(run, "wandb", 1)
    said = (run.layout.logs / "wandb.log").read_text()
    assert str(theirs) not in said
    assert sorted(path.name for path in theirs.rglob("*")) == ["settings", "wandb"]


def test_a_relative_directory_of_a_tracker_is_one_of_the_current_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tracker(
        tmp_path,
        monkeypatch,
        "import os; print(os.getcwd(), os.environ['WANDB_DIR'], os.environ['MLFLOW_TRACKING_URI'],"
        " file=sys.stderr); sys.exit(3)",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DIR", "mine")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    tracker = TrackerProcess(
        "wandb", config=config_of(run, "wandb"), layout=run.layout, say=lambda text: None
    )
    tracker.wait_until_ready()
    tracker.close()
    said = (run.layout.logs / "wandb.log").read_text()
    assert said == f"{run.layout.root / 'trackers'} {tmp_path / 'mine'} http://127.0.0.1:1\n"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("sys.exit(3)", "its process ended with status 3"),
        ("print('{\"fault\": \"CommError: no network\"}', flush=True); time.sleep(60)", "CommError: no network"),
        ("time.sleep(60)", "it has not started for 0.5 s"),
        ("print('{\"ready\": true}', flush=True); time.sleep(60)", "it has not ended for 1 s"),
    ],
)  # fmt: skip
def test_a_tracker_that_fails_is_one_line_and_the_run_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    fake_tracker(tmp_path, monkeypatch, program)
    monkeypatch.setattr(tracker_module, "START_S", 0.5 if "started" in why else 60.0)
    monkeypatch.setattr(tracker_module, "CLOSE_S", 1.0)
    said: list[str] = []
    with follow_metrics(config_of(run, "wandb"), run.layout, say=said.append) as metrics:
        for _ in range(3):
            run.train(1, loss=1.0)
            metrics.follow()
            time.sleep(0.05)
    assert len(said) == 1 and why in said[0], said
    assert said[0].startswith("the tracker wandb failed: ")


def test_a_server_that_says_too_much_is_quoted_in_part(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would read 64 MiB for a minute, in which nothing else is looked at."""
    said = json.dumps({"error_code": "INVALID_STATE", "message": "words " * 200_000}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(400)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        setup = TrackerSetup(
            run_id="r", run_name="r", directory=str(run.layout.root), settings={}, n_logged=0
        )
        ended = subprocess.run(
            [sys.executable, "-m", "driver.trackers.tracker_process", "mlflow"],
            input=json.dumps(asdict(setup)).encode() + b"\n",
            capture_output=True,
            timeout=60,
            check=False,
        )
        server.shutdown()
    assert b"INVALID_STATE" in ended.stdout
    assert len(ended.stdout) < 500


def test_a_tracker_that_reads_nothing_never_blocks_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_tracker(tmp_path, monkeypatch, "print('{\"ready\": true}', flush=True); time.sleep(60)")
    monkeypatch.setattr(tracker_module, "MAX_UNREAD_BYTES", 1000)
    monkeypatch.setattr(tracker_module, "CLOSE_S", 0.1)
    said: list[str] = []
    run.record({f"loss/{number:05d}": 1.0 for number in range(9000)}, version=0, step=0)
    tracker = TrackerProcess(
        "wandb", config=config_of(run, "wandb"), layout=run.layout, say=said.append
    )
    tracker.wait_until_ready()
    from store import metrics_since

    tracker.take(metrics_since(run.layout, 0).rows, has_all_rows=True)
    tracker.close()
    assert len(said) == 1 and "bytes of metrics to read" in said[0]


def test_a_missing_package_is_one_line_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker_module, "_is_there", lambda package: False)
    with pytest.raises(ConfigError, match=r"trackers=wandb needs .* pip install 'async-gigpo\[tra"):
        check_trackers(replace(configs.Config(), trackers=["tensorboard", "wandb"]))


def test_settings_are_shown_without_what_may_be_a_secret() -> None:
    options = {
        "api_key": "s3cret",
        "url": "http://me:s3cret@host/x",
        "n_games": 3,
        "a": {"token": "s3cret"},
        "servers": [{"url": "http://me:s3@cret@h/y?api_key=s3cret#s3cret", "password": "s3cret"}],
        "pairs": [["Cookie", "sid=s3cret"], {"name": "Authorization", "value": "s3cret"}],
        "arguments": ["--api-key", "s3cret"],
        "headers": {"X": ["s3cret"]},
        "sizes": [1, 2],
        "is_large": True,
        "nothing": [],
        "text": "see https://h/z?key=s3cret, Server=x;Password=s3cret",
        "https://h?key=s3cret": 4,
        "one": {"name": "api_key", "value": "s3cret"},
        "passphrase": "s3cret",
        "token": 12345,
    }
    config = replace(configs.Config(), env=replace(configs.Config().env, options=options))
    shown = configs.shown_settings(config)
    assert "cret" not in json.dumps({key: shown[key] for key in shown if "options" in key})
    assert "12345" not in json.dumps(shown)
    assert shown["env.options.n_games"] == 3
    assert shown["env.options.is_large"] is True
    assert [shown["env.options.sizes.0"], shown["env.options.sizes.1"]] == [1, 2]
    assert shown["env.options.url"] == "(not shown)"
    assert shown["actors.max_response_tokens"] == 512


@pytest.mark.parametrize(
    "text",
    [
        "trackers=wandb",
        "trackers=[wanbd]",
        "trackers=[wandb,wandb]",
        "metrics_port=-1",
        "metrics_port=99999",
        "alarms.webhook_env=https://x/y",
    ],
)
def test_wrong_settings_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        configs.load("configs/quickstart.yaml", [text])
    assert "\n" not in str(error.value) and "x/y" not in str(error.value)


def test_trackers_may_change_between_two_starts() -> None:
    before = configs.Config()
    after = replace(before, trackers=["mlflow"], metrics_port=9400)
    assert configs.forbidden_changes(before, after) == []


def test_a_damaged_record_is_one_line(tmp_path: Path) -> None:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    (layout.root / "given.json").write_text('{"wandb": 3}')
    from driver.trackers.delivered import DeliveredMetrics
    from store import StoreError

    with pytest.raises(StoreError, match="given.json is not readable"):
        DeliveredMetrics(layout, "wandb")
