"""Whole runs of gigpo train on key_room, with the real engine, learner and processes: to the end,
interrupted, and killed.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.compute as pc
import pytest
import torch
from transformers import AutoTokenizer

import store
from cli.__main__ import main
from configs import Config
from driver import run_lock
from learner.data.micro_batch import micro_batches
from learner.distributed.private_ray import RAY_DIRECTORY
from learner.training.engine import Engine
from printable import counted
from store import RunLayout
from tests.project.test_docs_metrics import documented
from tests.support.curves_read import in_store, in_tensorboard
from tests.support.fault_runs import catalog_number, trained_step
from tests.support.learner_samples import one_step_each
from tests.support.processes import litter, unused_shared_memory
from tests.support.run_views import connect

pytestmark = pytest.mark.run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
env: {name: key_room, max_steps: 12}
prompt: {template: compact, history_length: 1, max_prompt_tokens: 120, invalid: admissible}
actors: {groups_in_flight: 4, max_response_tokens: 12, kv_cache_gib: 0.25}
model: {tiny: {vocabulary_size: 384, hidden_size: 64, layers: 2, clone_steps: 20}}
algorithm: {group_size: 4}
learner: {steps: 6, groups_per_step: 4, learning_rate: 1.0e-3, checkpoint_every: 2}
evaluation: {every: 3, final_episodes_per_task: 1}
"""
START_TIMEOUT_S = 900.0  # only for what hangs
DOCUMENTED_QUERIES = re.findall(
    r"```sql\n(.*?)```", (ROOT / "docs" / "sql.md").read_text(), re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    run: Path
    driver: int
    code: int
    output: str


@dataclass(frozen=True, kw_only=True)
class Before:
    """The things that there were before a run: our child processes, and unused shared memory."""

    pids: frozenset[int]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Before:
        return cls(
            pids=frozenset(child.pid for child in psutil.Process().children(recursive=True)),
            shared_memory=unused_shared_memory(),
        )


def left_since(before: Before, driver: int) -> list[str]:
    """Return the processes, the shared memory and the Ray sessions that a run left behind."""
    # Only sessions with our driver's process id: others belong to other runs on this machine.
    sessions = [path.name for path in Path("/tmp").glob(f"{RAY_DIRECTORY}{driver}-*")]
    return [*map(str, Before.now().pids - before.pids), *litter(before.shared_memory), *sessions]


def left_sockets(run: Path) -> list[Path]:
    """Return engine sockets outside Ray's directory. Those inside are removed with it."""
    return [path for path in (run.parent / "tmp").rglob("*") if path.is_socket()]


def rows(run: Path, sql: str) -> list[tuple]:
    with connect(RunLayout.open(run)) as connection:
        return connection.sql(sql).fetchall()


def plant_as_a_neighbour(temporary: Path, shared: Path) -> None:
    """Do what another user can in two directories that are open to all: no run may care.

    torch would make a directory of this name. Ray, vLLM and multiprocessing would import from the
    current directory first.
    """
    (temporary / f"torchinductor_{getpass.getuser()}").touch()
    shared.mkdir(exist_ok=True)
    for name in ("blake3", "deepspeed", "multiprocessing", "psutil", "torch", "vllm"):
        (shared / f"{name}.py").write_text("raise ImportError('a neighbour ran this')")


def start(run: Path, *overrides: str) -> subprocess.Popen[str]:
    config = run.parent / "key_room.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(CONFIG)
    # -P: as the program `gigpo`, which imports nothing from the current directory
    command = [sys.executable, "-P", "-m", "cli", "train", str(config), f"run_dir={run}"]
    temporary, shared = run.parent / "tmp", run.parent / "shared"
    temporary.mkdir(exist_ok=True)
    plant_as_a_neighbour(temporary, shared)
    variables = {"HF_HUB_OFFLINE": "1", "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    environ = {**os.environ, **variables}
    return subprocess.Popen(
        [*command, *overrides],
        cwd=shared,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], run: Path) -> Finished:
    output, _ = process.communicate(timeout=START_TIMEOUT_S)
    return Finished(run=run, driver=process.pid, code=process.returncode, output=output)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.2)


# Groups that were claimed or trained on after a learner step.
CONSUMED_SINCE = """
SELECT count(*) FROM batch_group JOIN batch USING (batch_id)
WHERE live = 1 AND (state = 'claimed' OR (state = 'trained' AND learner_step > {learner_step}))
"""


def checkpoint(run: Path) -> int:
    """Learner step of the newest one."""
    return catalog_number(run, "SELECT max(learner_step) FROM checkpoint WHERE live = 1")


def trajectory_uids(run: Path) -> set[object]:
    return {uid for (uid,) in rows(run, "SELECT traj_uid FROM trajectories")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, list[str]]:
    """One run from nothing to the end, and what it left behind."""
    run = tmp_path_factory.mktemp("whole") / "run"
    before = Before.now()
    done = finish(start(run), run)
    assert done.code == 0, done.output
    return done, left_since(before, done.driver)


@pytest.fixture(scope="module")
def reader(finished: tuple[Finished, list[str]]) -> Iterator[store.Reader]:
    with store.open_run(finished[0].run) as reader:
        yield reader


@pytest.fixture(scope="module")
def base(finished: tuple[Finished, list[str]]) -> str:
    return f"model.path={finished[0].run / 'base' / 'policy'}"


def test_the_run_says_how_well_it_did_and_where_everything_is(
    finished: tuple[Finished, list[str]],
) -> None:
    output = finished[0].output
    assert "success on training tasks" in output
    assert re.search(
        r"held-out tasks: \d\.\d\d  \(95% interval \d\.\d\d to \d\.\d\d, \d+ of 20 episodes\)",
        output,
    )
    assert "gigpo sql" in output
    assert re.search(
        r"6 learner steps took \d+ (s|min), one of them \d+\.\d\d s \(median\)", output
    )
    assert "advantages" not in output
    assert (
        "cloning  step " in output
        and "training  step " in output
        and "evaluating  held-out episodes " in output
    )
    assert "the base policy is cloned: " in output
    assert "Traceback" not in output
    report = (finished[0].run / "report.html").read_text()
    assert f"report     {finished[0].run}/report.html" in output
    assert "Held-out tasks: " in report and 'class="error"' not in report


def test_a_normal_end_leaves_no_traceback_in_the_logs(
    finished: tuple[Finished, list[str]],
) -> None:
    check_no_traceback(finished[0].run, {})


def log_sizes(run: Path) -> dict[str, int]:
    """Return the characters of each log of the run, and of the cloning of its base policy."""
    return {str(path): len(path.read_text()) for path in run.rglob("logs/*.log")}


def check_no_traceback(run: Path, before: dict[str, int]) -> None:
    """Check what was logged since `log_sizes` returned `before`."""
    logs = log_sizes(run)
    assert {Path(name).name for name in logs} >= {"coordinator.log", "learner.log", "worker-0.log"}
    assert any(name.endswith("worker-0-engine.log") for name in logs)
    for name in logs:
        said = Path(name).read_text()[before.get(name, 0) :]
        assert "Traceback" not in said and "EngineDeadError" not in said, f"{name}: {said}"


def test_every_promised_metric_has_rows(finished: tuple[Finished, list[str]]) -> None:
    names = {name for (name,) in rows(finished[0].run, "SELECT DISTINCT name FROM metrics")}
    assert names >= {
        "train/success", "heldout/success", "staleness/max", "learner/idle_fraction",
        "tokens/generated_per_s", "tokens/trained_per_s", "time/advantages_s",
        "time/filter_s", "time/step_s", "train/return",
        "train/episode_steps", "heldout/return", "heldout/episode_steps",
    }  # fmt: skip
    assert names <= set(documented()), "docs/metrics.md has them all"
    assert rows(
        finished[0].run,
        "SELECT count(DISTINCT learner_step) FROM metrics WHERE name = 'train/success'",
    ) == [(6,)]


def test_tensorboard_shows_what_the_store_has(finished: tuple[Finished, list[str]]) -> None:
    run = finished[0].run
    rows = in_store(run)
    assert in_tensorboard(run) == rows
    assert [step for name, step, _ in rows if name == "heldout/success"] == [3, 6]
    assert in_tensorboard(run / "base") == in_store(run / "base")


def test_nothing_was_too_stale_and_no_task_is_in_both_splits(
    finished: tuple[Finished, list[str]],
) -> None:
    run = finished[0].run
    assert rows(run, "SELECT count(*) FROM staleness_violations") == [(0,)]
    assert rows(run, "SELECT count(*) FROM task_overlap") == [(0,)]
    assert rows(run, "SELECT count(*) FROM lineage") == [(24,)]  # 6 learner steps of 4 groups


@pytest.mark.parametrize("query", DOCUMENTED_QUERIES, ids=range(len(DOCUMENTED_QUERIES)))
def test_a_documented_query_runs(
    finished: tuple[Finished, list[str]], reader: store.Reader, query: str
) -> None:
    answer = reader.sql(query)
    # Some tasks are always solved in the end, no state is met often enough in so few episodes,
    # nothing was rolled back.
    may_be_empty = any(word in query for word in ("HAVING", "rolled back"))
    assert answer.num_columns > 0 and (answer.num_rows > 0 or may_be_empty), query


def test_enough_questions_are_documented() -> None:
    assert len(DOCUMENTED_QUERIES) >= 15


def test_fsck_finds_nothing_in_a_finished_run(finished: tuple[Finished, list[str]]) -> None:
    command = [sys.executable, "-m", "cli", "fsck", str(finished[0].run)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_from_a_learner_step_to_the_weights_that_wrote_its_rows(
    finished: tuple[Finished, list[str]],
) -> None:
    run = finished[0].run
    found = rows(
        run,
        """SELECT count(*), count(DISTINCT s.traj_uid), min(len(s.response_ids)), count(v.digest)
           FROM lineage l JOIN steps s USING (group_uid)
           JOIN versions v ON v.version = s.version_min
           WHERE l.learner_step = 3""",
    )
    n_rows, n_trajectories, shortest, n_digests = found[0]
    assert n_trajectories == 16
    assert n_rows == n_digests
    assert shortest >= 1


def test_engine_and_learner_give_a_token_the_same_log_probability(
    finished: tuple[Finished, list[str]],
) -> None:
    """Behaviour log-probabilities as recorded by vLLM, against the learner's forward pass on the
    same published weights.
    """
    run = finished[0].run
    kept = {int(path.name.removeprefix("v")) for path in (run / "weights").glob("v*")}
    with connect(RunLayout.open(run)) as connection:
        table = connection.sql(
            f"""SELECT prompt_ids, response_ids, response_logprobs, version_min,
                0.0::DOUBLE AS advantage, 0::BIGINT AS staleness
            FROM steps
            WHERE split = 'train' AND version_min = version_max AND version_min IN {tuple(kept)}"""
        ).to_arrow_table()
    version = table["version_min"][0].as_py()
    of_version = table.filter(pc.equal(table["version_min"], version))
    config = Config()
    engine = Engine(
        model_path=run / "weights" / f"v{version:06d}",
        model=config.model,
        learner=config.learner,
        loss=config.loss,
        temperature=1.0,
        seed=0,
    )
    batches = micro_batches(one_step_each(of_version), micro_batch_tokens=4096, ranks=1)
    for batch, logprobs_N in zip(batches, engine.score(batches), strict=True):
        torch.testing.assert_close(logprobs_N, batch.behaviour_logprobs_N, atol=1e-5, rtol=0.0)
    engine.close()


def test_every_version_was_served_as_published(finished: tuple[Finished, list[str]]) -> None:
    served = rows(
        finished[0].run,
        """
        WITH load AS (
            SELECT (detail ->> 'version')::BIGINT AS version, detail ->> 'digest' AS served
            FROM events WHERE what = 'weights loaded'
        )
        SELECT version, count(served), count(*) FILTER (served <> digest)
        FROM versions LEFT JOIN load USING (version) GROUP BY version
        """,
    )
    assert len(served) == 7 and all(different == 0 for _, _, different in served)
    loaded = {version for version, loads, _ in served if loads}
    wrote = {
        version
        for (version,) in rows(
            finished[0].run, "SELECT DISTINCT unnest([version_min, version_max]) FROM steps"
        )
    }
    assert wrote <= loaded, (
        "every token is of weights whose digest is recorded; others than these may be skipped"
    )
    assert {0, 6} <= wrote, "the first version is played, and the last in the held-out evaluation"


def test_the_base_policy_came_through_the_same_store(finished: tuple[Finished, list[str]]) -> None:
    base = finished[0].run / "base"
    (losses,) = zip(
        *rows(base, "SELECT value FROM metrics WHERE name = 'loss/loss' ORDER BY learner_step"),
        strict=True,
    )
    assert len(losses) == 20
    assert losses[-1] < 0.5 * losses[0]


def test_an_orderly_end_leaves_nothing_behind(finished: tuple[Finished, list[str]]) -> None:
    done, left = finished
    assert left == []
    assert not left_sockets(done.run)


def test_a_finished_run_is_not_trained_again(finished: tuple[Finished, list[str]]) -> None:
    again = finish(start(finished[0].run), finished[0].run)
    assert again.code == 0
    assert "held-out tasks" in again.output
    assert trained_step(finished[0].run) == 6


def test_killed_moved_and_stopped_by_ctrl_c_it_goes_on_and_loses_nothing(
    tmp_path: Path, base: str
) -> None:
    run, moved = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    process = start(run, base, "learner.steps=500")
    wait_for(lambda: (run / "open.sql").exists() and trained_step(run) >= 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    committed = trajectory_uids(run)
    assert committed
    run_lock.remove_leftovers(run)  # Ray ends them too, some seconds later
    # Another user who locked the file at which vLLM's processes meet would keep the engine waiting.
    meets = [path for path in (tmp_path / "tmp").iterdir() if path.name.startswith("vllm")]
    assert meets == [], "it is in the directory that only this user can enter"
    trained_by_then = trained_step(run)
    moved.parent.mkdir()
    shutil.copytree(run, moved)
    shutil.rmtree(run)
    run = moved
    n_kept = catalog_number(run, "SELECT count(*) FROM trajectory")
    n_again = catalog_number(run, CONSUMED_SINCE.format(learner_step=checkpoint(run)))
    before, logged = Before.now(), log_sizes(run)
    command = [
        sys.executable,
        "-m",
        "cli",
        "train",
        "--resume",
        run.name,
        "actors.groups_in_flight=2",
    ]
    process = subprocess.Popen(
        command,
        cwd=run.parent,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    wait_for(lambda: checkpoint(run) > trained_by_then, process)
    process.send_signal(signal.SIGINT)
    again = finish(process, run)
    assert again.code == 130, again.output
    (restored,) = re.findall(r": (continues at learner step .*)", again.output)
    assert f"{counted(n_again, 'group')} consumed after the checkpoint" in restored
    assert f"; {n_kept} trajectories are kept" in restored
    assert "thrown away: " in again.output
    check_no_traceback(run, logged)
    assert f"gigpo train --resume {run.name}" in again.output and "Traceback" not in again.output
    assert committed <= trajectory_uids(run)
    steps = trained_step(run)
    assert checkpoint(run) == steps  # nothing has to be trained again
    trained = rows(
        run,
        "SELECT learner_step, count(*) FROM lineage WHERE batch_state = 'trained' "
        "GROUP BY 1 ORDER BY 1",
    )
    assert trained == [(step, 4) for step in range(1, steps + 1)]
    assert rows(run, "SELECT count(*) - count(DISTINCT group_uid) FROM lineage WHERE live") == [
        (0,)
    ]
    assert rows(run, "SELECT count(*) FROM staleness_violations") == [(0,)]
    ((versions, newest),) = rows(run, "SELECT count(DISTINCT version), max(version) FROM versions")
    assert versions == newest + 1  # restored weights got a number of their own
    assert left_since(before, again.driver) == []
    assert in_tensorboard(run) == in_store(run), (
        "also the rows of the kill, of the roll-back, and of the last step"
    )


@pytest.mark.slow
def test_in_synchronous_mode_nothing_is_generated_while_the_learner_trains(
    tmp_path: Path, base: str
) -> None:
    run = tmp_path / "run"
    stop = "prompt.stop=[</action>]"
    done = finish(
        start(run, base, "max_staleness=0", "learner.steps=3", "evaluation.every=0", stop), run
    )
    assert done.code == 0, done.output
    tokenizer = AutoTokenizer.from_pretrained(base.removeprefix("model.path="))
    ended = rows(run, "SELECT DISTINCT response_ids[-1] FROM steps WHERE finish_reason = 'stop'")
    word = tokenizer.convert_tokens_to_ids("</action>")
    assert {(word,)} <= set(ended) <= {(word,), (tokenizer.eos_token_id,)}
    assert rows(run, "SELECT max(staleness) FROM lineage") == [(0,)]
    assert rows(run, "SELECT max(fraction) < 0.1 FROM generation_overlap") == [(True,)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["learner.stepz=3"], ["learner.stepz", "learner.steps"]),
        (["env.name=key_rom"], ["key_rom", "key_room"]),
        (["env.name=no_such_module:World"], ["no_such_module"]),
        (["model.path=models/nowhere"], ["models/nowhere", "config.json"]),
        (["max_staleness=-2"], ["max_staleness=-2"]),
    ],
)
def test_a_users_mistake_is_one_line_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: Sequence[str], words: list[str]
) -> None:
    code = train_here(tmp_path / "run", *overrides)
    check_mistake(tmp_path / "run", code, "".join(capsys.readouterr()), words)


def train_here(run: Path, *overrides: str) -> int:
    """Give the command in this process, for what is refused before anything starts."""
    config = run.parent / "key_room.yaml"
    config.write_text(CONFIG)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return main(["train", str(config), f"run_dir={run}", *overrides])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_gpus_that_are_not_there_are_one_line_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = finish(start(run, "learner.gpus_per_rank=1", "actors.gpus_per_worker=1"), run)
    check_mistake(run, done.code, done.output, ["2 GPUs", "0"])


def check_mistake(run: Path, code: int, output: str, words: list[str]) -> None:
    assert code == 2
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), output
    assert "Traceback" not in output
    assert not (run / "base").exists()


def test_a_run_of_another_config_or_a_newer_format_is_refused(
    finished: tuple[Finished, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(finished[0].run, "algorithm.omega=0.5") == 2
    said = "".join(capsys.readouterr())
    assert "algorithm.omega: 1.0 -> 0.5" in said
    assert "Traceback" not in said


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "configs" / "alfworld_qwen2.5_1.5b.yaml"
    assert main(["train", str(config), "--dry-run", f"run_dir={tmp_path / 'run'}"]) == 0
    assert "1 rank x 1 GPU" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
