"""Test episodes as growing conversations: sent and sampled tokens never change."""

from __future__ import annotations

import copy
import importlib.util
import random
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from actors.policy import Prompt
from actors.prompting.action_parser import Answer
from actors.prompting.chat_template import Chat
from actors.prompting.prompt import PromptForm
from actors.prompting.template import FOLDER, TEMPLATES, Turn
from configs import PromptConfig
from envs import Observation
from learner.data.micro_batch import micro_batches
from learner.model.tiny_model import CHAT_TEMPLATE, train_tokenizer
from tests.support.chat_samples import tokenizer as made_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts of earlier replies are left out, and the reply begins inside a thought, or behind an
# empty one.
THINKING = (
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>{% "
    "endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% if enable_thinking is defined and not "
    "enable_thinking %}"
    "</think>\n{% endif %}{% endif %}"
)
VISION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% for part in m.content %}{{ part.text }}{% "
    "endfor %}<|im_end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
CHAT_TEMPLATES = {"tiny": CHAT_TEMPLATE, "chatml": CHATML, "thinking": THINKING, "vision": VISION}
ENDS = {"tiny": "<eos>", "chatml": "<|im_end|>", "thinking": "<|im_end|>", "vision": "<|im_end|>"}
UNLIMITED = 10**6
TEXTS = [
    "A red room with a door.",
    "A locked door.",
    "You hold the key.",
    "Nothing happens.",
    "x " * 60,
    "",
]
ANSWERS = ["<think>a</think><action>go</action>", "go", "", "<think>not yet do"]


@pytest.fixture(scope="module")
def trained() -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(TEXTS, vocabulary_size=400)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


def form(tokenizer: PreTrainedTokenizerFast, chat_template: str, **changes: Any) -> PromptForm:
    tokenizer.chat_template = CHAT_TEMPLATES[chat_template]
    config = PromptConfig(template="think", style="chat", max_prompt_tokens=UNLIMITED)
    return PromptForm(tokenizer, replace(config, **changes))


def seen(text: str) -> Observation:
    return Observation(text=text, objective="open it.", actions=("go", "take key"))


def played(
    made: PromptForm, texts: list[str], responses: list[tuple[int, ...]]
) -> tuple[list[Prompt], list[Turn]]:
    """Return the prompts of an episode, and its turns."""
    prompts, history = [], []
    for text, response_ids in zip(texts, responses, strict=True):
        prompts.append(made.prompt(seen(text), history))
        history.append(
            Turn(observation=text, action="go", prompt=prompts[-1], response_ids=response_ids)
        )
    return prompts, history


def encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from(TEXTS),
            st.sampled_from(ANSWERS),
            st.booleans(),
            st.lists(st.integers(8, 260), max_size=5),
        ),
        min_size=1,
        max_size=8,
    ),
    budget=st.integers(60, 2000),
)
def test_a_prompt_begins_with_all_tokens_before_it_or_says_what_was_left_out(
    trained: PreTrainedTokenizerFast,
    name: str,
    turns: list[tuple[str, str, bool, list[int]]],
    budget: int,
) -> None:
    made = form(trained, name, max_prompt_tokens=budget)
    end = encoded(trained, ENDS[name])
    responses = [
        encoded(trained, answer) + tuple(odd) + end * ended for _, answer, ended, odd in turns
    ]
    prompts, history = played(made, [text for text, *_ in turns], responses)
    alone = form(trained, name, style="window", history_length=0)
    for number, (prompt, before) in enumerate(zip(prompts[1:], history, strict=False), start=1):
        assert before.prompt is not None
        so_far = before.prompt.token_ids + before.response_ids
        assert len(prompt.token_ids) <= budget
        dropped = prompt.n_dropped_turns
        if dropped == before.prompt.n_dropped_turns:
            assert prompt.token_ids[: len(so_far)] == so_far
            assert prompt.n_dropped_tokens == before.prompt.n_dropped_tokens
            continue
        assert before.prompt.n_dropped_turns < dropped <= number
        assert prompt.n_dropped_tokens > before.prompt.n_dropped_tokens
        # it begins anew with the turn after those, what was sampled then, and room to go on
        if dropped < number:
            first = (
                alone.prompt(seen(history[dropped].observation), history[:dropped]).token_ids
                + responses[dropped]
            )
            assert prompt.token_ids[: len(first)] == first
            assert len(prompt.token_ids) <= budget // 2


@pytest.mark.parametrize("name", ["tiny", "chatml", "vision"])
def test_it_reads_as_the_chat_template_writes_the_whole_conversation(
    trained: PreTrainedTokenizerFast, name: str
) -> None:
    """Check also a reply that was cut off: the missing end token is added."""
    made = form(trained, name)
    answers = ["<think>a</think><action>go</action>", "go", "<think>cut o"]
    responses = [
        encoded(trained, answer + ENDS[name] * (answer != "<think>cut o")) for answer in answers
    ]
    texts = ["A room.", "A door.", "A wall."]
    _, history = played(made, texts, responses)
    last = made.prompt(seen("The end."), history)
    messages = []
    for turn, text in enumerate([*texts, "The end."], start=1):
        text_of_turn = TEMPLATES["think"].first if turn == 1 else TEMPLATES["think"].next
        message = text_of_turn.format(
            objective="open it.", observation=text, actions="'go'\n'take key'\n", step=turn
        )
        messages += [{"role": "user", "content": message}]
        messages += [
            {"role": "assistant", "content": answer} for answer in answers[turn - 1 : turn]
        ]
    if name == "vision":
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    whole = trained.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert trained.decode(last.token_ids) == whole
    assert last.n_dropped_tokens == 0


def test_the_learner_makes_one_sequence_of_it_and_two_where_it_began_anew(
    trained: PreTrainedTokenizerFast,
) -> None:
    answer = encoded(trained, "<action>go</action><eos>")

    def sequences(budget: int) -> tuple[int, list[int]]:
        prompts, _ = played(
            form(trained, "tiny", max_prompt_tokens=budget), ["A locked door."] * 6, [answer] * 6
        )
        rows = pa.table(
            {
                "traj_uid": [b"t"] * 6,
                "step_index": list(range(6)),
                "prompt_ids": pa.array([p.token_ids for p in prompts], pa.list_(pa.int32())),
                "response_ids": pa.array([answer] * 6, pa.list_(pa.int32())),
                "response_logprobs": pa.array([[-1.0] * len(answer)] * 6, pa.list_(pa.float32())),
                "advantage": [1.0] * 6,
                "staleness": [0] * 6,
            }
        )
        (batch,) = micro_batches(rows, micro_batch_tokens=10**6, ranks=1)
        return len(batch.bounds_Sp1) - 1, [p.n_dropped_turns for p in prompts]

    lengths = [
        len(p.token_ids)
        for p in played(form(trained, "tiny"), ["A locked door."] * 6, [answer] * 6)[0]
    ]
    assert sequences(UNLIMITED) == (1, [0] * 6)
    # the sixth prompt is too long; half the budget holds the latest turns
    n_sequences, dropped = sequences(lengths[4])
    assert n_sequences == 2
    assert dropped[:5] == [0] * 5
    assert 0 < dropped[5] <= 5


def test_messages_are_numbered_by_turn_also_where_a_conversation_began_anew(
    trained: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    values = yaml.safe_load((FOLDER / "direct.yaml").read_text())
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump(
            {**values, "first": "{step}: {observation}", "next": "{step}: {observation}"}
        )
    )
    answer = encoded(trained, "go<eos>")
    made = form(trained, "tiny", template=str(tmp_path / "own.yaml"), max_prompt_tokens=60)
    prompts, _ = played(made, ["A locked door."] * 9, [answer] * 9)
    for turn, prompt in enumerate(prompts, start=1):
        numbers = [
            int(number)
            for number in re.findall(
                r"<user>(\d+): A locked door\.", trained.decode(prompt.token_ids)
            )
        ]
        assert numbers == list(range(prompt.n_dropped_turns + 1, turn + 1))
    assert len({prompt.n_dropped_turns for prompt in prompts}) > 1
    assert prompts[-1].n_dropped_turns < 8


def test_thoughts_of_earlier_replies_stay_as_they_were_sampled(
    trained: PreTrainedTokenizerFast,
) -> None:
    made = form(trained, "thinking")
    response = encoded(trained, "a</think><action>go</action><|im_end|>")
    prompts, history = played(made, ["A room."], [response])
    again = made.prompt(seen("A door."), history)
    assert (
        again.token_ids[: len(prompts[0].token_ids + response)] == prompts[0].token_ids + response
    )
    # the template's instructions, and two replies begun
    assert trained.decode(again.token_ids).count("<think>") == 1 + 2
    assert trained.decode(again.token_ids).endswith("[assistant]<think>\n")


@pytest.mark.parametrize(
    ("thinking", "ends"), [(None, "<think>\n"), (True, "<think>\n"), (False, "<think>\n</think>\n")]
)
@pytest.mark.parametrize("style", ["window", "chat"])
def test_thinking_is_handed_to_the_chat_template(
    trained: PreTrainedTokenizerFast, style: str, thinking: bool | None, ends: str
) -> None:
    made = form(trained, "thinking", style=style, thinking=thinking)
    prompts, history = played(made, ["A room."], [encoded(trained, "x<|im_end|>")])
    for prompt in (*prompts, made.prompt(seen("A door."), history)):
        assert trained.decode(prompt.token_ids).endswith("[assistant]" + ends)
    # the thought was closed for the model; otherwise it has to do that itself
    well_formed = thinking is False
    assert made.parse(encoded(trained, "<action>go</action>")) == Answer(
        action="go", well_formed=well_formed
    )
    assert made.parse(encoded(trained, "so</think><action>go</action>")).well_formed


def test_a_chat_template_without_a_thought_ignores_thinking(
    trained: PreTrainedTokenizerFast,
) -> None:
    on, off = (
        form(trained, "chatml", thinking=thinking).prompt(seen("A room."), [])
        for thinking in (True, False)
    )
    assert on == off


@pytest.mark.parametrize(
    ("chat_template", "style", "words"),
    [
        (None, "window", ["cannot be used", "instruction-tuned", "chat_template.jinja"]),
        (
            "{{ raise_exception('no users here') }}",
            "window",
            ["no users here", "instruction-tuned"],
        ),
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            "window",
            ["leaves out the user's message"],
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "chat",
            ["earlier replies", "'window'"],
        ),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused_at_once(
    trained: PreTrainedTokenizerFast, chat_template: str | None, style: str, words: list[str]
) -> None:
    trained.chat_template = chat_template
    with pytest.raises(ValueError, match=words[0]) as caught:
        PromptForm(trained, PromptConfig(style=style))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


PUBLISHED = (
    "qwen2_5",
    "qwen3",
    "llama3_1",
    "gemma3",
    "phi3",
    "deepseek_r1_distill",
    "glm4moe",
    "gptoss",
    "smolvlm",
)


def published_templates() -> list[Path]:
    """Load chat templates of published models, where TRL is installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return []
    found = sorted(Path(spec.origin).parent.glob("chat_templates/*.jinja"))
    return [path for path in found if path.stem in PUBLISHED]


@pytest.mark.skipif(not published_templates(), reason="the extra [bench] is not installed")
def test_published_chat_templates_begin_and_go_on(trained: PreTrainedTokenizerFast) -> None:
    draw = random.Random(0)
    trained.bos_token = "<|im_start|>"
    for path in published_templates():
        trained.chat_template = path.read_text()
        chat = Chat(trained, thinking=draw.choice([None, True, False]))
        begun, gone_on = (
            trained.decode(chat.begun("One room.")),
            trained.decode(chat.continued("Two rooms.", after=())),
        )
        assert begun.count("One room.") == 1, path.name
        assert gone_on.count("Two rooms.") == 1, path.name
        assert begun[-8:] == gone_on[-8:], (
            f"{path.name}: both end where the assistant begins to speak"
        )
        assert "One room." not in gone_on and "0reply0" not in gone_on, path.name


class Looping:
    """Loop in the chat template until `ends` is set."""

    eos_token_id, name_or_path = 0, "somebody/model"

    def __init__(self) -> None:
        self.ends = threading.Event()

    def apply_chat_template(self, *args: Any, **options: Any) -> list[int]:
        self.ends.wait()
        return []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return []

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return ""

    def get_vocab(self) -> dict[str, int]:
        return {}


def test_a_chat_template_that_never_ends_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.prompting.chat_template.TEMPLATE_TIMEOUT_S", 0.05)
    looping = Looping()
    try:
        with pytest.raises(
            ValueError,
            match=r"model.path=somebody/model did not end within 0.05 s.*chat_template.jinja",
        ):
            Chat(looping, thinking=None)
    finally:
        looping.ends.set()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages.nothing.at_all }}", "nothing"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_a_chat_template_that_fails_in_any_way_is_one_line(template: str, says: str) -> None:
    failing = copy.deepcopy(made_tokenizer())
    failing.chat_template = template
    with pytest.raises(ValueError, match="cannot be used") as caught:
        Chat(failing, thinking=None)
    assert says in str(caught.value) and "\n" not in str(caught.value)
