"""Test the steps of one episode in a small real environment with a scripted policy."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from actors import EngineLostError
from actors.policy import Completion, Prompt, ScriptedPolicy
from actors.prompting.prompt import PromptForm
from actors.rollout.episode import (
    AttemptProgress,
    EpisodeContext,
    EpisodeRules,
    play_episode,
    request_seed,
)
from actors.rollout.step_records import EpisodeIds
from envs import EnvironmentDied, Observation, Task, Transition, environment_class, list_tasks
from row_bounds import MAX_REWARD
from store import FinalObservation, Trajectory, state_hash, to_table

Form = Callable[..., PromptForm]
IDS = EpisodeIds(group_uid=b"g" * 16, traj_uid=b"t" * 16, member=3)
OPTIONS: dict[str, object] = {}


class InProcess:
    """Await the calls of a synchronous environment."""

    def __init__(self, name: str) -> None:
        self.environment = environment_class(name)(OPTIONS)

    async def reset(self, task: Task) -> Observation:
        return self.environment.reset(task)

    async def step(self, action: str) -> Transition:
        return self.environment.step(action)


class FixedPolicy:
    """Answer with the given texts in order, with one log-probability per character."""

    def __init__(self, form: PromptForm, answers: list[str], finish_reason: str = "stop") -> None:
        self.form, self.answers, self.finish_reason = form, answers, finish_reason
        self.seeds: list[int] = []

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        ids = tuple(
            self.form.tokenizer.encode(self.answers[len(self.seeds)], add_special_tokens=False)
        )
        version = len(self.seeds)
        self.seeds.append(seed)
        return Completion(
            token_ids=ids,
            logprobs=(-0.5,) * len(ids),
            finish_reason=self.finish_reason,
            version_min=version,
            version_max=version + 1,
        )


PATIENT = {"turn_timeout_s": 60.0, "episode_timeout_s": 60.0}


def rules(**changes: object) -> EpisodeRules:
    settings = {
        "max_steps": 4,
        "win_reward": 10.0,
        "temperature": 1.0,
        "invalid": "admissible",
        **PATIENT,
        **changes,
    }
    return EpisodeRules(**settings)  # type: ignore[arg-type]


def play(form: Form, policy: object, **changes: object) -> Trajectory:
    task = next(
        t
        for t in list_tasks("key_room", OPTIONS)["train"]
        if t.data["start"] == "0" and t.data["key"] == "1"
    )
    return asyncio.run(
        play_episode(
            EpisodeContext(
                environment=InProcess("key_room"),
                policy=policy,
                form=form(),
                task=task,
                ids=IDS,
                rules=rules(**changes),
            ),
            progress=AttemptProgress(),
        )  # type: ignore[arg-type]
    )


def winning_walk() -> list[str]:
    """Return the actions that win the task of `play`."""
    door = next(
        t
        for t in list_tasks("key_room", OPTIONS)["train"]
        if t.data["start"] == "0" and t.data["key"] == "1"
    ).data["door"]
    return ["go east", "take key", *["go east"] * (int(door) - 1), "unlock door"]


def test_a_won_episode_pays_on_its_last_step_and_records_what_was_seen(form: Form) -> None:
    walk = winning_walk()
    policy = FixedPolicy(form(), [f"<action>{action}</action>" for action in walk])
    trajectory = play(form, policy, max_steps=20)
    assert [step.action_text for step in trajectory.steps] == walk
    assert [step.reward for step in trajectory.steps] == [0.0] * (len(walk) - 1) + [10.0]
    assert trajectory.won
    assert trajectory.steps[-1].terminated
    assert not any(step.truncated for step in trajectory.steps)
    assert (trajectory.traj_uid, trajectory.group_uid, trajectory.member) == (
        b"t" * 16,
        b"g" * 16,
        3,
    )
    assert [(step.version_min, step.version_max) for step in trajectory.steps] == [
        (i, i + 1) for i in range(len(walk))
    ]
    first = trajectory.steps[0]
    assert first.state_hash == state_hash(first.anchor_text or "")
    assert to_table([trajectory]).num_rows == len(walk)


@pytest.mark.parametrize("win_reward", [1.1e12, -1.1e12])
def test_a_reward_that_the_factor_makes_too_large_fails_its_episode(
    form: Form, win_reward: float
) -> None:
    policy = FixedPolicy(form(), [f"<action>{action}</action>" for action in winning_walk()])
    assert rules(win_reward=MAX_REWARD).stored_reward(-1.0) == -MAX_REWARD
    assert rules(win_reward=1e6).stored_reward(1e6) == MAX_REWARD
    with pytest.raises(EnvironmentDied, match="reward 1 times env.win_reward=.* is above 1e\\+12"):
        play(form, policy, max_steps=20, win_reward=win_reward)


def test_how_far_a_cancelled_episode_got_is_known(form: Form) -> None:
    class Silent(FixedPolicy):
        async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
            if len(self.seeds) == 2:
                raise asyncio.CancelledError
            return await super().generate(prompt, seed=seed, temperature=temperature)

    ids, progress = EpisodeIds.of(b"g" * 16, 3), AttemptProgress()
    policy = Silent(form(), ["<action>go east</action>"] * 4)
    task = list_tasks("key_room", OPTIONS)["train"][0]
    playing = play_episode(
        EpisodeContext(
            environment=InProcess("key_room"),
            policy=policy,
            form=form(),
            task=task,
            ids=ids,
            rules=rules(),
        ),
        progress=progress,
    )
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(playing)
    n_tokens = len(form().tokenizer.encode("<action>go east</action>", add_special_tokens=False))
    assert (progress.n_steps, progress.n_response_tokens) == (2, 2 * n_tokens)


def test_the_step_limit_truncates_and_pays_nothing(form: Form) -> None:
    policy = FixedPolicy(form(), ["<action>go east</action>"] * 4)
    trajectory = play(form, policy)
    assert [step.truncated for step in trajectory.steps] == [False, False, False, True]
    assert not trajectory.won
    assert trajectory.episode_return == 0.0


def test_an_episode_that_shows_too_much_is_truncated_before_no_file_can_keep_it(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: no learner could read an episode with more than 2 GiB of screenshots."""
    answers = ["<action>go east</action>"] * 4
    whole = play(form, FixedPolicy(form(), answers))
    n_bytes = sum(step.max_bytes for step in whole.steps[:2])
    monkeypatch.setattr("actors.rollout.episode.MAX_EPISODE_BYTES", n_bytes)
    trajectory = play(form, FixedPolicy(form(), answers))
    assert [step.truncated for step in trajectory.steps] == [False, True]
    assert trajectory.final_observation is not None
    assert trajectory.final_observation.text == whole.steps[2].obs_text


def test_the_observation_after_the_last_action_is_kept(form: Form) -> None:
    """An episode of four steps ends where the fifth step of a longer one begins, also if time ran
    out while the fifth action was sampled.
    """

    class Slow(FixedPolicy):
        async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
            if len(self.seeds) == 4:
                raise TimeoutError
            return await super().generate(prompt, seed=seed, temperature=temperature)

    answers = ["<action>go east</action>"] * 5
    fifth = play(form, FixedPolicy(form(), answers), max_steps=5).steps[4]
    cut_off = play(form, FixedPolicy(form(), answers))
    overdue = play(form, Slow(form(), answers), max_steps=5)
    for trajectory in (cut_off, overdue):
        assert len(trajectory.steps) == 4
        assert trajectory.final_observation == FinalObservation(
            text=fifth.obs_text,
            anchor_text=fifth.anchor_text,
            state_hash=fifth.state_hash,
            admissible_actions=fifth.admissible_actions,
        )
    table = to_table([cut_off])
    assert table["final_observation"].to_pylist() == [None] * 3 + [fifth.obs_text]


@pytest.mark.parametrize(
    ("answer", "finish_reason", "valid_by"),
    [
        ("<action>go east</action>", "stop", {"form", "environment", "admissible"}),
        ("<action>fly</action>", "stop", {"form"}),
        ("go east", "stop", set()),
        ("<action>go east</action>", "length", {"form"}),
    ],
)
def test_each_rule_calls_its_own_actions_invalid(
    form: Form, answer: str, finish_reason: str, valid_by: set[str]
) -> None:
    for rule in ("form", "environment", "admissible"):
        trajectory = play(
            form, FixedPolicy(form(), [answer], finish_reason), max_steps=1, invalid=rule
        )
        assert trajectory.steps[0].is_action_valid is (rule in valid_by), rule


@pytest.mark.parametrize(
    ("rule", "valid"), [("form", True), ("environment", True), ("admissible", False)]
)
def test_an_action_that_is_understood_and_not_listed(form: Form, rule: str, valid: bool) -> None:
    """An environment may accept an action that its list does not name, such as a search."""

    class Unlisted(InProcess):
        async def reset(self, task: Task) -> Observation:
            return replace(await super().reset(task), actions=("go west",))

    task = list_tasks("key_room", OPTIONS)["train"][0]
    policy = FixedPolicy(form(), ["<action>go east</action>"])
    played = play_episode(
        EpisodeContext(
            environment=Unlisted("key_room"),
            policy=policy,
            form=form(),
            task=task,
            ids=IDS,
            rules=rules(max_steps=1, invalid=rule),
        ),
        progress=AttemptProgress(),
    )
    assert asyncio.run(played).steps[0].is_action_valid is valid


def test_an_aborted_answer_is_no_action_and_ends_the_attempt_as_the_policys_failure(
    form: Form,
) -> None:
    with pytest.raises(EngineLostError, match="aborted a response"):
        play(form, FixedPolicy(form(), ["<action>go east</action>"], "abort"), max_steps=1)


class ShowsImagesLater(InProcess):
    async def step(self, action: str) -> Transition:
        transition = await super().step(action)
        seen = replace(transition.observation, images=(np.zeros((28, 28, 3), np.uint8),) * 2)
        return replace(transition, observation=seen)


def test_an_observation_that_no_prompt_has_a_place_for_is_named(form: Form) -> None:
    task = list_tasks("key_room", OPTIONS)["train"][0]
    policy = FixedPolicy(form(), ["<action>go east</action>"])
    with pytest.raises(
        EnvironmentDied,  # the run's start tries one observation; later ones must not end the run
        match=f"^key_room task '{re.escape(task.id)}', step 1: the environment shows images",
    ):
        asyncio.run(
            play_episode(
                EpisodeContext(
                    environment=ShowsImagesLater("key_room"),
                    policy=policy,
                    form=form(),
                    task=task,
                    ids=IDS,
                    rules=rules(),
                ),
                progress=AttemptProgress(),
            )
        )


def test_seeds_depend_on_trajectory_and_step_alone(form: Form) -> None:
    policies = [FixedPolicy(form(), ["<action>go east</action>"] * 4) for _ in range(2)]
    for policy in policies:
        play(form, policy)
    assert policies[0].seeds == policies[1].seeds
    assert len(set(policies[0].seeds)) == 4
    assert request_seed(b"a" * 16, 0) != request_seed(b"b" * 16, 0)


def test_a_scripted_answer_ends_as_a_models_does_and_is_not_tokenised_whole(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: an action of two million characters became 428,576 tokens on the event loop."""
    made = form()
    encoded: list[str] = []
    encode = made.tokenizer.encode

    def counted(text: str, **options: object) -> list[int]:
        encoded.append(text)
        return encode(text, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(made.tokenizer, "encode", counted)
    policy = ScriptedPolicy(made.encode_answer, max_tokens=12)
    prompt = Prompt(token_ids=(1,), actions=("go " * 700_000,))
    completion = asyncio.run(policy.generate(prompt, seed=0, temperature=1.0))
    assert (len(completion.token_ids), len(completion.logprobs)) == (12, 12)
    assert completion.finish_reason == "length"
    assert not made.parse(completion.token_ids).well_formed
    assert len(encoded[-1]) < 10_000


def test_a_scripted_policy_draws_admissible_actions_and_says_how_likely_they_were(
    form: Form,
) -> None:
    policy = ScriptedPolicy(form().encode_answer)
    prompt = Prompt(token_ids=(1,), actions=("a", "b", "c"))
    completions = [
        asyncio.run(policy.generate(prompt, seed=seed, temperature=1.0)) for seed in range(60)
    ]
    assert {form().parse(c.token_ids).action for c in completions} == {"a", "b", "c"}
    assert all(sum(c.logprobs) == pytest.approx(-math.log(3)) for c in completions)
    demonstration = Prompt(token_ids=(1,), actions=("a", "b", "c"), demonstrated="b")
    completion = asyncio.run(policy.generate(demonstration, seed=0, temperature=1.0))
    assert (form().parse(completion.token_ids).action, sum(completion.logprobs)) == ("b", 0.0)
    short = ScriptedPolicy(form().encode_answer, max_tokens=len(completion.token_ids))
    assert asyncio.run(short.generate(demonstration, seed=0, temperature=1.0)) == completion
    with pytest.raises(ValueError, match="lists none"):
        asyncio.run(policy.generate(Prompt(token_ids=(1,), actions=None), seed=0, temperature=1.0))
