"""gigpo train on what another run has played, with the real learner and processes: killed in the
middle, it goes on, and ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from store import RunLayout, VersionRecord
from store.maintenance.fsck import CONTENTS, check
from tests.support.engine_samples import make_base
from tests.support.learner_loop import make_config, open_coordinator, play
from tests.support.run_views import connect

pytestmark = [pytest.mark.run, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


def documented_queries(page: str) -> list[str]:
    return re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


CONFIG = """
env: {name: not_installed_here:World}
learner: {steps: 99, groups_per_step: 2, learning_rate: 1.0e-3, checkpoint_every: 2}
offline: {uses: 4, train_on: "advantage > 0"}
"""
N_GROUPS, LAST_STEP = 6, 12  # 6 groups, 4 times, 2 a step
TIMEOUT_S = 900.0  # only for what hangs


def make_source(root: Path) -> RunLayout:
    coordinator = open_coordinator(make_config(root, max_staleness=N_GROUPS, steps=9))
    coordinator.publish(VersionRecord(version=3, path="weights/v3", digest="d", learner_step=0))
    for _ in range(N_GROUPS):
        lease = coordinator.lease("w")
        assert lease is not None
        play(coordinator, lease)
    coordinator.close()
    (root / "base").mkdir()
    make_base(root / "base" / "policy")
    return coordinator.layout


def start(run: Path, source: str, *overrides: str) -> subprocess.Popen[str]:
    config = run.parent / "offline.yaml"
    config.write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "cli",
        "train",
        str(config),
        f"run_dir={run}",
        f"source={source}",
        *overrides,
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def rows(run: Path, sql: str) -> list[tuple]:
    with connect(RunLayout.open(run)) as connection:
        return connection.sql(sql).fetchall()


def learner_step(run: Path) -> int:
    return rows(
        run, "SELECT coalesce(max(learner_step), 0) FROM lineage WHERE batch_state = 'trained'"
    )[0][0]


def test_killed_in_the_middle_it_goes_on_without_its_source_to_where_that_is_used_up(
    tmp_path: Path,
) -> None:
    source, run = make_source(tmp_path / "source"), tmp_path / "run"
    process = start(run, f"{source.root}@won")
    deadline = time.monotonic() + TIMEOUT_S
    while not (run / "open.sql").exists() or learner_step(run) < 3:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    shutil.rmtree(source.root)  # what was taken is the run's own
    again = start(run, f"{source.root}@won")
    output, _ = again.communicate(timeout=TIMEOUT_S)
    assert again.returncode == 0, output
    assert "continues at learner step" in output
    assert (
        f"offline rollouts are used up after learner step {LAST_STEP}" in output
        and "gigpo evaluate" in output
    )
    per_step = (
        "SELECT learner_step, count(*) FROM lineage WHERE batch_state = 'trained' AND live "
        "GROUP BY 1 ORDER BY 1"
    )
    assert rows(run, per_step) == [(step, 2) for step in range(1, LAST_STEP + 1)]
    uses = (
        "SELECT list(DISTINCT n) FROM "
        "(SELECT count(*) AS n FROM lineage WHERE live GROUP BY group_uid)"
    )
    assert rows(run, uses) == [([4],)]
    assert rows(run, "SELECT DISTINCT source FROM lineage") == [(source.info.run_id,)]
    assert rows(run, "SELECT count(DISTINCT digest) > 10 FROM versions") == [(True,)], (
        "it learned something in each step"
    )
    assert sorted(path.name for path in (run / "logs").iterdir()) == [
        "coordinator.log",
        "learner.log",
    ], "nobody played"
    assert check(RunLayout.open(run), level=CONTENTS) == []
    for query in documented_queries("offline_groups.md"):
        assert rows(run, query), query


def test_chats_teach_a_model_made_from_nothing(tmp_path: Path) -> None:
    """Repeat a digit: after 30 learner steps of 8 of 40 chats, each used 6 times."""
    path, run = tmp_path / "chats.jsonl", tmp_path / "run"
    with path.open("w") as file:
        for number in range(40):
            said = [
                {"role": "user", "content": f"say {number % 10}"},
                {"role": "assistant", "content": str(number % 10)},
                {"role": "user", "content": "again"},
                {"role": "assistant", "content": str(number % 10)},
            ]
            file.write(json.dumps({"messages": said}) + "\n")
    process = start(
        run,
        str(path),
        "loss.policy=behaviour_cloning",
        "offline.train_on=",
        "offline.uses=6",
        "learner.groups_per_step=8",
        "learner.learning_rate=3e-3",
    )
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert "offline rollouts are used up after learner step 30" in output
    assert f"40 groups of {path} (run chats.jsonl " in output
    loss = "SELECT value FROM metrics WHERE name = 'loss/loss' AND learner_step IN (1, 30) ORDER BY learner_step"
    (first,), (last,) = rows(run, loss)
    assert first > 5 and last < 0.5, "nats a token"
    (row,) = [rows(run, query) for query in documented_queries("chats.md")]
    assert [(chats, uses) for _, chats, uses in row] == [(40, 6)]
    assert check(RunLayout.open(run), level=CONTENTS) == []
