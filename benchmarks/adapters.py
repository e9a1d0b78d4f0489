"""Compare a CPU engine that serves LoRA adapters with one that loads merged weights.

    python benchmarks/adapters.py [--quick] [--model DIR] [--cores 0]

The model is random, of the size of the project's own tiny policy, unless one is given. Both engines
answer the same prompts, in turns. The last line is JSON:

    tokens_adapter_over_merged   generated tokens per second with an adapter, over merged weights
    load_adapter_ms              to check and load a version's adapter; generation goes on
    load_merged_ms               to check and load a version's merged weights
    bytes_adapter_over_merged    of a version's weight files
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

# our packages are run from a checkout
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.figures import quick_parser, show_json, show_table
from support.tiny_model import make_random_tiny

from actors.concurrency import RequestGate
from actors.inference.vllm_policy import VLLMPolicy
from actors.policy import Prompt
from configs import ActorsConfig, ModelConfig
from learner import write_weights
from learner.model.lora import adapter_weights, add_adapters, merged, write_adapter_config
from learner.publishing.publish import WeightsCopy
from store import files_digest, weight_files, write_base

LORA = ModelConfig(lora_rank=16)
PROMPT_TOKENS, RESPONSE_TOKENS, VOCABULARY = 120, 32, 1000
ADAPTER, MERGED = "adapter", "merged"


def publish(base: Path, directory: Path) -> dict[str, str]:
    """Write a version in both forms. Return their digests."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    add_adapters(model, rank=LORA.lora_rank, alpha=LORA.lora_alpha)
    with torch.no_grad():
        for name, tensor in adapter_weights(model):
            if ".lora_B." in name:
                tensor.normal_(std=0.01)

    def write_others(unfinished: Path) -> None:
        write_adapter_config(model, unfinished)
        write_base(unfinished, digest=files_digest(weight_files(base)))

    copy = WeightsCopy()
    digest = copy.take(adapter_weights(model))
    copy.write_adapter(directory / ADAPTER, write_others=write_others)
    return {
        ADAPTER: digest,
        MERGED: write_weights(merged(model), directory / MERGED, source_dir=base),
    }


async def start(base: Path, *, lora: ModelConfig | None, cores: str, in_flight: int) -> VLLMPolicy:
    policy = VLLMPolicy(
        model_path=base,
        dtype="float32",
        lora=lora,
        actors=ActorsConfig(cpu_cores=cores, max_response_tokens=RESPONSE_TOKENS, kv_cache_gib=1.0),
        max_model_tokens=512,
        gate=RequestGate(in_flight),
        stop_token_ids=(),
        stop=(),
        tokenizer=None,
        log_path=base.parent / f"engine-{'merged' if lora is None else 'adapter'}.log",
        statistics=False,
    )
    await policy.start()
    return policy


async def tokens_per_s(policy: VLLMPolicy, *, seconds: float, in_flight: int, seed: int) -> float:
    """Keep `in_flight` requests going. No prompt shares a prefix with another."""
    draw, n_tokens = random.Random(seed), 0
    began_s = time.perf_counter()

    async def client() -> None:
        nonlocal n_tokens
        while time.perf_counter() < began_s + seconds:
            token_ids = tuple(draw.choices(range(2, VOCABULARY), k=PROMPT_TOKENS))
            prompt = Prompt(token_ids=token_ids, actions=None)
            answer = await policy.generate(prompt, seed=draw.getrandbits(31), temperature=1.0)
            n_tokens += len(answer.token_ids)

    await asyncio.gather(*(client() for _ in range(in_flight)))
    return n_tokens / (time.perf_counter() - began_s)


async def load_ms(policy: VLLMPolicy, *, path: Path, digest: str, loads: int) -> float:
    """Return the median time to load the version under new numbers. The first reads the base."""
    times_ms = []
    for _ in range(loads + 1):
        load = await policy.load_weights(version=policy.version + 1, path=path, digest=digest)
        phases: Mapping[str, object] = asdict(load)
        times_ms.append(sum(float(str(phases[name])) for name in phases if name.endswith("_ms")))
    return statistics.median(times_ms[1:])


async def measured(
    base: Path, *, cores: str, seconds: float, turns: int, loads: int, in_flight: int
) -> dict[str, float | None]:
    digests = publish(base, base.parent)
    policies = {
        ADAPTER: await start(base, lora=LORA, cores=cores, in_flight=in_flight),
        MERGED: await start(base, lora=None, cores=cores, in_flight=in_flight),
    }
    figures: dict[str, float | None] = {}
    try:
        rates: dict[str, list[float]] = {name: [] for name in policies}
        for name, policy in policies.items():
            figures[f"load_{name}_ms"] = await load_ms(
                policy, path=base.parent / name, digest=digests[name], loads=loads
            )
            # The first batches are slower.
            await tokens_per_s(policy, seconds=1.0, in_flight=in_flight, seed=0)
        for turn in range(turns):
            for name, policy in policies.items():
                rate = await tokens_per_s(
                    policy, seconds=seconds, in_flight=in_flight, seed=turn + 1
                )
                rates[name].append(rate)
        for name in policies:
            figures[f"tokens_{name}_per_s"] = statistics.median(rates[name])
        figures["tokens_adapter_over_merged"] = statistics.median(
            of_adapter / of_merged
            for of_adapter, of_merged in zip(rates[ADAPTER], rates[MERGED], strict=True)
        )
    finally:
        for policy in policies.values():
            await policy.close()
    sizes = {}
    for name in policies:
        sizes[name] = sum(file.stat().st_size for file in weight_files(base.parent / name))
    return figures | {"bytes_adapter_over_merged": sizes[ADAPTER] / sizes[MERGED]}


def main() -> None:
    parser = quick_parser(__doc__, quick="shorter turns, about a minute")
    parser.add_argument("--model", type=Path, help="a model directory instead of the random one")
    parser.add_argument("--cores", default="0", help='cores of the engines, such as "0" or "0,2-3"')
    parser.add_argument("--in-flight", type=int, default=32, help="requests at once")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        if args.model is None:
            make_random_tiny(base, seed=0)
        else:
            base.symlink_to(args.model.resolve(), target_is_directory=True)
        figures = asyncio.run(
            measured(
                base,
                cores=args.cores,
                seconds=4.0 if args.quick else 20.0,
                turns=3,
                loads=3 if args.quick else 9,
                in_flight=args.in_flight,
            )
        )
    show_table(figures, {})
    show_json(figures, figures)


if __name__ == "__main__":
    main()
