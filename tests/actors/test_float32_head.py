"""Compare a bfloat16 engine that computes its logits in float32 with the learner's two heads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from actors.concurrency import RequestGate
from actors.inference.vllm_policy import VLLMPolicy
from actors.policy import Completion, Prompt
from configs import ActorsConfig
from learner.data.micro_batch import micro_batches
from learner.model.policy_model import load_policy
from store import files_digest
from tests.support.learner_samples import table
from tests.support.served_model import VOCABULARY_SIZE, served_model

pytestmark = pytest.mark.engine

STOP_TOKEN = 7
Played = list[tuple[Prompt, Completion]]


def make_model(path: Path, *, seed: int) -> Path:
    """Make a model whose logits are as large as a trained model's: bfloat16 rounds them by 0.03."""
    model = served_model(seed=seed, initializer_range=0.02, tie_word_embeddings=False)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    model.bfloat16().save_pretrained(path)
    return path


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(8, VOCABULARY_SIZE, (4, 40), generator=generator)
    return [Prompt(token_ids=tuple(ids), actions=None) for ids in drawn.tolist()]


async def play(base: Path, other: Path, log_path: Path) -> tuple[Played, Played]:
    """Return what an engine answered with the weights in `base`, then with those in `other`."""
    policy = VLLMPolicy(
        model_path=base,
        dtype="bfloat16",
        float32_head=True,
        lora=None,
        actors=ActorsConfig(max_response_tokens=48, kv_cache_gib=0.125, engine={"block_size": 64}),
        max_model_tokens=128,
        gate=RequestGate(8),
        stop_token_ids=[STOP_TOKEN],
        stop=(),
        tokenizer=None,
        log_path=log_path,
        statistics=False,
    )
    await policy.start()

    async def answers() -> Played:
        return [
            (each, await policy.generate(each, seed=index, temperature=1.0))
            for index, each in enumerate(prompts())
        ]

    try:
        first = await answers()
        await policy.load_weights(
            version=1, path=other, digest=files_digest([other / "model.safetensors"])
        )
        return first, await answers()
    finally:
        await policy.close()


def mismatch(model: Path, played: Played, *, float32_head: bool) -> float:
    """Return the mean distance of the recorded log-probabilities from the learner's."""
    rows = table(
        *[(list(p.token_ids), list(c.token_ids), list(c.logprobs), 0.0) for p, c in played]
    )
    policy = load_policy(
        model,
        dtype="bfloat16",
        gradient_checkpointing=False,
        temperature=1.0,
        float32_head=float32_head,
    )
    (batch,) = micro_batches(rows, micro_batch_tokens=4096, ranks=1)
    with torch.no_grad():
        found_N, _ = policy(batch)
    return float((found_N - batch.behaviour_logprobs_N).abs().mean())


def test_engine_and_learner_with_float32_heads_agree_better_also_after_new_weights(
    tmp_path: Path, engine_log: Path
) -> None:
    base, other = (make_model(tmp_path / name, seed=n) for n, name in enumerate(("a", "b")))
    for model, played in zip(
        (base, other), asyncio.run(play(base, other, engine_log)), strict=True
    ):
        with_heads = mismatch(model, played, float32_head=True)
        without = mismatch(model, played, float32_head=False)
        # 0.75 of it was measured: the rest comes from hidden states in bfloat16
        assert with_heads < without, (with_heads, without)
