"""Test agent programs in their processes: recorded episodes and failures."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from actors.endpoint.program_episode import ProgramEpisodes
from actors.endpoint.server import Endpoint
from actors.policy import Policy
from actors.rollout.episode import AttemptProgress
from envs import (
    ClientSettings,
    EnvironmentDied,
    ProgramPool,
    Task,
    environment_class,
    is_program,
    program_class,
)
from store import Trajectory, to_table
from tests.support.chat_samples import IDS, TextPolicy, rules, served, tokenizer
from tests.support.processes import children, end_with_their_owner, wait_until_gone

EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"
NUMBER_GAME: dict[str, object] = {"highest": 20, "guesses": 4}

# Asks with nothing but the standard library, which starts faster than a client; what it does is the
# task's id.
ODD = """
import asyncio, json, os, subprocess, sys, time, urllib.request
from envs import Outcome, Task

def ask(client, text="guess"):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + client.api_key}
    request = urllib.request.Request(client.base_url + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

class Odd:
    def __init__(self, options):
        self.n_played = 0
        if options.get("broken"): raise KeyError("broken")
    @classmethod
    def tasks(cls, split, options): return [Task(id=split, env_name="odd", split=split, seed=0)]
    def run(self, task, client): return getattr(self, task.id)(client)
    def win(self, client):
        self.n_played += 1
        print("a word of its own")
        ask(client)
        return Outcome(reward=self.n_played, won=True, task_score=0.5)
    async def win_async(self, client):
        return Outcome(reward=1.0, won=bool(await asyncio.to_thread(ask, client)))
    def from_environment(self, client):
        given = (os.getenv("OPENAI_BASE_URL"), os.getenv("OPENAI_API_KEY"))
        return self.win(client) if given == (client.base_url, client.api_key) else None
    def too_many(self, client):
        while True: ask(client)
    def takes_no_for_an_answer(self, client):
        try: self.too_many(client)
        except urllib.error.HTTPError: return Outcome(reward=0.5, won=False)
    def says_nothing(self, client): return Outcome(reward=1.0, won=True)
    def raises(self, client): raise RuntimeError("no such\\ndoor")
    def exits(self, client): sys.exit("enough")
    def dies(self, client): os._exit(7)
    def dies_and_leaves_a_child(self, client):
        ask(client, str(subprocess.Popen(["sleep", "60"]).pid))
        os._exit(7)
    def returns_nothing(self, client): ask(client)
    def returns_nan(self, client): return Outcome(reward=float("nan"), won=False)
    def returns_much(self, client): return Outcome(reward=1e150, won=False)
    def returns_more(self, client): return Outcome(reward=1e308, won=False)
    def returns_less(self, client): return Outcome(reward=-1.7e307, won=False)
    def scores_much(self, client): return Outcome(reward=1.0, won=False, task_score=1e308)
    def returns_a_word(self, client): return Outcome(reward=1.0, won="maybe")
    def forks(self, client):
        # The fork comes back from here, too: late, and with a reward of its own.
        is_fork = os.fork() == 0
        if is_fork: time.sleep(0.5)
        else: ask(client)
        return Outcome(reward=100.0 if is_fork else 1.0, won=is_fork)
    def writes_to_the_socket(self, client):
        self.win(client)
        os.write(int(sys.argv[1]), json.dumps({"outcome": {"reward": 100.0, "won": True}, "number": 9}).encode() + b"\\n")
        time.sleep(60)
    def sleeps_longer(self, client):
        time.sleep(1.5)
        ask(client)
        return Outcome(reward=2.0, won=False)
    def hangs(self, client):
        child = subprocess.Popen(["sleep", "60"])
        ask(client, str(child.pid))
        time.sleep(60)
    def sleeps(self, client): time.sleep(0.1); return self.win(client)
    def stays(self, client): time.sleep(60)
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "odd_agent.py").write_text(ODD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # leads nowhere
    return "odd_agent:Odd"


def task(name: str) -> Task:
    return Task(id=name, env_name="odd", split="train", seed=5)


Play = Callable[..., Coroutine[Any, Any, Trajectory]]


def playing(name: str, body: Callable[[Play], Any], *, policy: Policy, processes: int = 1) -> Any:
    """Return the result of `body(play)`; `await play(task, **rules)` plays one episode."""

    async def run(endpoint: Endpoint) -> Any:
        pool = ProgramPool(name, NUMBER_GAME, processes=processes)

        def play(played: Task, **changes: object) -> Coroutine[Any, Any, Trajectory]:
            return ProgramEpisodes(pool, endpoint).run(
                played, IDS, rules(**changes), progress=AttemptProgress()
            )

        try:
            return await body(play)
        finally:
            pool.close()

    return served(policy, run)


def test_the_example_is_trained_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert len((EXAMPLES / "number_game_agent.py").read_text().splitlines()) < 60
    name = "number_game_agent:Agent"
    tasks = program_class(name).tasks("train", NUMBER_GAME)
    guessed = next(task for task in tasks if task.data["number"] == "7")
    policy = TextPolicy(["it is 3", "it is", "it is 7"])
    trajectory = playing(name, lambda play: play(guessed), policy=policy)
    assert (trajectory.won, trajectory.env_name, trajectory.task_id, trajectory.seed) == (
        True,
        "number_game",
        "number-7",
        7,
    )
    assert (trajectory.traj_uid, trajectory.group_uid, trajectory.member) == (
        IDS.traj_uid,
        IDS.group_uid,
        IDS.member,
    )
    assert [step.action_text for step in trajectory.steps] == ["it is 3", "it is", "it is 7"]
    assert [step.obs_text for step in trajectory.steps[1:]] == ["Too low.", "That is no number."]
    assert [step.reward for step in trajectory.steps] == [0.0, 0.0, 10.0]
    assert [(step.terminated, step.truncated) for step in trajectory.steps] == [
        (False, False),
        (False, False),
        (True, False),
    ]
    for before, after in zip(trajectory.steps, trajectory.steps[1:], strict=False):
        said = before.prompt_ids + before.response_ids
        assert after.prompt_ids[: len(said)] == said
    assert "Too low." in tokenizer().decode(trajectory.steps[-1].prompt_ids)
    assert to_table([trajectory]).num_rows == 3


def test_a_program_is_found_by_its_name_as_environments_are(odd: str) -> None:
    assert is_program(odd) and not is_program("key_room")
    assert program_class(odd).tasks("heldout", {})[0].id == "heldout"
    with pytest.raises(
        ValueError,
        match="lacks reset, step, close; see envs/base.py; an agent program has `tasks` and `run`",
    ):
        environment_class(odd)
    with pytest.raises(ValueError, match="'key_room': the class lacks run; see envs/base.py"):
        program_class("key_room")
    with pytest.raises(ValueError, match="no class 'Even'"):
        is_program(odd.replace("Odd", "Even"))


def test_a_process_and_its_program_are_used_again(odd: str) -> None:
    async def body(play: Play) -> list[Trajectory]:
        return [await play(task(name)) for name in ("win", "from_environment", "win_async", "win")]

    played = playing(odd, body, policy=TextPolicy(["7"]))
    assert [trajectory.episode_return for trajectory in played] == [10.0, 20.0, 10.0, 30.0]
    assert [trajectory.task_score for trajectory in played] == [0.5, 0.5, None, 0.5]


FAILURES = {
    "says_nothing": "got no chat completion: it made none; give client.base_url and client.api_key",
    "raises": "failed: RuntimeError: no such door, at .*odd_agent.py:34 in raises$",
    "exits": "failed: SystemExit: enough, at .*odd_agent.py:35 in exits$",
    "returns_nothing": "failed: TypeError: run returned NoneType; it must return an envs.Outcome, "
    "at .*odd_agent.py:17 in run$",
    "returns_nan": "failed: ValueError: run returned reward=nan; it must be a finite number",
    "returns_much": r"run returned reward=1e\+150; it must be a finite number, at most 1e\+12 in",
    "returns_more": r"run returned reward=1e\+308; it must be a finite number, at most 1e\+12 in",
    "returns_less": r"run returned reward=-1.7e\+307; it must be a finite number, at most 1e\+12",
    "scores_much": r"run returned task_score=1e\+308; it must be a finite number, at most 1e\+12",
    "returns_a_word": "failed: TypeError: run returned won='maybe'",
    "no_such_method": "failed: AttributeError",
    "dies": "its process ended with exit code 7",
}


def test_a_failure_names_program_and_task_and_the_next_task_is_played(odd: str) -> None:
    async def body(play: Play) -> Trajectory:
        for name, says in FAILURES.items():
            with pytest.raises(
                EnvironmentDied, match=rf"^program 'odd_agent:Odd' on task train/{name}.*{says}"
            ) as failed:
                await play(task(name))
            assert failed.value.at_fault
        return await play(task("win"))

    assert playing(odd, body, policy=TextPolicy(["7"])).won


def test_a_fork_that_comes_back_from_a_program_answers_for_nobody(odd: str) -> None:
    """The attack: the fork's outcome was that of the next task, which was recorded as won."""

    async def body(play: Play) -> list[Trajectory]:
        return [await play(task("forks")), await play(task("sleeps_longer"))]

    played = playing(odd, body, policy=TextPolicy(["7"]))
    assert [(one.won, one.episode_return) for one in played] == [(False, 10.0), (False, 20.0)]


def test_what_is_no_answer_to_the_task_ends_the_process_and_not_the_worker(odd: str) -> None:
    async def body(play: Play) -> Trajectory:
        with pytest.raises(EnvironmentDied, match="sent something else than an answer and was kil"):
            await play(task("writes_to_the_socket"))
        return await play(task("win"))

    assert playing(odd, body, policy=TextPolicy(["7"])).episode_return == 10.0


def test_a_program_that_hangs_is_killed_with_what_it_started(odd: str) -> None:
    policy = TextPolicy(["7"])

    async def body(play: Play) -> Trajectory:
        await play(task("win"))  # its process is up: a start may take longer than 2 s
        with pytest.raises(
            EnvironmentDied,
            match="task train/hangs had not ended after 2 s and was killed, at .*:64 in hangs",
        ):
            await play(task("hangs"), episode_timeout_s=2.0)
        wait_until_gone(spoken_number(policy))
        return await play(task("win"))

    assert playing(odd, body, policy=policy).won


def test_a_program_that_dies_leaves_nothing_that_it_started(odd: str) -> None:
    policy = TextPolicy(["7"])

    async def body(play: Play) -> None:
        with pytest.raises(EnvironmentDied, match="ended with exit code 7"):
            await play(task("dies_and_leaves_a_child"))

    playing(odd, body, policy=policy)
    wait_until_gone(spoken_number(policy))


def spoken_number(policy: TextPolicy) -> int:
    """Quote the pid in a program's last message."""
    return int("".join(filter(str.isdigit, tokenizer().decode(policy.prompts[-1].token_ids))))


def test_the_program_that_runs_longest_is_named(odd: str) -> None:
    async def run() -> tuple[object, tuple[str, float] | None, object]:
        pool = ProgramPool(odd, {}, processes=2)
        nobody = ClientSettings(base_url="", api_key="")
        before = pool.oldest()
        first = asyncio.create_task(
            pool.run(Task(id="stays", env_name="odd", split="train", seed=0), nobody, deadline_s=60)
        )
        await asyncio.sleep(0.05)
        second = asyncio.create_task(
            pool.run(Task(id="dies", env_name="odd", split="train", seed=0), nobody, deadline_s=60)
        )
        await asyncio.sleep(0.05)
        named = pool.oldest()
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        pool.close()
        return before, named, pool.oldest()

    before, named, after = asyncio.run(run())
    assert before is None and after is None
    assert named is not None
    assert named[0] == "program 'odd_agent:Odd' on task train/stays" and named[1] > 0


def test_an_episode_that_is_given_up_ends_its_program_and_frees_its_turn(odd: str) -> None:
    policy = TextPolicy(["7"])

    async def body(play: Play) -> Trajectory:
        playing = asyncio.create_task(play(task("hangs")))
        while not policy.prompts:
            await asyncio.sleep(0.01)
        (process,) = children("envs.hosting.program_pool")
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert not process.is_running()
        return await play(task("win"))

    assert playing(odd, body, policy=policy).won


@pytest.mark.parametrize(("name", "reward"), [("too_many", 0.0), ("takes_no_for_an_answer", 5.0)])
def test_an_episode_that_asks_too_often_is_cut_off_unless_its_program_makes_the_best_of_it(
    odd: str, name: str, reward: float
) -> None:
    trajectory = playing(odd, lambda play: play(task(name), max_steps=3), policy=TextPolicy(["7"]))
    assert [step.step_index for step in trajectory.steps] == [0, 1, 2]
    ended = name == "takes_no_for_an_answer"
    assert [(step.terminated, step.truncated) for step in trajectory.steps[-2:]] == [
        (False, False),
        (ended, not ended),
    ]
    assert (trajectory.episode_return, trajectory.won) == (reward, False)


def test_a_failure_of_the_policy_is_not_the_programs(odd: str) -> None:
    class Lost:
        async def generate(self, *_: object, **__: object) -> None:
            raise LookupError("the engine is gone")

    with pytest.raises(LookupError, match="the engine is gone"):
        playing(odd, lambda play: play(task("win")), policy=Lost())  # type: ignore[arg-type]


def test_as_many_episodes_run_at_once_as_there_are_processes(odd: str) -> None:
    async def body(play: Play) -> int:
        most = 0
        episodes = [asyncio.create_task(play(task("sleeps"))) for _ in range(6)]
        while not all(episode.done() for episode in episodes):
            most = max(most, len(children("envs.hosting.program_pool")))
            await asyncio.sleep(0.02)
        returns = [(await episode).episode_return for episode in episodes]
        # Each of the two counts what it has played; six episodes between them come to at least 1 +
        # 2 + 3 each.
        assert sum(returns) >= 10.0 * (1 + 2 + 3) * 2
        return most

    assert playing(odd, body, policy=TextPolicy(["7"]), processes=2) == 2


WORKER = """
import asyncio, sys
from envs import ClientSettings, ProgramPool, Task
async def main():
    pool = ProgramPool("sleeper:Sleeper", {}, processes=1)
    task = Task(id="t", env_name="e", split="train", seed=0)
    await pool.run(task, ClientSettings(base_url="", api_key=""), deadline_s=60)
asyncio.run(main())
"""
SLEEPER = """
import os, subprocess, time
class Sleeper:
    def __init__(self, options): pass
    @classmethod
    def tasks(cls, split, options): return []
    def run(self, task, client):
        child = subprocess.Popen(["sleep", "60"])
        with open("PATH", "w") as file: file.write(f"{os.getpid()} {child.pid}")
        time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_neither_a_program_nor_its_child_outlives_a_worker_that_was_killed(
    tmp_path: Path, stopped: bool
) -> None:
    pid_file = tmp_path / "pid"
    (tmp_path / "sleeper.py").write_text(SLEEPER.replace("PATH", str(pid_file)))
    root = str(EXAMPLES.parent.parent)
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        cwd=root,
        env=dict(os.environ, PYTHONPATH=f"{tmp_path}{os.pathsep}{root}"),
    )
    end_with_their_owner(worker, pid_file=pid_file, stopped=stopped)


def test_nothing_is_started_for_a_pool_that_is_not_used() -> None:
    before = children("")
    pool = ProgramPool("number_game_agent:Agent", NUMBER_GAME, processes=3)
    assert {*children("")} <= {*before}
    pool.close()
    assert ClientSettings(base_url="b", api_key="k").api_key == "k"
