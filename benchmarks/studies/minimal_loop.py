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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm._C  # noqa: F401  # registers torch.ops._C.fused_gumbel_argmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs import Observation, environment_class
from store import uid

# As configs/key_room.yaml and the settings that sync_equality.py changes.
GROUPS, GROUP_SIZE, STEPS, MAX_STEPS, MAX_TOKENS = 8, 8, 5, 16, 12
GAMMA, PENALTY, WIN, EPSILON = 0.95, 0.1, 10.0, 1e-6  # as the paper and its authors' code
KeyRoom = environment_class("key_room")


def prompt_of(seen: Observation, steps: list[dict]) -> str:
    """Return the user's message: the objective, the last action, the state, the actions."""
    turn = f"> {steps[-1]['action']}\n" if steps else ""
    actions = "".join(f"- {action}\n" for action in seen.actions or ())
    return f"{seen.objective}\n{turn}{seen.text}\n{actions}"


def padded(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
    ids = torch.zeros_like(mask)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = torch.tensor(sequence), 1
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


def episodes_of(
    model: torch.nn.Module, tokenizer: Any, *, run_id: str, seed: int, first: int
) -> list[list[dict]]:
    """Play the groups `first`, `first + 1`, ... of a run to their ends."""
    tasks = KeyRoom.tasks("train", {})
    playing: list[Any] = []  # environment, observation, name, steps, group
    episodes: list[list[dict]] = []
    for ordinal in range(first, first + GROUPS):
        order = list(range(len(tasks)))
        random.Random(f"{seed}/{ordinal // len(tasks)}").shuffle(order)
        group = uid(run_id, "train", ordinal, None)
        for member in range(GROUP_SIZE):
            env = KeyRoom({})
            seen = env.reset(tasks[order[ordinal % len(tasks)]])
            episodes.append([])
            playing.append([env, seen, uid(group, member), episodes[-1], group])
    while playing:
        prompts, seeds = [], []
        for _, seen, name, steps, _ in playing:
            message = [{"role": "user", "content": prompt_of(seen, steps)}]
            text = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
            prompts.append(tokenizer.encode(text, add_special_tokens=False))
            digest = hashlib.blake2b(name + len(steps).to_bytes(4, "little"), digest_size=4)
            seeds.append(int.from_bytes(digest.digest(), "little") >> 1)
        answers = sample(model, prompts, seeds)
        for episode, prompt, answer in zip(playing, prompts, answers, strict=True):
            env, seen, name, steps, group = episode
            is_ended = answer[-1] == tokenizer.eos_token_id
            text = tokenizer.decode(answer[:-1] if is_ended else answer)
            found = re.search("<action>(.*?)</action>", text, re.DOTALL)
            action = (found[1] if found else text[-30:]).strip().lower()
            after = env.step(action)
            step = {"text": seen.text, "action": action, "prompt": prompt, "answer": answer}
            valid = action in seen.actions and is_ended
            step |= {"reward": WIN * after.reward, "valid": valid, "group": group, "name": name}
            steps.append(step)
            episode[1] = after.observation
        playing = [
            each for each in playing if not each[3][-1]["reward"] and len(each[3]) < MAX_STEPS
        ]
    return episodes


def normalised(values: list[float]) -> np.ndarray:
    """Return (x - mean) / (deviation + 1e-6), 0 where all are equal."""
    x = np.array(values)
    return (x - x.mean()) / (x.std(ddof=1) + EPSILON) if np.ptp(x) else np.zeros(len(x))


def advantages_of(episodes: list[list[dict]]) -> list[tuple[dict, float]]:
    """Return each step of the groups whose episodes differ, with its advantage (eqs. 3 to 8)."""
    by_group, by_state = defaultdict(list), defaultdict(list)
    for steps in episodes:
        total, later = sum(step["reward"] for step in steps), 0.0
        for step in reversed(steps):
            later = step["reward"] + GAMMA * later
            lost = 0.0 if step["valid"] else PENALTY
            step |= {"score": total - lost, "return": later - lost, "total": total, "later": later}
            by_group[step["group"]].append(step)
            by_state[step["group"], step["text"]].append(step)
    for groups, value in ((by_group, "score"), (by_state, "return")):
        for steps in groups.values():
            for step, one in zip(steps, normalised([s[value] for s in steps]), strict=True):
                step["advantage"] = step.get("advantage", 0.0) + one
    differing = {s[0]["group"] for s in by_group.values() if len({x["total"] for x in s}) > 1}
    differing |= {s[0]["group"] for s in by_state.values() if len({x["later"] for x in s}) > 1}
    return [
        (step, step["advantage"])
        for steps in episodes
        for step in steps
        if step["group"] in differing
    ]


def minimal_loop(
    base: Path, *, run_id: str, seed: int, learning_rate: float
) -> Iterator[tuple[list, dict]]:
    """Yield each learner step's episodes, and the weights after it."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    for number in range(STEPS):
        episodes = episodes_of(model, tokenizer, run_id=run_id, seed=seed, first=number * GROUPS)
        trained = advantages_of(episodes)
        ids, mask = padded([step["prompt"] + step["answer"] for step, _ in trained])
        logprobs = torch.log_softmax(model(ids, attention_mask=mask).logits[:, :-1], dim=-1)
        chosen = logprobs.gather(2, ids[:, 1:, None]).squeeze(2)
        is_answer = mask[:, 1:].clone()
        for row, (step, _) in enumerate(trained):
            is_answer[row, : len(step["prompt"]) - 1] = 0
        weight = torch.tensor([advantage for _, advantage in trained], dtype=torch.float32)[:, None]
        # At the policy that sampled, the gradient of PPO's clipped ratio is that of log pi.
        loss = -(weight * chosen * is_answer).sum() / is_answer.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (1 - 0.9 * number / (STEPS - 1))
        optimizer.step()
        yield episodes, {name: tensor.detach() for name, tensor in model.state_dict().items()}
