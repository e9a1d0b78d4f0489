"""Test the records of steps and episodes by hand, and the rule for invalid actions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.policy import Completion, Prompt
from actors.prompting.action_parser import Answer
from actors.rollout.step_records import (
    EpisodeIds,
    SampledAnswer,
    StepOutcome,
    anchor_of,
    is_valid,
    step_of,
    trajectory_of,
)
from envs import Observation, Task, Transition
from store import StepImage, state_hash, to_table, uid

GROUP = b"g" * 16
SEEN = Observation(text="A door.", actions=("open door", "wait"))
SAMPLED = SampledAnswer(
    prompt=Prompt(token_ids=(1, 2, 3), actions=SEEN.actions, n_dropped_turns=4, n_dropped_tokens=5),
    completion=Completion(
        token_ids=(6, 7),
        logprobs=(-0.5, -0.25),
        finish_reason="stop",
        version_min=8,
        version_max=9,
    ),
    t_start_us=10,
    gen_us=11,
)


def test_an_episode_has_the_same_names_at_every_attempt() -> None:
    ids = EpisodeIds.of(GROUP, 3)
    assert ids == EpisodeIds.of(GROUP, 3)
    assert ids == EpisodeIds(group_uid=GROUP, traj_uid=uid(GROUP, 3), member=3)
    assert ids.traj_uid != EpisodeIds.of(GROUP, 2).traj_uid


def test_a_step_has_what_was_sampled_and_waits_for_its_outcome() -> None:
    given = {"step_index": 0, "observation": SEEN, "action": "open door", "is_valid": True}
    step = step_of(SAMPLED, anchor=anchor_of(SEEN), **given)
    assert (step.prompt_ids, step.prompt_dropped_turns, step.prompt_dropped_tokens) == (
        (1, 2, 3),
        4,
        5,
    )
    assert (step.response_ids, step.response_logprobs) == ((6, 7), (-0.5, -0.25))
    assert (step.version_min, step.version_max, step.finish_reason) == (8, 9, "stop")
    assert (step.t_start_us, step.gen_us, step.env_us) == (10, 11, 0)
    assert (step.obs_text, step.anchor_text) == ("A door.", "A door.")
    assert step.state_hash == state_hash("A door.")
    assert (step.admissible_actions, step.action_text) == (SEEN.actions, "open door")
    assert (step.reward, step.terminated, step.truncated) == (0.0, False, False)
    outcome = StepOutcome(reward=1.5, terminated=True, truncated=False, env_us=12)
    done = step_of(SAMPLED, anchor=anchor_of(SEEN), outcome=outcome, **given)
    assert done == replace(step, reward=1.5, terminated=True, env_us=12)


def test_an_anchor_takes_the_place_of_the_text_and_none_has_no_hash() -> None:
    assert anchor_of(replace(SEEN, anchor="room 1")) == "room 1"
    step = step_of(
        SAMPLED, step_index=0, observation=SEEN, anchor=None, action="wait", is_valid=True
    )
    assert (step.anchor_text, step.state_hash) == (None, None)


def test_an_image_keeps_its_size_and_its_pixels() -> None:
    pixels = np.arange(2 * 1 * 3, dtype=np.uint8).reshape(2, 1, 3)
    seen = replace(SAMPLED, prompt=replace(SAMPLED.prompt, images=(pixels,)))
    step = step_of(seen, step_index=0, observation=SEEN, anchor=None, action="a", is_valid=True)
    assert step.images == (StepImage(height=2, width=1, pixels=bytes(range(6))),)


@pytest.mark.parametrize("final", [Observation(text="A hall.", anchor="hall"), None])
def test_a_trajectory_is_one_that_the_store_takes(final: Observation | None) -> None:
    step = step_of(
        SAMPLED,
        step_index=0,
        observation=SEEN,
        anchor=anchor_of(SEEN),
        action="open door",
        is_valid=True,
        outcome=StepOutcome(reward=1.0, terminated=True, truncated=False, env_us=1),
    )
    trajectory = trajectory_of(
        [step],
        task=Task(id="t", env_name="key_room", split="train", seed=7),
        ids=EpisodeIds.of(GROUP, 0),
        won=True,
        task_score=None,
        final=final,
    )
    assert (trajectory.task_id, trajectory.seed, trajectory.steps) == ("t", 7, (step,))
    assert to_table([trajectory]).num_rows == 1
    last = trajectory.final_observation
    if final is None:
        assert last is None
    else:
        assert last is not None
        assert (last.text, last.anchor_text, last.state_hash) == (
            "A hall.",
            "hall",
            state_hash("hall"),
        )


@pytest.mark.parametrize(
    ("broken", "valid_by"),
    [
        ("nothing", {"form", "environment", "admissible"}),
        ("the form", set()),
        ("the end", {"form"}),  # the answer was cut off
        ("the environment's rules", {"form"}),
        ("the list", {"form", "environment"}),
    ],
)
def test_the_rule_for_invalid_actions(broken: str, valid_by: set[str]) -> None:
    action = "jump" if broken == "the list" else "wait"
    transition = Transition(
        observation=SEEN,
        reward=0.0,
        terminated=False,
        truncated=False,
        won=False,
        valid=broken != "the environment's rules",
    )
    finish_reason = "length" if broken == "the end" else "stop"
    found = {
        rule
        for rule in ("form", "environment", "admissible")
        if is_valid(
            Answer(action=action, well_formed=broken != "the form"),
            replace(SAMPLED.completion, finish_reason=finish_reason),
            observation=SEEN,
            transition=transition,
            invalid=rule,
        )
    }
    assert found == valid_by
