"""Provide tokenizers with chat templates, and policies without a model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import openai
from transformers import PreTrainedTokenizerFast

from actors.endpoint.server import Endpoint
from actors.policy import Completion, Policy, Prompt
from actors.rollout.episode import AttemptProgress, EpisodeRules
from actors.rollout.step_records import EpisodeIds
from configs import ActorsConfig, Config, PromptConfig
from learner import train_tokenizer
from store import Step

IDS = EpisodeIds(group_uid=b"g" * 16, traj_uid=b"t" * 16, member=3)
# Roles as words: the closing token is the only special one that a conversation has.
CHATML = (
    "{% for m in messages %}<user>{{ m['role'] }}\n{{ m['content'] | trim }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<user>assistant\n{% endif %}"
)
# Earlier thoughts are left out, the next one is begun.
THINKING = (
    "{% for m in messages %}<user>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1].lstrip() if m['role'] == 'assistant' else m['content'] "
    "}}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<user>assistant\n<think>\n{% endif %}"
)
# Nothing but words between the messages, and a refusal.
PLAIN = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system messages "
    "here') }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% "
    "endif %}"
)
# Tools and their calls, in the form of Qwen2.5 and of Hermes.
TOOLED = (
    "{% if tools %}<user>tools: {% for t in tools %}{{ t.function.name }}{% endfor %}<eos>\n"
    "{% endif %}"
    "{% for m in messages %}<user>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<user>assistant\n{% endif %}"
)
UNREAD = TOOLED.replace("tool_call>", "unknown>")
# The form of Qwen3-Coder.
XML = TOOLED.replace(
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>",
)
# The form of dots, whose parser takes cubic time for line breaks.
DOTS = XML.replace("tool_call>", "dots_function_call>")
for xml, dots in (
    ("<function={{ c.function.name }}>", '<invoke name="{{ c.function.name }}">'),
    ("<parameter={{ k }}>\n{{ v }}\n", '<parameter name="{{ k }}">{{ v }}'),
    ("</function>", "</invoke>"),
):
    DOTS = DOTS.replace(xml, dots)
TEMPLATES = {
    "tiny": None,
    "chatml": CHATML,
    "thinking": THINKING,
    "plain": PLAIN,
    "tooled": TOOLED,
    "unread": UNREAD,
    "xml": XML,
    "dots": DOTS,
}


@cache
def tokenizer(template: str = "tiny") -> PreTrainedTokenizerFast:
    made = train_tokenizer(
        ["guess my number, too low, too high: it is 7 or 12"] * 9, vocabulary_size=300
    )
    if TEMPLATES[template] is not None:
        made.chat_template = TEMPLATES[template]
    return made


def encode(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False))


class TextPolicy:
    """Reply with the given texts in order, each with an end token, logprobs -0.5."""

    def __init__(self, texts: Sequence[str], *, finish_reason: str = "stop") -> None:
        self.texts, self.finish_reason = list(texts), finish_reason
        self.prompts: list[Prompt] = []
        self.seeds: list[int] = []
        self.temperatures: list[float] = []

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        number = len(self.prompts)
        self.prompts.append(prompt)
        self.seeds.append(seed)
        self.temperatures.append(temperature)
        end = (tokenizer().eos_token_id,) if self.finish_reason == "stop" else ()
        token_ids = encode(self.texts[number % len(self.texts)]) + end
        return completion(token_ids, finish_reason=self.finish_reason, version=number)


class NoisePolicy:
    """Reply with random tokens: text that no tokenizer cuts so, and bytes that are no text."""

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        draw = random.Random(seed)
        token_ids = tuple(draw.randrange(4, len(tokenizer())) for _ in range(draw.randrange(1, 9)))
        if draw.random() < 0.5:
            return completion(
                (*token_ids, tokenizer().eos_token_id), finish_reason="stop", version=0
            )
        return completion(token_ids, finish_reason="length", version=0)


def completion(token_ids: tuple[int, ...], *, finish_reason: str, version: int) -> Completion:
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(-0.5 - place for place in range(len(token_ids))),
        finish_reason=finish_reason,
        version_min=version,
        version_max=version + 1,
    )


def rules(**changes: object) -> EpisodeRules:
    settings: dict[str, Any] = {
        "max_steps": 50,
        "win_reward": 10.0,
        "temperature": 0.7,
        "invalid": "environment",
        "turn_timeout_s": 20.0,
        "episode_timeout_s": 30.0,
    }
    return EpisodeRules(**{**settings, **changes})


def endpoint_config(
    model: str, *, max_response: int, max_model: int, tool_parser: str = "auto"
) -> Config:
    """Return the config of an endpoint whose model has this name and these limits in tokens."""
    return Config(
        run_dir=model,
        actors=ActorsConfig(max_response_tokens=max_response),
        prompt=PromptConfig(max_prompt_tokens=max_model - max_response, tool_parser=tool_parser),
    )


def served(
    policy: Policy,
    body: Callable[[Endpoint], Any],
    *,
    template: str = "tiny",
    max_response: int = 40,
    max_model: int = 400,
    tool_parser: str = "auto",
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Any:
    """Return the result of `body(endpoint)`, on a loop of `loop_factory` if it is given."""

    async def run() -> Any:
        config = endpoint_config(
            "number-game", max_response=max_response, max_model=max_model, tool_parser=tool_parser
        )
        endpoint = Endpoint(policy, tokenizer(template), config=config)
        await endpoint.start()
        try:
            return await body(endpoint)
        finally:
            await endpoint.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(asyncio.wait_for(run(), timeout=60))


class LetterTokenizer:
    """One token per character, its code point; 7 ends a message. For models with random weights."""

    eos_token_id = 7

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> str:
        assert not tokenize
        written = "".join(f"{message['role']}:{message['content']}\7" for message in conversation)
        return written + "assistant:" * add_generation_prompt

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(token) for token in token_ids if token != 7 or not skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return {}


async def two_turns_over_http(policy: Policy, *, max_model_tokens: int) -> list[Step]:
    """Return the steps of a program that asks, repeats the reply, and asks again."""
    config = endpoint_config("m", max_response=12, max_model=max_model_tokens)
    endpoint = Endpoint(policy, LetterTokenizer(), config=config)
    await endpoint.start()
    with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
        client = openai.AsyncOpenAI(
            base_url=recording.client.base_url, api_key=recording.client.api_key
        )
        messages: list[Any] = [{"role": "user", "content": "guess"}]
        first = await client.chat.completions.create(model="m", messages=messages)
        messages += [first.choices[0].message, {"role": "user", "content": "too low"}]
        await client.chat.completions.create(model="m", messages=messages, max_tokens=5)
        await client.close()
    await endpoint.close()
    return recording.steps()
