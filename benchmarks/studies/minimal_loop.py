"""Synchronous GiGPO on key_room in one plain file, to compare the system with.

Written from the paper and from configs/key_room.yaml. It shares with the system the environment,
the tokenizer, the names of episodes, which seed their sampling, and vLLM's kernel that draws a
token from logits. Prompts, sampling, advantages, loss and update are its own: plain transformers,
one padded batch, torch's AdamW.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm._C  # noqa: F401  # registers torch.ops._C.fused_gumbel_argmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs import Environment, Observation, environment_class
from store import uid

# As configs/key_room.yaml, the defaults, and the settings that sync_equality.py changes.
GROUPS, GROUP_SIZE, STEPS, MAX_STEPS, MAX_TOKENS = 8, 8, 5, 16, 12
WEIGHT_DECAY = 0.01
MAX_GRADIENT_NORM = 1.0
RATE_FALLS_BY = 0.9  # of the learning rate, from the first step to the last
GAMMA, PENALTY, WIN, EPSILON = 0.95, 0.1, 10.0, 1e-6  # as the paper and its authors' code
SEED_BYTES = 4
KeyRoom = environment_class("key_room")


@dataclass(kw_only=True)
class PlayedStep:
    """One step. Its returns and advantage are set when its episode is over."""

    group: bytes
    state: str
    prompt: list[int]
    answer: list[int]
    action: str
    reward: float
    valid: bool
    episode_return: float = 0.0  # of the whole episode
    later_return: float = 0.0  # discounted, from this step on
    advantage: float = 0.0

    @property
    def penalty(self) -> float:
        return 0.0 if self.valid else PENALTY


@dataclass(kw_only=True)
class Playing:
    """An episode that is being played."""

    env: Environment
    seen: Observation
    group: bytes
    uid: bytes  # seeds its sampling
    steps: list[PlayedStep] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return len(self.steps) == MAX_STEPS or bool(self.steps and self.steps[-1].reward)

    def next_seed(self) -> int:
        name = self.uid + len(self.steps).to_bytes(SEED_BYTES, "little")
        digest = hashlib.blake2b(name, digest_size=SEED_BYTES).digest()
        return int.from_bytes(digest, "little") >> 1


def prompt_of(seen: Observation, steps: list[PlayedStep]) -> str:
    """Return the user's message: the objective, the last action, the state, the actions."""
    turn = f"> {steps[-1].action}\n" if steps else ""
    actions = "".join(f"- {action}\n" for action in seen.actions or ())
    return f"{seen.objective}\n{turn}{seen.text}\n{actions}"


def padded(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    ids = torch.zeros_like(mask)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    return ids, mask


def sample(model: torch.nn.Module, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
    """Sample an answer to each prompt, one token of all of them at a time."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    answers: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    while going:
        ids, mask = padded([prompts[at] + answers[at] for at in going])
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits[range(len(going)), mask.sum(1) - 1]
        draws = [torch.randint(0, 2**31, (1,), generator=generators[at]).item() for at in going]
        tokens = torch.ops._C.fused_gumbel_argmax(logits.contiguous(), torch.tensor(draws))
        for at, token in zip(going, tokens.tolist(), strict=True):
            answers[at].append(int(token))
        end = model.config.eos_token_id
        going = [at for at in going if answers[at][-1] != end and len(answers[at]) < MAX_TOKENS]
    return answers


def first_observations(*, run_id: str, seed: int, first: int) -> list[Playing]:
    """Begin the episodes of the groups `first`, `first + 1`, ... of a run."""
    tasks = KeyRoom.tasks("train", {})
    begun = []
    for ordinal in range(first, first + GROUPS):
        order = list(range(len(tasks)))
        random.Random(f"{seed}/{ordinal // len(tasks)}").shuffle(order)
        task = tasks[order[ordinal % len(tasks)]]
        group = uid(run_id, "train", ordinal, None)
        for member in range(GROUP_SIZE):
            env = KeyRoom({})
            seen = env.reset(task)
            begun.append(Playing(env=env, seen=seen, group=group, uid=uid(group, member)))
    return begun


def play_to_the_end(model: torch.nn.Module, tokenizer: Any, episodes: list[Playing]) -> None:
    """Play the episodes side by side, one step of all of them at a time."""
    while playing := [episode for episode in episodes if not episode.is_over]:
        prompts = []
        for episode in playing:
            message = {"role": "user", "content": prompt_of(episode.seen, episode.steps)}
            text = tokenizer.apply_chat_template(
                [message], tokenize=False, add_generation_prompt=True
            )
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
        seeds = [episode.next_seed() for episode in playing]
        answers = sample(model, prompts, seeds)
        for episode, prompt, answer in zip(playing, prompts, answers, strict=True):
            take_step(episode, prompt=prompt, answer=answer, tokenizer=tokenizer)


def take_step(episode: Playing, *, prompt: list[int], answer: list[int], tokenizer: Any) -> None:
    """Carry out the action of an answer."""
    is_ended = answer[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(answer[:-1] if is_ended else answer)
    found = re.search("<action>(.*?)</action>", text, re.DOTALL)
    action = (found[1] if found else text[-30:]).strip().lower()
    after = episode.env.step(action)
    is_listed = action in (episode.seen.actions or ())
    step = PlayedStep(
        group=episode.group,
        state=episode.seen.text,
        prompt=prompt,
        answer=answer,
        action=action,
        reward=WIN * after.reward,
        valid=is_listed and is_ended,
    )
    episode.steps.append(step)
    episode.seen = after.observation


def normalised(values: list[float]) -> np.ndarray:
    """Return (x - mean) / (deviation + 1e-6), 0 where all are equal."""
    x = np.array(values)
    return (x - x.mean()) / (x.std(ddof=1) + EPSILON) if np.ptp(x) else np.zeros(len(x))


def steps_to_train(episodes: list[Playing]) -> list[PlayedStep]:
    """Give each step its advantage (eqs. 3 to 8). Return those of groups whose episodes differ."""
    by_group: dict[bytes, list[PlayedStep]] = defaultdict(list)
    by_state: dict[tuple[bytes, str], list[PlayedStep]] = defaultdict(list)
    for episode in episodes:
        episode_return = sum(step.reward for step in episode.steps)
        later_return = 0.0
        for step in reversed(episode.steps):
            later_return = step.reward + GAMMA * later_return
            step.episode_return = episode_return
            step.later_return = later_return
            by_group[step.group].append(step)
            by_state[step.group, step.state].append(step)
    differing = set()
    for steps in by_group.values():
        add_advantages(steps, [step.episode_return - step.penalty for step in steps])
        if any(step.episode_return != steps[0].episode_return for step in steps):
            differing.add(steps[0].group)
    for steps in by_state.values():
        add_advantages(steps, [step.later_return - step.penalty for step in steps])
        if any(step.later_return != steps[0].later_return for step in steps):
            differing.add(steps[0].group)
    return [step for episode in episodes for step in episode.steps if step.group in differing]


def add_advantages(steps: list[PlayedStep], scores: list[float]) -> None:
    for step, advantage in zip(steps, normalised(scores), strict=True):
        step.advantage += advantage


def loss_of(model: torch.nn.Module, trained: list[PlayedStep]) -> torch.Tensor:
    """Return the loss, a mean over the tokens of all answers.

    At the policy that sampled, the gradient of PPO's clipped ratio is that of log pi.
    """
    ids, mask = padded([step.prompt + step.answer for step in trained])
    logprobs = torch.log_softmax(model(ids, attention_mask=mask).logits[:, :-1], dim=-1)
    chosen = logprobs.gather(2, ids[:, 1:, None]).squeeze(2)
    is_answer = mask[:, 1:].clone()
    for row, step in enumerate(trained):
        is_answer[row, : len(step.prompt) - 1] = 0
    weight = torch.tensor([step.advantage for step in trained], dtype=torch.float32)[:, None]
    return -(weight * chosen * is_answer).sum() / is_answer.sum()


def minimal_loop(
    base: Path, *, run_id: str, seed: int, learning_rate: float
) -> Iterator[tuple[list[Playing], dict[str, torch.Tensor]]]:
    """Yield each learner step's episodes, and the weights after it."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=WEIGHT_DECAY)
    for number in range(STEPS):
        episodes = first_observations(run_id=run_id, seed=seed, first=number * GROUPS)
        play_to_the_end(model, tokenizer, episodes)
        loss = loss_of(model, steps_to_train(episodes))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate * (1 - RATE_FALLS_BY * number / (STEPS - 1))
        optimizer.step()
        yield episodes, {name: tensor.detach() for name, tensor in model.state_dict().items()}
