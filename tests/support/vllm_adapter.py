"""Generate with vLLM, with a LoRA adapter and without it, in a process of its own.

python -m tests.support.vllm_adapter MODEL ADAPTER       # last line: JSON, prompt ids, then (token
ids, log-probabilities) twice
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

PROMPT_IDS = list(range(20, 60))


def main() -> None:
    model, adapter = sys.argv[1:]
    llm = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        kv_cache_memory_bytes=2**27,
        enable_lora=True,
        max_lora_rank=8,
    )
    answers = []
    for lora in (LoRARequest("adapter", 1, adapter), None):
        params = SamplingParams(
            temperature=1.0, seed=0, max_tokens=32, logprobs=0, detokenize=False
        )
        (answer,) = llm.generate(
            {"prompt_token_ids": PROMPT_IDS}, params, lora_request=lora, use_tqdm=False
        )
        output = answer.outputs[0]
        logprobs = [
            of[token].logprob for of, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        answers.append((list(output.token_ids), logprobs))
    print(json.dumps([PROMPT_IDS, *answers]))


if __name__ == "__main__":
    main()
