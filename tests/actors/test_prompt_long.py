"""Test texts of any length: bounded work, and the same prompt as without the bound."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors import PromptStuckError
from actors.endpoint.program_episode import ProgramEpisodes
from actors.endpoint.server import Endpoint
from actors.policy import Prompt, ScriptedPolicy
from actors.prompting import prompt_thread
from actors.prompting.chat_template import LONG_CHARACTERS
from actors.prompting.prompt import COUNTED_CHARACTERS, PromptForm
from actors.prompting.template import Turn, shortened
from actors.rollout.episode import AttemptProgress, EpisodeContext, play_episode
from configs import PromptConfig
from envs import ClientSettings, EnvironmentDied, Observation, Outcome, Task, Transition
from tests.support.chat_samples import IDS, endpoint_config, rules, tokenizer

UNLIMITED = 10**12
TASK = Task(id="long", env_name="long", split="train", seed=0)


class Counting:
    """Count the characters it is given, and remember the thread of the longest text."""

    def __init__(self) -> None:
        self.made, self.n_characters, self.longest = tokenizer(), 0, 0
        self.thread: threading.Thread | None = None
        self.eos_token_id = self.made.eos_token_id

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        self._note("".join(message["content"] for message in conversation))
        return self.made.apply_chat_template(conversation, **options)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self._note(text)
        return self.made.encode(text, add_special_tokens=add_special_tokens)  # type: ignore[no-any-return]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self.made.decode(token_ids, skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]

    def get_vocab(self) -> dict[str, int]:
        return self.made.get_vocab()  # type: ignore[no-any-return]

    def _note(self, text: str) -> None:
        self.n_characters += len(text)
        if len(text) > self.longest:
            self.longest, self.thread = len(text), threading.current_thread()


def settings(style: str, budget: int) -> PromptConfig:
    return PromptConfig(
        template="compact", style=style, history_length=-1, max_prompt_tokens=budget
    )


@pytest.mark.parametrize("style", ["window", "chat"])
@pytest.mark.parametrize(
    "seen",
    [
        Observation(text="a room. " * 640_000, objective="win"),
        Observation(text="x" * 50_000_000),
        Observation(text="a room", objective="win " * 1_500_000),
        Observation(text="a room", actions=tuple(f"go {n}" for n in range(200_000))),
        Observation(text="a room", actions=("",) * 1_000_000),
    ],
    ids=["5 MB", "50 MB", "objective", "actions", "empty actions"],
)
def test_a_text_of_any_length_is_bounded_work(seen: Observation, style: str) -> None:
    """Each of these texts once was tokenised whole, tens of megabytes, for every cut."""
    counting = Counting()
    form = PromptForm(counting, settings(style, 500))
    most = form.max_prompt_tokens * 16
    first = form.prompt(seen, [])
    turn = Turn(observation=seen.text, action="wait", prompt=first, response_ids=(7, 1))
    prompts = [first, form.prompt(seen, [turn] * 3)]
    assert [len(prompt.token_ids) <= 500 for prompt in prompts] == [True, True]
    assert all(prompt.n_dropped_tokens >= 1_000_000 // 16 - 500 for prompt in prompts)
    assert counting.longest <= most
    assert counting.n_characters <= 30 * most


def test_the_event_loop_goes_on_beside_a_long_prompt() -> None:
    counting = Counting()
    form = PromptForm(counting, settings("window", 4000))
    policy = ScriptedPolicy(form.encode_answer)
    trajectory = asyncio.run(
        play_episode(
            EpisodeContext(
                environment=Wordy(), policy=policy, form=form, task=TASK, ids=IDS, rules=rules()
            ),
            progress=AttemptProgress(),
        )
    )
    assert len(trajectory.steps[0].prompt_ids) <= 4000
    assert counting.longest > LONG_CHARACTERS
    assert counting.thread is not threading.main_thread()


class Wordy:
    """Show a long text."""

    def __init__(self, n_words: int = 20_000) -> None:
        self.n_words = n_words

    async def reset(self, task: Task) -> Observation:
        return Observation(text="a room. " * self.n_words, actions=("wait",))

    async def step(self, action: str) -> Transition:
        return Transition(
            observation=Observation(text="done"),
            reward=1.0,
            terminated=True,
            truncated=False,
            won=True,
        )


class Looping(Counting):
    """Loop in the chat template for a long text, until the test ends it."""

    name_or_path = "models/odd"

    def __init__(self) -> None:
        super().__init__()
        self.is_ended, self.most_characters = threading.Event(), LONG_CHARACTERS

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        if sum(len(message["content"]) for message in conversation) > self.most_characters:
            self.is_ended.wait(timeout=60)
        return super().apply_chat_template(conversation, **options)


@pytest.fixture
def looping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looping]:
    monkeypatch.setattr(prompt_thread, "PROMPT_TIMEOUT_S", 0.2)
    for name in ("SHORT_PROMPTS", "LONG_PROMPTS"):  # those of another test may be stuck
        thread = prompt_thread.PromptThread()
        monkeypatch.setattr(f"actors.rollout.episode.{name}", thread)
        monkeypatch.setattr(f"actors.endpoint.server.{name}", thread)
    made = Looping()
    yield made
    made.is_ended.set()


LOOPS = re.compile(
    r"^the prompt of (.*) is not made after 0.2 s: the chat template of "
    r".*model.path=models/odd loops; put a"
)


@pytest.mark.parametrize("most_characters", [LONG_CHARACTERS, 20], ids=["long", "short"])
def test_a_template_that_loops_ends_the_worker_by_name(
    looping: Looping, most_characters: int
) -> None:
    """Episodes behind the stuck one end too, and their errors name the stuck one."""
    looping.most_characters = most_characters
    form = PromptForm(looping, settings("window", 4000))
    policy = ScriptedPolicy(form.encode_answer)

    async def episodes() -> list[Any]:
        tasks = [replace(TASK, id=name) for name in ("one", "two")]
        n_words = 20_000 if most_characters == LONG_CHARACTERS else 20
        playing = [
            play_episode(
                EpisodeContext(
                    environment=Wordy(n_words),
                    policy=policy,
                    form=form,
                    task=task,
                    ids=IDS,
                    rules=rules(),
                ),
                progress=AttemptProgress(),
            )
            for task in tasks
        ]
        return await asyncio.wait_for(asyncio.gather(*playing, return_exceptions=True), timeout=60)

    errors = asyncio.run(episodes())
    assert [type(error) for error in errors] == [PromptStuckError, PromptStuckError]
    assert {LOOPS.findall(str(error))[0] for error in errors} == {"long task 'one', step 0"}


def test_a_prompt_that_waits_for_others_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in the queue does not count: the last of many prompts waits long."""
    monkeypatch.setattr(prompt_thread, "PROMPT_TIMEOUT_S", 2.0)
    prompts = prompt_thread.PromptThread()
    pause = threading.Event()

    async def made() -> list[bool]:
        return await asyncio.gather(
            *(
                prompts.make(lambda: pause.wait(0.1), tokenizer=tokenizer(), label="x")
                for _ in range(21)
            )
        )

    assert asyncio.run(made()) == [False] * 21


def test_prompts_of_one_moment_are_made_in_one_go_and_each_caller_gets_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = prompt_thread.PromptThread()
    batches: list[int] = []
    make_all = prompts._make_all

    def noted(batch: Any, *rest: Any) -> None:
        batches.append(len(batch))
        make_all(batch, *rest)

    monkeypatch.setattr(prompts, "_make_all", noted)

    class Panic(BaseException):
        """Stand in for an error of the tokenizer, which is written in Rust."""

    def prompt(number: int) -> int:
        if number == 1:
            raise ValueError("no room")
        if number == 2:
            raise Panic
        return number

    async def made() -> list[Any]:
        asked = [
            asyncio.ensure_future(
                prompts.make(lambda number=number: prompt(number), tokenizer=tokenizer(), label="x")
            )
            for number in range(5)
        ]
        await asyncio.sleep(0)
        asked[-1].cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second, third, fourth, fifth = asyncio.run(made())
    assert (first, fourth, batches) == (0, 3, [5])
    assert isinstance(second, ValueError) and isinstance(third, Panic)
    assert isinstance(fifth, asyncio.CancelledError)


@pytest.mark.parametrize("most_characters", [LONG_CHARACTERS, 20], ids=["long", "short"])
def test_a_program_whose_messages_make_the_template_loop_ends_the_worker_by_name(
    looping: Looping, most_characters: int
) -> None:
    looping.most_characters = most_characters
    n_characters = 20_000 if most_characters == LONG_CHARACTERS else 100

    class Asks:
        """Stand in for a ProgramPool: the program sends one long message."""

        name, log = "asker", None

        async def run(self, task: Task, client: ClientSettings, *, deadline_s: float) -> Outcome:
            body = {"model": "m", "messages": [{"role": "user", "content": "x" * n_characters}]}
            headers = {"Authorization": f"Bearer {client.api_key}"}
            url = f"{client.base_url}/chat/completions"
            async with (
                aiohttp.ClientSession() as session,
                session.post(url, json=body, headers=headers) as answer,
            ):
                told = await answer.json()
            raise EnvironmentDied(told["error"]["code"], at_fault=True)

    async def episode() -> None:
        config = endpoint_config("m", max_response=9, max_model=90_000)
        endpoint = Endpoint(ScriptedPolicy(lambda text, at_most: []), looping, config=config)
        await endpoint.start()
        try:
            pool: Any = Asks()
            await asyncio.wait_for(
                ProgramEpisodes(pool, endpoint).run(TASK, IDS, rules(), progress=AttemptProgress()),
                timeout=60,
            )
        finally:
            await endpoint.close()

    with pytest.raises(PromptStuckError, match=LOOPS) as raised:
        asyncio.run(episode())
    assert LOOPS.findall(str(raised.value)) == ["program 'asker' on task train/long"]


long_texts = st.builds(
    lambda text, n: text * n, st.text("ab \n'{}7", max_size=40), st.sampled_from([1, 1, 3, 60])
)


@given(
    style=st.sampled_from(["window", "chat"]),
    seen=st.builds(
        Observation,
        text=long_texts,
        objective=long_texts,
        actions=st.none() | st.lists(long_texts, max_size=5).map(tuple),
    ),
    past=st.lists(long_texts, max_size=4),
    budget=st.integers(10, 120),
    counted=st.sampled_from([0, COUNTED_CHARACTERS]),
)
@example(  # less than one longest token over the budget: some tokens were left out, not none
    style="window",
    seen=Observation(text="7" * 54, objective="7" * 54, actions=("7" * 48,)),
    past=[],
    budget=10,
    counted=0,
)
def test_the_prompt_is_that_of_a_form_that_tokenises_everything(
    style: str, seen: Observation, past: list[str], budget: int, counted: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.prompting.prompt.COUNTED_CHARACTERS", counted)
        bounded, uncut = (PromptForm(tokenizer(), settings(style, budget)) for _ in range(2))
        uncut._max_characters = UNLIMITED
        histories: list[list[Turn]] = [[], []]
        for text in [*past, None]:
            observation = seen if text is None else replace(seen, text=text)
            found, exact = (
                form.prompt(observation, history)
                for form, history in zip((bounded, uncut), histories, strict=True)
            )
            assert found.token_ids == exact.token_ids
            assert found.n_dropped_turns == exact.n_dropped_turns
            assert 0 <= found.n_dropped_tokens <= exact.n_dropped_tokens
            if counted:
                assert found.n_dropped_tokens == exact.n_dropped_tokens
            assert (found.n_dropped_tokens > 0) == (exact.n_dropped_tokens > 0)
            for history, prompt in zip(histories, (found, exact), strict=True):
                history.append(turn_of(observation, prompt))


def turn_of(observation: Observation, prompt: Prompt) -> Turn:
    return Turn(observation=observation.text, action="wait", prompt=prompt, response_ids=(7, 1))


@given(st.lists(st.text("x", max_size=4), max_size=9), st.integers(0, 20))
def test_actions_are_kept_from_both_ends_in_turn(actions: list[str], limit: int) -> None:
    inwards = sorted(range(len(actions)), key=lambda place: min(place, len(actions) - 1 - place))
    kept: list[int] = []
    for place in inwards:
        if sum(max(1, len(actions[other])) for other in [*kept, place]) > limit:
            break
        kept.append(place)
    made = shortened(Observation(text="", actions=tuple(actions)), limit)
    assert made.actions == tuple(actions[place] for place in sorted(kept))
